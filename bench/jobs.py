"""Starts one process for each arm and passes on what it tells, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from . import arms
from .options import Options
from .routing import STRATEGY

# A task that is under way at the deadline has so long to end.
GRACE_SECONDS = 30
ERROR_LINES = 12


def run(
    arm: arms.Arm, tasks: list[dict], options: Options, deadline: float | None = None,
    fault: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The events of an arm's process as they come: `start`, `task`, `skipped`, `error`.

    deadline: time.time() after which no task is begun. Whatever goes wrong becomes an `error`
    event, so that other arms can go on. The process and its children are gone at the end.
    """
    with temporary_folder() as folder:
        job = {
            "shape": options.shape,
            "layers": options.layers,
            "folder": str(folder),
            "engine": {**options.engine, **arm.engine},
            "snapshots": str(folder / "snapshots") if arm.cached else None,
            "routing": options.routing,
            "hot": options.hot,
            "memory_gib": options.memory_gib,
            "fault": fault,
            "tasks": tasks,
            "deadline": deadline,
        }
        environment = arms.environment(arm, folder / "snapshots", options.environment)
        if options.routing == "trace":
            environment["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGY
        log = log_file(arm.name, options, folder)
        yield from events("bench.worker", job, environment, log, deadline)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """In memory where that is to be had: the kernels store the counters into a file there, and a
    driver need not map a file on a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bench-", dir=memory) as folder:
        yield Path(folder)


def log_file(name: str, options: Options, folder: Path) -> Path:
    if options.logs is None:
        return folder / "log.txt"
    options.logs.mkdir(parents=True, exist_ok=True)
    return options.logs / f"{name}.txt"


def events(
    module: str, job: dict, environment: dict[str, str], log: Path,
    deadline: float | None = None, patience: float | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What a process that runs `module` with this job tells, until it says `end`.

    patience: seconds that may pass between two events. A process that ends, is late or keeps
    silent for longer gives an `error`.
    """
    read, write = os.pipe()
    path = log.with_suffix(".json")
    path.write_text(json.dumps(job))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(path), str(write)],
            cwd=arms.ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            pass_fds=[write], start_new_session=True,
        )  # fmt: skip
    os.close(write)
    late = None if deadline is None else deadline + GRACE_SECONDS - time.time()
    try:
        with os.fdopen(read) as lines, _killed_after(late, process):
            for line in _lines(lines, process, patience):
                event = json.loads(line)
                if event["event"] == "end":
                    return
                if event["event"] == "error":
                    _stop(process)  # its traceback is in the log then
                yield {**event, **_from_log(log, event["event"])}
                if event["event"] == "error":
                    return
        text = f"the process ended with status {process.wait()}"
        yield {"event": "error", "text": text, **_from_log(log, "error")}
    finally:
        _stop(process)


def _lines(stream: TextIO, process: subprocess.Popen, patience: float | None) -> Iterator[str]:
    while True:
        with _killed_after(patience, process):
            line = stream.readline()
        if not line:
            return
        yield line


@contextlib.contextmanager
def _killed_after(seconds: float | None, process: subprocess.Popen) -> Iterator[None]:
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, _kill, [process])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _from_log(log: Path, event: str) -> dict[str, list[str]]:
    """What the cache said, and at an error the end of the log too."""
    if event not in ("start", "error"):
        return {}
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "expert cache" in line]
    return {"log": [*said, *(lines[-ERROR_LINES:] if event == "error" else [])]}


def _stop(process: subprocess.Popen) -> None:
    """Lets a process that has told all it knows end by itself, then makes it."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    _kill(process)
    process.wait()


def _kill(process: subprocess.Popen) -> None:
    """Kills a process that leads its own group, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
