// Vectors, and what the kernels need of them, for the instruction set of the including file. It defines VW, the floats in a vector
// (16, 8 or 4), and RB, the rows of a register tile; the tile is RB rows by NR vectors, its accumulators fill the FMA pipes' latency.
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INL static inline __attribute__((always_inline))
#define NOINL static __attribute__((noinline))
#define ALN __attribute__((aligned(64)))
#define UNROLL _Pragma("GCC unroll 16")
// Without it gcc loads whole triangles of coefficients ahead of use and spills them.
#define BARRIER __asm__ volatile("" ::: "memory")

enum { NR = 2, PW = NR * VW }; // PW: columns of a panel, the layout of every state and operand that is read by columns

typedef float vf __attribute__((vector_size(4 * VW)));
typedef float vfu __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vhu __attribute__((vector_size(2 * VW), aligned(2), may_alias));
#define LD(p) (*(const vfu *)(p))
#define ST(p, x) (*(vfu *)(p) = (x))
#define SH __builtin_shufflevector

INL vf bc(float x) { return x - (vf){}; }
INL vf sel(vi m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }

// The whole-line store past the caches; p is aligned to the vector.
INL void st_stream(void *p, vf x) {
#if VW == 16
	_mm512_stream_ps(p, (__m512)x);
#elif VW == 8
	_mm256_stream_ps(p, (__m256)x);
#elif defined(__x86_64__)
	_mm_stream_ps(p, (__m128)x);
#else
	ST(p, x);
#endif
}
INL void stream_fence(void) {
#if defined(__x86_64__)
	_mm_sfence();
#endif
}

// Strong decays make denormals by design, and they cost a hundred cycles each: flush them while a kernel runs.
INL uint64_t flush_denormals(void) {
#if defined(__x86_64__)
	unsigned old = _mm_getcsr();
	_mm_setcsr(old | 0x8040);
	return old;
#elif defined(__aarch64__)
	uint64_t old;
	__asm__ volatile("mrs %0, fpcr" : "=r"(old));
	__asm__ volatile("msr fpcr, %0" ::"r"(old | (1u << 24)));
	return old;
#endif
}
INL void restore_denormals(uint64_t old) {
#if defined(__x86_64__)
	_mm_setcsr((unsigned)old);
#elif defined(__aarch64__)
	__asm__ volatile("msr fpcr, %0" ::"r"(old));
#endif
}

// exp(x) for x <= 0; -inf gives 0, NaN stays. Cody and Waite's reduction and the Cephes polynomial: 1 ulp.
INL vf vexp(vf x) {
	// Of 512 bits one instruction multiplies by 2^n, whatever n, and the maximum keeps NaN: 14 instructions instead of 20.
#if VW == 16
	vf xc = (vf)_mm512_max_ps((__m512)bc(-104.f), (__m512)x);
#else
	vf xc = sel(x < -104.f, bc(-104.f), x);
#endif
	vf n = xc * 1.44269504f + 12582912.f; // the sum rounds to an integer that stands in the low mantissa bits
#if VW < 16
	vi ni = (vi)n;
#endif
	n -= 12582912.f;
	vf r = xc - n * 0.693359375f;
	r = r + n * 2.12194440e-4f;
	vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
	p = p * r + 8.3334519073e-3f;
	p = p * r + 4.1665795894e-2f;
	p = p * r + 1.6666665459e-1f;
	p = p * r + 5.0000001201e-1f;
	p = p * r * r + r + 1.f;
#if VW == 16
	return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
	vf y = sel(x < -87.f, bc(0), (vf)((ni << 23) + (vi)p));
	return sel(x == x, y, x);
#endif
}

