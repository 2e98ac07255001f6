#pragma once

// Saves the callee-saved registers and the stack pointer of the running fiber in *save, and
// continues the fiber whose stack pointer is `load`.
extern "C" void shim_switch(void** save, void* load);

extern const int kFrameWords;  // machine words that a switch pushes
extern const int kReturnWord;  // which of them is jumped to
