// fla-npu's decode operators, short convolution and context parallelism. libcust_opapi.
#include "fla.h"
#include "recurrent.h"

EXPORT int aclnnRecurrentGatedDeltaRuleGetWorkspaceSize(T query, T key, T value_, T beta, T stateRef, T actualSeqLengths, T ssmStateIndices, T g, T gk,
                                                        T numAcceptedTokens, float scaleValue, T result, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	return recurrent("aclnnRecurrentGatedDeltaRule", 1, query, key, value_, beta, stateRef, actualSeqLengths, ssmStateIndices, g, gk, numAcceptedTokens, scaleValue,
	                 result, workspaceSize, executor);
}
LAUNCH(aclnnRecurrentGatedDeltaRule)

// Lengths, slots and accepted counts are on the device: what is wrong in them ends the core without a word.
static int run_recurrent_kda(Op *o) {
	Sizes z = sizes(o);
	int64_t most = z.K * z.V, slots = dim(o, "slots"), N = z.N;
	double *q = get(o, "query"), *k = get(o, "key"), *v = get(o, "value"), *gate = get(o, "gate"), *beta = get(o, "beta"), *pool = get(o, "initialStateRef");
	double *cu = get(o, "cuSeqlens"), *slot = get(o, "ssmStateIndices"), *accepted = get(o, "numAcceptedTokens"), *aLog = get(o, "aLog"), *bias = get(o, "dtBias");
	double *result = get(o, "attnOut"), *final = get(o, "finalState");
	int inplace = value(o, "inplace") != 0;
	double *S = scratch(most), *decay = scratch(z.K), *qs = scratch(z.K), *ks = scratch(z.K), *next = scratch(slots * z.HV * most);
	memcpy(next, pool, (size_t)(slots * z.HV * most) * sizeof *next);
	for (int64_t s = 0; s < N; s++) {
		int64_t b = cu ? 0 : s, first = cu ? (int64_t)cu[s] : 0, end = cu ? (int64_t)cu[s + 1] : z.T, n = end - first;
		int64_t from = accepted ? (int64_t)accepted[s] - 1 : 0, width = slot ? (int64_t)value(o, "columns") : 0;
#define SLOT(t) (int64_t)(!slot ? s : width ? slot[s * width + (t)] : slot[first + (t)])
		int right = first >= 0 && n >= 0 && n <= 8 && end <= z.T && (!n || (from >= 0 && from < n)) && (!width || n <= width);
		for (int64_t t = 0; right && t < n; t++)
			right = SLOT(t) >= 0 && SLOT(t) < slots;
		if (!right)
			break;
		for (int64_t h = 0; n && h < z.HV; h++) {
			memcpy(S, next + (SLOT(from) * z.HV + h) * most, (size_t)most * sizeof *S);
			for (int64_t t = 0; t < n; t++) {
				int64_t kh = ((b * z.HK + h / z.G) * z.T + first + t) * z.K, vh = (b * z.HV + h) * z.T + first + t;
				double rq = value(o, "norm") != 0 ? 1 / sqrt(dot(q + kh, q + kh, z.K)) : 1, rk = value(o, "norm") != 0 ? 1 / sqrt(dot(k + kh, k + kh, z.K)) : 1;
				double write = value(o, "sigmoid") != 0 ? sigmoid(beta[vh]) * (value(o, "negative") != 0 ? 2 : 1) : beta[vh];
				for (int64_t d = 0; d < z.K; d++) {
					double x = gate[vh * z.K + d];
					qs[d] = q[kh + d] * rq, ks[d] = k[kh + d] * rk;
					decay[d] = exp(value(o, "useGate") != 0 ? kda_gate(x, aLog[h], bias ? bias[h * z.K + d] : 0, value(o, "safe") != 0, value(o, "bound")) : x);
				}
				tokens_forward(&(Head){1, z.K, z.V, qs, ks, v + vh * z.V, &write, decay, value(o, "scale")}, S, result + vh * z.V, 0);
				memcpy(next + (SLOT(t) * z.HV + h) * most, S, (size_t)most * sizeof *S);
			}
		}
	}
	if (final)
		memcpy(final, next, (size_t)(slots * z.HV * most) * sizeof *next);
	if (inplace)
		memcpy(pool, next, (size_t)(slots * z.HV * most) * sizeof *next);
	return OK;
}

