// The two phases of an aclnn operator. libnnopbase.
#include "op.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int fake_item(int dtype); // tensor.c

enum { POISON = 0xa5, MAX_SPANS = 32 };

static const char *type_name(int dtype) {
	switch (dtype) {
	case 0: return "float32";
	case 1: return "float16";
	case 2: return "int8";
	case 3: return "int32";
	case 4: return "uint8";
	case 6: return "int16";
	case 9: return "int64";
	case 11: return "float64";
	case 12: return "bool";
	case 27: return "bfloat16";
	}
	return "another type";
}

// ---- first phase ----

Op *op_begin(const char *name, int (*run)(Op *), int flags, int data_types) {
	Op *o = fake_new(EXECUTOR, sizeof *o);
	snprintf(o->name, sizeof o->name, "%s", name);
	o->run = run, o->flags = flags, o->data_types = data_types, o->data = o->state = -1;
	o->state_types = F32 | BF16 | F16;
	o->workspace = 4096;
	return o;
}

static void refuse(Op *o, int status, const char *format, va_list args) {
	char line[512];
	if (o->status)
		return; // the first reason stays
	vsnprintf(line, sizeof line, format, args);
	o->status = fake_error(status, "%s: %s", o->name, line);
}

void need(Op *o, int right, const char *format, ...) {
	if (right)
		return;
	va_list args;
	va_start(args, format);
	refuse(o, NN_ARGUMENT, format, args);
	va_end(args);
}

static void needs(Op *o, int right, int status, const char *format, ...) {
	if (right)
		return;
	va_list args;
	va_start(args, format);
	refuse(o, status, format, args);
	va_end(args);
}

void size(Op *o, const char *letter, int64_t v) {
	for (int i = 0; i < o->nsizes; i++)
		if (!strcmp(o->sizes[i].name, letter)) {
			need(o, o->sizes[i].value == v, "%s is %ld, expected %ld", letter, v, o->sizes[i].value);
			return;
		}
	snprintf(o->sizes[o->nsizes].name, sizeof o->sizes->name, "%s", letter);
	o->sizes[o->nsizes++].value = v;
}

int64_t dim(Op *o, const char *letter) {
	for (int i = 0; i < o->nsizes; i++)
		if (!strcmp(o->sizes[i].name, letter))
			return o->sizes[i].value;
	return strchr("0123456789", *letter) ? atoll(letter) : 0;
}

void number(Op *o, const char *name, double v) {
	o->numbers[o->nnumbers].name = name;
	o->numbers[o->nnumbers++].value = v;
}

double value(Op *o, const char *name) {
	for (int i = 0; i < o->nnumbers; i++)
		if (!strcmp(o->numbers[i].name, name))
			return o->numbers[i].value;
	fprintf(stderr, "fake CANN: %s has no number %s\n", o->name, name);
	abort();
}

static int split(const char *letters, char words[MAX_RANK][8]) {
	int n = 0, used = 0;
	while (n < MAX_RANK && sscanf(letters, " %7s%n", words[n], &used) == 1)
		n++, letters += used;
	return n;
}

static int64_t elements(const Tensor *t) {
	int64_t n = 1;
	for (int i = 0; i < t->rank; i++)
		n *= t->dims[i];
	return n;
}

static int contiguous(const Tensor *t) {
	int64_t step = 1;
	for (int i = t->rank - 1; i >= 0; i--) {
		if (t->dims[i] != 1 && t->strides[i] != step)
			return 0;
		step *= t->dims[i];
	}
	return 1;
}

static const char *shape_text(const Tensor *t, char *text, size_t room) {
	size_t n = (size_t)snprintf(text, room, "[");
	for (int i = 0; i < t->rank && n < room; i++)
		n += (size_t)snprintf(text + n, room - n, i ? " %ld" : "%ld", t->dims[i]);
	if (n < room)
		snprintf(text + n, room - n, "]");
	return text;
}

