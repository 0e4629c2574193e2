// How an aclnn operator of the fake is written. Its first phase describes each argument once: name, letters of its sizes, types. The
// descriptors are checked against that, strictly, and the second phase does the rest: addresses, ordering, workspace. What remains for the
// operator is a function that reads dense float64 arrays and writes dense float64 arrays.
#ifndef FAKE_OP_H
#define FAKE_OP_H

#include <stdbool.h>

#include "fake.h"

enum { MAX_RANK = 8, MAX_ARGS = 40, MAX_NUMBERS = 24, MAX_SIZES = 32 };

typedef struct Tensor {
	Handle handle;
	int rank, dtype, format, storage_rank;
	int64_t dims[MAX_RANK], strides[MAX_RANK], offset, storage[MAX_RANK];
	char *data; // start of the storage, as the client knows it
} Tensor;

typedef struct {
	Handle handle;
	int dtype;
	double value;
} Scalar;

typedef struct {
	Handle handle;
	int64_t n, v[];
} IntArray;

typedef struct {
	Handle handle;
	int64_t n;
	Tensor **v;
} TensorList;

typedef const Tensor *T;
typedef const IntArray *L;
typedef struct Op Executor;

// Types of elements: the bit of the real enumeration's number. DATA: the type that the operator's first DATA tensor has, one of
// data_types; STATE likewise.
enum { F32 = 1 << 0, F16 = 1 << 1, I8 = 1 << 2, I32 = 1 << 3, U8 = 1 << 4, I16 = 1 << 6, I64 = 1 << 9, F64 = 1 << 11, BOOL = 1 << 12, BF16 = 1 << 27,
       DATA = 1 << 28, STATE = 1 << 29, ANY = F32 | F16 | I8 | I32 | U8 | I16 | I64 | F64 | BOOL | BF16 };

typedef enum { IN, OUT, IN_OUT } Role;

typedef struct {
	const char *name;
	T given;     // the client's descriptor, or 0
	Tensor view; // its copy, dimensions in the order that the operator computes in
	Role role;
	char *at; // first element, as the fake reaches it
	double *values;
	int64_t count;
} Arg;

typedef struct {
	int64_t b, start, n, chunk; // batch, first token, tokens, index of the first chunk
} Sequence;

typedef struct Op {
	Handle handle;
	char name[64];
	int (*run)(struct Op *);
	int status, launched, repeatable;
	int flags, data_types, data, state_types, state;
	int nargs, nnumbers, nsizes;
	Arg args[MAX_ARGS];
	struct {
		const char *name;
		double value;
	} numbers[MAX_NUMBERS];
	struct {
		char name[8];
		int64_t value;
	} sizes[MAX_SIZES];
	Sequence *sequences;
	int nsequences;
	int64_t chunks; // all of them: NT
	int64_t *list;  // for operators with lists of their own
	uint64_t workspace;
	char *workspace_at;
} Op;

// Flags. ND_ONLY also: no empty tensors, outputs contiguous. LOGICAL: the storage has the tensor's own shape. CONTIGUOUS: inputs too.
enum { ND_ONLY = 1, LOGICAL = 2, CONTIGUOUS = 4 };

EXPORT Op *op_begin(const char *name, int (*run)(Op *), int flags, int data_types);
EXPORT int op_end(Op *o, uint64_t *bytes, Executor **executor);
EXPORT int op_launch(const char *name, void *workspace, uint64_t bytes, Executor *executor, void *stream, int scripted);
EXPORT void need(Op *o, int right, const char *format, ...) __attribute__((format(printf, 3, 4)));

// One argument. sizes: letters, outermost first, in the order that the operator computes in; stored: the order in which the client has
// them, 0: the same. A letter that stored lacks is 1.
EXPORT void arg(Op *o, Role role, int required, const char *name, T t, const char *sizes, const char *stored, int types);
#define in(o, name, t, sizes, types) arg(o, IN, 1, name, t, sizes, 0, types)
#define opt(o, name, t, sizes, types) arg(o, IN, 0, name, t, sizes, 0, types)
#define out(o, name, t, sizes, types) arg(o, OUT, 1, name, t, sizes, 0, types)
#define optout(o, name, t, sizes, types) arg(o, OUT, 0, name, t, sizes, 0, types)
#define inout(o, name, t, sizes, types) arg(o, IN_OUT, 1, name, t, sizes, 0, types)
EXPORT void any(Op *o, Role role, const char *name, T t, int types);        // of any shape
EXPORT void broadcast(Op *o, const char *name, const char *like);          // to the shape of another argument
EXPORT int64_t shape(Op *o, const char *name, int axis);                   // axis -1: the rank
EXPORT double scalar(Op *o, const char *name, const Scalar *s);
EXPORT void null(Op *o, const char *name, T t); // an argument that must be NULL
EXPORT void number(Op *o, const char *name, double value);
EXPORT void size(Op *o, const char *letter, int64_t value);

// Sequences from the lists in host memory, or the batch's. The letters B and T are known. Sets N and NT. Rules: BOTH: a list comes with the
// other one; STRICT: no sequence is empty; WINDOW: they may begin after 0 and end before T; else they go from 0 to at most T.
enum { BOTH = 1, STRICT = 2, WINDOW = 4, WHOLE = 8 };
EXPORT void sequences(Op *o, L cu, L indices, int64_t chunk, int rules);

// For the computation.
EXPORT double *get(Op *o, const char *name); // 0: not given. Outputs begin as NaN
EXPORT double value(Op *o, const char *name);
EXPORT int64_t dim(Op *o, const char *letter);
EXPORT double *scratch(int64_t n); // zeros, freed after the run

#define LAUNCH(name)                                                                                                                         \
	EXPORT int name(void *workspace, uint64_t bytes, Executor *executor, void *stream) {                                                     \
		TIMED();                                                                                                                             \
		return op_launch(#name, workspace, bytes, executor, stream, fake_enter(#name));                                                      \
	}

#endif