EXPORT int aclnnRecurrentKdaGetWorkspaceSize(T query, T key, T value_, T gate, T beta, T initialStateRef, T cuSeqlens, T ssmStateIndices, T aLog, T dtBias,
                                             T numAcceptedTokens, const char *layout, double scale, bool outputFinalState, bool inplaceFinalState,
                                             bool useQkL2norm, bool useGateInKernel, bool useBetaSigmoid, bool allowNegEigval, bool safeGate, double lowerBound,
                                             bool stateVFirst, T attnOut, T finalState, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnRecurrentKda", run_recurrent_kda, 0, BF16);
	o->state_types = F32 | BF16 | F16;
	int order = layout ? layout_of(o, layout, 0) : BSND;
	need(o, order == BSND || order == TND, "layout is \"%s\", expected BSND or TND", layout);
	const char *states = stateVFirst ? "slots HV V K" : "slots HV K V";
	arg(o, IN, 1, "query", query, "B HK T K", LAID(order, "HK K"), DATA);
	arg(o, IN, 1, "key", key, "B HK T K", LAID(order, "HK K"), DATA);
	arg(o, IN, 1, "value", value_, "B HV T V", LAID(order, "HV V"), DATA);
	arg(o, IN, 1, "gate", gate, "B HV T K", LAID(order, "HV K"), F32 | BF16 | F16);
	arg(o, IN, 1, "beta", beta, "B HV T", LAID(order, "HV"), F32 | BF16 | F16);
	if (!o->status && order == TND)
		size(o, "B", 1);
	grouped(o);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128, 256);
	need(o, order != TND || cuSeqlens, "layout TND without cuSeqlens");
	arg(o, IN_OUT, 1, "initialStateRef", initialStateRef, "slots HV K V", states, STATE);
	opt(o, "cuSeqlens", cuSeqlens, "N1", I32 | I64);
	if (!o->status)
		size(o, "N", cuSeqlens ? dim(o, "N1") - 1 : dim(o, "B"));
	need(o, o->status || !cuSeqlens || dim(o, "B") == 1, "cuSeqlens with a batch of %ld", dim(o, "B"));
	int table = ssmStateIndices && fake_is(ssmStateIndices, TENSOR) && ssmStateIndices->rank == 2;
	opt(o, "ssmStateIndices", ssmStateIndices, table ? "N columns" : "tokens", I32 | I64);
	need(o, o->status || !ssmStateIndices || table || (cuSeqlens && dim(o, "tokens") >= dim(o, "T")), "ssmStateIndices has %ld entries", dim(o, "tokens"));
	need(o, o->status || ssmStateIndices || dim(o, "slots") == dim(o, "N"), "%ld states for %ld sequences without ssmStateIndices", dim(o, "slots"), dim(o, "N"));
	opt(o, "aLog", aLog, "HV", F32);
	if (!o->status)
		size(o, "HVK", dim(o, "HV") * dim(o, "K"));
	opt(o, "dtBias", dtBias, "HVK", F32);
	need(o, !useGateInKernel || aLog, "useGateInKernel without aLog");
	need(o, !useGateInKernel || !safeGate || (lowerBound >= -5 && lowerBound < 0), "lowerBound is %g", lowerBound);
	opt(o, "numAcceptedTokens", numAcceptedTokens, "N", I32 | I64);
	need(o, !numAcceptedTokens || ssmStateIndices, "numAcceptedTokens without ssmStateIndices");
	arg(o, OUT, 1, "attnOut", attnOut, "B HV T V", LAID(order, "HV V"), DATA);
	arg(o, OUT, outputFinalState, "finalState", finalState, "slots HV K V", states, STATE);
	need(o, o->status || !inplaceFinalState || !finalState || finalState->data == initialStateRef->data, "finalState is another tensor than initialStateRef");
	number(o, "scale", scale);
	number(o, "inplace", inplaceFinalState);
	number(o, "norm", useQkL2norm);
	number(o, "useGate", useGateInKernel);
	number(o, "sigmoid", useBetaSigmoid);
	number(o, "negative", allowNegEigval);
	number(o, "safe", safeGate);
	number(o, "bound", lowerBound);
	number(o, "columns", table ? (double)dim(o, "columns") : 0);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnRecurrentKda)

