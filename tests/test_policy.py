"""The numpy reference of manage: examples worked by hand, and properties of any routing."""

from pathlib import Path

import numpy as np
import pytest

from expert_cache_shim.policy import CODES, COUNTERS, Reference, decay_parameter

TRACES = np.load(Path(__file__).parent / "data" / "routing_slice.npz")


def after(reference, *steps, mode="rows"):
    """Runs steps, each a list of expert ids, and returns the last one's row ids as a list."""
    for ids in steps:
        rows = reference.step(np.array(ids, np.int32), mode)
    return rows.tolist()


def residents(reference):
    return reference.expert_at[: reference.slots].tolist()


# Slots and overflow rows


def test_misses_fill_empty_slots_in_expert_order():
    cache = Reference(4, 2, "lru")
    assert after(cache, [2, 0]) == [1, 0]
    assert residents(cache) == [0, 2]
    assert cache.row_of.tolist() == [0, -1, 1, -1]
    assert cache.copies.tolist() == [[0, -1, 0, -1], [2, -1, 1, -1]]


def test_a_hit_copies_nothing():
    cache = Reference(4, 2, "lru")
    assert after(cache, [2, 0], [0, 2]) == [0, 1]
    assert cache.copies.shape == (0, 4)


def test_an_empty_slot_goes_before_any_victim():
    cache = Reference(5, 3, "lru")
    after(cache, [0, 1], [2])
    assert residents(cache) == [0, 1, 2]
    assert cache.counters["evictions"] == 0


def test_a_routed_resident_is_no_victim_and_the_surplus_overflows():
    cache = Reference(4, 2, "lru")
    assert after(cache, [0, 1], [0, 2, 3]) == [0, 1, 2]
    assert cache.expert_at.tolist() == [0, 2, 3, -1]
    assert cache.copies.tolist() == [[2, -1, 1, -1], [3, -1, 2, -1]]
    assert cache.counters["overflow"] == 1


def test_overflow_rows_are_forgotten_by_the_next_step():
    cache = Reference(4, 1, "lru")
    after(cache, [0, 1, 2, 3])
    assert cache.expert_at.tolist() == [0, 1, 2, 3]
    after(cache, [0])
    assert cache.expert_at.tolist() == [0, -1, -1, -1]
    assert cache.row_of.tolist() == [0, -1, -1, -1]


def test_all_experts_at_once_need_exactly_every_row():
    cache = Reference(8, 3, "lrfu")
    assert sorted(after(cache, [5, 7], list(range(8)))) == list(range(8))


# Victim order


def test_lru_evicts_the_least_recently_routed():
    cache = Reference(4, 2, "lru")
    after(cache, [0], [1], [0], [2])
    assert residents(cache) == [0, 2]


def test_equal_scores_and_ages_evict_the_lowest_slot():
    cache = Reference(5, 2, "lru")
    after(cache, [3, 1], [0])
    assert residents(cache) == [0, 3]


def test_fifo_evicts_the_first_admitted_whatever_was_hit():
    cache = Reference(4, 2, "fifo")
    after(cache, [0], [1], [0], [0], [2])
    assert residents(cache) == [2, 1]
    assert cache.last.tolist() == [1, 2, 5, 0]


def test_fifo_keeps_no_date_for_an_expert_that_overflowed():
    cache = Reference(4, 1, "fifo")
    after(cache, [0, 1, 2])
    assert cache.last.tolist() == [1, 0, 0, 0]


def test_lrfu_weighs_frequency_against_recency():
    often_then_once = [[0], [0], [0], [1], [2]]
    lrfu, lru = Reference(4, 2, "lrfu"), Reference(4, 2, "lru")
    after(lrfu, *often_then_once)
    after(lru, *often_then_once)
    assert residents(lrfu) == [0, 2]
    assert residents(lru) == [2, 1]


def test_lrfu_scores_halve_in_one_half_life():
    cache = Reference(4, 1, "lrfu", decay_parameter("lrfu", half_life=1))
    after(cache, [0])
    assert cache.score.tolist() == [65536, 0, 0, 0]
    after(cache, [1])
    assert cache.score.tolist() == [32768, 65536, 0, 0]
    after(cache, [1])
    assert cache.score.tolist() == [16384, 98304, 0, 0]


