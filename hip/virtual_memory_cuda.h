// Virtual memory through the CUDA driver, found at run time: nothing links to libcuda.
// Interface: virtual_memory.h.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

namespace expert_cache {
namespace driver {

typedef CUmemGenericAllocationHandle Handle;
constexpr uint64_t kMaxPieceBytes = 0;

#define EXPERT_CACHE_CUDA_FUNCTIONS(apply)                                                     \
  apply(cuInit) apply(cuDeviceGetAttribute) apply(cuMemGetAllocationGranularity)               \
  apply(cuMemCreate) apply(cuMemRelease) apply(cuMemAddressReserve) apply(cuMemAddressFree)    \
  apply(cuMemMap) apply(cuMemUnmap) apply(cuMemSetAccess)                                      \
  apply(cuMemHostRegister_v2) apply(cuMemHostUnregister)

// The driver's functions, all of them or none.
struct Functions {
  bool loaded = false;
#define EXPERT_CACHE_DECLARE(name) decltype(&::name) name = nullptr;
  EXPERT_CACHE_CUDA_FUNCTIONS(EXPERT_CACHE_DECLARE)
#undef EXPERT_CACHE_DECLARE

  Functions() {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!library) return;
    loaded = true;
#define EXPERT_CACHE_FIND(name) \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  loaded = loaded && name;
    EXPERT_CACHE_CUDA_FUNCTIONS(EXPERT_CACHE_FIND)
#undef EXPERT_CACHE_FIND
    loaded = loaded && cuInit(0) == CUDA_SUCCESS;
  }
};
#undef EXPERT_CACHE_CUDA_FUNCTIONS

inline const Functions &functions() {
  static const Functions functions;
  return functions;
}

// CUresult and cudaError_t agree on the values that occur here.
inline int translate(CUresult result) {
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return EXPERT_CACHE_NO_MEMORY;
  if (result == CUDA_ERROR_NOT_SUPPORTED) return EXPERT_CACHE_UNSUPPORTED;
  return static_cast<int>(result);
}

inline CUmemAllocationProp properties(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

inline int granularity(int device, uint64_t *bytes) {
  const Functions &cuda = functions();
  if (!cuda.loaded) return EXPERT_CACHE_UNSUPPORTED;
  int supported = 0;
  const CUresult result = cuda.cuDeviceGetAttribute(
      &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  if (result) return translate(result);
  if (!supported) return EXPERT_CACHE_UNSUPPORTED;
  const CUmemAllocationProp wanted = properties(device);
  size_t granularity = 0;
  const int error = translate(cuda.cuMemGetAllocationGranularity(
      &granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  *bytes = granularity;
  return error;
}

inline int create(int device, uint64_t bytes, Handle *handle) {
  const CUmemAllocationProp wanted = properties(device);
  return translate(functions().cuMemCreate(handle, bytes, &wanted, 0));
}

inline int release(Handle handle) { return translate(functions().cuMemRelease(handle)); }

inline int reserve(uint64_t bytes, void **address) {
  CUdeviceptr reserved = 0;
  const int error = translate(functions().cuMemAddressReserve(&reserved, bytes, 0, 0, 0));
  *address = reinterpret_cast<void *>(reserved);
  return error;
}

inline int unreserve(void *address, uint64_t bytes) {
  return translate(functions().cuMemAddressFree(reinterpret_cast<CUdeviceptr>(address), bytes));
}

inline int map(void *address, uint64_t bytes, Handle handle) {
  return translate(
      functions().cuMemMap(reinterpret_cast<CUdeviceptr>(address), bytes, 0, handle, 0));
}

inline int unmap(void *address, uint64_t bytes) {
  return translate(functions().cuMemUnmap(reinterpret_cast<CUdeviceptr>(address), bytes));
}

inline int allow_access(int device, void *address, uint64_t bytes) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return translate(
      functions().cuMemSetAccess(reinterpret_cast<CUdeviceptr>(address), bytes, &access, 1));
}

}  // namespace driver
}  // namespace expert_cache
