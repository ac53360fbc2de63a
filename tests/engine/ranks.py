"""Two ranks of real vLLM that share a model: how they are served, and what must hold.

On a CPU for `test_processes.py`, on two GPUs for `gpu/test_ranks.py`.
"""

import os
from collections.abc import Callable
from pathlib import Path

from engine import Answer, Job, offer_plugins, run, shim, snapshots_of

from expert_cache_shim.telemetry import Snapshot

RANKS = {"tensor_parallel_size": 2}
EXPERT_PARALLEL = {**RANKS, "enable_expert_parallel": True}
WAYS = ("off", "on", "wrong experts")
FAULT = "bench.fault"  # experts of another layer


def serve(
    job: Job, folder: Path, environment: Callable[..., dict[str, str]],
    ways: tuple[str, ...] = WAYS, plugins: tuple[str, ...] = (), **settings: object,
) -> dict[str, Answer]:  # fmt: skip
    """The answers to a job without the cache, with it, and with one that fetches the wrong experts,
    each from an engine in a process of its own.

    environment: as the fixture of that name. plugins: modules of this folder to be installed in
    every process. settings: of the cache. Its counters are left in `folder / "snapshots"`.
    """
    offered = offer_plugins(folder / "plugins", *plugins, FAULT)
    answers = {}
    for way in ways:
        variables = shim(folder / "snapshots" if way == "on" else "off", **settings)
        variables["EXPERT_CACHE_DISABLE"] = int(way == "off")
        variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}{os.pathsep}{offered}"
        chosen = [*plugins, FAULT] if way == "wrong experts" else plugins
        variables["VLLM_PLUGINS"] = ",".join(chosen)
        (answers[way],) = run([job], folder / way, environment(**variables))
    return answers


def check_both_used_the_cache(folder: Path, model: str) -> tuple[Snapshot, Snapshot]:
    """That two workers left counters of a cache that worked; what they left."""
    first, second = snapshots_of(folder / "snapshots", model)
    assert {first.rank, second.rank} == {0, 1}
    assert first.pid != second.pid
    for rank in (first, second):
        assert all(rank.total(counter) > 0 for counter in ("hits", "misses", "overflow"))
    return first, second


def check_each_stage_has_its_own_layers(stages: tuple[Snapshot, ...]) -> None:
    """Of a model of four layers with two pipeline stages."""
    names = {stage.rank: [layer["name"] for layer in stage.layers] for stage in stages}
    expected = [f"model.layers.{number}.mlp.experts.routed_experts" for number in range(4)]
    assert names == {0: expected[:2], 1: expected[2:]}


def check_wrong_experts_show(answers: dict[str, Answer]) -> None:
    """That the comparison of tokens can fail."""
    assert answers["wrong experts"]["tokens"] != answers["off"]["tokens"]
