"""Other weights while an engine serves, and sleep, by every way that vLLM has on a CPU."""

from collections.abc import Callable, Iterator

import torch
from safetensors.torch import load_file
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.v1.worker.gpu_worker import Worker

Tokens = list[list[int]]
PARTS = 3


def play(llm, generate: Callable[[], Tokens], first: str, other: str) -> dict:
    """What is served after each change, by its name; `first` and `other` are checkpoints with
    the same weights but for the experts."""

    return served_after(changes(llm, first, other), llm, generate)


def served_after(names: Iterator[str], llm, generate: Callable[[], Tokens]) -> dict[str, Tokens]:
    def served() -> Tokens:
        llm.reset_prefix_cache()  # its keys and values are those of the old weights
        return generate()

    return {name: served() for name in names}


def changes(llm, first: str, other: str) -> Iterator[str]:
    """Each name is given when the change has been made."""
    yield from replaced(llm, first, other)
    for level in (1, 2):
        llm.collective_rpc(sleep_and_wake, args=(level,))
        yield f"slept {level}"


def replaced(llm, first: str, other: str) -> Iterator[str]:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    yield "reloaded"

    llm.collective_rpc("start_weight_update")
    for number in range(PARTS):
        part = {"folder": first, "number": number, "of": PARTS}
        llm.collective_rpc("update_weights", kwargs={"update_info": part})
    llm.collective_rpc("finish_weight_update")
    yield "transferred"

    llm.collective_rpc(copy_in_kernel_format)
    yield "copied"

    llm.collective_rpc(load_directly, args=(other,))
    yield "given"


def copy_in_kernel_format(worker) -> None:
    """Each expert gets the weights of the one before it."""
    weights = [
        (name, parameter.roll(1, 0))
        for name, parameter in worker.get_model().named_parameters()
        if ".experts." in name
    ]
    worker.reload_weights(weights_iterator=weights, is_checkpoint_format=False)


def load_directly(worker, folder: str) -> None:
    """What a trainer's worker extension does: experts only, because the CPU keeps no other
    weights in the form that they are loaded in."""
    weights = load_file(f"{folder}/model.safetensors").items()
    worker.get_model().load_weights([item for item in weights if ".experts." in item[0]])


class PoisonedMemory(SleepModeBackend):
    """What vLLM's allocator does to the memory that PyTorch took while the model was loaded:
    level 1 gives it back as it was, level 2 without its content. On a CPU there is no allocator
    to do it, so what the cache keeps on its device is overwritten. The model's own weights
    are spared: here they are the host copies."""

    def suspend(self, level: int = 1) -> None:
        self.level = level

    def resume(self, tags: list[str] | None = None) -> None:
        if self.level == 2 and (tags is None or "weights" in tags):
            for tensor in device_tensors():
                tensor.view(torch.uint8).fill_(0xA5)


def device_tensors() -> Iterator[torch.Tensor]:
    """All that the armed layers keep on their device; nothing where no layer is armed."""
    import sys

    arming = sys.modules.get("expert_cache_shim.arming")
    for report in arming.reports() if arming else ():
        for cache in (layer.cache for layer in report.armed):
            yield from (cache.state, cache.counters, *cache._tables.values())
            for placement in cache.storage.placements:
                yield from (t for t in (placement.slots, placement.scratch) if t is not None)


def sleep_and_wake(worker, level: int) -> None:
    """The GPU worker's own sleep, and waking up in two parts, as a trainer does it."""
    worker = getattr(worker, "worker", worker)  # the executor's wrapper of it
    worker._sleep_mode_backend = PoisonedMemory()
    accelerator = torch.accelerator
    synchronize, memory = accelerator.synchronize, accelerator.get_memory_info
    accelerator.synchronize = lambda: None
    accelerator.get_memory_info = lambda: (0, 0)
    try:
        Worker.sleep(worker, level)
        Worker.wake_up(worker, ["weights"])
        Worker.wake_up(worker, tags=["kv_cache"])
    finally:
        accelerator.synchronize, accelerator.get_memory_info = synchronize, memory
