// Stacks to run work-items on, and what the sanitizers must be told about them.
// x86-64 switches stacks in eight instructions; elsewhere ucontext does (ten times slower).
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__has_feature)
#define EMULATION_CLANG_FEATURE(name) __has_feature(name)
#else
#define EMULATION_CLANG_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || EMULATION_CLANG_FEATURE(address_sanitizer)
#define EMULATION_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__) || EMULATION_CLANG_FEATURE(thread_sanitizer)
#define EMULATION_TSAN 1
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#define EMULATION_UNOBSERVED __attribute__((noinline, no_sanitize("thread")))
#else
#define EMULATION_UNOBSERVED
#endif
#if !defined(__x86_64__)
#define EMULATION_UCONTEXT 1
#endif
#if defined(EMULATION_UCONTEXT)
#include <ucontext.h>
#endif

namespace emulation {

#if defined(EMULATION_TSAN)
constexpr bool kThreadSanitizer = true;
inline void ignore_begin() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void ignore_end() {
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}
#else
constexpr bool kThreadSanitizer = false;
inline void ignore_begin() {}
inline void ignore_end() {}
#endif

// The emulator's own accesses are no part of the kernel: ThreadSanitizer looks away while an
// Unobserved lives, and looks again while an Observed lives inside it.
struct Unobserved {
  Unobserved() { ignore_begin(); }
  ~Unobserved() { ignore_end(); }
};
struct Observed {
  Observed() { ignore_end(); }
  ~Observed() { ignore_begin(); }
};

// A happens-before edge: what came before release() is ordered before what follows acquire().
class Edge {
 public:
#if defined(EMULATION_TSAN)
  void release() { __tsan_release(&tag_); }
  void acquire() { __tsan_acquire(&tag_); }

 private:
  char tag_ = 0;
#else
  void release() {}
  void acquire() {}
#endif
};

#if !defined(EMULATION_UCONTEXT)
extern "C" void expert_cache_switch_stack(void **saved, void *next);
__asm__(R"(
.pushsection .text
.weak expert_cache_switch_stack
.hidden expert_cache_switch_stack
.type expert_cache_switch_stack, @function
expert_cache_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size expert_cache_switch_stack, . - expert_cache_switch_stack
.popsection
)");
constexpr int kSavedRegisters = 6;
#endif

class Fiber {
 public:
  uint32_t item = 0;

  // The calling thread's own stack.
  Fiber() = default;

  // A stack of its own with a guard page below; `body` must never return.
  explicit Fiber(void (*body)()) : body_(body) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = kStackBytes + page;
    mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED || mprotect(mapping_, page, PROT_NONE) != 0) {
      perror("expert cache emulation: no memory for a work-item's stack");
      abort();
    }
    stack_ = static_cast<char *>(mapping_) + page;
    stack_bytes_ = kStackBytes;
    prepare();
#if defined(EMULATION_TSAN)
    tsan_ = __tsan_create_fiber(0);
#endif
  }

  ~Fiber() {
    if (!body_) return;
#if defined(EMULATION_TSAN)
    __tsan_destroy_fiber(tsan_);
#endif
    munmap(mapping_, mapped_);
  }

  Fiber(const Fiber &) = delete;
  Fiber &operator=(const Fiber &) = delete;

  void adopt_thread() {
#if defined(EMULATION_TSAN)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // The first thing a body does: completes the switch that `from` began.
  void entered_from(Fiber &from) {
#if defined(EMULATION_ASAN)
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    from.stack_ = const_cast<void *>(stack);
    from.stack_bytes_ = bytes;
#else
    (void)from;
#endif
  }

  // Called on this fiber; returns when somebody switches back to it.
  EMULATION_UNOBSERVED void switch_to(Fiber &next) {
#if defined(EMULATION_ASAN)
    __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.stack_bytes_);
#endif
#if defined(EMULATION_TSAN)
    __tsan_switch_to_fiber(next.tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(EMULATION_UCONTEXT)
    swapcontext(&context_, &next.context_);
#else
    expert_cache_switch_stack(&stack_pointer_, next.stack_pointer_);
#endif
#if defined(EMULATION_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;

  // The first frame of a new stack: its entry finds rsp as after a call, 8 modulo 16.
  void prepare() {
#if defined(EMULATION_UCONTEXT)
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = stack_bytes_;
    context_.uc_link = nullptr;
    makecontext(&context_, body_, 0);
#else
    void **top = reinterpret_cast<void **>(static_cast<char *>(stack_) + stack_bytes_);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(body_);
    for (int i = 0; i < kSavedRegisters; i++) *--top = nullptr;
    stack_pointer_ = top;
#endif
  }

  void (*body_)() = nullptr;
  void *mapping_ = nullptr, *stack_ = nullptr;
  size_t mapped_ = 0, stack_bytes_ = 0;
#if defined(EMULATION_UCONTEXT)
  ucontext_t context_;
#else
  void *stack_pointer_ = nullptr;
#endif
#if defined(EMULATION_ASAN)
  void *fake_stack_ = nullptr;
#endif
#if defined(EMULATION_TSAN)
  void *tsan_ = nullptr;
#endif
};

}  // namespace emulation
