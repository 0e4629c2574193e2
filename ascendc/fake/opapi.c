// CANN's own operators, as far as clients here need them: copies, elementwise arithmetic, matrix products, and the two gated delta rules.
// libopapi.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "delta.h"
#include "op.h"

static Op *plain(const char *name, int (*run)(Op *)) {
	Op *o = op_begin(name, run, 0, ANY);
	o->workspace = 0;
	return o;
}

static int64_t count(Op *o, const char *name) {
	int64_t n = 1;
	for (int64_t i = 0; i < shape(o, name, -1); i++)
		n *= shape(o, name, (int)i);
	return n;
}

// ---- copies and constants ----

static int run_copy(Op *o) {
	memcpy(get(o, "self"), get(o, "src"), (size_t)count(o, "self") * sizeof(double));
	return OK;
}

EXPORT int aclnnInplaceCopyGetWorkspaceSize(T self, T src, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnInplaceCopy", run_copy);
	any(o, OUT, "self", self, ANY);
	any(o, IN, "src", src, ANY);
	broadcast(o, "src", "self");
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnInplaceCopy)

EXPORT int aclnnCastGetWorkspaceSize(T self, int dtype, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnCast", run_copy);
	any(o, OUT, "self", result, ANY);
	any(o, IN, "src", self, ANY);
	broadcast(o, "src", "self");
	need(o, o->status || result->dtype == dtype, "dtype is %d, the output has %d", dtype, o->status ? 0 : result->dtype);
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnCast)

static int run_constant(Op *o) {
	double *x = get(o, "self");
	for (int64_t i = 0; i < count(o, "self"); i++)
		x[i] = value(o, "value");
	return OK;
}

static int constant(const char *name, T self, double v, const Scalar *s, int scalar_needed, uint64_t *bytes, Executor **executor) {
	Op *o = plain(name, run_constant);
	any(o, OUT, "self", self, ANY);
	number(o, "value", scalar_needed ? scalar(o, "value", s) : v);
	return op_end(o, bytes, executor);
}

EXPORT int aclnnInplaceZeroGetWorkspaceSize(T self, uint64_t *bytes, Executor **executor) {
	ENTER();
	return constant("aclnnInplaceZero", self, 0, 0, 0, bytes, executor);
}
LAUNCH(aclnnInplaceZero)

EXPORT int aclnnInplaceOneGetWorkspaceSize(T self, uint64_t *bytes, Executor **executor) {
	ENTER();
	return constant("aclnnInplaceOne", self, 1, 0, 0, bytes, executor);
}
LAUNCH(aclnnInplaceOne)

EXPORT int aclnnInplaceFillScalarGetWorkspaceSize(T self, const Scalar *v, uint64_t *bytes, Executor **executor) {
	ENTER();
	return constant("aclnnInplaceFillScalar", self, 0, v, 1, bytes, executor);
}
LAUNCH(aclnnInplaceFillScalar)

static int run_pad(Op *o) {
	double *x = get(o, "self"), *y = get(o, "out");
	int rank = (int)shape(o, "out", -1);
	int64_t n = count(o, "out");
	for (int64_t i = 0; i < n; i++) {
		int64_t rest = i, from = 0, step = 1;
		int inside = 1;
		for (int axis = rank - 1; axis >= 0; axis--) {
			int64_t at = rest % shape(o, "out", axis) - o->list[axis], have = shape(o, "self", axis);
			rest /= shape(o, "out", axis);
			inside &= at >= 0 && at < have;
			from += at * step, step *= have;
		}
		y[i] = inside ? x[from] : value(o, "value");
	}
	return OK;
}

