// The scans of frame GDN in REAL (float or double). Included once for each REAL; FN names the functions.
//
//	forward    S_t = S_{t-1} W_t + U_t
//	backward   G_t = dS_t + G_{t+1} W_{t+1}^T     dU_t = G_t     dW_t = S_{t-1}^T G_t     what G_0 W_0^T sends back is the first state's
//
// A state that is known to be 0 is never multiplied: what is not finite in W may then not show.

// Rows of the state: those that the caller has, and below them, where M is asked for, the rows of a product of W's, which begin as Id.
INL int64_t FN(scan_scratch)(const chain *c, int bwd) {
	const int64_t ld = FN(stride)(c->K), rows = pad_to(c->block, VW), square = ld * pad_to(c->K, VW);
	return (square * (1 + (c->dW.dtype != 0)) + ld * rows * (bwd ? 3 : 2) + (c->rescan ? c->T * rows * ld : 0)) * sizeof(REAL) + 64 * 8;
}
// The rows from r on of a state before the first frame
static void FN(start)(const chain *c, REAL *d, int ld, int64_t b, int64_t r, int n, int rows) {
	const int own = n < c->V - r ? n : c->V > r ? (int)(c->V - r) : 0;
	if (c->S0.dtype && own) FN(load)(d, ld, at(state_rows(&c->S0, b), r), own, rows, c->K);
	else FN(zero)(d, ld, rows);
	for (int i = own; i < n; i++) d[i * ld + r + i - c->V] = 1;
}
static void FN(step)(const chain *c, int n, const REAL *S, const REAL *W, REAL *to, int ld, prefetch *q) {
	const int KP = pad_to(c->K, VW);
	if (c->merge && !FN(finite)(W, ld, c->K)) FN(product_sparse)(n, KP, KP, S, ld, W, ld, to, ld);
	else FN(product)(n, KP, KP, S, ld, W, ld, to, ld, 1, q);
}
// The n rows from r on, own of them the caller's, after frame t; seen: how many frames there were before it
static void FN(advance)(const chain *c, int64_t b, int64_t t, int64_t r, int n, int own, int64_t seen, const REAL *now, REAL *next, REAL *W, int ld, prefetch *q) {
	const int K = c->K;
	if (seen || c->S0.dtype || n > own) FN(load)(W, ld, matrix(&c->W, b, t), K, pad_to(K, VW), K);
	FN(load)(next, ld, at(matrix(&c->U, b, t), r), own, n, K);
	if (seen) FN(step)(c, n, now, W, next, ld, q);
	else {
		if (c->S0.dtype) FN(step)(c, own, now, W, next, ld, q);
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
	for (int64_t i = 0; i < c->T; i++) {
		const int64_t t = c->reverse ? c->T - 1 - i : i, after = c->reverse ? t - 1 : t + 1;
		const int counts = t < c->active, wanted = c->S.dtype && own;
		if (wanted && (c->exclusive || !counts)) FN(store)(now, ld, at(matrix(&c->S, b, t), r), own, K, c->stream);
		if (!counts) continue;
		prefetch q = {0};
		if (after >= 0 && after < c->active) {
			ahead(&q, matrix(&c->W, b, after), K, K);
			ahead(&q, at(matrix(&c->U, b, after), r), own, K);
		}
		FN(advance)(c, b, t, r, n, own, seen++, now, next, W, ld, &q);
		REAL *old = now;
		now = next, next = old;
		if (wanted && !c->exclusive) FN(store)(now, ld, at(matrix(&c->S, b, t), r), own, K, c->stream);
	}
	if (c->ST.dtype && own) FN(store)(now, ld, at(state_rows(&c->ST, b), r), own, K, 0);
	if (c->M.dtype && n > own) FN(store)(now + own * ld, ld, at(state_rows(&c->M, b), r + own - c->V), n - own, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
// The state before each frame by the scan's order, into X [T][pad][ld]
static void FN(rescan)(const chain *c, int64_t b, REAL *X, REAL *W, int pad, int ld) {
	const int n = c->rows, own = c->V;
	int64_t seen = 0;
	for (int64_t i = 0; i < c->T; i++, X += pad * ld) {
		const int64_t t = c->reverse ? c->T - 1 - i : i;
		if (i == 0) FN(start)(c, X, ld, b, 0, n, pad);
		if (i + 1 == c->T) break;
		REAL *next = X + pad * ld;
		FN(zero)(next + n * ld, ld, pad - n);
		if (t < c->active) FN(advance)(c, b, t, 0, n, own, seen++, X, next, W, ld, NULL);
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
		if (!counts) continue;
		if (i == 0 && !c->dS0.dtype) break;
		FN(zero)(next, ld, n);
		if (c->exclusive && c->dS.dtype && own) FN(load)(next, ld, at(matrix(&c->dS, b, t), r), own, own, K);
		if (live) {
			view w = matrix(&c->W, b, t);
			const ptrdiff_t row = w.row;
			w.row = w.col, w.col = row;
			FN(load)(W, ld, w, K, KP, K);
			q = (prefetch){0};
			if (D && i > 1 && !X) {
				const int64_t past = c->reverse ? before + 1 : before - 1;
				ahead(&q, matrix(&c->S, b, c->exclusive ? before : past), n, K);
			}
			if (!D && i > 0) {
				ahead(&q, matrix(&c->W, b, before), K, K);
				ahead(&q, at(matrix(&c->dS, b, before), r), own, K);
			}
			FN(step)(c, n, G, W, next, ld, &q);
		}
		live |= c->exclusive && c->dS.dtype;
		REAL *old = G;
		G = next, next = old;
	}
	if (c->dS0.dtype && own) FN(store)(G, ld, at(state_rows(&c->dS0, b), r), own, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

// ---------------------------------------------------------------- z <- Wz z + uz
// A row of Wz and z are two vectors, so it is a matter of memory: Wz is read where it lies if it can be.
INL const REAL *FN(where)(view v, int K, int ld, REAL *scratch, ptrdiff_t *stride) {
	if (v.type == TYPE && v.col == 1) return *stride = v.row, (const REAL *)v.p;
	FN(load)(scratch, ld, v, K, K, K);
	return *stride = ld, scratch;
}
INL int64_t FN(vector_scratch)(const chain *c) {
	const int64_t ld = FN(stride)(c->K);
	return (ld * (c->K + 5 + (c->rescan ? c->T + 1 : 0)) + ld * c->K) * sizeof(REAL) + 64 * 8;
}
static void FN(vector_fwd)(void *ctx, int64_t b, char *p) {
	const chain *c = ctx;
	const int K = c->K, ld = FN(stride)(K);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *scratch = FN(take)(&p, ld * K), *now = FN(take)(&p, ld), *next = FN(take)(&p, ld);
	int live = c->S0.dtype != 0;
	FN(start)(c, now, ld, b, 0, 1, 1);
	for (int64_t i = 0; i < c->T; i++) {
		const int64_t t = c->reverse ? c->T - 1 - i : i;
		const int counts = t < c->active;
		if (c->S.dtype && (c->exclusive || !counts)) FN(store)(now, ld, matrix(&c->S, b, t), 1, K, 0);
		if (!counts) continue;
		FN(load)(next, ld, matrix(&c->U, b, t), 1, 1, K);
		if (live) {
			ptrdiff_t stride;
			const REAL *W = FN(where)(matrix(&c->W, b, t), K, ld, scratch, &stride);
			FN(rows_dot)(next, W, stride, now, K, K);
		}
		live = 1;
		REAL *old = now;
		now = next, next = old;
		if (c->S.dtype && !c->exclusive) FN(store)(now, ld, matrix(&c->S, b, t), 1, K, 0);
	}
	if (c->ST.dtype) FN(store)(now, ld, state_rows(&c->ST, b), 1, K, 0);
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static void FN(vector_bwd)(void *ctx, int64_t b, char *p) {
	const chain *c = ctx;
	const int K = c->K, ld = FN(stride)(K);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *scratch = FN(take)(&p, ld * K), *D = FN(take)(&p, ld * K), *G = FN(take)(&p, ld), *next = FN(take)(&p, ld), *x = FN(take)(&p, ld);
	REAL *X = c->rescan ? FN(take)(&p, ld * (c->T + 1)) : NULL; // z before each frame by the scan's order
	ptrdiff_t stride;
	if (X) {
		FN(start)(c, X, ld, b, 0, 1, 1);
		for (int64_t i = 0; i < c->T; i++) {
			const int64_t t = c->reverse ? c->T - 1 - i : i;
			REAL *now = X + i * ld;
			if (t >= c->active) {
				memcpy(now + ld, now, sizeof *X * ld);
				continue;
			}
			FN(load)(now + ld, ld, matrix(&c->U, b, t), 1, 1, K);
			if (i == 0 && !c->S0.dtype) continue;
			const REAL *W = FN(where)(matrix(&c->W, b, t), K, ld, scratch, &stride);
			FN(rows_dot)(now + ld, W, stride, now, K, K);
		}
	}
	int live = c->dST.dtype != 0;
	if (live) FN(load)(G, ld, state_rows(&c->dST, b), 1, 1, K);
	else FN(zero)(G, ld, 1);
	for (int64_t i = c->T - 1; i >= 0; i--) {
		const int64_t t = c->reverse ? c->T - 1 - i : i, before = c->reverse ? t + 1 : t - 1;
		const int counts = t < c->active;
		if (c->dS.dtype && (!c->exclusive || !counts)) {
			FN(load)(x, ld, matrix(&c->dS, b, t), 1, 1, K);
			FN(add)(G, x, ld, 1);
			live = 1;
		}
		if (c->dU.dtype) {
			FN(zero)(x, ld, 1);
			FN(store)(counts ? G : x, ld, matrix(&c->dU, b, t), 1, K, 0);
		}
		if (c->dW.dtype) {
			const int first = i == 0 && !c->exclusive;
			int known = live && counts;
			if (known && X) memcpy(x, X + i * ld, sizeof *x * ld);
			else if (known && first && c->S0.dtype) FN(start)(c, x, ld, b, 0, 1, 1);
			else if (known && !first) FN(load)(x, ld, matrix(&c->S, b, c->exclusive ? t : before), 1, 1, K);
			else known = 0;
			if (!known) FN(zero)(D, ld, K);
			for (int k = 0; k < K && known; k++)
				for (int j = 0; j < ld; j += VL) VST(D + k * ld + j, G[k] * VLD(x + j));
			FN(store)(D, ld, matrix(&c->dW, b, t), K, K, c->stream);
		}
		if (!counts) continue;
		if (i == 0 && !c->dS0.dtype) break;
		FN(zero)(next, ld, 1);
		if (c->exclusive && c->dS.dtype) FN(load)(next, ld, matrix(&c->dS, b, t), 1, 1, K);
		if (live) {
			const REAL *W = FN(where)(matrix(&c->W, b, t), K, ld, scratch, &stride);
			FN(rows_sum)(next, W, stride, G, K, K);
		}
		live |= c->exclusive && c->dS.dtype;
		REAL *old = G;
		G = next, next = old;
	}
	if (c->dS0.dtype) FN(store)(G, ld, state_rows(&c->dS0, b), 1, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
