"""What is said about a vLLM that was not tried."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from expert_cache_shim import versions
from expert_cache_shim.versions import NEWEST_TRIED, OLDEST_TRIED, note, running


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(versions, "OLDEST_TRIED", "0.21.0")
    monkeypatch.setattr(versions, "NEWEST_TRIED", "0.33.0")


@pytest.mark.parametrize(
    "version",
    ["0.33.1", "0.34", "0.34.0rc1", "0.100.0", "1.0", "0.33.1.dev12+gabcdef", "v0.34.0+rocm7.1"],
)
def test_a_newer_release_is_named_as_newer(tried, version):
    assert f"vLLM {version} is newer than 0.33.0" in note(version)


@pytest.mark.parametrize("version", ["0.20.9", "0.9.2", "0.0.1", "0"])
def test_an_older_release_is_named_as_older(tried, version):
    assert f"vLLM {version} is older than 0.21.0" in note(version)


@pytest.mark.parametrize(
    "version",
    ["0.21", "0.21.0", "0.25.1", "0.25.2", "0.33", "0.33.0", "0.33.0rc2", "0.33.0+cpu",
     "0.33.0.post1"],
)  # fmt: skip
def test_nothing_is_said_about_releases_between(tried, version):
    assert note(version) is None


@pytest.mark.parametrize("version", [None, "", "dev", "unknown"])
def test_nothing_is_said_about_a_version_that_cannot_be_placed(version):
    assert note(version) is None


def test_the_bounds_themselves_are_tried():
    assert note(OLDEST_TRIED) is None
    assert note(NEWEST_TRIED) is None


@pytest.fixture
def modules(monkeypatch):
    """Makes modules seem imported."""
    for name in ("vllm", "vllm.version"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def add(name: str, **content) -> None:
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    return add


def test_the_version_is_unknown_before_vllm_is_imported(modules):
    assert running() is None
    assert "vllm" not in sys.modules


def test_the_version_is_known_while_vllm_is_still_being_imported(modules):
    modules("vllm")
    modules("vllm.version", __version__="0.34.0")
    assert running() == "0.34.0"


def test_the_version_is_that_of_the_package(modules):
    modules("vllm", __version__="0.32.0+cpu")
    assert running() == "0.32.0+cpu"


def test_a_version_that_is_no_text_is_not_taken(modules):
    modules("vllm", __version__=object())
    assert running() is None
