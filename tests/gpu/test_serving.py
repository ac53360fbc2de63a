"""Real vLLM on a GPU while its weights and its memory change, and with drafted tokens, under full
decode graphs. Two processes of several engines each, and one for a control; minutes.

What vLLM needs on this machine is said as for `test_engine.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import engine
import pytest
import served
from draft_checkpoints import write_draft_checkpoint
from engine import PROMPTS, Answer, snapshots_of
from other_experts import write_other_experts
from recorded import check_replay_counts_alike, read_trace
from served import QUARTER

from bench.jobs import temporary_folder
from examples.quantised_moe import GPU_SHAPE
from examples.tiny_moe import write_checkpoint

SHAPE = replace(GPU_SHAPE, layers=4)
SERVED = ("weights", "chunked", "eagle", "glm4_moe")
DRAFTED = ("eagle", "glm4_moe")
LAYERS = {"weights": 4, "chunked": 4, "eagle": 4, "glm4_moe": 3}
CHANGES = (
    "reloaded", "transferred", "copied", "given", "slept 1", "slept 2", "captured again",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def vllm_installed(library) -> None:
    served.needs_vllm()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def jobs(folder) -> dict[str, engine.Job]:
    first = str(write_checkpoint("qwen3_moe", folder / "first", SHAPE))
    other = str(write_other_experts(first, folder / "other", SHAPE))
    drafts = {kind: str(write_draft_checkpoint(kind, folder / kind, SHAPE)) for kind in DRAFTED}

    def drafted(target: str, **config: object) -> engine.Job:
        form = {
            "disable_log_stats": False,
            "speculative_config": {"num_speculative_tokens": 3, **config},
        }
        return served.job(target, form, scenario=("drafted",))

    weights = served.job(
        first, {"enable_sleep_mode": True, "weight_transfer_config": {"backend": "files"}},
        plugins=("file_transfer",), scenario=("device_weights", first, other),
        prompts=PROMPTS[:4], max_tokens=(8,) * 4,
    )  # fmt: skip
    return {
        "weights": weights,
        "chunked": served.job(
            first, {"max_num_batched_tokens": 32, "enable_prefix_caching": True,
                    "disable_log_stats": False}, scenario=("drafted",),
        ),
        "eagle": drafted(first, method="eagle", model=drafts["eagle"]),
        "glm4_moe": drafted(drafts["glm4_moe"], method="mtp"),
        "recorded": served.job(
            first, environment={"EXPERT_CACHE_TRACE": str(folder / "rings"),
                                "EXPERT_CACHE_SNAPSHOT": str(folder / "recorded")},
        ),
        "deaf": replace(weights, plugins=("file_transfer", "deaf_worker")),
    }  # fmt: skip


def serve(jobs, names: tuple[str, ...], folder: Path, **settings: object) -> dict[str, Answer]:
    environment = served.environment(folder)(**settings)
    answers = engine.run([jobs[name] for name in names], folder, environment)
    return dict(zip(names, answers))


@pytest.fixture(scope="module")
def off(folder, jobs):
    return serve(jobs, (*SERVED, "recorded"), folder / "off")


@pytest.fixture(scope="module")
def on(folder, jobs):
    settings = engine.shim(folder / "snapshots", slots=QUARTER)
    return serve(jobs, (*SERVED, "recorded"), folder / "on", **settings)


@pytest.fixture(scope="module")
def deaf(folder, jobs):
    """In a process of its own: vLLM's allocator, which sleep needs, serves one engine of a process,
    and what is deaf stays so."""
    settings = engine.shim("off", slots=QUARTER)
    return serve(jobs, ("deaf",), folder / "deaf", **settings)["deaf"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_uses_the_weights_that_are_there_now(change, off, on):
    assert on["weights"][change] == off["weights"][change]


def test_the_changes_show_in_the_tokens(off):
    answers = off["weights"]
    assert answers["slept 1"] == answers["given"] != answers["tokens"]
    assert answers["tokens"] == answers["transferred"] == answers["slept 2"]
    assert answers["captured again"] == answers["tokens"]
    assert answers["reloaded"] != answers["tokens"] != answers["copied"]


@pytest.mark.parametrize("change", ["reloaded", "transferred", "copied", "given", "slept 2"])
def test_control_a_cache_that_does_not_hear_of_it_serves_other_tokens(change, off, deaf):
    assert deaf[change] != off["weights"][change]


@pytest.mark.parametrize("kind", ["chunked", *DRAFTED])
def test_wide_steps_serve_the_same_tokens(kind, off, on):
    assert on[kind]["tokens"] == off[kind]["tokens"]
    assert on[kind]["again"] == off[kind]["again"]


def test_drafts_are_verified_and_the_prefix_cache_is_hit(on, off):
    for kind in DRAFTED:
        assert on[kind]["drafted"] == off[kind]["drafted"] > 0
        assert on[kind]["accepted"] == off[kind]["accepted"]
    assert on["chunked"]["prefix_hits"] > 0


@pytest.mark.parametrize("kind", SERVED)
def test_every_layer_of_the_model_uses_the_cache_to_the_end(kind, on, jobs, folder):
    assert on[kind]["tokens"]
    assert served.CAPTURED in on[kind].log
    model = jobs[kind].model
    found = snapshots_of(folder / "snapshots", model)
    assert len(found) == sum(jobs[name].model == model for name in SERVED)
    for snapshot in found:
        assert len(snapshot.layers) == LAYERS[kind]
        for counter in ("steps", "hits", "misses", "evictions"):
            assert (snapshot.by_layer(counter) > 0).all(), counter
        assert not any(snapshot.given_back)


def test_replay_of_what_was_recorded_counts_what_the_kernels_counted(on, off, jobs, folder):
    """Padding is there too, and capture is not."""
    assert on["recorded"]["tokens"] == off["recorded"]["tokens"]
    (snapshot,) = snapshots_of(folder / "recorded", jobs["recorded"].model)
    check_replay_counts_alike(read_trace(folder / "rings"), snapshot, QUARTER)
