// Runs the threads of a threadgroup as fibers, one threadgroup after the other. A fiber runs until
// it waits at a barrier or a simdgroup operation, so the order of ready fibers decides which
// interleaving of the kernel is seen.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "state.h"

State* g = nullptr;

static uint64_t random_number() {  // xorshift64
  uint64_t x = g->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return g->random = x;
}

// ---- the ready queue

static int next_ready() {
  if (g->ready_head == g->ready.size()) return -1;
  if (g->launch.order == ORDER_SHUFFLED) {
    size_t pick = g->ready_head + random_number() % (g->ready.size() - g->ready_head);
    std::swap(g->ready[pick], g->ready[g->ready_head]);
  }
  int fiber = g->ready[g->ready_head++];
  if (g->ready_head == g->ready.size()) {
    g->ready.clear();
    g->ready_head = 0;
  }
  return fiber;
}

static void make_ready(unsigned i) {
  g->fibers[i].status = READY;
  g->ready.push_back(i);
}

void wake(unsigned first, unsigned last, Status status) {
  for (unsigned k = first; k < last; k++) {
    unsigned i = g->launch.order == ORDER_REVERSE ? last - 1 - (k - first) : k;
    if (g->fibers[i].status == status) make_ready(i);
  }
}

void block() {
  int self = g->current, next = next_ready();
  if (next == self) return;
  g->current = next;
  shim_switch(&g->fibers[self].stack_pointer,
              next < 0 ? g->scheduler_stack : g->fibers[next].stack_pointer);
}

void stop_launch() {
  g->fatal = true;
  int self = g->current;
  g->current = -1;
  shim_switch(&g->fibers[self].stack_pointer, g->scheduler_stack);
  abort();  // a stopped launch continues no fiber
}

// ---- barriers

extern "C" void shim_threadgroup_barrier(int mem_flags) {
  Fiber& me = g->fibers[g->current];
  me.status = AT_GROUP_BARRIER;
  me.site = __builtin_return_address(0);
  if (++g->at_group_barrier == g->threads) {
    for (unsigned i = 0; i < g->threads; i++) {
      if (g->fibers[i].site == me.site) continue;
      report("divergence", "threads wait at different threadgroup_barrier calls");
      break;
    }
    g->at_group_barrier = 0;
    checker_group_barrier(mem_flags);
    wake(0, g->threads, AT_GROUP_BARRIER);
  }
  block();
}

// ---- one threadgroup

static void fiber_main() {
  g->launch.entry(g->launch.arguments);
  g->fibers[g->current].status = DONE;
  block();
  abort();  // a finished fiber is never continued
}

static unsigned extent(unsigned group, unsigned size, unsigned grid) {
  return (group + 1) * size <= grid ? size : grid - group * size;
}

static void start_group(unsigned bx, unsigned by, unsigned bz) {
  const Launch& l = g->launch;
  // The last threadgroup of an axis may be smaller, as with Metal's dispatchThreads.
  ShimVec3 size = {extent(bx, l.group.x, l.grid.x), extent(by, l.group.y, l.grid.y),
                   extent(bz, l.group.z, l.grid.z)};
  g->threads = size.x * size.y * size.z;
  unsigned simdgroups = (g->threads + SHIM_LANES - 1) / SHIM_LANES;
  g->at_simd_operation.assign(simdgroups, 0);
  g->at_group_barrier = 0;
  g->ready.clear();
  g->ready_head = 0;
  checker_start_group();
  for (unsigned i = 0; i < g->threads; i++) {
    Fiber& f = g->fibers[i];
    ShimVec3 p = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    ShimVec3 in_grid = {bx * l.group.x + p.x, by * l.group.y + p.y, bz * l.group.z + p.z};
    f.ids = {in_grid, p, {bx, by, bz}, l.groups, l.grid, size,
             i, i / SHIM_LANES, i % SHIM_LANES, simdgroups};
    f.copies.clear();
    f.copy_group = 0;
    f.status = AT_GROUP_BARRIER;
    f.stack_pointer = g->stacks.prepare(i, fiber_main);
  }
  wake(0, g->threads, AT_GROUP_BARRIER);
}

