"""`expert-cache status`: attached to workers of this machine, and where there are none."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import make_image
from rich.console import Console

from expert_cache_shim import telemetry
from expert_cache_shim.commands import status as command
from expert_cache_shim.commands.status_screen import screen
from expert_cache_shim.commands.watch import Watch

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
WRITES = """
import sys
from pathlib import Path
from test_cli_status import written
written(Path(sys.argv[1]), "ended-model")
"""


def layers(count: int, first: int = 0) -> list[dict]:
    return [
        {
            "name": f"model.layers.{n}.mlp.experts.routed_experts", "experts": 128, "slots": 64,
            "record_bytes": GIB // 64, "tensors": 2, "private_bytes": GIB, "shared_bytes": 0,
            "storage": "virtual",
        }
        for n in range(first, first + count)
    ]  # fmt: skip


def written(
    folder: Path, model: str = "a-model", rank: int = 0, engine: str = "engine-1", count: int = 2,
    first: int = 0,
) -> telemetry.SnapshotFile:  # fmt: skip
    """A worker that is this process: in each layer three hits, and a miss that found no slot."""
    snapshot = telemetry.SnapshotFile(folder, model, rank, layers(count, first), engine, "lrfu")
    for index in range(count):
        count_more(snapshot, index)
    return snapshot


def count_more(snapshot: telemetry.SnapshotFile, layer: int, hits: int = 3, misses: int = 1):
    counts = {"steps": 1, "hits": hits, "misses": misses, "overflow": misses}
    for name, value in counts.items():
        snapshot.mirror(layer)[telemetry.COUNTERS.index(name)] += value


def end_a_worker(folder: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [sys.executable, "-c", WRITES, str(folder)], check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


@pytest.fixture
def status(capsys, monkeypatch):
    """Runs the command as a pipe gets it: its status and what it printed."""
    monkeypatch.delenv("EXPERT_CACHE_SNAPSHOT", raising=False)

    def run(folder: Path, **options) -> tuple[int, str]:
        done = command.status(folder=str(folder), **options)
        return done, capsys.readouterr().out

    return run


# --- Plain ----------------------------------------------------------------------------------


def test_a_worker_is_a_row_and_its_layers_are_a_strip(tmp_path, status):
    snapshot = written(tmp_path)
    count_more(snapshot, 0, hits=96, misses=0)
    code, text = status(tmp_path)
    assert code == 0
    title, header, row, strip = text.splitlines()
    assert title == "a-model  (lrfu)"
    assert dict(zip(re.split(r"\s{2,}", header), re.split(r"\s{2,}", row.strip()))) == {
        "rank": "0", "pid": str(os.getpid()), "layers": "2", "slots": "64 of 128",
        "hit rate": "98.1%", "fetched": "32.0 MiB", "overflow": "100.0%", "read through": "0.0%",
    }  # fmt: skip
    assert strip == "hit rate by layer, 70% ▁▂▃▄▅▆▇█ 100%: █▂"


def test_layers_that_were_given_back_are_told_apart(tmp_path, status):
    snapshot = written(tmp_path, count=3)
    snapshot.note_given_back(1, True)
    assert "  2 of 3  64 of 128  " in status(tmp_path)[1]
    shown = io.StringIO()
    watch = Watch(tmp_path)
    watch.read()
    for layer in (0, 2):
        count_more(snapshot, layer)
    reading = watch.read()
    rank = reading.engines[0].ranks[0]
    assert rank.passes_per_second() * rank.seconds == pytest.approx(1)  # of the layers that count
    Console(file=shown, width=100).print(screen(reading, 1.0, False))
    assert "2 of 3 layers, 64 of 128 experts resident" in shown.getvalue()
    data = json.loads(status(tmp_path, as_json=True)[1])
    of_layers = data["engines"][0]["ranks"][0]["layers"]
    assert [layer["given_back"] for layer in of_layers] == [False, True, False]
    for layer in (0, 2):
        snapshot.note_given_back(layer, True)
    assert "  0 of 3  " in status(tmp_path)[1]


def test_ranks_of_an_engine_are_together_and_engines_apart(tmp_path, status):
    for rank in (1, 0):
        written(tmp_path, rank=rank)
    written(tmp_path, engine="engine-2")
    _, text = status(tmp_path)
    blocks = text.strip().split("\n\n")
    assert [re.findall(r"^ +(\d)  ", block, re.M) for block in blocks] == [["0", "1"], ["0"]]


def test_with_an_interval_it_prints_what_happened_in_between(tmp_path, status, monkeypatch):
    snapshot = written(tmp_path)

    def pass_time(seconds: float) -> None:
        count_more(snapshot, 0, hits=0, misses=64)
        moments.append(moments[-1] + seconds)

    moments = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: moments[-1])
    monkeypatch.setattr(time, "sleep", pass_time)
    _, text = status(tmp_path, interval=2.0)
    header, row = text.splitlines()[1:3]
    assert re.split(r"\s{2,}", header)[-3:] == ["hit rate now", "fetched now", "steps/s"]
    # 64 records of 1/64 GiB in two seconds; one step in one of two layers is half a pass.
    assert re.split(r"\s{2,}", row)[-3:] == ["0.0%", "512.0 MiB/s", "0.2"]


def test_where_none_runs_it_says_so_and_the_status_is_1(tmp_path, status):
    code, text = status(tmp_path / "none")
    assert code == 1
    assert f"no cache is running that keeps its counters in {tmp_path / 'none'}" in text


def test_workers_that_have_ended_are_apart(tmp_path, status):
    end_a_worker(tmp_path)
    code, text = status(tmp_path)
    assert code == 1
    assert "ended-model" not in text
    assert "--ended shows the last counters of 1 ended workers" in text
    written(tmp_path)
    code, text = status(tmp_path)
    assert (code, "ended-model" in text) == (0, False)
    _, text = status(tmp_path, ended=True)
    running, ended = text.split("ended\n")
    assert "a-model" in running and "ended-model" not in running
    assert "ended-model" in ended and "75.0%" in ended


# --- JSON -----------------------------------------------------------------------------------


def test_json_has_every_counter_of_every_layer(tmp_path, status):
    written(tmp_path)
    end_a_worker(tmp_path)
    code, text = status(tmp_path, as_json=True)
    data = json.loads(text)
    assert (code, data["folder"]) == (0, str(tmp_path))
    ((rank,),) = [engine["ranks"] for engine in data["engines"]]
    assert (rank["model"], rank["rank"], rank["pid"]) == ("a-model", 0, os.getpid())
    assert rank["counters"] == dict(zip(telemetry.COUNTERS, (2, 6, 2, 2, 0, 0, 0, 0)))
    assert (rank["hit_rate"], rank["overflow_share"]) == (0.75, 1)
    assert rank["fetched_bytes"] == 2 * GIB // 64
    assert [layer["counters"]["hits"] for layer in rank["layers"]] == [3, 3]
    assert "interval" not in rank
    assert [worker["model"] for worker in data["ended"]] == ["ended-model"]


def test_json_of_nothing_is_json(tmp_path, status):
    code, text = status(tmp_path, as_json=True)
    assert (code, json.loads(text)["engines"]) == (1, [])


def test_json_with_an_interval_has_what_happened_in_it(tmp_path, status, monkeypatch):
    snapshot = written(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: count_more(snapshot, 1))
    _, text = status(tmp_path, as_json=True, interval=5.0)
    ((rank,),) = [engine["ranks"] for engine in json.loads(text)["engines"]]
    assert rank["interval"]["counters"]["hits"] == 3
    assert rank["interval"]["hit_rate"] == 0.75


# --- Options --------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), 1e9])
def test_an_interval_that_is_none_is_named(status, tmp_path, interval):
    with pytest.raises(command.CommandError, match=re.escape(f"--interval {interval:g}: allowed")):
        status(tmp_path, interval=interval)


def test_the_folder_is_that_of_the_environment(tmp_path, monkeypatch, capsys):
    written(tmp_path)
    monkeypatch.setenv("EXPERT_CACHE_SNAPSHOT", str(tmp_path))
    assert command.status() == 0
    monkeypatch.setenv("EXPERT_CACHE_SNAPSHOT", "off")
    with pytest.raises(command.CommandError, match="EXPERT_CACHE_SNAPSHOT is off"):
        command.status()


def test_an_image_without_numpy_is_told_what_is_missing(tmp_path):
    refusal = make_image(tmp_path).refusal("status")
    assert refusal == "counters cannot be read (No module named 'numpy'): use vLLM's Python"


# --- The live view --------------------------------------------------------------------------


def drawn(folder: Path, width: int, with_ended: bool = False) -> list[str]:
    watch = Watch(folder)
    watch.read()
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(screen(watch.read(), 1.0, with_ended))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_fits_the_screen(tmp_path, width):
    written(tmp_path, "/a/folder/" + "very-" * 30 + "long/Model-30B", count=94)
    for rank in range(8):
        written(tmp_path, "b-model", rank, "engine-2")
    lines = drawn(tmp_path, width)
    assert max(map(len, lines)) <= width
    assert any("long/Model-30B" in line for line in lines)
    assert sum(line.count("▂") for line in lines) >= 94


def test_the_strip_names_layers_by_their_own_numbers(tmp_path):
    """The first layers of a model may have no experts."""
    snapshot = written(tmp_path, count=12, first=3)
    count_more(snapshot, 11, hits=0, misses=5)
    lines = drawn(tmp_path, 80)
    place = next(n for n, line in enumerate(lines) if line.startswith("hit rate by layer"))
    assert "lowest 33.3% in layer 14" in lines[place]
    assert lines[place + 1].split() == ["3", "13"]
    assert len(lines[place + 2].strip()) == 12


def test_layers_of_two_ranks_that_share_them_are_one_strip_and_of_two_stages_follow(tmp_path):
    for rank, first in ((0, 0), (1, 0), (2, 2), (3, 2)):
        written(tmp_path, rank=rank, first=first)
    (engine,) = Watch(tmp_path).read().engines
    numbers = [command.layer_number(name) for name in engine.layer_hit_rates()]
    assert numbers == ["0", "1", "2", "3"]
    assert set(engine.layer_hit_rates().values()) == {0.75}


def test_ended_workers_and_none_at_all(tmp_path):
    end_a_worker(tmp_path)
    text = "\n".join(drawn(tmp_path, 80))
    assert "no cache is running" in text and "ended-model" not in text
    assert "ended-model" in "\n".join(drawn(tmp_path, 80, with_ended=True))


def test_a_terminal_gets_the_live_view_until_it_is_interrupted(tmp_path):
    written(tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
        os.chdir(ROOT)
        words = ["-m", "expert_cache_shim", "status", "--folder", str(tmp_path)]
        os.execv(sys.executable, [sys.executable, *words])
    said = b""
    while said.count(b"hit rate by layer") < 2:
        said += os.read(terminal, 4096)
    os.kill(child, signal.SIGINT)
    _, how = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(how) == 0
    assert "█".encode() in said and b"a-model" in said
