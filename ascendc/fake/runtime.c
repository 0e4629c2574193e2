// Devices, contexts, streams, events, copies. Every stream has a thread that takes its work in order; an event carries the number of its
// newest record.
#define _GNU_SOURCE
#include "runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct Stream Stream;

typedef struct Context {
	Handle handle;
	int device, own; // own: made by aclrtCreateContext
	Stream *fallback; // the default stream
	struct Context *next;
} Context;

typedef struct Job {
	struct Job *next;
	Work work;
	char name[64];
} Job;

struct Stream {
	Handle handle;
	Context *context;
	Stream *next;
	int slot;
	Job *first, **last;
	uint64_t queued, done;
	int error, stops, stopped, leaving; // stops: after a failure nothing more runs
	char text[320];                     // of the failure
	Clock clock;
	pthread_t thread;
};

typedef struct {
	Handle handle;
	uint64_t recorded, done;
	int users, gone; // users: queued work that names it
	double time;
	Clock clock;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Context *primary[DEVICES];
static Stream *streams, *slots[MAX_STREAMS];
static int initialised, held, delay_us = -1;
static char soc[64] = "Ascend910B2";
static __thread Context *current;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// ---- process ----

EXPORT int aclInit(const char *config) {
	ENTER();
	(void)config;
	if (__atomic_fetch_add(&initialised, 1, __ATOMIC_SEQ_CST))
		return fake_error(REPEAT_INIT, "aclInit: already initialised");
	return OK;
}

EXPORT int aclFinalize(void) {
	ENTER();
	if (!__atomic_exchange_n(&initialised, 0, __ATOMIC_SEQ_CST))
		return fake_error(REPEAT_FINALIZE, "aclFinalize: not initialised");
	return OK;
}

#if CANN >= 900
EXPORT int aclFinalizeReference(uint64_t *count) {
	ENTER();
	int left = __atomic_sub_fetch(&initialised, 1, __ATOMIC_SEQ_CST);
	if (left < 0) {
		__atomic_store_n(&initialised, 0, __ATOMIC_SEQ_CST);
		return fake_error(REPEAT_FINALIZE, "aclFinalizeReference: not initialised");
	}
	if (count)
		*count = (uint64_t)left;
	return OK;
}
#endif

EXPORT const char *aclrtGetSocName(void) {
	return fake_enter(__func__) ? 0 : soc;
}

const char *fake_soc(void) {
	return soc;
}

// For tests: which product the fake is, such as Ascend910B2 or Ascend950PR_9599.
EXPORT void gdnfake_soc(const char *name) {
	snprintf(soc, sizeof soc, "%s", name);
}

// ---- devices and contexts ----

static Context *make_context(int device, int own) {
	Context *c = fake_new(CONTEXT, sizeof *c);
	c->device = device, c->own = own;
	return c;
}

// The calling thread's context. 0 with an error text where there is none, or it was destroyed.
static Context *here(const char *function) {
	if (!current) {
		fake_error(OK, "%s: this thread has no context; call aclrtSetDevice or aclrtSetCurrentContext on it first", function);
		return 0;
	}
	return fake_is(current, CONTEXT) ? current : 0;
}
#define HERE()                                                                                                                               \
	Context *context = here(__func__);                                                                                                       \
	if (!context)                                                                                                                            \
	return RT_NO_CONTEXT

int fake_device(void) {
	return current && fake_is(current, CONTEXT) ? current->device : -1;
}

EXPORT int aclrtGetDeviceCount(uint32_t *n) {
	ENTER();
	NEED(n);
	return *n = DEVICES, OK;
}

EXPORT int aclrtSetDevice(int32_t device) {
	ENTER();
	if (!initialised)
		return fake_error(NOT_INITIALISED, "aclrtSetDevice: aclInit was not called");
	if (device < 0 || device >= DEVICES)
		return fake_error(RT_DEVICE, "aclrtSetDevice: device %d, expected 0 to %d", device, DEVICES - 1);
	pthread_mutex_lock(&lock);
	if (!primary[device])
		primary[device] = make_context(device, 0);
	current = primary[device];
	pthread_mutex_unlock(&lock);
	return OK;
}

EXPORT int aclrtGetDevice(int32_t *device) {
	ENTER();
	NEED(device);
	HERE();
	return *device = context->device, OK;
}

EXPORT int aclrtCreateContext(void **out, int32_t device) {
	ENTER();
	NEED(out);
	if (device < 0 || device >= DEVICES)
		return fake_error(RT_DEVICE, "aclrtCreateContext: device %d, expected 0 to %d", device, DEVICES - 1);
	*out = current = make_context(device, 1);
	return OK;
}

EXPORT int aclrtGetCurrentContext(void **out) {
	ENTER();
	NEED(out);
	HERE();
	return *out = context, OK;
}

EXPORT int aclrtSetCurrentContext(void *context) {
	ENTER();
	if (!fake_is(context, CONTEXT))
		return RT_PARAM;
	return current = context, OK;
}

#define DEVICE_ARGUMENT(device)                                                                                                              \
	if ((uint32_t)(device) >= DEVICES)                                                                                                       \
	return fake_error(RT_DEVICE, "%s: device %d, expected 0 to %d", __func__, (int)(device), DEVICES - 1)

EXPORT int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
	ENTER();
	NEED(value);
	DEVICE_ARGUMENT(device);
	int newest = !strncmp(soc, "Ascend950", 9);
	switch (attribute) {
	case 102: // cube cores
		return *value = 24, OK;
	case 201: // vector cores
		return *value = 48, OK;
	case 302: // bytes of L2
		return *value = 192 << 20, OK;
	case 601: // architecture
		return *value = newest ? 3510 : 2201, OK;
	}
	return fake_error(RT_UNSUPPORTED, "aclrtGetDeviceInfo: attribute %d is not known", attribute);
}

