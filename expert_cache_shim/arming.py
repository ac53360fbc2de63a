"""Arms the layers of a loaded model, or refuses them with a reason and a remedy.

Nothing here raises into vLLM. A layer that fails any question, or any step of arming, is left
exactly as it was and serves on vLLM's own path.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import budget, native, telemetry, vllm_compat
from .discovery import ExpertTensors, NotExpertMajor, count_experts, layer_tensors
from .discovery import reachable_tensors
from .layer import ArmedLayer, ExpertCache, copy_method
from .settings import Settings, SettingsError
from .storage import Allocator, Storage, StorageError

logger = logging.getLogger("vllm.expert_cache")

_UVA = (
    "unset VLLM_WEIGHT_OFFLOADING_DISABLE_UVA; under WSL set VLLM_WSL2_ENABLE_PIN_MEMORY=1"
)
OFFLOAD = "serve with --cpu-offload-gb N --cpu-offload-params experts"


@dataclass(frozen=True)
class Refusal(Exception):
    """Why a layer is not armed, and what would change that."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass
class Candidate:
    """A layer that passed every question, before device memory is spent on it."""

    name: str
    layer: torch.nn.Module
    experts: int
    tensors: ExpertTensors

    @property
    def slot_bytes(self) -> int:
        return sum(entry.stride for entry in self.tensors)


@dataclass
class Report:
    """What became of one model's layers."""

    model: str
    armed: list[ArmedLayer] = field(default_factory=list)
    refused: list[tuple[str, Refusal]] = field(default_factory=list)
    storage_note: str = ""
    snapshot: telemetry.SnapshotFile | None = None

    def steps(self) -> int:
        """Layer-steps that reached the cache, idle and read-through ones included."""
        return sum(layer.cache.calls() for layer in self.armed)


_reports: weakref.WeakKeyDictionary[torch.nn.Module, Report] = weakref.WeakKeyDictionary()


def reports() -> Iterator[Report]:
    """One for each model of this process that is still alive."""
    return iter(list(_reports.values()))


def arm_model(model: torch.nn.Module, model_config: Any) -> Report:
    """Arms what can be armed in a model whose weights are final. Never raises."""
    report = Report("model")
    try:
        report.model = vllm_compat.model_name(model_config)
        _reports.pop(model, None)  # or the slots of a first loading would stay while a second arms
        layers = list(vllm_compat.moe_layers(model))
        if layers:
            _arm(_rebind_armed(layers, report), model_config, report)
            telemetry.log_report(report)
        if report.armed:
            _reports[model] = report
    except Exception:
        logger.exception(
            "expert cache: unexpected error while arming %s; layers not armed so far serve on "
            "vLLM's own path", report.model,
        )  # fmt: skip
    return report


def armed_layer(layer: torch.nn.Module) -> ArmedLayer | None:
    """The cache in front of this layer, if there is one."""
    held = getattr(layer.quant_method, "__dict__", {})
    owner = getattr(held.get("apply"), "__self__", None)
    return owner if isinstance(owner, ArmedLayer) and owner.serves(layer) else None


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
            report.refused.append((name, refusal))
        except Exception as error:
            _refuse_unexpected(name, error, report)
    return remaining


def _rebound(armed: ArmedLayer, layer: torch.nn.Module) -> bool:
    """Whether the layer could be bound anew; it is given back to vLLM in any other case."""
    armed.remove()
    if discover(layer, armed.cache.experts).keys() != armed.tensors.keys():
        return False
    armed.bind()
    armed.cache.forget()
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
    for warning in settings.unknown:
        logger.warning("expert cache: %s", warning)
    candidates = list(_candidates(layers, model_config, settings, report))
    if not candidates:
        return
    try:
        library = load_library(candidates[0].layer, settings)
        candidates = list(_offloaded(candidates, library, report))
        device = next(iter(layer_tensors(layers[0][1]).values())).device
        plan = budget.plan(candidates, settings, device)
    except (native.LibraryError, native.KernelError, SettingsError) as error:
        refusal = Refusal(str(error), "the model serves without the cache")
        report.refused += [(c.name, refusal) for c in candidates]
        return
    if candidates:
        _arm_candidates(candidates, plan, Allocator(library, device), settings, report)


