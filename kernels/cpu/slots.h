// The work of decode for one sequence and a few of its value heads, in REAL. Included once for each REAL.
//
// A state is kept as it lies in the pool: rows are key channels, or value channels with state_v_first. Where the pool has REAL in rows without
// gaps, the step reads and writes the slots themselves; else `own` holds the state between the tokens, in full precision.
typedef struct {
	int rows, cols, ld; // ld: cols and zeros up to whole vectors
} FN(form);
static FN(form) FN(form_of)(const scan *s) {
	if (s->v_first) return (FN(form)){s->V, s->K, (s->K + VR - 1) / VR * VR};
	return (FN(form)){s->K, s->V, s->VP};
}
INL view FN(rows_of)(const scan *s, const gdnk_tensor *t, int64_t n, int64_t hv) {
	const view v = state_view(t, n, hv, s->v_first);
	return s->v_first ? (view){v.p, v.type, v.col, v.row} : v;
}
static void FN(read_state)(const FN(form) f, view v, REAL *S) {
	if (sizeof(REAL) == 4) rows_in((float *)S, f.ld, v, f.rows, f.rows, f.cols);
	else
		for (int i = 0; i < f.rows; i++) FN(row_in)(S + (ptrdiff_t)i * f.ld, at(v, i), f.cols, f.ld);
}
static void FN(write_state)(const FN(form) f, const REAL *S, view v, int stream) {
	if (sizeof(REAL) == 4) rows_out((const float *)S, f.ld, v, f.rows, f.cols, stream);
	else
		for (int i = 0; i < f.rows; i++) FN(row_out)(S + (ptrdiff_t)i * f.ld, at(v, i), f.cols);
}
// The state itself where the step can work on it, else NULL
INL REAL *FN(lies)(const FN(form) f, view v) {
	return v.type == (sizeof(REAL) == 4 ? GDNK_F32 : GDNK_F64) && v.col == 1 && v.row == f.ld && f.cols == f.ld ? (REAL *)v.p : NULL;
}
static void FN(step_form)(const scan *s, FN(token) *w, const FN(form) f, const REAL *P, REAL *S, const REAL *next, int stream) {
	stream = stream && !((uintptr_t)S & (4 * VW - 1));
	if (s->v_first && stream) FN(step_v_first)(s, w, P, S, f.ld, next, 1);
	else if (s->v_first) FN(step_v_first)(s, w, P, S, f.ld, next, 0);
	else if (stream) FN(step_as)(s, w, P, S, next, 1, 1);
	else FN(step_as)(s, w, P, S, next, 1, 0);
}
static int64_t FN(decode_scratch)(const scan *s, FN(token) *w, REAL **own, char *base) {
	const FN(form) f = FN(form_of)(s);
	char *p = base;
	FN(token_scratch)(s, w, &p);
	*own = FN(take)(&p, f.rows * f.ld);
	return p - base;
}

static void FN(decode_unit)(void *ctx, int64_t unit, char *base) {
	const decode *c = ctx;
	const scan *s = &c->s;
	const uint64_t fp = sizeof(REAL) == 4 ? flush_denormals() : 0;
	const int64_t n = unit / c->groups, first = unit % c->groups * c->group, end = first + c->group < s->HV ? first + c->group : s->HV;
	const FN(form) f = FN(form_of)(s);
	const sequence q = sequence_of(s, n);
	const int64_t from = q.len || s->ht.dtype ? first_slot(c, n) : -1;
	FN(token) w;
	REAL *own;
	FN(decode_scratch)(s, &w, &own, base);
	for (int64_t hv = first; hv < end; hv++) {
		const REAL *P = own;
		if (from < 0) memset(own, 0, sizeof(REAL) * f.rows * f.ld), memset(w.o, 0, sizeof(REAL) * s->VP);
		else if (!(P = FN(lies)(f, FN(rows_of)(s, &c->pool, from, hv)))) FN(read_state)(f, FN(rows_of)(s, &c->pool, from, hv), own), P = own;
		for (int64_t t = 0; t < q.len; t++) {
			const int last = t + 1 == q.len;
			if (from >= 0) {
				const int64_t to = next_slot(c, n, t, last);
				// Straight to where the state shall lie; that of the last token may be an output of its own.
				REAL *S = to >= 0 ? FN(lies)(f, FN(rows_of)(s, &c->pool, to, hv)) : last && s->ht.dtype ? FN(lies)(f, FN(rows_of)(s, &s->ht, n, hv)) : NULL;
				if (!S) S = own;
				FN(load)(s, &w, &q, t, hv);
				for (int d = s->K; s->v_first && d < f.ld; d++) w.k[d] = w.q[d] = w.ak[d] = 0;
				FN(step_form)(s, &w, f, P, S, last && hv + 1 < end ? FN(lies)(f, FN(rows_of)(s, &c->pool, from, hv + 1)) : NULL, to < 0 && S != own && s->stream);
				if (to >= 0 && S == own) FN(write_state)(f, own, FN(rows_of)(s, &c->pool, to, hv), 0);
				P = S;
			}
			FN(row_out)(w.o, token_view(&s->o, q.b, q.t0 + t, hv), s->V);
		}
		if (s->ht.dtype && (const char *)P != state_view(&s->ht, n, hv, 0).p) FN(write_state)(f, P, FN(rows_of)(s, &s->ht, n, hv), s->stream);
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static int FN(decode_run)(decode *c) {
	FN(token) w;
	REAL *own;
	return gdnk_parallel(c->s.N * c->groups, FN(decode_scratch)(&c->s, &w, &own, NULL), FN(decode_unit), c);
}
