"""Every fact about vLLM's insides that the shim relies on, with the versions it was seen in.

Read from the sources of every release from 0.21.0 to 0.33.0; `make contract` checks them again.
0.25.1 (CUDA) and 0.32.0 (CPU build) were also run. A name that is missing in the running version
makes a question answer "no", never an exception: a newer vLLM is served as far as its parts can
be recognised.

What is rebound, and when that can go:

| what | why | how | until |
| --- | --- | --- | --- |
| `model_loader.utils.process_weights_after_loading` and every module that imported it by name | the one call after which all weights and kernels of a model are final | wrapped; the original runs first | vLLM has a post-load plugin hook |
| `model_loader.utils.device_loading_context` | 0.33 leaves repacked experts in device memory | replaced while the function above runs | 0.33 is no longer served, or was mended |
| `quant_method.apply` of each armed layer | the one call that has routing ids and weights together | instance attribute, no class is touched | same |
| `moe_align_block_size` in the module of `fused_marlin_moe` | Marlin rounds by the order of experts in its result | replaced while a step of an armed layer runs, for its thread | Marlin's sums do not depend on that order |
| `get_config` of `layers.fused_moe` | a kernel on fewer rows would look up another tuned configuration | the same, with plain storage | plain storage is no longer needed |
| `Worker.compile_or_warm_up_model` | warm-up routes dummy tokens through the cache | wrapped; afterwards the cache is emptied | same |
| `Worker.reload_weights`, `finish_weight_update`, `reset_weights`, `wake_up` | what slots hold is stale, or gone | wrapped; afterwards the cache is emptied and bound anew | same |
| `Worker.update_weights` | what slots hold is stale | wrapped; afterwards the cache is emptied | same |
| `load_weights` of the class of an armed model | the same, past the worker | wrapped; the cache is emptied before the next execution | same |
| `Worker.execute_model` | the line above; what is fetched ahead must end before a graph is replayed; and a cache that is armed and never called must be reported | wrapped | same |
| `VllmConfig.additional_config`, on a CPU only | a graph that vLLM compiled and kept on disk without the cache would serve a model with it | a copy that names the armed layers takes its place | no platform has its compiler trace through `apply` |
| `prometheus_client`'s REGISTRY and `MultiProcessCollector.__init__`, when `v1.metrics.prometheus` is imported | the counters belong on vLLM's own `/metrics` | a collector is registered with the one, and with each registry that the other is | vLLM asks plugins for collectors |
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# --- Where weights become final -------------------------------------------------------------

# 0.21-0.33: `(model, model_config, target_device) -> None`, called positionally, once a model.
LOADED = "process_weights_after_loading"
LOADED_SOURCE = "vllm.model_executor.model_loader.utils"
# Modules that do `from .utils import process_weights_after_loading`. gguf_loader: 0.21-0.23;
# ipc_loader: 0.30-0.33. Others are found by the sweep over sys.modules.
LOADED_HOLDERS = (
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.gguf_loader",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader",
)
# 0.30-0.33: a process that only holds weights for others. It must not arm.
LOADED_NOT_SERVING = "vllm.model_executor.model_loader.weight_cache.daemon"

# The context in which the weights of one module are processed, a global of LOADED_SOURCE
# (0.21-0.33): `(module, target_device)`. When it ends, parameters that were offloaded when it
# began and do not carry the flag are moved to the host again, and get it.
LOADING_CONTEXT = "device_loading_context"
# The flag itself, on a parameter (0.21-0.33).
OFFLOADED = "_vllm_is_uva_offloaded"


def loading_module() -> Any:
    return _imported(LOADED_SOURCE)


def offloaded_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of which vLLM's flag says that they lie on the host (0.21-0.33). Not always
    true: 0.33 leaves the flag on what it has replaced with device memory."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, OFFLOADED, False):
            yield name, parameter


def set_offloaded(parameters: Iterable[torch.nn.Parameter], offloaded: bool) -> None:
    for parameter in parameters:
        setattr(parameter, OFFLOADED, offloaded)


# --- The server's /metrics -----------------------------------------------------------------

# 0.21-0.33: imported by whatever answers /metrics, before it does. get_prometheus_registry()
# gives prometheus_client's REGISTRY, or where PROMETHEUS_MULTIPROC_DIR is set a new registry with
# a MultiProcessCollector; vLLM sets the variable in the parent of several API servers. Its other
# server, written in Rust, has no part in this.
METRICS_SOURCE = "vllm.v1.metrics.prometheus"

# --- The worker (all versions: V1 engine) ---------------------------------------------------

WORKER_MODULES = {
    "vllm.v1.worker.gpu_worker": "Worker",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
}
WARM_UP = "compile_or_warm_up_model"
EXECUTE = "execute_model"
GET_MODEL = "get_model"
# While a session of these is under way host copies change, in place, and layers whose weights
# have not come yet hold tensors on the meta device (0.21-0.33).
WEIGHTS_CHANGING = ("update_weights",)
# After these the host copies hold other bytes, in place (reload_weights and
# finish_weight_update 0.21-0.33, reset_weights 0.32-0.33). A kernel may be a new one.
WEIGHTS_CHANGED = ("reload_weights", "finish_weight_update", "reset_weights")
# `wake_up(tags)`, 0.21-0.33: device memory comes back from sleep, at level 2 without content.
WAKE_UP = "wake_up"
# Every model's method that takes weights of checkpoint format by name (0.21-0.33).
LOAD_WEIGHTS = "load_weights"


def wakes_weights(tags: list[str] | None) -> bool:
    """None wakes everything; before its turn, memory of the weights' pool is not there."""
    return tags is None or "weights" in tags


