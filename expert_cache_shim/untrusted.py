"""Reading what another user, or nobody of ours, may have written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


def open_file(path: str | os.PathLike, most: int) -> BinaryIO:
    """A regular file of at most `most` bytes, to be read. A link at the end of the path is not
    followed, and nothing is waited for: a pipe or a device is refused. Raises OSError."""

    def opened(path: str, flags: int) -> int:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_size <= most:
            return handle
        os.close(handle)
        if stat.S_ISREG(status.st_mode):
            raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
        raise OSError(errno.EINVAL, "not a regular file", path)

    return open(path, "rb", opener=opened)


def read_file(path: str | os.PathLike, most: int) -> bytes:
    """The content of such a file. Raises OSError."""
    with open_file(path, most) as stream:
        return read_at(stream, 0, min(most, os.fstat(stream.fileno()).st_size))


def read_at(stream: BinaryIO, start: int, length: int) -> bytes:
    """So many bytes of a file. Not by mapping it: a page that was cut off meanwhile would end the
    process. Raises OSError where they are not there."""
    data = os.pread(stream.fileno(), length, start)
    if len(data) != length:
        raise OSError(errno.EIO, "cut off while it was read", stream.name)
    return data


def own_folder(folder: Path) -> None:
    """Makes a folder for this user alone, or finds it so. Raises OSError for one that is open to
    others, another user's, or a link: its name can be guessed, so anybody may have made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(folder):
        raise PermissionError(f"{folder} is not a folder of this user alone")


def is_own_folder(folder: Path) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )


def fields(data: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The named fields of a JSON object, each of its kind: `str` (what would steer a terminal is
    replaced), `int` (from 0 to 2^63 - 1), `float` or `list`. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__} in place of an object")
    return {name: _field(name, data.get(name), kind) for name, kind in kinds.items()}


def _field(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is int and not 0 <= value < 2**63):
        raise ValueError(f"{name} is {repr(value)[:40]}")
    if kind is str:
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    return value
