"""The candidates of bench.policies: lrfu among them is the product's, and the table adds up."""

import numpy as np
import pytest

from bench import policies
from expert_cache_shim import trace, trace_control
from expert_cache_shim.trace_replay import Replay

CANDIDATES = {candidate.name: candidate for candidate in policies.candidates()}


@pytest.fixture(scope="module")
def found() -> trace.Trace:
    return trace.load(policies.DATA / "olmoe.npz").first(120)


def test_lrfu_among_the_candidates_is_the_product_s(found):
    sizes = [found.experts // divisor for divisor in policies.DIVISORS]
    for half_life in (8, 24):
        misses = CANDIDATES[f"lrfu {half_life}"].misses(found)
        decay = round(65536 * 0.5 ** (1 / half_life))
        assert (misses == Replay(found, sizes, "lrfu", decay).run().misses).all()


@pytest.mark.parametrize(
    "name",
    ["lru-2", "lrfu 24, score up to 4", "uses in the last 64 steps", "lrfu 24 + 96 x predictor"],
)
def test_a_candidate_is_no_other(found, name):
    assert (CANDIDATES[name].misses(found) != CANDIDATES["lrfu 24"].misses(found)).any()


def test_one_use_of_lru_k_is_lru(found):
    candidate = policies.Candidate("lru-1", policies.LruK, {"uses": 1})
    sizes = [found.experts // divisor for divisor in policies.DIVISORS]
    assert (candidate.misses(found) == Replay(found, sizes, "lru").run().misses).all()


@pytest.mark.slow
def test_no_candidate_looks_good_on_independent_routing(found):
    control = trace_control.uniform(found)
    base = CANDIDATES["lrfu 24"].misses(control).sum()
    for candidate in CANDIDATES.values():
        assert candidate.misses(control).sum() == pytest.approx(base, rel=0.02), candidate.name


def test_the_table_compares_with_lrfu(found):
    chosen = [CANDIDATES[name] for name in ("lrfu 24", "lru-2")]
    lines = list(policies.table({"olmoe": found}, chosen))
    assert lines[0] == "| candidate | olmoe | all | E/8 | E/4 | E/2 | worst |"
    assert lines[2] == f"| lrfu 24 |{6 * ' +0.00 |'}"
    base, other = (candidate.misses(found).sum() for candidate in chosen)
    assert lines[3].split("|")[2:4] == [f" {100 * (other / base - 1):+.2f} "] * 2


def test_admission_from_nothing_admits_all(found):
    options = CANDIDATES["lrfu 24"].options
    every = policies.Candidate("a", policies.Lrfu, options, admission=1e-9).misses(found)
    assert (every == CANDIDATES["lrfu 24"].misses(found)).all()
    few = policies.Candidate("b", policies.Lrfu, options, admission=0.5).misses(found)
    assert (few != every).any() and np.isfinite(few).all()
