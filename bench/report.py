"""From what the arms told to figures: the floor, the ratios, a table.

    python -m bench.report decode.json      the table of a run, again

A run is `{"environment", "options", "arms": [{"name", "start", "tasks", "error"}]}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the windows of a cell."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Cell:
    """One task of one arm. None where a figure needs what the run does not have.

    ms: of one step, which is a whole prompt in prefill. device_ms: the device's part of it, where
    steps are CUDA graphs; ratios to the resident arm and to the floor are then of this time, for
    what the host does between two short steps differs from process to process. misses: experts
    fetched in a step, all layers together. link_ms: their bytes over the copy bandwidth measured
    in the same process. floor_ms: the resident arm's step + link_ms. over_floor: step / floor_ms,
    window by window. over_longer: step / the longer of resident step and link_ms, the floor of a
    perfect overlap.
    """

    arm: str
    name: str
    ms: Spread
    tokens_per_second: float
    device_ms: Spread | None = None
    misses: float | None = None
    link_ms: float | None = None
    floor_ms: float | None = None
    over_floor: Spread | None = None
    over_longer: float | None = None
    times_uncached: float | None = None
    over_resident: float | None = None


def step_ms(task: dict) -> list[float]:
    return [1e3 * window["seconds"] / window["steps"] for window in task["windows"]]


def device_ms(task: dict) -> list[float] | None:
    """Device time of a step in each window, None where steps are not CUDA graphs."""
    times = [window.get("device_ms") for window in task["windows"]]
    return None if None in times else times


def cell(run: dict, arm: dict, task: dict) -> Cell:
    """The figures of one task; the other arms' come from what the run has so far."""
    wall, device = step_ms(task), device_ms(task)
    uncached = _median_of(run, "uncached", task["name"], step_ms)
    resident = _median_of(run, "resident", task["name"], device_ms) if device else None
    times = device if resident else wall
    resident = resident or _median_of(run, "resident", task["name"], step_ms)
    median = statistics.median(times)
    figures = {
        "arm": arm["name"],
        "name": task["name"],
        "ms": Spread.of(wall),
        "device_ms": Spread.of(device) if device else None,
        "tokens_per_second": 1e3
        * task.get("streams", task.get("tokens"))
        / statistics.median(wall),
        "times_uncached": uncached and uncached / statistics.median(wall),
        "over_resident": resident and median / resident,
    }
    links = _link_ms(arm, task)
    if links is None:
        return Cell(**figures)
    figures["misses"] = _per_step(task, "misses")
    if links:
        figures["link_ms"] = statistics.median(links)
    if links and resident:
        floors = [resident + link for link in links]
        figures["floor_ms"] = statistics.median(floors)
        figures["over_floor"] = Spread.of([t / floor for t, floor in zip(times, floors)])
        figures["over_longer"] = median / max(resident, figures["link_ms"])
    return Cell(**figures)


def _link_ms(arm: dict, task: dict) -> list[float] | None:
    """For each window, the least time its missed bytes take on the link; [] without a GPU, None
    for an arm without a cache."""
    start, windows = arm["start"], task["windows"]
    if not windows[0]["counters"]:
        return None
    if start["copy_gb_s"] is None:
        return []
    ms_per_miss = start["record_bytes"] / start["copy_gb_s"]["median"] / 1e6
    return [window["counters"]["misses"] / window["steps"] * ms_per_miss for window in windows]


def _per_step(task: dict, counter: str) -> float:
    windows = task["windows"]
    steps = sum(window["steps"] for window in windows)
    return sum(window["counters"][counter] for window in windows) / steps


def _median_of(
    run: dict, arm_name: str, task_name: str, times: Callable[[dict], list[float] | None]
) -> float | None:
    for arm in run["arms"]:
        for task in arm["tasks"]:
            if arm["name"] == arm_name and task["name"] == task_name and times(task):
                return statistics.median(times(task))
    return None


def cells(run: dict) -> list[Cell]:
    return [
        cell(run, arm, task) for arm in run["arms"] for task in arm["tasks"] if "windows" in task
    ]


HEADERS = ("arm", "cell", "ms/step", "(min-max)", "gpu ms", "tok/s", "misses", "link ms",
           "floor ms", "/ floor", "(min-max)", "/ longer", "x uncached",
           "/ resident")  # fmt: skip
WIDTHS = (18, 12, 8, 15, 8, 8, 7, 8, 8, 7, 9, 8, 10, 10)


def header() -> str:
    return _line(HEADERS) + "\n" + _line(["-" * width for width in WIDTHS])


def row(cell: Cell) -> str:
    over, span = cell.over_floor, None
    if over is not None:
        span = f"{over.low:.2f}-{over.high:.2f}"
    return _line([
        cell.arm, cell.name, _number(cell.ms.median), f"{cell.ms.low:.4g}-{cell.ms.high:.4g}",
        _number(cell.device_ms and cell.device_ms.median),
        f"{cell.tokens_per_second:.0f}", _number(cell.misses), _number(cell.link_ms),
        _number(cell.floor_ms), f"{over.median:.3f}" if over else "-", span or "-",
        _ratio(cell.over_longer), _ratio(cell.times_uncached), _ratio(cell.over_resident),
    ])  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(fields: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(f.ljust(width) for f, width in zip(fields, WIDTHS)) + " |"


def start_line(name: str, start: dict) -> str:
    """One line about an arm that has started."""
    parts = [f"{name}: started in {start['seconds']:.0f} s"]
    if start["copy_gb_s"]:
        parts.append("copy {median:.1f} GB/s ({min:.1f}-{max:.1f})".format(**start["copy_gb_s"]))
        parts.append(f"{start['memory_gib']:.1f} GiB of device memory")
    if start["armed"]:
        parts.append(f"{start['armed']} layers armed, {start['slots']} slots, {start['storage']}")
    return ", ".join(parts)


def take(arm: dict, event: dict, describe: Callable[[dict, dict], str]) -> None:
    """Puts an event of an arm's process into `arm` and prints what it says; `describe` says it
    of an arm's task that is done."""
    kind = event.pop("event")
    if kind == "start":
        arm["start"] = event
        print(start_line(arm["name"], event), flush=True)
    elif kind == "task":
        arm["tasks"].append(event)
        print(describe(arm, event), flush=True)
    elif kind == "skipped":
        print(f"{arm['name']} {event['name']}: skipped, {event['reason']}", flush=True)
    else:
        arm["error"] = event
        print(f"{arm['name']}: {event['text']}", *event["log"], sep="\n    ", flush=True)


def table(run: dict) -> str:
    return "\n".join([header(), *(row(c) for c in cells(run))])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of a run of bench.decode.")
    parser.add_argument("run", type=Path)
    run = json.loads(parser.parse_args().run.read_text())
    print(*(f"{name}: {value}" for name, value in run["environment"].items()), sep="\n")
    print(table(run))


if __name__ == "__main__":
    main()
