// fla-npu's Kimi Delta Attention: composites token by token, stages by the chunk formulas. libcust_opapi.
#include "fla.h"

// Head-major letters without their B where the tensor is packed.
static const char *packed(T t, int full_rank, const char *letters) {
	return t && fake_is(t, TENSOR) && t->rank == full_rank - 1 ? letters + 2 : letters;
}

static void batch_of_one(Op *o) {
	if (!o->status && !dim(o, "B"))
		size(o, "B", 1);
}

static void gate_arguments(Op *o, T aLog, T dtBias, int use, int safe, double bound) {
	if (!o->status)
		size(o, "HVK", dim(o, "HV") * dim(o, "K"));
	opt(o, "aLog", aLog, "HV", F32);
	opt(o, "dtBias", dtBias, "HVK", F32);
	need(o, !use || aLog, "useGateInKernel without aLog");
	need(o, !use || !safe || (bound >= -5 && bound < 0), "lowerBound is %g, expected -5 <= lowerBound < 0", bound);
	number(o, "gate", use);
	number(o, "safe", safe);
	number(o, "bound", bound);
}

// The log gate of a row's channels, from what the client gave.
static double gate_at(Op *o, const Sizes *z, const double *g, int64_t h, int64_t at, int64_t d) {
	if (value(o, "gate") == 0)
		return g[at + d];
	double *bias = get(o, "dtBias");
	return kda_gate(g[at + d], get(o, "aLog")[h], bias ? bias[h * z->K + d] : 0, value(o, "safe") != 0, value(o, "bound"));
}

static int run_gate_cumsum(Op *o) {
	Sizes z = sizes(o);
	double *g = get(o, "g"), *y = get(o, "gkOut");
	FOR_CHUNKS(x, 0) {
		double *from = rows(&z, g, &x, z.K), *to = rows(&z, y, &x, z.K);
		for (int64_t d = 0; d < z.K; d++) {
			double s = 0;
			for (int64_t i = 0; i < x.n; i++)
				to[i * z.K + d] = (s += gate_at(o, &z, from, x.h, i * z.K, d)) / LN2;
		}
	}
	return OK;
}

EXPORT int aclnnKdaGateCumsumGetWorkspaceSize(T g, T aLog, T dtBias, L cuSeqlens, int64_t chunkSize, bool useGateInKernel, bool safeGate, double lowerBound,
                                              T gkOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnKdaGateCumsum", run_gate_cumsum, ND_ONLY, F32 | F16 | BF16);
	need(o, chunkSize == 32 || chunkSize == 64 || chunkSize == 128, "chunkSize is %ld, expected 32, 64 or 128", chunkSize);
	size(o, "C", chunkSize);
	arg(o, IN, 1, "g", g, "B HV T K", packed(g, 4, "B HV T K"), DATA);
	batch_of_one(o);
	size(o, "HK", dim(o, "HV"));
	need(o, dim(o, "K") <= 256, "K is %ld, expected at most 256", dim(o, "K"));
	gate_arguments(o, aLog, dtBias, useGateInKernel, safeGate, lowerBound);
	sequences(o, cuSeqlens, 0, chunkSize, WHOLE);
	arg(o, OUT, 1, "gkOut", gkOut, "B HV T K", packed(g, 4, "B HV T K"), F32);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnKdaGateCumsum)

// ---- forward: the composite and its first stage differ in which outputs they have ----

static double *output(Op *o, const char *name) {
	for (int i = 0; i < o->nargs; i++)
		if (!strcmp(o->args[i].name, name))
			return get(o, name);
	return 0;
}

static void put(double *to, const double *from, int64_t n) {
	if (to && from && to != from)
		memcpy(to, from, (size_t)n * sizeof *to);
}

