"""vLLM's compiled mode on a CPU, where Dynamo traces through the layer.

vLLM keeps compiled graphs on disk. All runs share one such folder, as a user's would: the graph
of a run without the cache must not serve one with it, nor the graph of one cache another.
"""

import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of

WAYS = {
    "first": {"storage": "virtual", "slots": 16},
    "again": {"storage": "virtual", "slots": 8},
    "plain": {"storage": "plain", "slots": 16},
}


@pytest.fixture(scope="module")
def off(folder, checkpoint, environment):
    """The answer of the compiled model without the cache; it leaves its graph on disk."""
    job = Job(checkpoint("qwen3_moe"), {"enforce_eager": False})
    (answer,) = run([job], folder / "stock-compiled", environment(**IN_PROCESS))
    return answer


@pytest.fixture(scope="module")
def on(off, folder, checkpoint, environment):
    """The answers, and the snapshots, of one process that serves the model in each way."""
    jobs, places = [], {}
    for name, settings in WAYS.items():
        places[name] = folder / "compiled-snapshots" / name
        variables = {k: str(v) for k, v in shim(places[name], **settings).items()}
        jobs.append(Job(checkpoint("qwen3_moe"), {"enforce_eager": False}, variables))
    answers = run(jobs, folder / "compiled", environment(**IN_PROCESS, **shim(folder)))
    return {
        name: (answer, snapshots_of(places[name], jobs[0].model))
        for name, answer in zip(WAYS, answers)
    }


@pytest.mark.parametrize("name", ("first", "again"))
def test_a_compiled_model_is_served_through_the_cache(name, off, on):
    answer, snapshots = on[name]
    assert answer["tokens"] == off["tokens"]
    (snapshot,) = snapshots
    assert all(snapshot.total(counter) > 0 for counter in ("steps", "hits", "misses", "overflow"))


def test_plain_storage_is_refused_for_a_compiled_model(off, on):
    answer, snapshots = on["plain"]
    assert answer["tokens"] == off["tokens"]
    assert snapshots == []
    (line,) = answer.cache_lines()
    assert "not armed" in line and "--enforce-eager" in line
