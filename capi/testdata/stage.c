// Stages, summaries and their merge from C, against gdn_fwd and gdn_bwd; gates that are equal in all channels make Kimi Delta Attention the same.
#include "check.h"

enum { T = 70, K = 2, V = 3, NT = 2 };

static tensor pool[512];
static int used;
static DLTensor *of(void *data, int rank, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) {
	tensor *x = &pool[used++];
	view(x, data, rank, a, b, c, d)->shape[4] = e;
	return &x->t;
}
#define TOKENS(p, d) of(p, 4, 1, T, 1, d, 0)
#define NUMBERS(p) of(p, 3, 1, T, 1, 0, 0)
#define STATE(p) of(p, 4, 1, 1, K, V, 0)
#define CHUNKS(p) of(p, 5, 1, NT, 1, K, V)

static float q[T * K], k[T * K], v[T * V], g[T], gc[T * K], beta[T], h0[K * V], dout[T * V], dht[K * V];
static double want_of[T * V];

static int near(const float *got, const float *want, int n) {
	for (int i = 0; i < n; i++) want_of[i] = want[i];
	return same(got, want_of, n);
}

int main(void) {
	for (int i = 0; i < T * V; i++) {
		v[i] = (float)sin(3 * i + 1), dout[i] = (float)cos(5 * i);
		if (i < T * K) q[i] = (float)cos(i + 1), k[i] = (i % K ? sinf : cosf)((float)(i / K * 2)) * 0.9f, gc[i] = -0.05f * (float)(i / K % 5);
		if (i < T) g[i] = -0.05f * (float)(i % 5), beta[i] = 0.25f + 0.5f * (float)(i % 2);
		if (i < K * V) h0[i] = 0.5f * (float)(i - 2), dht[i] = 0.3f * (float)(3 - i);
	}
	static float o[T * V], ht[K * V], dq[T * K], dk[T * K], dv[T * V], dg[T], dbeta[T], dh0[K * V];
	float *tape = calloc((size_t)gdn_fwd_TAPE(1, T, 1, 1, K, V, 1), sizeof *tape);
	DLTensor *ttape = of(tape, 1, gdn_fwd_TAPE(1, T, 1, 1, K, V, 1), 0, 0, 0, 0);
	gdn_fwd_args f = {.size = sizeof f, .q = TOKENS(q, K), .k = TOKENS(k, K), .v = TOKENS(v, V), .g = NUMBERS(g), .beta = NUMBERS(beta), .initial_state = STATE(h0),
	                  .o = TOKENS(o, V), .final_state = STATE(ht), .tape = ttape, .scale = 0.5};
	CHECK(gdn_fwd(&f) == GDN_OK);
	gdn_bwd_args b = {.size = sizeof b, .q = f.q, .k = f.k, .v = f.v, .g = f.g, .beta = f.beta, .initial_state = f.initial_state, .tape = ttape,
	                  .dout = TOKENS(dout, V), .dht = STATE(dht), .dq = TOKENS(dq, K), .dk = TOKENS(dk, K), .dv = TOKENS(dv, V), .dg = NUMBERS(dg), .dbeta = NUMBERS(dbeta),
	                  .dh0 = STATE(dh0), .scale = 0.5};
	CHECK(gdn_bwd(&b) == GDN_OK);

	// Gated DeltaNet by stages
	static float sum[T], A[T * 64], w[T * K], u[T * V], qn[T * K], kn[T * K], rq[T], rk[T], be[T], h[NT * K * V], vn[T * V], x[T * V], hT[K * V];
	gdn_prepare_args p = {.size = sizeof p, .q = f.q, .k = f.k, .v = f.v, .g = f.g, .beta = f.beta, .g_cumsum = NUMBERS(sum), .A = TOKENS(A, 64), .w = TOKENS(w, K),
	                      .u = TOKENS(u, V), .q_norm = TOKENS(qn, K), .k_norm = TOKENS(kn, K), .q_rstd = NUMBERS(rq), .k_rstd = NUMBERS(rk), .beta_eff = NUMBERS(be)};
	CHECK(gdn_prepare(&p) == GDN_OK);
	gdn_state_pass_args s = {.size = sizeof s, .k = f.k, .w = p.w, .u = p.u, .g_cumsum = p.g_cumsum, .initial_state = f.initial_state, .h = CHUNKS(h), .v_new = TOKENS(vn, V),
	                         .final_state = STATE(hT)};
	CHECK(gdn_state_pass(&s) == GDN_OK);
	gdn_output_args out = {.size = sizeof out, .q = f.q, .k = f.k, .v_new = s.v_new, .g_cumsum = p.g_cumsum, .h = s.h, .o = TOKENS(x, V), .scale = 0.5};
	CHECK(gdn_output(&out) == GDN_OK);
	CHECK(near(x, o, T * V) && near(hT, ht, K * V));

	static float local[T * V], dh[NT * K * V], scan[T * V], xq[T * K], xk[T * K], xv[T * V], xg[T * K], xb[T], xh[K * V];
	gdn_bwd_prepare_args bp = {.size = sizeof bp, .q = f.q, .k = f.k, .v = f.v, .g_cumsum = p.g_cumsum, .beta = f.beta, .A = p.A, .dout = b.dout, .w = TOKENS(w, K),
	                           .u = TOKENS(u, V), .dv_local = TOKENS(local, V), .scale = 0.5};
	CHECK(gdn_bwd_prepare(&bp) == GDN_OK);
	gdn_state_grad_args sg = {.size = sizeof sg, .q = f.q, .k = f.k, .w = bp.w, .dout = b.dout, .dv_local = bp.dv_local, .g_cumsum = p.g_cumsum, .initial_state = f.initial_state,
	                          .dht = b.dht, .dh = CHUNKS(dh), .dv_scan = TOKENS(scan, V), .dh0 = STATE(xh), .scale = 0.5};
	CHECK(gdn_state_grad(&sg) == GDN_OK);
	gdn_finish_args fi = {.size = sizeof fi, .q = f.q, .k = f.k, .v = f.v, .v_new = s.v_new, .dout = b.dout, .dv_scan = sg.dv_scan, .g_cumsum = p.g_cumsum, .beta = f.beta,
	                      .h = s.h, .dh = sg.dh, .A = p.A, .dq = TOKENS(xq, K), .dk = TOKENS(xk, K), .dv = TOKENS(xv, V), .dbeta = NUMBERS(xb), .dg = NUMBERS(xg), .scale = 0.5};
	CHECK(gdn_finish(&fi) == GDN_OK);
	CHECK(near(xq, dq, T * K) && near(xk, dk, T * K) && near(xv, dv, T * V) && near(xb, dbeta, T) && near(xg, dg, T) && near(xh, dh0, K * V));

	// Kimi Delta Attention
	static float gk[T * K], Aqk[T * 64], qg[T * K], kg[T * K], qs[T * K], dA[T * 64], raw[T * K];
	gdn_kda_prepare_args kp = {.size = sizeof kp, .q = f.q, .k = f.k, .v = f.v, .g = TOKENS(gc, K), .beta = f.beta, .gk = TOKENS(gk, K), .Aqk = TOKENS(Aqk, 64), .Akk = TOKENS(A, 64),
	                           .w = TOKENS(w, K), .u = TOKENS(u, V), .qg = TOKENS(qg, K), .kg = TOKENS(kg, K), .qg_scaled = TOKENS(qs, K), .q_norm = TOKENS(qn, K),
	                           .k_norm = TOKENS(kn, K), .q_rstd = NUMBERS(rq), .k_rstd = NUMBERS(rk), .beta_eff = NUMBERS(be), .scale = 0.5, .exp2 = 1};
	CHECK(gdn_kda_prepare(&kp) == GDN_OK);
	s = (gdn_state_pass_args){.size = sizeof s, .k = kp.kg, .w = kp.w, .u = kp.u, .gk = kp.gk, .initial_state = f.initial_state, .h = CHUNKS(h), .v_new = TOKENS(vn, V),
	                          .final_state = STATE(hT), .exp2 = 1};
	CHECK(gdn_state_pass(&s) == GDN_OK);
	gdn_kda_output_args ko = {.size = sizeof ko, .qg_scaled = kp.qg_scaled, .Aqk = kp.Aqk, .v_new = s.v_new, .h = s.h, .o = TOKENS(x, V)};
	CHECK(gdn_kda_output(&ko) == GDN_OK);
	CHECK(near(x, o, T * V) && near(hT, ht, K * V));
	gdn_kda_bwd_prepare_args kb = {.size = sizeof kb, .Aqk = kp.Aqk, .v_new = s.v_new, .dout = b.dout, .h = s.h, .dAqk = TOKENS(dA, 64), .dv_local = TOKENS(local, V),
	                               .dq_raw = TOKENS(raw, K), .scale = 0.5};
	CHECK(gdn_kda_bwd_prepare(&kb) == GDN_OK);
	sg = (gdn_state_grad_args){.size = sizeof sg, .q = kp.qg, .k = kp.kg, .w = kp.w, .dout = b.dout, .dv_local = kb.dv_local, .gk = kp.gk, .initial_state = f.initial_state,
	                           .dht = b.dht, .dh = CHUNKS(dh), .dv_scan = TOKENS(scan, V), .dh0 = STATE(xh), .scale = 0.5, .exp2 = 1};
	CHECK(gdn_state_grad(&sg) == GDN_OK);
	gdn_kda_finish_args kf = {.size = sizeof kf, .q = f.q, .k = f.k, .v = f.v, .gk = kp.gk, .g = kp.g, .beta = f.beta, .Akk = kp.Akk, .v_new = s.v_new, .h = s.h, .dh = sg.dh,
	                          .dv_scan = sg.dv_scan, .dAqk = kb.dAqk, .dq_raw = kb.dq_raw, .dq = TOKENS(xq, K), .dk = TOKENS(xk, K), .dv = TOKENS(xv, V), .dbeta = NUMBERS(xb),
	                          .dg = TOKENS(xg, K), .scale = 0.5, .exp2 = 1};
	CHECK(gdn_kda_finish(&kf) == GDN_OK);
	CHECK(near(xq, dq, T * K) && near(xk, dk, T * K) && near(xv, dv, T * V) && near(xb, dbeta, T) && near(xh, dh0, K * V));
	for (int i = 0; i < T; i++) xg[i] = xg[i * K] + xg[i * K + 1];
	CHECK(near(xg, dg, T));

	// Summaries: a map of two windows, composed, applied and differentiated
	enum { W = V + K };
	static float maps[2 * K * W], whole[K * W], one[K * W], y[K * V], back[K * W], zero[K * V];
	int32_t ends[] = {0, 30, T}, all[] = {0, T};
	DLTensor *cu = of(ends, 1, 3, 0, 0, 0, 0), *cut = of(all, 1, 2, 0, 0, 0, 0);
	cu->dtype.code = cut->dtype.code = kDLInt;
	gdn_summary_fwd_args m = {.size = sizeof m, .k = f.k, .v = f.v, .g = f.g, .beta = f.beta, .cu_seqlens = cu, .map = of(maps, 4, 2, 1, K, W, 0)};
	CHECK(gdn_summary_fwd(&m) == GDN_OK);
	m.cu_seqlens = cut, m.map = of(whole, 4, 1, 1, K, W, 0);
	CHECK(gdn_summary_fwd(&m) == GDN_OK);
	int64_t strides[] = {K * W, K * W, K * W, W, 1}; // S and M are columns of packed maps
	DLTensor *S = of(maps, 5, 2, 1, 1, K, V), *M = of(maps + V, 5, 2, 1, 1, K, K);
	S->strides = M->strides = strides;
	gdn_summary_compose_args co = {.size = sizeof co, .s = S, .m = M, .map = of(one, 4, 1, 1, K, W, 0)};
	CHECK(gdn_summary_compose(&co) == GDN_OK && near(one, whole, K * W));
	gdn_summary_merge_args me = {.size = sizeof me, .s = S, .m = M, .state = STATE(h0), .out = STATE(y)};
	CHECK(gdn_summary_merge(&me) == GDN_OK && near(y, ht, K * V));
	gdn_kda_summary_fwd_args km = {.size = sizeof km, .k = f.k, .v = f.v, .g = kp.g, .beta = f.beta, .map = of(one, 4, 1, 1, K, W, 0)};
	CHECK(gdn_kda_summary_fwd(&km) == GDN_OK && near(one, whole, K * W));
	gdn_summary_bwd_args mb = {.size = sizeof mb, .q = f.q, .k = f.k, .g = f.g, .beta = f.beta, .dout = b.dout, .map = of(back, 4, 1, 1, K, W, 0), .scale = 0.5};
	CHECK(gdn_summary_bwd(&mb) == GDN_OK);
	DLTensor *G = of(back, 5, 1, 1, 1, K, V), *N = of(back + V, 5, 1, 1, 1, K, K);
	G->strides = N->strides = strides;
	me = (gdn_summary_merge_args){.size = sizeof me, .s = G, .m = N, .state = b.dht, .out = STATE(y), .reverse = 1};
	CHECK(gdn_summary_merge(&me) == GDN_OK && near(y, dh0, K * V));
	gdn_kda_summary_bwd_args kmb = {.size = sizeof kmb, .q = f.q, .k = f.k, .g = kp.g, .beta = f.beta, .dout = b.dout, .map = of(one, 4, 1, 1, K, W, 0), .scale = 0.5};
	CHECK(gdn_kda_summary_bwd(&kmb) == GDN_OK && near(one, back, K * W));

	// The gradient of sum(dht S) of the whole is that of gdn_bwd without outputs, from a state of 0.
	static float dmap[K * W], dm[K * K];
	for (int i = 0; i < K * V; i++) dmap[i / V * W + i % V] = dht[i];
	static float none[T * V];
	f.initial_state = NULL, f.o = TOKENS(x, V);
	CHECK(gdn_fwd(&f) == GDN_OK);
	b.initial_state = NULL, b.dh0 = NULL, b.dout = TOKENS(none, V);
	CHECK(gdn_bwd(&b) == GDN_OK);
	gdn_summary_grad_args gr = {.size = sizeof gr, .k = f.k, .v = f.v, .g = f.g, .beta = f.beta, .dmap = of(dmap, 4, 1, 1, K, W, 0), .dk = TOKENS(xk, K), .dv = TOKENS(xv, V),
	                            .dg = NUMBERS(xg), .dbeta = NUMBERS(xb)};
	CHECK(gdn_summary_grad(&gr) == GDN_OK && near(xk, dk, T * K) && near(xv, dv, T * V) && near(xg, dg, T) && near(xb, dbeta, T));
	gdn_kda_summary_grad_args kgr = {.size = sizeof kgr, .k = f.k, .v = f.v, .g = kp.g, .beta = f.beta, .dmap = gr.dmap, .dk = gr.dk, .dv = gr.dv, .dg = TOKENS(xg, K), .dbeta = gr.dbeta};
	CHECK(gdn_kda_summary_grad(&kgr) == GDN_OK && near(xk, dk, T * K) && near(xv, dv, T * V));
	// D <- M^T D: gradients of one map applied to a state
	gdn_summary_merge_bwd_args mg = {.size = sizeof mg, .s = me.s, .m = me.m, .state = STATE(zero), .dout = STATE(dht), .ds = of(y, 5, 1, 1, 1, K, V), .dm = of(dm, 5, 1, 1, 1, K, K),
	                                 .dstate = STATE(hT)};
	CHECK(gdn_summary_merge_bwd(&mg) == GDN_OK && near(y, dht, K * V));
	for (int i = 0; i < K * K; i++) CHECK(dm[i] == 0); // the state was
	gdn_summary_compose_bwd_args cb = {.size = sizeof cb, .s = me.s, .m = me.m, .dmap = gr.dmap, .ds = mg.ds, .dm = mg.dm};
	CHECK(gdn_summary_compose_bwd(&cb) == GDN_OK && near(y, dht, K * V));
	free(tape);
	return 0;
}
