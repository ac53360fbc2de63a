// Counting over a workgroup without atomics or wave intrinsics: every work-item writes a byte, one
// work-item per 32 packs them into bit masks and counts, and everybody adds up the counts.
#pragma once
#include "faults.h"
#include "manage_order.h"
#include "state.h"

namespace expert_cache {

constexpr int kGroup = 32;  // work-items per mask
constexpr int kGroups = kMaxExperts / kGroup;

// One byte per work-item, readable eight at a time.
struct alignas(16) Flags {
  uint64_t word[kMaxExperts / 8];

  __device__ __forceinline__ uint8_t &operator[](int i) {
    return reinterpret_cast<uint8_t *>(word)[i];
  }

  // Bit i of the result is bit `bit` of the group's byte i.
  __device__ __forceinline__ uint32_t mask(int group, int bit) const {
    uint32_t mask = 0;
    EXPERT_CACHE_UNROLL
    for (int i = 0; i < kGroup / 8; i++) {
      const uint64_t ones = word[group * (kGroup / 8) + i] >> bit & 0x0101010101010101ull;
      // Moves bit 0 of byte k to bit 56 + k: the factor has bits 56 - 7k.
      mask |= (uint32_t)(ones * 0x0102040810204080ull >> 56) << 8 * i;
    }
    return mask;
  }

  // The sum of the group's bytes, each below 128.
  __device__ __forceinline__ uint32_t sum(int group) const {
    uint64_t pairs = 0;
    EXPERT_CACHE_UNROLL
    for (int i = 0; i < kGroup / 8; i++) {
      const uint64_t bytes = word[group * (kGroup / 8) + i];
      pairs += (bytes & 0x00ff00ff00ff00ffull) + (bytes >> 8 & 0x00ff00ff00ff00ffull);
    }
    return (uint32_t)(pairs * 0x0001000100010001ull >> 48);
  }
};

// What an expert is in this step, a bit each.
enum Kind { kIsRouted = 0, kIsMiss = 1, kIsResident = 2, kIsProtected = 3 };

// Five counts in one integer, so that one addition adds them all. At most 1024 experts fit in
// eleven bits; the ids, below 2^20, have the top.
struct Tally {
  static constexpr int kBits = 11;
  static constexpr int kIdShift = 4 * kBits;
  uint64_t packed = 0;

  __device__ __forceinline__ int of(Kind kind) const {
    return (int)(packed >> kind * kBits) & ((1 << kBits) - 1);
  }
  __device__ __forceinline__ int routed() const { return of(kIsRouted); }
  __device__ __forceinline__ int misses() const { return of(kIsMiss); }
  __device__ __forceinline__ int hits() const { return routed() - misses(); }
  __device__ __forceinline__ int residents() const { return of(kIsResident); }
  __device__ __forceinline__ int protected_residents() const { return of(kIsProtected); }
  __device__ __forceinline__ int ids() const { return (int)(packed >> kIdShift); }
};

struct Tallies {
  uint64_t packed[kGroups];
  uint32_t routed[kGroups], misses[kGroups];

  __device__ __forceinline__ void count(int group, const Flags &kinds, uint32_t ids) {
    routed[group] = kinds.mask(group, kIsRouted);
    misses[group] = kinds.mask(group, kIsMiss);
    uint64_t counts = (uint64_t)ids << Tally::kIdShift;
    EXPERT_CACHE_UNROLL
    for (int kind = kIsRouted; kind <= kIsProtected; kind++)
      counts |= (uint64_t)popcount(kinds.mask(group, kind)) << kind * Tally::kBits;
    packed[group] = counts;
  }

  // All groups, and those before work-item t's own.
  __device__ __forceinline__ void add_up(int groups, int t, Tally *all, Tally *before) const {
    for (int group = 0; group < groups; group++) {
      all->packed += packed[group];
      if (group < t / kGroup) before->packed += packed[group];
    }
  }
};

// The number of bits set below bit t of its own group's mask.
__device__ __forceinline__ int count_before(uint32_t mask, int t) {
  return popcount(mask & ((1u << t % kGroup) - 1));
}

}  // namespace expert_cache
