"""`manage` and `gather` alone, under graph replay.

    python -m bench.kernels --output kernels.json

Each case is compared with the numpy reference before it is timed. `manage` is timed as a chain of
64 steps in one graph, so a figure includes the gap between two graph nodes. `gather` is held
against the copy engine moving as many bytes, and run beside a busy matrix product. Without a GPU
the emulated kernels run: that checks this program and times nothing of interest.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from . import environment
from .device_layer import DeviceLayer, DeviceTensors, copies_to_rows, load_library
from .engine import device
from .report import Spread
from .timing import captured, milliseconds

TOP_K = 8
CHAIN = 64  # steps of manage in one graph
SETS = 8  # gathers in one graph, each of other records
RECORD = [2 * 768 * 2048 * 2, 768 * 2048 * 2]  # bytes: w13 and w2 of Qwen3-30B-A3B, bfloat16
PATTERNS = ("hits", "few", "many")


def routing(
    experts: int, slots: int, tokens: int, pattern: str, steps: int = CHAIN
) -> Iterator[np.ndarray]:
    """int32 `[tokens, TOP_K]` ids: `hits` names few enough experts that all stay resident, `few`
    puts two others among them in each step, `many` draws from all."""
    generator = np.random.default_rng(experts + slots + tokens)
    names = generator.permutation(experts).astype(np.int32)
    hot, cold = names[: slots - 4], itertools.cycle(names[slots:])
    for _ in range(steps):
        pool = names if pattern == "many" else hot
        ids = np.stack([generator.permutation(pool)[:TOP_K] for _ in range(tokens)])
        if pattern == "few":
            ids[0, :2] = next(cold), next(cold)
        yield ids


def manage_case(library, experts: int, slots: int, tokens: int, pattern: str) -> dict:
    """Checks one case, then times it. Raises Difference."""
    layer = DeviceLayer(library, experts, slots, device=device())
    chain = list(routing(experts, slots, tokens, pattern))
    ids = [torch.from_numpy(step).to(layer.device) for step in chain]
    row_ids = [torch.empty_like(step) for step in ids]

    def run() -> None:
        for step, rows in zip(ids, row_ids):
            layer.manage(step, rows)

    replay = captured(run)
    layer.forget()
    for last in (False, True):
        replay()
        for step, rows in zip(chain, row_ids):
            layer.expect(step, rows if last else None)
    layer.compare()
    misses = layer.reference.counters["misses"]
    for step in chain:
        layer.expect(step)
    misses = (layer.reference.counters["misses"] - misses) / CHAIN
    time = milliseconds(replay)
    return {
        "experts": experts, "slots": slots, "tokens": tokens, "pattern": pattern,
        "misses": misses, "us": asdict(_scaled(time, 1e3 / CHAIN)),
    }  # fmt: skip


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.low * factor, spread.high * factor)


def manage_cases(library) -> Iterator[dict]:
    print("| manage: experts | slots | tokens x 8 | routing | misses/step | us/step (min-max) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for experts, divisor, tokens, pattern in itertools.product(
        (128, 256, 512), (4, 2), (1, 4, 32), PATTERNS
    ):
        case = manage_case(library, experts, experts // divisor, tokens, pattern)
        us = case["us"]
        print(
            f"| {experts} | {case['slots']} | {tokens} | {pattern} | {case['misses']:.1f} | "
            f"{us['median']:.2f} ({us['low']:.2f}-{us['high']:.2f}) |", flush=True,
        )  # fmt: skip
        yield case


class GatherBench:
    """Records of one expert's size on host and device, and SETS lists of copies of them."""

    def __init__(self, library, experts: int, record: list[int]) -> None:
        self.tensors = DeviceTensors(library, experts, record, device())
        self.record = sum(record)
        self._generator = np.random.default_rng(0)

    def gather(self, records: int, grid: tuple[int, int, int]):
        """Checks a grid of chunks, lanes and threads; a function that runs SETS gathers."""
        tensors = self.tensors
        sets = [copies_to_rows(self._generator, tensors.experts, records) for _ in range(SETS)]
        tensors.check(sets[0], **dict(zip(("chunks", "lanes", "threads"), grid)))
        states = [tensors.state(copies) for copies in sets]
        return captured(lambda: [tensors.gather(state, *grid) for state in states])

    def copies(self, records: int):
        """SETS copies by the copy engine, each of as many bytes in one piece. Not in a graph:
        launching one takes far less time than it runs."""
        size = records * self.record
        source = torch.empty(size, dtype=torch.uint8, pin_memory=self.tensors.device.type == "cuda")
        target = torch.empty(size, dtype=torch.uint8, device=self.tensors.device)
        return lambda: [target.copy_(source, non_blocking=True) for _ in range(SETS)]

    def rate(self, work, records: int) -> Spread:
        """GB/s of SETS pieces of work that move `records` records each."""
        time = milliseconds(work)
        size = SETS * records * self.record / 1e6
        return Spread(size / time.median, size / time.high, size / time.low)


