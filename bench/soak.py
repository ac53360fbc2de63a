"""Many random layer-steps, and after each everything that the cache promises.

    python -m bench.soak                    100,000 layer-steps, ends with status 1 at a difference

Layers of both kinds of storage, of random policies, some of one rank of two with an expert map,
share one allocator. Between steps of random width, type, strides and routing, caches are emptied,
host copies are overwritten in place as a reload does it, and layers are dropped and built anew.
Experts of wide steps are fetched ahead while another layer steps. After every step, on the device:
each routed expert's row and each resident's slot equals the host record byte for byte, and ids
that name no expert came through unchanged. At the end: no memory has been taken, and a byte changed
on purpose is noticed. Needs PyTorch and the kernel library, not vLLM; without a GPU the emulated
kernels run.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import signal
import sys
import time
from collections import Counter

import torch

from expert_cache_shim import native
from expert_cache_shim.layer import SCRATCH, SKIP
from expert_cache_shim.preload import IDS_PER_EXPERT, Preloader
from expert_cache_shim.settings import POLICIES
from expert_cache_shim.storage import Allocator

from .device_layer import Difference, load_library
from .engine import device, synchronize, used_bytes
from .soak_layer import Plan, SoakLayer

WIDTHS = ((1, 8), (1, 8), (1, 1), (2, 8), (4, 6), (16, 8), (64, 8), (256, 8), (512, 8))
GRAPHED = ((1, 8), (16, 8))  # like the above: tokens, top-k
# Odds of each before a step, and of a step that reads through.
RESET, RELOAD, REBUILD, SKIPPED = 1 / 200, 1 / 500, 1 / 4000, 1 / 50
# Of experts that were fetched ahead in vain, because an execution ended before their step.
IN_VAIN = 1 / 10
RSS_SLACK = 64 * 2**20
DEVICE_SLACK = 8 * 2**20  # what the driver may take or keep for its own tables


class Soak:
    """The layers, the lots that decide what happens to them, and the sums."""

    def __init__(self, experts: int, record: int, seed: int, library: native.Library) -> None:
        self.lots = random.Random(seed)
        torch.manual_seed(seed)
        self.device = device()
        self.experts, self.record = experts, record
        self.allocator = Allocator(library, self.device)
        self.preloader = Preloader(self.device)
        few, half = max(1, experts // 4), experts // 2
        plans = [
            Plan("virtual", few), Plan("virtual", few, mapped=True), Plan("virtual", half),
            Plan("virtual", few, region=1), Plan("virtual", few, region=1, mapped=True),
            Plan("plain", few), Plan("plain", few, mapped=True), Plan("plain", half),
        ]  # fmt: skip
        self.layers = [self._build(plan) for plan in plans]
        self.counts: Counter[str] = Counter()

    def _build(self, plan: Plan) -> SoakLayer:
        policy = self.lots.choice(POLICIES)
        return SoakLayer(self.allocator, plan, self.experts, self.record, policy)

    def step(self, number: int) -> None:
        index = self.lots.randrange(len(self.layers))
        layer, lot = self.layers[index], self.lots.random()
        if lot < REBUILD:
            self.counts.update(layer.counted(), rebuilds=1)
            self.settle()
            plan = layer.plan
            self.layers[index] = layer = None
            gc.collect()  # its memory goes before another's is taken
            self.layers[index] = layer = self._build(plan)
        elif lot < REBUILD + RELOAD:
            self.counts.update(layer.reload(), reloads=1)
        elif lot < REBUILD + RELOAD + RESET:
            self.counts.update(layer.forget(), resets=1)
        if self.lots.random() < SKIPPED:
            layer.skip()
            return
        shape = self.lots.choice(WIDTHS)
        in_graph = shape in GRAPHED and self.lots.random() < 0.5
        ids = self._draw(layer, shape, number, plain=in_graph)
        preloaded = not in_graph and self._preload(layer, ids, number)
        mode = layer.step(ids, in_graph, preloaded)
        self.counts["preloaded steps"] += preloaded
        self.counts["graph replays"] += in_graph and self.device.type == "cuda"
        self.counts["steps on the scratch"] += mode == SCRATCH
        assert mode != SKIP

    def _preload(self, layer: SoakLayer, ids: torch.Tensor, number: int) -> bool:
        """As in a model: while another layer steps, a wide step's experts are fetched. Whether
        they lie in the layer's rows then."""
        wide = ids.numel() >= IDS_PER_EXPERT * layer.cache.experts_of_all_ranks
        if layer.plan.kind != "virtual" or not wide:
            return False
        self.preloader.start(layer.cache, ids)
        other = self.lots.choice([one for one in self.layers if not layer.shares_rows_with(one)])
        other.step(self._draw(other, self.lots.choice(WIDTHS), number, plain=False), False)
        if self.lots.random() < IN_VAIN:
            self.preloader.end()
        return self.preloader.finish(layer.cache)

    def _draw(
        self, layer: SoakLayer, shape: tuple[int, int], number: int, plain: bool
    ) -> torch.Tensor:
        """Skewed routing whose favourites change, one id in 25 naming nobody; plain: int32,
        contiguous."""
        dtype = torch.int32 if plain else self.lots.choice((torch.int32, torch.int64))
        gap = 0 if plain else self.lots.choice((0, 0, 3))
        known = layer.cache.experts_of_all_ranks
        ids = torch.rand(*shape, device=self.device) ** 3 * known
        ids = (ids.to(dtype) + number // 200) % known
        nobody = self.lots.choice((-1, known, 2**31 - 1, -(2**31)))
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
                plan, policy = layer.plan, layer.cache.policy_name
                raise Difference(
                    f"layer {index} ({plan.kind}, {policy}): {ids} wrong row ids, {rows} rows and "
                    f"{slots} slots that do not hold their expert's record"
                )
            layer.counted()

    def memory(self) -> tuple[int, int]:
        """Bytes in use: of this process in host memory, and of the device; with every graph that
        a layer can have."""
        for layer in self.layers:
            for shape in WIDTHS:
                in_graph = shape in GRAPHED
                layer.step(self._draw(layer, shape, 0, plain=in_graph), in_graph)
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
            layer.step(layer.one_id(), in_graph=False)
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    if not on_gpu:
        torch.set_num_threads(1)  # sums of small tensors
    soak = Soak(options.experts, options.record, options.seed, load_library(options.lib))
    try:
        result = run(soak, options.steps)
    except Difference as difference:
        print(f"different, {difference}", flush=True)
        return 1
    print("equal, " + ", ".join(f"{n}: {value:,}" for n, value in result.items()), flush=True)
    return 0


def _ended(number: int, _frame: object) -> None:
    """A run that is cut off, by a limit of time for one, says so: its last line is a verdict, or
    tells that there is none."""
    print(f"ended by {signal.Signals(number).name}: no verdict", flush=True)
    sys.exit(128 + number)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
