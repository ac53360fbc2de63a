"""Arms the layers of a loaded model, or refuses them with a reason and a remedy.

Nothing here raises into vLLM. A layer that fails any question, or any step of arming, is left
exactly as it was and serves on vLLM's own path.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import budget, native, reporting, telemetry, versions, vllm_compat
from .entry import Entry
from .layer import ArmedLayer, ExpertCache
from .log import logger
from .preload import Preloader
from .recorder import Recorder, record_routing
from .refusals import (
    Candidate,
    Refusal,
    check_compiled,
    check_on_host,
    check_plain,
    discover,
    inspect,
)
from .settings import Settings, SettingsError
from .storage import Allocator, Storage, StorageError


@dataclass
class Report:
    """What became of one model's layers."""

    model: str
    armed: list[ArmedLayer] = field(default_factory=list)
    refused: list[tuple[str, Refusal]] = field(default_factory=list)
    # Given back while serving. A captured graph may go on using their memory.
    retired: list[ArmedLayer] = field(default_factory=list)
    storage_note: str = ""
    snapshot: telemetry.SnapshotFile | None = None
    recorders: list[Recorder] = field(default_factory=list)  # one a device, where asked for

    def refuse(self, name: str, refusal: Refusal) -> None:
        """Remembers why a layer is not armed, and not the frames that it was found out in: they
        hold the model, and a model that is held by its own report is never freed."""
        self.refused.append((name, Refusal(refusal.reason, refusal.remedy)))

    def end_preloads(self) -> None:
        """After this no layer's experts are on their way to overflow rows."""
        for preloader in {layer.preloader for layer in (*self.armed, *self.retired)}:
            if preloader is not None:
                preloader.end()

    def steps(self) -> int:
        """Layer-steps that reached the cache, idle and read-through ones included."""
        return sum(layer.cache.calls() for layer in self.armed)


_reports: weakref.WeakKeyDictionary[torch.nn.Module, Report] = weakref.WeakKeyDictionary()


def reports() -> Iterator[Report]:
    """One for each model of this process that is still alive."""
    return iter(list(_reports.values()))


def layers_of(model: torch.nn.Module) -> list[ArmedLayer]:
    """The armed layers of one model; none of a model that is not armed."""
    report = report_of(model)
    return report.armed if report else []


def report_of(model: torch.nn.Module | None) -> Report | None:
    """What became of a model; None of one that is not armed."""
    return None if model is None else _reports.get(model)


def arm_model(model: torch.nn.Module, model_config: Any) -> Report:
    """Arms what can be armed in a model whose weights are final. Never raises."""
    report = Report("model")
    try:
        report.model = vllm_compat.model_name(model_config)
        # No more of it, or the slots of a first loading would stay while a second arms.
        report.recorders = _reports.pop(model, report).recorders
        layers = list(vllm_compat.moe_layers(model))
        # What is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            if layers:
                _arm(_rebind_armed(layers, report), model_config, report)
                reporting.log_report(report)
    except Exception:
        logger.exception(
            "expert cache: unexpected error while arming %s; layers not armed so far serve on "
            "vLLM's own path", report.model,
        )  # fmt: skip
    if report.armed:
        _reports[model] = report
    return report


def armed_layer(layer: torch.nn.Module) -> ArmedLayer | None:
    """The cache in front of this layer, if there is one."""
    entry = Entry.of(layer.quant_method)
    return None if entry is None else entry.armed(layer)


def _rebind_armed(layers: list, report: Report) -> list:
    """A model's weights may be processed again. A layer that is armed and whose tensors lie
    where they lay is bound to its new kernel; another is given back and armed anew."""
    remaining = []
    for name, layer in layers:
        armed = armed_layer(layer)
        try:
            if armed is None or not _rebound(armed, layer):
                remaining.append((name, layer))
            else:
                report.armed.append(armed)
        except Refusal as refusal:
            report.refuse(name, refusal)
        except Exception as error:
            _refuse_unexpected(name, error, report)
    return remaining


def refresh(reports: list[Report]) -> None:
    """The weights of some armed models have changed in place: nothing in a slot is good any
    more, and a layer may have a new kernel. A layer whose tensors moved goes back to vLLM."""
    for model, report in list(_reports.items()):
        if not any(report is one for one in reports):
            continue
        report.end_preloads()
        layers = [(name, m) for name, m in vllm_compat.moe_layers(model) if armed_layer(m)]
        before, report.armed, known = report.armed, [], len(report.refused)
        moved = _rebind_armed(layers, report)
        report.refused += [(name, _MOVED) for name, _ in moved]
        report.retired += [armed for armed in before if armed not in report.armed]
        reporting.log_given_back(report.model, report.refused[known:])