def _candidates(
    layers: list, model_config: Any, settings: Settings, report: Report
) -> Iterator[Candidate]:
    for name, layer in layers:
        try:
            yield inspect(name, layer, model_config, settings)
        except Refusal as refusal:
            report.refused.append((name, refusal))
        except Exception as error:
            _refuse_unexpected(name, error, report)


def inspect(
    name: str, layer: torch.nn.Module, model_config: Any, settings: Settings
) -> Candidate:
    """Asks every question that needs no device memory. Raises Refusal."""
    if vllm_compat.is_draft_model(model_config):
        raise Refusal("a draft model's experts are few and resident", "nothing needs to change")
    _check_residency(layer, settings)
    _check_form(layer)
    experts = count_experts(layer)
    tensors = discover(layer, experts)
    return Candidate(name, layer, experts, tensors)


def _check_residency(layer: torch.nn.Module, settings: Settings) -> None:
    """Questions that the tensors' devices and the offloader answer. Where a pointer of a GPU
    tensor really points is asked later, of the driver."""
    devices = {tensor.device.type for tensor in layer_tensors(layer).values()}
    if "meta" in devices:
        raise Refusal("its weights are not loaded (meta tensors)", "load real weights")
    offloader = vllm_compat.offloader_name()
    if offloader == "PrefetchOffloader":
        raise Refusal(
            "the prefetch offloader moves whole layers through a buffer that layers share",
            "use the UVA offloader: --offload-backend uva, and " + OFFLOAD,
        )
    if "cpu" not in devices:
        return
    if torch.cuda.is_available():
        raise Refusal(
            "its weights are offloaded without unified addressing (non-UVA), so the GPU cannot "
            "read them in place",
            _UVA,
        )
    if not settings.allow_cpu:
        raise Refusal(
            "this engine runs on a CPU, where no layer is offloaded to the host",
            f"on a GPU {OFFLOAD}; to try the cache on a CPU set EXPERT_CACHE_ALLOW_CPU=1",
        )


def _check_form(layer: torch.nn.Module) -> None:
    """Questions about how vLLM calls this layer."""
    method = layer.quant_method
    if vllm_compat.is_monolithic(method):
        raise Refusal(
            f"{type(method).__name__} is monolithic: it routes inside the kernel and has no "
            "routing ids to rewrite",
            "choose a modular kernel, for example --moe-backend triton",
        )
    if vllm_compat.expert_map(layer) is not None:
        raise Refusal(
            "expert parallelism maps ids through expert_map, which is not composed with the "
            "cache's own table",
            "serve without --enable-expert-parallel",
        )
    if vllm_compat.is_lora_enabled(layer):
        raise Refusal("LoRA kernels index by expert id", "serve without --enable-lora")
    if vllm_compat.is_eplb_enabled(layer):
        raise Refusal(
            "expert load balancing (EPLB) moves experts while serving",
            "serve without --enable-eplb",
        )
    if vllm_compat.uses_ubatches():
        raise Refusal(
            "dual batch overlap (DBO) runs two forwards through a layer at once",
            "serve without --enable-dbo",
        )
    _check_kernel(layer, method)
    if "apply" in vars(method):
        raise Refusal(
            "another package has replaced apply() of this layer's quant method "
            f"({vars(method)['apply']!r})",
            "remove one of the two",
        )


