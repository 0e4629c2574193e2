// The token form, forward and backward, in REAL (float or double): the recurrence itself, with decays per head, per key channel and per
// value channel. It serves decoding and short sequences, and in double everything. Included once for each REAL; FN names the functions.
//
// Backward of a token, D the gradient of S_t:   D += scale q dO^T     dq = scale S dO     u = D^T k     dbeta = u e    dv = beta u
//     dk = D (beta e) - S~ dv      dS~ = D - k dv^T      gates: sums of dS~ S~ over what they scale      D <- decay dS~
// It needs S at every token. The tape has one state every SEG = LEAP * LEAP tokens; two levels of LEAP states are recomputed from it.
#define VR ((int)(sizeof(vf) / sizeof(REAL)))
typedef REAL FN(vr) __attribute__((vector_size(sizeof(vf))));
typedef REAL FN(vru) __attribute__((vector_size(sizeof(vf)), aligned(sizeof(REAL)), may_alias));
#define RLD(p) (*(const FN(vru) *)(p))
#define RST(p, x) (*(FN(vru) *)(p) = (x))
#define EXP(x) (sizeof(REAL) == 4 ? expf(x) : exp(x))
// What goes by elements is done for LANES of them: a vector, or one double. The rows' memory goes on to the vector's end.
typedef LANES FN(lanes) __attribute__((may_alias));
#define EACH(n) for (int d = 0; d < (n); d += (int)(sizeof(LANES) / sizeof(REAL)))
#define LANE_OF(x) (*(FN(lanes) *)((x) + d))

typedef struct { // one token of one value head
	REAL *k, *q, *ak, *gk, *raw, *dk, *dq, *dgk;      // [K]; ak: decay of each key channel, g included; raw: the raw gate with its bias
	REAL *v, *av, *be, *dout, *e, *acc, *w, *o, *dgv; // [VP]; av: decay of each value channel
	double amp;
	REAL rk, rq;
} FN(token);

