"""The kernel library of the CPU, with its virtual memory counted."""

from __future__ import annotations

import gc

import torch  # noqa: F401  before its objects are frozen

from expert_cache_shim import native

# What torch has made by now stays: a collection then takes a millisecond and not a hundred.
gc.freeze()


class CountedLibrary(native.Library):
    """Knows which memories and ranges it has handed out and not been given back."""

    def __init__(self, library: native.Library) -> None:
        super().__init__(library.path, library._handle)
        self.memories: dict[int, int] = {}  # handle to bytes
        self.ranges: set[int] = set()

    def create_memory(self, device, size):
        handle = super().create_memory(device, size)
        self.memories[handle] = size
        return handle

    def free_memory(self, handle):
        del self.memories[handle]
        super().free_memory(handle)

    def create_range(self, device, memories):
        handle, address = super().create_range(device, memories)
        self.ranges.add(handle)
        return handle, address

    def free_range(self, handle):
        self.ranges.remove(handle)
        super().free_range(handle)

    def all_is_freed(self) -> bool:
        if self.memories or self.ranges:
            gc.collect()
        return not self.memories and not self.ranges
