"""What a rank needs of device and host memory, by the arithmetic of `layout` and of vLLM.

All figures are bytes of one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import layout, vllm_compat
from .plan_families import Model
from .plan_sizes import Shape, Sizes

GRANULARITY = 2 * 2**20  # pieces in which CUDA and HIP hand out memory for virtual storage
KV_BLOCK = 16  # tokens in a block of the KV cache; vLLM's default


@dataclass(frozen=True)
class Load:
    """What is to be served. by_expert: ranks have whole experts, else a part of each. kv_bytes: of
    one element of the KV cache."""

    context: int
    streams: int
    ranks: int
    batched_tokens: int
    kv_bytes: int
    by_expert: bool = False


@dataclass(frozen=True)
class Fixed:
    """Device memory that is taken whatever the number of slots."""

    rest: int
    kv_cache: int
    steps: int
    context: int = layout.CONTEXT

    @property
    def total(self) -> int:
        return self.rest + self.kv_cache + self.steps + self.context


def fixed_memory(model: Model, sizes: Sizes, load: Load) -> Fixed:
    steps = vllm_compat.memory_of_steps(
        load.batched_tokens, load.streams, model.vocabulary, model.hidden,
        model.inner if load.by_expert else -(-model.inner // load.ranks), model.top_k,
    )  # fmt: skip
    return Fixed(sizes.rest, load.streams * kv_of_sequence(model, load), steps)


def kv_of_token(model: Model, load: Load) -> int:
    """What one more token takes in the layers that keep every token."""
    return sum(_kv_of_token(kv, load) for kv in model.kv if not kv.window)


def kv_of_sequence(model: Model, load: Load) -> int:
    """One sequence of full length. A sliding layer keeps its window and the tokens of a step, in
    whole blocks, one of them begun before the window (vLLM's SlidingWindowSpec)."""
    total = -(-model.state // load.ranks) * 2
    for kv in model.kv:
        tokens = load.context
        if kv.window:
            tokens = min(kv.window - 1 + load.batched_tokens, tokens) + KV_BLOCK
        total += layout.round_up(tokens, KV_BLOCK) * _kv_of_token(kv, load)
    return total


def _kv_of_token(kv, load: Load) -> int:
    """In the layers of one kind. Heads are split between ranks as far as there are heads."""
    heads = max(1, kv.heads // load.ranks) if kv.heads else 1
    return kv.layers * kv.elements * heads * load.kv_bytes


def cache_memory(
    shapes: tuple[Shape, ...], experts: int, slots: int, regions: int = 1
) -> tuple[int, int]:
    """Device memory of slots and of overflow rows. regions: sets of overflow rows, in `virtual`
    storage; 2 with EXPERT_CACHE_PRELOAD. 0: none, in the `plain` storage that comes with
    EXPERT_CACHE_OVERFLOW=off."""
    if not regions:
        return slots * sum(shape.layers * shape.nbytes for shape in shapes), 0
    own, shared = 0, {}
    for shape in shapes:
        ordinals: dict[tuple[int, int], int] = {}
        for record in shape.records:
            size = record.nbytes
            if not layout.is_aliased(size, GRANULARITY):
                own += shape.layers * experts * size
                continue
            key = layout.aliased_bytes(experts, slots, size, size, GRANULARITY)
            own += shape.layers * key[0]
            ordinals[key] = ordinals.get(key, -1) + 1
            shared[(*key, ordinals[key])] = key[1] * min(regions, shape.layers)
    return own, sum(shared.values())


def most_slots(shapes: tuple[Shape, ...], experts: int, room: int, regions: int = 1) -> int:
    """The most slots a layer, below all experts, that fit into `room` with so many regions of
    overflow rows; 0 where none does."""
    low, high = 0, experts - 1
    while low < high:
        slots = (low + high + 1) // 2
        fits = sum(cache_memory(shapes, experts, slots, regions)) <= room
        low, high = (slots, high) if fits else (low, slots - 1)
    return low


def host_memory(shapes: tuple[Shape, ...], experts: int) -> tuple[int, int]:
    """Bytes of the experts, and what they take as pinned memory: vLLM pins each tensor by itself,
    and PyTorch rounds each up to a power of two."""
    sizes = [(s.layers, experts * record.nbytes) for s in shapes for record in s.records]
    exact = sum(layers * size for layers, size in sizes)
    return exact, sum(layers * (1 << max(0, size - 1).bit_length()) for layers, size in sizes)
