// How fibers take turns, how a grid is launched, products and copies: what all kernels share, compiled once.
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

// --- Shared memory and products --------------------------------------------------------------------------------------

void Block::outside(u32 address, u32 bytes) const {
  fail("shared memory: address " + std::to_string(address) + " for " + std::to_string(bytes) + " bytes");
}

Barrier& Block::barrier(u32 address) {
  must_run();
  auto found = barriers.find(address);
  if (found == barriers.end()) fail("no barrier was made at " + std::to_string(address));
  return found->second;
}

// The copy engine and wgmma read these bytes: ordinary writes must have been fenced by their writers.
void Block::must_be_fenced(u32 address, u32 bytes, const char* reader) const {
  if (unfenced_words == 0) return;
  for (u32 w = (address - SHARED_START) / 4; w <= (address - SHARED_START + bytes - 1) / 4; w++)
    if (unfenced[w])
      fail(std::string(reader) + " reads what thread " + std::to_string(unfenced[w] - 1) +
           " wrote to shared memory without a fence");
}

void ordinary_write(u32 address, const void* from, u32 bytes) {
  Block& block = *self().block;
  memcpy(block.at(address, bytes), from, bytes);
  for (u32 w = (address - SHARED_START) / 4; w <= (address - SHARED_START + bytes - 1) / 4; w++) {
    if (!block.unfenced[w]) block.unfenced_words++;
    block.unfenced[w] = self().index + 1;
    self().written.push_back(w);
  }
}

// 32 bytes of a row: of e4m3 or int8, or of 16-bit elements (`wide`), of which there are 16.
void read_operand(const Product& p, u64 descriptor, u32 row, float (&out)[32]) {
  Block& block = *self().block;
  for (u32 half = 0; half < 2; half++) {
    const u32 address = operand_at(descriptor, row, half * 16);
    block.must_be_fenced(address, 16, "wgmma");
    const unsigned char* at = block.at(address, 16);
    if (p.wide) {
      p.wide(at, out + half * 8);
    } else {
      for (u32 k = 0; k < 16; k++) out[half * 16 + k] = from_code(at[k], p.whole);
    }
  }
}

// Four sums, of T: two rows of a by two of b, one k after another.
template <class T>
void add_products(double* d, bool add, const float (&a)[2][32], const float (&b)[2][32], u32 depth) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  Four sums = {};
  for (u32 j = 0; j < 4 && add; j++) sums[j] = d[j];
  for (u32 k = 0; k < depth; k++) {
    const Four left = {a[0][k], a[0][k], a[1][k], a[1][k]}, right = {b[0][k], b[1][k], b[0][k], b[1][k]};
    sums += left * right;
  }
  for (u32 j = 0; j < 4; j++) d[j] = sums[j];
}

// This thread's part of a product, from shared memory as it is now.
void execute(Product& p) {
  Thread& t = self();
  const u32 g = t.lane() / 4, q = t.lane() % 4, first = t.warp() % 4 * 16;
  float a[2][32], b[2][32];
  for (u32 h = 0; h < 2; h++) {
    if (p.a_given) {
      memcpy(a[h], p.rows[h], sizeof a[h]);
    } else {
      read_operand(p, p.a, first + g + 8 * h, a[h]);
    }
  }
  std::vector<double>& d = t.results[p.d].sums;
  for (u32 i = 0; i < (u32)p.width; i += 4) {
    for (u32 e = 0; e < 2; e++) read_operand(p, p.b, i * 2 + 2 * q + e, b[e]);
    if (p.whole) {
      add_products<double>(&d[i], p.add, a, b, 32);
    } else {
      add_products<float>(&d[i], p.add, a, b, p.wide ? 16 : 32);
    }
  }
  p.executed = true;
}

void execute_before(u32 group) {
  for (Product& p : self().products)
    if (!p.executed && p.group < group) execute(p);
}

// A register of a product's and its later content: the former's goes into the latter's place, and `x` into it.
void exchange_sum(float* at, Result& result, int i, double x) {
  int bits, whole = x == x ? (int)x : 0x7FC00000;
  float before, part = x;
  memcpy(&bits, at, 4), memcpy(&before, at, 4);
  result.sums[i] = result.whole ? bits : before;
  memcpy(at, result.whole ? (void*)&whole : (void*)&part, 4);
}

void issue(Product p) {
  Thread& t = self();
  if (!t.fenced) fail("a product without a fence before it");
  auto& sequence = t.block->products[t.index / 128];
  const u32 mine = t.issued++;
  if (mine == sequence.size()) sequence.push_back({p.a, p.b});
  if (sequence[mine] != std::pair(p.a, p.b)) fail("the threads of a warpgroup multiply different operands");
  p.group = t.group, p.executed = false;
  auto [result, fresh] = t.results.try_emplace(p.d);
  if (fresh) {
    result->second = {std::vector<double>(p.width), p.whole};
    for (int i = 0; i < p.width; i++) exchange_sum(p.d + i, result->second, i, NAN);
  }
  t.products.push_back(p);
  if (pick(2)) execute_before(t.group + 1);
}