INL vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
// log(1 + y) for y in [0, 1]: Cephes' logarithm of the rounded sum, and what the rounding lost.
INL vf vlog1p(vf y) {
	const vf u = 1.f + y, lost = (y - (u - 1.f)) / u;
	const vi upper = u > 1.41421356f;
	const vf x = sel(upper, u * 0.5f, u) - 1.f, e = sel(upper, bc(1), bc(0)), z = x * x;
	vf p = x * 7.0376836292e-2f - 1.1514610310e-1f;
	p = p * x + 1.1676998740e-1f;
	p = p * x - 1.2420140846e-1f;
	p = p * x + 1.4249322787e-1f;
	p = p * x - 1.6668057665e-1f;
	p = p * x + 2.0000714765e-1f;
	p = p * x - 2.4999993993e-1f;
	p = p * x + 3.3333331174e-1f;
	p = p * x * z - e * 2.12194440e-4f - 0.5f * z + lost;
	return x + p + e * 0.693359375f;
}
INL vf vsoftplus(vf x) { return sel(x > 0.f, x, bc(0)) + vlog1p(vexp(-vabs(x))); }
INL vf vsigmoid(vf x) {
	const vf e = vexp(-vabs(x));
	return sel(x < 0.f, e, bc(1)) / (1.f + e);
}

