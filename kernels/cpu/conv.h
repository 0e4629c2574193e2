// Depthwise causal convolution:   z_t = bias + sum_w weight_w x_{t-(W-1-w)dil}     y = act(z) + residual
//                                 dz = dy act'(z)     dx_t = sum_w weight_w dz_{t+(W-1-w)dil}     dweight_w = sum_t dz_t x_{t-(W-1-w)dil}
//
// A unit of work is a block of tokens by a group of channels. It keeps the rows that it needs as fp32 in scratch, from whatever dtype and
// strides, the rows before a sequence's first from its state: so there is one loop, with channels as lanes. The rows that reach back (forward)
// or ahead (backward) into the next unit are computed twice. Sums over tokens have the order of the units, whose size follows from the call's.
enum { CONV_ROWS = 16, CONV_COLS = 256, CONV_COLS_BWD = 128, CONV_UNIT = 512 };

typedef struct {
	gdnk_tensor x, weight, bias, residual, h0, cu, y, ht, dout, dht, dx, dw, dbias, dresidual, dh0; // absent: dtype 0
	int64_t B, T, D, W, N, S, dil, reach; // reach: rows before a token that it needs
	int silu, stream;
	int64_t tokens, unit, cols, groups; // tokens and channels of a unit, groups of channels
	double *sums;                       // backward: [token units][W + 1][D], bias last
} conv_call;

static view channels(const gdnk_tensor *t, int64_t b, int64_t tok, int64_t d) {
	const int64_t *st = t->stride;
	return (view){(char *)t->data + (b * st[0] + tok * st[1] + d * st[2]) * size_of(t->dtype), t->dtype, st[1], st[2]};
}
// Column j of a state [N D S] as a row of channels
static view state_row(const gdnk_tensor *t, int64_t n, int64_t j, int64_t d) {
	const int64_t *st = t->stride;
	return (view){(char *)t->data + (n * st[0] + j * st[2] + d * st[1]) * size_of(t->dtype), t->dtype, st[2], st[1]};
}
static double weight_at(const conv_call *s, int64_t d, int64_t w) {
	return ld1((const char *)s->weight.data, s->weight.dtype, d * s->weight.stride[0] + w * s->weight.stride[1]);
}
static double bias_at(const conv_call *s, int64_t d) {
	return s->bias.dtype ? ld1((const char *)s->bias.data, s->bias.dtype, d * s->bias.stride[0]) : 0;
}
static sequence conv_sequence(const conv_call *s, int64_t n) {
	scan q = {.cu = s->cu, .T = s->T};
	return sequence_of(&q, n);
}
// The first sequence that ends behind a row, counted over B and T; N if none does
static int64_t sequence_at(const conv_call *s, int64_t row) {
	int64_t lo = 0, hi = s->N;
	if (!s->cu.dtype) return row / s->T;
	while (lo < hi) {
		const int64_t mid = (lo + hi) / 2;
		const sequence q = conv_sequence(s, mid);
		if (q.t0 + q.len > row) hi = mid;
		else lo = mid + 1;
	}
	return lo;
}

