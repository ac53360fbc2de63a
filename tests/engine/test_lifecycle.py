"""Other weights while a model serves, and sleep, in a real engine: the next step uses what came.

Every way to change weights that vLLM has is taken twice, without the cache and with it. That the
cache hears of each is shown by a control in which it does not.
"""

import pytest
from engine import IN_PROCESS, PROMPTS, Job, run, shim, snapshots_of
from other_experts import write_other_experts

SLOTS = 16
CHANGES = ("reloaded", "transferred", "copied", "given", "slept 1", "slept 2")


@pytest.fixture(scope="module")
def checkpoints(folder, checkpoint) -> tuple[str, str]:
    """Two models that differ in their experts only."""
    first = checkpoint("qwen3_moe")
    other = write_other_experts(first, folder / "checkpoints" / "other-experts")
    return first, str(other)


@pytest.fixture(scope="module")
def jobs(checkpoints, checkpoint) -> dict[str, Job]:
    first, other = checkpoints
    quantised = checkpoint("int8_channel")
    answers = {"prompts": PROMPTS[:4], "max_tokens": (8,) * 4}
    engine = {"weight_transfer_config": {"backend": "files"}}
    scenario = ("other_weights", first, other)
    return {
        "played": Job(first, engine, plugins=("file_transfer",), scenario=scenario, **answers),
        "quantised": Job(
            quantised, {"moe_backend": "triton"}, plugins=("torch_experts",),
            scenario=("doubled_scales", quantised), **answers,
        ),
        "deaf": Job(
            first, engine, plugins=("file_transfer", "deaf_worker"), scenario=scenario, **answers
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def off(folder, environment, jobs):
    names = ("played", "quantised")
    answers = run([jobs[n] for n in names], folder / "lifecycle", environment(**IN_PROCESS))
    return dict(zip(names, answers))


@pytest.fixture(scope="module")
def on(folder, environment, jobs):
    """With the cache; the control stays deaf to the end of its process, so it comes last."""
    names = ("played", "quantised", "deaf")
    settings = shim(folder / "lifecycle-snapshots", slots=SLOTS)
    variables = environment(**IN_PROCESS, **settings)
    answers = run([jobs[n] for n in names], folder / "lifecycle-cached", variables)
    return dict(zip(names, answers))


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_uses_the_new_weights(change, off, on):
    assert on["played"][change] == off["played"][change]


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "slept 1"])
def test_control_a_cache_that_does_not_hear_of_it_would_serve_other_tokens(change, off, on):
    assert on["deaf"][change] != off["played"][change]


def test_a_quantised_model_is_reloaded_and_its_layers_stay_armed(off, on):
    """vLLM's new config holds scales of its own then, beside those of the layer."""
    for name in ("tokens", "doubled", "as before"):
        assert on["quantised"][name] == off["quantised"][name]
    assert on["quantised"]["doubled"] != on["quantised"]["tokens"] == on["quantised"]["as before"]
    assert every_layer_is_armed(on["quantised"])


def test_every_layer_stays_armed_and_goes_on_counting(on, folder, checkpoints):
    assert every_layer_is_armed(on["played"])
    played, _ = snapshots_of(folder / "lifecycle-snapshots", checkpoints[0])
    # At least a step for the prompts and seven more, each time that the prompts were served.
    assert played.total("steps") >= (1 + len(CHANGES)) * 8 * 4
    assert played.total("hits") > 0 and played.total("misses") > 0


def every_layer_is_armed(answer) -> bool:
    """From the start on: nothing of a layer that is not armed, or no longer, is in the log."""
    (line,) = [line for line in answer.cache_lines() if "armed" in line]
    return "4 of 4 MoE layers" in line and "not armed" not in line
