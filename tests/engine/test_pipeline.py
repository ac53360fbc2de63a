"""Two pipeline stages, in a process each: every stage has a cache for the layers that it runs.

Compiled, because that is how vLLM 0.32 serves stages on a CPU: an eager worker makes no dummy
step there, in which the second stage would get the buffer for what it receives.
"""

import os
from functools import partial

import pytest
import ranks
from engine import Job

ENGINE = {"dtype": "float32", "enforce_eager": False, "pipeline_parallel_size": 2}

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two stages need two cores"
)


@pytest.fixture(scope="module")
def stages(folder, checkpoint, environment):
    return ranks.serve(
        Job(checkpoint("qwen3_moe"), ENGINE), folder / "pipeline",
        partial(environment, VLLM_CPU_OMP_THREADS_BIND="0|1"), slots=16,
    )  # fmt: skip


def test_two_stages_serve_the_tokens_of_one(stages, stock):
    assert stock["float32"]["tokens"] == stock["transformers"]["tokens"]
    assert stages["off"]["tokens"] == stock["float32"]["tokens"]
    assert stages["on"]["tokens"] == stock["float32"]["tokens"]


def test_each_stage_uses_the_cache_of_its_own_layers(stages, folder, checkpoint):
    assert stages["on"]["tokens"]
    found = ranks.check_both_used_the_cache(folder / "pipeline", checkpoint("qwen3_moe"))
    ranks.check_each_stage_has_its_own_layers(found)
    for stage in found:
        for counter in ("steps", "hits", "misses"):
            assert (stage.by_layer(counter) > 0).all(), counter


def test_wrong_experts_of_the_stages_would_change_the_tokens(stages):
    ranks.check_wrong_experts_show(stages)
