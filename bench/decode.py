"""Decode and prefill of real vLLM: resident, offloaded, and through the cache.

    python -m bench.decode --output decode.json
    python -m bench.decode --arms resident cache-64-plain --streams 16 --prefill 2048

Each arm is an engine in a process of its own, all over the same model and routing. The floor of a
cached step is the resident step of the same run plus the missed bytes over the copy bandwidth of
the same process.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from . import arms, environment, jobs, options, report

ARMS = ("resident", "uncached", "cache-64", "cache-32", "cache-16")
KINDS = ("decode", "hits", "prefill")

# Warm-up steps and measured steps of a window, by streams: about as long for few as for many.
STEPS = {1: (64, 96), 4: (48, 48), 16: (24, 24), 32: (24, 16)}


def tasks(arm: arms.Arm, arguments: argparse.Namespace) -> list[dict]:
    """What an arm is to do: every cell has the same name in every arm."""
    found = []
    for streams in arguments.streams:
        warm, steps = STEPS.get(streams, (24, 24))
        if arguments.steps:
            warm = steps = arguments.steps
        common = {"kind": "decode", "streams": streams, "warm": warm, "steps": steps,
                  "windows": arguments.windows}  # fmt: skip
        if "decode" in arguments.only:
            found.append({"name": f"decode-{streams}", **common, "route": "trace"})
        # Every routed expert resident: what the cache costs when it has nothing to fetch.
        if "hits" in arguments.only and arguments.routing == "trace" and arm.name != "uncached":
            found.append({"name": f"hits-{streams}", **common, "route": "hot"})
    if "prefill" in arguments.only:
        found += [
            {"name": f"prefill-{tokens}", "kind": "prefill", "tokens": tokens,
             "repeats": arguments.windows}
            for tokens in arguments.prefill
        ]  # fmt: skip
    return found


def measure(arguments: argparse.Namespace, common: options.Options) -> dict:
    """Runs the arms one after the other and prints each cell as soon as it is known."""
    deadline = time.time() + arguments.budget_seconds if arguments.budget_seconds else None
    described = {**asdict(common), "logs": None}
    run = {"environment": environment.describe(), "options": described, "arms": []}
    print(report.header(), flush=True)
    longest_start = 0.0
    for name in arguments.arms:
        if deadline and time.time() + longest_start > deadline:
            print(f"{name}: skipped, the time is spent", flush=True)
            continue
        arm = {"name": name, "tasks": []}
        run["arms"].append(arm)
        parsed = arms.parse(name)
        for event in jobs.run(parsed, tasks(parsed, arguments), common, deadline):
            report.take(arm, event, lambda *task: report.row(report.cell(run, *task)))
            if arguments.output:
                arguments.output.write_text(json.dumps(run, indent=1) + "\n")
        longest_start = max(longest_start, arm.get("start", {}).get("seconds", 0.0))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms", nargs="+", default=ARMS,
        help="resident, uncached, cache-SLOTS[-POLICY][-STORAGE][-nopreload]; default: "
        + " ".join(ARMS),
    )  # fmt: skip
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--prefill", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--windows", type=int, default=3, help="repeats of each measurement")
    parser.add_argument("--steps", type=int, help="decode steps of a window, in place of many")
    parser.add_argument("--budget-seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options.add(parser)
    arguments = parser.parse_args()
    try:
        for name in arguments.arms:
            arms.parse(name)
    except ValueError as error:
        parser.error(str(error))
    common = options.read(arguments, arguments.streams)
    run = measure(arguments, common)
    print("", report.table(run), sep="\n")


if __name__ == "__main__":
    main()
