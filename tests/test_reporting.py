"""What the log says of a cache, when it is armed and while it serves."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
from synthetic import Model
from synthetic.checks import loaded_layer, model_of
from synthetic.snapshots import described
from test_expert_parallel import map_of

from expert_cache_shim import reporting, telemetry, vllm_compat
from expert_cache_shim.policy import COUNTERS
from expert_cache_shim.refusals import RESIDENT, Refusal
from expert_cache_shim.vllm_compat import Offloading

pytest_plugins = ["synthetic.fixtures"]

LAYERS = [described(f"layers.{n}", record_bytes=2**20) for n in (0, 1)]


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.INFO, logger="vllm.expert_cache")


# --- When a model has loaded ----------------------------------------------------------------


@pytest.mark.parametrize("slots, warned", [(1, True), (2, False)])
def test_slots_for_fewer_experts_than_one_token_routes_to_are_warned_of(
    arm, settings, caplog, slots, warned
):
    settings(slots=slots)
    report = arm(model_of())
    assert [layer.top_k for layer in report.armed] == [2, 2]
    warning = "one token routes to 2 experts of a layer, more than its 1 slots (layers.0."
    assert (warning in caplog.text) == warned


def resident_report(model: str = "a-model"):
    from expert_cache_shim.arming import Report

    refused = [(f"layers.{n}", Refusal(RESIDENT, "remedy")) for n in range(2)]
    return Report(model, refused=refused)


@pytest.mark.parametrize(
    "asked, cause",
    [
        (Offloading(0, frozenset({"experts"}), "NoopOffloader", 0), "without --cpu-offload-gb"),
        (Offloading(60, frozenset({"experts"}), "NoopOffloader", 0), "VLLM_USE_V2_MODEL_RUNNER=0"),
        (Offloading(60, frozenset({"expert"}), "UVAOffloader", 0), "params expert matches no"),
        (Offloading(60, frozenset({"experts"}), "UVAOffloader", 2**30), "1.00 GiB of other"),
    ],
)
def test_the_cause_is_said_where_offloading_was_asked_for_and_no_expert_was(
    monkeypatch, caplog, asked, cause
):
    monkeypatch.setattr(vllm_compat, "offloading", lambda: asked)
    reporting.log_report(resident_report())
    line = caplog.messages[-1]
    assert "no expert of a-model was offloaded: " in line
    assert cause in line


def test_where_no_offloading_was_asked_for_the_refusal_is_all(monkeypatch, caplog):
    nothing = Offloading(0, frozenset(), "NoopOffloader", 0)
    monkeypatch.setattr(vllm_compat, "offloading", lambda: nothing)
    reporting.log_report(resident_report())
    (line,) = caplog.messages
    assert "2 of 2 MoE layers of a-model not armed" in line


def test_a_model_that_is_partly_armed_is_not_told_that_nothing_was_offloaded(arm, caplog):
    report = arm(model_of())
    report.refused.append(("layers.9", Refusal(RESIDENT, "remedy")))
    caplog.clear()
    reporting.log_report(report)
    assert "was offloaded" not in caplog.text


def test_the_offloader_is_asked_in_vllms_own_words(monkeypatch):
    class UVAOffloader:
        cpu_offload_bytes = 5

    class Config:
        class offload_config:
            class uva:
                cpu_offload_gb = 2
                cpu_offload_params = {"experts"}

    monkeypatch.setattr(vllm_compat, "_offloader", UVAOffloader)
    monkeypatch.setattr(vllm_compat, "_current_config", lambda: Config)
    expected = Offloading(2, frozenset({"experts"}), "UVAOffloader", 5)
    assert vllm_compat.offloading() == expected


def test_a_vllm_without_such_a_configuration_was_asked_for_nothing():
    assert vllm_compat.offloading() == Offloading(0, frozenset(), "NoopOffloader", 0)


# --- While it serves ------------------------------------------------------------------------


class Intervals:
    """Stands for the time between two readings: before each, something is done."""

    def __init__(self, *actions):
        self._actions = list(actions)

    def __call__(self, seconds: float) -> None:
        if not self._actions:
            raise OSError("the test is over")
        self._actions.pop(0)()


@pytest.fixture
def counting(tmp_path):
    """A snapshot, and a function that counts so much more in its first layer."""
    snapshot = telemetry.SnapshotFile(tmp_path, "a-model", 0, LAYERS)

    def count(**counts: int) -> None:
        for name, value in counts.items():
            snapshot.mirror(0)[COUNTERS.index(name)] += value

    return snapshot, count


def log_of(snapshot, caplog, *actions) -> list[str]:
    reporting._log_while_in_use(weakref.ref(snapshot), snapshot.path, 1, Intervals(*actions))
    return [message.removeprefix("expert cache: ") for message in caplog.messages[:-1]]


def test_layers_that_were_given_back_are_told_in_every_line(counting, caplog):
    snapshot, count = counting
    lines = log_of(
        snapshot, caplog,
        lambda: count(steps=1, hits=1),
        lambda: (snapshot.note_given_back(1, True), count(steps=1, hits=1)),
        lambda: (snapshot.note_given_back(0, True), count(steps=1, hits=9)),
    )  # fmt: skip
    assert "own path again" not in lines[0]
    assert lines[1].endswith("were read through; 1 of 2 layers are on vLLM's own path again")
    assert lines[2].endswith("; 2 of 2 layers are on vLLM's own path again")
    assert len(lines) == 3  # nobody is told to raise the slots of no layer


def test_a_line_tells_what_happened_in_the_interval_and_not_before(counting, caplog, monkeypatch):
    snapshot, count = counting
    count(steps=1000, hits=10**6)
    moments = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(moments))
    first, second = log_of(
        snapshot, caplog,
        lambda: count(steps=8, hits=6, misses=2, overflow=1, read_through=2),
        lambda: count(steps=10, hits=10),
    )  # fmt: skip
    assert first == (
        "a-model, rank 0: in 2 s 75.0% of 8 routed experts were resident, 0.00 GiB/s fetched, "
        "50.0% of the misses found no slot, 20.0% of the layer-steps were read through"
    )
    assert "100.0% of 10 routed experts" in second


def test_the_rate_is_that_of_the_bytes_fetched(counting):
    snapshot, count = counting
    count(steps=1, misses=1024)
    line = reporting.activity_line(telemetry.read_snapshot(snapshot.path), 0.5)
    assert "2.00 GiB/s fetched" in line


def test_an_idle_model_is_not_spoken_of(counting, caplog):
    snapshot, count = counting
    nothing = lambda: None  # noqa: E731
    lines = log_of(snapshot, caplog, nothing, nothing, lambda: count(idle=1), nothing)
    assert len(lines) == 1


def test_steps_that_are_wider_than_the_slots_are_warned_of_once(counting, caplog):
    snapshot, count = counting
    wide, narrow = (lambda: count(steps=10, misses=31)), (lambda: count(steps=10, misses=30))
    lines = log_of(snapshot, caplog, narrow, wide, wide)
    warnings = [line for line in lines if "on average, more than its 3 slots" in line]
    assert len(lines) == 4
    assert warnings == [lines[2]]
    assert "routes to 3.1 experts" in warnings[0]


def test_counters_that_have_gone_end_the_lines(counting, caplog):
    snapshot, _ = counting
    log_of(snapshot, caplog, snapshot.path.unlink)
    assert caplog.messages[-1].startswith("expert cache: no more lines about ")


def test_an_error_of_ours_ends_the_lines_with_a_traceback(counting, caplog):
    snapshot, _ = counting
    log_of(snapshot, caplog, lambda: 1 // 0)
    assert "serving goes on" in caplog.messages[-1]
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def threads(monkeypatch, settings):
    """The threads that log. Their first interval ends with `threads.tick()`, and the test is
    the last of their intervals."""
    settings(log_interval=1)
    tick, over = threading.Event(), threading.Event()

    def wait(seconds: float) -> None:
        tick.wait(60)
        if over.is_set():
            raise OSError("the test is over")

    monkeypatch.setattr(reporting._log_while_in_use, "__defaults__", (wait,))

    before = threading.enumerate()  # of models of other tests: they sleep, and end by themselves

    def running() -> list[threading.Thread]:
        new = (thread for thread in threading.enumerate() if thread not in before)
        return [thread for thread in new if thread.name == "expert-cache-log"]

    running.tick = tick.set
    yield running
    over.set()
    tick.set()
    for thread in running():
        thread.join(60)


def test_one_thread_speaks_for_each_armed_model_and_keeps_nothing_alive(arm, threads):
    models = [model_of(), model_of()]
    for model in models:
        arm(model)
    assert len(threads()) == 2
    assert all(thread.daemon for thread in threads())


def test_a_thread_ends_when_its_model_has_gone(arm, threads):
    arm(model_of())
    (thread,) = threads()
    gc.collect()
    threads.tick()
    thread.join(60)
    assert threads() == []


@pytest.mark.parametrize("variables", [{"log_interval": 0}, {"snapshot": "off"}])
def test_no_thread_where_there_is_nothing_to_say_or_to_read(arm, settings, threads, variables):
    settings(**variables)
    assert len(arm(model_of()).armed) == 2
    assert threads() == []


def test_the_first_rank_speaks_for_a_tensor_parallel_group(arm, threads, monkeypatch):
    monkeypatch.setattr(vllm_compat, "tensor_parallel_rank", lambda: 1)
    arm(model_of())
    assert threads() == []
    monkeypatch.setattr(vllm_compat, "tensor_parallel_rank", lambda: 0)
    arm(model_of())
    assert len(threads()) == 1


def test_each_rank_of_expert_parallelism_speaks_for_itself(arm, threads, monkeypatch):
    monkeypatch.setattr(vllm_compat, "tensor_parallel_rank", lambda: 1)
    report = arm(Model(loaded_layer(expert_map=map_of(1, "linear"))))
    assert len(report.armed) == len(threads()) == 1