def _check_kernel(layer: torch.nn.Module, method: Any) -> None:
    kernel = vllm_compat.moe_kernel(method)
    prepare = vllm_compat.prepare_finalize(kernel)
    if prepare is not None and type(prepare).__name__ != vllm_compat.LOCAL_PREPARE_FINALIZE:
        raise Refusal(
            f"{type(prepare).__name__} moves routing ids between ranks after the cache has "
            "rewritten them",
            "serve with tensor parallelism only (no data or expert parallelism)",
        )
    if prepare is None and vllm_compat.data_parallel_size(layer) > 1:
        raise Refusal(
            "data parallelism gathers routing ids of other ranks", "serve with one data-parallel rank"
        )


def discover(layer: torch.nn.Module, experts: int) -> ExpertTensors:
    """The layer's per-expert tensors, those inside its kernel and configs included.

    Raises Refusal for a per-expert tensor that the cache could not stand in for: it would go on
    being read by expert number while the ids are rows, silently.
    """
    if not 2 <= experts <= 1024:
        raise Refusal(
            f"it has {experts} experts; the cache serves 2 to 1024", "nothing needs to change"
        )
    vllm_compat.ensure_quant_config(layer)
    tensors = ExpertTensors(experts)
    method = layer.quant_method
    try:
        for name, tensor in layer_tensors(layer).items():
            if tensors.add(tensor, name=name) is None and _is_per_expert(tensor, experts):
                raise Refusal(_leak(name), _OTHER_KERNEL)

        def collect(tensor: torch.Tensor, place: str) -> torch.Tensor:
            tensors.add(tensor, place=place)
            return tensor

        copy_method(method, collect)
    except NotExpertMajor as error:
        raise Refusal(str(error), _OTHER_KERNEL) from None
    _check_leaks(method, tensors)
    return tensors


_OTHER_KERNEL = "choose another kernel with --moe-backend"


def _leak(place: str) -> str:
    return f"{place} is per-expert data that the cache cannot stand in for"


def _check_leaks(method: Any, tensors: ExpertTensors) -> None:
    """Walks a copy from which every replaceable tensor has been taken: what is still there and
    is indexed by expert would be read by row. Raises Refusal."""
    nothing = torch.empty(0, device="cpu")

    def take(tensor: torch.Tensor, place: str) -> torch.Tensor:
        return tensor if tensors.find(tensor) is None else nothing

    left = vars(copy_method(method, take))
    for place, tensor in reachable_tensors(left, "quant_method"):
        if tensors.find(tensor) is not None or _is_per_expert(tensor, tensors.experts):
            raise Refusal(_leak(place), _OTHER_KERNEL)
    for place, tensor in reachable_tensors(left, "quant_method", modules=True):
        if tensors.find(tensor) is not None:
            raise Refusal(_leak(place), _OTHER_KERNEL)


def _is_per_expert(tensor: torch.Tensor, experts: int) -> bool:
    """By any dimension; a tensor that repeats one value for every expert is not."""
    if experts not in tensor.shape or tensor.numel() == 0:
        return False
    return tensor.stride(tuple(tensor.shape).index(experts)) != 0


def load_library(layer: torch.nn.Module, settings: Settings) -> native.Library:
    """The kernel library for the device that the layer's kernels run on. Raises LibraryError."""
    device = next(iter(layer_tensors(layer).values())).device
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
            if not _on_host(candidate, library):
                raise Refusal("its weights are resident in device memory", f"to offload {OFFLOAD}")
            yield candidate
        except Refusal as refusal:
            report.refused.append((candidate.name, refusal))


def _on_host(candidate: Candidate, library: native.Library) -> bool:
    """True if most of the layer's bytes lie in host memory, asked of the driver: `.device` says
    "cuda" for host memory too, and vLLM's own flag can be stale. Raises Refusal for host
    memory that the GPU cannot read."""
    kinds = {e.label: library.pointer_kind(e.tensor.data_ptr()) for e in candidate.tensors}
    unreadable = [label for label, kind in kinds.items() if kind == native.HOST_UNREADABLE]
    if unreadable:
        raise Refusal(f"{unreadable[0]} lies in host memory that the GPU cannot read", _UVA)
    host = sum(e.nbytes for e in candidate.tensors if kinds[e.label] != native.DEVICE)
    return 2 * host > sum(e.nbytes for e in candidate.tensors)


