// What the machine can do on one thread, for the benchmark to compare with. Compiled for this machine when the benchmark starts.
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif

typedef float vf __attribute__((vector_size(BYTES)));

enum {
	LANES = BYTES / 4,
	// Independent, at least latency times units (12 on Zen, 16 on Neoverse V), and all in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
	CHAINS = 24,
#else
	CHAINS = 12,
#endif
	STEPS = 1 << 14,
};

// CPU time of this thread: what others on the core take does not count.
static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

// GFLOP/s of fused multiply-adds over at least the given time.
double peak_gflops(double seconds) {
	vf x[CHAINS], a, b;
	for (int i = 0; i < LANES; i++)
		a[i] = 0.999f, b[i] = 0.001f;
	for (int i = 0; i < CHAINS; i++)
		x[i] = b * (float)i;
	int64_t rounds = 0;
	double begin = now(), end;
	do {
		for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 24
			for (int i = 0; i < CHAINS; i++)
				x[i] = x[i] * a + b;
		}
		rounds++;
	} while ((end = now()) - begin < seconds);
	static volatile float sink;
	for (int i = 0; i < CHAINS; i++)
		sink += x[i][0];
	return 2.0 * CHAINS * LANES * STEPS * rounds / (end - begin) * 1e-9;
}

// Seconds of one copy.
double copy_seconds(void *to, const void *from, int64_t bytes) {
	double begin = now();
	memcpy(to, from, bytes);
	return now() - begin;
}