// Rows of channels, where tokens lie side by side in memory: a line of them at a time.
NOINL void rows_across(float *d, int ld, view v, int n, int cols) {
	const int sz = size_of(v.type), whole = n / VW * VW;
	int c = 0;
	for (; c + VW <= cols && v.type != GDNK_F64; c += VW)
		for (int i = 0; i < whole; i += VW) {
			vf x[VW];
			UNROLL for (int j = 0; j < VW; j++) {
				const char *p = v.p + ((c + j) * v.col + i) * sz;
				x[j] = v.type == GDNK_F32 ? (vf)LD(p) : v.type == GDNK_BF16 ? ld_bf16((const uint16_t *)p) : ld_f16((const uint16_t *)p);
			}
			transpose(x);
			UNROLL for (int j = 0; j < VW; j++) ST(d + (ptrdiff_t)(i + j) * ld + c, x[j]);
		}
	if (v.type == GDNK_F32) // the narrow ones: weights and states
		for (int k = 0; k < cols; k++)
			for (int i = k < c ? whole : 0; i < n; i++) d[(ptrdiff_t)i * ld + k] = ((const float *)v.p)[k * v.col + i];
	else
		for (int k = 0; k < cols; k++)
			for (int i = k < c ? whole : 0; i < n; i++) d[(ptrdiff_t)i * ld + k] = ld1(v.p, v.type, k * v.col + i);
	for (int i = 0; i < n; i++)
		for (int k = cols; k < ld; k++) d[(ptrdiff_t)i * ld + k] = 0;
}
static void conv_rows_in(float *d, int ld, view v, int n, int cols) {
	if (v.row == 1 && v.col != 1) rows_across(d, ld, v, n, cols);
	else rows_in(d, ld, v, n, n, cols);
}

// Rows [from, from + n) of a sequence, counted from its first token, those before it out of its state; rows from len on are zero.
static void conv_load(const conv_call *s, float *d, int ld, int64_t n_seq, const sequence *q, int64_t from, int n, int64_t first, int cols) {
	for (; n > 0 && from < 0; from++, n--, d += ld) {
		if (s->h0.dtype && s->S + from >= 0) rows_in(d, ld, state_row(&s->h0, n_seq, s->S + from, first), 1, 1, cols);
		else memset(d, 0, sizeof *d * ld);
	}
	const int have = q->len - from < n ? (q->len > from ? q->len - from : 0) : n;
	if (have > 0) conv_rows_in(d, ld, channels(&s->x, q->b, q->t0 + from, first), have, cols);
	if (have < n) memset(d + (ptrdiff_t)have * ld, 0, sizeof *d * (n - have) * ld);
}
static void load_filter(const conv_call *s, float *w, float *bias, int ld, int64_t first, int cols) {
	const gdnk_tensor *t = &s->weight;
	const view v = {(char *)t->data + first * t->stride[0] * size_of(t->dtype), t->dtype, t->stride[1], t->stride[0]};
	conv_rows_in(w, ld, v, s->W, cols);
	memset(bias, 0, sizeof *bias * ld);
	for (int j = 0; s->bias.dtype && j < cols; j++) bias[j] = bias_at(s, first + j);
}

// 1/d for d in [1, 2]
INL vf reciprocal(vf d) {
#if VW == 16
	const vf r = (vf)_mm512_rcp14_ps((__m512)d); // with one step 2^-27; the division takes as long as the exponential
	return r * (2.f - d * r);
#else
	return 1.f / d;
#endif
}
// Rows that are read next, asked for while others are computed: a line with each vector. They are too short and too far apart for the
// hardware's prefetchers. Beyond a row's or the tensor's end: harmless.
typedef struct {
	const char *p;
	ptrdiff_t row, sz;
} upcoming;
static upcoming rows_ahead(view v) { return (upcoming){v.p, v.row * size_of(v.type), size_of(v.type)}; }

