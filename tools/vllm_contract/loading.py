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
    "reload_weights": "", "update_weights": "", "finish_weight_update": "", "reset_weights": "0.32",
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


@fact(f"it processes a module in {vllm_compat.LOADING_CONTEXT}(module, target_device)")
def _(release: Release) -> Iterator[Found]:
    source = release.module(vllm_compat.LOADED_SOURCE)
    context = source.function(vllm_compat.LOADING_CONTEXT)
    wanted = ["module", "target_device"]
    require(context.parameters == wanted, f"its parameters are {context.parameters}")
    yield context
    yield from source.function(vllm_compat.LOADED).calls(vllm_compat.LOADING_CONTEXT)


@fact("when it ends, a parameter that lost the mark of offloading is offloaded again")
def _(release: Release) -> Iterator[Found]:
    context = release.module(vllm_compat.LOADED_SOURCE).function(vllm_compat.LOADING_CONTEXT)
    mark = vllm_compat.OFFLOADED
    require(f"not getattr(p, {mark!r}, False)" in context.text, f"{context.place} does not ask")
    require(f"p.{mark} = True" in context.text, f"{context.place} does not set {mark}")
    yield context


@fact("repacked weights keep the parameter, and so the mark", "0.33")
def _(release: Release) -> Iterator[Found]:
    function = release.module("vllm.model_executor.utils").function("replace_parameter")
    require("old_param.data = new_tensor" in function.text, f"{function.place} makes a new one")
    yield function


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


for _name in (
    vllm_compat.WARM_UP, vllm_compat.EXECUTE, vllm_compat.WAKE_UP, vllm_compat.GET_MODEL
):  # fmt: skip
    _worker_method(_name)
for _name, _since in CHANGES_SINCE.items():
    _worker_method(_name, _since)


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
            known = name in HARMLESS or name in CHANGES_SINCE
            require(known, f"{method.place} defines {name}")
    yield worker


@fact("loaders and a reload give a model weights by load_weights")
def _(release: Release) -> Iterator[Found]:
    packages = ("vllm.model_executor.model_loader", "vllm.v1.worker")
    for package in packages:
        for source in release.sources(package, mentioning=vllm_compat.LOAD_WEIGHTS):
            for call in source.root.calls(vllm_compat.LOAD_WEIGHTS):
                if call.text.startswith(f"model.{vllm_compat.LOAD_WEIGHTS}("):
                    yield call


@fact("a layer that is reloaded keeps the tensors it serves from, and takes new bytes into them")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.model_executor.model_loader.reload.layerwise")
    yield from source.function("_copy_and_restore_kernel_tensors").calls("copy_")


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
