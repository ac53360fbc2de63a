// A fuzzer of the C interface: what the header allows must do what docs/kernels.md says to the last
// bit, what it does not allow must be refused and change nothing, and neither may touch memory that
// it was not given. The library's own source is compiled in, so that the sanitizers see it.
//
//   clang++-19 -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
//     tests/kernels/fuzz/fuzz_interface.cpp -o fuzz && ./fuzz -max_total_time=3600
//
// -DEXPERT_CACHE_FUZZ_RANDOM adds a driver for compilers without libFuzzer: ./fuzz RUNS, or
// ./fuzz FILE to repeat an input.
#include "../../../hip/expert_cache.hip.cpp"

#include <dirent.h>

#include <memory>

#include "bytes.h"
#include "reference.h"
#include "rules.h"

namespace {

[[noreturn]] void fail(const char *what, int line) {
  fprintf(stderr, "fuzz_interface.cpp:%d: expected %s\n", line, what);
  abort();
}
#define EXPECT(condition) \
  do {                    \
    if (!(condition)) fail(#condition, __LINE__); \
  } while (0)

// A code must be 0 where nothing is wrong, else one that names something wrong.
#define EXPECT_CODE(code, errors) \
  EXPECT((errors) ? (code) < 0 && ((errors) >> -(code)&1) : (code) == EXPERT_CACHE_OK)

uint32_t random_decay(Bytes &in, int policy) {
  if (policy == EXPERT_CACHE_LRFU) return in.one_of({1, 63670, 65535, 32768});
  return policy == EXPERT_CACHE_LFU ? in.one_of({1, 2, 3, 64, UINT32_MAX}) : 0;
}

// Everything that lies in one tensor's three memories, and what must lie there.
class Tensor {
 public:
  Tensor(Bytes &in, int experts, int slots, bool plain)
      : bytes_(in.one_of({1, 2, 3, 4, 7, 12, 16, 33, 64, 100, 520, 4100})),
        stride_(bytes_ + in.one_of({0, 0, 0, 1, 4, 12, 16, 3})),
        source_(span(experts), in.one_of({0, 0, 0, 4, 1, 8})),
        slots_(span(plain ? slots : experts), in.one_of({0, 0, 0, 4, 1, 8})),
        scratch_(plain ? span(experts) : 0, in.one_of({0, 0, 0, 4, 1, 8})),
        plain_(plain) {
    uint32_t value = in.byte() + 1;
    for (const Memory *memory : {&source_, &slots_, &scratch_})
      for (uint8_t &byte : Range{memory}) byte = (value = value * 1664525 + 1013904223) >> 24;
    wanted_slots_.assign(slots_.begin(), slots_.end());
    wanted_scratch_.assign(scratch_.begin(), scratch_.end());
  }

  ExpertCacheTensor entry(int mode) const {
    uint8_t *rows = in_scratch(mode) ? scratch_.begin() : slots_.begin();
    return {source_.begin(), slots_.begin(), rows, bytes_, stride_};
  }

  void expect(const std::vector<Reference::Copy> &copies, int mode) {
    const std::vector<uint8_t> before = wanted_slots_;
    auto &rows = in_scratch(mode) ? wanted_scratch_ : wanted_slots_;
    for (const auto &[expert, from_slot, to_row, to_slot] : copies) {
      if (to_row < 0) continue;
      const uint8_t *from = source_.begin() + expert * stride_;
      if (from_slot >= 0) from = &before[from_slot * stride_];
      std::copy(from, from + bytes_, &rows[to_row * stride_]);
      if (to_slot >= 0) std::copy(from, from + bytes_, &wanted_slots_[to_slot * stride_]);
    }
    EXPECT(std::equal(wanted_slots_.begin(), wanted_slots_.end(), slots_.begin()));
    EXPECT(std::equal(wanted_scratch_.begin(), wanted_scratch_.end(), scratch_.begin()));
    EXPECT(source_.guard_intact() && slots_.guard_intact() && scratch_.guard_intact());
  }

 private:
  struct Range {
    const Memory *memory;
    uint8_t *begin() const { return memory->begin(); }
    uint8_t *end() const { return memory->end(); }
  };

  bool in_scratch(int mode) const { return plain_ && mode == EXPERT_CACHE_SCRATCH; }
  size_t span(int rows) const { return (rows - 1) * stride_ + bytes_; }

  int64_t bytes_, stride_;
  Memory source_, slots_, scratch_;
  bool plain_;
  std::vector<uint8_t> wanted_slots_, wanted_scratch_;
};

class Layer {
 public:
  Layer(Bytes &in, int experts, int slots, int policy)
      : plain_(in.one_in(3)), reference_(experts, slots, policy, random_decay(in, policy)),
        state_(EXPERT_CACHE_STATE_WORDS(experts) * 4), counters_(8 * EXPERT_CACHE_COUNTERS),
        mirror_(8 * EXPERT_CACHE_COUNTERS) {
    const bool scrambled = in.one_in(4);
    if (scrambled) scramble(in);
    const bool mirrored = !in.one_in(4);
    for (int64_t n = in.one_of({1, 2, 3, 20}); n > 0; n--)
      tensors_.emplace_back(in, experts, slots, plain_);
    put_state();
    args_.state = state_.as<int32_t>();
    args_.counters = counters_.as<int64_t>();
    args_.counters_mirror = mirrored ? mirror_.as<int64_t>() : nullptr;
    args_.experts = experts;
    args_.slots = slots;
    args_.policy = policy;
    args_.decay = reference_.decay;
    if (in.one_in(4)) add_map(in);
  }

  void step(Bytes &in) {
    choose_ids(in);
    args_.mode = choose_mode(in);
    Memory row_ids(args_.id_rows * args_.id_columns * id_size(), in.below(4) * id_size() % 16);
    args_.row_ids = row_ids.begin();
    args_.preloaded = args_.mode == EXPERT_CACHE_ROWS && !plain_ && in.one_in(3);
    if (args_.preloaded || (!plain_ && in.one_in(8))) preload(in);
    const std::vector<uint8_t> untouched(row_ids.begin(), row_ids.end());
    if (in.one_in(3)) refuse_manage(in);

    EXPECT(errors_of(args_) == 0);
    EXPECT(expert_cache_manage(&args_, nullptr) == EXPERT_CACHE_OK);
    const std::vector<int64_t> seen = read(ids_->begin(), args_.id_row_stride,
                                           args_.id_column_stride);
    const std::vector<int64_t> rows = reference_.manage(seen, args_.mode,
                                                            args_.preloaded);
    if (args_.mode == EXPERT_CACHE_SKIP)
      EXPECT(std::equal(untouched.begin(), untouched.end(), row_ids.begin()));
    else
      EXPECT(read(row_ids.begin(), args_.id_columns, 1) == rows);
    EXPECT(row_ids.guard_intact() && ids_->guard_intact());
    compare_state();
    if (args_.counters_mirror) EXPECT(!memcmp(mirror_.begin(), counters_.begin(), mirror_.bytes()));
    gather(in);
  }

 private:
  size_t id_size() const { return args_.id_type == EXPERT_CACHE_INT64 ? 8 : 4; }

  // An expert map as expert parallelism has it, and entries that no map should have.
  void add_map(Bytes &in) {
    const int experts = reference_.experts, length = experts + in.below(60);
    auto &map = reference_.expert_map, &ids = reference_.expert_ids;
    for (int i = 0; i < length; i++)
      map.push_back(in.one_of({-1, -1, -1, experts, INT32_MAX, INT32_MIN}));
    const int first = in.below(length), step = in.one_of({1, 1, length - 1});
    for (int e = 0; e < experts; e++) {
      ids.push_back((first + e * step) % length);
      map[ids.back()] = e;
    }
    map_.reset(new Memory(4 * length, in.below(4) * 4));
    expert_ids_.reset(new Memory(4 * experts, in.below(4) * 4));
    std::copy(map.begin(), map.end(), map_->as<int32_t>());
    std::copy(ids.begin(), ids.end(), expert_ids_->as<int32_t>());
    args_.expert_map = map_->as<int32_t>();
    args_.expert_ids = expert_ids_->as<int32_t>();
    args_.map_length = length;
  }

  // A state that some history could have left: ties, ages round the clamp, steps about to wrap.
  void scramble(Bytes &in) {
    Reference &r = reference_;
    r.step = static_cast<uint32_t>(in.stray());
    for (int64_t n = in.below(r.experts); n > 0; n--) {
      const int e = in.below(r.experts), row = in.below(plain_ ? r.slots : r.experts);
      if (r.row_of[e] < 0 && r.expert_at[row] < 0) r.row_of[e] = row, r.expert_at[row] = e;
    }
    for (int e = 0; e < r.experts; e++) {
      const bool resident = r.row_of[e] >= 0 && r.row_of[e] < r.slots;
      const uint32_t value = r.policy == EXPERT_CACHE_LFU && in.one_in(4) ? UINT32_MAX : in.byte();
      if (r.policy == EXPERT_CACHE_LRFU) r.score[e] = value << 12;
      if (r.policy == EXPERT_CACHE_LFU && resident) r.score[e] = value;
      if (r.policy == EXPERT_CACHE_SLRU && resident) r.score[e] = value & 1;
      r.last[e] = r.step - static_cast<uint32_t>(in.one_of({0, 1, 2, 3, 1 << 20, 1 << 21}));
    }
    for (int64_t &counter : r.counters) counter = in.one_of({0, 1, UINT32_MAX, 1ll << 40});
  }

  void put_state() {
    int32_t *words = state_.as<int32_t>();
    memset(words, 0, state_.bytes());
    words[0] = static_cast<int32_t>(reference_.step);
    words += EXPERT_CACHE_STATE_HEADER;
    words = std::copy(reference_.row_of.begin(), reference_.row_of.end(), words);
    words = std::copy(reference_.expert_at.begin(), reference_.expert_at.end(), words);
    words = std::copy(reference_.score.begin(), reference_.score.end(), words);
    std::copy(reference_.last.begin(), reference_.last.end(), words);
    std::copy(reference_.counters, reference_.counters + EXPERT_CACHE_COUNTERS,
              counters_.as<int64_t>());
  }

  void compare_state() {
    const Reference &r = reference_;
    const int32_t *words = state_.as<int32_t>();
    EXPECT(static_cast<uint32_t>(words[0]) == r.step);
    EXPECT(words[1] == static_cast<int32_t>(r.copies.size()));
    EXPECT(words[2] == r.copies_of_misses);
    for (int i = 3; i < EXPERT_CACHE_STATE_HEADER; i++) EXPECT(words[i] == 0);
    words += EXPERT_CACHE_STATE_HEADER;
    EXPECT(std::equal(r.row_of.begin(), r.row_of.end(), words));
    EXPECT(std::equal(r.expert_at.begin(), r.expert_at.end(), words += r.experts));
    const auto *numbers = reinterpret_cast<const uint32_t *>(words += r.experts);
    EXPECT(std::equal(r.score.begin(), r.score.end(), numbers));
    EXPECT(std::equal(r.last.begin(), r.last.end(), numbers + r.experts));
    words += 2 * r.experts;
    for (const Reference::Copy &copy : r.copies) {
      EXPECT(std::equal(copy.begin(), copy.end(), words));
      words += copy.size();
    }
    EXPECT(!memcmp(counters_.begin(), r.counters, sizeof r.counters));
  }

  // Shape, strides and values of a step's ids. A long list repeats what the input names.
  void choose_ids(Bytes &in) {
    args_.id_type = in.below(3);
    args_.id_rows = in.one_of({1, 1, 1, 2, 3, 8, 40});
    args_.id_columns = in.one_of({1, 2, 4, 8, 8, 33});
    if (in.byte() == 77) {  // rare: they take their time
      const int64_t most = EXPERT_CACHE_MAX_IDS / args_.id_columns;
      args_.id_rows = std::min(most, args_.id_rows * in.one_of({33, 129, 65536}));
    }
    args_.id_column_stride = in.one_of({1, 1, 1, 2, 0, 3});
    const int64_t dense = args_.id_columns * args_.id_column_stride;
    args_.id_row_stride = in.one_of({dense, dense, dense + 3, 0, 1, 2 * dense});
    // Strides that lead nowhere are the caller's own affair.
    if (args_.id_rows == 1 && in.one_in(4)) args_.id_row_stride = INT64_MAX;
    if (args_.id_columns == 1 && in.one_in(4)) args_.id_column_stride = INT64_MAX;
    const size_t elements = static_cast<size_t>(id_span(args_)) + 1;
    ids_.reset(new Memory(elements * id_size(), in.below(4) * id_size() % 16));
    args_.ids = ids_->begin();
    std::vector<int64_t> named;
    for (int64_t n = in.between(1, 40); n > 0; n--)
      named.push_back(in.one_in(9) ? in.stray()
                                   : in.below(std::max(args_.experts, args_.map_length)));
    for (size_t i = 0; i < elements; i++) write(i, named[(i + i / named.size()) % named.size()]);
  }

  void write(size_t at, int64_t id) {
    memcpy(ids_->begin() + at * id_size(), &id, id_size());  // little endian
  }

  std::vector<int64_t> read(const uint8_t *from, int64_t row_stride, int64_t column_stride) const {
    std::vector<int64_t> ids;
    for (int64_t r = 0; r < args_.id_rows; r++) {
      for (int64_t k = 0; k < args_.id_columns; k++) {
        // Unsigned: a stride that is never walked may be anything.
        const uint64_t at = uint64_t(r) * row_stride + uint64_t(k) * column_stride;
        int64_t wide = 0;
        memcpy(&wide, from + at * id_size(), id_size());
        if (args_.id_type == EXPERT_CACHE_INT32) wide = static_cast<int32_t>(wide);
        ids.push_back(wide);
      }
    }
    return ids;
  }

  // In plain storage a step may run on the slots only where it cannot need more rows.
  int choose_mode(Bytes &in) {
    if (in.one_in(8)) return EXPERT_CACHE_SKIP;
    const int64_t most = std::min<int64_t>(args_.experts, args_.id_rows * args_.id_columns);
    if (!plain_) return EXPERT_CACHE_ROWS;
    return most <= args_.slots && in.one_in(2) ? EXPERT_CACHE_ROWS : EXPERT_CACHE_SCRATCH;
  }

  // For the step that is about to be made, or for one that is not.
  void preload(Bytes &in) {
    ExpertCachePreload args = {args_.state, args_.experts, args_.slots};
    if (in.one_in(4)) {
      ExpertCachePreload bad = args;
      if (in.one_in(2)) bad.state = stray_pointer(in, bad.state);
      (in.one_in(2) ? bad.experts : bad.slots) = in.stray();
      if (const Errors errors = errors_of(bad))
        EXPECT_CODE(expert_cache_preload(&bad, nullptr), errors);
      EXPECT(expert_cache_preload(nullptr, nullptr) == EXPERT_CACHE_BAD_POINTER);
    }
    EXPECT(expert_cache_preload(&args, nullptr) == EXPERT_CACHE_OK);
    reference_.preload();
    compare_state();
    const int mode = args_.mode;
    args_.mode = EXPERT_CACHE_ROWS;
    gather(in);
    args_.mode = mode;
  }

  // One to three fields gone wrong: the call must be refused for one of its faults, untouched.
  void refuse_manage(Bytes &in) {
    ExpertCacheManage bad = args_;
    for (int64_t n = in.between(1, 3); n > 0; n--) {
      switch (in.below(19)) {
        case 0: bad.ids = nullptr; break;
        case 1: bad.row_ids = nullptr; break;
        case 2: bad.state = stray_pointer(in, bad.state); break;
        case 3: bad.counters = stray_pointer(in, bad.counters); break;
        case 4: bad.counters_mirror = stray_pointer(in, bad.counters); break;
        case 5: bad.ids = stray_pointer(in, bad.ids); break;
        case 6: bad.row_ids = ids_->begin() + in.byte(); break;
        case 7: bad.id_rows = in.stray(); break;
        case 8: bad.id_columns = in.stray(); break;
        case 9: bad.id_row_stride = in.stray(); break;
        case 10: bad.id_column_stride = in.stray(); break;
        case 11: bad.id_type = in.stray(); break;
        case 12: (in.one_in(2) ? bad.experts : bad.slots) = in.stray(); break;
        case 13: (in.one_in(2) ? bad.policy : bad.mode) = in.stray(); break;
        case 14: bad.decay = in.stray(); break;
        case 15: bad.expert_map = stray_pointer(in, bad.expert_map); break;
        case 16: bad.expert_ids = stray_pointer(in, bad.expert_ids); break;
        case 17: bad.map_length = in.stray(); break;
        case 18: bad.preloaded = in.stray(); break;
      }
    }
    const Errors errors = errors_of(bad);
    if (!errors) return;  // another good call: its memory is not there
    const int code = expert_cache_manage(&bad, nullptr);
    EXPECT_CODE(code, errors);
    EXPECT(expert_cache_manage(nullptr, nullptr) == EXPERT_CACHE_BAD_POINTER);
  }

  template <class T>
  static T *stray_pointer(Bytes &in, T *good) {
    const uintptr_t offset = in.one_of({1, 2, 3, 4, 8, 12});
    return in.one_in(4) ? nullptr
                        : reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(good) + offset);
  }

  void gather(Bytes &in) {
    std::vector<ExpertCacheTensor> table;
    for (const Tensor &tensor : tensors_) table.push_back(tensor.entry(args_.mode));
    ExpertCacheGather args = {};
    args.tensors = table.data();
    args.state = args_.state;
    args.tensor_count = static_cast<int32_t>(table.size());
    args.experts = args_.experts;
    args.chunks = in.one_of({1, 2, 3, 16});
    args.lanes = in.one_of({1, 2, 5});
    args.device_lanes = in.one_of({0, 0, 1, 3});
    args.threads = in.one_of({0, 64, 128, 1024});
    if (in.one_in(3)) refuse_gather(in, args);
    EXPECT(expert_cache_gather(&args, nullptr) == EXPERT_CACHE_OK);
    for (Tensor &tensor : tensors_) tensor.expect(reference_.copies, args_.mode);
  }

  static void refuse_gather(Bytes &in, ExpertCacheGather bad) {
    switch (in.below(8)) {
      case 0: bad.tensors = stray_pointer(in, bad.tensors); break;
      case 1: bad.state = stray_pointer(in, bad.state); break;
      case 2: bad.tensor_count = in.stray(); break;
      case 3: bad.experts = in.stray(); break;
      case 4: bad.chunks = in.stray(); break;
      case 5: bad.lanes = in.stray(); break;
      case 6: bad.threads = in.stray(); break;
      case 7: bad.device_lanes = in.stray(); break;
    }
    if (const Errors errors = errors_of(bad)) EXPECT_CODE(expert_cache_gather(&bad, nullptr), errors);
  }

  bool plain_;
  Reference reference_;
  Memory state_, counters_, mirror_;
  std::vector<Tensor> tensors_;
  std::unique_ptr<Memory> ids_, map_, expert_ids_;
  ExpertCacheManage args_ = {};
};

void fuzz_layer(Bytes &in) {
  const int experts = in.one_in(16) ? in.between(2, 1024) : in.between(2, 40);
  const int slots = in.between(1, experts - 1);
  Layer layer(in, experts, slots, in.below(5));
  int steps = experts > 40 ? 4 : 12;
  do layer.step(in);
  while (!in.empty() && --steps > 0);
}

int open_files() {
  DIR *folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

// Memories and ranges in any order, of any size: what a range shows is what its memories hold, and
// nothing stays open.
void fuzz_memory(Bytes &in) {
  const int files = open_files();
  uint64_t page = 0;
  EXPECT(expert_cache_memory_granularity(0, &page) == EXPERT_CACHE_OK);
  EXPECT(expert_cache_memory_granularity(0, nullptr) == EXPERT_CACHE_BAD_POINTER);
  struct Held {
    ExpertCacheMemory *memory;
    uint64_t pages;
    uint8_t mark;
  };
  std::vector<Held> held;
  std::vector<ExpertCacheRange *> ranges;
  for (int turn = 0; turn < 30 && !in.empty(); turn++) {
    const int kind = in.below(4);
    if (kind == 0) {
      const bool sound = !in.one_in(4);
      const uint64_t pages = in.between(1, 3);
      const uint64_t bytes = sound ? pages * page : in.stray();
      ExpertCacheMemory *memory = nullptr;
      const int code = expert_cache_memory_create(0, bytes, &memory);
      EXPECT(!sound || code == EXPERT_CACHE_OK);
      if (bytes == 0 || bytes % page) EXPECT(code == EXPERT_CACHE_BAD_SIZE);
      EXPECT((code == EXPERT_CACHE_OK) == (memory != nullptr));
      if (sound) held.push_back({memory, pages, static_cast<uint8_t>(turn + 1)});
      else if (memory) EXPECT(expert_cache_memory_free(memory) == EXPERT_CACHE_OK);
    } else if (kind == 1) {
      std::vector<ExpertCacheMemory *> parts;
      std::vector<Held> order;
      for (int64_t n = in.below(5); n > 0 && !held.empty(); n--) {
        order.push_back(held[in.below(held.size())]);
        parts.push_back(order.back().memory);
      }
      const bool hole = in.one_in(6) && !parts.empty();
      if (hole) parts[in.below(parts.size())] = nullptr;
      ExpertCacheRange *range = nullptr;
      void *address = nullptr;
      const int count = in.one_in(8) ? -1 : static_cast<int>(parts.size());
      ExpertCacheMemory *nothing[1] = {};
      const int code = expert_cache_range_create(0, parts.empty() ? nothing : parts.data(), count,
                                                 &range, &address);
      EXPECT((code == EXPERT_CACHE_OK) == (!hole && count > 0));
      EXPECT((code == EXPERT_CACHE_OK) == (range != nullptr && address != nullptr));
      if (!range) continue;
      ranges.push_back(range);
      auto *at = static_cast<uint8_t *>(address);
      for (const Held &h : order) memset(at, h.mark, h.pages * page), at += h.pages * page;
      at = static_cast<uint8_t *>(address);
      for (const Held &h : order) {
        EXPECT(at[0] == h.mark && at[h.pages * page - 1] == h.mark);
        at += h.pages * page;
      }
    } else if (kind == 2 && !ranges.empty()) {
      const size_t i = in.below(ranges.size());
      EXPECT(expert_cache_range_free(ranges[i]) == EXPERT_CACHE_OK);
      ranges.erase(ranges.begin() + i);
    } else {
      int32_t where;
      EXPECT(expert_cache_error_string(static_cast<int>(in.stray())) != nullptr);
      EXPECT(expert_cache_range_free(nullptr) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_memory_free(nullptr) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_memory_create(0, page, nullptr) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_pointer_kind(nullptr, &where) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_pointer_kind(&where, nullptr) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_host_register(nullptr, page) == EXPERT_CACHE_BAD_POINTER);
      EXPECT(expert_cache_host_register(&where, 0) == EXPERT_CACHE_BAD_SIZE);
      EXPECT(expert_cache_host_unregister(nullptr) == EXPERT_CACHE_BAD_POINTER);
    }
  }
  for (ExpertCacheRange *range : ranges) EXPECT(expert_cache_range_free(range) == EXPERT_CACHE_OK);
  for (const Held &h : held) EXPECT(expert_cache_memory_free(h.memory) == EXPERT_CACHE_OK);
  EXPECT(open_files() == files);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes in(data, size);
  const uint8_t kind = in.byte();
  expert_cache_shuffle(kind & 0x0F ? 0 : kind >> 4);
  if (kind % 8 == 7)
    fuzz_memory(in);
  else
    fuzz_layer(in);
  return 0;
}

#if defined(EXPERT_CACHE_FUZZ_RANDOM)
int main(int count, char **arguments) {
  const char *what = count > 1 ? arguments[1] : "10000";
  std::vector<uint8_t> data;
  if (FILE *file = fopen(what, "rb")) {
    for (int c; (c = fgetc(file)) != EOF;) data.push_back(c);
    return LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  uint64_t random = 1;
  for (long run = atol(what); run > 0; run--) {
    data.resize(random >> 33 & 511);
    for (uint8_t &byte : data)
      byte = (random = random * 6364136223846793005ull + 1442695040888963407ull) >> 56;
    random += run;
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  printf("Done %s runs\n", what);
}
#endif