# --- Layers ---------------------------------------------------------------------------------


def moe_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that own expert weights: FusedMoE (0.21-0.23), RoutedExperts (0.24-0.33).

    Recognised by what they own, not by class: a `quant_method` and `w13_*` tensors.
    """
    for name, module in model.named_modules():
        if is_moe_layer(module):
            yield name, module


def is_moe_layer(module: torch.nn.Module) -> bool:
    if getattr(module, "quant_method", None) is None:
        return False
    tensors = list(vars(module)) + list(module._parameters) + list(module._buffers)
    return any(t.startswith("w13_") for t in tensors)


def is_monolithic(method: Any) -> bool:
    """`is_monolithic` is a property of every fused MoE method (0.21-0.33); true after loading
    when the kernel routes by itself, so that there are no routing ids to rewrite."""
    return bool(getattr(method, "is_monolithic", False))


def expert_map(layer: Any) -> Any:
    """What the layer hands to its kernel under expert parallelism, else None (0.21-0.33): the map
    below, or for AITER a mask of the rank's experts."""
    return getattr(layer, "expert_map", None)


def global_to_local(layer: Any) -> Any:
    """Under expert parallelism the buffer `_expert_map`, int32 (0.21-0.33): for each id of the
    model the expert of this rank, or -1. Linear and round-robin placement both end in it."""
    return getattr(layer, "_expert_map", None)


def is_lora_enabled(layer: Any) -> bool:
    """0.21-0.33: FusedMoEConfig.is_lora_enabled. LoRA's kernels index by expert id."""
    return bool(getattr(_moe_config(layer), "is_lora_enabled", False))


def is_eplb_enabled(layer: Any) -> bool:
    """0.21: layer.enable_eplb too; 0.21-0.33: FusedMoEParallelConfig.enable_eplb."""
    return bool(
        getattr(layer, "enable_eplb", False)
        or getattr(_parallel_config(layer), "enable_eplb", False)
    )


def data_parallel_size(layer: Any) -> int:
    return int(getattr(_parallel_config(layer), "dp_size", 1) or 1)


def expert_sizes(layer: Any) -> tuple[int, int]:
    """Hidden and intermediate size of one expert on this rank, in elements (0.21-0.33)."""
    return int(layer.hidden_size), int(layer.intermediate_size_per_partition)


def top_k(layer: Any) -> int:
    """Experts that a token routes to (0.21-0.33)."""
    return int(getattr(layer, "top_k", 1))


def _moe_config(layer: Any) -> Any:
    return getattr(layer, "moe_config", None)


def _parallel_config(layer: Any) -> Any:
    config = _moe_config(layer)
    found = getattr(config, "moe_parallel_config", None)
    return found if found is not None else getattr(layer, "moe_parallel_config", None)


# --- Kernels --------------------------------------------------------------------------------

# 0.21-0.33. Any other form moves topk_ids between ranks after apply, where the rows of
# different ranks would mix.
LOCAL_PREPARE_FINALIZE = "MoEPrepareAndFinalizeNoDPEPModular"

