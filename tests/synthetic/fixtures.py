"""Fixtures of the tests that arm synthetic layers."""

from __future__ import annotations

import os
import sys
import weakref

import pytest

from expert_cache_shim import arming, native

from . import tuning
from .counted_library import CountedLibrary
from .models import MODEL_CONFIG, Model


@pytest.fixture
def library(host_library, monkeypatch) -> CountedLibrary:
    """The library that arming loads in this test."""
    counted = CountedLibrary(host_library)
    monkeypatch.setattr(native, "load", lambda backend, path=None: counted)
    return counted


@pytest.fixture
def vllm_modules(monkeypatch):
    """vLLM's modules that the shim asks, where vLLM would have imported them."""
    for module in (tuning.package, tuning.fused_moe):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def settings(monkeypatch, tmp_path, vllm_modules):
    """Sets EXPERT_CACHE_* variables: `settings(slots=4)`. A CPU is allowed and three of eight
    experts are resident, unless the test says otherwise; None unsets."""
    for name in list(os.environ):
        if name.startswith("EXPERT_CACHE_"):
            monkeypatch.delenv(name)

    def set_variables(**values):
        for name, value in values.items():
            variable = f"EXPERT_CACHE_{name.upper()}"
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, str(value))

    set_variables(allow_cpu=1, slots=3, snapshot=tmp_path / "snapshots")
    return set_variables


@pytest.fixture
def arm(library, settings, monkeypatch):
    """Arms a loaded model as vLLM's loader would and returns the report."""
    # The models of earlier tests may not be collected yet.
    monkeypatch.setattr(arming, "_reports", weakref.WeakKeyDictionary())

    def arm_model(model: Model, config=MODEL_CONFIG) -> arming.Report:
        return arming.arm_model(model, config)

    return arm_model
