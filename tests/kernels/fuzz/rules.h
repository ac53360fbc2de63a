// Which calls hip/expert_cache.h allows, as a set of the errors that a call deserves: bit n stands
// for code -n. A call of the empty set must succeed, any other must return one of its set.
#pragma once
#include "../../../hip/expert_cache.h"

typedef uint32_t Errors;

inline Errors if_not(bool allowed, int code) { return allowed ? 0 : 1u << -code; }

inline bool in(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

inline bool aligned(const void *pointer, size_t to) {
  return pointer && reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

// Elements from the first id to the last.
inline __int128 id_span(const ExpertCacheManage &a) {
  return static_cast<__int128>(a.id_rows - 1) * a.id_row_stride +
         static_cast<__int128>(a.id_columns - 1) * a.id_column_stride;
}

inline Errors id_errors(const ExpertCacheManage &a) {
  Errors errors = if_not(in(a.id_type, EXPERT_CACHE_INT32, EXPERT_CACHE_UINT32),
                         EXPERT_CACHE_BAD_ID_TYPE);
  const int64_t most = EXPERT_CACHE_MAX_IDS;
  const bool counted = in(a.id_rows, 1, most) && in(a.id_columns, 1, most) &&
                       a.id_rows * a.id_columns <= most && a.id_row_stride >= 0 &&
                       a.id_column_stride >= 0;
  errors |= if_not(counted, EXPERT_CACHE_BAD_IDS);
  const size_t size = a.id_type == EXPERT_CACHE_INT64 ? 8 : 4;
  errors |= if_not(aligned(a.ids, size) && aligned(a.row_ids, size), EXPERT_CACHE_BAD_POINTER);
  if (!counted) return errors;
  if (id_span(a) > EXPERT_CACHE_MAX_ID_SPAN) return errors | 1u << -EXPERT_CACHE_BAD_IDS;
  const uintptr_t extent = (static_cast<uintptr_t>(id_span(a)) + 1) * size;
  const uintptr_t ids = reinterpret_cast<uintptr_t>(a.ids);
  const uintptr_t rows = reinterpret_cast<uintptr_t>(a.row_ids);
  const bool apart = ids + extent <= rows || rows + a.id_rows * a.id_columns * size <= ids;
  return errors | if_not(apart, EXPERT_CACHE_BAD_POINTER);
}

inline Errors map_errors(const ExpertCacheManage &a) {
  if (!a.expert_map) return if_not(!a.expert_ids && !a.map_length, EXPERT_CACHE_BAD_MAP);
  return if_not(aligned(a.expert_map, 4) && aligned(a.expert_ids, 4), EXPERT_CACHE_BAD_POINTER) |
         if_not(a.map_length >= a.experts, EXPERT_CACHE_BAD_MAP);
}

inline Errors errors_of(const ExpertCacheManage &a) {
  Errors errors = if_not(in(a.experts, 2, EXPERT_CACHE_MAX_EXPERTS), EXPERT_CACHE_BAD_EXPERTS);
  errors |= if_not(in(a.slots, 1, int64_t{a.experts} - 1), EXPERT_CACHE_BAD_SLOTS);
  errors |= if_not(in(a.mode, EXPERT_CACHE_ROWS, EXPERT_CACHE_SKIP), EXPERT_CACHE_BAD_MODE);
  errors |= if_not(in(a.preloaded, 0, a.mode == EXPERT_CACHE_ROWS), EXPERT_CACHE_BAD_MODE);
  errors |= if_not(in(a.policy, EXPERT_CACHE_LRFU, EXPERT_CACHE_SLRU), EXPERT_CACHE_BAD_POLICY);
  const bool decays = a.policy == EXPERT_CACHE_LRFU || a.policy == EXPERT_CACHE_LFU;
  const int64_t most = !decays ? 0 : a.policy == EXPERT_CACHE_LRFU ? 65535 : UINT32_MAX;
  errors |= if_not(in(a.decay, decays, most), EXPERT_CACHE_BAD_DECAY);
  const bool mirrored = !a.counters_mirror || aligned(a.counters_mirror, 8);
  errors |= if_not(aligned(a.state, 16) && aligned(a.counters, 8) && mirrored,
                   EXPERT_CACHE_BAD_POINTER);
  errors |= map_errors(a);
  return a.mode == EXPERT_CACHE_SKIP ? errors : errors | id_errors(a);
}

inline Errors errors_of(const ExpertCacheGather &a) {
  Errors errors = if_not(aligned(a.tensors, 8) && aligned(a.state, 16), EXPERT_CACHE_BAD_POINTER);
  errors |= if_not(in(a.tensor_count, 1, EXPERT_CACHE_MAX_TENSORS), EXPERT_CACHE_BAD_TENSORS);
  errors |= if_not(in(a.experts, 2, EXPERT_CACHE_MAX_EXPERTS), EXPERT_CACHE_BAD_EXPERTS);
  const bool threads = a.threads == 0 || a.threads == 64 || a.threads == 128 ||
                       a.threads == 256 || a.threads == 512 || a.threads == 1024;
  const bool grid = in(a.chunks, 1, 4096) && in(a.lanes, 1, 4096) &&
                    in(a.device_lanes, 0, 4096) &&
                    a.chunks * (int64_t{a.lanes} + a.device_lanes) <= 65535;
  return errors | if_not(threads && grid, EXPERT_CACHE_BAD_GRID);
}

inline Errors errors_of(const ExpertCachePreload &a) {
  return if_not(aligned(a.state, 16), EXPERT_CACHE_BAD_POINTER) |
         if_not(in(a.experts, 2, EXPERT_CACHE_MAX_EXPERTS), EXPERT_CACHE_BAD_EXPERTS) |
         if_not(in(a.slots, 1, int64_t{a.experts} - 1), EXPERT_CACHE_BAD_SLOTS);
}
