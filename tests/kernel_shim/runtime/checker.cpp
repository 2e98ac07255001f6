// The access checker. The kernel is compiled with -fsanitize=thread, so the compiler calls a
// __tsan_* function before each memory access; these are defined here (no sanitizer library is
// linked), as are the handlers of -fsanitize=alignment,array-bounds,shift-exponent.
//
// Threadgroup memory has a shadow cell a byte. Two accesses by different threads, one of them a
// write, are ordered if between them lies
//   - a threadgroup_barrier with mem_threadgroup (a new group epoch), or
//   - when both threads are of one simdgroup, a simdgroup_barrier with mem_threadgroup (a new
//     simdgroup epoch).
// Shuffles, reductions and matrix operations order no memory, nor do barriers with other flags.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "state.h"

static const size_t kLargestMemory = 256 << 10;  // an H100's 227 KiB, rounded up
static const size_t kRedZone = 256;              // around every threadgroup array
static const size_t kArena = kLargestMemory + 64 * kRedZone;
static const size_t kGuardZone = 64 << 10;  // run.py keeps as much around every device buffer
static const char kDynamicShared = 0;

// Readers of one byte in one group epoch: a thread, several of one simdgroup, or more.
static const uint16_t kManySimdgroups = 0xffff, kManyOfSimdgroup = 0x8000;

struct Cell {
  uint32_t write_epoch, write_simd_epoch, read_epoch, read_simd_epoch;
  uint16_t writer, reader;
};

struct Checker {
  char* arena = static_cast<char*>(aligned_alloc(4096, kArena));
  std::vector<Cell> cells = std::vector<Cell>(kArena);
  std::vector<uint32_t> simd_epochs;
  uint32_t epoch = 0, group_start = 0;  // epochs count on over all threadgroups of a launch
  size_t used = 0;                      // of the arena, red zones included
  size_t counted = 0;                   // what a GPU would need
  uint32_t group_id = 0;
};

static Checker& checker() {  // kept from launch to launch: epochs start anew, cells are cleared
  static Checker instance;
  return instance;
}

