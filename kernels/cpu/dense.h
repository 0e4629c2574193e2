// Small dense matrices in REAL (float or double): rows of the caller's to scratch and back, and products. Included once for each REAL; FN
// names the functions. A matrix in scratch is [rows][ld], its columns padded with zeros to a multiple of VW.
typedef REAL FN(vec) __attribute__((vector_size(sizeof(vf))));
typedef REAL FN(vecu) __attribute__((vector_size(sizeof(vf)), aligned(sizeof(REAL)), may_alias));
#define VL ((int)(sizeof(vf) / sizeof(REAL))) // numbers in a vector
#define VLD(p) (*(const FN(vecu) *)(p))
#define VST(p, x) (*(FN(vecu) *)(p) = (x))
#define TYPE (sizeof(REAL) == 4 ? GDNK_F32 : GDNK_F64)

// Rows a multiple of 512 bytes apart would share a few sets of the first cache.
static int FN(stride)(int cols) {
	const int padded = pad_to(cols, VW);
	return padded * sizeof(REAL) % 512 ? padded : padded + VW;
}
static REAL *FN(take)(char **p, int64_t n) {
	REAL *x = (REAL *)*p;
	*p += (n * sizeof(REAL) + 63) / 64 * 64;
	return x;
}
static void FN(zero)(REAL *d, int ld, int rows) { memset(d, 0, sizeof *d * rows * ld); }

// n x cols numbers into d[rows][ld], the rest zero
NOINL void FN(load)(REAL *d, int ld, view v, int n, int rows, int cols) {
	if (sizeof(REAL) == 8) {
		FN(zero)(d, ld, rows);
		for (int i = 0; i < n; i++, v = at(v, 1), d += ld) {
			if (v.type == GDNK_F64 && v.col == 1) memcpy(d, v.p, sizeof *d * cols);
			else
				for (int c = 0; c < cols; c++) d[c] = ld1(v.p, v.type, c * v.col);
		}
	} else if (v.col == 1 || v.row != 1) rows_in((float *)d, ld, v, n, rows, cols);
	else {
		// The rows of the transposed matrix are the ones that lie together.
		float t[VW * PADDED_MOST] ALN;
		const int wide = pad_to(n, VW);
		FN(zero)(d, ld, rows);
		for (int c = 0; c < cols; c += VW) {
			const int some = cols - c < VW ? cols - c : VW;
			rows_in(t, wide, (view){v.p + c * v.col * size_of(v.type), v.type, v.col, 1}, some, VW, n);
			int r = 0;
			for (; r + VW <= n; r += VW) transpose_block(t + r, wide, (float *)d + (ptrdiff_t)r * ld + c, ld, VW, VW);
			for (; r < n; r++)
				for (int i = 0; i < some; i++) d[(ptrdiff_t)r * ld + c + i] = t[i * wide + r];
		}
	}
}
// n x cols numbers from s[n][ld]; stream: nobody reads them soon
NOINL void FN(store)(const REAL *s, int ld, view v, int n, int cols, int stream) {
	if (sizeof(REAL) == 4) rows_out((const float *)s, ld, v, n, cols, stream);
	else
		for (int i = 0; i < n; i++, v = at(v, 1), s += ld) {
			if (v.type == GDNK_F64 && v.col == 1) memcpy(v.p, s, sizeof *s * cols);
			else
				for (int c = 0; c < cols; c++) st1(v.p, v.type, c * v.col, s[c]);
		}
}
NOINL void FN(add)(REAL *d, const REAL *s, int ld, int rows) {
	for (ptrdiff_t i = 0; i < (ptrdiff_t)rows * ld; i += VL) VST(d + i, VLD(d + i) + VLD(s + i));
}
static int FN(finite)(const REAL *x, int ld, int rows) {
	FN(vec) bad = {0}; // a finite number less itself is 0
	for (ptrdiff_t i = 0; i < (ptrdiff_t)rows * ld; i += VL) bad += VLD(x + i) - VLD(x + i);
	REAL sum = 0;
	for (int i = 0; i < VL; i++) sum += bad[i];
	return sum == 0;
}

