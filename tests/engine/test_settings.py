"""What keeps the cache off leaves one line in the log that says so, and a model served as ever."""

import os
import shutil

import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of

# Settings of one run, and what its line in the log must name.
REFUSED = {
    "slots of letters": ({"EXPERT_CACHE_SLOTS": "abc"}, ("EXPERT_CACHE_SLOTS", "abc")),
    "negative slots": ({"EXPERT_CACHE_SLOTS": "-1"}, ("EXPERT_CACHE_SLOTS", "-1")),
    "no slots": ({"EXPERT_CACHE_SLOTS": "0"}, ("EXPERT_CACHE_SLOTS", "0")),
    "slots in exponents": ({"EXPERT_CACHE_SLOTS": "1e9"}, ("EXPERT_CACHE_SLOTS", "1e9")),
    "slots for every expert": ({"EXPERT_CACHE_SLOTS": "32"}, ("EXPERT_CACHE_SLOTS", "32")),
    "unknown policy": ({"EXPERT_CACHE_POLICY": "foo"}, ("EXPERT_CACHE_POLICY", "foo", "lrfu")),
    "missing library": ({"EXPERT_CACHE_LIB": "{missing}"}, ("{missing}", "EXPERT_CACHE_LIB")),
    "truncated library": ({"EXPERT_CACHE_LIB": "{truncated}"}, ("{truncated}", "truncated")),
    "a CPU not allowed": ({"EXPERT_CACHE_ALLOW_CPU": "0"}, ("EXPERT_CACHE_ALLOW_CPU=1",)),
}


@pytest.fixture(scope="module")
def files(folder, library) -> dict[str, str]:
    """Paths for the placeholders of `REFUSED`."""
    truncated = folder / "libtruncated.so"
    shutil.copyfile(library, truncated)
    os.truncate(truncated, library.stat().st_size // 2)
    return {"missing": str(folder / "libmissing.so"), "truncated": str(truncated)}


@pytest.fixture(scope="module")
def refused(folder, checkpoint, environment, files):
    """Answers by case; the settings are read anew for each model, so one process serves all."""
    jobs = [
        Job(
            checkpoint("qwen3_moe"),
            environment={name: value.format_map(files) for name, value in settings.items()},
        )
        for settings, _ in REFUSED.values()
    ]
    variables = environment(**IN_PROCESS, **shim(folder / "refused-snapshots"))
    return dict(zip(REFUSED, run(jobs, folder / "refused", variables)))


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_cannot_start_says_why_in_one_line(case, refused, files, stock):
    answer = refused[case]
    assert answer["tokens"] == stock["qwen3_moe"]["tokens"]
    (line,) = answer.cache_lines()
    assert "4 of 4 MoE layers" in line and "not armed" in line
    for word in REFUSED[case][1]:
        assert word.format_map(files) in line
    assert "Traceback" not in answer.log


def test_a_cache_that_cannot_start_leaves_no_counters(refused, folder, checkpoint):
    assert refused["no slots"]["tokens"]
    assert snapshots_of(folder / "refused-snapshots", checkpoint("qwen3_moe")) == []


def test_disable_makes_the_shim_inert(folder, checkpoint, environment, stock):
    variables = environment(**IN_PROCESS, **shim(folder / "off-snapshots", disable=1, slots="abc"))
    (answer,) = run([Job(checkpoint("qwen3_moe"))], folder / "off", variables)

    assert answer["tokens"] == stock["qwen3_moe"]["tokens"]
    assert answer.cache_lines() == []
    assert snapshots_of(folder / "off-snapshots", checkpoint("qwen3_moe")) == []
