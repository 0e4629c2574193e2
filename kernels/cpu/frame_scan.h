// The scans of frame GDN in REAL (float or double). Included once for each REAL; FN names the functions.
//
//	forward    S_t = S_{t-1} W_t + U_t
//	backward   G_t = dS_t + G_{t+1} W_{t+1}^T     dU_t = G_t     dW_t = S_{t-1}^T G_t     what G_0 W_0^T sends back is the first state's
//
// A state that is known to be 0 is never multiplied: what is not finite in W may then not show.

// Rows of the state: those that the caller has, and below them, where M is asked for, the rows of a product of W's, which begin as Id.
// These are the rows from r on of a state before the first frame.
static void FN(start)(const chain *c, REAL *d, int ld, int64_t b, int64_t r, int n, int rows) {
	const int own = n < c->V - r ? n : c->V > r ? (int)(c->V - r) : 0;
	if (c->S0.dtype && own) FN(load)(d, ld, at(state_rows(&c->S0, b), r), own, rows, c->K);
	else FN(zero)(d, ld, rows);
	for (int i = own; i < n; i++) d[i * ld + r + i - c->V] = 1;
}
// ---------------------------------------------------------------- z <- Wz z + uz
// A row of Wz and z are two vectors, so it is a matter of memory. Where a unit is a whole head, each frame of z follows that of S, and its Wz
// was asked for while the matrices were multiplied; it is read where it lies if it can be.
typedef struct {
	REAL *now, *next, *x, *D, *W, *X; // X: z before each frame by the scan's order, computed again
	int ld, live;
	int64_t b;
} FN(vector);
INL const REAL *FN(where)(view v, int K, FN(vector) *s, ptrdiff_t *stride) {
	if (v.type == TYPE && v.col == 1) return *stride = v.row, (const REAL *)v.p;
	FN(load)(s->W, s->ld, v, K, K, K);
	return *stride = s->ld, s->W;
}
INL int64_t FN(vector_scratch)(const chain *c, int bwd) {
	const int64_t ld = FN(stride)(c->K);
	return (ld * (c->K + 3 + (bwd ? c->K : 0) + (c->rescan ? c->T + 1 : 0))) * sizeof(REAL) + 64 * 8;
}
static void FN(vector_place)(const chain *c, FN(vector) *s, int64_t b, int bwd, char **p) {
	s->b = b, s->ld = FN(stride)(c->K);
	s->W = FN(take)(p, s->ld * c->K), s->now = FN(take)(p, s->ld), s->next = FN(take)(p, s->ld), s->x = FN(take)(p, s->ld);
	s->D = bwd ? FN(take)(p, s->ld * c->K) : NULL;
	s->X = c->rescan ? FN(take)(p, s->ld * (c->T + 1)) : NULL;
}
// to = W now + uz of frame t
static void FN(vector_advance)(const chain *c, FN(vector) *s, int64_t t, const REAL *now, REAL *to, int live) {
	FN(load)(to, s->ld, matrix(&c->U, s->b, t), 1, 1, c->K);
	if (!live) return;
	ptrdiff_t stride;
	const REAL *W = FN(where)(matrix(&c->W, s->b, t), c->K, s, &stride);
	FN(rows_dot)(to, W, stride, now, c->K, c->K);
}
static void FN(vector_start)(const chain *c, FN(vector) *s) {
	s->live = c->S0.dtype != 0;
	FN(start)(c, s->now, s->ld, s->b, 0, 1, 1);
}
// The i-th frame of the scan's order
static void FN(vector_step)(const chain *c, FN(vector) *s, int64_t i) {
	const int64_t t = c->reverse ? c->T - 1 - i : i;
	const int counts = t < c->active;
	if (c->S.dtype && (c->exclusive || !counts)) FN(store)(s->now, s->ld, matrix(&c->S, s->b, t), 1, c->K, 0);
	if (!counts) return;
	FN(vector_advance)(c, s, t, s->now, s->next, s->live);
	s->live = 1;
	REAL *old = s->now;
	s->now = s->next, s->next = old;
	if (c->S.dtype && !c->exclusive) FN(store)(s->now, s->ld, matrix(&c->S, s->b, t), 1, c->K, 0);
}
static void FN(vector_end)(const chain *c, FN(vector) *s) {
	if (c->ST.dtype) FN(store)(s->now, s->ld, state_rows(&c->ST, s->b), 1, c->K, 0);
}
static void FN(vector_start_bwd)(const chain *c, FN(vector) *s) {
	if (s->X) {
		FN(start)(c, s->X, s->ld, s->b, 0, 1, 1);
		int live = c->S0.dtype != 0;
		for (int64_t i = 0; i < c->T; i++) {
			const int64_t t = c->reverse ? c->T - 1 - i : i;
			REAL *now = s->X + i * s->ld;
			if (t < c->active) FN(vector_advance)(c, s, t, now, now + s->ld, live), live = 1;
			else memcpy(now + s->ld, now, sizeof *now * s->ld);
		}
	}
	s->live = c->dST.dtype != 0;
	if (s->live) FN(load)(s->now, s->ld, state_rows(&c->dST, s->b), 1, 1, c->K);
	else FN(zero)(s->now, s->ld, 1);
}
// now: the gradient of z after the frame
static void FN(vector_step_bwd)(const chain *c, FN(vector) *s, int64_t i) {
	const int K = c->K, ld = s->ld;
	const int64_t t = c->reverse ? c->T - 1 - i : i, before = c->reverse ? t + 1 : t - 1, b = s->b;
	const int counts = t < c->active;
	if (c->dS.dtype && (!c->exclusive || !counts)) {
		FN(load)(s->x, ld, matrix(&c->dS, b, t), 1, 1, K);
		FN(add)(s->now, s->x, ld, 1);
		s->live = 1;
	}
	if (c->dU.dtype) {
		FN(zero)(s->x, ld, 1);
		FN(store)(counts ? s->now : s->x, ld, matrix(&c->dU, b, t), 1, K, 0);
	}
	if (c->dW.dtype) {
		const int first = i == 0 && !c->exclusive;
		int known = s->live && counts;
		if (known && s->X) memcpy(s->x, s->X + i * ld, sizeof *s->x * ld);
		else if (known && first && c->S0.dtype) FN(start)(c, s->x, ld, b, 0, 1, 1);
		else if (known && !first) FN(load)(s->x, ld, matrix(&c->S, b, c->exclusive ? t : before), 1, 1, K);
		else known = 0;
		if (!known) FN(zero)(s->D, ld, K);
		for (int k = 0; k < K && known; k++)
			for (int j = 0; j < ld; j += VL) VST(s->D + k * ld + j, s->now[k] * VLD(s->x + j));
		FN(store)(s->D, ld, matrix(&c->dW, b, t), K, K, c->stream);
	}
	if (!counts || (i == 0 && !c->dS0.dtype)) return;
	FN(zero)(s->next, ld, 1);
	if (c->exclusive && c->dS.dtype) FN(load)(s->next, ld, matrix(&c->dS, b, t), 1, 1, K);
	if (s->live) {
		ptrdiff_t stride;
		const REAL *W = FN(where)(matrix(&c->W, b, t), K, s, &stride);
		FN(rows_sum)(s->next, W, stride, s->now, K, K);
	}
	s->live |= c->exclusive && c->dS.dtype;
	REAL *old = s->now;
	s->now = s->next, s->next = old;
}
static void FN(vector_end_bwd)(const chain *c, FN(vector) *s) {
	if (c->dS0.dtype) FN(store)(s->now, s->ld, state_rows(&c->dS0, s->b), 1, c->K, 0);
}
static void FN(vector_unit)(void *ctx, int64_t b, char *p) {
	const chain *c = ctx;
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	FN(vector) s;
	FN(vector_place)(c, &s, b, c->bwd, &p);
	if (c->bwd) {
		FN(vector_start_bwd)(c, &s);
		for (int64_t i = c->T - 1; i >= 0; i--) FN(vector_step_bwd)(c, &s, i);
		FN(vector_end_bwd)(c, &s);
	} else {
		FN(vector_start)(c, &s);
		for (int64_t i = 0; i < c->T; i++) FN(vector_step)(c, &s, i);
		FN(vector_end)(c, &s);
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

// ---------------------------------------------------------------- S <- S W + U
INL int64_t FN(scan_scratch)(const chain *c) {
	const int64_t ld = FN(stride)(c->K), rows = pad_to(c->block, VW), square = ld * pad_to(c->K, VW);
	return (square * (1 + (c->dW.dtype != 0)) + ld * rows * (c->bwd ? 3 : 2) + (c->rescan ? c->T * rows * ld : 0)) * sizeof(REAL) + 64 * 8;
}
// to = I + S W
static void FN(step)(const chain *c, int n, const REAL *S, const REAL *W, ptrdiff_t ldw, REAL *to, int ld, const REAL *I, ptrdiff_t ldi, prefetch *q) {
	const int KP = pad_to(c->K, VW);
	if (c->merge && !FN(finite)(W, ldw, c->K)) FN(product_sparse)(n, KP, KP, S, ld, W, ldw, to, ld);
	else FN(product_on)(n, KP, KP, S, ld, W, ldw, to, ld, I, ldi, q);
}
// Whether a product can read a matrix where it lies
static int FN(readable)(const chain *c, view v) { return v.type == TYPE && v.col == 1 && c->K % VW == 0 && v.row * sizeof(REAL) % 512 && !c->merge; }
// The n rows from r on, own of them the caller's, after frame t; seen: how many frames there were before it
static void FN(advance)(const chain *c, int64_t b, int64_t t, int64_t r, int n, int own, int64_t seen, const REAL *now, REAL *next, REAL *W, int ld, prefetch *q) {
	const int K = c->K;
	const view w = matrix(&c->W, b, t), u = at(matrix(&c->U, b, t), r);
	const int there = FN(readable)(c, w) && seen, add = FN(readable)(c, u) && seen && own == n; // as they lie
	if (!there && (seen || c->S0.dtype || n > own)) FN(load)(W, ld, w, K, pad_to(K, VW), K);
	if (!add) FN(load)(next, ld, u, own, n, K);
	if (seen) FN(step)(c, n, now, there ? (const REAL *)w.p : W, there ? w.row : ld, next, ld, add ? (const REAL *)u.p : next, add ? u.row : ld, q);
	else {
		if (c->S0.dtype) FN(step)(c, own, now, W, ld, next, ld, next, ld, q);
		if (n > own) memcpy(next + own * ld, W + (r + own - c->V) * ld, sizeof *W * (n - own) * ld); // Id W
	}
}
// One head's rows [r, r + n) through all frames
static void FN(scan_fwd)(void *ctx, int64_t unit, char *p) {
	const chain *c = ctx;
	const int64_t b = unit / c->blocks, r = unit % c->blocks * c->block;
	const int K = c->K, ld = FN(stride)(K), n = c->rows - r < c->block ? c->rows - r : c->block;
	const int own = n < c->V - r ? n : c->V > r ? (int)(c->V - r) : 0; // rows of the caller's state
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *W = FN(take)(&p, ld * pad_to(K, VW)), *now = FN(take)(&p, ld * n), *next = FN(take)(&p, ld * n);
	int64_t seen = 0;
	FN(start)(c, now, ld, b, r, n, n);
	FN(vector) z;
	if (c->z) FN(vector_place)(c->z, &z, b, 0, &p), FN(vector_start)(c->z, &z);
	for (int64_t i = 0; i < c->T; i++) {
		const int64_t t = c->reverse ? c->T - 1 - i : i, after = c->reverse ? t - 1 : t + 1;
		const int counts = t < c->active, wanted = c->S.dtype && own;
		if (wanted && (c->exclusive || !counts)) FN(store)(now, ld, at(matrix(&c->S, b, t), r), own, K, c->stream);
		if (!counts) {
			if (c->z) FN(vector_step)(c->z, &z, i);
			continue;
		}
		prefetch q = {0};
		if (c->z) ahead(&q, matrix(&c->z->W, b, t), K, K);
		if (after >= 0 && after < c->active) {
			ahead(&q, matrix(&c->W, b, after), K, K);
			ahead(&q, at(matrix(&c->U, b, after), r), own, K);
		}
		FN(advance)(c, b, t, r, n, own, seen++, now, next, W, ld, &q);
		REAL *old = now;
		now = next, next = old;
		if (wanted && !c->exclusive) FN(store)(now, ld, at(matrix(&c->S, b, t), r), own, K, c->stream);
		if (c->z) FN(vector_step)(c->z, &z, i);
	}
	if (c->z) FN(vector_end)(c->z, &z);
	if (c->ST.dtype && own) FN(store)(now, ld, at(state_rows(&c->ST, b), r), own, K, 0);
	if (c->M.dtype && n > own) FN(store)(now + own * ld, ld, at(state_rows(&c->M, b), r + own - c->V), n - own, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
// The state before each frame by the scan's order, into X [T][pad][ld]
static void FN(rescan)(const chain *c, int64_t b, REAL *X, REAL *W, int pad, int ld) {
	const int n = c->rows, own = c->V;
	int64_t seen = 0;
	prefetch none = {0};
	for (int64_t i = 0; i < c->T; i++, X += pad * ld) {
		const int64_t t = c->reverse ? c->T - 1 - i : i;
		if (i == 0) FN(start)(c, X, ld, b, 0, n, pad);
		if (i + 1 == c->T) break;
		REAL *next = X + pad * ld;
		FN(zero)(next + n * ld, ld, pad - n);
		if (t < c->active) FN(advance)(c, b, t, 0, n, own, seen++, X, next, W, ld, &none);
		else memcpy(next, X, sizeof *X * n * ld);
	}
}
// One head (where dW is wanted) or some of its rows, from the last frame to the first
static void FN(scan_bwd)(void *ctx, int64_t unit, char *p) {
	const chain *c = ctx;
	const int64_t b = unit / c->blocks, r = unit % c->blocks * c->block;
	const int K = c->K, KP = pad_to(K, VW), ld = FN(stride)(K), n = c->rows - r < c->block ? c->rows - r : c->block, pad = pad_to(c->block, VW);
	const int own = n < c->V - r ? n : c->V > r ? (int)(c->V - r) : 0;
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *W = FN(take)(&p, ld * KP), *G = FN(take)(&p, ld * pad), *next = FN(take)(&p, ld * pad), *P = FN(take)(&p, ld * pad);
	REAL *D = c->dW.dtype ? FN(take)(&p, ld * KP) : NULL, *X = c->rescan ? FN(take)(&p, c->T * pad * ld) : NULL;
	if (X) FN(rescan)(c, b, X, W, pad, ld);
	FN(zero)(next, ld, pad);
	// G: the gradient of the state after the frame at hand
	int live = c->dST.dtype != 0 || c->dM.dtype != 0;
	if (c->dST.dtype && own) FN(load)(G, ld, at(state_rows(&c->dST, b), r), own, pad, K);
	else FN(zero)(G, ld, pad);
	FN(vector) z;
	if (c->z) FN(vector_place)(c->z, &z, b, 1, &p), FN(vector_start_bwd)(c->z, &z);
	if (c->dM.dtype && n > own) FN(load)(G + own * ld, ld, at(state_rows(&c->dM, b), r + own - c->V), n - own, n - own, K);
	for (int64_t i = c->T - 1; i >= 0; i--) {
		const int64_t t = c->reverse ? c->T - 1 - i : i, before = c->reverse ? t + 1 : t - 1;
		const int counts = t < c->active;
		if (c->dS.dtype && own && (!c->exclusive || !counts)) {
			FN(load)(P, ld, at(matrix(&c->dS, b, t), r), own, own, K);
			FN(add)(G, P, ld, own);
			live = 1;
		}
		if (c->dU.dtype && own) {
			if (!counts) FN(zero)(P, ld, own);
			FN(store)(counts ? G : P, ld, at(matrix(&c->dU, b, t), r), own, K, c->stream);
		}
		prefetch q = {0};
		if (D) {
			// The state before the frame
			const REAL *old = X ? X + i * pad * ld : P;
			int known = live && counts && (i > 0 || c->exclusive || c->S0.dtype || n > own);
			if (known && !X) {
				if (i == 0 && !c->exclusive) FN(start)(c, P, ld, b, r, n, pad);
				else FN(load)(P, ld, matrix(&c->S, b, c->exclusive ? t : before), n, pad, K);
			}
			ahead(&q, matrix(&c->W, b, t), K, K);
			if (i > 0 && c->dS.dtype) ahead(&q, matrix(&c->dS, b, before), own, K);
			if (known) FN(product_t)(K, KP, pad, old, ld, G, ld, D, ld, 0, 0, &q);
			else FN(zero)(D, ld, K);
			FN(store)(D, ld, matrix(&c->dW, b, t), K, K, c->stream);
		}
		if (!counts || (i == 0 && !c->dS0.dtype)) {
			if (c->z) FN(vector_step_bwd)(c->z, &z, i);
			continue;
		}
		FN(zero)(next, ld, n);
		if (c->exclusive && c->dS.dtype && own) FN(load)(next, ld, at(matrix(&c->dS, b, t), r), own, own, K);
		if (live) {
			view w = matrix(&c->W, b, t);
			const ptrdiff_t row = w.row;
			w.row = w.col, w.col = row;
			FN(load)(W, ld, w, K, KP, K);
			q = (prefetch){0};
			if (c->z) ahead(&q, matrix(&c->z->W, b, t), K, K);
			if (D && i > 1 && !X) {
				const int64_t past = c->reverse ? before + 1 : before - 1;
				ahead(&q, matrix(&c->S, b, c->exclusive ? before : past), n, K);
			}
			if (!D && i > 0) {
				ahead(&q, matrix(&c->W, b, before), K, K);
				ahead(&q, at(matrix(&c->dS, b, before), r), own, K);
			}
			FN(step)(c, n, G, W, ld, next, ld, next, ld, &q);
		}
		live |= c->exclusive && c->dS.dtype;
		REAL *old = G;
		G = next, next = old;
		if (c->z) FN(vector_step_bwd)(c->z, &z, i);
	}
	if (c->z) FN(vector_end_bwd)(c->z, &z);
	if (c->dS0.dtype && own) FN(store)(G, ld, at(state_rows(&c->dS0, b), r), own, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