// ---- short convolution ----

static double activated(double x, int mode) {
	return mode ? x * sigmoid(x) : x;
}

// z_t = bias + sum_i w_i x_(t-W+1+i); rows before the first come from the state, whose last row is the newest. D channels.
static int run_conv(Op *o) {
	int64_t W = dim(o, "W"), D = dim(o, "D"), tokens = dim(o, "T"), states = dim(o, "rows"), heads = (int64_t)value(o, "heads");
	double *x = get(o, "x"), *w = get(o, "weight"), *bias = get(o, "bias"), *pool = get(o, "convStates"), *y = get(o, "y"), *row = scratch(D);
	for (int s = 0; s < o->nsequences; s++) {
		const Sequence *q = &o->sequences[s];
		int64_t slot = o->list ? o->list[2 * s] : s;
		int starts = o->list ? (int)o->list[2 * s + 1] : 1;
		double *from = x + (q->b * tokens + q->start) * D, *state_ = pool && slot >= 0 ? pool + slot * states * D : 0;
		for (int64_t t = 0; t < q->n && slot >= 0; t++) {
			for (int64_t d = 0; d < D; d++) {
				double z = bias ? bias[d] : 0;
				for (int64_t i = 0; i < W; i++) {
					int64_t at = t - W + 1 + i;
					z += w[i * D + d] * (at >= 0 ? from[at * D + d] : state_ && starts ? state_[(states + at) * D + d] : 0);
				}
				row[d] = activated(z, (int)value(o, "activation"));
			}
			for (int64_t d = 0; d < D; d++) {
				int64_t width = heads ? D / heads : D, h = d / width, at = q->b * tokens + q->start + t;
				y[heads ? ((q->b * heads + h) * tokens + q->start + t) * width + d % width : at * D + d] = row[d];
			}
		}
		if (!state_)
			continue;
		double *next = scratch(states * D);
		for (int64_t i = 0; i < states; i++) {
			int64_t at = q->n - states + i;
			memcpy(next + i * D, at >= 0 ? from + at * D : state_ + (states + at) * D, (size_t)D * sizeof *next);
			if (at < 0 && !starts)
				memset(next + i * D, 0, (size_t)D * sizeof *next);
		}
		memcpy(state_, next, (size_t)(states * D) * sizeof *next);
	}
	return OK;
}

static int64_t item_of(L list, int64_t i, int64_t otherwise) {
	return list ? list->v[i] : otherwise;
}

static int conv(T x, T weight, T bias, T convStates, int states_needed, L starts, L cache, L modes, L accepted, int activation, int64_t padSlot, int64_t runMode,
                int64_t headNum, T y, uint64_t *workspaceSize, Executor **executor) {
	Op *o = op_begin("aclnnCausalConv1d", run_conv, 0, F16 | BF16);
	int flat = x && fake_is(x, TENSOR) && x->rank == 2;
	arg(o, IN, 1, "x", x, "B T D", flat ? "T D" : "B T D", DATA);
	if (!o->status && flat)
		size(o, "B", 1);
	in(o, "weight", weight, "W D", DATA);
	opt(o, "bias", bias, "D", DATA);
	arg(o, IN_OUT, states_needed, "convStates", convStates, "slots rows D", 0, DATA);
	ONE_OF(o, "W", 2, 3, 4);
	need(o, o->status || dim(o, "D") % 16 == 0, "%ld channels, expected a multiple of 16", dim(o, "D"));
	need(o, o->status || !convStates || dim(o, "rows") == dim(o, "W") - 1, "states of %ld rows, this fake has them with W-1", dim(o, "rows"));
	need(o, runMode == 0 || runMode == 1, "runMode is %ld, expected 0 or 1", runMode);
	need(o, runMode == 0 || convStates, "runMode 1 without convStates");
	need(o, !accepted, "numAcceptedTokens is not part of this fake");
	need(o, headNum >= 0 && (!headNum || (runMode == 0 && (o->status || dim(o, "D") % headNum == 0))), "headNum is %ld", headNum);
	need(o, !flat || starts || o->status || runMode == 1, "x of rank 2 without queryStartLoc");
	sequences(o, starts, 0, 1, 0);
	int64_t N = dim(o, "N");
	need(o, o->status || (!cache || (fake_is(cache, INT_ARRAY) && cache->n == N)), "cacheIndices does not have %ld numbers", N);
	need(o, o->status || (!modes || (fake_is(modes, INT_ARRAY) && modes->n == N)), "initialStateMode does not have %ld numbers", N);
	need(o, o->status || cache || !convStates || dim(o, "slots") >= N, "%ld states for %ld sequences", dim(o, "slots"), N);
	if (!o->status) {
		o->list = calloc((size_t)N, 2 * sizeof *o->list);
		for (int64_t i = 0; i < N && !o->status; i++) {
			int64_t slot = item_of(cache, i, i);
			o->list[2 * i] = slot == padSlot ? -1 : slot;
			o->list[2 * i + 1] = runMode == 1 || item_of(modes, i, 0);
			need(o, slot == padSlot || !convStates || (slot >= 0 && slot < dim(o, "slots")), "cacheIndices[%ld] is %ld", i, slot);
		}
	}
	if (headNum) {
		size(o, "heads", headNum);
		size(o, "width", o->status ? 0 : dim(o, "D") / headNum);
		arg(o, OUT, 1, "y", y, "B heads T width", flat ? "heads T width" : "B heads T width", DATA);
	} else
		arg(o, OUT, 1, "y", y, "B T D", flat ? "T D" : "B T D", DATA);
	number(o, "activation", activation);
	number(o, "heads", (double)headNum);
	return op_end(o, workspaceSize, executor);
}

