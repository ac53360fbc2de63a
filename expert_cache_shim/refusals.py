"""The questions a layer must pass before it is armed, and the refusals that answer them.

A refusal says what was found and what would change it. A question that cannot be answered for
certain is answered "no": a layer that is not armed serves as vLLM would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import native, policy, vllm_compat
from .discovery import (
    ExpertTensors,
    NotExpertMajor,
    count_experts,
    layer_tensors,
    reachable_tensors,
)
from .entry import Entry
from .settings import Settings
from .view import copy_method

_UVA = "unset VLLM_WEIGHT_OFFLOADING_DISABLE_UVA; under WSL set VLLM_WSL2_ENABLE_PIN_MEMORY=1"
OFFLOAD = "serve with --cpu-offload-gb N --cpu-offload-params experts"
RESIDENT = "its weights are resident in device memory"


@dataclass(frozen=True)
class Refusal(Exception):
    """Why a layer is not armed, and what would change that."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass
class Candidate:
    """A layer that passed every question, before device memory is spent on it."""

    name: str
    layer: torch.nn.Module
    experts: int
    tensors: ExpertTensors
    expert_map: np.ndarray | None = None  # as `read_expert_map` returns it

    @property
    def device(self) -> torch.device:
        """Where the layer's kernels run."""
        return next(iter(layer_tensors(self.layer).values())).device

    @property
    def slot_bytes(self) -> int:
        return sum(entry.stride for entry in self.tensors)


def inspect(name: str, layer: torch.nn.Module, model_config: Any, settings: Settings) -> Candidate:
    """Asks every question that needs no device memory. Raises Refusal."""
    check_served(layer, model_config, settings)
    experts = count_experts(layer)
    tensors = discover(layer, experts)
    return Candidate(name, layer, experts, tensors, read_expert_map(layer, experts))


def check_served(layer: torch.nn.Module, model_config: Any, settings: Settings) -> None:
    """The questions that can be asked before the layer's tensors are final. Raises Refusal."""
    if vllm_compat.is_draft_model(model_config):
        raise Refusal("a draft model's experts are few and resident", "nothing needs to change")
    _check_residency(layer, settings)
    _check_form(layer)


def _check_residency(layer: torch.nn.Module, settings: Settings) -> None:
    """Questions that the tensors' devices and the offloader answer. Where a pointer of a GPU
    tensor really points is asked later, of the driver."""
    devices = {tensor.device.type for tensor in layer_tensors(layer).values()}
    if "meta" in devices:
        raise Refusal("its weights are not loaded (meta tensors)", "load real weights")
    offloader = vllm_compat.offloader_name()
    if offloader == "PrefetchOffloader":
        raise Refusal(
            "the prefetch offloader moves whole layers through a buffer that layers share",
            "use the UVA offloader: --offload-backend uva, and " + OFFLOAD,
        )
    if "cpu" not in devices:
        return
    if torch.cuda.is_available():
        raise Refusal(
            "its weights are offloaded without unified addressing (non-UVA), so the GPU cannot "
            "read them in place",
            _UVA,
        )
    if not settings.allow_cpu:
        raise Refusal(
            "this engine runs on a CPU, where no layer is offloaded to the host",
            f"on a GPU {OFFLOAD}; to try the cache on a CPU set EXPERT_CACHE_ALLOW_CPU=1",
        )


