"""What each number of slots costs and brings, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .plan_families import Model
from .plan_memory import (
    Fixed,
    Load,
    cache_memory,
    fixed_memory,
    host_memory,
    kv_of_sequence,
    kv_of_token,
    most_slots,
)
from .plan_misses import Expectation
from .plan_sizes import Sizes

Span = tuple[float, float]
"""The least and the most over the expectations."""


@dataclass(frozen=True)
class Machine:
    """One GPU of those that share the model. vram: bytes; link, memory_rate: bytes a second from
    host to device, and of device memory. resident: seconds of a step of the resident model, where
    they were measured."""

    vram: int
    utilization: float
    link: float
    memory_rate: float
    resident: float | None = None

    @property
    def usable(self) -> int:
        return int(self.vram * self.utilization)


@dataclass(frozen=True)
class Row:
    """One number of slots a layer. own, overflow, left: bytes of device memory; left is what
    remains beside everything, below 0 where it does not fit. miss: misses over routed experts.
    step: seconds at least. rate, alone: tokens a second at most, of all streams, and of one
    stream that decodes alone. No slots: vLLM reads every routed expert from the host."""

    slots: int
    own: int
    overflow: int
    left: int
    miss: Span
    step: Span
    rate: Span
    alone: Span


@dataclass(frozen=True)
class Budget:
    """kv_token, kv_sequence: bytes of the KV cache for one more token and for one request. host,
    pinned: bytes of the experts, and as pinned memory.

    best: the most slots a layer that fit, 0 where not even one does, for which `short` bytes are
    missing. overflow: whether overflow rows fit beside them. preload: the most slots beside two
    sets of those, with which a long prompt fetches ahead. whole: the model fits as it is."""

    fixed: Fixed
    kv_token: int
    kv_sequence: int
    host: int
    pinned: int
    whole: bool
    best: int
    short: int
    overflow: bool
    preload: int
    rows: tuple[Row, ...]


def candidates(experts: int, best: int) -> list[int]:
    """Numbers of slots for the table: eighths of the experts, and the best."""
    eighths = {max(1, experts * part // 8) for part in range(1, 8)}
    return sorted((eighths | {best}) - {0})


def best_slots(model: Model, sizes: Sizes, load: Load, machine: Machine) -> tuple[int, bool]:
    """The most slots that fit, and whether overflow rows fit beside them."""
    room = machine.usable - fixed_memory(model, sizes, load).total
    best = most_slots(sizes.shapes, sizes.experts, room)
    if best:
        return best, True
    return most_slots(sizes.shapes, sizes.experts, room, regions=0), False


def budget_of(
    model: Model, sizes: Sizes, load: Load, machine: Machine,
    together: Sequence[Expectation], alone: Sequence[Expectation],
) -> Budget:  # fmt: skip
    """together, alone: what is expected of `load.streams` streams, and of one."""
    fixed = fixed_memory(model, sizes, load)
    room = machine.usable - fixed.total
    host, pinned = host_memory(sizes.shapes, sizes.experts)
    best, overflow = best_slots(model, sizes, load, machine)
    one_slot, _ = cache_memory(sizes.shapes, sizes.experts, 1, regions=0)

    def row(slots: int) -> Row:
        own = shared = 0
        if slots:
            regions = 0 if slots == best and not overflow else 1
            own, shared = cache_memory(sizes.shapes, sizes.experts, slots, regions)
        left = room - own - shared
        steps = [_seconds(model, sizes, load, machine, e, slots, load.streams) for e in together]
        ones = [_seconds(model, sizes, load, machine, e, slots, 1) for e in alone]
        return Row(
            slots, own, shared, left, _span([e.misses[slots] for e in together]), _span(steps),
            _span([load.streams / seconds for seconds in steps]),
            _span([1 / seconds for seconds in ones]),
        )  # fmt: skip

    return Budget(
        fixed=fixed, kv_token=kv_of_token(model, load), kv_sequence=kv_of_sequence(model, load),
        host=host, pinned=pinned, whole=host <= room, best=best,
        short=0 if best else one_slot - room, overflow=overflow,
        preload=most_slots(sizes.shapes, sizes.experts, room, regions=2),
        rows=tuple(row(slots) for slots in (0, *candidates(sizes.experts, best))),
    )  # fmt: skip


def _seconds(
    model: Model, sizes: Sizes, load: Load, machine: Machine, expected: Expectation, slots: int,
    streams: int,
) -> float:  # fmt: skip
    """The floor of a decode step: that of the resident model, and the missed bytes over the link.
    A resident step reads its weights, its routed experts and the KV cache once."""
    routed = expected.routed * sizes.experts / model.experts  # where ranks have whole experts
    missed = routed * expected.misses[slots] * sizes.one_of_each
    resident = machine.resident
    if resident is None:
        read = sizes.rest - sizes.embedding + streams * kv_of_sequence(model, load)
        held = routed * (sizes.one_of_each if slots else 0)
        resident = (read + held) / machine.memory_rate
    return resident + missed / machine.link


def _span(values: Sequence[float]) -> Span:
    return min(values), max(values)


def offload_gib(budget: Budget) -> int:
    """For --cpu-offload-gb: whole GiB above the experts of a rank. vLLM stops offloading once the
    number is reached, so one that is too large harms nothing."""
    return math.ceil(budget.host / 2**30) + 1