_MOVED = Refusal(
    "its tensors were replaced while serving", "restart the engine to have the layer armed again"
)


def _leave_to_vllm() -> None:
    """In a forked process: on a CPU its slots are the memory of its parent, which goes on serving
    from them. No GPU serves a forked process."""
    for report in reports():
        for armed in report.armed:
            armed.remove_in_child()


os.register_at_fork(after_in_child=_leave_to_vllm)


def _rebound(armed: ArmedLayer, layer: torch.nn.Module) -> bool:
    """Whether the layer could be bound anew; it is given back to vLLM in any other case."""
    armed.remove()
    if not armed.rebind(discover(layer, armed.cache.experts)):
        return False
    armed.cache.restore()
    armed.install()
    return True


def _arm(layers: list, model_config: Any, report: Report) -> None:
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        refusal = Refusal(str(error), "correct the variable")
        report.refused += [(name, refusal) for name, _ in layers]
        return
    if settings.disable or not layers:
        return
    _say_if_untried()
    for warning in settings.unknown:
        logger.warning("expert cache: %s", warning)
    candidates = list(_candidates(layers, model_config, settings, report))
    for device in dict.fromkeys(candidate.device for candidate in candidates):
        there = [candidate for candidate in candidates if candidate.device == device]
        _arm_on(device, there, settings, report)


def _arm_on(
    device: torch.device, candidates: list[Candidate], settings: Settings, report: Report
) -> None:
    """Layers of one device: a budget, shared memory and kernels are each device's own."""
    try:
        library = load_library(device, settings)
        candidates = list(_offloaded(candidates, library, report))
        if candidates:
            plan = budget.plan(candidates, settings, device)
            _arm_candidates(candidates, plan, Allocator(library, device), settings, report)
    except (native.LibraryError, SettingsError) as error:
        refusal = Refusal(str(error), "the model serves without the cache")
        report.refused += [(c.name, refusal) for c in candidates]


@functools.cache
def _say_if_untried() -> None:
    """One line a process where vLLM is a release that nobody has tried."""
    note = versions.note(versions.running())
    if note:
        logger.warning("%s", note)


def _candidates(
    layers: list, model_config: Any, settings: Settings, report: Report
) -> Iterator[Candidate]:
    for name, layer in layers:
        try:
            yield inspect(name, layer, model_config, settings)
        except Refusal as refusal:
            report.refuse(name, refusal)
        except Exception as error:
            _refuse_unexpected(name, error, report)


def load_library(device: torch.device, settings: Settings) -> native.Library:
    """The kernel library for a device. Raises LibraryError."""
    if device.type != "cuda":
        return native.load("host", settings.lib)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        library, found = native.load("hip", settings.lib), properties.gcnArchName
    else:
        library = native.load("cuda", settings.lib)
        found = f"sm_{properties.major}{properties.minor}"
    library.check_architecture(found)
    return library


def _offloaded(
    candidates: list[Candidate], library: native.Library, report: Report
) -> Iterator[Candidate]:
    """The candidates whose weights lie in host memory."""
    for candidate in candidates:
        try:
            check_on_host(candidate, library)
        except Refusal as refusal:
            report.refuse(candidate.name, refusal)
        except Exception as error:
            _refuse_unexpected(candidate.name, error, report)
        else:
            yield candidate


def _arm_candidates(
    candidates: list[Candidate], plan: budget.Plan, allocator: Allocator, settings: Settings,
    report: Report,
) -> None:  # fmt: skip
    kind = _storage_kind(allocator, plan, settings, report)
    built: list[tuple[Candidate, Storage, int]] = []
    for candidate in candidates:
        try:
            check_compiled(candidate, kind)
            region = len(built) % 2 if plan.preload else 0
            built.append(_build(candidate, plan, kind, allocator, region))
        except Refusal as refusal:
            report.refuse(candidate.name, refusal)
        except Exception as error:
            _refuse_unexpected(candidate.name, error, report)
    if built:
        report.snapshot = _snapshot(built, allocator, settings, report)
    armed_now: list[ArmedLayer] = []
    for index, (candidate, storage, count) in enumerate(built):
        try:
            mirror = report.snapshot.mirror(index) if report.snapshot else None
            cache = ExpertCache(
                allocator.library, storage, candidate.experts, count, settings, mirror,
                candidate.expert_map,
            )  # fmt: skip
            armed = ArmedLayer(
                report.model, candidate.name, candidate.layer, candidate.tensors, cache
            )
            if report.snapshot:
                armed.count_in(report.snapshot, index)
            armed.install()
            armed_now.append(armed)
        except Exception as error:
            if report.snapshot:
                report.snapshot.note_given_back(index, True)
            _refuse_unexpected(candidate.name, error, report)
    report.armed += armed_now
    if armed_now and vllm_compat.compiles_on_cpu():
        vllm_compat.distinguish_graphs([layer.key for layer in armed_now])
    if report.armed:
        # Ranks of tensor parallelism keep the same cache, those of expert parallelism do not.
        if vllm_compat.tensor_parallel_rank() == 0 or candidates[0].expert_map is not None:
            reporting.log_regularly(report.snapshot, settings.log_interval)
    elif report.snapshot:
        report.snapshot.path.unlink(missing_ok=True)
    if plan.preload and kind == "virtual":
        _link(armed_now, Preloader(allocator.device))
    if armed_now and settings.trace not in (None, "off"):
        report.recorders.append(
            record_routing(settings.trace, report.model, _rank(), armed_now, allocator)
        )


