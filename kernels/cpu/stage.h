// The stages of the chunk form as operators of their own, with the intermediates that other libraries know; kernels in chunk64.h.
// Tokens of a chunk and of a block of it, columns of a unit of the scans over the state; by how many numbers long rows are kept apart, for
// rows at a distance of a power of two share cache sets.
enum { CH = 64, BL = 16, COLS = 64, APART = 16 };

typedef struct {
	scan s; // q, k, v, g, beta, dout, their gradients, the states at the ends
	gdnk_tensor sum, gk, A, Aqk, w, u, qg, kg, qg_scaled, q_norm, k_norm, q_rstd, k_rstd, beta_eff; // A: (1 + L)^-1 of either family
	gdnk_tensor h, dh, v_new, dv_local, dv_scan, dAqk, dq_raw;
	int exp2;
	int64_t *first, chunks, blocks; // chunks before each sequence and in all; blocks of columns
} stage;
typedef struct { // one chunk
	sequence q;
	int64_t t, slot; // its first token in the sequence, its place in h
	int n;           // tokens
} place;
static place place_of(const stage *m, int64_t i) {
	int64_t lo = 0, hi = m->s.N;
	while (hi - lo > 1) {
		const int64_t mid = (lo + hi) / 2;
		if (m->first[mid] <= i) lo = mid;
		else hi = mid;
	}
	while (m->first[lo + 1] <= i) lo++; // sequences without tokens
	place c = {.q = sequence_of(&m->s, lo), .t = (i - m->first[lo]) * CH};
	c.slot = m->s.cu.dtype ? i : i - m->first[lo];
	c.n = c.q.len - c.t < CH ? c.q.len - c.t : CH;
	return c;
}
// [B P HV K V] at a chunk and head: rows are key channels
static view chunk_view(const gdnk_tensor *t, const place *c, int64_t h, int v_first) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (c->q.b * s[0] + c->slot * s[1] + h * s[2]) * size_of(t->dtype), t->dtype, s[v_first ? 4 : 3], s[v_first ? 3 : 4]};
}
#define MLD(p) (*(const FN(vru) *)(p))
#define MST(p, x) (*(FN(vru) *)(p) = (x))
#define MVR ((int)(sizeof(vf) / sizeof(REAL)))
#define EACH(n) for (int d = 0; d < (n); d += (int)(sizeof(LANES) / sizeof(REAL)))
#define LANE_OF(x) (*(FN(lanes) *)((x) + d))

#define REAL float
#define LANES vf
#define FN(name) name##_f32
#include "mm.h"
#include "chunk64.h"
#undef REAL
#undef LANES
#undef FN
#define REAL double
#define LANES double
#define FN(name) name##_f64
#include "mm.h"
#include "chunk64.h"
#undef REAL
#undef LANES
#undef FN

static int stage_setup(stage *m, const int64_t *size, double scale) {
	const gdnk_tensor none = {0};
	setup(&m->s, size, scale, &none);
	m->blocks = (m->s.V + COLS - 1) / COLS;
	if (!(m->first = malloc((m->s.N + 1) * sizeof *m->first))) return 1;
	m->first[0] = 0;
	for (int64_t n = 0; n < m->s.N; n++) m->first[n + 1] = m->first[n] + (sequence_of(&m->s, n).len + CH - 1) / CH;
	m->chunks = m->first[m->s.N];
	return 0;
}
// Runs n units, and makes zero what belongs to no sequence: rows of the outputs, and chunks of h or dh.
static int stage_run(stage *m, int64_t n, void (*f32)(void *, int64_t, char *), void (*f64)(void *, int64_t, char *), const gdnk_tensor *first) {
	work_f32 w;
	work_f64 w2;
	const int failed = first->dtype == GDNK_F64 ? gdnk_parallel(n, work_scratch_f64(&m->s, &w2, NULL), f64, m) : gdnk_parallel(n, work_scratch_f32(&m->s, &w, NULL), f32, m);
	free(m->first);
	return failed;
}
static void stage_rest(const stage *m, const gdnk_tensor *const *out, int n) {
	for (int i = 0; i < n; i++) zero_rest(&m->s, out[i]);
}
static void spare_chunks(const stage *m, const gdnk_tensor *h) {
	for (int64_t n = m->chunks; n < h->shape[1] && m->s.cu.dtype; n++)
		for (int64_t hv = 0; hv < h->shape[2]; hv++)
			for (int64_t i = 0; i < h->shape[3]; i++)
				for (int64_t j = 0; j < h->shape[4]; j++)
					st1((char *)h->data, h->dtype, n * h->stride[1] + hv * h->stride[2] + i * h->stride[3] + j * h->stride[4], 0);
}
#define REST(...)                                                          \
	{                                                                      \
		const gdnk_tensor *const out_[] = {__VA_ARGS__};                   \
		stage_rest(&m, out_, sizeof out_ / sizeof *out_);                  \
	}

