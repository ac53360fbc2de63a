"""What a `vllm serve` command line asks of the offloader, as vLLM's own parser reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .. import versions, vllm_compat
from . import CommandError, plan_checkpoint, plan_config
from .check import Check, size
from .machine import cgroup_memory_limit, memory_total
from .plan_families import describe
from .plan_memory import host_memory
from .plan_sizes import require_divisible, sizes_of

GIVE_BOTH = "serve with --cpu-offload-gb N --cpu-offload-params experts"
# Options under which the shim refuses every layer, and what would change that.
REFUSED = {
    "enable_lora": "LoRA kernels index by expert id",
    "enable_eplb": "expert load balancing moves experts while serving",
    "enable_dbo": "dual batch overlap runs two forwards through a layer at once",
}


@dataclass(frozen=True)
class Experts:
    """Of one rank, bytes on the host, and what they take as pinned memory; and the model's class
    in vLLM."""

    host: int
    pinned: int
    architectures: tuple[str, ...]


def serve_words(words: list[str]) -> list[str]:
    """`serve MODEL …` of the words after `--`. Raises CommandError for another command."""
    found = words[1:] if words[:1] and os.path.basename(words[0]) == "vllm" else words
    if found[:1] != ["serve"]:
        raise CommandError(
            f"{' '.join(words)[:60]!r} is no `vllm serve MODEL ...`; variables such as "
            "EXPERT_CACHE_SLOTS go before the command, where it reads them"
        )
    return found


def experts_of(arguments: Mapping) -> Experts | None:
    """Of the model that is served, where its config.json is on this machine and known."""
    model = arguments.get("model_tag") or arguments.get("model")
    try:
        path = plan_config.find(str(model))
        fields = plan_config.read(path)
        tensors = plan_checkpoint.read(path.parent)
        described = describe(fields, foretell=not tensors)
        ranks = int(arguments.get("tensor_parallel_size") or 1)
        by_expert = bool(arguments.get("enable_expert_parallel"))
        require_divisible(described, ranks, by_expert)
        sizes = sizes_of(described, tensors or described.tensors, ranks, by_expert)
        architectures = tuple(fields.texts("architectures"))
    except CommandError:
        return None
    return Experts(*host_memory(sizes.shapes, sizes.experts), architectures)


def check_arguments(found: dict, version: str | None, environ: Mapping = os.environ) -> list[Check]:
    """`found`: what the probe's step "arguments" said. version: of vLLM, None where there is
    none."""
    if version is None:
        remedy = "run this with the Python that runs vLLM"
        return [Check("offload", "warn", "not read: no vLLM here to read the options", remedy)]
    if "error" in found:
        return [Check("offload", "fail", found["error"], "correct the command line")]
    experts = experts_of(found)
    checks = [_offload(found, version, environ, experts)]
    if experts is not None and checks[0].status != "fail":
        checks.append(_host(experts, int(found.get("tensor_parallel_size") or 1)))
    return checks + _refused(found)


def _offload(found: dict, version: str, environ: Mapping, experts: Experts | None) -> Check:
    gib, params = float(found.get("cpu_offload_gb") or 0), found.get("cpu_offload_params") or []
    backend, group = found.get("offload_backend") or "auto", found.get("offload_group_size") or 0
    if backend == "prefetch" or (backend == "auto" and group):
        remedy = f"--offload-backend uva, and {GIVE_BOTH}"
        return Check("offload", "fail", "the prefetch offloader, which the cache refuses", remedy)
    if not gib:
        alone = " --cpu-offload-params alone offloads nothing" if params else ""
        status = "fail" if alone else "warn"
        return Check("offload", status, f"vLLM offloads nothing.{alone}", GIVE_BOTH)
    if environ.get("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "0") not in ("", "0"):
        return Check(
            "offload", "fail", "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set, so vLLM copies whole "
            "layers in each step", "unset it",
        )  # fmt: skip
    if _ignored(version, environ, experts):
        return Check(
            "offload", "fail", f"vLLM {version} ignores it in its second model runner",
            "VLLM_USE_V2_MODEL_RUNNER=0, or vLLM 0.28 or later",
        )  # fmt: skip
    if params and not any(vllm_compat.offloads_experts(param) for param in params):
        text = f"--cpu-offload-params {' '.join(params)} matches no expert"
        return Check("offload", "fail", text, "--cpu-offload-params experts")
    text = f"{gib:g} GiB a GPU, of {'the experts' if params else 'all weights'} (uva)"
    if not params:
        return Check(
            "offload", "warn", f"{text}; attention is read from the host too, which is slow",
            "--cpu-offload-params experts",
        )  # fmt: skip
    if experts and gib * 2**30 < experts.host:
        text += f"; the experts are {size(experts.host)} a GPU, and the last layers stay resident"
        return Check("offload", "warn", text, "raise --cpu-offload-gb; it is a limit")
    return Check("offload", "ok", text)


def _ignored(version: str, environ: Mapping, experts: Experts | None) -> bool:
    """Before 0.28 the second model runner knows no offloader."""
    setting = environ.get("VLLM_USE_V2_MODEL_RUNNER", "")
    architectures = experts.architectures if experts else ()
    if versions.minor(version) >= (0, 28) or setting == "0":
        return False
    return setting == "1" or vllm_compat.prefers_second_runner(
        versions.minor(version), architectures
    )  # fmt: skip


def _host(experts: Experts, ranks: int) -> Check:
    need, exact = experts.pinned * ranks, experts.host * ranks
    have = min(memory_total()[0], cgroup_memory_limit() or 2**62)
    text = f"{size(exact)} of experts take {size(need)} of pinned memory"
    if need > have:
        return Check(
            "host memory", "fail" if exact > have else "warn", f"{text}; the limit is {size(have)}",
            "more memory, or a smaller type of experts; see docs/sizing.md on rounding",
        )  # fmt: skip
    return Check("host memory", "ok", text)


def _refused(found: dict) -> list[Check]:
    checks = [
        Check("arguments", "fail", f"{reason}, so every layer is refused",
              f"serve without --{name.replace('_', '-')}")
        for name, reason in REFUSED.items()
        if found.get(name)
    ]  # fmt: skip
    if int(found.get("data_parallel_size") or 1) > 1:
        checks.append(
            Check("arguments", "fail", "with data parallelism layers are refused",
                  "serve without --data-parallel-size")
        )  # fmt: skip
    return checks
