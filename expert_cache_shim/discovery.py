"""Which tensors of a layer are indexed by expert.

Nothing here knows a quantisation scheme. A tensor belongs to the experts when its first
dimension is the number of experts: the layer's `w13_*` and `w2_*`, and whatever the kernel's
quantisation config and experts object hold. The same tensor under two names is one record.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# vLLM's names for the two projections of the experts; packed, scale and bias tensors share the
# prefix.
_EXPERT_NAME = re.compile(r"w(13|2)_")


@dataclass
class ExpertTensor:
    """One tensor `[E, ...]` whose records move between host copy and rows.

    names: attributes of the layer that hold it (aliases included), maybe none.
    nbytes: bytes of one expert's record. stride: bytes between two records.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Kernels read this memory by address: it must not go when a parameter gets other data.
        self._memory = self.tensor.untyped_storage()

    @property
    def nbytes(self) -> int:
        return record_bytes(self.tensor)

    @property
    def stride(self) -> int:
        return self.tensor.stride(0) * self.tensor.element_size()

    @property
    def label(self) -> str:
        return (self.names or self.places)[0]


class NotExpertMajor(ValueError):
    """A per-expert tensor whose records are not separate runs of memory."""


def record_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of one expert, gaps included."""
    inner = zip(tensor.shape[1:], tensor.stride()[1:])
    return (sum((size - 1) * stride for size, stride in inner) + 1) * tensor.element_size()


def records(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, uint8 `[n, record bytes]`, where n is the first dimension. For
    copies: a tensor that shows one element in several places cannot be written to as it is."""
    size = tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (tensor.shape[0], record_bytes(tensor)),
        (tensor.stride(0) * size, 1),
    )


def layer_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """The layer's `w13_*` and `w2_*` tensors by attribute name, aliases included.

    `named_parameters()` would hide the second name of a tensor, so the dictionaries are read.
    """
    return {name: holder[name] for name, holder in _holders(layer).items()}


def _holders(layer: Any) -> dict[str, dict[str, Any]]:
    """For each name of an expert tensor the dictionary that holds it."""
    found = {}
    for holder in (vars(layer), getattr(layer, "_parameters", {}), getattr(layer, "_buffers", {})):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and _EXPERT_NAME.match(name):
                found[name] = holder
    return found


class Locations:
    """Where a layer's tensors lie, to be asked in every step: a look-up and a pointer for each."""

    def __init__(self, layer: Any) -> None:
        self._known = [
            (holder, name, holder[name].data_ptr()) for name, holder in _holders(layer).items()
        ]

    def changed(self) -> bool:
        """Whether a tensor was replaced, or has other memory."""
        for holder, name, address in self._known:
            tensor = holder.get(name)
            if tensor is None or tensor.data_ptr() != address:
                return True
        return False


def count_experts(layer: Any) -> int:
    """E as the kernel sees it: the first dimension of the largest `w13_*` tensor, 0 if none."""
    tensors = [t for n, t in layer_tensors(layer).items() if n.startswith("w13_") and t.dim() > 1]
    return max(tensors, key=lambda t: t.numel()).shape[0] if tensors else 0


