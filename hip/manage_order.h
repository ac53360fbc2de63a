// The orders of docs/kernels.md as single integers: what comes first is smaller, no two are equal.
#pragma once
#include "faults.h"
#include "state.h"

namespace expert_cache {

constexpr int kMaxExperts = EXPERT_CACHE_MAX_EXPERTS;

// Victim order (step 5), from the top bit: routed (never a victim), occupied (empty slots come
// first), score (32 bits), 2^20 - 1 - age (20 bits), slot (10 bits).
constexpr uint64_t kRoutedBit = 1ull << 63;
constexpr uint64_t kOccupiedBit = 1ull << 62;
constexpr int kScoreShift = 30;
constexpr int kAgeShift = 10;
constexpr uint32_t kMaxAge = (1u << 20) - 1;
constexpr uint64_t kLastKey = ~0ull;
static_assert(kMaxExperts <= 1 << kAgeShift, "a slot number has ten bits");

// The part of an expert's victim key that does not depend on where it lies.
__device__ __forceinline__ uint64_t resident_key(uint32_t score, uint32_t age, bool routed) {
  const uint64_t youth = kMaxAge - (age < kMaxAge ? age : kMaxAge);
  return (routed && !has_fault(kVictimInUse) ? kRoutedBit : 0) | kOccupiedBit |
         (uint64_t)score << kScoreShift | youth << kAgeShift;
}

__device__ __forceinline__ uint64_t slot_part(int slot) {
  return has_fault(kWrongTieBreak) ? kMaxExperts - 1 - slot : slot;
}

// Admission order (step 6): higher score, then lower expert number.
__device__ __forceinline__ uint64_t miss_key(uint32_t score, int expert) {
  return (has_fault(kAdmissionByNumber) ? 0 : (uint64_t)~score << kScoreShift) | expert;
}

// Protected residents of slru have score 1: a range of keys, if the routed bit is left out.
constexpr uint64_t kFirstProtected = kOccupiedBit | 1ull << kScoreShift;

constexpr int kKeysAtOnce = 4;

__device__ __forceinline__ int padded(int keys) {
  return (keys + kKeysAtOnce - 1) / kKeysAtOnce * kKeysAtOnce;
}

// How many of the first padded(count) keys are smaller. Separate sums keep the additions of one
// round independent of each other.
__device__ __forceinline__ int count_smaller(const uint64_t *keys, int count, uint64_t key) {
  int smaller[kKeysAtOnce] = {};
  for (int i = 0; i < count; i += kKeysAtOnce) {
    EXPERT_CACHE_UNROLL
    for (int j = 0; j < kKeysAtOnce; j++) smaller[j] += keys[i + j] < key;
  }
  return (smaller[0] + smaller[1]) + (smaller[2] + smaller[3]);
}

}  // namespace expert_cache
