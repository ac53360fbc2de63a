"""Other weights, real sleep, and graphs captured anew, while an engine serves on a GPU."""

import sys
from collections.abc import Callable, Iterator

from other_weights import Tokens, replaced, served_after
from vllm.compilation.cuda_graph import CUDAGraphWrapper

WEIGHTS, KV_CACHE = ["weights"], ["kv_cache"]


def play(llm, generate: Callable[[], Tokens], first: str, other: str) -> dict:
    """As `other_weights.play`."""
    return served_after(changes(llm, first, other), llm, generate)


def changes(llm, first: str, other: str) -> Iterator[str]:
    """Each name is given when the change has been made."""
    yield from replaced(llm, first, other)

    llm.sleep(level=1)
    llm.wake_up(tags=WEIGHTS)
    llm.wake_up(tags=KV_CACHE)
    yield "slept 1"

    llm.sleep(level=2)
    llm.wake_up(tags=WEIGHTS)
    # What vLLM took for the weights came back without its content.
    llm.collective_rpc("reload_weights", kwargs={"weights_path": first})
    llm.wake_up(tags=KV_CACHE)
    yield "slept 2"

    llm.collective_rpc(capture_again)
    yield "captured again"


def capture_again(worker) -> None:
    """The decode graphs once more, over caches that are empty."""
    arming = sys.modules.get("expert_cache_shim.arming")
    for report in arming.reports() if arming else ():
        for layer in report.armed:
            layer.cache.forget()
    CUDAGraphWrapper.clear_all_graphs()
    getattr(worker, "worker", worker).model_runner.capture_model()
