"""What replay counts is what the reference and the kernels count, to the miss."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from compared_layer import ComparedLayer
from guarded import Guarded

from expert_cache_shim import trace, trace_control
from expert_cache_shim.policy import CODES, COUNTERS, Reference
from expert_cache_shim.trace import NO_EXPERT, Trace
from expert_cache_shim.trace_replay import POLICIES, Replay, reuse_distances

DATA = Path(__file__).parents[1] / "bench" / "data"
TRACES = ("deepseek_v2_lite", "gpt_oss_120b", "gpt_oss_20b", "olmoe")
DIVISORS = (8, 4, 2)  # of the experts, for the number of slots


def load(name: str) -> Trace:
    return trace.load(DATA / f"{name}.npz")


def reference_counts(found: Trace, slots: int, policy: str, decay: int | None) -> np.ndarray:
    """[misses, overflow] of all layers: int64 `[layers, 2]`."""
    counts = []
    for layer in range(found.layers):
        cache = Reference(found.experts, slots, policy, decay)
        for start, end in itertools.pairwise(found.bounds):
            cache.step(found.ids[start:end, layer])
        counts.append([cache.counters["misses"], cache.counters["overflow"]])
    return np.array(counts)


def random_trace(seed: int) -> Trace:
    """Any number of experts, tokens in a step, tokens without experts, steps without tokens."""
    generator = np.random.default_rng(seed)
    experts, layers, tokens = int(generator.integers(2, 40)), 3, 60
    ids = generator.zipf(1.3, (tokens, layers, min(4, experts))) % experts
    ids[generator.random(ids.shape) < 0.1] = NO_EXPERT
    ids[generator.random((tokens, layers)) < 0.2] = NO_EXPERT
    step = np.sort(generator.integers(0, (tokens, 20, 6)[seed % 3], tokens))
    return Trace(ids.astype(np.uint16), np.zeros(tokens, np.int32), step, {"num_experts": experts})


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("seed", range(6))
def test_any_routing_is_counted_as_the_reference_counts_it(policy, seed):
    found = random_trace(seed)
    decay = 5 if policy == "lfu" else None
    sizes = sorted({1, max(1, found.experts // 4), max(1, found.experts // 2), found.experts - 1})
    counts = Replay(found, sizes, policy, decay).run()
    for index, slots in enumerate(sizes):
        expected = reference_counts(found, slots, policy, decay)
        assert counts.misses[index].tolist() == expected[:, 0].tolist()
        assert counts.overflow[index].tolist() == expected[:, 1].tolist()


def kernel_counts(found: Trace, layer: int, slots: int, policy: str, library) -> list[int]:
    """[misses, overflow] of one layer in the emulated kernel."""
    cache = ComparedLayer(library, found.experts, slots, policy)
    tokens = found.ids[:, layer].astype(np.int32)
    row_ids = Guarded((1, found.top_k), np.int32)
    for token in tokens:
        cache.set_ids(token[None], row_ids, "rows")
        library.manage(cache.args)
    return cache.counters.array[[COUNTERS.index(name) for name in ("misses", "overflow")]].tolist()


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("name", TRACES)
def test_kernels_and_replay_agree_on_every_trace(name, policy, host_library):
    """The first steps in all sizes. That the kernel was called is what its counters say."""
    found = load(name).first(100)
    sizes = [found.experts // divisor for divisor in DIVISORS]
    counts = Replay(found, sizes, policy).run()
    layer = found.layers // 2
    for index, slots in enumerate(sizes):
        expected = [counts.misses[index, layer], counts.overflow[index, layer]]
        assert kernel_counts(found, layer, slots, policy, host_library) == expected
        assert 0 < expected[0] < counts.routed[layer]


@pytest.mark.slow
@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("name", TRACES)
def test_kernels_and_replay_agree_on_whole_traces(name, policy, host_library):
    found = load(name)
    slots = found.experts // 4
    counts = Replay(found, [slots], policy).run()
    for layer in {0, found.layers - 1}:
        expected = [counts.misses[0, layer], counts.overflow[0, layer]]
        assert kernel_counts(found, layer, slots, policy, host_library) == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("name", TRACES)
def test_reference_and_replay_agree_in_every_layer(name, policy):
    found = load(name).first(200)
    slots = found.experts // 4
    counts = Replay(found, [slots], policy).run()
    expected = reference_counts(found, slots, policy, None)
    assert counts.misses[0].tolist() == expected[:, 0].tolist()


# Belady's optimum


def optimum_by_search(sets: list[set[int]], slots: int) -> int:
    """The fewest misses of any choice of victims, by trying all of them."""
    states = {frozenset(): 0}
    for routed in sets:
        after: dict[frozenset, int] = {}
        for resident, misses in states.items():
            others, cost = resident - routed, misses + len(routed - resident)
            for kept in itertools.combinations(others, min(slots - len(routed), len(others))):
                key = frozenset(kept) | routed
                after[key] = min(after.get(key, cost), cost)
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_victims_misses_less_than_the_optimum(seed):
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.permutation(7)[:2] for _ in range(40)])[:, None].astype(np.uint16)
    found = Trace(ids, np.zeros(40, np.int32), np.arange(40), {"num_experts": 7})
    for slots in (2, 3, 5):
        expected = optimum_by_search([set(token) for token in ids[:, 0].tolist()], slots)
        assert Replay(found, [slots], "opt").run().misses.sum() == expected


@pytest.mark.parametrize("name", TRACES)
def test_no_policy_beats_the_optimum(name):
    found = load(name).first(300)
    sizes = [found.experts // divisor for divisor in DIVISORS]
    best = Replay(found, sizes, "opt").run().misses
    for policy in CODES:
        assert (Replay(found, sizes, policy).run().misses >= best).all(), policy


# Controls


@pytest.mark.parametrize("policy", CODES)
def test_no_policy_looks_good_on_independent_routing(policy):
    """Where the past says nothing, every policy hits `slots / experts` of the time, beyond a cold
    start."""
    control = trace_control.uniform(load("olmoe"))
    sizes = [16, 32]
    rates = Replay(control, sizes, policy).run().miss_rates
    assert rates == pytest.approx([1 - size / 64 for size in sizes], abs=0.01)


def test_the_control_would_show_a_policy_that_looks_ahead():
    control = trace_control.uniform(load("olmoe"))
    assert Replay(control, [16, 32], "opt").run().miss_rates.tolist() < [0.6, 0.4]


def test_controls_keep_what_they_say_they_keep():
    found = load("gpt_oss_20b").first(500)
    mixed, drawn = trace_control.shuffled(found), trace_control.uniform(found)
    assert mixed.ids.shape == drawn.ids.shape == found.ids.shape
    for layer in (0, 23):
        tokens = sorted(map(tuple, found.ids[:, layer].tolist()))
        assert sorted(map(tuple, mixed.ids[:, layer].tolist())) == tokens
        assert (mixed.ids[:, layer] != found.ids[:, layer]).any()
    assert (np.diff(np.sort(drawn.ids, axis=-1).astype(int), axis=-1) > 0).all()
    used = np.bincount(drawn.ids.ravel(), minlength=32)
    assert used.min() > 0.9 * used.mean() and used.max() < 1.1 * used.mean()


# The rest


def test_reuse_distances_of_a_sequence_worked_out_by_hand():
    ids = np.array([0, 1, 2, 0, 0, 2], np.uint16)[:, None, None]
    found = Trace(ids, np.zeros(6, np.int32), np.arange(6), {"num_experts": 4})
    # First times: 0, 1, 2. Then 0 after {1, 2}, 0 after nothing, 2 after {0}.
    assert reuse_distances(found).tolist() == [1, 1, 1, 0, 3]


def test_lru_misses_what_reuse_distances_say():
    """Mattson's inclusion: one expert a step misses in LRU where its distance is the size or
    more."""
    ids = (np.random.default_rng(0).zipf(1.2, 3000) % 32).astype(np.uint16)[:, None, None]
    found = Trace(ids, np.zeros(3000, np.int32), np.arange(3000), {"num_experts": 32})
    distances = reuse_distances(found)
    sizes = [1, 4, 9, 31]
    misses = Replay(found, sizes, "lru").run().misses[:, 0]
    assert misses.tolist() == [distances[size:].sum() for size in sizes]


@pytest.mark.parametrize("slots", [0, 32])
def test_a_size_that_is_no_cache_is_refused(slots):
    with pytest.raises(ValueError, match=f"{slots} slots of 32 experts; it must be from 1 to 31"):
        Replay(load("gpt_oss_20b"), [slots], "lru")


def test_every_policy_has_a_replay():
    assert set(POLICIES) == {*CODES, "opt"}
