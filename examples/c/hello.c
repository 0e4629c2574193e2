#include <stdio.h>
#include "gdn.h"

enum { T = 512, H = 4, D = 64 };
static float q[T][H][D], k[T][H][D], v[T][H][D], g[T][H], beta[T][H], o[T][H][D];

static DLTensor view(void *data, int rank, int64_t *shape) {
	return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = rank, .dtype = {kDLFloat, 32, 1}, .shape = shape};
}

int main(void) {
	for (int t = 0; t < T; t++) // each token writes its number under one of D keys and asks for what lies there
		for (int h = 0; h < H; h++)
			k[t][h][t % D] = q[t][h][t % D] = 1, v[t][h][0] = t, g[t][h] = -0.01f, beta[t][h] = 1;
	int64_t heads[] = {1, T, H, D}, gates[] = {1, T, H};
	DLTensor tq = view(q, 4, heads), tk = view(k, 4, heads), tv = view(v, 4, heads), to = view(o, 4, heads);
	DLTensor tg = view(g, 3, gates), tbeta = view(beta, 3, gates);
	gdn_fwd_args args = {.size = sizeof args, .q = &tq, .k = &tk, .v = &tv, .g = &tg, .beta = &tbeta, .o = &to, .scale = 1};
	if (gdn_fwd(&args) != GDN_OK)
		return fprintf(stderr, "%s\n", gdn_last_error()), 1;
	printf("%s\nthe last token reads %g, it wrote %g\n", gdn_build_info(), o[T - 1][0][0], v[T - 1][0][0]);
	return 0;
}
