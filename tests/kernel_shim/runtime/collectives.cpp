// Operations of a simdgroup (a warp). The last lane to arrive runs the operation for all of them,
// so that a lane is switched away from once an operation.
#include "state.h"

// Where lane's two elements of an 8x8 simdgroup matrix lie: (row, column) and (row, column + 1).
// The layout that MLX's steel kernels rely on (get_coord).
static void matrix_position(unsigned lane, unsigned& row, unsigned& column) {
  unsigned quad = lane / 4;
  row = (quad & 4) + (lane / 2) % 4;
  column = (quad & 2) * 2 + (lane % 2) * 2;
}

static void multiply_accumulate(Fiber* lanes) {
  float a[8][8], b[8][8];
  for (unsigned lane = 0; lane < SHIM_LANES; lane++) {
    unsigned r, c;
    matrix_position(lane, r, c);
    for (unsigned j = 0; j < 2; j++) {
      a[r][c + j] = lanes[lane].a[j];
      b[r][c + j] = lanes[lane].b[j];
    }
  }
  for (unsigned lane = 0; lane < SHIM_LANES; lane++) {
    unsigned r, c;
    matrix_position(lane, r, c);
    for (unsigned j = 0; j < 2; j++) {
      float sum = lanes[lane].c[j];
      for (unsigned k = 0; k < 8; k++) sum += a[r][k] * b[k][c + j];
      lanes[lane].d[j] = sum;
    }
  }
}

// Lanes at different operations, or too few of them: on a GPU a hang or garbage.
static bool agree(unsigned first, unsigned last) {
  const Fiber* one = nullptr;
  unsigned waiting = 0;
  for (unsigned i = first; i < last; i++) {
    const Fiber& f = g->fibers[i];
    if (f.status != AT_SIMD_OPERATION) continue;
    waiting++;
    if (!one) one = &f;
    if (f.site != one->site || f.operation != one->operation) {
      report("divergence", "lanes of a simdgroup wait at different simdgroup operations");
      return false;
    }
  }
  // A ragged last simdgroup is complete for a barrier, but has too few lanes for a matrix.
  unsigned needed = one->operation == SIMD_BARRIER ? last - first : SHIM_LANES;
  if (one->needs_all && waiting < needed) {
    report("divergence", "a simdgroup matrix operation or barrier is reached by %u of %u lanes", waiting,
           needed);
    return false;
  }
  return true;
}

void run_simd_operation(unsigned simdgroup) {
  unsigned first = simdgroup * SHIM_LANES, last = last_lane(first);
  if (!agree(first, last)) {
    if (g->current >= 0) stop_launch();
    g->fatal = true;
    return;
  }
  void* data[SHIM_LANES] = {};
  const Fiber* one = nullptr;
  for (unsigned i = first; i < last; i++) {
    if (g->fibers[i].status != AT_SIMD_OPERATION) continue;
    data[i - first] = g->fibers[i].lane_data;
    one = &g->fibers[i];
  }
  switch (one->operation) {
    case SIMD_BARRIER: checker_simdgroup_barrier(simdgroup, one->mem_flags); break;
    case SIMD_MMA8X8: multiply_accumulate(&g->fibers[first]); break;
    case SIMD_EXCHANGE: one->exchange(data); break;
  }
  g->at_simd_operation[simdgroup] = 0;
  wake(first, last, AT_SIMD_OPERATION);
}

static void wait_for_simdgroup(SimdOperation operation, bool needs_all, const void* site) {
  Fiber& me = g->fibers[g->current];
  me.status = AT_SIMD_OPERATION;
  me.operation = operation;
  me.needs_all = needs_all;
  me.site = site;
  unsigned simdgroup = me.ids.simdgroup, first = simdgroup * SHIM_LANES;
  if (++g->at_simd_operation[simdgroup] == last_lane(first) - first) run_simd_operation(simdgroup);
  block();
}

extern "C" {
const ShimIds* shim_ids() { return &g->fibers[g->current].ids; }

void shim_simdgroup_barrier(int mem_flags) {
  g->fibers[g->current].mem_flags = mem_flags;
  wait_for_simdgroup(SIMD_BARRIER, true, __builtin_return_address(0));
}

void shim_collective(void* lane_data, void (*exchange)(void**), int needs_all) {
  Fiber& me = g->fibers[g->current];
  me.lane_data = lane_data;
  me.exchange = exchange;
  wait_for_simdgroup(SIMD_EXCHANGE, needs_all, __builtin_return_address(0));
}

void shim_mma8x8(const float* a, const float* b, const float* c, float* d) {
  Fiber& me = g->fibers[g->current];
  memcpy(me.a, a, sizeof me.a);
  memcpy(me.b, b, sizeof me.b);
  memcpy(me.c, c, sizeof me.c);
  wait_for_simdgroup(SIMD_MMA8X8, true, __builtin_return_address(0));
  memcpy(d, me.d, sizeof me.d);
}

void shim_async_copy(void* shared, const void* global, int bytes, int source_bytes) {
  Fiber& me = g->fibers[g->current];
  if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(global) % bytes)
    report("misaligned", "cp.async of %d bytes from or to an address that is no multiple of it", bytes);
  me.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), bytes, source_bytes,
                       me.copy_group});
}

void shim_async_commit() { g->fibers[g->current].copy_group++; }

void shim_async_wait(int pending_groups) {
  Fiber& me = g->fibers[g->current];
  size_t kept = 0;
  for (const AsyncCopy& copy : me.copies) {
    if (copy.group >= me.copy_group - pending_groups) {
      me.copies[kept++] = copy;
      continue;
    }
    if (copy.source_bytes) check_access(copy.global, copy.source_bytes, false);
    check_access(copy.shared, copy.bytes, true);
    memcpy(copy.shared, copy.global, copy.source_bytes);
    memset(copy.shared + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
  }
  me.copies.resize(kept);
}
}
