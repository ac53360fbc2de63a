"""The ring of recent routing: what a device writes without waiting, another process reads."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from expert_cache_shim.mapped_file import MappedFile
from expert_cache_shim.processes import lineage
from expert_cache_shim.recorder import Recorder, Ring
from expert_cache_shim.trace import NO_EXPERT
from expert_cache_shim.trace_ring import MAGIC, SUFFIX, Layout, Reader, RingError, to_trace

LAYERS, TOP_K, TOKENS = 3, 2, 8
HEADER = {
    "process": lineage()[0], "rank": 0, "model": "m", "started": 1.0, "experts": 16,
    "expert_map": None, "tokens": TOKENS, "layers": LAYERS, "top_k": TOP_K,
}  # fmt: skip


class Model:
    """Runs passes as a model does: every layer in turn, then the next pass."""

    def __init__(self, folder, header=HEADER, layers=LAYERS):
        layout = Layout(TOKENS, LAYERS, TOP_K)
        self.file = MappedFile(folder, SUFFIX, MAGIC, header, layout.length)
        self.layout = layout
        self.opened = []
        self.recorder = Recorder(layers, self.open)
        self.reader = Reader(self.file.path)
        self._next = 0

    def open(self, top_k):
        self.opened.append(top_k)
        content = self.file.content("u1", self.layout.length)
        return Ring(self.file, self.layout, torch.from_numpy(content))

    def run(self, tokens: int, dtype=torch.int32, skip: int | None = None) -> np.ndarray:
        """int `[tokens, LAYERS, TOP_K]`: the ids of one pass."""
        start = self._next
        self._next += tokens
        ids = np.arange(start, start + tokens)[:, None, None] + np.arange(LAYERS)[:, None]
        ids = np.concatenate([ids, ids + 1], axis=2) % 16
        for layer in range(LAYERS):
            if layer != skip:
                # Not contiguous, as a view of a wider buffer may be.
                wide = torch.from_numpy(ids[:, layer].copy()).repeat(1, 2).to(dtype)
                self.recorder.record(layer, wide[:, :TOP_K])
        return ids


@pytest.fixture
def model(tmp_path) -> Model:
    return Model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_what_ran_is_read_pass_by_pass(model, dtype):
    ran = [model.run(tokens, dtype) for tokens in (1, 3, 2)]
    rows = model.reader.read()
    assert rows.ids.tolist() == np.concatenate(ran).tolist()
    assert rows.passes.tolist() == [1, 2, 2, 2, 3, 3]
    assert (rows.lost, rows.reset, model.opened) == (0, False, [TOP_K])
    assert len(model.reader.read().ids) == 0


def test_a_reader_that_keeps_up_loses_nothing_however_often_the_ring_wraps(model):
    ran, read = [], []
    for tokens in (3, 1, 4, 2, 5, 1, 3, 8, 7, 2):
        ran.append(model.run(tokens))
        rows = model.reader.read()
        assert rows.lost == 0
        read.append(rows.ids)
    assert np.concatenate(read).tolist() == np.concatenate(ran).tolist()


def test_a_reader_that_is_late_says_how_much_it_lost(model):
    model.run(2)
    model.reader.read()
    ran = [model.run(3) for _ in range(4)]
    rows = model.reader.read()
    assert rows.ids.tolist() == np.concatenate(ran)[-TOKENS:].tolist()
    assert rows.lost == 12 - TOKENS
    found = to_trace(HEADER, [rows])
    assert found.meta["lost_tokens"] == 12 - TOKENS and found.steps == 3


def test_a_new_reader_begins_with_what_is_kept(model):
    ran = [model.run(3) for _ in range(4)]
    rows = Reader(model.file.path).read()
    assert rows.ids.tolist() == np.concatenate(ran)[-TOKENS:].tolist()
    assert rows.lost == 0


def test_rows_that_are_being_overwritten_are_not_read(model):
    """The device is in the middle of a pass: its rows, and those they take the place of, are
    no good."""
    ran = [model.run(4), model.run(4)]
    model.recorder.record(0, torch.zeros(3, TOP_K, dtype=torch.int32))
    rows = model.reader.read()
    assert rows.ids.tolist() == np.concatenate(ran)[3:].tolist()
    assert rows.lost == 3


def test_a_layer_that_did_not_run_has_no_experts(model):
    model.run(8)
    ran = model.run(2, skip=1)
    ran[:, 1] = -1
    assert model.reader.read().ids[-2:].tolist() == ran.tolist()


@pytest.mark.parametrize("gone", [0, LAYERS - 1], ids=["first", "last"])
def test_passes_stay_apart_when_a_layer_is_given_back(model, gone):
    """The one with which a pass began, or ended."""
    ran = [model.run(2), *(model.run(2, skip=gone) for _ in range(3))]
    for ids in ran[1:]:
        ids[:, gone] = -1
    rows = model.reader.read()
    known = 2 * (3 if gone else 4)  # that one has ended shows when the next one begins
    assert rows.ids.tolist() == np.concatenate(ran).tolist()[:known]
    assert rows.passes.tolist() == [1, 1, 2, 2, 3, 3, 4, 4][:known]


def test_a_pass_that_is_wider_than_the_ring_is_left_out(model):
    before = model.run(2)
    model.run(TOKENS + 1)
    after = model.run(1)
    rows = model.reader.read()
    assert rows.ids.tolist() == [*before.tolist(), *after.tolist()]


def test_after_a_reset_a_reader_begins_anew(model):
    model.run(5)
    model.reader.read()
    model.run(1)
    model.recorder.reset()
    ran = model.run(2)
    rows = model.reader.read()
    assert (rows.ids.tolist(), rows.reset, rows.lost) == (ran.tolist(), True, 0)


def test_a_ring_that_was_made_in_inference_mode_can_be_reset_outside(model):
    with torch.inference_mode():
        model.run(2)
    model.recorder.reset()
    with torch.inference_mode():
        ran = model.run(1)
    assert model.reader.read().ids.tolist() == ran.tolist()


def test_a_captured_step_records_what_its_ids_are_then(model):
    """A graph replays operations on fixed addresses and runs no Python. Shown with one of
    PyTorch's: it fails where a value is read back."""

    def step(ids):
        for layer in range(LAYERS):
            model.recorder.record(layer, ids + layer)
        return ids

    first, second = (torch.tensor([[n, n + 1]], dtype=torch.int32) for n in (2, 7))
    step(first)  # vLLM runs a step before it captures one
    graph = make_fx(step)(first)
    for ids in (second, second + 3, second):
        graph(ids)
    expected = [[[n + layer, n + layer + 1] for layer in range(LAYERS)] for n in (2, 2, 7, 10, 7)]
    rows = model.reader.read()
    assert rows.ids.tolist() == expected
    assert rows.passes.tolist() == [1, 2, 3, 4, 5]


