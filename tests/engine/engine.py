"""Starts real vLLM engines in processes of their own and reads what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runner import MARK

from expert_cache_shim.telemetry import Snapshot, read_folder

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("runner.py")

MODELS = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2")

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

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Job:
    """One model to serve: what `runner.py` reads."""

    model: str
    engine: dict = field(default_factory=dict)  # keyword arguments of vllm.LLM
    environment: dict = field(default_factory=dict)  # set while this job runs
    plugins: tuple[str, ...] = ()  # modules of this folder; install() runs before vllm.LLM
    # A module of this folder, and what its play(llm, generate, ...) gets after these two: what
    # happens to an engine while it serves.
    scenario: tuple[str, ...] = ()
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
    """What one job left: its result or its error, and its part of the log."""

    log: str
    result: dict

    def __getitem__(self, name: str) -> list:
        """`tokens`: ids for each prompt. `methods`: class names of the experts' quant methods."""
        assert name in self.result, f"{self.result.get('error')}\n{self.log[-6000:]}"
        return self.result[name]

    def cache_lines(self) -> list[str]:
        """The log lines that speak of the expert cache."""
        return [line for line in self.log.splitlines() if "expert cache" in line.lower()]


def environment(cache_folder: Path, **settings: object) -> dict[str, str]:
    """The environment of an engine process, with nothing of ours inherited or installed: the
    cache is off unless `settings` come from `shim`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EXPERT_CACHE_", "VLLM_", "PYTHON"))
    }
    return {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # runner.py looks at the model
        "VLLM_CACHE_ROOT": str(cache_folder),
        "EXPERT_CACHE_DISABLE": "1",
        **{name: str(value) for name, value in settings.items()},
    }


def shim(snapshots: Path, **settings: object) -> dict[str, object]:
    """What a user sets to serve a model through the cache on a CPU, for `environment`."""
    return {
        "PYTHONPATH": ROOT,
        "EXPERT_CACHE_DISABLE": "",
        "EXPERT_CACHE_ALLOW_CPU": 1,
        "EXPERT_CACHE_SNAPSHOT": snapshots,
        **{f"EXPERT_CACHE_{name.upper()}": value for name, value in settings.items()},
    }


def offer_plugins(folder: Path, *modules: str) -> str:
    """Offers modules of this folder to vLLM as general plugins, which run `install()` in every
    process of an engine where `VLLM_PLUGINS` names them; returns what PYTHONPATH must have."""
    package = folder / "engine_plugins-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-plugins\nVersion: 1\n")
    lines = "".join(f"{module} = {module}:install\n" for module in modules)
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}")
    return os.pathsep.join([str(folder), str(RUNNER.parent)])


def snapshots_of(folder: Path, model: str) -> list[Snapshot]:
    """The counters that each process left which armed layers of this model."""
    return [snapshot for snapshot in read_folder(folder) if snapshot.model == model]


def total(snapshots: list[Snapshot], counter: str) -> int:
    """The sum of one counter over processes and layers."""
    return sum(snapshot.total(counter) for snapshot in snapshots)


def stop(process: subprocess.Popen) -> None:
    """Ends a process started with a session of its own, and what it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
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
            process.wait(max(600, 120 * len(jobs)))
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)
    text = log.read_text(errors="replace")
    found = json.loads(results.read_text()) if results.exists() else []
    found += [{"error": f"the process ended with status {process.returncode}"}] * len(jobs)
    logs = text.split(MARK)[1:] + [text] * len(jobs)
    return [Answer(log, result) for _, log, result in zip(jobs, logs, found)]


class Server:
    """`vllm serve` for one model by one Python, reached over HTTP; a context manager."""

    def __init__(
        self,
        model: str,
        folder: Path,
        environment: dict[str, str],
        python: str | Path = sys.executable,
        options: tuple[str, ...] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model = model
        self.log = folder / "log.txt"
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model,
                   "--port", str(self.port), "--enforce-eager", "--max-model-len", "256",
                   "--max-num-seqs", "8", "--dtype", "bfloat16", "--seed", "0",
                   *options]  # fmt: skip
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        stop(self.process)
        raise AssertionError(f"no server:\n{self.log.read_text()[-6000:]}")

    def __exit__(self, *_: object) -> None:
        stop(self.process)

    def get(self, path: str, content: dict | None = None) -> bytes:
        """GET, or POST where there is content; raises urllib.error.URLError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(content).encode() if content else None,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def complete(self, prompts: tuple[str, ...], max_tokens: int) -> list[list[int]]:
        """Greedy token ids for each prompt, all in one request."""
        content = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = json.loads(self.get("/v1/completions", content))["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]
