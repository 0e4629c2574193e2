// What the test programs share.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdn.h"

#define CHECK(x)                                                                  \
	do                                                                            \
		if (!(x)) {                                                               \
			fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #x, gdn_last_error()); \
			exit(1);                                                              \
		}                                                                         \
	while (0)

typedef struct {
	DLTensor t;
	int64_t shape[5];
} tensor;

// A compact float32 view of data.
static tensor *view(tensor *x, void *data, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
	memset(x, 0, sizeof *x);
	x->shape[0] = a, x->shape[1] = b, x->shape[2] = c, x->shape[3] = d;
	x->t.data = data;
	x->t.device.device_type = kDLCPU;
	x->t.ndim = rank;
	x->t.dtype.code = kDLFloat;
	x->t.dtype.bits = 32;
	x->t.dtype.lanes = 1;
	x->t.shape = x->shape;
	return x;
}

static int same(const float *got, const double *want, int n) {
	for (int i = 0; i < n; i++)
		if (!(fabs(got[i] - want[i]) <= 1e-6 * (1 + fabs(want[i])))) {
			fprintf(stderr, "element %d is %.9g, expected %.9g\n", i, got[i], want[i]);
			return 0;
		}
	return 1;
}

// One token, one head, K = V = 2, worked out by hand:
//	S~ = S0/2 = (1 2; 3 4)   S~^T k = (-2 -2)   e = (6 2)   S = S~ + k (e/2)^T = (4 3; 0 3)   o = S^T q = (4 9)
typedef struct {
	float q[2], k[2], v[2], g[1], beta[1], h0[4], o[2], ht[4];
	tensor tq, tk, tv, tg, tbeta, th0, to, tht;
	gdn_fwd_args a;
} one_token;

static const double want_o[] = {4, 9}, want_ht[] = {4, 3, 0, 3};

__attribute__((unused)) static void set_one_token(one_token *x) {
	static const float q[] = {1, 2}, k[] = {1, -1}, v[] = {4, 0}, h0[] = {2, 4, 6, 8};
	memset(x, 0, sizeof *x);
	memcpy(x->q, q, sizeof q);
	memcpy(x->k, k, sizeof k);
	memcpy(x->v, v, sizeof v);
	memcpy(x->h0, h0, sizeof h0);
	x->g[0] = (float)log(0.5);
	x->beta[0] = 0.5f;
	x->a.size = sizeof x->a;
	x->a.q = &view(&x->tq, x->q, 4, 1, 1, 1, 2)->t;
	x->a.k = &view(&x->tk, x->k, 4, 1, 1, 1, 2)->t;
	x->a.v = &view(&x->tv, x->v, 4, 1, 1, 1, 2)->t;
	x->a.g = &view(&x->tg, x->g, 3, 1, 1, 1, 0)->t;
	x->a.beta = &view(&x->tbeta, x->beta, 3, 1, 1, 1, 0)->t;
	x->a.initial_state = &view(&x->th0, x->h0, 4, 1, 1, 2, 2)->t;
	x->a.o = &view(&x->to, x->o, 4, 1, 1, 1, 2)->t;
	x->a.final_state = &view(&x->tht, x->ht, 4, 1, 1, 2, 2)->t;
	x->a.scale = 1;
}
