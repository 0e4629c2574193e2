// Rows of the caller's tensors to fp32 scratch and back, and the parts of the operators that act on rows alone: gates, beta, l2norm.

// Where one head (or one sequence's state) lies: strides count elements.
typedef struct {
	char *p;
	int type;
	ptrdiff_t row, col;
} view;

INL int size_of(int type) { return type == GDNK_F64 || type == GDNK_I64 ? 8 : type == GDNK_F32 || type == GDNK_I32 ? 4 : 2; }

// [B T heads D] at batch b, token t, head h; rows are tokens. Rank 3, one number a token and head, gives col 0.
INL view token_view(const gdnk_tensor *t, int64_t b, int64_t tok, int64_t h) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (b * s[0] + tok * s[1] + h * s[2]) * size_of(t->dtype), t->dtype, s[1], t->rank == 4 ? s[3] : 0};
}
// [N HV K V], or [N HV V K] with v_first: rows are key channels
INL view state_view(const gdnk_tensor *t, int64_t n, int64_t h, int v_first) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (n * s[0] + h * s[1]) * size_of(t->dtype), t->dtype, s[v_first ? 3 : 2], s[v_first ? 2 : 3]};
}
INL view at(view v, int64_t row) { return v.p += row * v.row * size_of(v.type), v; }

static double ld1(const char *p, int type, ptrdiff_t i) {
	float f;
	uint32_t u;
	switch (type) {
	case GDNK_F32: return ((const float *)p)[i];
	case GDNK_F64: return ((const double *)p)[i];
	case GDNK_BF16:
		u = (uint32_t)((const uint16_t *)p)[i] << 16;
		memcpy(&f, &u, 4);
		return f;
	default: {
		uint16_t h[VW] = {((const uint16_t *)p)[i]};
		return ld_f16(h)[0];
	}
	}
}
static void st1(char *p, int type, ptrdiff_t i, double x) {
	uint16_t h[VW];
	switch (type) {
	case GDNK_F32: ((float *)p)[i] = x; break;
	case GDNK_F64: ((double *)p)[i] = x; break;
	case GDNK_BF16:
		st_bf16(h, bc(x));
		((uint16_t *)p)[i] = h[0];
		break;
	default:
		st_f16(h, bc(x));
		((uint16_t *)p)[i] = h[0];
	}
}