EXPORT int aclGetDeviceCapability(uint32_t device, int attribute, int64_t *value) {
	ENTER();
	NEED(value);
	DEVICE_ARGUMENT(device);
	(void)attribute;
	return *value = 24, OK; // cores, of either kind
}

EXPORT int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
	ENTER();
	NEED(can);
	DEVICE_ARGUMENT(device);
	DEVICE_ARGUMENT(peer);
	return *can = 0, OK;
}

EXPORT int aclrtDeviceGetBareTgid(int32_t *pid) {
	ENTER();
	NEED(pid);
	return *pid = getpid(), OK;
}

EXPORT int aclrtGetMemInfo(int kind, size_t *left, size_t *total) {
	ENTER();
	NEED(left && total);
	HERE();
	(void)kind;
	memory_info(context->device, left, total);
	return OK;
}

// ---- streams ----

static void *serve(void *argument) {
	Stream *s = argument;
	pthread_mutex_lock(&lock);
	current = s->context;
	for (;;) {
		while ((!s->first || held) && !s->leaving)
			pthread_cond_wait(&changed, &lock);
		Job *job = s->first;
		if (!job)
			break;
		if (!(s->first = job->next))
			s->last = &s->first;
		int skip = s->stopped, status = OK;
		pthread_mutex_unlock(&lock);
		if (delay_us > 0)
			usleep((useconds_t)delay_us);
		char entry[80];
		snprintf(entry, sizeof entry, "run:%s", job->name);
		if (!skip && !(status = fake_enter(entry)))
			status = job->work.run(job->work.arg);
		const char *why = status ? aclGetRecentErrMsg() : "";
		if (job->work.drop)
			job->work.drop(job->work.arg);
		pthread_mutex_lock(&lock);
		if (status && !s->error) {
			s->error = status, s->stopped = s->stops;
			snprintf(s->text, sizeof s->text, "%s failed on its stream: %.180s", job->name, why);
		}
		free(job);
		s->done++;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

// The lock is held.
static Stream *make_stream(Context *c) {
	int slot = 0;
	while (slot < MAX_STREAMS && slots[slot])
		slot++;
	if (slot == MAX_STREAMS)
		return 0;
	Stream *s = fake_new(STREAM, sizeof *s);
	s->context = c, s->slot = slot, s->last = &s->first, s->next = streams;
	s->clock.of[slot] = host_clock.of[slot]; // numbers go on where the slot's last stream ended
	streams = slots[slot] = s;
	const char *slow = delay_us < 0 ? getenv("GDNFAKE_DELAY_US") : 0;
	if (delay_us < 0)
		delay_us = slow ? atoi(slow) : 0;
	if (pthread_create(&s->thread, 0, serve, s))
		abort();
	return s;
}

// The stream that an argument means. 0 with an error text and *status. The lock is held.
static Stream *stream_of(void *stream, const char *function, int *status) {
	Context *c = here(function);
	*status = RT_NO_CONTEXT;
	if (!c)
		return 0;
	if (!stream) {
		if (!c->fallback && !(c->fallback = make_stream(c)))
			*status = fake_error(RT_INTERNAL, "%s: no stream is left", function);
		return c->fallback;
	}
	*status = RT_HANDLE;
	if (!fake_is(stream, STREAM))
		return 0;
	Stream *s = stream;
	if (s->context == c)
		return s;
	*status = fake_error(RT_STREAM_CONTEXT, "%s: the stream is of device %d, another context than this thread's (device %d)", function,
	                     s->context->device, c->device);
	return 0;
}

int fake_enqueue(void *stream, const Work *work) {
	int status;
	Job *job = calloc(1, sizeof *job);
	job->work = *work;
	snprintf(job->name, sizeof job->name, "%s", work->name);
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, work->name, &status);
	if (s) {
		race_work(&s->clock, s->slot, work->name, work->spans, work->nspans);
		*s->last = job, s->last = &job->next, s->queued++;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
	if (s)
		return OK;
	free(job);
	return status;
}

// Waits until what is queued now has run. The lock is held.
static int finish(Stream *s, int32_t ms) {
	uint64_t all = s->queued;
	Clock then = s->clock;
	double end = now() + (ms < 0 ? 1e9 : ms * 1e-3);
	held = 0;
	pthread_cond_broadcast(&changed);
	while (s->done < all && now() < end) {
		struct timespec t;
		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_nsec += 1000000 * (ms < 0 || ms > 100 ? 100 : ms);
		t.tv_sec += t.tv_nsec / 1000000000, t.tv_nsec %= 1000000000;
		pthread_cond_timedwait(&changed, &lock, &t);
	}
	if (s->done < all)
		return fake_error(RT_TIMEOUT, "the stream was not done after %d ms", ms);
	clock_join(&host_clock, &then);
	int status = s->error;
	if (status)
		fake_error(OK, "%s", s->text);
	if (!s->stopped)
		s->error = OK;
	return status;
}

static int create_stream(void **out, const char *function) {
	Context *c = here(function);
	if (!c)
		return RT_NO_CONTEXT;
	pthread_mutex_lock(&lock);
	*out = make_stream(c);
	pthread_mutex_unlock(&lock);
	return *out ? OK : fake_error(RT_INTERNAL, "%s: %d streams exist, no more can", function, MAX_STREAMS);
}

EXPORT int aclrtCreateStream(void **stream) {
	ENTER();
	NEED(stream);
	return create_stream(stream, __func__);
}

EXPORT int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
	ENTER();
	NEED(stream);
	(void)priority, (void)flag;
	return create_stream(stream, __func__);
}

// Removes a stream with the lock held, which it gives up meanwhile.
static void remove_stream(Stream *s) {
	finish(s, -1);
	Stream **p = &streams;
	while (*p != s)
		p = &(*p)->next;
	*p = s->next;
	s->leaving = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	pthread_join(s->thread, 0);
	pthread_mutex_lock(&lock);
	slots[s->slot] = 0;
	fake_delete(s, STREAM);
}

EXPORT int aclrtDestroyStream(void *stream) {
	ENTER();
	NEED(stream);
	int status = OK;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, __func__, &status);
	if (s && s->queued && s->clock.of[s->slot] > host_clock.of[s->slot])
		fake_violation("aclrtDestroyStream: the stream was not synchronized after its last work");
	if (s)
		remove_stream(s), status = OK;
	pthread_mutex_unlock(&lock);
	return status;
}

