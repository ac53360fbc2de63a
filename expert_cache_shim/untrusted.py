"""Reading what another user, or nobody of ours, may have written."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

ANY_SIZE = 2**63 - 1
_YEAR_10000 = 253_402_300_800


def open_file(
    path: str | os.PathLike, most: int, links: bool = False, owner: int | None = None
) -> BinaryIO:
    """A regular file of at most `most` bytes, to be read. Nothing is waited for: a pipe or a
    device is refused. links: a link at the end of the path is followed, else refused too. owner:
    the user whose file it must be. Raises OSError."""
    more = os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)

    def opened(path: str, flags: int) -> int:
        handle = os.open(path, flags | more)
        status = os.fstat(handle)
        own = owner is None or status.st_uid == owner
        if stat.S_ISREG(status.st_mode) and status.st_size <= most and own:
            return handle
        os.close(handle)
        if not own:
            raise OSError(errno.EPERM, "another user's file", path)
        if stat.S_ISREG(status.st_mode):
            raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
        raise OSError(errno.EINVAL, "not a regular file", path)

    return open(path, "rb", opener=opened)


def read_file(
    path: str | os.PathLike, most: int, links: bool = False, owner: int | None = None
) -> bytes:
    """The content of such a file. Raises OSError."""
    with open_file(path, most, links, owner) as stream:
        return read_at(stream, 0, min(most, os.fstat(stream.fileno()).st_size))


def read_at(stream: BinaryIO, start: int, length: int) -> bytes:
    """So many bytes of a file. Not by mapping it: a page that was cut off meanwhile would end the
    process. Raises OSError where they are not there."""
    data = os.pread(stream.fileno(), length, start)
    if len(data) != length:
        raise OSError(errno.EIO, "cut off while it was read", stream.name)
    return data


def make_folder(folder: Path) -> None:
    """A folder that is there afterwards; what of its path is made is for this user alone, whatever
    the umask. Raises OSError."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


def own_folder(folder: Path) -> None:
    """Makes a folder for this user alone, or finds it so. Raises OSError for one that is open to
    others, another user's, or a link: its name can be guessed, so anybody may have made it."""
    make_folder(folder)
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


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what runs longer, a regular expression included. Without effect
    outside the main thread, where Python handles no signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def printable(text: str) -> str:
    """The text in one line: what would end it, or steer a terminal, is replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fields(data: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The named fields of a JSON object, each of its kind: `str` (made printable), `int` (from 0
    to 2^63 - 1), `float` (seconds since the epoch, before the year 10000) or `list`. Raises
    ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__} in place of an object")
    return {name: _field(name, data.get(name), kind) for name, kind in kinds.items()}


def _field(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    limits = {int: 2**63, float: _YEAR_10000}
    if type(value) is not kind or (kind in limits and not 0 <= value < limits[kind]):
        raise ValueError(f"{name} is {repr(value)[:40]}")
    return printable(value) if kind is str else value
