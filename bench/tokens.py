"""Equal tokens: the model resident, offloaded without the cache, and cached at several sizes.

    python -m bench.tokens --output tokens.json

The model routes by itself. One stream, with short prompts and long ones in turn; then sixteen
streams together, and a long prompt that joins them on the way. Every token must be that of the
resident model. In the last arm the cache is made to fetch experts of the wrong layer: there,
tokens must differ, or the comparison would show nothing. Ends with status 1 if not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import arms, environment, jobs, options

ARMS = ("resident", "uncached", "cache-64", "cache-32", "cache-16")


def requests(scale: float) -> list[dict]:
    """Batches to serve, their sizes and lengths times `scale`."""

    def scaled(length: int) -> int:
        return max(2, round(length * scale))

    streams = scaled(16)
    one = [
        {"prompts": [scaled(length)], "max_tokens": scaled(48)}
        for length in (16, 900, 40, 2048, 16)
    ]
    many = {
        "prompts": [scaled(16 + 7 * stream) for stream in range(streams)],
        "max_tokens": scaled(48),
        "interrupt": [scaled(16), scaled(2048)],
    }
    return [*one, many]


def serve(name: str, common: options.Options, scale: float, fault: bool) -> dict:
    """What an arm answers: `tokens` and `counters`, or `error`."""
    task = {"name": "tokens", "kind": "generate", "requests": requests(scale)}
    answer: dict = {"name": name, "fault": fault}
    for event in jobs.run(arms.parse(name), [task], common, fault=fault):
        kind = event.pop("event")
        if kind == "error":
            answer["error"] = event
        if kind == "task":
            answer.update({**event, "name": name})
    return answer


def differences(answer: dict, reference: dict) -> tuple[int, int]:
    """Tokens that differ, and tokens compared."""
    pairs = [
        (ours, theirs)
        for batch, expected in zip(answer["tokens"], reference["tokens"])
        for row, expected_row in zip(batch, expected)
        for ours, theirs in zip(row, expected_row, strict=True)
    ]
    return sum(ours != theirs for ours, theirs in pairs), len(pairs)


def judge(answer: dict, reference: dict) -> tuple[bool, str]:
    """Whether an arm answered as it must, and a line that says what it did."""
    if "error" in answer:
        error = answer["error"]
        return False, "\n    ".join([error["text"], *error["log"]])
    wrong, total = differences(answer, reference)
    text = f"{total - wrong} of {total} tokens as resident"
    counters = answer["counters"]
    if counters:
        text += ", " + ", ".join(
            f"{counters[name]} {name}" for name in ("steps", "hits", "misses", "overflow")
        )
        if not (counters["hits"] and counters["misses"]):
            return False, text + ": the cache did not work at all"
    if answer["fault"]:
        return wrong > 0, text + (": the fault shows" if wrong else ": the fault does not show")
    return wrong == 0, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=ARMS, help="default: " + " ".join(ARMS))
    parser.add_argument("--control", default="cache-32", help="arm to put the fault in, or none")
    parser.add_argument("--scale", type=float, default=1.0, help="of streams and lengths")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options.add(parser, layers=4, routing="model")
    arguments = parser.parse_args()
    common = options.read(arguments, [1, 2, 4, 8, 16])
    work = [(name, False) for name in arguments.arms]
    if arguments.control != "none":
        work.append((arguments.control, True))
    answers: list[dict] = []
    right = True
    for name, fault in work:
        answers.append(serve(name, common, arguments.scale, fault))
        if "tokens" not in answers[0]:
            raise SystemExit(judge(answers[0], {})[1])
        good, text = judge(answers[-1], answers[0])
        right = right and good
        print(f"{name}{' with wrong experts' if fault else ''}: {text}", flush=True)
        if arguments.output:
            found = {"environment": environment.describe(), "arms": answers}
            arguments.output.write_text(json.dumps(found) + "\n")
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
