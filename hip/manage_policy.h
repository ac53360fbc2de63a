// The rules of the policies for one expert (docs/kernels.md, steps 4 and 6).
#pragma once
#include "state.h"

namespace expert_cache {

// What work-item t knows of expert t, and of row t (its occupant).
struct ManageItem {
  int32_t row = -1, occupant = -1;
  int32_t preloaded = -1;  // the overflow row that already holds expert t's record
  uint32_t score = 0, last = 0;
  bool routed = false, hit = false, miss = false;
};

// Step 4, all but the demotions of slru.
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

__device__ __forceinline__ void on_demoted(uint32_t step, ManageItem *item) {
  item->score = 0;
  item->last = step;
}

__device__ __forceinline__ void on_evicted(const ExpertCacheManage &job, ManageItem *item) {
  item->row = -1;
  if (job.policy == EXPERT_CACHE_LFU || job.policy == EXPERT_CACHE_SLRU) item->score = 0;
}

__device__ __forceinline__ void on_admitted(const ExpertCacheManage &job, uint32_t step, int slot,
                                            ManageItem *item) {
  item->row = slot;
  if (job.policy == EXPERT_CACHE_LFU) item->score = 1;
  if (job.policy == EXPERT_CACHE_SLRU) item->score = 0;
  if (job.policy == EXPERT_CACHE_SLRU || job.policy == EXPERT_CACHE_FIFO) item->last = step;
}

}  // namespace expert_cache
