"""Fixtures of the tests that arm synthetic layers."""

from __future__ import annotations

import logging
import os
import sys
import weakref

import pytest

from expert_cache_shim import arming, native

from . import tuning
from .checks import assert_untouched, loaded_layer, parts
from .counted_library import CountedLibrary
from .methods import UnquantizedFusedMoEMethod
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
    """Sets EXPERT_CACHE_* variables: `settings(slots=4)`. A CPU is allowed, three of eight
    experts are resident, and no thread logs, unless the test says otherwise; None unsets."""
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

    set_variables(allow_cpu=1, slots=3, snapshot=tmp_path / "snapshots", log_interval=0)
    return set_variables


@pytest.fixture
def arm(library, settings, monkeypatch):
    """Arms a loaded model as vLLM's loader would and returns the report."""
    # The models of earlier tests may not be collected yet.
    monkeypatch.setattr(arming, "_reports", weakref.WeakKeyDictionary())

    def arm_model(model: Model, config=MODEL_CONFIG) -> arming.Report:
        return arming.arm_model(model, config)

    return arm_model


@pytest.fixture
def pair(arm, settings):
    """Two equal layers, one of them armed: `(uncached, cached, its ArmedLayer)`."""
    models = []  # reports live as long as their model

    def make(method=UnquantizedFusedMoEMethod, storage="virtual", variables=None, **options):
        settings(storage=storage, **(variables or {}))
        uncached, cached = (loaded_layer(method, **options) for _ in range(2))
        models.append(Model(cached))
        report = arm(models[-1])
        assert [str(refusal) for _, refusal in report.refused] == []
        return uncached, cached, report.armed[0]

    return make


@pytest.fixture
def refused(arm, library, caplog):
    """Arms a model that must be refused whole, and returns its one reason and remedy."""

    def check(model: Model, config=MODEL_CONFIG) -> tuple[str, str]:
        before = parts(model)
        caplog.clear()
        report = arm(model, config)
        assert report.armed == []
        assert [name for name, _ in report.refused] == [
            f"layers.{n}.experts.routed_experts" for n in range(len(model.routed))
        ]
        assert_untouched(model, before)
        assert library.all_is_freed()
        assert report not in list(arming.reports())
        ((reason, remedy),) = {(r.reason, r.remedy) for _, r in report.refused}
        line = caplog.messages[-1]
        assert f"{len(model.routed)} of {len(model.routed)} MoE layers of synthetic" in line
        assert line.endswith(f"{reason}; {remedy}")
        return reason, remedy

    return check


@pytest.fixture
def discarded_log():
    """Log records are made and thrown away: a kept one would keep a traceback's memory."""

    def discard(record: logging.LogRecord) -> bool:
        assert record.getMessage()
        return False

    logger = logging.getLogger("vllm.expert_cache")
    logger.addFilter(discard)
    yield
    logger.removeFilter(discard)
