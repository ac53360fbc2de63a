"""Negative controls: a kernel with a fault built in must not pass the comparisons.

The faults are those of `hip/faults.h`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from comparison_suite import EXIT_DIFFERENT

HERE = Path(__file__).parent

FAULTS = {
    1: "missing barrier",
    2: "victim in use",
    3: "stale overflow row",
    4: "lost tail",
    5: "wrong tie-break",
    6: "admission ignores the score",
    7: "int64 ids read as int32",
    8: "from_slot ignored",
    9: "row stored as the id",
    10: "preloaded rows forgotten",
}


def compare(library):
    """Runs the comparisons on a library in a process of its own."""
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(HERE / "comparison_suite.py"), str(library)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_the_kernel_without_a_fault_passes(host_library_path):
    done = compare(host_library_path)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.values())
def test_a_fault_is_caught(build_host_library, tmp_path, fault):
    library = tmp_path / "faulty.so"
    build_host_library(library, f"-DEXPERT_CACHE_FAULT={fault}")
    done = compare(library)
    caught = (EXIT_DIFFERENT, -signal.SIGABRT)
    assert done.returncode in caught, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    assert done.returncode == EXIT_DIFFERENT or fault == 1, "only a barrier may stop the emulator"
