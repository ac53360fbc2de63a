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

// Ids first, first + T, ... of a workgroup of T; those past the end read as invalid.
__device__ __forceinline__ void load_ids(const ExpertCacheManage &job, uint32_t first,
                                         uint32_t total, Id (&ids)[kIdsAtOnce]) {
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    ids[i] = {~0u, 0};
    if (first + i * blockDim.x < total) ids[i] = load_id(job, first + i * blockDim.x);
  }
}

// Step 2. Returns how many are valid.
__device__ __forceinline__ int mark_routed(const ExpertCacheManage &job,
                                           const Id (&ids)[kIdsAtOnce], Flags &routed) {
  int valid = 0;
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    if (!is_valid(job, ids[i])) continue;
    store_flag(&routed[ids[i].low]);
    valid++;
  }
  return valid;
}

// Step 9. `row` is by expert.
__device__ __forceinline__ void store_row_ids(const ExpertCacheManage &job, uint32_t first,
                                              uint32_t total, const Id (&ids)[kIdsAtOnce],
                                              const int32_t *row) {
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kIdsAtOnce; i++) {
    const uint32_t at = first + i * blockDim.x;
    if (at >= total) return;
    Id id = ids[i];
    if (job.mode == EXPERT_CACHE_ROWS && is_valid(job, id)) id = {(uint32_t)row[id.low], 0};
    uint32_t *word = static_cast<uint32_t *>(job.row_ids) + (is_wide(job) ? 2 * at : at);
    word[0] = id.low;
    if (is_wide(job)) word[1] = id.high;
  }
}

}  // namespace expert_cache