INL REAL FN(hsum)(FN(vr) x) {
	REAL s = 0;
	for (int i = 0; i < VR; i++) s += x[i];
	return s;
}
// cols numbers of row 0 of a view, zero up to pad
static void FN(row_in)(REAL *d, view v, int cols, int pad) {
	if (sizeof(REAL) == 4) rows_in((float *)d, pad, v, 1, 1, cols);
	else {
		for (int c = 0; c < cols; c++) d[c] = ld1(v.p, v.type, c * v.col);
		for (int c = cols; c < pad; c++) d[c] = 0;
	}
}
static void FN(row_out)(const REAL *s, view v, int cols) {
	if (sizeof(REAL) == 4) rows_out((const float *)s, cols, v, 1, cols, 0);
	else
		for (int c = 0; c < cols; c++) st1(v.p, v.type, c * v.col, s[c]);
}
static REAL FN(unit_row)(REAL *x, int n) {
	double s = 1e-6;
	for (int i = 0; i < n; i++) s += (double)x[i] * x[i];
	const REAL r = 1 / sqrt(s);
	for (int i = 0; i < n; i++) x[i] *= r;
	return r;
}
// The log decays of a token into ak: one for all channels, or one each
static void FN(log_decays)(const scan *s, FN(token) *w, const sequence *q, int64_t tok, int64_t hv) {
	const int n = s->biases;
	if (s->g.dtype) {
		FN(row_in)(w->ak, token_view(&s->g, q->b, tok, hv), n, n);
		if (s->gate) {
			const gdnk_tensor *b = &s->dt_bias;
			w->amp = amplitude(s, hv);
			memcpy(w->raw, w->ak, sizeof(REAL) * n);
			if (b->dtype) {
				FN(row_in)(w->gk, (view){(char *)b->data + hv * b->stride[0] * size_of(b->dtype), b->dtype, 0, b->stride[1]}, n, n);
				for (int d = 0; d < n; d++) w->raw[d] += w->gk[d];
			}
			EACH(n) LANE_OF(w->ak) = FN(gate)(LANE_OF(w->raw), w->amp, s->lower);
		}
	} else memset(w->ak, 0, sizeof(REAL) * n);
}
// All of token t of value head hv: rows, decays as factors, effective beta
static void FN(load)(const scan *s, FN(token) *w, const sequence *q, int64_t t, int64_t hv) {
	const int K = s->K, V = s->V, VP = s->VP;
	const int64_t h = hv / s->G, tok = q->t0 + t;
	FN(row_in)(w->k, token_view(&s->k, q->b, tok, h), K, K);
	FN(row_in)(w->q, token_view(&s->q, q->b, tok, h), K, K);
	FN(row_in)(w->v, token_view(&s->v, q->b, tok, hv), V, VP);
	w->rk = w->rq = 1;
	if (s->l2norm) w->rk = FN(unit_row)(w->k, K), w->rq = FN(unit_row)(w->q, K);
	const int n = s->biases;
	FN(log_decays)(s, w, q, tok, hv);
	EACH(n) LANE_OF(w->ak) = FN(exp)(LANE_OF(w->ak));
	for (int d = n; d < K; d++) w->ak[d] = w->ak[0];
	if (s->gk.dtype) {
		FN(row_in)(w->gk, token_view(&s->gk, q->b, tok, hv), K, K);
		EACH(K) LANE_OF(w->ak) *= FN(exp)(LANE_OF(w->gk));
	}
	if (s->gv.dtype) FN(row_in)(w->av, token_view(&s->gv, q->b, tok, hv), V, VP);
	for (int d = 0; d < VP; d++) w->av[d] = s->gv.dtype ? EXP(w->av[d]) : 1;
	if (s->perv) FN(row_in)(w->be, token_view(&s->beta, q->b, tok, hv), V, VP);
	else {
		const REAL b = s->beta.dtype ? ld1(token_view(&s->beta, q->b, tok, hv).p, s->beta.dtype, 0) : 1;
		for (int d = 0; d < VP; d++) w->be[d] = b;
	}
	if (s->beta_sigmoid) {
		const int m = s->perv ? V : 1;
		for (int d = 0; d < m; d++) w->be[d] = s->beta_max / (1 + EXP(-w->be[d]));
		for (int d = m; d < VP; d++) w->be[d] = s->perv ? 0 : w->be[0];
	}
}
static REAL FN(dot)(const REAL *a, const REAL *b, int n) {
	FN(vr) x = {0};
	int d = 0;
	for (; d + VR <= n; d += VR) x += RLD(a + d) * RLD(b + d);
	REAL s = FN(hsum)(x);
	for (; d < n; d++) s += a[d] * b[d];
	return s;
}
// One token from P to S, which may be the same memory. The state is read once for both of its products, k^T S~ and q^T S~, and once more, from
// the caches, to be written: with x = beta e, S^T q is S~^T q + (q.k) x. stream: S is written past the caches. next: what the next step reads,
// asked for while this one writes; NULL: nothing.
//
// For n vectors of value columns from v on, rows being key channels
INL void FN(step_columns)(const scan *s, const FN(token) *w, const REAL *P, REAL *S, const REAL *next, int read, int stream, REAL qk, int v, int n) {
	const int K = s->K;
	const ptrdiff_t VP = s->VP;
	FN(vr) e[8] = {0}, o[8] = {0}, x[8], av[8];
	for (int d = 0; d < K; d++) {
		const REAL k = w->k[d] * w->ak[d], q = w->q[d] * w->ak[d];
		UNROLL for (int z = 0; z < n; z++) {
			const FN(vr) u = RLD(P + d * VP + v + z * VR);
			e[z] += k * u;
			if (read) o[z] += q * u;
		}
	}
	UNROLL for (int z = 0; z < n; z++) {
		av[z] = RLD(w->av + v + z * VR);
		x[z] = (RLD(w->v + v + z * VR) - av[z] * e[z]) * RLD(w->be + v + z * VR);
		if (read) RST(w->o + v + z * VR, (av[z] * o[z] + qk * x[z]) * (REAL)s->scale64);
	}
	for (int d = 0; d < K; d++) {
		const REAL k = w->k[d], ak = w->ak[d];
		if (next)
			UNROLL for (int z = 0; z < n; z++) __builtin_prefetch(next + d * VP + v + z * VR, 0, 2);
		UNROLL for (int z = 0; z < n; z++) {
			const ptrdiff_t i = d * VP + v + z * VR;
			const FN(vr) u = RLD(P + i) * (ak * av[z]) + k * x[z];
			if (stream) st_stream(S + i, (vf)u);
			else RST(S + i, u);
		}
	}
}
INL void FN(step_as)(const scan *s, const FN(token) *w, const REAL *P, REAL *S, const REAL *next, int read, int stream) {
	const REAL qk = FN(dot)(w->q, w->k, s->K);
	int v = 0;
	if (RB == 8) // half of the registers are the sums
		for (; v + 8 * VR <= s->VP; v += 8 * VR) FN(step_columns)(s, w, P, S, next, read, stream, qk, v, 8);
	for (; v + 4 * VR <= s->VP; v += 4 * VR) FN(step_columns)(s, w, P, S, next, read, stream, qk, v, 4);
	for (; v < s->VP; v += VR) FN(step_columns)(s, w, P, S, next, read, stream, qk, v, 1);
}
// The same where rows are value channels of ld numbers, a multiple of VR with zeros behind the K key channels, in the token's rows too.
INL FN(vr) FN(sums)(const FN(vr) *a) {
	FN(vr) r;
	if (sizeof(REAL) == 4) {
		const vf x = redall((const vf *)a);
		memcpy(&r, &x, sizeof r);
	} else
		for (int i = 0; i < VR; i++) r[i] = FN(hsum)(a[i]);
	return r;
}
INL void FN(step_rows)(const scan *s, const FN(token) *w, const REAL *P, REAL *S, ptrdiff_t ld, const REAL *next, int stream, REAL qk, int v, int n) {
	FN(vr) e[VW] = {0}, o[VW] = {0};
	P += v * ld, S += v * ld;
	for (int d = 0; d < ld; d += VR) {
		const FN(vr) k = RLD(w->k + d) * RLD(w->ak + d);
		UNROLL for (int z = 0; z < n; z++) e[z] += RLD(P + z * ld + d) * k;
	}
	for (int d = 0; d < ld; d += VR) {
		const FN(vr) q = RLD(w->q + d) * RLD(w->ak + d);
		UNROLL for (int z = 0; z < n; z++) o[z] += RLD(P + z * ld + d) * q;
	}
	REAL x[VR];
	if (n == VR) {
		const FN(vr) av = RLD(w->av + v), y = (RLD(w->v + v) - av * FN(sums)(e)) * RLD(w->be + v);
		RST(w->o + v, (av * FN(sums)(o) + qk * y) * (REAL)s->scale64);
		RST(x, y);
	} else {
		x[0] = (w->v[v] - w->av[v] * FN(hsum)(e[0])) * w->be[v];
		w->o[v] = (w->av[v] * FN(hsum)(o[0]) + qk * x[0]) * (REAL)s->scale64;
	}
	for (int d = 0; d < ld; d += VR) {
		const FN(vr) k = RLD(w->k + d), ak = RLD(w->ak + d);
		if (next)
			UNROLL for (int z = 0; z < n; z++) __builtin_prefetch(next + (v + z) * ld + d, 0, 2);
		UNROLL for (int z = 0; z < n; z++) {
			const FN(vr) u = RLD(P + z * ld + d) * (ak * w->av[v + z]) + k * x[z];
			if (stream) st_stream(S + z * ld + d, (vf)u);
			else RST(S + z * ld + d, u);
		}
	}
}
INL void FN(step_v_first)(const scan *s, const FN(token) *w, const REAL *P, REAL *S, int ld, const REAL *next, int stream) {
	const REAL qk = FN(dot)(w->q, w->k, s->K);
	int v = 0;
	for (; v + VR <= s->V; v += VR) FN(step_rows)(s, w, P, S, ld, next, stream, qk, v, VR);
	for (; v < s->V; v++) FN(step_rows)(s, w, P, S, ld, next, stream, qk, v, 1);
}
static void FN(step)(const scan *s, FN(token) *w, const REAL *P, REAL *S, int read) {
	if (read) FN(step_as)(s, w, P, S, NULL, 1, 0);
	else FN(step_as)(s, w, P, S, NULL, 0, 0);
}
// D behind the token becomes D before it. P, S: states before and behind it.
static void FN(step_bwd)(const scan *s, FN(token) *w, const REAL *P, const REAL *S, REAL *D, REAL *dg) {
	const int K = s->K, VP = s->VP;
	const REAL scale = s->scale64;
	memset(w->acc, 0, sizeof(REAL) * VP);
	memset(w->dgv, 0, sizeof(REAL) * VP);
	memcpy(w->e, w->v, sizeof(REAL) * VP);
	for (int d = 0; d < K; d++) {
		FN(vr) x = {0};
		const REAL *Pd = P + (ptrdiff_t)d * VP, *Sd = S + (ptrdiff_t)d * VP;
		REAL *Dd = D + (ptrdiff_t)d * VP;
		for (int v = 0; v < VP; v += VR) {
			FN(vr) dout = RLD(w->dout + v), u = RLD(Dd + v) + scale * w->q[d] * dout;
			RST(Dd + v, u);
			RST(w->acc + v, RLD(w->acc + v) + w->k[d] * u);
			RST(w->e + v, RLD(w->e + v) - w->k[d] * (w->ak[d] * RLD(w->av + v) * RLD(Pd + v)));
			x += RLD(Sd + v) * dout;
		}
		w->dq[d] += scale * FN(hsum)(x);
	}
	for (int v = 0; v < VP; v += VR) RST(w->w + v, RLD(w->be + v) * RLD(w->acc + v)); // dv
	*dg = 0;
	for (int d = 0; d < K; d++) {
		FN(vr) x = {0}, y = {0};
		const REAL *Pd = P + (ptrdiff_t)d * VP;
		REAL *Dd = D + (ptrdiff_t)d * VP;
		for (int v = 0; v < VP; v += VR) {
			FN(vr) dec = w->ak[d] * RLD(w->av + v), st = dec * RLD(Pd + v), u = RLD(Dd + v), dv = RLD(w->w + v);
			x += u * (RLD(w->be + v) * RLD(w->e + v)) - st * dv;
			u -= w->k[d] * dv;
			FN(vr) gg = u * st;
			y += gg;
			RST(w->dgv + v, RLD(w->dgv + v) + gg);
			RST(Dd + v, dec * u);
		}
		w->dk[d] += FN(hsum)(x);
		w->dgk[d] = FN(hsum)(y);
		*dg += w->dgk[d];
	}
}

