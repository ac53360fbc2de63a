"""Device memory for the records of one layer: `virtual` and `plain` rows.

`virtual`: every large tensor gets a tensor of the layer's full shape `[E, ...]`. Its first rows
are the layer's own memory (slots), the rest is memory that all layers of that shape map at the
same place (overflow rows). Small tensors get a private tensor of full shape.

`plain`: ordinary tensors of `S` rows, and one scratch of `E` rows shared by all layers of a
shape, for steps that need more experts than there are slots.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .discovery import ExpertTensor, ExpertTensors, records
from .layout import ALIAS_FROM, aliased_bytes, is_aliased
from .log import logger
from .native import HOST_READABLE, KernelError, Library
from .native import Tensor as TableEntry

if TYPE_CHECKING:
    from .mapped_file import MappedFile


class StorageError(RuntimeError):
    """Device memory of this kind cannot be had here; the text says why."""


@dataclass
class Placement:
    """Where one per-expert tensor lives on the device.

    slots: `[S, ...]` or `[E, ...]`, the layer's own records in its first S rows.
    scratch: `[E, ...]` shared with other layers, only in `plain` storage.
    """

    source: ExpertTensor
    slots: torch.Tensor
    scratch: torch.Tensor | None = None


@dataclass
class Storage:
    """The placements of a layer. `private` and `shared` are bytes of device memory; `shared`
    counts only what this layer was the first to need. Layers of another `region` have overflow
    rows of other memory."""

    kind: str
    placements: list[Placement]
    region: int = 0
    private: int = 0
    shared: int = 0

    @property
    def has_scratch(self) -> bool:
        return all(placement.scratch is not None for placement in self.placements)

    def fill_small(self) -> None:
        """Gives every small tensor values: a kernel may look at the scale of an expert that no
        token is routed to, and must find a number there."""
        for place in self.placements:
            if place.source.nbytes < ALIAS_FROM:
                for rows in (place.slots, place.scratch):
                    if rows is not None:
                        records(rows).copy_(records(place.source.tensor)[: rows.shape[0]])

    def table(self, scratch: bool) -> torch.Tensor:
        """The gather kernel's table as a device tensor of bytes. `scratch`: rows are those of
        the scratch, else they are the slots' tensors."""
        entries = (TableEntry * len(self.placements))()
        for entry, place in zip(entries, self.placements):
            rows = place.scratch if scratch else place.slots
            entry.source = place.source.tensor.data_ptr()
            entry.slots = place.slots.data_ptr()
            entry.rows = rows.data_ptr()
            entry.bytes = place.source.nbytes
            entry.stride = place.source.stride
        host = torch.frombuffer(bytearray(entries), dtype=torch.uint8)
        return host.to(self.placements[0].slots.device)


class Memory:
    """Physical device memory; freed with the last object that refers to it."""

    def __init__(self, library: Library, device: int, size: int) -> None:
        self.handle = library.create_memory(device, size)
        self.size = size
        # Not at exit: kernels may still run, and the driver frees everything then.
        weakref.finalize(self, library.free_memory, self.handle).atexit = False


class AddressRange:
    """Bytes at an address as an array that torch can view; kept for as long as the tensor lives."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,), "typestr": "|u1", "data": (self.address, False),
            "version": 3, "strides": None,
        }  # fmt: skip

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The range as uint8 `[bytes]`."""
        if device.type == "cuda":
            return torch.as_tensor(self, device=device)
        array = (ctypes.c_uint8 * self.size).from_address(self.address)
        array.range = self
        return torch.frombuffer(array, dtype=torch.uint8)


class _Mapped(AddressRange):
    """An address range of our own; unmapped with its last tensor."""

    def __init__(self, library: Library, device: int, memories: list[Memory]) -> None:
        handle, address = library.create_range(device, [m.handle for m in memories])
        size = sum(memory.size for memory in memories)
        # At once: whatever fails from here on gives the range back. The memories ride along as an
        # argument, so that they are freed after it.
        weakref.finalize(self, _unmap, library, handle, memories).atexit = False
        super().__init__(address, size)


def _unmap(library: Library, handle: int, memories: list[Memory]) -> None:
    library.free_range(handle)
    memories.clear()


