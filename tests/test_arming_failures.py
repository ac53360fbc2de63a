"""Errors that nobody foresaw: whatever fails while a model is armed, the model serves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FrameType

from synthetic import Model, methods
from synthetic.checks import assert_same, model_of, outputs
from synthetic.counted_library import CountedLibrary

from expert_cache_shim import arming, native, vllm_compat

pytest_plugins = ["synthetic.fixtures"]


def test_an_unexpected_error_in_one_layer_is_told_once_and_the_others_are_armed(
    arm, monkeypatch, caplog
):
    model = model_of(count=4)
    bad = [model.routed[1], model.routed[2]]

    def fail(layer):
        if any(layer is other for other in bad):
            raise ZeroDivisionError("nobody foresaw this\nas a driver's hints go on")

    monkeypatch.setattr(vllm_compat, "ensure_quant_config", fail)
    report = arm(model)
    assert [armed.name for armed in report.armed] == [
        "layers.0.experts.routed_experts",
        "layers.3.experts.routed_experts",
    ]
    assert {str(refusal) for _, refusal in report.refused} == {
        "unexpected ZeroDivisionError: nobody foresaw this; please report the traceback in the log"
    }
    assert caplog.text.count("Traceback") == 1


def test_a_quant_method_that_takes_no_attributes_is_refused_alone(arm):
    class Slotted:
        __slots__ = ()
        is_monolithic = False

    model = model_of(methods.Int8ChannelMoEMethod, methods.Int8ChannelMoEMethod)
    model.routed[0].quant_method = Slotted()
    report = arm(model)
    assert [armed.name for armed in report.armed] == ["layers.1.experts.routed_experts"]
    assert [name for name, _ in report.refused] == ["layers.0.experts.routed_experts"]


def test_out_of_memory_in_one_layer_leaves_the_others_armed(arm, library, monkeypatch):
    create, calls = library.create_memory, iter(range(100))

    def limited(device, size):
        # Three for the proof, four for the first layer: slots and overflow rows of two tensors.
        if next(calls) >= 3 + 4:
            raise native.KernelError("expert_cache_memory_create", -12, "out of memory")
        return create(device, size)

    monkeypatch.setattr(library, "create_memory", limited)
    model, uncached = model_of(count=3), model_of(count=3)
    report = arm(model)
    assert (len(report.armed), len(report.refused)) == (1, 2)
    assert "out of memory" in str(report.refused[0][1])
    assert_same(outputs(model), outputs(uncached))
    assert len(library.memories) == 4


# --- A failure at every call ----------------------------------------------------------------


class Failure(RuntimeError):
    pass


# Giving back is not part of it: nothing can be done about a driver that does not take memory back.
# Nor is the log, which handles its own errors, nor a generator, which also runs when it is closed.
EXCLUDED = {"_unmap", "free_memory", "free_range", "<genexpr>"}
# Runs before there is anything to catch an error: it fills a dataclass.
REPORT = arming.Report.__init__.__code__
EXCLUDED_MODULES = {"logging", "weakref"}
CONTAINERS = (list, dict, set, tuple, str, bytes, bytearray, memoryview)


OURS = str(Path(arming.__file__).parent)


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def is_excluded(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in EXCLUDED or frame.f_globals.get("__name__") in EXCLUDED_MODULES:
            return True
        frame = frame.f_back if is_ours(frame.f_back) else None
    return False


def call_site(frame: FrameType, event: str, function: BuiltinFunctionType) -> tuple | None:
    """Names a call that our package makes, of a Python or a C function; None for all else."""
    if event == "call" and is_ours(frame.f_back) and frame.f_code is not REPORT:
        return frame.f_code.co_name, frame.f_back.f_code.co_filename, frame.f_back.f_lineno
    if event == "c_call" and is_ours(frame):
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, CONTAINERS) and owner is not sys.modules["builtins"]:
            return function.__name__, frame.f_code.co_filename, frame.f_lineno
    return None


@contextlib.contextmanager
def profiled(reached: Callable[[tuple], None], only: tuple | None = None) -> Iterator[None]:
    """Tells of every call of a site, or of the one that is given; what `reached` raises, the
    call raises."""

    def profile(frame, event, argument):
        if event not in ("call", "c_call"):
            return
        site = call_site(frame, event, argument)
        if site is not None and only in (None, site) and not is_excluded(frame):
            reached(site)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def sites_of(run: Callable[[], object]) -> list[tuple[tuple, int]]:
    """Each distinct call site with the numbers of its first and of its last call."""
    count: dict[tuple, int] = {}

    def note(site):
        count[site] = count.get(site, 0) + 1

    with profiled(note):
        run()
    return [(site, number) for site, last in count.items() for number in sorted({1, last})]


def failing(site: tuple, number: int) -> contextlib.AbstractContextManager:
    """Makes the call of that number of a site fail."""
    calls = iter(range(1, number + 1))

    def fail(reached):
        if next(calls, 0) == number:
            raise Failure(f"call {number} of {site}")

    return profiled(fail, only=site)


def mixed_model() -> Model:
    return model_of(
        methods.Int8ChannelMoEMethod, methods.MonolithicMoEMethod, methods.UnquantizedFusedMoEMethod
    )


def test_wherever_arming_fails_the_model_serves_and_no_memory_is_kept(
    arm, settings, library, discarded_log
):
    expected = outputs(mixed_model())
    seen: set[tuple] = set()
    for storage in ("virtual", "plain"):
        settings(storage=storage)
        arm(mixed_model())  # what is imported or made once is there after this
        sites = [s for s in sites_of(lambda: arm(mixed_model())) if s not in seen]
        seen.update(sites)
        harm = {
            f"{name}, called at line {line} of {file}, call {number}": problem
            for (name, file, line), number in sites
            if (problem := harm_of_failure((name, file, line), number, arm, library, expected))
        }
        assert harm == {}
    assert len(seen) > 300


def harm_of_failure(site, number, arm, library: CountedLibrary, expected) -> str:
    """What a failure of one call does to a model, "" if nothing."""
    model = mixed_model()
    try:
        with failing(site, number):
            report = arm(model)
    except Failure:
        return "arming raises into vLLM"
    for layer in model.routed:
        armed = arming.armed_layer(layer)
        if armed is not None and armed not in report.armed:
            return "a layer is armed that the report does not know"
    try:
        assert_same(outputs(model), expected)
    except Exception as error:
        return f"the model fails to serve: {error!r}"
    del model, layer, armed, report
    return "" if library.all_is_freed() else "device memory is kept"