// The form of a state as the forward walks it: rows of ld numbers, cols of them and zeros up to whole vectors. Rows are key channels. Decoding
// takes a pool as it lies, rows being value channels where they come first; elsewhere both layouts give the same bits.
typedef struct {
	int v_first, rows, cols, ld;
} FN(form);
INL FN(form) FN(keys)(const scan *s) { return (FN(form)){0, s->K, s->V, s->VP}; }
static FN(form) FN(form_of)(const scan *s) {
	if (s->v_first && s->P) return (FN(form)){1, s->V, s->K, (s->K + VR - 1) / VR * VR};
	return FN(keys)(s);
}
INL view FN(rows_of)(const scan *s, FN(form) f, const gdnk_tensor *t, int64_t n, int64_t hv) {
	const view v = state_view(t, n, hv, s->v_first);
	return f.v_first ? (view){v.p, v.type, v.col, v.row} : v;
}
static void FN(read_state)(FN(form) f, view v, REAL *S) {
	if (sizeof(REAL) == 4 && columns_in((float *)S, f.ld, v, f.rows, f.cols)) return;
	if (sizeof(REAL) == 4) rows_in((float *)S, f.ld, v, f.rows, f.rows, f.cols);
	else
		for (int i = 0; i < f.rows; i++) FN(row_in)(S + (ptrdiff_t)i * f.ld, at(v, i), f.cols, f.ld);
}
static void FN(write_state)(FN(form) f, const REAL *S, view v, int stream) {
	if (sizeof(REAL) == 4 && columns_out((const float *)S, f.ld, v, f.rows, f.cols)) return;
	if (sizeof(REAL) == 4) rows_out((const float *)S, f.ld, v, f.rows, f.cols, stream);
	else
		for (int i = 0; i < f.rows; i++) FN(row_out)(S + (ptrdiff_t)i * f.ld, at(v, i), f.cols);
}
// The state itself where the step can work on it in memory, else NULL
INL REAL *FN(lies)(const scan *s, FN(form) f, const gdnk_tensor *t, int64_t n, int64_t hv) {
	if (t->dtype != (sizeof(REAL) == 4 ? GDNK_F32 : GDNK_F64)) return NULL;
	const view v = FN(rows_of)(s, f, t, n, hv);
	return v.col == 1 && v.row == f.ld && f.cols == f.ld ? (REAL *)v.p : NULL;
}
static void FN(token_state_in)(const scan *s, const gdnk_tensor *t, int64_t n, int64_t hv, REAL *S) {
	if (t->dtype) FN(read_state)(FN(keys)(s), state_view(t, n, hv, s->v_first), S);
	else memset(S, 0, sizeof(REAL) * s->K * s->VP);
}
// The tape's states are compact: [HV][nstates][K][V]
static REAL *FN(tape_state)(const scan *s, const sequence *q, int64_t hv, int64_t seg) {
	return (REAL *)s->states + (hv * s->nstates + q->seg + seg - 1) * s->K * s->V;
}
static REAL *FN(take)(char **p, int64_t n) {
	REAL *r = (REAL *)*p;
	*p += (n * (int64_t)sizeof(REAL) + 127) / 64 * 64;
	return r;
}
static void FN(token_scratch)(const scan *s, FN(token) *w, char **p) {
	REAL **k[] = {&w->k, &w->q, &w->ak, &w->gk, &w->raw, &w->dk, &w->dq, &w->dgk}, **v[] = {&w->v, &w->av, &w->be, &w->dout, &w->e, &w->acc, &w->w, &w->o, &w->dgv};
	for (int i = 0; i < 8; i++) *k[i] = FN(take)(p, s->K);
	for (int i = 0; i < 9; i++) *v[i] = FN(take)(p, s->VP);
}

