"""What is told of a process that measures, however it ends."""

import os

import pytest

from bench import jobs

TELLS = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
with os.fdopen(int(sys.argv[2]), "w", buffering=1) as results:
    results.write(json.dumps({"event": "task", "job": job}) + "\\n")
    print("expert cache: a line")
    LAST
"""


@pytest.fixture
def events(tmp_path):
    """All that a process tells that does `last` after one event."""

    def run(last: str, **limits: float) -> list[dict]:
        (tmp_path / "tells.py").write_text(TELLS.replace("LAST", last))
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "EXPERT_CACHE_DISABLE": "1"}
        log = tmp_path / "log.txt"
        return list(jobs.events("tells", {"a": 1}, environment, log, **limits))

    return run


def test_a_process_that_says_end_has_told_all(events):
    assert events('results.write(\'{"event": "end"}\\n\')') == [{"event": "task", "job": {"a": 1}}]


def test_a_process_that_dies_gives_an_error_with_the_end_of_its_log(events):
    told, error = events("sys.stdout.flush(); os._exit(3)")
    assert told["event"] == "task"
    assert error["event"] == "error" and "status 3" in error["text"]
    assert "expert cache: a line" in error["log"]


def test_a_process_that_hangs_is_killed(events):
    *_, error = events("time.sleep(1000)", patience=5.0)
    assert "status -9" in error["text"]


def test_a_process_that_is_late_is_killed(events):
    *_, error = events("time.sleep(1000)", deadline=0.0)
    assert "status -9" in error["text"]