class ExpertTensors:
    """The distinct per-expert tensors of a layer, keyed by where and how they lie in memory."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._by_storage: dict[tuple, ExpertTensor] = {}

    def __iter__(self) -> Iterator[ExpertTensor]:
        return iter(self._by_storage.values())

    def __len__(self) -> int:
        return len(self._by_storage)

    def add(self, tensor: torch.Tensor, *, name: str = "", place: str = "") -> ExpertTensor | None:
        """Takes a tensor in if it is indexed by expert; returns its entry, else None.

        Raises NotExpertMajor for a tensor that is, but cannot be moved expert by expert.
        """
        if tensor.dim() == 0 or tensor.shape[0] != self.experts or tensor.numel() == 0:
            return None
        if tensor.stride(0) == 0:
            return None  # one value for every expert: right for any row
        if record_bytes(tensor) > tensor.stride(0) * tensor.element_size():
            raise NotExpertMajor(
                f"{name or place} of shape {tuple(tensor.shape)} and stride {tensor.stride()} "
                "does not keep each expert's values together"
            )
        entry = self._by_storage.setdefault(storage_key(tensor), ExpertTensor(tensor))
        if name:
            entry.names.append(name)
        if place:
            entry.places.append(place)
        return entry

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert's records in all tensors."""
        return sum(entry.nbytes for entry in self)

    def counterparts(self, found: ExpertTensors) -> dict[int, ExpertTensor] | None:
        """For each entry of a later discovery, by id(), the entry here that it stands for: one
        in the same memory, or another tensor with a name or a place of it and equal content.
        None if some entry has no counterpart, or if one here has lost its memory.

        After a reload vLLM's new configs hold tensors of their own beside the layer's.
        """
        counterparts = {}
        for entry in found:
            old = self.find(entry.tensor) or self._same_content(entry)
            if old is None:
                return None
            counterparts[id(entry)] = old
        in_place = {id(self.find(entry.tensor)) for entry in found}
        return counterparts if all(id(entry) in in_place for entry in self) else None

    def _same_content(self, entry: ExpertTensor) -> ExpertTensor | None:
        """The entry that had a name or a place of this one, if content and layout are equal."""
        for old in self:
            if {*old.names, *old.places} & {*entry.names, *entry.places}:
                return old if _equal(old.tensor, entry.tensor) else None
        return None

    def find(self, tensor: torch.Tensor) -> ExpertTensor | None:
        return self._by_storage.get(storage_key(tensor))


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """In layout and in every bit: no comparison is defined for some narrow types."""
    if storage_key(tensor)[1:] != storage_key(other)[1:]:
        return False
    return torch.equal(*(t.detach().contiguous().view(torch.uint8) for t in (tensor, other)))


def storage_key(tensor: torch.Tensor) -> tuple:
    """Equal for two tensor objects that are the same view of the same memory."""
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def reachable_tensors(
    root: Any, place: str, depth: int = 7, modules: bool = False, seen: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors held by an object's fields, down to `depth` objects, with their dotted place.

    Walks plain objects, containers, and what functions and methods are bound to. `modules`: the
    tensors that a module itself owns too; never its children, which may be the whole model.
    Every object is visited once.
    """
    seen = set() if seen is None else seen
    if isinstance(root, torch.Tensor):
        yield place, root
    elif depth and id(root) not in seen:
        seen.add(id(root))
        for name, value in _children(root, modules):
            yield from reachable_tensors(value, f"{place}.{name}", depth - 1, modules, seen)


def _children(root: Any, modules: bool) -> list[tuple[str, Any]]:
    if isinstance(root, dict):
        return [(str(key), value) for key, value in root.items()]
    if isinstance(root, (list, tuple, set)):
        return [(str(index), value) for index, value in enumerate(root)]
    if isinstance(root, functools.partial):
        return [("func", root.func), ("args", root.args), ("keywords", root.keywords)]
    if isinstance(root, types.MethodType):
        return [("__self__", root.__self__), ("__func__", root.__func__)]
    if isinstance(root, types.FunctionType):
        defaults = [("defaults", root.__defaults__), ("kwdefaults", root.__kwdefaults__)]
        return _closure(root) + defaults
    if isinstance(root, (type, types.ModuleType)) or _is_configuration(root):
        return []
    held = list(getattr(root, "__dict__", {}).items())
    if isinstance(root, torch.nn.Module):
        held += [*root._parameters.items(), *root._buffers.items()]
        return [(n, t) for n, t in held if modules and isinstance(t, torch.Tensor)]
    slots = [n for base in type(root).__mro__ for n in _slots(base)]
    return held + [(name, getattr(root, name)) for name in slots if hasattr(root, name)]


def _is_configuration(root: Any) -> bool:
    """vLLM's configuration objects know every layer of the model."""
    return type(root).__module__.startswith("vllm.config")


def _closure(function: types.FunctionType) -> list[tuple[str, Any]]:
    named = zip(function.__code__.co_freevars, function.__closure__ or ())
    return [(name, cell.cell_contents) for name, cell in named if cell != types.CellType()]


def _slots(base: type) -> tuple[str, ...]:
    names = vars(base).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)