// Whether a type is among those wanted; binds the types that DATA and STATE stand for.
static int typed(Op *o, int dtype, int types) {
	if (types & DATA && (o->data < 0 ? o->data_types >> dtype & 1 : o->data == dtype))
		return o->data = dtype, 1;
	if (types & STATE && (o->state < 0 ? o->state_types >> dtype & 1 : o->state == dtype))
		return o->state = dtype, 1;
	return types >> dtype & 1;
}

void arg(Op *o, Role role, int required, const char *name, T t, const char *sizes, const char *stored, int types) {
	char words[MAX_RANK][8], have[MAX_RANK][8], shape[128];
	Arg *a = &o->args[o->nargs++];
	*a = (Arg){.name = name, .given = t, .role = role};
	if (!t) {
		needs(o, !required, NN_NULL, "%s is null", name);
		return;
	}
	if (o->status)
		return;
	if (!fake_is(t, TENSOR)) {
		const char *why = aclGetRecentErrMsg();
		need(o, 0, "%s: %s", name, why);
		return;
	}
	int rank = split(sizes, words), own = split(stored ? stored : sizes, have);
	shape_text(t, shape, sizeof shape);
	need(o, t->rank == own, "%s has shape %s, expected [%s]", name, shape, stored ? stored : sizes);
	need(o, t->dtype <= 27 && typed(o, t->dtype, types), "%s is %s, which the operator does not take there", name, type_name(t->dtype));
	need(o, !(o->flags & ND_ONLY) || t->format == 2, "%s has format %d, expected ND (2)", name, t->format);
	need(o, !(o->flags & ND_ONLY) || elements(t), "%s has shape %s: empty tensors are not taken", name, shape);
	need(o, !(o->flags & ND_ONLY && role != IN) || role == IN_OUT || contiguous(t), "%s is an output and not contiguous", name);
	need(o, !(o->flags & CONTIGUOUS) || contiguous(t), "%s is not contiguous", name);
	if (o->flags & LOGICAL && contiguous(t)) {
		int same = t->storage_rank == t->rank && !t->offset;
		for (int i = 0; same && i < t->rank; i++)
			same = t->storage[i] == t->dims[i];
		need(o, same, "%s: the storage has another shape than the tensor, which this operator reads", name);
	}
	if (o->status)
		return;
	for (int i = 0; i < own; i++) {
		int literal = strchr("0123456789", have[i][0]) != 0;
		int64_t expected = literal ? atoll(have[i]) : t->dims[i];
		for (int s = 0; !literal && s < o->nsizes; s++)
			if (!strcmp(o->sizes[s].name, have[i]))
				expected = o->sizes[s].value;
		need(o, t->dims[i] == expected, "%s has shape %s, expected [%s] with %s=%ld", name, shape, stored ? stored : sizes, have[i], expected);
		if (!literal && !o->status)
			size(o, have[i], t->dims[i]);
	}
	a->view = *t;
	a->view.rank = rank;
	int placed = 0;
	for (int i = 0; i < rank; i++) {
		a->view.dims[i] = 1, a->view.strides[i] = 0;
		for (int j = 0; j < own; j++)
			if (!strcmp(words[i], have[j]))
				a->view.dims[i] = t->dims[j], a->view.strides[i] = t->strides[j], placed++;
	}
	if (placed != own) {
		fprintf(stderr, "fake CANN: %s: the letters of %s, \"%s\", lack some of \"%s\"\n", o->name, name, sizes, stored);
		abort();
	}
	a->count = elements(&a->view);
}

void any(Op *o, Role role, const char *name, T t, int types) {
	static const char *const letters[] = {"", "a", "a b", "a b c", "a b c d", "a b c d e", "a b c d e f", "a b c d e f g", "a b c d e f g h"};
	int before = o->nsizes;
	arg(o, role, 1, name, t, letters[fake_is(t, TENSOR) ? t->rank : 0], 0, types);
	o->nsizes = before; // these letters say nothing about other arguments
}