#if CANN >= 900
// For streams whose work need not end; here it does all the same.
EXPORT int aclrtDestroyStreamForce(void *stream) {
	ENTER();
	NEED(stream);
	int status = OK;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, __func__, &status);
	if (s)
		remove_stream(s), status = OK;
	pthread_mutex_unlock(&lock);
	return status;
}
#endif

EXPORT int aclrtSetStreamFailureMode(void *stream, uint64_t mode) {
	ENTER();
	int status;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, __func__, &status);
	if (s && mode > 1)
		s = 0, status = fake_error(RT_PARAM, "aclrtSetStreamFailureMode: mode %lu, expected 0 (go on) or 1 (stop)", mode);
	if (s)
		s->stops = (int)mode, status = OK;
	pthread_mutex_unlock(&lock);
	return status;
}

static int synchronize(void *stream, int32_t ms, const char *function) {
	int status;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, function, &status);
	if (s)
		status = finish(s, ms);
	pthread_mutex_unlock(&lock);
	return status;
}

EXPORT int aclrtSynchronizeStream(void *stream) {
	ENTER();
	return synchronize(stream, -1, __func__);
}

EXPORT int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) {
	ENTER();
	return synchronize(stream, ms, __func__);
}

static int synchronize_device(int32_t ms, const char *function) {
	Context *c = here(function);
	if (!c)
		return RT_NO_CONTEXT;
	int status = OK;
	pthread_mutex_lock(&lock);
	for (Stream *s = streams; s; s = s->next)
		if (s->context->device == c->device) {
			int one = finish(s, ms);
			status = status ? status : one;
		}
	pthread_mutex_unlock(&lock);
	return status;
}

