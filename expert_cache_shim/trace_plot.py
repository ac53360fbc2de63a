"""Pictures of recorded routing: what a cache would miss, which experts are used, and how soon
again. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import PercentFormatter

from .trace import Trace
from .trace_replay import OPTIMUM, Counts, reuse_distances, usage

# Okabe and Ito's colours, which people with colour-blindness tell apart.
COLOURS = {
    "lrfu": "#0072b2", "lru": "#e69f00", "lfu": "#009e73", "fifo": "#999999", "slru": "#cc79a7",
    OPTIMUM: "#000000",
}  # fmt: skip
PANEL = (5.2, 3.9)  # inches


def curves(panels: Sequence[tuple[str, Trace, Sequence[Counts]]], path: Path) -> None:
    """Miss-ratio curves: misses over routed experts by the share of experts that are resident,
    one panel a trace and one line a policy."""
    figure, axes = _grid(len(panels))
    for axis, (title, trace, counts) in zip(axes, panels):
        for found in counts:
            axis.plot(
                [size / trace.experts for size in found.slots], found.miss_rates,
                label=found.policy, color=COLOURS[found.policy], marker="o", markersize=3,
                linestyle="--" if found.policy == OPTIMUM else "-",
            )  # fmt: skip
        axis.plot([0, 1], [1, 0], color="#bbbbbb", linewidth=1, linestyle=":", label="no order")
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of experts resident", ylabel="miss rate")
        _finish(axis, title)
        axis.xaxis.set_major_formatter(PercentFormatter(1))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.legend(fontsize="small")
    _save(figure, path)


def layers(panels: Sequence[tuple[str, Trace]], path: Path) -> None:
    """Heat maps: how often each layer routes to its busiest expert, its second, and so on."""
    figure, axes = _grid(len(panels))
    for axis, (title, trace) in zip(axes, panels):
        by_rank = np.sort(usage(trace), axis=1)[:, ::-1]
        least = 1 / trace.steps
        picture = axis.imshow(
            np.maximum(by_rank, least), aspect="auto", interpolation="nearest", cmap="viridis",
            norm=LogNorm(least, max(by_rank.max(), 2 * least)),
            extent=(0, trace.experts, trace.layers, 0),
        )  # fmt: skip
        axis.set(xlabel="experts of the layer, busiest first", ylabel="layer")
        axis.set_title(title, fontsize="medium")
        figure.colorbar(picture, ax=axis, label="share of steps that route to it")
    _save(figure, path)


def reuse(panels: Sequence[tuple[str, Trace]], path: Path) -> None:
    """The distribution of reuse distances, one line a trace."""
    figure, (axis,) = _grid(1)
    for title, trace in panels:
        distances = reuse_distances(trace)
        share = np.cumsum(distances[:-1]) / distances.sum()
        axis.plot(np.arange(trace.experts) / trace.experts, share, label=title)
    axis.set(
        xlim=(0, 1), ylim=(0, 1), ylabel="share of routed experts",
        xlabel="other experts of the layer routed since its last time, share of all",
    )  # fmt: skip
    _finish(axis, "How soon an expert is routed again")
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.legend(fontsize="x-small", loc="lower right")
    _save(figure, path)


def _grid(panels: int) -> tuple[pyplot.Figure, list[Axes]]:
    """Panels beside each other, two a row; places without one stay empty."""
    columns = min(panels, 2)
    rows = -(-panels // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(columns * PANEL[0], rows * PANEL[1]), squeeze=False
    )
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:panels])


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize="medium")
    axis.grid(alpha=0.3)


def _save(figure: pyplot.Figure, path: Path) -> None:
    """By the ending of the name; the same input gives the same bytes."""
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "expert-cache"}):
        figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)
