"""Kernels: their parts, their quantisation configs, and how many experts they read."""

from __future__ import annotations

from collections.abc import Iterator

from expert_cache_shim import vllm_compat

from .facts import Subject, require
from .layers import FUSED_MOE
from .reading import Found, Release
from .served import apply_of, existing

fact = Subject("kernels")


@fact("what looks ids up uses the expert_map that apply is given, or the layer's")
def _(release: Release) -> Iterator[Found]:
    """Under expert parallelism. A method that has a kernel leaves that to its experts."""
    for found in existing(release, vllm_compat.LOOK_UP_EXPERT_MAP):
        apply = apply_of(release, found)
        if "self.moe_kernel" in apply.text:
            continue
        uses = apply.text.count("expert_map") - apply.parameters.count("expert_map")
        require(uses > 0, f"{found.name} uses none at {apply.place}")
        yield apply


@fact("FusedMoEKernel.impl, and in it fused_experts and prepare_finalize")
def _(release: Release) -> Iterator[Found]:
    source = release.module(f"{FUSED_MOE}.modular_kernel")
    kernel = source.cls("FusedMoEKernel")
    require("impl" in kernel.attributes, f"{kernel.place} sets no impl")
    yield kernel.attributes["impl"]
    impl = source.cls("FusedMoEKernelModularImpl")
    for name in ("fused_experts", "prepare_finalize"):
        require(name in impl.attributes, f"{impl.place} sets no {name}")
        yield impl.attributes[name]


@fact(f"{vllm_compat.LOCAL_PREPARE_FINALIZE} is there")
def _(release: Release) -> Iterator[Found]:
    yield release.cls(vllm_compat.LOCAL_PREPARE_FINALIZE)


@fact("FusedMoEQuantConfig has _a1, _a2, _w1, _w2")
def _(release: Release) -> Iterator[Found]:
    config = release.module(f"{FUSED_MOE}.config").cls("FusedMoEQuantConfig")
    for name in ("_a1", "_a2", "_w1", "_w2"):
        require(name in config.fields, f"{config.place} has no {name}")
        yield config.fields[name]


@fact("FusedMoEQuantDesc has scale, alpha_or_gscale, zp, bias and no other tensor")
def _(release: Release) -> Iterator[Found]:
    desc = release.module(f"{FUSED_MOE}.config").cls("FusedMoEQuantDesc")
    tensors = {n for n, field in desc.fields.items() if "Tensor" in field.text}
    wanted = {"scale", "alpha_or_gscale", "zp", "bias"}
    require(tensors == wanted, f"the tensors of {desc.place} are {sorted(tensors)}")
    yield desc


@fact("experts hold quant_config and have block_shape")
def _(release: Release) -> Iterator[Found]:
    experts = release.module(f"{FUSED_MOE}.modular_kernel").cls("FusedMoEExperts")
    require("quant_config" in experts.attributes, f"{experts.place} sets no quant_config")
    yield experts.attributes["quant_config"]
    yield experts.method("block_shape")


COUNTS = ("num_experts", "num_local_experts", "local_num_experts", "global_num_experts")


def served_by_plain(release: Release) -> Iterator[Found]:
    """The experts classes that plain storage serves, those that this release has."""
    return existing(release, vllm_compat.TAKE_FEWER_EXPERTS)


@fact("what plain storage serves reads the number of experts from the weights only")
def _(release: Release) -> Iterator[Found]:
    """A read of a count that is kept beside the weights, in a method that an object runs. What
    LoRA keeps does not matter: such layers are refused."""
    common = {"FusedMoEExperts", "FusedMoEExpertsModular", "LoRAExpertsMixin"}
    for experts in served_by_plain(release):
        for part in release.ancestry(experts):
            for method in part.methods.values() if part.name not in common else ():
                if not method.decorators & {"staticmethod", "classmethod"}:
                    for read in method.reads(*COUNTS):
                        require(False, f"{experts.name} reads {read.text} at {read.place}")
        yield experts


@fact("fused_moe.get_config() gives an overriding configuration")
def _(release: Release) -> Iterator[Found]:
    getter = release.module(FUSED_MOE).function("get_config")
    require(not getter.parameters, f"{getter.place} takes {getter.parameters}")
    yield getter


@fact("try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, block_shape)")
def _(release: Release) -> Iterator[Found]:
    lookup = release.module(f"{FUSED_MOE}.fused_moe").function("try_get_optimal_moe_config")
    wanted = ["w1_shape", "w2_shape", "top_k", "dtype", "M", "block_shape"]
    require(lookup.parameters == wanted, f"its parameters are {lookup.parameters}")
    yield lookup
    require("get_config()" in lookup.text, f"{lookup.place} does not ask get_config")
    imported = f"from {FUSED_MOE} import get_config"
    require(imported in lookup.text, f"{lookup.place} does not import get_config when called")