EXPORT int aclnnConstantPadNdGetWorkspaceSize(T self, L pad, const Scalar *v, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnConstantPadNd", run_pad);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	number(o, "value", scalar(o, "value", v));
	need(o, fake_is(pad, INT_ARRAY), "pad is no live aclIntArray");
	if (!o->status) {
		need(o, self->rank == result->rank && pad->n <= 2 * self->rank && pad->n % 2 == 0, "pad of %ld numbers from rank %d to %d", pad->n, self->rank, result->rank);
		o->list = calloc(MAX_RANK, sizeof *o->list);
		for (int i = 0; !o->status && i < self->rank; i++) { // pairs, the last axis first
			int axis = self->rank - 1 - i;
			int64_t before = 2 * i < pad->n ? pad->v[2 * i] : 0, after = 2 * i < pad->n ? pad->v[2 * i + 1] : 0;
			o->list[axis] = before;
			need(o, self->dims[axis] + before + after == result->dims[axis], "axis %d: %ld + %ld + %ld is not %ld", axis, before, self->dims[axis], after,
			     result->dims[axis]);
		}
	}
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnConstantPadNd)

static const char *const parts[] = {"0",  "1",  "2",  "3",  "4",  "5",  "6",  "7",  "8",  "9",  "10", "11", "12", "13", "14", "15",
                                    "16", "17", "18", "19", "20", "21", "22", "23", "24", "25", "26", "27", "28", "29", "30", "31"};

static int run_cat(Op *o) {
	int axis = (int)value(o, "axis"), n = (int)value(o, "n");
	double *y = get(o, "out");
	int64_t outer = 1, inner = 1, at = 0, whole = shape(o, "out", axis);
	for (int i = 0; i < shape(o, "out", -1); i++)
		*(i < axis ? &outer : &inner) *= i == axis ? 1 : shape(o, "out", i);
	for (int i = 0; i < n; i++) {
		double *x = get(o, parts[i]);
		int64_t rows = shape(o, parts[i], axis);
		for (int64_t a = 0; a < outer; a++)
			memcpy(y + (a * whole + at) * inner, x + a * rows * inner, (size_t)(rows * inner) * sizeof *y);
		at += rows;
	}
	return OK;
}

EXPORT int aclnnCatGetWorkspaceSize(const TensorList *list, int64_t axis, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnCat", run_cat);
	any(o, OUT, "out", result, ANY);
	need(o, fake_is(list, TENSOR_LIST) && list->n <= LENGTH(parts), "tensors is no live aclTensorList of at most %d", LENGTH(parts));
	int n = 0;
	int64_t rows = 0;
	if (!o->status) {
		axis += axis < 0 ? result->rank : 0;
		need(o, axis >= 0 && axis < result->rank, "dim is %ld", axis);
	}
	for (int64_t i = 0; !o->status && i < list->n; i++) {
		T t = list->v[i];
		if (t->rank == 1 && !t->dims[0] && result->rank != 1)
			continue; // an empty tensor of another rank may stand in a list
		any(o, IN, parts[n++], t, ANY);
		need(o, t->rank == result->rank, "tensor %ld has rank %d, expected %d", i, t->rank, result->rank);
		for (int d = 0; !o->status && d < t->rank; d++)
			need(o, d == axis || t->dims[d] == result->dims[d], "tensor %ld: dimension %d has size %ld, expected %ld", i, d, t->dims[d], result->dims[d]);
		rows += o->status ? 0 : t->dims[axis];
	}
	need(o, o->status || rows == result->dims[axis], "the parts have %ld rows, the output %ld", rows, o->status ? 0 : result->dims[axis]);
	number(o, "axis", (double)axis);
	number(o, "n", n);
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnCat)

// ---- elementwise ----

typedef enum { ADD, SUB, MUL, DIV, GREATER, LESS, EQUAL, NOT_EQUAL, POWER, FROM } Binary;

static double apply(Binary op, double a, double b) {
	switch (op) {
	case ADD: return a + b;
	case SUB: return a - b;
	case MUL: return a * b;
	case DIV: return a / b;
	case GREATER: return a > b;
	case LESS: return a < b;
	case EQUAL: return a == b;
	case NOT_EQUAL: return a != b;
	case POWER: return pow(a, b);
	case FROM: return b - a;
	}
	return NAN;
}

