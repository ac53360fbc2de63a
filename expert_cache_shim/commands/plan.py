"""`plan`: what fits, what it will do, and the command line, before anything is started."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from ..untrusted import time_limit
from . import CommandError, Option, plan_checkpoint, plan_config
from .machine import cgroup_memory_limit, memory_total, torch_backend
from .plan_budget import Budget, Machine, best_slots, budget_of, candidates, offload_gib
from .plan_curves import CURVES
from .plan_families import Model, describe
from .plan_memory import Load, host_memory, most_slots
from .plan_misses import Expectation, from_curves, from_trace
from .plan_quantization import COMMON, Tensor
from .plan_sizes import Sizes, require_divisible, shape_of, sizes_of

LINK = 25e9  # bytes a second; what 16 lanes of PCIe 4.0 bring
MEMORY_RATE = 1e12  # bytes a second of device memory
MOST_SECONDS = 10  # that a config.json may take to be understood; real ones take a tenth
CONTEXT = 8192  # tokens, where neither the user nor the model says less
GIB = 2**30


def plan(
    model: Annotated[
        str,
        Option("MODEL", "A config.json, a folder with one, or the name of a downloaded model."),
    ],
    vram: Annotated[
        float | None, Option("--vram", "Memory of one GPU. Unset: that of GPU 0 here.", "GIB")
    ] = None,
    context: Annotated[
        int | None,
        Option("--max-model-len", "Tokens of a request. Unset: 8192, or the model's.", "TOKENS"),
    ] = None,
    streams: Annotated[int, Option("--max-num-seqs", "Requests at the same time.", "N")] = 1,
    ranks: Annotated[int, Option("--tensor-parallel-size", "GPUs that share the model.", "N")] = 1,
    by_expert: Annotated[
        bool, Option("--enable-expert-parallel", "GPUs have whole experts, not parts of each.")
    ] = False,
    utilization: Annotated[
        float, Option("--gpu-memory-utilization", "What vLLM may use of a GPU.", "SHARE")
    ] = 0.92,
    batched_tokens: Annotated[
        int, Option("--max-num-batched-tokens", "Tokens of a step of prefill.", "TOKENS")
    ] = 2048,
    kv_dtype: Annotated[str, Option("--kv-cache-dtype", "auto or fp8.", "TYPE")] = "auto",
    quantization: Annotated[
        str | None,
        Option("--quantization", f"Plan for other experts: {', '.join(COMMON)}.", "TYPE"),
    ] = None,
    link: Annotated[
        float | None, Option("--link", "Host to GPU. Unset: measured, else 25.", "GB/S")
    ] = None,
    memory_rate: Annotated[
        float | None, Option("--vram-bandwidth", "Of the GPU's memory. Unset: 1000.", "GB/S")
    ] = None,
    resident: Annotated[
        float | None,
        Option("--resident-ms", "A decode step with every expert resident, if measured.", "MS"),
    ] = None,
    ram: Annotated[float | None, Option("--ram", "Memory of the host.", "GIB")] = None,
    trace: Annotated[
        str | None, Option("--trace", "Recorded routing, in place of built-in curves.", "FILE")
    ] = None,
    as_json: Annotated[bool, Option("--json", "Everything as JSON, in bytes and seconds.")] = False,
) -> int:
    """Size slots, memory and decode rate of a model before serving it; status 1 if nothing fits."""
    path = plan_config.find(model)
    tensors = plan_checkpoint.read(path.parent)
    described = _described(path, foretell=not tensors)
    context = _context(described, context)
    load = Load(context, streams, ranks, batched_tokens, _kv_bytes(kv_dtype), by_expert)
    _require_sensible(
        {
            "--vram": vram, "--max-num-seqs": streams, "--tensor-parallel-size": ranks,
            "--max-num-batched-tokens": batched_tokens, "--link": link,
            "--vram-bandwidth": memory_rate, "--resident-ms": resident, "--ram": ram,
            "--gpu-memory-utilization": utilization, "--max-model-len": context,
        }
    )  # fmt: skip
    require_divisible(described, ranks, by_expert)
    sizes, origin = _sizes(path.parent, described, tensors, load, quantization)
    machine, here = _machine(vram, utilization, link, memory_rate, resident)
    best, _ = best_slots(described, sizes, load, machine)
    slots = [0, *candidates(sizes.experts, best)]
    together = _expected(described, sizes, trace, streams, slots)
    alone = _expected(described, sizes, trace, 1, slots) if streams > 1 else together
    budget = budget_of(described, sizes, load, machine, together, alone)
    report = {
        "model": _model_facts(described, sizes, origin, quantization),
        "load": asdict(load),
        "machine": asdict(machine) | here | {"ram": int(ram * GIB) if ram else here["ram"]},
        "budget": asdict(budget),
        "misses_from": [expected.source for expected in together],
        "other_types": _other_types(described, sizes, budget, machine, load),
        "command": command_line(
            model if path != Path(model) else str(path.parent), described, load, budget,
            utilization, kv_dtype,
        ),
    }  # fmt: skip
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        from .plan_screen import show

        show(report, budget)
    return int(not budget.best and not budget.whole)


def _described(path: Path, foretell: bool) -> Model:
    try:
        with time_limit(MOST_SECONDS):
            return describe(plan_config.read(path), foretell)
    except TimeoutError:
        raise CommandError(
            f"{path}: quantization_config: its expressions for names of layers take more than "
            f"{MOST_SECONDS} s"
        ) from None


def _context(model: Model, context: int | None) -> int:
    most = model.context or CONTEXT
    if context is None:
        return min(most, CONTEXT)
    if context > most and model.context:
        raise CommandError(f"--max-model-len {context}: the model has {most} (config.json)")
    return context


def _kv_bytes(dtype: str) -> int:
    if dtype not in ("auto", "bfloat16", "float16") and not dtype.startswith("fp8"):
        raise CommandError(f"--kv-cache-dtype {dtype!r}: it must be auto or fp8")
    return 1 if dtype.startswith("fp8") else 2


def _require_sensible(values: dict[str, float | None]) -> None:
    for name, value in values.items():
        most = {"--gpu-memory-utilization": 1, "--max-num-seqs": 65536}.get(name, 1e12)
        if value is not None and not 0 < value <= most:
            raise CommandError(f"{name} {value:g}: it must be above 0, and at most {most:g}")


def _sizes(
    folder: Path, model: Model, tensors: list[Tensor], load: Load, quantization: str | None
) -> tuple[Sizes, str]:
    """What a rank holds, and where that is known from."""
    origin = "the headers of its checkpoint" if tensors else "config.json"
    try:
        sizes = sizes_of(model, tensors or model.tensors, load.ranks, load.by_expert)
    except CommandError as error:
        raise CommandError(f"{folder}: {error}") from None
    if quantization is None:
        return sizes, origin
    if quantization not in COMMON:
        raise CommandError(
            f"--quantization {quantization!r}: it must be one of {', '.join(COMMON)}"
        )
    shape = shape_of(model, COMMON[quantization], 1 if load.by_expert else load.ranks)
    return replace(sizes, shapes=(shape,)), f"{origin}, but for the experts"


def _machine(
    vram: float | None, utilization: float, link: float | None, memory_rate: float | None,
    resident: float | None,
) -> tuple[Machine, dict[str, Any]]:  # fmt: skip
    """The GPU that is described, or the one that is here; what is assumed of it, and host memory
    where the plan is for this machine."""
    assumed, ram = [], None
    if vram is None:
        total, measured = _gpu_here(link is None)
        vram = total / GIB
        link = link or (measured and measured / 1e9)
        ram = min(memory_total()[0], cgroup_memory_limit() or 2**62)
    if link is None:
        assumed.append("link")
    if memory_rate is None and resident is None:
        assumed.append("memory_rate")
    machine = Machine(
        int(vram * GIB), utilization, link * 1e9 if link else LINK,
        memory_rate * 1e9 if memory_rate else MEMORY_RATE, resident and resident / 1000,
    )  # fmt: skip
    return machine, {"assumed": assumed, "ram": ram}


def _gpu_here(measure_link: bool) -> tuple[int, float | None]:
    """Bytes of GPU 0, and bytes a second of its link."""
    from .check_device import needed_file
    from .probe import probe

    backend, _ = torch_backend()
    if backend not in ("cuda", "hip"):
        raise CommandError("this Python has no PyTorch for a GPU; say --vram GIB")
    steps = ["torch", "link"] if measure_link else ["torch"]
    found = probe(steps, backend, needed_file(backend))
    gpus = found["torch"].get("gpus")
    if not gpus:
        raise CommandError("PyTorch sees no GPU here; say --vram GIB")
    link = found.get("link", {})
    rate = link["bytes"] / link["seconds"] if "seconds" in link else None
    return gpus[0]["bytes"], rate


def _expected(
    model: Model, sizes: Sizes, trace: str | None, streams: int, slots: list[int]
) -> list[Expectation]:
    """Ranks with whole experts have slots for their own; together they have a multiple."""
    ranks = model.experts // sizes.experts
    of_all = [count * ranks for count in slots]
    if trace is not None:
        found = [from_trace(trace, model.experts, model.top_k, streams, of_all)]
    else:
        found = from_curves(CURVES, model.kind, model.experts, model.top_k, streams, of_all)
    return [
        replace(one, misses={count: one.misses[count * ranks] for count in slots})
        for one in found
    ]  # fmt: skip


def _model_facts(
    model: Model, sizes: Sizes, origin: str, quantization: str | None
) -> dict[str, Any]:
    return {
        "kind": model.kind,
        "layers": model.layers,
        "moe_layers": len(model.moe_layers),
        "experts": model.experts,
        "experts_of_a_rank": sizes.experts,
        "top_k": model.top_k,
        "stored_as": quantization or model.quantization.label,
        "sizes_from": origin,
        "shapes": [asdict(shape) | {"bytes_per_expert": shape.nbytes} for shape in sizes.shapes],
    }


def _other_types(
    model: Model, sizes: Sizes, budget: Budget, machine: Machine, load: Load
) -> dict[str, dict[str, int]]:
    """Bytes of one expert in one layer by how it could be stored, and the slots that would fit."""
    found = {}
    room = machine.usable - budget.fixed.total
    for name, scheme in COMMON.items():
        shape = shape_of(model, scheme, 1 if load.by_expert else load.ranks)
        total, _ = host_memory((shape,), sizes.experts)
        slots = sizes.experts if total <= room else most_slots((shape,), sizes.experts, room)
        found[name] = {"expert": shape.nbytes, "all": total, "slots": slots}
    return found


def command_line(
    name: str, model: Model, load: Load, budget: Budget, utilization: float, kv_dtype: str
) -> list[str]:  # fmt: skip
    """Words of a shell command; the part that says what the cache takes comes first."""
    words = ["vllm", "serve", shlex.quote(name)]
    words += ["--max-model-len", str(load.context), "--max-num-seqs", str(load.streams)]
    words += ["--max-num-batched-tokens", str(load.batched_tokens)]
    words += ["--gpu-memory-utilization", f"{utilization:g}"]
    words += ["--tensor-parallel-size", str(load.ranks)] if load.ranks > 1 else []
    words += ["--enable-expert-parallel"] if load.by_expert else []
    words += ["--kv-cache-dtype", kv_dtype] if kv_dtype != "auto" else []
    if budget.whole or not budget.best:
        return words
    words += ["--cpu-offload-gb", str(offload_gib(budget)), "--cpu-offload-params", "experts"]
    if model.quantization.label == "mxfp4" and model.family.fused:
        words += ["--moe-backend", "marlin"]  # of those for MXFP4, the one that plan_sizes is for
    variables = [f"EXPERT_CACHE_SLOTS={budget.best}"]
    variables += [] if budget.overflow else ["EXPERT_CACHE_OVERFLOW=off"]
    return [*variables, *words]
