// Affine maps of states in REAL (float or double): the reverse scan that gives the backward map, and maps applied one after the other.
// Included once for each REAL, behind mm.h.

// The reverse scan with K more columns, which start at the identity and see no output gradient: per token, D the gradient of the state,
//     D += scale q dO^T      D <- diag(a) (D - k (beta D^T k)^T)
INL void FN(back_columns)(const FN(token) *w, REAL scale, int K, ptrdiff_t ld, REAL *D, const REAL *dout, int n) {
	FN(vr) acc[4] = {0}, o[4];
	if (dout) UNROLL for (int z = 0; z < n; z++) o[z] = MLD(dout + z * MVR) * scale;
	for (int d = 0; d < K; d++) {
		const REAL k = w->k[d], q = w->q[d];
		UNROLL for (int z = 0; z < n; z++) {
			FN(vr) u = MLD(D + d * ld + z * MVR);
			if (dout) {
				u += q * o[z];
				MST(D + d * ld + z * MVR, u);
			}
			acc[z] += k * u;
		}
	}
	const REAL beta = w->be[0];
	UNROLL for (int z = 0; z < n; z++) acc[z] *= beta;
	for (int d = 0; d < K; d++) {
		const REAL k = w->k[d], a = w->ak[d];
		UNROLL for (int z = 0; z < n; z++) MST(D + d * ld + z * MVR, a * (MLD(D + d * ld + z * MVR) - k * acc[z]));
	}
}
static int64_t FN(back_scratch)(const scan *s, FN(token) *w, REAL **D, char *base) {
	char *p = base;
	FN(token_scratch)(s, w, &p);
	*D = FN(take)(&p, s->K * (s->VP + s->KP));
	return p - base;
}
static void FN(back_unit)(void *ctx, int64_t unit, char *base) {
	const summary *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t n = unit / s->HV, hv = unit % s->HV, ld = s->VP + s->KP;
	const sequence q = sequence_of(s, n);
	FN(token) w;
	REAL *D;
	FN(back_scratch)(s, &w, &D, base);
	memset(D, 0, sizeof(REAL) * s->K * ld);
	for (int64_t d = 0; d < s->K; d++) D[d * ld + s->VP + d] = 1;
	for (int64_t t = q.len - 1; t >= 0; t--) {
		FN(load)(s, &w, &q, t, hv);
		FN(row_in)(w.dout, token_view(&s->dout, q.b, q.t0 + t, hv), s->V, s->VP);
		int64_t v = 0;
		for (; v < s->VP; v += 4 * MVR <= 32 ? 4 * MVR : MVR) FN(back_columns)(&w, s->scale64, s->K, ld, D + v, w.dout + v, 4 * MVR <= 32 ? 4 : 1);
		for (; v < ld; v += 4 * MVR <= 32 ? 4 * MVR : MVR) FN(back_columns)(&w, s->scale64, s->K, ld, D + v, NULL, 4 * MVR <= 32 ? 4 : 1);
	}
	view to = state_view(&m->map, n, hv, 0);
	FN(block_out)(D, ld, to, s->K, s->V);
	to.p += s->V * to.col * size_of(to.type);
	FN(block_out)(D + s->VP, ld, to, s->K, s->K);
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

// ---------------------------------------------------------------- maps one after the other
enum { FN(MAPW) = 64 }; // columns of a unit
static view FN(map_view)(const gdnk_tensor *t, int64_t r, int64_t b, int64_t h) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (r * s[0] + b * s[1] + h * s[2]) * size_of(t->dtype), t->dtype, s[3], s[4]};
}
// Columns [c, c+n) of a view that has cols; beyond them zero
static void FN(columns_in)(REAL *d, int ld, view v, int rows, int64_t c, int64_t n, int64_t cols) {
	const int64_t have = cols - c < 0 ? 0 : cols - c < n ? cols - c : n;
	v.p += (have ? c : 0) * v.col * size_of(v.type);
	FN(block_in)(d, ld, v, rows, have);
}
// Columns [c, c+n) of the state to begin with: the one that came, or of a composition [0, identity]
static void FN(first_state)(const maps *m, int64_t b, int64_t h, int64_t c, int64_t n, REAL *X, int ld) {
	if (m->x.dtype) {
		FN(columns_in)(X, ld, state_view(&m->x, b, h, 0), m->K, c, n, m->V);
		return;
	}
	memset(X, 0, sizeof(REAL) * m->K * ld);
	for (int64_t i = 0; i < m->K && m->compose; i++)
		if (m->V + i >= c && m->V + i < c + n) X[i * ld + m->V + i - c] = 1;
}
// Y = M X + S for columns [c, c+n) of map r
static void FN(apply)(const maps *m, int64_t r, int64_t b, int64_t h, int64_t c, int64_t n, REAL *M, const REAL *X, REAL *Y, int ld) {
	const int KP = m->KP;
	FN(block_in)(M, KP, FN(map_view)(&m->m, r, b, h), m->K, m->K);
	FN(columns_in)(Y, ld, FN(map_view)(&m->s, r, b, h), m->K, c, n, m->V);
	FN(mm)(1, m->K, ld, m->K, M, m->transpose ? 1 : KP, m->transpose ? KP : 1, X, ld, Y, ld);
}
static void FN(merge_unit)(void *ctx, int64_t unit, char *base) {
	const maps *m = ctx;
	const int64_t blocks = (m->VX + FN(MAPW) - 1) / FN(MAPW), c = unit % blocks * FN(MAPW), h = unit / blocks % m->HV, b = unit / blocks / m->HV;
	const int64_t n = m->VX - c < FN(MAPW) ? m->VX - c : FN(MAPW);
	char *p = base;
	REAL *M = FN(take)(&p, m->K * m->KP), *X = FN(take)(&p, m->K * FN(MAPW)), *Y = FN(take)(&p, m->K * FN(MAPW));
	FN(first_state)(m, b, h, c, n, X, FN(MAPW));
	for (int64_t i = 0; i < m->R; i++) {
		FN(apply)(m, m->reverse ? m->R - 1 - i : i, b, h, c, n, M, X, Y, FN(MAPW));
		REAL *t = X;
		X = Y;
		Y = t;
	}
	view to = state_view(&m->out, b, h, 0);
	to.p += c * to.col * size_of(to.type);
	FN(block_out)(X, FN(MAPW), to, m->K, n);
}
// D behind a map becomes D before it: D <- M^T D, with dS = D and dM = D X^T (transposed maps: D <- M D, dM = X D^T)
static void FN(merge_bwd_unit)(void *ctx, int64_t unit, char *base) {
	const maps *m = ctx;
	const int64_t h = unit % m->HV, b = unit / m->HV, K = m->K, KP = m->KP, WP = m->WP;
	char *p = base;
	REAL *M = FN(take)(&p, K * KP), *dM = FN(take)(&p, K * KP), *D = FN(take)(&p, K * WP), *Y = FN(take)(&p, K * WP), *T = FN(take)(&p, WP * KP);
	REAL *X = FN(take)(&p, (m->R + 1) * K * WP);
	FN(first_state)(m, b, h, 0, m->VX, X, WP);
	for (int64_t i = 0; i + 1 < m->R; i++) FN(apply)(m, m->reverse ? m->R - 1 - i : i, b, h, 0, m->VX, M, X + i * K * WP, X + (i + 1) * K * WP, WP);
	FN(columns_in)(D, WP, state_view(&m->dout, b, h, 0), K, 0, m->VX, m->VX);
	for (int64_t i = m->R - 1; i >= 0; i--) {
		const int64_t r = m->reverse ? m->R - 1 - i : i;
		const REAL *x = X + i * K * WP, *rows = m->transpose ? x : D;
		FN(block_out)(D, WP, FN(map_view)(&m->ds, r, b, h), K, m->V);
		FN(turn)(m->transpose ? D : x, WP, T, KP, K, WP);
		for (int64_t c = 0; c < WP; c++)
			for (int64_t j = K; j < KP; j++) T[c * KP + j] = 0;
		FN(mm)(0, K, KP, WP, rows, WP, 1, T, KP, dM, KP);
		FN(block_out)(dM, KP, FN(map_view)(&m->dm, r, b, h), K, K);
		FN(block_in)(M, KP, FN(map_view)(&m->m, r, b, h), K, K);
		FN(mm)(0, K, WP, K, M, m->transpose ? KP : 1, m->transpose ? 1 : KP, D, WP, Y, WP);
		REAL *t = D;
		D = Y;
		Y = t;
	}
	if (m->dx.dtype) FN(block_out)(D, WP, state_view(&m->dx, b, h, 0), K, m->V);
}
static int FN(merge_run)(const maps *m, int backward) {
	char *p = NULL;
	if (!backward) {
		FN(take)(&p, m->K * m->KP), FN(take)(&p, m->K * FN(MAPW)), FN(take)(&p, m->K * FN(MAPW));
		return gdnk_parallel(m->B * m->HV * ((m->VX + FN(MAPW) - 1) / FN(MAPW)), p - (char *)NULL, FN(merge_unit), (void *)m);
	}
	FN(take)(&p, m->K * m->KP), FN(take)(&p, m->K * m->KP), FN(take)(&p, m->K * m->WP), FN(take)(&p, m->K * m->WP), FN(take)(&p, m->WP * m->KP);
	FN(take)(&p, (m->R + 1) * m->K * m->WP);
	return gdnk_parallel(m->B * m->HV, p - (char *)NULL, FN(merge_bwd_unit), (void *)m);
}
// Rows [B T heads cols] of one tensor to another, which has `pad` columns: the rest becomes zero
typedef struct {
	const gdnk_tensor *from, *to;
	int cols, pad;
} FN(copy);
static void FN(copy_unit)(void *ctx, int64_t unit, char *base) {
	const FN(copy) *c = ctx;
	const int64_t T = c->to->shape[1], b = unit / T, t = unit % T;
	for (int64_t h = 0; h < c->to->shape[2]; h++) {
		FN(row_in)((REAL *)base, token_view(c->from, b, t, h), c->cols, c->pad);
		FN(row_out)((REAL *)base, token_view(c->to, b, t, h), c->pad);
	}
}
static int FN(copy_rows)(const gdnk_tensor *from, const gdnk_tensor *to, int cols, int pad) {
	FN(copy) c = {from, to, cols, pad};
	return gdnk_parallel(to->shape[0] * to->shape[1], sizeof(REAL) * pad + 64, FN(copy_unit), &c);
}
