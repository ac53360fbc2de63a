// manage: one workgroup turns a layer-step's routing ids into rows and a list of copies.
//
// docs/kernels.md specifies it; "step n" below is its numbering. Work-item t stands for expert t
// and for row t, and takes the ids t, t + T, ... of a workgroup of T >= E. Counting is done with
// bit masks and with ranks ("how many keys are smaller"), never with atomics or wave intrinsics,
// so that every device evolves the same cache. What is read from memory is read at the start, in
// one wait; the rest runs in shared memory.
#pragma once
#include "faults.h"
#include "manage_ids.h"
#include "manage_order.h"
#include "manage_policy.h"
#include "manage_tally.h"
#include "state.h"

namespace expert_cache {

struct ManageShared {
  alignas(16) uint64_t expert_key[kMaxExperts];     // by expert: victim order but for the slot
  alignas(16) uint64_t slot_key[kMaxExperts];       // by slot: victim order
  alignas(16) uint64_t admission_key[kMaxExperts];  // by miss: admission order
  int32_t slot_of_rank[kMaxExperts];                // available slots in victim order
  int32_t row[kMaxExperts];                         // by expert: its row in this step
  Flags routed, kinds, admitted;                    // by expert
  Flags evicted, demoted;                           // by expert
  Flags id_counts, more_id_counts;                  // by work-item: valid ids it has seen, 7 bits each
  Tallies tallies;
  uint32_t admitted_mask[kGroups];
};

// What a layer-step comes to (steps 5 to 7), the same for every work-item.
struct ManagePlan {
  int admitted, overflow, evictions;

  __device__ __forceinline__ ManagePlan(Tally tally, int slots) {
    const int empty = slots - tally.residents();
    const int available = slots - tally.hits();
    admitted = tally.misses() < available ? tally.misses() : available;
    overflow = tally.misses() - admitted;
    evictions = admitted > empty ? admitted - empty : 0;
  }
};

// Step 4, slru: the `surplus` protected residents that come first in victim order lose their
// protection. Corrects slot t's key, here and in shared memory. Two barriers.
__device__ __forceinline__ void demote_protected(int slots, int surplus, int t, int occupant,
                                                 ManageShared &shared, uint64_t *key) {
  const uint64_t own = (*key & ~kRoutedBit) - kFirstProtected;
  bool demoted = t < slots && occupant >= 0 && own < 1ull << kScoreShift;
  if (demoted) {
    int rank = 0;
    for (int slot = 0; slot < slots; slot++)
      rank += (shared.slot_key[slot] & ~kRoutedBit) - kFirstProtected < own;
    demoted = rank < surplus;
  }
  __syncthreads();
  if (demoted) {
    *key = (*key & kRoutedBit) | resident_key(0, 0, false) | slot_part(t);
    shared.slot_key[t] = *key;
    shared.demoted[occupant] = 1;
  }
  __syncthreads();
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

// Step 6 where slots run short: which misses get one, as a mask. `order` is this miss's place among
// the misses. Ends with a barrier.
__device__ __forceinline__ void admit(const ManagePlan &plan, int t, int order,
                                      const ManageItem &item, ManageShared &shared) {
  const int misses = plan.admitted + plan.overflow;
  const uint64_t key = miss_key(item.score, t);
  if (item.miss) shared.admission_key[order] = key;
  if (t >= misses && t < padded(misses)) shared.admission_key[t] = kLastKey;
  __syncthreads();
  shared.admitted[t] =
      item.miss && count_smaller(shared.admission_key, misses, key) < plan.admitted;
  __syncthreads();
  if (t < (int)blockDim.x / kGroup) shared.admitted_mask[t] = shared.admitted.mask(t, 0);
  __syncthreads();
}

// Steps 6 and 7, the misses' side: the i-th admitted miss takes the i-th available slot, the k-th
// other miss overflow row k, or the one in which it was preloaded: all misses of a step are, or none.
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
    on_admitted(job, step, shared.slot_of_rank[admitted_before], item);
  } else if (job.mode == EXPERT_CACHE_ROWS) {
    item->row = item->preloaded >= 0 ? item->preloaded : job.slots + order - admitted_before;
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
  if (plan.overflow > 0)
    admit(plan, t, order, *item, shared);
  else
    __syncthreads();
  if (shared.evicted[t]) on_evicted(job, item);
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
      case EXPERT_CACHE_HITS: value += tally.hits(); break;
      case EXPERT_CACHE_MISSES: value += tally.misses(); break;
      case EXPERT_CACHE_OVERFLOW: value += plan.overflow; break;
      case EXPERT_CACHE_EVICTIONS: value += plan.evictions; break;
      case EXPERT_CACHE_IDS: value += tally.ids(); break;
    }
  }
  job.counters[t] = value;
  if (job.counters_mirror) job.counters_mirror[t] = value;
}

