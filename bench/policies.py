"""Candidates for a better policy, counted against lrfu on the recorded traces.

python -m bench.policies [TRACE...]

Each is a score for every expert from the past of its own layer. `Transitions` and `Predictor` keep
`experts * experts` numbers a layer besides, and `Admitting` is a change of the cache's own rules.
docs/policies.md has the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expert_cache_shim import trace
from expert_cache_shim.policy import LRFU_GAIN, decay_parameter
from expert_cache_shim.trace_policies import Cache, Lrfu, Lru, Rule
from expert_cache_shim.trace_replay import busy_steps

DATA = Path(__file__).with_name("data")
DIVISORS = (8, 4, 2)  # of the experts, for the number of slots
HALF_LIVES = (4, 8, 12, 16, 20, 24, 32, 48, 64, 128)


def _multiplier(half_life: float) -> int:
    return decay_parameter("lrfu", half_life)


class TwoHalfLives(Lru):
    """The sum of two scores, the faster one with a weight."""

    def __init__(self, *shape, fast: float, slow: float, weight: int) -> None:
        super().__init__(*shape)
        self._weight = weight
        self._parts = Lrfu(*shape, _multiplier(fast)), Lrfu(*shape, _multiplier(slow))

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        super().route(step, routed, cache)
        fast, slow = self._parts
        for part in self._parts:
            part.route(step, routed, cache)
        self.score = fast.score * np.uint32(self._weight) + slow.score


class Capped(Lrfu):
    """A score that many uses in a row cannot raise further."""

    def __init__(self, *shape, half_life: float, cap: float) -> None:
        super().__init__(*shape, _multiplier(half_life))
        self._cap = np.uint32(cap * LRFU_GAIN)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        super().route(step, routed, cache)
        np.minimum(self.score, self._cap, out=self.score)


class LruK(Lru):
    """The step of the k-th last use (O'Neil et al., SIGMOD 1993)."""

    def __init__(self, *shape, uses: int) -> None:
        super().__init__(*shape)
        self._steps = np.zeros((uses, *self.score.shape[1:]), np.uint32)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        super().route(step, routed, cache)
        self._steps[1:, routed] = self._steps[:-1, routed]
        self._steps[0, routed] = step
        self.score[0] = self._steps[-1]


class Window(Lru):
    """Uses in the last steps, as a mask of bits would have them."""

    def __init__(self, *shape, steps: int) -> None:
        super().__init__(*shape)
        self._ring = np.zeros((steps, *self.score.shape[1:]), bool)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        super().route(step, routed, cache)
        oldest = self._ring[step % len(self._ring)]
        self.score[0] += routed
        self.score[0] -= oldest
        oldest[:] = routed


class Transitions(Lrfu):
    """lrfu, and how often an expert followed those of the present step: `experts * experts`
    counts a layer."""

    def __init__(self, *shape, half_life: float, weight: float) -> None:
        super().__init__(*shape, _multiplier(half_life))
        self._own = self.score
        self._weight = weight * LRFU_GAIN
        layers, experts = self.score.shape[1:]
        self._followed = np.zeros((layers, experts, experts), np.float32)
        self._times = np.ones((layers, experts), np.float32)
        self._before = np.zeros((layers, experts), bool)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        self.score = self._own
        super().route(step, routed, cache)
        layers, experts = np.nonzero(self._before)
        self._followed[layers, experts] += routed[layers]
        self._times[layers, experts] += 1
        self._before = routed.copy()
        likely = (routed / self._times)[:, None] @ self._followed
        self.score = self._own + (self._weight * likely).astype(np.uint32)[None, :, 0]


class Predictor(Lrfu):
    """lrfu, and a linear prediction of the next step from the last three, learnt as it goes
    (normalised least mean squares): `experts * experts` weights a layer."""

    def __init__(self, *shape, half_life: float, weight: float, rate: float) -> None:
        super().__init__(*shape, _multiplier(half_life))
        self._own = self.score
        self._weight, self._rate = weight * LRFU_GAIN, rate
        layers, experts = self.score.shape[1:]
        self._weights = np.zeros((layers, experts, experts), np.float32)
        self._lately = np.zeros((3, layers, experts), np.float32)
        self._input = np.zeros((layers, experts, 1), np.float32)
        self._predicted = np.zeros((layers, experts), np.float32)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        self.score = self._own
        super().route(step, routed, cache)
        power = (self._input**2).sum(axis=(1, 2), keepdims=True) + 1e-6
        error = self._rate * (routed - self._predicted)[:, :, None] / power
        self._weights += error * self._input.transpose(0, 2, 1)
        self._lately = np.stack([routed.astype(np.float32), *(self._lately[:2] * np.float32(0.7))])
        total = self._lately.sum(axis=0)
        self._input = (total / total.sum(axis=1, keepdims=True))[:, :, None]
        self._predicted = (self._weights @ self._input)[:, :, 0]
        extra = self._weight * np.maximum(self._predicted, 0)
        self.score = self._own + extra.astype(np.uint32)[None]


class Admitting(Cache):
    """A miss whose score is below `share` of its victim's gets no slot: it goes to an overflow
    row, and the victim stays."""

    share = 0.0

    def _fill(self, admitted: np.ndarray, count: np.ndarray, evictable: np.ndarray) -> None:
        evictions = count - np.minimum(self._sizes - self._filled, count)
        (sizes, layers, victims), _ = self.first_victims(evictable, evictions)
        lowest = np.zeros(count.shape, np.uint32)  # of each cache's victims, the best to keep
        np.maximum.at(lowest, (sizes, layers), self._rule.score[0, layers, victims])
        refused = admitted & (self._rule.score < self.share * lowest[:, :, None])
        refused &= (evictions > 0)[:, :, None]
        admitted &= ~refused
        count -= np.count_nonzero(refused, axis=2)
        self.overflow += np.count_nonzero(refused, axis=2)
        super()._fill(admitted, count, evictable)


@dataclass(frozen=True)
class Candidate:
    name: str
    rule: Callable[..., Rule]
    options: dict
    admission: float = 0.0

    def misses(self, found: trace.Trace) -> np.ndarray:
        """int64 `[sizes, layers]`."""
        sizes = np.array([found.experts // divisor for divisor in DIVISORS])
        shape = (sizes, found.layers, found.experts)
        cache = (Admitting if self.admission else Cache)(*shape, self.rule(*shape, **self.options))
        cache.share = self.admission
        for routed in busy_steps(found):
            cache.step(routed)
        return cache.misses


def candidates() -> Iterator[Candidate]:
    for half_life in HALF_LIVES:
        yield Candidate(f"lrfu {half_life}", Lrfu, {"decay": _multiplier(half_life)})
    for fast, slow, weight in ((4, 32, 1), (4, 32, 2), (8, 64, 4), (16, 128, 4)):
        options = {"fast": fast, "slow": slow, "weight": weight}
        yield Candidate(f"{weight} x lrfu {fast} + lrfu {slow}", TwoHalfLives, options)
    for cap in (2, 4, 8, 16):
        yield Candidate(f"lrfu 24, score up to {cap}", Capped, {"half_life": 24, "cap": cap})
    for uses in (2, 3, 4, 8):
        yield Candidate(f"lru-{uses}", LruK, {"uses": uses})
    for steps in (8, 16, 32, 64):
        yield Candidate(f"uses in the last {steps} steps", Window, {"steps": steps})
    for half_life, share in ((24, 0.25), (24, 0.5), (24, 0.75), (16, 0.5)):
        options = {"decay": _multiplier(half_life)}
        name = f"lrfu {half_life}, admitted from {share:.0%} of the victim"
        yield Candidate(name, Lrfu, options, share)
    options = {"half_life": 24, "cap": 12}
    yield Candidate("lrfu 24, score up to 12, admitted from 40%", Capped, options, 0.4)
    for weight, share in ((2, 0), (4, 0), (4, 0.4)):
        options = {"half_life": 24, "weight": weight}
        name = f"lrfu 24 + {weight} x transitions" + (", admitted from 40%" if share else "")
        yield Candidate(name, Transitions, options, share)
    for half_life, weight, rate in ((24, 96, 0.05), (16, 128, 0.05)):
        options = {"half_life": half_life, "weight": weight, "rate": rate}
        name = f"lrfu {half_life} + {weight} x predictor"
        yield Candidate(name, Predictor, options)
        yield Candidate(f"{name}, admitted from 40%", Predictor, options, 0.4)


def table(traces: dict[str, trace.Trace], chosen: list[Candidate]) -> Iterator[str]:
    """Misses more or less than lrfu's, in percent: each trace, all together, all at one size, and
    the worst of the traces and sizes."""
    lrfu = next(candidate for candidate in candidates() if candidate.name == "lrfu 24")
    base = {name: lrfu.misses(found) for name, found in traces.items()}
    columns = ["candidate", *traces, "all", *(f"E/{divisor}" for divisor in DIVISORS), "worst"]
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(['---'] * len(columns))} |"
    by_half_life: dict[str, list[np.ndarray]] = {name: [] for name in traces}
    for candidate in chosen:
        found = {name: candidate.misses(one) for name, one in traces.items()}
        yield _row(candidate.name, found, base)
        if candidate.rule is Lrfu and not candidate.admission:
            for name, misses in found.items():
                by_half_life[name].append(misses)
    if all(by_half_life.values()):
        best = {name: np.min(every, axis=0) for name, every in by_half_life.items()}
        yield _row("the best half-life of each layer and size, with hindsight", best, base)


def _row(name: str, found: dict[str, np.ndarray], base: dict[str, np.ndarray]) -> str:
    """found, base: int64 `[sizes, layers]` by trace."""
    ours, theirs = (np.stack([m.sum(axis=1) for m in side.values()]) for side in (found, base))
    shares = [
        *(ours.sum(axis=1) / theirs.sum(axis=1)), ours.sum() / theirs.sum(),
        *(ours.sum(axis=0) / theirs.sum(axis=0)), (ours / theirs).max(),
    ]  # fmt: skip
    return f"| {name} | {' | '.join(f'{100 * (share - 1):+.2f}' for share in shares)} |"


def main(names: list[str]) -> None:
    paths = [Path(name) for name in names] or sorted(DATA.glob("*.npz"))
    for line in table({path.stem: trace.load(path) for path in paths}, list(candidates())):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