# What computes a step is served by exact name, and nothing else is: a class derived from one of
# these may do otherwise. Names are of experts classes, or of quant methods that build no kernel
# and call a function themselves (see `runner_of`).
#
# Served means: proven to give a layer the same bits wherever its experts lie, on an H200 with
# 0.25.1 (TritonExperts, MarlinExperts, CutlassExpertsFp8, TritonOrCutlassExperts) or on a CPU with
# 0.32.0 (CPUUnquantizedExperts), or to come to the same functions by the sources of 0.21-0.33.

# For CPUs (modular from 0.30 on). They ignore `expert_map`, and would read beyond their weights.
ON_CPU = frozenset(
    {
        "CPUUnquantizedExperts",
        "X86CPUUnquantizedExperts",
        "ArmCPUUnquantizedExperts",
        "PowerCPUUnquantizedExperts",
        "CPUExpertsFp8",
        "CPUExpertsInt4",
        "CPUExpertsInt8",
    }
)

# What calls `fused_marlin_moe`, whose kernel shares the sums over one expert's columns among
# workgroups by where the expert comes in the order of rows, so that another order rounds otherwise
# (0.21-0.33; seen on an H200 with 0.25.1: without `keep_order` layer outputs of W4A16 and GPTQ
# were 0.0005 to 0.004 apart, with it they are equal).
CALL_FUSED_MARLIN = frozenset(
    {
        "MarlinExperts",
        # Without a kernel: 0.21; 0.21-0.22; 0.21-0.23, where its `use_marlin` is true.
        "AWQMarlinMoEMethod",
        "CompressedTensorsWNA16MarlinMoEMethod",
        "QuarkW8A8Fp8MoEMethod",
    }
)

# Without a kernel, what calls `fused_experts`, which launches the kernels of the Triton experts:
# 0.21-0.26 the first two; Quark's int8 from 0.27 on for static activations only; Quark's fp8 in
# 0.21-0.23. For 4-bit weights and few tokens the first two come to `moe_wna16_gemm` on NVIDIA.
ON_NVIDIA_OTHERWISE = frozenset({"CompressedTensorsWNA16MoEMethod", "MoeWNA16Method"})
CALL_FUSED_EXPERTS = ON_NVIDIA_OTHERWISE | {"QuarkW8A8Int8MoEMethod", "QuarkW8A8Fp8MoEMethod"}

# Take weights of S rows while the model has E experts: they read the number of experts from the
# weights only. `plain` storage serves these and refuses the rest.
TAKE_FEWER_EXPERTS = ON_CPU | {"TritonExperts", "TritonWNA16Experts", "MarlinExperts"}

# The last two hand weights in bfloat16 to TritonExperts, unpacked while loading (from 0.26 on) or
# in each step (from 0.24 on), value by value.
SERVED = (TAKE_FEWER_EXPERTS | CALL_FUSED_MARLIN | CALL_FUSED_EXPERTS) | {
    "CutlassExpertsFp8",
    "TritonOrCutlassExperts",
    "Int4EmulationTritonExperts",
    "Mxfp8EmulationTritonExperts",
}

# Find an expert's row by looking its id up in the `expert_map` they are handed, whatever it holds.
LOOK_UP_EXPERT_MAP = SERVED - ON_CPU


def is_served(method: Any) -> bool:
    """Whether a layer's result is known not to depend on where its experts lie."""
    name = type(runner_of(method)).__name__
    if name not in SERVED or uses_aiter(method):
        return False
    if name in ON_NVIDIA_OTHERWISE and _is_nvidia():
        return False
    return not _is_order_dependent(method) or _sorting_module(method) is not None


def uses_aiter(method: Any) -> bool:
    """Kernels of AITER, by the name of their class (0.21-0.33), or by an attribute of the methods
    of Quark that choose them in `apply` (0.21-0.23). VLLM_ROCM_USE_AITER_MOE turns them off."""
    runner = runner_of(method)
    chosen = getattr(runner, "rocm_aiter_moe_enabled", False)
    return chosen or type(runner).__name__.startswith("Aiter")


def _is_nvidia() -> bool:
    """platforms.current_platform.is_cuda() is false for AMD (0.21-0.33)."""
    platform = getattr(_imported("vllm.platforms"), "current_platform", None)
    return platform is not None and platform.is_cuda()


def _is_order_dependent(method: Any) -> bool:
    """Whether a layer's output has other last bits where its experts are sorted otherwise."""
    runner = runner_of(method)
    return type(runner).__name__ in CALL_FUSED_MARLIN and getattr(runner, "use_marlin", True)


