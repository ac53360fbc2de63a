"""Many random layer-steps, and after each everything that the cache promises.

    python -m bench.soak                    100,000 layer-steps, ends with status 1 at a difference

Layers of both kinds of storage, of random policies, share one allocator. Between steps of random
width, type, strides and routing, caches are emptied, host copies are overwritten in place as a
reload does it, and layers are dropped and built anew. After every step, on the device: each routed
expert's row and each resident's slot equals the host record byte for byte, and ids that name no
expert came through unchanged. At the end: no memory has been taken, and a byte changed on purpose
is noticed. Needs PyTorch and the kernel library, not vLLM; without a GPU the emulated kernels run.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from expert_cache_shim import native
from expert_cache_shim.discovery import ExpertTensors
from expert_cache_shim.layer import ROWS, SCRATCH, SKIP, ExpertCache
from expert_cache_shim.policy import COUNTERS
from expert_cache_shim.settings import POLICIES, Settings
from expert_cache_shim.storage import Allocator, Storage

from .device_layer import Difference, load_library
from .engine import device, synchronize, used_bytes
from .timing import captured

WIDTHS = ((1, 8), (1, 8), (1, 1), (2, 8), (4, 6), (16, 8), (64, 8), (256, 8))  # tokens, top-k
GRAPHED = ((1, 8), (16, 8))
MOST_IDS = 2048
# Odds of each before a step, and of a step that reads through.
RESET, RELOAD, REBUILD, SKIPPED = 1 / 200, 1 / 500, 1 / 4000, 1 / 50
RSS_SLACK = 64 * 2**20
DEVICE_SLACK = 8 * 2**20  # what the driver may take or keep for its own tables


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


class SoakLayer:
    """An ExpertCache over random records, and what its last step left, checked on the device."""

    def __init__(
        self, allocator: Allocator, kind: str, experts: int, slots: int, record: int, policy: str
    ) -> None:
        self.records = Records(allocator.device, experts, record)
        storage = self._storage(allocator, kind, slots)
        self.cache = ExpertCache(
            allocator.library, storage, experts, slots, Settings(policy=policy)
        )
        self.steps = 0  # since the cache was emptied
        # Failures: wrong ids, wrong rows, wrong slots.
        self.failures = torch.zeros(3, dtype=torch.int64, device=allocator.device)
        self._ids = torch.zeros(MOST_IDS, dtype=torch.int64, device=allocator.device)
        self._rows = torch.zeros_like(self._ids)
        self._checks: dict[int, Callable[[], None]] = {}
        self._graphs: dict[tuple[int, int], tuple] = {}

    def _storage(self, allocator: Allocator, kind: str, slots: int) -> Storage:
        if kind == "virtual":
            return allocator.virtual(self.records.tensors, slots)
        return allocator.plain(self.records.tensors, slots, scratch=True)

    def step(self, ids: torch.Tensor, in_graph: bool) -> int:
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
            rows = self.cache.run(ids, mode)
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
        valid = (ids >= 0) & (ids < experts)
        stray = valid & ((rows < 0) | (rows >= tensors[0].shape[0]))
        expert = torch.where(valid, ids, experts)  # one place more than there are experts
        row_of = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
        row_of.scatter_(0, expert, rows)
        routed = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
        routed.scatter_(0, expert, torch.ones_like(valid))
        changed = torch.where(valid, row_of[expert] != rows, rows != ids)
        row = row_of[:experts].clamp(0, tensors[0].shape[0] - 1)
        resident = self._expert_at()
        wrong = [(stray | changed).sum(), *torch.zeros(2, dtype=torch.int64, device=ids.device)]
        for place, tensor, truth in zip(placements, tensors, self.records.truth):
            wrong[1] = wrong[1] + (_differ(tensor[row], truth) & routed[:experts]).sum()
            slots = place.slots[: self.cache.slots]
            wrong[2] = wrong[2] + (_differ(slots, truth[resident.clamp(0)]) & (resident >= 0)).sum()
        self.failures += torch.stack(wrong)


def _differ(records: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which of the records, `[n, ...]`, are not equal: bool `[n]`."""
    return (records != others).flatten(1).any(1)


