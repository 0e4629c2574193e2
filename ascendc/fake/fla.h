// What fla-npu's operators share. FLA 1: the package as of August 2026, FLA 2: today's. All computation is on head-major arrays:
// [B H T .] rows, [B NT HV K V] states.
#ifndef FAKE_FLA_H
#define FAKE_FLA_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "delta.h"
#include "op.h"

#ifndef FLA
#define FLA 2
#endif

#define LN2 0.69314718055994530942

// The per-chunk states moved from head-major to token-major, under the same signature.
#define STATES (FLA == 1 ? "B HV NT K V" : "B NT HV K V")
#define STATES_V_FIRST (FLA == 1 ? "B HV NT V K" : "B NT HV V K")

// ---- first phase ----

// CANN finds the kernels by ASCEND_CUSTOM_OPP_PATH, not by this library's handle.
static inline int kernels_found(void) {
	static __thread char vendor[PATH_MAX];
	Dl_info self;
	char one[PATH_MAX], part[PATH_MAX];
	const char *list = getenv("ASCEND_CUSTOM_OPP_PATH");
	if (!*vendor && dladdr((void *)kernels_found, &self) && realpath(self.dli_fname, vendor) && strstr(vendor, "/op_api/lib/"))
		*strstr(vendor, "/op_api/lib/") = 0;
	for (int n; list && *list; list += n + (list[n] == ':')) {
		n = (int)strcspn(list, ":");
		snprintf(part, sizeof part, "%.*s", n, list);
		if (!strcmp(part, vendor) || (realpath(part, one) && !strcmp(one, vendor)))
			return 1;
	}
	return 0;
}

static inline Op *fla_begin(const char *name, int (*run)(Op *), int flags, int data_types) {
	Op *o = op_begin(name, run, flags, data_types);
	if (!kernels_found())
		o->status = fake_error(NN_NO_KERNEL, "%s: ASCEND_CUSTOM_OPP_PATH does not name this package, so its kernels are not found", name);
	return o;
}
#define op_begin fla_begin

enum { BSND, BNSD, TND, NTD };

static inline int layout_of(Op *o, const char *text, int lower) {
	static const char *const upper_names[] = {"BSND", "BNSD", "TND", "NTD"}, *const lower_names[] = {"bsnd", "bnsd", "tnd", "ntd"};
	for (int i = 0; text && i < 4; i++)
		if (!strcmp(text, (lower ? lower_names : upper_names)[i]))
			return i;
	need(o, 0, "layout is \"%s\", expected %s", text ? text : "(null)", lower ? "bsnd, bnsd, tnd or ntd" : "BSND, BNSD, TND or NTD");
	return BSND;
}

// The letters of a tensor in a layout: laid(text, BSND, "HK K") is "B T HK K".
static inline const char *laid(char *text, int layout, const char *heads_and_rest) {
	char head[8], rest[40] = "";
	sscanf(heads_and_rest, "%7s %39[^\n]", head, rest);
	const char *format = layout == BSND ? "B T %s %s" : layout == BNSD ? "B %s T %s" : layout == TND ? "T %s %s" : "%s T %s";
	snprintf(text, 64, format, head, rest);
	return text;
}
#define LAID(layout, letters) laid((char[64]){0}, layout, letters)

static inline void one_of(Op *o, const char *letter, const int64_t *values) {
	int64_t have = dim(o, letter);
	for (const int64_t *v = values; *v; v++)
		if (have == *v)
			return;
	need(o, o->status, "%s is %ld, which this operator does not have", letter, have);
}
#define ONE_OF(o, letter, ...) one_of(o, letter, (const int64_t[]){__VA_ARGS__, 0})

// HV a multiple of HK.
static inline void grouped(Op *o) {
	need(o, o->status || dim(o, "HV") % dim(o, "HK") == 0, "%ld value heads on %ld key heads", dim(o, "HV"), dim(o, "HK"));
}

static inline void chunk_size(Op *o, int64_t C, int64_t a, int64_t b) {
	need(o, C == a || C == b, "chunkSize is %ld, expected %ld or %ld", C, a, b);
	size(o, "C", C);
}

static inline void only_950(Op *o, const char *what) {
	if (!o->status && strncmp(fake_soc(), "Ascend950", 9))
		o->status = fake_error(NN_NO_KERNEL, "%s: no kernel for %s%s", o->name, fake_soc(), what);
}

// ---- the run ----

typedef struct {
	int64_t B, T, HK, HV, K, V, C, NT, N, G;
} Sizes;

