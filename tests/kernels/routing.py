"""Routing that differs in what a replacement policy can learn from it, and expert maps.

Each kind is a generator of int64 `[tokens, top_k]` arrays: expert ids of one layer-step each.
Each placement gives an expert map: int32 `[ids]`, the expert of one rank that each id names.
"""

from collections.abc import Iterator

import numpy as np

Steps = Iterator[np.ndarray]


def _top_k(experts: int) -> int:
    return max(1, min(8, experts // 8))


def _tokens(generator: np.random.Generator, wide: int) -> int:
    """Mostly decode, at times a step wide enough to name most experts."""
    return int(generator.integers(1, 4) if generator.random() < 0.8 else wide)


def _skewed_token(generator: np.random.Generator, experts: int) -> np.ndarray:
    weights = 1 / np.arange(1, experts + 1)
    return generator.choice(experts, _top_k(experts), replace=False, p=weights / weights.sum())


def random(generator: np.random.Generator, experts: int) -> Steps:
    """Any ids, repeats within a token included, some of them not valid."""
    while True:
        shape = (_tokens(generator, experts), int(generator.integers(1, 9)))
        yield generator.integers(-1, experts + 1, shape)


def skewed(generator: np.random.Generator, experts: int) -> Steps:
    """A few experts take most tokens."""
    while True:
        tokens = _tokens(generator, max(1, experts // 4))
        yield np.stack([_skewed_token(generator, experts) for _ in range(tokens)])


def repeated(generator: np.random.Generator, experts: int) -> Steps:
    """Three sets of experts in turn, for ever."""
    sets = [generator.permutation(experts)[None, : 2 * _top_k(experts)] for _ in range(3)]
    while True:
        yield from sets


def prompt_changing(generator: np.random.Generator, experts: int) -> Steps:
    """Skewed, but who is popular changes every twelve steps."""
    while True:
        names = generator.permutation(experts)
        for _ in range(12):
            yield names[_skewed_token(generator, experts)][None]


def independent(generator: np.random.Generator, experts: int) -> Steps:
    """Each token's experts by lot: the past says nothing."""
    while True:
        tokens = _tokens(generator, experts)
        lots = [generator.permutation(experts)[: _top_k(experts)] for _ in range(tokens)]
        yield np.stack(lots)


KINDS = {
    "random": random,
    "skewed": skewed,
    "repeated": repeated,
    "prompt_changing": prompt_changing,
    "independent": independent,
}


def linear(generator: np.random.Generator, experts: int) -> np.ndarray:
    """One rank of three, each with a run of ids; the last has one expert fewer."""
    first = experts * int(generator.integers(0, 2))
    placement = np.full(3 * experts - 1, -1, np.int32)
    placement[first : first + experts] = np.arange(experts)
    return placement


def round_robin(generator: np.random.Generator, experts: int) -> np.ndarray:
    """One rank of two that take the ids in turn."""
    placement = np.full(2 * experts, -1, np.int32)
    placement[generator.integers(0, 2) :: 2] = np.arange(experts)
    return placement


def scattered(generator: np.random.Generator, experts: int) -> np.ndarray:
    """The rank's experts in any order among ids of others, for which any number that is no
    expert stands."""
    strangers = generator.choice([-1, -(2**31), experts, 2**31 - 1], 2 * experts + 1)
    return generator.permutation(np.append(strangers, np.arange(experts))).astype(np.int32)


PLACEMENTS = {"linear": linear, "round_robin": round_robin, "scattered": scattered}