static Arg *named(Op *o, const char *name) {
	for (int i = 0; i < o->nargs; i++)
		if (!strcmp(o->args[i].name, name))
			return &o->args[i];
	fprintf(stderr, "fake CANN: %s has no argument %s\n", o->name, name);
	abort();
}

int64_t shape(Op *o, const char *name, int axis) {
	const Tensor *t = &named(o, name)->view;
	return axis < 0 ? t->rank : t->dims[axis];
}

void broadcast(Op *o, const char *name, const char *like) {
	if (o->status)
		return;
	Arg *a = named(o, name);
	const Tensor *to = &named(o, like)->view;
	Tensor was = a->view;
	need(o, was.rank <= to->rank, "%s has rank %d and does not go into %s of rank %d", name, was.rank, like, to->rank);
	for (int i = 0; i < to->rank && !o->status; i++) {
		int j = i - (to->rank - was.rank);
		int64_t n = j < 0 ? 1 : was.dims[j];
		need(o, n == 1 || n == to->dims[i], "%s: dimension %d has size %ld, %s has %ld there", name, j, n, like, to->dims[i]);
		a->view.dims[i] = to->dims[i];
		a->view.strides[i] = n == 1 ? 0 : was.strides[j];
	}
	a->view.rank = to->rank;
	a->count = elements(&a->view);
}

double scalar(Op *o, const char *name, const Scalar *s) {
	needs(o, s != 0, NN_NULL, "%s is null", name);
	need(o, !s || fake_is(s, SCALAR), "%s is no live aclScalar", name);
	return o->status ? 0 : s->value;
}

void null(Op *o, const char *name, T t) {
	need(o, !t, "%s must be null", name);
}

void sequences(Op *o, L cu, L indices, int64_t chunk, int rules) {
	int64_t batch = dim(o, "B"), tokens = dim(o, "T"), n = batch, most = 0;
	if (o->status)
		return;
	need(o, chunk > 0, "chunkSize is %ld", chunk);
	need(o, (!cu || fake_is(cu, INT_ARRAY)) && (!indices || fake_is(indices, INT_ARRAY)), "a list is not a live aclIntArray");
	need(o, cu || !indices, "chunkIndices without cuSeqlens");
	if (o->status)
		return;
	need(o, !(rules & BOTH) || !cu || indices, "cuSeqlens without chunkIndices");
	if (cu) {
		need(o, batch == 1, "cuSeqlens with a batch of %ld, expected 1", batch);
		need(o, cu->n >= 2, "cuSeqlens has %ld entries", cu->n);
		n = cu->n - 1;
		for (int64_t i = 0; i < cu->n && !o->status; i++)
			need(o, cu->v[i] >= (i ? cu->v[i - 1] + !!(rules & STRICT) : 0) && cu->v[i] <= tokens && (i || rules & WINDOW || !cu->v[0]),
			     "cuSeqlens[%ld] is %ld: expected offsets from 0 to %ld that %s", i, cu->v[i], tokens, rules & STRICT ? "increase" : "do not decrease");
		if (!o->status && rules & WHOLE)
			need(o, cu->v[n] == tokens, "cuSeqlens ends at %ld, expected %ld", cu->v[n], tokens);
	}
	if (o->status)
		return;
	o->sequences = calloc((size_t)n + 1, sizeof *o->sequences);
	o->nsequences = (int)n;
	for (int64_t i = 0, pair = 0; i < n; i++) {
		Sequence *s = &o->sequences[i];
		*s = cu ? (Sequence){0, cu->v[i], cu->v[i + 1] - cu->v[i], most} : (Sequence){i, 0, tokens, 0};
		int64_t chunks = (s->n + chunk - 1) / chunk;
		most = cu ? most + chunks : chunks;
		for (int64_t c = 0; indices && c < chunks; c++, pair++)
			need(o, 2 * pair + 1 < indices->n && indices->v[2 * pair] == i && indices->v[2 * pair + 1] == c,
			     "chunkIndices: pair %ld is not (%ld, %ld)", pair, i, c);
	}
	need(o, !indices || indices->n == 2 * most, "chunkIndices has %ld numbers, expected %ld", indices ? indices->n : 0, 2 * most);
	o->chunks = most;
	size(o, "N", n);
	size(o, "NT", most);
}

