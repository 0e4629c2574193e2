// The thread pool: parallel_for over an atomic counter. Workers start at the first parallel call, spin for about a millisecond after
// each and then sleep; a caller that finds the pool busy does its work alone. Each thread keeps a grow-only scratch block.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>

#include "cpu.h"

enum { MAX_THREADS = 256, WANTED = 1024 };

typedef struct {
	char *p;
	int64_t bytes;
} block;

static struct {
	void (*fn)(void *, int64_t, char *);
	void *ctx;
	int64_t n;
	_Atomic int64_t next;
	block scratch[MAX_THREADS]; // of the workers
	_Atomic uint64_t round;     // workers wait for it to change: a counter, below it how many of them are wanted (one that lags must not read the next round's number)
	uint64_t born[MAX_THREADS]; // the round in which a worker was made
	_Atomic int working, sleeping;
	int started; // workers
	pthread_mutex_t busy, lock;
	pthread_cond_t wake;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static _Atomic int threads;      // asked for, 0: not yet known
static __thread block own;       // a caller's scratch
static pthread_key_t own_key;    // frees it when the caller's thread ends
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static int grow(block *b, int64_t bytes) {
	if (b->bytes >= bytes) return 0;
	// Scratch is walked again and again in strides: large pages save a page walk at each step.
	const size_t page = bytes >= 64 << 10 ? 2 << 20 : 4096, size = ((size_t)bytes + page - 1) & ~(page - 1);
	char *p;
	if (posix_memalign((void **)&p, page, size)) return 1;
	if (page > 4096) madvise(p, size, MADV_HUGEPAGE);
	free(b->p);
	b->p = p;
	b->bytes = (int64_t)size;
	return 0;
}
void gdnk_large_pages(uintptr_t p, int64_t bytes) {
	const uintptr_t page = 2 << 20, first = (p + page - 1) & ~(page - 1), last = (p + bytes) & ~(page - 1);
	if (bytes >= 2 * (int64_t)page && first < last) madvise((void *)first, last - first, MADV_HUGEPAGE);
}
static void drop_own(void *b) { free(((block *)b)->p); }
static void make_key(void) { pthread_key_create(&own_key, drop_own); }

// The cgroup's CPU quota in whole CPUs, or a large number
static int quota(void) {
	FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
	long long q, period;
	int n = MAX_THREADS;
	if (f) {
		if (fscanf(f, "%lld %lld", &q, &period) == 2 && q > 0 && period > 0) n = (int)((q + period - 1) / period);
		fclose(f);
	}
	return n < 1 ? 1 : n;
}
static int from_env(const char *name) {
	const char *v = getenv(name);
	const int n = v ? atoi(v) : 0; // OMP_NUM_THREADS may be a list: its first number counts
	return n > MAX_THREADS ? MAX_THREADS : n;
}
int gdnk_get_num_threads(void) {
	int n = threads;
	if (n) return n;
	n = from_env("GDN_NUM_THREADS");
	if (n < 1) n = from_env("OMP_NUM_THREADS");
	if (n < 1) {
		cpu_set_t set;
		n = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
		const int q = quota();
		if (n > q) n = q;
	}
	if (n > MAX_THREADS) n = MAX_THREADS;
	int unset = 0;
	atomic_compare_exchange_strong(&threads, &unset, n < 1 ? 1 : n);
	return threads;
}
void gdnk_set_num_threads(int n) { threads = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n; }

static inline void relax(void) {
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}
static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}
static void drain(char *scratch) {
	for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < pool.n;) pool.fn(pool.ctx, i, scratch);
}
static void *worker(void *arg) {
	const int me = (int)(intptr_t)arg;
	uint64_t seen = pool.born[me];
	for (;;) {
		const double t = now();
		int spins = 0;
		while (pool.round == seen) {
			relax();
			if (++spins % 64 || now() - t < 1e-3) continue;
			pthread_mutex_lock(&pool.lock);
			pool.sleeping++;
			while (pool.round == seen) pthread_cond_wait(&pool.wake, &pool.lock);
			pool.sleeping--;
			pthread_mutex_unlock(&pool.lock);
		}
		seen = pool.round;
		if (me < (int)(seen % WANTED)) {
			drain(pool.scratch[me].p);
			atomic_fetch_sub(&pool.working, 1);
		}
	}
	return NULL;
}
// Workers for `want` threads beside the caller, with scratch; fewer if the system refuses threads.
static int ready(int want, int64_t bytes) {
	for (int i = 0; i < want; i++)
		if (grow(&pool.scratch[i], bytes)) return -1;
	while (pool.started < want) {
		pthread_t t;
		pthread_attr_t a;
		pool.born[pool.started] = pool.round;
		pthread_attr_init(&a);
		pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
		const int failed = pthread_create(&t, &a, worker, (void *)(intptr_t)pool.started);
		pthread_attr_destroy(&a);
		if (failed) return pool.started;
		pool.started++;
	}
	return want;
}
int gdnk_parallel(int64_t n, int64_t bytes, void (*fn)(void *, int64_t, char *), void *ctx) {
	if (n <= 0) return 0;
	if (!own.p) {
		pthread_once(&own_once, make_key);
		pthread_setspecific(own_key, &own);
	}
	if (grow(&own, bytes)) return 1;
	int want = gdnk_get_num_threads() - 1;
	if (want > n - 1) want = (int)(n - 1);
	if (want <= 0 || pthread_mutex_trylock(&pool.busy)) {
		for (int64_t i = 0; i < n; i++) fn(ctx, i, own.p);
		return 0;
	}
	const int have = ready(want, bytes);
	if (have < 0) {
		pthread_mutex_unlock(&pool.busy);
		return 1;
	}
	pool.fn = fn;
	pool.ctx = ctx;
	pool.n = n;
	pool.next = 0;
	pool.working = have;
	pthread_mutex_lock(&pool.lock); // a worker about to sleep has seen the old round or gets the signal
	pool.round = (pool.round / WANTED + 1) * WANTED + have;
	if (pool.sleeping) pthread_cond_broadcast(&pool.wake);
	pthread_mutex_unlock(&pool.lock);
	drain(own.p);
	for (int spins = 0; pool.working;) {
		if (++spins < 1 << 14) relax();
		else sched_yield();
	}
	pthread_mutex_unlock(&pool.busy);
	return 0;
}