// z of one row of channels. x: the row of the first tap; taps are step floats apart.
INL vf taps(int W, const float *w, int ld, const float *x, ptrdiff_t step, vf z) {
	UNROLL for (int k = 0; k < W; k++) z += LD(w + k * ld) * LD(x + k * step);
	return z;
}
INL void conv_rows_as(int W, int silu, float *y, const float *x, ptrdiff_t step, const float *w, const float *bias, int ld, int n, upcoming a) {
	for (int i = 0; i < n; i++, x += ld, y += ld, a.p += a.row)
		for (int c = 0; c < ld; c += VW) {
			__builtin_prefetch(a.p + c * a.sz, 0, 2);
			const vf z = taps(W, w + c, ld, x + c, step, LD(bias + c)), e = vexp(-vabs(z));
			ST(y + c, silu ? z * sel(z < 0.f, e, bc(1)) * reciprocal(1.f + e) : z);
		}
}
NOINL void conv_rows(int W, int silu, float *y, const float *x, ptrdiff_t step, const float *w, const float *bias, int ld, int n, upcoming a) {
	if (W == 4 && silu) conv_rows_as(4, 1, y, x, step, w, bias, ld, n, a);
	else conv_rows_as(W, silu, y, x, step, w, bias, ld, n, a);
}
// The filter that models have, four taps one token apart and SiLU, down n rows that lie where the caller has them: each number is read once.
// The three rows before stay in registers from row to row, and pass from block to block in `before`, fp32 as all scratch.
INL void conv_four_as(int type, int stream, char *y, ptrdiff_t yrow, view x, float *before, const float *w, const float *bias, int ld, int n, upcoming a) {
	const ptrdiff_t sz = size_of(type), row = x.row * sz;
	for (int c = 0; c < ld; c += VW) {
		const vf w0 = LD(w + c), w1 = LD(w + ld + c), w2 = LD(w + 2 * ld + c), w3 = LD(w + 3 * ld + c), b = LD(bias + c);
		vf x0 = LD(before + c), x1 = LD(before + ld + c), x2 = LD(before + 2 * ld + c);
		const char *px = x.p + c * sz, *pa = a.p + c * sz;
		char *py = y + c * 4;
		_Pragma("GCC unroll 4") for (int i = 0; i < n; i++, px += row, pa += row, py += yrow) {
			__builtin_prefetch(pa, 0, 2);
			const vf x3 = ld_as(type, px), z = b + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3, e = vexp(-vabs(z)), r = z * sel(z < 0.f, e, bc(1)) * reciprocal(1.f + e);
			if (stream) st_stream(py, r);
			else ST((float *)py, r);
			x0 = x1, x1 = x2, x2 = x3;
		}
		ST(before + c, x0), ST(before + ld + c, x1), ST(before + 2 * ld + c, x2);
	}
}
NOINL void conv_four(int stream, char *y, ptrdiff_t yrow, view x, float *before, const float *w, const float *bias, int ld, int n, upcoming a) {
	if (x.type == GDNK_F32 && stream) conv_four_as(GDNK_F32, 1, y, yrow, x, before, w, bias, ld, n, a);
	else if (x.type == GDNK_F32) conv_four_as(GDNK_F32, 0, y, yrow, x, before, w, bias, ld, n, a);
	else if (x.type == GDNK_BF16) conv_four_as(GDNK_BF16, 0, y, yrow, x, before, w, bias, ld, n, a);
	else conv_four_as(GDNK_F16, 0, y, yrow, x, before, w, bias, ld, n, a);
}
// dz in place of dy; the first `own` rows add to the sums of dweight and dbias, which are W + 1 rows
INL void conv_rows_bwd_as(int W, int silu, float *dz, const float *x, ptrdiff_t step, const float *w, const float *bias, float *dw, int ld, int n, int own, upcoming a, upcoming b) {
	for (int i = 0; i < n; i++, x += ld, dz += ld, a.p += a.row, b.p += b.row)
		for (int c = 0; c < ld; c += VW) {
			__builtin_prefetch(a.p + c * a.sz, 0, 2);
			__builtin_prefetch(b.p + c * b.sz, 0, 2);
			vf d = LD(dz + c);
			if (silu) {
				const vf z = taps(W, w + c, ld, x + c, step, LD(bias + c)), e = vexp(-vabs(z)), r = reciprocal(1.f + e), er = e * r;
				d *= sel(z < 0.f, er, r) + z * er * r;
				ST(dz + c, d);
			}
			if (i >= own) continue;
			UNROLL for (int k = 0; k < W; k++) ST(dw + k * ld + c, LD(dw + k * ld + c) + d * LD(x + k * step + c));
			ST(dw + W * ld + c, LD(dw + W * ld + c) + d);
		}
}
NOINL void conv_rows_bwd(int W, int silu, float *dz, const float *x, ptrdiff_t step, const float *w, const float *bias, float *dw, int ld, int n, int own, upcoming a, upcoming b) {
	if (W == 4 && silu) conv_rows_bwd_as(4, 1, dz, x, step, w, bias, dw, ld, n, own, a, b);
	else conv_rows_bwd_as(W, silu, dz, x, step, w, bias, dw, ld, n, own, a, b);
}
// dx of n rows: the filter turned round, from the row's own dz on
INL void conv_rows_dx_as(int W, float *dx, const float *dz, ptrdiff_t step, const float *w, int ld, int n) {
	for (int i = 0; i < n; i++, dz += ld, dx += ld)
		for (int c = 0; c < ld; c += VW) {
			vf a = bc(0);
			UNROLL for (int k = 0; k < W; k++) a += LD(w + (W - 1 - k) * ld + c) * LD(dz + k * step + c);
			ST(dx + c, a);
		}
}
NOINL void conv_rows_dx(int W, float *dx, const float *dz, ptrdiff_t step, const float *w, int ld, int n) {
	if (W == 4) conv_rows_dx_as(4, dx, dz, step, w, ld, n);
	else conv_rows_dx_as(W, dx, dz, step, w, ld, n);
}

