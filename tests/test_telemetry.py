"""Counter snapshots: written by the kernels, read by anyone, also after the worker was killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from synthetic import methods
from synthetic.checks import model_of, outputs
from synthetic.snapshots import described

from expert_cache_shim import processes, telemetry
from expert_cache_shim.policy import COUNTERS

pytest_plugins = ["synthetic.fixtures"]

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [described(f"layers.{n}", record_bytes=1000 * (n + 1)) for n in range(2)]


def written(folder: Path, layers=LAYERS, model="model") -> telemetry.SnapshotFile:
    """A file whose counters are all different."""
    snapshot = telemetry.SnapshotFile(folder, model, 1, layers, "engine-1", "lru")
    for index in range(len(layers)):
        snapshot.mirror(index)[:] = np.arange(8) + 100 * index
    return snapshot


# --- Round trip -----------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path):
    before = time.time()
    snapshot = telemetry.read_snapshot(written(tmp_path).path)
    assert (snapshot.pid, snapshot.rank, snapshot.model) == (os.getpid(), 1, "model")
    assert (snapshot.engine, snapshot.policy) == ("engine-1", "lru")
    assert snapshot.lineage == processes.lineage()
    assert before <= snapshot.started <= time.time()
    assert snapshot.layers == LAYERS
    assert snapshot.counters.tolist() == [list(range(8)), list(range(100, 108))]
    assert snapshot.total("misses") == 2 + 102
    assert snapshot.fetched_bytes() == 2 * 1000 + 102 * 2000


def test_a_snapshot_is_a_copy_and_the_file_is_current(tmp_path):
    writer = written(tmp_path)
    first = telemetry.read_snapshot(writer.path)
    writer.mirror(0)[:] = 2**62
    assert first.counters[0, 0] == 0
    assert telemetry.read_snapshot(writer.path).counters[0].tolist() == [2**62] * 8


@pytest.mark.parametrize("count", [1, 40, 400])
def test_headers_of_any_length_fit(tmp_path, count):
    layers = [described("x" * 60, record_bytes=n) for n in range(count)]
    snapshot = telemetry.read_snapshot(written(tmp_path, layers).path)
    assert snapshot.layers == layers
    assert snapshot.counters[-1].tolist() == [100 * (count - 1) + n for n in range(8)]


def test_a_model_name_of_any_script_is_kept(tmp_path):
    name = 'modèle/混合 "专家"'
    assert telemetry.read_snapshot(written(tmp_path, model=name).path).model == name


def test_the_address_is_where_the_file_is_mapped(tmp_path):
    writer = written(tmp_path)
    assert writer.address % 4096 == 0
    assert writer.size == writer.path.stat().st_size
    offset = writer.mirror(1).ctypes.data - writer.address
    assert struct.unpack_from("<q", writer.path.read_bytes(), offset) == (100,)
    assert offset % 8 == 0


def test_a_folder_is_made_for_its_owner_alone(tmp_path):
    writer = written(tmp_path / "a" / "b")
    assert stat.S_IMODE(writer.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600


def test_files_of_a_folder_are_read_oldest_first(tmp_path, monkeypatch):
    for name, started in (("second", 20), ("third", 30), ("first", 10)):
        monkeypatch.setattr(time, "time", lambda started=started: started)
        written(tmp_path, model=name)
    assert [s.model for s in telemetry.read_folder(tmp_path)] == ["first", "second", "third"]


def test_a_layer_that_was_given_back_keeps_its_counts_and_is_no_longer_armed(tmp_path):
    writer = written(tmp_path)
    assert telemetry.read_snapshot(writer.path).armed_layers == LAYERS
    writer.note_given_back(0, True)
    snapshot = telemetry.read_snapshot(writer.path)
    assert snapshot.given_back.tolist() == [True, False]
    assert (snapshot.layers, snapshot.armed_layers) == (LAYERS, LAYERS[1:])
    assert snapshot.total("misses") == 2 + 102
    writer.note_given_back(0, False)
    assert telemetry.read_snapshot(writer.path).armed_layers == LAYERS


def test_a_snapshot_of_the_first_version_is_read(tmp_path):
    """It says nothing about layers that were given back."""
    path = written(tmp_path).path
    data = damaged(path.read_bytes(), version=...)
    path.write_bytes(data[: -8 * len(LAYERS)])
    snapshot = telemetry.read_snapshot(path)
    assert snapshot.given_back.tolist() == [False, False]
    assert snapshot.counters.tolist() == [list(range(8)), list(range(100, 108))]


@pytest.mark.parametrize("version", [0, 3, "2", None, [2]])
def test_a_snapshot_of_a_version_that_is_not_known_is_one_line(tmp_path, version):
    path = written(tmp_path).path
    path.write_bytes(damaged(path.read_bytes(), version=version))
    with pytest.raises(telemetry.SnapshotError, match="of another release: use its own command"):
        telemetry.read_snapshot(path)


# --- What is made of the counters -----------------------------------------------------------


def counted(folder: Path, *layers: dict[str, int]) -> telemetry.Snapshot:
    """What is read where two layers have counted this."""
    writer = telemetry.SnapshotFile(folder, "model", 0, LAYERS)
    for index, counts in enumerate(layers):
        writer.mirror(index)[:] = [counts.get(name, 0) for name in COUNTERS]
    return telemetry.read_snapshot(writer.path)


def test_rates_are_those_of_all_layers_together(tmp_path):
    snapshot = counted(
        tmp_path,
        {"steps": 6, "hits": 30, "misses": 10, "overflow": 4, "idle": 1},
        {"steps": 2, "hits": 0, "misses": 10, "overflow": 1, "read_through": 1},
    )
    assert snapshot.hit_rate() == 30 / 50
    assert snapshot.layer_hit_rates() == [30 / 40, 0]
    assert snapshot.overflow_share() == 5 / 20
    assert snapshot.layer_steps() == 10
    assert snapshot.read_through_share() == 1 / 10
    assert snapshot.width() == 50 / 8
    assert snapshot.fetched_bytes() == 10 * 1000 + 10 * 2000


def test_nothing_is_no_rate(tmp_path):
    snapshot = counted(tmp_path)
    rates = (snapshot.hit_rate, snapshot.overflow_share, snapshot.read_through_share)
    assert [rate() for rate in rates] == [None, None, None]
    assert snapshot.width() is None
    assert snapshot.layer_hit_rates() == [None, None]


def test_what_is_counted_since_a_reading_is_the_difference(tmp_path):
    before = counted(tmp_path, {"hits": 5, "misses": 2}, {"hits": 7, "misses": 1})
    now = counted(tmp_path, {"hits": 6, "misses": 2}, {"hits": 9, "misses": 4})
    recent = now.since(before)
    assert (recent.by_layer("hits").tolist(), recent.by_layer("misses").tolist()) == (
        [1, 2],
        [0, 3],
    )
    assert recent.path == now.path


def test_a_layer_that_was_emptied_in_between_has_counted_from_zero(tmp_path):
    before = counted(tmp_path, {"hits": 5, "misses": 2}, {"hits": 7, "misses": 1})
    now = counted(tmp_path, {"hits": 6, "misses": 1}, {"hits": 9, "misses": 4})
    recent = now.since(before)
    assert (recent.by_layer("hits").tolist(), recent.by_layer("misses").tolist()) == (
        [6, 2],
        [1, 3],
    )


def test_a_snapshot_says_whether_its_worker_runs(tmp_path):
    mine = written(tmp_path)
    assert telemetry.read_snapshot(mine.path).is_alive()
    (pid, start), *ancestors = processes.lineage()
    # Another process has this pid now.
    data = damaged(mine.path.read_bytes(), lineage=[[pid, start - 1], *ancestors])
    mine.path.write_bytes(data)
    assert not telemetry.read_snapshot(mine.path).is_alive()


# --- Files that are not snapshots -----------------------------------------------------------


def damaged(data: bytes, **header) -> bytes:
    """The file with other header fields, of the same length where that is possible."""
    (length,) = struct.unpack_from("<Q", data, 8)
    fields = {**json.loads(data[16 : 16 + length]), **header}
    fields = {name: value for name, value in fields.items() if value is not ...}
    text = json.dumps(fields).encode()
    return data[:8] + struct.pack("<Q", len(text)) + text + data[16 + len(text) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:15],
        lambda data: data[:16],
        lambda data: data[:40],
        lambda data: data[:4096],
        lambda data: data[:-1],
        lambda data: b"\x7fELF\x02\x01\x01\x00" + data[8:],
        lambda data: data[:8] + struct.pack("<Q", 2**64 - 1) + data[16:],
        lambda data: data[:8] + struct.pack("<Q", 2**63 - 4200) + data[16:],
        lambda data: data[:8] + struct.pack("<Q", 0) + data[16:],
        lambda data: data[:16] + b"\xff" * 8 + data[24:],
        lambda data: data[:8] + struct.pack("<Q", 4000) + b"[" * 4000 + data[4016:],
        lambda data: damaged(data, layers=...),
        lambda data: damaged(data, lineage=...),
        lambda data: damaged(data, lineage=[]),
        lambda data: damaged(data, lineage=[[1]]),
        lambda data: damaged(data, layers=7),
        lambda data: damaged(data, layers=[{}] * 2),
        lambda data: damaged(data, layers=[described("x")] * 3),
        lambda data: damaged(data, layers=[described("x", slots="3")] * 2),
        lambda data: damaged(data, layers=[described("x", experts=-1)] * 2),
        lambda data: damaged(data, layers=[described("x", record_bytes=2**63)] * 2),
        lambda data: damaged(data, layers=[described(7)] * 2),
        lambda data: damaged(data, model=["model"]),
        lambda data: damaged(data, rank="0"),
        lambda data: damaged(data, rank=True),
        lambda data: damaged(data, started="now"),
        lambda data: damaged(data, lineage=[]),
        lambda data: damaged(data, lineage=[["1/../2", 3]]),
        lambda data: damaged(data, lineage=[[1]]),
        lambda data: damaged(data, started=...),
        lambda data: data[:8] + struct.pack("<Q", 2) + b"[]" + data[18:],
    ],
)
def test_a_damaged_file_is_an_error_of_one_line_that_names_it(tmp_path, damage):
    path = written(tmp_path).path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(telemetry.SnapshotError, match=path.name) as error:
        telemetry.read_snapshot(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        telemetry.read_snapshot(tmp_path / "none.counters")


def test_a_folder_is_read_past_what_is_damaged_or_foreign(tmp_path):
    whole = written(tmp_path)
    (tmp_path / "1-damaged.counters").write_bytes(whole.path.read_bytes()[:-1])
    (tmp_path / "2-foreign.counters").write_text("hello")
    (tmp_path / "3-folder.counters").mkdir()
    (tmp_path / "4-gone.counters").symlink_to(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("hello")
    assert [s.path for s in telemetry.read_folder(tmp_path)] == [whole.path]


def test_a_folder_that_is_missing_holds_nothing(tmp_path):
    assert telemetry.read_folder(tmp_path / "none") == []


# --- Where no file can be written -----------------------------------------------------------


@pytest.fixture
def default_folder(tmp_path, monkeypatch):
    """A default folder of this test, not made yet."""
    folder = tmp_path / f"expert-cache-{os.getuid()}"
    monkeypatch.setattr(telemetry, "default_folder", lambda: folder)
    return folder


def refused_line(caplog) -> str:
    (line,) = caplog.messages
    assert "EXPERT_CACHE_SNAPSHOT" in line
    assert "The cache itself is not affected" in line
    return line


def test_the_default_folder_is_of_this_user_in_memory_where_there_is_some():
    folder = telemetry.default_folder()
    assert folder.name == f"expert-cache-{os.getuid()}"
    assert folder.parent in (Path("/dev/shm"), Path(tempfile.gettempdir()))


def test_the_default_folder_is_made_and_used_again(default_folder):
    files = [telemetry.open_snapshot(None, "model", 0, LAYERS) for _ in range(2)]
    assert stat.S_IMODE(default_folder.stat().st_mode) == 0o700
    assert len({file.path for file in files}) == 2


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_default_folder_open_to_others_is_not_used(default_folder, caplog, mode):
    default_folder.mkdir()
    default_folder.chmod(mode)
    assert telemetry.open_snapshot(None, "model", 0, LAYERS) is None
    assert f"{default_folder} is not a folder of this user alone" in refused_line(caplog)
    assert not list(default_folder.iterdir())


def test_a_default_folder_of_another_user_is_not_used(default_folder, caplog, monkeypatch):
    default_folder.mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert telemetry.open_snapshot(None, "model", 0, LAYERS) is None
    assert "is not a folder of this user alone" in refused_line(caplog)


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_a_link_in_place_of_the_default_folder_is_not_followed(
    default_folder, caplog, tmp_path, target
):
    elsewhere = tmp_path / "elsewhere"
    if target == "folder":
        elsewhere.mkdir(mode=0o700)
    default_folder.symlink_to(elsewhere)
    assert telemetry.open_snapshot(None, "model", 0, LAYERS) is None
    assert refused_line(caplog)
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


def test_a_file_in_place_of_a_folder_is_one_line(default_folder, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    assert telemetry.open_snapshot(str(tmp_path / "file"), "model", 0, LAYERS) is None
    assert refused_line(caplog)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, caplog, error):
    def full(handle, offset, size):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert telemetry.open_snapshot(str(tmp_path), "model", 0, LAYERS) is None
    assert os.strerror(error) in refused_line(caplog)
    assert not list(tmp_path.iterdir())


def test_off_writes_nothing_and_says_nothing(default_folder, caplog):
    assert telemetry.open_snapshot("off", "model", 0, LAYERS) is None
    assert caplog.messages == []
    assert not default_folder.exists()


def test_a_model_is_armed_without_a_snapshot(arm, settings, monkeypatch, caplog):
    monkeypatch.setattr(telemetry, "SnapshotFile", lambda *arguments: 1 // 0)
    model = model_of()
    report = arm(model)
    assert len(report.armed) == 2
    assert "no counter snapshot" in caplog.text
    outputs(model)
    assert report.steps() == 6


# --- Files of workers that have gone --------------------------------------------------------


def test_only_day_old_files_of_dead_workers_are_removed(default_folder):
    default_folder.mkdir(mode=0o700)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = time.time() - 2 * 86400
    for name, age in {
        f"{dead.pid}-old.counters": old,
        f"{dead.pid}-new.counters": time.time(),
        f"{os.getpid()}-old.counters": old,
        "1-other-user.counters": old,
        "nobody-old.counters": old,
        f"{dead.pid}-old.txt": old,
    }.items():
        (default_folder / name).write_text("")
        os.utime(default_folder / name, (age, age))
    kept = telemetry.open_snapshot(None, "model", 0, LAYERS)
    assert {path.name for path in default_folder.iterdir()} == {
        f"{dead.pid}-new.counters",
        f"{os.getpid()}-old.counters",
        "1-other-user.counters",
        "nobody-old.counters",
        f"{dead.pid}-old.txt",
        kept.path.name,
    }


def test_a_folder_that_was_named_is_never_cleaned(tmp_path):
    old = tmp_path / "999999-old.counters"
    old.write_text("")
    os.utime(old, (0, 0))
    telemetry.open_snapshot(str(tmp_path), "model", 0, LAYERS)
    assert old.exists()


# --- Models ---------------------------------------------------------------------------------


def test_two_models_of_one_process_have_a_file_each(arm, tmp_path):
    models = [model_of(methods.Int8ChannelMoEMethod), model_of(count=3)]
    reports = [arm(model) for model in models]
    outputs(models[1])
    first, second = telemetry.read_folder(tmp_path / "snapshots")
    assert [len(s.layers) for s in (first, second)] == [1, 3]
    assert [s.total("steps") for s in (first, second)] == [0, 9]
    outputs(models[0])
    (first, _) = telemetry.read_folder(tmp_path / "snapshots")
    assert first.counters.tolist() == [a.cache.counters.tolist() for a in reports[0].armed]


def test_a_snapshot_describes_every_armed_layer(arm, tmp_path):
    report = arm(model_of(methods.Int8ChannelMoEMethod, methods.MonolithicMoEMethod))
    (snapshot,) = telemetry.read_folder(tmp_path / "snapshots")
    assert snapshot.model == "synthetic"
    (layer,) = snapshot.layers
    record = 128 * 32 + 32 * 64 + (128 + 32) * 4
    assert layer == {
        "name": "layers.0.experts.routed_experts",
        "experts": 8,
        "slots": 3,
        "record_bytes": record,
        "tensors": 4,
        "storage": "virtual",
        "private_bytes": report.armed[0].cache.storage.private,
        "shared_bytes": report.armed[0].cache.storage.shared,
    }


def test_fetched_bytes_are_the_misses_records(arm, tmp_path):
    model = model_of(count=1)
    report = arm(model)
    outputs(model)
    (snapshot,) = telemetry.read_folder(tmp_path / "snapshots")
    misses = int(report.armed[0].cache.counters[COUNTERS.index("misses")])
    assert misses > 0
    assert snapshot.fetched_bytes() == misses * (128 * 32 + 32 * 64) * 4


def test_a_model_of_which_nothing_is_armed_leaves_no_file(arm, settings, tmp_path):
    settings(slots=8)
    report = arm(model_of())
    assert (len(report.armed), len(report.refused)) == (0, 2)
    assert not list(tmp_path.glob("snapshots/*"))


WRITER = """
import ctypes, os, sys, time
import numpy as np
from pathlib import Path
from expert_cache_shim import native, policy, telemetry
from synthetic.snapshots import described

