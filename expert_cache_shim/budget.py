"""How much device memory the cache may take, and what it buys.

Slots and overflow rows are taken before vLLM measures what is left for the KV cache, so too much
of them would keep a model from starting that starts without the cache. What the user asked for
by name is given; what was only a default gives way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from . import vllm_compat
from .layout import CONTEXT
from .log import logger
from .settings import Settings

if TYPE_CHECKING:
    from .arming import Candidate


@dataclass(frozen=True)
class Plan:
    """slots: by layer name. overflow: whether shared rows for wide steps are affordable. preload:
    whether there are two sets of them, so that one is filled while the other is read."""

    slots: dict[str, int]
    overflow: bool
    note: str = ""
    preload: bool = False


def plan(candidates: Sequence[Candidate], settings: Settings, device: torch.device) -> Plan:
    """Slots for each layer, and the questions of overflow and preload. Raises SettingsError where
    EXPERT_CACHE_GIB buys no slot."""
    price = max(1, sum(candidate.slot_bytes for candidate in candidates))
    slots = {c.name: settings.slots_for(c.experts, price) for c in candidates}
    room = room_on(device, candidates)
    if room is None:
        overflow = settings.overflow != "off"
        return Plan(slots, overflow, preload=overflow and settings.preload == "on")
    plan = _fit(candidates, slots, settings, room)
    preload = settings.preload == "on"
    if settings.preload == "auto" and len(candidates) > 1:
        preload = _cost(candidates, plan.slots, overflow_sets=2) <= room
    plan = replace(plan, preload=preload and plan.overflow)
    _warn_if_too_much(_cost(candidates, plan.slots, plan.overflow + plan.preload) - room)
    return plan


def _warn_if_too_much(lacking: int) -> None:
    """What was named is taken even so: `room_on` is an estimate."""
    if lacking > 0:
        logger.warning(
            "expert cache: takes about %s GiB more device memory than vLLM can spare: it may not "
            "start, or spill to host memory where the driver allows it (WSL); lower "
            "EXPERT_CACHE_SLOTS, GIB or FRACTION", f"{lacking / 2**30:.2f}",
        )  # fmt: skip


def _fit(
    candidates: Sequence[Candidate], slots: dict[str, int], settings: Settings, room: int
) -> Plan:
    """What is named is kept, and a default that does not fit the room gives way."""
    overflow = settings.overflow != "off"
    if settings.overflow != "auto" and settings.names_a_budget:
        return Plan(slots, overflow)
    wanted = max(slots.values())
    least = wanted if settings.names_a_budget else 1
    sets = 2 if settings.preload == "on" else 1
    most = _most_slots(candidates, slots, sets if overflow else 0, room, least)
    if most is None and settings.overflow == "auto":
        overflow = False
        most = _most_slots(candidates, slots, 0, room, least)
    most = least if most is None else most
    notes = []
    if most < wanted:
        slots = {name: min(count, most) for name, count in slots.items()}
        notes.append(f"{most} slots a layer is what fits beside the KV cache")
    if settings.overflow == "auto" and not overflow:
        notes.append(
            "no room for overflow rows, so steps wider than the slots read through; "
            "EXPERT_CACHE_OVERFLOW=on takes the room from the KV cache"
        )
    return Plan(slots, overflow, "; ".join(notes))


def _most_slots(
    candidates: Sequence[Candidate], slots: dict[str, int], overflow_sets: int, room: int,
    least: int,
) -> int | None:  # fmt: skip
    """The largest cap on every layer's slots, `least` or more, that fits the room."""
    for cap in range(max(slots.values()), least - 1, -1):
        capped = {name: min(count, cap) for name, count in slots.items()}
        if _cost(candidates, capped, overflow_sets) <= room:
            return cap
    return None


def _cost(candidates: Sequence[Candidate], slots: dict[str, int], overflow_sets: int) -> int:
    """Bytes of device memory for these slots and so many sets of overflow rows."""
    private = sum(c.slot_bytes * slots[c.name] for c in candidates)
    return private + overflow_sets * _overflow_bytes(candidates, slots)


def room_on(device: torch.device, candidates: Sequence[Candidate]) -> int | None:
    """Bytes of device memory that the cache may take, None where that is not known."""
    if device.type != "cuda":
        return None
    try:
        share = vllm_compat.device_share()
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device) + CONTEXT
        sizes = [vllm_compat.expert_sizes(c.layer) for c in candidates]
        hidden, inner = (max(size) for size in zip(*sizes))
        top_k = max(vllm_compat.top_k(c.layer) for c in candidates)
        at_work = vllm_compat.memory_at_work(hidden, inner, top_k)
        return min(int(total * share) - ours, free) - at_work
    except Exception as error:
        logger.debug("expert cache: cannot tell how much device memory is free: %r", error)
        return None


def _overflow_bytes(candidates: Sequence[Candidate], slots: dict[str, int]) -> int:
    """Shared rows of one layer of each shape."""
    shapes = {
        (c.experts, c.slot_bytes): max(0, c.experts - slots[c.name]) * c.slot_bytes
        for c in candidates
    }
    return sum(shapes.values())
