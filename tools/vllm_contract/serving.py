"""How a server answers `/metrics`, and how its processes know each other."""

from __future__ import annotations

from collections.abc import Iterator

from expert_cache_shim import vllm_compat

from .facts import Subject, require
from .reading import Found, Release

fact = Subject("serving")


@fact("get_prometheus_registry() gives REGISTRY, or a new one with a MultiProcessCollector")
def _(release: Release) -> Iterator[Found]:
    source = release.module(vllm_compat.METRICS_SOURCE)
    function = source.function("get_prometheus_registry")
    require("return REGISTRY" in function.text, f"{function.place} does not return REGISTRY")
    require("PROMETHEUS_MULTIPROC_DIR" in function.text, f"{function.place} has another condition")
    for call in function.calls("MultiProcessCollector"):
        given = [argument.id for argument in call.node.args]
        require(given == ["registry"], f"{call.place} passes {given}")
        yield call
    held = source.imports("REGISTRY")
    require(held, f"{source.name} does not import REGISTRY")
    yield held


@fact("whatever mounts /metrics asks get_prometheus_registry() for it")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.entrypoints.serve.instrumentator.metrics")
    held = source.imports("get_prometheus_registry")
    require(held, f"{source.name} does not import it")
    yield held
    yield from source.function("attach_router").calls("get_prometheus_registry")


@fact("the parent of several API servers sets PROMETHEUS_MULTIPROC_DIR")
def _(release: Release) -> Iterator[Found]:
    setup = release.module(vllm_compat.METRICS_SOURCE).function("setup_multiprocess_prometheus")
    wanted = "os.environ['PROMETHEUS_MULTIPROC_DIR'] = "
    require(wanted in setup.text, f"{setup.place} does not")
    yield setup
    serve = release.module("vllm.entrypoints.cli.serve")
    yield from serve.function("run_multi_api_server").calls("setup_multiprocess_prometheus")


@fact("API servers are processes of multiprocessing")
def _(release: Release) -> Iterator[Found]:
    manager = release.module("vllm.v1.utils").cls("APIServerProcessManager")
    yield from manager.calls("get_context")


@fact("VllmConfig has an instance_id, which it makes up where there is none")
def _(release: Release) -> Iterator[Found]:
    config = release.module("vllm.config.vllm").cls("VllmConfig")
    for found in (config.fields, config.attributes):
        require("instance_id" in found, f"{config.place} has no instance_id, or does not set it")
        yield found["instance_id"]


@fact("get_tensor_model_parallel_rank()")
def _(release: Release) -> Iterator[Found]:
    source = release.module("vllm.distributed.parallel_state")
    function = source.function("get_tensor_model_parallel_rank")
    require(function.parameters == [], f"{function.place} takes {function.parameters}")
    yield function
