// C side of package ascendc: calls whose argument lists purego cannot make, and what only libc knows.
#ifndef GDNA_TRAMPOLINE_H
#define GDNA_TRAMPOLINE_H
#include <stdint.h>

enum { GDNA_INTS = 40, GDNA_FLOATS = 8 };

// Calls fn with up to 40 integer-class and 8 floating arguments. A C float goes as the low half of its double. What fn does not take
// lies in registers and stack that it does not read.
int32_t gdna_call(uintptr_t fn, const uint64_t *ints, const double *floats);

// The file that a function lies in, or NULL.
const char *gdna_file_of(uintptr_t fn);
#endif
