"""Mixture-of-experts layers: what they own, and how their quant method is called."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Subject, require
from .reading import Differs, Found, Release

fact = Subject("layers")
FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def owner(release: Release) -> Found:
    """The module that owns the experts' weights: RoutedExperts, or FusedMoE before it."""
    try:
        return release.module(f"{FUSED_MOE}.routed_experts").cls("RoutedExperts")
    except Differs:
        return release.module(f"{FUSED_MOE}.layer").cls("FusedMoE")


@fact("FusedMoE owns the weights", until="0.23")
def _(release: Release) -> Iterator[Found]:
    yield release.module(f"{FUSED_MOE}.layer").cls("FusedMoE")


@fact("RoutedExperts owns the weights", since="0.24")
def _(release: Release) -> Iterator[Found]:
    yield release.module(f"{FUSED_MOE}.routed_experts").cls("RoutedExperts")


def _has(*names: str) -> None:
    @fact(f"the owner has {', '.join(names)}")
    def _(release: Release) -> Iterator[Found]:
        layer = owner(release)
        found = layer.methods | layer.attributes
        for name in names:
            require(name in found, f"{layer.name} ({layer.place}) has no {name}")
            yield found[name]


_has("quant_method")
_has("moe_config")
_has("hidden_size", "intermediate_size_per_partition", "top_k")


@fact("the owner's expert_map is a property")
def _(release: Release) -> Iterator[Found]:
    found = owner(release).method("expert_map")
    require("property" in found.decorators, f"{found.place} is none")
    yield found


@fact("expert_map gives the buffer _expert_map, or AITER's expert_mask")
def _(release: Release) -> Iterator[Found]:
    layer = owner(release)
    found = layer.method("expert_map")
    given = {read.node.attr for read in found.reads("_expert_map", "expert_mask")}
    require(given == {"_expert_map", "expert_mask"}, f"{found.place} reads {sorted(given)}")
    require("_expert_map" in layer.attributes, f"{layer.place} registers none")
    yield found
    yield layer.attributes["_expert_map"]


@fact("the owner asks its quant method to create the weights")
def _(release: Release) -> Iterator[Found]:
    yield from owner(release).calls("create_weights")


@fact("unquantised weights are w13_weight and w2_weight")
def _(release: Release) -> Iterator[Found]:
    method = release.cls("UnquantizedFusedMoEMethod").method("create_weights")
    calls = list(method.calls("register_parameter"))
    for name in ("w13_weight", "w2_weight"):
        found = [call for call in calls if repr(name) in call.text]
        require(found, f"{method.place} registers no {name}")
        yield found[0]


def _ensure(name: str, since: str, until: str) -> None:
    @fact(f"the owner's {name}()", since, until)
    def _(release: Release) -> Iterator[Found]:
        found = owner(release).method(name)
        require(found.parameters == [], f"{found.place} takes {found.parameters}")
        yield found


_ensure("ensure_moe_quant_config_init", "", "0.23")
_ensure("_ensure_moe_quant_config_init", "0.24", "")


@fact("layer.enable_eplb", until="0.21")
def _(release: Release) -> Iterator[Found]:
    layer = owner(release)
    require("enable_eplb" in layer.attributes, f"{layer.place} sets none")
    yield layer.attributes["enable_eplb"]


@fact("layer.moe_parallel_config", until="0.23")
def _(release: Release) -> Iterator[Found]:
    layer = owner(release)
    require("moe_parallel_config" in layer.attributes, f"{layer.place} sets none")
    yield layer.attributes["moe_parallel_config"]


def _config_field(owner_name: str, *names: str) -> None:
    @fact(f"{owner_name} has {', '.join(names)}")
    def _(release: Release) -> Iterator[Found]:
        config = release.module(f"{FUSED_MOE}.config").cls(owner_name)
        for name in names:
            require(name in config.fields, f"{config.place} has no {name}")
            yield config.fields[name]


_config_field("FusedMoEConfig", "moe_parallel_config")
_config_field("FusedMoEConfig", "is_lora_enabled")
_config_field("FusedMoEParallelConfig", "enable_eplb")
_config_field("FusedMoEParallelConfig", "dp_size")


def apply_methods(release: Release) -> Iterator[Found]:
    """Every definition of `apply` by a fused mixture-of-experts method."""
    for found in release.subclasses("FusedMoEMethodBase").values():
        if "apply" in found.methods:
            yield found.methods["apply"]


@fact("apply of every FusedMoEMethodBase takes layer, x, topk_weights, topk_ids")
def _(release: Release) -> Iterator[Found]:
    for apply in apply_methods(release):
        first = apply.parameters[:4]
        wanted = ["layer", "x", "topk_weights", "topk_ids"]
        require(first == wanted, f"{apply.place} takes {first} first")
        yield apply


@fact("apply takes shared_experts", since="0.22")
def _(release: Release) -> Iterator[Found]:
    apply = release.cls("FusedMoEMethodBase").method("apply")
    require("shared_experts" in apply.parameters, f"{apply.place} does not")
    yield apply


@fact("layers call apply by keyword")
def _(release: Release) -> Iterator[Found]:
    for source in release.sources(FUSED_MOE, mentioning="quant_method.apply("):
        for call in source.root.calls("apply"):
            if not call.text.split(".apply(")[0].endswith("quant_method"):
                continue
            require(not call.node.args, f"{call.place} passes arguments by position")
            missing = {"layer", "x", "topk_weights", "topk_ids"} - call.keywords.keys()
            require(not missing, f"{call.place} does not pass {sorted(missing)}")
            yield call


@fact("is_monolithic is a property of every method that defines it")
def _(release: Release) -> Iterator[Found]:
    for found in release.subclasses("FusedMoEMethodBase").values():
        if "is_monolithic" in found.methods:
            method = found.methods["is_monolithic"]
            require("property" in method.decorators, f"{method.place} is none")
            yield method
    release.cls("FusedMoEMethodBase").method("is_monolithic")


@fact("a method holds moe_kernel and moe_quant_config")
def _(release: Release) -> Iterator[Found]:
    base = release.cls("FusedMoEMethodBase")
    for name in ("moe_kernel", "moe_quant_config"):
        require(name in base.attributes, f"{base.place} sets no {name}")
        yield base.attributes[name]


@fact("on a CPU the runner calls the layer, not the opaque op")
def _(release: Release) -> Iterator[Found]:
    runner = release.module(f"{FUSED_MOE}.runner.moe_runner")
    require("torch.ops.vllm.moe_forward" in runner.text, f"{runner.name} has no moe_forward op")
    yield from runner.root.calls("is_cpu")


@fact("routing ids of a local layer have no type of their own, so int32")
def _(release: Release) -> Iterator[Found]:
    local = release.cls("MoEPrepareAndFinalizeNoDPEPModular").method("topk_indices_dtype")
    require(any("return None" in line for line in local.text.splitlines()), f"{local.place}")
    yield local
    router = release.module(f"{FUSED_MOE}.router.fused_topk_router")
    default = "torch.int32 if indices_type is None else indices_type"
    require(default in router.text, f"{router.name} has another default")
    yield router.root.methods["fused_topk"]
