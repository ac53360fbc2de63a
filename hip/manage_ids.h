// Routing ids: read, marked and rewritten a few at a time by every work-item.
#pragma once
#include "faults.h"
#include "manage_tally.h"
#include "state.h"

namespace expert_cache {

constexpr int kIdsAtOnce = 4;

// An id as it lies in memory. All types are read as words, without a branch on the type, so that
// nothing waits for one id before the next is asked for.
struct Id {
  uint32_t low, high;  // high: of an int64, else 0
};

__device__ __forceinline__ bool is_wide(const ExpertCacheManage &job) {
  return job.id_type == EXPERT_CACHE_INT64;
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

// Ids first, first + T, ... of a workgroup of T; those past the end read as invalid.
__device__ __forceinline__ void load_ids(const ExpertCacheManage &job, uint32_t first,
                                         uint32_t total, Id (&ids)[kIdsAtOnce]) {
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    ids[i] = {~0u, 0};
    if (first + i * blockDim.x < total) ids[i] = load_id(job, first + i * blockDim.x);
  }
}

// Below a count, as a number of its own type; an int32 below zero is too large as a uint32.
__device__ __forceinline__ bool is_below(int32_t count, Id id) {
  return id.low < (uint32_t)count && (id.high == 0 || has_fault(kTruncatedIds));
}

// The expert that an expert map has for each id, all asked for together; E or more where it has
// none.
__device__ __forceinline__ void look_up(const ExpertCacheManage &job, const Id (&ids)[kIdsAtOnce],
                                        Id (&experts)[kIdsAtOnce]) {
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    const bool known = is_below(job.map_length, ids[i]);
    experts[i] = {known ? (uint32_t)job.expert_map[ids[i].low] : ~0u, 0};
  }
}

__device__ __forceinline__ int mark_experts(const ExpertCacheManage &job,
                                            const Id (&experts)[kIdsAtOnce], Flags &routed) {
  int valid = 0;
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    if (!is_below(job.experts, experts[i])) continue;
    store_flag(&routed[experts[i].low]);
    valid++;
  }
  return valid;
}

// Step 2. Returns how many are valid. Without a map nothing is copied: that would wait for the ids.
__device__ __forceinline__ int mark_routed(const ExpertCacheManage &job,
                                           const Id (&ids)[kIdsAtOnce], Flags &routed) {
  if (!job.expert_map) return mark_experts(job, ids, routed);
  Id experts[kIdsAtOnce];
  look_up(job, ids, experts);
  return mark_experts(job, experts, routed);
}

__device__ __forceinline__ void store_rows(const ExpertCacheManage &job, uint32_t first,
                                           uint32_t total, const Id (&ids)[kIdsAtOnce],
                                           const Id (&experts)[kIdsAtOnce], const int32_t *row) {
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    const uint32_t at = first + i * blockDim.x;
    if (at >= total) return;
    Id id = ids[i];
    if (job.mode == EXPERT_CACHE_ROWS && is_below(job.experts, experts[i])) {
      id = {(uint32_t)row[experts[i].low], 0};
      if (job.expert_map && !has_fault(kRowAsId)) id.low = (uint32_t)job.expert_ids[id.low];
    }
    uint32_t *word = static_cast<uint32_t *>(job.row_ids) + (is_wide(job) ? 2 * at : at);
    word[0] = id.low;
    if (is_wide(job)) word[1] = id.high;
  }
}

// Step 9. `row` is by expert.
__device__ __forceinline__ void store_row_ids(const ExpertCacheManage &job, uint32_t first,
                                              uint32_t total, const Id (&ids)[kIdsAtOnce],
                                              const int32_t *row) {
  if (!job.expert_map) return store_rows(job, first, total, ids, ids, row);
  Id experts[kIdsAtOnce];
  look_up(job, ids, experts);
  store_rows(job, first, total, ids, experts, row);
}

}  // namespace expert_cache
