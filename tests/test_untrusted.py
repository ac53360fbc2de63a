"""Files of counters and of recent routing that somebody else may have written."""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic.snapshots import described

from expert_cache_shim import metrics, telemetry, trace, trace_ring
from expert_cache_shim.commands import CommandError, trace_record
from expert_cache_shim.mapped_file import MappedFile
from expert_cache_shim.processes import lineage
from expert_cache_shim.trace_ring import Layout, Reader, RingError, to_trace

ROOT = Path(__file__).resolve().parents[1]
MARK = "\N{REPLACEMENT CHARACTER}"
LAYOUT = Layout(tokens=8, layers=3, top_k=2)
RING = {
    "process": lineage()[0], "rank": 0, "model": "m", "started": 1.0, "experts": 16,
    "expert_map": None, "tokens": 8, "layers": 3, "top_k": 2,
}  # fmt: skip


def counters(folder: Path, **header) -> MappedFile:
    layers = header.pop("layers", [described("layers.0")])
    return telemetry.SnapshotFile(folder, header.pop("model", "m"), 0, layers)


def ring(folder: Path, **header) -> MappedFile:
    return MappedFile(
        folder, trace_ring.SUFFIX, trace_ring.MAGIC, {**RING, **header}, LAYOUT.length
    )


# For each kind of file: its writer, and code that reads the file named in sys.argv[1].
KINDS = {
    "counters": (counters, "telemetry.read_snapshot(sys.argv[1])"),
    "routing": (ring, "trace_ring.Reader(Path(sys.argv[1])).read()"),
}


