"""The counters as Prometheus gets them. A real server's /metrics: tests/engine/test_metrics.py."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from synthetic.snapshots import described

from expert_cache_shim import metrics, processes
from expert_cache_shim.policy import COUNTERS
from expert_cache_shim.telemetry import SnapshotFile, read_folder

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    described(
        f"layers.{n}", slots=3 + n, record_bytes=1000 * (n + 1), private_bytes=10 + n,
        shared_bytes=n,
    )
    for n in range(2)
]  # fmt: skip


def written(folder: Path, model: str = "a-model", rank: int = 0) -> SnapshotFile:
    """A snapshot of this process; its counters are 0 to 7, and 100 to 107."""
    snapshot = SnapshotFile(folder, model, rank, LAYERS, "engine", "lrfu")
    for index in range(2):
        snapshot.mirror(index)[:] = [100 * index + n for n in range(8)]
    return snapshot


def page(folder: Path, by_layer: bool = False) -> dict[str, prometheus_client.Metric]:
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.CacheCollector(folder, by_layer))
    text = prometheus_client.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: prometheus_client.Metric) -> dict[tuple[str, ...], float]:
    """By model, rank and, where there is one, layer."""
    names = ("model", "rank", "layer")
    return {
        tuple(sample.labels[name] for name in names if name in sample.labels): sample.value
        for sample in family.samples
    }


# --- What is on the page --------------------------------------------------------------------


def test_counters_are_the_sums_of_all_layers(tmp_path):
    written(tmp_path)
    found = page(tmp_path)
    names = {
        "steps": "steps", "hits": "hits", "misses": "misses", "overflow": "overflow_fetches",
        "evictions": "evictions", "ids": "routing_ids", "idle": "idle_steps",
        "read_through": "read_through_steps",
    }  # fmt: skip
    assert tuple(names) == COUNTERS
    for index, name in enumerate(names.values()):
        family = found[f"expert_cache_{name}"]
        assert family.type == "counter"
        assert values(family) == {("a-model", "0"): 100 + 2 * index}


def test_bytes_and_sizes_are_in_bytes(tmp_path):
    snapshot = written(tmp_path)
    found = page(tmp_path)
    of = ("a-model", "0")
    expected = {
        "fetched_bytes": 2 * 1000 + 102 * 2000, "slots": 7, "experts": 16, "armed_layers": 2,
        "slot_memory_bytes": 21, "shared_memory_bytes": 1, "host_memory_bytes": 8 * 3000,
    }  # fmt: skip
    assert {name: values(found[f"expert_cache_{name}"])[of] for name in expected} == expected
    (read,) = read_folder(tmp_path)
    assert values(found["expert_cache_start_time_seconds"]) == {of: pytest.approx(read.started)}
    assert read.path == snapshot.path


def test_a_layer_that_was_given_back_is_not_armed_and_keeps_its_counts_and_memory(tmp_path):
    written(tmp_path).note_given_back(1, True)
    found, of = page(tmp_path), ("a-model", "0")
    expected = {
        "armed_layers": 1, "slots": 3, "experts": 8, "host_memory_bytes": 8 * 1000,
        "slot_memory_bytes": 21, "misses": 2 + 102, "fetched_bytes": 2 * 1000 + 102 * 2000,
    }  # fmt: skip
    assert {name: values(found[f"expert_cache_{name}"])[of] for name in expected} == expected
    by_layer = values(page(tmp_path, by_layer=True)["expert_cache_slots"])
    assert by_layer == {(*of, "layers.0"): 3, (*of, "layers.1"): 0}


def test_a_cache_is_described_in_words(tmp_path):
    written(tmp_path)
    ((sample),) = page(tmp_path)["expert_cache_info"].samples
    assert (sample.labels["policy"], sample.labels["storage"]) == ("lrfu", "virtual")
    assert sample.value == 1


def test_by_layer_the_same_series_have_one_more_label_and_no_sum_beside_it(tmp_path):
    written(tmp_path)
    sums, layers = page(tmp_path), page(tmp_path, by_layer=True)
    assert sums.keys() == layers.keys()
    assert values(layers["expert_cache_misses"]) == {
        ("a-model", "0", "layers.0"): 2, ("a-model", "0", "layers.1"): 102,
    }  # fmt: skip
    for series in metrics.SERIES:
        name = metrics.PREFIX + series.name
        assert sum(values(layers[name]).values()) == values(sums[name])["a-model", "0"]
        assert all(
            sample.labels.keys() == {"model", "rank", "layer"} for sample in layers[name].samples
        )


def test_every_rank_and_model_is_a_series(tmp_path):
    for model, rank in (("a", 0), ("a", 1), ("b", 0)):
        written(tmp_path, model, rank)
    assert values(page(tmp_path)["expert_cache_hits"]).keys() == {
        ("a", "0"),
        ("a", "1"),
        ("b", "0"),
    }


def test_a_model_of_any_name_is_a_label(tmp_path):
    name = 'mo"del\\混合'
    written(tmp_path, name)
    assert values(page(tmp_path)["expert_cache_hits"]) == {(name, "0"): 102}


def test_nothing_is_on_the_page_where_nothing_runs(tmp_path):
    assert page(tmp_path) == {} == page(tmp_path / "none")


def test_names_follow_the_conventions(tmp_path):
    """Prometheus's page on naming: lower case, one prefix, base units, `_total` for counters."""
    written(tmp_path)
    for family in page(tmp_path).values():
        assert re.fullmatch(r"expert_cache_[a-z]+(_[a-z]+)*", family.name)
        assert family.type in ("counter", "gauge")
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)
        assert not re.search("mib|gib|ms|percent|ratio", family.name)


