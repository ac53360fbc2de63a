"""What a process holds of the cache's making: memory, mappings, files."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

from synthetic.counted_library import CountedLibrary


@dataclass(frozen=True)
class Held:
    """Equal for two moments between which nothing was kept."""

    memories: int
    ranges: int
    files: int
    """Open descriptors."""
    mappings: tuple[str, ...]
    """Of memory files and snapshots."""
    reserved: int
    """Bytes of address space that are taken and cannot be read."""

    @classmethod
    def now(cls, library: CountedLibrary) -> Held:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            len(library.memories),
            len(library.ranges),
            len(os.listdir("/proc/self/fd")),
            tuple(line.split()[0] for line in maps if "expert_cache" in line.split()[-1]
                  or line.endswith((".counters", ".counters (deleted)"))),
            sum(_size(line) for line in maps if " ---p " in line and len(line.split()) == 5),
        )  # fmt: skip


def _size(line: str) -> int:
    start, end = (int(address, 16) for address in line.split()[0].split("-"))
    return end - start
