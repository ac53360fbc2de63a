"""One rank of a tensor-parallel group: weights of its own, the routing of all.

    python -m synthetic.rank RANK ROUTING_SEED OUT.npz

Serves the same steps through two layers with each policy and each storage, and writes what the
caches were after every step: for each combination "states" [steps, layers, words] and "counters"
[steps, layers, counters]; and "output" [tokens, H], the last one of the last layer.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from expert_cache_shim import arming, policy

from . import tuning
from .checks import steps
from .models import MODEL_CONFIG, Model, RoutedExperts, call, load

COMBINATIONS = [(name, storage) for name in policy.CODES for storage in ("virtual", "plain")]
STEPS, LAYERS = 60, 2


def serve(rank: int, routing_seed: int, out: str) -> None:
    for module in (tuning.package, tuning.fused_moe):
        sys.modules[module.__name__] = module
    os.environ |= {"EXPERT_CACHE_ALLOW_CPU": "1", "EXPERT_CACHE_SLOTS": "3"}
    os.environ["EXPERT_CACHE_SNAPSHOT"] = "off"
    found = {}
    for name, storage in COMBINATIONS:
        os.environ |= {"EXPERT_CACHE_POLICY": name, "EXPERT_CACHE_STORAGE": storage}
        model = load(Model(*(RoutedExperts(seed=1000 * rank + n) for n in range(LAYERS))))
        caches = [armed.cache for armed in arming.arm_model(model, MODEL_CONFIG).armed]
        assert len(caches) == LAYERS
        states, counters, outputs = [], [], []
        for inputs in steps(model.routed[0], STEPS, seed=routing_seed):
            outputs = [call(layer, *inputs) for layer in model.routed]
            states.append([cache.state.tolist() for cache in caches])
            counters.append([cache.counters.tolist() for cache in caches])
        found[f"{name} {storage} states"] = np.array(states)
        found[f"{name} {storage} counters"] = np.array(counters)
        found["output"] = outputs[-1].numpy()
    np.savez(out, **found)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