static int run_binary(Op *o) {
	double *a = get(o, "self"), *b = get(o, "other"), *y = get(o, "out"), alpha = value(o, "alpha");
	Binary op = (Binary)value(o, "op");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = apply(op, a[i], alpha * b[i]);
	return OK;
}

static int binary(const char *name, Binary op, T self, T other, double alpha, T result, uint64_t *bytes, Executor **executor) {
	Op *o = plain(name, run_binary);
	any(o, IN, "self", self, ANY);
	any(o, IN, "other", other, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "self", "out");
	broadcast(o, "other", "out");
	number(o, "op", op);
	number(o, "alpha", alpha);
	return op_end(o, bytes, executor);
}

static int run_with_scalar(Op *o) {
	double *a = get(o, "self"), *y = get(o, "out"), b = value(o, "other");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = apply((Binary)value(o, "op"), a[i], b);
	return OK;
}

static int with_scalar(const char *name, Binary op, T self, const Scalar *other, const Scalar *alpha, int has_alpha, T result, uint64_t *bytes, Executor **executor) {
	Op *o = plain(name, run_with_scalar);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "self", "out");
	number(o, "op", op);
	number(o, "other", scalar(o, "other", other) * (has_alpha ? scalar(o, "alpha", alpha) : 1));
	return op_end(o, bytes, executor);
}

static double alpha_of(const Scalar *s) {
	return s && fake_is(s, SCALAR) ? s->value : NAN;
}