static void drop(Op *o) {
	free(o->sequences);
	free(o->list);
	fake_delete(o, EXECUTOR);
}

int op_end(Op *o, uint64_t *bytes, Executor **executor) {
	needs(o, bytes && executor, NN_NULL, "workspaceSize or executor is null");
	int status = o->status;
	if (status) {
		char line[512]; // dropping may say something of its own
		snprintf(line, sizeof line, "%s", aclGetRecentErrMsg());
		drop(o);
		return fake_error(status, "%s", line);
	}
	*bytes = o->workspace, *executor = o;
	return OK;
}

// ---- executors that are used again ----

static Arg *tensor_at(Op *o, uint64_t index, int role) { // role: -1 any
	uint64_t at = 0;
	for (int i = 0; i < o->nargs; i++)
		if (o->args[i].given && (role < 0 || (role == OUT ? o->args[i].role == OUT : o->args[i].role != OUT)) && at++ == index)
			return &o->args[i];
	return 0;
}

EXPORT int aclSetAclOpExecutorRepeatable(Executor *executor) {
	ENTER();
	if (!fake_is(executor, EXECUTOR))
		return NN_NO_EXECUTOR;
	return executor->repeatable = 1, OK;
}

EXPORT int aclDestroyAclOpExecutor(Executor *executor) {
	ENTER();
	if (!fake_is(executor, EXECUTOR) || executor->launched) {
		fake_violation("aclDestroyAclOpExecutor: %p is no executor that the caller still owns", (void *)executor);
		return NN_NO_EXECUTOR;
	}
	return drop(executor), OK;
}

static int set_address(Executor *o, uint64_t index, T t, void *address, int role, const char *function) {
	if (!fake_is(o, EXECUTOR))
		return NN_NO_EXECUTOR;
	Arg *a = tensor_at(o, index, role);
	if (!o->repeatable || !a || a->given != t || (uintptr_t)address % 32)
		return fake_error(NN_ARGUMENT, "%s: tensor %lu of %s cannot be moved to %p", function, index, o->name, address);
	return a->view.data = address, OK;
}

EXPORT int aclSetTensorAddr(Executor *executor, size_t index, T t, void *address) {
	ENTER();
	return set_address(executor, index, t, address, -1, __func__);
}

EXPORT int aclSetInputTensorAddr(Executor *executor, size_t index, T t, void *address) {
	ENTER();
	return set_address(executor, index, t, address, IN, __func__);
}

EXPORT int aclSetOutputTensorAddr(Executor *executor, size_t index, T t, void *address) {
	ENTER();
	return set_address(executor, index, t, address, OUT, __func__);
}

// ---- second phase ----

static double load(const char *p, int dtype) {
	switch (dtype) {
	case 0: return *(const float *)p;
	case 1: return (double)*(const _Float16 *)p;
	case 2: return *(const int8_t *)p;
	case 3: return *(const int32_t *)p;
	case 4: case 12: return *(const uint8_t *)p;
	case 6: return *(const int16_t *)p;
	case 9: return (double)*(const int64_t *)p;
	case 11: return *(const double *)p;
	}
	uint32_t bits = (uint32_t)*(const uint16_t *)p << 16;
	float f;
	memcpy(&f, &bits, 4);
	return f;
}