static int run_kda(Op *o) {
	Sizes z = sizes(o);
	int64_t n = z.C * z.K, most = z.K * z.V, keys = z.B * z.HK * z.T;
	double *q = get(o, "q"), *k = get(o, "k"), *v = get(o, "v"), *g = get(o, "g"), *beta = get(o, "beta"), unit = value(o, "unit"), scale = value(o, "scale");
	double *qh = output(o, "qHat"), *kh = output(o, "kHat"), *qr = output(o, "qRstd"), *kr = output(o, "kRstd"), *eff = output(o, "betaEff");
	double *attn = output(o, "attnOut"), *last = output(o, "finalState"), *h0 = output(o, "initialState"), *vnew = output(o, "vNew"), *hout = output(o, "h");
	if (value(o, "norm") != 0) {
		double *qs = scratch(keys * z.K), *ks = scratch(keys * z.K);
		normalize(keys, z.K, value(o, "epsilon"), q, qs, qr);
		normalize(keys, z.K, value(o, "epsilon"), k, ks, kr);
		q = qs, k = ks;
	} else
		for (int64_t i = 0; qr && i < keys; i++)
			qr[i] = kr[i] = 1;
	put(qh, q, keys * z.K);
	put(kh, k, keys * z.K);
	double *bs = scratch(z.B * z.HV * z.T);
	for (int64_t i = 0; i < z.B * z.HV * z.T; i++)
		bs[i] = value(o, "sigmoid") != 0 ? sigmoid(beta[i]) * (value(o, "negative") != 0 ? 2 : 1) : beta[i];
	put(eff, bs, z.B * z.HV * z.T);

	double *G = scratch(n), *A = scratch(z.C * z.C), *X = scratch(z.C * z.C), *w = scratch(n), *u = scratch(z.C * z.V), *qe = scratch(n), *ke = scratch(n);
	double *kd = scratch(n), *row = scratch(z.C), *S = scratch(most), *vn = scratch(z.C * z.V), *decay = scratch(n), *token_state = scratch(most);
	for (int64_t i = 0; last && i < z.N * z.HV * most; i++) // of empty sequences
		last[i] = h0 ? h0[i] : 0;
	FOR_CHUNKS(x, 0) {
		double *qs = key_rows(&z, q, &x, z.K), *ks = key_rows(&z, k, &x, z.K), *vs = rows(&z, v, &x, z.V), *gs = rows(&z, g, &x, z.K), *b = rows(&z, bs, &x, 1);
		if (x.first) {
			memset(S, 0, (size_t)most * sizeof *S);
			put(S, border(&z, h0, &x), most);
			put(token_state, S, most);
		}
		for (int64_t d = 0; d < z.K; d++) {
			double s = 0;
			for (int64_t i = 0; i < x.n; i++) {
				double one = gate_at(o, &z, gs, x.h, i * z.K, d);
				decay[i * z.K + d] = exp(one);
				G[i * z.K + d] = s += one;
			}
		}
		double *gk = rows(&z, output(o, "gk"), &x, z.K);
		for (int64_t i = 0; gk && i < x.n * z.K; i++)
			gk[i] = G[i] / unit;
		keys_on_keys(&z, &x, ks, b, G, A);
		invert(x.n, z.C, A, X);
		double *aqk = rows(&z, output(o, "aqk"), &x, z.C), *akk = rows(&z, output(o, "akk"), &x, z.C);
		for (int64_t i = 0; i < x.n; i++) {
			for (int64_t j = 0; j < x.n; j++)
				row[j] = j <= i ? scale * decayed(qs + i * z.K, ks + j * z.K, G + i * z.K, G + j * z.K, z.K) : 0;
			put(aqk + i * z.C, row, i + 1); // above the diagonal and beyond the chunk unspecified
			put(akk ? akk + i * z.C : 0, X + i * z.C, x.n);
		}
		toward_start(x.n, z.K, qs, G, qe);
		toward_start(x.n, z.K, ks, G, ke);
		toward_end(x.n, z.K, ks, G, kd);
		apply(x.n, z.C, X, 0, b, ke, z.K, w);
		apply(x.n, z.C, X, 0, b, vs, z.V, u);
		put(rows(&z, output(o, "w"), &x, z.K), w, x.n * z.K);
		put(rows(&z, output(o, "u"), &x, z.V), u, x.n * z.V);
		put(rows(&z, output(o, "qg"), &x, z.K), qe, x.n * z.K);
		put(rows(&z, output(o, "kg"), &x, z.K), kd, x.n * z.K);
		double *scaled = rows(&z, output(o, "qgScaled"), &x, z.K);
		for (int64_t i = 0; scaled && i < x.n * z.K; i++)
			scaled[i] = scale * qe[i];
		if (hout || vnew) {
			put(state(&z, hout, &x), S, most);
			rows_on_state(x.n, z.K, z.V, w, S, vn);
			for (int64_t i = 0; i < x.n * z.V; i++)
				vn[i] = u[i] - vn[i];
			put(rows(&z, vnew, &x, z.V), vn, x.n * z.V);
			decay_state(z.K, z.V, G + (x.n - 1) * z.K, S);
			add_outer(x.n, z.K, z.V, 1, kd, vn, S);
		}
		if (attn) {
			tokens_forward(&(Head){x.n, z.K, z.V, qs, ks, vs, b, decay, scale}, token_state, rows(&z, attn, &x, z.V), 0);
			if (x.last)
				put(border(&z, last, &x), token_state, most);
		}
	}
	return OK;
}

