// Gates, their cumulative sums, and norms, standing alone.
//
// Both keep rows of a group of columns in scratch. A group's thread walks all tokens in order, so sums over tokens have one order whatever
// the number of threads. Sums over tokens are double throughout: they may be over any number, and -inf must pass.

// The derivative of sigmoid, without the cancellation of 1 - sigmoid(x)
INL vf vdsigmoid(vf x) {
	const vf e = vexp(-vabs(x)), r = 1.f / (1.f + e);
	return e * r * r;
}
static double sigmoid64(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double dsigmoid64(double x) { return sigmoid64(x) * sigmoid64(-x); }

// ---------------------------------------------------------------- gates
enum { GATE_COLS = 256, GATE_ROWS = 16 }; // of a block

typedef struct {
	gdnk_tensor g, A_log, dt_bias, cu, y, dout, dg, dA, dbias; // absent: dtype 0
	int64_t T, HV, K, N, chunk;
	int gate, reverse;
	double bound, scale;
	int64_t heads, span, cols, groups; // columns that one stride covers: span in each of heads; cols a unit, groups units a head
	double (*sums)[2];                 // backward: of dx and of what A_log gets, by column
} gates_call;

// A column counts over heads and channels. They are one span where all tensors let one stride cover them.
static int one_span(const gates_call *s, const gdnk_tensor *t) {
	return !t->dtype || s->K == 1 || s->HV == 1 || t->stride[2] == s->K * t->stride[3];
}
static view columns_of(const gates_call *s, const gdnk_tensor *t, int64_t b, int64_t tok, int64_t col) {
	const int64_t *st = t->stride, h = col / s->K;
	return (view){(char *)t->data + (b * st[0] + tok * st[1] + h * st[2] + (col - h * s->K) * st[3]) * size_of(t->dtype), t->dtype, st[1], s->K == 1 ? st[2] : st[3]};
}
static void gates_setup(gates_call *s, const int64_t *size) {
	s->T = size[SZ_T], s->HV = size[SZ_HV], s->K = size[SZ_K], s->N = size[SZ_N];
	if (s->scale == 0) s->scale = 1;
	const int one = one_span(s, &s->g) && one_span(s, &s->y) && one_span(s, &s->dout) && one_span(s, &s->dg);
	s->heads = one ? 1 : s->HV, s->span = one ? s->HV * s->K : s->K;
	s->cols = (s->span / 16 + VW) / VW * VW; // at least 16 units, as long as they are a vector wide
	if (s->cols > GATE_COLS) s->cols = GATE_COLS;
	s->groups = (s->span + s->cols - 1) / s->cols;
}
static void amplitude_and_bias(const gates_call *s, int64_t col, double *a, double *bias) {
	const int64_t h = col / s->K, k = col % s->K;
	*a = s->A_log.dtype ? exp(ld1((const char *)s->A_log.data, s->A_log.dtype, h * s->A_log.stride[0])) : 1;
	*bias = s->dt_bias.dtype ? ld1((const char *)s->dt_bias.data, s->dt_bias.dtype, h * s->dt_bias.stride[0] + k * s->dt_bias.stride[1]) : 0;
}
static sequence gates_sequence(const gates_call *s, int64_t n) {
	scan q = {.cu = s->cu, .T = s->T};
	return sequence_of(&q, n);
}

// The whole column in double, forward (dg absent) or backward
static void gate_column_f64(const gates_call *s, int64_t col) {
	double a, bias, sums[2] = {0};
	amplitude_and_bias(s, col, &a, &bias);
	for (int64_t n = 0; n < s->N; n++) {
		const sequence q = gates_sequence(s, n);
		const int64_t chunk = s->chunk ? s->chunk : q.len ? q.len : 1;
		const int down = s->dg.dtype ? !s->reverse : s->reverse; // a gradient runs against its sum
		for (int64_t c = 0; c < q.len; c += chunk) {
			const int64_t len = q.len - c < chunk ? q.len - c : chunk;
			double sum = 0;
			for (int64_t i = 0; i < len; i++) {
				const int64_t tok = q.t0 + c + (down ? len - 1 - i : i);
				const view v = columns_of(s, &s->g, q.b, tok, col);
				const double x = ld1(v.p, v.type, 0) + bias;
				if (!s->dg.dtype) {
					const double y = s->gate ? gate_f64(x, a, s->bound) : x;
					sum = s->chunk ? sum + y : y;
					st1(columns_of(s, &s->y, q.b, tok, col).p, s->y.dtype, 0, sum * s->scale);
				} else {
					double dx, dA = 0;
					const double dy = ld1(columns_of(s, &s->dout, q.b, tok, col).p, s->dout.dtype, 0) * s->scale;
					sum = s->chunk ? sum + dy : dy;
					if (s->gate) gate_bwd_f64(x, a, s->bound, sum, &dx, &dA);
					else dx = sum;
					sums[0] += dx, sums[1] += dA;
					st1(columns_of(s, &s->dg, q.b, tok, col).p, s->dg.dtype, 0, dx);
				}
			}
		}
	}
	if (s->sums) memcpy(s->sums[col], sums, sizeof sums);
}

typedef struct {
	float x[GATE_ROWS * GATE_COLS], y[GATE_ROWS * GATE_COLS], a[GATE_COLS], bias[GATE_COLS], dA[GATE_COLS];
	double sum[GATE_COLS], sums[2][GATE_COLS];
} ALN gate_scratch;

// sum += x, x = sum where the gate is summed, then x *= scale
static void running(float *restrict x, double *restrict sum, int n, int summed, float scale) {
	if (summed)
		for (int j = 0; j < n; j++) sum[j] += x[j], x[j] = sum[j];
	if (scale != 1)
		for (int j = 0; j < n; j++) x[j] *= scale;
}
static void add_row(double *restrict sum, const float *restrict x, int n) {
	for (int j = 0; j < n; j++) sum[j] += x[j];
}
NOINL void gate_row(const gates_call *s, const gate_scratch *w, float *x, int ld) {
	for (int j = 0; j < ld; j += VW) ST(x + j, vgate(LD(x + j) + LD(w->bias + j), LD(w->a + j), s->bound));
}
// y becomes the gradient of the raw gate x, and dA what A_log gets
NOINL void gate_row_bwd(const gates_call *s, gate_scratch *w, const float *x, float *y, int ld) {
	for (int j = 0; j < ld; j += VW) {
		vf dx, dA;
		vgate_bwd(LD(x + j) + LD(w->bias + j), LD(w->a + j), s->bound, LD(y + j), &dx, &dA);
		ST(y + j, dx);
		ST(w->dA + j, dA);
	}
}
static void gate_unit(void *ctx, int64_t unit, char *base) {
	const gates_call *s = ctx;
	const int64_t first = unit / s->groups * s->span + unit % s->groups * s->cols, left = s->span - unit % s->groups * s->cols;
	const int cols = left < s->cols ? left : s->cols, ld = (cols + VW - 1) / VW * VW, backward = s->dg.dtype != 0;
	if (s->g.dtype == GDNK_F64) {
		for (int j = 0; j < cols; j++) gate_column_f64(s, first + j);
		return;
	}
	const uint64_t fp = flush_denormals();
	gate_scratch *w = (gate_scratch *)base;
	memset(w, 0, sizeof *w);
	for (int j = 0; j < cols; j++) {
		double a, bias;
		amplitude_and_bias(s, first + j, &a, &bias);
		w->a[j] = a, w->bias[j] = bias;
	}
	const int down = backward ? !s->reverse : s->reverse;
	for (int64_t n = 0; n < s->N; n++) {
		const sequence q = gates_sequence(s, n);
		const int64_t chunk = s->chunk ? s->chunk : q.len ? q.len : 1;
		for (int64_t c = 0; c < q.len; c += chunk) {
			const int64_t len = q.len - c < chunk ? q.len - c : chunk;
			memset(w->sum, 0, sizeof w->sum);
			for (int64_t i = 0; i < len; i += GATE_ROWS) {
				const int rows = len - i < GATE_ROWS ? len - i : GATE_ROWS;
				const int64_t tok = q.t0 + c + (down ? len - i - rows : i);
				rows_in(w->x, ld, columns_of(s, &s->g, q.b, tok, first), rows, rows, cols);
				if (backward) rows_in(w->y, ld, columns_of(s, &s->dout, q.b, tok, first), rows, rows, cols);
				for (int j = 0; j < rows; j++) {
					const int r = down ? rows - 1 - j : j;
					float *const x = w->x + r * ld, *const y = w->y + r * ld;
					if (!backward) {
						if (s->gate) gate_row(s, w, x, ld);
						running(x, w->sum, cols, s->chunk != 0, s->scale);
						continue;
					}
					running(y, w->sum, cols, s->chunk != 0, 1);
					for (int d = 0; s->scale != 1 && d < cols; d++) y[d] *= (float)s->scale;
					if (s->gate) gate_row_bwd(s, w, x, y, ld);
					if (s->sums) add_row(w->sums[0], y, cols), add_row(w->sums[1], w->dA, cols);
				}
				rows_out(backward ? w->y : w->x, ld, columns_of(s, backward ? &s->dg : &s->y, q.b, tok, first), rows, cols, 0);
			}
		}
	}
	for (int j = 0; s->sums && j < cols; j++) s->sums[first + j][0] = w->sums[0][j], s->sums[first + j][1] = w->sums[1][j];
	restore_denormals(fp);
}
static int gates_run(gates_call *s) {
	const gdnk_tensor *out = s->dg.dtype ? &s->dg : &s->y;
	will_write(out);
	if (gdnk_parallel(s->heads * s->groups, sizeof(gate_scratch), gate_unit, s)) return 1;
	if (s->cu.dtype) {
		const sequence last = s->N ? gates_sequence(s, s->N - 1) : (sequence){0};
		zero_tokens(out, last.t0 + last.len, s->T);
	}
	return 0;
}
static int op_gate_fwd(const gdnk_call *c) {
	gates_call s = {.g = TENSOR(gate_fwd, g), .A_log = TENSOR(gate_fwd, A_log), .dt_bias = TENSOR(gate_fwd, dt_bias), .cu = TENSOR(gate_fwd, cu_seqlens), .y = TENSOR(gate_fwd, y),
		.gate = INT(gate_fwd, gate), .chunk = INT(gate_fwd, chunk), .reverse = INT(gate_fwd, reverse), .bound = c->f[N_gate_fwd_bound], .scale = c->f[N_gate_fwd_scale]};
	gates_setup(&s, c->size);
	return gates_run(&s);
}
static int op_gate_bwd(const gdnk_call *c) {
	gates_call s = {.g = TENSOR(gate_bwd, g), .A_log = TENSOR(gate_bwd, A_log), .dt_bias = TENSOR(gate_bwd, dt_bias), .cu = TENSOR(gate_bwd, cu_seqlens),
		.dout = TENSOR(gate_bwd, dout), .dg = TENSOR(gate_bwd, dg), .dA = TENSOR(gate_bwd, dA_log), .dbias = TENSOR(gate_bwd, ddt_bias), .gate = INT(gate_bwd, gate),
		.chunk = INT(gate_bwd, chunk), .reverse = INT(gate_bwd, reverse), .bound = c->f[N_gate_bwd_bound], .scale = c->f[N_gate_bwd_scale]};
	gates_setup(&s, c->size);
	if ((s.dA.dtype || s.dbias.dtype) && !(s.sums = calloc(s.HV * s.K, sizeof *s.sums))) return 1;
	const int failed = gates_run(&s);
	for (int64_t h = 0; !failed && s.sums && h < s.HV; h++) {
		double dA = 0;
		for (int64_t k = 0; k < s.K; k++) {
			const double *sum = s.sums[h * s.K + k];
			dA += sum[1];
			if (s.dbias.dtype) st1((char *)s.dbias.data, s.dbias.dtype, h * s.dbias.stride[0] + k * s.dbias.stride[1], sum[0]);
		}
		if (s.dA.dtype) st1((char *)s.dA.data, s.dA.dtype, h * s.dA.stride[0], dA);
	}
	free(s.sums);
	return failed;
}

// ---------------------------------------------------------------- norms
// y = x r weight act(z), r = 1 / sqrt(sum x^2 (/ K) + eps). With u = dy weight act(z): dx = r (u - (u.x) r^2 x (/ K)).
typedef struct {
	gdnk_tensor x, weight, z, y, dout, dx, dweight, dz; // absent: dtype 0
	int64_t T, H, K, KP, tokens, block, blocks; // tokens in all; of a unit
	int activation;
	double eps, inv; // inv: 1, or 1 / K for the mean
	double *sums;    // backward: of dweight, by unit
} norm_call;

static view norm_view(const norm_call *s, const gdnk_tensor *t, int64_t tok, int64_t h) {
	view v = token_view(t, tok / s->T, tok % s->T, h);
	v.row = 0; // a row by itself
	return v;
}
INL vf activation_of(int kind, vf z) {
	const vf s = vsigmoid(z);
	return kind == 1 ? z * s : s;
}
INL float hsum(vf x) {
	float a[VW] ALN;
	ST(a, x);
	for (int n = VW / 2; n; n /= 2)
		for (int i = 0; i < n; i++) a[i] += a[i + n];
	return a[0];
}
static float row_factor(const norm_call *s, const float *x) {
	vf a = bc(0), b = bc(0);
	int d = 0;
	for (; d + 2 * VW <= s->KP; d += 2 * VW) a += LD(x + d) * LD(x + d), b += LD(x + d + VW) * LD(x + d + VW);
	if (d < s->KP) a += LD(x + d) * LD(x + d);
	return 1 / sqrtf(hsum(a + b) * (float)s->inv + (float)s->eps);
}
NOINL void norm_row(const norm_call *s, float *x, const float *weight, const float *z) {
	const float r = row_factor(s, x);
	for (int d = 0; d < s->KP; d += VW) {
		vf y = LD(x + d) * r * LD(weight + d);
		if (s->activation) y *= activation_of(s->activation, LD(z + d));
		ST(x + d, y);
	}
}
// dy becomes dx, z its gradient, and dw grows by the gradient of weight
NOINL void norm_row_bwd(const norm_call *s, const float *x, const float *weight, float *z, float *dy, float *dw) {
	const float r = row_factor(s, x);
	vf dot = bc(0);
	for (int d = 0; d < s->KP; d += VW) {
		const vf xn = LD(x + d) * r, w = LD(weight + d), g = LD(dy + d);
		vf act = bc(1);
		if (s->activation) {
			const vf zz = LD(z + d), sig = vsigmoid(zz), ds = vdsigmoid(zz);
			act = s->activation == 1 ? zz * sig : sig;
			ST(z + d, g * xn * w * (s->activation == 1 ? sig + zz * ds : ds));
		}
		ST(dw + d, LD(dw + d) + g * xn * act);
		const vf u = g * w * act;
		dot += u * xn;
		ST(dy + d, u);
	}
	const float t = hsum(dot) * (float)s->inv;
	for (int d = 0; d < s->KP; d += VW) ST(dy + d, (LD(dy + d) - LD(x + d) * r * t) * r);
}
static double norm_weight(const norm_call *s, int64_t d) {
	return s->weight.dtype ? ld1((const char *)s->weight.data, s->weight.dtype, d * s->weight.stride[0]) : 1;
}
static void norm_row_f64(const norm_call *s, int64_t tok, int64_t h, double *dw) {
	const view x = norm_view(s, &s->x, tok, h), z = s->z.dtype ? norm_view(s, &s->z, tok, h) : x;
	const view dy = s->dx.dtype ? norm_view(s, &s->dout, tok, h) : x;
	double sum = 0, dot = 0;
	for (int64_t d = 0; d < s->K; d++) sum += ld1(x.p, x.type, d * x.col) * ld1(x.p, x.type, d * x.col);
	const double r = 1 / sqrt(sum * s->inv + s->eps);
	for (int pass = 0; pass < 2; pass++)
		for (int64_t d = 0; d < s->K; d++) {
			const double xn = r * ld1(x.p, x.type, d * x.col), w = norm_weight(s, d), zz = ld1(z.p, z.type, d * z.col), sig = sigmoid64(zz);
			const double act = s->activation == 0 ? 1 : s->activation == 1 ? zz * sig : sig, g = ld1(dy.p, dy.type, d * dy.col);
			if (!s->dx.dtype) {
				if (pass) st1(norm_view(s, &s->y, tok, h).p, s->y.dtype, d * s->y.stride[3], xn * w * act);
			} else if (!pass) {
				dot += g * w * act * xn;
				if (dw) dw[d] += g * xn * act;
				if (s->dz.dtype) st1(norm_view(s, &s->dz, tok, h).p, s->dz.dtype, d * s->dz.stride[3], g * xn * w * (s->activation == 1 ? sig + zz * dsigmoid64(zz) : dsigmoid64(zz)));
			} else st1(norm_view(s, &s->dx, tok, h).p, s->dx.dtype, d * s->dx.stride[3], r * (g * w * act - dot * s->inv * xn));
		}
}
static void norm_unit(void *ctx, int64_t unit, char *base) {
	const norm_call *s = ctx;
	const int64_t from = unit * s->block, to = from + s->block < s->tokens ? from + s->block : s->tokens;
	double *sums = s->sums ? s->sums + unit * s->K : NULL;
	if (s->x.dtype == GDNK_F64) {
		for (int64_t t = from; t < to; t++)
			for (int64_t h = 0; h < s->H; h++) norm_row_f64(s, t, h, sums);
		return;
	}
	const uint64_t fp = flush_denormals();
	float *x = (float *)base, *weight = x + s->KP, *z = weight + s->KP, *dy = z + s->KP, *dw = dy + s->KP;
	memset(base, 0, 5 * sizeof(float) * s->KP);
	for (int64_t d = 0; d < s->K; d++) weight[d] = norm_weight(s, d);
	for (int64_t t = from; t < to; t++) {
		for (int64_t h = 0; h < s->H; h++) {
			rows_in(x, s->KP, norm_view(s, &s->x, t, h), 1, 1, s->K);
			if (s->z.dtype) rows_in(z, s->KP, norm_view(s, &s->z, t, h), 1, 1, s->K);
			if (!s->dx.dtype) {
				norm_row(s, x, weight, z);
				rows_out(x, s->KP, norm_view(s, &s->y, t, h), 1, s->K, 0);
				continue;
			}
			rows_in(dy, s->KP, norm_view(s, &s->dout, t, h), 1, 1, s->K);
			norm_row_bwd(s, x, weight, z, dy, dw);
			rows_out(dy, s->KP, norm_view(s, &s->dx, t, h), 1, s->K, 0);
			if (s->dz.dtype) rows_out(z, s->KP, norm_view(s, &s->dz, t, h), 1, s->K, 0);
		}
		if (sums) { // fp32 sums over a token's heads only
			add_row(sums, dw, s->K);
			memset(dw, 0, sizeof(float) * s->KP);
		}
	}
	restore_denormals(fp);
}
static int norm_run(norm_call *s, const int64_t *size) {
	s->T = size[SZ_T], s->H = size[SZ_H], s->K = size[SZ_K], s->KP = (s->K + VW - 1) / VW * VW;
	s->tokens = size[SZ_B] * s->T;
	// Blocks of tokens by the size of the call alone: the sums of dweight are by block.
	s->block = (s->tokens + 63) / 64;
	if (s->block * s->H * s->K < 4096) s->block = 4096 / (s->H * s->K) + 1;
	s->blocks = (s->tokens + s->block - 1) / s->block;
	will_write(s->dx.dtype ? &s->dx : &s->y);
	if (s->dweight.dtype && !(s->sums = calloc(s->blocks * s->K + 1, sizeof *s->sums))) return 1;
	const int failed = gdnk_parallel(s->blocks, 5 * sizeof(float) * s->KP, norm_unit, s);
	for (int64_t d = 0; !failed && s->sums && d < s->K; d++) {
		double sum = 0;
		for (int64_t b = 0; b < s->blocks; b++) sum += s->sums[b * s->K + d];
		st1((char *)s->dweight.data, s->dweight.dtype, d * s->dweight.stride[0], sum);
	}
	free(s->sums);
	return failed;
}
static int op_norm_fwd(const gdnk_call *c) {
	norm_call s = {.x = TENSOR(norm_fwd, x), .weight = TENSOR(norm_fwd, weight), .z = TENSOR(norm_fwd, z), .y = TENSOR(norm_fwd, y), .activation = INT(norm_fwd, activation),
		.eps = c->f[N_norm_fwd_eps], .inv = INT(norm_fwd, mean) ? 1.0 / c->size[SZ_K] : 1};
	return norm_run(&s, c->size);
}
static int op_norm_bwd(const gdnk_call *c) {
	norm_call s = {.x = TENSOR(norm_bwd, x), .weight = TENSOR(norm_bwd, weight), .z = TENSOR(norm_bwd, z), .dout = TENSOR(norm_bwd, dout), .dx = TENSOR(norm_bwd, dx),
		.dweight = TENSOR(norm_bwd, dweight), .dz = TENSOR(norm_bwd, dz), .activation = INT(norm_bwd, activation), .eps = c->f[N_norm_bwd_eps],
		.inv = INT(norm_bwd, mean) ? 1.0 / c->size[SZ_K] : 1};
	return norm_run(&s, c->size);
}