#if FLA == 1
EXPORT int aclnnCausalConv1dGetWorkspaceSize(T x, T weight, T bias, T convStates, L queryStartLoc, L cacheIndices, L initialStateMode, L numAcceptedTokens,
                                             int64_t activationMode, int64_t padSlotId, int64_t runMode, int64_t headNum, T y, uint64_t *workspaceSize,
                                             Executor **executor) {
	ENTER();
	if (activationMode < 0 || activationMode > 1)
		return fake_error(NN_ARGUMENT, "aclnnCausalConv1d: activationMode is %ld, expected 0 or 1", activationMode);
	return conv(x, weight, bias, convStates, 1, queryStartLoc, cacheIndices, initialStateMode, numAcceptedTokens, (int)activationMode, padSlotId, runMode, headNum, y,
	            workspaceSize, executor);
}
#else
EXPORT int aclnnCausalConv1dGetWorkspaceSize(T x, T weight, T bias, T convStates, T queryStartLoc, T cacheIndices, T hasInitialState, T numAccepted,
                                             L queryStartLocHost, L cacheIndicesHost, L hasInitialStateHost, L numAcceptedHost, const char *activation,
                                             int64_t padSlotId, int64_t nullBlockId, int64_t runMode, int64_t headNum, int64_t maxQueryLen, T y,
                                             uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	(void)nullBlockId, (void)maxQueryLen;
	int silu = activation && (!strcmp(activation, "silu") || !strcmp(activation, "swish"));
	if (!silu && (!activation || strcmp(activation, "none")))
		return fake_error(NN_ARGUMENT, "aclnnCausalConv1d: activation is \"%s\", expected none, silu or swish", activation ? activation : "(null)");
	if (queryStartLoc || cacheIndices || hasInitialState || numAccepted)
		return fake_error(NN_ARGUMENT, "aclnnCausalConv1d: this fake has the lists in host memory only");
	return conv(x, weight, bias, convStates, 0, queryStartLocHost, cacheIndicesHost, hasInitialStateHost, numAcceptedHost, silu, padSlotId, runMode, headNum, y,
	            workspaceSize, executor);
}
#endif
LAUNCH(aclnnCausalConv1d)