static void kda_numbers(Op *o, double scale, double unit, int norm, double epsilon, int sigmoid_, int negative) {
	number(o, "scale", scale);
	number(o, "unit", unit);
	number(o, "norm", norm);
	number(o, "epsilon", epsilon);
	number(o, "sigmoid", sigmoid_);
	number(o, "negative", negative);
}

typedef struct {
	T q, k, v, g, beta, aLog, dtBias, initialState;
	L cu, indices;
	const char *layout;
	double scale;
	int64_t chunkSize;
	int safeGate;
	double lowerBound;
	int useGate, vFirst;
	T attnOut, finalState, gk, aqk, akk, w, u, qg, kg, vNew, h;
} Kda;

// What both versions of the composite have in common.
static Op *kda(const char *name, const Kda *a, int rules) {
	Op *o = op_begin(name, run_kda, ND_ONLY | LOGICAL, F16 | BF16);
	int order = layout_of(o, a->layout, 0), flat = order >= TND;
	const char *keys = LAID(order, "HK K"), *border_ = a->vFirst ? "N HV V K" : "N HV K V", *h = a->vFirst ? "B NT HV V K" : "B NT HV K V";
	chunk_size(o, a->chunkSize, 64, 128);
	arg(o, IN, 1, "q", a->q, "B HK T K", keys, DATA);
	arg(o, IN, 1, "k", a->k, "B HK T K", keys, DATA);
	arg(o, IN, 1, "v", a->v, "B HV T V", LAID(order, "HV V"), DATA);
	arg(o, IN, 1, "g", a->g, "B HV T K", LAID(order, "HV K"), F32 | BF16);
	arg(o, IN, 1, "beta", a->beta, "B HV T", LAID(order, "HV"), F32 | BF16);
	batch_of_one(o);
	grouped(o);
	int64_t K = dim(o, "K"), V = dim(o, "V");
	need(o, o->status || (K % 16 == 0 && K <= 256 && V % 16 == 0 && V <= 256), "K %ld and V %ld, expected multiples of 16 up to 256", K, V);
	need(o, o->status || dim(o, "HV") <= 128, "%ld value heads, expected at most 128", dim(o, "HV"));
	need(o, !flat || a->cu, "layout %s without cuSeqlens", a->layout);
	gate_arguments(o, a->aLog, a->dtBias, a->useGate, a->safeGate, a->lowerBound);
	sequences(o, a->cu, a->indices, a->chunkSize, rules);
	need(o, o->status || dim(o, "N") <= 1024, "%ld sequences, expected at most 1024", dim(o, "N"));
	arg(o, IN, 0, "initialState", a->initialState, "N HV K V", border_, F32);
	arg(o, OUT, 1, "attnOut", a->attnOut, "B HV T V", flat ? "T HV V" : "B T HV V", DATA);
	arg(o, OUT, 0, "finalState", a->finalState, "N HV K V", border_, F32);
	arg(o, OUT, 0, "gk", a->gk, "B HV T K", &"B HV T K"[2 * flat], F32);
	arg(o, OUT, 1, "aqk", a->aqk, "B HV T C", &"B HV T C"[2 * flat], DATA);
	arg(o, OUT, 1, "akk", a->akk, "B HV T C", &"B HV T C"[2 * flat], DATA);
	arg(o, OUT, 0, "w", a->w, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 0, "u", a->u, "B HV T V", &"B HV T V"[2 * flat], DATA);
	arg(o, OUT, 0, "qg", a->qg, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 0, "kg", a->kg, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 0, "vNew", a->vNew, "B HV T V", &"B HV T V"[2 * flat], DATA);
	arg(o, OUT, 0, "h", a->h, "B NT HV K V", h + 2 * flat, DATA);
	return o;
}

