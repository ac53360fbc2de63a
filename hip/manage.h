// manage: one workgroup turns a layer-step's routing ids into rows and a list of copies.
//
// docs/kernels.md specifies it; "step n" below is its numbering. Work-item t stands for expert t
// and for row t, and takes the ids t, t + T, ... of a workgroup of T >= E. Counting is done with
// bit masks and with ranks ("how many keys are smaller"), never with atomics or wave intrinsics,
// so that every device evolves the same cache. What is read from memory is read at the start, in
// one wait; the rest runs in shared memory.
#pragma once
#include "faults.h"
#include "manage_order.h"
#include "manage_tally.h"
#include "state.h"

namespace expert_cache {

constexpr int kIdsInRegisters = 4;

struct ManageShared {
  alignas(16) uint64_t expert_key[kMaxExperts];     // by expert: victim order but for the slot
  alignas(16) uint64_t slot_key[kMaxExperts];       // by slot: victim order
  alignas(16) uint64_t admission_key[kMaxExperts];  // by expert: admission order of misses
  int32_t slot_of_rank[kMaxExperts];                // available slots in victim order
  int32_t row[kMaxExperts];                         // by expert: its row in this step
  Flags routed, kinds, admitted;                    // by expert
  Flags evicted, demoted;                           // by expert
  Flags id_counts;                                  // by work-item: valid ids it has seen
  Tallies tallies;
  uint32_t admitted_mask[kGroups];
};

// What work-item t knows of expert t, and of row t (its occupant).
struct ManageItem {
  int32_t row = -1, occupant = -1;
  uint32_t score = 0, last = 0;
  bool routed = false, hit = false, miss = false;
};

// What a layer-step comes to (steps 5 to 7), the same for every work-item.
struct ManagePlan {
  int available, admitted, overflow, evictions;

