"""The cache inside a graph that torch.compile traces.

On CUDA and ROCm a mixture-of-experts layer is one opaque op of vLLM's, and nothing here is used.
On a CPU, Dynamo traces through `apply`. Launching kernels cannot be traced, so that part is an op
of its own: routing ids in, row ids out. The graph around it stays what it was, operation by
operation, so a compiled model gives the same result with and without the cache.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layer import ExpertCache

_caches: weakref.WeakValueDictionary[str, ExpertCache] = weakref.WeakValueDictionary()


def register(model: str, layer: str, cache: ExpertCache) -> str:
    """Registers a cache for `rows`. A graph refers to it by the key returned, which is the same
    in every process: a compiled graph may be read from disk by another one."""
    key = _key(model, layer)
    _caches[key] = cache
    return key


def is_taken(model: str, layer: str) -> bool:
    """Whether a model of this name serves in this process: a graph would find the wrong cache."""
    if _key(model, layer) in _caches:
        gc.collect()  # that model may have been dropped
    return _key(model, layer) in _caches


def _key(model: str, layer: str) -> str:
    return f"{model}/{layer}"


@torch.library.custom_op("expert_cache::rows", mutates_args=())
def rows(topk_ids: torch.Tensor, cache: str) -> torch.Tensor:
    """topk_ids: `[tokens, top_k]` int32 or int64. Returns the ids for the kernel, alike.

    Fetching is its side effect on memory that the graph reads only through the result's ids.
    """
    return _caches[cache].run(topk_ids, 0)


@rows.register_fake
def _(topk_ids: torch.Tensor, cache: str) -> torch.Tensor:
    return torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)