EXPORT int aclnnChunkKdaFwdGetWorkspaceSize(T q, T k, T v, T g, T beta, T aLog, T dtBias, T initialState, L cuSeqlens, L chunkIndices, const char *layout,
                                            double scale, int64_t chunkSize, bool safeGate, double lowerBound, bool useGateInKernel, bool stateVFirst, T attnOut,
                                            T finalState, T gk, T aqk, T akk, T w, T u, T qg, T kg, T vNew, T h, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = kda("aclnnChunkKdaFwd",
	            &(Kda){q, k, v, g, beta, aLog, dtBias, initialState, cuSeqlens, chunkIndices, layout, scale, chunkSize, safeGate, lowerBound, useGateInKernel,
	                   stateVFirst, attnOut, finalState, gk, aqk, akk, w, u, qg, kg, vNew, h},
	            BOTH | WHOLE);
	kda_numbers(o, scale, LN2, 0, 0, 0, 0);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaFwd)

#if FLA >= 2

EXPORT int aclnnChunkKdaFwdV2GetWorkspaceSize(T q, T k, T v, T g, T beta, T aLog, T dtBias, T initialState, L cuSeqlens, L chunkIndices, const char *layout,
                                              double scale, int64_t chunkSize, bool safeGate, double lowerBound, bool useGateInKernel, bool stateVFirst,
                                              double epsilon, bool useQkL2norm, bool useBetaSigmoid, bool allowNegEigval, bool useExp2, T attnOut, T finalState,
                                              T gk, T aqk, T akk, T w, T u, T qg, T kg, T vNew, T h, T qHat, T kHat, T qRstd, T kRstd, T betaEff,
                                              uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = kda("aclnnChunkKdaFwdV2",
	            &(Kda){q, k, v, g, beta, aLog, dtBias, initialState, cuSeqlens, chunkIndices, layout, scale, chunkSize, safeGate, lowerBound, useGateInKernel,
	                   stateVFirst, attnOut, finalState, gk, aqk, akk, w, u, qg, kg, vNew, h},
	            BOTH | WHOLE | STRICT);
	int flat = o->status ? 0 : layout_of(o, layout, 0) >= TND;
	arg(o, OUT, 0, "qHat", qHat, "B HK T K", &"B HK T K"[2 * flat], DATA);
	arg(o, OUT, 0, "kHat", kHat, "B HK T K", &"B HK T K"[2 * flat], DATA);
	arg(o, OUT, 0, "qRstd", qRstd, "B HK T", &"B HK T"[2 * flat], F32);
	arg(o, OUT, 0, "kRstd", kRstd, "B HK T", &"B HK T"[2 * flat], F32);
	arg(o, OUT, 0, "betaEff", betaEff, "B HV T", &"B HV T"[2 * flat], F32);
	need(o, !qHat == !kHat && !qHat == !qRstd && !qHat == !kRstd, "qHat, kHat, qRstd and kRstd come together");
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	kda_numbers(o, scale, useExp2 ? LN2 : 1, useQkL2norm, epsilon, useBetaSigmoid, allowNegEigval);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaFwdV2)

