"""Processes that share vLLM's compiled graphs on disk, and differ in the settings of the cache.

vLLM drops the guards of a graph that it reads. One that was compiled without the cache would serve
a model with it, whose slots it does not know, and the other way round.
"""

import pytest
from engine import IN_PROCESS, ROOT, Job, run, shim, snapshots_of

READ = "Directly load AOT compilation"
# In this order: the slots of each process, or no cache; and whether its graph is there already.
PROCESSES = {
    "off": (None, False),
    "on": (16, False),
    "on again": (8, True),
    "off again": (None, True),
}


@pytest.fixture(scope="module")
def answers(folder, checkpoint, environment):
    """By process."""
    job = Job(checkpoint("qwen3_moe"), {"enforce_eager": False}, plugins=("graph_reader",))
    answers = {}
    for name, (slots, _) in PROCESSES.items():
        place = folder / "graphs" / name
        settings = shim(place / "snapshots", slots=slots) if slots else {"PYTHONPATH": ROOT}
        variables = environment(**IN_PROCESS, **settings, VLLM_CACHE_ROOT=folder / "graphs/vllm")
        (answers[name],) = run([job], place, variables)
    return answers


@pytest.mark.parametrize("name", PROCESSES)
def test_the_tokens_do_not_change(name, answers):
    assert answers[name]["tokens"] == answers["off"]["tokens"]


@pytest.mark.parametrize("name", PROCESSES)
def test_a_graph_is_read_where_one_of_the_same_layers_was_left(name, answers):
    _, there = PROCESSES[name]
    assert (READ in answers[name].log) == there
    assert "load failure" not in answers[name].log


@pytest.mark.parametrize("name", [name for name, (slots, _) in PROCESSES.items() if slots])
def test_the_cache_is_used(name, answers, folder, checkpoint):
    assert answers[name]["tokens"]
    (snapshot,) = snapshots_of(folder / "graphs" / name / "snapshots", checkpoint("qwen3_moe"))
    for counter in ("steps", "hits", "misses"):
        assert (snapshot.by_layer(counter) > 0).all(), counter
