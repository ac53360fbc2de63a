"""Two ranks of real vLLM on two GPUs, under full decode graphs. Each engine takes a minute or more.

What vLLM needs on this machine is said as for `test_engine.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import engine
import pytest
import ranks
import served
import torch
from served import QUARTER

from bench.jobs import temporary_folder
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


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder


def serve(
    job: engine.Job, folder: Path, slots: int, **settings: object
) -> dict[str, engine.Answer]:
    """The answers of two ranks, each way."""
    answers = ranks.serve(job, folder, served.environment(folder), slots=slots, **settings)
    assert all(served.CAPTURED in answer.log for answer in answers.values())
    return answers


def test_two_tensor_parallel_ranks_serve_the_same_tokens_and_keep_the_same_cache(model, folder):
    answers = serve(served.job(model, ranks.RANKS), folder, slots=QUARTER)
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    first, second = ranks.check_both_used_the_cache(folder, model)
    assert first.counters.tolist() == second.counters.tolist()
    ranks.check_wrong_experts_show(answers)


@pytest.mark.parametrize("scheme, form", [("bf16", {}), ("w4a16", {"moe_backend": "auto"})])
def test_two_expert_parallel_ranks_serve_the_same_tokens(scheme, form, folder):
    model = str(write_quantised(scheme, folder / "model", GPU_SHAPE))
    job = served.job(model, {**ranks.EXPERT_PARALLEL, **form})
    answers = serve(job, folder, slots=QUARTER // 2)
    assert "EP Rank 0/2" in answers["on"].log
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    found = ranks.check_both_used_the_cache(folder, model)
    experts = {layer["experts"] for rank in found for layer in rank.layers}
    assert experts == {GPU_SHAPE.experts // 2}
    ranks.check_wrong_experts_show(answers)


def test_two_pipeline_stages_serve_the_same_tokens(folder):
    """Two layers each; those of the second stage are on another device than 0."""
    model = str(write_quantised("bf16", folder / "model", replace(GPU_SHAPE, layers=4)))
    answers = serve(served.job(model, STAGES), folder, slots=QUARTER)
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    found = ranks.check_both_used_the_cache(folder, model)
    ranks.check_each_stage_has_its_own_layers(found)
    ranks.check_wrong_experts_show(answers)


def test_load_balancing_is_refused_and_serves_as_without_the_cache(model, folder):
    job = served.job(model, {**ranks.EXPERT_PARALLEL, "enable_eplb": True})
    answers = serve(job, folder, slots=QUARTER, ways=("off", "on"))
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    (refused,) = {line.partition("): ")[2] for line in answers["on"].cache_lines()}
    assert "expert load balancing (EPLB) moves experts while serving" in refused
