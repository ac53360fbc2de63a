"""A model that does not fit: 48 layers, 57 GB of experts, on a GPU held to 24 GB.

    python -m bench.fits --output fits.json

Three arms: everything resident (must fail), offloaded, and offloaded with the cache. The cap is
`gpu_memory_utilization`, and for torch's own allocator a hard limit beside it. Each arm also
serves a full batch at full context while the device memory in use is watched, and the cached one
counts decode misses just after a long prompt and without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from . import arms, environment, jobs, options, report
from .decode import STEPS


def tasks(arm: arms.Arm, arguments: argparse.Namespace) -> list[dict]:
    found = [
        {"name": f"decode-{streams}", "kind": "decode", "streams": streams, "route": "trace",
         "warm": STEPS[streams][0] // 2, "steps": STEPS[streams][1] // 4, "windows": 3}
        for streams in (1, 4)
    ]  # fmt: skip
    found.append({"name": "prefill-2048", "kind": "prefill", "tokens": 2048, "repeats": 2})
    if arm.cached:
        found.append({"name": "after-prefill", "kind": "after_prefill",
                      "tokens": arguments.prompt, "warm": 128, "steps": 64})  # fmt: skip
    found.append({"name": "full-batch", "kind": "full_batch", "streams": arguments.batch,
                  "length": arguments.context})  # fmt: skip
    return found


def line(arm: dict, task: dict, arguments: argparse.Namespace) -> str:
    """What one task showed."""
    if task["kind"] in ("decode", "prefill"):
        tokens = task.get("streams", task.get("tokens"))
        rates = [1e3 * tokens / ms for ms in report.step_ms(task)]
        return (
            f"{arm['name']} {task['name']}: {statistics.median(rates):.1f} tok/s "
            f"({min(rates):.1f}-{max(rates):.1f})"
        )
    if task["kind"] == "after_prefill":
        before, after = task["misses"]["without"], task["misses"]["with"]
        return (
            f"{arm['name']}: {task['steps']} decode steps miss {after / task['steps']:.2f} experts "
            f"a step just after a prompt of {task['tokens']}, {before / task['steps']:.2f} without "
            f"it ({after / before - 1:+.1%})"
        )
    verdict = "within" if task["peak_gib"] <= arguments.gpu_gib else "OVER"
    return (
        f"{arm['name']}: {task['finished']} of {task['streams']} requests of {task['length']} "
        f"tokens served in {task['seconds']:.1f} s, at most {task['peak_gib']:.2f} GiB of device "
        f"memory used by the engine, {verdict} the {arguments.gpu_gib:g} allowed "
        f"({task['device_gib']:.2f} in use on the device)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu-gib", type=float, default=24.0, help="default: %(default)s")
    parser.add_argument("--slots", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens; default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="requests; default: %(default)s")
    parser.add_argument("--context", type=int, default=8704, help="tokens; default: %(default)s")
    parser.add_argument("--arms", nargs="+", help="default: resident uncached cache-SLOTS")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options.add(parser, layers=48)
    arguments = parser.parse_args()
    common = options.read(arguments, [1, 4])
    common.memory_gib = arguments.gpu_gib
    common.engine.update(max_model_len=arguments.context, max_num_seqs=arguments.batch)
    run = {"environment": environment.describe(), "gpu_gib": arguments.gpu_gib, "arms": []}
    for name in arguments.arms or ["resident", "uncached", f"cache-{arguments.slots}"]:
        arm = {"name": name, "tasks": []}
        run["arms"].append(arm)
        parsed = arms.parse(name)
        for event in jobs.run(parsed, tasks(parsed, arguments), common):
            report.take(arm, event, lambda *task: line(*task, arguments))
            if arguments.output:
                arguments.output.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
