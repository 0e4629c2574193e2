// Handles, errors, scripted failures and the functions by which tests steer the fake: the gdnfake_* exports.
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 4096, GRAVES = 4096, TEXT = 1024, SCRIPTS = 64, KEPT = 64 };
static const uint64_t ALIVE = 0x616c697665676e64, DEAD = 0xdeaddeaddeaddead;

static const char *const kinds[KINDS] = {"device memory", "host memory", "context",     "stream",   "event", "tensor",
                                         "scalar",        "int array",   "tensor list", "executor", "comm",  "program"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- handles: a table of those alive, a ring of those that died last ----

typedef struct Entry {
	struct Entry *next;
	Handle *handle;
} Entry;

static Entry *table[BUCKETS];
static Handle *graves[GRAVES];
static int grave;
static int64_t live[KINDS];

static Entry **find(const void *handle) {
	Entry **e = &table[((uintptr_t)handle >> 4) * 2654435761u % BUCKETS];
	while (*e && (*e)->handle != handle)
		e = &(*e)->next;
	return e;
}

void *fake_new(Kind kind, size_t bytes) {
	Handle *h = calloc(1, bytes);
	Entry *entry = malloc(sizeof *entry);
	if (!h || !entry)
		abort();
	h->magic = ALIVE, h->kind = kind;
	pthread_mutex_lock(&lock);
	Entry **e = find(h);
	*e = entry, entry->next = 0, entry->handle = h;
	live[kind]++;
	pthread_mutex_unlock(&lock);
	return h;
}

// What a pointer is, for messages. The lock is held.
static const char *describe(const void *handle) {
	if (!handle)
		return "null";
	Entry *e = *find(handle);
	if (e)
		return e->handle->magic == ALIVE ? kinds[e->handle->kind] : "a handle that was overwritten";
	for (int i = 0; i < GRAVES; i++)
		if (graves[i] == handle)
			return "already destroyed";
	return "no handle at all";
}

static int is(const void *handle, Kind kind) {
	Entry *e = handle ? *find(handle) : 0;
	return e && e->handle->magic == ALIVE && e->handle->kind == kind;
}

int fake_is(const void *handle, Kind kind) {
	pthread_mutex_lock(&lock);
	int right = is(handle, kind);
	const char *what = right ? "" : describe(handle);
	pthread_mutex_unlock(&lock);
	if (!right)
		fake_error(OK, "%p is %s, expected a live %s", handle, what, kinds[kind]);
	return right;
}

int fake_delete(void *handle, Kind kind) {
	pthread_mutex_lock(&lock);
	int right = is(handle, kind);
	const char *what = right ? "" : describe(handle);
	Handle *old = 0;
	if (right) {
		Entry **e = find(handle), *entry = *e;
		*e = entry->next;
		free(entry);
		((Handle *)handle)->magic = DEAD;
		old = graves[grave], graves[grave] = handle, grave = (grave + 1) % GRAVES;
		live[kind]--;
	}
	pthread_mutex_unlock(&lock);
	free(old);
	if (right)
		return OK;
	fake_violation("destroying %p as a %s: it is %s", handle, kinds[kind], what);
	return RT_HANDLE;
}

void fake_count(Kind kind, int64_t by) {
	__atomic_add_fetch(&live[kind], by, __ATOMIC_SEQ_CST);
}

// ---- the thread's error text ----

static __thread char text[TEXT], handed_out[TEXT];

int fake_error(int status, const char *format, ...) {
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	return status;
}

const char *aclGetRecentErrMsg(void) {
	memcpy(handed_out, text, sizeof text);
	text[0] = 0;
	return handed_out;
}

// ---- violations: what hardware would not notice, or only as wrong numbers ----

static char *violations[KEPT];
static int64_t violated;

void fake_violation(const char *format, ...) {
	char line[TEXT];
	va_list args;
	va_start(args, format);
	vsnprintf(line, sizeof line, format, args);
	va_end(args);
	fake_error(OK, "%s", line);
	fprintf(stderr, "fake CANN: violation: %s\n", line);
	pthread_mutex_lock(&lock);
	if (violated < KEPT)
		violations[violated] = strdup(line);
	violated++;
	pthread_mutex_unlock(&lock);
	if (getenv("GDNFAKE_ABORT"))
		abort();
}

// ---- counts and scripted failures ----

typedef struct {
	char function[96];
	int64_t left; // calls until it fails
	int status;
	char text[256];
} Script;

typedef struct Count {
	struct Count *next;
	const char *function;
	int64_t calls;
} Count;

static Script scripts[SCRIPTS];
static int nscripts;
static Count *counts[256];
static int64_t total;

// Functions by name: the same one may come from several translation units.
static Count *counted(const char *function) {
	unsigned h = 0;
	for (const char *c = function; *c; c++)
		h = h * 31 + (unsigned char)*c;
	Count **c = &counts[h % 256];
	while (*c && strcmp((*c)->function, function))
		c = &(*c)->next;
	if (!*c) {
		*c = calloc(1, sizeof **c);
		(*c)->function = strdup(function);
	}
	return *c;
}

int fake_enter(const char *function) {
	int status = OK;
	char line[sizeof scripts[0].text];
	int on_stream = !strncmp(function, "run:", 4);
	pthread_mutex_lock(&lock);
	counted(function)->calls++;
	total += !on_stream;
	for (int i = 0; i < nscripts && !status; i++) {
		Script *s = &scripts[i];
		if ((strcmp(s->function, on_stream ? "run:*" : "*") && strcmp(s->function, function)) || --s->left > 0)
			continue;
		status = s->status;
		memcpy(line, s->text, sizeof line);
		*s = scripts[--nscripts];
	}
	pthread_mutex_unlock(&lock);
	return status ? fake_error(status, "%s", line) : OK;
}

// ---- time ----

static int64_t inside;

int64_t fake_began(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000 + t.tv_nsec;
}

void fake_left(const int64_t *began) {
	__atomic_add_fetch(&inside, fake_began() - *began, __ATOMIC_RELAXED);
}

// ---- for tests ----

// Nanoseconds that callers have spent in functions of the API since the process began; a client's own time is the rest.
EXPORT int64_t gdnfake_ns(void) {
	return __atomic_load_n(&inside, __ATOMIC_RELAXED);
}

// The nth call from now of a function fails, once; "*" is any function of the API, "run:NAME" a piece of work on its stream, "run:*" any.
EXPORT void gdnfake_fail(const char *function, int64_t nth, int status, const char *message) {
	pthread_mutex_lock(&lock);
	if (nscripts == SCRIPTS)
		abort();
	Script *s = &scripts[nscripts++];
	snprintf(s->function, sizeof s->function, "%s", function);
	snprintf(s->text, sizeof s->text, "%s", message ? message : "scripted failure");
	s->left = nth, s->status = status;
	pthread_mutex_unlock(&lock);
}

EXPORT int64_t gdnfake_pending_failures(void) {
	pthread_mutex_lock(&lock);
	int64_t n = nscripts;
	pthread_mutex_unlock(&lock);
	return n;
}

EXPORT int64_t gdnfake_calls(const char *function) {
	pthread_mutex_lock(&lock);
	int64_t n = function ? counted(function)->calls : total;
	pthread_mutex_unlock(&lock);
	return n;
}

EXPORT int64_t gdnfake_live(const char *kind) {
	int64_t n = 0;
	for (int i = 0; i < KINDS; i++)
		if (kind ? !strcmp(kind, kinds[i]) : 1)
			n += __atomic_load_n(&live[i], __ATOMIC_SEQ_CST);
	return n;
}

EXPORT int64_t gdnfake_violations(void) {
	return __atomic_load_n(&violated, __ATOMIC_SEQ_CST);
}

EXPORT const char *gdnfake_violation(int64_t i) {
	return i >= 0 && i < violated && i < KEPT ? violations[i] : "";
}

EXPORT void gdnfake_reset(void) {
	pthread_mutex_lock(&lock);
	nscripts = 0, total = 0;
	for (int i = 0; i < LENGTH(counts); i++)
		for (Count *c = counts[i]; c; c = c->next)
			c->calls = 0;
	for (int i = 0; i < KEPT && i < violated; i++)
		free(violations[i]);
	violated = 0;
	pthread_mutex_unlock(&lock);
}
