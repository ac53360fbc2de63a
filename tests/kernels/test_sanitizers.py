"""The kernels' own test program under the address, undefined-behaviour and thread sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "hip" / "tests" / "emulation_test.cpp"

SANITIZERS = {
    "address and undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request, tmp_path_factory):
    """The test program with one sanitizer; skipped where it cannot be compiled at all."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("clang++-19")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitizer")
    flags = ["-O1", "-g", "-std=c++17", *SANITIZERS[request.param]]
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    probe = subprocess.run([compiler, *flags, str(empty), "-o", str(folder / "empty")])
    if probe.returncode:
        pytest.skip(f"{compiler} has no {request.param} sanitizer")
    made = folder / "emulation_test"
    done = subprocess.run(
        [compiler, *flags, str(SOURCE), "-o", str(made)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("seed", [0, 5])
def test_the_kernels_are_clean(program, seed):
    done = subprocess.run([str(program), str(seed)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-8000:]}"
