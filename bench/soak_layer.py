"""One layer of the soak: random records behind an ExpertCache, and the check of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from expert_cache_shim import native
from expert_cache_shim.discovery import ExpertTensors
from expert_cache_shim.layer import ROWS, SCRATCH, ExpertCache
from expert_cache_shim.policy import COUNTERS
from expert_cache_shim.settings import Settings
from expert_cache_shim.storage import Allocator, Storage

from .device_layer import Difference
from .engine import synchronize
from .timing import captured

MOST_IDS = 4096  # in one step


class Records:
    """The host copy of one layer's tensors, and what the device must hold of it.

    `truth`: for each tensor an equal one in device memory.
    """

    def __init__(self, where: torch.device, experts: int, record: int) -> None:
        """record: bytes of one expert in the largest tensor."""
        self.tensors = ExpertTensors(experts)
        self.truth: list[torch.Tensor] = []
        pinned = where.type == "cuda"
        shapes = [
            (torch.int16, (record // 2,), 0),
            (torch.int16, (record // 4,), 0),
            (torch.int16, (1,), 0),
            (torch.uint8, (37,), 0),
            (torch.int32, (20,), 3),  # with a gap between records
        ]
        for number, (dtype, (size,), gap) in enumerate(shapes):
            memory = torch.empty(experts, size + gap, dtype=dtype, pin_memory=pinned)
            self.tensors.add(memory[:, :size], name=f"w13_{number}")
            self.truth.append(torch.empty(experts, size, dtype=dtype, device=where))
        self.change()

    def change(self) -> None:
        """Other values in the same memory. No step may be under way."""
        for entry, truth in zip(self.tensors, self.truth):
            bounds = torch.iinfo(truth.dtype)
            truth.random_(bounds.min, bounds.max + 1)
            entry.tensor.copy_(truth)


class Plan(NamedTuple):
    """A layer to build. region: of virtual storage. mapped: it is one rank's of two."""

    kind: str
    slots: int
    region: int = 0
    mapped: bool = False


