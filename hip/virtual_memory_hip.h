// Virtual memory through HIP. Interface: virtual_memory.h.
//
// The functions are weak references: on a ROCm without them the library still loads and these
// calls answer EXPERT_CACHE_UNSUPPORTED. HIP's rules, each from a known defect: a piece has at most
// 256 MiB and is mapped whole, access is set once over the whole reservation from its start
// (setting a tail fails on ROCm 7.0 to 7.2), and each piece is unmapped by a call of its own.
#pragma once

#pragma weak hipMemGetAllocationGranularity
#pragma weak hipMemCreate
#pragma weak hipMemRelease
#pragma weak hipMemAddressReserve
#pragma weak hipMemAddressFree
#pragma weak hipMemMap
#pragma weak hipMemUnmap
#pragma weak hipMemSetAccess

namespace expert_cache {
namespace driver {

typedef hipMemGenericAllocationHandle_t Handle;
constexpr uint64_t kMaxPieceBytes = 256ull << 20;

// Clears the runtime's error too: it has been reported here.
inline int translate(hipError_t result) {
  if (result == hipSuccess) return EXPERT_CACHE_OK;
  (void)hipGetLastError();
  if (result == hipErrorOutOfMemory) return EXPERT_CACHE_NO_MEMORY;
  if (result == hipErrorNotSupported) return EXPERT_CACHE_UNSUPPORTED;
  return static_cast<int>(result);
}

inline hipMemAllocationProp properties(int device) {
  hipMemAllocationProp properties = {};
  properties.type = hipMemAllocationTypePinned;
  properties.location.type = hipMemLocationTypeDevice;
  properties.location.id = device;
  return properties;
}

inline int granularity(int device, uint64_t *bytes) {
  if (!hipMemGetAllocationGranularity || !hipMemCreate || !hipMemRelease ||
      !hipMemAddressReserve || !hipMemAddressFree || !hipMemMap || !hipMemUnmap ||
      !hipMemSetAccess)
    return EXPERT_CACHE_UNSUPPORTED;
  const hipMemAllocationProp wanted = properties(device);
  size_t granularity = 0;
  const int error = translate(hipMemGetAllocationGranularity(
      &granularity, &wanted, hipMemAllocationGranularityMinimum));
  *bytes = granularity;
  return error;
}

inline int create(int device, uint64_t bytes, Handle *handle) {
  const hipMemAllocationProp wanted = properties(device);
  return translate(hipMemCreate(handle, bytes, &wanted, 0));
}

inline int release(Handle handle) { return translate(hipMemRelease(handle)); }

inline int reserve(uint64_t bytes, void **address) {
  return translate(hipMemAddressReserve(address, bytes, 0, nullptr, 0));
}

inline int unreserve(void *address, uint64_t bytes) {
  return translate(hipMemAddressFree(address, bytes));
}

inline int map(void *address, uint64_t bytes, Handle handle) {
  return translate(hipMemMap(address, bytes, 0, handle, 0));
}

inline int unmap(void *address, uint64_t bytes) { return translate(hipMemUnmap(address, bytes)); }

inline int allow_access(int device, void *address, uint64_t bytes) {
  hipMemAccessDesc access = {};
  access.location.type = hipMemLocationTypeDevice;
  access.location.id = device;
  access.flags = hipMemAccessFlagsProtReadWrite;
  return translate(hipMemSetAccess(address, bytes, &access, 1));
}

}  // namespace driver
}  // namespace expert_cache
