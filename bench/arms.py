"""The ways to serve a model that are compared, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from expert_cache_shim.settings import POLICIES, STORAGES

ROOT = Path(__file__).resolve().parents[1]

# What an arm decides for itself, whatever the environment says.
DECIDED = {
    f"EXPERT_CACHE_{name}"
    for name in ("DISABLE", "SLOTS", "GIB", "FRACTION", "POLICY", "STORAGE", "PRELOAD", "SNAPSHOT")
}

# More than any model here has: vLLM offloads every expert and nothing else.
OFFLOAD = {"cpu_offload_gb": 1000, "cpu_offload_params": ["experts"]}


@dataclass(frozen=True)
class Arm:
    """`name` as on the command line, keyword arguments of vllm.LLM, environment variables."""

    name: str
    engine: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)

    @property
    def cached(self) -> bool:
        return "EXPERT_CACHE_DISABLE" not in self.environment


def parse(name: str) -> Arm:
    """`resident`, `uncached`, or `cache-SLOTS` with a policy, a storage or `nopreload` after it, as
    in `cache-64-lru-plain`. SLOTS is a number, or `auto` for the cache's own choice. Raises
    ValueError for anything else."""
    if name == "resident":
        return Arm(name, {}, {"EXPERT_CACHE_DISABLE": "1"})
    if name == "uncached":
        return Arm(name, OFFLOAD, {"EXPERT_CACHE_DISABLE": "1"})
    kind, *words = name.split("-")
    if kind != "cache" or not words or not (words[0].isdigit() or words[0] == "auto"):
        raise ValueError(
            f"arm {name!r}: allowed are resident, uncached and "
            "cache-SLOTS[-POLICY][-STORAGE][-nopreload]"
        )
    environment = {} if words[0] == "auto" else {"EXPERT_CACHE_SLOTS": words[0]}
    for word in words[1:]:
        if word in POLICIES:
            environment["EXPERT_CACHE_POLICY"] = word
        elif word in STORAGES:
            environment["EXPERT_CACHE_STORAGE"] = word
        elif word == "nopreload":
            environment["EXPERT_CACHE_PRELOAD"] = "off"
        else:
            raise ValueError(
                f"arm {name!r}: {word!r} is no policy ({', '.join(POLICIES)}), no storage "
                f"({', '.join(STORAGES)}) and not nopreload"
            )
    return Arm(name, OFFLOAD, environment)


def environment(
    arm: Arm, snapshots: Path, extra: dict[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The whole environment of an arm's process. The shim starts from this source tree."""
    inherited = {k: v for k, v in inherited.items() if k not in DECIDED}
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
    return {
        **inherited,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine in the process that measures: its device can be synchronised with.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "EXPERT_CACHE_SNAPSHOT": str(snapshots),
        **arm.environment,
        **extra,
    }
