// The operators of the Gated DeltaNet family: arguments, choice of the form, and what is left to do when the units have run.

// ---------------------------------------------------------------- slots of a pool
static int64_t index_at(const gdnk_tensor *t, int64_t i, int64_t j) {
	const ptrdiff_t at = i * t->stride[0] + (t->rank == 2 ? j * t->stride[1] : 0);
	return t->dtype == GDNK_I32 ? ((const int32_t *)t->data)[at] : ((const int64_t *)t->data)[at];
}
// Where sequence n begins; below 0: it is padding.
static int64_t first_slot(const scan *s, int64_t n) {
	if (!s->slots.dtype) return n;
	return s->R ? index_at(&s->slots, n, s->accepted.dtype ? index_at(&s->accepted, n, 0) - 1 : 0) : -1;
}
// Where the state after token t of sequence n goes; below 0: nowhere.
static int64_t next_slot(const scan *s, int64_t n, int64_t t, int last) {
	if (!s->in_place) return -1;
	return s->slots.dtype ? index_at(&s->slots, n, t) : last ? n : -1;
}

#define REAL float
#define LANES vf
#define FN(name) name##_f32
#include "token.h"
#undef REAL
#undef LANES
#undef FN
#define REAL double
#define LANES double
#define FN(name) name##_f64
#include "token.h"
#undef REAL
#undef LANES
#undef FN