def test_lrfu_scores_round_down():
    cache = Reference(4, 1, "lrfu", decay=65535)
    cache.score[:] = [1, 65536, 65537, 0]
    after(cache, [3])
    assert cache.score.tolist() == [0, 65535, 65535, 65536]


def test_the_highest_lrfu_score_fits_32_bits():
    cache = Reference(2, 1, "lrfu", decay=65535)
    cache.score[0] = 2**32 - 1
    after(cache, [0], [0])
    assert cache.score[0] == 2**32 - 1


def test_lfu_evicts_the_least_hit_then_the_oldest():
    cache = Reference(5, 3, "lfu", decay=64)
    after(cache, [0], [1], [2], [0], [3])
    assert residents(cache) == [0, 3, 2]
    assert cache.score.tolist() == [2, 0, 1, 1, 0]


def test_lfu_halves_before_it_counts():
    cache = Reference(4, 2, "lfu", decay=4)
    after(cache, [0, 1], [0], [0])
    assert cache.score.tolist() == [3, 1, 0, 0]
    after(cache, [0])
    assert cache.score.tolist() == [2, 0, 0, 0]


def test_lfu_counts_saturate():
    cache = Reference(4, 2, "lfu", decay=64)
    after(cache, [0])
    cache.score[0] = 2**32 - 2
    after(cache, [0], [0])
    assert cache.score[0] == 2**32 - 1


def test_lfu_forgets_the_count_of_an_evicted_expert():
    cache = Reference(4, 1, "lfu", decay=64)
    after(cache, [0], [0], [0], [1], [0])
    assert cache.score.tolist() == [1, 0, 0, 0]


def test_slru_protects_what_was_hit_once_from_a_scan():
    cache = Reference(16, 5, "slru")
    after(cache, [0], [0], *([expert] for expert in range(1, 16)))
    assert cache.row_of[0] == 0
    assert cache.score.tolist() == [1] + [0] * 15


def test_slru_protects_at_most_four_slots_of_five():
    cache = Reference(8, 5, "slru")
    after(cache, [0], [1], [2], [3], [4], [4, 3, 2, 1, 0])
    assert cache.score.tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    after(cache, [5])
    assert residents(cache) == [5, 1, 2, 3, 4]


def test_slru_demotes_the_oldest_and_dates_it_anew():
    cache = Reference(8, 3, "slru")  # two of three slots may be protected
    after(cache, [0, 1, 2], [1], [0], [2])
    assert cache.score.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert cache.last.tolist() == [3, 4, 4, 0, 0, 0, 0, 0]


def test_slru_with_one_slot_protects_nobody():
    cache = Reference(4, 1, "slru")
    after(cache, [0], [0])
    assert cache.score.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lrfu"])
def test_ages_beyond_the_clamp_are_equal(policy):
    cache = Reference(4, 2, policy)
    after(cache, [0, 1])
    cache.score[:] = 0
    cache.step_number = 2**21
    cache.last[:2] = [2**20 + 2, 5]  # ages 2**20 - 1, the greatest there is, and far beyond
    after(cache, [2])
    assert residents(cache) == [2, 1]


def test_ages_just_below_the_clamp_differ():
    cache = Reference(4, 2, "lru")
    after(cache, [0, 1])
    cache.step_number = 2**21
    cache.last[:2] = [2**20 + 3, 2**20 + 2]  # ages 2**20 - 2 and 2**20 - 1
    after(cache, [2])
    assert residents(cache) == [0, 2]


def test_ages_are_right_across_the_wrap_of_step():
    cache = Reference(4, 2, "lru")
    cache.step_number = 2**32 - 2
    after(cache, [0], [1], [2])
    assert cache.step_number == 1
    assert cache.last.tolist() == [2**32 - 1, 0, 1, 0]
    assert residents(cache) == [2, 1]


# Admission


def test_the_best_scores_are_admitted():
    cache = Reference(6, 1, "lrfu")
    after(cache, [5], [5], [1], [2])
    assert after(cache, [1, 5]) == [1, 0]
    assert cache.copies.tolist() == [[1, -1, 1, -1], [5, -1, 0, -1]]


def test_equal_scores_admit_the_lowest_experts():
    cache = Reference(6, 2, "lrfu")
    assert after(cache, [5, 3, 4, 1]) == [3, 1, 2, 0]


