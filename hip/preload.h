// preload: lays every expert that is not resident in an overflow row, before it is known which of
// them the layer's next step routes to, and lists the copies.
//
// docs/kernels.md specifies it. For steps so wide that nearly every expert is routed: gather can
// then fetch them while the layer before still computes.
#pragma once
#include "faults.h"
#include "manage_tally.h"
#include "state.h"

namespace expert_cache {

struct PreloadShared {
  Flags resident;  // by expert
};

extern "C" __global__ void __launch_bounds__(kMaxExperts)
expert_cache_preload_kernel(ExpertCachePreload job) {
  EXPERT_CACHE_SHARED(PreloadShared, shared);
  const int t = threadIdx.x, experts = job.experts, slots = job.slots;
  const State state(job.state, experts);

  // Work-items beyond the last expert count as resident, so that they ask for no row.
  const int32_t row = t < experts ? state.row_of[t] : 0;
  const bool resident = t >= experts || (row >= 0 && row < slots);
  shared.resident[t] = resident;
  __syncthreads();

  int absent = 0, absent_before = 0;
  for (int group = 0; group < (int)blockDim.x / kGroup; group++) {
    const uint32_t mask = ~shared.resident.mask(group, 0);
    absent += popcount(mask);
    if (group < t / kGroup) absent_before += popcount(mask);
    if (group == t / kGroup) absent_before += count_before(mask, t);
  }
  // With an empty slot there are more absent experts than overflow rows: fetch as usual, which
  // fills the slots.
  const bool fits = absent == experts - slots;
  if (t == 0) *state.copy_count = *state.miss_count = fits ? absent : 0;
  if (t >= experts) return;
  if (!fits) {
    if (!resident && row >= 0) state.row_of[t] = -1;
    if (t >= slots) state.expert_at[t] = -1;
  } else if (!resident) {
    const int32_t overflow_row = slots + absent_before;
    state.row_of[t] = overflow_row;
    state.expert_at[overflow_row] = t;
    state.copies[absent_before] = {t, -1, overflow_row, -1};
  }
}

}  // namespace expert_cache