def _sorting_module(method: Any) -> Any:
    """The module of `fused_marlin_moe`, which imports by name the `moe_align_block_size` that it
    sorts a step's tokens by expert with (0.21-0.33). None for a method that does not come to it,
    and where the running code does not name the one and then the other, or is traced."""
    if not _is_order_dependent(method):
        return None
    if compiles_on_cpu():  # a graph would have no use for the rows, and not compute them
        return None
    function = _named_in(type(runner_of(method)).apply, "fused_marlin_moe")
    if _named_in(function, "moe_align_block_size") is None:
        return None
    return sys.modules.get(function.__module__)


def _named_in(function: Any, name: str) -> Any:
    """What a name in the code of a Python function stands for; None if it does not occur."""
    code = getattr(function, "__code__", None)
    return function.__globals__.get(name) if code and name in code.co_names else None


def keep_order(method: Any, row_of: torch.Tensor) -> bool:
    """Makes a quant method of ours sort a step's tokens by expert, as the model's own does, and
    read each expert at its row: the order of sums stays what it is without the cache. `apply` then
    takes ids of experts and not rows. False, and nothing is changed, where this cannot be done.

    row_of: int32 [E] on the device, where manage keeps the row of every routed expert.

    The second result of `moe_align_block_size` is the expert of this rank whose weights each block
    of sorted tokens reads, or -1; under expert parallelism it looks ids up in the map before it
    sorts (0.21-0.33).
    """
    runner, module = runner_of(method), _sorting_module(method)
    if module is None:
        return False
    original, last = runner.apply, len(row_of) - 1

    def sort_then_look_up(align: Any) -> Any:
        def aligned(*args: Any, **kwargs: Any) -> Any:
            tokens, blocks, count = align(*args, **kwargs)
            rows = row_of[blocks.clamp(0, last).long()]
            return tokens, rows.where((blocks >= 0) & (blocks <= last), blocks), count

        return aligned

    def apply(*args: Any, **kwargs: Any) -> Any:
        with _replaced(module, "moe_align_block_size", sort_then_look_up):
            return original(*args, **kwargs)

    vars(runner)["apply"] = apply
    return True


_replacing = threading.RLock()


@contextlib.contextmanager
def _replaced(module: Any, name: str, replacement: Any) -> Iterator[None]:
    """While a step of ours runs, gives its thread another function of a module of vLLM's: what
    `replacement` makes of it. Other engines of the process may run in threads of their own."""
    with _replacing:  # or the one that began later would put the other's back
        original, ours = getattr(module, name), threading.get_ident()
        other = replacement(original)

        def choose(*args: Any, **kwargs: Any) -> Any:
            function = other if threading.get_ident() == ours else original
            return function(*args, **kwargs)

        setattr(module, name, choose)
        try:
            yield
        finally:
            setattr(module, name, original)


def moe_kernel(method: Any) -> Any:
    """The built kernel, or None for a method that calls functions directly (0.21-0.33)."""
    return getattr(method, "moe_kernel", None)


def prepare_finalize(kernel: Any) -> Any:
    return getattr(getattr(kernel, "impl", kernel), "prepare_finalize", None)


def fused_experts(kernel: Any) -> Any:
    """0.21-0.33: FusedMoEKernel.impl.fused_experts; before `impl` existed, on the kernel."""
    return getattr(getattr(kernel, "impl", kernel), "fused_experts", None)


def runner_of(method: Any) -> Any:
    """What computes a step: the experts object of the method's kernel, else the method itself."""
    experts = fused_experts(moe_kernel(method))
    return method if experts is None else experts


def ensure_quant_config(layer: Any) -> None:
    """A method without a kernel gets its quantisation config at the first forward; the layer's
    own call, which changes nothing when repeated, gives it now. 0.21-0.23:
    ensure_moe_quant_config_init; 0.24-0.33: _ensure_moe_quant_config_init."""
    if moe_kernel(layer.quant_method) is not None:
        return
    for name in ("_ensure_moe_quant_config_init", "ensure_moe_quant_config_init"):
        if hasattr(layer, name):
            getattr(layer, name)()
            return


# Experts classes that look up a tuned kernel configuration by the number of experts in the
# weights (0.21-0.33), so that fewer rows would change the order of summation.
TUNED_BY_EXPERTS = frozenset({"TritonExperts", "TritonWNA16Experts"})


def needs_tuned_config(experts: Any) -> bool:
    return type(experts).__name__ in TUNED_BY_EXPERTS


