"""The trace file: what is written is read, and a file that is none is refused in one line."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest

from expert_cache_shim import trace
from expert_cache_shim.trace import NO_EXPERT, Trace, TraceError

IDS = np.array([[[0, 3]], [[1, 3]], [[2, NO_EXPERT]]], np.uint16)


def made(ids=IDS, step=(0, 1, 2), **meta) -> Trace:
    tokens = len(ids)
    return Trace(ids, np.zeros(tokens, np.int32), np.array(step), {"num_experts": 4, **meta})


def write(path, **arrays):
    with path.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    return path


@pytest.mark.parametrize("step", [(0, 1, 2), (5, 5, 9)])
def test_what_is_saved_is_loaded(tmp_path, step):
    before = made(step=step, model="a model")
    trace.save(before, tmp_path / "t.npz")
    after = trace.load(tmp_path / "t.npz")
    assert (after.ids == before.ids).all() and after.ids.dtype == np.uint16
    assert (np.diff(after.step) == 0).tolist() == (np.diff(before.step) == 0).tolist()
    assert after.meta == before.meta and after.experts == 4
    assert (after.layers, after.top_k, after.steps) == (1, 2, len(set(step)))


def test_tokens_of_one_step_are_routed_together():
    together = made(step=(0, 0, 1))
    assert [np.flatnonzero(mask).tolist() for mask in together.routed()] == [[0, 1, 3], [2]]
    assert together.first(1).ids.tolist() == IDS[:2].tolist()
    assert together.first(9).steps == 2


def test_arrays_that_may_be_left_out(tmp_path):
    found = trace.load(write(tmp_path / "t.npz", ids=IDS[:2].astype(np.uint8)))
    assert found.seq.tolist() == [0, 0] and found.step.tolist() == [0, 1]
    assert found.meta == {"num_experts": 4}


def meta(**values):
    return np.array(json.dumps(values))


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"seq": [0]}, "has no array 'ids'"),
        ({"ids": IDS[0]}, "'ids' is uint16 of shape (1, 2)"),
        ({"ids": IDS.astype(np.int32)}, "'ids' is int32, allowed are uint8 and uint16"),
        ({"ids": IDS.astype(float)}, "'ids' is float64 of shape (3, 1, 2)"),
        ({"ids": IDS[:0]}, "'ids' is [0, 1, 2], allowed are 1 to 16777216 tokens, 4096 layers and "
                           "256 experts a token"),
        ({"ids": IDS, "seq": [0]}, "'seq' is int64 [1] for 3 tokens"),
        ({"ids": IDS, "seq": ["a", "b", "c"]}, "'seq' is <U1 [3] for 3 tokens"),
        ({"ids": IDS, "step": [1, 2, 1]}, "'step' falls"),
        ({"ids": IDS, "meta": np.array("{")}, "'meta' is no JSON"),
        ({"ids": IDS, "meta": np.array("[" * 100000)}, "'meta' is no JSON"),
        ({"ids": IDS, "meta": meta()[None]}, "'meta' is <U2 of shape (1,)"),
        ({"ids": IDS, "meta": np.array("[]")}, "'meta' is no JSON object"),
        ({"ids": IDS, "meta": np.array(" " * 2**19)}, "'meta' is larger than 1048576 bytes"),
        ({"ids": IDS, "meta": meta(num_experts=3)},
         "'num_experts' is '3' with expert 3 in use, allowed are 4 to 1024"),
        ({"ids": IDS, "meta": meta(num_experts="many")},
         "'num_experts' is 'many' with expert 3 in use, allowed are 4 to 1024"),
        ({"ids": IDS, "meta": meta(num_experts=True)},
         "'num_experts' is 'True' with expert 3 in use, allowed are 4 to 1024"),
        ({"ids": IDS + np.uint16(2000)},
         "'num_experts' is '2004' with expert 2003 in use, allowed are 2004 to 1024"),
    ],
)  # fmt: skip
def test_a_file_with_other_arrays_is_refused(tmp_path, arrays, message):
    path = write(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError) as error:
        trace.load(path)
    assert str(error.value) == f"{path}: is not a routing trace: {message}"


class Ran(Exception):
    """What a pickle in a file would do."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def npy(header: dict, data: bytes) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + data


def archive(path, members: dict[str, bytes]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


HUGE = {"descr": "<u2", "fortran_order": False, "shape": (2**40, 64, 8)}
CLAIMED = {"descr": "<u2", "fortran_order": False, "shape": (2**20, 64, 8)}
OBJECT = {"descr": "|O", "fortran_order": False, "shape": (1, 1, 1)}


@pytest.mark.parametrize(
    "members, message",
    [
        ({"ids.npy": npy(OBJECT, pickle.dumps(Ran()))}, "'ids' is object of shape (1, 1, 1)"),
        ({"ids.npy": pickle.dumps(Ran())}, "the magic string is not correct"),
        ({"ids.npy": npy(HUGE, b"")}, f"'ids' has {2**50} bytes, allowed are 2147483648"),
        ({"ids.npy": npy(CLAIMED, b"12")}, "does not fit its 130 bytes"),
        ({"ids.npy": npy({**CLAIMED, "shape": (1, 1, 1)}, b"\0" * 2**20)}, "does not fit its"),
        ({"ids.npy": b""}, "EOF"),
        ({"ids.npy": b"\x93NUMPY\x07\x00"}, "EOF"),
        ({"ids.npy": b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 16}, "EOF in multi-line statement"),
        ({"ids": b"x"}, "has no array 'ids'"),
    ],
)
def test_a_hostile_member_is_refused(tmp_path, members, message):
    path = archive(tmp_path / "t.npz", members)
    with pytest.raises(TraceError) as error:
        trace.load(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_archive_are_refused(tmp_path):
    path = tmp_path / "t.npz"
    for content in (b"", b"PK\x03\x04", b"x" * 1000, write(path, ids=IDS).read_bytes()[:-30]):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="is not a routing trace: "):
            trace.load(path)


def test_no_byte_that_is_changed_does_more_than_a_refusal(tmp_path):
    path = tmp_path / "t.npz"
    trace.save(made(step=(0, 0, 1), model="m"), path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            trace.load(path)
        except TraceError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(whole) // 4


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        trace.load(tmp_path / "none.npz")
