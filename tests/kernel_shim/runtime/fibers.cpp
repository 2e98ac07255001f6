#include "fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static const uint64_t kCanary = 0x51ac4f1be45ac41eull;

void Stacks::release() {
  if (base_) munmap(base_, kBytes * count_);
}

void Stacks::reserve(unsigned count) {
  if (count + 1 <= count_) return;
  release();
  count_ = count + 1;
  void* p = mmap(nullptr, kBytes * count_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    perror("fiber stacks");
    abort();
  }
  base_ = static_cast<char*>(p);
}

void* Stacks::prepare(unsigned i, void (*entry)()) {
  char* low = base_ + kBytes * (i + 1);
  memcpy(low, &kCanary, sizeof kCanary);
  // The entry is reached by a return, not a call: on x86-64 the ABI then wants sp = 8 mod 16, which
  // the one spare word above the frame gives; on aarch64 sp is 16-aligned after the frame is popped.
  void** top = reinterpret_cast<void**>(low + kBytes - 64);
  void** frame = top - (kFrameWords + kFrameWords % 2);
  memset(frame, 0, sizeof(void*) * (kFrameWords + kFrameWords % 2));
  frame[kReturnWord] = reinterpret_cast<void*>(entry);
  return frame;
}

bool Stacks::intact(unsigned i) const {
  return memcmp(base_ + kBytes * (i + 1), &kCanary, sizeof kCanary) == 0;
}
