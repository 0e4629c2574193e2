// The delta rule of one head, in float64. A state is K x V, rows of vectors lie one after the other.
#ifndef FAKE_DELTA_H
#define FAKE_DELTA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline double dot(const double *a, const double *b, int64_t n) {
	double s = 0;
	for (int64_t i = 0; i < n; i++)
		s += a[i] * b[i];
	return s;
}

typedef struct {
	int64_t n, K, V;
	const double *q, *k, *v, *beta;
	const double *decay; // n x K: exp(g)
	double scale;
} Head;

// S <- diag(decay) S; e = v - S'k; S <- S + beta k e'; o = scale S'q, token by token. tape: n states, each after its token's decay, or 0.
static inline void tokens_forward(const Head *h, double *S, double *o, double *tape) {
	int64_t K = h->K, V = h->V;
	for (int64_t t = 0; t < h->n; t++) {
		const double *q = h->q + t * K, *k = h->k + t * K, *v = h->v + t * V, *d = h->decay + t * K;
		double *out = o + t * V;
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				S[i * V + j] = d[i] == 0 ? 0 : S[i * V + j] * d[i];
		if (tape)
			memcpy(tape + t * K * V, S, (size_t)(K * V) * sizeof *S);
		for (int64_t j = 0; j < V; j++)
			out[j] = v[j];
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				out[j] -= S[i * V + j] * k[i];
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				S[i * V + j] += h->beta[t] * k[i] * out[j];
		memset(out, 0, (size_t)V * sizeof *out);
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				out[j] += h->scale * S[i * V + j] * q[i];
	}
}

// The adjoint. D is the gradient of the state after the last token and becomes that of the state before the first. dg is the gradient of
// log(decay), n x K. dq, dk, dg are added to; dv, dbeta are written. tape is of tokens_forward.
static inline void tokens_backward(const Head *h, const double *tape, const double *dO, double *D, double *dq, double *dk, double *dv, double *dbeta, double *dg, double *e /* V */) {
	int64_t K = h->K, V = h->V;
	for (int64_t t = h->n - 1; t >= 0; t--) {
		const double *q = h->q + t * K, *k = h->k + t * K, *d = h->decay + t * K, *S = tape + t * K * V, *go = dO + t * V;
		double beta = h->beta[t], *de = dv + t * V;
		for (int64_t j = 0; j < V; j++)
			e[j] = h->v[t * V + j];
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				e[j] -= S[i * V + j] * k[i];
		for (int64_t i = 0; i < K; i++) {
			double s = 0;
			for (int64_t j = 0; j < V; j++)
				s += (S[i * V + j] + beta * k[i] * e[j]) * go[j], D[i * V + j] += h->scale * q[i] * go[j];
			dq[t * K + i] += h->scale * s;
		}
		memset(de, 0, (size_t)V * sizeof *de);
		for (int64_t i = 0; i < K; i++)
			for (int64_t j = 0; j < V; j++)
				de[j] += D[i * V + j] * k[i];
		dbeta[t] = dot(de, e, V);
		for (int64_t j = 0; j < V; j++)
			de[j] *= beta;
		for (int64_t i = 0; i < K; i++)
			dk[t * K + i] += beta * dot(D + i * V, e, V) - dot(S + i * V, de, V);
		for (int64_t i = 0; i < K; i++) {
			double s = 0;
			for (int64_t j = 0; j < V; j++) {
				double x = D[i * V + j] - k[i] * de[j];
				s += x * S[i * V + j];
				D[i * V + j] = x * d[i];
			}
			dg[t * K + i] += s;
		}
	}
}

#endif