def test_admitted_experts_take_slots_in_expert_order_not_by_score():
    cache = Reference(6, 2, "lrfu")
    after(cache, [5], [5], [4], [0, 1])
    after(cache, [3, 4, 5])
    assert residents(cache) == [4, 5]


# Modes


def test_scratch_copies_every_routed_expert_to_its_own_row():
    cache = Reference(6, 2, "lru")
    after(cache, [0, 4])
    assert after(cache, [4, 1, 3], mode="scratch") == [4, 1, 3]
    assert cache.copies.tolist() == [[1, -1, 1, 0], [3, -1, 3, -1], [4, 1, 4, -1]]
    assert residents(cache) == [1, 4]
    assert cache.expert_at[2:].tolist() == [-1] * 4
    assert cache.row_of.tolist() == [-1, 0, -1, -1, 1, -1]


def test_scratch_counts_and_scores_as_rows_does():
    rows, scratch = Reference(8, 3, "lrfu"), Reference(8, 3, "lrfu")
    steps = [[0, 1], [2, 3, 4, 5], [0, 5], [7, 6, 5, 4, 3, 2, 1, 0], [1]]
    after(rows, *steps)
    after(scratch, *steps, mode="scratch")
    assert rows.counters == scratch.counters
    assert rows.score.tolist() == scratch.score.tolist()
    assert residents(rows) == residents(scratch)


def test_skip_forgets_overflow_rows_and_counts():
    cache = Reference(4, 1, "lru")
    after(cache, [0, 1, 2])
    before = cache.step_number, cache.score.tolist(), cache.last.tolist()
    assert cache.step(np.array([3]), "skip") is None
    assert (cache.step_number, cache.score.tolist(), cache.last.tolist()) == before
    assert cache.expert_at.tolist() == [0, -1, -1, -1]
    assert cache.copies.shape == (0, 4)
    assert cache.counters["read_through"] == 1


def test_a_step_without_a_valid_id_is_idle():
    cache = Reference(4, 1, "lru")
    after(cache, [0, 1])
    assert after(cache, [-1, 4, 99]) == [-1, 4, 99]
    assert cache.step_number == 1
    assert cache.copies.shape == (0, 4)
    assert cache.expert_at.tolist() == [0, -1, -1, -1]
    assert cache.counters["idle"] == 1


# Ids


def test_ids_that_name_no_expert_pass_unchanged():
    cache = Reference(4, 2, "lru")
    ids = np.array([[3, -1], [2**32 + 1, -(2**62)], [4, 3]], np.int64)
    rows = cache.step(ids)
    assert rows.tolist() == [[0, -1], [2**32 + 1, -(2**62)], [4, 0]]
    assert cache.counters["ids"] == 2
    assert cache.counters["misses"] == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_row_ids_keep_shape_and_type_and_ids_stay(dtype):
    cache = Reference(4, 1, "lru")
    ids = np.array([[[2, 3]], [[3, 1]]], dtype)
    before = ids.copy()
    rows = cache.step(ids)
    assert rows.dtype == dtype and rows.shape == ids.shape
    assert (ids == before).all()


def test_the_largest_unsigned_id_is_not_valid():
    cache = Reference(4, 1, "lru")
    assert cache.step(np.array([2**32 - 1, 1], np.uint32)).tolist() == [2**32 - 1, 0]


def test_counters_of_two_steps():
    cache = Reference(8, 2, "lru")
    after(cache, [0, 0, 1], [1, 2, 3, 3, -1])
    expected = dict(steps=2, hits=1, misses=4, overflow=1, evictions=1, ids=7)
    assert cache.counters == {**dict.fromkeys(COUNTERS, 0), **expected}


# Any routing