class SoakLayer:
    """An ExpertCache over random records, and what its last step left, checked on the device."""

    def __init__(
        self, allocator: Allocator, plan: Plan, experts: int, record: int, policy: str
    ) -> None:
        self.plan = plan
        self.records = Records(allocator.device, experts, record)
        expert_map = random_map(experts) if plan.mapped else None
        self.cache = ExpertCache(
            allocator.library, self._storage(allocator), experts, plan.slots,
            Settings(policy=policy), expert_map=expert_map,
        )  # fmt: skip
        known = np.arange(experts) if expert_map is None else expert_map
        # By id: the expert that it names before a step, and the row after it; or -1.
        self._map = torch.from_numpy(known.astype(np.int64)).to(allocator.device)
        self.steps = 0  # since the cache was emptied
        # Failures: wrong ids, wrong rows, wrong slots.
        self.failures = torch.zeros(3, dtype=torch.int64, device=allocator.device)
        self._ids = torch.zeros(MOST_IDS, dtype=torch.int64, device=allocator.device)
        self._rows = torch.zeros_like(self._ids)
        self._checks: dict[int, Callable[[], None]] = {}
        self._graphs: dict[tuple[int, int], tuple] = {}

    def _storage(self, allocator: Allocator) -> Storage:
        plan = self.plan
        if plan.kind == "virtual":
            return allocator.virtual(self.records.tensors, plan.slots, plan.region)
        return allocator.plain(self.records.tensors, plan.slots, scratch=True)

    def shares_rows_with(self, other: SoakLayer) -> bool:
        """Whether a step of the other may overwrite the rows of this one's last step."""
        return self.plan.kind == other.plan.kind and self.plan.region == other.plan.region

    def step(self, ids: torch.Tensor, in_graph: bool, preloaded: bool = False) -> int:
        """One layer-step and its check, enqueued; returns its mode."""
        mode = self.cache.mode(ids)
        if in_graph:
            if ids.shape not in self._graphs:
                self._graphs[ids.shape] = self._capture(ids, mode)
            buffer, rows, replay = self._graphs[ids.shape]
            buffer.copy_(ids)
            replay()
            rows = rows[0]
        else:
            rows = self.cache.run(ids, mode, preloaded)
        self.steps += 1
        self._note(ids, rows)
        if mode not in self._checks:
            self._check(mode)
            self._checks[mode] = captured(lambda: self._check(mode))
        self._checks[mode]()
        return mode

    def skip(self) -> None:
        self.cache.note_read_through()
        self.steps += 1

    def forget(self) -> dict[str, int]:
        """Empties the cache; what it had counted."""
        counted = self.counted()
        self.cache.forget()
        self.cache.reset_counters()
        self.steps = 0
        return counted

    def reload(self) -> dict[str, int]:
        """Other weights in place, and what the shim does when it hears of that."""
        counted = self.counted()
        synchronize()
        self.records.change()
        self.cache.restore()
        self.cache.reset_counters()
        self.steps = 0
        return counted

    def counted(self) -> dict[str, int]:
        """The counters; raises Difference where they do not add up to the steps made."""
        counters = dict(zip(COUNTERS, self.cache.counters.tolist()))
        reached = counters["steps"] + counters["idle"] + counters["read_through"]
        if reached != self.steps:
            raise Difference(f"{reached} steps were counted, {self.steps} were made")
        return counters

    def spoil(self) -> None:
        """Changes one byte of a resident expert's slot; the next check must fail."""
        resident = int((self._expert_at() >= 0).nonzero()[0])
        self.cache.storage.placements[0].slots[resident, -1] += 1
        self._check(ROWS if ROWS in self._checks else SCRATCH)

    def one_id(self) -> torch.Tensor:
        """An id of an expert of the layer, int32 `[1, 1]`."""
        return (self._map >= 0).nonzero()[:1].to(torch.int32)

    def _capture(self, ids: torch.Tensor, mode: int) -> tuple:
        buffer, rows = ids.clone(), []

        def run() -> None:
            rows[:] = [self.cache.run(buffer, mode)]

        replay = captured(run)
        # What warmed the capture up was a layer-step too; a CPU has nothing to warm up.
        self.steps += replay is not run
        return buffer, rows, replay

    def _note(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps ids and row ids for the check, which needs one shape: the rest names nobody."""
        for kept, given in ((self._ids, ids), (self._rows, rows)):
            given = given.view(torch.int32) if given.dtype == torch.uint32 else given
            kept.fill_(-1)
            kept[: given.numel()].copy_(given.reshape(-1))

    def _expert_at(self) -> torch.Tensor:
        start = native.STATE_HEADER + self.cache.experts
        return self.cache.state[start : start + self.cache.slots].long()

    def _check(self, mode: int) -> None:
        """Adds what is wrong to `failures`. Fixed shapes, so that it can be one graph."""
        experts, ids, rows = self.cache.experts, self._ids, self._rows
        placements = self.cache.storage.placements
        tensors = [p.scratch if mode == SCRATCH else p.slots for p in placements]
        named, given = self._look_up(ids), self._look_up(rows)
        valid = named >= 0
        stray = valid & ((given < 0) | (given >= tensors[0].shape[0]))
        expert = torch.where(valid, named, experts)  # one place more than there are experts
        row_of = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
        row_of.scatter_(0, expert, given)
        routed = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
        routed.scatter_(0, expert, torch.ones_like(valid))
        changed = torch.where(valid, row_of[expert] != given, rows != ids)
        row = row_of[:experts].clamp(0, tensors[0].shape[0] - 1)
        resident = self._expert_at()
        wrong = [(stray | changed).sum(), *torch.zeros(2, dtype=torch.int64, device=ids.device)]
        for place, tensor, truth in zip(placements, tensors, self.records.truth):
            wrong[1] = wrong[1] + (_differ(tensor[row], truth) & routed[:experts]).sum()
            slots = place.slots[: self.cache.slots]
            wrong[2] = wrong[2] + (_differ(slots, truth[resident.clamp(0)]) & (resident >= 0)).sum()
        self.failures += torch.stack(wrong)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        known = (ids >= 0) & (ids < len(self._map))
        return torch.where(known, self._map[torch.where(known, ids, 0)], -1)


def random_map(experts: int) -> np.ndarray:
    """The expert of this rank that each id of two ranks names, or -1: int32 `[2 * experts]`."""
    expert_map = np.full(2 * experts, -1, np.int32)
    expert_map[torch.randperm(2 * experts)[:experts].numpy()] = np.arange(experts)
    return expert_map


def _differ(records: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which of the records, `[n, ...]`, are not equal: bool `[n]`."""
    return (records != others).flatten(1).any(1)
