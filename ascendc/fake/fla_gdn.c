// fla-npu's Gated DeltaNet: the stages, by the chunk formulas, and the composites, token by token. libcust_opapi.
#include "fla.h"

// ---- gates, A, its inverse, w and u ----

static int run_cumsum(Op *o) {
	Sizes z = sizes(o);
	double *g = get(o, "g"), *y = get(o, "out"), scale = value(o, "scale");
	int back = value(o, "reverse") != 0;
	FOR_CHUNKS(x, 0) {
		double *from = rows(&z, g, &x, 1), *to = rows(&z, y, &x, 1), s = 0;
		for (int64_t i = 0; i < x.n; i++) {
			int64_t t = back ? x.n - 1 - i : i;
			to[t] = (s += from[t]) * scale;
		}
	}
	return OK;
}

EXPORT int aclnnChunkLocalCumsumGetWorkspaceSize(T g, L cuSeqlens, L chunkIndicesOut, int64_t chunkSize, bool reverse, double scale, bool headFirst,
                                                 const char *outputDtype, T result, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	static const char *const types[] = {"float32", "float16", "bfloat16", "same", "input", "none"};
	Op *o = op_begin("aclnnChunkLocalCumsum", run_cumsum, ND_ONLY, F32 | F16 | BF16);
	int known = 0;
	for (int i = 0; outputDtype && i < LENGTH(types); i++)
		known |= !strcmp(outputDtype, types[i]);
	need(o, known, "outputDtype is \"%s\"", outputDtype ? outputDtype : "(null)");
	need(o, headFirst, "headFirst is false");
	need(o, chunkSize > 0 && !(chunkSize & (chunkSize - 1)), "chunkSize is %ld, expected a power of two", chunkSize);
	in(o, "g", g, "B HV T", DATA);
	out(o, "out", result, "B HV T", F32 | F16 | BF16);
	size(o, "C", chunkSize);
	size(o, "HK", dim(o, "HV"));
	sequences(o, cuSeqlens, chunkIndicesOut, chunkSize, BOTH);
	number(o, "reverse", reverse);
	number(o, "scale", scale);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkLocalCumsum)

static int run_kkt(Op *o) {
	Sizes z = sizes(o);
	double *k = get(o, "k"), *g = get(o, "g"), *beta = get(o, "beta"), *A = get(o, "A");
	FOR_CHUNKS(x, 0) {
		double *ks = key_rows(&z, k, &x, z.K), *gs = rows(&z, g, &x, 1), *bs = rows(&z, beta, &x, 1), *to = rows(&z, A, &x, z.C);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j < x.n; j++)
				to[i * z.C + j] = j < i ? bs[i] * dot(ks + i * z.K, ks + j * z.K, z.K) * exp(fmax(-50, fmin(50, gs[i] - gs[j]))) : 0;
	}
	return OK;
}

EXPORT int aclnnChunkScaledDotKktGetWorkspaceSize(T k, T g, T beta, L cuSeqlens, L chunkIndices, int64_t chunkSize, T A, uint64_t *workspaceSize,
                                                  Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkScaledDotKkt", run_kkt, ND_ONLY, F16 | BF16);
	need(o, chunkSize == 16 || chunkSize == 32 || chunkSize == 64 || chunkSize == 128, "chunkSize is %ld, expected 16, 32, 64 or 128", chunkSize);
	size(o, "C", chunkSize);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "g", g, "B HV T", F32);
	in(o, "beta", beta, "B HV T", F32);
	out(o, "A", A, "B HV T C", F32);
	grouped(o);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkScaledDotKkt)

static int run_solve(Op *o) {
	Sizes z = sizes(o);
	double *A = get(o, "x"), *X = get(o, "xOut"), *full = scratch(z.C * z.C);
	FOR_CHUNKS(x, 0) {
		double *from = rows(&z, A, &x, z.C), *to = rows(&z, X, &x, z.C);
		invert(x.n, z.C, from, full);
		for (int64_t i = 0; i < x.n; i++)
			memcpy(to + i * z.C, full + i * z.C, (size_t)x.n * sizeof *to); // columns beyond the chunk stay unspecified
	}
	return OK;
}

EXPORT int aclnnSolveTriGetWorkspaceSize(T x, L cuSeqlens, L chunkIndices, const char *layout, T xOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnSolveTri", run_solve, ND_ONLY, F16 | BF16);
	int order = layout_of(o, layout, 1);
	arg(o, IN, 1, "x", x, "B HV T C", LAID(order, "HV C"), DATA);
	arg(o, OUT, 1, "xOut", xOut, "B HV T C", LAID(order, "HV C"), DATA);
	if (!o->status && order >= TND)
		size(o, "B", 1);
	size(o, "HK", dim(o, "HV"));
	need(o, order < TND || (cuSeqlens && chunkIndices), "layout %s needs both lists", layout);
	ONE_OF(o, "C", 16, 32, 64, 128);
	sequences(o, cuSeqlens, chunkIndices, dim(o, "C"), BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnSolveTri)

static int run_w_u(Op *o) {
	Sizes z = sizes(o);
	double *k = get(o, "k"), *v = get(o, "v"), *beta = get(o, "beta"), *a = get(o, "a"), *g = get(o, "g");
	double *G = scratch(z.C * z.K), *ke = scratch(z.C * z.K);
	FOR_CHUNKS(x, 0) {
		gates(&z, g, 1, 0, 0, &x, G);
		toward_start(x.n, z.K, key_rows(&z, k, &x, z.K), G, ke);
		double *X = rows(&z, a, &x, z.C), *bs = rows(&z, beta, &x, 1);
		apply(x.n, z.C, X, 0, bs, ke, z.K, rows(&z, get(o, "wOut"), &x, z.K));
		apply(x.n, z.C, X, 0, bs, rows(&z, v, &x, z.V), z.V, rows(&z, get(o, "uOut"), &x, z.V));
	}
	return OK;
}

EXPORT int aclnnRecomputeWUFwdGetWorkspaceSize(T k, T v, T beta, T a, T g, T gk, L cuSeqlens, L chunkIndices, int64_t chunkSize, T wOut, T uOut,
                                               uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnRecomputeWUFwd", run_w_u, ND_ONLY, F16 | BF16);
	o->state_types = F32 | F16 | BF16;
	chunk_size(o, chunkSize, 64, 128);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "v", v, "B HV T V", DATA);
	in(o, "beta", beta, "B HV T", STATE);
	in(o, "a", a, "B HV T C", DATA);
	in(o, "g", g, "B HV T", STATE);
	null(o, "gk", gk);
	out(o, "wOut", wOut, "B HV T K", DATA);
	out(o, "uOut", uOut, "B HV T V", DATA);
	grouped(o);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnRecomputeWUFwd)

