// Small products in REAL (float or double) for operators that are not the composites: C (+-)= A B with B by rows. Included once for each
// REAL, behind token.h.

// A tile of m rows and nv vectors over k steps; m and nv are constants. A is broadcast, so that any pair of strides is free.
INL void FN(mm_tile)(int m, int nv, ptrdiff_t k, const REAL *A, ptrdiff_t sm, ptrdiff_t sk, const REAL *B, ptrdiff_t ldb, REAL *Y, ptrdiff_t ldy, int mode) {
	FN(vr) a[RB][NR];
	UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < nv; z++) a[i][z] = (FN(vr)){0};
	for (ptrdiff_t d = 0; d < k; d++) {
		FN(vr) b[NR];
		UNROLL for (int z = 0; z < nv; z++) b[z] = MLD(B + d * ldb + z * MVR);
		UNROLL for (int i = 0; i < m; i++) {
			const REAL x = A[i * sm + d * sk];
			UNROLL for (int z = 0; z < nv; z++) a[i][z] += x * b[z];
		}
	}
	UNROLL for (int i = 0; i < m; i++)
		UNROLL for (int z = 0; z < nv; z++) {
			REAL *y = Y + i * ldy + z * MVR;
			FN(vr) x = a[i][z];
			if (mode) x = MLD(y) + (mode > 0 ? x : -x);
			MST(y, x);
		}
}
INL void FN(mm_rows)(int nv, int m, ptrdiff_t k, const REAL *A, ptrdiff_t sm, ptrdiff_t sk, const REAL *B, ptrdiff_t ldb, REAL *Y, ptrdiff_t ldy, int mode) {
	int i = 0;
	for (; i + RB <= m; i += RB) FN(mm_tile)(RB, nv, k, A + i * sm, sm, sk, B, ldb, Y + i * ldy, ldy, mode);
	for (; i + 3 <= m; i += 3) FN(mm_tile)(3, nv, k, A + i * sm, sm, sk, B, ldb, Y + i * ldy, ldy, mode);
	for (; i < m; i++) FN(mm_tile)(1, nv, k, A + i * sm, sm, sk, B, ldb, Y + i * ldy, ldy, mode);
}
// Y [m][n] = A B (mode 0), += (1) or -= (-1): A [m][k] with strides sm and sk, B [k][n] by rows. n is a multiple of the vector's length.
NOINL void FN(mm)(int mode, int m, int n, ptrdiff_t k, const REAL *A, ptrdiff_t sm, ptrdiff_t sk, const REAL *B, ptrdiff_t ldb, REAL *Y, ptrdiff_t ldy) {
	int j = 0;
	for (; j + NR * MVR <= n; j += NR * MVR) FN(mm_rows)(NR, m, k, A, sm, sk, B + j, ldb, Y + j, ldy, mode);
	for (; j < n; j += MVR) FN(mm_rows)(1, m, k, A, sm, sk, B + j, ldb, Y + j, ldy, mode);
}
// rows x cols numbers of a view into d [rows][ld], the rest of each row zero
static void FN(block_in)(REAL *d, int ld, view v, int rows, int cols) {
	if (sizeof(REAL) == 4) rows_in((float *)d, ld, v, rows, rows, cols);
	else
		for (int i = 0; i < rows; i++) FN(row_in)(d + (ptrdiff_t)i * ld, at(v, i), cols, ld);
}
static void FN(block_out)(const REAL *s, int ld, view v, int rows, int cols) {
	if (sizeof(REAL) == 4) rows_out((const float *)s, ld, v, rows, cols, 0);
	else
		for (int i = 0; i < rows; i++) FN(row_out)(s + (ptrdiff_t)i * ld, at(v, i), cols);
}
// d [cols][ldd] = s [rows][lds] transposed
static void FN(turn)(const REAL *s, ptrdiff_t lds, REAL *d, ptrdiff_t ldd, int rows, int cols) {
	for (int r = 0; r < rows; r++)
		for (int c = 0; c < cols; c++) d[c * ldd + r] = s[r * lds + c];
}
