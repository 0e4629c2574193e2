// The stages in REAL (float or double): chunks of CH tokens, whose pairs are taken in blocks of BL. Included once for each REAL, behind mm.h.
//
// Decays are running products of a = exp(g), one number for each token and channel (Gated DeltaNet: the same in all channels), so that no
// exponent is above zero and a = 0 is exact: within a block Gam_ij = a_{j+1}..a_i runs along; between blocks I > J it is the inclusive prefix
// product in I, times those of the blocks in between, times the exclusive suffix product in J.
static REAL FN(exp1)(REAL x) { return sizeof(REAL) == 4 ? expf(x) : exp(x); }
#define VROW(p) (*(FN(vru) *)(p))
#define FOR_CHANNELS for (int d = 0; d < KP; d += MVR)

typedef struct { // of one chunk and head; rows are KP or VP wide and zero behind the chunk's end
	FN(token) tok;
	REAL *k, *q, *a, *eb, *ed, *pre, *LK, *LQ; // [CH][KP]; ed: suffix products; pre: prefix products in a block, and k, q times them
	REAL *R, *S, *T, *U;                       // [BL][KP]
	REAL *eL, *z, *bp;                         // [KP] product of the chunk, sums of h dh; [CH/BL][KP] products of the blocks
	REAL *KK, *QK, *X, *P, *F;                 // [CH][CH]
	REAL *beta, *cum, *raw;                    // [CH], [CH][KP], [CH][KP]
	REAL *k1, *k2, *k3, *dq, *dk, *dg, *dqs, *dks; // [CH][KP]
	REAL *v1, *v2, *v3, *v4;                   // [CH][VP]
	REAL *h, *ht;                              // [KP][VP], [VP][KP]
	REAL rq[CH], rk[CH];
} FN(work);
static int64_t FN(work_scratch)(const scan *s, FN(work) *w, char *base) {
	char *p = base;
	const int64_t K = s->KP, V = s->VP, most = K > V ? K : V, KV = most > COLS ? most : COLS;
	FN(token_scratch)(s, &w->tok, &p);
	REAL **keys[] = {&w->k, &w->q, &w->a, &w->eb, &w->ed, &w->pre, &w->LK, &w->LQ, &w->cum, &w->raw, &w->k1, &w->k2, &w->k3, &w->dq, &w->dk, &w->dg, &w->dqs, &w->dks};
	for (int i = 0; i < (int)(sizeof keys / sizeof *keys); i++) *keys[i] = FN(take)(&p, CH * K);
	REAL **blocks[] = {&w->R, &w->S, &w->T, &w->U};
	for (int i = 0; i < 4; i++) *blocks[i] = FN(take)(&p, BL * K);
	w->eL = FN(take)(&p, K), w->z = FN(take)(&p, K), w->bp = FN(take)(&p, 2 * CH / BL * K), w->beta = FN(take)(&p, CH);
	REAL **pairs[] = {&w->KK, &w->QK, &w->X, &w->P, &w->F}, **values[] = {&w->v1, &w->v2, &w->v3, &w->v4};
	for (int i = 0; i < 5; i++) *pairs[i] = FN(take)(&p, CH * CH);
	for (int i = 0; i < 4; i++) *values[i] = FN(take)(&p, CH * KV);
	w->h = FN(take)(&p, KV * KV), w->ht = FN(take)(&p, KV * KV);
	return p - base;
}
// The chunk's rows of a tensor, CH of them
static void FN(rows64_in)(REAL *d, int ld, const gdnk_tensor *t, const place *c, int64_t h, int cols) {
	FN(block_in)(d, ld, token_view(t, c->q.b, c->q.t0 + c->t, h), c->n, cols);
	memset(d + (ptrdiff_t)c->n * ld, 0, sizeof(REAL) * (CH - c->n) * ld);
}
static void FN(rows64_out)(const REAL *s, int ld, const gdnk_tensor *t, const place *c, int64_t h, int cols) {
	if (t->dtype) FN(block_out)(s, ld, token_view(t, c->q.b, c->q.t0 + c->t, h), c->n, cols);
}
static REAL FN(number)(const gdnk_tensor *t, const place *c, int64_t h, int i) {
	return ld1(token_view(t, c->q.b, c->q.t0 + c->t + i, h).p, t->dtype, 0);
}
static REAL FN(effective_beta)(const scan *s, const place *c, int64_t hv, int i) {
	const REAL b = s->beta.dtype ? FN(number)(&s->beta, c, hv, i) : 1;
	return s->beta_sigmoid ? s->beta_max / (1 + FN(exp1)(-b)) : b;
}
static void FN(number_out)(const gdnk_tensor *t, const place *c, int64_t h, int i, REAL x) {
	if (t->dtype) st1(token_view(t, c->q.b, c->q.t0 + c->t + i, h).p, t->dtype, 0, x);
}
// A square of the chunk's pairs; above the diagonal stands nothing that counts.
static void FN(pairs_in)(REAL *d, const gdnk_tensor *t, const place *c, int64_t h) {
	FN(rows64_in)(d, CH, t, c, h, CH);
	for (int i = 0; i < CH; i++)
		for (int j = i + 1; j < CH; j++) d[i * CH + j] = 0;
}
static void FN(state64_in)(const stage *m, REAL *d, const gdnk_tensor *t, const place *c, int64_t h, int64_t col, int64_t cols, int ld) {
	view v = chunk_view(t, c, h, m->s.v_first);
	v.p += col * v.col * size_of(v.type);
	FN(block_in)(d, ld, v, m->s.K, cols);
}

