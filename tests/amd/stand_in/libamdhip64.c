/* A stand-in for libamdhip64: it has the HIP functions that the kernel library calls, records
 * every call as one line of text, fails on request, and maps host memory where HIP would map
 * device memory. So loading, registration, launch arguments and virtual memory can be tested
 * with no AMD GPU. Types and calling conventions are those of HIP 5 to 7.
 *
 * Driven from Python through the stand_in_* functions at the end. Not thread-safe. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE_FUNCTION = 98 };

/* ---- recording and failing ---- */

static char record[1 << 20];
static size_t record_length;
static int last_error;
static struct {
  char function[64];
  int calls_left;
  int code;
} failure;

static void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int written = vsnprintf(record + record_length, sizeof record - record_length, format, arguments);
  va_end(arguments);
  if (written < 0 || record_length + (size_t)written + 1 >= sizeof record) abort();
  record_length += (size_t)written;
  record[record_length++] = '\n';
  record[record_length] = 0;
}

static int finish(int code) {
  if (code != OK) last_error = code;
  return code;
}

/* The error that the test asked this call to return, or OK. */
static int injected(const char *function) {
  if (strcmp(function, failure.function) != 0 || --failure.calls_left != 0) return OK;
  failure.function[0] = 0;
  return finish(failure.code);
}

#define RETURN_IF_INJECTED()             \
  do {                                   \
    int code_ = injected(__func__);      \
    if (code_ != OK) return code_;       \
  } while (0)

/* ---- registration and launch ---- */

typedef struct {
  uint32_t x, y, z;
} dim3;

struct fat_binary {
  uint32_t magic, version;
  const char *bundle;
  void *unused;
};

enum { MAX_KERNELS = 64, MAX_ARGUMENTS = 32 };
static struct kernel {
  const void *handle;
  char name[256];
  int argument_count;
  size_t argument_sizes[MAX_ARGUMENTS];
} kernels[MAX_KERNELS];
static int kernel_count;
static struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

void **__hipRegisterFatBinary(const struct fat_binary *binary) {
  static void *module;
  note("__hipRegisterFatBinary magic=0x%x version=%u bundle=%.24s", binary->magic, binary->version,
       binary->bundle);
  return &module;
}

void __hipUnregisterFatBinary(void **module) {
  (void)module;
  note("__hipUnregisterFatBinary");
}

static struct kernel *find_kernel(const void *handle, const char *name) {
  for (int i = 0; i < kernel_count; i++)
    if (kernels[i].handle == handle || (name && strcmp(kernels[i].name, name) == 0)) return &kernels[i];
  return NULL;
}

void __hipRegisterFunction(void **module, const void *handle, char *device_name, const char *name,
                           unsigned thread_limit, void *thread, void *block, void *block_size,
                           void *grid_size, int *wave_size) {
  (void)module, (void)device_name, (void)thread_limit, (void)thread, (void)block;
  (void)block_size, (void)grid_size, (void)wave_size;
  if (kernel_count == MAX_KERNELS) abort();
  struct kernel *kernel = &kernels[kernel_count++];
  kernel->handle = handle;
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  note("__hipRegisterFunction name=%s", name);
}

int __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return OK;
}

int __hipPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return OK;
}

int hipLaunchKernel(const void *handle, dim3 grid, dim3 block, void **arguments, size_t shared,
                    void *stream) {
  char bytes[4096] = "";
  size_t length = 0;
  struct kernel *kernel = find_kernel(handle, NULL);
  RETURN_IF_INJECTED();
  if (!kernel) return finish(INVALID_DEVICE_FUNCTION);
  for (int i = 0; i < kernel->argument_count; i++) {
    for (size_t j = 0; j < kernel->argument_sizes[i] && length + 3 < sizeof bytes; j++)
      length += (size_t)sprintf(bytes + length, "%02x", ((const uint8_t *)arguments[i])[j]);
    bytes[length++] = ',';
    bytes[length] = 0;
  }
  note("hipLaunchKernel name=%s grid=%u,%u,%u block=%u,%u,%u shared=%zu stream=%p arguments=%s",
       kernel->name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, bytes);
  return OK;
}

/* ---- errors, versions, pointers ---- */

int hipGetLastError(void) {
  int code = last_error;
  last_error = OK;
  return code;
}

const char *hipGetErrorString(int code) {
  switch (code) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_DEVICE_FUNCTION: return "invalid device function";
    case 719: return "unspecified launch failure";
    case 801: return "operation not supported";
    default: return "unknown error";
  }
}

static int runtime_version = 70000000;
int hipRuntimeGetVersion(int *version) {
  RETURN_IF_INJECTED();
  *version = runtime_version;
  return OK;
}

struct pointer_attributes {
  int type, device;
  void *device_pointer, *host_pointer;
  int is_managed;
  unsigned allocation_flags;
};

