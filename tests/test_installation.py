"""The commands that messages name: a user can type them as they stand."""

import os
import shutil
import subprocess
import sys

import pytest
from start_up import ROOT

from expert_cache_shim import installation
from expert_cache_shim.installation import build_command, invocation


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python somewhere, not on PATH; it is the running one by a link."""
    link = tmp_path / "a venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(link))
    return link


@pytest.fixture
def script(python):
    """The command that pip puts beside it."""
    file = python.with_name("expert-cache")
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def put_on_path(monkeypatch, folder) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))


def test_a_python_off_the_path_is_named_in_full(python):
    command = invocation("doctor", "--build")
    assert command == f"'{python}' -m expert_cache_shim doctor --build"
    done = subprocess.run(invocation("--version"), shell=True, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_python_on_the_path_is_named_as_it_is_typed(python, monkeypatch):
    put_on_path(monkeypatch, python.parent)
    assert invocation("doctor") == "python -m expert_cache_shim doctor"


def test_the_script_is_the_one_beside_the_python(python, script, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(script, other)
    put_on_path(monkeypatch, other)
    assert invocation("build") == f"'{script}' build"
    put_on_path(monkeypatch, script.parent)
    assert invocation("build") == "expert-cache build"


def test_a_clone_is_built_by_its_makefile():
    assert build_command("cuda") == f"make -C {ROOT} cuda"
    assert build_command("hip", "gfx1100") == f"EXPERT_CACHE_ARCHS=gfx1100 make -C {ROOT} hip"
    command = f"{build_command('cuda')} --dry-run"
    done = subprocess.run(command, shell=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_is_built_by_the_command(python, script, tmp_path, monkeypatch):
    put_on_path(monkeypatch, script.parent)
    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "site-packages" / "expert_cache_shim")
    assert build_command("cuda") == "expert-cache build"
    assert build_command("host") == "expert-cache build --arch host"
    assert build_command("cuda", "sm_75") == "expert-cache build --arch sm_75"