// ---------------------------------------------------------------- decays
// From the gate as it came. cum: their sums are wanted. raw: what the activation saw.
static void FN(raw_decays)(const stage *m, FN(work) *w, const place *c, int64_t hv, int cum, int raw) {
	const scan *s = &m->s;
	const int KP = s->KP, n = s->biases;
	const REAL least = sizeof(REAL) == 4 ? -128 : -1000; // exp of it is 0
	const REAL unit = m->exp2 ? (REAL)1.4426950408889634074 : 1;
	REAL *const x = w->tok.ak;
	double sum[512] = {0}; // in double: the decay of a chunk is exp of it
	for (int i = 0; i < CH; i++) {
		REAL *a = w->a + i * KP;
		if (i >= c->n) {
			for (int d = 0; d < KP; d++) a[d] = 1;
			continue;
		}
		FN(log_decays)(s, &w->tok, &c->q, c->q.t0 + c->t + i, hv);
		if (raw && s->gate) memcpy(w->raw + i * KP, w->tok.raw, sizeof(REAL) * n);
		for (int d = 0; d < n && cum; d++) {
			sum[d] += x[d] > least ? x[d] : x[d] == x[d] ? least : x[d];
			w->cum[i * KP + d] = sum[d] * unit;
		}
		EACH(n) LANE_OF(x) = FN(exp)(LANE_OF(x));
		for (int d = 0; d < KP; d++) a[d] = n == 1 ? x[0] : d < n ? x[d] : 1;
	}
}
// exp of a difference of sums, which is not above zero; behind a sum of -inf nothing is known, and taken to be 0.
INL REAL FN(decay)(const stage *m, REAL from, REAL to) {
	const REAL x = to - from;
	return !(x > -INFINITY) && from == -INFINITY ? 0 : x >= 0 ? 1 : FN(exp1)(m->exp2 ? x * (REAL)0.69314718055994530942 : x);
}
// From their sums: one a token
static void FN(sum_decays)(const stage *m, FN(work) *w, const place *c, int64_t hv) {
	const int KP = m->s.KP;
	REAL last = 0;
	for (int i = 0; i < CH; i++) {
		REAL a = 1;
		if (i < c->n && m->sum.dtype) {
			const REAL b = FN(number)(&m->sum, c, hv, i);
			a = FN(decay)(m, last, b);
			last = b;
		}
		for (int d = 0; d < KP; d++) w->a[i * KP + d] = a;
	}
}
// Products of the decays of the first `rows` tokens, whole blocks: eb, ed, eL; pre and bp of its blocks; rows of k and q in the prefix products
static void FN(products)(const scan *s, FN(work) *w, int rows) {
	const int KP = s->KP;
	FOR_CHANNELS {
		FN(vr) p = (FN(vr)){0} + 1, b = p;
		for (int i = 0; i < rows; i++) {
			const FN(vr) a = MLD(w->a + i * KP + d);
			p *= a;
			b = i % BL ? b * a : a;
			MST(w->eb + i * KP + d, p);
			MST(w->pre + i * KP + d, b);
			MST(w->LK + i * KP + d, MLD(w->k + i * KP + d) * b);
			MST(w->LQ + i * KP + d, MLD(w->q + i * KP + d) * b);
			if (i % BL == BL - 1) MST(w->bp + i / BL * KP + d, b);
		}
		MST(w->eL + d, p);
		p = (FN(vr)){0} + 1;
		for (int i = rows - 1; i >= 0; i--) {
			MST(w->ed + i * KP + d, p);
			p *= MLD(w->a + i * KP + d);
		}
	}
}
// Rows of k in block J times the suffix products there, and those products
static void FN(suffixes)(FN(work) *w, int KP, int J) {
	FOR_CHANNELS {
		FN(vr) p = (FN(vr)){0} + 1;
		for (int j = BL - 1; j >= 0; j--) {
			const int at = (J * BL + j) * KP + d;
			MST(w->S + j * KP + d, p);
			MST(w->R + j * KP + d, MLD(w->k + at) * p);
			p *= MLD(w->a + at);
		}
	}
}
static void FN(further)(FN(work) *w, int KP, int block) {
	for (int j = 0; j < BL; j++)
		FOR_CHANNELS {
			const FN(vr) b = MLD(w->bp + block * KP + d);
			VROW(w->S + j * KP + d) *= b;
			VROW(w->R + j * KP + d) *= b;
		}
}
// KK_ij = sum k_i k_j Gam_ij (i > j), QK_ij = sum q_i k_j Gam_ij (i >= j). Behind products().
static void FN(pairs)(const scan *s, FN(work) *w, int n) {
	const int KP = s->KP, blocks = (n + BL - 1) / BL;
	memset(w->KK, 0, sizeof(REAL) * CH * CH);
	memset(w->QK, 0, sizeof(REAL) * CH * CH);
	for (int J = 0; J < blocks; J++) {
		FN(suffixes)(w, KP, J);
		for (int I = J + 1; I < blocks; I++) {
			if (I > J + 1) FN(further)(w, KP, I - 1);
			FN(turn)(w->R, KP, w->T, BL, BL, KP);
			FN(mm)(0, BL, BL, KP, w->LK + I * BL * KP, KP, 1, w->T, BL, w->KK + I * BL * CH + J * BL, CH);
			FN(mm)(0, BL, BL, KP, w->LQ + I * BL * KP, KP, 1, w->T, BL, w->QK + I * BL * CH + J * BL, CH);
		}
		for (int j = J * BL; j < (J + 1) * BL && j < n; j++) {
			REAL *r = w->R;
			memcpy(r, w->k + j * KP, sizeof(REAL) * KP);
			for (int i = j; i < (J + 1) * BL && i < n; i++) {
				FN(vr) x = {0}, y = {0};
				FOR_CHANNELS {
					FN(vr) z = MLD(r + d);
					if (i > j) {
						z *= MLD(w->a + i * KP + d);
						MST(r + d, z);
						x += z * MLD(w->k + i * KP + d);
					}
					y += z * MLD(w->q + i * KP + d);
				}
				if (i > j) w->KK[i * CH + j] = FN(hsum)(x);
				w->QK[i * CH + j] = FN(hsum)(y);
			}
		}
	}
}
// X = (1 + beta KK)^-1 by substitution
static void FN(invert)(FN(work) *w, int n) {
	memset(w->X, 0, sizeof(REAL) * CH * CH);
	for (int i = 0; i < n; i++) {
		REAL *x = w->X + i * CH;
		for (int j = 0; j < i; j++) {
			const REAL f = w->beta[i] * w->KK[i * CH + j];
			for (int e = 0; e <= j; e++) x[e] -= f * w->X[j * CH + e];
		}
		x[i] = 1;
	}
}
// y = X (beta x) for rows of `cols` numbers; x is lost
static void FN(solve)(FN(work) *w, int n, REAL *x, REAL *y, int ld) {
	for (int i = 0; i < n; i++)
		for (int d = 0; d < ld; d++) x[i * ld + d] *= w->beta[i];
	FN(mm)(0, n, ld, n, w->X, CH, 1, x, ld, y, ld);
}
static void FN(times)(REAL *y, const REAL *x, const REAL *f, int n) {
	for (int d = 0; d < n; d++) y[d] = x[d] * f[d];
}

