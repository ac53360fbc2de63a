// Where the fields of a layer's state lie (expert_cache.h gives the layout in words).
#pragma once
#include "expert_cache.h"
#include "platform.h"

namespace expert_cache {

// What gather does for one expert. -1: the host copy for from_slot, nowhere for to_slot, nothing at
// all for to_row.
struct alignas(16) Copy {
  int32_t expert, from_slot, to_row, to_slot;
};

struct State {
  uint32_t *step;
  int32_t *copy_count;
  int32_t *miss_count;  // of the copies, those of misses, which come first
  int32_t *row_of;
  int32_t *expert_at;
  uint32_t *score;
  uint32_t *last;
  Copy *copies;

  __device__ __forceinline__ State(int32_t *words, int experts)
      : step(reinterpret_cast<uint32_t *>(words)),
        copy_count(words + 1),
        miss_count(words + 2),
        row_of(words + EXPERT_CACHE_STATE_HEADER),
        expert_at(row_of + experts),
        score(reinterpret_cast<uint32_t *>(expert_at + experts)),
        last(score + experts),
        copies(reinterpret_cast<Copy *>(last + experts)) {}
};

}  // namespace expert_cache
