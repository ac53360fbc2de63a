"""The cache where vLLM computes in processes of its own: workers, tensor parallelism, HTTP."""

import os
import signal
import time
from functools import partial

import pytest
import ranks
from engine import PROMPTS, Job, Server, run, shim, snapshots_of

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


@two_cores
def test_two_ranks_serve_the_same_tokens_and_keep_the_same_cache(folder, checkpoint, environment):
    model, place = checkpoint("qwen3_moe"), folder / "ranks"
    answers = ranks.serve(
        Job(model, ranks.RANKS), place, partial(environment, **ONE_CORE_EACH),
        ways=("off", "on"), slots=SLOTS,
    )  # fmt: skip
    assert answers["on"]["tokens"] == answers["off"]["tokens"]
    first, second = ranks.check_both_used_the_cache(place, model)
    # No rank asks another: both see the same routing and reach the same cache.
    assert first.counters.tolist() == second.counters.tolist()


@pytest.fixture(scope="module")
def expert_parallel(folder, checkpoint, environment):
    """The answers of two ranks that have half of the experts each."""
    return ranks.serve(
        Job(checkpoint("qwen3_moe"), {**ranks.EXPERT_PARALLEL, "dtype": "float32"}),
        folder / "parallel", partial(environment, **ONE_CORE_EACH), plugins=("mapped_experts",),
        slots=SLOTS // 2,
    )  # fmt: skip


@two_cores
def test_two_expert_parallel_ranks_serve_the_same_tokens(
    folder, checkpoint, expert_parallel, stock
):
    assert "EP Rank 0/2" in expert_parallel["on"].log
    assert expert_parallel["off"]["tokens"] == stock["transformers"]["tokens"]
    assert expert_parallel["on"]["tokens"] == stock["transformers"]["tokens"]
    found = ranks.check_both_used_the_cache(folder / "parallel", checkpoint("qwen3_moe"))
    assert {layer["experts"] for rank in found for layer in rank.layers} == {16}


@two_cores
def test_wrong_experts_of_a_rank_would_change_the_tokens(expert_parallel):
    ranks.check_wrong_experts_show(expert_parallel)


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
