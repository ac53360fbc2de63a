// Runs manage and gather on the CPU over random routing and checks what must hold after every
// layer-step. Meant for the sanitizers, which see the kernels' own source here:
//
//   g++ -std=c++17 -O1 -g -fsanitize=address,undefined hip/tests/emulation_test.cpp -o test
//   g++ -std=c++17 -O1 -g -fsanitize=thread hip/tests/emulation_test.cpp -o test
//   ./test [SHUFFLE_SEED [STEPS]]
//
// The exact outcome of a step is compared with an independent reference elsewhere; here are the
// invariants that make a cache correct whatever its policy, and the order of victims.
#include "../expert_cache.hip.cpp"

#include <algorithm>
#include <tuple>

namespace {

[[noreturn]] void fail(const char *what, int line) {
  fprintf(stderr, "line %d: expected %s\n", line, what);
  exit(1);
}
#define EXPECT(condition) \
  do {                    \
    if (!(condition)) fail(#condition, __LINE__); \
  } while (0)

struct Random {
  uint64_t state;
  uint32_t below(uint32_t bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>((state >> 33) % bound);
  }
};

// Records of every alignment class, with gaps, tails and more than one tile.
struct RecordShape {
  int64_t bytes, stride;
};
const RecordShape kShapes[] = {{4096, 4096}, {20011, 20016}, {52, 52}, {2, 2}, {7, 9}, {33, 48}};

struct Case {
  int experts, slots, policy, mode, id_type, rows, columns;
  uint32_t decay;
  bool gaps;   // ids lie at strides that no flattening can merge
  bool large;  // all record shapes, else the small ones
};

class Layer {
 public:
  Layer(const Case &c, uint64_t seed) : c_(c), random_{seed} {
    words_.resize((EXPERT_CACHE_STATE_WORDS(c.experts) + 3) / 4);
    state_ = reinterpret_cast<int32_t *>(words_.data());
    std::fill(row_of(), row_of() + 2 * c.experts, -1);
    for (const RecordShape &shape : kShapes) {
      if (!c.large && shape.bytes > 100) continue;
      const size_t bytes = shape.stride * c.experts;
      Tensor t = {shape, std::vector<uint8_t>(bytes), std::vector<uint8_t>(bytes, kGap),
                  std::vector<uint8_t>(c.mode == EXPERT_CACHE_SCRATCH ? bytes : 0, kGap)};
      for (uint8_t &byte : t.source) byte = random_.below(kGap);
      tensors_.push_back(std::move(t));
    }
    for (Tensor &t : tensors_)
      table_.push_back({t.source.data(), t.slots.data(), t.rows(), t.shape.bytes, t.shape.stride});
  }

  void step(int mode) {
    draw_ids();
    remember();
    ExpertCacheManage args = {};
    args.ids = ids_.data();
    args.row_ids = row_ids_.data();
    args.id_rows = c_.rows;
    args.id_columns = c_.columns;
    args.id_row_stride = row_stride();
    args.id_column_stride = column_stride();
    args.state = state_;
    args.counters = counters_;
    args.counters_mirror = mirror_;
    args.id_type = c_.id_type;
    args.experts = c_.experts;
    args.slots = c_.slots;
    args.policy = c_.policy;
    args.decay = c_.decay;
    args.mode = mode;
    EXPECT(expert_cache_manage(&args, nullptr) == EXPERT_CACHE_OK);
    EXPECT(std::equal(mirror_, mirror_ + EXPERT_CACHE_COUNTERS, counters_));
    check_rows();
    if (mode == EXPERT_CACHE_SKIP) {
      EXPECT(state_[1] == 0);
      return;
    }
    check_row_ids();
    check_placement();
    ExpertCacheGather gather = {table_.data(), state_, static_cast<int>(table_.size()),
                                c_.experts, 3, 2, 0};
    EXPECT(expert_cache_gather(&gather, nullptr) == EXPERT_CACHE_OK);
    check_bytes();
    mark_slots();
  }

 private:
  static constexpr uint8_t kGap = 0xEE;  // never part of a record

  struct Tensor {
    RecordShape shape;
    std::vector<uint8_t> source, slots, scratch;
    uint8_t *rows() { return scratch.empty() ? slots.data() : scratch.data(); }
  };
  struct alignas(16) Words {
    int32_t word[4];
  };

  int32_t *row_of() { return state_ + EXPERT_CACHE_STATE_HEADER; }
  int32_t *expert_at() { return row_of() + c_.experts; }
  uint32_t *score() { return reinterpret_cast<uint32_t *>(expert_at() + c_.experts); }
  uint32_t *last() { return score() + c_.experts; }
  const int32_t *copy(int i) { return row_of() + 4 * c_.experts + 4 * i; }
  int id_bytes() const { return c_.id_type == EXPERT_CACHE_INT64 ? 8 : 4; }
  int column_stride() const { return c_.gaps ? 2 : 1; }
  int row_stride() const { return c_.columns * column_stride() + (c_.gaps ? 3 : 0); }

  int64_t read_id(const std::vector<uint8_t> &from, int64_t at) const {
    int64_t wide;
    int32_t narrow;
    if (c_.id_type == EXPERT_CACHE_INT64) {
      memcpy(&wide, &from[8 * at], 8);
      return wide;
    }
    memcpy(&narrow, &from[4 * at], 4);
    return c_.id_type == EXPERT_CACHE_UINT32 ? static_cast<uint32_t>(narrow) : narrow;
  }

  // Skewed ids, some repeated, one in eight invalid, now and then none valid.
  void draw_ids() {
    const bool idle = random_.below(12) == 0;
    ids_.assign(static_cast<size_t>(c_.rows) * row_stride() * id_bytes(), 0);
    row_ids_.assign(static_cast<size_t>(c_.rows) * c_.columns * id_bytes(), 0);
    expected_.clear();
    routed_.assign(c_.experts, 0);
    for (int r = 0; r < c_.rows; r++) {
      for (int k = 0; k < c_.columns; k++) {
        int64_t id = std::min(random_.below(c_.experts), random_.below(c_.experts));
        if (idle || random_.below(8) == 0) {
          const int64_t invalid[] = {-1, c_.experts, INT32_MIN, 0x100000000 + id};
          id = invalid[random_.below(c_.id_type == EXPERT_CACHE_INT64 ? 4 : 3)];
        }
        const int at = r * row_stride() + k * column_stride();
        memcpy(&ids_[static_cast<size_t>(at) * id_bytes()], &id, id_bytes());
        expected_.push_back(read_id(ids_, at));
        if (id >= 0 && id < c_.experts) routed_[id] = 1;
      }
    }
  }

  void remember() {
    row_before_.assign(row_of(), row_of() + c_.experts);
    for (int &row : row_before_)
      if (row >= c_.slots) row = -1;
    std::copy(counters_, counters_ + EXPERT_CACHE_COUNTERS, counters_before_);
    slots_before_.clear();
    for (Tensor &t : tensors_) slots_before_.push_back(t.slots);
    occupant_before_.assign(expert_at(), expert_at() + c_.slots);
  }

  bool is_hit(int e) const { return routed_[e] && row_before_[e] >= 0; }
  bool is_miss(int e) const { return routed_[e] && row_before_[e] < 0; }
  int64_t counted(int counter) const { return counters_[counter] - counters_before_[counter]; }

  void check_rows() {
    for (int e = 0; e < c_.experts; e++) {
      if (row_of()[e] >= 0) EXPECT(expert_at()[row_of()[e]] == e);
      if (expert_at()[e] >= 0) EXPECT(row_of()[expert_at()[e]] == e);
    }
  }

  void check_row_ids() {
    for (size_t i = 0; i < expected_.size(); i++) {
      const int64_t id = expected_[i];
      const bool rewritten = c_.mode == EXPERT_CACHE_ROWS && id >= 0 && id < c_.experts;
      EXPECT(read_id(row_ids_, i) == (rewritten ? row_of()[id] : id));
    }
  }

  void check_placement() {
    int hits = 0, misses = 0, admitted = 0;
    std::vector<std::tuple<uint32_t, int>> in, out;  // (inverted score, expert) of misses
    std::vector<int> victims;                        // slots in the order they were taken
    for (int e = 0; e < c_.experts; e++) {
      hits += is_hit(e);
      misses += is_miss(e);
      const bool resident = row_of()[e] >= 0 && row_of()[e] < c_.slots;
      if (is_hit(e)) EXPECT(row_of()[e] == row_before_[e]);
      if (!routed_[e]) EXPECT(!resident || row_of()[e] == row_before_[e]);
      if (!is_miss(e)) continue;
      if (c_.mode == EXPERT_CACHE_ROWS) EXPECT(row_of()[e] >= 0);
      (resident ? in : out).emplace_back(~score()[e], e);
      admitted += resident;
      if (resident) victims.push_back(row_of()[e]);
    }
    EXPECT(admitted == std::min(misses, c_.slots - hits));
    EXPECT(counted(EXPERT_CACHE_HITS) == hits && counted(EXPERT_CACHE_MISSES) == misses);
    EXPECT(counted(EXPERT_CACHE_OVERFLOW) == misses - admitted);
    EXPECT(counted(EXPERT_CACHE_STEPS) == (hits + misses > 0));
    EXPECT(counted(EXPERT_CACHE_IDLE) == (hits + misses == 0));
    EXPECT(state_[1] == (c_.mode == EXPERT_CACHE_ROWS ? misses : hits + misses));
    // lfu and slru change an expert's score as it enters or leaves.
    if (c_.policy == EXPERT_CACHE_LFU || c_.policy == EXPERT_CACHE_SLRU) return;
    if (!in.empty() && !out.empty())
      EXPECT(*std::max_element(in.begin(), in.end()) < *std::min_element(out.begin(), out.end()));
    for (size_t i = 1; i < victims.size(); i++)
      EXPECT(victim_order(victims[i - 1]) < victim_order(victims[i]));
    for (int slot = 0; slot < c_.slots && !victims.empty(); slot++)
      if (occupant_before_[slot] < 0 ? expert_at()[slot] < 0
                                     : expert_at()[slot] == occupant_before_[slot] &&
                                           !routed_[occupant_before_[slot]])
        EXPECT(victim_order(victims.back()) < victim_order(slot));
  }

  std::tuple<bool, uint32_t, uint32_t, int> victim_order(int slot) {
    const int e = occupant_before_[slot];
    if (e < 0) return {false, 0, 0, slot};
    return {true, score()[e], last()[e], slot};
  }

  // Every routed expert's record lies where the kernel will read it, from where it had to come;
  // slots hold what they held or their new expert's record; gaps are untouched.
  void check_bytes() {
    for (size_t k = 0; k < tensors_.size(); k++) {
      Tensor &t = tensors_[k];
      const int64_t stride = t.shape.stride;
      for (int e = 0; e < c_.experts; e++) {
        const uint8_t *source = t.source.data() + e * stride;
        const uint8_t *before = slots_before_[k].data() + row_before_[e] * stride;
        const uint8_t *content = row_before_[e] >= 0 ? before : source;
        const int read_at = c_.mode == EXPERT_CACHE_ROWS ? row_of()[e] : e;
        if (routed_[e]) EXPECT(!memcmp(t.rows() + read_at * stride, content, t.shape.bytes));
        if (row_of()[e] >= 0)
          EXPECT(!memcmp(t.slots.data() + row_of()[e] * stride, content, t.shape.bytes));
        for (int64_t i = t.shape.bytes; i < stride; i++)
          EXPECT(t.slots[e * stride + i] == kGap && t.rows()[e * stride + i] == kGap);
      }
    }
  }

  // Makes a resident's record differ from its host copy, to tell where later copies come from.
  void mark_slots() {
    for (Tensor &t : tensors_)
      for (int slot = 0; slot < c_.slots; slot++) t.slots[slot * t.shape.stride]++;
  }

  const Case c_;
  Random random_;
  std::vector<Words> words_;
  int32_t *state_;
  int64_t counters_[EXPERT_CACHE_COUNTERS] = {}, counters_before_[EXPERT_CACHE_COUNTERS] = {};
  int64_t mirror_[EXPERT_CACHE_COUNTERS] = {};
  std::vector<Tensor> tensors_;
  std::vector<ExpertCacheTensor> table_;
  std::vector<uint8_t> ids_, row_ids_;
  std::vector<int64_t> expected_;
  std::vector<uint8_t> routed_;
  std::vector<int> row_before_, occupant_before_;
  std::vector<std::vector<uint8_t>> slots_before_;
};

void run(const Case &c, int steps) {
  Layer layer(c, 1 + c.experts * 31 + c.policy);
  for (int i = 0; i < steps; i++) layer.step(i % 9 == 8 ? EXPERT_CACHE_SKIP : c.mode);
}

void check_aliases() {
  uint64_t page;
  EXPECT(expert_cache_memory_granularity(0, &page) == EXPERT_CACHE_OK);
  ExpertCacheMemory *memory[3];
  for (ExpertCacheMemory *&m : memory)
    EXPECT(expert_cache_memory_create(0, 2 * page, &m) == EXPERT_CACHE_OK);
  ExpertCacheMemory *first[] = {memory[0], memory[2]}, *second[] = {memory[1], memory[2]};
  ExpertCacheRange *range[2];
  void *address[2];
  EXPECT(expert_cache_range_create(0, first, 2, &range[0], &address[0]) == EXPERT_CACHE_OK);
  EXPECT(expert_cache_range_create(0, second, 2, &range[1], &address[1]) == EXPERT_CACHE_OK);
  char *a = static_cast<char *>(address[0]), *b = static_cast<char *>(address[1]);
  memset(a, 1, 4 * page);
  EXPECT(b[0] == 0 && b[2 * page - 1] == 0 && b[2 * page] == 1 && b[4 * page - 1] == 1);
  for (ExpertCacheRange *r : range) EXPECT(expert_cache_range_free(r) == EXPERT_CACHE_OK);
  for (ExpertCacheMemory *m : memory) EXPECT(expert_cache_memory_free(m) == EXPERT_CACHE_OK);
}

}  // namespace

int main(int count, char **arguments) {
  expert_cache_shuffle(count > 1 ? strtoull(arguments[1], nullptr, 10) : 0);
  const int steps = count > 2 ? atoi(arguments[2]) : 20;
  check_aliases();
  for (int mode : {EXPERT_CACHE_ROWS, EXPERT_CACHE_SCRATCH}) {
    for (int policy = EXPERT_CACHE_LRFU; policy <= EXPERT_CACHE_SLRU; policy++) {
      const uint32_t decay = policy == EXPERT_CACHE_LRFU  ? 63670
                             : policy == EXPERT_CACHE_LFU ? 4
                                                          : 0;
      // experts, slots, policy, mode, id type, ids, decay, gaps, large records
      run({2, 1, policy, mode, EXPERT_CACHE_INT32, 1, 1, decay, false, true}, steps);
      run({16, 8, policy, mode, EXPERT_CACHE_INT64, 1, 3, decay, false, true}, steps);
      run({67, 30, policy, mode, EXPERT_CACHE_INT64, 4, 8, decay, true, false}, steps);
      run({128, 16, policy, mode, EXPERT_CACHE_UINT32, 32, 2, decay, true, false}, steps);
    }
    run({1024, 700, EXPERT_CACHE_LRFU, mode, EXPERT_CACHE_INT32, 5, 1000, 63670, true, false}, 3);
  }
  printf("ok\n");
}
