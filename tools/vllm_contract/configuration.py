"""The engine's configuration, the offloader, and what a model needs of device memory."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Subject, require
from .reading import Found, Release

fact = Subject("configuration and memory")


@fact("a draft's ModelConfig is built with runner='draft'")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.config.speculative")
    calls = source.cls("SpeculativeConfig").calls("ModelConfig")
    yield from (call for call in calls if call.keywords.get("runner") == "'draft'")


@fact("ModelConfig sets runner_type, and has model and get_vocab_size()")
def _(release: Release) -> Iterator[Found]:
    config = release.module("vllm.config.model").cls("ModelConfig")
    for found, name in ((config.attributes, "runner_type"), (config.fields, "model")):
        require(name in found, f"{config.place} has no {name}")
        yield found[name]
    method = config.method("get_vocab_size")
    require(method.parameters == [], f"{method.place} takes {method.parameters}")
    yield method


@fact("get_offloader() in offloader.base")
def _(release: Release) -> Iterator[Found]:
    yield release.module("vllm.model_executor.offloader.base").function("get_offloader")


@fact("offloaders are NoopOffloader, UVAOffloader and PrefetchOffloader")
def _(release: Release) -> Iterator[Found]:
    found = release.subclasses("BaseOffloader")
    wanted = {"BaseOffloader", "NoopOffloader", "UVAOffloader", "PrefetchOffloader"}
    require(found.keys() == wanted, f"they are {sorted(found)}")
    yield from found.values()


@fact("get_current_vllm_config() and its form that may return None, in config.vllm")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.config.vllm")
    yield source.function("get_current_vllm_config_or_none")
    yield source.function("get_current_vllm_config")


@fact("a UVAOffloader counts what it offloads in cpu_offload_bytes")
def _(release: Release) -> Iterator[Found]:
    offloader = release.module("vllm.model_executor.offloader.uva").cls("UVAOffloader")
    require("cpu_offload_bytes" in offloader.attributes, f"{offloader.place} does not")
    yield offloader.attributes["cpu_offload_bytes"]


def _fields(module: str, name: str, *fields: str) -> None:
    @fact(f"{name} has {', '.join(fields)}")
    def _(release: Release) -> Iterator[Found]:
        config = release.module(module).cls(name)
        for field in fields:
            require(field in config.fields, f"{config.place} has no {field}")
            yield config.fields[field]


_fields(
    "vllm.config.vllm", "VllmConfig",
    "model_config", "cache_config", "parallel_config", "scheduler_config", "compilation_config",
)  # fmt: skip
_fields("vllm.config.vllm", "VllmConfig", "offload_config")
_fields("vllm.config.offload", "OffloadConfig", "uva")
_fields("vllm.config.offload", "UVAOffloadConfig", "cpu_offload_gb", "cpu_offload_params")
_fields("vllm.config.parallel", "ParallelConfig", "enable_dbo", "ubatch_size")
_fields("vllm.config.cache", "CacheConfig", "gpu_memory_utilization")
_fields("vllm.config.scheduler", "SchedulerConfig", "max_num_batched_tokens", "max_num_seqs")
_fields("vllm.config.compilation", "CompilationConfig", "mode", "static_forward_context")


_fields(
    "vllm.engine.arg_utils", "EngineArgs",
    "cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size",
    "enable_lora", "enable_eplb", "enable_dbo", "enable_expert_parallel", "data_parallel_size",
)  # fmt: skip


@fact("FlexibleArgumentParser, and cmd_init() of `vllm serve`")
def _(release: Release) -> Iterator[Found]:
    yield release.module("vllm.utils.argparse_utils").cls("FlexibleArgumentParser")
    yield release.module("vllm.entrypoints.cli.serve").function("cmd_init")


@fact("the second model runner knows no offloader", until="0.27")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.v1.worker.gpu.model_runner")
    require(not source.imports("set_offloader"), f"{source.name} imports set_offloader")
    yield source.cls("GPUModelRunner")


@fact("the second model runner is the default of DeepSeek-V2, Qwen2-MoE and Granite-MoE",
      since="0.24", until="0.28")  # fmt: skip
def _(release: Release) -> Iterator[Found]:
    names = release.module("vllm.config.vllm").assigned("DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")
    for name in ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"):
        require(repr(name) in names.text, f"{names.place} does not name {name}")
    yield names


@fact("CompilationMode is a number, and NONE is 0")
def _(release: Release) -> Iterator[Found]:
    mode = release.module("vllm.config.compilation").cls("CompilationMode")
    require("IntEnum" in mode.bases, f"{mode.place} derives from {mode.bases}")
    require("NONE" in mode.fields, f"{mode.place} has no NONE")
    none = mode.fields["NONE"]
    require(none.text == "NONE = 0", f"{none.place} says {none.text}")
    yield none


@fact("VllmConfig has additional_config, and its compute_hash() takes it in")
def _(release: Release) -> Iterator[Found]:
    config = release.module("vllm.config.vllm").cls("VllmConfig")
    require("additional_config" in config.fields, f"{config.place} has no additional_config")
    yield from config.method("compute_hash").reads("additional_config")


@fact("attention layers answer get_kv_cache_spec(vllm_config)")
def _(release: Release) -> Iterator[Found]:
    for source in release.sources("vllm.model_executor.layers.attention"):
        for found in source.classes.values():
            if "get_kv_cache_spec" in found.methods:
                method = found.methods["get_kv_cache_spec"]
                taken = method.parameters
                require(taken == ["vllm_config"], f"{method.place} takes {taken}")
                yield method


@fact("a KV cache spec answers max_memory_usage_bytes(vllm_config)")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.v1.kv_cache_interface")
    for found in source.classes.values():
        if "max_memory_usage_bytes" in found.methods:
            method = found.methods["max_memory_usage_bytes"]
            taken = method.parameters
            require(taken == ["vllm_config"], f"{method.place} takes {taken}")
            yield method
    source.cls("KVCacheSpec").method("max_memory_usage_bytes")
