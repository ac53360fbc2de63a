"""What vLLM's own kernel sees of an armed layer.

vLLM's module, its config objects and its kernel are never changed. The kernel runs on a *view*
of the layer whose expert tensors are the device tensors, through a copy of the quant method
whose kernel and quantisation config hold device tensors too.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from . import vllm_compat
from .discovery import ExpertTensors


def view_layer(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The layer as the kernel sees it: a module of the same class that shares everything with
    `layer` but the named tensors. What a kernel sets on it stays off vLLM's module."""
    view = shallow_copy(layer)
    for holder in ("_parameters", "_buffers", "_modules"):
        held = vars(layer)[holder]
        vars(view)[holder] = {n: value for n, value in held.items() if n not in tensors}
    vars(view).update(tensors)
    return view


class KernelView:
    """A quant method bound to device tensors, and the layer view that goes with it."""

    def __init__(
        self, layer: torch.nn.Module, method: Any, tensors: ExpertTensors,
        rows: dict[int, torch.Tensor], fewer_rows: bool, row_of: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """rows: for each ExpertTensor, by id(), the device tensor that stands for it.
        fewer_rows: those tensors have fewer than E rows. row_of: where the row of each expert
        stands on the device, if experts do not lie at their own numbers."""
        names = {name: rows[id(entry)] for entry in tensors for name in entry.names}
        self.layer = view_layer(layer, names)

        def replace(tensor: torch.Tensor, place: str) -> torch.Tensor:
            entry = tensors.find(tensor)
            return tensor if entry is None else rows[id(entry)]

        self.method = copy_method(method, replace)
        runner = vllm_compat.runner_of(self.method)
        if fewer_rows and vllm_compat.needs_tuned_config(runner):
            vllm_compat.keep_tuned_config(runner, tensors.experts)
        self.takes_experts = row_of is not None and vllm_compat.keep_order(self.method, row_of)
        self.apply: Callable[..., Any] = self.method.apply


Replace = Callable[[torch.Tensor, str], torch.Tensor]


def copy_method(method: Any, replace: Replace) -> Any:
    """A quant method that shares everything with `method` but its expert tensors.

    The chain method -> kernel -> impl -> fused experts -> quantisation config -> descriptors is
    copied link by link, and every tensor on it passes through `replace(tensor, place)`; every
    other object stays shared.
    """
    view = _copy_with(method, replace, "quant_method")
    vars(view).pop("apply", None)
    for name, value in vars(method).items():
        if isinstance(value, types.MethodType) and value.__self__ is method:
            # CustomOp keeps a bound forward; it must run on the copy's kernel.
            vars(view)[name] = types.MethodType(value.__func__, view)
    config = getattr(method, "moe_quant_config", None)
    if config is not None:
        vars(view)["moe_quant_config"] = _copy_config(config, replace)
    kernel = vllm_compat.moe_kernel(method)
    if kernel is not None:
        vars(view)["moe_kernel"] = _copy_kernel(kernel, replace)
    return view


def shallow_copy(original: Any) -> Any:
    """Like copy.copy, without running constructors or __reduce__ of vLLM's classes."""
    new = object.__new__(type(original))
    vars(new).update(vars(original))
    return new


def _copy_with(original: Any, replace: Replace, place: str) -> Any:
    view = shallow_copy(original)
    for name, value in vars(original).items():
        if isinstance(value, torch.Tensor):
            vars(view)[name] = replace(value, f"{place}.{name}")
    return view


def _copy_kernel(kernel: Any, replace: Replace) -> Any:
    view = _copy_with(kernel, replace, "moe_kernel")
    holder = view
    if hasattr(kernel, "impl"):
        holder = view.impl = _copy_with(kernel.impl, replace, "moe_kernel.impl")
    holder.fused_experts = _copy_experts(vllm_compat.fused_experts(kernel), replace)
    return view


def _copy_experts(experts: Any, replace: Replace, place: str = "fused_experts") -> Any:
    """Experts may hold other experts to choose from at each call (vLLM's FallbackExperts)."""
    view = _copy_with(experts, replace, place)
    for name, value in vars(experts).items():
        if name == "quant_config" and value is not None:
            vars(view)[name] = _copy_config(value, replace)
        elif hasattr(value, "quant_config") and hasattr(value, "apply"):
            vars(view)[name] = _copy_experts(value, replace, f"{place}.{name}")
    return view


def _copy_config(config: Any, replace: Replace, place: str = "quant_config") -> Any:
    """A quantisation config with copied descriptors; the original may be a shared singleton."""
    view = _copy_with(config, replace, place)
    for name, value in vars(config).items():
        if any(isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values()):
            if not isinstance(value, torch.Tensor):
                vars(view)[name] = _copy_with(value, replace, f"{place}.{name}")
    return view
