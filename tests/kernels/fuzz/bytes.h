// An input of the fuzzer as choices, and memory that ends where its last byte does.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }

  uint8_t byte() { return empty() ? 0 : *at_++; }

  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value = value << 8 | byte();
    return value;
  }

  // 0..bound-1, from as few bytes as that needs.
  int64_t below(int64_t bound) {
    uint64_t value = byte();
    for (int64_t reach = 256; reach < bound; reach *= 256) value = value << 8 | byte();
    return static_cast<int64_t>(value % static_cast<uint64_t>(bound));
  }

  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

  bool one_in(int n) { return byte() % n == 1; }

  int64_t one_of(std::initializer_list<int64_t> values) {
    return values.begin()[byte() % values.size()];
  }

  // What a caller with a fault might pass: edges of types and of our limits and their neighbours,
  // or anything.
  int64_t stray() {
    if (one_in(8)) return static_cast<int64_t>(word());
    const int64_t edge = one_of({0, 2, 64, 96, 256, 1024, 4096, 65536, 524288, INT32_MAX, INT32_MIN,
                                 1ll << 32, 1ll << 40, 1ll << 62, INT64_MAX, INT64_MIN});
    return static_cast<int64_t>(static_cast<uint64_t>(edge) + below(3) - 1);
  }

 private:
  const uint8_t *at_, *end_;
};

// `bytes` bytes, `offset` (0..15) behind a 16-byte boundary. Under AddressSanitizer a touch of the
// byte after the last ends the program; the bytes before the first are checked here.
class Memory {
 public:
  explicit Memory(size_t bytes, size_t offset = 0)
      : memory_(static_cast<uint8_t *>(malloc(offset + bytes))), offset_(offset), bytes_(bytes) {
    if (!memory_) abort();
    memset(memory_, kGuard, offset + bytes);
  }
  Memory(Memory &&other) : memory_(other.memory_), offset_(other.offset_), bytes_(other.bytes_) {
    other.memory_ = nullptr;
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  ~Memory() { free(memory_); }

  template <class T>
  T *as() const { return reinterpret_cast<T *>(memory_ + offset_); }
  uint8_t *begin() const { return memory_ + offset_; }
  uint8_t *end() const { return begin() + bytes_; }
  size_t bytes() const { return bytes_; }

  bool guard_intact() const {
    for (size_t i = 0; i < offset_; i++)
      if (memory_[i] != kGuard) return false;
    return true;
  }

 private:
  static constexpr uint8_t kGuard = 0xA5;
  uint8_t *memory_;
  size_t offset_, bytes_;
};