static inline Sizes sizes(Op *o) {
	Sizes z = {dim(o, "B"), dim(o, "T"), dim(o, "HK"), dim(o, "HV"), dim(o, "K"), dim(o, "V"), dim(o, "C"), dim(o, "NT"), dim(o, "N"), 1};
	z.G = z.HK ? z.HV / z.HK : 1;
	return z;
}

// One chunk of one value head.
typedef struct {
	int64_t b, h, hk, start, n, c, sequence;
	int first, last, more;
	int64_t local; // index in its sequence
} Chunk;

// Chunks of a sequence in order (or backwards), heads, sequences.
static inline void settle(Op *o, const Sizes *z, Chunk *x) {
	while (x->sequence < z->N && o->sequences[x->sequence].n == 0) // an empty sequence has no chunks
		x->sequence++;
	x->more = x->sequence < z->N;
	if (!x->more)
		return;
	const Sequence *s = &o->sequences[x->sequence];
	int64_t chunks = (s->n + z->C - 1) / z->C;
	if (x->local < 0)
		x->local = chunks - 1;
	x->b = s->b, x->c = s->chunk + x->local, x->start = s->start + x->local * z->C, x->hk = x->h / z->G;
	x->n = s->n - x->local * z->C < z->C ? s->n - x->local * z->C : z->C;
	x->first = x->local == 0, x->last = x->local == chunks - 1;
}

static inline void step(Op *o, const Sizes *z, Chunk *x, int back) {
	int ends = back ? x->first : x->last;
	if (!ends)
		x->local += back ? -1 : 1;
	else {
		x->local = back ? -1 : 0;
		if (++x->h == z->HV)
			x->h = 0, x->sequence++;
	}
	settle(o, z, x);
}

static inline Chunk begin(Op *o, const Sizes *z, int back) {
	Chunk x = {.local = back ? -1 : 0};
	settle(o, z, &x);
	return x;
}
#define FOR_CHUNKS(x, back) for (Chunk x = begin(o, &z, back); x.more; step(o, &z, &x, back))

// The first row of a chunk in [B H T width], of a value head or its key head.
static inline double *rows(const Sizes *z, double *a, const Chunk *x, int64_t width) {
	return a ? a + ((x->b * z->HV + x->h) * z->T + x->start) * width : 0;
}
static inline double *key_rows(const Sizes *z, double *a, const Chunk *x, int64_t width) {
	return a ? a + ((x->b * z->HK + x->hk) * z->T + x->start) * width : 0;
}
// Its state in [B NT HV K V], and its sequence's in [N HV K V].
static inline double *state(const Sizes *z, double *a, const Chunk *x) {
	return a ? a + ((x->b * z->NT + x->c) * z->HV + x->h) * z->K * z->V : 0;
}
static inline double *border(const Sizes *z, double *a, const Chunk *x) {
	return a ? a + (x->sequence * z->HV + x->h) * z->K * z->V : 0;
}

// The chunk's cumulative gates as natural logarithms, n x K. g: one number a row, gk: K of them; either may be 0.
static inline void gates(const Sizes *z, double *g, double g_unit, double *gk, double gk_unit, const Chunk *x, double *G) {
	for (int64_t i = 0; i < x->n; i++)
		for (int64_t d = 0; d < z->K; d++)
			G[i * z->K + d] = (g ? rows(z, g, x, 1)[i] * g_unit : 0) + (gk ? rows(z, gk, x, z->K)[i * z->K + d] * gk_unit : 0);
}

// sum_d a_d b_d exp(G_id - G_jd)
static inline double decayed(const double *a, const double *b, const double *Gi, const double *Gj, int64_t K) {
	double s = 0;
	for (int64_t d = 0; d < K; d++)
		s += a[d] * b[d] * exp(Gi[d] - Gj[d]);
	return s;
}

// A[i][j] = beta_i k_i.k_j with decays, below the diagonal, n x C.
static inline void keys_on_keys(const Sizes *z, const Chunk *x, const double *k, const double *beta, const double *G, double *A) {
	for (int64_t i = 0; i < x->n; i++)
		for (int64_t j = 0; j < z->C; j++)
			A[i * z->C + j] = j < i ? beta[i] * decayed(k + i * z->K, k + j * z->K, G + i * z->K, G + j * z->K, z->K) : 0;
}

// (1 + A)^-1, by substitution; columns beyond n are 0.
static inline void invert(int64_t n, int64_t C, const double *A, double *X) {
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < C; j++) {
			double s = i == j;
			for (int64_t m = j; m < i; m++)
				s -= A[i * C + m] * X[m * C + j];
			X[i * C + j] = j <= i ? s : 0;
		}
}

