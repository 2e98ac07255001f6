// Fibers: the threads of one threadgroup, each with its own stack, all on one OS thread.
#pragma once
#include <cstddef>

#include "switch.h"

// Stacks of equal size in one mapping, so that "is this address on a stack?" is two comparisons. One
// spare stack lies lowest, to take what overflows the first one.
class Stacks {
 public:
  static constexpr size_t kBytes = 128 << 10;
  ~Stacks() { release(); }
  void reserve(unsigned count);
  bool holds(const char* p) const { return p >= base_ && p < base_ + kBytes * count_; }
  // A stack pointer for shim_switch that starts `entry` on stack i.
  void* prepare(unsigned i, void (*entry)());
  // False when a fiber has overwritten the lowest word of its stack.
  bool intact(unsigned i) const;

 private:
  void release();
  char* base_ = nullptr;
  unsigned count_ = 0;
};
