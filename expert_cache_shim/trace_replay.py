"""Counts what a cache would have missed on recorded routing.

All layers, and caches of all sizes, are stepped together as arrays. `policy.Reference` says the
same of one layer, field by field; the tests hold both and the kernels to the same misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from . import policy as policies
from .trace import Trace
from .trace_policies import RULES, Cache

OPTIMUM = "opt"
POLICIES = (*policies.CODES, OPTIMUM)


@dataclass(frozen=True)
class Counts:
    """What one policy comes to. misses, overflow: int64 `[sizes, layers]`, experts that were not
    resident, and those of them that found no slot; routed: int64 `[layers]`."""

    policy: str
    slots: tuple[int, ...]
    misses: np.ndarray
    overflow: np.ndarray
    routed: np.ndarray

    @property
    def miss_rates(self) -> np.ndarray:
        """float `[sizes]`: misses of all layers over routed experts of all layers."""
        return self.misses.sum(axis=1) / max(1, self.routed.sum())


class Replay:
    """A trace run through caches of one policy and of several sizes, all empty at the start.

    Iterating takes one forward pass at a time and yields its number, so that a caller can show
    progress; `counts` holds what was counted so far.
    """

    def __init__(
        self, trace: Trace, slots: Sequence[int], policy: str, decay: int | None = None
    ) -> None:
        """slots: sizes of the cache in experts a layer, each from 1 to `trace.experts - 1`.
        decay: as `policy.decay_parameter` gives it; unset: that of the policy's defaults.
        Raises ValueError for a size or a policy that is none."""
        bad = [size for size in slots if not 1 <= size < trace.experts]
        if bad:
            raise ValueError(f"{bad[0]} slots of {trace.experts} experts; it must be from 1 to "
                             f"{trace.experts - 1}")  # fmt: skip
        self._trace = trace
        shape = (np.array(slots), trace.layers, trace.experts)
        if policy == OPTIMUM:
            rule = RULES[policy](*shape, next_uses(trace))
        else:
            decay = policies.decay_parameter(policy) if decay is None else decay
            rule = RULES[policy](*shape, decay)
        self._cache = Cache(*shape, rule)
        self.counts = Counts(
            policy, tuple(slots), self._cache.misses, self._cache.overflow,
            np.zeros(trace.layers, np.int64),
        )  # fmt: skip

    def __iter__(self) -> Iterator[int]:
        for number, routed in enumerate(busy_steps(self._trace)):
            self.counts.routed[:] += np.count_nonzero(routed, axis=1)
            self._cache.step(routed)
            yield number

    def run(self) -> Counts:
        for _ in self:
            pass
        return self.counts


def busy_steps(trace: Trace) -> Iterator[np.ndarray]:
    """`trace.routed()` without the layer-steps that route to nobody: to a cache they are no
    steps. Layers do not depend on each other, so each goes on to its own next one."""
    idle = _idle(trace)
    if not idle.any():
        yield from trace.routed()
        return
    order = np.argsort(idle, axis=0, kind="stable")
    bounds = trace.bounds
    for steps in order[: (~idle).sum(axis=0).max()]:
        routed = np.zeros((trace.layers, trace.experts), bool)
        for layer, step in enumerate(steps):
            ids = trace.ids[bounds[step] : bounds[step + 1], layer]
            routed[layer, ids[ids < trace.experts]] = True
        yield routed


def _idle(trace: Trace) -> np.ndarray:
    """bool `[steps, layers]`."""
    nobody = (trace.ids >= trace.experts).all(axis=2)
    return np.logical_and.reduceat(nobody, trace.bounds[:-1], axis=0)


def next_uses(trace: Trace) -> Iterator[np.ndarray]:
    """For each of `busy_steps`, of each routed expert in order of layer and expert, the steps
    from the first one to that of its next use; the number of steps where there is none."""
    used = [np.flatnonzero(routed) for routed in busy_steps(trace)]
    lengths = [len(codes) for codes in used]
    codes = np.concatenate(used)
    times = np.repeat(np.arange(len(used)), lengths)
    order = np.argsort(codes, kind="stable")
    again = np.full(len(codes), len(used))
    same = codes[order[1:]] == codes[order[:-1]]
    again[order[:-1][same]] = times[order[1:][same]]
    return iter(np.split(again, np.cumsum(lengths)[:-1]))


def reuse_distances(trace: Trace) -> np.ndarray:
    """int64 `[experts + 1]`: entry `d` is how often an expert was routed after `d` other experts
    of its layer had been since its last time (the stack distance of Mattson et al., IBM Systems
    J. 9(2), 1970; those of one step count as none between each other). The last entry counts
    first times."""
    last = np.full((trace.layers, trace.experts), -1)
    found = np.zeros(trace.experts + 1, np.int64)
    for number, routed in enumerate(busy_steps(trace)):
        layers, experts = np.nonzero(routed)
        before = last[layers, experts]
        since = np.count_nonzero(last[layers] > before[:, None], axis=1)
        since[before < 0] = trace.experts
        found += np.bincount(since, minlength=trace.experts + 1)
        last[routed] = number
    return found


def usage(trace: Trace) -> np.ndarray:
    """float `[layers, experts]`: the share of a layer's steps that route to an expert."""
    used = np.zeros((trace.layers, trace.experts))
    for routed in trace.routed():
        used += routed
    return used / trace.steps


def busiest_share(trace: Trace) -> float:
    """The part of all routing that goes to the busiest quarter of each layer's experts."""
    by_layer = np.sort(usage(trace), axis=1)[:, ::-1]
    return float(by_layer[:, : max(1, trace.experts // 4)].sum() / max(by_layer.sum(), 1e-30))