EXPORT int aclrtSynchronizeDevice(void) {
	ENTER();
	return synchronize_device(-1, __func__);
}

EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
	ENTER();
	return synchronize_device(ms, __func__);
}

EXPORT int aclrtStreamQuery(void *stream, int *ready) { // 0: complete, 1: not ready
	ENTER();
	NEED(ready);
	int status;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, __func__, &status);
	if (s) {
		*ready = s->done < s->queued, status = OK;
		if (!*ready)
			clock_join(&host_clock, &s->clock);
	}
	pthread_mutex_unlock(&lock);
	return status;
}

EXPORT int aclrtStreamGetId(void *stream, int32_t *id) {
	ENTER();
	NEED(id);
	int status;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, __func__, &status);
	if (s)
		*id = s->slot, status = OK;
	pthread_mutex_unlock(&lock);
	return status;
}

// The context that a device's users share goes when it is reset, with its streams.
EXPORT int aclrtResetDevice(int32_t device) {
	ENTER();
	DEVICE_ARGUMENT(device);
	pthread_mutex_lock(&lock);
	Context *c = primary[device];
	for (Stream *s = streams, *next; c && s; s = next) {
		next = s->next;
		if (s->context == c) {
			remove_stream(s);
			next = streams;
		}
	}
	if (c)
		fake_delete(c, CONTEXT);
	primary[device] = 0;
	pthread_mutex_unlock(&lock);
	return OK;
}

EXPORT int aclrtDestroyContext(void *context) {
	ENTER();
	if (!fake_is(context, CONTEXT))
		return RT_PARAM;
	Context *c = context;
	if (!c->own)
		return fake_error(RT_PARAM, "aclrtDestroyContext: this is the shared context of device %d", c->device);
	pthread_mutex_lock(&lock);
	for (Stream *s = streams, *next; s; s = next) {
		next = s->next;
		if (s->context == c) {
			if (s != c->fallback)
				fake_violation("aclrtDestroyContext: the context still has streams");
			remove_stream(s);
			next = streams;
		}
	}
	pthread_mutex_unlock(&lock);
	if (current == c)
		current = 0;
	return fake_delete(c, CONTEXT);
}

// For tests: nothing runs on any stream until somebody synchronizes or on is 0. What did not wait then sees old values, each time.
EXPORT void gdnfake_hold(int on) {
	pthread_mutex_lock(&lock);
	held = on;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

// For tests: the pause before each piece of work.
EXPORT void gdnfake_delay(int microseconds) {
	delay_us = microseconds;
}

// ---- events ----

static int create_event(void **event, const char *function) {
	if (!here(function))
		return RT_NO_CONTEXT;
	*event = fake_new(EVENT, sizeof(Event));
	return OK;
}

EXPORT int aclrtCreateEvent(void **event) {
	ENTER();
	NEED(event);
	return create_event(event, __func__);
}

EXPORT int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
	ENTER();
	NEED(event);
	(void)flag;
	return create_event(event, __func__);
}

EXPORT int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
	ENTER();
	NEED(event);
	(void)flag;
	return create_event(event, __func__);
}

// The lock is held.
static void leave(Event *e) {
	if (!--e->users && e->gone)
		fake_delete(e, EVENT);
}

