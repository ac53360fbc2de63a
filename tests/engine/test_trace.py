"""The routing that a real engine leaves for `expert-cache trace record`."""

import numpy as np
import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of
from recorded import check_replay_counts_alike, read_trace

SLOTS = 16


@pytest.fixture(scope="module")
def recording(folder, checkpoint, environment):
    """The answer of an engine that records, and what it recorded."""
    rings = folder / "rings"
    variables = environment(
        **IN_PROCESS, **shim(folder / "trace-snapshots", slots=SLOTS, trace=rings)
    )
    (answer,) = run([Job(checkpoint("qwen3_moe"))], folder / "trace", variables)
    return answer, read_trace(rings)


def test_recording_changes_no_token(recording, stock):
    answer, _ = recording
    assert answer["tokens"] == stock["qwen3_moe"]["tokens"]
    assert "the routing of the last" in answer.log


def test_replay_of_what_was_recorded_counts_what_the_kernels_counted(recording, folder, checkpoint):
    _, found = recording
    (snapshot,) = snapshots_of(folder / "trace-snapshots", checkpoint("qwen3_moe"))
    check_replay_counts_alike(found, snapshot, SLOTS)
    assert np.diff(found.bounds).max() > 8  # prompts, which ran together