def _check_form(layer: torch.nn.Module) -> None:
    """Questions about how vLLM calls this layer."""
    method = layer.quant_method
    if vllm_compat.is_monolithic(method):
        raise Refusal(
            f"{type(method).__name__} is monolithic: it routes inside the kernel and has no "
            "routing ids to rewrite",
            "choose a modular kernel, for example --moe-backend triton, or marlin for MXFP4",
        )
    if vllm_compat.is_lora_enabled(layer):
        raise Refusal("LoRA kernels index by expert id", "serve without --enable-lora")
    if vllm_compat.is_eplb_enabled(layer):
        raise Refusal(
            "expert load balancing (EPLB) moves experts while serving",
            "serve without --enable-eplb",
        )
    if vllm_compat.uses_ubatches():
        raise Refusal(
            "dual batch overlap (DBO) runs two forwards through a layer at once",
            "serve without --enable-dbo",
        )
    _check_kernel(layer, method)
    if "apply" in vars(method) and Entry.of(method) is None:
        raise Refusal(
            "another package has replaced apply() of this layer's quant method "
            f"({vars(method)['apply']!r})",
            "remove one of the two",
        )


def _check_kernel(layer: torch.nn.Module, method: Any) -> None:
    kernel = vllm_compat.moe_kernel(method)
    prepare = vllm_compat.prepare_finalize(kernel)
    if prepare is not None and type(prepare).__name__ != vllm_compat.LOCAL_PREPARE_FINALIZE:
        raise Refusal(
            f"{type(prepare).__name__} moves routing ids between ranks after the cache has "
            "rewritten them",
            "serve with one data-parallel rank and without all2all; expert parallelism over "
            "tensor-parallel ranks is served",
        )
    if prepare is None and vllm_compat.data_parallel_size(layer) > 1:
        raise Refusal(
            "data parallelism gathers routing ids of other ranks",
            "serve with one data-parallel rank",
        )
    if not vllm_compat.is_served(method):
        _refuse_unproven(method)


def _refuse_unproven(method: Any) -> None:
    name = type(vllm_compat.runner_of(method)).__name__
    reason = f"it is not proven that {name} gives the same result wherever an expert lies"
    if vllm_compat.uses_aiter(method):
        raise Refusal(reason, "set VLLM_ROCM_USE_AITER_MOE=0")
    if vllm_compat.moe_kernel(method) is None:
        raise Refusal(reason, "serve the model in another quantisation")
    raise Refusal(reason, f"{_OTHER_KERNEL}, for example triton, or marlin for 4-bit weights")


def read_expert_map(layer: torch.nn.Module, experts: int) -> np.ndarray | None:
    """Under expert parallelism the layer's map, `[ids of all ranks]` int32: the expert of this
    rank, or -1. None without. Raises Refusal unless its kernel is known to go by that map."""
    handed, expert_map = vllm_compat.expert_map(layer), vllm_compat.global_to_local(layer)
    if handed is None:
        return None
    runner = vllm_compat.runner_of(layer.quant_method)
    if handed is not expert_map or type(runner).__name__ not in vllm_compat.LOOK_UP_EXPERT_MAP:
        raise Refusal(
            f"{type(runner).__name__} is not known to look ids up in the layer's expert_map, as "
            "expert parallelism needs",
            "serve without --enable-expert-parallel",
        )
    found = expert_map.to("cpu", torch.int32).numpy()
    try:
        policy.ids_of_experts(found, experts)
    except ValueError as error:
        raise Refusal(str(error), "serve without --enable-expert-parallel") from None
    return found


def discover(layer: torch.nn.Module, experts: int) -> ExpertTensors:
    """The layer's per-expert tensors, those inside its kernel and configs included.

    Raises Refusal for a per-expert tensor that the cache could not stand in for: it would go on
    being read by expert number while the ids are rows, silently.
    """
    if not 2 <= experts <= 1024:
        raise Refusal(
            f"it has {experts} experts; the cache serves 2 to 1024", "nothing needs to change"
        )
    vllm_compat.ensure_quant_config(layer)
    tensors = ExpertTensors(experts)
    method = layer.quant_method
    try:
        for name, tensor in layer_tensors(layer).items():
            if tensors.add(tensor, name=name) is None and _is_per_expert(tensor, experts):
                raise Refusal(_leak(name), _OTHER_KERNEL)

        def collect(tensor: torch.Tensor, place: str) -> torch.Tensor:
            tensors.add(tensor, place=place)
            return tensor

        copy_method(method, collect)
    except NotExpertMajor as error:
        raise Refusal(str(error), _OTHER_KERNEL) from None
    _check_leaks(method, tensors)
    return tensors