  __device__ __forceinline__ ManagePlan(Tally tally, int slots) {
    const int hits = tally.routed() - tally.misses();
    const int empty = slots - tally.residents();
    available = slots - hits;
    admitted = tally.misses() < available ? tally.misses() : available;
    overflow = tally.misses() - admitted;
    evictions = admitted > empty ? admitted - empty : 0;
  }
};

// An id as it lies in memory. All types are read as words, without a branch on the type, so that
// nothing waits for one id before the next is asked for.
struct Id {
  uint32_t low, high;  // high: of an int64, else 0
};

__device__ __forceinline__ bool is_wide(const ExpertCacheManage &job) {
  return job.id_type == EXPERT_CACHE_INT64;
}

// Valid as a number of its own type; an int32 below zero is too large as a uint32.
__device__ __forceinline__ bool is_valid(const ExpertCacheManage &job, Id id) {
  return id.low < (uint32_t)job.experts && (id.high == 0 || has_fault(kTruncatedIds));
}

__device__ __forceinline__ Id load_id(const ExpertCacheManage &job, uint32_t i) {
  const uint32_t columns = (uint32_t)job.id_columns;
  const int64_t at = job.id_rows == 1
                         ? i * job.id_column_stride
                         : i / columns * job.id_row_stride + i % columns * job.id_column_stride;
  const uint32_t *word = static_cast<const uint32_t *>(job.ids) + (is_wide(job) ? 2 * at : at);
  Id id = {word[0], 0};
  if (is_wide(job)) id.high = word[1];
  return id;
}

// Step 9. `row` is by expert.
__device__ __forceinline__ void store_row_id(const ExpertCacheManage &job, const int32_t *row,
                                             uint32_t i, Id id) {
  if (job.mode == EXPERT_CACHE_ROWS && is_valid(job, id)) id = {(uint32_t)row[id.low], 0};
  uint32_t *word = static_cast<uint32_t *>(job.row_ids) + (is_wide(job) ? 2 * i : i);
  word[0] = id.low;
  if (is_wide(job)) word[1] = id.high;
}

// Step 4 for one expert, all but the demotions of slru.
__device__ __forceinline__ void update_score(const ExpertCacheManage &job, uint32_t step,
                                             ManageItem *item) {
  bool touched = item->routed;
  switch (job.policy) {
    case EXPERT_CACHE_LRFU:
      item->score = (uint32_t)((uint64_t)item->score * job.decay >> 16);
      if (item->routed) item->score += 65536;
      break;
    case EXPERT_CACHE_LFU:
      if (step % job.decay == 0) item->score >>= 1;
      if (item->hit && item->score != ~0u) item->score++;
      break;
    case EXPERT_CACHE_FIFO:
      touched = false;
      break;
    case EXPERT_CACHE_SLRU:
      if (item->hit) item->score = 1;
      touched = item->hit;
      break;
  }
  if (touched) item->last = step;
}

// Step 4, slru: the protected residents beyond 4/5 of the slots lose their protection. Returns
// the key of slot t after that. Two barriers.
__device__ __forceinline__ uint64_t demote_protected(int slots, int t, uint64_t key, int occupant,
                                                     ManageShared &shared) {
  const bool is_protected = occupant >= 0 && (uint32_t)(key >> kScoreShift) == 1;
  const uint64_t own = key & ~kRoutedBit;
  if (t < padded(slots)) shared.slot_key[t] = is_protected ? own : 0;
  __syncthreads();
  if (is_protected) {
    const int not_before = padded(slots) - count_smaller(shared.slot_key, slots, own);
    if (not_before > 4 * slots / 5) {
      shared.demoted[occupant] = 1;
      key = (key & kRoutedBit) | resident_key(0, 0, false) | slot_part(t);
    }
  }
  __syncthreads();
  return key;
}

// Step 5: the victim key of slot t.
__device__ __forceinline__ uint64_t victim_key(const ExpertCacheManage &job, int t, int occupant,
                                               ManageShared &shared) {
  uint64_t key = kLastKey;
  if (t < job.slots) key = slot_part(t) | (occupant < 0 ? 0 : shared.expert_key[occupant]);
  if (job.policy == EXPERT_CACHE_SLRU)
    key = demote_protected(job.slots, t, key, t < job.slots ? occupant : -1, shared);
  return key;
}

// Step 6, the slots' side: slot t finds its place among the available ones and gives up its
// occupant if a miss will take it.
__device__ __forceinline__ void offer_slot(int slots, int admitted, int t, uint64_t key,
                                           int occupant, ManageShared &shared) {
  if (t >= slots) return;
  const int rank = count_smaller(shared.slot_key, slots, key);
  if (rank >= admitted) return;
  shared.slot_of_rank[rank] = t;
  if (occupant >= 0) shared.evicted[occupant] = 1;
}

// Steps 6 and 7, the misses' side: the i-th admitted miss takes the i-th available slot, the k-th
// other miss overflow row k. `order` is this miss's place among the misses, `before` the groups
// before its own.
__device__ __forceinline__ void place_miss(const ExpertCacheManage &job, const ManagePlan &plan,
                                           uint32_t step, int t, int order, const State &state,
                                           ManageShared &shared, ManageItem *item) {
  bool admitted = true;
  int admitted_before = order;
  if (plan.overflow > 0) {
    admitted = shared.admitted[t];
    admitted_before = count_before(shared.admitted_mask[t / kGroup], t);
    for (int group = 0; group < t / kGroup; group++)
      admitted_before += popcount(shared.admitted_mask[group]);
  }
  if (admitted) {
    item->row = shared.slot_of_rank[admitted_before];
    if (job.policy == EXPERT_CACHE_LFU) item->score = 1;
    if (job.policy == EXPERT_CACHE_SLRU) item->score = 0;
    if (job.policy == EXPERT_CACHE_SLRU || job.policy == EXPERT_CACHE_FIFO) item->last = step;
  } else if (job.mode == EXPERT_CACHE_ROWS) {
    item->row = job.slots + order - admitted_before;
  }
  if (item->row < 0) return;
  state.expert_at[item->row] = t;
  shared.row[t] = item->row;
}

// Steps 5 to 7 for a layer-step with misses. Ends with a barrier: shared.row is then final.
__device__ __forceinline__ void place_misses(const ExpertCacheManage &job, const ManagePlan &plan,
                                             uint32_t step, int t, uint64_t slot_key, int order,
                                             const State &state, ManageShared &shared,
                                             ManageItem *item) {
  offer_slot(job.slots, plan.admitted, t, slot_key, item->occupant, shared);
  if (plan.overflow > 0) {
    shared.admitted[t] = item->miss && count_smaller(shared.admission_key, job.experts,
                                                     miss_key(item->score, t)) < plan.available;
    __syncthreads();
    if (t < (int)blockDim.x / kGroup) shared.admitted_mask[t] = shared.admitted.mask(t, 0);
  }
  __syncthreads();
  if (t < job.experts && shared.evicted[t]) {
    item->row = -1;
    if (job.policy == EXPERT_CACHE_LFU || job.policy == EXPERT_CACHE_SLRU) item->score = 0;
  }
  if (item->miss) place_miss(job, plan, step, t, order, state, shared, item);
  __syncthreads();
}

// Step 10 for counter t. Device memory is read and written, the mirror only written.
__device__ __forceinline__ void update_counter(const ExpertCacheManage &job, int t, int64_t value,
                                               Tally tally, const ManagePlan &plan) {
  if (t >= EXPERT_CACHE_COUNTERS) return;
  if (job.mode == EXPERT_CACHE_SKIP) {
    value += t == EXPERT_CACHE_READ_THROUGH;
  } else if (tally.routed() == 0) {
    value += t == EXPERT_CACHE_IDLE;
  } else {
    switch (t) {
      case EXPERT_CACHE_STEPS: value += 1; break;
      case EXPERT_CACHE_HITS: value += tally.routed() - tally.misses(); break;
      case EXPERT_CACHE_MISSES: value += tally.misses(); break;
      case EXPERT_CACHE_OVERFLOW: value += plan.overflow; break;
      case EXPERT_CACHE_EVICTIONS: value += plan.evictions; break;
      case EXPERT_CACHE_IDS: value += tally.ids(); break;
    }
  }
  job.counters[t] = value;
  if (job.counters_mirror) job.counters_mirror[t] = value;
}

// Step 8: the copy, if any, that expert t needs.
__device__ __forceinline__ void list_copy(const ExpertCacheManage &job, int t,
                                          const ManageItem &item, int order_routed,
                                          int order_miss, const State &state) {
  if (job.mode == EXPERT_CACHE_SCRATCH && item.routed)
    state.copies[order_routed] = {t, item.hit ? item.row : -1, t, item.miss ? item.row : -1};
  if (job.mode == EXPERT_CACHE_ROWS && item.miss)
    state.copies[order_miss] = {t, -1, item.row, -1};
}

// `job` as the launcher leaves it: ids that lie at one stride are one row, and mode skip has none.
extern "C" __global__ void __launch_bounds__(kMaxExperts)
expert_cache_manage_kernel(ExpertCacheManage job) {
  EXPERT_CACHE_SHARED(ManageShared, shared);
  const int t = threadIdx.x, experts = job.experts, slots = job.slots;
  const uint32_t workers = blockDim.x;
  const uint32_t id_total = (uint32_t)job.id_rows * (uint32_t)job.id_columns;
  const State state(job.state, experts);

  ManageItem item;
  if (t < experts) {
    item.row = state.row_of[t];
    item.occupant = state.expert_at[t];
    item.score = state.score[t];
    item.last = state.last[t];
  }
  const uint32_t step = *state.step + 1;
  const int64_t counter = t < EXPERT_CACHE_COUNTERS ? job.counters[t] : 0;
  Id ids[kIdsInRegisters];
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsInRegisters; i++) {
    ids[i] = {~0u, 0};
    if (t + i * workers < id_total) ids[i] = load_id(job, t + i * workers);
  }
  shared.routed[t] = shared.evicted[t] = shared.demoted[t] = 0;
  __syncthreads();