def _tuned_config_lookup() -> tuple[Any, Any]:
    """The package whose `get_config` gives an overriding configuration, and the function that asks
    it and else looks one up: `fused_moe.fused_moe.try_get_optimal_moe_config` (0.21-0.33), which
    imports `get_config` when it is called."""
    package = _imported("vllm.model_executor.layers.fused_moe")
    functions = _imported("vllm.model_executor.layers.fused_moe.fused_moe")
    return package, getattr(functions, "try_get_optimal_moe_config", None)


def can_keep_tuned_config(experts: Any) -> bool:
    package, lookup = _tuned_config_lookup()
    names = inspect.signature(experts.apply).parameters
    wanted = {"hidden_states", "w1", "w2", "topk_ids"}
    return hasattr(package, "get_config") and lookup is not None and wanted <= names.keys()


def keep_tuned_config(experts: Any, count: int) -> None:
    """Makes an experts object of ours, that runs on fewer rows, use the tuned configuration of
    `count` experts, as the model's own kernel does. What vLLM's `override_config` set stays."""
    package, lookup = _tuned_config_lookup()
    original = experts.apply
    signature = inspect.signature(original)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if package.get_config():
            return original(*args, **kwargs)
        step = signature.bind(*args, **kwargs).arguments
        config = lookup(
            (count, *step["w1"].shape[1:]), (count, *step["w2"].shape[1:]),
            step["topk_ids"].shape[1],
            experts.quant_config.config_name(step["hidden_states"].dtype),
            step["hidden_states"].shape[0], block_shape=experts.block_shape,
        )  # fmt: skip
        with _replaced(package, "get_config", lambda original: lambda: config):
            return original(*args, **kwargs)

    vars(experts)["apply"] = apply


# --- Configuration --------------------------------------------------------------------------


def is_draft_model(model_config: Any) -> bool:
    """SpeculativeConfig builds the draft's ModelConfig with runner="draft" (0.21-0.33)."""
    return getattr(model_config, "runner_type", None) == "draft"


def model_name(model_config: Any) -> str:
    return str(getattr(model_config, "model", None) or "model")


def instance_id() -> str:
    """VllmConfig.instance_id, the same in all workers of one engine and in no other
    (0.21-0.33). The API server's own may differ."""
    return str(getattr(_current_config(), "instance_id", "") or "")


def tensor_parallel_rank() -> int:
    """0 where there is no such group (0.21-0.33)."""
    module = _imported("vllm.distributed.parallel_state")
    try:
        return int(module.get_tensor_model_parallel_rank()) if module else 0
    except (AssertionError, AttributeError):  # the group is not there
        return 0


def model_of(worker: Any) -> Any | None:
    """The model that a worker loaded, without the wrappers of its runner (0.21-0.33); None where
    it has none yet."""
    get_model = getattr(worker, GET_MODEL, None)
    try:
        return get_model() if get_model else None
    except Exception:  # a runner that has loaded nothing: ValueError or AttributeError
        return None


def offloader_name() -> str:
    """Class name of the global offloader: Noop-, UVA- or PrefetchOffloader (0.21-0.33)."""
    offloader = _offloader()
    return "NoopOffloader" if offloader is None else type(offloader).__name__


def _offloader() -> Any:
    module = _imported("vllm.model_executor.offloader.base")
    return module.get_offloader() if module else None


class Offloading(NamedTuple):
    """What offloading was asked for, and what came of it."""

    gib: float
    params: frozenset[str]
    offloader: str
    offloaded_bytes: int


def offloading() -> Offloading:
    """OffloadConfig.uva holds --cpu-offload-gb and --cpu-offload-params; a UVAOffloader counts
    in cpu_offload_bytes (0.21-0.33)."""
    uva = getattr(getattr(_current_config(), "offload_config", None), "uva", None)
    return Offloading(
        float(getattr(uva, "cpu_offload_gb", 0)),
        frozenset(getattr(uva, "cpu_offload_params", ())),
        offloader_name(),
        int(getattr(_offloader(), "cpu_offload_bytes", 0)),
    )


# Names of an expert's weight below a decoder layer: 0.21-0.23, and from 0.24 on.
EXPERT_NAMES = ("mlp.experts.w13_weight", "mlp.experts.routed_experts.w13_weight")


def offloads_experts(param: str) -> bool:
    """Whether an entry of --cpu-offload-params matches weights of experts: whole parts of the
    name, between dots (0.21-0.33)."""
    return any(f".{param}." in f".{name}." for name in EXPERT_NAMES)