def skewed_steps(experts, count, seed):
    """Steps of one to 3 * experts ids, some of them not valid, skewed to a few experts."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        size = generator.integers(1, 3 * experts) if generator.random() < 0.2 else 4
        yield (generator.pareto(1.0, size) * 2).astype(np.int64) - (generator.random(size) < 0.05)


@pytest.mark.parametrize("policy", CODES)
@pytest.mark.parametrize("experts, slots", [(2, 1), (16, 1), (16, 5), (16, 15), (64, 16)])
def test_the_state_stays_consistent(policy, experts, slots):
    cache = Reference(experts, slots, policy)
    for ids in skewed_steps(experts, 150, seed=slots):
        before = cache.row_of.copy()
        rows = cache.step(ids)
        valid = (ids >= 0) & (ids < experts)
        routed = np.unique(ids[valid])
        assert (cache.expert_at[rows[valid]] == ids[valid]).all()
        assert (rows[~valid] == ids[~valid]).all()
        held = np.flatnonzero(cache.expert_at >= 0)
        assert (cache.row_of[cache.expert_at[held]] == held).all()
        assert np.count_nonzero(cache.row_of >= 0) == len(held)
        hits = routed[(before[routed] >= 0) & (before[routed] < slots)]
        assert (cache.row_of[hits] == before[hits]).all()
        assert cache.copies[:, 0].tolist() == np.setdiff1d(routed, hits).tolist()


@pytest.mark.parametrize("policy", CODES)
def test_no_policy_beats_chance_on_independent_routing(policy):
    """The null control: where the past says nothing, every policy hits S / E of the time."""
    generator = np.random.default_rng(7)
    cache = Reference(32, 8, policy)
    for _ in range(4000):
        cache.step(generator.integers(0, 32, 1))
    assert cache.counters["hits"] / cache.counters["ids"] == pytest.approx(8 / 32, abs=0.02)


MISSES_ON_SLICES = {
    "gpt_oss_20b": {"lrfu": 3290, "lru": 3778, "lfu": 3691, "fifo": 3981, "slru": 3507},
    "gpt_oss_120b": {"lrfu": 1509, "lru": 1560, "lfu": 1774, "fifo": 1787, "slru": 1539},
    "deepseek_v2_lite": {"lrfu": 8448, "lru": 9094, "lfu": 9109, "fifo": 9218, "slru": 8821},
}


@pytest.mark.parametrize("trace, experts", [
    ("gpt_oss_20b", 32), ("gpt_oss_120b", 128), ("deepseek_v2_lite", 64),
])  # fmt: skip
def test_misses_on_real_routing(trace, experts):
    found = {}
    for policy in CODES:
        caches = [Reference(experts, experts // 4, policy) for _ in range(4)]
        for step in TRACES[trace]:
            for cache, ids in zip(caches, step):
                cache.step(ids)
        found[policy] = sum(cache.counters["misses"] for cache in caches)
    assert found == MISSES_ON_SLICES[trace]
    assert found["lrfu"] == min(found.values())


# Arguments


@pytest.mark.parametrize("half_life, multiplier", [
    (24, 63670), (1, 32768), (0.0625, 1), (90000, 65535), (2, 46341),
])  # fmt: skip
def test_lrfu_decay_is_the_multiplier_of_a_half_life(half_life, multiplier):
    assert decay_parameter("lrfu", half_life=half_life) == multiplier


def test_decay_of_the_other_policies():
    assert decay_parameter("lfu") == 64
    assert decay_parameter("lfu", halving_steps=1) == 1
    assert [decay_parameter(policy) for policy in ("lru", "fifo", "slru")] == [0, 0, 0]


@pytest.mark.parametrize("arguments, message", [
    (("lrfu", 0), "half-life is 0 steps; it must be above 0"),
    (("lrfu", float("nan")), "half-life is nan steps; it must be above 0"),
    (("lrfu", 0.05), "half-life is 0.05 steps; it must be from 0.0625 to 90000"),
    (("lrfu", 1e6), "half-life is 1000000.0 steps; it must be from 0.0625 to 90000"),
    (("lfu", 24, 0), "decay is 0 steps; it must be from 1 to 4294967295"),
    (("mru",), "policy is 'mru'; it must be one of lrfu, lru, lfu, fifo, slru"),
])  # fmt: skip
def test_a_bad_decay_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError) as error:
        decay_parameter(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("experts, slots, message", [
    (1, 1, "experts is 1; it must be from 2 to 1024"),
    (1025, 1, "experts is 1025; it must be from 2 to 1024"),
    (8, 0, "slots is 0; it must be from 1 to 7"),
    (8, 8, "slots is 8; it must be from 1 to 7"),
])  # fmt: skip
def test_a_bad_size_says_what_is_allowed(experts, slots, message):
    with pytest.raises(ValueError) as error:
        Reference(experts, slots)
    assert str(error.value) == message


def test_a_bad_mode_says_what_is_allowed():
    with pytest.raises(ValueError) as error:
        Reference(8, 4).step(np.array([1]), "row")
    assert str(error.value) == "mode is 'row'; it must be one of rows, scratch, skip"