def _arm_candidates(
    candidates: list[Candidate], plan: budget.Plan, allocator: Allocator, settings: Settings,
    report: Report,
) -> None:  # fmt: skip
    kind = _storage_kind(allocator, plan, settings, report)
    built: list[tuple[Candidate, Storage, int]] = []
    for candidate in candidates:
        try:
            built.append(_build(candidate, plan, kind, allocator))
        except Refusal as refusal:
            report.refused.append((candidate.name, refusal))
        except Exception as error:
            _refuse_unexpected(candidate.name, error, report)
    if built:
        report.snapshot = _snapshot(built, allocator, settings, report)
    for index, (candidate, storage, count) in enumerate(built):
        try:
            mirror = report.snapshot.mirror(index) if report.snapshot else None
            cache = ExpertCache(
                allocator.library, storage, candidate.experts, count, settings, mirror
            )
            armed = ArmedLayer(candidate.name, candidate.layer, candidate.tensors, cache)
            armed.snapshot = report.snapshot  # stays registered for as long as a kernel stores
            armed.install()
            report.armed.append(armed)
        except Exception as error:
            _refuse_unexpected(candidate.name, error, report)


def _snapshot(
    built: list[tuple[Candidate, Storage, int]], allocator: Allocator, settings: Settings,
    report: Report,
) -> telemetry.SnapshotFile | None:  # fmt: skip
    """The file that the kernels store their counters to; None where that cannot be had."""
    layers = [_describe(*entry) for entry in built]
    snapshot = telemetry.open_snapshot(settings.snapshot, report.model, _rank(), layers)
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
    candidate: Candidate, plan: budget.Plan, kind: str, allocator: Allocator
) -> tuple[Candidate, Storage, int]:
    """Spends the device memory of one layer. Raises Refusal."""
    slots = plan.slots[candidate.name]
    if slots >= candidate.experts:
        raise Refusal(
            f"{slots} slots hold all of its {candidate.experts} experts, so there is nothing to "
            "replace",
            "lower EXPERT_CACHE_SLOTS, or do not offload the experts",
        )
    if kind == "plain" and vllm_compat.compiles_on_cpu():
        raise Refusal(
            "a graph that is compiled on a CPU cannot choose between slots and scratch",
            "use EXPERT_CACHE_STORAGE=virtual, or serve with --enforce-eager",
        )
    if kind == "virtual":
        return candidate, allocator.virtual(candidate.tensors, slots), slots
    _check_plain(candidate.layer.quant_method)
    return candidate, allocator.plain(candidate.tensors, slots, plan.overflow), slots


def _check_plain(method: Any) -> None:
    experts = vllm_compat.fused_experts(vllm_compat.moe_kernel(method))
    remedy = "use EXPERT_CACHE_STORAGE=virtual or auto"
    if not any(base.__name__ in vllm_compat.TAKE_FEWER_EXPERTS for base in type(experts).__mro__):
        runner = method if experts is None else experts
        raise Refusal(
            f"{type(runner).__name__} is not known to run with fewer experts than the model "
            "has, as plain storage needs",
            remedy,
        )
    if vllm_compat.needs_tuned_config(experts) and not vllm_compat.can_keep_tuned_config(experts):
        raise Refusal(
            f"the tuned configuration of {type(experts).__name__} cannot be kept in this vLLM, "
            "and another one may change results",
            remedy,
        )


def _describe(candidate: Candidate, storage: Storage, slots: int) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "experts": candidate.experts,
        "slots": slots,
        "record_bytes": sum(entry.nbytes for entry in candidate.tensors),
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
    refusal = Refusal(
        f"unexpected {type(error).__name__}: {error}", "please report the traceback in the log"
    )
    report.refused.append((name, refusal))