@fact("experts look it up by shapes, top k, type, tokens and block shape")
def _(release: Release) -> Iterator[Found]:
    wanted = (
        "w1.size(), w2.size(), top_k_num, self.quant_config.config_name(hidden_states.dtype), "
        "num_tokens, block_shape=self.block_shape"
    )
    for name in sorted(vllm_compat.TUNED_BY_EXPERTS):
        calls = list(release.cls(name).calls("try_get_optimal_moe_config"))
        require(calls, f"{name} does not look it up")
        for call in calls:
            passed = call.text.split("(", 1)[1][:-1]
            require(passed == wanted, f"{call.place} passes {passed}")
            yield call


@fact("no other experts that plain storage serves look one up")
def _(release: Release) -> Iterator[Found]:
    for experts in served_by_plain(release):
        if experts.name not in vllm_compat.TUNED_BY_EXPERTS:
            for part in release.ancestry(experts):
                for call in part.calls("try_get_optimal_moe_config"):
                    require(False, f"{experts.name} does at {call.place}")
        yield experts


@fact("apply of tuned experts takes hidden_states, w1, w2, topk_ids")
def _(release: Release) -> Iterator[Found]:
    for name in sorted(vllm_compat.TUNED_BY_EXPERTS):
        apply = release.cls(name).method("apply")
        missing = {"hidden_states", "w1", "w2", "topk_ids"} - set(apply.parameters)
        require(not missing, f"{apply.place} takes no {sorted(missing)}")
        yield apply


@fact("FusedMoEQuantConfig.config_name(dtype)")
def _(release: Release) -> Iterator[Found]:
    config = release.module(f"{FUSED_MOE}.config").cls("FusedMoEQuantConfig")
    method = config.method("config_name")
    require(method.parameters == ["dtype"], f"{method.place} takes {method.parameters}")
    yield method


MARLIN = f"{FUSED_MOE}.experts.marlin_moe"


@fact("fused_marlin_moe sorts by moe_align_block_size, a name of its module, and once")
def _(release: Release) -> Iterator[Found]:
    source = release.module(MARLIN)
    imported = source.imports("moe_align_block_size")
    require(imported, f"{source.name} does not import it")
    yield imported
    function = source.function("fused_marlin_moe")
    require(not function.decorators, f"{function.place} is decorated")
    wanted = (
        "moe_align_block_size(topk_ids, block_size_m, global_num_experts, expert_map, "
        "ignore_invalid_experts=True)"
    )
    calls = list(function.calls("moe_align_block_size"))
    require([call.text for call in calls] == [wanted], f"{function.place} calls it otherwise")
    yield from calls


@fact("moe_align_block_size returns the experts of blocks second")
def _(release: Release) -> Iterator[Found]:
    function = release.module(f"{FUSED_MOE}.moe_align_block_size").function("moe_align_block_size")
    yield from function.returns("sorted_ids", "expert_ids", "num_tokens_post_pad")


def _calls_fused_marlin(name: str, until: str = "") -> None:
    @fact(f"{name} calls fused_marlin_moe by its name", until=until)
    def _(release: Release) -> Iterator[Found]:
        experts = release.cls(name)
        apply = experts.method("apply")
        require(not apply.decorators, f"{apply.place} is decorated")
        chosen = experts.attributes.get("use_marlin")
        always = chosen is None or chosen.text == "self.use_marlin = True"
        chooses = bool(list(apply.reads("use_marlin")))
        require(chooses != always, f"{apply.place} does not go by {experts.name}.use_marlin")
        yield from apply.calls("fused_marlin_moe")


_calls_fused_marlin("MarlinExperts")
_calls_fused_marlin("AWQMarlinMoEMethod", until="0.21")
_calls_fused_marlin("CompressedTensorsWNA16MarlinMoEMethod", until="0.22")
_calls_fused_marlin("QuarkW8A8Fp8MoEMethod", until="0.23")


@fact("nothing else comes to Marlin's kernel for experts, but BatchedMarlinExperts")
def _(release: Release) -> Iterator[Found]:
    known = {
        "moe_wna16_marlin_gemm": {"_fused_marlin_moe"},
        "_fused_marlin_moe": {"fused_marlin_moe", "batched_fused_marlin_moe"},
        "fused_marlin_moe": vllm_compat.CALL_FUSED_MARLIN,
        "batched_fused_marlin_moe": {"BatchedMarlinExperts"},
    }
    for name, callers in known.items():
        for source in release.sources("vllm.model_executor", mentioning=name):
            for part in (*source.functions.values(), *source.classes.values()):
                for call in part.calls(name):
                    require(part.name in callers, f"{part.name} calls it at {call.place}")
                    yield call