// Step 8: the copy, if any, that expert t needs. Those of misses come first.
__device__ __forceinline__ void list_copy(const ExpertCacheManage &job, int t,
                                          const ManageItem &item, int order_hit, int misses,
                                          int order_miss, const State &state) {
  if (job.mode == EXPERT_CACHE_SCRATCH && item.miss) state.copies[order_miss] = {t, -1, t, item.row};
  if (job.mode == EXPERT_CACHE_SCRATCH && item.hit)
    state.copies[misses + order_hit] = {t, item.row, t, -1};
  if (job.mode == EXPERT_CACHE_ROWS && item.miss) {
    const bool there = item.preloaded >= 0 && item.preloaded == item.row;
    state.copies[order_miss] = {t, there ? -1 : item.preloaded, there ? -1 : item.row, -1};
  }
}

__device__ __forceinline__ ManageItem load_item(const State &state, int experts, int t) {
  ManageItem item;
  if (t >= experts) return item;
  item.row = state.row_of[t];
  item.occupant = state.expert_at[t];
  item.score = state.score[t];
  item.last = state.last[t];
  return item;
}

// Steps 1, 3 and 4 for expert t; publishes what others need to know of it.
__device__ __forceinline__ void classify(const ExpertCacheManage &job, uint32_t step, int t,
                                         ManageShared &shared, ManageItem *item) {
  if (item->row >= job.slots && !has_fault(kStaleOverflowRow)) {
    if (job.preloaded && !has_fault(kPreloadedForgotten)) item->preloaded = item->row;
    item->row = -1;
  }
  const bool resident = item->row >= 0;
  item->routed = t < job.experts && shared.routed[t];
  item->hit = item->routed && resident;
  item->miss = item->routed && !resident;
  update_score(job, step, item);
  const bool is_protected = resident && job.policy == EXPERT_CACHE_SLRU && item->score == 1;
  shared.kinds[t] = item->routed << kIsRouted | item->miss << kIsMiss | resident << kIsResident |
                    is_protected << kIsProtected;
  shared.expert_key[t] = resident_key(item->score, step - item->last, item->routed);
  shared.row[t] = item->row;
}

// The new state of expert t and row t, as far as placing the misses has not written it.
__device__ __forceinline__ void store_item(const ExpertCacheManage &job, const ManagePlan &plan,
                                           bool idle, int t, int32_t row_before,
                                           const ManageItem &item, const State &state,
                                           const ManageShared &shared) {
  if (t >= job.experts) return;
  if (item.row != row_before) state.row_of[t] = item.row;
  if (t >= job.slots && item.occupant >= 0) {
    const int overflow_rows = job.mode == EXPERT_CACHE_ROWS ? plan.overflow : 0;
    const bool taken = job.preloaded ? shared.row[item.occupant] == t
                                     : t < job.slots + overflow_rows;
    if (!taken) state.expert_at[t] = -1;
  }
  if (idle) return;
  state.score[t] = item.score;
  state.last[t] = item.last;
}

