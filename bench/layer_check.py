"""One layer's output with and without the cache, bit for bit, in an engine that is up.

Equal tokens can hide a small difference; this cannot. It asks a kernel whether its result depends
on which row an expert lies in, and how much.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from expert_cache_shim import arming, vllm_compat
from expert_cache_shim.discovery import count_experts

# Tokens of a step: one stream, few, more ids than slots, and more than one tile of any kernel.
WIDTHS = (1, 4, 16, 200)


@dataclass(frozen=True)
class Comparison:
    """A step of `tokens` tokens through one layer. difference: the largest between the cached
    and the uncached output. repeated: the same between two uncached outputs."""

    layer: str
    tokens: int
    difference: float
    repeated: float


def compare(model: torch.nn.Module, dtype: torch.dtype) -> list[Comparison]:
    """Every armed layer at every width; `dtype` is that of the activations."""
    found = []
    with torch.inference_mode():
        for name, layer in vllm_compat.moe_layers(model):
            if arming.armed_layer(layer) is not None:
                found += [_compare(name, layer, width, dtype) for width in WIDTHS]
    return found


def _compare(name: str, layer: torch.nn.Module, tokens: int, dtype: torch.dtype) -> Comparison:
    step = _step(layer, tokens, dtype)
    cached = _output(layer, step)
    armed = arming.armed_layer(layer)
    armed.remove()
    try:
        uncached, again = _output(layer, step), _output(layer, step)
    finally:
        armed.install()
    return Comparison(name, tokens, _difference(cached, uncached), _difference(again, uncached))


def _step(layer: torch.nn.Module, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Random arguments of `apply`, the same for every run."""
    experts, (hidden, _) = count_experts(layer), vllm_compat.expert_sizes(layer)
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.topk(layer.top_k)
    arguments = {
        "x": torch.randn(tokens, hidden, generator=generator).to(dtype),
        "topk_weights": weights / weights.sum(1, keepdim=True),
        "topk_ids": ids.to(torch.int32),
    }
    device = next(layer.parameters()).device
    return {name: value.to(device) for name, value in arguments.items()}


def _output(layer: torch.nn.Module, step: dict[str, Any]) -> torch.Tensor:
    wanted = inspect.signature(type(layer.quant_method).apply).parameters
    optional = {n: None for n in ("shared_experts", "shared_experts_input") if n in wanted}
    inputs = {name: value.clone() for name, value in step.items()}
    return layer.quant_method.apply(layer=layer, **inputs, **optional).clone()


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """0.0 for equal bits only."""
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return 0.0
    return max((one.float() - other.float()).abs().max().item(), torch.finfo(torch.float32).tiny)


def describe(comparisons: Iterator[dict] | list[dict]) -> str:
    """`bitwise`, or the largest difference and whether the kernel alone shows one."""
    found = list(comparisons)
    worst = max((c["difference"] for c in found), default=None)
    if worst is None:
        return "-"
    if worst == 0:
        return "bitwise"
    widths = sorted({c["tokens"] for c in found if c["difference"]})
    alone = max(c["repeated"] for c in found)
    return f"up to {worst:.2g} at {', '.join(map(str, widths))} tokens (repeated: {alone:.2g})"