EXPORT int aclnnChunkKdaFwdPrepareGetWorkspaceSize(T q, T k, T v, T g, T beta, T aLog, T dtBias, L cuSeqlens, L chunkIndices, const char *layout, double scale,
                                                   int64_t chunkSize, double epsilon, bool useQkL2norm, bool useGateInKernel, bool useBetaSigmoid,
                                                   bool allowNegEigval, bool safeGate, double lowerBound, bool useExp2, T gk, T aqk, T akk, T w, T u, T qg, T kg,
                                                   T qgScaled, T qHat, T kHat, T qRstd, T kRstd, T betaEff, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkKdaFwdPrepare", run_kda, ND_ONLY | LOGICAL, BF16);
	int order = layout_of(o, layout, 0), flat = order >= TND;
	int hats = !!qHat + !!kHat + !!qRstd + !!kRstd + !!betaEff;
	need(o, gk && aqk && w && u && kg && qgScaled && (akk ? hats == 0 || hats == 5 : hats == 0) && (!qg || hats == 5),
	     "the outputs given are none of the patterns none, forward, recompute and save");
	chunk_size(o, chunkSize, 64, 64);
	arg(o, IN, 1, "q", q, "B HK T K", LAID(order, "HK K"), DATA);
	arg(o, IN, 1, "k", k, "B HK T K", LAID(order, "HK K"), DATA);
	arg(o, IN, 1, "v", v, "B HV T V", LAID(order, "HV V"), DATA);
	arg(o, IN, 1, "g", g, "B HV T K", LAID(order, "HV K"), F32 | BF16);
	arg(o, IN, 1, "beta", beta, "B HV T", LAID(order, "HV"), F32 | BF16);
	batch_of_one(o);
	grouped(o);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	need(o, !flat || cuSeqlens, "layout %s without cuSeqlens", layout);
	gate_arguments(o, aLog, dtBias, useGateInKernel, safeGate, lowerBound);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH | WHOLE);
	arg(o, OUT, 1, "gk", gk, "B HV T K", &"B HV T K"[2 * flat], F32);
	arg(o, OUT, 1, "aqk", aqk, "B HV T C", &"B HV T C"[2 * flat], DATA);
	arg(o, OUT, 0, "akk", akk, "B HV T C", &"B HV T C"[2 * flat], DATA);
	arg(o, OUT, 1, "w", w, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 1, "u", u, "B HV T V", &"B HV T V"[2 * flat], DATA);
	arg(o, OUT, 0, "qg", qg, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 1, "kg", kg, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 1, "qgScaled", qgScaled, "B HV T K", &"B HV T K"[2 * flat], DATA);
	arg(o, OUT, 0, "qHat", qHat, "B HK T K", &"B HK T K"[2 * flat], DATA);
	arg(o, OUT, 0, "kHat", kHat, "B HK T K", &"B HK T K"[2 * flat], DATA);
	arg(o, OUT, 0, "qRstd", qRstd, "B HK T", &"B HK T"[2 * flat], F32);
	arg(o, OUT, 0, "kRstd", kRstd, "B HK T", &"B HK T"[2 * flat], F32);
	arg(o, OUT, 0, "betaEff", betaEff, "B HV T", &"B HV T"[2 * flat], F32);
	kda_numbers(o, scale, useExp2 ? LN2 : 1, useQkL2norm, epsilon, useBetaSigmoid, allowNegEigval);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaFwdPrepare)

static int run_finalize(Op *o) {
	Sizes z = sizes(o);
	FOR_CHUNKS(x, 0) {
		double *to = rows(&z, get(o, "attnOut"), &x, z.V), *vs = rows(&z, get(o, "vNew"), &x, z.V), *P = rows(&z, get(o, "aqk"), &x, z.C);
		rows_on_state(x.n, z.K, z.V, rows(&z, get(o, "qgScaled"), &x, z.K), state(&z, get(o, "h"), &x), to);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j <= i; j++)
				for (int64_t d = 0; d < z.V; d++)
					to[i * z.V + d] += P[i * z.C + j] * vs[j * z.V + d];
	}
	return OK;
}

EXPORT int aclnnChunkKdaFwdFinalizeGetWorkspaceSize(T qgScaled, T aqk, T vNew, T h, L cuSeqlens, L chunkIndices, const char *outputLayout, bool stateVFirst,
                                                    T attnOut, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkKdaFwdFinalize", run_finalize, ND_ONLY | LOGICAL, BF16);
	int order = layout_of(o, outputLayout, 0);
	size(o, "C", 64);
	arg(o, IN, 1, "qgScaled", qgScaled, "B HV T K", packed(qgScaled, 4, "B HV T K"), DATA);
	arg(o, IN, 1, "aqk", aqk, "B HV T C", packed(qgScaled, 4, "B HV T C"), DATA);
	arg(o, IN, 1, "vNew", vNew, "B HV T V", packed(qgScaled, 4, "B HV T V"), DATA);
	batch_of_one(o);
	size(o, "HK", dim(o, "HV"));
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	sequences(o, cuSeqlens, chunkIndices, 64, BOTH);
	arg(o, IN, 1, "h", h, "B NT HV K V", stateVFirst ? "B NT HV V K" : "B NT HV K V", DATA);
	arg(o, OUT, 1, "attnOut", attnOut, "B HV T V", LAID(order, "HV V"), DATA);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaFwdFinalize)

// ---- backward ----

