"""EXPERT_CACHE_* variables that hold anything at all."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic.checks import model_of

from expert_cache_shim.log import logger
from expert_cache_shim.settings import VARIABLES, Settings, SettingsError

pytest_plugins = ["synthetic.fixtures"]

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = [
    "0x10", "1e3", "1_0", "+1", "++1", "-0", "0", "00001", "1.", ".5", "nan", "-nan", "inf",
    "-inf", "Infinity", "1e400", "1e308", "5e-324", "0.1", "86400", "86401", "9" * 400, "9" * 5000,
    "1" + "0" * 4000, "١٢", "\uff15", "²", "Ⅷ", "1\u00a0", "\u20281", "1 1", "\t1\n", "1\n2",
    "a\nb", "\x1b[2J", "\udcff\udc80", "x" * 100_000, "/" + "x" * 5000, "on", "OFF", "İ", "auto",
    "lru", "/dev/null", "/proc/self/mem", "true", "None", "{}", "%s%n", "'; rm -rf /'", "~", "..",
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(HOSTILE), st.text(), st.integers().map(str), st.floats().map(repr),
    # As the bytes of an environment reach Python.
    st.binary(max_size=20).map(lambda data: os.fsdecode(data)),
    st.text(st.characters(categories=["Nd", "Nl", "No", "Zs", "Cc", "Cs"]), max_size=6),
)  # fmt: skip

# What docs/settings.md says of each, written once more.
DOCUMENTED = {
    "disable": lambda v: type(v) is bool,
    "slots": lambda v: type(v) is int and 1 <= v < 2**31,
    "gib": lambda v: 0 < v <= 2**20,
    "fraction": lambda v: 0 < v <= 1,
    "policy": lambda v: v in ("lrfu", "lru", "lfu", "fifo", "slru"),
    "half_life": lambda v: 1 <= v <= 10000,
    "decay": lambda v: type(v) is int and 1 <= v < 2**31,
    "lib": lambda v: bool(v),
    "chunks": lambda v: type(v) is int and 1 <= v <= 4096,
    "lanes": lambda v: type(v) is int and 1 <= v <= 4096,
    "storage": lambda v: v in ("auto", "virtual", "plain"),
    "overflow": lambda v: v in ("auto", "on", "off"),
    "preload": lambda v: v in ("auto", "on", "off"),
    "allow_cpu": lambda v: type(v) is bool,
    "snapshot": lambda v: bool(v),
    "metrics": lambda v: v in ("model", "layer", "off"),
    "log_interval": lambda v: v == 0 or 0.1 <= v <= 86400,
    "trace": lambda v: bool(v),
}


def is_one_line(text: str) -> bool:
    return len(text) < 400 and text.isprintable()


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
@example(text="9" * 400)
def test_a_value_is_accepted_as_documented_or_named_in_one_line(variable, text):
    try:
        found = Settings.from_environment({variable.name: text})
    except SettingsError as error:
        assert str(error).startswith(f"{variable.name}=") and is_one_line(str(error))
        assert text.strip()
        return
    value = getattr(found, variable.field)
    if not text.strip():
        assert value == getattr(Settings, variable.field)
        return
    assert DOCUMENTED[variable.field](value)
    if type(value) is float:
        assert math.isfinite(value) and text.strip().isascii()
    try:
        assert found.slots_for(8, 2**20) >= 1
    except SettingsError as error:
        assert str(error).startswith("EXPERT_CACHE_GIB=") and is_one_line(str(error))


@settings(max_examples=100, deadline=None)
@given(name=TEXTS)
def test_a_name_that_is_no_variable_is_one_warning(name):
    found = Settings.from_environment({f"EXPERT_CACHE_{name}": "1"})
    known = name in {variable.name.removeprefix("EXPERT_CACHE_") for variable in VARIABLES}
    assert len(found.unknown) == (not known) and all(map(is_one_line, found.unknown))


def hostile(name: str) -> list[str]:
    """What can be in a real environment, and does not switch the cache off."""
    texts = [text for text in HOSTILE if name != "disable" or text.strip() != "1"]
    return [text for text in texts if not any("\ud800" <= c < "\udc80" for c in text)]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_an_interpreter_starts_whatever_a_variable_holds(variable, tmp_path):
    """One that has the shim, and imports something of the name of vLLM."""
    (tmp_path / "vllm.py").write_text("")
    code = (
        "import os, sys\n"
        f"os.environ[{variable.name!r}]\n"
        "import vllm\n"
        "print('up', 'expert_cache_shim.hooks' in sys.modules)"
    )
    for text in hostile(variable.field)[:: len(VARIABLES) // 2]:
        environ = {
            "PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{tmp_path}", variable.name: text,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "up True\n", ""), text[:60]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_model_is_armed_or_told_why_not_whatever_a_variable_holds(
    variable, arm, settings, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a relative folder may be made
    for text in hostile(variable.field):
        caplog.clear()
        settings()
        monkeypatch.setenv(variable.name, text)
        report = arm(model_of())
        told = [str(refusal) for _, refusal in report.refused]
        assert len(report.armed) + len(told) == 2
        lines = [*told, *(record.getMessage() for record in caplog.records)]
        assert all(line.isprintable() for line in lines)
        assert not any("unexpected" in line for line in lines), (text[:60], lines)
        assert not any(record.exc_text for record in caplog.records)


def test_a_line_of_log_is_one_line_whatever_is_in_it(caplog):
    caplog.set_level(logging.INFO, logger.name)
    logger.info("a folder: %s", "a\nb\x1b[2J%s\u2028")
    assert caplog.messages == ["a folder: a�b�[2J%s�"]
