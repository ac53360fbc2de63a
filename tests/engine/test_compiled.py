"""vLLM's compiled mode on a CPU, where Dynamo traces through the layer.

The compiled graph of a run without the cache must not serve a run with it: both runs share one
vLLM cache folder, as a user's would.
"""

import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of, total


@pytest.fixture(scope="module")
def compiled(folder, checkpoint, environment):
    """Answers without and with the cache of the compiled model."""
    job = Job(checkpoint("qwen3_moe"), {"enforce_eager": False})
    settings = shim(folder / "compiled-snapshots", slots=16)
    return [
        run([job], folder / name, environment(**IN_PROCESS, **variables))[0]
        for name, variables in (("stock-compiled", {}), ("compiled", settings))
    ]


def test_a_compiled_model_is_served_through_the_cache_or_refused_aloud(
    compiled, folder, checkpoint
):
    off, on = compiled
    assert on["tokens"] == off["tokens"]
    snapshots = snapshots_of(folder / "compiled-snapshots", checkpoint("qwen3_moe"))
    if snapshots:
        assert total(snapshots, "steps") > 0
        assert total(snapshots, "misses") > 0
    else:
        assert any("not armed" in line and "eager" in line for line in on.cache_lines())
