// The one translation unit of the kernel library: checks arguments and launches.
#include "expert_cache.h"
#include "platform.h"
#include "gather.h"
#include "host_register.h"
#include "manage.h"
#include "pointer_kind.h"
#include "preload.h"
#include "virtual_memory.h"

#if !defined(EXPERT_CACHE_ARCHITECTURES)
#if !defined(EXPERT_CACHE_HOST)
#error "Define EXPERT_CACHE_ARCHITECTURES: the architectures this build has code for, as a string"
#elif defined(__x86_64__)
#define EXPERT_CACHE_ARCHITECTURES "x86_64"
#elif defined(__aarch64__)
#define EXPERT_CACHE_ARCHITECTURES "aarch64"
#else
#define EXPERT_CACHE_ARCHITECTURES "cpu"
#endif
#endif

namespace expert_cache {
namespace {

bool is_aligned(const void *pointer, size_t alignment) {
  return pointer && reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// The distance in elements that `count` ids at a stride reach; -1 where it is more than is allowed.
int64_t reach(int64_t count, int64_t stride) {
  if (count == 1) return 0;
  return stride > EXPERT_CACHE_MAX_ID_SPAN ? -1 : (count - 1) * stride;
}

int check_ids(const ExpertCacheManage &args) {
  if (args.id_type < EXPERT_CACHE_INT32 || args.id_type > EXPERT_CACHE_UINT32)
    return EXPERT_CACHE_BAD_ID_TYPE;
  const int64_t most = EXPERT_CACHE_MAX_IDS;
  if (args.id_rows < 1 || args.id_columns < 1 || args.id_rows > most || args.id_columns > most ||
      args.id_rows * args.id_columns > most || args.id_row_stride < 0 || args.id_column_stride < 0)
    return EXPERT_CACHE_BAD_IDS;
  const int64_t rows = reach(args.id_rows, args.id_row_stride);
  const int64_t columns = reach(args.id_columns, args.id_column_stride);
  if (rows < 0 || columns < 0 || rows + columns > EXPERT_CACHE_MAX_ID_SPAN)
    return EXPERT_CACHE_BAD_IDS;

  const size_t bytes = args.id_type == EXPERT_CACHE_INT64 ? 8 : 4;
  if (!is_aligned(args.ids, bytes) || !is_aligned(args.row_ids, bytes))
    return EXPERT_CACHE_BAD_POINTER;
  const uintptr_t from = reinterpret_cast<uintptr_t>(args.ids);
  const uintptr_t to = reinterpret_cast<uintptr_t>(args.row_ids);
  const bool apart = from + (rows + columns + 1) * bytes <= to ||
                     to + args.id_rows * args.id_columns * bytes <= from;
  return apart ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_POINTER;
}

int check_map(const ExpertCacheManage &args) {
  if (!args.expert_map)
    return args.expert_ids || args.map_length ? EXPERT_CACHE_BAD_MAP : EXPERT_CACHE_OK;
  if (!is_aligned(args.expert_map, 4) || !is_aligned(args.expert_ids, 4))
    return EXPERT_CACHE_BAD_POINTER;
  return args.map_length >= args.experts ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_MAP;
}

int check_policy(int32_t policy, uint32_t decay) {
  switch (policy) {
    case EXPERT_CACHE_LRFU:
      return decay >= 1 && decay <= 65535 ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_DECAY;
    case EXPERT_CACHE_LFU:
      return decay >= 1 ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_DECAY;
    case EXPERT_CACHE_LRU:
    case EXPERT_CACHE_FIFO:
    case EXPERT_CACHE_SLRU:
      return decay == 0 ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_DECAY;
  }
  return EXPERT_CACHE_BAD_POLICY;
}

int check(const ExpertCacheManage *args) {
  if (!args) return EXPERT_CACHE_BAD_POINTER;
  if (args->experts < 2 || args->experts > EXPERT_CACHE_MAX_EXPERTS)
    return EXPERT_CACHE_BAD_EXPERTS;
  if (args->slots < 1 || args->slots >= args->experts) return EXPERT_CACHE_BAD_SLOTS;
  if (args->mode < EXPERT_CACHE_ROWS || args->mode > EXPERT_CACHE_SKIP)
    return EXPERT_CACHE_BAD_MODE;
  if (args->preloaded < 0 || args->preloaded > 1 ||
      (args->preloaded && args->mode != EXPERT_CACHE_ROWS))
    return EXPERT_CACHE_BAD_MODE;
  if (const int error = check_policy(args->policy, args->decay)) return error;
  if (!is_aligned(args->state, 16) || !is_aligned(args->counters, 8) ||
      (args->counters_mirror && !is_aligned(args->counters_mirror, 8)))
    return EXPERT_CACHE_BAD_POINTER;
  if (const int error = check_map(*args)) return error;
  // A step that reads through may be wider than any the kernel could serve.
  return args->mode == EXPERT_CACHE_SKIP ? EXPERT_CACHE_OK : check_ids(*args);
}

int check(const ExpertCachePreload *args) {
  if (!args || !is_aligned(args->state, 16)) return EXPERT_CACHE_BAD_POINTER;
  if (args->experts < 2 || args->experts > EXPERT_CACHE_MAX_EXPERTS)
    return EXPERT_CACHE_BAD_EXPERTS;
  if (args->slots < 1 || args->slots >= args->experts) return EXPERT_CACHE_BAD_SLOTS;
  return EXPERT_CACHE_OK;
}

int check(const ExpertCacheGather *args) {
  if (!args || !is_aligned(args->tensors, 8) || !is_aligned(args->state, 16))
    return EXPERT_CACHE_BAD_POINTER;
  if (args->tensor_count < 1 || args->tensor_count > EXPERT_CACHE_MAX_TENSORS)
    return EXPERT_CACHE_BAD_TENSORS;
  if (args->experts < 2 || args->experts > EXPERT_CACHE_MAX_EXPERTS)
    return EXPERT_CACHE_BAD_EXPERTS;
  const bool grid = args->chunks >= 1 && args->chunks <= 4096 && args->lanes >= 1 &&
                    args->lanes <= 4096 && args->device_lanes >= 0 &&
                    args->device_lanes <= 4096 &&
                    args->chunks * (args->lanes + args->device_lanes) <= 65535;
  switch (args->threads) {
    case 0:
    case 64:
    case 128:
    case 256:
    case 512:
    case 1024:
      return grid ? EXPERT_CACHE_OK : EXPERT_CACHE_BAD_GRID;
  }
  return EXPERT_CACHE_BAD_GRID;
}

// Ids at one stride become one row, which spares the kernel a division per id.
void flatten_ids(ExpertCacheManage *job) {
  const int64_t count = job->id_rows * job->id_columns;
  int64_t stride;
  if (job->id_rows == 1 || job->id_row_stride == job->id_columns * job->id_column_stride)
    stride = job->id_column_stride;
  else if (job->id_columns == 1)
    stride = job->id_row_stride;
  else
    return;
  job->id_rows = 1;
  job->id_columns = count;
  job->id_column_stride = stride;
}

// One work-item per expert, and for wide steps up to 1024 that share the ids.
uint32_t manage_threads(const ExpertCacheManage &job) {
  int64_t items = (job.id_rows * job.id_columns + kIdsAtOnce - 1) / kIdsAtOnce;
  if (items < job.experts) items = job.experts;
  if (items > kMaxExperts) items = kMaxExperts;
  return static_cast<uint32_t>((items + 63) / 64 * 64);
}

#if defined(EXPERT_CACHE_HOST)
constexpr int kGatherThreads = 64;
#else
constexpr int kGatherThreads = 512;
#endif

const char *own_error_string(int code) {
  switch (code) {
    case EXPERT_CACHE_OK:
      return "no error";
    case EXPERT_CACHE_BAD_EXPERTS:
      return "the number of experts must be 2 to 1024";
    case EXPERT_CACHE_BAD_SLOTS:
      return "the number of slots must be at least 1 and less than the number of experts";
    case EXPERT_CACHE_BAD_IDS:
      return "there must be 1 to 524288 routing ids, at strides of 0 or more, the last at most 2^40 "
             "elements behind the first";
    case EXPERT_CACHE_BAD_ID_TYPE:
      return "routing ids must be int32, int64 or uint32";
    case EXPERT_CACHE_BAD_POLICY:
      return "unknown policy code";
    case EXPERT_CACHE_BAD_DECAY:
      return "decay must be 1 to 65535 for lrfu, at least 1 for lfu and 0 for other policies";
    case EXPERT_CACHE_BAD_MODE:
      return "unknown mode, or preloaded is not 0, nor 1 in mode rows";
    case EXPERT_CACHE_BAD_POINTER:
      return "a pointer is null or not aligned for its type, or ids and row_ids overlap";
    case EXPERT_CACHE_BAD_TENSORS:
      return "the number of tensors must be 1 to 256";
    case EXPERT_CACHE_BAD_GRID:
      return "chunks and lanes must be 1 to 4096, device_lanes 0 to 4096, chunks times all lanes at "
             "most 65535, and threads 0, 64, 128, 256, 512 or 1024";
    case EXPERT_CACHE_BAD_SIZE:
      return "a byte count or a number of memories is zero, too large or not a multiple of the "
             "granularity";
    case EXPERT_CACHE_NO_MEMORY:
      return "out of memory or address space";
    case EXPERT_CACHE_UNSUPPORTED:
      return "not supported by this build of the kernel library or by the GPU driver";
    case EXPERT_CACHE_BAD_MAP:
      return "expert_map, expert_ids and map_length go together, and the map must be at least as "
             "long as the number of experts";
  }
  return "unknown error code of the kernel library";
}

}  // namespace
}  // namespace expert_cache

using namespace expert_cache;

extern "C" {

int expert_cache_abi_version(void) { return EXPERT_CACHE_ABI_VERSION; }

const char *expert_cache_backend(void) { return kBackend; }

const char *expert_cache_architectures(void) { return EXPERT_CACHE_ARCHITECTURES; }

const char *expert_cache_error_string(int code) {
  return code > 0 ? runtime_error_string(code) : own_error_string(code);
}

int expert_cache_manage(const ExpertCacheManage *args, void *stream) {
  if (const int error = check(args)) return error;
  ExpertCacheManage job = *args;
  if (job.mode == EXPERT_CACHE_SKIP) {
    job.id_rows = 1;
    job.id_columns = 0;
  } else {
    flatten_ids(&job);
  }
  const bool general = job.expert_map || job.preloaded;
  return launch(general ? expert_cache_manage_general_kernel : expert_cache_manage_kernel, dim3(1),
                dim3(manage_threads(job)), stream, job);
}

int expert_cache_gather(const ExpertCacheGather *args, void *stream) {
  if (const int error = check(args)) return error;
  const int threads = args->threads ? args->threads : kGatherThreads;
  const dim3 grid(args->chunks, args->lanes + args->device_lanes);
  return launch(expert_cache_gather_kernel, grid, dim3(threads), stream, *args);
}

int expert_cache_preload(const ExpertCachePreload *args, void *stream) {
  if (const int error = check(args)) return error;
  const uint32_t threads = (args->experts + 63) / 64 * 64;
  return launch(expert_cache_preload_kernel, dim3(1), dim3(threads), stream, *args);
}

int expert_cache_pointer_kind(const void *pointer, int32_t *kind) {
  if (!pointer || !kind) return EXPERT_CACHE_BAD_POINTER;
  return pointer_kind(pointer, kind);
}

int expert_cache_host_register(void *pointer, uint64_t bytes) {
  if (!pointer) return EXPERT_CACHE_BAD_POINTER;
  return bytes ? host_register(pointer, bytes) : EXPERT_CACHE_BAD_SIZE;
}

int expert_cache_host_unregister(void *pointer) {
  return pointer ? host_unregister(pointer) : EXPERT_CACHE_BAD_POINTER;
}

int expert_cache_memory_granularity(int device, uint64_t *bytes) {
  if (!bytes) return EXPERT_CACHE_BAD_POINTER;
  return memory_granularity(device, bytes);
}

int expert_cache_memory_create(int device, uint64_t bytes, ExpertCacheMemory **memory) {
  if (!memory) return EXPERT_CACHE_BAD_POINTER;
  return create_memory(device, bytes, memory);
}

int expert_cache_memory_free(ExpertCacheMemory *memory) {
  return memory ? free_memory(memory) : EXPERT_CACHE_BAD_POINTER;
}

int expert_cache_range_create(int device, ExpertCacheMemory *const *memories, int32_t count,
                              ExpertCacheRange **range, void **address) {
  if (!memories || !range || !address) return EXPERT_CACHE_BAD_POINTER;
  return create_range(device, memories, count, range, address);
}

int expert_cache_range_free(ExpertCacheRange *range) {
  return range ? free_range(range) : EXPERT_CACHE_BAD_POINTER;
}

int expert_cache_shuffle(uint64_t seed) {
#if defined(EXPERT_CACHE_HOST)
  emulation::shuffle_seed = seed;
  return EXPERT_CACHE_OK;
#else
  (void)seed;
  return EXPERT_CACHE_UNSUPPORTED;
#endif
}

}  // extern "C"
