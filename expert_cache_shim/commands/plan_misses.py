"""How many experts a decode step routes to and misses: from a trace, or from built-in curves.

A curve is what `tools/make_miss_curves.py` counted on recorded routing of one model: the share of
routed experts that were not resident, by the share of experts that are, and by streams.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import CommandError

if TYPE_CHECKING:
    from ..trace import Trace

WARM_UP = 100  # steps that are not counted, while empty caches fill
MOST_STEPS = 20_000  # of a trace that are replayed
MOST_IDS = 2**28


@dataclass(frozen=True)
class Curve:
    """misses[i][j]: miss rate at streams[i] and fractions[j] of the experts resident. routed[i]:
    experts that a layer of a step routes to."""

    name: str
    kind: str
    source: str
    experts: int
    top_k: int
    layers: int
    streams: tuple[int, ...]
    fractions: tuple[float, ...]
    routed: tuple[float, ...]
    misses: tuple[tuple[float, ...], ...]

    def miss_rate(self, fraction: float, streams: int) -> float:
        """Between the points of the curve straight lines, over the logarithm of the streams;
        nothing resident misses all, everything resident none. Streams beyond the last: as there."""
        by_streams = [
            _between((0.0, *self.fractions, 1.0), (1.0, *misses, 0.0), fraction)
            for misses in self.misses
        ]
        return _between(self._logs, by_streams, math.log2(streams))

    def routed_experts(self, experts: int, top_k: int, streams: int) -> float:
        """Of another model: what even routing would come to, times what the curve's model has of
        that."""
        shares = [
            routed / evenly_routed(self.experts, self.top_k, count)
            for routed, count in zip(self.routed, self.streams)
        ]
        share = _between(self._logs, shares, math.log2(streams))
        return max(float(top_k), share * evenly_routed(experts, top_k, streams))

    @property
    def _logs(self) -> list[float]:
        return [math.log2(count) for count in self.streams]


@dataclass(frozen=True)
class Expectation:
    """Of one source. routed: experts of a layer-step. misses: rate by slots of a rank; 1 at no
    slots."""

    source: str
    routed: float
    misses: dict[int, float]


def from_curves(
    curves: Sequence[Curve], kind: str, experts: int, top_k: int, streams: int,
    slots: Sequence[int],
) -> list[Expectation]:  # fmt: skip
    """One for each curve, or that of this very model where there is one."""
    own = [c for c in curves if (c.kind, c.experts, c.top_k) == (kind, experts, top_k)]
    return [
        Expectation(
            curve.name, curve.routed_experts(experts, top_k, streams),
            {count: curve.miss_rate(count / experts, streams) for count in slots},
        )
        for curve in own or curves
    ]  # fmt: skip


def from_trace(
    path: str, experts: int, top_k: int, streams: int, slots: Sequence[int]
) -> Expectation:
    """Replays a trace file with the default policy. Raises CommandError."""
    try:
        from .. import trace
    except ImportError as error:
        raise CommandError(f"--trace: {error}; pip install numpy") from None
    try:
        recorded = trace.load(path)
    except (trace.TraceError, OSError) as error:
        text = str(error) if isinstance(error, trace.TraceError) else f"{path}: {error.strerror}"
        raise CommandError(text) from None
    if recorded.experts > experts or recorded.top_k != top_k:
        raise CommandError(
            f"{path}: of a model that routes to {recorded.top_k} of {recorded.experts} experts, "
            f"this one to {top_k} of {experts}"
        )
    routed, misses = count_misses(recorded, streams, slots)
    return Expectation(path, routed, {0: 1.0} | dict(zip(slots, misses)))


def count_misses(recorded: Trace, streams: int, slots: Sequence[int]) -> tuple[float, list[float]]:
    """Experts routed in a layer-step, and the miss rate for each number of slots, once the caches
    are warm. A trace of one token a step is read by `streams` readers at once."""
    from ..trace_replay import Replay

    if recorded.steps == len(recorded.ids):
        recorded = read_at_once(recorded, streams)
    recorded = recorded.first(MOST_STEPS)
    inside = [count for count in slots if 1 <= count < recorded.experts]
    replay = Replay(recorded, inside or [1], "lrfu")
    warm = min(WARM_UP, recorded.steps // 2)
    routed = misses = 0
    for number in replay:
        if number + 1 == warm:
            routed, misses = replay.counts.routed.sum(), replay.counts.misses.sum(axis=1)
    routed = replay.counts.routed.sum() - routed
    rates = (replay.counts.misses.sum(axis=1) - misses) / max(1, routed)
    found = dict(zip(inside, rates.tolist()))
    layer_steps = max(1, (recorded.steps - warm) * recorded.layers)
    return float(routed / layer_steps), [found.get(count, float(count == 0)) for count in slots]


def read_at_once(recorded: Trace, streams: int) -> Trace:
    """A trace of one token a step as `streams` sequences that are decoded together, each begun at
    its own place, evenly apart. Of a long one not all steps."""
    import numpy as np

    from ..trace import Trace

    tokens = len(recorded.ids)
    most = max(1, MOST_IDS // (streams * recorded.layers * recorded.top_k))
    count = min(tokens, MOST_STEPS, most)
    places = np.arange(count)[:, None] + np.arange(streams) * tokens // streams
    order = (places % tokens).ravel()
    steps = np.repeat(np.arange(count), streams)
    return Trace(recorded.ids[order], recorded.seq[order], steps, recorded.meta)


def evenly_routed(experts: int, top_k: int, streams: int) -> float:
    """Experts that `streams` tokens route to where each chooses evenly and by itself."""
    return experts * (1 - (1 - top_k / experts) ** streams)


def _between(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Straight lines between points; beyond the ends the value at the end."""
    if place <= places[0] or len(places) == 1:
        return values[0]
    if place >= places[-1]:
        return values[-1]
    right = bisect_right(places, place)
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
