// State of one launch, shared by the parts of the runtime. One threadgroup runs at a time.
//
//   switch.cpp       the context switch
//   fibers.cpp       stacks
//   scheduler.cpp    which thread runs next; barriers; the launch itself
//   collectives.cpp  what lanes of a simdgroup exchange
//   checker.cpp      shadow state of every byte a kernel may touch; findings
#pragma once
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "fibers.h"

enum Order { ORDER_FIFO, ORDER_REVERSE, ORDER_SHUFFLED };
enum Status { READY, DONE, AT_GROUP_BARRIER, AT_SIMD_OPERATION };
enum SimdOperation { SIMD_BARRIER, SIMD_MMA8X8, SIMD_EXCHANGE };

struct AsyncCopy {
  char* shared;
  const char* global;
  int bytes, source_bytes, group;
};

struct Fiber {
  void* stack_pointer;
  ShimIds ids;
  Status status;
  const void* site;  // where in the kernel it waits
  // What it waits with, if at a simdgroup operation:
  SimdOperation operation;
  int mem_flags;
  bool needs_all;  // every lane of the simdgroup must take part
  void* lane_data;
  void (*exchange)(void**);
  float a[2], b[2], c[2], d[2];
  // cp.async:
  std::vector<AsyncCopy> copies;
  int copy_group;
};

struct Buffer {
  char* data;
  size_t bytes;
  int kind;         // 0 input, 1 output, 2 output that was filled beforehand
  uint32_t* owner;  // outputs, when checking: per byte, 1 + id of the thread that wrote it
};

struct ThreadgroupArray {
  const void* key;
  char* data;
  size_t bytes;
  std::string name;
};

struct Launch {
  void (*entry)(void**);
  void** arguments;
  std::vector<Buffer> buffers;
  ShimVec3 grid, group, groups;
  size_t memory_limit, dynamic_shared;
  Order order;
  bool check;
};

struct Finding {
  unsigned times = 0;
  std::string example;  // details of the first time
};

struct State {
  Launch launch;
  Stacks stacks;
  std::vector<Fiber> fibers;
  unsigned threads = 0;  // of the current threadgroup, which may be ragged
  int current = -1;      // running fiber, or -1: the scheduler
  void* scheduler_stack = nullptr;
  std::vector<unsigned> ready;
  size_t ready_head = 0;
  uint64_t random = 0;
  unsigned at_group_barrier = 0;
  std::vector<unsigned> at_simd_operation;  // per simdgroup
  bool fatal = false;                       // nothing sensible can follow; stop the launch
  std::map<std::pair<std::string, std::string>, Finding> findings;  // by (kind, message)
  std::vector<ThreadgroupArray> arrays;
};

extern State* g;

// scheduler.cpp
void block();  // the running fiber waits; another one continues
void wake(unsigned first, unsigned last, Status status);
[[noreturn]] void stop_launch();
inline unsigned last_lane(unsigned first) {
  return first + SHIM_LANES < g->threads ? first + SHIM_LANES : g->threads;
}

// collectives.cpp
void run_simd_operation(unsigned simdgroup);

// checker.cpp
Finding& report(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
void check_access(const char* p, size_t bytes, bool write);
void checker_start_launch();
void checker_start_group();
void checker_group_barrier(int mem_flags);
void checker_simdgroup_barrier(unsigned simdgroup, int mem_flags);
void checker_finish_launch();
