"""Several schemes in this process, an engine after the other: importing vLLM takes longer than
serving a tiny model.

    python -m bench.scheme_worker JOB.json FILE_DESCRIPTOR

Started by `schemes.py`. Tells `begin` for a scheme, `arm` for each of its engines, then `end`; or
`error`, after which this process cannot go on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.quantised_moe import GPU_SHAPE, write_quantised
from expert_cache_shim import arming, vllm_compat

from . import arms, fault, layer_check, worker
from .engine import Engine, synchronize

SHIM_LOG = "vllm.expert_cache"


class Warnings(logging.Handler):
    """What the shim warned of since the last `take`."""

    def __init__(self) -> None:
        # vLLM sets up its loggers when it is imported, and takes away handlers that are there.
        import vllm.logger  # noqa: F401

        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        logging.getLogger(SHIM_LOG).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # Of "2 of 2 MoE layers of MODEL not armed (NAME): REASON" the reason.
        text = record.getMessage().removeprefix("expert cache: ")
        self._texts.append(text.partition("): ")[2] if " not armed (" in text else text)

    def take(self) -> list[str]:
        taken, self._texts = self._texts, []
        return taken


@contextlib.contextmanager
def environment(arm: arms.Arm, snapshots: Path) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(arms.environment(arm, snapshots, {}, inherited=before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def kernels(model: torch.nn.Module) -> dict[str, Any]:
    """Class names of the routed experts' quant method and kernel."""
    _, layer = next(vllm_compat.moe_layers(model))
    method = layer.quant_method
    experts = vllm_compat.fused_experts(vllm_compat.moe_kernel(method))
    return {"method": type(method).__name__, "kernel": experts and type(experts).__name__}


def cache() -> dict[str, Any]:
    """The layers that are armed in this process, and the tensors of the first one's record."""
    layers = [layer for report in arming.reports() for layer in report.armed]
    if not layers:
        return {"armed": 0}
    return {
        "armed": len(layers),
        "storage": layers[0].cache.storage.kind,
        "slots": layers[0].cache.slots,
        "tensors": [
            {"names": entry.names + entry.places, "dtype": str(entry.tensor.dtype),
             "shape": list(entry.tensor.shape)}
            for entry in layers[0].tensors
        ],
    }  # fmt: skip


def with_wrong_experts(engine: Engine, requests: list[dict]) -> list[list[list[int]]]:
    """Tokens of the same engine, its graphs too, once its tables name the wrong layer."""
    remove = fault.install()
    for report in arming.reports():
        for layer in report.armed:
            layer.cache.restore()
    try:
        return [engine.batch(*request) for request in enumerate(requests)]
    finally:
        remove()


def serve_arm(job: dict, options: dict, arm: arms.Arm, folder: Path) -> dict:
    """Starts an engine, serves the requests, looks inside, and ends it."""
    with environment(arm, folder):
        engine = Engine(folder, **{**job["engine"], **options, **arm.engine})
        try:
            model = engine.model()
            answer = {**kernels(model), **cache(), "seconds": engine.start_seconds}
            requests = job["requests"]
            answer["tokens"] = [engine.batch(*request) for request in enumerate(requests)]
            synchronize()
            answer["counters"] = engine.counters()
            if answer["armed"]:
                compared = layer_check.compare(model, engine.llm.llm_engine.model_config.dtype)
                answer["layers"] = [asdict(comparison) for comparison in compared]
                answer["wrong"] = with_wrong_experts(engine, requests)
            return answer
        finally:
            model = None
            engine.close()


def serve_scheme(job: dict, scheme: dict, folder: Path, tell: worker.Tell) -> None:
    """All arms of a scheme, until one has failed or is refused: the others would too."""
    checkpoint = write_quantised(scheme["checkpoint"], folder / "checkpoint", GPU_SHAPE)
    options = {"model": str(checkpoint), **scheme["engine"]}
    warnings = Warnings()
    for name in job["arms"]:
        arm = arms.parse(name)
        started = time.perf_counter()
        try:
            answer = serve_arm(job, options, arm, folder / name)
        except Exception as error:
            logging.getLogger(__name__).exception("%s, %s", scheme["name"], name)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["warnings"] = warnings.take()
        answer["wall_seconds"] = time.perf_counter() - started
        tell("arm", {"scheme": scheme["name"], "arm": name, **answer})
        if "error" in answer or (arm.cached and not answer["armed"]):
            break
    logging.getLogger(SHIM_LOG).removeHandler(warnings)
    shutil.rmtree(folder)


def serve(job: dict, tell: worker.Tell) -> None:
    try:
        for scheme in job["schemes"]:
            if job["deadline"] and time.time() > job["deadline"]:
                break
            tell("begin", {"scheme": scheme["name"]})
            folder = Path(job["folder"]) / scheme["name"]
            folder.mkdir()
            serve_scheme(job, scheme, folder, tell)
            clean_up()
    except Exception as error:
        tell("error", {"text": f"{type(error).__name__}: {error}"})
        raise
    tell("end", {})


def clean_up() -> None:
    """What an engine that failed while starting has left. Raises if the device is beyond use."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()
    synchronize()


if __name__ == "__main__":
    worker.main(serve)
