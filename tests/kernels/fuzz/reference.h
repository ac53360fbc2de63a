// One layer of docs/kernels.md in plain serial C++, for the fuzzer: what numpy's reference in
// expert_cache_shim/policy.py is to the tests, at the speed that millions of inputs need. Written
// from the page, not from either implementation.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <vector>

#include "../../../hip/expert_cache.h"

struct Reference {
  using Copy = std::array<int32_t, 4>;  // expert, from_slot, to_row, to_slot

  int experts, slots, policy;
  uint32_t decay;
  uint32_t step = 0;
  std::vector<Copy> copies;  // those of misses first
  int copies_of_misses = 0;
  std::vector<int32_t> row_of, expert_at;
  std::vector<uint32_t> score, last;
  int64_t counters[EXPERT_CACHE_COUNTERS] = {};
  std::vector<int32_t> expert_map, expert_ids;  // both empty: ids are experts

  Reference(int experts, int slots, int policy, uint32_t decay)
      : experts(experts), slots(slots), policy(policy), decay(decay), row_of(experts, -1),
        expert_at(experts, -1), score(experts), last(experts) {}

  // ids: as numbers of their own type. Returns what row_ids must hold; empty in mode skip.
  std::vector<int64_t> manage(const std::vector<int64_t> &ids, int mode, bool preloaded) {
    const std::vector<int32_t> laid = row_of;
    forget();
    copies.clear();
    copies_of_misses = 0;
    if (mode == EXPERT_CACHE_SKIP) {
      counters[EXPERT_CACHE_READ_THROUGH]++;
      return {};
    }
    std::set<int> routed;
    int64_t valid = 0;
    for (int64_t id : ids)
      if (const int e = expert_of(id); e >= 0) routed.insert(e), valid++;
    if (routed.empty()) {
      counters[EXPERT_CACHE_IDLE]++;
      return ids;
    }
    step++;
    std::vector<int> hits, misses;
    for (int e : routed) (row_of[e] >= 0 ? hits : misses).push_back(e);
    update_scores(routed, hits);
    const std::vector<int32_t> rows_for_overflow =
        preloaded ? laid : std::vector<int32_t>(experts, -1);
    const int overflow = place(routed, misses, mode, rows_for_overflow);
    for (int e : misses) {
      const int32_t from = rows_for_overflow[e];
      if (mode == EXPERT_CACHE_SCRATCH)
        copies.push_back({e, -1, e, row_of[e]});
      else if (from < 0)
        copies.push_back({e, -1, row_of[e], -1});
      else if (row_of[e] < slots)
        copies.push_back({e, from, row_of[e], -1});
      else
        copies.push_back({e, -1, -1, -1});
    }
    copies_of_misses = static_cast<int>(copies.size());
    if (mode == EXPERT_CACHE_SCRATCH)
      for (int e : hits) copies.push_back({e, row_of[e], e, -1});
    counters[EXPERT_CACHE_STEPS]++;
    counters[EXPERT_CACHE_HITS] += hits.size();
    counters[EXPERT_CACHE_MISSES] += misses.size();
    counters[EXPERT_CACHE_OVERFLOW] += overflow;
    counters[EXPERT_CACHE_IDS] += valid;
    std::vector<int64_t> rows = ids;
    if (mode == EXPERT_CACHE_ROWS)
      for (int64_t &id : rows)
        if (const int e = expert_of(id); e >= 0)
          id = expert_map.empty() ? row_of[e] : expert_ids[row_of[e]];
    return rows;
  }

  void preload() {
    forget();
    copies.clear();
    copies_of_misses = 0;
    if (std::count(expert_at.begin(), expert_at.begin() + slots, -1)) return;
    int row = slots;
    for (int e = 0; e < experts; e++) {
      if (row_of[e] >= 0) continue;
      copies.push_back({e, -1, row, -1});
      expert_at[row] = e;
      row_of[e] = row++;
    }
    copies_of_misses = static_cast<int>(copies.size());
  }

 private:
  // -1 for an id that is not valid.
  int expert_of(int64_t id) const {
    if (!expert_map.empty())
      id = id >= 0 && id < static_cast<int64_t>(expert_map.size()) ? expert_map[id] : -1;
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
  }

