"""The policies of docs/kernels.md, and Belady's, over all layers and several sizes at once.

Arrays are `[sizes, layers, experts]`, or `[1, layers, experts]` where nothing depends on what is
resident.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .policy import LRFU_GAIN, MAX_AGE, UINT32

Where = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Indices of sizes, layers and experts."""

_SCORE_SHIFT, _AGE_SHIFT = np.uint64(30), np.uint64(10)
_LAST = np.uint64(2**64 - 1)


class Rule:
    """What a policy knows of each expert. The resident of the lowest `score` gives way, of those
    the one with the least `last`. Where slots run short the miss of the highest score comes
    first."""

    by_size = False
    """Whether score and last depend on what is resident."""

    def __init__(self, sizes: np.ndarray, layers: int, experts: int, decay: int = 0) -> None:
        shape = (len(sizes) if self.by_size else 1, layers, experts)
        self.decay = decay
        self.score = np.zeros(shape, np.uint32)
        self.last = np.zeros(shape, np.int64)

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        """Before any eviction. routed: bool `[layers, experts]`; `cache.hit` says which were
        resident."""
        raise NotImplementedError

    def admit(self, step: int, admitted: Where, evicted: Where) -> None:
        """After the evictions."""


class Lru(Rule):
    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        self.last[0][routed] = step


class Lrfu(Lru):
    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        super().route(step, routed, cache)
        self.score[:] = self.score.astype(np.uint64) * np.uint64(self.decay) >> np.uint64(16)
        self.score[0][routed] += np.uint32(LRFU_GAIN)


class Lfu(Rule):
    by_size = True

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        if step % self.decay == 0:
            self.score >>= 1
        self.score += cache.hit
        self.last[:, routed] = step

    def admit(self, step: int, admitted: Where, evicted: Where) -> None:
        self.score[evicted] = 0
        self.score[admitted] = 1


class Fifo(Rule):
    by_size = True

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        """A hit changes nothing."""

    def admit(self, step: int, admitted: Where, evicted: Where) -> None:
        self.last[admitted] = step


