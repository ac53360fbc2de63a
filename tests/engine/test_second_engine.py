"""Two engines of one model in one process, compiled: a graph names the cache that it uses."""

import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of

TURNS = ("tokens", "second", "first again", "second again", "first at last")


@pytest.fixture(scope="module")
def answers(folder, checkpoint, environment):
    """Without the cache one engine, and with it two."""
    engine = {"enforce_eager": False}
    off = {"EXPERT_CACHE_DISABLE": "1"}
    jobs = [
        Job(checkpoint("qwen3_moe"), engine, off),
        Job(checkpoint("qwen3_moe"), engine, scenario=("second_engine",)),
    ]
    settings = shim(folder / "second-snapshots", slots=16)
    return run(jobs, folder / "second", environment(**IN_PROCESS, **settings))


@pytest.mark.parametrize("turn", TURNS)
def test_each_engine_serves_what_it_would_without_the_cache(turn, answers):
    off, on = answers
    assert on[turn] == off["tokens"]


def test_each_engine_uses_a_cache_of_its_own(answers, folder, checkpoint):
    assert answers[1]["tokens"]
    first, second = snapshots_of(folder / "second-snapshots", checkpoint("qwen3_moe"))
    assert first.pid == second.pid
    assert first.total("steps") * 2 == second.total("steps") * 3  # three turns, and two
    for snapshot in (first, second):
        for counter in ("hits", "misses", "overflow"):
            assert (snapshot.by_layer(counter) > 0).all(), counter
