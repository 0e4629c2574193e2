#define _GNU_SOURCE
#include "trampoline.h"

#include <dlfcn.h>
#include <stddef.h>

#define I(n) uint64_t
#define TEN(x, n) x(n), x(n + 1), x(n + 2), x(n + 3), x(n + 4), x(n + 5), x(n + 6), x(n + 7), x(n + 8), x(n + 9)

// Integers and floats are counted apart by both calling conventions (x86-64 System V, AArch64), so their order among each other does not
// matter. All floats fit in registers.
typedef int32_t function(TEN(I, 0), TEN(I, 10), TEN(I, 20), TEN(I, 30), double, double, double, double, double, double, double, double);

#define A(n) i[n]

int32_t gdna_call(uintptr_t fn, const uint64_t *i, const double *f) {
	return ((function *)fn)(TEN(A, 0), TEN(A, 10), TEN(A, 20), TEN(A, 30), f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
}

const char *gdna_file_of(uintptr_t fn) {
	Dl_info info;
	return dladdr((void *)fn, &info) ? info.dli_fname : NULL;
}
