"""The cache inside a graph that torch.compile traces.

On CUDA and ROCm a mixture-of-experts layer is one opaque op of vLLM's, and nothing here is used.
On a CPU, Dynamo traces through `apply`. Launching kernels cannot be traced, so that part is an op
of its own: routing ids in, row ids out. The graph around it stays what it was, operation by
operation, so a compiled model gives the same result with and without the cache.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layer import ExpertCache

_caches: weakref.WeakValueDictionary[str, ExpertCache] = weakref.WeakValueDictionary()


def register(model: str, layer: str, cache: ExpertCache) -> str:
    """Registers a cache for `rows`. A graph refers to it by the key returned, which no other
    living cache has. The first of a layer has the same in every process, because a compiled graph
    may be read from disk by another one; those of further engines are numbered."""
    names = itertools.chain((model,), (f"{model}#{number}" for number in itertools.count(2)))
    keys = (f"{name}/{layer}" for name in names)
    return next(key for key in keys if _caches.setdefault(key, cache) is cache)


@torch.library.custom_op("expert_cache::rows", mutates_args=())
def rows(topk_ids: torch.Tensor, cache: str) -> torch.Tensor:
    """topk_ids: `[tokens, top_k]` int32 or int64. Returns the ids for the kernel, alike.

    Fetching is its side effect on memory that the graph reads only through the result's ids.
    """
    return _caches[cache].run(topk_ids, 0)


@rows.register_fake
def _(topk_ids: torch.Tensor, cache: str) -> torch.Tensor:
    return torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)