// ---- the scan: states at the entry of each chunk, v_new ----

static int run_fwd_h(Op *o) {
	Sizes z = sizes(o);
	double *k = get(o, "k"), *w = get(o, "w"), *u = get(o, "u"), *g = get(o, "g"), *gk = get(o, "gk"), *h0 = get(o, "initialState");
	double *G = scratch(z.C * z.K), *kd = scratch(z.C * z.K), *S = scratch(z.K * z.V), *vn = scratch(z.C * z.V);
	double *last = get(o, "finalState"), *vout = get(o, "vNew"), *hout = get(o, "h");
	int64_t most = (int64_t)z.K * z.V;
	for (int64_t i = 0; last && i < z.N * z.HV * most; i++) // of empty sequences
		last[i] = h0 ? h0[i] : 0;
	FOR_CHUNKS(x, 0) {
		if (x.first) {
			memset(S, 0, (size_t)most * sizeof *S);
			if (h0)
				memcpy(S, border(&z, h0, &x), (size_t)most * sizeof *S);
		}
		memcpy(state(&z, hout, &x), S, (size_t)most * sizeof *S);
		gates(&z, g, value(o, "unit"), gk, LN2, &x, G);
		double *us = rows(&z, u, &x, z.V);
		rows_on_state(x.n, z.K, z.V, rows(&z, w, &x, z.K), S, vn);
		for (int64_t i = 0; i < x.n * z.V; i++)
			vn[i] = us[i] - vn[i];
		if (vout)
			memcpy(rows(&z, vout, &x, z.V), vn, (size_t)(x.n * z.V) * sizeof *vn);
		// With per-channel gates k carries its decay to the chunk's end already.
		double *ks = gk ? rows(&z, k, &x, z.K) : key_rows(&z, k, &x, z.K);
		memcpy(kd, ks, (size_t)(x.n * z.K) * sizeof *kd);
		double *gs = rows(&z, g, &x, 1);
		for (int64_t i = 0; g && i < x.n; i++)
			for (int64_t d = 0; d < z.K; d++)
				kd[i * z.K + d] *= exp((gs[x.n - 1] - gs[i]) * value(o, "unit"));
		decay_state(z.K, z.V, G + (x.n - 1) * z.K, S);
		add_outer(x.n, z.K, z.V, 1, kd, vn, S);
		if (x.last && last)
			memcpy(border(&z, last, &x), S, (size_t)most * sizeof *S);
	}
	return OK;
}

static void fwd_h_arguments(Op *o, T k, T w, T u, T g, T gk, T initialState, int final, int64_t chunkSize, int save, L cu, L indices, double unit, int vFirst, T h,
                            T vNew, T finalState, int rules) {
	const char *border_ = vFirst ? "N HV V K" : "N HV K V";
	in(o, "k", k, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "w", w, "B HV T K", DATA);
	in(o, "u", u, "B HV T V", DATA);
	if (!o->status && gk)
		size(o, "HK", dim(o, "HV"));
	opt(o, "g", g, "B HV T", F32 | DATA);
	opt(o, "gk", gk, "B HV T K", F32 | DATA);
	need(o, g || gk, "neither g nor gk is given");
	grouped(o);
	sequences(o, cu, indices, chunkSize, rules);
	arg(o, IN, 0, "initialState", initialState, "N HV K V", border_, F32 | DATA);
	arg(o, OUT, 1, "h", h, "B NT HV K V", vFirst ? STATES_V_FIRST : STATES, DATA);
	arg(o, OUT, save, "vNew", vNew, "B HV T V", 0, DATA);
	arg(o, OUT, final, "finalState", finalState, "N HV K V", border_, initialState ? F32 | DATA : F32);
	need(o, o->status || !finalState || !initialState || finalState->dtype == initialState->dtype, "finalState has another type than initialState");
	need(o, final || !finalState, "finalState is given and outputFinalState is false");
	number(o, "unit", unit);
}

EXPORT int aclnnChunkGatedDeltaRuleFwdHGetWorkspaceSize(T k, T w, T u, T g, T gk, T initialState, bool outputFinalState, int64_t chunkSize, L cuSeqlens,
                                                        L chunkIndices, bool stateVFirst, T hOut, T vNewOut, T finalStateOut, uint64_t *workspaceSize,
                                                        Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkGatedDeltaRuleFwdH", run_fwd_h, ND_ONLY, F16 | BF16);
	chunk_size(o, chunkSize, 64, 128);
	fwd_h_arguments(o, k, w, u, g, gk, initialState, outputFinalState, chunkSize, 1, cuSeqlens, chunkIndices, 1, stateVFirst, hOut, vNewOut, finalStateOut, BOTH);
	need(o, FLA == 1 || !(g && gk), "g and gk are both given");
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkGatedDeltaRuleFwdH)

#if FLA >= 2
EXPORT int aclnnChunkFwdHGetWorkspaceSize(T k, T w, T u, T g, T gk, T initialState, bool outputFinalState, int64_t chunkSize, bool saveNewValue, L cuSeqlens,
                                          L chunkIndices, bool useExp2, bool stateVFirst, T hOut, T vNewOut, T finalStateOut, uint64_t *workspaceSize,
                                          Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkFwdH", run_fwd_h, ND_ONLY, BF16);
	chunk_size(o, chunkSize, 64, 64);
	fwd_h_arguments(o, k, w, u, g, gk, initialState, outputFinalState, chunkSize, saveNewValue, cuSeqlens, chunkIndices, useExp2 ? LN2 : 1, stateVFirst, hOut,
	                vNewOut, finalStateOut, BOTH | STRICT);
	need(o, !(g && gk), "g and gk are both given");
	need(o, !gk || useExp2, "gk without useExp2");
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkFwdH)
#endif

// ---- outputs ----

