"""The cache where vLLM computes in processes of its own: workers, tensor parallelism, HTTP."""

import os
import signal
import time

import pytest
from engine import PROMPTS, Job, Server, offer_plugins, run, shim, snapshots_of

SLOTS = 16
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_a_worker_process_serves_the_same_tokens(folder, checkpoint, environment, stock):
    model, snapshots = checkpoint("qwen3_moe"), folder / "worker-snapshots"
    settings = shim(snapshots, slots=SLOTS)
    (answer,) = run([Job(model)], folder / "worker", environment(**settings))

    assert answer["tokens"] == stock["qwen3_moe"]["tokens"]
    # One snapshot: of the processes that import vLLM, only the one with the model arms layers.
    (snapshot,) = snapshots_of(snapshots, model)
    assert all(snapshot.total(counter) > 0 for counter in ("steps", "hits", "misses", "overflow"))


@pytest.fixture(scope="module")
def two_ranks(folder, checkpoint, environment):
    """Answers without and with the cache of two ranks that share every layer."""
    job = Job(checkpoint("qwen3_moe"), {"tensor_parallel_size": 2})
    settings = shim(folder / "ranks-snapshots", slots=SLOTS)
    return [
        run([job], folder / name, environment(**ONE_CORE_EACH, **variables))[0]
        for name, variables in (("stock-ranks", {}), ("ranks", settings))
    ]


@two_cores
def test_two_ranks_serve_the_same_tokens_and_keep_the_same_cache(folder, checkpoint, two_ranks):
    off, on = two_ranks
    assert on["tokens"] == off["tokens"]

    first, second = snapshots_of(folder / "ranks-snapshots", checkpoint("qwen3_moe"))
    assert {first.rank, second.rank} == {0, 1}
    assert first.pid != second.pid
    assert all(first.total(counter) > 0 for counter in ("steps", "hits", "misses", "overflow"))
    # No rank asks another: both see the same routing and reach the same cache.
    assert first.counters.tolist() == second.counters.tolist()


@pytest.fixture(scope="module")
def expert_parallel(folder, checkpoint, environment):
    """Answers of two ranks that have half of the experts each: without the cache, with it, and
    with a cache that fetches the wrong experts."""
    engine = {"dtype": "float32", "tensor_parallel_size": 2, "enable_expert_parallel": True}
    wrong = {"VLLM_PLUGINS": "mapped_experts,wrong_expert", "EXPERT_CACHE_SNAPSHOT": "off"}
    cases = {"off": {"EXPERT_CACHE_DISABLE": "1"}, "on": {}, "wrong expert": wrong}
    jobs = [Job(checkpoint("qwen3_moe"), engine, variables) for variables in cases.values()]
    settings = shim(folder / "parallel-snapshots", slots=SLOTS // 2)
    plugins = offer_plugins(folder / "plugins", "mapped_experts", "wrong_expert")
    settings["PYTHONPATH"] = f"{settings['PYTHONPATH']}{os.pathsep}{plugins}"
    settings["VLLM_PLUGINS"] = "mapped_experts"
    variables = environment(**ONE_CORE_EACH, **settings)
    return dict(zip(cases, run(jobs, folder / "parallel", variables)))


@two_cores
def test_two_expert_parallel_ranks_serve_the_same_tokens(
    folder, checkpoint, expert_parallel, stock
):
    assert "EP Rank 0/2" in expert_parallel["on"].log
    assert expert_parallel["off"]["tokens"] == stock["transformers"]["tokens"]
    assert expert_parallel["on"]["tokens"] == stock["transformers"]["tokens"]

    ranks = snapshots_of(folder / "parallel-snapshots", checkpoint("qwen3_moe"))
    assert {rank.rank for rank in ranks} == {0, 1}
    for rank in ranks:
        assert {layer["experts"] for layer in rank.layers} == {16}
        assert all(rank.total(counter) > 0 for counter in ("hits", "misses", "overflow"))


@two_cores
def test_wrong_experts_of_a_rank_would_change_the_tokens(expert_parallel, stock):
    changed = zip(expert_parallel["wrong expert"]["tokens"], stock["transformers"]["tokens"])
    assert any(tokens != right for tokens, right in changed)


def test_counters_outlive_a_killed_worker_of_a_server(folder, checkpoint, environment, stock):
    model, snapshots = checkpoint("qwen3_moe"), folder / "server-snapshots"
    variables = environment(**shim(snapshots, slots=SLOTS))
    with Server(model, folder / "server", variables) as server:
        answers = server.complete(PROMPTS, max_tokens=6)
        (before,) = snapshots_of(snapshots, model)
        page = server.get("/metrics").decode()
        of = f'{{model="{model}",rank="0"}}'
        for counter in ("steps", "hits", "misses"):
            line = f"expert_cache_{counter}_total{of} {float(before.total(counter))}"
            assert line in page.splitlines()
        os.kill(before.pid, signal.SIGKILL)
        wait_for_end(before.pid)

    assert answers == [tokens[:6] for tokens in stock["qwen3_moe"]["tokens"]]
    (after,) = snapshots_of(snapshots, model)
    assert after.counters.tolist() == before.counters.tolist()
    assert all(after.total(counter) > 0 for counter in ("steps", "hits", "misses", "overflow"))


def wait_for_end(pid: int) -> None:
    """Waits until a process has gone, or is a zombie that nobody has waited for."""
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} did not end")
