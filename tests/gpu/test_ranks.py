"""Two ranks of real vLLM on two GPUs, under full decode graphs. Each engine takes a minute or more.

What vLLM needs on this machine is said as for `test_engine.py`.
"""

import importlib.util
import os
from functools import partial

import engine
import pytest
import ranks
import torch

from bench import arms, options
from examples.quantised_moe import GPU_SHAPE, write_quantised

QUARTER = GPU_SHAPE.experts // 4
CAPTURED = "Graph capturing finished"  # vLLM's own words


@pytest.fixture(scope="module", autouse=True)
def two_gpus(library) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks need two GPUs, and torch finds {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Qwen3-MoE in bfloat16, of sizes that a GPU's kernels take."""
    return str(write_quantised("bf16", tmp_path_factory.mktemp("model"), GPU_SHAPE))


def serve(model: str, form: dict, folder, slots: int) -> dict[str, engine.Answer]:
    """The answers of two ranks, each way; every engine offloads its experts and captures the
    decode steps of all its sizes."""
    job = engine.Job(model, {
        **form, **arms.OFFLOAD, "moe_backend": "triton", "enforce_eager": False,
        "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**28,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(range(1, 9)),
        },
        **options.engine_options([]),
    })  # fmt: skip
    vllm = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    environment = partial(engine.environment, folder / "vllm", **vllm)
    answers = ranks.serve(job, folder, environment, slots=slots)
    assert all(CAPTURED in answer.log for answer in answers.values())
    return answers


def test_two_tensor_parallel_ranks_serve_the_same_tokens_and_keep_the_same_cache(model, tmp_path):
    answers = serve(model, ranks.RANKS, tmp_path, slots=QUARTER)
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    first, second = ranks.check_both_used_the_cache(tmp_path, model)
    assert first.counters.tolist() == second.counters.tolist()
    ranks.check_wrong_experts_show(answers)


def test_two_expert_parallel_ranks_serve_the_same_tokens(model, tmp_path):
    answers = serve(model, ranks.EXPERT_PARALLEL, tmp_path, slots=QUARTER // 2)
    assert "EP Rank 0/2" in answers["on"].log
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    found = ranks.check_both_used_the_cache(tmp_path, model)
    experts = {layer["experts"] for rank in found for layer in rank.layers}
    assert experts == {GPU_SHAPE.experts // 2}
    ranks.check_wrong_experts_show(answers)