INL vf ld_as(int type, const char *p) { return type == GDNK_F32 ? (vf)LD(p) : type == GDNK_BF16 ? ld_bf16((const uint16_t *)p) : ld_f16((const uint16_t *)p); }
INL void st_as(int type, char *p, vf x) {
	if (type == GDNK_F32) ST(p, x);
	else if (type == GDNK_BF16) st_bf16((uint16_t *)p, x);
	else st_f16((uint16_t *)p, x);
}
INL void rows_in_as(int type, float *d, int ld, view v, int n, int cols) {
	const int sz = size_of(type);
	for (int i = 0; i < n; i++, d += ld) {
		const char *p = v.p + i * v.row * sz;
		int c = 0;
		if (v.col == 1 && type != GDNK_F64)
			for (; c + VW <= cols; c += VW) ST(d + c, ld_as(type, p + c * sz));
		for (; c < cols; c++) d[c] = ld1(p, type, c * v.col);
		for (; c < ld; c++) d[c] = 0;
	}
}
// n rows of cols numbers into d[rows][ld], the rest zero
NOINL void rows_in(float *d, int ld, view v, int n, int rows, int cols) {
	switch (v.type) {
	case GDNK_F32: rows_in_as(GDNK_F32, d, ld, v, n, cols); break;
	case GDNK_BF16: rows_in_as(GDNK_BF16, d, ld, v, n, cols); break;
	case GDNK_F16: rows_in_as(GDNK_F16, d, ld, v, n, cols); break;
	default: rows_in_as(GDNK_F64, d, ld, v, n, cols);
	}
	if (n < rows) memset(d + (ptrdiff_t)n * ld, 0, sizeof *d * (rows - n) * ld);
}
INL void rows_out_as(int type, const float *s, int ld, view v, int n, int cols, int stream) {
	const int sz = size_of(type);
	for (int i = 0; i < n; i++, s += ld) {
		char *p = v.p + i * v.row * sz;
		int c = 0;
		if (v.col == 1 && type != GDNK_F64) {
			if (stream && type == GDNK_F32 && !((uintptr_t)p & (4 * VW - 1)))
				for (; c + VW <= cols; c += VW) st_stream(p + c * sz, LD(s + c));
			if (stream && type == GDNK_BF16 && !((uintptr_t)p & (4 * VW - 1)))
				for (; c + 2 * VW <= cols; c += 2 * VW) {
					uint16_t h[2 * VW] ALN;
					st_bf16(h, LD(s + c));
					st_bf16(h + VW, LD(s + c + VW));
					st_stream(p + c * sz, LD(h));
				}
			for (; c + VW <= cols; c += VW) st_as(type, p + c * sz, LD(s + c));
		}
		for (; c < cols; c++) st1(p, type, c * v.col, s[c]);
	}
}
// n rows of cols numbers from s[n][ld]; stream: nobody reads them soon
NOINL void rows_out(const float *s, int ld, view v, int n, int cols, int stream) {
	switch (v.type) {
	case GDNK_F32: rows_out_as(GDNK_F32, s, ld, v, n, cols, stream); break;
	case GDNK_BF16: rows_out_as(GDNK_BF16, s, ld, v, n, cols, stream); break;
	case GDNK_F16: rows_out_as(GDNK_F16, s, ld, v, n, cols, stream); break;
	default: rows_out_as(GDNK_F64, s, ld, v, n, cols, stream);
	}
}
// The same for whole blocks that lie transposed, column after column in float32; 0 where they do not.
static int columns_in(float *d, int ld, view v, int n, int cols) {
	if (v.type != GDNK_F32 || v.row != 1 || v.col == 1 || n % VW || cols % VW || ld != cols) return 0;
	transpose_block((const float *)v.p, v.col, d, ld, cols, n);
	return 1;
}
static int columns_out(const float *s, int ld, view v, int n, int cols) {
	if (v.type != GDNK_F32 || v.row != 1 || v.col == 1 || n % VW || cols % VW) return 0;
	transpose_block(s, ld, (float *)v.p, v.col, n, cols);
	return 1;
}
// One number a token
INL void column_in(float *d, view v, int n) {
	for (int i = 0; i < n; i++) d[i] = ld1(v.p, v.type, i * v.row);
}
INL void column_out(const float *s, view v, int n) {
	for (int i = 0; i < n; i++) st1(v.p, v.type, i * v.row, s[i]);
}
// Tokens [from, to) of batch 0 become zero
static void zero_tokens(const gdnk_tensor *t, int64_t from, int64_t to) {
	if (!t->dtype) return;
	for (int64_t i = from; i < to; i++)
		for (int64_t h = 0; h < t->shape[2]; h++) {
			view v = token_view(t, 0, i, h);
			for (int64_t d = 0; d < (t->rank == 4 ? t->shape[3] : 1); d++) st1(v.p, v.type, d * v.col, 0);
		}
}