static int conv_ld(int cols) { return (cols + VW - 1) / VW * VW; }
static void conv_fwd_unit(void *ctx, int64_t unit, char *base) {
	const conv_call *s = ctx;
	const uint64_t fp = flush_denormals();
	const int64_t first = unit % s->groups * s->cols, from = unit / s->groups * s->unit, to = from + s->unit < s->tokens ? from + s->unit : s->tokens;
	const int cols = s->D - first < s->cols ? s->D - first : s->cols, ld = conv_ld(cols), reach = s->reach;
	char *p = base;
	float *w = take(&p, s->W * ld), *bias = take(&p, ld), *y = take(&p, CONV_ROWS * ld), *x = take(&p, (reach + CONV_ROWS) * ld);
	load_filter(s, w, bias, ld, first, cols);
	int64_t row = from;
	for (int64_t n = sequence_at(s, from); n < s->N && row < to; n++) {
		const sequence q = conv_sequence(s, n);
		const int64_t begin = q.b * s->T + q.t0, last = (to - begin < q.len ? to - begin : q.len);
		int64_t t = row - begin;
		if (t < last) conv_load(s, x, ld, n, &q, t - reach, reach, first, cols);
		for (; t < last; t += CONV_ROWS) {
			const int m = last - t < CONV_ROWS ? last - t : CONV_ROWS;
			const view in = channels(&s->x, q.b, q.t0 + t, first), out = channels(&s->y, q.b, q.t0 + t, first);
			const upcoming next = rows_ahead(at(in, m));
			if (s->W == 4 && s->dil == 1 && s->silu && !s->residual.dtype && in.col == 1 && cols == ld) {
				if (out.type == GDNK_F32 && out.col == 1) {
					conv_four(s->stream && !(((uintptr_t)out.p | 4 * out.row) & 63), out.p, 4 * out.row, in, x, w, bias, ld, m, next);
				} else {
					conv_four(0, (char *)y, 4 * ld, in, x, w, bias, ld, m, next);
					rows_out(y, ld, out, m, cols, s->stream);
				}
				continue;
			}
			conv_load(s, x + reach * ld, ld, n, &q, t, m, first, cols);
			conv_rows(s->W, s->silu, y, x, s->dil * ld, w, bias, ld, m, next);
			if (t + m < last) memmove(x, x + m * ld, sizeof *x * reach * ld); // before the residual takes the rows behind
			if (s->residual.dtype) {
				float *r = x + reach * ld;
				conv_rows_in(r, ld, channels(&s->residual, q.b, q.t0 + t, first), m, cols);
				for (int i = 0; i < m * ld; i += VW) ST(y + i, LD(y + i) + LD(r + i));
			}
			rows_out(y, ld, out, m, cols, s->stream);
		}
		row = begin + last;
	}
	memset(y, 0, sizeof *y * ld);
	for (; row < to; row++) rows_out(y, ld, channels(&s->y, row / s->T, row % s->T, first), 1, cols, 0); // of no sequence
	stream_fence();
	restore_denormals(fp);
}
static void conv_bwd_unit(void *ctx, int64_t unit, char *base) {
	const conv_call *s = ctx;
	const uint64_t fp = flush_denormals();
	const int64_t first = unit % s->groups * s->cols, from = unit / s->groups * s->unit, to = from + s->unit < s->tokens ? from + s->unit : s->tokens;
	const int cols = s->D - first < s->cols ? s->D - first : s->cols, ld = conv_ld(cols), reach = s->reach;
	char *p = base;
	float *w = take(&p, s->W * ld), *bias = take(&p, ld), *dw = take(&p, (s->W + 1) * ld), *dx = take(&p, CONV_ROWS * ld);
	float *x = take(&p, (reach + CONV_ROWS) * ld), *dz = take(&p, (reach + CONV_ROWS) * ld), *more = take(&p, ld);
	double *const sums = s->sums + unit / s->groups * (s->W + 1) * s->D + first;
	load_filter(s, w, bias, ld, first, cols);
	memset(dw, 0, sizeof *dw * (s->W + 1) * ld);
	int64_t row = from, summed = 0;
	for (int64_t n = sequence_at(s, from); n < s->N && row < to; n++) {
		const sequence q = conv_sequence(s, n);
		const int64_t begin = q.b * s->T + q.t0, last = (to - begin < q.len ? to - begin : q.len), t0 = row - begin;
		if (t0 < last) {
			conv_load(s, x, ld, n, &q, t0 - reach, reach, first, cols);
			memset(dz, 0, sizeof *dz * reach * ld);
		}
		// dz of rows [t, t + CONV_ROWS) gives dx of the rows `reach` before them; behind `last` it is for those alone.
		for (int64_t t = t0; t0 < last && t - reach < last; t += CONV_ROWS) {
			const int64_t end = last + reach < q.len ? last + reach : q.len; // of the rows whose dz counts
			const int m = end - t < CONV_ROWS ? (end > t ? end - t : 0) : CONV_ROWS, own = last - t < m ? (last > t ? last - t : 0) : m;
			float *const xt = x + reach * ld, *const dzt = dz + reach * ld;
			if (m) {
				conv_load(s, xt, ld, n, &q, t, m, first, cols);
				conv_rows_in(dzt, ld, channels(&s->dout, q.b, q.t0 + t, first), m, cols);
				if (s->dresidual.dtype && own) rows_out(dzt, ld, channels(&s->dresidual, q.b, q.t0 + t, first), own, cols, s->stream);
				conv_rows_bwd(s->W, s->silu, dzt, x, s->dil * ld, w, bias, dw, ld, m, own, rows_ahead(channels(&s->x, q.b, q.t0 + t + m, first)),
					rows_ahead(channels(&s->dout, q.b, q.t0 + t + m, first)));
				if ((summed += own) >= CONV_UNIT) { // fp32 sums over so many tokens only
					for (int k = 0; k <= s->W; k++) add_row(sums + k * s->D, dw + k * ld, cols);
					memset(dw, 0, sizeof *dw * (s->W + 1) * ld);
					summed = 0;
				}
			}
			if (m < CONV_ROWS) memset(dzt + m * ld, 0, sizeof *dz * (CONV_ROWS - m) * ld);
			// Rows before this unit's belong to the unit before, those before the sequence's first to its state.
			const int64_t lo = t - reach < t0 ? (t0 == 0 ? t - reach : t0) : t - reach, hi = t - reach + CONV_ROWS < last ? t - reach + CONV_ROWS : last;
			conv_rows_dx(s->W, dx, dz, s->dil * ld, w, ld, CONV_ROWS);
			for (int64_t r = lo; r < hi; r++) {
				float *const d = dx + (r - t + reach) * ld;
				if (r < 0 ? s->dh0.dtype != 0 : s->dht.dtype && r >= q.len - s->S) {
					// What the states add: to the state's own gradient, which conv_states made of that of the final state, or from the latter.
					const view v = r < 0 ? state_row(&s->dh0, n, s->S + r, first) : state_row(&s->dht, n, r - q.len + s->S, first);
					rows_in(more, ld, v, 1, 1, cols);
					for (int c = 0; c < ld; c += VW) ST(d + c, LD(d + c) + LD(more + c));
					if (r < 0) rows_out(d, ld, v, 1, cols, 0);
				}
			}
			const int64_t r = lo < 0 ? 0 : lo;
			if (r < hi) rows_out(dx + (r - t + reach) * ld, ld, channels(&s->dx, q.b, q.t0 + r, first), hi - r, cols, s->stream);
			memmove(dz, dz + CONV_ROWS * ld, sizeof *dz * reach * ld);
			memmove(x, x + CONV_ROWS * ld, sizeof *x * reach * ld);
		}
		row = begin + last;
	}
	for (int k = 0; k <= s->W; k++) add_row(sums + k * s->D, dw + k * ld, cols);
	memset(dx, 0, sizeof *dx * ld);
	for (; row < to; row++) { // of no sequence
		rows_out(dx, ld, channels(&s->dx, row / s->T, row % s->T, first), 1, cols, 0);
		if (s->dresidual.dtype) rows_out(dx, ld, channels(&s->dresidual, row / s->T, row % s->T, first), 1, cols, 0);
	}
	stream_fence();
	restore_denormals(fp);
}
// States of one sequence, all copies. Forward: the last S of its inputs and of the state before them. Backward: what the gradient of the
// final state hands straight to the initial one.
static void conv_states(void *ctx, int64_t n, char *base) {
	const conv_call *s = ctx;
	(void)base;
	const sequence q = conv_sequence(s, n);
	const gdnk_tensor *to = s->dx.dtype ? &s->dh0 : &s->ht;
	for (int64_t d = 0; d < s->D; d++)
		for (int64_t j = 0; j < s->S; j++) {
			const view v = state_row(to, n, j, d);
			const int64_t i = s->dx.dtype ? j - q.len : j + q.len; // of the dht that column j of the initial state becomes; of the state and the inputs in a row
			double a = 0;
			if (s->dx.dtype) {
				if (s->dht.dtype && i >= 0) a = ld1(state_row(&s->dht, n, i, d).p, s->dht.dtype, 0);
			} else if (i >= s->S) a = ld1(channels(&s->x, q.b, q.t0 + i - s->S, d).p, s->x.dtype, 0);
			else if (s->h0.dtype) a = ld1(state_row(&s->h0, n, i, d).p, s->h0.dtype, 0);
			st1(v.p, v.type, 0, a);
		}
}

