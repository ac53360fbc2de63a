"""Replacement policies: their names and codes, and the numpy reference of the `manage` kernel.

`docs/kernels.md` is the specification of both. `Reference` and the kernel are independent
implementations of it, compared field by field in `tests/kernels/`; `Reference` also replays
recorded routing to count misses.
"""

from __future__ import annotations

import numpy as np

# Values of ExpertCachePolicy, ExpertCacheMode and ExpertCacheCounter in hip/expert_cache.h.
CODES = {"lrfu": 0, "lru": 1, "lfu": 2, "fifo": 3, "slru": 4}
MODES = {"rows": 0, "scratch": 1, "skip": 2}
COUNTERS = (
    "steps",
    "hits",
    "misses",
    "overflow",
    "evictions",
    "ids",
    "idle",
    "read_through",
)

MAX_EXPERTS = 1024
MAX_IDS = 524288
MAX_AGE = 2**20 - 1
LRFU_GAIN = 65536  # what one routed step adds to a score: 1.0 in 16.16 fixed point
UINT32 = 2**32

DEFAULT_HALF_LIFE = 24.0
DEFAULT_HALVING_STEPS = 64


def decay_parameter(
    policy: str,
    half_life: float = DEFAULT_HALF_LIFE,
    halving_steps: int = DEFAULT_HALVING_STEPS,
) -> int:
    """The kernel's `decay` argument for a policy.

    `lrfu`: the multiplier, in 1/65536, that halves a score in `half_life` layer-steps.
    `lfu`: `halving_steps` itself, the layer-steps between two halvings of every count.
    Other policies do not decay: 0. Raises ValueError on a value outside what the kernel takes.
    """
    if policy not in CODES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(CODES)}")
    if policy == "lrfu":
        if not half_life > 0:
            raise ValueError(f"half-life is {half_life} steps; it must be above 0")
        multiplier = round(65536 * 0.5 ** (1 / half_life))
        if not 1 <= multiplier <= 65535:
            raise ValueError(f"half-life is {half_life} steps; it must be from 0.0625 to 90000")
        return multiplier
    if policy == "lfu":
        if not 1 <= halving_steps < UINT32:
            raise ValueError(f"decay is {halving_steps} steps; it must be from 1 to 4294967295")
        return halving_steps
    return 0


def ids_of_experts(expert_map: np.ndarray, experts: int) -> np.ndarray:
    """The kernel's `expert_ids` for an `expert_map`: [experts] int32, the id that the map takes
    to each expert. Raises ValueError unless every expert has exactly one."""
    ids = np.flatnonzero((expert_map >= 0) & (expert_map < experts))
    if not np.array_equal(np.sort(expert_map[ids]), np.arange(experts)):
        raise ValueError(
            f"an expert map takes {len(ids)} of {len(expert_map)} ids to {experts} experts; "
            "it must take one to each"
        )
    return ids[np.argsort(expert_map[ids])].astype(np.int32)


