"""Serves a tiny Qwen3-MoE model with vLLM three times: as it is, and through the expert cache.

    make demo

The three runs are one script (generate.py) in three environments. Exits with 1 unless the cache
was used in both cached runs and the output is the same in all three.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".demo"
GENERATE = ROOT / "examples" / "generate.py"
sys.path.insert(0, str(ROOT))

import tiny_moe  # noqa: E402

from expert_cache_shim.telemetry import Snapshot, read_folder  # noqa: E402

STARTED = time.monotonic()


@dataclass(frozen=True)
class Run:
    name: str
    title: str
    slots: int | None  # None: without the shim

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    @property
    def answers(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def counters(self) -> Path:
        return FOLDER / f"{self.name}-counters"

    def environment(self) -> dict[str, str]:
        """This process's environment, with what a user sets on a machine without a GPU."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_CACHE_")}
        engine = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # starts in half the time
        }
        if self.slots is None:
            return {**inherited, **engine, "EXPERT_CACHE_DISABLE": "1"}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        cache = {
            "PYTHONPATH": os.pathsep.join(path),
            "EXPERT_CACHE_ALLOW_CPU": "1",
            "EXPERT_CACHE_SLOTS": str(self.slots),
            "EXPERT_CACHE_SNAPSHOT": str(self.counters),
        }
        return {**inherited, **engine, **cache}

    def snapshot(self) -> Snapshot | None:
        """What the cache counted, or None where it armed nothing."""
        return next(iter(read_folder(self.counters)), None) if self.slots else None


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def serve(run: Run, model: Path) -> bool:
    """Runs generate.py in the run's environment, relaying its progress; False if it fails."""
    run.answers.unlink(missing_ok=True)
    shutil.rmtree(run.counters, ignore_errors=True)
    command = [sys.executable, str(GENERATE), str(model), str(run.answers)]
    with run.log.open("w") as log:
        process = subprocess.Popen(
            command, env=run.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith("progress: "):
                say(f"  {line.removeprefix('progress: ').rstrip()}")
    if process.wait() == 0 and run.answers.exists():
        return True
    print(f"\nThis run failed with status {process.returncode}. The end of {run.log}:\n")
    print("\n".join(run.log.read_text(errors="replace").splitlines()[-25:]))
    return False


def row(run: Run, snapshot: Snapshot | None, same: bool) -> tuple[str, ...]:
    if run.slots is None:
        return (run.title, *"-------", "the reference")
    armed = len(snapshot.layers) if snapshot else 0
    counts = ("steps", "hits", "misses", "overflow")
    return (
        run.title,
        str(run.slots),
        str(armed),
        *(f"{snapshot.total(count) if snapshot else 0:,}" for count in counts),
        f"{snapshot.fetched_bytes() / 2**20 if snapshot else 0:,.1f} MiB",
        "identical" if same else "DIFFERENT",
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    head = ("run", "slots", "layers armed", "steps", "hits", "misses", "overflow fetches",
            "fetched", "output")  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for cells in (head, tuple("-" * width for width in widths), *rows):
        numbers = (cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1]))
        print("  ".join((cells[0].ljust(widths[0]), *numbers, cells[-1])))


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    shape = tiny_moe.Shape()
    model = tiny_moe.write_checkpoint("qwen3_moe", FOLDER / "qwen3_moe", shape)
    say(
        f"wrote a random Qwen3-MoE model: {shape.layers} layers of {shape.experts} experts, "
        f"{shape.top_k} a token"
    )
    runs = (
        Run("no-shim", "vLLM alone", None),
        Run("half", "half the experts", shape.experts // 2),
        Run("quarter", "a quarter", shape.experts // 4),
    )
    for number, run in enumerate(runs, 1):
        say(f"run {number} of {len(runs)}: {run.title} (log: {run.log.relative_to(ROOT)})")
        if not serve(run, model):
            return 1
    answers = [json.loads(run.answers.read_text()) for run in runs]
    same = [answer == answers[0] for answer in answers]
    snapshots = [run.snapshot() for run in runs]
    say("done\n")
    print_table([row(*cells) for cells in zip(runs, snapshots, same)])
    print(
        "\nsteps: forward passes times layers. hits and misses: routed experts that were or were "
        "not in a slot.\noverflow fetches: misses of a step that routes to more experts than "
        "there are slots."
    )
    used = all(s is not None and s.total("steps") and s.total("misses") for s in snapshots[1:])
    if not used:
        print(f"\nThe cache was not used. What it said: grep 'expert cache' {runs[1].log}")
    if not used or not all(same):
        return 1
    print(
        "\nNext, on a GPU (NVIDIA: make cuda first), N the GiB of your model's experts or more:\n"
        f"  PYTHONPATH={ROOT} vllm serve MODEL --cpu-offload-gb N --cpu-offload-params experts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
