// The context switch, for x86-64 and aarch64. Includes nothing, so that any clang can assemble it for
// either machine.
#include "switch.h"

#ifdef __APPLE__
#define SYMBOL "_shim_switch"
#define HIDE ".private_extern " SYMBOL "\n"
#else
#define SYMBOL "shim_switch"
#define HIDE ".hidden " SYMBOL "\n"
#endif

// setjmp/ucontext would save signal masks by a system call, some 20 times slower than this.
#if defined(__x86_64__)
extern const int kFrameWords = 7, kReturnWord = 6;
asm(".text\n.globl " SYMBOL "\n" HIDE SYMBOL R"(:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#elif defined(__aarch64__)
extern const int kFrameWords = 20, kReturnWord = 11;  // x19..x30, then d8..d15
asm(".text\n.globl " SYMBOL "\n" HIDE ".p2align 2\n" SYMBOL R"(:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the fiber switch is written for x86-64 and aarch64"
#endif
