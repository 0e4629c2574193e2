// The decode operator, which CANN and fla-npu both have. skips: the first of the lengths is a number of leading tokens to leave out.
#ifndef FAKE_RECURRENT_H
#define FAKE_RECURRENT_H

#include <math.h>
#include <string.h>

#include "delta.h"
#include "op.h"

static int run_recurrent(Op *o) {
	int64_t HK = dim(o, "HK"), HV = dim(o, "HV"), K = dim(o, "K"), V = dim(o, "V"), slots = dim(o, "slots"), tokens = dim(o, "T");
	int64_t skips = (int64_t)value(o, "skips"), N = dim(o, "L") - skips;
	double *q = get(o, "query"), *k = get(o, "key"), *v = get(o, "value"), *beta = get(o, "beta"), *g = get(o, "g"), *gk = get(o, "gk"), *y = get(o, "out");
	double *pool = get(o, "stateRef"), *lengths = get(o, "actualSeqLengths"), *slot = get(o, "ssmStateIndices"), *accepted = get(o, "numAcceptedTokens");
	double *S = scratch(K * V), *decay = scratch(K);
	int64_t first = skips ? (int64_t)lengths[0] : 0;
	for (int64_t s = 0; s < N; s++) {
		int64_t n = (int64_t)lengths[s + skips], from = first + (accepted ? (int64_t)accepted[s] - 1 : 0);
		int right = first >= 0 && n >= 0 && n <= 8 && first + n <= tokens && (!n || (from >= first && from < first + n));
		for (int64_t t = first; right && t < first + n; t++)
			right = slot[t] >= 0 && slot[t] < (double)slots;
		if (!right)
			return OK; // the core stops there without a word
		for (int64_t h = 0; n && h < HV; h++) {
			memcpy(S, pool + ((int64_t)slot[from] * HV + h) * K * V, (size_t)(K * V) * sizeof *S);
			for (int64_t t = first; t < first + n; t++) {
				int64_t kh = (t * HK + h / (HV / HK)) * K, vh = t * HV + h;
				for (int64_t i = 0; i < K; i++)
					decay[i] = exp((g ? g[vh] : 0) + (gk ? gk[vh * K + i] : 0));
				tokens_forward(&(Head){1, K, V, q + kh, k + kh, v + vh * V, beta + vh, decay, value(o, "scale")}, S, y + vh * V, 0);
				memcpy(pool + ((int64_t)slot[t] * HV + h) * K * V, S, (size_t)(K * V) * sizeof *S);
			}
		}
		first += n;
	}
	return OK;
}

static int recurrent(const char *name, int skips, T query, T key, T value_, T beta, T stateRef, T actualSeqLengths, T ssmStateIndices, T g, T gk,
                     T numAcceptedTokens, float scale, T result, uint64_t *bytes, Executor **executor) {
	Op *o = op_begin(name, run_recurrent, 0, BF16);
	o->state_types = skips ? BF16 | F32 : BF16;
	in(o, "query", query, "T HK K", DATA);
	in(o, "key", key, "T HK K", DATA);
	in(o, "value", value_, "T HV V", DATA);
	in(o, "beta", beta, "T HV", DATA);
	arg(o, IN_OUT, 1, "stateRef", stateRef, "slots HV K V", "slots HV V K", STATE);
	in(o, "actualSeqLengths", actualSeqLengths, "L", I32);
	in(o, "ssmStateIndices", ssmStateIndices, "T", I32);
	opt(o, "g", g, "T HV", F32);
	opt(o, "gk", gk, "T HV K", F32);
	if (!o->status)
		size(o, "N", dim(o, "L") - skips);
	opt(o, "numAcceptedTokens", numAcceptedTokens, "N", I32);
	out(o, "out", result, "T HV V", DATA);
	number(o, "scale", scale);
	number(o, "skips", skips);
	int64_t HK = dim(o, "HK"), HV = dim(o, "HV"), K = dim(o, "K"), V = dim(o, "V");
	need(o, o->status || (HV <= 256 && HK <= 256 && HV % HK == 0), "%ld value heads on %ld key heads", HV, HK);
	need(o, o->status || (K <= 512 && V <= 512), "head sizes %ld and %ld, expected at most 512", K, V);
	return op_end(o, bytes, executor);
}

#endif
