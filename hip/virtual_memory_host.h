// Virtual memory on the CPU: a memory file per piece, mapped shared wherever it is wanted, so that
// aliases are as real as on a GPU. Interface: virtual_memory.h.
#pragma once
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

namespace expert_cache {
namespace driver {

typedef int Handle;  // of a memory file
constexpr uint64_t kMaxPieceBytes = 0;

inline int last_error() {
  if (errno == ENOMEM) return EXPERT_CACHE_NO_MEMORY;
  if (errno == ENOSYS) return EXPERT_CACHE_UNSUPPORTED;
  return errno;
}

inline int granularity(int, uint64_t *bytes) {
  *bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return EXPERT_CACHE_OK;
}

inline int create(int, uint64_t bytes, Handle *handle) {
  const int file = memfd_create("expert_cache", MFD_CLOEXEC);
  if (file < 0) return last_error();
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    const int error = last_error();
    close(file);
    return error;
  }
  *handle = file;
  return EXPERT_CACHE_OK;
}

inline int release(Handle handle) { return close(handle) == 0 ? EXPERT_CACHE_OK : last_error(); }

inline int reserve(uint64_t bytes, void **address) {
  void *reserved =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return last_error();
  *address = reserved;
  return EXPERT_CACHE_OK;
}

inline int unreserve(void *address, uint64_t bytes) {
  return munmap(address, bytes) == 0 ? EXPERT_CACHE_OK : last_error();
}

inline int map(void *address, uint64_t bytes, Handle handle) {
  void *mapped =
      mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handle, 0);
  return mapped == MAP_FAILED ? last_error() : EXPERT_CACHE_OK;
}

// Reserving the pages again rather than unmapping them leaves no hole that others could be given.
inline int unmap(void *address, uint64_t bytes) {
  void *reserved = mmap(address, bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved == MAP_FAILED ? last_error() : EXPERT_CACHE_OK;
}

inline int allow_access(int, void *, uint64_t) { return EXPERT_CACHE_OK; }

}  // namespace driver
}  // namespace expert_cache
