// Affine maps of states in REAL (float or double): the reverse scan that gives the backward map, and maps applied one after the other.
// Included once for each REAL, behind mm.h.

// The reverse scan with K more columns, which start at the identity and see no output gradient. Per chunk of BL tokens (in longer ones similar keys
// cancel more of what they write), D the gradient behind it, with the
// rows and pairs of chunk64.h:
//     Y = (k d) D + scale QK^T dO      m_i = -beta_i (Y_i + sum_{j>i} KK_ji m_j)      D <- b_last D + scale (q b)^T dO + (k b)^T m
static int64_t FN(back_scratch)(const scan *s, FN(work) *w, REAL **D, REAL **Y, char *base) {
	char *p = base + FN(work_scratch)(s, w, base);
	*D = FN(take)(&p, s->K * (s->VP + s->KP + APART));
	*Y = FN(take)(&p, BL * (s->VP + s->KP + APART));
	return p - base;
}
// Rows of m from those of Y, from the last on
static void FN(solve_up)(FN(work) *w, int n, REAL *Y, int cols, int ld) {
	for (int i = n - 1; i >= 0; i--) {
		REAL *m = Y + (ptrdiff_t)i * ld;
		for (int d = 0; d < cols; d++) m[d] *= -w->beta[i];
		for (int j = 0; j < i; j++) {
			const REAL f = w->KK[i * CH + j];
			REAL *y = Y + (ptrdiff_t)j * ld;
			for (int d = 0; d < cols; d++) y[d] += f * m[d];
		}
	}
}
static void FN(back_unit)(void *ctx, int64_t unit, char *base) {
	const summary *m = ctx;
	const scan *s = &m->s;
	const stage chunks = {.s = *s};
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t n = unit / s->HV, hv = unit % s->HV, h = hv / s->G;
	const int K = s->K, V = s->V, KP = s->KP, VP = s->VP, cols = VP + KP, ld = cols + APART;
	const REAL scale = s->scale64;
	FN(work) w;
	REAL *D, *Y;
	FN(back_scratch)(s, &w, &D, &Y, base);
	memset(D, 0, sizeof(REAL) * K * ld);
	for (int d = 0; d < K; d++) D[(ptrdiff_t)d * ld + VP + d] = 1;
	place c = {.q = sequence_of(s, n)};
	for (c.t = (c.q.len - 1) / BL * BL; c.t >= 0 && c.q.len; c.t -= BL) {
		c.n = c.q.len - c.t < BL ? c.q.len - c.t : BL;
		FN(rows64_in)(w.q, KP, &s->q, &c, h, K);
		FN(rows64_in)(w.k, KP, &s->k, &c, h, K);
		FN(rows64_in)(w.v1, VP, &s->dout, &c, hv, V);
		for (int i = 0; i < c.n; i++) {
			if (s->l2norm) FN(unit_row)(w.q + i * KP, K), FN(unit_row)(w.k + i * KP, K);
			w.beta[i] = FN(effective_beta)(s, &c, hv, i);
		}
		FN(raw_decays)(&chunks, &w, &c, hv, 0, 0);
		FN(products)(s, &w, BL);
		FN(pairs)(s, &w, c.n);
		for (int i = 0; i < c.n * KP; i++) {
			w.k1[i] = w.k[i] * w.ed[i];
			w.k2[i] = w.k[i] * w.eb[i];
			w.k3[i] = scale * w.q[i] * w.eb[i];
		}
		for (int i = 0; i < c.n * CH; i++) w.QK[i] *= scale;
		FN(mm)(0, c.n, cols, K, w.k1, KP, 1, D, ld, Y, ld);
		FN(mm)(1, c.n, VP, c.n, w.QK, 1, CH, w.v1, VP, Y, ld);
		FN(solve_up)(&w, c.n, Y, cols, ld);
		for (int d = 0; d < K; d++)
			for (int z = 0; z < cols; z++) D[(ptrdiff_t)d * ld + z] *= w.eL[d];
		FN(mm)(1, K, VP, c.n, w.k3, 1, KP, w.v1, VP, D, ld);
		FN(mm)(1, K, cols, c.n, w.k2, 1, KP, Y, ld, D, ld);
	}
	view to = state_view(&m->map, n, hv, 0);
	FN(block_out)(D, ld, to, K, V);
	to.p += V * to.col * size_of(to.type);
	FN(block_out)(D + VP, ld, to, K, K);
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