def gather_cases(bench: GatherBench, grids: list[tuple[int, int, int]]) -> Iterator[dict]:
    print("\n| gather: records | chunks x lanes x threads | GB/s (min-max) | of the copy engine |")
    print("| --- | --- | --- | --- |")
    for records in (1, 2, 8):
        engine = bench.rate(bench.copies(records), records)
        print(f"| {records} | copy engine | {_gb(engine)} | |", flush=True)
        for grid in grids:
            rate = bench.rate(bench.gather(records, grid), records)
            share = rate.median / engine.median
            print(f"| {records} | {_grid(grid)} | {_gb(rate)} | {share:.1%} |", flush=True)
            yield {"records": records, "grid": grid, "gb_s": asdict(rate), "share": share,
                   "copy_engine_gb_s": asdict(engine)}  # fmt: skip


def beside_matmul(bench: GatherBench, grids: list[tuple[int, int, int]]) -> Iterator[dict]:
    """A gather of 8 records on one stream and a matrix product on another."""
    matrix = torch.randn(8192, 8192, device=device(), dtype=torch.bfloat16)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        # About as long as the SETS gathers of 8 records, so that all of each can hide.
        for _ in range(SETS):
            torch.matmul(matrix, matrix, out=product)

    multiply_ms = milliseconds(multiply)
    side = torch.cuda.Stream()
    print("\n| beside a matmul: grid | matmul ms | gather ms | both ms | / the longer |")
    print("| --- | --- | --- | --- | --- |")
    works = [(_grid(grid), bench.gather(8, grid)) for grid in grids]
    for name, gathers in [*works, ("copy engine", bench.copies(8))]:

        def both(gathers=gathers) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                gathers()
            multiply()
            torch.cuda.current_stream().wait_stream(side)

        alone, pair = milliseconds(gathers), milliseconds(both)
        ratio = pair.median / max(alone.median, multiply_ms.median)
        print(
            f"| {name} | {multiply_ms.median:.2f} | {alone.median:.2f} | {pair.median:.2f} | "
            f"{ratio:.2f} |", flush=True,
        )  # fmt: skip
        yield {"work": name, "matmul_ms": asdict(multiply_ms), "alone_ms": asdict(alone),
               "both_ms": asdict(pair), "over_longer": ratio}  # fmt: skip


def _gb(rate: Spread) -> str:
    return f"{rate.median:.1f} ({rate.low:.1f}-{rate.high:.1f})"


def _grid(grid: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid))


def grid(text: str) -> tuple[int, int, int]:
    chunks, lanes, threads = map(int, text.split("x"))
    return chunks, lanes, threads


# The package's default (0 threads: the build's own), fewer, more, records side by side, and what
# fills the whole GPU.
GRIDS = "16x1x0 4x1x512 8x1x512 16x1x512 32x1x512 8x1x1024 16x1x1024 4x4x512 8x2x512 16x64x256"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["manage", "gather", "matmul"],
                        default=["manage", "gather", "matmul"])  # fmt: skip
    parser.add_argument("--grids", nargs="+", type=grid, default=[grid(g) for g in GRIDS.split()],
                        metavar="CHUNKSxLANESxTHREADS", help=f"default: {GRIDS}")  # fmt: skip
    parser.add_argument("--lib", help="kernel library; default: the package's own")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    library = load_library(arguments.lib)
    found: dict = {"environment": environment.describe()}
    if "manage" in arguments.only:
        found["manage"] = list(manage_cases(library))
    gpu = torch.cuda.is_available()
    if {"gather", "matmul"} & set(arguments.only):
        bench = GatherBench(library, 64 if gpu else 8, RECORD if gpu else [4096 + 3, 2048])
        if "gather" in arguments.only:
            found["gather"] = list(gather_cases(bench, arguments.grids))
        if "matmul" in arguments.only and gpu:
            found["matmul"] = list(beside_matmul(bench, arguments.grids))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