// ---------------------------------------------------------------- forward
static void FN(prepare_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t h = unit % s->H;
	const int K = s->K, V = s->V, KP = s->KP, VP = s->VP;
	const place c = place_of(m, unit / s->H);
	const int n = c.n;
	const REAL scale = s->scale64;
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	FN(rows64_in)(w.q, KP, &s->q, &c, h, K);
	FN(rows64_in)(w.k, KP, &s->k, &c, h, K);
	for (int i = 0; i < n; i++) {
		w.rq[i] = s->l2norm ? FN(unit_row)(w.q + i * KP, K) : 1;
		w.rk[i] = s->l2norm ? FN(unit_row)(w.k + i * KP, K) : 1;
		FN(number_out)(&m->q_rstd, &c, h, i, w.rq[i]);
		FN(number_out)(&m->k_rstd, &c, h, i, w.rk[i]);
	}
	FN(rows64_out)(w.q, KP, &m->q_norm, &c, h, K);
	FN(rows64_out)(w.k, KP, &m->k_norm, &c, h, K);
	for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
		FN(raw_decays)(m, &w, &c, hv, 1, 0);
		if (s->channels) FN(rows64_out)(w.cum, KP, &m->gk, &c, hv, K);
		for (int i = 0; i < n; i++) {
			w.beta[i] = FN(effective_beta)(s, &c, hv, i);
			FN(number_out)(&m->beta_eff, &c, hv, i, w.beta[i]);
			if (!s->channels) FN(number_out)(&m->sum, &c, hv, i, w.cum[i * KP]);
		}
		FN(products)(s, &w, CH);
		FN(pairs)(s, &w, n);
		FN(invert)(&w, n);
		FN(rows64_out)(w.X, CH, &m->A, &c, hv, CH);
		FN(times)(w.k1, w.k, w.eb, n * KP);
		FN(solve)(&w, n, w.k1, w.k2, KP);
		FN(rows64_out)(w.k2, KP, &m->w, &c, hv, K);
		FN(rows64_in)(w.v1, VP, &s->v, &c, hv, V);
		FN(solve)(&w, n, w.v1, w.v2, VP);
		FN(rows64_out)(w.v2, VP, &m->u, &c, hv, V);
		if (!s->channels) continue;
		for (int i = 0; i < n * CH; i++) w.QK[i] *= scale;
		FN(rows64_out)(w.QK, CH, &m->Aqk, &c, hv, CH);
		FN(times)(w.k1, w.q, w.eb, n * KP);
		FN(rows64_out)(w.k1, KP, &m->qg, &c, hv, K);
		for (int i = 0; i < n * KP; i++) w.k1[i] *= scale;
		FN(rows64_out)(w.k1, KP, &m->qg_scaled, &c, hv, K);
		FN(times)(w.k1, w.k, w.ed, n * KP);
		FN(rows64_out)(w.k1, KP, &m->kg, &c, hv, K);
	}
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
// What carries a state over a chunk: rows of kg (and with q those of qg), and eL
static void FN(carriers)(const stage *m, FN(work) *w, const place *c, int64_t hv, int q) {
	const scan *s = &m->s;
	const int K = s->K, KP = s->KP;
	const int64_t h = m->gk.dtype ? hv : hv / s->G;
	FN(rows64_in)(w->k, KP, &s->k, c, h, K);
	if (q) FN(rows64_in)(w->q, KP, &s->q, c, h, K);
	for (int d = 0; d < KP; d++) w->eL[d] = 1;
	if (m->gk.dtype) {
		view v = at(token_view(&m->gk, c->q.b, c->q.t0 + c->t, hv), c->n - 1);
		FN(row_in)(w->cum, v, K, KP);
		for (int d = 0; d < K; d++) w->eL[d] = FN(decay)(m, 0, w->cum[d]);
	} else if (m->sum.dtype) {
		const REAL last = FN(number)(&m->sum, c, hv, c->n - 1);
		for (int d = 0; d < KP; d++) w->eL[d] = FN(decay)(m, 0, last);
		for (int i = 0; i < c->n; i++) {
			const REAL b = FN(number)(&m->sum, c, hv, i), f = FN(decay)(m, b, last), g = FN(decay)(m, 0, b);
			for (int d = 0; d < KP; d++) w->k[i * KP + d] *= f;
			if (q) for (int d = 0; d < KP; d++) w->q[i * KP + d] *= g;
		}
	}
}
// Columns [col, col+cols) of a state, in rows of COLS
static void FN(state_pass_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t col = unit % m->blocks * COLS, hv = unit / m->blocks % s->HV, n = unit / m->blocks / s->HV;
	const int K = s->K, KP = s->KP, cols = s->V - col < COLS ? s->V - col : COLS;
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	REAL *S = w.h;
	memset(S, 0, sizeof(REAL) * KP * COLS);
	if (s->h0.dtype) {
		view v = state_view(&s->h0, n, hv, s->v_first);
		v.p += col * v.col * size_of(v.type);
		FN(block_in)(S, COLS, v, K, cols);
	}
	for (int64_t i = m->first[n]; i < m->first[n + 1]; i++) {
		const place c = place_of(m, i);
		view to = chunk_view(&m->h, &c, hv, s->v_first);
		to.p += col * to.col * size_of(to.type);
		FN(block_out)(S, COLS, to, K, cols);
		FN(carriers)(m, &w, &c, hv, 0);
		FN(rows64_in)(w.k1, KP, &m->w, &c, hv, K);
		view u = token_view(&m->u, c.q.b, c.q.t0 + c.t, hv), x = token_view(&m->v_new, c.q.b, c.q.t0 + c.t, hv);
		u.p += col * u.col * size_of(u.type), x.p += col * x.col * size_of(x.type);
		FN(block_in)(w.v1, COLS, u, c.n, cols);
		FN(mm)(-1, c.n, COLS, K, w.k1, KP, 1, S, COLS, w.v1, COLS);
		FN(block_out)(w.v1, COLS, x, c.n, cols);
		for (int d = 0; d < K; d++)
			for (int z = 0; z < COLS; z++) S[d * COLS + z] *= w.eL[d];
		FN(mm)(1, K, COLS, c.n, w.k, 1, KP, w.v1, COLS, S, COLS);
	}
	if (s->ht.dtype) {
		view v = state_view(&s->ht, n, hv, s->v_first);
		v.p += col * v.col * size_of(v.type);
		FN(block_out)(S, COLS, v, K, cols);
	}
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static void FN(output_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t hv = unit % s->HV;
	const int K = s->K, V = s->V, KP = s->KP, VP = s->VP;
	const place c = place_of(m, unit / s->HV);
	const REAL scale = s->scale64;
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	if (m->Aqk.dtype) {
		FN(rows64_in)(w.k1, KP, &m->qg_scaled, &c, hv, K);
		FN(pairs_in)(w.QK, &m->Aqk, &c, hv);
	} else {
		FN(rows64_in)(w.q, KP, &s->q, &c, hv / s->G, K);
		FN(rows64_in)(w.k, KP, &s->k, &c, hv / s->G, K);
		FN(sum_decays)(m, &w, &c, hv);
		FN(products)(s, &w, CH);
		FN(pairs)(s, &w, c.n);
		FN(times)(w.k1, w.q, w.eb, c.n * KP);
		for (int i = 0; i < c.n * KP; i++) w.k1[i] *= scale;
		for (int i = 0; i < CH * CH; i++) w.QK[i] *= scale;
	}
	FN(state64_in)(m, w.h, &m->h, &c, hv, 0, V, VP);
	FN(rows64_in)(w.v1, VP, &m->v_new, &c, hv, V);
	FN(mm)(0, c.n, VP, K, w.k1, KP, 1, w.h, VP, w.v2, VP);
	FN(mm)(1, c.n, VP, c.n, w.QK, CH, 1, w.v1, VP, w.v2, VP);
	FN(rows64_out)(w.v2, VP, &s->o, &c, hv, V);
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

// ---------------------------------------------------------------- backward
static void FN(bwd_prepare_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t hv = unit % s->HV;
	const int K = s->K, V = s->V, KP = s->KP, VP = s->VP;
	const place c = place_of(m, unit / s->HV);
	const REAL scale = s->scale64;
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	FN(rows64_in)(w.v1, VP, &s->dout, &c, hv, V);
	if (m->Aqk.dtype) {
		FN(pairs_in)(w.QK, &m->Aqk, &c, hv);
		FN(rows64_in)(w.v2, VP, &m->v_new, &c, hv, V);
		FN(turn)(w.v2, VP, w.ht, CH, CH, VP);
		FN(mm)(0, c.n, CH, V, w.v1, VP, 1, w.ht, CH, w.P, CH);
		for (int i = 0; i < c.n; i++)
			for (int j = 0; j < CH; j++) w.P[i * CH + j] = j > i ? 0 : w.P[i * CH + j] * scale;
		FN(rows64_out)(w.P, CH, &m->dAqk, &c, hv, CH);
		FN(state64_in)(m, w.h, &m->h, &c, hv, 0, V, VP);
		memset(w.ht, 0, sizeof(REAL) * VP * KP);
		FN(turn)(w.h, VP, w.ht, KP, K, V);
		FN(mm)(0, c.n, KP, V, w.v1, VP, 1, w.ht, KP, w.k1, KP);
		FN(rows64_out)(w.k1, KP, &m->dq_raw, &c, hv, K);
	} else {
		FN(rows64_in)(w.q, KP, &s->q, &c, hv / s->G, K);
		FN(rows64_in)(w.k, KP, &s->k, &c, hv / s->G, K);
		for (int i = 0; i < c.n; i++) w.beta[i] = FN(number)(&s->beta, &c, hv, i);
		FN(sum_decays)(m, &w, &c, hv);
		FN(products)(s, &w, CH);
		FN(pairs)(s, &w, c.n);
		for (int i = 0; i < CH * CH; i++) w.QK[i] *= scale;
		FN(pairs_in)(w.X, &m->A, &c, hv);
		FN(times)(w.k1, w.k, w.eb, c.n * KP);
		FN(solve)(&w, c.n, w.k1, w.k2, KP);
		FN(rows64_out)(w.k2, KP, &m->w, &c, hv, K);
		FN(rows64_in)(w.v2, VP, &s->v, &c, hv, V);
		FN(solve)(&w, c.n, w.v2, w.v3, VP);
		FN(rows64_out)(w.v3, VP, &m->u, &c, hv, V);
	}
	FN(mm)(0, c.n, VP, c.n, w.QK, 1, CH, w.v1, VP, w.v2, VP);
	FN(rows64_out)(w.v2, VP, &m->dv_local, &c, hv, V);
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static void FN(state_grad_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t col = unit % m->blocks * COLS, hv = unit / m->blocks % s->HV, n = unit / m->blocks / s->HV;
	const int K = s->K, KP = s->KP, cols = s->V - col < COLS ? s->V - col : COLS;
	const REAL scale = s->scale64;
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	REAL *D = w.h;
	memset(D, 0, sizeof(REAL) * KP * COLS);
	if (s->dht.dtype) {
		view v = state_view(&s->dht, n, hv, s->v_first);
		v.p += col * v.col * size_of(v.type);
		FN(block_in)(D, COLS, v, K, cols);
	}
	for (int64_t i = m->first[n + 1] - 1; i >= m->first[n]; i--) {
		const place c = place_of(m, i);
		view to = chunk_view(&m->dh, &c, hv, s->v_first);
		to.p += col * to.col * size_of(to.type);
		FN(block_out)(D, COLS, to, K, cols);
		FN(carriers)(m, &w, &c, hv, 1);
		FN(rows64_in)(w.k1, KP, &m->w, &c, hv, K);
		const int64_t tok = c.q.t0 + c.t;
		view dl = token_view(&m->dv_local, c.q.b, tok, hv), ds = token_view(&m->dv_scan, c.q.b, tok, hv), dout = token_view(&s->dout, c.q.b, tok, hv);
		dl.p += col * dl.col * size_of(dl.type), ds.p += col * ds.col * size_of(ds.type), dout.p += col * dout.col * size_of(dout.type);
		FN(block_in)(w.v1, COLS, dl, c.n, cols);
		FN(block_in)(w.v2, COLS, dout, c.n, cols);
		FN(mm)(1, c.n, COLS, K, w.k, KP, 1, D, COLS, w.v1, COLS);
		FN(block_out)(w.v1, COLS, ds, c.n, cols);
		for (int d = 0; d < K; d++)
			for (int z = 0; z < COLS; z++) D[d * COLS + z] *= w.eL[d];
		for (int j = 0; j < c.n * KP; j++) w.q[j] *= scale;
		FN(mm)(1, K, COLS, c.n, w.q, 1, KP, w.v2, COLS, D, COLS);
		FN(mm)(-1, K, COLS, c.n, w.k1, 1, KP, w.v1, COLS, D, COLS);
	}
	if (s->dh0.dtype) {
		view v = state_view(&s->dh0, n, hv, s->v_first);
		v.p += col * v.col * size_of(v.type);
		FN(block_out)(D, COLS, v, K, cols);
	}
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
// What pairs of tokens give to dq, dk and dg: with P and F (F below the diagonal only)
//     dq_i += sum_j P_ij k_j Gam_ij      dk_i += sum_j F_ij k_j Gam_ij      dk_j += sum_i (P_ij q_i + F_ij k_i) Gam_ij
//     dg_t += sum_{j < t <= i} X_ij      X_ij = (P_ij q_i + F_ij k_i) k_j Gam_ij
static void FN(pair_gradients)(const scan *s, FN(work) *w, int n) {
	const int KP = s->KP, blocks = (n + BL - 1) / BL;
	REAL *rows = w->k2, *cols = w->k3, *between = w->bp + CH / BL * KP; // sums of X over the blocks before, behind, and around
	memset(rows, 0, sizeof(REAL) * CH * KP);
	memset(cols, 0, sizeof(REAL) * CH * KP);
	memset(between, 0, sizeof(REAL) * CH / BL * KP);
	for (int J = 0; J < blocks; J++) {
		FN(suffixes)(w, KP, J);
		for (int I = J + 1; I < blocks; I++) {
			const REAL *P = w->P + I * BL * CH + J * BL, *F = w->F + I * BL * CH + J * BL;
			if (I > J + 1) FN(further)(w, KP, I - 1);
			FN(mm)(0, BL, KP, BL, P, CH, 1, w->R, KP, w->T, KP);
			FN(mm)(0, BL, KP, BL, F, CH, 1, w->R, KP, w->U, KP);
			FOR_CHANNELS {
				FN(vr) sum = {0};
				for (int i = 0; i < BL; i++) {
					const int at = (I * BL + i) * KP + d;
					const FN(vr) p = MLD(w->pre + at), x = MLD(w->T + i * KP + d) * p, y = MLD(w->U + i * KP + d) * p, z = x * MLD(w->q + at) + y * MLD(w->k + at);
					VROW(w->dq + at) += x;
					VROW(w->dk + at) += y;
					VROW(rows + at) += z;
					sum += z;
				}
				for (int M = J + 1; M < I; M++) VROW(between + M * KP + d) += sum;
			}
			FN(mm)(0, BL, KP, BL, P, 1, CH, w->LQ + I * BL * KP, KP, w->T, KP);
			FN(mm)(1, BL, KP, BL, F, 1, CH, w->LK + I * BL * KP, KP, w->T, KP);
			for (int j = 0; j < BL; j++)
				FOR_CHANNELS {
					const int at = (J * BL + j) * KP + d;
					const FN(vr) x = MLD(w->T + j * KP + d) * MLD(w->S + j * KP + d);
					VROW(w->dk + at) += x;
					VROW(cols + at) += x * MLD(w->k + at);
				}
		}
		const int b = J * BL, e = b + BL < n ? b + BL : n;
		FOR_CHANNELS
			for (int j = b; j < e; j++) {
				const FN(vr) kj = MLD(w->k + j * KP + d);
				const REAL pj = w->P[j * CH + j];
				FN(vr) gam = (FN(vr)){0} + 1, dkj = pj * MLD(w->q + j * KP + d), X[BL], acc = {0};
				VROW(w->dq + j * KP + d) += pj * kj;
				for (int i = j + 1; i < e; i++) {
					const int at = i * KP + d;
					const REAL p = w->P[i * CH + j], f = w->F[i * CH + j];
					gam *= MLD(w->a + at);
					const FN(vr) r = kj * gam, u = p * MLD(w->q + at) + f * MLD(w->k + at);
					VROW(w->dq + at) += p * r;
					VROW(w->dk + at) += f * r;
					dkj += u * gam;
					X[i - b] = u * r;
				}
				VROW(w->dk + j * KP + d) += dkj;
				for (int i = e - 1; i > j; i--) {
					acc += X[i - b];
					VROW(w->dg + i * KP + d) += acc;
				}
			}
	}
	for (int J = 0; J < blocks; J++)
		FOR_CHANNELS {
			FN(vr) before = MLD(between + J * KP + d), behind = {0};
			for (int i = J * BL; i < (J + 1) * BL; i++) {
				VROW(w->dg + i * KP + d) += before;
				before += MLD(cols + i * KP + d);
			}
			for (int i = (J + 1) * BL - 1; i >= J * BL; i--) {
				behind += MLD(rows + i * KP + d);
				VROW(w->dg + i * KP + d) += behind;
			}
		}
}
// One value head: dq and dk of its own (w->dq, w->dk), dg by channels, dv and dbeta
static void FN(finish_head)(const stage *m, FN(work) *w, const place *c, int64_t hv) {
	const scan *s = &m->s;
	const int K = s->K, V = s->V, KP = s->KP, VP = s->VP, n = c->n;
	const REAL scale = s->scale64;
	for (int i = 0; i < CH; i++) w->beta[i] = i < n ? FN(number)(&s->beta, c, hv, i) : 0;
	if (s->channels) FN(raw_decays)(m, w, c, hv, 0, 1);
	else FN(sum_decays)(m, w, c, hv);
	FN(products)(s, w, CH);
	FN(pairs)(s, w, n);
	REAL *v = w->v1, *vn = w->v2, *tu = w->v3, *neg = w->v4;
	// Tu = X^T dv_scan, m = -beta Tu
	FN(pairs_in)(w->X, &m->A, c, hv);
	FN(rows64_in)(v, VP, &m->dv_scan, c, hv, V);
	FN(mm)(0, CH, VP, CH, w->X, 1, CH, v, VP, tu, VP);
	for (int i = 0; i < CH; i++)
		for (int d = 0; d < VP; d++) neg[i * VP + d] = -w->beta[i] * tu[i * VP + d];
	// e = v - (k exp(b)) h - KK v_new; dbeta = Tu.e
	FN(rows64_in)(v, VP, &s->v, c, hv, V);
	FN(rows64_in)(vn, VP, &m->v_new, c, hv, V);
	FN(state64_in)(m, w->h, &m->h, c, hv, 0, V, VP);
	FN(times)(w->k1, w->k, w->eb, CH * KP);
	FN(mm)(-1, n, VP, K, w->k1, KP, 1, w->h, VP, v, VP);
	FN(mm)(-1, n, VP, n, w->KK, CH, 1, vn, VP, v, VP);
	for (int i = 0; i < n; i++) {
		REAL x = FN(dot)(tu + i * VP, v + i * VP, V);
		if (s->beta_sigmoid) x *= w->beta[i] * (1 - w->beta[i] / s->beta_max);
		FN(number_out)(&s->dbeta, c, hv, i, x);
	}
	for (int i = 0; i < n; i++)
		for (int d = 0; d < VP; d++) tu[i * VP + d] *= w->beta[i];
	FN(rows64_out)(tu, VP, &s->dv, c, hv, V);
	// F = m v_new^T below the diagonal, P = scale dO v_new^T on and below it
	REAL *t = w->ht;
	FN(turn)(vn, VP, t, CH, CH, VP);
	FN(mm)(0, CH, CH, V, neg, VP, 1, t, CH, w->F, CH);
	if (m->dAqk.dtype) {
		FN(pairs_in)(w->P, &m->dAqk, c, hv);
		FN(rows64_in)(w->dq, KP, &m->dq_raw, c, hv, K);
	} else {
		FN(rows64_in)(v, VP, &s->dout, c, hv, V);
		FN(mm)(0, CH, CH, V, v, VP, 1, t, CH, w->P, CH);
		for (int i = 0; i < CH; i++)
			for (int j = 0; j < CH; j++) w->P[i * CH + j] = j > i ? 0 : w->P[i * CH + j] * scale;
	}
	for (int i = 0; i < CH; i++)
		for (int j = i; j < CH; j++) w->F[i * CH + j] = 0;
	// dO h^T, m h^T, v_new dh^T and the channels' sums of h dh
	memset(t, 0, sizeof(REAL) * VP * KP);
	FN(turn)(w->h, VP, t, KP, K, V);
	if (!m->dAqk.dtype) FN(mm)(0, CH, KP, V, v, VP, 1, t, KP, w->dq, KP);
	FN(mm)(0, CH, KP, V, neg, VP, 1, t, KP, w->k2, KP);
	REAL *dh = v; // no more rows of values: the gradient of the state in parts of CH rows
	REAL *z = w->z;
	memset(z, 0, sizeof(REAL) * KP);
	memset(t, 0, sizeof(REAL) * VP * KP);
	for (int d0 = 0; d0 < K; d0 += CH) {
		const int part = K - d0 < CH ? K - d0 : CH;
		view x = at(chunk_view(&m->dh, c, hv, s->v_first), d0);
		FN(block_in)(dh, VP, x, part, V);
		for (int d = 0; d < part; d++) z[d0 + d] = FN(dot)(dh + d * VP, w->h + (ptrdiff_t)(d0 + d) * VP, V);
		FN(turn)(dh, VP, t + d0, KP, part, V);
	}
	FN(mm)(0, CH, KP, V, vn, VP, 1, t, KP, w->k3, KP);
	// rows of their own: dq, dk, and the gate's x, y and z
	FOR_CHANNELS {
		FN(vr) x = {0}, y = MLD(w->eL + d) * MLD(z + d);
		for (int i = 0; i < CH; i++) {
			const int o = i * KP + d;
			const FN(vr) eb = MLD(w->eb + o), ed = MLD(w->ed + o), k = MLD(w->k + o);
			const FN(vr) dq = scale * eb * MLD(w->dq + o), dk = eb * MLD(w->k2 + o), du = ed * MLD(w->k3 + o);
			MST(w->k1 + o, dq * MLD(w->q + o) + dk * k);
			MST(w->dq + o, dq);
			MST(w->dk + o, dk + du);
			MST(w->dg + o, y);
			y += du * k;
		}
		for (int i = CH - 1; i >= 0; i--) {
			x += MLD(w->k1 + i * KP + d);
			VROW(w->dg + i * KP + d) += x;
		}
	}
	FN(pair_gradients)(s, w, n);
}
// The gate's gradient goes through its activation; sums of dA_log and ddt_bias of this chunk
static void FN(finish_gate)(const stage *m, FN(work) *w, const place *c, int64_t hv, double *sums) {
	const scan *s = &m->s;
	const int K = s->K, KP = s->KP;
	for (int i = 0; i < c->n; i++) {
		REAL *dg = w->dg + i * KP;
		if (!s->channels) {
			REAL x = 0;
			for (int d = 0; d < K; d++) x += dg[d];
			FN(number_out)(&s->dg, c, hv, i, x);
			continue;
		}
		if (s->gate) {
			const REAL *raw = w->raw + i * KP;
			REAL *dA = w->tok.gk;
			EACH(K) FN(gate_bwd)(LANE_OF(raw), w->tok.amp, s->lower, LANE_OF(dg), &LANE_OF(dg), &LANE_OF(dA));
			for (int d = 0; d < K; d++) sums[0] += dA[d], sums[1 + d] += dg[d];
		}
	}
	if (s->channels) FN(rows64_out)(w->dg, KP, &s->dg, c, hv, K);
}
static void FN(finish_unit)(void *ctx, int64_t unit, char *base) {
	const stage *m = ctx;
	const scan *s = &m->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t h = unit % s->H;
	const int K = s->K, KP = s->KP;
	const place c = place_of(m, unit / s->H);
	FN(work) w;
	FN(work_scratch)(s, &w, base);
	FN(rows64_in)(w.q, KP, &s->q, &c, h, K);
	FN(rows64_in)(w.k, KP, &s->k, &c, h, K);
	memset(w.dqs, 0, sizeof(REAL) * CH * KP);
	memset(w.dks, 0, sizeof(REAL) * CH * KP);
	for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
		FN(finish_head)(m, &w, &c, hv);
		FN(finish_gate)(m, &w, &c, hv, s->sums ? s->sums + (unit / s->H * s->HV + hv) * (1 + s->biases) : NULL);
		for (int i = 0; i < CH * KP; i++) w.dqs[i] += w.dq[i], w.dks[i] += w.dk[i];
	}
	for (int i = 0; i < c.n; i++)
		for (int part = 0; part < 2; part++) {
			const gdnk_tensor *r = part ? &m->k_rstd : &m->q_rstd;
			REAL *dy = (part ? w.dks : w.dqs) + i * KP, *y = (part ? w.k : w.q) + i * KP;
			if (!r->dtype) continue;
			const REAL f = FN(number)(r, &c, h, i), x = FN(dot)(dy, y, K);
			for (int d = 0; d < K; d++) dy[d] = f * (dy[d] - x * y[d]);
		}
	FN(rows64_out)(w.dqs, KP, &s->dq, &c, h, K);
	FN(rows64_out)(w.dks, KP, &s->dk, &c, h, K);
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
#undef VROW
#undef FOR_CHANNELS