// One channel in double: every token by itself
static double input_f64(const conv_call *s, int64_t n, const sequence *q, int64_t t, int64_t d) {
	if (t >= 0) return ld1(channels(&s->x, q->b, q->t0 + t, d).p, s->x.dtype, 0);
	return s->h0.dtype && s->S + t >= 0 ? ld1(state_row(&s->h0, n, s->S + t, d).p, s->h0.dtype, 0) : 0;
}
static double conv_z_f64(const conv_call *s, int64_t n, const sequence *q, int64_t t, int64_t d) {
	double z = bias_at(s, d);
	for (int64_t w = 0; w < s->W; w++) z += weight_at(s, d, w) * input_f64(s, n, q, t - (s->W - 1 - w) * s->dil, d);
	return z;
}
static double conv_dz_f64(const conv_call *s, int64_t n, const sequence *q, int64_t t, int64_t d) {
	const double dy = ld1(channels(&s->dout, q->b, q->t0 + t, d).p, s->dout.dtype, 0), z = s->silu ? conv_z_f64(s, n, q, t, d) : 0;
	return s->silu ? dy * (sigmoid64(z) + z * dsigmoid64(z)) : dy;
}
static void conv_channel_f64(void *ctx, int64_t d, char *base) {
	const conv_call *s = ctx;
	(void)base;
	for (int64_t n = 0; n < s->N; n++) {
		const sequence q = conv_sequence(s, n);
		for (int64_t t = s->dx.dtype ? -s->reach : 0; t < q.len; t++) {
			double a = 0;
			if (!s->dx.dtype) {
				a = conv_z_f64(s, n, &q, t, d);
				if (s->silu) a *= sigmoid64(a);
				if (s->residual.dtype) a += ld1(channels(&s->residual, q.b, q.t0 + t, d).p, s->residual.dtype, 0);
				st1(channels(&s->y, q.b, q.t0 + t, d).p, s->y.dtype, 0, a);
				continue;
			}
			for (int64_t w = 0; w < s->W; w++) {
				const int64_t u = t + (s->W - 1 - w) * s->dil;
				if (u >= 0 && u < q.len) a += weight_at(s, d, w) * conv_dz_f64(s, n, &q, u, d);
			}
			if (t < 0) {
				if (!s->dh0.dtype) continue;
				const view v = state_row(&s->dh0, n, s->S + t, d);
				st1(v.p, v.type, 0, a + ld1(v.p, v.type, 0));
				continue;
			}
			if (s->dht.dtype && t >= q.len - s->S) a += ld1(state_row(&s->dht, n, t - q.len + s->S, d).p, s->dht.dtype, 0);
			st1(channels(&s->dx, q.b, q.t0 + t, d).p, s->dx.dtype, 0, a);
			if (s->dresidual.dtype) st1(channels(&s->dresidual, q.b, q.t0 + t, d).p, s->dresidual.dtype, 0, ld1(channels(&s->dout, q.b, q.t0 + t, d).p, s->dout.dtype, 0));
			const double dz = conv_dz_f64(s, n, &q, t, d);
			for (int64_t w = 0; w < s->W; w++) s->sums[w * s->D + d] += dz * input_f64(s, n, &q, t - (s->W - 1 - w) * s->dil, d);
			s->sums[s->W * s->D + d] += dz;
		}
	}
	const sequence q = s->cu.dtype && s->N ? conv_sequence(s, s->N - 1) : (sequence){0};
	const gdnk_tensor *rest[] = {&s->y, &s->dx, &s->dresidual};
	for (int64_t i = q.t0 + q.len; s->cu.dtype && i < s->T; i++)
		for (int k = 0; k < 3; k++)
			if (rest[k]->dtype) st1(channels(rest[k], 0, i, d).p, rest[k]->dtype, 0, 0);
}