_OTHER_KERNEL = "choose another kernel with --moe-backend"


def _leak(place: str) -> str:
    return f"{place} is per-expert data that the cache cannot stand in for"


def _check_leaks(method: Any, tensors: ExpertTensors) -> None:
    """Walks a copy from which every replaceable tensor has been taken: what is still there and
    is indexed by expert would be read by row. Raises Refusal."""
    nothing = torch.empty(0, device="cpu")

    def take(tensor: torch.Tensor, place: str) -> torch.Tensor:
        return tensor if tensors.find(tensor) is None else nothing

    left = vars(copy_method(method, take))
    for place, tensor in reachable_tensors(left, "quant_method"):
        if tensors.find(tensor) is not None or _is_per_expert(tensor, tensors.experts):
            raise Refusal(_leak(place), _OTHER_KERNEL)
    for place, tensor in reachable_tensors(left, "quant_method", modules=True):
        if tensors.find(tensor) is not None:
            raise Refusal(_leak(place), _OTHER_KERNEL)


def _is_per_expert(tensor: torch.Tensor, experts: int) -> bool:
    """By any dimension; a tensor that repeats one value for every expert is not."""
    if experts not in tensor.shape or tensor.numel() == 0:
        return False
    return tensor.stride(tuple(tensor.shape).index(experts)) != 0


def check_on_host(candidate: Candidate, library: native.Library) -> None:
    """Most of the layer's bytes must lie in host memory, asked of the driver: `.device` says
    "cuda" for host memory too, and vLLM's own flag can be stale. Raises Refusal."""
    kinds = {e.label: library.pointer_kind(e.tensor.data_ptr()) for e in candidate.tensors}
    unreadable = [label for label, kind in kinds.items() if kind == native.HOST_UNREADABLE]
    if unreadable:
        raise Refusal(f"{unreadable[0]} lies in host memory that the GPU cannot read", _UVA)
    host = sum(e.nbytes for e in candidate.tensors if kinds[e.label] != native.DEVICE)
    if 2 * host <= candidate.tensors.record_bytes:
        raise Refusal(RESIDENT, f"to offload {OFFLOAD}")


def check_compiled(candidate: Candidate, storage: str) -> None:
    """What a graph could not do that torch.compile makes of a layer on a CPU. Raises Refusal."""
    if not vllm_compat.compiles_on_cpu():
        return
    if storage == "plain":
        raise Refusal(
            "a graph that is compiled on a CPU cannot choose between slots and scratch",
            "use EXPERT_CACHE_STORAGE=virtual, or serve with --enforce-eager",
        )
    most = vllm_compat.most_tokens() * vllm_compat.top_k(candidate.layer)
    if most > policy.MAX_IDS:
        raise Refusal(
            f"a step may have {most} routing ids, and a graph that is compiled on a CPU cannot "
            f"leave one of more than {policy.MAX_IDS} to vLLM",
            "lower --max-num-batched-tokens, or serve with --enforce-eager",
        )


def check_plain(method: Any) -> None:
    runner = vllm_compat.runner_of(method)
    remedy = "use EXPERT_CACHE_STORAGE=virtual or auto"
    if type(runner).__name__ not in vllm_compat.TAKE_FEWER_EXPERTS:
        raise Refusal(
            f"{type(runner).__name__} is not known to run with fewer experts than the model "
            "has, as plain storage needs",
            remedy,
        )
    if vllm_compat.needs_tuned_config(runner) and not vllm_compat.can_keep_tuned_config(runner):
        raise Refusal(
            f"the tuned configuration of {type(runner).__name__} cannot be kept in this vLLM, "
            "and another one may change results",
            remedy,
        )