  // Step 2.
  int valid_ids = 0;
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsInRegisters; i++) {
    if (!is_valid(job, ids[i])) continue;
    store_flag(&shared.routed[ids[i].low]);
    valid_ids++;
  }
  for (uint32_t i = t + kIdsInRegisters * workers; i < id_total; i += workers) {
    const Id id = load_id(job, i);
    if (!is_valid(job, id)) continue;
    store_flag(&shared.routed[id.low]);
    valid_ids++;
  }
  shared.id_counts[t] = valid_ids;
  __syncthreads();

  // Steps 1, 3 and 4. Nothing of it is kept if no expert turns out to be routed.
  const ManageItem before = item;
  if (item.row >= slots && !has_fault(kStaleOverflowRow)) item.row = -1;
  item.routed = t < experts && shared.routed[t];
  item.hit = item.routed && item.row >= 0;
  item.miss = item.routed && item.row < 0;
  const bool resident = item.row >= 0;
  update_score(job, step, &item);
  shared.kinds[t] = item.routed << kIsRouted | item.miss << kIsMiss | resident << kIsResident;
  shared.expert_key[t] = resident_key(item.score, step - item.last, item.routed);
  shared.admission_key[t] = item.miss ? miss_key(item.score, t) : kLastKey;
  shared.row[t] = item.row;
  if (!has_fault(kMissingBarrier)) __syncthreads();

  const uint64_t slot_key = victim_key(job, t, item.occupant, shared);
  if (t < padded(slots)) shared.slot_key[t] = slot_key;
  // The last work-items count: the first ones have had a slot's key to compute.
  const int groups = workers / kGroup, own_group = workers - 1 - t;
  if (own_group < groups) shared.tallies.count(own_group, shared.kinds, shared.id_counts);
  __syncthreads();

  Tally tally, groups_before;
  shared.tallies.add_up(groups, t, &tally, &groups_before);
  const ManagePlan plan(tally, slots);
  const bool idle = tally.routed() == 0;
  const int order_routed = groups_before.routed() + count_before(shared.tallies.routed[t / kGroup], t);
  const int order_miss = groups_before.misses() + count_before(shared.tallies.misses[t / kGroup], t);
  if (shared.demoted[t]) {
    item.score = 0;
    item.last = step;
  }
  if (tally.misses() > 0)
    place_misses(job, plan, step, t, slot_key, order_miss, state, shared, &item);

  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsInRegisters; i++)
    if (t + i * workers < id_total) store_row_id(job, shared.row, t + i * workers, ids[i]);
  for (uint32_t i = t + kIdsInRegisters * workers; i < id_total; i += workers)
    store_row_id(job, shared.row, i, load_id(job, i));

  const int overflow_rows = job.mode == EXPERT_CACHE_ROWS ? plan.overflow : 0;
  if (t < experts) {
    if (item.row != before.row) state.row_of[t] = item.row;
    if (t >= slots + overflow_rows && item.occupant >= 0) state.expert_at[t] = -1;
    if (!idle) {
      state.score[t] = item.score;
      state.last[t] = item.last;
      list_copy(job, t, item, order_routed, order_miss, state);
    }
  }
  if (t == 0) {
    *state.copy_count = job.mode == EXPERT_CACHE_SCRATCH ? tally.routed() : tally.misses();
    if (!idle) *state.step = step;
  }
  update_counter(job, t, counter, tally, plan);
}

}  // namespace expert_cache
