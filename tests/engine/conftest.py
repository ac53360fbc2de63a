"""What the engine tests share: checkpoints, and the answers of vLLM without the cache.

These tests start real vLLM engines on the CPU. Each run costs many seconds, so a run serves
several models where it can and is made once a session.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import engine
import pytest


@pytest.fixture(scope="session", autouse=True)
def vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `make test` sets it up in .venv")


@pytest.fixture(scope="session", autouse=True)
def library(vllm_installed, host_library_path: Path) -> Path:
    """The kernel library that every engine loads, built from the current sources."""
    return host_library_path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def checkpoint(folder: Path) -> Callable[[str], str]:
    """The folder of a tiny checkpoint: an architecture, or a quantisation of Qwen3-MoE."""
    from examples.quantised_moe import SCHEMES, write_quantised
    from examples.tiny_moe import write_checkpoint

    @functools.cache
    def write(kind: str) -> str:
        writer = write_quantised if kind in SCHEMES else write_checkpoint
        return str(writer(kind, folder / "checkpoints" / kind))

    return write


@pytest.fixture(scope="session")
def environment(folder: Path) -> Callable[..., dict[str, str]]:
    """Engine environments that share one vLLM cache folder, as a user's would."""
    return functools.partial(engine.environment, folder / "vllm")


@pytest.fixture(scope="session")
def stock(folder, checkpoint, environment) -> dict[str, engine.Answer]:
    """vLLM's own answers in one process, by kind; and of Qwen3-MoE in float32 those of vLLM
    (`float32`) and of transformers (`transformers`)."""
    jobs = {kind: engine.Job(checkpoint(kind)) for kind in engine.MODELS}
    jobs["float32"] = engine.Job(checkpoint("qwen3_moe"), {"dtype": "float32"})
    jobs["transformers"] = engine.Job(checkpoint("qwen3_moe"), reference=True)
    answers = engine.run(list(jobs.values()), folder / "stock", environment(**engine.IN_PROCESS))
    return dict(zip(jobs, answers))