Finding& report(const char* kind, const char* format, ...) {
  char message[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  Finding& finding = g->findings[{kind, message}];
  finding.times++;
  return finding;
}

extern "C" void shim_report(const char* kind, const char* message) { report(kind, "%s", message); }

// ---- epochs

void checker_start_launch() {
  Checker& c = checker();
  std::fill(c.cells.begin(), c.cells.end(), Cell{});
  c.epoch = 0;
  c.group_id = 0;
  for (Buffer& b : g->launch.buffers)
    if (g->launch.check && b.kind)
      b.owner = static_cast<uint32_t*>(calloc(std::max<size_t>(b.bytes, 1), sizeof(uint32_t)));
}

void checker_start_group() {
  Checker& c = checker();
  c.group_start = ++c.epoch;
  c.simd_epochs.assign(g->at_simd_operation.size(), 1);
  c.used = kRedZone;
  c.counted = 0;
  c.group_id++;
  g->arrays.clear();
}

void checker_group_barrier(int mem_flags) {
  if (mem_flags & SHIM_MEM_THREADGROUP) checker().epoch++;
}

void checker_simdgroup_barrier(unsigned simdgroup, int mem_flags) {
  if (mem_flags & SHIM_MEM_THREADGROUP) checker().simd_epochs[simdgroup]++;
}

void checker_finish_launch() {
  for (Buffer& b : g->launch.buffers) {
    if (!b.owner) continue;
    size_t unwritten = std::count(b.owner, b.owner + b.bytes, 0u);
    if (b.kind == 1 && unwritten && !g->fatal) {
      size_t first = std::find(b.owner, b.owner + b.bytes, 0u) - b.owner;
      report("unwritten", "buffer %d: %zu of %zu output bytes never written, the first at byte %zu",
             int(&b - &g->launch.buffers[0]), unwritten, b.bytes, first);
    }
    free(b.owner);
    b.owner = nullptr;
  }
}

// ---- threadgroup memory

static char* allocate(const void* key, size_t bytes, size_t align, const char* name) {
  Checker& c = checker();
  auto up = [](size_t n, size_t to) { return (n + to - 1) / to * to; };
  size_t offset = up(c.used, std::max<size_t>(align, 16));
  c.counted = up(c.counted, std::max<size_t>(align, 16)) + bytes;
  if (c.counted > g->launch.memory_limit)
    report("threadgroup-memory", "%zu bytes with array %s, the limit is %zu", c.counted, name,
           g->launch.memory_limit);
  if (offset + bytes + kRedZone > kArena) {
    report("threadgroup-memory", "array %s does not fit at all", name);
    stop_launch();
  }
  g->arrays.push_back({key, c.arena + offset, bytes, name});
  c.used = offset + bytes + kRedZone;
  memset(c.arena + offset, 0xff, bytes);  // NaN as any float type: an early read shows in values too
  return c.arena + offset;
}

extern "C" void* shim_threadgroup_array(const void* key, size_t bytes, size_t align, const char* name) {
  for (const ThreadgroupArray& a : g->arrays)
    if (a.key == key) return a.data;
  return allocate(key, bytes, align, name);
}

extern "C" void* shim_dynamic_shared() {
  return shim_threadgroup_array(&kDynamicShared, g->launch.dynamic_shared, 1024, "dynamic shared memory");
}

static const ThreadgroupArray* array_near(const char* p, size_t margin) {
  for (const ThreadgroupArray& a : g->arrays)
    if (p >= a.data - margin && p < a.data + a.bytes + margin) return &a;
  return nullptr;
}

static void report_race(const char* what, const ThreadgroupArray& a, const char* p, unsigned other) {
  Finding& found = report("race", "%s without a barrier between, threadgroup array %s", what, a.name.c_str());
  if (found.times > 1) return;
  bool several = other == kManySimdgroups || other & kManyOfSimdgroup;
  found.example = ", first: byte " + std::to_string(p - a.data) + ", thread " + std::to_string(g->current) +
                  " after " + (several ? "several threads" : "thread " + std::to_string(other));
}

struct Accessor {
  uint16_t thread, simdgroup;
  uint32_t epoch, simd_epoch;
};

// Whether an access in (epoch, simd_epoch) by `thread` comes before the accessor's by a barrier.
static bool ordered(const Accessor& me, uint32_t epoch, uint32_t simd_epoch, uint16_t thread) {
  return epoch < me.epoch || thread == me.thread ||
         (thread / SHIM_LANES == me.simdgroup && simd_epoch < me.simd_epoch);
}

static const char* check_read(Cell& c, const Accessor& me, uint16_t& other) {
  if (c.write_epoch < checker().group_start) return "uninitialised";
  other = c.writer;
  if (!ordered(me, c.write_epoch, c.write_simd_epoch, c.writer)) return "read after write";
  if (c.read_epoch != me.epoch) {
    c.reader = me.thread;
  } else if (c.reader != me.thread) {
    bool same = c.reader != kManySimdgroups && (c.reader & ~kManyOfSimdgroup) / SHIM_LANES == me.simdgroup;
    c.reader = same ? kManyOfSimdgroup | me.thread : kManySimdgroups;
  }
  c.read_epoch = me.epoch;
  c.read_simd_epoch = me.simd_epoch;
  return nullptr;
}

static const char* check_write(Cell& c, const Accessor& me, uint16_t& other) {
  other = c.writer;
  if (c.write_epoch >= checker().group_start && !ordered(me, c.write_epoch, c.write_simd_epoch, c.writer))
    return "write after write";
  other = c.reader;
  if (c.read_epoch == me.epoch && c.reader != me.thread) {
    bool same = c.reader != kManySimdgroups && (c.reader & ~kManyOfSimdgroup) / SHIM_LANES == me.simdgroup;
    if (!(same && c.read_simd_epoch < me.simd_epoch)) return "write after read";
  }
  c.write_epoch = me.epoch;
  c.write_simd_epoch = me.simd_epoch;
  c.writer = me.thread;
  return nullptr;
}

static void check_threadgroup(const char* p, size_t bytes, bool write) {
  Checker& c = checker();
  const ThreadgroupArray* a = array_near(p, 0);
  if (!a || p + bytes > a->data + a->bytes) {
    const ThreadgroupArray* near = a ? a : array_near(p, kRedZone);
    report("out-of-bounds", "%s beside threadgroup array %s", write ? "write" : "read",
           near ? near->name.c_str() : "(none is near)");
    stop_launch();
  }
  unsigned thread = g->current, simdgroup = thread / SHIM_LANES;
  Accessor me = {uint16_t(thread), uint16_t(simdgroup), c.epoch, c.simd_epochs[simdgroup]};
  for (const char* q = p; q < p + bytes; q++) {
    Cell& cell = c.cells[q - c.arena];
    uint16_t other = 0;
    const char* wrong = write ? check_write(cell, me, other) : check_read(cell, me, other);
    if (!wrong) continue;
    if (!strcmp(wrong, "uninitialised"))
      report("uninitialised", "read of threadgroup array %s", a->name.c_str());
    else
      report_race(wrong, *a, q, other);
    return;  // one finding an access
  }
}

// ---- device memory

static void check_buffer(Buffer& b, const char* p, size_t bytes, bool write) {
  int index = &b - &g->launch.buffers[0];
  if (write && !b.kind) {
    report("write-to-input", "buffer %d", index);
    stop_launch();
  }
  if (!b.owner) return;
  uint32_t* owner = b.owner + (p - b.data);
  uint32_t me = checker().group_id * 1024 + g->current;
  for (size_t i = 0; i < bytes; i++) {
    if (write && owner[i] && owner[i] != me) {
      report("double-write", "buffer %d: an output element is written by two threads", index);
      return;
    }
    if (!write && !owner[i] && b.kind == 1) {
      report("uninitialised", "read of an output that nothing has written, buffer %d", index);
      return;
    }
    if (write) owner[i] = me;
  }
}

#ifdef __linux__
// The kernel's own shared object: its tables and constants may be read anywhere.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
static bool in_image(const char* p) { return p >= &__ehdr_start && p < &_end; }
#else
static bool in_image(const char*) { return true; }  // wild accesses are then not reported
#endif

// Thread positions, read through shim_ids(), and the argument array, read by the entry.
static bool in_runtime(const char* p) {
  const char* fibers = reinterpret_cast<const char*>(g->fibers.data());
  const char* arguments = reinterpret_cast<const char*>(g->launch.arguments);
  return (p >= fibers && p < fibers + g->fibers.size() * sizeof(Fiber)) ||
         (p >= arguments && p < arguments + g->launch.buffers.size() * sizeof(void*));
}

void check_access(const char* p, size_t bytes, bool write) {
  if (!g || g->current < 0 || !g->launch.check || g->stacks.holds(p)) return;
  const char* arena = checker().arena;
  if (p >= arena && p < arena + kArena) return check_threadgroup(p, bytes, write);
  for (Buffer& b : g->launch.buffers)
    if (p >= b.data && p + bytes <= b.data + b.bytes) return check_buffer(b, p, bytes, write);
  for (Buffer& b : g->launch.buffers) {
    if (p + kGuardZone < b.data || p >= b.data + b.bytes + kGuardZone) continue;
    report("out-of-bounds", "device %s, buffer %d: byte offset %ld of %zu", write ? "write" : "read",
           int(&b - &g->launch.buffers[0]), long(p - b.data), b.bytes);
    stop_launch();
  }
  if (in_runtime(p) || in_image(p)) return;
  report("out-of-bounds", "%s far from every buffer", write ? "write" : "read");
  stop_launch();
}

extern "C" uint32_t shim_atomic_add(uint32_t* p, uint32_t value) {
  // Not an access in the checker's sense: atomics of different threads do not race. Bounds only.
  const char* q = reinterpret_cast<const char*>(p);
  const Checker& c = checker();
  bool inside = array_near(q, 0) && array_near(q + 3, 0);
  for (Buffer& b : g->launch.buffers) {
    if (q < b.data || q + 4 > b.data + b.bytes) continue;
    inside = b.kind != 0;
    for (int i = 0; i < 4 && b.owner; i++) b.owner[q - b.data + i] = UINT32_MAX;
  }
  if (!inside) {
    report("out-of-bounds", "atomic operation");
    stop_launch();
  }
  if (q >= c.arena && q < c.arena + kArena) {
    Cell* cell = &checker().cells[q - c.arena];
    if (cell->write_epoch < c.group_start) report("uninitialised", "atomic add to threadgroup memory");
    for (int i = 0; i < 4; i++) cell[i].write_epoch = std::max(cell[i].write_epoch, c.group_start);
  }
  uint32_t old = *p;
  *p = old + value;
  return old;
}

// ---- what the compiler calls

// The compiler relies on this alignment, so the access itself would end the process.
static void aligned(const char* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes == 0 || !g || g->current < 0 || !g->launch.check) return;
  report("misaligned", "access of %zu bytes at an address that is no multiple of it", bytes);
  stop_launch();
}