// y[i] = sum_j X[i][j] f_j a[j], rows of width; f may be 0. back: with the transposed X.
static inline void apply(int64_t n, int64_t C, const double *X, int back, const double *f, const double *a, int64_t width, double *y) {
	memset(y, 0, (size_t)(n * width) * sizeof *y);
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = back ? i : 0; j < (back ? n : i + 1); j++) {
			double c = (back ? X[j * C + i] : X[i * C + j]) * (f ? f[j] : 1);
			for (int64_t d = 0; d < width; d++)
				y[i * width + d] += c * a[j * width + d];
		}
}

// y (n x V) = a (n x K) S
static inline void rows_on_state(int64_t n, int64_t K, int64_t V, const double *a, const double *S, double *y) {
	memset(y, 0, (size_t)(n * V) * sizeof *y);
	for (int64_t i = 0; i < n; i++)
		for (int64_t d = 0; d < K; d++)
			for (int64_t j = 0; j < V; j++)
				y[i * V + j] += a[i * K + d] * S[d * V + j];
}

// y (n x K) = a (n x V) S'
static inline void rows_on_state_back(int64_t n, int64_t K, int64_t V, const double *a, const double *S, double *y) {
	for (int64_t i = 0; i < n; i++)
		for (int64_t d = 0; d < K; d++)
			y[i * K + d] = dot(a + i * V, S + d * V, V);
}

// S (K x V) += sign a' b for rows a of K and b of V
static inline void add_outer(int64_t n, int64_t K, int64_t V, double sign, const double *a, const double *b, double *S) {
	for (int64_t i = 0; i < n; i++)
		for (int64_t d = 0; d < K; d++)
			for (int64_t j = 0; j < V; j++)
				S[d * V + j] += sign * a[i * K + d] * b[i * V + j];
}

// y[i] = a[i] exp(G_i) or a[i] exp(G_last - G_i)
static inline void toward_start(int64_t n, int64_t K, const double *a, const double *G, double *y) {
	for (int64_t i = 0; i < n * K; i++)
		y[i] = a[i] * exp(G[i]);
}
static inline void toward_end(int64_t n, int64_t K, const double *a, const double *G, double *y) {
	for (int64_t i = 0; i < n; i++)
		for (int64_t d = 0; d < K; d++)
			y[i * K + d] = a[i * K + d] * exp(G[(n - 1) * K + d] - G[i * K + d]);
}
static inline void decay_state(int64_t K, int64_t V, const double *G_last, double *S) {
	for (int64_t d = 0; d < K; d++)
		for (int64_t j = 0; j < V; j++)
			S[d * V + j] *= exp(G_last[d]);
}

static inline double sigmoid(double x) {
	return 1 / (1 + exp(-x));
}
static inline double softplus(double x) {
	return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

// The log gate of KDA and its gradient: dx of the raw gate, its part of dA_log.
static inline double kda_gate(double raw, double a_log, double bias, int safe, double bound) {
	double a = exp(a_log), x = raw + bias;
	return safe ? bound * sigmoid(a * x) : -a * softplus(x);
}
static inline double kda_gate_back(double raw, double a_log, double bias, int safe, double bound, double dg, double *dA_log) {
	double a = exp(a_log), x = raw + bias, s = sigmoid(a * x);
	double dx = safe ? dg * bound * s * (1 - s) * a : -a * sigmoid(x) * dg;
	*dA_log += safe ? dx * x : dg * -a * softplus(x);
	return dx;
}

// rows / |rows|, with the operator's epsilon; r: 1 / norms
static inline void normalize(int64_t n, int64_t K, double epsilon, const double *x, double *hat, double *r) {
	for (int64_t i = 0; i < n; i++) {
		double f = 1 / sqrt(dot(x + i * K, x + i * K, K) + epsilon);
		for (int64_t d = 0; d < K; d++)
			hat[i * K + d] = x[i * K + d] * f;
		if (r)
			r[i] = f;
	}
}
static inline void normalize_back(int64_t n, int64_t K, const double *hat, const double *r, double *dy) {
	for (int64_t i = 0; i < n; i++) {
		double s = dot(dy + i * K, hat + i * K, K);
		for (int64_t d = 0; d < K; d++)
			dy[i * K + d] = r[i] * (dy[i * K + d] - s * hat[i * K + d]);
	}
}

#endif
