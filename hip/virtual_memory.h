// Physical memories that several address ranges may map: the ABI's memory and range functions.
// What differs between drivers is in virtual_memory_{host,cuda,hip}.h, as namespace driver:
//
//   Handle                                      one piece of physical memory
//   kMaxPieceBytes                              the largest piece, 0 for no limit
//   granularity(device, &bytes)
//   create(device, bytes, &handle), release(handle)
//   reserve(bytes, &address), unreserve(address, bytes)
//   map(address, bytes, handle), unmap(address, bytes)         a piece, always whole
//   allow_access(device, address, bytes)        once per reservation, all of it
//
// Each returns 0, an ExpertCacheError or the driver's positive code.
#pragma once
#include <stdlib.h>

#include "expert_cache.h"
#include "platform.h"

#if defined(EXPERT_CACHE_HOST)
#include "virtual_memory_host.h"
#elif defined(EXPERT_CACHE_CUDA)
#include "virtual_memory_cuda.h"
#else
#include "virtual_memory_hip.h"
#endif

struct ExpertCacheMemory {
  uint64_t bytes;
  uint64_t piece_bytes;                    // of every piece but perhaps the last
  int64_t pieces;                          // created so far
  expert_cache::driver::Handle handle[1];  // as many as pieces

  uint64_t bytes_of(int64_t piece) const {
    const uint64_t rest = bytes - piece * piece_bytes;
    return rest < piece_bytes ? rest : piece_bytes;
  }
};

struct ExpertCacheRange {
  char *address;
  uint64_t bytes;           // reserved
  int64_t pieces;           // mapped so far
  uint64_t piece_bytes[1];  // as many as pieces
};

namespace expert_cache {

// Remembers the first error of a sequence that has to go on to its end.
inline void note(int *first, int error) {
  if (!*first) *first = error;
}

inline int memory_granularity(int device, uint64_t *bytes) {
  *bytes = 0;
  return driver::granularity(device, bytes);
}

inline int free_memory(ExpertCacheMemory *memory) {
  int error = EXPERT_CACHE_OK;
  for (int64_t i = 0; i < memory->pieces; i++) note(&error, driver::release(memory->handle[i]));
  free(memory);
  return error;
}

inline int create_memory(int device, uint64_t bytes, ExpertCacheMemory **result) {
  *result = nullptr;
  uint64_t granularity;
  if (const int error = memory_granularity(device, &granularity)) return error;
  if (bytes == 0 || bytes % granularity != 0 || bytes > INT64_MAX) return EXPERT_CACHE_BAD_SIZE;
  uint64_t piece = bytes;
  if (driver::kMaxPieceBytes && piece > driver::kMaxPieceBytes)
    piece = driver::kMaxPieceBytes / granularity * granularity;
  const uint64_t pieces = (bytes + piece - 1) / piece;
  auto *memory = static_cast<ExpertCacheMemory *>(
      malloc(sizeof(ExpertCacheMemory) + pieces * sizeof(driver::Handle)));
  if (!memory) return EXPERT_CACHE_NO_MEMORY;
  memory->bytes = bytes;
  memory->piece_bytes = piece;
  for (memory->pieces = 0; memory->pieces < (int64_t)pieces; memory->pieces++) {
    const int64_t i = memory->pieces;
    if (const int error = driver::create(device, memory->bytes_of(i), &memory->handle[i])) {
      free_memory(memory);
      return error;
    }
  }
  *result = memory;
  return EXPERT_CACHE_OK;
}

inline int free_range(ExpertCacheRange *range) {
  int error = EXPERT_CACHE_OK;
  char *address = range->address;
  for (int64_t i = 0; i < range->pieces; i++) {
    note(&error, driver::unmap(address, range->piece_bytes[i]));
    address += range->piece_bytes[i];
  }
  note(&error, driver::unreserve(range->address, range->bytes));
  free(range);
  return error;
}

// Maps every piece of every memory, end to end from the range's address.
inline int map_memories(ExpertCacheMemory *const *memories, int32_t count,
                        ExpertCacheRange *range) {
  char *address = range->address;
  for (int32_t m = 0; m < count; m++) {
    for (int64_t i = 0; i < memories[m]->pieces; i++) {
      const uint64_t bytes = memories[m]->bytes_of(i);
      if (const int error = driver::map(address, bytes, memories[m]->handle[i])) return error;
      range->piece_bytes[range->pieces++] = bytes;
      address += bytes;
    }
  }
  return EXPERT_CACHE_OK;
}

inline int create_range(int device, ExpertCacheMemory *const *memories, int32_t count,
                        ExpertCacheRange **result, void **address) {
  *result = nullptr;
  *address = nullptr;
  if (count < 1) return EXPERT_CACHE_BAD_SIZE;
  uint64_t bytes = 0, pieces = 0;
  for (int32_t m = 0; m < count; m++) {
    if (!memories[m]) return EXPERT_CACHE_BAD_POINTER;
    if (memories[m]->bytes > INT64_MAX - bytes) return EXPERT_CACHE_BAD_SIZE;
    bytes += memories[m]->bytes;
    pieces += memories[m]->pieces;
  }
  auto *range = static_cast<ExpertCacheRange *>(
      malloc(sizeof(ExpertCacheRange) + pieces * sizeof(uint64_t)));
  if (!range) return EXPERT_CACHE_NO_MEMORY;
  range->bytes = bytes;
  range->pieces = 0;
  void *reserved = nullptr;
  if (const int error = driver::reserve(bytes, &reserved)) {
    free(range);
    return error;
  }
  range->address = static_cast<char *>(reserved);
  int error = map_memories(memories, count, range);
  if (!error) error = driver::allow_access(device, range->address, bytes);
  if (error) {
    free_range(range);
    return error;
  }
  *result = range;
  *address = range->address;
  return EXPERT_CACHE_OK;
}

}  // namespace expert_cache