static void store(char *p, int dtype, double v) {
	switch (dtype) {
	case 0: *(float *)p = (float)v; return;
	case 1: *(_Float16 *)p = (_Float16)v; return;
	case 2: *(int8_t *)p = (int8_t)v; return;
	case 3: *(int32_t *)p = (int32_t)v; return;
	case 4: *(uint8_t *)p = (uint8_t)v; return;
	case 6: *(int16_t *)p = (int16_t)v; return;
	case 9: *(int64_t *)p = (int64_t)v; return;
	case 11: *(double *)p = v; return;
	case 12: *(uint8_t *)p = v != 0; return;
	}
	float f = (float)v;
	uint32_t bits;
	memcpy(&bits, &f, 4);
	*(uint16_t *)p = f != f ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Moves between the client's elements and the dense array: 0 load, 1 store, 2 poison.
static void move(const Arg *a, int axis, char *p, int64_t *index, int how) {
	const Tensor *t = &a->view;
	int bytes = fake_item(t->dtype);
	if (axis == t->rank) {
		if (how == 0)
			a->values[*index] = load(p, t->dtype);
		else if (how == 1)
			store(p, t->dtype, a->values[*index]);
		else
			memset(p, 0xff, (size_t)bytes);
		++*index;
		return;
	}
	for (int64_t i = 0; i < t->dims[axis]; i++)
		move(a, axis + 1, p + i * t->strides[axis] * bytes, index, how);
}

static void each(const Arg *a, int how) {
	int64_t index = 0;
	if (a->count)
		move(a, 0, a->at, &index, how);
}

double *get(Op *o, const char *name) {
	Arg *a = named(o, name);
	return a->given ? a->values : 0;
}

typedef struct Piece {
	struct Piece *next;
	double values[];
} Piece;

static __thread Piece *pieces;

double *scratch(int64_t n) {
	Piece *p = calloc(1, sizeof *p + (size_t)(n ? n : 1) * sizeof(double));
	if (!p)
		abort();
	p->next = pieces, pieces = p;
	return p->values;
}

static int run(void *argument) {
	Op *o = argument;
	if (o->workspace)
		memset(o->workspace_at, POISON, o->workspace);
	for (int i = 0; i < o->nargs; i++) {
		Arg *a = &o->args[i];
		if (!a->given)
			continue;
		a->values = malloc((size_t)(a->count ? a->count : 1) * sizeof(double));
		if (a->role != OUT)
			each(a, 0);
		else
			for (int64_t j = 0; j < a->count; j++)
				a->values[j] = NAN;
	}
	for (int i = 0; i < o->nargs; i++)
		if (o->args[i].given && o->args[i].role == OUT)
			each(&o->args[i], 2);
	int status = o->run(o);
	for (Piece *p; (p = pieces);) {
		pieces = p->next;
		free(p);
	}
	for (int i = 0; i < o->nargs; i++) {
		Arg *a = &o->args[i];
		if (a->given && a->role != IN && !status)
			each(a, 1);
		free(a->values);
		a->values = 0;
	}
	for (uint64_t i = 0; i < o->workspace; i++)
		if ((unsigned char)o->workspace_at[i] != POISON) {
			fake_violation("%s: something else wrote into its workspace while it ran", o->name);
			break;
		}
	return status;
}

static void drop_launched(void *argument) {
	drop(argument);
}

// The memory of a tensor, exactly: its contiguous pieces. More than room of them: none, and ordering is not watched there.
static int spans_of(const Arg *a, Span *spans, int room) {
	const Tensor *t = &a->view;
	int bytes = fake_item(t->dtype), order[MAX_RANK], n = 0;
	for (int i = 0; i < t->rank; i++) { // dimensions by stride, the largest first, those of size 1 left out
		if (t->dims[i] == 1)
			continue;
		int at = n++;
		for (; at && t->strides[order[at - 1]] < t->strides[i]; at--)
			order[at] = order[at - 1];
		order[at] = i;
	}
	int64_t piece = 1, pieces_ = 1;
	while (n && t->strides[order[n - 1]] == piece)
		piece *= t->dims[order[--n]];
	for (int i = 0; i < n; i++)
		pieces_ *= t->dims[order[i]];
	if (!a->count || pieces_ > room)
		return 0;
	for (int64_t i = 0; i < pieces_; i++) {
		int64_t at = t->offset, rest = i;
		for (int j = n - 1; j >= 0; j--)
			at += rest % t->dims[order[j]] * t->strides[order[j]], rest /= t->dims[order[j]];
		spans[i] = (Span){(uintptr_t)t->data + (uintptr_t)(at * bytes), (size_t)(piece * bytes), a->role != IN};
	}
	return (int)pieces_;
}

static int prepare(Op *o, void *workspace, uint64_t bytes, Span *spans, int *nspans) {
	int device = fake_device();
	if (device < 0)
		return fake_error(RT_NO_CONTEXT, "%s: this thread has no context", o->name);
	for (int i = 0; i < o->nargs; i++) {
		Arg *a = &o->args[i];
		if (!a->given)
			continue;
		if (!fake_is(a->given, TENSOR)) {
			fake_violation("%s: the descriptor of %s was destroyed between the two phases", o->name, a->name);
			return NN_ARGUMENT;
		}
		int64_t last = a->view.offset;
		int item = fake_item(a->view.dtype);
		for (int j = 0; j < a->view.rank; j++)
			last += (a->view.dims[j] - 1) * a->view.strides[j];
		if (!a->count)
			continue;
		a->at = fake_reach(a->view.data + a->view.offset * item, (size_t)((last - a->view.offset + 1) * item), device);
		if (!a->at) {
			const char *why = aclGetRecentErrMsg();
			return fake_error(NN_RUNTIME, "%s: %s: %.300s", o->name, a->name, why);
		}
		*nspans += spans_of(a, spans + *nspans, MAX_SPANS);
	}
	if (!o->workspace)
		return OK;
	if (bytes < o->workspace || !(o->workspace_at = fake_reach(workspace, o->workspace, device))) {
		const char *why = bytes < o->workspace ? "too small" : aclGetRecentErrMsg();
		return fake_error(NN_RUNTIME, "%s: workspace of %lu bytes, expected %lu: %.300s", o->name, bytes, o->workspace, why);
	}
	spans[(*nspans)++] = (Span){(uintptr_t)workspace, o->workspace, 1};
	return OK;
}

int op_launch(const char *name, void *workspace, uint64_t bytes, Executor *executor, void *stream, int scripted) {
	Span *spans = malloc((MAX_ARGS * MAX_SPANS + 1) * sizeof *spans);
	int n = 0, status = scripted;
	char line[512];
	if (!fake_is(executor, EXECUTOR) || executor->launched || strcmp(executor->name, name)) {
		fake_violation("%s: %p is not an executor of its first phase that was not launched yet", name, (void *)executor);
		free(spans);
		return NN_NO_EXECUTOR;
	}
	Op *o = executor;
	if (!status && o->repeatable) { // the client keeps its own
		Op *mine = fake_new(EXECUTOR, sizeof *mine);
		Handle handle = mine->handle;
		*mine = *o;
		mine->handle = handle;
		mine->sequences = calloc((size_t)o->nsequences + 1, sizeof *o->sequences);
		if (o->sequences)
			memcpy(mine->sequences, o->sequences, (size_t)o->nsequences * sizeof *o->sequences);
		mine->list = 0; // no operator with lists of its own is repeatable
		o = mine;
	}
	if (!status)
		status = prepare(o, workspace, bytes, spans, &n);
	if (!status) {
		o->launched = 1;
		status = fake_enqueue(stream, &(Work){name, run, drop_launched, o, spans, n});
	}
	free(spans);
	if (status && (o != executor || !o->repeatable)) { // consumed all the same
		snprintf(line, sizeof line, "%s", aclGetRecentErrMsg());
		drop(o);
		fake_error(status, "%s", line);
	}
	return status;
}