// An event that queued work names lives until that has run.
EXPORT int aclrtDestroyEvent(void *event) {
	ENTER();
	if (!fake_is(event, EVENT) || ((Event *)event)->gone) {
		fake_violation("aclrtDestroyEvent: %p is no live event", event);
		return RT_HANDLE;
	}
	Event *e = event;
	pthread_mutex_lock(&lock);
	e->gone = 1, e->users++;
	leave(e);
	pthread_mutex_unlock(&lock);
	return OK;
}

typedef struct {
	Event *event;
	uint64_t turn;
} Mark;

static int mark(void *argument) {
	Mark *m = argument;
	pthread_mutex_lock(&lock);
	m->event->done = m->turn, m->event->time = now();
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	return OK;
}

static int await(void *argument) {
	Mark *m = argument;
	pthread_mutex_lock(&lock);
	while (m->event->done < m->turn)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	return OK;
}

static void drop_mark(void *argument) {
	Mark *m = argument;
	pthread_mutex_lock(&lock);
	// Where the record itself was skipped or failed, nobody may wait for it for ever.
	if (m->event->done < m->turn)
		m->event->done = m->turn;
	pthread_cond_broadcast(&changed);
	leave(m->event);
	pthread_mutex_unlock(&lock);
	free(m);
}

static int with_event(void *event, void *stream, int records, const char *name) {
	if (!fake_is(event, EVENT) || ((Event *)event)->gone)
		return fake_error(RT_HANDLE, "%s: %p is no live event", name, event);
	Event *e = event;
	int status;
	pthread_mutex_lock(&lock);
	Stream *s = stream_of(stream, name, &status);
	if (s) {
		Mark *m = malloc(sizeof *m);
		Job *job = calloc(1, sizeof *job);
		if (records) {
			race_work(&s->clock, s->slot, name, 0, 0);
			e->recorded++, e->clock = s->clock;
		} else {
			clock_join(&s->clock, &e->clock); // the newest record at this moment
			race_work(&s->clock, s->slot, name, 0, 0);
		}
		*m = (Mark){e, e->recorded}, e->users++;
		job->work = (Work){name, records ? mark : await, drop_mark, m, 0, 0};
		snprintf(job->name, sizeof job->name, "%s", name);
		*s->last = job, s->last = &job->next, s->queued++, status = OK;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
	return status;
}

EXPORT int aclrtRecordEvent(void *event, void *stream) {
	ENTER();
	return with_event(event, stream, 1, __func__);
}

EXPORT int aclrtStreamWaitEvent(void *stream, void *event) {
	ENTER();
	return with_event(event, stream, 0, __func__);
}

#define LIVE_EVENT(name)                                                                                                                     \
	if (!fake_is(name, EVENT) || ((Event *)(name))->gone)                                                                                    \
	return fake_error(RT_HANDLE, "%s: %p is no live event", __func__, name)

EXPORT int aclrtResetEvent(void *event, void *stream) {
	ENTER();
	LIVE_EVENT(event);
	(void)stream;
	return OK;
}

EXPORT int aclrtSynchronizeEvent(void *event) {
	ENTER();
	LIVE_EVENT(event);
	Event *e = event;
	pthread_mutex_lock(&lock);
	uint64_t turn = e->recorded;
	Clock then = e->clock;
	held = 0;
	pthread_cond_broadcast(&changed);
	while (e->done < turn)
		pthread_cond_wait(&changed, &lock);
	clock_join(&host_clock, &then);
	pthread_mutex_unlock(&lock);
	return OK;
}

static int complete(Event *e) {
	pthread_mutex_lock(&lock);
	int done = e->done >= e->recorded;
	if (done)
		clock_join(&host_clock, &e->clock);
	pthread_mutex_unlock(&lock);
	return done;
}

EXPORT int aclrtQueryEventStatus(void *event, int *status) { // 1: complete, 0: not ready
	ENTER();
	NEED(status);
	LIVE_EVENT(event);
	return *status = complete(event), OK;
}

EXPORT int aclrtQueryEventWaitStatus(void *event, int *status) { // the other way round
	ENTER();
	NEED(status);
	LIVE_EVENT(event);
	return *status = !complete(event), OK;
}

EXPORT int aclrtEventElapsedTime(float *ms, void *start, void *end) {
	ENTER();
	NEED(ms);
	LIVE_EVENT(start);
	LIVE_EVENT(end);
	Event *a = start, *b = end;
	if (!a->recorded || !b->recorded || !complete(a) || !complete(b))
		return fake_error(RT_PARAM, "aclrtEventElapsedTime: an event was not recorded or is not complete");
	return *ms = (float)((b->time - a->time) * 1e3), OK;
}

// ---- memory ----

static int take(void **p, size_t n, const char *function) {
	Context *c = here(function);
	if (!c)
		return RT_NO_CONTEXT;
	if (!n)
		return fake_error(RT_PARAM, "%s: 0 bytes", function);
	return memory_take(c->device, n, p);
}

EXPORT int aclrtMalloc(void **p, size_t n, int policy) {
	ENTER();
	NEED(p);
	(void)policy;
	return take(p, n, __func__);
}

EXPORT int aclrtMallocAlign32(void **p, size_t n, int policy) {
	ENTER();
	NEED(p);
	(void)policy;
	return take(p, n, __func__);
}

EXPORT int aclrtMallocWithCfg(void **p, size_t n, int policy, void *config) {
	ENTER();
	NEED(p);
	(void)policy, (void)config;
	return take(p, n, __func__);
}

EXPORT int aclrtFree(void *p) {
	ENTER();
	NEED(p);
	pthread_mutex_lock(&lock);
	race_host("aclrtFree", memory_block(p));
	pthread_mutex_unlock(&lock);
	return memory_give(p);
}

// Pinned host memory, so that it is known what may be named by work that has not run yet.
typedef struct Pinned {
	struct Pinned *next;
	char *p;
	size_t bytes;
} Pinned;

static Pinned *pinned;

static Pinned **pinned_with(const void *p) { // the lock is held
	Pinned **at = &pinned;
	while (*at && !((char *)p >= (*at)->p && (char *)p < (*at)->p + (*at)->bytes))
		at = &(*at)->next;
	return at;
}

EXPORT int aclrtMallocHost(void **p, size_t n) {
	ENTER();
	NEED(p);
	HERE();
	if (!n)
		return fake_error(RT_PARAM, "aclrtMallocHost: 0 bytes");
	Pinned *block = malloc(sizeof *block);
	if (!block || posix_memalign(p, 4096, n)) {
		free(block);
		return fake_error(RT_MEMORY, "aclrtMallocHost: no memory for %zu bytes", n);
	}
	pthread_mutex_lock(&lock);
	*block = (Pinned){pinned, *p, n}, pinned = block;
	pthread_mutex_unlock(&lock);
	fake_count(HOST_MEMORY, 1);
	return OK;
}

EXPORT int aclrtFreeHost(void *p) {
	ENTER();
	NEED(p);
	pthread_mutex_lock(&lock);
	Pinned **at = pinned_with(p), *block = *at;
	if (block && block->p == p) {
		race_host("aclrtFreeHost", (Span){(uintptr_t)p, block->bytes, 1});
		*at = block->next;
	} else
		block = 0;
	pthread_mutex_unlock(&lock);
	if (!block) {
		fake_violation("aclrtFreeHost: %p is not the start of a live allocation", p);
		return RT_PARAM;
	}
	free(block->p);
	free(block);
	fake_count(HOST_MEMORY, -1);
	return OK;
}

// ---- copies ----

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

typedef struct {
	char *to, *owned; // owned: a copy of the source that goes with this
	const char *from;
	size_t n;
	int value;
} Copy;

// One side of a copy: what the fakes touch for it, 0 with an error text and *status.
static char *side(const void *p, size_t n, int on_device, const char *what, const char *function, int *status) {
	int d = fake_device_of(p);
	if (on_device == 2)
		on_device = d >= 0;
	*status = RT_PARAM;
	if (on_device && d < 0)
		fake_error(OK, "%s: %s is %p, which is not device memory", function, what, p);
	else if (!on_device && d >= 0)
		fake_error(OK, "%s: %s is %p, which is device memory and the kind of copy says host", function, what, p);
	else if (!on_device)
		return (char *)p;
	else
		return fake_reach(p, n, d);
	return 0;
}

static int copy(const char *function, void *to, size_t room, const void *from, size_t n, int kind, void *stream, int asynchronous);

EXPORT int aclrtMemcpy(void *to, size_t room, const void *from, size_t n, int kind) {
	ENTER();
	return copy(__func__, to, room, from, n, kind, 0, 0);
}

EXPORT int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t n, int kind, void *stream) {
	ENTER();
	return copy(__func__, to, room, from, n, kind, stream, 1);
}

