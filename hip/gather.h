// gather: moves the records that manage listed, from the host copies (or slots) to their rows.
//
// Workgroup (x, y) of a grid of chunks x lanes takes every lanes-th copy, and every chunks-th tile
// of each of its records. A few workgroups with many loads in flight fill a PCIe link and leave
// the rest of the GPU to others. Copies from slot to scratch can have lanes of their own, so that
// the link does not wait for them.
#pragma once
#include "faults.h"
#include "state.h"

namespace expert_cache {

// Loads in flight per work-item, one tile per workgroup: 8 x 16 bytes x 512 work-items, 64 KiB.
constexpr int kLoadsInFlight = 8;

// Where one record, or one tile of it, goes. `slot` is null or a second destination, which is
// written from the same load.
struct RecordCopy {
  const EXPERT_CACHE_GLOBAL char *from;
  EXPERT_CACHE_GLOBAL char *row;
  EXPERT_CACHE_GLOBAL char *slot;

  __device__ __forceinline__ RecordCopy at(int64_t offset) const {
    return {from + offset, row + offset, slot ? slot + offset : nullptr};
  }
};

// Stores a work-item's lanes of a tile, those that the tile has.
template <class Lane, bool kFull>
__device__ __forceinline__ void store_tile(EXPERT_CACHE_GLOBAL char *tile, uint32_t lanes,
                                           const Lane (&lane)[kLoadsInFlight]) {
  auto *to = (EXPERT_CACHE_GLOBAL Lane *)tile + threadIdx.x;
  uint32_t index = threadIdx.x;
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kLoadsInFlight; i++) {
    if (kFull || index < lanes) *to = lane[i];
    to += blockDim.x;
    index += blockDim.x;
  }
}

// Copies a tile of at most kLoadsInFlight lanes per work-item; all its loads are issued before its
// first store. kFull: every work-item has all its lanes. Else surplus loads repeat the last lane.
template <class Lane, bool kFull>
__device__ __forceinline__ void copy_tile(const RecordCopy &tile, uint32_t lanes) {
  const auto *from = (const EXPERT_CACHE_GLOBAL Lane *)tile.from;
  uint32_t index = threadIdx.x;
  Lane lane[kLoadsInFlight];
  EXPERT_CACHE_UNROLL
  for (int i = 0; i < kLoadsInFlight; i++) {
    lane[i] = load_once(from + (kFull || index < lanes ? index : lanes - 1));
    index += blockDim.x;
  }
  store_tile<Lane, kFull>(tile.row, lanes, lane);
  if (tile.slot) store_tile<Lane, kFull>(tile.slot, lanes, lane);
}

// Tiles chunk, chunk + chunks, ... of a record; chunk 0 also moves the bytes that fill no lane.
template <class Lane>
__device__ __forceinline__ void copy_record(const RecordCopy &record, int64_t bytes, int chunk,
                                            int chunks) {
  const int64_t lanes = bytes / (int)sizeof(Lane);
  const int64_t tile = (int64_t)kLoadsInFlight * blockDim.x;
  for (int64_t lane = chunk * tile; lane < lanes; lane += chunks * tile) {
    const RecordCopy part = record.at(lane * (int)sizeof(Lane));
    if (lanes - lane >= tile)
      copy_tile<Lane, true>(part, (uint32_t)tile);
    else
      copy_tile<Lane, false>(part, (uint32_t)(lanes - lane));
  }
  const int64_t tail = lanes * (int)sizeof(Lane) + threadIdx.x;
  if (chunk == 0 && tail < bytes && !has_fault(kLostTail)) {
    const char byte = record.from[tail];
    record.row[tail] = byte;
    if (record.slot) record.slot[tail] = byte;
  }
}

__device__ __forceinline__ void copy_expert(const ExpertCacheTensor &tensor, const Copy &copy,
                                            int chunk, int chunks) {
  const auto *source = (const EXPERT_CACHE_GLOBAL char *)tensor.source;
  auto *slots = (EXPERT_CACHE_GLOBAL char *)tensor.slots;
  auto *rows = (EXPERT_CACHE_GLOBAL char *)tensor.rows;
  const bool from_slot = copy.from_slot >= 0 && !has_fault(kFromSlotIgnored);
  RecordCopy record;
  record.from = from_slot ? slots + copy.from_slot * tensor.stride
                          : source + copy.expert * tensor.stride;
  record.row = rows + copy.to_row * tensor.stride;
  record.slot = copy.to_slot >= 0 ? slots + copy.to_slot * tensor.stride : nullptr;
  const uintptr_t bits = (uintptr_t)source | (uintptr_t)slots | (uintptr_t)rows |
                         (uintptr_t)tensor.stride;
  if (bits % 16 == 0)
    copy_record<Lane16>(record, tensor.bytes, chunk, chunks);
  else if (bits % 4 == 0)
    copy_record<uint32_t>(record, tensor.bytes, chunk, chunks);
  else
    copy_record<uint8_t>(record, tensor.bytes, chunk, chunks);
}

extern "C" __global__ void __launch_bounds__(1024)
expert_cache_gather_kernel(ExpertCacheGather job) {
  const State state(const_cast<int32_t *>(job.state), job.experts);
  int32_t first = blockIdx.y, end = *state.copy_count, lanes = job.lanes;
  if (job.device_lanes > 0) {
    const int32_t misses = *state.miss_count;
    if (first < lanes) {
      end = misses;
    } else {
      first += misses - lanes;
      lanes = job.device_lanes;
    }
  }
  if (end > job.experts) end = job.experts;
  for (int32_t i = first; i < end; i += lanes) {
    const Copy copy = state.copies[i];
    if (copy.to_row < 0) continue;  // preloaded, and to stay where it lies
    // Each tensor starts one workgroup further on, so that records of a single tile (scales,
    // biases) spread over the workgroups instead of queueing at the first.
    int chunk = blockIdx.x;
    for (int32_t k = 0; k < job.tensor_count; k++) {
      copy_expert(job.tensors[k], copy, chunk, job.chunks);
      chunk = chunk == 0 ? job.chunks - 1 : chunk - 1;
    }
  }
}

}  // namespace expert_cache
