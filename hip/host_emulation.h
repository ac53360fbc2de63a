// Runs kernels on the CPU: workgroups one after another, each work-item of a workgroup as a fiber
// of its own, everything in the calling thread and deterministic.
//
//   - A barrier that only part of a workgroup reaches aborts, with counts.
//   - Shared memory holds 0xA5 bytes when a workgroup starts, so a read of what nobody wrote shows.
//   - A shuffle seed runs the work-items between two barriers in a pseudo-random order.
//   - Under ThreadSanitizer work-items are unordered but for barriers, and workgroups of a launch
//     are unordered altogether, so that a missing barrier or an overlapping write is reported.
//   - Work-items that meet no barrier share one fiber: such a workgroup costs a plain loop.
//
// A kernel may declare one object of shared memory. Wave-wide operations are not provided.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "host_fiber.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define EXPERT_CACHE_SHARED(Type, name) Type &name = emulation::shared_memory<Type>()

struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {

inline std::atomic<uint64_t> shuffle_seed{0};

inline thread_local dim3 thread_index, block_index, block_size, grid_size;

// Runs the workgroups of one thread's launches. Only block.x work-items: the kernels use no more.
class Scheduler {
 public:
  static Scheduler &current() {
    static thread_local Scheduler scheduler;
    return scheduler;
  }

  void launch(dim3 grid, dim3 block, void (*call)(void *), void *closure) {
    Unobserved unobserved;
    call_ = call;
    closure_ = closure;
    block_size = block;
    grid_size = grid;
    order_.resize(block.x);
    for (uint32_t i = 0; i < block.x; i++) order_[i] = i;
    random_ = shuffle_seed.load();
    if (random_) random_ += 0x9E3779B97F4A7C15ull * ++launches_;
    main_.adopt_thread();
    start_.release();
    for (uint32_t y = 0; y < grid.y; y++)
      for (uint32_t x = 0; x < grid.x; x++) run_workgroup(dim3(x, y));
    end_.acquire();
    shared_.clear();
  }

  void barrier() {
    Unobserved unobserved;
    Fiber *self = current_;
    // Two edges in turn: arriving early at the next barrier must not order anything at this one.
    Edge &edge = barrier_[passed_ & 1];
    edge.release();
    waiting_.push_back(self);
    self->switch_to(main_);
    thread_index.x = self->item;
    edge.acquire();
  }

  void *shared(size_t bytes) {
    Unobserved unobserved;
    if (!shared_here_) {
      // Kept to the end of the launch: no workgroup gets another's memory.
      shared_.emplace_back(static_cast<char *>(malloc(bytes)), free);
      shared_here_ = shared_.back().get();
      memset(shared_here_, 0xA5, bytes);
    }
    return shared_here_;
  }

 private:
  void run_workgroup(dim3 index) {
    block_index = index;
    shared_here_ = nullptr;
    next_ = ended_ = passed_ = 0;
    fibers_used_ = 0;
    shuffle(order_);
    while (next_ < order_.size()) resume(unused_fiber());
    while (!waiting_.empty()) {
      if (waiting_.size() != order_.size()) report_divergence();
      passed_++;
      resuming_.swap(waiting_);
      waiting_.clear();
      shuffle(resuming_);
      for (Fiber *fiber : resuming_) resume(fiber);
    }
  }

  void resume(Fiber *fiber) {
    current_ = fiber;
    main_.switch_to(*fiber);
  }

  Fiber *unused_fiber() {
    if (fibers_used_ == fibers_.size()) fibers_.emplace_back(new Fiber(&Scheduler::fiber_body));
    return fibers_[fibers_used_++].get();
  }

  static void fiber_body() {
    Scheduler &scheduler = current();
    Fiber *self = scheduler.enter();
    for (;;) {
      scheduler.run_items(self);
      self->switch_to(scheduler.main_);
    }
  }

  Fiber *enter() {
    Unobserved unobserved;
    current_->entered_from(main_);
    return current_;
  }

  // One work-item, and the following ones as long as none has met a barrier. ThreadSanitizer
  // needs a fiber for each: what runs on one fiber is ordered.
  void run_items(Fiber *fiber) {
    Unobserved unobserved;
    do {
      thread_index.x = fiber->item = order_[next_++];
      start_.acquire();
      {
        Observed observed;
        call_(closure_);
      }
      end_.release();
      ended_++;
    } while (!kThreadSanitizer && passed_ == 0 && next_ < order_.size());
  }

  template <class T>
  void shuffle(std::vector<T> &items) {
    if (!random_) return;
    for (size_t i = items.size(); i > 1; i--) {
      random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(items[i - 1], items[(random_ >> 33) % i]);
    }
  }

  [[noreturn]] void report_divergence() {
    fprintf(stderr,
            "expert cache emulation: barrier divergence in workgroup (%u, %u): %zu of %zu "
            "work-items wait at barrier %u, %u have ended\n",
            block_index.x, block_index.y, waiting_.size(), order_.size(), passed_, ended_);
    abort();
  }

  void (*call_)(void *) = nullptr;
  void *closure_ = nullptr;
  Fiber main_;
  Fiber *current_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::unique_ptr<char, void (*)(void *)>> shared_;
  char *shared_here_ = nullptr;
  std::vector<uint32_t> order_;
  std::vector<Fiber *> waiting_, resuming_;
  size_t next_ = 0, fibers_used_ = 0;
  uint32_t passed_ = 0, ended_ = 0;   // barriers passed, work-items ended, in this workgroup
  uint64_t random_ = 0, launches_ = 0;
  Edge start_, end_, barrier_[2];
};

template <class Closure>
void launch(dim3 grid, dim3 block, Closure closure) {
  Scheduler::current().launch(
      grid, block, [](void *c) { (*static_cast<Closure *>(c))(); }, &closure);
}

template <class T>
T &shared_memory() {
  return *static_cast<T *>(Scheduler::current().shared(sizeof(T)));
}

// Read by every work-item, written by the scheduler between them: not the kernels' business.
EMULATION_UNOBSERVED inline dim3 read(const dim3 &value) { return value; }

}  // namespace emulation

#define threadIdx (emulation::read(emulation::thread_index))
#define blockIdx (emulation::read(emulation::block_index))
#define blockDim (emulation::read(emulation::block_size))
#define gridDim (emulation::read(emulation::grid_size))

inline void __syncthreads() { emulation::Scheduler::current().barrier(); }
