// Fibers and a scheduler that picks the next one at random, from a seed: every CUDA thread is a fiber, and what the
// hardware does on its own (copies that land) is an event that happens at a random moment.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

struct Fiber {
  jmp_buf here;
  ucontext_t entry;
  std::function<void()> body;
  bool started = false, done = false;
  bool lazy = false;  // runs when no other can, mostly: what it should have done before others is missed
  bool (*ready)(void*) = nullptr;  // of what it waits for, null when it can run
  void* awaited = nullptr;
  const char* what = "";
};

struct Scheduler {
  std::mt19937 random;
  std::vector<Fiber*> live;
  std::vector<std::function<void()>> events;
  std::string error;
  Fiber* current = nullptr;
  jmp_buf home;
  unsigned delay = 16;  // an event happens before a step once in so many steps, and when no fiber can run
};

inline Scheduler scheduler;

inline unsigned pick(unsigned n) { return scheduler.random() % n; }

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

// Lets others run, then waits until `condition()` holds.
template <class F>
inline void wait_until(const char* what, F condition) {
  Fiber* self = scheduler.current;
  self->ready = [](void* f) { return (*(F*)f)(); };
  self->awaited = &condition;
  self->what = what;
  if (!condition() || pick(2)) yield();
  self->ready = nullptr;
}

inline void enter() {
  Fiber* self = scheduler.current;
  self->body();
  self->done = true;
  yield();
}

__attribute__((noinline)) inline void resume(Fiber* fiber) {
  scheduler.current = fiber;
  if (!_setjmp(scheduler.home)) {
    if (fiber->started) _longjmp(fiber->here, 1);
    fiber->started = true;
    setcontext(&fiber->entry);
  }
  scheduler.current = nullptr;
}

constexpr size_t STACK = 128 << 10;

inline char* stack(size_t i) {
  static std::vector<char*> stacks;
  while (stacks.size() <= i)
    stacks.push_back((char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return stacks[i];
}

inline void start(Fiber* fiber) {
  getcontext(&fiber->entry);
  fiber->entry.uc_stack.ss_sp = stack(scheduler.live.size());
  fiber->entry.uc_stack.ss_size = STACK;
  fiber->entry.uc_link = nullptr;
  makecontext(&fiber->entry, enter, 0);
  scheduler.live.push_back(fiber);
}

inline void happen() {
  const unsigned i = pick(scheduler.events.size());
  auto event = std::move(scheduler.events[i]);
  scheduler.events[i] = std::move(scheduler.events.back());
  scheduler.events.pop_back();
  try {
    event();
  } catch (const std::runtime_error&) {  // kept in scheduler.error
  }
}

inline std::string stuck() {
  std::map<std::string, int> waits;
  for (Fiber* f : scheduler.live) waits[f->what]++;
  std::string text = "deadlock:";
  for (auto& [what, count] : waits) text += " " + std::to_string(count) + " threads wait for " + what + ";";
  return text;
}

// Until every fiber has ended and every event has happened, or something failed.
inline void run() {
  auto& live = scheduler.live;
  while (scheduler.error.empty() && (!live.empty() || !scheduler.events.empty())) {
    if (!scheduler.events.empty() && pick(scheduler.delay) == 0) happen();
    size_t chosen = live.size(), lazy = live.size();
    const size_t first = live.empty() ? 0 : pick(live.size());
    const bool fair = pick(64) == 0;
    for (size_t i = 0; i < live.size() && chosen == live.size(); i++) {
      const size_t at = first + i < live.size() ? first + i : first + i - live.size();
      if (live[at]->ready && !live[at]->ready(live[at]->awaited)) continue;
      (live[at]->lazy && !fair ? lazy : chosen) = at;
    }
    if (chosen == live.size()) chosen = lazy;
    if (chosen < live.size()) {
      resume(live[chosen]);
      if (live[chosen]->done) {
        live[chosen] = live.back();
        live.pop_back();
      }
    } else if (!scheduler.events.empty()) {
      happen();
    } else if (!live.empty()) {
      scheduler.error = stuck();
    }
  }
  live.clear();
  scheduler.events.clear();
}

}  // namespace emulator
