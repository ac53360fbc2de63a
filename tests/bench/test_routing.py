"""The replayed routing: whose rows a call reads, and that the ids are ids."""

import numpy as np
import pytest
import torch

from bench.routing import STREAM_OFFSET, TRACE_EXPERTS, Replay, hot_rows, trace_rows

LAYERS = 5


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return trace_rows(LAYERS)


def ids_of_a_step(replay: Replay, tokens: int) -> np.ndarray:
    """int32 `[LAYERS, tokens, 8]`: each layer asks once, in order."""
    hidden = torch.empty(tokens, 4)
    return np.stack([replay.route_tokens(hidden, hidden, 8)[1].numpy() for _ in range(LAYERS)])


@pytest.mark.parametrize("layers, top_k", [(1, 8), (48, 8), (12, 4)])
def test_every_token_names_distinct_experts(layers, top_k):
    rows = np.sort(trace_rows(layers, top_k), axis=-1)
    assert rows.shape[1:] == (layers, top_k)
    assert (np.diff(rows, axis=-1) > 0).all()
    assert rows.min() >= 0
    assert rows.max() < TRACE_EXPERTS


def test_no_two_layers_are_the_same():
    rows = np.sort(trace_rows(48), axis=-1)
    assert len({rows[:, layer].tobytes() for layer in range(48)}) == 48


def test_hot_routing_names_few_experts_and_all_of_them(rows):
    hot = hot_rows(rows, 16)
    assert (np.diff(np.sort(hot, axis=-1), axis=-1) > 0).all()
    assert all(len(np.unique(hot[:, layer])) == 16 for layer in range(LAYERS))


def test_layers_and_steps_follow_the_trace(rows):
    replay = Replay(rows, "cpu")
    for step in range(3):
        assert np.array_equal(ids_of_a_step(replay, 1)[:, 0], rows[step])


def test_each_stream_reads_at_its_own_offset(rows):
    replay = Replay(rows, "cpu")
    ids = ids_of_a_step(replay, 32)
    for stream in range(32):
        assert np.array_equal(ids[:, stream], rows[stream * STREAM_OFFSET % len(rows)])


def test_the_trace_begins_again_at_its_end(rows):
    replay = Replay(rows, "cpu")
    replay.seek(len(rows) - 1)
    ids_of_a_step(replay, 1)
    assert np.array_equal(ids_of_a_step(replay, 1)[:, 0], rows[0])


def test_seek_and_load_change_what_is_read_in_place(rows):
    replay = Replay(rows, "cpu")
    addresses = [replay._ids.data_ptr(), replay._position.data_ptr()]
    ids_of_a_step(replay, 2)
    replay.load(hot_rows(rows, 16))
    replay.seek(7)
    assert np.array_equal(ids_of_a_step(replay, 1)[:, 0], hot_rows(rows, 16)[7])
    assert [replay._ids.data_ptr(), replay._position.data_ptr()] == addresses


def test_the_type_of_ids_is_the_one_asked_for(rows):
    hidden = torch.empty(3, 4)
    weights, ids = Replay(rows, "cpu").route_tokens(hidden, hidden, 8, torch.int64)
    assert ids.dtype == torch.int64
    assert weights.shape == (3, 8)
    assert weights.sum(1).allclose(torch.ones(3))


def test_a_top_k_the_trace_cannot_make_is_refused():
    with pytest.raises(ValueError, match="--routing model"):
        trace_rows(4, top_k=10)