// The state has W rows, of which the last W-1 are the history.
static int run_conv_bwd(Op *o) {
	int64_t W = dim(o, "W"), D = dim(o, "D"), tokens = dim(o, "T");
	double *x = get(o, "x"), *pre = get(o, "y"), *w = get(o, "weight"), *dy = get(o, "dy"), *h0 = get(o, "initialState"), *dht = get(o, "dht");
	double *dx = get(o, "dx"), *dw = get(o, "dw"), *db = get(o, "db"), *dh0 = get(o, "dh0");
	for (int64_t i = 0; dw && i < W * D; i++)
		dw[i] = 0;
	for (int64_t i = 0; db && i < D; i++)
		db[i] = 0;
	for (int64_t i = 0; dh0 && i < o->nsequences * W * D; i++)
		dh0[i] = 0;
	for (int s = 0; s < o->nsequences; s++) {
		const Sequence *q = &o->sequences[s];
		int64_t base = (q->b * tokens + q->start) * D;
		memset(dx + base, 0, (size_t)(q->n * D) * sizeof *dx);
		for (int64_t d = 0; d < D; d++) {
			for (int64_t t = 0; t < q->n; t++) {
				double z = pre ? pre[base + t * D + d] : 0, r = sigmoid(z), g = dy[base + t * D + d];
				g *= value(o, "activation") != 0 ? r * (1 + z * (1 - r)) : 1;
				if (db)
					db[d] += g;
				for (int64_t i = 0; i < W; i++) {
					int64_t at = t - W + 1 + i;
					double there = at >= 0 ? x[base + at * D + d] : h0 ? h0[(s * W + W + at) * D + d] : 0;
					if (dw)
						dw[i * D + d] += g * there;
					if (at >= 0)
						dx[base + at * D + d] += g * w[i * D + d];
					else if (dh0)
						dh0[(s * W + W + at) * D + d] += g * w[i * D + d];
				}
			}
			for (int64_t i = 1; dht && i < W; i++) { // the new state holds the last tokens, or what was left of the old one
				int64_t at = q->n - W + i;
				double g = dht[(s * W + i) * D + d];
				if (at >= 0)
					dx[base + at * D + d] += g;
				else if (dh0)
					dh0[(s * W + W + at) * D + d] += g;
			}
		}
	}
	return OK;
}

EXPORT int aclnnCausalConv1dBwdGetWorkspaceSize(T x, T y, T weight, T dy, T initialState, T dht, L queryStartLoc, int64_t activation, const char *inputLayout,
                                                T dx, T dw, T db, T dh0, uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnCausalConv1dBwd", run_conv_bwd, 0, F32 | F16 | BF16);
	int flat = x && fake_is(x, TENSOR) && x->rank == 2;
	const char *letters = flat ? "T D" : "B T D";
	need(o, activation >= 0 && activation <= 2, "activation is %ld, expected 0 to 2", activation);
	need(o, !activation || y, "activation without y");
	need(o, !inputLayout || !strcmp(inputLayout, flat ? "TND" : "BSND"), "inputLayout \"%s\" is not part of this fake", inputLayout ? inputLayout : "");
	arg(o, IN, 1, "x", x, "B T D", letters, DATA);
	if (!o->status && flat)
		size(o, "B", 1);
	arg(o, IN, 0, "y", y, "B T D", letters, DATA);
	in(o, "weight", weight, "W D", DATA);
	arg(o, IN, 1, "dy", dy, "B T D", letters, DATA);
	ONE_OF(o, "W", 2, 3, 4);
	sequences(o, queryStartLoc, 0, 1, 0);
	opt(o, "initialState", initialState, "N W D", DATA);
	opt(o, "dht", dht, "N W D", DATA);
	arg(o, OUT, 1, "dx", dx, "B T D", letters, DATA);
	optout(o, "dw", dw, "W D", DATA);
	optout(o, "db", db, "D", DATA);
	optout(o, "dh0", dh0, "N W D", DATA);
	need(o, !dh0 || initialState, "dh0 without initialState");
	number(o, "activation", (double)activation);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnCausalConv1dBwd)

// ---- context parallelism ----

#if FLA >= 2