static int run_bwd_prepare(Op *o) {
	Sizes z = sizes(o);
	FOR_CHUNKS(x, 0) {
		double *P = rows(&z, get(o, "aqk"), &x, z.C), *vs = rows(&z, get(o, "vNew"), &x, z.V), *go = rows(&z, get(o, "dO"), &x, z.V);
		double *dP = rows(&z, get(o, "dAqk"), &x, z.C), *dv = rows(&z, get(o, "dv"), &x, z.V);
		rows_on_state_back(x.n, z.K, z.V, go, state(&z, get(o, "h"), &x), rows(&z, get(o, "dqRaw"), &x, z.K));
		memset(dv, 0, (size_t)(x.n * z.V) * sizeof *dv);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j < x.n; j++) {
				dP[i * z.C + j] = j <= i ? value(o, "scale") * dot(go + i * z.V, vs + j * z.V, z.V) : 0;
				for (int64_t d = 0; j <= i && d < z.V; d++)
					dv[j * z.V + d] += P[i * z.C + j] * go[i * z.V + d];
			}
	}
	return OK;
}

EXPORT int aclnnChunkKdaBwdPrepareGetWorkspaceSize(T aqk, T vNew, T dO, T h, L cuSeqlens, L chunkIndices, double scale, int64_t chunkSize, bool stateVFirst,
                                                   T dAqk, T dv, T dqRaw, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkKdaBwdPrepare", run_bwd_prepare, ND_ONLY | LOGICAL | CONTIGUOUS, BF16);
	chunk_size(o, chunkSize, 64, 64);
	arg(o, IN, 1, "aqk", aqk, "B HV T C", packed(vNew, 4, "B HV T C"), DATA);
	arg(o, IN, 1, "vNew", vNew, "B HV T V", packed(vNew, 4, "B HV T V"), DATA);
	arg(o, IN, 1, "dO", dO, "B HV T V", packed(vNew, 4, "B HV T V"), DATA);
	batch_of_one(o);
	size(o, "HK", dim(o, "HV"));
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	need(o, o->status || dim(o, "N") <= 1024 || !cuSeqlens, "%ld sequences, expected at most 1024", dim(o, "N"));
	arg(o, IN, 1, "h", h, "B NT HV K V", packed(h, 5, stateVFirst ? "B NT HV V K" : "B NT HV K V"), DATA);
	need(o, o->status || (h->rank == 4) == (vNew->rank == 3), "h has rank %d, vNew rank %d", o->status ? 0 : h->rank, o->status ? 0 : vNew->rank);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	arg(o, OUT, 1, "dAqk", dAqk, "B HV T C", packed(vNew, 4, "B HV T C"), F32);
	arg(o, OUT, 1, "dv", dv, "B HV T V", packed(vNew, 4, "B HV T V"), DATA);
	arg(o, OUT, 1, "dqRaw", dqRaw, "B HV T K", packed(vNew, 4, "B HV T K"), F32);
	only_950(o, "");
	number(o, "scale", scale);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaBwdPrepare)