static int run_copy(void *argument) {
	Copy *c = argument;
	memmove(c->to, c->from, c->n);
	return OK;
}

static int run_fill(void *argument) {
	Copy *c = argument;
	memset(c->to, c->value, c->n);
	return OK;
}

static void drop_copy(void *argument) {
	free(((Copy *)argument)->owned);
	free(argument);
}

static int copy(const char *function, void *to, size_t room, const void *from, size_t n, int kind, void *stream, int asynchronous) {
	int status;
	if (!here(function))
		return RT_NO_CONTEXT;
	if (!to || !from)
		return fake_error(RT_PARAM, "%s: null address", function);
	if (n > room)
		return fake_error(RT_PARAM, "%s: %zu bytes do not fit into %zu", function, n, room);
	if (kind < HOST_TO_HOST || kind > BY_ADDRESS)
		return fake_error(RT_PARAM, "%s: kind %d, expected 0 to 4", function, kind);
	char *there = side(to, n, kind == BY_ADDRESS ? 2 : kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE, "the destination", function, &status);
	char *here_ = there ? side(from, n, kind == BY_ADDRESS ? 2 : kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE, "the source", function, &status) : 0;
	if (!here_)
		return status;
	Span spans[] = {{(uintptr_t)from, n, 0}, {(uintptr_t)to, n, 1}};
	if (!asynchronous) {
		pthread_mutex_lock(&lock);
		race_host(function, spans[0]);
		race_host(function, spans[1]);
		pthread_mutex_unlock(&lock);
		memmove(there, here_, n);
		return OK;
	}
	pthread_mutex_lock(&lock);
	int loose_from = here_ == (char *)from && !*pinned_with(from), loose_to = there == (char *)to && !*pinned_with(to);
	pthread_mutex_unlock(&lock);
	Copy *c = calloc(1, sizeof *c);
	*c = (Copy){there, 0, here_, n, 0};
	if (loose_from) // pageable memory is read before the call returns
		c->from = c->owned = memcpy(malloc(n + 1), here_, n);
	status = fake_enqueue(stream, &(Work){function, run_copy, drop_copy, c, spans, 2});
	if (status)
		drop_copy(c);
	else if (loose_to) // and written before it returns
		status = synchronize(stream, -1, function);
	return status;
}