static void FN(step_form)(const scan *s, FN(token) *w, FN(form) f, const REAL *P, REAL *S, const REAL *next, int stream) {
	stream = stream && !((uintptr_t)S & (4 * VW - 1));
	if (f.v_first && stream) FN(step_v_first)(s, w, P, S, f.ld, next, 1);
	else if (f.v_first) FN(step_v_first)(s, w, P, S, f.ld, next, 0);
	else if (stream) FN(step_as)(s, w, P, S, next, 1, 1);
	else FN(step_as)(s, w, P, S, next, 1, 0);
}
static int64_t FN(walk_scratch)(const scan *s, FN(token) *w, REAL **own, char *base) {
	const FN(form) f = FN(form_of)(s);
	char *p = base;
	FN(token_scratch)(s, w, &p);
	*own = FN(take)(&p, f.rows * f.ld);
	return p - base;
}

// A few value heads of a sequence. A step reads the state once and writes it once, from where it lies to where it shall lie; `own` holds it between
// the tokens where no memory of the caller's does.
static void FN(token_fwd)(void *ctx, int64_t unit, char *base) {
	const scan *s = ctx;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t n = unit / s->walks, first = unit % s->walks * s->walk, end = first + s->walk < s->HV ? first + s->walk : s->HV;
	const FN(form) f = FN(form_of)(s);
	const sequence q = sequence_of(s, n);
	const int64_t from = q.len || s->ht.dtype ? first_slot(s, n) : -1;
	FN(token) w;
	REAL *own;
	FN(walk_scratch)(s, &w, &own, base);
	for (int64_t hv = first; hv < end; hv++) {
		const REAL *P = from < 0 ? NULL : FN(lies)(s, f, &s->h0, from, hv);
		if (!P) {
			if (from >= 0 && s->h0.dtype) FN(read_state)(f, FN(rows_of)(s, f, &s->h0, from, hv), own);
			else memset(own, 0, sizeof(REAL) * f.rows * f.ld);
			P = own;
		}
		if (from < 0) memset(w.o, 0, sizeof(REAL) * s->VP); // padding
		for (int64_t t = 0; t < q.len; t++) {
			const int last = t + 1 == q.len;
			if (s->h.dtype && t % SEG == 0) FN(write_state)(f, P, kept_view(s, &q, n, t, hv), s->stream);
			if (s->states && t && t % SEG == 0)
				for (int d = 0; d < s->K; d++) memcpy(FN(tape_state)(s, &q, hv, t / SEG) + d * s->V, P + (ptrdiff_t)d * s->VP, sizeof(REAL) * s->V);
			if (from >= 0) {
				const int64_t to = next_slot(s, n, t, last);
				REAL *S = to >= 0 ? FN(lies)(s, f, &s->h0, to, hv) : last ? FN(lies)(s, f, &s->ht, n, hv) : NULL;
				if (!S) S = own;
				FN(load)(s, &w, &q, t, hv);
				for (int d = s->K; f.v_first && d < f.ld; d++) w.k[d] = w.q[d] = w.ak[d] = 0;
				FN(step_form)(s, &w, f, P, S, last && hv + 1 < end ? FN(lies)(s, f, &s->h0, from, hv + 1) : NULL, to < 0 && S != own && s->stream);
				if (to >= 0 && S == own) FN(write_state)(f, own, FN(rows_of)(s, f, &s->h0, to, hv), 0);
				P = S;
			}
			if (s->o.dtype) FN(row_out)(w.o, token_view(&s->o, q.b, q.t0 + t, hv), s->V);
		}
		if (s->ht.dtype && P != FN(lies)(s, f, &s->ht, n, hv)) FN(write_state)(f, P, FN(rows_of)(s, f, &s->ht, n, hv), s->stream);
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

enum { FN(LEAP) = 8 };
static int64_t FN(token_bwd_scratch)(const scan *s, char *base) {
	FN(token) w;
	char *p = base;
	FN(token_scratch)(s, &w, &p);
	FN(take)(&p, 2 * SEG * s->K);
	FN(take)(&p, (2 * FN(LEAP) + s->G) * s->K * s->VP);
	take(&p, 2 * s->G * (1 + s->biases));
	return p - base;
}
static void FN(token_bwd)(void *ctx, int64_t unit, char *base) {
	const scan *s = ctx;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t n = unit / s->H, h = unit % s->H, KV = s->K * s->VP;
	const int K = s->K, V = s->V, LEAP = FN(LEAP);
	const sequence q = sequence_of(s, n);
	FN(token) w;
	char *p = base;
	FN(token_scratch)(s, &w, &p);
	REAL *dk = FN(take)(&p, 2 * SEG * K), *dq = dk + SEG * K; // of a segment, summed over the value heads
	REAL *far = FN(take)(&p, (2 * LEAP + s->G) * KV), *near = far + LEAP * KV, *D = near + LEAP * KV; // states before every LEAPth and every token
	REAL *wdk = w.dk, *wdq = w.dq;
	const int nsums = 1 + s->biases;
	double *sums = (double *)take(&p, 2 * s->G * nsums);
	memset(sums, 0, sizeof *sums * s->G * nsums);
	for (int64_t e = 0; e < s->G; e++) FN(token_state_in)(s, &s->dht, n, h * s->G + e, D + e * KV);
	for (int64_t t0 = (q.len - 1) / SEG * SEG; t0 >= 0 && q.len; t0 -= SEG) {
		const int len = q.len - t0 < SEG ? q.len - t0 : SEG;
		memset(dk, 0, sizeof(REAL) * 2 * SEG * K);
		for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
			REAL *Dv = D + (hv - h * s->G) * KV;
			if (t0) {
				memset(far, 0, sizeof(REAL) * KV);
				for (int d = 0; d < K; d++) memcpy(far + (ptrdiff_t)d * s->VP, FN(tape_state)(s, &q, hv, t0 / SEG) + d * V, sizeof(REAL) * V);
			} else FN(token_state_in)(s, &s->h0, n, hv, far);
			for (int i = 0; i < (len - 1) / LEAP * LEAP; i++) {
				REAL *to = far + (i / LEAP + 1) * KV;
				FN(load)(s, &w, &q, t0 + i, hv);
				FN(step)(s, &w, i % LEAP ? to : to - KV, to, 0);
			}
			for (int f = (len - 1) / LEAP; f >= 0; f--) {
				const int first = f * LEAP, m = len - first < LEAP ? len - first : LEAP;
				memcpy(near, far + f * KV, sizeof(REAL) * KV);
				// far + f is read for the last time: it takes the state behind the last token.
				for (int i = 0; i < m; i++) {
					FN(load)(s, &w, &q, t0 + first + i, hv);
					FN(step)(s, &w, near + i * KV, i + 1 < m ? near + (i + 1) * KV : far + f * KV, 0);
				}
				for (int i = m - 1; i >= 0; i--) {
					const int64_t tok = q.t0 + t0 + first + i;
					REAL dg;
					FN(load)(s, &w, &q, t0 + first + i, hv);
					FN(row_in)(w.dout, token_view(&s->dout, q.b, tok, hv), V, s->VP);
					memset(wdk, 0, sizeof(REAL) * K);
					memset(wdq, 0, sizeof(REAL) * K);
					FN(step_bwd)(s, &w, near + i * KV, i + 1 < m ? near + (i + 1) * KV : far + f * KV, Dv, &dg);
					REAL yk = 0, yq = 0;
					if (s->l2norm)
						for (int d = 0; d < K; d++) yk += wdk[d] * w.k[d], yq += wdq[d] * w.q[d];
					for (int d = 0; d < K; d++) {
						dk[(first + i) * K + d] += s->l2norm ? w.rk * (wdk[d] - yk * w.k[d]) : wdk[d];
						dq[(first + i) * K + d] += s->l2norm ? w.rq * (wdq[d] - yq * w.q[d]) : wdq[d];
					}
					FN(row_out)(w.w, token_view(&s->dv, q.b, tok, hv), V);
					if (s->dgk.dtype) FN(row_out)(w.dgk, token_view(&s->dgk, q.b, tok, hv), K);
					if (s->dgv.dtype) FN(row_out)(w.dgv, token_view(&s->dgv, q.b, tok, hv), V);
					if (s->dg.dtype || s->gate) {
						const int biases = s->biases;
						if (!s->channels) w.dgk[0] = dg;
						if (s->gate) {
							double *sum = sums + (hv - h * s->G) * nsums;
							EACH(biases) FN(gate_bwd)(LANE_OF(w.raw), w.amp, s->lower, LANE_OF(w.dgk), &LANE_OF(w.dgk), &LANE_OF(w.gk));
							for (int d = 0; d < biases; d++) sum[0] += w.gk[d], sum[1 + d] += w.dgk[d];
						}
						if (s->dg.dtype) FN(row_out)(w.dgk, token_view(&s->dg, q.b, tok, hv), biases);
					}
					if (s->dbeta.dtype) {
						REAL sum = 0;
						for (int v = 0; v < V; v++) {
							REAL x = w.acc[v] * w.e[v];
							if (s->beta_sigmoid) x *= w.be[v] * (1 - w.be[v] / s->beta_max);
							w.acc[v] = x;
							sum += x;
						}
						if (!s->perv) w.acc[0] = sum;
						view b = token_view(&s->dbeta, q.b, tok, hv);
						FN(row_out)(w.acc, b, s->perv ? V : 1);
					}
				}
			}
		}
		for (int i = 0; i < len; i++) {
			FN(row_out)(dk + i * K, token_view(&s->dk, q.b, q.t0 + t0 + i, h), K);
			if (s->dq.dtype) FN(row_out)(dq + i * K, token_view(&s->dq, q.b, q.t0 + t0 + i, h), K);
		}
	}
	for (int64_t e = 0; e < s->G; e++) {
		const int64_t hv = h * s->G + e;
		if (s->dh0.dtype) FN(write_state)(FN(keys)(s), D + e * KV, state_view(&s->dh0, n, hv, s->v_first), s->stream);
		if (s->sums) memcpy(s->sums + (n * s->HV + hv) * nsums, sums + e * nsums, sizeof *sums * nsums);
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static int FN(token_run)(scan *s, int backward) {
	FN(token) w;
	REAL *own;
	if (backward) return gdnk_parallel(s->N * s->H, FN(token_bwd_scratch)(s, NULL), FN(token_bwd), s);
	// Heads that one thread takes in turn: while it writes the state of one it asks for that of the next. Units enough to share out.
	s->walk = s->N * s->HV / (4 * gdnk_get_num_threads());
	s->walk = s->walk < 1 ? 1 : s->walk > 8 ? 8 : s->walk;
	s->walks = (s->HV + s->walk - 1) / s->walk;
	return gdnk_parallel(s->N * s->walks, FN(walk_scratch)(s, &w, &own, NULL), FN(token_fwd), s);
}
