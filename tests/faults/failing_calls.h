// Compiled in before the kernel library's source (-include), makes a chosen one of the calls fail
// with which the library asks the C library for memory, files and addresses.
#pragma once
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace failing {

inline long calls = 0, fails_at = -1;

inline bool now(int error) {
  if (calls++ != fails_at) return false;
  errno = error;
  return true;
}

inline void *allocate(size_t bytes) { return now(ENOMEM) ? nullptr : malloc(bytes); }

inline int create_file(const char *name, unsigned flags) {
  return now(EMFILE) ? -1 : memfd_create(name, flags);
}

inline int resize(int file, off_t bytes) { return now(ENOSPC) ? -1 : ftruncate(file, bytes); }

// Not where a range is given back: nothing can be done about a system that takes nothing back.
inline void *map(void *address, size_t bytes, int access, int flags, int file, off_t offset) {
  const bool gives_back = (flags & MAP_FIXED) && file < 0;
  return !gives_back && now(ENOMEM) ? MAP_FAILED : mmap(address, bytes, access, flags, file, offset);
}

}  // namespace failing

extern "C" {
// Counts from 0 again; the call of number `at` will fail, none if it is negative.
__attribute__((visibility("default"))) void failing_calls_start(long at) {
  failing::calls = 0;
  failing::fails_at = at;
}
__attribute__((visibility("default"))) long failing_calls_count(void) { return failing::calls; }
}

#define malloc(bytes) failing::allocate(bytes)
#define memfd_create(name, flags) failing::create_file(name, flags)
#define ftruncate(file, bytes) failing::resize(file, bytes)
#define mmap(address, bytes, access, flags, file, offset) \
  failing::map(address, bytes, access, flags, file, offset)