// hm = [S | M] with S_out = M S_in + S, in base 2; the client has zeroed it, and what it holds is added to.
static int run_pre_fwd(Op *o) {
	Sizes z = sizes(o);
	int64_t wide = z.V + z.K;
	double *k = get(o, "k"), *w = get(o, "w"), *u = get(o, "u"), *g = get(o, "g"), *gk = get(o, "gk"), *hm = get(o, "hm");
	double *G = scratch(z.C * z.K), *kd = scratch(z.C * z.K), *S = scratch(z.K * wide), *y = scratch(z.C * wide);
	FOR_CHUNKS(x, 0) {
		if (x.first) {
			memset(S, 0, (size_t)(z.K * wide) * sizeof *S);
			for (int64_t d = 0; d < z.K; d++)
				S[d * wide + z.V + d] = 1;
		}
		gates(&z, g, LN2, gk, LN2, &x, G);
		if (gk)
			memcpy(kd, rows(&z, k, &x, z.K), (size_t)(x.n * z.K) * sizeof *kd);
		else
			toward_end(x.n, z.K, key_rows(&z, k, &x, z.K), G, kd);
		double *us = rows(&z, u, &x, z.V);
		rows_on_state(x.n, z.K, wide, rows(&z, w, &x, z.K), S, y);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j < wide; j++)
				y[i * wide + j] = (j < z.V ? us[i * z.V + j] : 0) - y[i * wide + j];
		decay_state(z.K, wide, G + (x.n - 1) * z.K, S);
		add_outer(x.n, z.K, wide, 1, kd, y, S);
		double *to = hm + (x.sequence * z.HV + x.h) * z.K * wide;
		for (int64_t i = 0; x.last && i < z.K * wide; i++)
			to[i] += S[i];
	}
	return OK;
}

static void summary_gates(Op *o, T g, T gk) {
	opt(o, "g", g, "B HV T", F32 | BF16);
	opt(o, "gk", gk, "B HV T K", F32 | BF16);
	need(o, !g != !gk, "exactly one of g and gk is expected");
	if (!o->status && gk)
		size(o, "HK", dim(o, "HV"));
	grouped(o);
	need(o, o->status || dim(o, "B") == 1, "a batch of %ld, expected 1", dim(o, "B"));
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	if (!o->status)
		size(o, "KV", dim(o, "K") + dim(o, "V"));
}

EXPORT int aclnnPreProcessFwdKernelMergedGetWorkspaceSize(T k, T w, T u, T g, T gk, T bg, T v, L cuSeqlens, int64_t chunkSize, T hm, uint64_t *workspaceSize,
                                                          Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnPreProcessFwdKernelMerged", run_pre_fwd, ND_ONLY, BF16);
	chunk_size(o, chunkSize, 64, 64);
	in(o, "k", k, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "w", w, "B HV T K", DATA);
	in(o, "u", u, "B HV T V", DATA);
	null(o, "bg", bg);
	null(o, "v", v);
	summary_gates(o, g, gk);
	need(o, cuSeqlens != 0, "cuSeqlens is null");
	sequences(o, cuSeqlens, 0, chunkSize, STRICT | WINDOW);
	inout(o, "hm", hm, "N HV K KV", F32);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnPreProcessFwdKernelMerged)

// dhm = [G | N] with dH_start = N dH_end + G.
static int run_pre_bwd(Op *o) {
	Sizes z = sizes(o);
	int64_t wide = z.V + z.K;
	double *q = get(o, "q"), *k = get(o, "k"), *w = get(o, "w"), *dO = get(o, "dO"), *dv = get(o, "dv"), *g = get(o, "g"), *gk = get(o, "gk"), *dhm = get(o, "dhm");
	double *G = scratch(z.C * z.K), *qd = scratch(z.C * z.K), *kd = scratch(z.C * z.K), *D = scratch(z.K * wide), *y = scratch(z.C * wide), *go = scratch(z.C * wide);
	FOR_CHUNKS(x, 1) {
		if (x.last) {
			memset(D, 0, (size_t)(z.K * wide) * sizeof *D);
			for (int64_t d = 0; d < z.K; d++)
				D[d * wide + z.V + d] = 1;
		}
		gates(&z, g, LN2, gk, LN2, &x, G);
		if (gk) {
			memcpy(qd, rows(&z, q, &x, z.K), (size_t)(x.n * z.K) * sizeof *qd);
			memcpy(kd, rows(&z, k, &x, z.K), (size_t)(x.n * z.K) * sizeof *kd);
		} else {
			toward_start(x.n, z.K, key_rows(&z, q, &x, z.K), G, qd);
			toward_end(x.n, z.K, key_rows(&z, k, &x, z.K), G, kd);
		}
		rows_on_state(x.n, z.K, wide, kd, D, y);
		memset(go, 0, (size_t)(x.n * wide) * sizeof *go);
		for (int64_t i = 0; i < x.n; i++)
			for (int64_t j = 0; j < z.V; j++) {
				y[i * wide + j] += rows(&z, dv, &x, z.V)[i * z.V + j];
				go[i * wide + j] = rows(&z, dO, &x, z.V)[i * z.V + j];
			}
		decay_state(z.K, wide, G + (x.n - 1) * z.K, D);
		add_outer(x.n, z.K, wide, value(o, "scale"), qd, go, D);
		add_outer(x.n, z.K, wide, -1, rows(&z, w, &x, z.K), y, D);
		double *to = dhm + x.h * z.K * wide;
		for (int64_t i = 0; x.first && i < z.K * wide; i++)
			to[i] += D[i];
	}
	return OK;
}

