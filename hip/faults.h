// Faults that a build can carry on purpose, to show that the tests notice them:
// -DEXPERT_CACHE_FAULT=n compiles one of these in. Without it the code is unchanged.
#pragma once
#include "platform.h"

#ifndef EXPERT_CACHE_FAULT
#define EXPERT_CACHE_FAULT 0
#endif

namespace expert_cache {

enum Fault {
  kMissingBarrier = 1,      // manage: experts' keys are read before they are all written
  kVictimInUse = 2,         // manage: a routed expert may lose its slot
  kStaleOverflowRow = 3,    // manage: an expert keeps last step's overflow row
  kLostTail = 4,            // gather: bytes that do not fill a lane stay behind
  kWrongTieBreak = 5,       // manage: of equal victims the highest slot goes first
  kAdmissionByNumber = 6,   // manage: when slots run short the score does not count
  kTruncatedIds = 7,        // manage: the upper half of an int64 id is dropped
  kFromSlotIgnored = 8,     // gather: a resident is read from the host copy
  kRowAsId = 9,             // manage: with an expert map, the row itself is stored as the id
  kPreloadedForgotten = 10  // manage: a preloaded expert is fetched again, to the next free row
};

__host__ __device__ constexpr bool has_fault(Fault fault) { return EXPERT_CACHE_FAULT == fault; }

}  // namespace expert_cache
