"""Random calls of the C interface under the address and undefined-behaviour sanitizers: allowed
ones against a reference, others to be refused. `make fuzz SECONDS=3600` goes on for longer."""

from pathlib import Path

import pytest
from fuzzer import Fuzzer, NoCompiler

# Half a minute on one core.
RUNS = 15000


def built(folder: Path, *flags: str) -> Fuzzer:
    try:
        return Fuzzer.build(folder, *flags)
    except NoCompiler as error:
        pytest.skip(str(error))


def test_no_call_is_wrong_or_strays(tmp_path):
    done = built(tmp_path).run(RUNS, tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"Done {RUNS} " in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "where"), [(3, "manage: stale overflow row"), (4, "gather: lost tail")]
)
def test_a_fault_is_found(tmp_path, fault, where):
    """The control, with the faults of `hip/faults.h`."""
    done = built(tmp_path, f"-DEXPERT_CACHE_FAULT={fault}").run(RUNS, tmp_path)
    assert done.returncode != 0, where
    assert "fuzz_interface.cpp" in done.stderr and "expected" in done.stderr
