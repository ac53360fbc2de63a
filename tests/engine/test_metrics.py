"""What a real server with two ranks and two API servers shows: /metrics, its log, `status`."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from engine import PROMPTS, ROOT, Server, shim, snapshots_of
from prometheus_client.parser import text_string_to_metric_families

from expert_cache_shim import metrics
from expert_cache_shim.policy import COUNTERS
from expert_cache_shim.telemetry import Snapshot, SnapshotFile

SLOTS = 16
COUNTED = {
    "steps": "steps",
    "hits": "hits",
    "misses": "misses",
    "overflow_fetches": "overflow",
    "evictions": "evictions",
    "routing_ids": "ids",
    "idle_steps": "idle",
    "read_through_steps": "read_through",
}

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


def cache_samples(text: bytes) -> dict[tuple[str, str, str], float]:
    """The shim's samples on a page of metrics, by name, model and rank."""
    return {
        (sample.name, sample.labels["model"], sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith(metrics.PREFIX)
    }


def expected(snapshot: Snapshot) -> dict[str, float]:
    return {
        **{f"{name}_total": snapshot.total(counter) for name, counter in COUNTED.items()},
        "fetched_bytes_total": snapshot.fetched_bytes(),
        "armed_layers": len(snapshot.layers),
        "slots": SLOTS * len(snapshot.layers),
    }


@pytest.fixture(scope="module")
def served(folder, checkpoint, environment):
    """A server that has answered, and the model that it serves."""
    model, snapshots = checkpoint("qwen3_moe"), folder / "metrics-snapshots"
    # A cache of another server, its files in the same folder: that of this very process.
    foreign = SnapshotFile(
        snapshots, model, 0,
        [{"name": "layer", "experts": 8, "slots": 3, "record_bytes": 1, "private_bytes": 1,
          "shared_bytes": 1, "storage": "plain"}],
    )  # fmt: skip
    foreign.mirror(0)[:] = 10**9
    variables = environment(
        VLLM_CPU_OMP_THREADS_BIND="0|1", **shim(snapshots, slots=SLOTS, log_interval=1)
    )
    options = ("--tensor-parallel-size", "2", "--api-server-count", "2")
    with Server(model, folder / "metrics", variables, options=options) as server:
        server.complete(PROMPTS, max_tokens=6)
        yield server, [s for s in snapshots_of(snapshots, model) if s.pid != os.getpid()]


def test_every_rank_is_on_the_metrics_page_of_its_server_and_no_other_cache(served):
    server, ranks = served
    page = cache_samples(server.get("/metrics"))
    assert {rank.rank for rank in ranks} == {0, 1}
    assert {(model, rank) for _, model, rank in page} == {(server.model, "0"), (server.model, "1")}
    for snapshot in ranks:
        of = (server.model, str(snapshot.rank))
        found = {name: page[(metrics.PREFIX + name, *of)] for name in expected(snapshot)}
        assert found == expected(snapshot)
        assert snapshot.total("misses") > 0
    assert set(COUNTED.values()) == set(COUNTERS)


def test_vllms_own_metrics_in_the_dashboard_and_the_alerts_are_there(served):
    server, _ = served
    page = server.get("/metrics").decode()
    named = {
        name
        for file in (ROOT / "examples" / "monitoring").iterdir()
        for name in re.findall(r"vllm:\w+", file.read_text())
    }
    assert named
    assert [name for name in named if f"\n{name}{{" not in page] == []


def test_status_attaches_from_another_process(served):
    server, ranks = served
    command = ["-m", "expert_cache_shim", "status", "--json", "--folder", str(ranks[0].path.parent)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    engines = json.loads(done.stdout)["engines"]
    # The other engine is this process, which has written a snapshot as a worker does.
    (found,) = [e["ranks"] for e in engines if e["ranks"][0]["pid"] != os.getpid()]
    assert [rank["pid"] for rank in found] == [s.pid for s in sorted(ranks, key=lambda s: s.rank)]
    assert [rank["counters"]["hits"] for rank in found] == [s.total("hits") for s in ranks]
    assert {rank["model"] for rank in found} == {server.model}


def test_one_rank_logs_what_the_cache_does(served):
    server, _ = served
    for _ in range(600):
        lines = [line for line in server.log.read_text().splitlines() if " GiB/s fetched" in line]
        if lines:
            break
        time.sleep(0.1)
    assert all(f"expert cache: {server.model}, rank 0: in " in line for line in lines)
    assert lines