class Soak:
    """The layers, the lots that decide what happens to them, and the sums."""

    def __init__(self, experts: int, record: int, seed: int, library: native.Library) -> None:
        self.lots = random.Random(seed)
        torch.manual_seed(seed)
        self.device = device()
        self.experts, self.record = experts, record
        self.allocator = Allocator(library, self.device)
        self.plans = [
            (kind, slots)
            for kind in ("virtual", "plain")
            for slots in (max(1, experts // 4), max(1, experts // 4), experts // 2)
        ]
        self.layers = [self._build(*plan) for plan in self.plans]
        self.counts: Counter[str] = Counter()

    def _build(self, kind: str, slots: int) -> SoakLayer:
        policy = self.lots.choice(POLICIES)
        return SoakLayer(self.allocator, kind, self.experts, slots, self.record, policy)

    def step(self, number: int) -> None:
        index = self.lots.randrange(len(self.layers))
        layer, lot = self.layers[index], self.lots.random()
        if lot < REBUILD:
            self.counts.update(layer.counted(), rebuilds=1)
            self.settle()
            self.layers[index] = layer = None
            gc.collect()  # its memory goes before another's is taken
            self.layers[index] = layer = self._build(*self.plans[index])
        elif lot < REBUILD + RELOAD:
            self.counts.update(layer.reload(), reloads=1)
        elif lot < REBUILD + RELOAD + RESET:
            self.counts.update(layer.forget(), resets=1)
        if self.lots.random() < SKIPPED:
            layer.skip()
            return
        shape = self.lots.choice(WIDTHS)
        in_graph = shape in GRAPHED and self.lots.random() < 0.5
        ids = self._draw(shape, number, plain=in_graph)
        mode = layer.step(ids, in_graph)
        self.counts["graph replays"] += in_graph and self.device.type == "cuda"
        self.counts["steps on the scratch"] += mode == SCRATCH
        assert mode != SKIP

    def _draw(self, shape: tuple[int, int], number: int, plain: bool) -> torch.Tensor:
        """Skewed routing whose favourites change, one id in 25 naming nobody; plain: int32,
        contiguous."""
        dtype = torch.int32 if plain else self.lots.choice((torch.int32, torch.int64))
        gap = 0 if plain else self.lots.choice((0, 0, 3))
        ids = torch.rand(*shape, device=self.device) ** 3 * self.experts
        ids = (ids.to(dtype) + number // 200) % self.experts
        nobody = self.lots.choice((-1, self.experts, 2**31 - 1, -(2**31)))
        ids = ids.masked_fill(torch.rand(*shape, device=self.device) < 0.04, nobody)
        if gap:  # part of a larger buffer, as DeepEP's are
            buffer = torch.zeros(shape[0], shape[1] + gap, dtype=dtype, device=self.device)
            buffer[:, 1 : 1 + shape[1]] = ids
            ids = buffer[:, 1 : 1 + shape[1]]
        if dtype == torch.int32 and not plain and self.lots.random() < 0.3:
            ids = ids.view(torch.uint32)
        return ids

    def settle(self) -> None:
        """Waits for the device and asks every layer. Raises Difference."""
        for index, layer in enumerate(self.layers):
            ids, rows, slots = layer.failures.tolist()
            if ids or rows or slots:
                kind, policy = self.plans[index][0], layer.cache.policy_name
                raise Difference(
                    f"layer {index} ({kind}, {policy}): {ids} wrong row ids, {rows} rows and "
                    f"{slots} slots that do not hold their expert's record"
                )
            layer.counted()

    def memory(self) -> tuple[int, int]:
        """Bytes in use: of this process in host memory, and of the device; with every graph that
        a layer can have."""
        for layer in self.layers:
            for shape in WIDTHS:
                in_graph = shape in GRAPHED
                layer.step(self._draw(shape, 0, plain=in_graph), in_graph)
        gc.collect()
        synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), used_bytes()

    def control(self) -> None:
        """A byte that is changed on purpose is noticed in every layer, or this program is no
        check. Raises Difference."""
        for layer in self.layers:
            layer.forget()
            layer.step(torch.zeros(1, 1, dtype=torch.int32, device=self.device), in_graph=False)
            self.settle()
            layer.spoil()
            if not layer.failures[2]:
                raise Difference("a changed byte of a slot was not noticed")
            layer.failures.zero_()
            layer.forget()


def run(soak: Soak, steps: int) -> dict[str, float]:
    """Raises Difference."""
    started, memory = time.perf_counter(), (0, 0)
    part = max(1, steps // 10)
    for number in range(steps):
        soak.step(number)
        if (number + 1) % part == 0:
            try:
                soak.settle()
            except Difference as difference:
                raise Difference(f"by step {number + 1}: {difference}") from None
            print(f"{number + 1:,} layer-steps", flush=True)
        if number + 1 == 2 * part:
            memory = soak.memory()
    soak.settle()
    grown = [after - before for after, before in zip(soak.memory(), memory)]
    for layer in soak.layers:
        soak.counts.update(layer.forget())
    soak.control()
    if grown[0] > RSS_SLACK or grown[1] > DEVICE_SLACK:
        raise Difference(f"{grown[0]:,} bytes of host and {grown[1]:,} of device memory were kept")
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "host bytes kept": grown[0],
        "device bytes kept": grown[1],
        **soak.counts,
    }


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--experts", type=int, default=64 if on_gpu else 16)
    parser.add_argument(
        "--record", type=int, default=2**17 if on_gpu else 2**13,
        help="bytes of an expert in the largest tensor (default: %(default)s here)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lib", help="kernel library in place of the package's own")
    options = parser.parse_args()
    if not on_gpu:
        torch.set_num_threads(1)  # sums of small tensors
    soak = Soak(options.experts, options.record, options.seed, load_library(options.lib))
    try:
        result = run(soak, options.steps)
    except Difference as difference:
        print(f"different, {difference}", file=sys.stderr)
        return 1
    print(", ".join(f"{name}: {value:,}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
