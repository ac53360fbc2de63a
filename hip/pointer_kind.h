// Asks the driver where a pointer lives: 0 device, 1 host and readable by the GPU, 2 host only.
// Managed memory counts as device memory: the driver itself decides where its pages are.
#pragma once
#include "expert_cache.h"
#include "platform.h"

namespace expert_cache {

enum PointerKind { kDeviceMemory = 0, kReadableHostMemory = 1, kUnreadableHostMemory = 2 };

#if defined(EXPERT_CACHE_HOST)

inline int pointer_kind(const void *, int32_t *kind) {
  *kind = kReadableHostMemory;
  return EXPERT_CACHE_OK;
}

#elif defined(EXPERT_CACHE_CUDA)

inline int pointer_kind(const void *pointer, int32_t *kind) {
  cudaPointerAttributes attributes;
  if (const int error = cudaPointerGetAttributes(&attributes, pointer)) {
    (void)cudaGetLastError();
    return error;
  }
  switch (attributes.type) {
    case cudaMemoryTypeUnregistered:
      *kind = kUnreadableHostMemory;
      break;
    case cudaMemoryTypeHost:
      *kind = kReadableHostMemory;
      break;
    default:
      *kind = kDeviceMemory;
  }
  return EXPERT_CACHE_OK;
}

#else

inline int pointer_kind(const void *pointer, int32_t *kind) {
  hipPointerAttribute_t attributes;
  int version = 0;
  if (const int error = hipRuntimeGetVersion(&version)) return error;
  const int error = hipPointerGetAttributes(&attributes, pointer);
  if (error) (void)hipGetLastError();
  if (error && error != hipErrorInvalidValue) return error;
  // hipMemoryType was {host 0, device 1} before ROCm 6 and is {unregistered 0, host 1, device 2}
  // since; ROCm 5 answers for unregistered memory with an error, later ones with either.
  const int host = version >= 60000000 ? 1 : 0;
#if defined(HIP_VERSION_MAJOR) && HIP_VERSION_MAJOR < 6
  const int type = (int)attributes.memoryType;
#else
  const int type = (int)attributes.type;
#endif
  if (error || type < host)
    *kind = kUnreadableHostMemory;
  else
    *kind = type == host ? kReadableHostMemory : kDeviceMemory;
  return EXPERT_CACHE_OK;
}

#endif

}  // namespace expert_cache
