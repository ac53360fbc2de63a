// What this library needs of HIP where there are no ROCm headers and no device libraries
// (clang 17 or newer, -x hip -nogpuinc -nogpulib). Names, types and values are those of
// hip/hip_runtime.h; the ABI is HIP-Clang's since ROCm 4.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __forceinline__ inline __attribute__((always_inline))

struct dim3 {
  uint32_t x, y, z;
  constexpr __host__ __device__ dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1)
      : x(x), y(y), z(z) {}
};

typedef int hipError_t;
typedef struct ihipStream_t *hipStream_t;

enum { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorNotSupported = 801 };

typedef struct hipPointerAttribute_t {
  int type;  // hipMemoryType, whose values changed with ROCm 6
  int device;
  void *devicePointer;
  void *hostPointer;
  int isManaged;
  unsigned allocationFlags;
} hipPointerAttribute_t;

enum { hipHostRegisterMapped = 2 };
enum { hipMemAllocationTypePinned = 1, hipMemLocationTypeDevice = 1 };
enum { hipMemAllocationGranularityMinimum = 0, hipMemAccessFlagsProtReadWrite = 3 };

typedef struct hipMemLocation {
  int type;
  int id;
} hipMemLocation;

typedef struct hipMemAllocationProp {
  int type;
  int requestedHandleType;
  hipMemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
  } allocFlags;
} hipMemAllocationProp;

typedef struct hipMemAccessDesc {
  hipMemLocation location;
  int flags;
} hipMemAccessDesc;

typedef struct ihipMemGenericAllocationHandle *hipMemGenericAllocationHandle_t;

extern "C" {
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t, hipStream_t);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipGetLastError(void);
const char *hipGetErrorString(hipError_t);
hipError_t hipRuntimeGetVersion(int *);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t *, const void *);
hipError_t hipHostRegister(void *, size_t, unsigned int);
hipError_t hipHostUnregister(void *);
hipError_t hipMemGetAllocationGranularity(size_t *, const hipMemAllocationProp *, int);
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *, size_t, const hipMemAllocationProp *,
                        unsigned long long);
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t);
hipError_t hipMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
hipError_t hipMemAddressFree(void *, size_t);
hipError_t hipMemMap(void *, size_t, size_t, hipMemGenericAllocationHandle_t, unsigned long long);
hipError_t hipMemUnmap(void *, size_t);
hipError_t hipMemSetAccess(void *, size_t, const hipMemAccessDesc *, size_t);
}

// threadIdx.x and its kin are reads of registers or of the kernel's implicit arguments.
#define EXPERT_CACHE_INDEX_TYPE(Type, value_x, value_y, value_z)     \
  struct Type {                                                      \
    __device__ uint32_t get_x() const { return value_x; }            \
    __device__ uint32_t get_y() const { return value_y; }            \
    __device__ uint32_t get_z() const { return value_z; }            \
    __declspec(property(get = get_x)) uint32_t x;                    \
    __declspec(property(get = get_y)) uint32_t y;                    \
    __declspec(property(get = get_z)) uint32_t z;                    \
  }

EXPERT_CACHE_INDEX_TYPE(HipThreadIndex, __builtin_amdgcn_workitem_id_x(),
                        __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z());
EXPERT_CACHE_INDEX_TYPE(HipBlockIndex, __builtin_amdgcn_workgroup_id_x(),
                        __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z());
EXPERT_CACHE_INDEX_TYPE(HipBlockSize, __builtin_amdgcn_workgroup_size_x(),
                        __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z());
extern const __device__ __attribute__((weak)) HipThreadIndex threadIdx;
extern const __device__ __attribute__((weak)) HipBlockIndex blockIdx;
extern const __device__ __attribute__((weak)) HipBlockSize blockDim;

__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
