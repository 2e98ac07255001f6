// What a kernel running on the CPU may ask of the runtime. Included by metal_shim.h and cuda_shim.h
// (compiled with the kernel, instrumented) and by the runtime (compiled without instrumentation).
#pragma once
#include <cstddef>
#include <cstdint>

// Convergent: the optimiser must not copy these calls into branches. The address a call returns to
// identifies its place in the kernel, and lanes that meet must agree on it.
#define SHIM_CALL __attribute__((convergent))
#define SHIM_INLINE inline __attribute__((always_inline))

struct ShimVec3 {
  unsigned x, y, z;
};

// Position of the running thread.
struct ShimIds {
  ShimVec3 thread_in_grid, thread_in_group, group_in_grid;
  ShimVec3 groups, grid_threads, group_threads;
  unsigned index, simdgroup, lane, simdgroups;  // indices inside the threadgroup
};

// Bits of a barrier's memory flags, the values of metal::mem_flags.
enum { SHIM_MEM_NONE = 0, SHIM_MEM_DEVICE = 1, SHIM_MEM_THREADGROUP = 2 };

constexpr unsigned SHIM_LANES = 32;

extern "C" {
const ShimIds* shim_ids();
// A threadgroup array: the first thread to pass its declaration allocates it, the others find it.
void* shim_threadgroup_array(const void* key, size_t bytes, size_t align, const char* name);
// The block's one `extern __shared__` array (CUDA).
void* shim_dynamic_shared();
SHIM_CALL void shim_threadgroup_barrier(int mem_flags);
SHIM_CALL void shim_simdgroup_barrier(int mem_flags);
// Lanes meet; the last one runs exchange(lane_data), null where a lane is inactive.
SHIM_CALL void shim_collective(void* lane_data, void (*exchange)(void** lane_data), int needs_all);
// d = a b + c of 8x8 matrices, two elements a lane in Apple's layout, float arithmetic.
SHIM_CALL void shim_mma8x8(const float* a, const float* b, const float* c, float* d);
// cp.async: nothing is copied before the wait, so that an early read finds uninitialised memory.
void shim_async_copy(void* shared, const void* global, int bytes, int source_bytes);
void shim_async_commit();
void shim_async_wait(int pending_groups);
// Adds to a 32-bit integer in device or threadgroup memory; returns the old value.
uint32_t shim_atomic_add(uint32_t* p, uint32_t value);
void shim_report(const char* kind, const char* message);
}