static int run_fwd_o(Op *o) {
	Sizes z = sizes(o);
	double *q = get(o, "q"), *k = get(o, "k"), *v = get(o, "v"), *h = get(o, "h"), *g = get(o, "g"), scale = value(o, "scale");
	double *G = scratch(z.C * z.K), *qe = scratch(z.C * z.K);
	FOR_CHUNKS(x, 0) {
		double *qs = key_rows(&z, q, &x, z.K), *ks = key_rows(&z, k, &x, z.K), *vs = rows(&z, v, &x, z.V), *to = rows(&z, get(o, "o"), &x, z.V);
		gates(&z, g, value(o, "unit"), 0, 0, &x, G);
		toward_start(x.n, z.K, qs, G, qe);
		rows_on_state(x.n, z.K, z.V, qe, state(&z, h, &x), to);
		for (int64_t i = 0; i < x.n; i++) {
			for (int64_t j = 0; j <= i; j++) {
				double p = decayed(qs + i * z.K, ks + j * z.K, G + i * z.K, G + j * z.K, z.K);
				for (int64_t d = 0; d < z.V; d++)
					to[i * z.V + d] += p * vs[j * z.V + d];
			}
			for (int64_t d = 0; d < z.V; d++)
				to[i * z.V + d] *= scale;
		}
	}
	return OK;
}

static int fwd_o(T q, T k, T v, T h, T g, L cu, L indices, double scale, int64_t chunkSize, double unit, int vFirst, const char *layout, T result,
                 uint64_t *workspaceSize, Executor **executor) {
	Op *o = op_begin("aclnnChunkFwdO", run_fwd_o, ND_ONLY, F16 | BF16);
	int order = layout ? layout_of(o, layout, 0) : BNSD;
	chunk_size(o, chunkSize, 64, 128);
	in(o, "q", q, "B HK T K", DATA);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "v", v, "B HV T V", DATA);
	in(o, "g", g, "B HV T", F32 | DATA);
	grouped(o);
	sequences(o, cu, indices, chunkSize, BOTH);
	arg(o, IN, 1, "h", h, "B NT HV K V", vFirst ? STATES_V_FIRST : STATES, DATA);
	arg(o, OUT, 1, "o", result, "B HV T V", LAID(order, "HV V"), DATA);
	number(o, "scale", scale);
	number(o, "unit", unit);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
	return op_end(o, workspaceSize, executor);
}

#if FLA == 1
EXPORT int aclnnChunkFwdOGetWorkspaceSize(T q, T k, T v, T h, T g, L cuSeqlens, L chunkOffsets, double scale, int64_t chunkSize, T oOut, uint64_t *workspaceSize,
                                          Executor **executor) {
	ENTER();
	return fwd_o(q, k, v, h, g, cuSeqlens, chunkOffsets, scale, chunkSize, 1, 0, 0, oOut, workspaceSize, executor);
}
#else
EXPORT int aclnnChunkFwdOGetWorkspaceSize(T q, T k, T v, T h, T g, L cuSeqlens, L chunkOffsets, double scale, int64_t chunkSize, bool useExp2, bool stateVFirst,
                                          const char *outputLayout, T oOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	return fwd_o(q, k, v, h, g, cuSeqlens, chunkOffsets, scale, chunkSize, useExp2 ? LN2 : 1, stateVFirst, outputLayout ? outputLayout : "(null)", oOut,
	             workspaceSize, executor);
}
#endif
LAUNCH(aclnnChunkFwdO)

// ---- backward ----

static int run_dv_local(Op *o) {
	Sizes z = sizes(o);
	double *q = get(o, "q"), *k = get(o, "k"), *dO = get(o, "dO"), *g = get(o, "g"), *G = scratch(z.C * z.K);
	FOR_CHUNKS(x, 0) {
		double *qs = key_rows(&z, q, &x, z.K), *ks = key_rows(&z, k, &x, z.K), *go = rows(&z, dO, &x, z.V), *to = rows(&z, get(o, "out"), &x, z.V);
		gates(&z, g, value(o, "unit"), 0, 0, &x, G);
		memset(to, 0, (size_t)(x.n * z.V) * sizeof *to);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j <= i; j++) {
				double p = value(o, "scale") * decayed(qs + i * z.K, ks + j * z.K, G + i * z.K, G + j * z.K, z.K);
				for (int64_t d = 0; d < z.V; d++)
					to[j * z.V + d] += p * go[i * z.V + d];
			}
	}
	return OK;
}

EXPORT int aclnnChunkBwdDvLocalGetWorkspaceSize(T q, T k, T dO, T g, T gGamma, T a, L cuSeqlens, L chunkIndices, double scale, int64_t chunkSize, T result,
                                                uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkBwdDvLocal", run_dv_local, ND_ONLY, F16 | BF16);
	chunk_size(o, chunkSize, 64, 128);
	in(o, "q", q, "B HK T K", DATA);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "dO", dO, "B HV T V", DATA);
	in(o, "g", g, "B HV T", F32 | DATA);
	null(o, "gGamma", gGamma);
	null(o, "a", a);
	out(o, "out", result, "B HV T V", DATA);
	grouped(o);
	ONE_OF(o, "K", 128);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	number(o, "scale", scale);
	number(o, "unit", 1);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkBwdDvLocal)

// The reverse scan. dh is the gradient of the state at a chunk's exit.
static int run_dhu(Op *o) {
	Sizes z = sizes(o);
	double *q = get(o, "q"), *k = get(o, "k"), *w = get(o, "w"), *dO = get(o, "dO"), *dv = get(o, "dv"), *g = get(o, "g"), *gk = get(o, "gk");
	double *dht = FLA == 1 ? 0 : get(o, "dht"), *dh0 = get(o, "dh0"), *dh = get(o, "dh"), *dv2 = get(o, "dv2");
	double *G = scratch(z.C * z.K), *qd = scratch(z.C * z.K), *kd = scratch(z.C * z.K), *D = scratch(z.K * z.V);
	int64_t most = z.K * z.V;
	for (int64_t i = 0; FLA != 1 && dh0 && i < z.N * z.HV * most; i++)
		dh0[i] = dht ? dht[i] : 0;
	FOR_CHUNKS(x, 1) {
		if (x.last) {
			memset(D, 0, (size_t)most * sizeof *D);
			if (dht)
				memcpy(D, border(&z, dht, &x), (size_t)most * sizeof *D);
		}
		memcpy(state(&z, dh, &x), D, (size_t)most * sizeof *D);
		gates(&z, g, value(o, "unit"), gk, LN2, &x, G);
		if (gk) { // q and k carry their decays already
			memcpy(qd, rows(&z, q, &x, z.K), (size_t)(x.n * z.K) * sizeof *qd);
			memcpy(kd, rows(&z, k, &x, z.K), (size_t)(x.n * z.K) * sizeof *kd);
		} else {
			toward_start(x.n, z.K, key_rows(&z, q, &x, z.K), G, qd);
			toward_end(x.n, z.K, key_rows(&z, k, &x, z.K), G, kd);
		}
		double *to = rows(&z, dv2, &x, z.V), *from = rows(&z, dv, &x, z.V);
		rows_on_state(x.n, z.K, z.V, kd, D, to);
		for (int64_t i = 0; i < x.n * z.V; i++)
			to[i] += from[i];
		decay_state(z.K, z.V, G + (x.n - 1) * z.K, D);
		add_outer(x.n, z.K, z.V, value(o, "scale"), qd, rows(&z, dO, &x, z.V), D);
		add_outer(x.n, z.K, z.V, -1, rows(&z, w, &x, z.K), to, D);
		if (x.first && dh0)
			memcpy(FLA == 1 ? state(&z, dh0, &x) : border(&z, dh0, &x), D, (size_t)most * sizeof *D);
	}
	return OK;
}