// From 8 MB of traffic on, the rows of an output are not in the caches when somebody reads them.
enum { STREAM_BYTES = 8 << 20 };
static int64_t tensor_bytes(const gdnk_tensor *t) {
	int64_t n = t->dtype ? size_of(t->dtype) : 0;
	for (int i = 0; i < t->rank; i++) n *= t->shape[i];
	return n;
}
// A hint for an output without gaps
static void will_write(const gdnk_tensor *t) {
	int64_t n = 1;
	for (int i = t->rank - 1; i >= 0; i--) {
		if (t->stride[i] != n && t->shape[i] > 1) return;
		n *= t->shape[i];
	}
	if (t->dtype) gdnk_large_pages(t->data, n * size_of(t->dtype));
}
static void setup(scan *s, const int64_t *size, double scale, const gdnk_tensor *tape) {
	s->B = size[SZ_B], s->T = size[SZ_T], s->H = size[SZ_H], s->HV = size[SZ_HV], s->K = size[SZ_K], s->V = size[SZ_V], s->N = size[SZ_N];
	s->G = s->H ? s->HV / s->H : 1;
	s->KP = (s->K + 31) / 32 * 32, s->VP = (s->V + 31) / 32 * 32;
	s->scale = s->scale64 = scale == 0 ? 1 / sqrt((double)s->K) : scale;
	s->perv = s->beta.dtype && s->beta.rank == 4;
	s->nstates = s->B * s->T / SEG;
	s->biases = s->channels ? s->K : 1;
	if (tape->dtype) {
		s->states = (float *)tape->data;
		s->errors = s->states + s->HV * s->nstates * s->KP * s->VP;
	}
	// About eight value heads walk together; no fewer units than threads.
	const int64_t threads = gdnk_get_num_threads(), most = s->G >= 8 ? 1 : 8 / s->G;
	int64_t groups = (s->H + most - 1) / most;
	if (s->N && groups * s->N % threads) groups = (groups + threads - 1) / threads * threads;
	s->group = groups ? (s->H + groups - 1) / groups : 1;
	s->groups = (s->H + s->group - 1) / s->group;
}
// Tokens that no sequence owns become zero.
static void zero_rest(const scan *s, const gdnk_tensor *t) {
	if (!s->cu.dtype) return;
	const sequence q = s->N ? sequence_of(s, s->N - 1) : (sequence){0};
	zero_tokens(t, q.t0 + q.len, s->T);
}
// Where the states of each packed sequence begin in h. Behind the last of them h is zero. Returns 1 without memory.
static int place_states(scan *s) {
	if (!s->h.dtype || !s->cu.dtype) return 0;
	int64_t n = 0;
	if (!(s->first = malloc((s->N + 1) * sizeof *s->first))) return 1;
	for (int64_t i = 0; i < s->N; i++) s->first[i] = n, n += (sequence_of(s, i).len + SEG - 1) / SEG;
	for (; n < s->h.shape[1]; n++)
		for (int64_t hv = 0; hv < s->HV; hv++)
			for (int64_t i = 0; i < s->h.shape[3]; i++)
				for (int64_t j = 0; j < s->h.shape[4]; j++)
					st1((char *)s->h.data, s->h.dtype, n * s->h.stride[1] + hv * s->h.stride[2] + i * s->h.stride[3] + j * s->h.stride[4], 0);
	return 0;
}
static int run_fwd(scan *s, const gdnk_tensor *tape, int tokens) {
	s->stream = (tokens ? 2 * tensor_bytes(&s->ht) : tensor_bytes(&s->o) + tensor_bytes(&s->v) + tensor_bytes(&s->q) + tensor_bytes(&s->k)) >= STREAM_BYTES;
	will_write(&s->o), will_write(&s->ht), will_write(tape);
	scratch w;
	if (s->T == 0 && !s->ht.dtype) return 0; // whatever the number of heads
	if (place_states(s)) return 1;
	const int failed = s->q.dtype == GDNK_F64 ? token_run_f64(s, 0) : tokens ? token_run_f32(s, 0) : gdnk_parallel(s->N * s->groups, fwd_scratch(s, &w, NULL), fwd_unit, s);
	free(s->first);
	if (!failed) zero_rest(s, &s->o);
	return failed;
}
static int run_bwd(scan *s, int tokens) {
	s->stream = tensor_bytes(&s->dq) + tensor_bytes(&s->dk) + tensor_bytes(&s->dv) + tensor_bytes(&s->dout) >= STREAM_BYTES;
	will_write(&s->dq), will_write(&s->dk), will_write(&s->dv), will_write(&s->dh0);
	const int nsums = 1 + s->biases;
	if (s->gate && !(s->sums = calloc((s->N + 1) * s->HV * nsums + 1, sizeof *s->sums))) return 1;
	scratch w;
	const int failed = s->T == 0 && !s->dh0.dtype ? 0 : s->q.dtype == GDNK_F64 ? token_run_f64(s, 1) : tokens ? token_run_f32(s, 1) : gdnk_parallel(s->N * s->groups, bwd_scratch(s, &w, NULL), bwd_unit, s);
	if (!failed) {
		for (int64_t hv = 0; hv < s->HV && s->sums; hv++) {
			double *sum = s->sums + hv * nsums;
			for (int64_t n = 1; n < s->N; n++)
				for (int i = 0; i < nsums; i++) sum[i] += sum[n * s->HV * nsums + i];
			if (s->dA.dtype) st1((char *)s->dA.data, s->dA.dtype, hv * s->dA.stride[0], sum[0]);
			for (int i = 0; i < s->biases && s->dbias.dtype; i++) st1((char *)s->dbias.data, s->dbias.dtype, hv * s->dbias.stride[0] + i * s->dbias.stride[1], sum[1 + i]);
		}
		const gdnk_tensor *rows[] = {&s->dq, &s->dk, &s->dv, &s->dg, &s->dgk, &s->dgv, &s->dbeta};
		for (int i = 0; i < 7; i++) zero_rest(s, rows[i]);
	}
	free(s->sums);
	return failed;
}

#define TENSOR(op, name) c->t[T_##op##_##name]
#define INT(op, name) c->i[N_##op##_##name]
#define INPUTS(op)                                                                                           \
	.q = TENSOR(op, q), .k = TENSOR(op, k), .v = TENSOR(op, v), .g = TENSOR(op, g), .beta = TENSOR(op, beta), .A_log = TENSOR(op, A_log), \
	.dt_bias = TENSOR(op, dt_bias), .h0 = TENSOR(op, initial_state), .cu = TENSOR(op, cu_seqlens), .l2norm = INT(op, qk_l2norm), .gate = INT(op, gate), \
	.beta_sigmoid = INT(op, beta_sigmoid), .beta_max = INT(op, neg_eigval) ? 2 : 1, .v_first = INT(op, state_v_first)