static int pointer_type;
int hipPointerGetAttributes(struct pointer_attributes *attributes, const void *pointer) {
  RETURN_IF_INJECTED();
  note("hipPointerGetAttributes pointer=%p", pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = pointer_type;
  return OK;
}

int hipHostRegister(void *pointer, size_t size, unsigned flags) {
  RETURN_IF_INJECTED();
  note("hipHostRegister pointer=%p size=%zu flags=%u", pointer, size, flags);
  return OK;
}

int hipHostUnregister(void *pointer) {
  RETURN_IF_INJECTED();
  note("hipHostUnregister pointer=%p", pointer);
  return OK;
}

/* ---- virtual memory: reservations of address space, memfds for physical memory ---- */

static int live_handles, live_reservations, live_mappings;

#ifndef WITHOUT_VIRTUAL_MEMORY

enum { GRANULARITY = 2 << 20, MAX_HANDLES = 256 };

struct location {
  int type, id;
};

struct properties {
  int type, handle_types;
  struct location location;
};

static struct {
  int file;
  size_t size;
} handles[MAX_HANDLES]; /* a handle is an index from 1 on; size 0: free */

int hipMemGetAllocationGranularity(size_t *bytes, const struct properties *properties, int option) {
  RETURN_IF_INJECTED();
  note("hipMemGetAllocationGranularity type=%d location=%d,%d option=%d", properties->type,
       properties->location.type, properties->location.id, option);
  *bytes = GRANULARITY;
  return OK;
}

int hipMemCreate(void **handle, size_t size, const struct properties *properties,
                 unsigned long long flags) {
  RETURN_IF_INJECTED();
  if (size == 0 || size % GRANULARITY) return finish(INVALID_VALUE);
  size_t index = 1;
  while (index < MAX_HANDLES && handles[index].size) index++;
  if (index == MAX_HANDLES) return finish(OUT_OF_MEMORY);
  handles[index].file = memfd_create("device memory", 0);
  if (handles[index].file < 0 || ftruncate(handles[index].file, (off_t)size)) abort();
  handles[index].size = size;
  live_handles++;
  *handle = (void *)index;
  note("hipMemCreate handle=%zu size=%zu type=%d location=%d,%d flags=%llu", index, size,
       properties->type, properties->location.type, properties->location.id, flags);
  return OK;
}

int hipMemRelease(void *handle) {
  size_t index = (size_t)handle;
  note("hipMemRelease handle=%zu", index);
  if (index == 0 || index >= MAX_HANDLES || !handles[index].size) return finish(INVALID_VALUE);
  close(handles[index].file);
  handles[index].size = 0;
  live_handles--;
  return OK;
}

int hipMemAddressReserve(void **address, size_t size, size_t alignment, void *hint,
                         unsigned long long flags) {
  RETURN_IF_INJECTED();
  void *base = mmap(hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return finish(OUT_OF_MEMORY);
  *address = base;
  live_reservations++;
  note("hipMemAddressReserve address=%p size=%zu alignment=%zu flags=%llu", base, size, alignment, flags);
  return OK;
}

int hipMemAddressFree(void *address, size_t size) {
  note("hipMemAddressFree address=%p size=%zu", address, size);
  munmap(address, size);
  live_reservations--;
  return OK;
}

/* Like the real one, it maps a handle whole and from its start, or not at all. */
int hipMemMap(void *address, size_t size, size_t offset, void *handle, unsigned long long flags) {
  size_t index = (size_t)handle;
  RETURN_IF_INJECTED();
  if (index == 0 || index >= MAX_HANDLES || offset != 0 || size != handles[index].size)
    return finish(INVALID_VALUE);
  if (mmap(address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[index].file, 0) == MAP_FAILED) abort();
  live_mappings++;
  note("hipMemMap address=%p size=%zu offset=%zu handle=%zu flags=%llu", address, size, offset, index,
       flags);
  return OK;
}

int hipMemUnmap(void *address, size_t size) {
  note("hipMemUnmap address=%p size=%zu", address, size);
  mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  live_mappings--;
  return OK;
}

struct access {
  struct location location;
  int flags;
};

int hipMemSetAccess(void *address, size_t size, const struct access *access, size_t count) {
  RETURN_IF_INJECTED();
  note("hipMemSetAccess address=%p size=%zu location=%d,%d access=%d count=%zu", address, size,
       access->location.type, access->location.id, access->flags, count);
  if (mprotect(address, size, PROT_READ | PROT_WRITE)) abort();
  return OK;
}

#endif

/* ---- for the tests ---- */

const char *stand_in_record(void) { return record; }

void stand_in_forget(void) { record[record_length = 0] = 0; }

/* The nth call of `function` from now on returns `code` and does nothing. */
void stand_in_fail(const char *function, int nth, int code) {
  snprintf(failure.function, sizeof failure.function, "%s", function);
  failure.calls_left = nth;
  failure.code = code;
}

void stand_in_set_version(int version) { runtime_version = version; }

/* The hipMemoryType that every pointer has from now on. */
void stand_in_set_pointer_type(int type) { pointer_type = type; }

/* Adds the next argument of a registered kernel, as its code object describes it. */
int stand_in_add_argument(const char *kernel_name, size_t size) {
  struct kernel *kernel = find_kernel(NULL, kernel_name);
  if (!kernel || kernel->argument_count == MAX_ARGUMENTS) return INVALID_VALUE;
  kernel->argument_sizes[kernel->argument_count++] = size;
  return OK;
}

int stand_in_live_handles(void) { return live_handles; }
int stand_in_live_reservations(void) { return live_reservations; }
int stand_in_live_mappings(void) { return live_mappings; }
