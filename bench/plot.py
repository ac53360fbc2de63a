"""A picture of a run of bench.decode: every cell of every cached arm over its floor.

python -m bench.plot decode.json decode.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import report

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
RESIDENT, UNCACHED = "#999999", "#333333"


def draw(run: dict, path: Path) -> None:
    """Above: tokens per second of each arm, on a logarithmic axis. Below: measured step over the
    floor, with the spread of the windows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = report.cells(run)
    names = list(dict.fromkeys(cell.name for cell in found))
    arms = list(dict.fromkeys(cell.arm for cell in found))
    figure, (rates, floors) = pyplot.subplots(2, 1, figsize=(11, 8), sharex=True)
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        cells = [cell for cell in found if cell.arm == arm]
        shift = (index - (len(arms) - 1) / 2) * width
        places = [names.index(cell.name) + shift for cell in cells]
        colour = _colour(arm, arms)
        rates.bar(
            places, [c.tokens_per_second for c in cells], 0.9 * width, label=arm, color=colour
        )
        _points(floors, [(x, c.over_floor) for x, c in zip(places, cells) if c.over_floor], colour)
    rates.set_yscale("log")
    rates.set_ylabel("tokens per second")
    rates.legend(fontsize="small", ncols=3)
    floors.axhline(1, color="black", linewidth=0.8)
    floors.grid(axis="y", alpha=0.3)
    floors.set_ylabel("step / (resident step + missed bytes / bandwidth)")
    floors.set_xticks(range(len(names)), names, rotation=30, ha="right")
    figure.suptitle(_title(run), fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def _points(axes, points: list[tuple[float, report.Spread]], colour: str) -> None:
    low = [spread.median - spread.low for _, spread in points]
    high = [spread.high - spread.median for _, spread in points]
    axes.errorbar(
        [x for x, _ in points], [spread.median for _, spread in points], yerr=[low, high],
        fmt="o", markersize=4, color=colour, elinewidth=1, capsize=2,
    )  # fmt: skip


def _title(run: dict) -> str:
    environment, options = run["environment"], run["options"]
    device = environment.get("gpu") or environment.get("cpu", "")
    return (
        f"{device}, vLLM {environment.get('vllm')}, {options['layers']} layers of "
        f"{options['shape']}"
    )


def _colour(arm: str, arms: list[str]) -> str:
    fixed = {"resident": RESIDENT, "uncached": UNCACHED}
    cached = [name for name in arms if name not in fixed]
    return fixed.get(arm) or COLOURS[cached.index(arm) % len(COLOURS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="JSON file of bench.decode")
    parser.add_argument("picture", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    draw(json.loads(arguments.run.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