static int dhu(T q, T k, T w, T dO, T dv, T g, T gk, T h0, T dht, L cu, L indices, double scale, int64_t chunkSize, int useExp2, int vFirst, T dh, T dh0, T dv2,
               uint64_t *workspaceSize, Executor **executor) {
	Op *o = op_begin("aclnnChunkGatedDeltaRuleBwdDhu", run_dhu, ND_ONLY | LOGICAL, F16 | BF16);
	const char *border_ = vFirst ? "N HV V K" : "N HV K V", *states = vFirst ? STATES_V_FIRST : STATES;
	chunk_size(o, chunkSize, 64, 128);
	in(o, "q", q, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "k", k, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "w", w, "B HV T K", DATA);
	in(o, "dO", dO, "B HV T V", DATA);
	in(o, "dv", dv, "B HV T V", DATA);
	if (!o->status && gk)
		size(o, "HK", dim(o, "HV"));
	opt(o, "g", g, "B HV T", F32 | DATA);
	opt(o, "gk", gk, "B HV T K", F32 | DATA);
	need(o, !g != !gk, "exactly one of g and gk is expected");
	need(o, !gk || useExp2, "gk without useExp2");
	grouped(o);
	sequences(o, cu, indices, chunkSize, BOTH);
	arg(o, IN, 0, "h0", h0, "N HV K V", border_, F32 | DATA);
	arg(o, IN, 0, "dht", dht, "N HV K V", border_, F32 | DATA);
	arg(o, OUT, 1, "dh", dh, "B NT HV K V", states, DATA);
	if (FLA == 1)
		arg(o, OUT, 0, "dh0", dh0, "B NT HV K V", states, DATA); // as it was
	else
		arg(o, OUT, 0, "dh0", dh0, "N HV K V", border_, DATA);
	need(o, FLA == 1 || !dh0 || h0, "dh0 is given without h0");
	out(o, "dv2", dv2, "B HV T V", DATA);
	number(o, "scale", scale);
	number(o, "unit", useExp2 ? LN2 : 1);
	return op_end(o, workspaceSize, executor);
}

#if FLA == 1
EXPORT int aclnnChunkGatedDeltaRuleBwdDhuGetWorkspaceSize(T q, T k, T w, T dO, T dv, T g, T gk, T h0, T dht, L cuSeqlens, L chunkIndices, double scale,
                                                          int64_t chunkSize, bool useExp2, T dhOut, T dh0Out, T dv2Out, uint64_t *workspaceSize,
                                                          Executor **executor) {
	ENTER();
	return dhu(q, k, w, dO, dv, g, gk, h0, dht, cuSeqlens, chunkIndices, scale, chunkSize, useExp2, 0, dhOut, dh0Out, dv2Out, workspaceSize, executor);
}
#else
EXPORT int aclnnChunkGatedDeltaRuleBwdDhuGetWorkspaceSize(T q, T k, T w, T dO, T dv, T g, T gk, T h0, T dht, L cuSeqlens, L chunkIndices, double scale,
                                                          int64_t chunkSize, bool useExp2, bool stateVFirst, T dhOut, T dh0Out, T dv2Out,
                                                          uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	return dhu(q, k, w, dO, dv, g, gk, h0, dht, cuSeqlens, chunkIndices, scale, chunkSize, useExp2, stateVFirst, dhOut, dh0Out, dv2Out, workspaceSize, executor);
}
#endif
LAUNCH(aclnnChunkGatedDeltaRuleBwdDhu)

// dg is the gradient of the cumulative gate, without what comes through w and u.
static int run_dqkwg(Op *o) {
	Sizes z = sizes(o);
	double *q = get(o, "q"), *k = get(o, "k"), *v = get(o, "v"), *g = get(o, "g"), *h = get(o, "h"), *dO = get(o, "dox"), *dh = get(o, "dh"), *dv = get(o, "dv");
	double *dq = get(o, "dqOut"), *dk = get(o, "dkOut"), *dw = get(o, "dwOut"), *dg = get(o, "dgOut"), scale = value(o, "scale");
	int64_t n = z.C * z.K, all = z.B * z.HK * z.T * z.K;
	double *G = scratch(n), *dqs = scratch(n), *inter = scratch(n), *dks = scratch(n);
	double *sum_q = scratch(all), *sum_k = scratch(all);
	FOR_CHUNKS(x, 0) {
		double *qs = key_rows(&z, q, &x, z.K), *ks = key_rows(&z, k, &x, z.K), *vs = rows(&z, v, &x, z.V), *go = rows(&z, dO, &x, z.V);
		double *S = state(&z, h, &x), *D = state(&z, dh, &x), *dgs = rows(&z, dg, &x, 1), *dws = rows(&z, dw, &x, z.K);
		gates(&z, g, value(o, "unit"), 0, 0, &x, G);
		rows_on_state_back(x.n, z.K, z.V, go, S, dqs);
		rows_on_state_back(x.n, z.K, z.V, vs, D, inter);
		rows_on_state_back(x.n, z.K, z.V, rows(&z, dv, &x, z.V), S, dws);
		double end = exp(G[(x.n - 1) * z.K]) * dot(S, D, z.K * z.V);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t d = 0; d < z.K; d++) {
				int64_t e = i * z.K + d;
				dws[e] = -dws[e];
				dqs[e] *= scale * exp(G[e]);
				dks[e] = inter[e] *= exp(G[(x.n - 1) * z.K + d] - G[e]);
				end += ks[e] * inter[e];
			}
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j <= i; j++) {
				double p = scale * dot(go + i * z.V, vs + j * z.V, z.V) * exp(G[i * z.K] - G[j * z.K]);
				for (int64_t d = 0; d < z.K; d++)
					dqs[i * z.K + d] += p * ks[j * z.K + d], dks[j * z.K + d] += p * qs[i * z.K + d];
			}
		double *to_q = key_rows(&z, sum_q, &x, z.K), *to_k = key_rows(&z, sum_k, &x, z.K);
		for (int64_t i = 0; i < x.n; i++)
			dgs[i] = dot(qs + i * z.K, dqs + i * z.K, z.K) - dot(ks + i * z.K, dks + i * z.K, z.K);
		dgs[x.n - 1] += end;
		for (int64_t i = 0; i < x.n * z.K; i++)
			to_q[i] += dqs[i], to_k[i] += dks[i];
		if (x.h % z.G == z.G - 1)
			memcpy(key_rows(&z, dq, &x, z.K), to_q, (size_t)(x.n * z.K) * sizeof *dq), memcpy(key_rows(&z, dk, &x, z.K), to_k, (size_t)(x.n * z.K) * sizeof *dk);
	}
	return OK;
}

