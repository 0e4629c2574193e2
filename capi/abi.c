// What must not need Go: error texts, the fork guard, SIGPIPE.
#define _GNU_SOURCE
#include "abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "gdn.h"

// fork(): in the child only the calling thread lives on. The Go runtime's threads and the kernels' pool are gone, and a call would wait for
// them for ever, even if the parent had never made one. The handler is registered at load for that reason.
static volatile int forked;

static const char forked_text[] = "libgdn was loaded before fork() and cannot run in the child process; load it in the child first, "
                                  "or start workers with spawn or forkserver instead of fork";

static void in_child(void) { forked = 1; }

// SIGPIPE: the Go runtime puts a handler in the place of what the host had, such as Python's "ignore". Constructors with a priority run
// before those without, among them the one that starts the runtime.
static struct sigaction host_sigpipe;

__attribute__((constructor(101))) static void at_load(void) {
	sigaction(SIGPIPE, 0, &host_sigpipe);
	pthread_atfork(0, 0, in_child);
}

// Where the handler is still the one that came with this library, put the host's back. One that the host has set since stays.
static void restore_sigpipe(void) {
	struct sigaction now;
	Dl_info handler, self;
	if (sigaction(SIGPIPE, 0, &now) == 0 && now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN && dladdr((void *)now.sa_sigaction, &handler) &&
	    dladdr((void *)forked_text, &self) && handler.dli_fbase == self.dli_fbase)
		sigaction(SIGPIPE, &host_sigpipe, 0);
}

// Per thread: a key and not a __thread variable, for glibc has little static TLS to give to libraries loaded late.
typedef struct {
	char *error, *path; // malloced, or 0
	gdnc_caller caller;
	gdnc_text info;
} thread_state;

static pthread_key_t key;
static int have_key;

static void free_state(void *p) {
	free(((thread_state *)p)->error);
	free(((thread_state *)p)->path);
	free(p);
}

static void start(void) {
	have_key = pthread_key_create(&key, free_state) == 0;
	gdnCall(GDNC_START, 0, 0);
	restore_sigpipe();
}

static void ready(void) {
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, start);
}

// 0 if memory ran out.
static thread_state *state(void) {
	ready();
	if (!have_key)
		return 0;
	thread_state *s = pthread_getspecific(key);
	if (!s && (s = calloc(1, sizeof *s)) && pthread_setspecific(key, s) != 0) {
		free(s);
		s = 0;
	}
	return s;
}

static void keep(char **to, const char *text, size_t length) {
	free(*to);
	if ((*to = malloc(length + 1))) {
		memcpy(*to, text, length);
		(*to)[length] = 0;
	}
}

void gdnc_set_error(const char *text, size_t length) {
	thread_state *s = state();
	if (s)
		keep(&s->error, text, length);
}

void gdnc_set_path(const char *text, size_t length) {
	thread_state *s = state();
	if (s)
		keep(&s->path, text, length);
}

gdnc_caller gdnc_get_caller(void) {
	thread_state *s = state();
	return s ? s->caller : (gdnc_caller){0};
}

int32_t gdnc_enter(int32_t op, const void *args, int32_t run) {
	if (forked)
		return GDN_FORKED;
	thread_state *s = state();
	if (s && s->error) {
		free(s->error);
		s->error = 0;
	}
	return gdnCall(op, (void *)args, run);
}

const char *gdn_last_error(void) {
	if (forked)
		return forked_text;
	thread_state *s = state();
	if (!s)
		return "no memory for the text of an error";
	return s->error ? s->error : "";
}

const char *gdn_version(void) { return GDN_VERSION; }

int32_t gdn_supports(const char *op, const void *args) {
	if (forked)
		return GDN_FORKED;
	gdnc_set_path("", 0);
	for (int32_t i = 0; op && gdnc_ops[i]; i++)
		if (strcmp(op, gdnc_ops[i]) == 0)
			return gdnc_enter(i, args, 0);
	char text[256];
	int n = op ? snprintf(text, sizeof text, "gdn_supports: op is \"%.100s\", expected the name of an operator, such as \"%s\"", op, gdnc_ops[0])
	           : snprintf(text, sizeof text, "gdn_supports: op is NULL, expected the name of an operator, such as \"%s\"", gdnc_ops[0]);
	gdnc_set_error(text, (size_t)n);
	return GDN_INVALID_ARGUMENT;
}

const char *gdn_last_path(void) {
	thread_state *s = forked ? 0 : state();
	return s && s->path ? s->path : "";
}

int32_t gdn_set_stream(void *stream) {
	if (forked)
		return GDN_FORKED;
	thread_state *s = state();
	if (!s)
		return GDN_OUT_OF_MEMORY;
	s->caller.stream = stream;
	return GDN_OK;
}

int32_t gdn_set_allocator(void *(*allocate)(void *user, int32_t device, size_t bytes, void *stream),
                          void (*release)(void *user, int32_t device, void *memory, size_t bytes, void *stream), void *user) {
	static const char one[] = "gdn_set_allocator: one of allocate and release is NULL, expected both or none";
	if (forked)
		return GDN_FORKED;
	thread_state *s = state();
	if (!s)
		return GDN_OUT_OF_MEMORY;
	if (!allocate != !release) {
		gdnc_set_error(one, sizeof one - 1);
		return GDN_INVALID_ARGUMENT;
	}
	s->caller.allocate = allocate, s->caller.release = release, s->caller.user = user;
	return GDN_OK;
}

const char *gdn_ascend_info(void) {
	if (forked || gdnc_enter(GDNC_ASCEND_INFO, 0, 1) != GDN_OK)
		return gdn_last_error();
	return gdn_last_path();
}

int32_t gdn_trim(void) { return gdnc_enter(GDNC_TRIM, 0, 1); }

int32_t gdn_set_num_threads(int32_t n) { return gdnc_enter(GDNC_SET_THREADS, &n, 1); }

int32_t gdn_get_num_threads(void) {
	int32_t n = 0;
	gdnc_enter(GDNC_GET_THREADS, &n, 1);
	return n;
}

static gdnc_text isa;
static void read_isa(void) { gdnc_enter(GDNC_ISA, &isa, 1); }

const char *gdn_isa(void) {
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	if (!forked) // nothing to learn there, and an answer from before the fork stays
		pthread_once(&once, read_isa);
	return isa.text;
}

const char *gdn_build_info(void) {
	thread_state *s = forked ? 0 : state();
	if (!s || gdnc_enter(GDNC_BUILD_INFO, &s->info, 1) != GDN_OK)
		return "libgdn " GDN_VERSION;
	return s->info.text;
}
