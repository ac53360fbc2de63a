"""Which process is which: by /proc of this machine, with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from expert_cache_shim import processes
from expert_cache_shim.processes import Process

SLEEPS = "import sys; print('started', flush=True); sys.stdin.read()"


@pytest.fixture
def start():
    """Starts a program that says a line and runs until the test ends."""
    running = []

    def run(*command: str) -> subprocess.Popen:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        running.append(child)
        child.first_line = child.stdout.readline()
        return child

    yield run
    for child in running:
        child.kill()
        child.communicate()


def test_a_lineage_goes_from_this_process_to_its_first_ancestor():
    found = processes.lineage()
    assert [process.pid for process in found[:2]] == [os.getpid(), os.getppid()]
    assert len(set(found)) == len(found)
    assert all(processes.is_alive(process) for process in found)


def test_the_lineage_of_a_child_is_its_own_before_that_of_its_parent(start):
    says = "import sys; from expert_cache_shim.processes import lineage; "
    says += "print([tuple(process) for process in lineage()], flush=True); sys.stdin.read()"
    child = start(sys.executable, "-c", says)
    own, *rest = [Process(*pair) for pair in eval(child.first_line)]
    assert own.pid == child.pid
    assert rest == processes.lineage()
    assert processes.is_alive(own)


def test_a_process_that_has_ended_is_not_alive_nor_is_one_that_nobody_has_waited_for(start):
    child = start(sys.executable, "-c", SLEEPS)
    process = Process(child.pid, processes._read(child.pid)[0])
    assert processes.is_alive(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes._read(child.pid) is not None  # a zombie
    assert not processes.is_alive(process)
    child.wait()
    assert not processes.is_alive(process)


def test_a_later_process_of_the_same_pid_is_another_one():
    own = processes.lineage()[0]
    assert not processes.is_alive(own._replace(start=own.start - 1))


def test_a_name_with_blanks_and_brackets_does_not_mislead(start, tmp_path):
    program = tmp_path / "a) R 1 (b"
    shutil.copy(shutil.which("cat"), program)
    child = subprocess.Popen([program], stdin=subprocess.PIPE)
    try:
        assert processes._read(child.pid)[1:] == (True, os.getpid())
    finally:
        child.communicate()


def test_a_process_that_never_was_is_not_alive():
    assert not processes.is_alive(Process(2**22 + 1, 1))
