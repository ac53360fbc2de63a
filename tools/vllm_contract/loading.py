"""Where weights become final, and what the worker does around a model."""

from __future__ import annotations

from collections.abc import Iterator

from expert_cache_shim import vllm_compat

from .facts import Subject, require
from .reading import Found, Release

fact = Subject("loading and workers")

# The first and the last minor version of each module that takes the function by name.
HOLDERS = {
    "vllm.model_executor.model_loader.base_loader": ("", ""),
    "vllm.model_executor.model_loader.gguf_loader": ("", "0.23"),
    "vllm.model_executor.model_loader.weight_cache.ipc_loader": ("0.30", ""),
    vllm_compat.LOADED_NOT_SERVING: ("0.30", ""),
}
# The first minor version of each method after which weights are other ones.
CHANGES_SINCE = {
    "reload_weights": "", "update_weights": "", "finish_weight_update": "",
    "reset_weights": "0.32", "wake_up": "",
}  # fmt: skip


@fact(f"{vllm_compat.LOADED}(model, model_config, target_device)")
def _(release: Release) -> Iterator[Found]:
    function = release.module(vllm_compat.LOADED_SOURCE).function(vllm_compat.LOADED)
    wanted = ["model", "model_config", "target_device"]
    require(function.parameters == wanted, f"its parameters are {function.parameters}")
    yield function


@fact(f"base_loader calls {vllm_compat.LOADED}, the model first")
def _(release: Release) -> Iterator[Found]:
    loader = release.module("vllm.model_executor.model_loader.base_loader")
    for call in loader.root.calls(vllm_compat.LOADED):
        first = [argument.id for argument in call.node.args[:2]]
        require(first == ["model", "model_config"], f"{call.place} passes {first} first")
        yield call


def _holder(module: str) -> None:
    since, until = HOLDERS[module]

    @fact(f"{module.split('model_loader.')[1]} imports it by name", since, until)
    def _(release: Release) -> Iterator[Found]:
        held = release.module(module).imports(vllm_compat.LOADED)
        require(held, f"{module} does not")
        yield held


for _module in (*vllm_compat.LOADED_HOLDERS, vllm_compat.LOADED_NOT_SERVING):
    _holder(_module)


@fact("no other module imports it by name")
def _(release: Release) -> Iterator[Found]:
    for source in release.sources(mentioning=vllm_compat.LOADED):
        held = source.imports(vllm_compat.LOADED)
        if held:
            require(source.module in HOLDERS, f"{held.place} does")
            yield held


@fact("nothing calls it as an attribute of its module")
def _(release: Release) -> Iterator[Found]:
    source = release.module(vllm_compat.LOADED_SOURCE)
    for user in release.sources(mentioning=f"utils.{vllm_compat.LOADED}"):
        for read in user.root.reads(vllm_compat.LOADED):
            require(not read.text.endswith(f"utils.{vllm_compat.LOADED}"), f"{read.place} does")
    yield source.function(vllm_compat.LOADED)


def _worker(module: str, name: str) -> None:
    @fact(f"{module.split('.')[-1]}.{name} is there")
    def _(release: Release) -> Iterator[Found]:
        yield release.module(module).cls(name)


for _module, _name in vllm_compat.WORKER_MODULES.items():
    _worker(_module, _name)


@fact("CPUWorker derives from Worker")
def _(release: Release) -> Iterator[Found]:
    worker = release.module("vllm.v1.worker.cpu_worker").cls("CPUWorker")
    require("Worker" in worker.bases, f"{worker.place} derives from {worker.bases}")
    yield worker


def _worker_method(name: str, since: str = "") -> None:
    @fact(f"Worker.{name}", since)
    def _(release: Release) -> Iterator[Found]:
        yield release.module("vllm.v1.worker.gpu_worker").cls("Worker").method(name)


for _name in (vllm_compat.WARM_UP, vllm_compat.EXECUTE):
    _worker_method(_name)
for _name in vllm_compat.WEIGHTS_CHANGED:
    _worker_method(_name, CHANGES_SINCE[_name])


@fact("wake_up(tags)")
def _(release: Release) -> Iterator[Found]:
    for module, name in vllm_compat.WORKER_MODULES.items():
        method = release.module(module).cls(name).method("wake_up")
        require(method.parameters == ["tags"], f"{method.place} takes {method.parameters}")
        yield method


# These read weights, or prepare what a method that is wrapped does.
HARMLESS = {
    "compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
    "start_draft_weight_update", "start_weight_update", "supports_draft_weight_updates",
}  # fmt: skip


@fact("no other public method of Worker is named for weights")
def _(release: Release) -> Iterator[Found]:
    """A new way to change weights will have a name like the old ones."""
    worker = release.module("vllm.v1.worker.gpu_worker").cls("Worker")
    for name, method in worker.methods.items():
        if "weight" in name and not name.startswith("_"):
            known = name in HARMLESS or name in vllm_compat.WEIGHTS_CHANGED
            require(known, f"{method.place} defines {name}")
    yield worker


@fact("Worker.load_model sets the current configuration")
def _(release: Release) -> Iterator[Found]:
    method = release.module("vllm.v1.worker.gpu_worker").cls("Worker").method("load_model")
    yield from method.calls("set_current_vllm_config")


@fact("vllm.version and vllm have __version__")
def _(release: Release) -> Iterator[Found]:
    held = release.module("vllm.version").imports("__version__")
    require(held, "vllm/version.py does not import it")
    yield held
    taken = release.module("vllm").imports("__version__")
    require(taken, "vllm/__init__.py does not import it")
    yield taken