library = native.load("host", sys.argv[1])
snapshot = telemetry.SnapshotFile(Path(sys.argv[2]), "model", 0, [described("layer")])
E, S = 8, 3
state = np.zeros(native.state_words(E) + 4, np.int32)
state = state[(-state.ctypes.data % 16) // 4 :]
state[8 : 8 + 2 * E] = -1
counters = np.zeros(8, np.int64)
ids, rows = np.zeros((2, 2), np.int32)
for step in range(10**9):
    ids[:] = step % E, (step + 1) % E
    library.manage(native.Manage(
        ids=ids.ctypes.data, row_ids=rows.ctypes.data, id_rows=1, id_columns=2, id_row_stride=2,
        id_column_stride=1, state=state.ctypes.data, counters=counters.ctypes.data,
        counters_mirror=snapshot.mirror(0).ctypes.data, id_type=native.INT32, experts=E, slots=S,
        policy=policy.CODES["lru"], decay=0, mode=0,
    ))
    if step == 50:
        print("running", flush=True)
"""


def test_a_worker_that_is_killed_leaves_its_counters(host_library_path, tmp_path):
    """No thread, no flush, no exit: the kernel's stores are the file."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(host_library_path), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )  # fmt: skip
    with writer:
        assert writer.stdout.readline() == "running\n"
        (alive,) = telemetry.read_folder(tmp_path)
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    (left,) = telemetry.read_folder(tmp_path)
    assert left.pid == writer.pid
    counted = dict(zip(COUNTERS, left.counters[0].tolist(), strict=True))
    assert counted["steps"] >= alive.total("steps") >= 50
    assert abs(counted["ids"] - 2 * counted["steps"]) <= 2