def prefers_second_runner(minor: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether vLLM takes its second model runner unasked, in releases where that one ignores the
    offloader (0.21-0.27): DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, from 0.24 on."""
    defaults = {"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"}
    return (0, 24) <= minor < (0, 28) and not defaults.isdisjoint(architectures)


def parse_command_line(words: Sequence[str]) -> Any:
    """The namespace that vLLM makes of `serve MODEL …` (0.21-0.33). For a process of its own: it
    imports vLLM's front end, which takes seconds. Raises SystemExit as argparse does."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    commands = parser.add_subparsers(required=True, dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands)
    return parser.parse_args(list(words))


def uses_ubatches() -> bool:
    """Dual batch overlap: two forwards share a layer at once (0.21-0.33)."""
    parallel = getattr(_current_config(), "parallel_config", None)
    return bool(
        getattr(parallel, "enable_dbo", False) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1
    )


def compiles_on_cpu() -> bool:
    """True where torch.compile traces through `apply`: on a CPU the runner calls the layer
    directly, not through the opaque op `moe_forward` that other platforms use (0.21-0.33)."""
    compilation = getattr(_current_config(), "compilation_config", None)
    mode = getattr(compilation, "mode", None)
    return mode is not None and int(mode) > 0 and not sys.modules["torch"].cuda.is_available()


def most_tokens() -> int:
    """Tokens of the widest step, max_num_batched_tokens (0.21-0.33); 0 where that is not known."""
    scheduler = getattr(_current_config(), "scheduler_config", None)
    return int(getattr(scheduler, "max_num_batched_tokens", 0) or 0)


def distinguish_graphs(parts: list[str]) -> None:
    """Makes the graphs that vLLM compiles and keeps on disk under the configuration in force
    others than those of the same configuration without these parts.

    The name of a graph is a hash that takes in VllmConfig.additional_config, a dict unless a
    platform has a class of its own for it (0.21-0.33). vLLM drops the guards of a graph that it
    reads, so one without the cache would serve a model with it, and the other way round. So far
    it fails to read any on a CPU, and compiles anew (read in 0.25.1, 0.30, 0.33; run in 0.32).
    """
    config = _current_config()
    if isinstance(getattr(config, "additional_config", None), dict):
        known = config.additional_config.get("expert_cache", [])
        config.additional_config = {**config.additional_config, "expert_cache": known + parts}


def device_share() -> float | None:
    """The share of device memory that vLLM may use: gpu_memory_utilization (0.21-0.33)."""
    return getattr(getattr(_current_config(), "cache_config", None), "gpu_memory_utilization", None)


def memory_at_work(hidden: int, inner: int, top_k: int) -> int:
    """Bytes of device memory that vLLM needs beside the weights to start and to serve: the KV
    cache of one request of full length, activations of the widest step, graphs. An estimate,
    made before vLLM measures; hidden and inner are the experts' sizes in elements.

    Attention layers answer `get_kv_cache_spec(config)`, and the spec `max_memory_usage_bytes`
    (0.21-0.33).
    """
    config = _current_config()
    context = getattr(config.compilation_config, "static_forward_context", {})
    kv_cache = 0
    for layer in context.values():
        spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
        kv_cache += spec.max_memory_usage_bytes(config) if spec is not None else 0
    scheduler = config.scheduler_config
    return kv_cache + memory_of_steps(
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs,
        config.model_config.get_vocab_size(), hidden, inner, top_k,
    )  # fmt: skip


def memory_of_steps(
    tokens: int, sequences: int, vocabulary: int, hidden: int, inner: int, top_k: int
) -> int:
    """The part of `memory_at_work` that is not KV cache, in bytes: activations of a step of
    `tokens`, logits of `sequences`, graphs."""
    # Three intermediate caches of the fused experts, two bytes an element.
    activations = tokens * top_k * (3 * inner + hidden) * 2
    # Logits in float32, and their copy while sampling.
    logits = sequences * vocabulary * 8
    graphs_and_context = 2**30
    return activations + logits + graphs_and_context


def _current_config() -> Any:
    """The VllmConfig in force: the worker sets it around load_model (0.21-0.33)."""
    module = _imported("vllm.config.vllm") or _imported("vllm.config")
    getter = getattr(module, "get_current_vllm_config_or_none", None)
    if getter is not None:
        return getter()
    try:
        return module.get_current_vllm_config() if module else None
    except (AssertionError, AttributeError):
        return None


def _imported(name: str) -> Any:
    """A vLLM module only if vLLM has imported it: importing one here could close a circle."""
    return sys.modules.get(name)