static void conv_setup(conv_call *s, const int64_t *size, int64_t cols) {
	s->B = size[SZ_B], s->T = size[SZ_T], s->D = size[SZ_D], s->W = size[SZ_W], s->N = size[SZ_N];
	s->reach = (s->W - 1) * s->dil;
	s->tokens = s->B * s->T;
	// At most 64 blocks of tokens: each keeps sums of its own in the backward.
	s->unit = (s->tokens + 64 * CONV_UNIT - 1) / (64 * CONV_UNIT) * CONV_UNIT;
	s->cols = cols < s->D ? cols : conv_ld(s->D), s->groups = (s->D + s->cols - 1) / s->cols;
}
static int op_conv_fwd(const gdnk_call *c) {
	conv_call s = {.x = TENSOR(conv_fwd, x), .weight = TENSOR(conv_fwd, weight), .bias = TENSOR(conv_fwd, bias), .residual = TENSOR(conv_fwd, residual),
		.h0 = TENSOR(conv_fwd, initial_state), .cu = TENSOR(conv_fwd, cu_seqlens), .y = TENSOR(conv_fwd, y), .ht = TENSOR(conv_fwd, final_state),
		.silu = INT(conv_fwd, silu), .dil = INT(conv_fwd, dilation), .S = INT(conv_fwd, state_len)};
	conv_setup(&s, c->size, CONV_COLS);
	s.stream = 2 * tensor_bytes(&s.y) >= STREAM_BYTES;
	will_write(&s.y);
	const int64_t ld = conv_ld(s.cols), bytes = (s.W + 1 + 2 * CONV_ROWS + s.reach) * ld * (int64_t)sizeof(float) + 1024;
	if (s.x.dtype == GDNK_F64 ? gdnk_parallel(s.D, 0, conv_channel_f64, &s) : s.tokens ? gdnk_parallel((s.tokens + s.unit - 1) / s.unit * s.groups, bytes, conv_fwd_unit, &s) : 0) return 1;
	return s.ht.dtype ? gdnk_parallel(s.N, 0, conv_states, &s) : 0;
}
static int op_conv_bwd(const gdnk_call *c) {
	conv_call s = {.x = TENSOR(conv_bwd, x), .weight = TENSOR(conv_bwd, weight), .bias = TENSOR(conv_bwd, bias), .h0 = TENSOR(conv_bwd, initial_state),
		.cu = TENSOR(conv_bwd, cu_seqlens), .dout = TENSOR(conv_bwd, dout), .dht = TENSOR(conv_bwd, dht), .dx = TENSOR(conv_bwd, dx), .dw = TENSOR(conv_bwd, dweight),
		.dbias = TENSOR(conv_bwd, dbias), .dresidual = TENSOR(conv_bwd, dresidual), .dh0 = TENSOR(conv_bwd, dh0), .silu = INT(conv_bwd, silu), .dil = INT(conv_bwd, dilation), .S = INT(conv_bwd, state_len)};
	conv_setup(&s, c->size, CONV_COLS_BWD);
	s.stream = 2 * tensor_bytes(&s.dx) >= STREAM_BYTES;
	will_write(&s.dx);
	const int64_t ld = conv_ld(s.cols), bytes = (2 * s.W + 2 + 1 + 3 * CONV_ROWS + 2 * s.reach + 1) * ld * (int64_t)sizeof(float) + 1024;
	const int64_t blocks = s.x.dtype == GDNK_F64 ? 1 : s.tokens ? (s.tokens + s.unit - 1) / s.unit : 0;
	if (!(s.sums = calloc((blocks * (s.W + 1)) * s.D + 1, sizeof *s.sums))) return 1;
	const int failed = (s.dh0.dtype && gdnk_parallel(s.N, 0, conv_states, &s)) ||
		(s.x.dtype == GDNK_F64 ? gdnk_parallel(s.D, 0, conv_channel_f64, &s) : gdnk_parallel(blocks * s.groups, bytes, conv_bwd_unit, &s));
	for (int64_t d = 0; !failed && d < s.D; d++)
		for (int64_t w = 0; w <= s.W; w++) {
			double sum = 0;
			for (int64_t b = 0; b < blocks; b++) sum += s.sums[(b * (s.W + 1) + w) * s.D + d];
			if (w < s.W) st1((char *)s.dw.data, s.dw.dtype, d * s.dw.stride[0] + w * s.dw.stride[1], sum);
			else if (s.dbias.dtype) st1((char *)s.dbias.data, s.dbias.dtype, d * s.dbias.stride[0], sum);
		}
	free(s.sums);
	return failed;
}