static int run_bwd_finalize(Op *o) {
	Sizes z = sizes(o);
	int64_t n = z.C * z.K, all = z.B * z.HK * z.T * z.K;
	double scale = value(o, "scale"), unit = value(o, "unit");
	double *G = scratch(n), *ke = scratch(n), *w = scratch(n), *u = scratch(z.C * z.V), *dw = scratch(n), *Tu = scratch(z.C * z.V), *Tw = scratch(n), *db = scratch(n);
	double *dqs = scratch(n), *dks = scratch(n), *inter = scratch(n), *r = scratch(n), *column = scratch(n), *sum_q = scratch(all), *sum_k = scratch(all);
	double *dA_log = get(o, "dALog"), *bias = get(o, "dtBias"), *dbias = get(o, "dDtBias"), *hq = get(o, "q"), *hk = get(o, "k");
	memset(dA_log, 0, (size_t)z.HV * sizeof *dA_log);
	memset(dbias, 0, (size_t)(z.HV * z.K) * sizeof *dbias);
	FOR_CHUNKS(x, 0) {
		double *q = key_rows(&z, hq, &x, z.K), *k = key_rows(&z, hk, &x, z.K), *v = rows(&z, get(o, "v"), &x, z.V), *beta = rows(&z, get(o, "beta"), &x, 1);
		double *X = rows(&z, get(o, "akk"), &x, z.C), *vn = rows(&z, get(o, "vNew"), &x, z.V), *S = state(&z, get(o, "h"), &x), *D = state(&z, get(o, "dh"), &x);
		double *du = rows(&z, get(o, "dvScan"), &x, z.V), *dP = rows(&z, get(o, "dAqk"), &x, z.C), *dq_raw = rows(&z, get(o, "dqRaw"), &x, z.K);
		double *dv = rows(&z, get(o, "dv"), &x, z.V), *dbeta = rows(&z, get(o, "dBeta"), &x, 1), *dg = rows(&z, get(o, "dG"), &x, z.K);
		gates(&z, 0, 0, get(o, "gk"), unit, &x, G);
		toward_start(x.n, z.K, k, G, ke);
		rows_on_state_back(x.n, z.K, z.V, du, S, dw);
		for (int64_t i = 0; i < x.n * z.K; i++)
			dw[i] = -dw[i];
		apply(x.n, z.C, X, 0, beta, v, z.V, u);
		apply(x.n, z.C, X, 0, beta, ke, z.K, w);
		apply(x.n, z.C, X, 1, 0, du, z.V, Tu);
		apply(x.n, z.C, X, 1, 0, dw, z.K, Tw);
		rows_on_state_back(x.n, z.K, z.V, vn, D, inter);
		memset(r, 0, (size_t)n * sizeof *r);
		memset(column, 0, (size_t)n * sizeof *column);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t d = 0; d < z.K; d++)
				dqs[i * z.K + d] = scale * dq_raw[i * z.K + d] * exp(G[i * z.K + d]), inter[i * z.K + d] *= exp(G[(x.n - 1) * z.K + d] - G[i * z.K + d]);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j <= i; j++) {
				double dA = j < i ? -dot(Tu + i * z.V, u + j * z.V, z.V) - dot(Tw + i * z.K, w + j * z.K, z.K) : 0, p = dP[i * z.C + j];
				for (int64_t d = 0; d < z.K; d++) {
					double f = exp(G[i * z.K + d] - G[j * z.K + d]);
					dqs[i * z.K + d] += p * k[j * z.K + d] * f;
					r[i * z.K + d] += dA * k[j * z.K + d] * f;
					column[j * z.K + d] += (p * q[i * z.K + d] + dA * beta[i] * k[i * z.K + d]) * f;
				}
			}
		for (int64_t d = 0; d < z.K; d++) { // the gradient of the cumulative gate
			double end = exp(G[(x.n - 1) * z.K + d]) * dot(S + d * z.V, D + d * z.V, z.V);
			for (int64_t i = 0; i < x.n; i++) {
				int64_t e = i * z.K + d;
				double wy = beta[i] * exp(G[e]) * Tw[e];
				dks[e] = inter[e] + wy + beta[i] * r[e] + column[e];
				db[e] = q[e] * dqs[e] + k[e] * (wy + beta[i] * r[e] - inter[e] - column[e]);
				end += k[e] * inter[e];
			}
			db[(x.n - 1) * z.K + d] += end;
		}
		for (int64_t i = 0; i < x.n; i++) {
			dbeta[i] = dot(Tu + i * z.V, v + i * z.V, z.V) + dot(Tw + i * z.K, ke + i * z.K, z.K) + dot(r + i * z.K, k + i * z.K, z.K);
			for (int64_t d = 0; d < z.V; d++)
				dv[i * z.V + d] = beta[i] * Tu[i * z.V + d];
		}
		double *raw = rows(&z, get(o, "rawG"), &x, z.K);
		for (int64_t d = 0; d < z.K; d++) {
			double s = 0;
			for (int64_t i = x.n - 1; i >= 0; i--) {
				s += db[i * z.K + d];
				if (value(o, "gate") == 0)
					dg[i * z.K + d] = s;
				else {
					double dx = kda_gate_back(raw[i * z.K + d], get(o, "aLog")[x.h], bias[x.h * z.K + d], value(o, "safe") != 0, value(o, "bound"), s, &dA_log[x.h]);
					dg[i * z.K + d] = dx, dbias[x.h * z.K + d] += dx;
				}
			}
		}
		double *to_q = key_rows(&z, sum_q, &x, z.K), *to_k = key_rows(&z, sum_k, &x, z.K);
		for (int64_t i = 0; i < x.n * z.K; i++)
			to_q[i] += dqs[i], to_k[i] += dks[i];
		if (x.h % z.G < z.G - 1)
			continue;
		double *qr = key_rows(&z, get(o, "qRstd"), &x, 1), *kr = key_rows(&z, get(o, "kRstd"), &x, 1);
		if (qr) {
			normalize_back(x.n, z.K, q, qr, to_q);
			normalize_back(x.n, z.K, k, kr, to_k);
		}
		put(key_rows(&z, get(o, "dq"), &x, z.K), to_q, x.n * z.K);
		put(key_rows(&z, get(o, "dk"), &x, z.K), to_k, x.n * z.K);
	}
	return OK;
}

