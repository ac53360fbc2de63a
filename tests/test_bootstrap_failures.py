"""Failures at the start of the shim: each is one line at most, and Python and vLLM go on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from start_up import (
    CURRENT,
    PACKAGE,
    Interpreter,
    make_venv,
    put_shim_for_pythonpath,
    put_shim_in_site_packages,
    put_vllm,
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Interpreter:
    return make_venv(CURRENT, tmp_path_factory.mktemp("bare"), "--without-pip")


@pytest.fixture
def installed(tmp_path) -> Interpreter:
    return put_shim_in_site_packages(make_venv(CURRENT, tmp_path / "venv", "--without-pip"))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Path:
    return put_vllm(tmp_path_factory.mktemp("vllm"))


def failing(bare, tmp_path, vllm, hooks, code="import vllm; print('served')"):
    shim = put_shim_for_pythonpath(tmp_path / "shim", hooks)
    return bare.run("-c", code, path=[shim, vllm])


def test_hooks_that_raise_are_one_line_and_vllm_is_imported(bare, tmp_path, vllm):
    hooks = "def register(): raise RuntimeError('first\\nsecond')"
    outcome = failing(bare, tmp_path, vllm, hooks)
    assert (outcome.status, outcome.out) == (0, "vllm\nserved\n")
    assert outcome.err == (
        "expert cache: off, vLLM serves without it: RuntimeError: first second\n"
    )


def test_hooks_that_do_not_compile_are_one_line_and_vllm_is_imported(bare, tmp_path, vllm):
    outcome = failing(bare, tmp_path, vllm, "def register(:")
    assert (outcome.status, outcome.out) == (0, "vllm\nserved\n")
    assert len(outcome.err.splitlines()) == 1 and "SyntaxError" in outcome.err


def test_a_missing_wrapt_is_named_with_its_remedy(bare, tmp_path, vllm):
    outcome = failing(bare, tmp_path, vllm, (PACKAGE / "hooks.py").read_text())
    assert (outcome.status, outcome.out) == (0, "vllm\nserved\n")
    assert outcome.err == (
        "expert cache: off, vLLM serves without it: "
        "the package wrapt is missing, `pip install wrapt` adds it\n"
    )


def test_a_failure_goes_to_the_logger_of_the_expert_cache(bare, tmp_path, vllm):
    code = """
import logging, sys
logging.basicConfig(level="DEBUG", stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
import vllm
"""
    outcome = failing(bare, tmp_path, vllm, "def register(): raise RuntimeError('why')", code)
    assert outcome.err == ""
    first, *traceback = outcome.out.splitlines()
    assert first.startswith("ERROR vllm.expert_cache expert cache: off") and first.endswith("why")
    assert traceback[0].startswith("Traceback") and traceback[-1] == "vllm"


def test_a_failure_where_logging_cannot_be_imported_goes_to_stderr(bare, tmp_path, vllm):
    code = "import sys; sys.modules['logging'] = None; import vllm; print('served')"
    outcome = failing(bare, tmp_path, vllm, "def register(): raise RuntimeError('why')", code)
    assert (outcome.status, outcome.out) == (0, "vllm\nserved\n")
    assert outcome.err.endswith("RuntimeError: why\n") and len(outcome.err.splitlines()) == 1


def test_a_failure_that_cannot_be_told_to_anybody_is_still_no_failure(bare, tmp_path, vllm):
    code = "import sys; sys.modules['logging'] = sys.stderr = None; import vllm; print('served')"
    outcome = failing(bare, tmp_path, vllm, "def register(): raise RuntimeError('why')", code)
    assert (outcome.status, outcome.out) == (0, "vllm\nserved\n")


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit"])
def test_what_is_not_an_error_passes(name, bare, tmp_path, vllm):
    code = f"try: import vllm\nexcept {name}: print('passed')"
    outcome = failing(bare, tmp_path, vllm, f"def register(): raise {name}", code)
    assert (outcome.status, outcome.out, outcome.err) == (0, "passed\n", "")


def test_a_pth_whose_package_was_deleted_is_silent(installed):
    shutil.rmtree(installed.site_packages / "expert_cache_shim")
    assert installed.says("print('up')") == "up"


def test_a_pth_whose_package_was_deleted_in_part_is_silent(installed):
    for path in (installed.site_packages / "expert_cache_shim").glob("*.py"):
        path.unlink()
    assert installed.says("print('up')") == "up"


def test_a_pth_whose_package_does_not_compile_is_one_line_each_time_it_runs(installed):
    (installed.site_packages / "expert_cache_shim" / "bootstrap.py").write_text("def install(:")
    outcome = installed.run("-c", "print('up')")
    assert (outcome.status, outcome.out) == (0, "up\n")
    assert len(set(outcome.err.splitlines())) == 1
    assert outcome.err.startswith("expert cache: off: SyntaxError: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_broken_package_and_a_full_disk_do_not_stop_an_interpreter(installed):
    (installed.site_packages / "expert_cache_shim" / "bootstrap.py").write_text("def install(:")
    code = f"""{installed.executable} -c 'print("up")'"""
    for stderr in ("2>/dev/full", "2>&-"):
        done = subprocess.run(["sh", "-c", f"{code} {stderr}"], capture_output=True, text=True)
        assert done.stdout == "up\n"