class Reference:
    """The state of one layer, and what `manage` does to it.

    Fields, as in `docs/kernels.md`: `step_number` (the field `step`, an int below 2**32),
    `copies` [n, 4] int32, `row_of` [experts] int32, `expert_at` [experts] int32, `score`
    [experts] uint32, `last` [experts] uint32; and `counters`, a dict by the names in COUNTERS.
    """

    def __init__(
        self, experts: int, slots: int, policy: str = "lrfu", decay: int | None = None,
        expert_map: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """expert_map: [ids] int32, the expert that each id names, or a number that is none.
        Every expert has one id. Without it an id is the number of its expert."""
        if not 2 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts is {experts}; it must be from 2 to {MAX_EXPERTS}")
        if not 1 <= slots < experts:
            raise ValueError(f"slots is {slots}; it must be from 1 to {experts - 1}")
        self.experts = experts
        self.slots = slots
        self.policy = policy
        self.decay = decay_parameter(policy) if decay is None else decay
        self.expert_map = np.arange(experts) if expert_map is None else np.asarray(expert_map)
        self.expert_ids = ids_of_experts(self.expert_map, experts)
        self._update_scores = {
            "lrfu": self._score_lrfu,
            "lru": self._score_lru,
            "lfu": self._score_lfu,
            "fifo": self._score_fifo,
            "slru": self._score_slru,
        }[policy]
        self.step_number = 0
        self.copies = np.empty((0, 4), np.int32)
        self.row_of = np.full(experts, -1, np.int32)
        self.expert_at = np.full(experts, -1, np.int32)
        self.score = np.zeros(experts, np.uint32)
        self.last = np.zeros(experts, np.uint32)
        self.counters = dict.fromkeys(COUNTERS, 0)

    def preload(self) -> None:
        """Lays every expert that is not resident in an overflow row; none while a slot is empty."""
        self._forget_overflow_rows()
        self.copies = np.empty((0, 4), np.int32)
        if (self.expert_at[: self.slots] >= 0).all():
            absent = np.flatnonzero(self.row_of < 0)
            self._lay_in_overflow_rows(absent)
            self.copies = self._copies_to_rows(absent)

    def step(
        self, ids: np.ndarray, mode: str = "rows", preloaded: bool = False
    ) -> np.ndarray | None:
        """One layer-step over routing ids of any shape and integer type.

        preloaded: `preload` ran just before, and its copies were made. Returns the row ids, of
        the shape and type of `ids`; None in mode `skip`, which writes none.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        if preloaded and mode != "rows":
            raise ValueError(f"a step in mode {mode!r} cannot be preloaded")
        laid = np.where(preloaded & (self.row_of >= self.slots), self.row_of, -1)
        self._forget_overflow_rows()
        self.copies = np.empty((0, 4), np.int32)
        if mode == "skip":
            self.counters["read_through"] += 1
            return None

        ids = np.asarray(ids)
        experts = np.full(ids.shape, -1)
        known = (ids >= 0) & (ids < len(self.expert_map))
        experts[known] = self.expert_map[ids[known]]
        valid = (experts >= 0) & (experts < self.experts)
        routed = np.zeros(self.experts, bool)
        routed[experts[valid]] = True
        if not routed.any():
            self.counters["idle"] += 1
            return ids.copy()

        self.step_number = (self.step_number + 1) % UINT32
        hit = routed & (self.row_of >= 0)
        misses = np.flatnonzero(routed & (self.row_of < 0))
        self._update_scores(routed, hit)

        available = self._available_slots(routed)
        admitted = self._best(misses, len(available))
        evictions = self._fill(admitted, available[: len(admitted)])
        refused = misses[self.row_of[misses] < 0]
        if mode == "rows":
            self._lay_in_overflow_rows(refused, laid[refused])
            self.copies = self._copies_to_rows(misses, laid[misses])
        else:
            self.copies = self._copies_to_scratch(misses, np.flatnonzero(hit))

        self._count(
            steps=1,
            hits=np.count_nonzero(hit),
            misses=len(misses),
            overflow=len(refused),
            evictions=evictions,
            ids=np.count_nonzero(valid),
        )
        row_ids = ids.copy()
        if mode == "rows":
            row_ids[valid] = self.expert_ids[self.row_of[experts[valid]]]
        return row_ids

    def _forget_overflow_rows(self) -> None:
        self.row_of[self.row_of >= self.slots] = -1
        self.expert_at[self.slots :] = -1

    def _count(self, **increments: int) -> None:
        for name, increment in increments.items():
            self.counters[name] += int(increment)

    # Scores: one function a policy, run before any eviction. `last` of a routed expert is the
    # present step; a score's meaning is the policy's own.

    def _score_lrfu(self, routed: np.ndarray, hit: np.ndarray) -> None:
        """LRFU (Lee et al., IEEE Trans. Computers 50(12), 2001) in 16.16 fixed point."""
        score = (self.score.astype(np.uint64) * np.uint64(self.decay)) >> np.uint64(16)
        score[routed] += np.uint64(LRFU_GAIN)
        self.score = score.astype(np.uint32)
        self.last[routed] = self.step_number

    def _score_lru(self, routed: np.ndarray, hit: np.ndarray) -> None:
        self.last[routed] = self.step_number

    def _score_lfu(self, routed: np.ndarray, hit: np.ndarray) -> None:
        if self.step_number % self.decay == 0:
            self.score >>= 1
        self.score[hit & (self.score < UINT32 - 1)] += 1
        self.last[routed] = self.step_number

    def _score_fifo(self, routed: np.ndarray, hit: np.ndarray) -> None:
        """A hit changes nothing: `last` is the step of the admission."""

    def _score_slru(self, routed: np.ndarray, hit: np.ndarray) -> None:
        """Segmented LRU: score 1 is the protected segment, at most 80 % of the slots."""
        self.score[hit] = 1
        self.last[hit] = self.step_number
        residents = self.expert_at[self._victim_order()]
        protected = residents[self.score[residents] == 1]
        demoted = protected[: max(0, len(protected) - 4 * self.slots // 5)]
        self.score[demoted] = 0
        self.last[demoted] = self.step_number

    def _victim_order(self) -> np.ndarray:
        """Occupied slots: lower score first, then greater age, then lower slot."""
        slots = np.flatnonzero(self.expert_at[: self.slots] >= 0)
        residents = self.expert_at[slots]
        age = (self.step_number - self.last[residents].astype(np.int64)) % UINT32
        age = np.minimum(age, MAX_AGE)
        return slots[np.lexsort((slots, -age, self.score[residents]))]

    def _available_slots(self, routed: np.ndarray) -> np.ndarray:
        """Empty slots by number, then slots of experts that are not routed, best victim first."""
        empty = np.flatnonzero(self.expert_at[: self.slots] < 0)
        occupied = self._victim_order()
        return np.concatenate((empty, occupied[~routed[self.expert_at[occupied]]]))

    def _best(self, misses: np.ndarray, room: int) -> np.ndarray:
        """The at most `room` misses of highest score (then lowest number), in expert order."""
        by_rank = np.lexsort((misses, -self.score[misses].astype(np.int64)))
        return np.sort(misses[by_rank[:room]])

    def _fill(self, admitted: np.ndarray, slots: np.ndarray) -> int:
        """Put the i-th admitted expert in the i-th slot; the number of experts evicted."""
        victims = self.expert_at[slots]
        victims = victims[victims >= 0]
        self.row_of[victims] = -1
        self.row_of[admitted] = slots
        self.expert_at[slots] = admitted
        if self.policy in ("lfu", "slru"):
            self.score[victims] = 0
            self.score[admitted] = 1 if self.policy == "lfu" else 0
        if self.policy in ("fifo", "slru"):
            self.last[admitted] = self.step_number
        return len(victims)

    def _lay_in_overflow_rows(self, experts: np.ndarray, laid: np.ndarray | int = -1) -> None:
        """laid: the rows in which they were preloaded, or -1."""
        rows = np.where(laid < 0, self.slots + np.arange(len(experts)), laid)
        self.row_of[experts] = rows
        self.expert_at[rows] = experts

    def _copies_to_rows(self, misses: np.ndarray, laid: np.ndarray | int = -1) -> np.ndarray:
        stays = self.row_of[misses] == laid
        copies = np.full((len(misses), 4), -1, np.int32)
        copies[:, 0] = misses
        copies[:, 1] = np.where(stays, -1, laid)
        copies[:, 2] = np.where(stays, -1, self.row_of[misses])
        return copies

    def _copies_to_scratch(self, misses: np.ndarray, hits: np.ndarray) -> np.ndarray:
        routed = np.concatenate((misses, hits))
        copies = np.full((len(routed), 4), -1, np.int32)
        copies[:, 0] = copies[:, 2] = routed
        copies[: len(misses), 3] = self.row_of[misses]
        copies[len(misses) :, 1] = self.row_of[hits]
        return copies