EXPORT int aclnnChunkBwdDqkwgGetWorkspaceSize(T q, T k, T v, T g, T h, T dox, T dh, T dv, L cuSeqlens, L chunkIndices, T w, T gGamma, float scale,
                                              int64_t chunkSize, bool useExp2, bool transposeStateLayout, T dqOut, T dkOut, T dwOut, T dgOut,
                                              uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkBwdDqkwg", run_dqkwg, ND_ONLY, F16 | BF16);
	const char *states = transposeStateLayout ? STATES_V_FIRST : STATES;
	chunk_size(o, chunkSize, 64, 128);
	in(o, "q", q, "B HK T K", DATA);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "v", v, "B HV T V", DATA);
	in(o, "g", g, "B HV T", F32 | DATA);
	grouped(o);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	arg(o, IN, 1, "h", h, "B NT HV K V", states, DATA);
	in(o, "dox", dox, "B HV T V", DATA);
	arg(o, IN, 1, "dh", dh, "B NT HV K V", states, DATA);
	in(o, "dv", dv, "B HV T V", DATA);
	null(o, "w", w);
	null(o, "gGamma", gGamma);
	out(o, "dqOut", dqOut, "B HK T K", DATA);
	out(o, "dkOut", dkOut, "B HK T K", DATA);
	out(o, "dwOut", dwOut, "B HV T K", DATA);
	out(o, "dgOut", dgOut, "B HV T", F32 | DATA);
	number(o, "scale", scale);
	number(o, "unit", useExp2 ? LN2 : 1);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkBwdDqkwg)

// The gradient of A, strictly lower, stored transposed: row j, column i holds that of A[i][j].
static void da_of(const Sizes *z, const Chunk *x, const double *X, const double *beta, const double *v, const double *ke, const double *du, const double *dw,
                  double *dA) {
	int64_t n = x->n, C = z->C;
	double *u = scratch(n * z->V), *w = scratch(n * z->K), *Tu = scratch(n * z->V), *Tw = scratch(n * z->K);
	apply(n, C, X, 0, beta, v, z->V, u);
	apply(n, C, X, 0, beta, ke, z->K, w);
	apply(n, C, X, 1, 0, du, z->V, Tu);
	apply(n, C, X, 1, 0, dw, z->K, Tw);
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < n; j++)
			dA[j * C + i] = j < i ? -dot(Tu + i * z->V, u + j * z->V, z->V) - dot(Tw + i * z->K, w + j * z->K, z->K) : 0;
}

static int run_wy_da(Op *o) {
	Sizes z = sizes(o);
	double *G = scratch(z.C * z.K), *ke = scratch(z.C * z.K);
	FOR_CHUNKS(x, 0) {
		gates(&z, get(o, "g"), 1, 0, 0, &x, G);
		toward_start(x.n, z.K, key_rows(&z, get(o, "k"), &x, z.K), G, ke);
		da_of(&z, &x, rows(&z, get(o, "a"), &x, z.C), rows(&z, get(o, "beta"), &x, 1), rows(&z, get(o, "v"), &x, z.V), ke, rows(&z, get(o, "du"), &x, z.V),
		      rows(&z, get(o, "dw"), &x, z.K), rows(&z, get(o, "dA"), &x, z.C));
	}
	return OK;
}

// dk is summed over the value heads of a key head, dg is of the cumulative gate.
static int run_wy_full(Op *o) {
	Sizes z = sizes(o);
	int fused = value(o, "fused") != 0;
	double *k = get(o, "k"), *dk = get(o, "dkOut"), *sum = scratch(z.B * z.HK * z.T * z.K), *G = scratch(z.C * z.K), *ke = scratch(z.C * z.K), *own = scratch(z.C * z.C);
	double *Tu = scratch(z.C * z.V), *Tw = scratch(z.C * z.K);
	FOR_CHUNKS(x, 0) {
		double *ks = key_rows(&z, k, &x, z.K), *vs = rows(&z, get(o, "v"), &x, z.V), *bs = rows(&z, get(o, "beta"), &x, 1), *X = rows(&z, get(o, "a"), &x, z.C);
		double *du = rows(&z, get(o, "du"), &x, z.V), *dw = rows(&z, get(o, "dw"), &x, z.K), *to_k = key_rows(&z, sum, &x, z.K);
		double *dv = rows(&z, get(o, "dvOut"), &x, z.V), *db = rows(&z, get(o, "dbetaOut"), &x, 1), *dg = rows(&z, get(o, "dgOut"), &x, 1);
		gates(&z, get(o, "g"), 1, 0, 0, &x, G);
		toward_start(x.n, z.K, ks, G, ke);
		double *dA = own;
		if (fused)
			da_of(&z, &x, X, bs, vs, ke, du, dw, own);
		else
			dA = rows(&z, get(o, "dA"), &x, z.C);
		apply(x.n, z.C, X, 1, 0, du, z.V, Tu);
		apply(x.n, z.C, X, 1, 0, dw, z.K, Tw);
		for (int64_t i = 0; i < x.n; i++) {
			double through = dot(Tw + i * z.K, ke + i * z.K, z.K);
			db[i] = dot(Tu + i * z.V, vs + i * z.V, z.V) + through;
			dg[i] = bs[i] * through;
			for (int64_t d = 0; d < z.V; d++)
				dv[i * z.V + d] = bs[i] * Tu[i * z.V + d];
			for (int64_t d = 0; d < z.K; d++)
				to_k[i * z.K + d] += bs[i] * exp(G[i * z.K + d]) * Tw[i * z.K + d];
		}
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j < i; j++) {
				double e = dA[j * z.C + i] * exp(G[i * z.K] - G[j * z.K]), kk = dot(ks + i * z.K, ks + j * z.K, z.K);
				db[i] += e * kk;
				dg[i] += e * bs[i] * kk, dg[j] -= e * bs[i] * kk;
				for (int64_t d = 0; d < z.K; d++)
					to_k[i * z.K + d] += bs[i] * e * ks[j * z.K + d], to_k[j * z.K + d] += bs[i] * e * ks[i * z.K + d];
			}
		if (x.h % z.G == z.G - 1)
			memcpy(key_rows(&z, dk, &x, z.K), to_k, (size_t)(x.n * z.K) * sizeof *dk);
	}
	return OK;
}