// Waits until at most `left` groups of this thread's products are not done.
void settle(u32 left) {
  Thread& t = self();
  quantrot::warp_sync();
  const u32 before = t.group < left ? 0 : t.group - left;
  if (pick(32) == 0)  // a late part: others run far ahead
    for (int i = 0; i < 256; i++) yield();
  execute_before(before);
  quantrot::warp_sync();
  std::set<float*> busy;
  for (auto& p : t.products)
    if (p.group >= before) busy.insert(p.d);
  for (auto result = t.results.begin(); result != t.results.end();) {
    if (busy.count(result->first)) {
      ++result;
      continue;
    }
    const std::vector<double> sums = result->second.sums;
    for (size_t i = 0; i < sums.size(); i++) exchange_sum(result->first + i, result->second, i, sums[i]);
    result = t.results.erase(result);
  }
  t.products.erase(t.products.begin(), std::find_if(t.products.begin(), t.products.end(),
                                                    [&](auto& p) { return p.group >= before; }));
  t.fenced = false;
}

}  // namespace emulator

// --- The tensor copy engine ------------------------------------------------------------------------------------------

namespace quantrot {

void send_word(u32 mapped, u32 word, u32 bar) {
  if (!elect_one()) return;
  emulator::Block& block = emulator::block_of(mapped);
  if (&block != &emulator::block_of(bar)) emulator::fail("sent to one block, counted on another's barrier");
  if (block.cluster->meeting.round == 0 && block.cluster->blocks.size() > 1) emulator::fail("sent to a block that may not have started");
  emulator::scheduler.events.push_back([=, &block] {
    block.must_run();
    memcpy(block.at(mapped, 4), &word, 4);
    emulator::Barrier& barrier = block.barrier(bar);
    barrier.bytes -= 4;
    barrier.settle();
  });
}

// Calls f(pointer in the matrix or null past its edges, address in shared memory) for each 16 bytes of a box.
template <class F>
inline void each_unit(const TensorMap& map, int x, int y, u32 address, F f) {
  const u32 line = map.box_columns * map.element;
  for (u32 r = 0; r < map.box_rows; r++) {
    for (u32 byte = 0; byte < line; byte += 16) {
      const u32 inside16 = r & 16 - 1, b = inside16 >> 3, q = inside16 >> 1 & 3;
      const i64 row = y + (i64)(map.folded ? r - inside16 + 4 * q + 2 * b + r % 2 : map.dealt ? r % 8 * 4 + r / 8 : r), at = (i64)x * map.element + byte;
      const bool inside = row >= 0 && row < (i64)map.rows && at >= 0 && at < (i64)(map.columns * map.element);
      u32 to = address + r * line + byte;
      if (map.swizzled) to ^= (to >> 7 & (line <= 32 ? 1 : line <= 64 ? 3 : 7)) << 4;
      f(inside ? map.base + row * map.pitch + at : nullptr, to);
    }
  }
}

void check_map(const TensorMap& map, u32 address) {
  const u32 line = map.box_columns * map.element;
  if (map.pitch % 16 || (u64)map.base % 16 || line % 16 || map.box_rows > 256 || map.box_columns > 256 ||
      (map.swizzled && line > (map.swizzled == 64 ? 64 : 128)) || address % 128 || map.columns * map.element % 16)
    fail("a copy that the hardware does not take");
}

void tensor_load_all(u32 to, const TensorMap* map, int x, int y, u32 bar, u64, unsigned short blocks) {
  if (!elect_one()) return;
  check_map(*map, to);
  if (x * (int)map->element % 16) fail("a copy from the midst of 16 bytes, an illegal instruction");
  if (map->fresh && !self().waited) fail("a copy before grid_wait of what the kernel before writes");
  for (auto& owner : self().block->cluster->blocks) {
    emulator::Block* block = owner.get();
    if (!(blocks >> block->rank & 1)) continue;
    emulator::scheduler.events.push_back([=, map = *map] {
      u32 bytes = 0;
      each_unit(map, x, y, to, [&](const unsigned char* from, u32 address) {
        unsigned char* p = block->at(address, 16);
        if (from) {
          memcpy(p, from, 16);
        } else {
          memset(p, 0, 16);
        }
        bytes += 16;
      });
      emulator::Barrier& barrier = block->barrier(bar);
      barrier.bytes -= bytes;
      barrier.settle();
    });
  }
}

void line_load(u32 to, const void* from, u32 bytes, u32 bar) {
  if (!elect_one()) return;
  if ((u64)from % 16 || bytes % 16 || to % 16) fail("a copy that the hardware does not take");
  emulator::Block* block = self().block;
  emulator::scheduler.events.push_back([=] {
    memcpy(block->at(to, bytes), from, bytes);
    emulator::Barrier& barrier = block->barrier(bar);
    barrier.bytes -= bytes;
    barrier.settle();
  });
}

void tensor_store(const TensorMap* map, int x, int y, u32 from) {
  check_map(*map, from);
  emulator::Block* block = self().block;
  self().open.push_back([=, map = *map] {
    each_unit(map, x, y, from, [&](unsigned char* to, u32 address) {
      block->must_be_fenced(address, 16, "a store");
      if (to) memcpy(to, block->at(address, 16), 16);
    });
  });
}

void tensor_store_commit() {
  auto left = std::make_shared<int>(self().open.size());
  for (auto& store : self().open) {
    emulator::scheduler.events.push_back([store, left, stored = &self().stored] {
      store();
      --*left;
      stored->changed();
    });
  }
  self().open.clear();
  self().stores.push_back(left);
}

}  // namespace quantrot
