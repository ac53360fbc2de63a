"""The lines of `doctor` for machines that the other tests do not run on."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expert_cache_shim.commands import check_device, check_host, check_start, doctor
from expert_cache_shim.commands.check import Check

ROOT = Path(__file__).parent.parent
GIB = 2**30


# --- GPU and link ---


def gpu(name: str = "a GPU", architecture: str = "gfx942:sramecc+:xnack-") -> dict:
    return {"name": name, "architecture": architecture, "bytes": 192 * GIB}


def test_gpus_of_one_kind_are_one_entry():
    found = {"version": "2.99", "gpus": [gpu(), gpu(), gpu("another", "gfx1201")]}
    check = check_device.check_gpu("hip", found)
    assert check == Check(
        "gpu", "ok", "3 x a GPU, gfx942, 192 GiB; another, gfx1201, 192 GiB (torch 2.99)"
    )


@pytest.mark.parametrize("backend, option", [("cuda", "--gpus all"), ("hip", "--device /dev/kfd")])
def test_a_container_without_its_gpus_is_told_how_to_get_them(backend, option):
    check = check_device.check_gpu(backend, {"version": "2.99", "gpus": []})
    assert check.status == "warn" and option in check.remedy


@pytest.mark.parametrize("seconds, status, rate", [
    (0.04, "ok", "26.8 GB/s"), (0.16, "ok", "6.7 GB/s"), (0.2, "warn", "5.4 GB/s"),
])  # fmt: skip
def test_a_link_is_slow_or_not(seconds, status, rate):
    check = check_device.check_link({"bytes": GIB, "seconds": seconds})
    assert check.status == status and check.found.startswith(f"{rate} from pinned host memory")
    assert bool(check.remedy) == (status == "warn")


def test_a_link_that_could_not_be_measured():
    check = check_device.check_link({"error": "CUDA out of memory"})
    assert (check.status, check.found) == ("warn", "not measured: CUDA out of memory")


def test_memory_that_cannot_be_aliased_is_no_failure():
    check = check_device.check_virtual_memory("hip", {"error": "no virtual memory here"})
    assert (check.status, check.found) == ("warn", "no virtual memory here")
    assert "plain storage" in check.remedy


# --- Host memory ---


def test_a_limit_below_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(check_host, "memory_total", lambda: (64 * GIB, 32 * GIB))
    monkeypatch.setattr(check_host, "cgroup_memory_limit", lambda: 16 * GIB)
    check = check_host.check_memory()
    assert check.status == "warn"
    assert check.found == (
        "64 GiB of RAM, 32 GiB of it available, but this container may have 16 GiB"
    )
    for limit in (None, 64 * GIB):
        monkeypatch.setattr(check_host, "cgroup_memory_limit", lambda limit=limit: limit)
        assert check_host.check_memory().status == "ok"


@pytest.mark.parametrize("limit, link, status", [
    (None, None, "ok"), (8 << 20, None, "warn"), (8 << 20, {"error": "x"}, "warn"),
    (8 << 20, {"bytes": GIB, "seconds": 1}, "ok"),
])  # fmt: skip
def test_a_limit_on_pinned_memory_counts_where_the_driver_applies_it(
    monkeypatch, limit, link, status
):
    monkeypatch.setattr(check_host, "locked_memory_limit", lambda: limit)
    check = check_host.check_pinned_memory(link)
    assert check.status == status
    assert ("memlock" in check.remedy) == (status == "warn")


# --- Counters ---


def test_a_folder_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(check_host, "filesystem_of", lambda folder: "ext4")
    check = check_host.check_counters(str(tmp_path / "counters"))
    assert check.status == "warn" and "is on ext4" in check.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    check = check_host.check_counters(str(file))
    assert (check.status, check.found) == ("warn", f"{file}: File exists")
    assert file.read_text() == "kept"


def test_counters_that_are_switched_off():
    assert check_host.check_counters("off").status == "ok"


# --- vLLM ---


@pytest.mark.parametrize("version, status", [
    ("0.21.0", "ok"), ("0.32.1.dev7+g0", "ok"), ("0.20.9", "warn"), ("1.0", "warn"),
    ("", "warn"), (None, "warn"),
])  # fmt: skip
def test_versions_of_vllm(version, status):
    check = check_start.check_vllm(version)
    assert check.status == status
    assert (version or "") in check.found and bool(check.remedy) == (status == "warn")


# --- The screen ---


def test_a_long_line_is_wrapped_under_its_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = doctor._lines(Check("start", "fail", "word " * 30, "a remedy"))
    assert all(len(line) <= 70 for line in lines) and len(lines) > 3
    assert lines[0].startswith("fail  start          word")
    assert all(line.startswith(" " * 21) for line in lines[1:])
    assert lines[-1].strip() == "-> a remedy"


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_is_shown_colors_unless_it_wants_none(no_color):
    code = (
        "from expert_cache_shim.commands import doctor\n"
        "from expert_cache_shim.commands.check import Check\n"
        "print(doctor._lines(Check('x', 'warn', 'found'))[0])"
    )
    environ = {"PYTHONPATH": str(ROOT), "EXPERT_CACHE_DISABLE": "1"}
    environ |= {"NO_COLOR": "1"} if no_color else {}
    shown = on_a_terminal([sys.executable, "-c", code], environ)
    assert re.sub(r"\x1b\[\d+m", "", shown) == "warn  x              found"
    assert ("\x1b[33mwarn\x1b[0m" in shown) != no_color


def on_a_terminal(command: list[str], environ: dict[str, str]) -> str:
    reader, terminal = pty.openpty()
    try:
        subprocess.run(command, env=environ, stdout=terminal, check=True)
        return os.read(reader, 4096).decode().strip()
    finally:
        os.close(terminal)
        os.close(reader)
