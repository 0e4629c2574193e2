// Picks the kernels' table once, by what the processor can; GDN_ISA names a lower one.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

#if defined(__x86_64__)
extern const gdnk_table gdnk_avx512, gdnk_avx2, gdnk_base;
static const gdnk_table *const tables[] = {&gdnk_avx512, &gdnk_avx2, &gdnk_base}; // best first
static int can(const gdnk_table *t) {
	__builtin_cpu_init();
	if (t == &gdnk_avx512) return __builtin_cpu_supports("x86-64-v4");
	if (t == &gdnk_avx2) return __builtin_cpu_supports("x86-64-v3");
	return 1;
}
#else
extern const gdnk_table gdnk_neon;
static const gdnk_table *const tables[] = {&gdnk_neon};
static int can(const gdnk_table *t) { return t != NULL; }
#endif

static const gdnk_table *pick(void) {
	static _Atomic(const gdnk_table *) picked;
	const gdnk_table *t = picked;
	if (t) return t;
	const char *want = getenv("GDN_ISA");
	for (size_t i = 0; i < sizeof tables / sizeof *tables && !t; i++)
		if (can(tables[i]) && (!want || !*want || !strcmp(want, tables[i]->name))) t = tables[i];
	for (size_t i = 0; !t; i++) // an unknown name, or one that this processor lacks, chooses nothing
		if (can(tables[i])) t = tables[i];
	picked = t;
	return t;
}
const char *gdnk_isa(void) { return pick()->name; }
int gdnk_run(int op, const gdnk_tensor *t, const double *f, const int64_t *i, const int64_t *size, char *refusal) {
	return pick()->op[op](&(gdnk_call){t, f, i, size, refusal});
}
