"""Steps that vLLM makes for itself, with tokens that nobody sent, go through the cache too."""

import dummy_steps
import pytest
from engine import IN_PROCESS, Job, run, shim


@pytest.fixture(scope="module")
def answer(folder, checkpoint, environment):
    job = Job(checkpoint("qwen3_moe"), scenario=("dummy_steps",))
    settings = shim(folder / "dummy-snapshots", slots=16)
    return run([job], folder / "dummy", environment(**IN_PROCESS, **settings))[0]


@pytest.mark.parametrize("turn", ("tokens", "after"))
def test_they_change_no_token_that_is_served(turn, answer, stock):
    assert answer[turn] == stock["qwen3_moe"]["tokens"]


def test_they_are_counted_in_every_layer(answer):
    before, idle, profiled = answer["counts"]
    assert [after - count for after, count in zip(idle, before)] == [dummy_steps.IDLE] * 4
    assert [after - count for after, count in zip(profiled, idle)] == [1] * 4
