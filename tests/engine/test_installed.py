"""The wheel in a fresh environment: `vllm serve` through the cache, and nothing left of it.

A .pth lets the environment see the packages of the Python that runs the tests, vLLM among them, as
a virtual environment sees those of the system. Of its own it has one: a general plugin of vLLM's
that wraps the very function that the shim wraps.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine import PROMPTS, Server, shim, snapshots_of
from file_list import Entry, file_list
from packages import build_wheel, can_build_wheels, copy_project, pip
from start_up import CURRENT, Interpreter, make_venv

from expert_cache_shim.telemetry import Snapshot

pytestmark = [
    pytest.mark.skipif(not can_build_wheels(), reason="needs pip and setuptools 70.1"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]


PLUGIN = """
import functools

def register():
    from vllm.model_executor.model_loader import base_loader

    theirs = base_loader.process_weights_after_loading

    @functools.wraps(theirs)
    def process_weights_after_loading(*args, **kwargs):
        print("the plugin saw a model", flush=True)
        return theirs(*args, **kwargs)

    base_loader.process_weights_after_loading = process_weights_after_loading
"""


@dataclass(frozen=True)
class Served:
    """What one server answered and said, and the counters that it left."""

    tokens: list[list[int]]
    log: str
    snapshots: list[Snapshot]

    @property
    def cache_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if "expert cache" in line]


@dataclass(frozen=True)
class Story:
    """An environment before the wheel, with it, and after it."""

    python: Interpreter
    model: str
    before: dict[str, Entry]
    doctor: dict
    installed: Served
    after: dict[str, Entry]
    removed: Served


def make_fresh_environment(folder: Path) -> Interpreter:
    python = make_venv(CURRENT, folder, "--without-pip")
    seen = [path for path in sys.path if Path(path).name == "site-packages"]
    (python.site_packages / "engine.pth").write_text("\n".join(seen) + "\n")
    (python.site_packages / "a_plugin.py").write_text(PLUGIN)
    described = python.site_packages / "a_plugin-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\na_plugin = a_plugin:register\n"
    )
    python.says("import a_plugin")  # leaves its bytecode
    return python


@pytest.fixture(scope="module")
def story(folder, checkpoint, environment) -> Story:
    model, home = checkpoint("qwen3_moe"), folder / "fresh"
    python = make_fresh_environment(home)

    def serve(name: str) -> Served:
        # The same settings each time; no PYTHONPATH: the wheel's .pth alone starts the shim.
        settings = shim(folder / name / "snapshots", slots=8)
        del settings["PYTHONPATH"]
        with Server(model, folder / name, environment(**settings), python.executable) as server:
            tokens = server.complete(PROMPTS, max_tokens=16)
        snapshots = snapshots_of(folder / name / "snapshots", model)
        return Served(tokens, server.log.read_text(), snapshots)

    def expert_cache(*words: str) -> str:
        command = [home / "bin" / "expert-cache", *words]
        done = subprocess.run(command, env=environment(EXPERT_CACHE_DISABLE=""),
                              cwd=folder, capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    before = file_list(home)
    source = copy_project(folder / "source" / "project")
    pip(python, "install", "--no-index", build_wheel(source, folder / "wheel"))
    expert_cache("build", "--arch", "host")  # what a user has a GPU for
    doctor = json.loads(expert_cache("doctor", "--json"))
    installed = serve("installed")
    pip(python, "uninstall", "--yes", "expert-cache-shim")
    after = file_list(home)
    return Story(python, model, before, doctor, installed, after, serve("removed"))


def test_the_tokens_are_those_of_the_environment_without_the_wheel(story):
    assert len(set(map(tuple, story.removed.tokens))) > 1
    assert story.installed.tokens == story.removed.tokens


def test_the_cache_served_them(story):
    (armed,) = [line for line in story.installed.cache_lines if " armed: " in line]
    assert "4 of 4 MoE layers" in armed
    (snapshot,) = story.installed.snapshots
    for counter in ("steps", "hits", "misses", "overflow", "evictions"):
        assert snapshot.total(counter) > 0, counter
    assert snapshot.total("read_through") == 0


def test_a_plugin_that_wraps_the_same_function_is_called_once_a_model(story):
    for served in (story.installed, story.removed):
        assert served.log.count("the plugin saw a model") == 1


def test_doctor_says_what_is_active(story):
    assert story.doctor["passed"]
    found = {check["name"]: check["found"] for check in reversed(story.doctor["checks"])}
    site_packages = story.python.site_packages
    assert found["start"] == f"starts with Python by {site_packages}/expert_cache_shim.pth"
    assert found["kernels"].startswith(
        f"{site_packages}/expert_cache_shim/lib/libexpertcache_host.so: host, ABI version "
    )
    assert found["vllm"].startswith("0.") and found["imports"].startswith("wrapt ")


def test_uninstalling_restores_the_environment_file_for_file(story):
    assert story.after == story.before


def test_a_server_without_the_wheel_has_nothing_of_it(story):
    assert story.removed.cache_lines == []
    assert story.removed.snapshots == []