// Sums have a factor of the second operand, products have none.
#define SUM_LIKE(Name, op)                                                                                                                   \
	EXPORT int aclnn##Name##GetWorkspaceSize(T self, T other, const Scalar *alpha, T result, uint64_t *bytes, Executor **executor) {         \
		ENTER();                                                                                                                             \
		return binary("aclnn" #Name, op, self, other, alpha_of(alpha), result, bytes, executor);                                             \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name)                                                                                                                      \
	EXPORT int aclnn##Name##sGetWorkspaceSize(T self, const Scalar *other, const Scalar *alpha, T result, uint64_t *bytes, Executor **executor) { \
		ENTER();                                                                                                                             \
		return with_scalar("aclnn" #Name "s", op, self, other, alpha, 1, result, bytes, executor);                                           \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name##s)                                                                                                                   \
	EXPORT int aclnnInplace##Name##GetWorkspaceSize(T self, T other, const Scalar *alpha, uint64_t *bytes, Executor **executor) {            \
		ENTER();                                                                                                                             \
		return binary("aclnnInplace" #Name, op, self, other, alpha_of(alpha), self, bytes, executor);                                        \
	}                                                                                                                                        \
	LAUNCH(aclnnInplace##Name)                                                                                                               \
	EXPORT int aclnnInplace##Name##sGetWorkspaceSize(T self, const Scalar *other, const Scalar *alpha, uint64_t *bytes, Executor **executor) { \
		ENTER();                                                                                                                             \
		return with_scalar("aclnnInplace" #Name "s", op, self, other, alpha, 1, self, bytes, executor);                                      \
	}                                                                                                                                        \
	LAUNCH(aclnnInplace##Name##s)
#define PRODUCT_LIKE(Name, op)                                                                                                               \
	EXPORT int aclnn##Name##GetWorkspaceSize(T self, T other, T result, uint64_t *bytes, Executor **executor) {                              \
		ENTER();                                                                                                                             \
		return binary("aclnn" #Name, op, self, other, 1, result, bytes, executor);                                                           \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name)                                                                                                                      \
	EXPORT int aclnn##Name##sGetWorkspaceSize(T self, const Scalar *other, T result, uint64_t *bytes, Executor **executor) {                 \
		ENTER();                                                                                                                             \
		return with_scalar("aclnn" #Name "s", op, self, other, 0, 0, result, bytes, executor);                                               \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name##s)                                                                                                                   \
	EXPORT int aclnnInplace##Name##GetWorkspaceSize(T self, T other, uint64_t *bytes, Executor **executor) {                                 \
		ENTER();                                                                                                                             \
		return binary("aclnnInplace" #Name, op, self, other, 1, self, bytes, executor);                                                      \
	}                                                                                                                                        \
	LAUNCH(aclnnInplace##Name)                                                                                                               \
	EXPORT int aclnnInplace##Name##sGetWorkspaceSize(T self, const Scalar *other, uint64_t *bytes, Executor **executor) {                    \
		ENTER();                                                                                                                             \
		return with_scalar("aclnnInplace" #Name "s", op, self, other, 0, 0, self, bytes, executor);                                          \
	}                                                                                                                                        \
	LAUNCH(aclnnInplace##Name##s)
SUM_LIKE(Add, ADD)
SUM_LIKE(Sub, SUB)
PRODUCT_LIKE(Mul, MUL)
PRODUCT_LIKE(Div, DIV)

#define COMPARISON(Name, op)                                                                                                                 \
	EXPORT int aclnn##Name##GetWorkspaceSize(T self, T other, T result, uint64_t *bytes, Executor **executor) {                              \
		ENTER();                                                                                                                             \
		return binary("aclnn" #Name, op, self, other, 1, result, bytes, executor);                                                           \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name)
COMPARISON(GtTensor, GREATER)
COMPARISON(LtTensor, LESS)
COMPARISON(EqTensor, EQUAL)
COMPARISON(NeTensor, NOT_EQUAL)

#define WITH_SCALAR(Name, op)                                                                                                                \
	EXPORT int aclnn##Name##GetWorkspaceSize(T self, const Scalar *other, T result, uint64_t *bytes, Executor **executor) {                  \
		ENTER();                                                                                                                             \
		return with_scalar("aclnn" #Name, op, self, other, 0, 0, result, bytes, executor);                                                   \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name)
WITH_SCALAR(GtScalar, GREATER)
WITH_SCALAR(LtScalar, LESS)
WITH_SCALAR(EqScalar, EQUAL)
WITH_SCALAR(NeScalar, NOT_EQUAL)
WITH_SCALAR(PowTensorScalar, POWER)

EXPORT int aclnnRsubsGetWorkspaceSize(T self, const Scalar *other, const Scalar *alpha, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	double factor = alpha_of(alpha);
	if (factor != 1)
		return fake_error(NN_ARGUMENT, "aclnnRsubs: alpha is %g, this fake has 1 only", factor);
	return with_scalar("aclnnRsubs", FROM, self, other, 0, 0, result, bytes, executor);
}
LAUNCH(aclnnRsubs)

static int run_where(Op *o) {
	double *c = get(o, "condition"), *a = get(o, "self"), *b = get(o, "other"), *y = get(o, "out");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = c[i] != 0 ? a[i] : b[i];
	return OK;
}

EXPORT int aclnnSWhereGetWorkspaceSize(T condition, T self, T other, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnSWhere", run_where);
	any(o, IN, "condition", condition, BOOL | U8);
	any(o, IN, "self", self, ANY);
	any(o, IN, "other", other, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "condition", "out");
	broadcast(o, "self", "out");
	broadcast(o, "other", "out");
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnSWhere)

static double sigmoid(double x) {
	return 1 / (1 + exp(-x));
}

static int run_unary(Op *o, double (*f)(double)) {
	double *x = get(o, "self"), *y = get(o, "out");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = f(x[i]);
	return OK;
}

#define UNARY(Name, expression)                                                                                                              \
	static double f_##Name(double x) {                                                                                                       \
		return expression;                                                                                                                   \
	}                                                                                                                                        \
	static int run_##Name(Op *o) {                                                                                                           \
		return run_unary(o, f_##Name);                                                                                                       \
	}                                                                                                                                        \
	EXPORT int aclnn##Name##GetWorkspaceSize(T self, T result, uint64_t *bytes, Executor **executor) {                                       \
		ENTER();                                                                                                                             \
		Op *o = plain("aclnn" #Name, run_##Name);                                                                                            \
		any(o, IN, "self", self, ANY);                                                                                                       \
		any(o, OUT, "out", result, ANY);                                                                                                     \
		broadcast(o, "self", "out");                                                                                                         \
		return op_end(o, bytes, executor);                                                                                                   \
	}                                                                                                                                        \
	LAUNCH(aclnn##Name)
UNARY(Exp, exp(x))
UNARY(Log, log(x))
UNARY(Neg, -x)
UNARY(Abs, fabs(x))
UNARY(Sqrt, sqrt(x))
UNARY(Rsqrt, 1 / sqrt(x))
UNARY(Sigmoid, sigmoid(x))
UNARY(Silu, x *sigmoid(x))

static int run_clamp_min(Op *o) {
	double *x = get(o, "self"), *y = get(o, "out"), least = value(o, "min");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = x[i] < least ? least : x[i];
	return OK;
}

EXPORT int aclnnClampMinGetWorkspaceSize(T self, const Scalar *min, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnClampMin", run_clamp_min);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "self", "out");
	number(o, "min", scalar(o, "min", min));
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnClampMin)

// Gradients: of the output, and what the forward kept.
static double silu_slope(double x, double beta, double threshold) {
	(void)beta, (void)threshold;
	return sigmoid(x) * (1 + x * (1 - sigmoid(x)));
}
static double sigmoid_slope(double y, double beta, double threshold) {
	(void)beta, (void)threshold;
	return y * (1 - y);
}
static double softplus_slope(double x, double beta, double threshold) {
	return x * beta > threshold ? 1 : sigmoid(x * beta);
}

static int run_slope(Op *o, double (*slope)(double, double, double)) {
	double *g = get(o, "gradOutput"), *x = get(o, "self"), *y = get(o, "out");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = g[i] * slope(x[i], value(o, "beta"), value(o, "threshold"));
	return OK;
}
static int run_silu_back(Op *o) {
	return run_slope(o, silu_slope);
}
static int run_sigmoid_back(Op *o) {
	return run_slope(o, sigmoid_slope);
}
static int run_softplus_back(Op *o) {
	return run_slope(o, softplus_slope);
}

static int slope_of(const char *name, int (*run)(Op *), T gradOutput, T self, double beta, double threshold, T result, uint64_t *bytes, Executor **executor) {
	Op *o = plain(name, run);
	any(o, IN, "gradOutput", gradOutput, ANY);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "gradOutput", "out");
	broadcast(o, "self", "out");
	number(o, "beta", beta);
	number(o, "threshold", threshold);
	return op_end(o, bytes, executor);
}

EXPORT int aclnnSiluBackwardGetWorkspaceSize(T gradOutput, T self, T gradInput, uint64_t *bytes, Executor **executor) {
	ENTER();
	return slope_of("aclnnSiluBackward", run_silu_back, gradOutput, self, 1, 0, gradInput, bytes, executor);
}
LAUNCH(aclnnSiluBackward)

EXPORT int aclnnSigmoidBackwardGetWorkspaceSize(T gradOutput, T output, T gradInput, uint64_t *bytes, Executor **executor) {
	ENTER();
	return slope_of("aclnnSigmoidBackward", run_sigmoid_back, gradOutput, output, 1, 0, gradInput, bytes, executor);
}
LAUNCH(aclnnSigmoidBackward)

EXPORT int aclnnSoftplusBackwardGetWorkspaceSize(T gradOutput, T self, const Scalar *beta, const Scalar *threshold, T gradInput, uint64_t *bytes,
                                                 Executor **executor) {
	ENTER();
	return slope_of("aclnnSoftplusBackward", run_softplus_back, gradOutput, self, alpha_of(beta), alpha_of(threshold), gradInput, bytes, executor);
}
LAUNCH(aclnnSoftplusBackward)

static int run_softplus(Op *o) {
	double *x = get(o, "self"), *y = get(o, "out"), beta = value(o, "beta");
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = x[i] * beta > value(o, "threshold") ? x[i] : log1p(exp(x[i] * beta)) / beta;
	return OK;
}

EXPORT int aclnnSoftplusGetWorkspaceSize(T self, const Scalar *beta, const Scalar *threshold, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = plain("aclnnSoftplus", run_softplus);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	broadcast(o, "self", "out");
	number(o, "beta", alpha_of(beta));
	number(o, "threshold", alpha_of(threshold));
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnSoftplus)

// ---- sums and matrix products ----

static int run_reduce_sum(Op *o) {
	double *x = get(o, "self"), *y = get(o, "out");
	int rank = (int)shape(o, "self", -1);
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] = 0;
	for (int64_t i = 0; i < count(o, "self"); i++) {
		int64_t rest = i, at = 0, step = 1;
		for (int axis = rank - 1; axis >= 0; axis--) {
			int64_t n = shape(o, "self", axis);
			if (!o->list[axis])
				at += rest % n * step, step *= n;
			rest /= n;
		}
		y[at] += x[i];
	}
	int64_t parts_ = value(o, "mean") != 0 ? count(o, "self") / count(o, "out") : 1;
	for (int64_t i = 0; i < count(o, "out"); i++)
		y[i] /= (double)parts_;
	return OK;
}

static int reduce(const char *name, int mean, T self, L dims, bool keep, int dtype, T result, uint64_t *bytes, Executor **executor) {
	Op *o = plain(name, run_reduce_sum);
	number(o, "mean", mean);
	any(o, IN, "self", self, ANY);
	any(o, OUT, "out", result, ANY);
	need(o, fake_is(dims, INT_ARRAY), "dims is no live aclIntArray");
	if (!o->status) {
		int kept = 0;
		o->list = calloc(MAX_RANK, sizeof *o->list);
		for (int i = 0; i < self->rank; i++)
			o->list[i] = !dims->n;
		for (int64_t i = 0; i < dims->n; i++) {
			int64_t d = dims->v[i] + (dims->v[i] < 0 ? self->rank : 0);
			need(o, d >= 0 && d < self->rank, "dims[%ld] is %ld", i, dims->v[i]);
			if (!o->status)
				o->list[d] = 1;
		}
		need(o, dtype == result->dtype, "dtype is %d, the output has %d", dtype, result->dtype);
		for (int i = 0; !o->status && i < self->rank; i++) {
			if (o->list[i] && !keep)
				continue;
			need(o, kept < result->rank && result->dims[kept] == (o->list[i] ? 1 : self->dims[i]), "the output's dimension %d does not fit", kept);
			kept++;
		}
		need(o, kept == result->rank, "the output has rank %d, expected %d", result->rank, kept);
	}
	return op_end(o, bytes, executor);
}

EXPORT int aclnnReduceSumGetWorkspaceSize(T self, L dims, bool keep, int dtype, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	return reduce("aclnnReduceSum", 0, self, dims, keep, dtype, result, bytes, executor);
}
LAUNCH(aclnnReduceSum)

EXPORT int aclnnMeanGetWorkspaceSize(T self, L dims, bool keep, int dtype, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	return reduce("aclnnMean", 1, self, dims, keep, dtype, result, bytes, executor);
}
LAUNCH(aclnnMean)

static int run_matmul(Op *o) {
	double *a = get(o, "self"), *b = get(o, "mat2"), *y = get(o, "out"), *add = get(o, "add");
	int64_t B = dim(o, "X") * dim(o, "Y"), M = dim(o, "m"), N = dim(o, "n"), K = dim(o, "k");
	for (int64_t z = 0; z < B; z++)
		for (int64_t i = 0; i < M; i++)
			for (int64_t j = 0; j < N; j++) {
				double s = 0;
				for (int64_t k = 0; k < K; k++)
					s += a[(z * M + i) * K + k] * b[(z * K + k) * N + j];
				int64_t at = (z * M + i) * N + j;
				y[at] = value(o, "alpha") * s + (add ? value(o, "beta") * add[at] : 0);
			}
	return OK;
}

// The cube unit's arithmetic is that of its operands' type; mode 0 keeps it, 1 allows HF32 for float32.
static int matmul(const char *name, int batched, T add, double beta, double alpha, T self, T mat2, T result, int8_t mode, uint64_t *bytes,
                  Executor **executor) {
	Op *o = op_begin(name, run_matmul, 0, F32 | F16 | BF16);
	// batched is the number of dimensions before the matrices'.
	arg(o, IN, 1, "self", self, &"Y X m k"[4 - 2 * batched], 0, DATA);
	arg(o, IN, 1, "mat2", mat2, &"Y X k n"[4 - 2 * batched], 0, DATA);
	arg(o, OUT, 1, "out", result, &"Y X m n"[4 - 2 * batched], 0, DATA);
	if (batched < 1)
		size(o, "X", 1);
	if (batched < 2)
		size(o, "Y", 1);
	if (add) {
		any(o, IN, "add", add, F32 | F16 | BF16);
		broadcast(o, "add", "out");
	} else
		opt(o, "add", add, "m n", DATA);
	number(o, "alpha", alpha);
	number(o, "beta", beta);
	need(o, mode >= 0 && mode <= 3, "cubeMathType is %d, expected 0 to 3", mode);
	return op_end(o, bytes, executor);
}

EXPORT int aclnnBatchMatMulGetWorkspaceSize(T self, T mat2, T result, int8_t mode, uint64_t *bytes, Executor **executor) {
	ENTER();
	return matmul("aclnnBatchMatMul", 1, 0, 0, 1, self, mat2, result, mode, bytes, executor);
}
LAUNCH(aclnnBatchMatMul)

EXPORT int aclnnMmGetWorkspaceSize(T self, T mat2, T result, int8_t mode, uint64_t *bytes, Executor **executor) {
	ENTER();
	return matmul("aclnnMm", 0, 0, 0, 1, self, mat2, result, mode, bytes, executor);
}
LAUNCH(aclnnMm)

EXPORT int aclnnMatmulGetWorkspaceSize(T self, T mat2, T result, int8_t mode, uint64_t *bytes, Executor **executor) {
	ENTER();
	return matmul("aclnnMatmul", self && fake_is(self, TENSOR) && self->rank > 2 ? self->rank > 3 ? 2 : 1 : 0, 0, 0, 1, self, mat2, result, mode, bytes, executor);
}
LAUNCH(aclnnMatmul)

EXPORT int aclnnAddmmGetWorkspaceSize(T self, T mat1, T mat2, const Scalar *beta, const Scalar *alpha, T result, int8_t mode, uint64_t *bytes,
                                      Executor **executor) {
	ENTER();
	if (!self)
		return fake_error(NN_NULL, "aclnnAddmm: self is null");
	return matmul("aclnnAddmm", 0, self, alpha_of(beta), alpha_of(alpha), mat1, mat2, result, mode, bytes, executor);
}
LAUNCH(aclnnAddmm)

EXPORT int aclnnBaddbmmGetWorkspaceSize(T self, T mat1, T mat2, const Scalar *beta, const Scalar *alpha, T result, int8_t mode, uint64_t *bytes,
                                      Executor **executor) {
	ENTER();
	if (!self)
		return fake_error(NN_NULL, "aclnnBaddbmm: self is null");
	return matmul("aclnnBaddbmm", 1, self, alpha_of(beta), alpha_of(alpha), mat1, mat2, result, mode, bytes, executor);
}
LAUNCH(aclnnBaddbmm)

// ---- the gated delta rules ----

#if CANN >= 850
// One value head of one sequence, rows gathered from token-major tensors.
static void gather(double *to, const double *from, int64_t start, int64_t n, int64_t heads, int64_t head, int64_t width) {
	for (int64_t t = 0; t < n; t++)
		memcpy(to + t * width, from + ((start + t) * heads + head) * width, (size_t)width * sizeof *to);
}

static int run_chunk(Op *o) {
	int64_t HK = dim(o, "HK"), HV = dim(o, "HV"), K = dim(o, "K"), V = dim(o, "V"), N = dim(o, "N"), tokens = dim(o, "T");
	double *q = get(o, "query"), *k = get(o, "key"), *v = get(o, "value"), *beta = get(o, "beta"), *g = get(o, "g"), *lengths = get(o, "actualSeqLengths");
	double *h0 = get(o, "initialState"), *y = get(o, "out"), *last = get(o, "finalState");
	int64_t start = 0;
	for (int64_t s = 0; s < N; s++) {
		int64_t n = (int64_t)lengths[s];
		if (n < 0 || start + n > tokens)
			return OK; // the core stops there without a word
		for (int64_t h = 0; h < HV; h++) {
			double *rows = scratch(n * (3 * K + 2 * V + 1)), *qs = rows, *ks = qs + n * K, *decay = ks + n * K, *vs = decay + n * K, *os = vs + n * V, *bs = os + n * V;
			gather(qs, q, start, n, HK, h / (HV / HK), K);
			gather(ks, k, start, n, HK, h / (HV / HK), K);
			gather(vs, v, start, n, HV, h, V);
			gather(bs, beta, start, n, HV, h, 1);
			for (int64_t t = 0; t < n; t++)
				for (int64_t i = 0; i < K; i++)
					decay[t * K + i] = g ? exp(g[(start + t) * HV + h]) : 1;
			double *S = last + (s * HV + h) * K * V;
			memcpy(S, h0 + (s * HV + h) * K * V, (size_t)(K * V) * sizeof *S);
			tokens_forward(&(Head){n, K, V, qs, ks, vs, bs, decay, value(o, "scale")}, S, os, 0);
			for (int64_t t = 0; t < n; t++)
				memcpy(y + ((start + t) * HV + h) * V, os + t * V, (size_t)V * sizeof *y);
		}
		start += n;
	}
	return OK;
}

EXPORT int aclnnChunkGatedDeltaRuleGetWorkspaceSize(T query, T key, T value_, T beta, T initialState, T actualSeqLengths, T g, float scale, T result,
                                                    T finalState, uint64_t *bytes, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkGatedDeltaRule", run_chunk, 0, BF16);
	o->state_types = BF16 | F32;
	in(o, "query", query, "T HK K", DATA);
	in(o, "key", key, "T HK K", DATA);
	in(o, "value", value_, "T HV V", DATA);
	in(o, "beta", beta, "T HV", DATA);
	arg(o, IN, 1, "initialState", initialState, "N HV K V", "N HV V K", STATE);
	in(o, "actualSeqLengths", actualSeqLengths, "N", I32);
	opt(o, "g", g, "T HV", F32);
	out(o, "out", result, "T HV V", DATA);
	arg(o, OUT, 1, "finalState", finalState, "N HV K V", "N HV V K", STATE);
	number(o, "scale", scale);
	need(o, o->status || (dim(o, "K") == 128 && dim(o, "V") == 128), "head sizes %ld and %ld, expected 128", dim(o, "K"), dim(o, "V"));
	need(o, o->status || (dim(o, "HV") <= 64 && dim(o, "HV") % dim(o, "HK") == 0), "%ld value heads on %ld key heads", dim(o, "HV"), dim(o, "HK"));
	if (!o->status && !strncmp(fake_soc(), "Ascend950", 9))
		o->status = fake_error(NN_NO_KERNEL, "aclnnChunkGatedDeltaRule: no kernel for %s", fake_soc());
	return op_end(o, bytes, executor);
}
LAUNCH(aclnnChunkGatedDeltaRule)
#endif

#include "recurrent.h"

EXPORT int aclnnRecurrentGatedDeltaRuleGetWorkspaceSize(T query, T key, T value_, T beta, Tensor *stateRef, T actualSeqLengths, T ssmStateIndices, T g, T gk,
                                                        T numAcceptedTokens, float scale, T result, uint64_t *bytes, Executor **executor) {
	ENTER();
	return recurrent("aclnnRecurrentGatedDeltaRule", 0, query, key, value_, beta, stateRef, actualSeqLengths, ssmStateIndices, g, gk, numAcceptedTokens, scale, result,
	                 bytes, executor);
}
LAUNCH(aclnnRecurrentGatedDeltaRule)