// VW vectors -> the vector of their sums
#if VW == 16
INL vf red4(vf a, vf b, vf c, vf d) {
	vf t = SH(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) + SH(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
	vf u = SH(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) + SH(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
	return SH(t, u, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + SH(t, u, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INL vf redall(const vf *a) {
	vf u0 = red4(a[0], a[1], a[2], a[3]), u1 = red4(a[4], a[5], a[6], a[7]), u2 = red4(a[8], a[9], a[10], a[11]), u3 = red4(a[12], a[13], a[14], a[15]);
	vf p = SH(u0, u1, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + SH(u0, u1, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
	vf q = SH(u2, u3, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + SH(u2, u3, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
	return SH(p, q, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + SH(p, q, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif VW == 8
INL vf red4(vf a, vf b, vf c, vf d) {
	vf t = SH(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SH(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
	vf u = SH(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SH(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
	return SH(t, u, 0, 1, 8, 9, 4, 5, 12, 13) + SH(t, u, 2, 3, 10, 11, 6, 7, 14, 15);
}
INL vf redall(const vf *a) {
	vf u0 = red4(a[0], a[1], a[2], a[3]), u1 = red4(a[4], a[5], a[6], a[7]);
	return SH(u0, u1, 0, 1, 2, 3, 8, 9, 10, 11) + SH(u0, u1, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
INL vf redall(const vf *a) {
	vf t = SH(a[0], a[1], 0, 4, 1, 5) + SH(a[0], a[1], 2, 6, 3, 7), u = SH(a[2], a[3], 0, 4, 1, 5) + SH(a[2], a[3], 2, 6, 3, 7);
	return SH(t, u, 0, 1, 4, 5) + SH(t, u, 2, 3, 6, 7);
}
#endif

// A VW x VW transpose in registers: interleave the rows log2(VW) times, pairing row i with row i + VW/2.
INL void transpose(vf *r) {
	vf t[VW];
#if VW == 16
#define LO(a, b) SH(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HI(a, b) SH(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif VW == 8
#define LO(a, b) SH(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HI(a, b) SH(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LO(a, b) SH(a, b, 0, 4, 1, 5)
#define HI(a, b) SH(a, b, 2, 6, 3, 7)
#endif
#define STEP(d, s)                                                                    \
	UNROLL for (int i = 0; i < VW / 2; i++) {                                         \
		d[2 * i] = LO(s[i], s[i + VW / 2]);                                           \
		d[2 * i + 1] = HI(s[i], s[i + VW / 2]);                                       \
	}
	STEP(t, r)
	STEP(r, t)
#if VW >= 8
	STEP(t, r)
#if VW == 8
	UNROLL for (int i = 0; i < VW; i++) r[i] = t[i];
#else
	STEP(r, t)
#endif
#endif
#undef STEP
#undef LO
#undef HI
}
// d[c][r] = s[r][c] for rows x cols, both multiples of VW
INL void transpose_block(const float *s, ptrdiff_t lds, float *d, ptrdiff_t ldd, int rows, int cols) {
	for (int r = 0; r < rows; r += VW)
		for (int c = 0; c < cols; c += VW) {
			vf x[VW];
			UNROLL for (int i = 0; i < VW; i++) x[i] = LD(s + (r + i) * lds + c);
			transpose(x);
			UNROLL for (int i = 0; i < VW; i++) ST(d + (c + i) * ldd + r, x[i]);
		}
}

// a[i][z] += A[i] B over k steps. A is broadcast, so that any pair of strides is free; B's rows are PW wide. The loops are unrolled four
// times and no more: larger bodies fall out of the cache of decoded instructions.
INL void tile_step(int m, vf (*a)[NR], const float *A, ptrdiff_t sm, const float *B) {
	vf b[NR];
	UNROLL for (int z = 0; z < NR; z++) b[z] = LD(B + z * VW);
	UNROLL for (int i = 0; i < m; i++) {
		vf x = bc(A[i * sm]);
		UNROLL for (int z = 0; z < NR; z++) a[i][z] += x * b[z];
	}
}
INL void tile(int m, vf (*a)[NR], int k, const float *A, ptrdiff_t sm, ptrdiff_t sk, const float *B, ptrdiff_t ldb) { // k: a multiple of 4
	for (int d = 0; d < k; d += 4)
		UNROLL for (int u = 0; u < 4; u++) tile_step(m, a, A + (d + u) * sk, sm, B + (d + u) * ldb);
}
// Sixteen rows as register tiles: F(first row, rows)
#if RB == 8
#define ROWS16(F) for (int r_ = 0; r_ < 16; r_ += 8) F(r_, 8)
#else
#define ROWS16(F) F(0, 6) F(6, 5) F(11, 5)
#endif

// Conversions of one vector. bf16 rounds to nearest even and keeps NaN a NaN.
INL vf ld_bf16(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vhu *)p, vu) << 16); }
INL void st_bf16(uint16_t *p, vf f) {
	vu x = (vu)f, r = x + 0x7fffu + ((x >> 16) & 1);
	vu nan = (vu)(f != f);
	*(vhu *)p = __builtin_convertvector((((r & ~nan) | ((x | 0x400000u) & nan)) >> 16), vhu);
}
#if VW >= 8 && defined(__F16C__)
#if VW == 16
INL vf ld_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INL void st_f16(uint16_t *p, vf f) { _mm256_storeu_si256((void *)p, _mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT)); }
#else
INL vf ld_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INL void st_f16(uint16_t *p, vf f) { _mm_storeu_si128((void *)p, _mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT)); }
#endif
#else
// By integers, since denormals are being flushed. An f16 denormal is mantissa * 2^-24.
INL vf ld_f16(const uint16_t *p) {
	vu h = __builtin_convertvector(*(const vhu *)p, vu), e = h & 0x7c00u, m = h & 0x3ffu;
	vf small = __builtin_convertvector((vi)m, vf) * 5.9604644775390625e-8f;
	vu big = ((h & 0x7fffu) << 13) + 0x38000000u, inf = big + 0x38000000u;
	vu r = ((vu)(e == 0u) & (vu)small) | ((vu)(e == 0x7c00u) & inf) | ((vu)((e != 0u) & (e != 0x7c00u)) & big);
	return (vf)(r | (h & 0x8000u) << 16);
}
INL void st_f16(uint16_t *p, vf f) {
	vu x = (vu)f, s = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
	vu normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
	vu small = (vu)((vf)a + 0.5f) - 0x3f000000u; // the sum's last bit is 2^-24: it rounds to the f16 denormal grid
	vu isnan = (vu)((vi)a > 0x7f800000), big = (vu)((vi)a >= 0x477ff000), low = (vu)((vi)a < 0x38800000);
	vu r = (isnan & (0x7e00u | ((a >> 13) & 0x3ffu))) | (~isnan & ((big & 0x7c00u) | (~big & ((low & small) | (~low & normal)))));
	*(vhu *)p = __builtin_convertvector(r | s, vhu);
}
#endif
