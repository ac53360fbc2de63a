"""Quantised experts through the cache: equal tokens for every scheme that vLLM has a kernel for.

    python -m bench.schemes --budget-seconds 480 --output schemes.json
    python -m bench.schemes --schemes w4a16 fp8_block@marlin --plain
    python -m bench.schemes --read schemes.json

For each scheme a tiny checkpoint is written (examples/quantised_moe.py) and real vLLM serves it,
offloaded without the cache and through the cache at two slot budgets: one stream with prompts in
between, then several together, under captured graphs. All tokens must be those of the uncached
engine. In each cached engine a layer is then run with and without the cache and compared bit for
bit, and last the cache is made to fetch experts of the wrong layer: there tokens must differ.

A scheme is the name of a checkpoint, and after an @ the value of --moe-backend. Whatever goes wrong
with one scheme is a row of the table. Ends with status 1 if a scheme that is armed differs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.quantised_moe import GPU_SHAPE, SCHEMES

from . import arms, environment, jobs, layer_check, options, tokens

# By importance, as time may end before the list does.
DEFAULT = (
    "bf16", "fp8_channel", "w4a16", "fp8_block", "gptq", "awq", "mxfp4@marlin", "nvfp4",
    "int8_channel", "w4a16_actorder", "fp8_static", "gptq_desc_act", "w8a16", "fp8_tensor",
    "gpt_oss_bf16", "fp16", "mxfp4", "nvfp4_ct", "fp8_channel@triton", "fp8_block@marlin",
)  # fmt: skip
HALF, QUARTER = GPU_SHAPE.experts // 2, GPU_SHAPE.experts // 4

# Small enough for an engine to be up in seconds: no torch.compile, one graph for each number of
# streams that is decoded here, a fixed KV cache in place of a measured one.
ENGINE = {
    **options.ENGINE,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2**28,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
SCALE = 0.4  # of bench.tokens' requests: six streams, prompts of up to 819 tokens
# Without a word for so long, an engine hangs. The first one of a machine compiles kernels.
PATIENCE_SECONDS = 180.0


@dataclass(frozen=True)
class Scheme:
    """`name` as on the command line, the checkpoint, keyword arguments of vllm.LLM."""

    name: str
    checkpoint: str
    engine: dict = field(default_factory=dict)


def parse(name: str) -> Scheme:
    """Raises ValueError for a checkpoint that nobody writes."""
    checkpoint, _, backend = name.partition("@")
    if checkpoint not in SCHEMES:
        raise ValueError(f"scheme {name!r}: allowed are {', '.join(SCHEMES)}, each with @BACKEND")
    return Scheme(name, checkpoint, {"moe_backend": backend} if backend else {})


def arm_names(plain: bool) -> list[str]:
    cached = [f"cache-{HALF}", f"cache-{QUARTER}"]
    return ["uncached", *cached, *([f"cache-{QUARTER}-plain"] if plain else [])]


# --- Running --------------------------------------------------------------------------------


def measure(names: list[str], plain: bool, common: options.Options, arguments: Any) -> dict:
    """Runs the schemes in as few processes as it takes: one that has died, or whose device is
    beyond use, is followed by another for the schemes that are left."""
    deadline = time.time() + arguments.budget_seconds if arguments.budget_seconds else None
    run = {"environment": environment.describe(), "schemes": []}
    left = [parse(name) for name in names]
    with jobs.temporary_folder() as folder:
        job = {
            "folder": str(folder), "engine": common.engine, "arms": arm_names(plain),
            "requests": tokens.requests(SCALE), "deadline": deadline,
        }  # fmt: skip
        variables = arms.environment(arms.parse(f"cache-{HALF}"), folder, common.environment)
        while left and not (deadline and time.time() > deadline):
            before = len(left)
            log = jobs.log_file(f"schemes-{len(run['schemes'])}", common, folder)
            job["schemes"] = [asdict(scheme) for scheme in left]
            events = jobs.events(
                "bench.scheme_worker", job, variables, log, deadline, arguments.patience_seconds
            )
            for event in events:
                take(run, left, event)
                if arguments.output:
                    arguments.output.write_text(json.dumps(run) + "\n")
            if len(left) == before:
                break
    run["schemes"] += [{"name": scheme.name, "arms": []} for scheme in left]
    return run


def take(run: dict, left: list[Scheme], event: dict) -> None:
    """Puts an event into `run` and prints what it says. A scheme that has begun is not `left`."""
    kind = event.pop("event")
    if kind == "begin":
        left[:] = [scheme for scheme in left if scheme.name != event["scheme"]]
        run["schemes"].append({"name": event["scheme"], "arms": []})
    elif kind == "arm":
        scheme = run["schemes"][-1]
        scheme["arms"].append(event)
        seconds = event["wall_seconds"]
        print(f"{scheme['name']} {event['arm']} ({seconds:.0f} s): {said(event)}", flush=True)
    else:
        if run["schemes"]:
            run["schemes"][-1]["error"] = event["text"]
        print(event["text"], *event["log"], sep="\n    ", flush=True)


def said(arm: dict) -> str:
    if "error" in arm:
        return arm["error"]
    text = f"{arm['method']}, {arm['kernel']}"
    if arm["armed"]:
        text += f", {arm['armed']} layers armed with {arm['slots']} slots, {arm['storage']}"
    return "; ".join([text, *arm["warnings"]])


# --- Judging --------------------------------------------------------------------------------


def judge(scheme: dict) -> tuple[str, bool]:
    """The result of a scheme in a few words, and whether it is one to live with."""
    found = scheme["arms"]
    error = next((arm["error"] for arm in found if "error" in arm), scheme.get("error"))
    if error is not None:
        served = bool(found) and "error" not in found[0]
        return f"{'failed' if served else 'vLLM does not serve it here'}: {error}", not served
    if not found:
        return "not tried", True
    reference, *cached = found
    if not cached:
        return "not tried through the cache", True
    refused = [arm for arm in cached if not arm["armed"]]
    for arm in cached:
        if differing(arm, reference)[0]:
            return f"tokens differ ({arm['arm']})", False
        if arm in refused:
            continue
        if not (arm["counters"]["hits"] and arm["counters"]["misses"]):
            return f"the cache did not work ({arm['arm']})", False
        if not differing({"tokens": arm["wrong"]}, reference)[0]:
            return f"wrong experts do not show ({arm['arm']})", False
    results = [] if refused == cached else ["served, identical"]
    for arm in refused:
        where = f" ({arm['arm']})" if results else ""
        results.append(f"refused{where}: {'; '.join(arm['warnings']) or 'no reason given'}")
    return "; ".join(results), True


def differing(arm: dict, reference: dict) -> tuple[int, int]:
    return tokens.differences(arm, reference)


HEADERS = (
    "scheme", "vLLM method", "kernel", "tensors", "tokens as uncached", "hits / misses",
    "layer output", "with wrong experts", "result",
)  # fmt: skip


def row(scheme: dict) -> list[str]:
    found = scheme["arms"]
    known = next((arm for arm in reversed(found) if "method" in arm), {})
    cached = [arm for arm in found[1:] if arm.get("armed")]
    cells = [
        scheme["name"],
        known.get("method", "-"),
        known.get("kernel") or "-",
        str(len(cached[0]["tensors"])) if cached else "-",
        *(_each(cached, column, found[:1]) for column in (_equal, _counts, _layers, _wrong)),
        judge(scheme)[0],
    ]
    return [_short(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]


def _short(text: str, length: int = 240) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _each(cached: list[dict], column: Any, reference: list[dict]) -> str:
    """The cell of every cached arm; once where they agree."""
    texts = [column(arm, *reference) for arm in cached]
    return ", ".join(dict.fromkeys(texts)) or "-"


def _equal(arm: dict, reference: dict) -> str:
    wrong, total = differing(arm, reference)
    return f"{total - wrong} of {total}"


def _counts(arm: dict, reference: dict) -> str:
    return f"{arm['counters']['hits']} / {arm['counters']['misses']} ({arm['arm']})"


def _layers(arm: dict, reference: dict) -> str:
    return layer_check.describe(arm["layers"])


def _wrong(arm: dict, reference: dict) -> str:
    wrong, total = differing({"tokens": arm["wrong"]}, reference)
    return f"{total - wrong} of {total}"


def table(run: dict) -> str:
    """Markdown."""
    lines = [HEADERS, ["---"] * len(HEADERS), *map(row, run["schemes"])]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=DEFAULT, metavar="CHECKPOINT[@BACKEND]",
                        help="default: " + " ".join(DEFAULT))  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="plain storage too")
    parser.add_argument("--budget-seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--patience-seconds", type=float, default=PATIENCE_SECONDS,
                        help="what an engine may take; default: %(default)s")  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--read", type=Path, help="print the table of a run, and run nothing")
    options.add_engine(parser)
    arguments = parser.parse_args()
    if arguments.read:
        run = json.loads(arguments.read.read_text())
    else:
        try:
            for name in arguments.schemes:
                parse(name)
        except ValueError as error:
            parser.error(str(error))
        common = options.Options(
            engine={**ENGINE, **options.engine_options(arguments.engine)},
            environment=dict(map(options.pair, arguments.env)),
            logs=arguments.logs,
        )
        run = measure(list(arguments.schemes), arguments.plain, common, arguments)
    print("", table(run), sep="\n")
    raise SystemExit(0 if all(judge(scheme)[1] for scheme in run["schemes"]) else 1)


if __name__ == "__main__":
    main()