def in_time(code: str, path: Path) -> str:
    """What reading the file says, in a process that may take two minutes and little memory."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from expert_cache_shim import telemetry, trace_ring\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
        f"try: {code}\n"
        "except (telemetry.SnapshotError, trace_ring.RingError, OSError) as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- What lies in place of the file ---------------------------------------------------------


def as_it_is(path: Path, sound: Path) -> None:
    sound.rename(path)


def as_a_pipe(path: Path, sound: Path) -> None:
    os.mkfifo(path)


def as_a_link(path: Path, sound: Path) -> None:
    path.symlink_to(sound)


def as_endless_zeros(path: Path, sound: Path) -> None:
    path.symlink_to("/dev/zero")


def as_a_terabyte_of_nothing(path: Path, sound: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def as_a_folder(path: Path, sound: Path) -> None:
    path.mkdir()


def as_its_first_half(path: Path, sound: Path) -> None:
    path.write_bytes(sound.read_bytes()[:4100])


def as_a_header_of_terabytes(path: Path, sound: Path) -> None:
    data = sound.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<Q", 2**43) + data[16:])


def as_a_header_that_promises_terabytes(path: Path, sound: Path) -> None:
    """As many layers, or tokens, as come to terabytes of content."""
    data = sound.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    header = json.loads(data[16 : 16 + length])
    if "top_k" in header:
        header.update(tokens=2**17, layers=4096, top_k=256)
    else:
        header["layers"] *= 30_000
    text = json.dumps(header).encode()
    path.write_bytes(data[:8] + struct.pack("<Q", len(text)) + text + bytes(8192))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lay, said", [
    (as_it_is, ""),
    (as_a_pipe, "not a regular file"),
    (as_a_link, "symbolic links"),
    (as_endless_zeros, "symbolic links"),
    (as_a_terabyte_of_nothing, "larger than"),
    (as_a_folder, "not a regular file"),
    (as_its_first_half, "damaged"),
    (as_a_header_of_terabytes, "header of 8796093022208 bytes"),
    (as_a_header_that_promises_terabytes, "damaged"),
])  # fmt: skip
def test_what_is_no_file_of_ours_is_told_and_takes_neither_time_nor_memory(
    tmp_path, kind, lay, said
):
    write, read = KINDS[kind]
    path = tmp_path / "1-x"
    lay(path, write(tmp_path).path)
    line = in_time(read, path)
    assert said in line and "\n" not in line
    assert bool(said) == bool(line) and (not said or str(path) in line)


# --- Folders --------------------------------------------------------------------------------


@pytest.fixture
def default_folder(tmp_path, monkeypatch):
    """A default folder of this test, not made yet."""
    folder = tmp_path / f"expert-cache-{os.getuid()}"
    monkeypatch.setattr(telemetry, "default_folder", lambda: folder)
    monkeypatch.delenv("EXPERT_CACHE_TRACE", raising=False)
    return folder


def what_is_found(folder: Path | None) -> tuple[int, int]:
    """Files of counters, and of routing, that are read."""
    try:
        trace_record._ring(str(folder) if folder else None, 0)
        rings = 1
    except CommandError:
        rings = 0
    return len(telemetry.read_folder(folder)), rings


def open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def of_another_user(folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


def by_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [open_to_others, of_another_user, by_a_link])
def test_a_default_folder_that_others_can_write_is_not_read(default_folder, change):
    default_folder.mkdir(mode=0o700)
    counters(default_folder), ring(default_folder)
    assert what_is_found(None) == what_is_found(default_folder) == (1, 1)
    change(default_folder)
    assert what_is_found(None) == what_is_found(default_folder) == (0, 0)


def test_a_folder_that_is_named_is_read_whoever_wrote_there(default_folder, tmp_path):
    folder = tmp_path / "named"
    files = [counters(folder), ring(folder)]
    folder.chmod(0o755)
    if os.getuid() == 0:
        for file in files:
            os.chown(file.path, 12345, 12345)
    assert what_is_found(folder) == (1, 1)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_written_is_for_its_owner_alone_whatever_the_umask(default_folder, tmp_path, umask):
    named = tmp_path / "a" / "b" / "c"
    before = os.umask(umask)
    try:
        files = [
            telemetry.open_snapshot(None, "m", 0, [described("layers.0")]),
            telemetry.open_snapshot(str(named), "m", 0, [described("layers.0")]),
            ring(named),
        ]
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.path.stat().st_mode) for file in files] == [0o600] * 3
    made = (default_folder, named, named.parent, named.parent.parent)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 4


@pytest.mark.parametrize("change", [open_to_others, of_another_user, by_a_link])
def test_nothing_is_written_to_a_default_folder_of_others(default_folder, caplog, change):
    default_folder.mkdir(mode=0o700)
    change(default_folder)
    assert telemetry.open_snapshot(None, "m", 0, [described("layers.0")]) is None
    assert "is not a folder of this user alone" in caplog.text
    assert not list(default_folder.iterdir())


def test_a_file_of_another_user_does_not_speak_for_this_server(default_folder, tmp_path):
    folder = tmp_path / "named"
    own, foreign = counters(folder), counters(folder, model="another")
    collector = metrics.CacheCollector(folder, by_layer=False)

    def models() -> set[str]:
        return {s.labels["model"] for family in collector.collect() for s in family.samples}

    assert models() == {"m", "another"}
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(foreign.path, 12345, 12345)
    assert models() == {"m"} and own.path.exists()
    assert len(telemetry.read_folder(folder)) == 2


# --- What the files say ---------------------------------------------------------------------


@pytest.mark.parametrize("field, value", [
    ("tokens", 0), ("tokens", 2**40), ("tokens", 8.0), ("tokens", 1e400), ("tokens", True),
    ("top_k", "2"), ("top_k", 257), ("layers", 2), ("layers", 4097), ("layers", [3]),
    ("process", [1]), ("process", None), ("process", [1, 2.0]), ("process", [1, "x"]),
    ("process", [[1], 2]), ("model", 3), ("rank", None), ("rank", -1), ("started", "now"),
    ("experts", 0), ("experts", 2**20), ("experts", float("nan")), ("expert_map", 7),
    ("expert_map", [[0]]), ("expert_map", [0, 2**70]), ("expert_map", [16]), ("expert_map", "0"),
    ("expert_map", [0.0]), ("expert_map", {"0": 0}),
])  # fmt: skip
def test_a_header_that_no_writer_made_is_refused(tmp_path, field, value):
    with pytest.raises(RingError, match="no recent routing") as error:
        Reader(ring(tmp_path, **{field: value}).path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("state", [
    (0, 0, 0, 0), (-1, -1, 0, 0), (2**63 - 1, 2**63 - 1, 0, 0), (0, 2**62, 0, 0),
    (2**62, 5, 0, 0), (5, -(2**63), 0, 0), (9, 9, 9, -1),
])  # fmt: skip
def test_no_state_of_a_ring_raises_or_takes_more_than_the_ring(tmp_path, state):
    file = ring(tmp_path)
    reader = Reader(file.path)
    for _ in range(2):
        assert len(reader.read().ids) <= 8
        file.content("<i8", 4)[:] = state
        assert len(Reader(file.path).read().ids) <= 8


def test_a_ring_that_is_cut_off_while_it_is_followed_is_an_error_and_no_signal(tmp_path):
    file = ring(tmp_path)
    reader = Reader(file.path)
    os.truncate(file.path, 4096)
    with pytest.raises(OSError, match="cut off"):
        reader.read()


def taken(tmp_path: Path, passes: list[int], expert: int) -> list[trace_ring.Rows]:
    """What is read of a ring with so many tokens of these passes, all routed to one expert."""
    file = ring(tmp_path)
    file.content("<i8", 8, LAYOUT.passes_at)[: len(passes)] = passes
    file.content("<i2", 48, LAYOUT.ids_at)[:] = expert
    reader = Reader(file.path)
    file.content("<i8", 4)[:2] = len(passes)
    return [reader.read()]


def test_a_ring_holds_what_a_model_could_have_run(tmp_path):
    found = to_trace(RING, taken(tmp_path, [1, 2, 2], 15))
    assert (found.steps, found.ids.max()) == (2, 15)


@pytest.mark.parametrize("passes, expert", [([2, 1], 0), ([1, 1], 16), ([0, -(2**63)], 3)])
def test_what_no_model_ran_is_no_trace(tmp_path, passes, expert):
    with pytest.raises(trace.TraceError):
        to_trace(RING, taken(tmp_path, passes, expert))


def test_text_that_would_steer_a_terminal_is_replaced(tmp_path):
    layers = [described("a\x1b[2Jb\nc"), described("\u202egpj.txt")]
    model = "\x9b31m\x07red"
    snapshot = telemetry.read_snapshot(counters(tmp_path, model=model, layers=layers).path)
    assert [layer["name"] for layer in snapshot.layers] == [f"a{MARK}[2Jb{MARK}c", f"{MARK}gpj.txt"]
    assert snapshot.model == f"{MARK}31m{MARK}red"
    assert Reader(ring(tmp_path, model=model).path).model == snapshot.model


def test_a_recording_ends_where_a_trace_would_be_too_large_to_read(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    file = ring(tmp_path)
    file.content("<i8", LAYOUT.tokens, LAYOUT.passes_at)[:] = np.arange(LAYOUT.tokens)
    reader = Reader(file.path)
    monkeypatch.setattr(trace, "MAX_BYTES", 2 * 6 * 20)
    done = iter(range(6, 60, 6))

    def advance(_seconds: float) -> None:
        file.content("<i8", 4)[:2] = next(done)

    monkeypatch.setattr(trace_record.time, "sleep", advance)
    rows = trace_record._follow(reader, float("inf"), float("inf"))
    assert sum(len(one.ids) for one in rows) == 12  # the next could be 8


def test_a_recording_keeps_what_came_before_its_ring_was_cut_off(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    file = ring(tmp_path)
    reader = Reader(file.path)
    file.content("<i8", 4)[:2] = 5
    monkeypatch.setattr(trace_record.time, "sleep", lambda _: os.truncate(file.path, 4096))
    rows = trace_record._follow(reader, float("inf"), float("inf"))
    assert sum(len(one.ids) for one in rows) == 5
    assert "cut off while it was read; what was recorded before is kept" in capsys.readouterr().err


# --- What status and the metrics make of them -----------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 2**63), st.integers(0, 9), st.floats(), st.sampled_from([2**63 - 1, 10**300])
)
ANYTHING = st.one_of(st.none(), NUMBERS, st.text(max_size=3), st.lists(NUMBERS, max_size=3))
LAYER = st.fixed_dictionaries(
    {name: st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1))
     for name in ("experts", "slots", "record_bytes", "tensors", "private_bytes", "shared_bytes")},
)  # fmt: skip
COUNTS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), min_size=16, max_size=16
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layers=st.lists(st.one_of(LAYER, LAYER, ANYTHING), max_size=2), counts=COUNTS,
    changes=st.dictionaries(
        st.sampled_from(["engine", "rank", "model", "policy", "started", "lineage"]), ANYTHING,
        max_size=2,
    ),
    alive=st.booleans(),
)  # fmt: skip
def test_no_snapshot_stops_what_shows_it(tmp_path_factory, layers, counts, changes, alive):
    pytest.importorskip("rich")
    from rich.console import Console

    from expert_cache_shim.commands import status, status_screen, watch

    folder = tmp_path_factory.mktemp("any")
    names = {"name": "[/]\x1b[2J", "storage": "virtual"}
    layers = [{**names, **one} if isinstance(one, dict) else one for one in layers]
    header = {
        "lineage": [lineage()[0] if alive else [2**22, 1]], "engine": "", "rank": 0, "model": "[/]",
        "policy": "lru", "started": 1e9, "layers": layers, **changes,
    }  # fmt: skip
    file = MappedFile(folder, ".counters", b"XPCACHE1", header, 64 * len(layers))
    file.content("<i8", 8 * len(layers))[:] = counts[: 8 * len(layers)]
    seen = watch.Watch(folder)
    for reading in (seen.read(), seen.read()):
        for line in status._plain(reading, True):
            assert line.replace("\n", "").isprintable() or not line
        json.dumps(status.as_data(reading), allow_nan=False)
        screen = io.StringIO()
        Console(file=screen, width=100).print(status_screen.screen(reading, 1.0, True))
        assert "\x1b" not in screen.getvalue()
        for by_layer in (False, True):
            list(metrics.families([*reading.ended], by_layer))