#define GRADIENTS(op)                                                                                        \
	.dout = TENSOR(op, dout), .dht = TENSOR(op, dht), .dq = TENSOR(op, dq), .dk = TENSOR(op, dk), .dv = TENSOR(op, dv), .dg = TENSOR(op, dg), .dbeta = TENSOR(op, dbeta), \
	.dA = TENSOR(op, dA_log), .dbias = TENSOR(op, ddt_bias), .dh0 = TENSOR(op, dh0)

static int op_fwd(const gdnk_call *c) {
	scan s = {INPUTS(fwd), .o = TENSOR(fwd, o), .ht = TENSOR(fwd, final_state)};
	setup(&s, c->size, c->f[N_fwd_scale], &TENSOR(fwd, tape));
	return run_fwd(&s, &TENSOR(fwd, tape), 0);
}
static int op_bwd(const gdnk_call *c) {
	scan s = {INPUTS(bwd), GRADIENTS(bwd)};
	setup(&s, c->size, c->f[N_bwd_scale], &TENSOR(bwd, tape));
	return run_bwd(&s, 0);
}
static int op_recurrent_fwd(const gdnk_call *c) {
	scan s = {INPUTS(recurrent_fwd), .gk = TENSOR(recurrent_fwd, gk), .gv = TENSOR(recurrent_fwd, gv), .o = TENSOR(recurrent_fwd, o), .ht = TENSOR(recurrent_fwd, final_state)};
	setup(&s, c->size, c->f[N_recurrent_fwd_scale], &TENSOR(recurrent_fwd, tape));
	return run_fwd(&s, &TENSOR(recurrent_fwd, tape), 1);
}
static int op_recurrent_bwd(const gdnk_call *c) {
	scan s = {INPUTS(recurrent_bwd), GRADIENTS(recurrent_bwd), .gk = TENSOR(recurrent_bwd, gk), .gv = TENSOR(recurrent_bwd, gv), .dgk = TENSOR(recurrent_bwd, dgk),
		.dgv = TENSOR(recurrent_bwd, dgv)};
	setup(&s, c->size, c->f[N_recurrent_bwd_scale], &TENSOR(recurrent_bwd, tape));
	return run_bwd(&s, 1);
}

#define CHANNELS(op) .channels = 1, .lower = c->f[N_##op##_lower_bound]
static int op_kda_fwd(const gdnk_call *c) {
	scan s = {INPUTS(kda_fwd), CHANNELS(kda_fwd), .o = TENSOR(kda_fwd, o), .ht = TENSOR(kda_fwd, final_state), .h = TENSOR(kda_fwd, h)};
	setup(&s, c->size, c->f[N_kda_fwd_scale], &TENSOR(kda_fwd, tape));
	return run_fwd(&s, &TENSOR(kda_fwd, tape), 0);
}
static int op_kda_bwd(const gdnk_call *c) {
	scan s = {INPUTS(kda_bwd), CHANNELS(kda_bwd), GRADIENTS(kda_bwd)};
	setup(&s, c->size, c->f[N_kda_bwd_scale], &TENSOR(kda_bwd, tape));
	return run_bwd(&s, 0);
}
static int op_kda_recurrent_fwd(const gdnk_call *c) {
	scan s = {INPUTS(kda_recurrent_fwd), CHANNELS(kda_recurrent_fwd), .o = TENSOR(kda_recurrent_fwd, o), .ht = TENSOR(kda_recurrent_fwd, final_state)};
	setup(&s, c->size, c->f[N_kda_recurrent_fwd_scale], &TENSOR(kda_recurrent_fwd, tape));
	return run_fwd(&s, &TENSOR(kda_recurrent_fwd, tape), 1);
}
static int op_kda_recurrent_bwd(const gdnk_call *c) {
	scan s = {INPUTS(kda_recurrent_bwd), CHANNELS(kda_recurrent_bwd), GRADIENTS(kda_recurrent_bwd)};
	setup(&s, c->size, c->f[N_kda_recurrent_bwd_scale], &TENSOR(kda_recurrent_bwd, tape));
	return run_bwd(&s, 1);
}
