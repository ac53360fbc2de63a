// Lets the device store to host memory that was not allocated for it, such as a mapped file: pins
// the pages and maps them at their own address. The memory must outlive its registration.
#pragma once
#include "expert_cache.h"
#include "platform.h"
#include "virtual_memory.h"

namespace expert_cache {

#if defined(EXPERT_CACHE_HOST)

inline int host_register(void *, uint64_t) { return EXPERT_CACHE_OK; }
inline int host_unregister(void *) { return EXPERT_CACHE_OK; }

#elif defined(EXPERT_CACHE_CUDA)

// By the driver and not the runtime: what the runtime refuses it remembers, and whoever launches
// next finds the error.
inline int host_register(void *pointer, uint64_t bytes) {
  const driver::Functions &cuda = driver::functions();
  if (!cuda.loaded) return EXPERT_CACHE_UNSUPPORTED;
  return driver::translate(
      cuda.cuMemHostRegister_v2(pointer, bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
}

inline int host_unregister(void *pointer) {
  return driver::translate(driver::functions().cuMemHostUnregister(pointer));
}

#else

inline int host_register(void *pointer, uint64_t bytes) {
  return driver::translate(hipHostRegister(pointer, bytes, hipHostRegisterMapped));
}

inline int host_unregister(void *pointer) {
  return driver::translate(hipHostUnregister(pointer));
}

#endif

}  // namespace expert_cache
