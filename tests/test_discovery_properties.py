"""Discovery and storage over layers of any shape: what is taken in comes back whole, and nothing
that is indexed by expert is left out."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from expert_cache_shim.discovery import ExpertTensors, NotExpertMajor, storage_key
from expert_cache_shim.layer import ROWS, SCRATCH, ExpertCache
from expert_cache_shim.settings import Settings
from expert_cache_shim.storage import Allocator

DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64)
CPU = torch.device("cpu")


def filled(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`[count]` of random bytes."""
    size = count * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)


@st.composite
def tensors(draw, experts: int) -> torch.Tensor:
    """A tensor as layers have them: contiguous, transposed, padded, expanded, part of another, of
    as many rows as there are experts or of another number."""
    rows = draw(st.sampled_from([experts] * 6 + [1, 2, experts + 1]))
    shape = [rows, *draw(st.lists(st.integers(0, 9), max_size=3))]
    padded = [size + draw(st.sampled_from([0, 0, 0, 1, 3])) for size in shape]
    if draw(st.integers(0, 9)) == 0:  # a record of several pages, so that it is aliased
        shape, padded = [rows, 3000], [rows, draw(st.sampled_from([3000, 3001, 4096]))]
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        order = sorted(order)  # experts outermost, mostly
    dtype = draw(st.sampled_from(DTYPES))
    memory = filled(math.prod(padded), dtype, draw(st.integers(0, 99)))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= padded[dim]
    tensor = memory.as_strided(shape, strides)
    for dim in range(len(shape)):
        if shape[dim] > 0 and draw(st.integers(0, 11)) == 0:
            tensor = tensor.narrow(dim, 0, 1).expand(*tensor.shape[:dim], shape[dim],
                                                     *tensor.shape[dim + 1 :])  # fmt: skip
    return tensor


ALIASES = ("same", "detached", "bytes", "first column")


def another_view(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "detached":
        return tensor.detach()
    if kind == "bytes" and tensor.dim() > 1 and tensor.stride(-1) == 1:
        return tensor.view(torch.uint8)
    if kind == "first column" and tensor.dim() > 1:
        return tensor[:, :1]
    return tensor


@st.composite
def layers(draw) -> tuple[int, list[tuple[str, torch.Tensor]]]:
    """Experts, and named tensors, some of them the same, or a view of, one that came before."""
    experts = draw(st.integers(2, 7))
    named: list[tuple[str, torch.Tensor]] = []
    for number in range(draw(st.integers(1, 6))):
        tensor = draw(tensors(experts))
        if named and draw(st.integers(0, 2)) == 0:
            earlier = draw(st.sampled_from(named))[1]
            tensor = another_view(earlier, draw(st.sampled_from(ALIASES)))
        named.append((f"w13_{number}", tensor))
    return experts, named


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte, NaNs included."""
    a, b = (torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def discovered(experts: int, named: list[tuple[str, torch.Tensor]]) -> ExpertTensors:
    """What can be taken in."""
    found = ExpertTensors(experts)
    for name, tensor in named:
        try:
            found.add(tensor, name=name)
        except NotExpertMajor:
            note(f"{name} is refused")
    return found


MANY = settings(max_examples=150, deadline=None, derandomize=True)
SOME = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@MANY
@given(layers())
def test_every_tensor_by_expert_is_taken_in_once_or_refused(layer):
    experts, named = layer
    found = ExpertTensors(experts)
    taken = []
    for name, tensor in named:
        by_expert = tensor.dim() > 0 and tensor.shape[0] == experts and tensor.numel() > 0
        varies = by_expert and tensor.stride(0) != 0
        try:
            entry = found.add(tensor, name=name)
        except NotExpertMajor:
            assert varies
            # Some two experts' values do lie among each other.
            assert any(s > tensor.stride(0) for s in tensor.stride()[1:])
            continue
        assert (entry is not None) == varies
        if entry is not None:
            taken.append(name)
            assert found.find(tensor) is entry
            assert storage_key(entry.tensor) == storage_key(tensor)
    assert sorted(name for entry in found for name in entry.names) == sorted(taken)
    assert len(found) == len({storage_key(entry.tensor) for entry in found})


@MANY
@given(layers())
def test_records_are_apart_and_hold_all_values(layer):
    """Experts' bytes do not meet, and they are all that the tensor shows."""
    experts, named = layer
    for entry in discovered(experts, named):
        assert 1 <= entry.nbytes <= entry.stride
        whole = entry.tensor.untyped_storage()
        start = entry.tensor.storage_offset() * entry.tensor.element_size()
        data = torch.empty(0, dtype=torch.uint8).set_(whole)
        moved = torch.zeros(experts * entry.stride, dtype=torch.uint8)
        for expert in range(experts):  # to the row on the other side, as the gather kernel does
            at, to = start + expert * entry.stride, (experts - 1 - expert) * entry.stride
            moved[to : to + entry.nbytes] = data[at : at + entry.nbytes]
        size = moved.numel() // entry.tensor.element_size() * entry.tensor.element_size()
        rows = moved[:size].view(entry.tensor.dtype)
        rows = rows.as_strided(entry.tensor.shape, entry.tensor.stride())
        for expert in range(experts):
            assert equal(rows[experts - 1 - expert], entry.tensor[expert])


@SOME
@given(layers(), st.sampled_from(["virtual", "plain"]), st.data())
def test_what_a_kernel_reads_at_a_row_is_the_experts_record(host_library, layer, kind, data):
    experts, named = layer
    found = discovered(experts, named)
    if not len(found):
        return
    slots = data.draw(st.integers(1, experts - 1))
    allocator = Allocator(host_library, CPU)
    storage = (
        allocator.virtual(found, slots)
        if kind == "virtual"
        else allocator.plain(found, slots, True)
    )
    cache = ExpertCache(host_library, storage, experts, slots, Settings())
    for _ in range(3):
        ids = data.draw(st.lists(st.integers(-1, experts), min_size=1, max_size=2 * experts))
        mode = cache.mode(torch.tensor([ids]))
        assert mode in (ROWS, SCRATCH)
        rows = cache.run(torch.tensor([ids]), mode)[0].tolist()
        for place in storage.placements:
            read = place.scratch if mode == SCRATCH else place.slots
            assert read.shape[1:] == place.source.tensor.shape[1:]
            assert read.stride() == place.source.tensor.stride()
            for expert, row in zip(ids, rows):
                if 0 <= expert < experts:
                    assert equal(read[row], place.source.tensor[expert])
