// Fibers and a scheduler that picks the next one at random, from a seed: every CUDA thread is a fiber, and what the
// hardware does on its own (copies that land) is an event that happens at a random moment.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

struct Fiber;

// What a fiber can wait for. It is asked again only after a change, of which its owner tells: asking all that wait before
// every step took two thirds of the tests' time.
struct Awaited {
  std::vector<Fiber*> waiting;
  inline void changed();
};

struct Fiber {
  jmp_buf here;
  ucontext_t entry;
  std::function<void()> body;
  bool started = false, done = false;
  bool lazy = false;  // runs when no other can, mostly: what it should have done before others is missed
  bool (*ready)(void*) = nullptr;  // of what it waits for, null when it can run
  void* condition = nullptr;
  Awaited* on = nullptr;
  const char* what = "";
};

struct Random {  // splitmix64
  typedef uint32_t result_type;
  uint64_t state = 0;
  static constexpr uint32_t min() { return 0; }
  static constexpr uint32_t max() { return ~0u; }
  void seed(uint64_t s) { state = s; }
  uint32_t operator()() {
    uint64_t x = state += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    return (x ^ x >> 27) * 0x94D049BB133111EB >> 32;
  }
};

struct Scheduler {
  Random random;
  std::vector<Fiber*> unfinished;
  std::vector<Fiber*> able[2];  // of these, what may be able to run: the prompt and the lazy; the rest is `waiting`
  std::vector<std::function<void()>> events;
  std::string error;
  Fiber* current = nullptr;
  jmp_buf home;
  unsigned delay = 16;  // an event happens before a step once in so many steps, and when no fiber can run
};

inline Scheduler scheduler;

inline unsigned pick(unsigned n) { return (uint64_t)scheduler.random() * n >> 32; }

__attribute__((noinline)) inline void yield() {
  Fiber* self = scheduler.current;
  if (!_setjmp(self->here)) _longjmp(scheduler.home, 1);
}

// Ends the run with this message: a fiber does not come back, an event is left.
[[noreturn]] inline void fail(const std::string& message) {
  if (scheduler.error.empty()) scheduler.error = message;
  if (scheduler.current) yield();
  throw std::runtime_error(message);
}

inline void Awaited::changed() {
  for (Fiber* fiber : waiting) scheduler.able[fiber->lazy].push_back(fiber);
  waiting.clear();
}

// Lets others run, then waits until `condition()` holds, which only a change of `on` can bring about.
template <class F>
inline void wait_until(Awaited& on, const char* what, F condition) {
  Fiber* self = scheduler.current;
  self->ready = [](void* f) { return (*(F*)f)(); };
  self->condition = &condition;
  self->on = &on;
  self->what = what;
  if (!condition() || pick(2)) yield();
  self->ready = nullptr;
}

}  // namespace emulator
