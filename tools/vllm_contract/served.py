"""Experts classes and methods that are served: that they are there, and what computes their
steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from expert_cache_shim import vllm_compat

from .facts import Subject, require
from .layers import FUSED_MOE
from .reading import Differs, Found, Release

fact = Subject("what is served")

# The minor versions that have each: from, to.
RELEASES = {
    "TritonExperts": ("", ""),
    "TritonWNA16Experts": ("", ""),
    "MarlinExperts": ("", ""),
    "CutlassExpertsFp8": ("", ""),
    "TritonOrCutlassExperts": ("", ""),
    "Int4EmulationTritonExperts": ("0.26", ""),
    "Mxfp8EmulationTritonExperts": ("0.24", ""),
    "AWQMarlinMoEMethod": ("", "0.23"),
    "CompressedTensorsWNA16MarlinMoEMethod": ("", "0.26"),
    "CompressedTensorsWNA16MoEMethod": ("", ""),
    "MoeWNA16Method": ("", ""),
    "QuarkW8A8Fp8MoEMethod": ("", ""),
    "QuarkW8A8Int8MoEMethod": ("", ""),
    "CPUUnquantizedExperts": ("0.28", ""),
    "X86CPUUnquantizedExperts": ("0.28", ""),
    "ArmCPUUnquantizedExperts": ("0.28", ""),
    "PowerCPUUnquantizedExperts": ("0.28", ""),
    "CPUExpertsFp8": ("", ""),
    "CPUExpertsInt4": ("0.23", ""),
    "CPUExpertsInt8": ("0.25", ""),
}


def _is_there(name: str) -> None:
    @fact(f"{name} is there", *RELEASES[name])
    def _(release: Release) -> Iterator[Found]:
        yield from release.classes(name)


for _name in sorted(vllm_compat.SERVED):
    _is_there(_name)

# What `apply` of each may call of all that is named like a kernel's launch. `super().apply` is that
# of TritonExperts.
COMES_TO = {
    "TritonExperts": {"invoke_fused_moe_triton_kernel"},
    "TritonWNA16Experts": {"invoke_fused_moe_wna16_triton_kernel"},
    "MarlinExperts": {"fused_marlin_moe"},
    "CutlassExpertsFp8": {"run_cutlass_moe_fp8"},
    "Int4EmulationTritonExperts": {"super().apply"},
    "Mxfp8EmulationTritonExperts": {"super().apply"},
    "AWQMarlinMoEMethod": {"fused_marlin_moe"},
    "CompressedTensorsWNA16MarlinMoEMethod": {"fused_marlin_moe"},
    "CompressedTensorsWNA16MoEMethod": {"fused_experts"},
    "MoeWNA16Method": {"fused_experts"},
    "QuarkW8A8Fp8MoEMethod": {"fused_marlin_moe", "fused_experts", "rocm_aiter_fused_experts"},
    "QuarkW8A8Int8MoEMethod": {"fused_experts"},
}
KERNEL = re.compile(r"\b(?:(?:invoke|fused|run|rocm|dispatch)_\w+|super\(\)\.apply)(?=\()")


def existing(release: Release, names: Iterable[str]) -> Iterator[Found]:
    """The classes of these names that a release has."""
    for name in sorted(names):
        with contextlib.suppress(Differs):
            yield from release.classes(name)


def launches(function: Found) -> set[str]:
    return set(KERNEL.findall(function.text)) - {function.name}


def apply_of(release: Release, experts: Found) -> Found:
    """The `apply` that an object of a class has."""
    methods = (part.methods.get("apply") for part in release.ancestry(experts))
    apply = next(filter(None, methods), None)
    require(apply, f"{experts.name} has no apply at {experts.place}")
    return apply


@fact("on a GPU their steps come to functions that were tried, or to experts of a kernel")
def _(release: Release) -> Iterator[Found]:
    for experts in existing(release, COMES_TO):
        apply = apply_of(release, experts)
        found = launches(apply)
        others = sorted(found - COMES_TO[experts.name])
        require(not others, f"{experts.name} calls {', '.join(others)} at {apply.place}")
        require(found or "self.moe_kernel" in apply.text, f"{apply.place} calls nothing known")
        yield apply


@fact("TritonOrCutlassExperts chooses of CutlassExpertsFp8 and TritonExperts")
def _(release: Release) -> Iterator[Found]:
    chosen = release.cls("TritonOrCutlassExperts").method("get_clses")
    yield from chosen.returns("CutlassExpertsFp8", "TritonExperts")


@fact("fused_experts launches Triton's kernels, or on NVIDIA for 4 bits moe_wna16_gemm")
def _(release: Release) -> Iterator[Found]:
    source = release.module(f"{FUSED_MOE}.fused_moe")
    launched = source.function("dispatch_fused_moe_kernel")
    wanted = {
        "invoke_fused_moe_triton_kernel",
        "invoke_fused_moe_wna16_triton_kernel",
        "invoke_fused_moe_wna16_cuda_kernel",
    }
    found = launches(launched)
    require(found == wanted, f"{launched.place} launches {sorted(found)}")
    yield launched
    asked = source.function("should_moe_wna16_use_cuda")
    for condition in ("current_platform.is_cuda()", "bit == 4"):
        require(condition in asked.text, f"{asked.place} does not ask {condition}")
    yield asked


@fact("of methods, only those served and bitsandbytes call fused_experts")
def _(release: Release) -> Iterator[Found]:
    known = vllm_compat.CALL_FUSED_EXPERTS | {"BitsAndBytesMoEMethod"}
    for method in release.subclasses("FusedMoEMethodBase").values():
        for call in method.calls("fused_experts"):
            require(method.name in known, f"{method.name} does at {call.place}")
            yield call


@fact("QuarkW8A8Fp8MoEMethod chooses AITER by rocm_aiter_moe_enabled", until="0.23")
def _(release: Release) -> Iterator[Found]:
    apply = release.cls("QuarkW8A8Fp8MoEMethod").method("apply")
    require("rocm_aiter_fused_experts" in apply.text, f"{apply.place} does not")
    yield from apply.reads("rocm_aiter_moe_enabled")


@fact("experts in files of AITER are named Aiter")
def _(release: Release) -> Iterator[Found]:
    for experts in release.subclasses("FusedMoEExperts").values():
        if "aiter" in experts.source.name:
            require(experts.name.startswith("Aiter"), f"{experts.name} at {experts.place} is not")
            yield experts
