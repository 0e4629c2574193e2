// What the tokens of a frame write and read, in REAL (float or double): the transitions and the projection. A unit is a frame of a head; its
// tokens pass in blocks of TOKENS. Included once for each REAL; FN names the functions.
//
// Gradients, with Y = k (dW + dW^T) and X = v dU, rows of tokens:
//	dk = beta (X - decay Y)     dv = beta k dU^T     dbeta = k.X - decay k.Y / 2     ddecay = tr dW - sum beta k.Y / 2
INL int64_t FN(tokens_scratch)(const tokens *c) {
	const int64_t ld = FN(stride)(c->K), lv = FN(stride)(c->V), KP = pad_to(c->K, VW), VP = pad_to(c->V, VW);
	return (KP * ld * 2 + KP * lv + VP * ld + TOKENS * (3 * ld + 2 * lv) + 3 * ld + 8 * TOKENS) * sizeof(REAL) + 64 * 16;
}
// c[i][j] = f_i x[i][j]
static void FN(scale_rows)(REAL *d, const REAL *x, int ld, const REAL *f, int n) {
	for (int i = 0; i < n; i++)
		for (int j = 0; j < ld; j += VL) VST(d + i * ld + j, VLD(x + i * ld + j) * f[i]);
}
static REAL FN(dot)(const REAL *x, const REAL *y, int n) { // n: padded
	FN(vec) a = {0};
	REAL s = 0;
	for (int j = 0; j < n; j += VL) a += VLD(x + j) * VLD(y + j);
	for (int l = 0; l < VL; l++) s += a[l];
	return s;
}
static void FN(numbers_in)(REAL *d, view v, int n) {
	for (int i = 0; i < n; i++) d[i] = ld1(v.p, v.type, i * v.row);
}
// decay (Id - P) from the upper half of P, to both halves
static void FN(transition)(REAL *P, int ld, int K, REAL decay) {
	for (int i = 0; i < K; i++)
		for (int j = i; j < K; j++) P[i * ld + j] = P[j * ld + i] = decay == 0 ? 0 : decay * ((i == j) - P[i * ld + j]);
}
static void FN(build_fwd)(void *ctx, int64_t unit, char *p) {
	const tokens *c = ctx;
	const int64_t t = unit % c->T, h = unit / c->T % c->H, b = unit / c->T / c->H;
	const int K = c->K, V = c->V, KP = pad_to(K, VW), VP = pad_to(V, VW), ld = FN(stride)(K), lv = FN(stride)(V);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *W = FN(take)(&p, KP * ld), *Wz = FN(take)(&p, KP * ld), *U = FN(take)(&p, VP * ld), *u = FN(take)(&p, ld);
	REAL *k = FN(take)(&p, TOKENS * ld), *bk = FN(take)(&p, TOKENS * ld), *v = FN(take)(&p, TOKENS * lv), *beta = FN(take)(&p, TOKENS);
	FN(zero)(W, ld, KP), FN(zero)(Wz, ld, KP), FN(zero)(U, ld, VP), FN(zero)(u, ld, 1);
	for (int64_t r = 0; r < c->R; r += TOKENS) {
		const int n = c->R - r < TOKENS ? c->R - r : TOKENS, some = pad_to(n, 4);
		FN(numbers_in)(beta, at(frame_tokens(&c->beta, b, t, h), r), n);
		FN(load)(k, ld, at(frame_tokens(&c->k, b, t, h), r), n, some, K);
		FN(load)(v, lv, at(frame_tokens(&c->v, b, t, h), r), n, some, V);
		FN(zero)(bk, ld, some);
		FN(scale_rows)(bk, k, ld, beta, n);
		FN(product_t)(K, KP, some, k, ld, bk, ld, W, ld, 1, 1, NULL);
		FN(product_t)(V, KP, some, v, lv, bk, ld, U, ld, 1, 0, NULL);
		if (!c->kz.dtype) continue;
		FN(load)(k, ld, at(frame_tokens(&c->kz, b, t, h), r), n, some, K);
		FN(scale_rows)(bk, k, ld, beta, n);
		FN(product_t)(K, KP, some, k, ld, bk, ld, Wz, ld, 1, 1, NULL);
		for (int i = 0; i < n; i++) FN(add)(u, bk + i * ld, ld, 1);
	}
	const REAL decay = number_of(&c->decay, b, t, h);
	FN(transition)(W, ld, K, decay);
	FN(store)(W, ld, frame_matrix(&c->W, b, h, t), K, K, c->stream);
	FN(store)(U, ld, frame_matrix(&c->U, b, h, t), V, K, c->stream);
	if (c->kz.dtype) {
		FN(transition)(Wz, ld, K, decay);
		if (c->Wz.dtype) FN(store)(Wz, ld, frame_matrix(&c->Wz, b, h, t), K, K, c->stream);
		if (c->uz.dtype) FN(store)(u, ld, frame_vector(&c->uz, b, h, t), 1, K, 0);
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
// d[i][j] + d[j][i]
static void FN(symmetrize)(REAL *d, int ld, int K) {
	for (int i = 0; i < K; i++)
		for (int j = i; j < K; j++) d[i * ld + j] = d[j * ld + i] = d[i * ld + j] + d[j * ld + i];
}
static REAL FN(trace)(const REAL *d, int ld, int K) {
	REAL s = 0;
	for (int i = 0; i < K; i++) s += d[i * ld + i];
	return s;
}
INL view FN(crosswise)(view v) { return (view){v.p, v.type, v.col, v.row}; }
static void FN(build_bwd)(void *ctx, int64_t unit, char *p) {
	const tokens *c = ctx;
	const int64_t t = unit % c->T, h = unit / c->T % c->H, b = unit / c->T / c->H;
	const int K = c->K, V = c->V, KP = pad_to(K, VW), VP = pad_to(V, VW), ld = FN(stride)(K), lv = FN(stride)(V);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *W = FN(take)(&p, KP * ld), *Wz = FN(take)(&p, KP * ld), *Ut = FN(take)(&p, KP * lv), *U = FN(take)(&p, VP * ld), *u = FN(take)(&p, ld);
	REAL *k = FN(take)(&p, TOKENS * ld), *y = FN(take)(&p, TOKENS * ld), *x = FN(take)(&p, TOKENS * ld);
	REAL *v = FN(take)(&p, TOKENS * lv), *dv = FN(take)(&p, TOKENS * lv), *beta = FN(take)(&p, TOKENS), *dbeta = FN(take)(&p, TOKENS);
	const REAL decay = number_of(&c->decay, b, t, h);
	FN(load)(W, ld, frame_matrix(&c->dW, b, h, t), K, KP, K);
	FN(load)(U, ld, frame_matrix(&c->dU, b, h, t), V, VP, K);
	FN(load)(Ut, lv, FN(crosswise)(frame_matrix(&c->dU, b, h, t)), K, KP, V);
	REAL ddecay = FN(trace)(W, ld, K);
	FN(symmetrize)(W, ld, K);
	if (c->dWz.dtype) {
		FN(load)(Wz, ld, frame_matrix(&c->dWz, b, h, t), K, KP, K);
		ddecay += FN(trace)(Wz, ld, K);
		FN(symmetrize)(Wz, ld, K);
	}
	FN(zero)(u, ld, 1);
	if (c->duz.dtype) FN(load)(u, ld, frame_vector(&c->duz, b, h, t), 1, 1, K);
	for (int64_t r = 0; r < c->R; r += TOKENS) {
		const int n = c->R - r < TOKENS ? c->R - r : TOKENS;
		FN(numbers_in)(beta, at(frame_tokens(&c->beta, b, t, h), r), n);
		FN(load)(k, ld, at(frame_tokens(&c->k, b, t, h), r), n, n, K);
		FN(load)(v, lv, at(frame_tokens(&c->v, b, t, h), r), n, n, V);
		FN(product)(n, KP, KP, k, ld, W, ld, y, ld);
		FN(product)(n, KP, VP, v, lv, U, ld, x, ld);
		FN(product)(n, VP, KP, k, ld, Ut, lv, dv, lv);
		for (int i = 0; i < n; i++) {
			const REAL ky = FN(dot)(k + i * ld, y + i * ld, KP);
			dbeta[i] = FN(dot)(k + i * ld, x + i * ld, KP) - decay * ky / 2;
			ddecay -= beta[i] * ky / 2;
			for (int j = 0; j < KP; j += VL) VST(x + i * ld + j, (VLD(x + i * ld + j) - VLD(y + i * ld + j) * decay) * beta[i]);
		}
		FN(scale_rows)(dv, dv, lv, beta, n);
		FN(store)(x, ld, at(frame_tokens(&c->dk, b, t, h), r), n, K, c->stream);
		FN(store)(dv, lv, at(frame_tokens(&c->dv, b, t, h), r), n, V, c->stream);
		if (c->kz.dtype) {
			FN(load)(k, ld, at(frame_tokens(&c->kz, b, t, h), r), n, n, K);
			if (c->dWz.dtype) FN(product)(n, KP, KP, k, ld, Wz, ld, y, ld);
			else FN(zero)(y, ld, n);
			for (int i = 0; i < n; i++) {
				const REAL ky = FN(dot)(k + i * ld, y + i * ld, KP);
				dbeta[i] += FN(dot)(k + i * ld, u, KP) - decay * ky / 2;
				ddecay -= beta[i] * ky / 2;
				for (int j = 0; j < KP; j += VL) VST(y + i * ld + j, (VLD(u + j) - VLD(y + i * ld + j) * decay) * beta[i]);
			}
			if (c->dkz.dtype) FN(store)(y, ld, at(frame_tokens(&c->dkz, b, t, h), r), n, K, c->stream);
		}
		const view out = at(frame_tokens(&c->dbeta, b, t, h), r);
		for (int i = 0; i < n; i++) st1(out.p, out.type, i * out.row, dbeta[i]);
	}
	set_number_of(&c->ddecay, b, t, h, ddecay);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}

static void FN(project_fwd)(void *ctx, int64_t unit, char *p) {
	const tokens *c = ctx;
	const int64_t t = unit % c->T, h = unit / c->T % c->H, b = unit / c->T / c->H;
	const int K = c->K, V = c->V, KP = pad_to(K, VW), VP = pad_to(V, VW), ld = FN(stride)(K), lv = FN(stride)(V);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *S = FN(take)(&p, KP * lv), *z = FN(take)(&p, ld), *q = FN(take)(&p, TOKENS * ld), *o = FN(take)(&p, TOKENS * lv);
	FN(load)(S, lv, FN(crosswise)(frame_matrix(&c->S, b, h, t)), K, KP, V);
	if (c->qz.dtype) FN(load)(z, ld, frame_vector(&c->z, b, h, t), 1, 1, K);
	for (int64_t r = 0; r < c->R; r += TOKENS) {
		const int n = c->R - r < TOKENS ? c->R - r : TOKENS;
		FN(load)(q, ld, at(frame_tokens(&c->k, b, t, h), r), n, n, K);
		FN(product)(n, VP, KP, q, ld, S, lv, o, lv);
		FN(store)(o, lv, at(frame_tokens(&c->num, b, t, h), r), n, V, c->stream);
		if (!c->den.dtype) continue;
		FN(load)(q, ld, at(frame_tokens(&c->qz, b, t, h), r), n, n, K);
		const view out = at(frame_tokens(&c->den, b, t, h), r);
		for (int i = 0; i < n; i++) st1(out.p, out.type, i * out.row, FN(dot)(q + i * ld, z, KP));
	}
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
static void FN(project_bwd)(void *ctx, int64_t unit, char *p) {
	const tokens *c = ctx;
	const int64_t t = unit % c->T, h = unit / c->T % c->H, b = unit / c->T / c->H;
	const int K = c->K, V = c->V, KP = pad_to(K, VW), VP = pad_to(V, VW), ld = FN(stride)(K), lv = FN(stride)(V);
	const uint64_t fp = flush_denormals_in(sizeof(REAL));
	REAL *S = FN(take)(&p, VP * ld), *dS = FN(take)(&p, KP * ld > VP * ld ? KP * ld : VP * ld), *z = FN(take)(&p, ld), *dz = FN(take)(&p, ld);
	REAL *q = FN(take)(&p, TOKENS * ld), *dq = FN(take)(&p, TOKENS * ld), *o = FN(take)(&p, TOKENS * lv), *dden = FN(take)(&p, TOKENS);
	FN(load)(S, ld, frame_matrix(&c->S, b, h, t), V, VP, K);
	FN(zero)(dS, ld, VP), FN(zero)(dz, ld, 1);
	if (c->qz.dtype) FN(load)(z, ld, frame_vector(&c->z, b, h, t), 1, 1, K);
	for (int64_t r = 0; r < c->R; r += TOKENS) {
		const int n = c->R - r < TOKENS ? c->R - r : TOKENS, some = pad_to(n, 4);
		FN(load)(q, ld, at(frame_tokens(&c->k, b, t, h), r), n, some, K);
		FN(load)(o, lv, at(frame_tokens(&c->dnum, b, t, h), r), n, some, V);
		FN(product)(n, KP, VP, o, lv, S, ld, dq, ld);
		FN(product_t)(V, KP, some, o, lv, q, ld, dS, ld, 1, 0, NULL);
		FN(store)(dq, ld, at(frame_tokens(&c->dk, b, t, h), r), n, K, c->stream);
		if (!c->qz.dtype) continue;
		for (int i = 0; i < n; i++) dden[i] = 0;
		if (c->dden.dtype) FN(numbers_in)(dden, at(frame_tokens(&c->dden, b, t, h), r), n);
		FN(load)(q, ld, at(frame_tokens(&c->qz, b, t, h), r), n, n, K);
		FN(rows_sum)(dz, q, ld, dden, n, KP);
		for (int i = 0; i < n; i++)
			for (int j = 0; j < ld; j += VL) VST(dq + i * ld + j, VLD(z + j) * dden[i]);
		if (c->dkz.dtype) FN(store)(dq, ld, at(frame_tokens(&c->dkz, b, t, h), r), n, K, c->stream);
	}
	FN(store)(dS, ld, frame_matrix(&c->dS, b, h, t), V, K, c->stream);
	if (c->dz.dtype) FN(store)(dz, ld, frame_vector(&c->dz, b, h, t), 1, K, 0);
	stream_fence();
	if (sizeof(REAL) == 4) restore_denormals(fp);
}
