"""Routing without the order that a cache lives on, to compare real routing with."""

from __future__ import annotations

import numpy as np

from .trace import NO_EXPERT, Trace

TOKENS_AT_ONCE = 2**14


def uniform(trace: Trace, seed: int = 0) -> Trace:
    """Every token routed to `top_k` different experts that are drawn from all with the same
    chance: whatever a policy does, it misses `1 - slots / experts`."""
    generator = np.random.default_rng(seed)
    ids = np.full_like(trace.ids, NO_EXPERT)
    for layer in range(trace.layers):
        for start in range(0, len(ids), TOKENS_AT_ONCE):
            part = ids[start : start + TOKENS_AT_ONCE, layer, : trace.experts]
            order = generator.random((len(part), trace.experts)).argsort(axis=1)
            part[:] = order[:, : trace.top_k]
    return Trace(ids, trace.seq, trace.step, {**trace.meta, "control": "uniform"})


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The tokens of each layer in an order of its own: experts are as popular as they were, and
    when one was routed last says nothing."""
    generator = np.random.default_rng(seed)
    order = generator.random((trace.layers, len(trace.ids))).argsort(axis=1).T
    ids = np.take_along_axis(trace.ids, order[:, :, None], axis=0)
    return Trace(ids, trace.seq, trace.step, {**trace.meta, "control": "shuffled"})


CONTROLS = {"uniform": uniform, "shuffled": shuffled}
