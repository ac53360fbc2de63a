"""The command that tries quantised schemes, on a CPU: one that vLLM serves here and one
that it does not."""

import json
import subprocess
import sys

import pytest
from engine import ROOT, shim

from bench import schemes


@pytest.fixture(scope="module")
def run(folder, environment):
    """What the command wrote, and its exit status."""
    output = folder / "schemes.json"
    command = [sys.executable, "-m", "bench.schemes", "--schemes", "bf16", "int8_channel",
               "--plain", "--patience-seconds", "400", "--output", str(output)]  # fmt: skip
    variables = environment(**shim(folder / "unused"))
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    return json.loads(output.read_text()), done


def test_a_scheme_that_is_served_is_identical_bit_for_bit_and_shows_the_fault(run):
    found, done = run
    assert done.returncode == 0, done.stdout + done.stderr
    scheme = found["schemes"][0]
    assert [arm["arm"] for arm in scheme["arms"]] == schemes.arm_names(plain=True)
    assert schemes.judge(scheme) == ("served, identical", True)
    for arm, slots in zip(scheme["arms"][1:], (16, 8, 8)):
        assert (arm["armed"], arm["slots"], len(arm["tensors"])) == (2, slots, 2)
        assert {compared["difference"] for compared in arm["layers"]} == {0.0}
        assert len(arm["layers"]) == 2 * 4
        assert arm["counters"]["hits"] and arm["counters"]["misses"]
    (first_stream,) = scheme["arms"][0]["tokens"][0]
    assert len(set(first_stream)) > 5, "the text is degenerate"


def test_a_scheme_without_a_kernel_is_a_row_and_does_not_end_the_run(run):
    found, done = run
    result, good = schemes.judge(found["schemes"][1])
    assert good and result.startswith("vLLM does not serve it here: NotImplementedError")
    assert result.split(":")[0] in done.stdout
