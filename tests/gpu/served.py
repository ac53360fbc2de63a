"""How the GPU tests serve a tiny model: offloaded experts, full decode graphs, in a process of its
own. What vLLM needs on a machine is said in BENCH_ENGINE and in vLLM's own variables."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import engine
import pytest

from bench import arms, options
from examples.quantised_moe import GPU_SHAPE

QUARTER = GPU_SHAPE.experts // 4
CAPTURED = "Graph capturing finished"  # vLLM's own words
# Of as many tokens, up to eight requests with three drafted tokens each. Steps of three, five, six
# and seven requests are padded.
GRAPHS = [1, 2, *range(4, 33, 4)]


def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


def job(model: str, form: dict | None = None, **more: object) -> engine.Job:
    """form: keyword arguments of vllm.LLM. more: of the job."""
    return engine.Job(model, {
        **arms.OFFLOAD, "moe_backend": "triton", "enforce_eager": False,
        "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**28,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS,
        },
        **options.engine_options([]), **(form or {}),
    }, **more)  # fmt: skip


def environment(folder: Path) -> Callable[..., dict[str, str]]:
    """As the fixture of the engine tests, on a machine where the environment may say where vLLM is
    and what it needs. The scheduler runs where the requests are made, so that every way to serve
    them has the same batches."""
    machine = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}

    def settings(**given: object) -> dict[str, str]:
        paths = [str(given.get("PYTHONPATH", "")), os.environ.get("PYTHONPATH", "")]
        variables = {**machine, **engine.IN_PROCESS, **given}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return engine.environment(folder / "vllm", **variables)

    return settings