EXPORT int aclnnPreProcessBwdKernelMergedGetWorkspaceSize(T q, T k, T w, T dO, T dv, T g, T gk, L cuSeqlens, double scale, int64_t chunkSize, T dhm,
                                                          uint64_t *workspaceSize, Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnPreProcessBwdKernelMerged", run_pre_bwd, ND_ONLY, BF16);
	chunk_size(o, chunkSize, 64, 64);
	in(o, "q", q, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "k", k, gk ? "B HV T K" : "B HK T K", DATA);
	in(o, "w", w, "B HV T K", DATA);
	in(o, "dO", dO, "B HV T V", DATA);
	in(o, "dv", dv, "B HV T V", DATA);
	summary_gates(o, g, gk);
	need(o, cuSeqlens != 0, "cuSeqlens is null");
	sequences(o, cuSeqlens, 0, chunkSize, STRICT | WINDOW);
	need(o, o->status || dim(o, "N") == 1, "%ld windows, expected one", dim(o, "N"));
	inout(o, "dhm", dhm, "HV K KV", F32);
	number(o, "scale", scale);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnPreProcessBwdKernelMerged)

static int run_merge(Op *o) {
	int64_t HV = dim(o, "HV"), n = (int64_t)value(o, "n"), rank = (int64_t)value(o, "rank"), K = 128, V = 128, wide = 256;
	int forward = value(o, "forward") != 0, alone = dim(o, "S") == 1;
	double *h = get(o, "h"), *all = get(o, "agHm"), *S = scratch(K * V);
	for (int64_t head = 0; head < HV; head++) {
		double *to = h + head * K * V;
		for (int64_t i = 0; i < n; i++) {
			int64_t r = alone ? 0 : forward ? rank - n + i : rank + n - i;
			double *from = all + (r * HV + head) * K * wide;
			for (int64_t d = 0; d < K; d++)
				for (int64_t j = 0; j < V; j++) {
					double s = from[d * wide + j];
					for (int64_t m = 0; i && m < K; m++)
						s += from[d * wide + V + m] * to[m * V + j];
					S[d * V + j] = s;
				}
			memcpy(to, S, (size_t)(K * V) * sizeof *to);
		}
	}
	return OK;
}

EXPORT int aclnnMergeFwdBwdKernelGetWorkspaceSize(T h, T agHm, int64_t preOrPostNumRanks, int64_t rank, bool forward, bool stateVFirst, uint64_t *workspaceSize,
                                                  Executor **executor) {
	ENTER();
	Op *o = op_begin("aclnnMergeFwdBwdKernel", run_merge, ND_ONLY, F32 | BF16);
	int64_t n = preOrPostNumRanks;
	arg(o, IN_OUT, 1, "h", h, "HV K V", stateVFirst ? "HV V K" : "HV K V", DATA);
	in(o, "agHm", agHm, "S HV K 256", DATA);
	ONE_OF(o, "K", 128);
	ONE_OF(o, "V", 128);
	int64_t S = dim(o, "S");
	need(o, o->status || (S <= 1024 && dim(o, "HV") <= 256), "%ld ranks of %ld heads", S, dim(o, "HV"));
	need(o, o->status || (n >= 1 && n <= S), "preOrPostNumRanks is %ld of %ld ranks", n, S);
	need(o, o->status || (S == 1 && rank == 0) || (forward ? rank >= n && rank <= S : rank >= 0 && rank + n < S), "rank %ld with %ld before or after it of %ld", rank, n, S);
	number(o, "n", (double)n);
	number(o, "rank", (double)rank);
	number(o, "forward", forward);
	return op_end(o, workspaceSize, executor);
}
LAUNCH(aclnnMergeFwdBwdKernel)

#endif
