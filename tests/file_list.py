"""What a tree of files holds, entry by entry."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    mode: str  # "-rw-r--r--"
    owner: tuple[int, int]
    content: str  # the checksum of a file, the target of a link


def file_list(root: Path) -> dict[str, Entry]:
    """Every file, folder and link below `root` by its path, without times."""
    return {str(path.relative_to(root)): _entry(path) for path in root.rglob("*")}


def _entry(path: Path) -> Entry:
    found = path.lstat()
    content = ""
    if stat.S_ISLNK(found.st_mode):
        content = str(path.readlink())
    elif stat.S_ISREG(found.st_mode):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return Entry(stat.filemode(found.st_mode), (found.st_uid, found.st_gid), content)


def files_only(entries: dict[str, Entry]) -> set[str]:
    return {path for path, entry in entries.items() if not entry.mode.startswith("d")}
