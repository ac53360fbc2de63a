"""One armed layer: what runs in front of vLLM's own kernel, which runs on a view of the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import compiled, policy, vllm_compat
from .discovery import ExpertTensors, Locations
from .entry import Entry
from .log import logger
from .native import (
    INT32,
    INT64,
    STATE_HEADER,
    UINT32,
    Gather,
    KernelError,
    Library,
    Manage,
    Preload,
)
from .preload import Preloader
from .settings import MAX_GATHER_WORKGROUPS, Settings
from .storage import Storage
from .view import KernelView

if TYPE_CHECKING:
    from .telemetry import SnapshotFile


ROWS, SCRATCH, SKIP = (policy.MODES[name] for name in ("rows", "scratch", "skip"))
# Hits that are copied to the scratch at the same time, beside the records from the host.
DEVICE_LANES = 8
ID_TYPES = {torch.int32: INT32, torch.int64: INT64, torch.uint32: UINT32}


class ExpertCache:
    """The device side of one layer: state, counters, tables, and the two launches."""

    def __init__(
        self, library: Library, storage: Storage, experts: int, slots: int, settings: Settings,
        mirror: np.ndarray | None = None, expert_map: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """mirror: int64 [8] in memory that the device can store to; manage keeps a copy of the
        counters there. expert_map: under expert parallelism, the layer's (`read_expert_map`)."""
        self.library = library
        self.storage = storage
        self.experts = experts
        self.slots = slots
        self.policy_name = settings.policy
        self._mirror = mirror
        self.expert_map = expert_map
        self.record: Callable[[torch.Tensor], None] | None = None  # told the ids of every step
        self.device = storage.placements[0].slots.device
        self.state = torch.zeros(STATE_HEADER + 8 * experts, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(8, dtype=torch.int64, device=self.device)
        self._tables = {ROWS: storage.table(scratch=False)}
        if storage.kind == "plain" and storage.has_scratch:
            self._tables[SCRATCH] = storage.table(scratch=True)
        self._manage = Manage(
            state=self.state.data_ptr(), counters=self.counters.data_ptr(),
            counters_mirror=None if mirror is None else mirror.ctypes.data,
            experts=experts, slots=slots, policy=policy.CODES[settings.policy],
            decay=policy.decay_parameter(settings.policy, settings.half_life, settings.decay),
        )  # fmt: skip
        self._maps_on_host = self._maps = None
        if expert_map is not None:
            expert_ids = policy.ids_of_experts(expert_map, experts)
            self._maps_on_host = torch.from_numpy(np.concatenate((expert_map, expert_ids)))
            self._maps = self._maps_on_host.to(self.device, copy=True)
            self._manage.expert_map = self._maps.data_ptr()
            self._manage.expert_ids = self._maps[len(expert_map) :].data_ptr()
            self._manage.map_length = len(expert_map)
        # Of all ranks together: ids name them too.
        self.experts_of_all_ranks = experts if expert_map is None else len(expert_map)
        self._gathers = {
            mode: Gather(
                tensors=table.data_ptr(), state=self.state.data_ptr(),
                tensor_count=len(storage.placements), experts=experts,
                chunks=settings.chunks, lanes=settings.lanes,
                device_lanes=_device_lanes(settings) if mode == SCRATCH else 0, threads=0,
            )
            for mode, table in self._tables.items()
        }  # fmt: skip
        self._preload = Preload(state=self.state.data_ptr(), experts=experts, slots=slots)
        self.forget()
        self.reset_counters()

    @property
    def row_of(self) -> torch.Tensor:
        """int32 [E], the row of every routed expert after `run`."""
        return self.state[STATE_HEADER : STATE_HEADER + self.experts]

    def forget(self) -> None:
        """Empties the cache: no expert is resident, so the next steps read the host copy. The
        counters go on."""
        self.state.zero_()
        self.state[STATE_HEADER : STATE_HEADER + 2 * self.experts] = -1

    def reset_counters(self) -> None:
        self.counters.zero_()
        if self._mirror is not None:
            self._mirror[:] = 0

    def restore(self) -> None:
        """Writes anew all that deep sleep may have wiped, in place, because captured graphs hold
        the addresses. The counters come from their mirror, or begin again where there is none."""
        for mode, table in self._tables.items():
            table.copy_(self.storage.table(scratch=mode == SCRATCH))
        if self._maps is not None:
            self._maps.copy_(self._maps_on_host)
        self.storage.fill_small()
        self.forget()
        if self._mirror is None:
            self.counters.zero_()
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step under way may still store to the mirror
        self.counters.copy_(torch.from_numpy(self._mirror.copy()))

    def calls(self) -> int:
        """Layer-steps that reached the cache, idle and read-through ones included. Read from
        the mirror where there is one: that waits for nothing."""
        counters = self.counters.tolist() if self._mirror is None else self._mirror
        return int(counters[0] + counters[6] + counters[7])

    def mode(self, ids: torch.Tensor) -> int:
        """How a step with these ids is served; decided from shapes alone, so that it captures."""
        count = ids.numel()
        if ids.dtype not in ID_TYPES or not 1 <= count <= policy.MAX_IDS:
            return SKIP
        if self.storage.kind == "virtual" or min(self.experts, count) <= self.slots:
            return ROWS
        return SCRATCH if SCRATCH in self._tables else SKIP

    def run(self, ids: torch.Tensor, mode: int, preloaded: bool = False) -> torch.Tensor:
        """Makes every routed expert readable and returns the ids the kernel must use.

        ids: `[tokens, top_k]` of int32, int64 or uint32, any strides. preloaded: `preload` has run
        for this step. Returns a contiguous tensor of the same shape and type: rows, or the ids
        themselves in mode SCRATCH. Under expert parallelism not the rows, but the ids that the
        layer's map takes to them. Raises KernelError if a launch fails.
        """
        rows = torch.empty(ids.shape, dtype=ids.dtype, device=ids.device)
        if ids.dim() != 2:
            ids = ids.reshape(1, -1)
        args = self._manage
        args.ids, args.row_ids, args.mode = ids.data_ptr(), rows.data_ptr(), mode
        args.preloaded = preloaded
        args.id_rows, args.id_columns = ids.shape
        args.id_row_stride, args.id_column_stride = ids.stride()
        args.id_type = ID_TYPES[ids.dtype]
        stream = self._stream()
        self.library.manage(args, stream)
        self.library.gather(self._gathers[mode], stream)
        if self.record is not None:
            self.record(ids)
        return rows

    def preload(self, stream: int) -> None:
        """Copies every expert without a slot to an overflow row, for a step still to come.
        Virtual storage only. Raises KernelError if a launch fails."""
        self.library.preload(self._preload, stream)
        self.library.gather(self._gathers[ROWS], stream)

    def note_read_through(self) -> None:
        """Counts a step that vLLM's own path serves."""
        self._manage.mode, self._manage.preloaded = SKIP, 0  # in which no field about ids is read
        self.library.manage(self._manage, self._stream())

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self.device).cuda_stream