extern "C" {
#define HOOKS(n)                                                                             \
  void __tsan_read##n(char* p) { aligned(p, n), check_access(p, n, false); }                 \
  void __tsan_write##n(char* p) { aligned(p, n), check_access(p, n, true); }                 \
  void __tsan_unaligned_read##n(char* p) { check_access(p, n, false); }                      \
  void __tsan_unaligned_write##n(char* p) { check_access(p, n, true); }                      \
  void __tsan_read_write##n(char* p) { __tsan_read##n(p), check_access(p, n, true); }        \
  void __tsan_unaligned_read_write##n(char* p) { check_access(p, n, false), check_access(p, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(char* to, const char* from, size_t n) {
  if (n) check_access(from, n, false), check_access(to, n, true);
  return memcpy(to, from, n);
}
void* __tsan_memmove(char* to, const char* from, size_t n) {
  if (n) check_access(from, n, false), check_access(to, n, true);
  return memmove(to, from, n);
}
void* __tsan_memset(char* to, int value, size_t n) {
  if (n) check_access(to, n, true);
  return memset(to, value, n);
}

// -fsanitize=alignment,array-bounds,shift-exponent. Each passes where in the text it happened.
struct Location {
  const char* file;
  unsigned line, column;
};
static void at(const char* kind, const char* what, const Location* l) {
  if (g && g->launch.check) report(kind, "%s at %s:%u", what, l->file ? l->file : "?", l->line);
}
void __ubsan_handle_type_mismatch_v1(const Location* l, void*) {
  at("misaligned", "vector access", l);
  if (g && g->launch.check) stop_launch();  // the access itself would end the process
}
void __ubsan_handle_out_of_bounds(const Location* l, void*) {
  at("out-of-bounds", "array index beyond the declared size", l);
}
void __ubsan_handle_shift_out_of_bounds(const Location* l, void*, void*) {
  at("shift", "shift by the width of the type or more", l);
}

// bfloat16 rounding, missing from libgcc before 13.
__attribute__((weak)) __bf16 __truncsfbf2(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000)
    u |= 0x400000;  // keep a NaN a NaN
  else
    u += 0x7fff + ((u >> 16) & 1);
  uint16_t high = u >> 16;
  __bf16 result;
  memcpy(&result, &high, 2);
  return result;
}
__attribute__((weak)) __bf16 __truncdfbf2(double f) { return __truncsfbf2(static_cast<float>(f)); }
}