static int op_prepare(const gdnk_call *c) {
	stage m = {.s = {.q = TENSOR(prepare, q), .k = TENSOR(prepare, k), .v = TENSOR(prepare, v), .g = TENSOR(prepare, g), .beta = TENSOR(prepare, beta),
		.cu = TENSOR(prepare, cu_seqlens), .l2norm = INT(prepare, qk_l2norm), .beta_sigmoid = INT(prepare, beta_sigmoid), .beta_max = INT(prepare, neg_eigval) ? 2 : 1},
		.sum = TENSOR(prepare, g_cumsum), .A = TENSOR(prepare, A), .w = TENSOR(prepare, w), .u = TENSOR(prepare, u), .q_norm = TENSOR(prepare, q_norm),
		.k_norm = TENSOR(prepare, k_norm), .q_rstd = TENSOR(prepare, q_rstd), .k_rstd = TENSOR(prepare, k_rstd), .beta_eff = TENSOR(prepare, beta_eff), .exp2 = INT(prepare, exp2)};
	if (stage_setup(&m, c->size, 0) || stage_run(&m, m.chunks * m.s.H, prepare_unit_f32, prepare_unit_f64, &m.s.q)) return 1;
	REST(&m.sum, &m.A, &m.w, &m.u, &m.q_norm, &m.k_norm, &m.q_rstd, &m.k_rstd, &m.beta_eff)
	return 0;
}
static int op_kda_prepare(const gdnk_call *c) {
	stage m = {.s = {.q = TENSOR(kda_prepare, q), .k = TENSOR(kda_prepare, k), .v = TENSOR(kda_prepare, v), .g = TENSOR(kda_prepare, g), .beta = TENSOR(kda_prepare, beta),
		.A_log = TENSOR(kda_prepare, A_log), .dt_bias = TENSOR(kda_prepare, dt_bias), .cu = TENSOR(kda_prepare, cu_seqlens), .gate = INT(kda_prepare, gate), CHANNELS(kda_prepare),
		.l2norm = INT(kda_prepare, qk_l2norm), .beta_sigmoid = INT(kda_prepare, beta_sigmoid), .beta_max = INT(kda_prepare, neg_eigval) ? 2 : 1},
		.gk = TENSOR(kda_prepare, gk), .Aqk = TENSOR(kda_prepare, Aqk), .A = TENSOR(kda_prepare, Akk), .w = TENSOR(kda_prepare, w), .u = TENSOR(kda_prepare, u),
		.qg = TENSOR(kda_prepare, qg), .kg = TENSOR(kda_prepare, kg), .qg_scaled = TENSOR(kda_prepare, qg_scaled), .q_norm = TENSOR(kda_prepare, q_norm),
		.k_norm = TENSOR(kda_prepare, k_norm), .q_rstd = TENSOR(kda_prepare, q_rstd), .k_rstd = TENSOR(kda_prepare, k_rstd), .beta_eff = TENSOR(kda_prepare, beta_eff),
		.exp2 = INT(kda_prepare, exp2)};
	if (stage_setup(&m, c->size, c->f[N_kda_prepare_scale]) || stage_run(&m, m.chunks * m.s.H, prepare_unit_f32, prepare_unit_f64, &m.s.q)) return 1;
	REST(&m.gk, &m.Aqk, &m.A, &m.w, &m.u, &m.qg, &m.kg, &m.qg_scaled, &m.q_norm, &m.k_norm, &m.q_rstd, &m.k_rstd, &m.beta_eff)
	return 0;
}
static int op_state_pass(const gdnk_call *c) {
	stage m = {.s = {.k = TENSOR(state_pass, k), .h0 = TENSOR(state_pass, initial_state), .cu = TENSOR(state_pass, cu_seqlens), .ht = TENSOR(state_pass, final_state),
		.v_first = INT(state_pass, state_v_first)},
		.w = TENSOR(state_pass, w), .u = TENSOR(state_pass, u), .sum = TENSOR(state_pass, g_cumsum), .gk = TENSOR(state_pass, gk), .h = TENSOR(state_pass, h),
		.v_new = TENSOR(state_pass, v_new), .exp2 = INT(state_pass, exp2)};
	if (stage_setup(&m, c->size, 0) || stage_run(&m, m.s.N * m.s.HV * m.blocks, state_pass_unit_f32, state_pass_unit_f64, &m.s.k)) return 1;
	REST(&m.v_new)
	spare_chunks(&m, &m.h);
	return 0;
}
static int op_output(const gdnk_call *c) {
	stage m = {.s = {.q = TENSOR(output, q), .k = TENSOR(output, k), .cu = TENSOR(output, cu_seqlens), .o = TENSOR(output, o), .v_first = INT(output, state_v_first)},
		.v_new = TENSOR(output, v_new), .sum = TENSOR(output, g_cumsum), .h = TENSOR(output, h), .exp2 = INT(output, exp2)};
	if (stage_setup(&m, c->size, c->f[N_output_scale]) || stage_run(&m, m.chunks * m.s.HV, output_unit_f32, output_unit_f64, &m.s.q)) return 1;
	REST(&m.s.o)
	return 0;
}
static int op_kda_output(const gdnk_call *c) {
	stage m = {.s = {.cu = TENSOR(kda_output, cu_seqlens), .o = TENSOR(kda_output, o), .v_first = INT(kda_output, state_v_first)},
		.qg_scaled = TENSOR(kda_output, qg_scaled), .Aqk = TENSOR(kda_output, Aqk), .v_new = TENSOR(kda_output, v_new), .h = TENSOR(kda_output, h)};
	if (stage_setup(&m, c->size, 0) || stage_run(&m, m.chunks * m.s.HV, output_unit_f32, output_unit_f64, &m.qg_scaled)) return 1;
	REST(&m.s.o)
	return 0;
}
static int op_bwd_prepare(const gdnk_call *c) {
	stage m = {.s = {.q = TENSOR(bwd_prepare, q), .k = TENSOR(bwd_prepare, k), .v = TENSOR(bwd_prepare, v), .beta = TENSOR(bwd_prepare, beta), .dout = TENSOR(bwd_prepare, dout),
		.cu = TENSOR(bwd_prepare, cu_seqlens)},
		.sum = TENSOR(bwd_prepare, g_cumsum), .A = TENSOR(bwd_prepare, A), .w = TENSOR(bwd_prepare, w), .u = TENSOR(bwd_prepare, u), .dv_local = TENSOR(bwd_prepare, dv_local),
		.exp2 = INT(bwd_prepare, exp2)};
	if (stage_setup(&m, c->size, c->f[N_bwd_prepare_scale]) || stage_run(&m, m.chunks * m.s.HV, bwd_prepare_unit_f32, bwd_prepare_unit_f64, &m.s.q)) return 1;
	REST(&m.w, &m.u, &m.dv_local)
	return 0;
}
static int op_kda_bwd_prepare(const gdnk_call *c) {
	stage m = {.s = {.dout = TENSOR(kda_bwd_prepare, dout), .cu = TENSOR(kda_bwd_prepare, cu_seqlens), .v_first = INT(kda_bwd_prepare, state_v_first)},
		.Aqk = TENSOR(kda_bwd_prepare, Aqk), .v_new = TENSOR(kda_bwd_prepare, v_new), .h = TENSOR(kda_bwd_prepare, h), .dAqk = TENSOR(kda_bwd_prepare, dAqk),
		.dv_local = TENSOR(kda_bwd_prepare, dv_local), .dq_raw = TENSOR(kda_bwd_prepare, dq_raw)};
	if (stage_setup(&m, c->size, c->f[N_kda_bwd_prepare_scale]) || stage_run(&m, m.chunks * m.s.HV, bwd_prepare_unit_f32, bwd_prepare_unit_f64, &m.Aqk)) return 1;
	REST(&m.dAqk, &m.dv_local, &m.dq_raw)
	return 0;
}
static int op_state_grad(const gdnk_call *c) {
	stage m = {.s = {.q = TENSOR(state_grad, q), .k = TENSOR(state_grad, k), .dout = TENSOR(state_grad, dout), .cu = TENSOR(state_grad, cu_seqlens),
		.dht = TENSOR(state_grad, dht), .dh0 = TENSOR(state_grad, dh0), .v_first = INT(state_grad, state_v_first)},
		.w = TENSOR(state_grad, w), .dv_local = TENSOR(state_grad, dv_local), .sum = TENSOR(state_grad, g_cumsum), .gk = TENSOR(state_grad, gk), .dh = TENSOR(state_grad, dh),
		.dv_scan = TENSOR(state_grad, dv_scan), .exp2 = INT(state_grad, exp2)};
	if (stage_setup(&m, c->size, c->f[N_state_grad_scale]) || stage_run(&m, m.s.N * m.s.HV * m.blocks, state_grad_unit_f32, state_grad_unit_f64, &m.s.q)) return 1;
	REST(&m.dv_scan)
	spare_chunks(&m, &m.dh);
	return 0;
}
static int finish_run(stage *p, const gdnk_call *c, double scale) {
	stage m = *p;
	if (stage_setup(&m, c->size, scale)) return 1;
	scan *s = &m.s;
	const int n = 1 + s->biases;
	s->sums = s->channels && s->gate ? calloc((m.chunks + 1) * s->HV * n, sizeof *s->sums) : NULL;
	int failed = s->channels && s->gate && !s->sums;
	if (failed) free(m.first);
	else failed = stage_run(&m, m.chunks * s->H, finish_unit_f32, finish_unit_f64, &s->q);
	if (!failed) {
		for (int64_t hv = 0; hv < s->HV && s->sums; hv++) {
			double *sum = s->sums + hv * n;
			for (int64_t i = 1; i < m.chunks; i++)
				for (int d = 0; d < n; d++) sum[d] += sum[i * s->HV * n + d];
			if (s->dA.dtype) st1((char *)s->dA.data, s->dA.dtype, hv * s->dA.stride[0], sum[0]);
			for (int d = 0; d < s->biases && s->dbias.dtype; d++) st1((char *)s->dbias.data, s->dbias.dtype, hv * s->dbias.stride[0] + d * s->dbias.stride[1], sum[1 + d]);
		}
		REST(&s->dq, &s->dk, &s->dv, &s->dbeta, &s->dg)
	}
	free(s->sums);
	return failed;
}
#define FINISH(op)                                                                                           \
	.q = TENSOR(op, q), .k = TENSOR(op, k), .v = TENSOR(op, v), .beta = TENSOR(op, beta), .cu = TENSOR(op, cu_seqlens), .dq = TENSOR(op, dq), .dk = TENSOR(op, dk), \
	.dv = TENSOR(op, dv), .dbeta = TENSOR(op, dbeta), .dg = TENSOR(op, dg), .beta_sigmoid = INT(op, beta_sigmoid), .beta_max = INT(op, neg_eigval) ? 2 : 1, \
	.v_first = INT(op, state_v_first)