EXPORT int aclnnChunkKdaBwdFinalizeGetWorkspaceSize(T q, T k, T v, T gk, T rawG, T beta, T aLog, T dtBias, T akk, T vNew, T h, T dh, T dvScan, T dAqk, T dqRaw,
                                                    T qRstd, T kRstd, L cuSeqlens, L chunkIndices, double scale, double lowerBound, int64_t chunkSize,
                                                    bool safeGate, bool useGateInKernel, bool useExp2, bool stateVFirst, T dq, T dk, T dv, T dBeta, T dG, T dALog,
                                                    T dDtBias, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnChunkKdaBwdFinalize", run_bwd_finalize, ND_ONLY | LOGICAL | CONTIGUOUS, BF16);
	o->state_types = F32 | BF16;
	chunk_size(o, chunkSize, 64, 64);
#define HEADS(name, t, letters, types) arg(o, IN, 1, name, t, letters, packed(q, 4, letters), types)
	HEADS("q", q, "B HK T K", DATA);
	HEADS("k", k, "B HK T K", DATA);
	HEADS("v", v, "B HV T V", DATA);
	HEADS("gk", gk, "B HV T K", F32);
	HEADS("rawG", rawG, "B HV T K", F32);
	HEADS("beta", beta, "B HV T", STATE);
	batch_of_one(o);
	grouped(o);
	if (!o->status)
		size(o, "HVK", dim(o, "HV") * dim(o, "K"));
	in(o, "aLog", aLog, "HV", F32 | BF16);
	const char *bias = dtBias && fake_is(dtBias, TENSOR) && dtBias->rank == 2 ? "HV K" : "HVK";
	in(o, "dtBias", dtBias, bias, F32);
	HEADS("akk", akk, "B HV T C", DATA);
	HEADS("vNew", vNew, "B HV T V", DATA);
	sequences(o, cuSeqlens, chunkIndices, chunkSize, BOTH);
	arg(o, IN, 1, "h", h, "B NT HV K V", packed(h, 5, stateVFirst ? "B NT HV V K" : "B NT HV K V"), DATA);
	arg(o, IN, 1, "dh", dh, "B NT HV K V", packed(dh, 5, stateVFirst ? "B NT HV V K" : "B NT HV K V"), DATA);
	HEADS("dvScan", dvScan, "B HV T V", DATA);
	HEADS("dAqk", dAqk, "B HV T C", F32);
	HEADS("dqRaw", dqRaw, "B HV T K", F32);
	arg(o, IN, 0, "qRstd", qRstd, "B HK T", packed(q, 4, "B HK T"), F32);
	arg(o, IN, 0, "kRstd", kRstd, "B HK T", packed(q, 4, "B HK T"), F32);
	need(o, !qRstd == !kRstd, "qRstd and kRstd come together");
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	need(o, !useGateInKernel || !safeGate || (lowerBound >= -5 && lowerBound < 0), "lowerBound is %g, expected -5 <= lowerBound < 0", lowerBound);
#undef HEADS
#define HEADS(name, t, letters, types) arg(o, OUT, 1, name, t, letters, packed(q, 4, letters), types)
	HEADS("dq", dq, "B HK T K", DATA);
	HEADS("dk", dk, "B HK T K", DATA);
	HEADS("dv", dv, "B HV T V", DATA);
	HEADS("dBeta", dBeta, "B HV T", STATE);
	HEADS("dG", dG, "B HV T K", F32);
#undef HEADS
	out(o, "dALog", dALog, "HV", F32);
	out(o, "dDtBias", dDtBias, bias, F32);
	only_950(o, "");
	number(o, "scale", scale);
	number(o, "unit", useExp2 ? LN2 : 1);
	number(o, "gate", useGateInKernel);
	number(o, "safe", safeGate);
	number(o, "bound", lowerBound);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnChunkKdaBwdFinalize)

#endif