  void forget() {
    for (int row = slots; row < experts; row++) expert_at[row] = -1;
    for (int32_t &row : row_of)
      if (row >= slots) row = -1;
  }

  void update_scores(const std::set<int> &routed, const std::vector<int> &hits) {
    if (policy == EXPERT_CACHE_LRFU)
      for (uint32_t &s : score) s = static_cast<uint32_t>(uint64_t{s} * decay >> 16);
    if (policy == EXPERT_CACHE_LFU && step % decay == 0)
      for (uint32_t &s : score) s >>= 1;
    for (int e : routed) {
      if (policy == EXPERT_CACHE_LRFU) score[e] += 65536;
      if (policy <= EXPERT_CACHE_LFU) last[e] = step;
    }
    for (int e : hits) {
      if (policy == EXPERT_CACHE_LFU && score[e] != UINT32_MAX) score[e]++;
      if (policy == EXPERT_CACHE_SLRU) score[e] = 1, last[e] = step;
    }
    if (policy == EXPERT_CACHE_SLRU) demote();
  }

  void demote() {
    std::vector<int> protected_slots;
    for (int slot : occupied_in_victim_order())
      if (score[expert_at[slot]] == 1) protected_slots.push_back(slot);
    const int surplus = static_cast<int>(protected_slots.size()) - 4 * slots / 5;
    std::vector<int> demoted;
    for (int i = 0; i < surplus; i++) demoted.push_back(expert_at[protected_slots[i]]);
    for (int e : demoted) score[e] = 0, last[e] = step;
  }

  std::vector<int> occupied_in_victim_order() const {
    std::vector<int> order;
    for (int slot = 0; slot < slots; slot++)
      if (expert_at[slot] >= 0) order.push_back(slot);
    std::sort(order.begin(), order.end(), [this](int a, int b) { return key(a) < key(b); });
    return order;
  }

  std::tuple<uint32_t, int64_t, int> key(int slot) const {
    const int e = expert_at[slot];
    const int64_t age = std::min<uint32_t>(step - last[e], (1u << 20) - 1);
    return {score[e], -age, slot};
  }

  // Steps 5 to 7; the number of misses that found no slot. laid: by expert, its laid row or -1.
  int place(const std::set<int> &routed, const std::vector<int> &misses, int mode,
            const std::vector<int32_t> &laid) {
    std::vector<int> available;
    for (int slot = 0; slot < slots; slot++)
      if (expert_at[slot] < 0) available.push_back(slot);
    for (int slot : occupied_in_victim_order())
      if (!routed.count(expert_at[slot])) available.push_back(slot);

    std::vector<int> best = misses;
    std::sort(best.begin(), best.end(), [this](int a, int b) {
      return std::make_tuple(~score[a], a) < std::make_tuple(~score[b], b);
    });
    if (best.size() > available.size()) best.resize(available.size());
    std::sort(best.begin(), best.end());
    for (size_t i = 0; i < best.size(); i++) admit(best[i], available[i]);

    int overflow = 0;
    for (int e : misses) {
      if (row_of[e] >= 0) continue;
      const int row = laid[e] >= 0 ? laid[e] : slots + overflow;
      overflow++;
      if (mode != EXPERT_CACHE_ROWS) continue;
      row_of[e] = row;
      expert_at[row] = e;
    }
    return overflow;
  }

  void admit(int e, int slot) {
    const int victim = expert_at[slot];
    const bool by_segment = policy == EXPERT_CACHE_LFU || policy == EXPERT_CACHE_SLRU;
    if (victim >= 0) {
      counters[EXPERT_CACHE_EVICTIONS]++;
      row_of[victim] = -1;
      if (by_segment) score[victim] = 0;
    }
    row_of[e] = slot;
    expert_at[slot] = e;
    if (by_segment) score[e] = policy == EXPERT_CACHE_LFU;
    if (policy == EXPERT_CACHE_SLRU || policy == EXPERT_CACHE_FIFO) last[e] = step;
  }
};
