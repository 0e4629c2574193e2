// State summaries: what a window of tokens does to a state and to its gradient, as affine maps, and what maps do one after the other.
//
// The forward map is the composite twice: S is the final state from zero, M that of zero values from the identity. It reads no queries and
// makes no output. Its gradient is the composite's of values with K more columns, which are zero and whose state starts at the identity.
typedef struct {
	scan s;
	gdnk_tensor map, dmap;
	int64_t KV; // V+K
} summary;
typedef struct {
	gdnk_tensor s, m, x, dout, out, ds, dm, dx; // out, dout: a map where maps are composed
	int64_t R, B, HV, K, V, VX, KP, WP;         // VX: columns of the state, WP: as vectors
	int reverse, transpose, compose;
} maps;
#define REAL float
#define LANES vf
#define FN(name) name##_f32
#include "maps.h"
#undef REAL
#undef LANES
#undef FN
#define REAL double
#define LANES double
#define FN(name) name##_f64
#include "maps.h"
#undef REAL
#undef LANES
#undef FN
#undef MLD
#undef MST
#undef MVR
#undef EACH
#undef LANE_OF

static int double_precision(const gdnk_tensor *first) { return first->dtype == GDNK_F64; }
// A tensor whose rows are one row of n numbers, or with row > 0 whose matrices are one matrix
static gdnk_tensor repeated(const void *p, int type, const int64_t *shape, int64_t row) {
	return (gdnk_tensor){(uintptr_t)p, type, 4, {shape[0], shape[1], shape[2], shape[3]}, {0, 0, row, 1}};
}
static gdnk_tensor compact_rows(void *p, int type, int64_t a, int64_t b, int64_t c, int64_t d) {
	return (gdnk_tensor){(uintptr_t)p, type, 4, {a, b, c, d}, {b * c * d, c * d, d, 1}};
}
static gdnk_tensor map_columns(const gdnk_tensor *map, int64_t from, int64_t n) {
	gdnk_tensor t = *map;
	t.data += from * t.stride[3] * size_of(t.dtype);
	t.shape[3] = n;
	return t;
}
// [rows][zeros | identity] in the accumulator's type, zeros before `from`
static void *identity(int64_t K, int64_t from, int doubles) {
	const int64_t cols = from + K;
	void *p = calloc(K * cols + 1, doubles ? 8 : 4);
	for (int64_t i = 0; i < K && p; i++)
		if (doubles) ((double *)p)[i * cols + from + i] = 1;
		else ((float *)p)[i * cols + from + i] = 1;
	return p;
}
static int summary_fwd(summary *m, const int64_t *size) {
	const int doubles = double_precision(&m->s.k), type = doubles ? GDNK_F64 : GDNK_F32;
	static const double zeros[512];
	int64_t sizes[SZ_count];
	memcpy(sizes, size, sizeof sizes);
	const int64_t K = size[SZ_K], N = size[SZ_N];
	const gdnk_tensor none = {0};
	void *const one = identity(K, 0, doubles);
	if (!one) return 1;
	m->s.q = m->s.k; // for the rows that are not read
	scan a = m->s, b = m->s;
	a.ht = map_columns(&m->map, 0, size[SZ_V]);
	setup(&a, sizes, 1, &none);
	b.ht = map_columns(&m->map, size[SZ_V], K);
	b.v = repeated(zeros, type, (int64_t[]){size[SZ_B], size[SZ_T], size[SZ_HV], K}, 0);
	b.h0 = repeated(one, type, (int64_t[]){N, size[SZ_HV], K, K}, K);
	sizes[SZ_V] = K;
	setup(&b, sizes, 1, &none);
	const int failed = run_fwd(&a, &none, 0) || run_fwd(&b, &none, 0);
	free(one);
	return failed;
}
static int summary_grad(summary *m, const int64_t *size) {
	const int doubles = double_precision(&m->s.k), type = doubles ? GDNK_F64 : GDNK_F32;
	static const double zeros[1024];
	int64_t sizes[SZ_count];
	memcpy(sizes, size, sizeof sizes);
	const int64_t B = size[SZ_B], T = size[SZ_T], HV = size[SZ_HV], K = size[SZ_K], V = size[SZ_V], N = size[SZ_N], VK = V + K;
	const int64_t VP = (VK + 31) / 32 * 32, KP = (K + 31) / 32 * 32, bytes = doubles ? 8 : 4;
	const int64_t n_tape = HV * (B * T / 64 * KP * VP + B * T * VP), n_rows = B * T * HV * VK;
	void *const one = identity(K, V, doubles), *const rows = malloc(n_rows * bytes + 1), *const tape = malloc(n_tape * bytes + 1);
	int failed = !one || !rows || !tape;
	if (!failed) {
		sizes[SZ_V] = VK;
		const gdnk_tensor v = m->s.v, dv = m->s.dv, wide = compact_rows(rows, type, B, T, HV, VK), none = {0};
		const gdnk_tensor kept = {(uintptr_t)tape, type, 1, {n_tape}, {1}};
		failed = doubles ? copy_rows_f64(&v, &wide, V, VK) : copy_rows_f32(&v, &wide, V, VK);
		m->s.q = m->s.k;
		m->s.v = wide;
		m->s.h0 = repeated(one, type, (int64_t[]){N, HV, K, VK}, VK);
		scan f = m->s;
		setup(&f, sizes, 1, &kept);
		f.dk = f.dv = f.dg = f.dbeta = f.dA = f.dbias = none;
		failed = failed || run_fwd(&f, &kept, 0);
		m->s.dout = repeated(zeros, type, (int64_t[]){B, T, HV, VK}, 0);
		m->s.dht = m->dmap;
		m->s.dv = wide; // in place: its values are in the tape's errors, and each row is read before it is written
		setup(&m->s, sizes, 1, &kept);
		failed = failed || run_bwd(&m->s, 0);
		if (!failed) failed = doubles ? copy_rows_f64(&wide, &dv, V, V) : copy_rows_f32(&wide, &dv, V, V);
	}
	free(one), free(rows), free(tape);
	return failed;
}
static int summary_bwd(summary *m, const int64_t *size, double scale) {
	const gdnk_tensor none = {0};
	setup(&m->s, size, scale, &none);
	work_f32 w;
	work_f64 w2;
	float *D, *Y;
	double *D2, *Y2;
	const int64_t units = m->s.N * m->s.HV;
	return double_precision(&m->s.q) ? gdnk_parallel(units, back_scratch_f64(&m->s, &w2, &D2, &Y2, NULL), back_unit_f64, m)
	                                 : gdnk_parallel(units, back_scratch_f32(&m->s, &w, &D, &Y, NULL), back_unit_f32, m);
}

