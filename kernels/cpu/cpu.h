// The boundary between Go and C: one call runs one operator. Everything that could fail but memory was refused before, except values of
// indices that lie where the other tensors do.
#ifndef GDNK_CPU_H
#define GDNK_CPU_H
#include <stdint.h>

#include "ops_gen.h"

// core.Tensor, byte for byte. Strides count elements; dtype 0: absent.
typedef struct {
	uintptr_t data;
	int32_t dtype, rank;
	int64_t shape[5], stride[5];
} gdnk_tensor;

enum { GDNK_NONE, GDNK_F32, GDNK_BF16, GDNK_F16, GDNK_F64, GDNK_I32, GDNK_I64 }; // core.DType

// The views, numbers and sizes of one call, each by its index in the generated enums.
typedef struct {
	const gdnk_tensor *t;
	const double *f;
	const int64_t *i, *size;
	char *refusal; // room for GDNK_REFUSAL bytes
} gdnk_call;

enum { GDNK_OK, GDNK_NO_MEMORY, GDNK_REFUSED, GDNK_REFUSAL = 192 };

// What one instruction set offers: an entry an operator, which returns GDNK_OK, or one of the others before anything was written.
// REFUSED: a value of a tensor of indices is wrong, and `refusal` says which.
typedef struct {
	const char *name;
	int (*op[OP_count])(const gdnk_call *);
} gdnk_table;

int gdnk_run(int op, const gdnk_tensor *t, const double *f, const int64_t *i, const int64_t *size, char *refusal);
const char *gdnk_isa(void);
void gdnk_set_num_threads(int n);
int gdnk_get_num_threads(void);

// pool.c. fn(ctx, unit, scratch) runs once for each unit in [0, n), on the caller's and the pool's threads; scratch is a 64-byte
// aligned block of the thread's own, `bytes` long, its content undefined. Returns 1, without having called fn, if memory ran out.
int gdnk_parallel(int64_t n, int64_t bytes, void (*fn)(void *ctx, int64_t unit, char *scratch), void *ctx);

// An output of some megabytes is often memory that was never touched: ask for large pages before it is, which saves most of the faults
// and page walks. Memory that has its pages already stays as it is.
void gdnk_large_pages(uintptr_t p, int64_t bytes);
#endif