// ---------------------------------------------------------------- l2norm, gate, beta
// Rows of x [rows][ld] are divided by sqrt(sum of squares + 1e-6); r keeps the factors.
NOINL void l2norm(float *x, int ld, int rows, float *r) {
	for (int i = 0; i < rows; i += 4) {
		vf s[VW];
		UNROLL for (int j = 0; j < VW; j++) s[j] = bc(0);
		for (int d = 0; d < ld; d += VW)
			UNROLL for (int j = 0; j < 4; j++) { vf y = LD(x + (i + j) * ld + d); s[j] += y * y; }
		vf y = redall(s);
		for (int j = 0; j < 4; j++) {
			float f = r[i + j] = 1 / sqrtf(y[j] + 1e-6f);
			for (int d = 0; d < ld; d += VW) ST(x + (i + j) * ld + d, LD(x + (i + j) * ld + d) * f);
		}
	}
}
// dy becomes the gradient of the rows before they were normalised to y: dx = r (dy - (dy.y) y)
NOINL void l2norm_bwd(float *dy, const float *y, int ld, int rows, const float *r) {
	for (int i = 0; i < rows; i += 4) {
		vf s[VW];
		UNROLL for (int j = 0; j < VW; j++) s[j] = bc(0);
		for (int d = 0; d < ld; d += VW)
			UNROLL for (int j = 0; j < 4; j++) s[j] += LD(dy + (i + j) * ld + d) * LD(y + (i + j) * ld + d);
		vf t = redall(s);
		for (int j = 0; j < 4; j++) {
			float f = r[i + j], u = t[j] * f;
			for (int d = 0; d < ld; d += VW) ST(dy + (i + j) * ld + d, LD(dy + (i + j) * ld + d) * f - LD(y + (i + j) * ld + d) * u);
		}
	}
}
// The gates in kernel, x the raw gate with its bias: g = -amp softplus(x), or lower sigmoid(amp x) where lower is not 0. No infinite x, amp
// or g makes a NaN: a softplus that underflows gives no decay whatever the amplitude, and where a factor of a gradient is 0 so is the gradient.
// One number in double, a vector in float.
INL vf exp_f32(vf x) { return vexp(x); }
static double exp_f64(double x) { return exp(x); }
#define FEW(x, most) ((x) > (most) ? (most) : (x) < -(most) ? -(most) : (x))
static double gate_f64(double x, double amp, double lower) {
	x = FEW(x, DBL_MAX), amp = FEW(amp, DBL_MAX);
	if (lower != 0) return lower / (1 + exp(-amp * x));
	return -amp * (x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)));
}
// Gradients of x and of log amp
static void gate_bwd_f64(double x, double amp, double lower, double dg, double *dx, double *dA) {
	const double g = gate_f64(x, amp, lower);
	x = FEW(x, DBL_MAX), amp = FEW(amp, DBL_MAX);
	const double y = 1 / (1 + exp(-(lower != 0 ? amp * x : x))), z = lower != 0 ? 1 / (1 + exp(amp * x)) * y * lower : -y;
	*dx = dg == 0 || z == 0 ? 0 : z * dg * amp;
	*dA = dg == 0 || z == 0 ? 0 : lower != 0 ? *dx * x : dg * g;
}
#undef FEW
INL vf few(vf x) { return sel(x > FLT_MAX, bc(FLT_MAX), sel(x < -FLT_MAX, bc(-FLT_MAX), x)); }
INL vf vgate(vf x, vf amp, float lower) {
	amp = few(amp);
	return lower != 0 ? lower * vsigmoid(few(x) * amp) : -amp * few(vsoftplus(x));
}
INL void vgate_bwd(vf x, vf amp, float lower, vf dg, vf *dx, vf *dA) {
	amp = few(amp);
	x = few(x);
	vf z;
	if (lower != 0) {
		const vf e = vexp(-vabs(x * amp)), u = 1.f / (1.f + e);
		z = lower * e * u * u;
	} else z = -vsigmoid(x);
	const vi none = (dg == 0.f) | (z == 0.f);
	*dx = sel(none, bc(0), z * dg * amp);
	*dA = sel(none, bc(0), lower != 0 ? *dx * x : dg * vgate(x, amp, lower));
}
INL vf gate_f32(vf x, float amp, float lower) { return vgate(x, bc(amp), lower); }
INL void gate_bwd_f32(vf x, float amp, float lower, vf dg, vf *dx, vf *dA) { vgate_bwd(x, bc(amp), lower, dg, dx, dA); }
static float sigmoid(float x) { return 1 / (1 + expf(-x)); }
