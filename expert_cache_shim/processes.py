"""Which process is which, and which descends from which, by Linux's /proc.

A process is named by its pid together with its start: the pid alone may have been given out again.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Process(NamedTuple):
    """`start`: clock ticks from the start of the machine to that of the process."""

    pid: int
    start: int


def lineage() -> list[Process]:
    """This process, its parent, and so on: as far up as this pid namespace and /proc show."""
    found = []
    pid = os.getpid()
    while pid > 0 and (read := _read(pid)) is not None:
        start, _, parent = read
        found.append(Process(pid, start))
        pid = parent
    return found


def is_alive(process: Process) -> bool:
    """Whether it still runs: not ended, not waiting to be buried, and no later one of that pid."""
    read = _read(process.pid)
    return read is not None and read[:2] == (process.start, True)


def _read(pid: int) -> tuple[int, bool, int] | None:
    """Start, whether it runs, and parent; None where there is no such process to be seen.

    proc_pid_stat(5): after the name, which may hold any character, come state, parent, ...; the
    start is field 22.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, parent, *rest = file.read().rpartition(")")[2].split()
        return int(rest[17]), state not in "ZX", int(parent)
    except (OSError, ValueError, IndexError):
        return None
