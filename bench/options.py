"""Command-line options that every measurement with an engine has."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .model import SHAPES

# Room for a prompt of 8,192 tokens in one step, and for the decode that follows it.
ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 8704,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "seed": 0,
}


@dataclass
class Options:
    """What all arms of a run have in common."""

    shape: str = "qwen3-30b-a3b"
    layers: int = 12
    routing: str = "trace"
    hot: int = 16
    memory_gib: float | None = None
    engine: dict[str, Any] = field(default_factory=lambda: dict(ENGINE))
    environment: dict[str, str] = field(default_factory=dict)
    logs: Path | None = None


def add(parser: argparse.ArgumentParser, layers: int = 12, routing: str = "trace") -> None:
    group = parser.add_argument_group("model and engine")
    group.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    group.add_argument("--layers", type=int, default=layers, help="default: %(default)s")
    group.add_argument(
        "--routing", choices=["trace", "model"], default=routing,
        help="replayed from a recorded trace, or by the (random) model itself; "
        "default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--hot", type=int, default=16, help="experts of a layer that hits-only cells route to"
    )
    add_engine(group)


def add_engine(group: argparse._ActionsContainer) -> None:
    """What has nothing to do with the model."""
    group.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE",
        help="an option of vllm.LLM for every arm, the value in JSON or as it is, for example "
        "max_num_seqs=16; the variable BENCH_ENGINE holds such options too, separated by blanks",
    )  # fmt: skip
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="an environment variable for every arm, for example EXPERT_CACHE_CHUNKS=32",
    )  # fmt: skip
    group.add_argument("--logs", type=Path, help="folder for the engines' logs")


def read(arguments: argparse.Namespace, batches: Iterable[int]) -> Options:
    """batches: the numbers of streams to capture graphs for, and no more, as each costs start-up
    time. Raises SystemExit with one line for a NAME=VALUE that is none."""
    return Options(
        shape=arguments.shape,
        layers=arguments.layers,
        routing=arguments.routing,
        hot=arguments.hot,
        engine={**ENGINE, **capture(batches), **engine_options(arguments.engine)},
        environment=dict(map(pair, arguments.env)),
        logs=arguments.logs,
    )


def capture(batches: Iterable[int]) -> dict[str, Any]:
    """The option of vllm.LLM for graphs of these batch sizes."""
    return {"compilation_config": {"cudagraph_capture_sizes": sorted({1, *batches})}}


def engine_options(given: list[str]) -> dict[str, Any]:
    """Options of vllm.LLM: what this machine needs (BENCH_ENGINE, separated by blanks), then
    what the command line says."""
    texts = [*os.environ.get("BENCH_ENGINE", "").split(), *given]
    return {name: _value(text) for name, text in map(pair, texts)}


def pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise SystemExit(f"{text!r} is not NAME=VALUE")
    return name, value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