static void wy_inputs(Op *o, T k, T v, T beta, T a, T dA, int has_dA, T dw, T du, T g, int64_t chunkSize) {
	o->state_types = F32 | F16 | BF16;
	chunk_size(o, chunkSize, 64, 128);
	in(o, "k", k, "B HK T K", DATA);
	in(o, "v", v, "B HV T V", DATA);
	in(o, "beta", beta, "B HV T", STATE);
	in(o, "a", a, "B HV T C", DATA);
	if (has_dA)
		in(o, "dA", dA, "B HV T C", DATA);
	in(o, "dw", dw, "B HV T K", DATA);
	in(o, "du", du, "B HV T V", DATA);
	in(o, "g", g, "B HV T", STATE);
	grouped(o);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
}

static void wy_outputs(Op *o, T beta, T g, T dk, T dv, T dbeta, T dg, int fused) {
	out(o, "dkOut", dk, "B HK T K", DATA);
	out(o, "dvOut", dv, "B HV T V", DATA);
	out(o, "dbetaOut", dbeta, "B HV T", F32 | F16 | BF16);
	out(o, "dgOut", dg, "B HV T", F32 | F16 | BF16);
	need(o, o->status || (dbeta->dtype == beta->dtype && dg->dtype == g->dtype), "dbeta and dg have the types of beta and g");
	number(o, "fused", fused);
}

EXPORT int aclnnPrepareWyReprBwdDaGetWorkspaceSize(T k, T v, T beta, T a, T dw, T du, T g, L cuSeqlens, L chunkIndices, int64_t chunkSize, T dAOut,
                                                   uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnPrepareWyReprBwdDa", run_wy_da, ND_ONLY, F16 | BF16);
	wy_inputs(o, k, v, beta, a, 0, 0, dw, du, g, chunkSize);
	out(o, "dA", dAOut, "B HV T C", DATA);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnPrepareWyReprBwdDa)

EXPORT int aclnnPrepareWyReprBwdFullGetWorkspaceSize(T k, T v, T beta, T a, T dA, T dw, T du, T g, L cuSeqlens, L chunkIndices, int64_t chunkSize, T dkOut,
                                                     T dvOut, T dbetaOut, T dgOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnPrepareWyReprBwdFull", run_wy_full, ND_ONLY, F16 | BF16);
	wy_inputs(o, k, v, beta, a, dA, 1, dw, du, g, chunkSize);
	wy_outputs(o, beta, g, dkOut, dvOut, dbetaOut, dgOut, 0);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnPrepareWyReprBwdFull)

EXPORT int aclnnPrepareWyReprBwdGetWorkspaceSize(T k, T v, T beta, T a, T dw, T du, T g, L cuSeqlens, L chunkIndices, int64_t chunkSize, T dkOut, T dvOut,
                                                 T dbetaOut, T dgOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnPrepareWyReprBwd", run_wy_full, ND_ONLY, F16 | BF16);
	wy_inputs(o, k, v, beta, a, 0, 0, dw, du, g, chunkSize);
	wy_outputs(o, beta, g, dkOut, dvOut, dbetaOut, dgOut, 1);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnPrepareWyReprBwd)

// ---- composites, token by token ----

#if FLA >= 2

// One value head of one sequence: rows are contiguous in head-major arrays. decay from gates of one number a token.
static void expand_decay(int64_t n, int64_t K, const double *g, double *decay) {
	for (int64_t t = 0; t < n; t++)
		for (int64_t d = 0; d < K; d++)
			decay[t * K + d] = exp(g[t]);
}

static int run_fwd(Op *o) {
	Sizes z = sizes(o);
	int64_t most = z.K * z.V;
	double *q = get(o, "q"), *k = get(o, "k"), *v = get(o, "v"), *g = get(o, "g"), *beta = get(o, "beta"), *h0 = get(o, "initialState"), *result = get(o, "o");
	double *last = get(o, "finalState"), *eff = get(o, "betaEff"), *cum = get(o, "gCumsum"), *X = get(o, "aOut"), *hout = get(o, "hOut");
	double unit = value(o, "useExp2") != 0 ? LN2 : 1;
	if (value(o, "norm") != 0) {
		normalize(z.B * z.HK * z.T, z.K, 1e-6, q, get(o, "qHat"), get(o, "qRstd"));
		normalize(z.B * z.HK * z.T, z.K, 1e-6, k, get(o, "kHat"), get(o, "kRstd"));
		q = get(o, "qHat"), k = get(o, "kHat");
	}
	for (int64_t i = 0; eff && i < z.B * z.HV * z.T; i++)
		eff[i] = sigmoid(beta[i]) * (value(o, "allowNegEigval") != 0 ? 2 : 1);
	if (eff)
		beta = eff;
	double *decay = scratch(z.T * z.K), *S = scratch(most);
	for (int64_t s = 0; s < z.N; s++)
		for (int64_t h = 0; h < z.HV; h++) {
			const Sequence *q_ = &o->sequences[s];
			Chunk x = {.b = q_->b, .h = h, .hk = h / z.G, .start = q_->start, .n = q_->n, .sequence = s};
			memset(S, 0, (size_t)most * sizeof *S);
			if (h0)
				memcpy(S, border(&z, h0, &x), (size_t)most * sizeof *S);
			if (hout) // states at the entry of each chunk: run up to each
				for (int64_t c = 0; c * z.C < q_->n; c++) {
					x.c = q_->chunk + c;
					memcpy(state(&z, hout, &x), S, (size_t)most * sizeof *S);
					Chunk y = x;
					y.start = q_->start + c * z.C;
					y.n = q_->n - c * z.C < z.C ? q_->n - c * z.C : z.C;
					expand_decay(y.n, z.K, rows(&z, g, &y, 1), decay);
					tokens_forward(&(Head){y.n, z.K, z.V, key_rows(&z, q, &y, z.K), key_rows(&z, k, &y, z.K), rows(&z, v, &y, z.V), rows(&z, beta, &y, 1), decay,
					                       value(o, "scale")},
					               S, rows(&z, result, &y, z.V), 0);
				}
			else {
				expand_decay(x.n, z.K, rows(&z, g, &x, 1), decay);
				tokens_forward(&(Head){x.n, z.K, z.V, key_rows(&z, q, &x, z.K), key_rows(&z, k, &x, z.K), rows(&z, v, &x, z.V), rows(&z, beta, &x, 1), decay,
				                       value(o, "scale")},
				               S, rows(&z, result, &x, z.V), 0);
			}
			if (last)
				memcpy(border(&z, last, &x), S, (size_t)most * sizeof *S);
		}
	if (!cum && !X)
		return OK;
	double *G = scratch(z.C * z.K), *A = scratch(z.C * z.C), *full = scratch(z.C * z.C);
	FOR_CHUNKS(x, 0) {
		double *gs = rows(&z, g, &x, 1), s = 0;
		for (int64_t i = 0; i < x.n; i++) {
			s += gs[i];
			if (cum)
				rows(&z, cum, &x, 1)[i] = s / unit;
			for (int64_t d = 0; d < z.K; d++)
				G[i * z.K + d] = s;
		}
		if (!X)
			continue;
		keys_on_keys(&z, &x, key_rows(&z, k, &x, z.K), rows(&z, beta, &x, 1), G, A);
		invert(x.n, z.C, A, full);
		for (int64_t i = 0; i < x.n; i++)
			memcpy(rows(&z, X, &x, z.C) + i * z.C, full + i * z.C, (size_t)x.n * sizeof *X);
	}
	return OK;
}