#define FINISH_MORE(op)                                                                                      \
	.v_new = TENSOR(op, v_new), .dv_scan = TENSOR(op, dv_scan), .h = TENSOR(op, h), .dh = TENSOR(op, dh), .q_rstd = TENSOR(op, q_rstd), .k_rstd = TENSOR(op, k_rstd), \
	.exp2 = INT(op, exp2)
static int op_finish(const gdnk_call *c) {
	stage m = {.s = {FINISH(finish), .dout = TENSOR(finish, dout)}, FINISH_MORE(finish), .sum = TENSOR(finish, g_cumsum), .A = TENSOR(finish, A)};
	return finish_run(&m, c, c->f[N_finish_scale]);
}
static int op_kda_finish(const gdnk_call *c) {
	stage m = {.s = {FINISH(kda_finish), CHANNELS(kda_finish), .g = TENSOR(kda_finish, g), .A_log = TENSOR(kda_finish, A_log), .dt_bias = TENSOR(kda_finish, dt_bias),
		.gate = INT(kda_finish, gate), .dA = TENSOR(kda_finish, dA_log), .dbias = TENSOR(kda_finish, ddt_bias)}, FINISH_MORE(kda_finish),
		.A = TENSOR(kda_finish, Akk), .dAqk = TENSOR(kda_finish, dAqk), .dq_raw = TENSOR(kda_finish, dq_raw)};
	return finish_run(&m, c, c->f[N_kda_finish_scale]);
}