def _link(layers: list[ArmedLayer], preloader: Preloader) -> None:
    """Each layer fetches ahead for the one after it, if their overflow rows are apart."""
    for layer, after in zip(layers, [*layers[1:], None]):
        if after is not None and layer.cache.storage.region == after.cache.storage.region:
            after = None
        layer.preload_with(preloader, after)


def _snapshot(
    built: list[tuple[Candidate, Storage, int]], allocator: Allocator, settings: Settings,
    report: Report,
) -> telemetry.SnapshotFile | None:  # fmt: skip
    """The file that the kernels store their counters to; None where that cannot be had."""
    layers = [_describe(*entry) for entry in built]
    snapshot = telemetry.open_snapshot(
        settings.snapshot, report.model, _rank(), layers, vllm_compat.instance_id(),
        settings.policy,
    )  # fmt: skip
    if snapshot is not None and not allocator.expose(snapshot):
        snapshot.path.unlink(missing_ok=True)
        return None
    return snapshot


def _storage_kind(
    allocator: Allocator, plan: budget.Plan, settings: Settings, report: Report
) -> str:
    """`auto` takes virtual storage where it proves itself, else plain and a line that says why.
    Without overflow rows there is nothing to alias: that is plain storage without a scratch."""
    report.storage_note = plan.note
    if settings.storage == "virtual" and not plan.overflow and not plan.note:
        report.storage_note = "plain storage: without overflow rows there is nothing to alias"
    if settings.storage == "plain" or not plan.overflow:
        return "plain"
    try:
        allocator.prove_virtual()
        return "virtual"
    except StorageError as error:
        report.storage_note = f"plain storage, because {error}"
        if settings.storage == "virtual":
            report.storage_note = f"EXPERT_CACHE_STORAGE=virtual is not to be had: {error}"
        return "plain"


def _build(
    candidate: Candidate, plan: budget.Plan, kind: str, allocator: Allocator, region: int
) -> tuple[Candidate, Storage, int]:
    """Spends the device memory of one layer. Raises Refusal."""
    slots = plan.slots[candidate.name]
    if slots >= candidate.experts:
        raise Refusal(
            f"{slots} slots hold all of its {candidate.experts} experts, so there is nothing to "
            "replace",
            "lower EXPERT_CACHE_SLOTS, or do not offload the experts",
        )
    if kind == "virtual":
        return candidate, allocator.virtual(candidate.tensors, slots, region), slots
    check_plain(candidate.layer.quant_method)
    return candidate, allocator.plain(candidate.tensors, slots, plan.overflow), slots


def _describe(candidate: Candidate, storage: Storage, slots: int) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "experts": candidate.experts,
        "slots": slots,
        "record_bytes": candidate.tensors.record_bytes,
        "tensors": len(candidate.tensors),
        "storage": storage.kind,
        "private_bytes": storage.private,
        "shared_bytes": storage.shared,
    }


def _rank() -> int:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0


def _refuse_unexpected(name: str, error: Exception, report: Report) -> None:
    """An error nobody foresaw: a traceback once, and the layer stays vLLM's."""
    first = not any(r.reason.startswith("unexpected") for _, r in report.refused)
    logger.log(
        logging.ERROR if first else logging.DEBUG,
        "expert cache: unexpected error in layer %s", name, exc_info=error,
    )  # fmt: skip
    first_line, *_ = str(error).splitlines() or [""]
    refusal = Refusal(
        f"unexpected {type(error).__name__}: {first_line}",
        "please report the traceback in the log",
    )
    report.refuse(name, refusal)