EXPORT int aclnnChunkGatedDeltaRuleFwdGetWorkspaceSize(T q, T k, T v, T g, T beta, T aLog, T dtBias, T initialState, L cuSeqlens, L chunkIndices,
                                                       const char *layout, double scale, int64_t chunkSize, bool useExp2, bool useQkL2norm, bool allowNegEigval,
                                                       bool stateVFirst, T result, T finalState, T qHat, T kHat, T qRstd, T kRstd, T betaEff, T gCumsum, T aOut,
                                                       T hOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkGatedDeltaRuleFwd", run_fwd, ND_ONLY | LOGICAL, F16 | BF16);
	int order = layout_of(o, layout, 0) % 2 ? BNSD : BSND; // always of rank 4
	const char *keys = LAID(order, "HK K"), *values = LAID(order, "HV V"), *border_ = stateVFirst ? "N HV V K" : "N HV K V";
	chunk_size(o, chunkSize, 64, 128);
	arg(o, IN, 1, "q", q, "B HK T K", keys, DATA);
	arg(o, IN, 1, "k", k, "B HK T K", keys, DATA);
	arg(o, IN, 1, "v", v, "B HV T V", values, DATA);
	arg(o, IN, 1, "g", g, "B HV T", "B T HV", F32 | DATA);
	arg(o, IN, 1, "beta", beta, "B HV T", "B T HV", F32 | DATA);
	null(o, "aLog", aLog);
	null(o, "dtBias", dtBias);
	grouped(o);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH | WHOLE);
	need(o, o->status || layout_of(o, layout, 0) < TND || cuSeqlens, "layout %s without cuSeqlens", layout);
	arg(o, IN, 0, "initialState", initialState, "N HV K V", border_, F32 | DATA);
	arg(o, OUT, 1, "o", result, "B HV T V", "B T HV V", DATA);
	arg(o, OUT, 0, "finalState", finalState, "N HV K V", border_, initialState ? F32 | DATA : F32);
	arg(o, OUT, useQkL2norm, "qHat", qHat, "B HK T K", keys, DATA);
	arg(o, OUT, useQkL2norm, "kHat", kHat, "B HK T K", keys, DATA);
	optout(o, "qRstd", qRstd, "B HK T", F32);
	optout(o, "kRstd", kRstd, "B HK T", F32);
	need(o, !qHat == !useQkL2norm && !kHat == !useQkL2norm && !qRstd == !useQkL2norm && !kRstd == !useQkL2norm,
	     "qHat, kHat, qRstd and kRstd come together, with useQkL2norm");
	arg(o, OUT, 0, "betaEff", betaEff, "B HV T", "B T HV", F32);
	arg(o, OUT, 0, "gCumsum", gCumsum, "B HV T", "B T HV", F32);
	optout(o, "aOut", aOut, "B HV T C", DATA);
	arg(o, OUT, 0, "hOut", hOut, "B NT HV K V", stateVFirst ? "B NT HV V K" : "B NT HV K V", DATA);
	need(o, betaEff || !allowNegEigval, "allowNegEigval without betaEff");
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
	if (useQkL2norm || betaEff || hOut || useExp2) {
		only_950(o, " with the norm, the sigmoid of beta, states or exp2");
		need(o, o->status || (o->data == 27 && dim(o, "V") == 128 && chunkSize == 64 && dim(o, "HV") / dim(o, "HK") <= 4),
		     "the extended form is bfloat16, V 128, chunkSize 64, at most 4 value heads on a key head");
	}
	number(o, "scale", scale);
	number(o, "useExp2", useExp2);
	number(o, "norm", useQkL2norm);
	number(o, "allowNegEigval", allowNegEigval);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkGatedDeltaRuleFwd)

static int run_bwd(Op *o) {
	Sizes z = sizes(o);
	int64_t most = z.K * z.V, all = z.B * z.HK * z.T * z.K;
	double *q = get(o, "q"), *k = get(o, "k"), *v = get(o, "v"), *cum = get(o, "gCumsum"), *beta = get(o, "beta"), *dO = get(o, "dO"), *h0 = get(o, "initialState");
	double *dht = get(o, "dht"), *raw = get(o, "betaRaw"), *dh0 = get(o, "dh0"), *dbeta = get(o, "dBeta"), *dg = get(o, "dG");
	double unit = value(o, "useExp2") != 0 ? LN2 : 1;
	double *dq = scratch(all), *dk = scratch(all), *g = scratch(z.T), *decay = scratch(z.T * z.K), *S = scratch(most), *D = scratch(most), *tape = scratch(z.T * most);
	double *os = scratch(z.T * z.V), *dgk = scratch(z.T * z.K), *e = scratch(z.V);
	for (int64_t s = 0; s < z.N; s++)
		for (int64_t h = 0; h < z.HV; h++) {
			const Sequence *q_ = &o->sequences[s];
			Chunk x = {.b = q_->b, .h = h, .hk = h / z.G, .start = q_->start, .n = q_->n, .sequence = s};
			double *G = rows(&z, cum, &x, 1);
			for (int64_t t = 0; t < x.n; t++)
				g[t] = (G[t] - (t % z.C ? G[t - 1] : 0)) * unit;
			expand_decay(x.n, z.K, g, decay);
			Head one = {x.n, z.K, z.V, key_rows(&z, q, &x, z.K), key_rows(&z, k, &x, z.K), rows(&z, v, &x, z.V), rows(&z, beta, &x, 1), decay, value(o, "scale")};
			memset(S, 0, (size_t)most * sizeof *S);
			memset(D, 0, (size_t)most * sizeof *D);
			if (h0)
				memcpy(S, border(&z, h0, &x), (size_t)most * sizeof *S);
			if (dht)
				memcpy(D, border(&z, dht, &x), (size_t)most * sizeof *D);
			memset(dgk, 0, (size_t)(x.n * z.K) * sizeof *dgk);
			tokens_forward(&one, S, os, tape);
			double *db = rows(&z, dbeta, &x, 1);
			tokens_backward(&one, tape, rows(&z, dO, &x, z.V), D, key_rows(&z, dq, &x, z.K), key_rows(&z, dk, &x, z.K), rows(&z, get(o, "dv"), &x, z.V), db, dgk, e);
			for (int64_t t = 0; t < x.n; t++) {
				double sum = 0;
				for (int64_t d = 0; d < z.K; d++)
					sum += dgk[t * z.K + d];
				rows(&z, dg, &x, 1)[t] = sum;
				if (value(o, "sigmoid") != 0) { // beta is 1 or 2 times the sigmoid
					double r = sigmoid(rows(&z, raw, &x, 1)[t]);
					db[t] *= one.beta[t] * (1 - r);
				}
			}
			if (dh0)
				memcpy(border(&z, dh0, &x), D, (size_t)most * sizeof *D);
		}
	if (value(o, "norm") != 0) {
		normalize_back(z.B * z.HK * z.T, z.K, q, get(o, "qRstd"), dq);
		normalize_back(z.B * z.HK * z.T, z.K, k, get(o, "kRstd"), dk);
	}
	for (int64_t s = 0; s < z.N; s++) // rows of no sequence stay unspecified
		for (int64_t h = 0; h < z.HK; h++) {
			const Sequence *q_ = &o->sequences[s];
			int64_t at = ((q_->b * z.HK + h) * z.T + q_->start) * z.K;
			memcpy(get(o, "dq") + at, dq + at, (size_t)(q_->n * z.K) * sizeof *dq);
			memcpy(get(o, "dk") + at, dk + at, (size_t)(q_->n * z.K) * sizeof *dk);
		}
	return OK;
}

EXPORT int aclnnChunkGatedDeltaRuleBwdGetWorkspaceSize(T q, T k, T v, T gCumsum, T beta, T A, T dO, T initialState, T dht, T qRstd, T kRstd, T betaRaw, T aLog,
                                                       T dtBias, L cuSeqlens, L chunkIndices, const char *layout, double scale, int64_t chunkSize, bool useExp2,
                                                       bool useGateInKernel, bool useQkL2norm, bool useBetaSigmoid, bool stateVFirst, T dq, T dk, T dv, T dBeta,
                                                       T dG, T dh0, T dALog, T dDtBias, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkGatedDeltaRuleBwd", run_bwd, ND_ONLY | LOGICAL, BF16);
	int order = layout_of(o, layout, 0) % 2 ? BNSD : BSND;
	const char *keys = LAID(order, "HK K"), *values = LAID(order, "HV V"), *border_ = stateVFirst ? "N HV V K" : "N HV K V";
	chunk_size(o, chunkSize, 64, 64);
	arg(o, IN, 1, "q", q, "B HK T K", keys, DATA);
	arg(o, IN, 1, "k", k, "B HK T K", keys, DATA);
	arg(o, IN, 1, "v", v, "B HV T V", values, DATA);
	arg(o, IN, 1, "gCumsum", gCumsum, "B HV T", "B T HV", F32);
	arg(o, IN, 1, "beta", beta, "B HV T", "B T HV", F32 | DATA);
	in(o, "A", A, "B HV T C", DATA);
	arg(o, IN, 1, "dO", dO, "B HV T V", "B T HV V", DATA);
	grouped(o);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH | WHOLE);
	arg(o, IN, 0, "initialState", initialState, "N HV K V", border_, BF16);
	arg(o, IN, 0, "dht", dht, "N HV K V", border_, BF16);
	opt(o, "qRstd", qRstd, "B HK T", F32);
	opt(o, "kRstd", kRstd, "B HK T", F32);
	need(o, !qRstd == !useQkL2norm && !kRstd == !useQkL2norm, "qRstd and kRstd come with useQkL2norm");
	arg(o, IN, 0, "betaRaw", betaRaw, "B HV T", "B T HV", F32 | DATA);
	need(o, !betaRaw == !useBetaSigmoid, "betaRaw comes with useBetaSigmoid");
	null(o, "aLog", aLog);
	null(o, "dtBias", dtBias);
	need(o, !useGateInKernel, "useGateInKernel is not there yet");
	arg(o, OUT, 1, "dq", dq, "B HK T K", keys, DATA);
	arg(o, OUT, 1, "dk", dk, "B HK T K", keys, DATA);
	arg(o, OUT, 1, "dv", dv, "B HV T V", values, DATA);
	arg(o, OUT, 1, "dBeta", dBeta, "B HV T", "B T HV", F32 | DATA);
	arg(o, OUT, 1, "dG", dG, "B HV T", "B T HV", F32);
	arg(o, OUT, 0, "dh0", dh0, "N HV K V", border_, BF16);
	need(o, !dh0 || initialState, "dh0 without initialState");
	null(o, "dALog", dALog);
	null(o, "dDtBias", dDtBias);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	need(o, o->status || dim(o, "HV") / dim(o, "HK") <= 4, "more than 4 value heads on a key head");
	only_950(o, "");
	number(o, "scale", scale);
	number(o, "useExp2", useExp2);
	number(o, "norm", useQkL2norm);
	number(o, "sigmoid", useBetaSigmoid);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkGatedDeltaRuleBwd)

#endif