#define SUMMARY_INPUTS(op)                                                                                   \
	.k = TENSOR(op, k), .g = TENSOR(op, g), .beta = TENSOR(op, beta), .A_log = TENSOR(op, A_log), .dt_bias = TENSOR(op, dt_bias), .cu = TENSOR(op, cu_seqlens), \
	.l2norm = INT(op, qk_l2norm), .gate = INT(op, gate), .beta_sigmoid = INT(op, beta_sigmoid), .beta_max = INT(op, neg_eigval) ? 2 : 1
#define SUMMARY_GRADIENTS(op) \
	.dk = TENSOR(op, dk), .dv = TENSOR(op, dv), .dg = TENSOR(op, dg), .dbeta = TENSOR(op, dbeta), .dA = TENSOR(op, dA_log), .dbias = TENSOR(op, ddt_bias)
static int op_summary_fwd(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(summary_fwd), .v = TENSOR(summary_fwd, v)}, .map = TENSOR(summary_fwd, map)};
	return summary_fwd(&m, c->size);
}
static int op_summary_grad(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(summary_grad), .v = TENSOR(summary_grad, v), SUMMARY_GRADIENTS(summary_grad)}, .dmap = TENSOR(summary_grad, dmap)};
	return summary_grad(&m, c->size);
}
static int op_summary_bwd(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(summary_bwd), .q = TENSOR(summary_bwd, q), .dout = TENSOR(summary_bwd, dout)}, .map = TENSOR(summary_bwd, map)};
	return summary_bwd(&m, c->size, c->f[N_summary_bwd_scale]);
}
static int op_kda_summary_fwd(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(kda_summary_fwd), CHANNELS(kda_summary_fwd), .v = TENSOR(kda_summary_fwd, v)}, .map = TENSOR(kda_summary_fwd, map)};
	return summary_fwd(&m, c->size);
}
static int op_kda_summary_grad(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(kda_summary_grad), CHANNELS(kda_summary_grad), .v = TENSOR(kda_summary_grad, v), SUMMARY_GRADIENTS(kda_summary_grad)},
		.dmap = TENSOR(kda_summary_grad, dmap)};
	return summary_grad(&m, c->size);
}
static int op_kda_summary_bwd(const gdnk_call *c) {
	summary m = {.s = {SUMMARY_INPUTS(kda_summary_bwd), CHANNELS(kda_summary_bwd), .q = TENSOR(kda_summary_bwd, q), .dout = TENSOR(kda_summary_bwd, dout)},
		.map = TENSOR(kda_summary_bwd, map)};
	return summary_bwd(&m, c->size, c->f[N_kda_summary_bwd_scale]);
}

static int run_maps(maps *m, const int64_t *size, int backward) {
	m->R = size[SZ_R], m->B = size[SZ_B], m->HV = size[SZ_HV], m->K = size[SZ_K], m->V = size[SZ_V];
	m->VX = m->V + (m->compose ? m->K : 0);
	m->KP = (m->K + 15) / 16 * 16, m->WP = (m->VX + 15) / 16 * 16;
	return double_precision(&m->s) ? merge_run_f64(m, backward) : merge_run_f32(m, backward);
}
#define MAPS(op) .s = TENSOR(op, s), .m = TENSOR(op, m), .reverse = INT(op, reverse), .transpose = INT(op, transpose)
static int op_summary_merge(const gdnk_call *c) {
	maps m = {MAPS(summary_merge), .x = TENSOR(summary_merge, state), .out = TENSOR(summary_merge, out)};
	return run_maps(&m, c->size, 0);
}
static int op_summary_merge_bwd(const gdnk_call *c) {
	maps m = {MAPS(summary_merge_bwd), .x = TENSOR(summary_merge_bwd, state), .dout = TENSOR(summary_merge_bwd, dout), .ds = TENSOR(summary_merge_bwd, ds),
		.dm = TENSOR(summary_merge_bwd, dm), .dx = TENSOR(summary_merge_bwd, dstate)};
	return run_maps(&m, c->size, 1);
}
static int op_summary_compose(const gdnk_call *c) {
	maps m = {MAPS(summary_compose), .out = TENSOR(summary_compose, map), .compose = 1};
	return run_maps(&m, c->size, 0);
}
static int op_summary_compose_bwd(const gdnk_call *c) {
	maps m = {MAPS(summary_compose_bwd), .dout = TENSOR(summary_compose_bwd, dmap), .ds = TENSOR(summary_compose_bwd, ds), .dm = TENSOR(summary_compose_bwd, dm), .compose = 1};
	return run_maps(&m, c->size, 1);
}