def _device_lanes(settings: Settings) -> int:
    return min(DEVICE_LANES, MAX_GATHER_WORKGROUPS // settings.chunks - settings.lanes)


class ArmedLayer:
    """A layer whose quant method runs through the cache."""

    def __init__(
        self, model: str, name: str, layer: torch.nn.Module, tensors: ExpertTensors,
        cache: ExpertCache,
    ) -> None:  # fmt: skip
        self.name = name
        self.cache = cache
        self.installed = False
        self._snapshot: tuple[SnapshotFile, int] | None = None
        self.preloader: Preloader | None = None
        self._following: ArmedLayer | None = None
        self.record_bytes = tensors.record_bytes
        self.top_k = vllm_compat.top_k(layer)
        self._layer = layer
        self._entry = Entry.of(layer.quant_method) or Entry(layer.quant_method)
        self.key = compiled.register(model, name, cache)
        self.tensors = tensors
        self.rebind(tensors)

    def rebind(self, found: ExpertTensors) -> bool:
        """Builds the views from what the layer's quant method holds now, of which `found` is the
        discovery. False, and nothing is changed, if these are not the tensors of before."""
        counterparts = self.tensors.counterparts(found)
        if counterparts is None:
            return False
        placements = {id(p.source): p for p in self.cache.storage.placements}
        placed = {new: placements[id(old)] for new, old in counterparts.items()}
        views = {ROWS: {new: p.slots for new, p in placed.items()}}
        if self.cache.storage.has_scratch:
            views[SCRATCH] = {new: p.scratch for new, p in placed.items()}
        method = self._layer.quant_method
        plain = self.cache.storage.kind == "plain"
        self._views = {
            mode: KernelView(
                self._layer,
                method,
                found,
                rows,
                plain and mode == ROWS,
                self.cache.row_of if mode == ROWS else None,
            )
            for mode, rows in views.items()
        }
        self._locations = Locations(self._layer)
        return True

    def count_in(self, snapshot: SnapshotFile, index: int) -> None:
        """The file that the kernels store this layer's counters to, kept as long as they may."""
        self._snapshot = snapshot, index

    def install(self) -> None:
        """Puts the cache in front of this layer's `apply`."""
        self._set_installed(True)
        self._entry.add(self)  # last, so that an error before leaves nothing in vLLM's way

    def preload_with(self, preloader: Preloader, following: ArmedLayer | None) -> None:
        """From now on fetches the experts of `following`, the layer that runs next and whose
        overflow rows are other memory, while this one computes."""
        self.preloader, self._following = preloader, following

    @property
    def preloads(self) -> bool:
        """Whether wide steps of this layer fetch the next one's experts."""
        return self._following is not None

    def serves(self, layer: Any) -> bool:
        return self._layer is layer

    def remove(self) -> None:
        """Gives the layer back to vLLM's own path."""
        self._entry.remove(self)
        self._set_installed(False)

    def remove_in_child(self) -> None:
        """The same in a forked process, whose parent goes on: nothing is noted in its file."""
        self._snapshot = None
        if self.installed:
            self.remove()

    def _set_installed(self, installed: bool) -> None:
        self.installed = installed
        if self._snapshot is not None:
            snapshot, index = self._snapshot
            snapshot.note_given_back(index, not installed)

    def apply(self, kwargs: dict[str, Any]) -> Any:
        """One step. kwargs: vLLM's for `apply`, all of which are passed on by name; 0.21 has no
        `shared_experts`."""
        ids = kwargs["topk_ids"]
        if torch.compiler.is_compiling():
            return self._apply_traced(ids, kwargs)
        preloaded = self.preloader is not None and self.preloader.finish(self.cache)
        if self._locations.changed():
            return self._give_up("its tensors were replaced while serving", kwargs)
        mode = self.cache.mode(ids)
        try:
            if mode != SKIP:
                rows = self.cache.run(ids, mode, preloaded)
            elif ids.numel():
                self.cache.note_read_through()
                if self.cache.record is not None:
                    self.cache.record(ids)
        except KernelError as error:
            return self._give_up(f"a kernel could not be launched: {error}", kwargs)
        if mode == SKIP:
            return self._entry.original(**kwargs)
        if self._following is not None and self._following.installed:
            self.preloader.start(self._following.cache, ids)
        view = self._views[mode]
        kwargs["topk_ids"] = ids if view.takes_experts else rows
        return view.apply(**{**kwargs, "layer": view.layer})

    def _give_up(self, reason: str, kwargs: dict[str, Any]) -> Any:
        """vLLM's path over the host copy is always right: a layer that cannot be served goes back
        to it for good."""
        logger.error(
            "expert cache: %s is served by vLLM's own path from now on, because %s",
            self.name, reason,
        )  # fmt: skip
        self.remove()
        return self._entry.original(**kwargs)

    def _apply_traced(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Inside a graph: no branch on a shape, which would be baked in."""
        view = self._views[ROWS]
        kwargs["topk_ids"] = torch.ops.expert_cache.rows(ids, self.key)
        kwargs["layer"] = view.layer
        return view.apply(**kwargs)