class Allocator:
    """Makes the storage of layers on one device; shares memory between layers of one shape."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.device = device
        self.index = device.index or 0
        self._shared: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def expose(self, file: MappedFile) -> bool:
        """Lets the device store to a file until the object is dropped. False where the driver
        does not do that."""
        address = file.address
        try:
            self.library.register_host(address, file.size)
            weakref.finalize(file, self.library.unregister_host, address).atexit = False
            if self.library.pointer_kind(address) == HOST_READABLE:
                return True
            reason = "the GPU cannot read it"
        except KernelError as error:
            reason = str(error)
        logger.warning(
            "expert cache: the driver does not map %s (%s), so it is not written; set "
            "EXPERT_CACHE_SNAPSHOT and EXPERT_CACHE_TRACE to a folder in memory, such as /dev/shm",
            file.path, reason,
        )  # fmt: skip
        return False

    def view(self, file: MappedFile) -> torch.Tensor | None:
        """The content of a file as a uint8 tensor of the device, which writes to the file itself;
        None where that is not to be had."""
        if not self.expose(file):
            return None
        content = AddressRange(file.content_address, file.size - file.content_offset)
        content.file = file
        tensor = content.tensor(self.device)
        return tensor if tensor.data_ptr() == content.address else None

    def prove_virtual(self) -> None:
        """Shows that aliasing works here, or raises StorageError.

        Two ranges with private first parts over one shared second part: a pattern written
        through one is read through the other, and the private parts stay apart.
        """
        try:
            works = self._aliases()
        except Exception as error:
            raise StorageError(f"no virtual memory management here: {error}") from None
        if not works:
            raise StorageError("aliased memory does not read back what was written to it")

    def _aliases(self) -> bool:
        size = self.library.granularity(self.index)
        shared = Memory(self.library, self.index, size)
        first, second = (
            _Mapped(
                self.library, self.index, [Memory(self.library, self.index, size), shared]
            ).tensor(self.device)
            for _ in range(2)
        )
        first[:size], second[:size] = 1, 2
        first[size:] = 3
        expected = ((first[:size], 1), (second[:size], 2), (second[size:], 3))
        return all(bool((part == value).all()) for part, value in expected)

    def virtual(self, tensors: ExpertTensors, slots: int, region: int = 0) -> Storage:
        """Full-size tensors of which the first `slots` rows are private and the others shared by
        the layers of a region."""
        granularity = self.library.granularity(self.index)
        storage = Storage("virtual", [], region)
        ordinals: dict[tuple, int] = {}
        for source in tensors:
            if not is_aliased(source.nbytes, granularity):
                rows = _new_rows(source, tensors.experts, self.device)
                storage.private += source.stride * tensors.experts
            else:
                rows = self._aliased(source, tensors.experts, slots, granularity, ordinals, storage)
            storage.placements.append(Placement(source, rows))
        storage.fill_small()
        return storage

    def _aliased(
        self, source: ExpertTensor, experts: int, slots: int, granularity: int,
        ordinals: dict[tuple, int], storage: Storage,
    ) -> torch.Tensor:  # fmt: skip
        private, size = aliased_bytes(experts, slots, source.stride, source.nbytes, granularity)
        memories = [Memory(self.library, self.index, private)]
        storage.private += private
        if size:
            make = partial(Memory, self.library, self.index, size)
            key = (private, size, storage.region)
            memories.append(self._share(key, ordinals, size, make, storage))
        flat = _Mapped(self.library, self.index, memories).tensor(self.device)
        return _view_like(flat, source.tensor)

    def _share(
        self, key: tuple, ordinals: dict[tuple, int], size: int, make: Callable[[], Any],
        storage: Storage,
    ) -> Any:  # fmt: skip
        """What layers share under a key; made, and counted, for the first that needs it. Two
        tensors of one layer are read at the same time and get one each: `ordinals` counts them."""
        ordinals[key] = ordinals.get(key, -1) + 1
        key = (*key, ordinals[key])
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = make()
            storage.shared += size
        return shared

    def plain(self, tensors: ExpertTensors, slots: int, scratch: bool) -> Storage:
        """Tensors of `slots` rows, and where `scratch` is set the shared tensors of E rows."""
        storage = Storage("plain", [])
        ordinals: dict[tuple, int] = {}
        for source in tensors:
            own = _new_rows(source, slots, self.device)
            storage.private += slots * source.stride
            shared = self._scratch(source, ordinals, storage) if scratch else None
            storage.placements.append(Placement(source, own, shared))
        storage.fill_small()
        return storage

    def _scratch(
        self, source: ExpertTensor, ordinals: dict[tuple, int], storage: Storage
    ) -> torch.Tensor:
        key = (tuple(source.tensor.shape), source.tensor.stride(), source.tensor.dtype)
        experts = source.tensor.shape[0]
        make = partial(_new_rows, source, experts, self.device)
        return self._share(key, ordinals, experts * source.stride, make, storage)


def _view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """uint8 memory as a tensor of another's shape, strides and type."""
    whole = flat[: flat.numel() // like.element_size() * like.element_size()].view(like.dtype)
    return _with_attributes(whole.as_strided(like.shape, like.stride()), like)


def _new_rows(source: ExpertTensor, rows: int, device: torch.device) -> torch.Tensor:
    """A tensor of `rows` records in the source's layout, its content undefined."""
    tensor = source.tensor
    shape = (rows, *tensor.shape[1:])
    new = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return _with_attributes(new, tensor)


def _with_attributes(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Marks that kernels read off a weight (AITER's `is_shuffled`); not vLLM's offload flag,
    which would call a device tensor host memory."""
    if getattr(like, "is_shuffled", False):
        rows.is_shuffled = True
    return rows
