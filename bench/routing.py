"""Routing that is the same for every arm: recorded expert ids, replayed inside CUDA graphs.

The weights of a benchmark are random, so its own routing is flat: no cache could help it. vLLM's
RoutingSimulator accepts a strategy of ours in place of the model's routers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

TRACE = Path(__file__).with_name("data") / "gpt_oss_120b.npz"
TRACE_EXPERTS = 128
STRATEGY = "expert_cache_replay"
# Steps of the trace between two streams: a prime, so that streams meet as late as can be.
STREAM_OFFSET = 97
MAX_TOKENS = 65536


def trace_rows(layers: int, top_k: int = 8) -> np.ndarray:
    """The recorded routing as int32 `[steps, layers, top_k]`, distinct ids within a row.

    The trace has 4 of 128 experts a token and 36 layers. Layer `l` takes those of layer `l % 18`
    and, for top-8, those of another layer of the second half under other names; a name that is
    taken already moves on to the next free one. Raises ValueError for another `top_k`.
    """
    if top_k not in (4, 8):
        raise ValueError(f"top_k is {top_k}; the trace makes 4 or 8: use --routing model")
    ids = np.load(TRACE)["ids"]
    generator = np.random.default_rng(0)
    chosen = []
    for layer in range(layers):
        names = generator.permutation(TRACE_EXPERTS)
        first = ids[:, layer % 18].astype(np.int32)
        second = names[ids[:, 18 + (layer + layer // 18) % 18]].astype(np.int32)
        chosen.append(_joined(first, second) if top_k == 8 else first)
    return np.ascontiguousarray(np.stack(chosen, axis=1))


def _joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`[steps, 8]`: the columns of both, those of `second` moved on past what is taken."""
    rows = first
    for column in second.T:
        column = column.copy()
        while True:
            taken = (rows == column[:, None]).any(axis=1)
            if not taken.any():
                break
            column[taken] = (column[taken] + 1) % TRACE_EXPERTS
        rows = np.concatenate([rows, column[:, None]], axis=1)
    return rows


def hot_rows(rows: np.ndarray, hot: int) -> np.ndarray:
    """Routing of the shape of `rows` in which each layer only ever names `hot` experts: after a
    few steps all of them are resident."""
    steps, layers, top_k = rows.shape
    generator = np.random.default_rng(1)
    names = np.stack([generator.permutation(TRACE_EXPERTS)[:hot] for _ in range(layers)])
    picks = generator.random((steps, layers, hot)).argsort(axis=-1)[..., :top_k]
    return np.take_along_axis(names[None], picks, axis=-1).astype(np.int32)


class Replay:
    """A routing strategy that reads its ids from a device tensor at a device position.

    vLLM does not tell a strategy which layer asks, but the layers ask in order and each once a
    step. So the position goes up by one a call, and with the trace laid out as `[steps * layers]`
    rows the next row is the next layer's. Nothing is read back, and every address is fixed: the
    calls can be captured into a CUDA graph, where a replay goes on from where the last one ended.

    Token `i` of a batch, a stream in decode, reads `i * STREAM_OFFSET` steps further on.
    """

    def __init__(self, rows: np.ndarray, device: torch.device | str) -> None:
        """rows: int32 `[steps, layers, top_k]`."""
        steps, self.layers, top_k = rows.shape
        self._ids = torch.tensor(rows.reshape(steps * self.layers, top_k), device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(MAX_TOKENS, device=device) * (STREAM_OFFSET * self.layers)
        self._weights = torch.full((MAX_TOKENS, top_k), 1 / top_k, device=device)

    def load(self, rows: np.ndarray) -> None:
        """Replays other rows of the same shape from now on; captured graphs stay valid."""
        self._ids.copy_(torch.tensor(rows).reshape(self._ids.shape))

    def seek(self, step: int) -> None:
        """The next step reads the trace here. Call it while no step is under way."""
        self._position.fill_(step * self.layers)

    def route_tokens(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """vLLM's RoutingStrategy: weights float32 and ids, both `[tokens, top_k]`."""
        tokens = hidden_states.shape[0]
        rows = (self._offsets[:tokens] + self._position).remainder_(self._ids.shape[0])
        ids = self._ids.index_select(0, rows)
        self._position.add_(1)
        return self._weights[:tokens], ids.to(indices_type or ids.dtype)


def install(strategy: Any) -> None:
    """Makes vLLM route by `strategy` where VLLM_MOE_ROUTING_SIMULATION_STRATEGY names it."""
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingSimulator,
    )

    RoutingSimulator.register_strategy(STRATEGY, strategy)
