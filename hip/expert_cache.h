/* The plain C interface of the expert cache kernels.
 *
 * One library, three builds of one source: AMD (HIP), NVIDIA (CUDA) and the CPU (emulated
 * workgroups). Every function returns 0, a negative ExpertCacheError of ours, or the positive
 * error code of the GPU runtime; expert_cache_error_string() explains all three.
 * What the kernels compute is specified in docs/kernels.md.
 */
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define EXPERT_CACHE_API
#else
#define EXPERT_CACHE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever a struct, an enum or a function below changes. */
#define EXPERT_CACHE_ABI_VERSION 5

#define EXPERT_CACHE_MAX_EXPERTS 1024
#define EXPERT_CACHE_MAX_IDS 524288
#define EXPERT_CACHE_MAX_ID_SPAN (1ll << 40) /* elements between the first id and the last */
#define EXPERT_CACHE_MAX_TENSORS 256

/* Layout of a layer's state: int32 words, all in one device allocation.
 *   [0] step (uint32)   [1] number of copies   [2] how many of them, the first ones,
 *   belong to misses   [3..7] reserved, zero
 *   then row_of[E], expert_at[E], score[E] (uint32), last[E] (uint32), copies[E][4]
 * A fresh state is zero except row_of and expert_at, which are -1. */
#define EXPERT_CACHE_STATE_HEADER 8
#define EXPERT_CACHE_STATE_WORDS(experts) (EXPERT_CACHE_STATE_HEADER + 8 * (experts))

/* Counters: int64 each, monotone. */
enum ExpertCacheCounter {
  EXPERT_CACHE_STEPS = 0,        /* layer-steps with at least one valid id */
  EXPERT_CACHE_HITS = 1,         /* distinct routed experts that were resident */
  EXPERT_CACHE_MISSES = 2,       /* distinct routed experts that were not */
  EXPERT_CACHE_OVERFLOW = 3,     /* misses that found no slot */
  EXPERT_CACHE_EVICTIONS = 4,    /* residents that lost their slot */
  EXPERT_CACHE_IDS = 5,          /* valid routing ids */
  EXPERT_CACHE_IDLE = 6,         /* layer-steps without a valid id */
  EXPERT_CACHE_READ_THROUGH = 7, /* layer-steps served from the host copy */
  EXPERT_CACHE_COUNTERS = 8
};

enum ExpertCachePolicy {
  EXPERT_CACHE_LRFU = 0,
  EXPERT_CACHE_LRU = 1,
  EXPERT_CACHE_LFU = 2,
  EXPERT_CACHE_FIFO = 3,
  EXPERT_CACHE_SLRU = 4
};

enum ExpertCacheIdType { EXPERT_CACHE_INT32 = 0, EXPERT_CACHE_INT64 = 1, EXPERT_CACHE_UINT32 = 2 };

enum ExpertCacheMode {
  EXPERT_CACHE_ROWS = 0,        /* ids become (the ids of) rows: slots, then overflow rows */
  EXPERT_CACHE_SCRATCH = 1,     /* ids stay; every routed expert is copied to its own row of a scratch */
  EXPERT_CACHE_SKIP = 2         /* the layer-step reads through: count it, touch nothing else */
};

enum ExpertCacheError {
  EXPERT_CACHE_OK = 0,
  EXPERT_CACHE_BAD_EXPERTS = -1,
  EXPERT_CACHE_BAD_SLOTS = -2,
  EXPERT_CACHE_BAD_IDS = -3,
  EXPERT_CACHE_BAD_ID_TYPE = -4,
  EXPERT_CACHE_BAD_POLICY = -5,
  EXPERT_CACHE_BAD_DECAY = -6,
  EXPERT_CACHE_BAD_MODE = -7,
  EXPERT_CACHE_BAD_POINTER = -8,   /* null, not aligned for its type, or row_ids overlap ids */
  EXPERT_CACHE_BAD_TENSORS = -9,
  EXPERT_CACHE_BAD_GRID = -10,
  EXPERT_CACHE_BAD_SIZE = -11,     /* a byte count of zero, or too large */
  EXPERT_CACHE_NO_MEMORY = -12,
  EXPERT_CACHE_UNSUPPORTED = -13,  /* this build or driver has no virtual memory management */
  EXPERT_CACHE_BAD_MAP = -14       /* an expert map that is shorter than the experts, or half of one */
};

typedef struct ExpertCacheManage {
  const void *ids;           /* device, [id_rows, id_columns], id_type */
  void *row_ids;             /* device, same shape and type, contiguous; apart from the ids */
  int64_t id_rows;
  int64_t id_columns;        /* 1 <= id_rows * id_columns <= EXPERT_CACHE_MAX_IDS */
  int64_t id_row_stride;     /* in elements, >= 0; see EXPERT_CACHE_MAX_ID_SPAN */
  int64_t id_column_stride;
  int32_t *state;            /* device, EXPERT_CACHE_STATE_WORDS(experts) words, 16-byte aligned */
  int64_t *counters;         /* device, EXPERT_CACHE_COUNTERS words */
  int64_t *counters_mirror;  /* null, or memory that is only ever stored to (mapped pinned host) */
  const int32_t *expert_map; /* device, [map_length]: the expert that an id names, or -1; null: ids
                                are experts */
  const int32_t *expert_ids; /* device, [experts]: the id that the map takes to an expert; null
                                where expert_map is */
  int32_t id_type;           /* ExpertCacheIdType */
  int32_t experts;           /* E, 2..EXPERT_CACHE_MAX_EXPERTS */
  int32_t slots;             /* S, 1..E-1 */
  int32_t policy;            /* ExpertCachePolicy */
  uint32_t decay;            /* lrfu: multiplier in 1/65536, 1..65535; lfu: steps between halvings, >= 1;
                                other policies: 0 */
  int32_t mode;              /* ExpertCacheMode */
  int32_t map_length;        /* ids that the map knows, at least `experts`; 0 without a map */
  int32_t preloaded;         /* 1: overflow rows hold what preload() laid there for this step; mode rows only */
} ExpertCacheManage;

