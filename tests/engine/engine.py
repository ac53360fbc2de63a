"""Starts real vLLM engines in processes of their own and reads what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from runner import MARK

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("runner.py")

# Eight prompts of different length whose answers end one after the other, so that one run has
# steps of eight tokens, of four, of two and of one: wider than the slots and narrower.
PROMPTS = (
    "the quick brown fox jumps over the lazy dog",
    "a mixture of experts routes each token to a few experts",
    "hello world",
    "0 1 2 3 4 5 6 7 8 9",
    "slots",
    "least recently, least frequently",
    "what is resident stays resident until it does not",
    "?",
)
MAX_TOKENS = (6, 8, 10, 12, 16, 20, 24, 32)

COUNTERS = (
    "steps", "hits", "misses", "overflow", "evictions", "ids", "idle", "read_through",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One model to serve: what `runner.py` reads."""

    model: str
    engine: dict = field(default_factory=dict)  # keyword arguments of vllm.LLM
    environment: dict = field(default_factory=dict)  # set while this job runs
    plugins: tuple[str, ...] = ()  # modules of this folder; install() runs before vllm.LLM
    reference: bool = False  # transformers in float32 in place of vLLM
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: tuple[int, ...] = MAX_TOKENS

    def as_json(self) -> dict:
        defaults = {
            "dtype": "bfloat16",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "seed": 0,
            "enforce_eager": True,
        }
        return {**asdict(self), "engine": {**defaults, **self.engine}}


@dataclass(frozen=True)
class Answer:
    """What one job left: its token ids or its error, and its part of the log."""

    model: str
    log: str
    result: dict

    @property
    def tokens(self) -> list[list[int]]:
        assert "tokens" in self.result, f"{self.result.get('error')}\n{self.log[-6000:]}"
        return self.result["tokens"]

    def log_lines(self, *words: str) -> list[str]:
        """The log lines of the expert cache in which all words occur."""
        return [
            line
            for line in self.log.splitlines()
            if "expert cache" in line.lower() and all(word in line for word in words)
        ]


@dataclass(frozen=True)
class Counters:
    """The counters of all layers of one model in one process, summed."""

    pid: int
    layers: list[dict]
    steps: int
    hits: int
    misses: int
    overflow: int
    evictions: int
    ids: int
    idle: int
    read_through: int


def environment(shim: bool, snapshots: Path, cache: Path, **settings: str) -> dict[str, str]:
    """The environment of an engine process, with nothing of ours inherited by accident."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EXPERT_CACHE_", "VLLM_", "PYTHON"))
    }
    engine = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    cached = {
        "PYTHONPATH": str(ROOT),
        "EXPERT_CACHE_ALLOW_CPU": "1",
        "EXPERT_CACHE_SNAPSHOT": str(snapshots),
    }
    return {**inherited, **engine, **(cached if shim else {}), **settings}


def stop(process: subprocess.Popen) -> None:
    """Ends a process started with a session of its own, and what it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


def run(jobs: list[Job], folder: Path, environment: dict[str, str]) -> list[Answer]:
    """Runs the jobs in one new process that has this environment; `folder` keeps its files."""
    folder.mkdir(parents=True, exist_ok=True)
    todo, results, log = folder / "jobs.json", folder / "results.json", folder / "log.txt"
    todo.write_text(json.dumps([job.as_json() for job in jobs]))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(RUNNER), str(todo), str(results)],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(600)
        finally:
            stop(process)
    found = json.loads(results.read_text()) if results.exists() else []
    logs = log.read_text(errors="replace").split(MARK)[1:]
    missing = {"error": f"the process ended with status {process.returncode}"}
    found += [missing] * (len(jobs) - len(found))
    logs += [log.read_text(errors="replace")] * (len(jobs) - len(logs))
    return [Answer(job.model, *rest) for job, *rest in zip(jobs, logs, found)]


def counters(snapshots: Path, model: str | None = None) -> list[Counters]:
    """What each process that armed layers (of a model, by its path) counted."""
    from expert_cache_shim.telemetry import read_folder

    return [
        Counters(snapshot.pid, snapshot.layers, *np.sum(snapshot.counters, axis=0).tolist())
        for snapshot in read_folder(snapshots)
        if model in (None, snapshot.model)
    ]


class Server:
    """`vllm serve` for one model, reached over HTTP."""

    def __init__(self, model: str, folder: Path, environment: dict[str, str], port: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self.log = folder / "log.txt"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model,
                   "--port", str(port), "--enforce-eager", "--max-model-len", "256",
                   "--max-num-seqs", "8", "--dtype", "bfloat16", "--seed", "0"]  # fmt: skip
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