// `job` as the launcher leaves it: ids that lie at one stride are one row, and mode skip has none.
__device__ __forceinline__ void manage(const ExpertCacheManage &job) {
  EXPERT_CACHE_SHARED(ManageShared, shared);
  const int t = threadIdx.x, slots = job.slots;
  const uint32_t ids_a_round = kIdsAtOnce * blockDim.x;
  const uint32_t id_total = (uint32_t)job.id_rows * (uint32_t)job.id_columns;
  const State state(job.state, job.experts);

  ManageItem item = load_item(state, job.experts, t);
  const uint32_t step = *state.step + 1;
  const int64_t counter = t < EXPERT_CACHE_COUNTERS ? job.counters[t] : 0;
  Id ids[kIdsAtOnce];
  load_ids(job, t, id_total, ids);
  shared.routed[t] = shared.evicted[t] = shared.demoted[t] = 0;
  __syncthreads();

  int valid_ids = mark_routed(job, ids, shared.routed);
  for (uint32_t i = t + ids_a_round; i < id_total; i += ids_a_round) {
    Id more[kIdsAtOnce];
    load_ids(job, i, id_total, more);
    valid_ids += mark_routed(job, more, shared.routed);
  }
  // A count has 7 bits, which is enough in all but very wide steps.
  const bool many_ids = id_total > 127 * blockDim.x;
  shared.id_counts[t] = valid_ids & 127;
  if (many_ids) shared.more_id_counts[t] = valid_ids >> 7;
  __syncthreads();

  const int32_t row_before = item.row;
  classify(job, step, t, shared, &item);
  if (!has_fault(kMissingBarrier)) __syncthreads();

  uint64_t slot_key = kLastKey;
  if (t < slots)
    slot_key = slot_part(t) | (item.occupant < 0 ? 0 : shared.expert_key[item.occupant]);
  if (t < padded(slots)) shared.slot_key[t] = slot_key;
  // The last work-items count: the first ones have had a slot's key to compute.
  const int groups = blockDim.x / kGroup, counted = blockDim.x - 1 - t;
  if (counted < groups) {
    uint32_t ids_seen = shared.id_counts.sum(counted);
    if (many_ids) ids_seen += shared.more_id_counts.sum(counted) << 7;
    shared.tallies.count(counted, shared.kinds, ids_seen);
  }
  __syncthreads();

  Tally tally, before;
  shared.tallies.add_up(groups, t, &tally, &before);
  const ManagePlan plan(tally, slots);
  const bool idle = tally.routed() == 0;  // then nothing of step 4 is kept
  const int order_miss = before.misses() + count_before(shared.tallies.misses[t / kGroup], t);
  const int order_hit =
      before.routed() + count_before(shared.tallies.routed[t / kGroup], t) - order_miss;
  const int surplus = tally.protected_residents() - 4 * slots / 5;
  if (job.policy == EXPERT_CACHE_SLRU && surplus > 0) {
    demote_protected(slots, surplus, t, item.occupant, shared, &slot_key);
    if (shared.demoted[t]) on_demoted(step, &item);
  }
  if (tally.misses() > 0)
    place_misses(job, plan, step, t, slot_key, order_miss, state, shared, &item);

  store_row_ids(job, t, id_total, ids, shared.row);
  for (uint32_t i = t + ids_a_round; i < id_total; i += ids_a_round) {
    Id more[kIdsAtOnce];
    load_ids(job, i, id_total, more);
    store_row_ids(job, i, id_total, more, shared.row);
  }
  store_item(job, plan, idle, t, row_before, item, state, shared);
  list_copy(job, t, item, order_hit, tally.misses(), order_miss, state);
  if (t == 0) {
    *state.copy_count = job.mode == EXPERT_CACHE_SCRATCH ? tally.routed() : tally.misses();
    *state.miss_count = tally.misses();
    if (!idle) *state.step = step;
  }
  update_counter(job, t, counter, tally, plan);
}

extern "C" __global__ void __launch_bounds__(kMaxExperts)
expert_cache_manage_general_kernel(ExpertCacheManage job) {
  manage(job);
}

// Without expert map and preload, as almost every step is: a kernel of its own has more predicate
// registers left for the counting loops.
extern "C" __global__ void __launch_bounds__(kMaxExperts)
expert_cache_manage_kernel(ExpertCacheManage job) {
  job.expert_map = nullptr;
  job.preloaded = 0;
  manage(job);
}

}  // namespace expert_cache