// No fiber is ready: run the operations of simdgroups that will get no further lanes. False when
// there is none, that is when the threadgroup is finished or stuck.
static bool run_partial_simd_operations() {
  bool progress = false;
  for (unsigned s = 0; s < g->at_simd_operation.size() && !g->fatal; s++) {
    if (!g->at_simd_operation[s]) continue;
    run_simd_operation(s);
    progress = true;
  }
  return progress;
}

static void finish_group() {
  unsigned done = 0, waiting = 0;
  for (unsigned i = 0; i < g->threads; i++) {
    done += g->fibers[i].status == DONE;
    waiting += g->fibers[i].status == AT_GROUP_BARRIER;
    if (!g->stacks.intact(i)) {
      report("stack", "a thread used more than %zu KiB of private memory", Stacks::kBytes >> 10);
      g->fatal = true;
    }
  }
  if (done == g->threads) return;
  report("divergence", "%u threads wait at threadgroup_barrier, %u have returned", waiting, done);
  g->fatal = true;
}

static void run_group(unsigned bx, unsigned by, unsigned bz) {
  start_group(bx, by, bz);
  while (!g->fatal) {
    int next = next_ready();
    if (next >= 0) {
      g->current = next;
      shim_switch(&g->scheduler_stack, g->fibers[next].stack_pointer);
    } else if (!run_partial_simd_operations()) {
      finish_group();
      return;
    }
  }
}

// ---- the launch

static std::vector<unsigned> group_order(unsigned count) {
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; i++) order[i] = i;
  for (unsigned i = 0; i < count / 2 && g->launch.order == ORDER_REVERSE; i++)
    std::swap(order[i], order[count - 1 - i]);
  for (unsigned i = count; i > 1 && g->launch.order == ORDER_SHUFFLED; i--)
    std::swap(order[i - 1], order[random_number() % i]);
  return order;
}

static void run_groups() {
  const Launch& l = g->launch;
  unsigned threads = l.group.x * l.group.y * l.group.z;
  g->fibers.resize(threads);
  g->stacks.reserve(threads);
  checker_start_launch();
  for (unsigned i : group_order(l.groups.x * l.groups.y * l.groups.z)) {
    run_group(i % l.groups.x, i / l.groups.x % l.groups.y, i / l.groups.x / l.groups.y);
    if (g->fatal) break;
  }
  checker_finish_launch();
}

// Mirrors run.py: LaunchParameters.
struct Parameters {
  unsigned grid[3], group[3];
  unsigned order, check;
  uint64_t seed, memory_limit, dynamic_shared;
};

static std::mutex one_launch_at_a_time;  // a caller's threads may launch the same kernel at once

// Runs `entry` over the grid. Every buffer lies between guard zones of the caller's. Writes one line
// "kind<tab>message<tab>times" a finding; returns the number of bytes that all lines together need.
extern "C" __attribute__((visibility("default"))) size_t shim_launch(
    void (*entry)(void**), void** arguments, const size_t* bytes, const int* kinds, int count,
    const Parameters* p, char* findings, size_t capacity) {
  std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  State state;
  g = &state;
  Launch& l = state.launch;
  l.entry = entry;
  l.arguments = arguments;
  for (int i = 0; i < count; i++)
    l.buffers.push_back({static_cast<char*>(arguments[i]), bytes[i], kinds[i], nullptr});
  l.grid = {p->grid[0], p->grid[1], p->grid[2]};
  l.group = {std::min(p->group[0], l.grid.x), std::min(p->group[1], l.grid.y),
             std::min(p->group[2], l.grid.z)};
  l.groups = {(l.grid.x + l.group.x - 1) / l.group.x, (l.grid.y + l.group.y - 1) / l.group.y,
              (l.grid.z + l.group.z - 1) / l.group.z};
  l.memory_limit = p->memory_limit;
  l.dynamic_shared = p->dynamic_shared;
  l.order = static_cast<Order>(p->order);
  l.check = p->check;
  state.random = p->seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
  run_groups();
  g = nullptr;
  std::string text;
  for (const auto& [what, found] : state.findings)
    text += what.first + "\t" + what.second + found.example + "\t" + std::to_string(found.times) + "\n";
  snprintf(findings, capacity, "%s", text.c_str());
  return text.size() + 1;
}
