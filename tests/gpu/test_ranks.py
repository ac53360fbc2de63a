"""Two ranks of real vLLM on two GPUs, under full decode graphs. Each engine takes a minute or more.

What vLLM needs on this machine is said as for `test_engine.py`.
"""

import engine
import pytest
import ranks
import served
import torch
from served import QUARTER

from examples.quantised_moe import GPU_SHAPE, write_quantised

STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module", autouse=True)
def two_gpus(library) -> None:
    served.needs_vllm()
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks need two GPUs, and torch finds {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Qwen3-MoE in bfloat16, of sizes that a GPU's kernels take."""
    return str(write_quantised("bf16", tmp_path_factory.mktemp("model"), GPU_SHAPE))


def serve(job: engine.Job, folder, slots: int, **settings: object) -> dict[str, engine.Answer]:
    """The answers of two ranks, each way."""
    answers = ranks.serve(job, folder, served.environment(folder), slots=slots, **settings)
    assert all(served.CAPTURED in answer.log for answer in answers.values())
    return answers


def test_two_tensor_parallel_ranks_serve_the_same_tokens_and_keep_the_same_cache(model, tmp_path):
    answers = serve(served.job(model, ranks.RANKS), tmp_path, slots=QUARTER)
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    first, second = ranks.check_both_used_the_cache(tmp_path, model)
    assert first.counters.tolist() == second.counters.tolist()
    ranks.check_wrong_experts_show(answers)


@pytest.mark.parametrize("scheme, form", [("bf16", {}), ("w4a16", {"moe_backend": "auto"})])
def test_two_expert_parallel_ranks_serve_the_same_tokens(scheme, form, tmp_path):
    model = str(write_quantised(scheme, tmp_path / "model", GPU_SHAPE))
    job = served.job(model, {**ranks.EXPERT_PARALLEL, **form})
    answers = serve(job, tmp_path, slots=QUARTER // 2, allow_inexact=1)
    assert "EP Rank 0/2" in answers["on"].log
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    found = ranks.check_both_used_the_cache(tmp_path, model)
    experts = {layer["experts"] for rank in found for layer in rank.layers}
    assert experts == {GPU_SHAPE.experts // 2}
    ranks.check_wrong_experts_show(answers)


def test_two_pipeline_stages_serve_the_same_tokens(model, tmp_path):
    """The second one's layers are on another device than 0."""
    answers = serve(served.job(model, STAGES), tmp_path, slots=QUARTER)
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    found = ranks.check_both_used_the_cache(tmp_path, model)
    names = {stage.rank: [layer["name"] for layer in stage.layers] for stage in found}
    expected = [f"model.layers.{number}.mlp.experts.routed_experts" for number in range(2)]
    assert names == {0: expected[:1], 1: expected[1:]}
    ranks.check_wrong_experts_show(answers)
