"""`expert-cache trace` on files that somebody made to do harm."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limited_commands import Run, limited

from expert_cache_shim import cli, trace, trace_control

pytest.importorskip("rich")
IDS = np.array([[[0, 3]], [[1, 3]], [[2, 0]]], np.uint16)
NASTY = ["[/]", "[bold", "$\\frac$", "\x1b[2J", "a\nb", "\ud800", "\u202egpj", "x" * 10_000]


@pytest.fixture(scope="module")
def process():
    yield from limited(2**29)


def refusal(process: Run, *words) -> str:
    status, out, err = process("trace", *words)
    assert (status, out, err.count("\n")) == (1, "", 1), (status, out, err)
    return err


def header(shape, descr="<u2", length=None) -> bytes:
    """The start of a `.npy` file in numpy's second format; length: what the header says of its
    own."""
    text = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)}).encode() + b"\n"
    length = len(text) if length is None else length
    return b"\x93NUMPY\x02\x00" + length.to_bytes(4, "little") + text


def bomb(path: Path, start: bytes, zeros: int, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """An archive of `ids` that is mostly zeros."""
    with (
        zipfile.ZipFile(path, "w", method, compresslevel=1) as archive,
        archive.open("ids.npy", "w") as member,
    ):
        member.write(start)
        for _ in range(zeros >> 20):
            member.write(bytes(2**20))
        member.write(bytes(zeros % 2**20))
    return path


# --- Memory and time ------------------------------------------------------------------------


@pytest.mark.parametrize("start, zeros, said", [
    (header([2**40, 1, 2]), 2**20, "allowed are 2147483648"),
    (header([2**40, 0, 2]), 0, "allowed are 1 to"),
    (header([-1, -1, 1]), 2, "of shape (-1, -1, 1)"),
    (header([2**25, 1, 1], "|u1"), 2**25, "allowed are 1 to 16777216 tokens"),
    (header([1, 1, 1], "|V8"), 8, "of shape (1, 1, 1)"),
    (header([1, 1, 1], "|O"), 8, "of shape (1, 1, 1)"),
    (header(["x", 1, 1]), 8, "not a routing trace"),
    (b"\x93NUMPY\x02\x00\xff\x00\x00\x00" + b"(" * 9000, 0, "not a routing trace"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["info", "replay"])
def test_an_archive_that_is_made_to_do_harm(process, tmp_path, command, start, zeros, said):
    path = bomb(tmp_path / "t.npz", start, zeros)
    line = refusal(process, command, path)
    assert said in line and str(path) in line


def test_a_header_is_not_as_long_as_it_says(process, tmp_path):
    path = bomb(tmp_path / "t.npz", header([1, 1, 1], length=2**32 - 1), 700 * 2**20)
    assert path.stat().st_size < 2**22
    assert "EOF" in refusal(process, "info", path)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_what_numpy_does_not_write_is_not_unpacked(process, tmp_path, method):
    path = bomb(tmp_path / "t.npz", header([1, 1, 1]), 2, method)
    assert "compressed as numpy does not" in refusal(process, "info", path)


@pytest.mark.parametrize("content, said", [
    (header([2**40, 0, 2]), "allowed are 1 to"),
    (header([1, 1, 1], length=2**32 - 1), "has no routed experts"),
    (header([1, 1, 1], "<U2") + bytes(8), "is <U2"),
    (b'{"routed_experts": "' + b"A" * (2**27), "bytes of JSON"),
    (b"[" + b"[]," * 2**20, "has no routed experts"),
])  # fmt: skip
def test_what_cannot_be_imported_takes_neither_time_nor_memory(process, tmp_path, content, said):
    path = tmp_path / "array.npy"
    path.write_bytes(content)
    if b"NUMPY" in content:
        os.truncate(path, max(len(content), 2**32 if b"\xff\xff\xff\xff" in content else 0))
    line = refusal(process, "import", tmp_path / "out.npz", path)
    assert said in line and str(path) in line and not (tmp_path / "out.npz").exists()


def as_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("lay", [as_a_pipe, as_a_device])
@pytest.mark.parametrize("command", [("info",), ("replay",), ("import", "{out}")])
def test_what_is_no_file_is_not_waited_for(process, tmp_path, lay, command):
    path = tmp_path / "t.npz"
    lay(path)
    words = [word.format(out=tmp_path / "out.npz") for word in command]
    assert f"{path}: not a regular file" in refusal(process, *words, path)


# --- Content --------------------------------------------------------------------------------


def run(capsys, *words) -> tuple[int, str, str]:
    return cli.main(["trace", *map(str, words)]), *capsys.readouterr()


def written(path: Path, ids=IDS, step=None, **meta) -> Path:
    arrays = {} if step is None else {"step": np.array(step)}
    with path.open("wb") as stream:
        np.savez_compressed(stream, ids=ids, meta=np.array(json.dumps(meta)), **arrays)
    return path


@pytest.mark.parametrize("text", [*NASTY, ["[/]"], {"a": "[/]"}, None, 10**400, float("nan")])
def test_no_text_of_a_trace_steers_what_shows_it(tmp_path, capsys, text):
    words = ("model", "source", "control", "lost_tokens", "licence", "commit")
    (tmp_path / "a[").mkdir()
    path = written(tmp_path / "a[" / "]$\\x$.npz", **dict.fromkeys(words, text))
    few = ["replay", "--slots", "1", "--policy", "lrfu"]
    for command in (["info"], ["info", "--json"], few, [*few, "--json"]):
        status, out, err = run(capsys, command[0], path, *command[1:])
        assert (status, err.strip()) == (0, "")
        assert out.replace("\n", "").isprintable() and len(out) < 10_000


@pytest.mark.parametrize("kind", ["curves", "layers", "reuse"])
@pytest.mark.parametrize("text", NASTY[:3])
def test_no_text_of_a_trace_steers_a_picture(tmp_path, capsys, kind, text):
    pytest.importorskip("matplotlib")
    path = written(tmp_path / "$\\x$.npz", control=text)
    picture = tmp_path / "picture.png"
    words = ("plot", path, "--kind", kind, "--output", picture, "--slots", "1", "--policy", "lrfu")
    assert run(capsys, *words)[0] == 0 and picture.exists()


@pytest.mark.parametrize("words", [["info"], ["replay"], ["replay", "--control", "uniform"]])
def test_a_trace_that_routes_to_nobody_is_refused(tmp_path, capsys, words):
    path = written(tmp_path / "t.npz", np.full_like(IDS, trace.NO_EXPERT))
    status, out, err = run(capsys, words[0], path, *words[1:])
    assert (status, out, err.count("\n")) == (1, "", 1) and "routed to an expert" in err


def test_the_control_of_a_rank_that_has_fewer_experts_than_a_token_names():
    ids = np.zeros((5, 2, 8), np.uint16)
    found = trace.Trace(ids, np.zeros(5, np.int32), np.arange(5), {"num_experts": 2})
    drawn = trace_control.uniform(found).ids
    assert (np.sort(drawn[:, :, :2]) == [0, 1]).all() and (drawn[:, :, 2:] == 65535).all()


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
META = st.dictionaries(
    st.sampled_from(["model", "num_experts", "control", "lost_tokens", "source", "x"]),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2), max_leaves=4),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.tuples(*[st.integers(0, 4)] * 3), kind=st.sampled_from(["u1", "u2", "i4", "f4", "U1"]),
    numbers=st.lists(st.integers(0, 255), min_size=64, max_size=64), meta=META,
    step=st.one_of(st.none(), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
)  # fmt: skip
def test_any_arrays_are_shown_or_refused_in_one_line(
    tmp_path_factory, capsys, shape, kind, numbers, meta, step
):
    ids = np.resize(np.array(numbers), shape).astype(kind)
    path = written(tmp_path_factory.mktemp("any") / "t.npz", ids, step, **meta)
    for words in (["info"], ["replay", "--slots", "1", "--policy", "lrfu,opt"]):
        status, out, err = run(capsys, words[0], path, *words[1:])
        if status:
            assert (status, out, err.count("\n")) == (1, "", 1) and str(path) in err
        else:
            assert out and err.strip() == ""


def test_a_member_that_is_said_to_be_longer_than_it_is(process, tmp_path):
    """What the archive says of sizes is wrong: the data ends before."""
    path = tmp_path / "t.npz"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("ids.npy", header([2**20, 1, 1]) + b"12")
    start = len(header([2**20, 1, 1]))
    data = stream.getvalue().replace((start + 2).to_bytes(4, "little"),
                                     (start + 2**21).to_bytes(4, "little"))  # fmt: skip
    path.write_bytes(data)
    assert "is not a routing trace" in refusal(process, "info", path)