static int fill(const char *function, void *p, size_t room, int32_t value, size_t n, void *stream, int asynchronous) {
	Context *c = here(function);
	if (!c)
		return RT_NO_CONTEXT;
	if (n > room)
		return fake_error(RT_PARAM, "%s: %zu bytes do not fit into %zu", function, n, room);
	char *at = fake_reach(p, n, c->device);
	if (!at)
		return RT_PARAM;
	Span span = {(uintptr_t)p, n, 1};
	if (!asynchronous) {
		pthread_mutex_lock(&lock);
		race_host(function, span);
		pthread_mutex_unlock(&lock);
		memset(at, value, n);
		return OK;
	}
	Copy *job = calloc(1, sizeof *job);
	*job = (Copy){at, 0, 0, n, value};
	int status = fake_enqueue(stream, &(Work){function, run_fill, drop_copy, job, &span, 1});
	if (status)
		drop_copy(job);
	return status;
}

EXPORT int aclrtMemset(void *p, size_t room, int32_t value, size_t n) {
	ENTER();
	return fill(__func__, p, room, value, n, 0, 0);
}

EXPORT int aclrtMemsetAsync(void *p, size_t room, int32_t value, size_t n, void *stream) {
	ENTER();
	return fill(__func__, p, room, value, n, stream, 1);
}

EXPORT int aclrtPointerGetAttributes(const void *p, void *attributes) {
	ENTER();
	NEED(attributes);
	struct {
		uint32_t id;
		int32_t type;
		uint32_t page, reserved[4];
	} out = {0};
	int d = fake_device_of(p);
	pthread_mutex_lock(&lock);
	int host = *pinned_with(p) != 0;
	pthread_mutex_unlock(&lock);
	out.id = d < 0 ? 0 : (uint32_t)d, out.type = d >= 0 ? 1 : host ? 0 : 2, out.page = 4096;
	memcpy(attributes, &out, sizeof out);
	return OK;
}
