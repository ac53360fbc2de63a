"""One arm in this process: starts an engine and does the tasks of a job.

    python -m bench.worker JOB.json FILE_DESCRIPTOR

Started by `jobs.py`. Writes one JSON object a line to the descriptor as soon as it is known:
first `start`, then one for each task, then `end`; or `error`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import fault, model, routing
from .engine import Engine, copy_bandwidth, device, used_bytes, wait_for_memory

Tell = Callable[[str, dict[str, Any]], None]


class Worker:
    """The engine of a job, and a method for each kind of task."""

    def __init__(self, job: dict) -> None:
        """job: `shape`, `layers`, `folder`, `engine` (options of vllm.LLM), `snapshots` (a folder,
        or None), `routing` ("model" or "trace"), `hot`, `memory_gib` (a cap, or None), `fault`."""
        import torch

        self.job = job
        self.shape = model.SHAPES[job["shape"]]
        wait_for_memory()
        self.bandwidth = copy_bandwidth()
        cap = {}
        if job["memory_gib"] and torch.cuda.is_available():
            fraction = job["memory_gib"] * 2**30 / torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(fraction)
            cap["gpu_memory_utilization"] = fraction
        self.replay = self._install_routing()
        if job["fault"]:
            fault.install()
        model.register_loader()
        folder = model.write_config(self.shape, job["layers"], Path(job["folder"]) / "model")
        self.memory_before = used_bytes()
        self.engine = Engine(
            Path(job["snapshots"]) if job["snapshots"] else None,
            **{"model": str(folder), "load_format": model.LOAD_FORMAT, **job["engine"], **cap},
        )
        self.memory_peak = used_bytes()

    def _install_routing(self) -> routing.Replay | None:
        if self.job["routing"] == "model":
            return None
        if self.shape.experts != routing.TRACE_EXPERTS:
            raise ValueError(
                f"the trace names {routing.TRACE_EXPERTS} experts and {self.job['shape']} has "
                f"{self.shape.experts}: use --routing model"
            )
        self.rows = routing.trace_rows(self.job["layers"], self.shape.top_k)
        replay = routing.Replay(self.rows, device())
        routing.install(replay)
        return replay

    def start(self) -> dict:
        """What is known of the arm before the first task. Raises RuntimeError for a cached arm
        in which nothing is armed: its figures would be those of another arm."""
        layers = self.engine.layers()
        if self.job["snapshots"] and not layers:
            raise RuntimeError("no layer is armed: see the log for the reason")
        return {
            "seconds": self.engine.start_seconds,
            "copy_gb_s": self.bandwidth,
            "memory_gib": (used_bytes() - self.memory_before) / 2**30,
            "armed": len(layers),
            "record_bytes": layers[0]["record_bytes"] if layers else self.shape.record_bytes,
            "storage": layers[0]["storage"] if layers else None,
            "slots": layers[0]["slots"] if layers else None,
        }

    def _route(self, kind: str) -> None:
        """Every arm reads the same part of the same routing in the same task: the trace, or
        ("hot") so few experts that all of them are soon resident."""
        if self.replay is not None:
            hot = routing.hot_rows(self.rows, self.job["hot"]) if kind == "hot" else self.rows
            self.replay.load(hot)
            self.replay.seek(0)

    def decode(self, streams: int, warm: int, windows: int, steps: int, route: str) -> dict:
        self._route(route)
        measured = self.engine.decode(streams, warm, windows, steps)
        return {"windows": [asdict(window) for window in measured]}

    def prefill(self, tokens: int, repeats: int) -> dict:
        self._route("trace")
        measured = self.engine.prefill(tokens, repeats)
        return {"windows": [asdict(window) for window in measured]}

    def generate(self, requests: list[dict]) -> dict:
        """Token lists of several batches, as `Engine.batch` takes them."""
        answers = []
        for number, request in enumerate(requests):
            self._route("trace")
            answers.append(self.engine.batch(number, request))
        return {"tokens": answers, "counters": self.engine.counters()}

    def after_prefill(self, tokens: int, warm: int, steps: int) -> dict:
        """Misses in `steps` decode steps of one stream over one part of the routing, twice from
        an empty cache: just after a prompt of `tokens` came in between, and without it."""
        from expert_cache_shim import arming

        misses = {}
        for name, prompt_tokens in (("without", 0), ("with", tokens)):
            for report in arming.reports():
                for layer in report.armed:
                    layer.cache.forget()
            self._route("trace")
            window = self.engine.decode_after_prompt(warm, steps, prompt_tokens)
            misses[name] = window.counters["misses"]
        return {"misses": misses}

    def full_batch(self, streams: int, length: int) -> dict:
        """Serves `streams` prompts that fill the context of `length` tokens but for 32, and
        watches the device memory in use after every step."""
        new = 32
        self._route("trace")
        prompt_tokens = length - new
        for stream in range(streams):
            self.engine.submit(self.engine.prompt(prompt_tokens, seed=stream), new)
        started, finished = time.perf_counter(), 0
        for output in self.engine.steps():
            self.memory_peak = max(self.memory_peak, used_bytes())
            finished += sum(len(tokens) == new for tokens in output.values())
        return {
            "finished": finished,
            "seconds": time.perf_counter() - started,
            "peak_gib": (self.memory_peak - self.memory_before) / 2**30,
            "device_gib": self.memory_peak / 2**30,
        }

    def task(self, task: dict) -> dict:
        arguments = {name: value for name, value in task.items() if name not in ("kind", "name")}
        started = time.perf_counter()
        result = getattr(self, task["kind"])(**arguments)
        return {**task, **result, "task_seconds": time.perf_counter() - started}


def serve(job: dict, tell: Tell) -> None:
    """Does the job. An error is told and ends it: what was told before stays good."""
    try:
        worker = Worker(job)
        tell("start", worker.start())
        for task in job["tasks"]:
            if job["deadline"] and time.time() > job["deadline"]:
                tell("skipped", {"name": task["name"], "reason": "the time is spent"})
                continue
            tell("task", worker.task(task))
        tell("end", {})
    except Exception as error:
        tell("error", {"text": f"{type(error).__name__}: {error}"})
        raise


def main(serve: Callable[[dict, Tell], None] = serve) -> None:
    job, descriptor = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w", buffering=1) as results:

        def tell(event: str, content: dict[str, Any]) -> None:
            results.write(json.dumps({"event": event, **content}) + "\n")

        serve(job, tell)


if __name__ == "__main__":
    main()