typedef struct ExpertCachePreload {
  int32_t *state;            /* device, as in ExpertCacheManage */
  int32_t experts;           /* E, 2..EXPERT_CACHE_MAX_EXPERTS */
  int32_t slots;             /* S, 1..E-1 */
} ExpertCachePreload;

/* One per-expert tensor, in a device-readable table. Expert e's record lies at
 * source + e * stride, slot s at slots + s * stride, row r at rows + r * stride. */
typedef struct ExpertCacheTensor {
  const void *source;        /* host copy */
  void *slots;               /* the layer's own rows */
  void *rows;                /* where the kernel reads in this mode: == slots, or the scratch */
  int64_t bytes;             /* of one record, >= 1 */
  int64_t stride;            /* between records, >= bytes */
} ExpertCacheTensor;

typedef struct ExpertCacheGather {
  const ExpertCacheTensor *tensors; /* device-readable table */
  const int32_t *state;      /* as manage left it: the copies are read from it */
  int32_t tensor_count;      /* 1..EXPERT_CACHE_MAX_TENSORS */
  int32_t experts;           /* E: bounds the copies and places the list in the state */
  int32_t chunks;            /* workgroups that share one record, 1..4096 */
  int32_t lanes;             /* records copied at once, 1..4096 */
  int32_t device_lanes;      /* 0: the lanes make all copies. 1..4096: they make those of misses, and so
                                many more lanes those of hits, slot to scratch, meanwhile.
                                chunks * (lanes + device_lanes) <= 65535 */
  int32_t threads;           /* per workgroup: 64, 128, 256, 512 or 1024; 0 = the build's default */
} ExpertCacheGather;

EXPERT_CACHE_API int expert_cache_abi_version(void);
/* "hip", "cuda" or "host" */
EXPERT_CACHE_API const char *expert_cache_backend(void);
/* Space-separated architectures the library carries code for, e.g. "gfx90a gfx942 gfx1201". */
EXPERT_CACHE_API const char *expert_cache_architectures(void);
/* Static text, never null. */
EXPERT_CACHE_API const char *expert_cache_error_string(int code);

/* These enqueue on `stream` (hipStream_t, cudaStream_t; ignored on the host) and return at once. */
EXPERT_CACHE_API int expert_cache_manage(const ExpertCacheManage *args, void *stream);
EXPERT_CACHE_API int expert_cache_gather(const ExpertCacheGather *args, void *stream);
EXPERT_CACHE_API int expert_cache_preload(const ExpertCachePreload *args, void *stream);

/* Where a pointer lives, by asking the driver: 0 device memory, 1 host memory the GPU can read,
 * 2 host memory the GPU cannot read. On the host build always 1. */
EXPERT_CACHE_API int expert_cache_pointer_kind(const void *pointer, int32_t *kind);

/* Lets the device load from and store to host memory at its own address, for as long as it is not
 * unregistered. A refusal leaves no error behind in the runtime. On the host build always 0. */
EXPERT_CACHE_API int expert_cache_host_register(void *pointer, uint64_t bytes);
EXPERT_CACHE_API int expert_cache_host_unregister(void *pointer);

/* Virtual memory: physical memories that several address ranges may map.
 * Host: memfd_create + mmap. CUDA: cuMem*. HIP: hipMem*, in chunks of at most 256 MiB. */
typedef struct ExpertCacheMemory ExpertCacheMemory;
typedef struct ExpertCacheRange ExpertCacheRange;
EXPERT_CACHE_API int expert_cache_memory_granularity(int device, uint64_t *bytes);
/* `bytes` must be a multiple of the granularity. */
EXPERT_CACHE_API int expert_cache_memory_create(int device, uint64_t bytes, ExpertCacheMemory **memory);
EXPERT_CACHE_API int expert_cache_memory_free(ExpertCacheMemory *memory);
/* Reserves one address range and maps `count` memories into it, end to end, each whole.
 * On failure nothing stays reserved or mapped. A memory must outlive its ranges. */
EXPERT_CACHE_API int expert_cache_range_create(int device, ExpertCacheMemory *const *memories, int32_t count,
                                               ExpertCacheRange **range, void **address);
EXPERT_CACHE_API int expert_cache_range_free(ExpertCacheRange *range);

/* Host build only (other builds return EXPERT_CACHE_UNSUPPORTED): seed != 0 runs the work-items
 * of every barrier phase in a pseudo-random order; 0 restores the natural order. */
EXPERT_CACHE_API int expert_cache_shuffle(uint64_t seed);

#ifdef __cplusplus
}
#endif
