// How fibers take turns, and how a grid is launched: what all kernels share, compiled once.
#include <sys/mman.h>

#include "emulator.h"

namespace emulator {

void enter() {
  Fiber* self = scheduler.current;
  self->body();
  self->done = true;
  yield();
}

__attribute__((noinline)) void resume(Fiber* fiber) {
  scheduler.current = fiber;
  if (!_setjmp(scheduler.home)) {
    if (fiber->started) _longjmp(fiber->here, 1);
    fiber->started = true;
    setcontext(&fiber->entry);
  }
  scheduler.current = nullptr;
}

constexpr size_t STACK = 128 << 10;

inline char* stack(size_t i) {  // of all kernels
  static std::vector<char*> stacks;
  while (stacks.size() <= i)
    stacks.push_back((char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return stacks[i];
}

void start(Fiber* fiber) {
  getcontext(&fiber->entry);
  const size_t i = scheduler.unfinished.size();
  fiber->entry.uc_stack.ss_sp = stack(i);
  fiber->entry.uc_stack.ss_size = STACK - i % 128 * 320;  // stacks that end alike would share a few lines of the caches
  fiber->entry.uc_link = nullptr;
  makecontext(&fiber->entry, enter, 0);
  scheduler.unfinished.push_back(fiber);
  scheduler.able[fiber->lazy].push_back(fiber);
}

void happen() {
  const unsigned i = pick(scheduler.events.size());
  auto event = std::move(scheduler.events[i]);
  scheduler.events[i] = std::move(scheduler.events.back());
  scheduler.events.pop_back();
  try {
    event();
  } catch (const std::runtime_error&) {  // kept in scheduler.error
  }
}

std::string stuck() {
  std::map<std::string, int> waits;
  for (Fiber* f : scheduler.unfinished) waits[f->what]++;
  std::string text = "deadlock:";
  for (auto& [what, count] : waits) text += " " + std::to_string(count) + " threads wait for " + what + ";";
  return text;
}

// One that can run, null if there is none; those that turn out to wait are asked again after a change.
Fiber* choose(std::vector<Fiber*>& able) {
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

Fiber* choose() {
  auto& [prompt, lazy] = scheduler.able;
  const bool fair = pick(64) == 0, lazy_first = fair && pick(prompt.size() + lazy.size() + 1) < lazy.size();
  Fiber* fiber = choose(lazy_first ? lazy : prompt);
  return fiber ? fiber : choose(lazy_first ? prompt : lazy);
}

template <class T>
void drop(std::vector<T*>& all, T* one) {
  *std::find(all.begin(), all.end(), one) = all.back();
  all.pop_back();
}

// Until every fiber has ended and every event has happened, or something failed.
void run() {
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

// Blocks of a cluster run at once, clusters one after another in random order.
std::string launch(Dim3 grid, u32 cluster_size, u32 threads, u32 shared, u32 seed,
                   const std::function<void()>& kernel) {
  scheduler.random.seed(seed);
  scheduler.error.clear();
  scheduler.delay = 1 << (seed % 3 * 8);  // copies that land at once, late, when everything waits for them
  block_size = {threads, 1, 1}, grid_size = grid;
  std::vector<u32> order(grid.x * grid.y * grid.z / cluster_size);
  for (u32 i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), scheduler.random);
  for (u32 number : order) {
    Cluster cluster;
    std::vector<std::unique_ptr<Thread>> all;
    for (u32 rank = 0; rank < cluster_size; rank++) {
      cluster.blocks.push_back(std::make_unique<Block>());
      Block& block = *cluster.blocks.back();
      const u32 flat = number * cluster_size + rank;
      block.cluster = &cluster, block.rank = rank, block.running = threads;
      block.index[0] = flat % grid.x, block.index[1] = flat / grid.x % grid.y, block.index[2] = flat / grid.x / grid.y;
      block.memory.assign(shared, 0xFF);
      block.unfenced.assign(shared / 4 + 1, 0);
      block.warps.resize((threads + 31) / 32);
      block.products.resize((threads + 127) / 128);
      bool lazy_warp = false;
      for (u32 i = 0; i < threads; i++) {
        if (i % 32 == 0) lazy_warp = pick(8) == 0;
        all.push_back(std::make_unique<Thread>());
        Thread& thread = *all.back();
        thread.block = &block, thread.index = i, thread.lazy = lazy_warp || pick(64) == 0;
        thread.body = [&kernel] {
          kernel();
          if (!self().products.empty()) fail("a thread ended before its products");
          for (auto& group : self().stores)
            if (*group) fail("a thread ended before its stores had read shared memory");
          if (!self().open.empty()) fail("a thread ended with stores that it did not commit");
          self().block->running--;
        };
        start(&thread);
      }
    }
    run();
    if (!scheduler.error.empty()) break;
  }
  return scheduler.error;
}

}  // namespace emulator