def test_ids_that_are_none_are_none_in_the_trace(model):
    for layer in range(LAYERS):
        model.recorder.record(layer, torch.tensor([[-1, 3]], dtype=torch.int32))
    found = to_trace(HEADER, [model.reader.read()])
    assert found.ids[0].tolist() == [[NO_EXPERT, 3]] * LAYERS
    assert (found.experts, found.meta["model"]) == (16, "m")


def test_under_expert_parallelism_ids_are_those_of_the_rank(tmp_path):
    header = {**HEADER, "experts": 2, "expert_map": [-1, 1, -1, 0]}
    model = Model(tmp_path, header)
    for layer in range(LAYERS):
        model.recorder.record(layer, torch.tensor([[1, 2], [3, 9]], dtype=torch.int32))
    found = to_trace(model.reader.header, [model.reader.read()])
    assert found.ids[:, 0].tolist() == [[1, NO_EXPERT], [0, NO_EXPERT]]
    assert found.experts == 2


def test_an_error_ends_recording_and_nothing_else(model, caplog):
    model.run(1)
    model.recorder.record(0, torch.zeros(1, TOP_K + 5, dtype=torch.int32))
    assert "unexpected error; routing is no longer recorded" in caplog.text
    model.run(1)
    assert len(model.reader.read().ids) == 1


def test_a_ring_that_cannot_be_made_is_asked_for_once():
    asked = []
    recorder = Recorder(1, asked.append)
    for _ in range(3):
        recorder.record(0, torch.zeros(1, 2, dtype=torch.int32))
    recorder.reset()
    assert asked == [2]


def test_the_ring_of_a_large_model_is_bounded_and_still_long():
    layout = Layout.of(layers=61, top_k=8)
    assert layout.length <= 2**25 + 8 * 4
    assert layout.tokens > 30_000


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"XPTRACE1", b"x" * 5000, b"XPTRACE1" + b"\xff" * 8,
        b"XPTRACE1" + (2).to_bytes(8, "little") + b"{}",
        b"XPTRACE1" + (2).to_bytes(8, "little") + b"[]" + b"\0" * 5000,
    ],
)  # fmt: skip
def test_another_file_is_refused(tmp_path, damage):
    path = tmp_path / f"1-x{SUFFIX}"
    path.write_bytes(damage)
    with pytest.raises(RingError):
        Reader(path)