def test_of_two_that_say_to_be_the_same_rank_the_later_counts(tmp_path, monkeypatch):
    for started in (20, 10):
        monkeypatch.setattr("time.time", lambda started=started: started)
        written(tmp_path).mirror(0)[1] = started
    assert values(page(tmp_path)["expert_cache_hits"]) == {("a-model", "0"): 20 + 101}


def test_an_error_of_ours_leaves_the_rest_of_the_page(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "read_folder", lambda folder: 1 // 0)
    collector = metrics.CacheCollector(tmp_path, False)
    assert [collector.collect(), collector.collect()] == [[], []]
    assert caplog.messages == [
        "expert cache: unexpected error; /metrics lacks the counters of the cache"
    ]


# --- Whose workers --------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from test_metrics import written
written(Path({folder!r}), rank={rank})
print("written", flush=True)
sys.stdin.read()
"""
# An engine: starts a worker and waits for it.
ENGINE = "import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
# A server: starts an engine, says for what rank its own collector sees a worker, and waits.
SERVER = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from expert_cache_shim import metrics, telemetry
pipe = subprocess.PIPE
command = [sys.executable, '-c', {engine!r}]
engine = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
assert engine.stdout.readline() == "written\\n"
print("ready", flush=True)
sys.stdin.readline()
print([s.rank for s in metrics.served_here(telemetry.read_folder({folder!r}))], flush=True)
engine.stdin.close()
engine.wait()
"""


def server(folder: Path, rank: int) -> subprocess.Popen:
    names = {"tests": str(ROOT / "tests"), "root": str(ROOT), "folder": str(folder), "rank": rank}
    engine = ENGINE.format(worker=WORKER.format(**names))
    code = SERVER.format(engine=engine, **names)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_server_shows_its_own_workers_and_not_those_of_another(tmp_path):
    servers = [server(tmp_path, rank) for rank in (1, 2)]
    assert len(read_folder(tmp_path)) == 2
    assert [child.communicate("\n")[0] for child in servers] == ["[1]\n", "[2]\n"]
    # The workers have ended, and this process, the ancestor of all, sees none.
    assert metrics.served_here(read_folder(tmp_path)) == []


def test_an_ancestor_of_servers_that_is_no_server_of_several_processes_claims_its_descendants(
    tmp_path,
):
    """In-process engines: whoever asks is the worker itself, or started it."""
    child = server(tmp_path, 3)
    assert [s.rank for s in metrics.served_here(read_folder(tmp_path))] == [3]
    child.communicate("\n")


def roots_in_child(variables: dict[str, str], queue) -> None:
    os.environ.update(variables)
    queue.put([list(map(tuple, metrics._roots())), [tuple(p) for p in processes.lineage()]])


@pytest.mark.parametrize("variables", [{}, {"PROMETHEUS_MULTIPROC_DIR": "/tmp"}])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_of_several_servers_their_parents_descendants_are_the_workers(start, variables):
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    child = context.Process(target=roots_in_child, args=(variables, queue))
    child.start()
    roots, lineage = queue.get(timeout=60)
    child.join()
    mine = tuple(processes.lineage()[0])
    assert lineage[:2] == [lineage[0], mine]
    assert roots == ([lineage[0], mine] if variables else [lineage[0]])


def test_a_server_that_no_process_of_python_started_has_no_other_root(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp")
    assert list(metrics._roots()) == processes.lineage()[:1]


# --- Where it is registered -----------------------------------------------------------------

REGISTERED = """
import sys, prometheus_client
from prometheus_client import multiprocess
from expert_cache_shim import metrics
metrics.register()
def has(registry):
    text = prometheus_client.generate_latest(registry).decode()
    return "expert_cache_hits_total" in text
from test_metrics import written
from pathlib import Path
written(Path(sys.argv[1]))
scraped = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(scraped, path=sys.argv[2])
by_name = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry=by_name, path=sys.argv[2])
multiprocess.MultiProcessCollector(None, path=sys.argv[2])
print(has(prometheus_client.REGISTRY), has(scraped), has(by_name))
"""


@pytest.mark.parametrize(
    "variables, seen",
    [
        ({}, True),
        ({"EXPERT_CACHE_METRICS": "layer"}, True),
        ({"EXPERT_CACHE_METRICS": "off"}, False),
        ({"EXPERT_CACHE_SNAPSHOT": "off"}, False),
        ({"EXPERT_CACHE_METRICS": "nonsense"}, False),
    ],
)
def test_the_default_registry_and_those_of_several_servers_have_the_counters(
    tmp_path, variables, seen
):
    (tmp_path / "multi").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED, str(tmp_path / "counters"), str(tmp_path / "multi")],
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "EXPERT_CACHE_SNAPSHOT": str(tmp_path / "counters"), **variables,
        },
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == f"{seen} {seen} {seen}\n"