// ---------------------------------------------------------------- products
// A register tile of m rows by nv vectors: C = I + A B over k steps, a multiple of 4, with requests to memory every 4 as long as there are any.
INL void FN(tile)(int m, int nv, int k, const REAL *A, ptrdiff_t sm, ptrdiff_t sk, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc, const REAL *I, ptrdiff_t ldi,
	prefetch *q) {
	FN(vec) a[8][3];
	UNROLL for (int i = 0; i < m; i++)
		UNROLL for (int z = 0; z < nv; z++) a[i][z] = I ? (FN(vec))VLD(I + i * ldi + z * VL) : (FN(vec)){0};
	for (int d = 0; d < k; d += 4) {
		pf(q, 2);
		UNROLL for (int u = 0; u < 4; u++) {
			FN(vec) b[3];
			UNROLL for (int z = 0; z < nv; z++) b[z] = VLD(B + (d + u) * ldb + z * VL);
			UNROLL for (int i = 0; i < m; i++) {
				const FN(vec) x = A[i * sm + (d + u) * sk] - (FN(vec)){0};
				UNROLL for (int z = 0; z < nv; z++) a[i][z] += x * b[z];
			}
		}
	}
	UNROLL for (int i = 0; i < m; i++)
		UNROLL for (int z = 0; z < nv; z++) VST(C + i * ldc + z * VL, a[i][z]);
}
// C [m][n] = I + A B, n a multiple of VW; I may be NULL or C. Each panel of B's columns stays in the first cache while A's rows pass. Whatever the tiles, each
// number is one sum in the order of k. upper: only what lies on and above the diagonal is wanted.
INL void FN(panels)(int m, int n, int k, const REAL *A, ptrdiff_t sm, ptrdiff_t sk, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc, const REAL *I,
	ptrdiff_t ldi, int upper, prefetch *q) {
	enum { WIDE = RB == 8 ? 8 : 4 }; // rows of a tile three vectors wide
#define TILE(rows, nv)                                                                                                                   \
	{                                                                                                                                    \
		FN(tile)(rows, nv, k, A + r * sm, sm, sk, B + c, ldb, C + r * ldc + c, ldc, I ? I + r * ldi + c : NULL, ldi, q);                  \
		r += rows;                                                                                                                       \
	}
#define PANEL(nv, high)                                                                                                                  \
	{                                                                                                                                    \
		const int end = upper && c + nv * VL < m ? c + nv * VL : m;                                                                       \
		int r = 0;                                                                                                                       \
		while (r + high <= end) TILE(high, nv)                                                                                           \
		if (high > 4 && r + 4 <= end) TILE(4, nv)                                                                                        \
		if (r + 2 <= end) TILE(2, nv)                                                                                                    \
		if (r < end) TILE(1, nv)                                                                                                         \
		c += nv * VL;                                                                                                                    \
	}
	for (int c = 0; c < n;) {
		const int left = (n - c) / VL;
		if (left == 1) PANEL(1, RB)
		else if (left == 2 || left == 4) PANEL(2, RB)
		else PANEL(3, WIDE)
	}
#undef PANEL
#undef TILE
}
// C = I + A B with A's rows as they lie; q: what to ask memory for meanwhile
NOINL void FN(product_on)(int m, int n, int k, const REAL *A, ptrdiff_t lda, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc, const REAL *I, ptrdiff_t ldi,
	prefetch *q) {
	FN(panels)(m, n, k, A, lda, 1, B, ldb, C, ldc, I, ldi, 0, q);
}
static void FN(product)(int m, int n, int k, const REAL *A, ptrdiff_t lda, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc) {
	prefetch none = {0};
	FN(product_on)(m, n, k, A, lda, B, ldb, C, ldc, NULL, 0, &none);
}
// C (+)= A^T B
NOINL void FN(product_t)(int m, int n, int k, const REAL *A, ptrdiff_t lda, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc, int add, int upper, prefetch *q) {
	prefetch none = {0};
	FN(panels)(m, n, k, A, 1, lda, B, ldb, C, ldc, add ? C : NULL, ldc, upper, q ? q : &none);
}
// C += A B where a zero of A counts for nothing, even against what is not finite
NOINL void FN(product_sparse)(int m, int n, int k, const REAL *A, ptrdiff_t lda, const REAL *B, ptrdiff_t ldb, REAL *C, ptrdiff_t ldc) {
	for (int i = 0; i < m; i++)
		for (int d = 0; d < k; d++) {
			const REAL x = A[i * lda + d];
			for (int j = 0; j < n && x != 0; j += VL) VST(C + i * ldc + j, VLD(C + i * ldc + j) + x * VLD(B + d * ldb + j));
		}
}

// y[i] += row i of W . x, cols numbers each; x is padded
NOINL void FN(rows_dot)(REAL *y, const REAL *W, ptrdiff_t ld, const REAL *x, int rows, int cols) {
	const int whole = cols / VL * VL;
	for (int i = 0; i < rows; i += 4) {
		const int m = rows - i < 4 ? rows - i : 4;
		const REAL *w[4];
		FN(vec) a[4] = {{0}};
		for (int j = 0; j < 4; j++) w[j] = W + (i + (j < m ? j : 0)) * ld;
		for (int c = 0; c < whole; c += VL)
			UNROLL for (int j = 0; j < 4; j++) a[j] += VLD(w[j] + c) * VLD(x + c);
		for (int j = 0; j < m; j++) {
			REAL s = y[i + j];
			for (int l = 0; l < VL; l++) s += a[j][l];
			for (int c = whole; c < cols; c++) s += w[j][c] * x[c];
			y[i + j] = s;
		}
	}
}
// y += sum of x[i] times row i of W
NOINL void FN(rows_sum)(REAL *y, const REAL *W, ptrdiff_t ld, const REAL *x, int rows, int cols) {
	const int whole = cols / VL * VL;
	int i = 0;
	for (; i + 4 <= rows; i += 4) {
		const REAL *w = W + i * ld;
		for (int c = 0; c < whole; c += VL)
			VST(y + c, VLD(y + c) + ((x[i] * VLD(w + c) + x[i + 1] * VLD(w + ld + c)) + (x[i + 2] * VLD(w + 2 * ld + c) + x[i + 3] * VLD(w + 3 * ld + c))));
		for (int c = whole; c < cols; c++) y[c] += (x[i] * w[c] + x[i + 1] * w[ld + c]) + (x[i + 2] * w[2 * ld + c] + x[i + 3] * w[3 * ld + c]);
	}
	for (; i < rows; i++)
		for (int c = 0; c < cols; c++) y[c] += x[i] * W[i * ld + c];
}