class Slru(Rule):
    by_size = True

    def __init__(self, sizes: np.ndarray, layers: int, experts: int, decay: int = 0) -> None:
        super().__init__(sizes, layers, experts)
        self._protected = (4 * sizes // 5)[:, None]

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        self.score[cache.hit] = 1
        self.last[cache.hit] = step
        protected = cache.resident & (self.score == 1)
        surplus = np.count_nonzero(protected, axis=2) - self._protected
        demoted, _ = cache.first_victims(protected, surplus)
        self.score[demoted] = 0
        self.last[demoted] = step

    def admit(self, step: int, admitted: Where, evicted: Where) -> None:
        self.score[evicted] = 0
        self.score[admitted] = 0
        self.last[admitted] = step


class Optimum(Rule):
    """Belady's: the expert whose next use is farthest gives way (IBM Systems J. 5(2), 1966),
    under the rules that hold for all: a miss that finds a slot is admitted, and no expert of the
    present step gives way."""

    def __init__(
        self, sizes: np.ndarray, layers: int, experts: int, next_uses: Iterator[np.ndarray]
    ) -> None:
        super().__init__(sizes, layers, experts)
        self._next_uses = next_uses

    def route(self, step: int, routed: np.ndarray, cache: Cache) -> None:
        self.score[0][routed] = UINT32 - 1 - next(self._next_uses)


RULES: dict[str, type[Rule]] = {
    "lrfu": Lrfu, "lru": Lru, "lfu": Lfu, "fifo": Fifo, "slru": Slru, "opt": Optimum,
}  # fmt: skip


class Cache:
    """Which experts lie in which slots, and what was missed.

    slot: int64 `[sizes, layers, experts]`, or -1. hit, resident: bool, of the same shape, as the
    present step found them. misses, overflow: int64 `[sizes, layers]`.
    """

    def __init__(self, sizes: np.ndarray, layers: int, experts: int, rule: Rule) -> None:
        self._rule = rule
        self._sizes = sizes[:, None]
        self._step = 0
        self.slot = np.full((len(sizes), layers, experts), -1)
        self.misses = np.zeros((len(sizes), layers), np.int64)
        self.overflow = np.zeros((len(sizes), layers), np.int64)
        self._filled = np.zeros((len(sizes), layers), np.int64)

    def step(self, routed: np.ndarray) -> None:
        """One layer-step of every layer. routed: bool `[layers, experts]`."""
        self._step += 1
        self.resident = self.slot >= 0
        self.hit = self.resident & routed
        missed = routed & ~self.resident
        self._rule.route(self._step, routed, self)
        count = np.count_nonzero(missed, axis=2)
        self.misses += count
        room = self._sizes - np.count_nonzero(self.hit, axis=2)
        if (count > room).any():
            self._refuse(missed, count, room)
        if count.any():
            self._fill(missed, count, self.resident & ~routed)

    def _refuse(self, missed: np.ndarray, count: np.ndarray, room: np.ndarray) -> None:
        """Takes out what finds no slot, in place: all but the best by score, then number."""
        sizes, layers = np.nonzero(count > room)
        score = self._rule.score[sizes if self._rule.by_size else 0, layers].astype(np.int64)
        order = np.argsort(np.where(missed[sizes, layers], -score, 1), axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(order.shape[1])[None], axis=1)
        missed[sizes, layers] &= place < room[sizes, layers][:, None]
        self.overflow += np.maximum(count - room, 0)
        np.minimum(count, room, out=count)

    def _fill(self, admitted: np.ndarray, count: np.ndarray, evictable: np.ndarray) -> None:
        """The i-th admitted miss, by number, takes the i-th slot: the empty ones, which are
        always the last, then those of the victims in their order."""
        empty = np.minimum(self._sizes - self._filled, count)
        victims, nth = self.first_victims(evictable, count - empty)
        slots = self._filled[:, :, None] + np.arange(count.max())
        slots[(*victims[:2], empty[victims[:2]] + nth)] = self.slot[victims]
        self.slot[victims] = -1
        where = np.nonzero(admitted)
        of_row = count.ravel()
        first = np.repeat(np.cumsum(of_row) - of_row, of_row)
        self.slot[where] = slots[(*where[:2], np.arange(len(first)) - first)]
        self._filled += empty
        self._rule.admit(self._step, where, victims)

    def first_victims(self, evictable: np.ndarray, count: np.ndarray) -> tuple[Where, np.ndarray]:
        """The first `count` experts of each cache in victim order, of those that are evictable,
        and for each its place in that order. count: `[sizes, layers]`; what is below 1 is none."""
        found = [(np.empty(0, np.intp),) * 4]
        sizes, layers = np.nonzero(count > 0)
        key = self._victim_keys(sizes, layers)
        key[~evictable[sizes, layers]] = _LAST
        count = count[sizes, layers]
        nth = 0
        while len(sizes):
            expert = key.argmin(axis=1)
            found.append((sizes, layers, expert, np.full(len(sizes), nth)))
            key[np.arange(len(sizes)), expert] = _LAST
            nth += 1
            more = count > nth
            sizes, layers, key, count = sizes[more], layers[more], key[more], count[more]
        size, layer, expert, nth = (np.concatenate(part) for part in zip(*found))
        return (size, layer, expert), nth

    def _victim_keys(self, sizes: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """uint64 `[rows, experts]`: lower score, then greater age, then lower slot, as one number
        (the bits are those of hip/manage_order.h)."""
        owner = sizes if self._rule.by_size else np.zeros_like(sizes)
        youth = np.maximum(MAX_AGE - self._step + self._rule.last[owner, layers], 0)
        key = self._rule.score[owner, layers].astype(np.uint64) << _SCORE_SHIFT
        key |= youth.astype(np.uint64) << _AGE_SHIFT
        key |= self.slot[sizes, layers].astype(np.uint64) & np.uint64(1023)
        return key
