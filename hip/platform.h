// One kernel source, four compilers:
//   HIP with ROCm headers  hipcc, or clang -x hip
//   HIP freestanding       clang -x hip -nogpuinc -nogpulib -DEXPERT_CACHE_HIP_MINIMAL
//   CUDA                   nvcc
//   CPU                    any C++17 compiler, see host_emulation.h
// Everything the kernels and launchers need that differs between them is here.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__HIP__) || defined(__HIPCC__)
#define EXPERT_CACHE_HIP 1
#if defined(EXPERT_CACHE_HIP_MINIMAL)
#include "hip_minimal.h"
#else
#include <hip/hip_runtime.h>
#endif
#elif defined(__CUDACC__)
#define EXPERT_CACHE_CUDA 1
#include <cuda_runtime.h>
#else
#define EXPERT_CACHE_HOST 1
#include <string.h>
#include "host_emulation.h"
#endif

#if defined(EXPERT_CACHE_HOST)
#define EXPERT_CACHE_UNROLL
#else
#define EXPERT_CACHE_UNROLL _Pragma("unroll")
#define EXPERT_CACHE_SHARED(Type, name) __shared__ Type name
#endif

// A pointer that was itself read from memory is generic on AMD, and a generic load occupies the
// LDS counter too. In address space 1 it becomes global_load_dwordx4 (gfx12: global_load_b128).
#if defined(EXPERT_CACHE_HIP) && defined(__HIP_DEVICE_COMPILE__)
#define EXPERT_CACHE_GLOBAL __attribute__((address_space(1)))
#else
#define EXPERT_CACHE_GLOBAL
#endif

namespace expert_cache {

#if defined(EXPERT_CACHE_HIP)
constexpr const char *kBackend = "hip";
#elif defined(EXPERT_CACHE_CUDA)
constexpr const char *kBackend = "cuda";
#else
constexpr const char *kBackend = "host";
#endif

// Sixteen bytes that move in one load or store. nvcc has no vector_size in device code.
#if defined(EXPERT_CACHE_CUDA)
typedef uint4 Lane16;
#else
typedef uint32_t Lane16 __attribute__((vector_size(16)));
#endif
static_assert(sizeof(Lane16) == 16 && alignof(Lane16) == 16, "one 16-byte access");

// Loads what is read once: it should not displace anything in the caches.
template <class T>
__device__ __forceinline__ T load_once(const EXPERT_CACHE_GLOBAL T *address) {
#if defined(EXPERT_CACHE_CUDA)
  return __ldcs(address);
#elif defined(EXPERT_CACHE_HIP)
  return __builtin_nontemporal_load(address);
#else
  return *address;
#endif
}

// Several work-items may store the same value here; on the CPU that must be atomic to be no race.
__device__ __forceinline__ void store_flag(uint8_t *flag) {
#if defined(EXPERT_CACHE_HOST)
  __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
#else
  *flag = 1;
#endif
}

__device__ __forceinline__ int popcount(uint32_t bits) {
#if defined(EXPERT_CACHE_CUDA) && defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Enqueues kernel(job); returns 0 or the runtime's error, which is cleared: it has been reported.
template <class Job>
int launch(void (*kernel)(Job), dim3 grid, dim3 block, void *stream, Job job) {
#if defined(EXPERT_CACHE_HOST)
  (void)stream;
  emulation::launch(grid, block, [kernel, &job] { kernel(job); });
  return 0;
#else
  void *arguments[] = {&job};
#if defined(EXPERT_CACHE_HIP)
  const int error = hipLaunchKernel((const void *)kernel, grid, block, arguments, 0,
                                    (hipStream_t)stream);
  if (error) (void)hipGetLastError();
#else
  const int error = cudaLaunchKernel((const void *)kernel, grid, block, arguments, 0,
                                     (cudaStream_t)stream);
  if (error) (void)cudaGetLastError();
#endif
  return error;
#endif
}

// The runtime's own words for a positive code; on the CPU positive codes are errno values.
inline const char *runtime_error_string(int code) {
#if defined(EXPERT_CACHE_HIP)
  return hipGetErrorString((hipError_t)code);
#elif defined(EXPERT_CACHE_CUDA)
  return cudaGetErrorString((cudaError_t)code);
#else
  return strerror(code);
#endif
}

}  // namespace expert_cache
