"""What vLLM's worker does round a model, as far as the shim wraps it."""

from __future__ import annotations

import torch


class Worker:
    """vLLM's, as far as its executions are wrapped."""

    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def execute_model(self, step):
        step()


def wipe(report):
    """What sleep of level 2 leaves of all that PyTorch allocated; slots of virtual storage are
    not PyTorch's, but are poisoned too."""
    for armed in report.armed:
        cache = armed.cache
        for tensor in (cache.state, cache.counters, *cache._tables.values()):
            tensor.fill_(77)
        for placement in cache.storage.placements:
            for rows in (placement.slots, placement.scratch):
                if rows is not None:
                    rows.view(torch.uint8).fill_(0xA5)
