"""`expert-cache` in a process of little memory, for input that is made to do harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import contextlib, io, json, resource, sys
from expert_cache_shim import cli
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(json.loads(line))
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""
Run = Callable[..., tuple[int, str, str]]


def limited(memory: int) -> Iterator[Run]:
    """For a fixture: runs one command after the other in one process that may take `memory`
    bytes; status, output, errors. An error that a command lets through ends the process, and so
    fails the test."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    ) as process:  # fmt: skip

        def run(*words: object) -> tuple[int, str, str]:
            process.stdin.write(json.dumps([*map(str, words)]) + "\n")
            process.stdin.flush()
            return tuple(json.loads(process.stdout.readline()))

        yield run
        process.stdin.close()
    assert process.returncode == 0
