"""The kernel library of the CPU, with its virtual and registered memory counted."""

from __future__ import annotations

import gc

import torch  # noqa: F401  before its objects are frozen

from expert_cache_shim import native

# What torch has made by now stays: a collection then takes a millisecond and not a hundred.
gc.freeze()


class CountedLibrary(native.Library):
    """Knows which memories and ranges it has handed out and not been given back, and which host
    memory is still registered."""

    def __init__(self, library: native.Library) -> None:
        super().__init__(library.path, library._handle)
        self.memories: dict[int, int] = {}  # handle to bytes
        self.ranges: set[int] = set()
        self.registered: set[int] = set()

    def register_host(self, address, size):
        super().register_host(address, size)
        self.registered.add(address)

    def unregister_host(self, address):
        self.registered.remove(address)
        super().unregister_host(address)

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
        if self.memories or self.ranges or self.registered:
            gc.collect()
        return not (self.memories or self.ranges or self.registered)
