// Fibers and a scheduler that picks the next one at random, from a seed: every CUDA thread is a fiber, and what the
// hardware does on its own (copies that land) is an event that happens at a random moment.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
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

struct Scheduler {
  std::mt19937 random;
  std::vector<Fiber*> unfinished;
  std::vector<Fiber*> able[2];  // of these, what may be able to run: the prompt and the lazy; the rest is `waiting`
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
  fiber->entry.uc_stack.ss_sp = stack(scheduler.unfinished.size());
  fiber->entry.uc_stack.ss_size = STACK;
  fiber->entry.uc_link = nullptr;
  makecontext(&fiber->entry, enter, 0);
  scheduler.unfinished.push_back(fiber);
  scheduler.able[fiber->lazy].push_back(fiber);
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
  for (Fiber* f : scheduler.unfinished) waits[f->what]++;
  std::string text = "deadlock:";
  for (auto& [what, count] : waits) text += " " + std::to_string(count) + " threads wait for " + what + ";";
  return text;
}

// One that can run, null if there is none; those that turn out to wait are asked again after a change.
inline Fiber* choose(std::vector<Fiber*>& able) {
  while (!able.empty()) {
    Fiber*& place = able[pick(able.size())];
    Fiber* fiber = place;
    if (!fiber->ready || fiber->ready(fiber->condition)) return fiber;
    fiber->on->waiting.push_back(fiber);
    place = able.back();
    able.pop_back();
  }
  return nullptr;
}

inline Fiber* choose() {
  auto& [prompt, lazy] = scheduler.able;
  const bool fair = pick(64) == 0, lazy_first = fair && pick(prompt.size() + lazy.size() + 1) < lazy.size();
  Fiber* fiber = choose(lazy_first ? lazy : prompt);
  return fiber ? fiber : choose(lazy_first ? prompt : lazy);
}

template <class T>
inline void drop(std::vector<T*>& all, T* one) {
  *std::find(all.begin(), all.end(), one) = all.back();
  all.pop_back();
}

// Until every fiber has ended and every event has happened, or something failed.
inline void run() {
  auto& unfinished = scheduler.unfinished;
  while (scheduler.error.empty() && (!unfinished.empty() || !scheduler.events.empty())) {
    if (!scheduler.events.empty() && pick(scheduler.delay) == 0) happen();
    if (Fiber* fiber = choose()) {
      resume(fiber);
      if (fiber->done) drop(unfinished, fiber), drop(scheduler.able[fiber->lazy], fiber);
    } else if (!scheduler.events.empty()) {
      happen();
    } else if (!unfinished.empty()) {
      scheduler.error = stuck();
    }
  }
  unfinished.clear(), scheduler.events.clear();
  for (auto& able : scheduler.able) able.clear();
}

}  // namespace emulator
