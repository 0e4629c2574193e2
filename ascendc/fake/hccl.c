// libhccl between processes of one machine.
//
// A communicator is a full mesh of Unix sockets, one per direction, in the abstract namespace, so that nothing stays behind when a rank
// dies. Every operation is a list of items, send to or receive from one rank; exchange() moves any such list, all items at once. Each
// message begins with what its sender called: a receiver that called something else reports it instead of hanging or taking wrong bytes.
// One byte comes back when a message was taken, and only then a send is over, as on a device: two ranks that both send first wait for each
// other whatever the size.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

enum { E_PARA = 1, E_PTR = 2, E_MEMORY = 3, E_NOT_SUPPORT = 5, E_SYSCALL = 8, E_TIMEOUT = 9, E_TCP_CONNECT = 11, E_TCP_TRANSFER = 13 };
enum { SUM, PROD, MAX, MIN };
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16, DTYPES };
enum { MAX_RANKS = 64, ROOT_INFO_BYTES = 4108, NAME_BYTES = 128, CONFIG_NAME_AT = 32 /* in HcclCommConfig */ };
static const int item_bytes[DTYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

// The types that reductions take.
static const int summed = 1 << INT8 | 1 << INT16 | 1 << INT32 | 1 << INT64 | 1 << FP16 | 1 << FP32 | 1 << BF16;
static const int multiplied = 1 << INT8 | 1 << INT32 | 1 << INT64 | 1 << FP16 | 1 << FP32;

typedef struct {
	Handle handle;
	uint32_t ranks, rank;
	int device;
	int fd[2][MAX_RANKS]; // [1]: to that rank, [0]: from it
	int error, queued;    // the first failure, for HcclGetCommAsyncError; operations called and not yet done
	void *stream;         // of the newest operation
	char name[NAME_BYTES];
	pthread_mutex_t busy; // operations of one communicator never overlap
} Comm;

typedef struct {
	int sending, dtype;
	uint32_t peer;
	char *at;     // as the fake reaches it
	uint64_t client; // as the client knows it, 0: the fake's own memory
	uint64_t bytes;
} Item;

typedef struct {
	char op[20];
	uint32_t dtype, detail; // detail: the root or the reduction
	uint64_t bytes;
} Head;

typedef struct {
	Comm *comm;
	const char *op;
	uint32_t detail;
	int status, n, room;
	char *parts, *out; // reductions: every rank's part, received side by side, and where their result goes
	Span result;
	uint64_t count;
	int dtype;
	Item *items;
} Task;

static int seconds(const char *name, int otherwise) {
	const char *s = getenv(name);
	return s && atoi(s) > 0 ? atoi(s) : otherwise;
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Errors of operations come to light later, if at all: they are printed too.
#define REPORT(status, ...) (fprintf(stderr, "fake HCCL: " __VA_ARGS__), fputc('\n', stderr), fake_error(status, "fake HCCL: " __VA_ARGS__))

// ---- one operation's messages ----

typedef struct { // the item in work in one direction of one socket
	int at;
	uint64_t done;
	Head head;
} Flow;

static int next_item(const Task *t, int from, int sending, uint32_t peer) {
	while (from < t->n && (t->items[from].sending != sending || t->items[from].peer != peer))
		from++;
	return from;
}

static int same_call(const Task *t, const Flow *f, const Item *i, uint32_t peer) {
	const char *expected = strcmp(t->op, "Recv") ? t->op : "Send"; // the one pair of names that differ
	if (!strcmp(f->head.op, expected) && f->head.dtype == (uint32_t)i->dtype && f->head.detail == t->detail && f->head.bytes == i->bytes)
		return OK;
	return REPORT(E_PARA, "rank %u called %s (dtype %d, detail %u, %lu bytes), but rank %u called %s (dtype %u, detail %u, %lu bytes)", t->comm->rank, t->op,
	              i->dtype, t->detail, i->bytes, peer, f->head.op, f->head.dtype, f->head.detail, f->head.bytes);
}

// Moves as many bytes of one flow as its socket takes now: the head, the data, then one byte back.
static int advance(Task *t, Flow *f, int sending, uint32_t peer) {
	Comm *c = t->comm;
	char taken = 1;
	while (f->at < t->n) {
		Item *i = &t->items[f->at];
		const uint64_t start = sizeof f->head, end = start + i->bytes;
		if (sending && !f->done) {
			f->head = (Head){"", (uint32_t)i->dtype, t->detail, i->bytes};
			strncpy(f->head.op, t->op, sizeof f->head.op - 1);
		}
		char *p = f->done < start ? (char *)&f->head + f->done : f->done < end ? i->at + (f->done - start) : &taken;
		uint64_t left = f->done < start ? start - f->done : f->done < end ? end - f->done : 1;
		int outwards = sending == (f->done < end), fd = c->fd[sending][peer];
		ssize_t n = outwards ? send(fd, p, left, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, p, left, MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return OK;
		if (n <= 0)
			return REPORT(E_TCP_TRANSFER, "rank %u left during %s of rank %u", peer, t->op, c->rank);
		f->done += (uint64_t)n;
		if (!sending && f->done == start && same_call(t, f, i, peer))
			return E_PARA;
		if (f->done > end)
			f->at = next_item(t, f->at + 1, sending, peer), f->done = 0;
	}
	return OK;
}

static int exchange(Task *t) {
	Comm *c = t->comm;
	Flow flow[2][MAX_RANKS];
	double deadline = now() + seconds("HCCL_EXEC_TIMEOUT", 60);
	for (int sending = 0; sending < 2; sending++)
		for (uint32_t p = 0; p < c->ranks; p++)
			flow[sending][p] = (Flow){.at = next_item(t, 0, sending, p)};
	Flow *to = &flow[1][c->rank], *from = &flow[0][c->rank]; // messages to oneself: in pairs, without a socket
	while (to->at < t->n && from->at < t->n) {
		memmove(t->items[from->at].at, t->items[to->at].at, t->items[from->at].bytes);
		to->at = next_item(t, to->at + 1, 1, c->rank), from->at = next_item(t, from->at + 1, 0, c->rank);
	}
	if (to->at < t->n || from->at < t->n)
		return REPORT(E_PARA, "rank %u: a message to itself without its other side in %s", c->rank, t->op);
	for (;;) {
		struct pollfd wait[2 * MAX_RANKS];
		int open = 0;
		for (int sending = 0; sending < 2; sending++)
			for (uint32_t p = 0; p < c->ranks; p++) {
				Flow *f = &flow[sending][p];
				int busy = f->at < t->n, data = busy && f->done < sizeof f->head + t->items[f->at].bytes;
				wait[(uint32_t)sending * c->ranks + p] = (struct pollfd){busy ? c->fd[sending][p] : -1, sending == data ? POLLOUT : POLLIN, 0};
				open |= busy;
			}
		if (!open)
			return OK;
		if (poll(wait, 2 * c->ranks, 200) < 0 && errno != EINTR)
			return E_SYSCALL;
		for (int sending = 0; sending < 2; sending++)
			for (uint32_t p = 0; p < c->ranks; p++) {
				int bad = wait[(uint32_t)sending * c->ranks + p].revents ? advance(t, &flow[sending][p], sending, p) : OK;
				if (bad)
					return bad;
			}
		if (now() > deadline)
			return REPORT(E_TIMEOUT, "rank %u waited too long in %s of %s", c->rank, t->op, c->name);
	}
}

// ---- reductions: pairwise in rank order, rounded to the type at each step, so that all ranks get equal bits ----

static float from_bf16(uint16_t h) {
	uint32_t u = (uint32_t)h << 16;
	float f;
	memcpy(&f, &u, 4);
	return f;
}

static uint16_t to_bf16(float f) {
	uint32_t u;
	memcpy(&u, &f, 4);
	return f != f ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#define PICK(op, a, b) ((op) == SUM ? (a) + (b) : (op) == PROD ? (a) * (b) : (op) == MAX ? ((a) > (b) ? (a) : (b)) : (a) < (b) ? (a) : (b))
#define FOLD(type)                                                                                                                           \
	for (uint64_t i = 0; i < n; i++)                                                                                                         \
		((type *)a)[i] = (type)PICK(op, ((type *)a)[i], ((type *)b)[i]);                                                                     \
	return

static void fold(int dtype, uint32_t op, void *a, void *b, uint64_t n) {
	switch (dtype) {
	case INT8: FOLD(int8_t);
	case INT16: FOLD(int16_t);
	case INT32: FOLD(int32_t);
	case INT64: FOLD(int64_t);
	case FP32: FOLD(float);
	case FP16: FOLD(_Float16);
	case BF16:
		for (uint64_t i = 0; i < n; i++) {
			float x = from_bf16(((uint16_t *)a)[i]), y = from_bf16(((uint16_t *)b)[i]);
			((uint16_t *)a)[i] = to_bf16(PICK(op, x, y));
		}
	}
}

// ---- from a call to work on a stream ----

static int overlaps(const Item *a, const Item *b) {
	return a->at < b->at + b->bytes && b->at < a->at + a->bytes;
}

static int execute(void *argument) {
	Task *t = argument;
	Comm *c = t->comm;
	pthread_mutex_lock(&c->busy);
	int bad = c->error;
	for (int i = 0; !bad && i < t->n; i++) { // what is to be received is NaN until it has come
		int sent = t->items[i].sending;
		for (int j = 0; !sent && j < t->n; j++)
			sent = t->items[j].sending && overlaps(&t->items[i], &t->items[j]);
		if (!sent)
			memset(t->items[i].at, 0xff, t->items[i].bytes);
	}
	bad = bad ? bad : exchange(t);
	uint64_t bytes = t->out ? t->count * (uint64_t)item_bytes[t->dtype] : 0;
	for (uint32_t p = 1; t->out && !bad && p < c->ranks; p++)
		fold(t->dtype, t->detail, t->parts, t->parts + p * bytes, t->count);
	if (t->out && !bad)
		memcpy(t->out, t->parts, bytes);
	if (bad && !c->error)
		c->error = bad;
	pthread_mutex_unlock(&c->busy);
	return bad ? RT_INTERNAL : OK;
}

static void drop(void *argument) {
	Task *t = argument;
	Comm *c = t->comm;
	free(t->parts);
	free(t->items);
	free(t);
	__atomic_sub_fetch(&c->queued, 1, __ATOMIC_SEQ_CST);
}

static Task *begin(Comm *c, const char *op, uint32_t detail, int dtype) {
	Task *t = calloc(1, sizeof *t);
	t->comm = c, t->op = op, t->detail = detail;
	if (!fake_is(c, COMM))
		t->status = E_PTR, t->comm = 0;
	else if (dtype < 0 || dtype >= DTYPES)
		t->status = fake_error(E_NOT_SUPPORT, "%s: data type %d", op, dtype);
	else if (fake_device() != c->device)
		t->status = fake_error(E_PARA, "%s: this thread is on device %d, the communicator on device %d", op, fake_device(), c->device);
	return t;
}

static void add(Task *t, int sending, uint32_t peer, const void *base, uint64_t at, uint64_t count, int dtype) {
	if (t->status)
		return;
	uint64_t bytes = count * (uint64_t)item_bytes[dtype];
	const char *p = (const char *)base + at * (uint64_t)item_bytes[dtype];
	if (peer >= t->comm->ranks) {
		t->status = fake_error(E_PARA, "%s: rank %u of %u", t->op, peer, t->comm->ranks);
		return;
	}
	char *there = bytes ? fake_reach(p, bytes, t->comm->device) : (char *)t;
	if (!there) {
		char why[300];
		snprintf(why, sizeof why, "%s", aclGetRecentErrMsg());
		t->status = fake_error(E_PTR, "%s: %s", t->op, why);
		return;
	}
	if (t->n == t->room)
		t->items = realloc(t->items, (size_t)(t->room = t->room ? 2 * t->room : 16) * sizeof *t->items);
	t->items[t->n++] = (Item){sending, dtype, peer, there, (uint64_t)(uintptr_t)p, bytes};
}
#define SENDS(...) add(t, 1, __VA_ARGS__)
#define RECEIVES(...) add(t, 0, __VA_ARGS__)
#define EACH(p) for (uint32_t p = 0; c && t->comm && p < c->ranks; p++)

typedef struct Grouped {
	struct Grouped *next;
	Task *task;
	void *stream;
} Grouped;

static __thread int group_depth;
static __thread Grouped *grouped;

static int put_on_stream(Task *t, void *stream) {
	Comm *c = t->comm;
	Span *spans = calloc((size_t)t->n + 1, sizeof *spans);
	int n = 0;
	for (int i = 0; i < t->n; i++)
		if (t->items[i].client && t->items[i].bytes)
			spans[n++] = (Span){(uintptr_t)t->items[i].client, t->items[i].bytes, !t->items[i].sending};
	if (t->result.bytes)
		spans[n++] = t->result;
	char name[32];
	snprintf(name, sizeof name, "Hccl%s", t->op);
	if (__atomic_fetch_add(&c->queued, 1, __ATOMIC_SEQ_CST) && c->stream != stream)
		fake_violation("%s: %s has unfinished operations on another stream", name, c->name);
	c->stream = stream;
	int status = fake_enqueue(stream, &(Work){name, execute, drop, t, spans, n});
	free(spans);
	if (status)
		drop(t);
	return status ? E_PARA : OK;
}

static int end(Task *t, void *stream) {
	int status = t->status;
	if (status) {
		if (t->comm)
			__atomic_add_fetch(&t->comm->queued, 1, __ATOMIC_SEQ_CST), drop(t);
		else
			free(t);
		return status;
	}
	if (!group_depth)
		return put_on_stream(t, stream);
	Grouped **last = &grouped, *g = malloc(sizeof *g);
	while (*last)
		last = &(*last)->next;
	*g = (Grouped){0, t, stream}, *last = g;
	return OK;
}

static int point_to_point(const Task *t) {
	return !strcmp(t->op, "Send") || !strcmp(t->op, "Recv");
}

EXPORT int HcclGroupStart(void) {
	ENTER();
	group_depth++;
	return OK;
}

// A group's sends and receives on one communicator and stream become one operation; collectives follow each other as called.
EXPORT int HcclGroupEnd(void) {
	ENTER();
	int bad = OK;
	if (!group_depth)
		return fake_error(E_NOT_SUPPORT, "HcclGroupEnd without HcclGroupStart");
	if (--group_depth)
		return OK;
	for (Grouped *g; (g = grouped);) {
		Task *t = g->task;
		if (point_to_point(t))
			for (Grouped **p = &g->next, *o; (o = *p);) {
				if (o->task->comm != t->comm || o->stream != g->stream || !point_to_point(o->task)) {
					p = &o->next;
					continue;
				}
				if (t->n == t->room)
					t->items = realloc(t->items, (size_t)(t->room *= 2) * sizeof *t->items);
				t->op = "Send", t->items[t->n++] = o->task->items[0]; // checked under one name on both sides
				*p = o->next;
				free(o->task->items);
				free(o->task);
				free(o);
			}
		grouped = g->next;
		int failed = put_on_stream(t, g->stream);
		bad = bad ? bad : failed;
		free(g);
	}
	return bad;
}

// All contributions come to this rank.
static int reduced(Task *t, void *out, uint64_t count, int dtype, void *stream) {
	Comm *c = t->comm;
	uint64_t bytes = t->status ? 0 : count * (uint64_t)item_bytes[dtype];
	t->count = count, t->dtype = dtype, t->result = (Span){(uintptr_t)out, bytes, 1};
	if (!t->status && bytes && !(t->out = fake_reach(out, bytes, c->device)))
		t->status = E_PTR;
	if (!t->status && !(t->parts = calloc(c->ranks * count + 1, (size_t)item_bytes[dtype])))
		t->status = E_MEMORY;
	for (uint32_t p = 0; !t->status && p < c->ranks; p++) {
		add(t, 0, p, "", 0, 0, dtype); // the fake's own memory takes the place of the client's
		t->items[t->n - 1].at = t->parts + p * bytes, t->items[t->n - 1].bytes = bytes, t->items[t->n - 1].client = 0;
	}
	return end(t, stream);
}

static Task *begin_reduction(Comm *c, const char *op, int dtype, int reduction) {
	Task *t = begin(c, op, (uint32_t)reduction, dtype);
	if (!t->status && (reduction < SUM || reduction > MIN || !((reduction == PROD ? multiplied : summed) >> dtype & 1)))
		t->status = fake_error(E_NOT_SUPPORT, "Hccl%s: reduction %d of data type %d", op, reduction, dtype);
	return t;
}

EXPORT int HcclAllGather(void *in, void *out, uint64_t count, int dtype, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "AllGather", 0, dtype);
	EACH(p) SENDS(p, in, 0, count, dtype), RECEIVES(p, out, p * count, count, dtype);
	return end(t, stream);
}

EXPORT int HcclAllGatherV(void *in, uint64_t count, void *out, const uint64_t *counts, const uint64_t *at, int dtype, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "AllGatherV", 0, dtype);
	EACH(p) SENDS(p, in, 0, count, dtype), RECEIVES(p, out, at[p], counts[p], dtype);
	return end(t, stream);
}

EXPORT int HcclAllReduce(void *in, void *out, uint64_t count, int dtype, int op, Comm *c, void *stream) {
	ENTER();
	Task *t = begin_reduction(c, "AllReduce", dtype, op);
	EACH(p) SENDS(p, in, 0, count, dtype);
	return reduced(t, out, count, dtype, stream);
}

EXPORT int HcclReduce(void *in, void *out, uint64_t count, int dtype, int op, uint32_t root, Comm *c, void *stream) {
	ENTER();
	Task *t = begin_reduction(c, "Reduce", dtype, op);
	SENDS(root, in, 0, count, dtype);
	return t->comm && c->rank == root ? reduced(t, out, count, dtype, stream) : end(t, stream);
}

EXPORT int HcclReduceScatter(void *in, void *out, uint64_t count, int dtype, int op, Comm *c, void *stream) {
	ENTER();
	Task *t = begin_reduction(c, "ReduceScatter", dtype, op);
	EACH(p) SENDS(p, in, p * count, count, dtype);
	return reduced(t, out, count, dtype, stream);
}

EXPORT int HcclReduceScatterV(void *in, const uint64_t *counts, const uint64_t *at, void *out, uint64_t count, int dtype, int op, Comm *c, void *stream) {
	ENTER();
	Task *t = begin_reduction(c, "ReduceScatterV", dtype, op);
	EACH(p) SENDS(p, in, at[p], counts[p], dtype);
	return reduced(t, out, count, dtype, stream);
}

EXPORT int HcclBroadcast(void *buf, uint64_t count, int dtype, uint32_t root, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "Broadcast", root, dtype);
	if (t->comm && c->rank != root)
		RECEIVES(root, buf, 0, count, dtype);
	else
		EACH(p) if (p != root) SENDS(p, buf, 0, count, dtype);
	return end(t, stream);
}

EXPORT int HcclScatter(void *in, void *out, uint64_t count, int dtype, uint32_t root, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "Scatter", root, dtype);
	if (t->comm && c->rank == root)
		EACH(p) SENDS(p, in, p * count, count, dtype);
	RECEIVES(root, out, 0, count, dtype);
	return end(t, stream);
}

EXPORT int HcclAlltoAll(const void *in, uint64_t in_count, int in_dtype, const void *out, uint64_t out_count, int dtype, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "AlltoAll", 0, in_dtype == dtype ? dtype : -1);
	EACH(p) SENDS(p, in, p * in_count, in_count, dtype), RECEIVES(p, out, p * out_count, out_count, dtype);
	return end(t, stream);
}

EXPORT int HcclAlltoAllV(const void *in, const uint64_t *in_counts, const uint64_t *in_at, int in_dtype, const void *out, const uint64_t *out_counts,
                         const uint64_t *out_at, int dtype, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "AlltoAllV", 0, in_dtype == dtype ? dtype : -1);
	EACH(p) SENDS(p, in, in_at[p], in_counts[p], dtype), RECEIVES(p, out, out_at[p], out_counts[p], dtype);
	return end(t, stream);
}

EXPORT int HcclSend(void *buf, uint64_t count, int dtype, uint32_t peer, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "Send", 0, dtype);
	SENDS(peer, buf, 0, count, dtype);
	return end(t, stream);
}

EXPORT int HcclRecv(void *buf, uint64_t count, int dtype, uint32_t peer, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "Recv", 0, dtype);
	RECEIVES(peer, buf, 0, count, dtype);
	return end(t, stream);
}

typedef struct {
	int receives;
	void *buf;
	uint64_t count;
	int dtype;
	uint32_t peer;
} BatchItem;

EXPORT int HcclBatchSendRecv(BatchItem *batch, uint32_t n, Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "BatchSendRecv", 0, n ? batch->dtype : 0);
	for (uint32_t i = 0; i < n; i++)
		add(t, !batch[i].receives, batch[i].peer, batch[i].buf, 0, batch[i].count, batch[i].dtype);
	return end(t, stream);
}

EXPORT int HcclBarrier(Comm *c, void *stream) {
	ENTER();
	Task *t = begin(c, "Barrier", 0, INT8);
	EACH(p) SENDS(p, "", 0, 0, INT8), RECEIVES(p, "", 0, 0, INT8);
	return end(t, stream);
}

// ---- communicators ----

// The root info is a random name; nobody needs to listen before the other ranks know it.
EXPORT int HcclGetRootInfo(char *info) {
	ENTER();
	uint64_t id[2];
	if (!info)
		return fake_error(E_PTR, "HcclGetRootInfo: null");
	if (getrandom(id, sizeof id, 0) != sizeof id)
		return E_SYSCALL;
	memset(info, 0, ROOT_INFO_BYTES);
	snprintf(info, 64, "fake-hccl-%016lx%016lx", id[0], id[1]);
	return OK;
}

static socklen_t address(struct sockaddr_un *a, const char *id, uint32_t rank) {
	memset(a, 0, sizeof *a);
	a->sun_family = AF_UNIX; // a first byte of 0: the abstract namespace
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "%.80s-%u", id, rank));
}

static void hang_up(Comm *c) {
	for (uint32_t p = 0; p < c->ranks; p++)
		for (int way = 0; way < 2; way++)
			if (c->fd[way][p] > 0)
				close(c->fd[way][p]);
	pthread_mutex_destroy(&c->busy);
	fake_delete(c, COMM);
}

static int meet(Comm *c, const char *id, int door) {
	struct sockaddr_un a;
	struct {
		uint32_t rank;
		int32_t device;
	} me = {c->rank, c->device}, who;
	double deadline = now() + seconds("HCCL_CONNECT_TIMEOUT", 120);
	socklen_t n = address(&a, id, c->rank);
	if (bind(door, (void *)&a, n) || listen(door, MAX_RANKS))
		return fake_error(E_TCP_CONNECT, "rank %u of this communicator exists already", c->rank);
	for (uint32_t p = 0; p < c->ranks; p++) {
		if (p == c->rank)
			continue;
		int fd = c->fd[1][p] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		for (n = address(&a, id, p); connect(fd, (void *)&a, n); usleep(1000))
			if (now() > deadline)
				return REPORT(E_TIMEOUT, "rank %u: rank %u did not come", c->rank, p);
		if (send(fd, &me, sizeof me, MSG_NOSIGNAL) != sizeof me)
			return E_TCP_CONNECT;
	}
	for (uint32_t i = 1; i < c->ranks; i++) {
		struct pollfd wait = {door, POLLIN, 0};
		double left = deadline - now();
		if (left <= 0 || poll(&wait, 1, (int)(left * 1000)) <= 0)
			return REPORT(E_TIMEOUT, "rank %u: only %u of %u other ranks came", c->rank, i - 1, c->ranks - 1);
		int fd = accept4(door, 0, 0, SOCK_CLOEXEC);
		if (fd < 0 || recv(fd, &who, sizeof who, MSG_WAITALL) != sizeof who || who.rank >= c->ranks || c->fd[0][who.rank])
			return E_TCP_CONNECT;
		c->fd[0][who.rank] = fd;
		if (who.device == c->device) // the usual mistake: no set_device before the process group is made
			return REPORT(E_PARA, "ranks %u and %u are both on device %d", c->rank, who.rank, c->device);
	}
	return OK;
}

// Every rank calls every other one and is called by it. Blocks until all have come, as the real one does.
static int join(const char *function, const char *id, uint32_t ranks, uint32_t rank, const char *name, Comm **comm) {
	if (!id || !comm)
		return fake_error(E_PTR, "%s: null", function);
	if (!ranks || ranks > MAX_RANKS || rank >= ranks || !*id)
		return fake_error(E_PARA, "%s: rank %u of %u, at most %d", function, rank, ranks, MAX_RANKS);
	if (fake_device() < 0)
		return fake_error(E_PARA, "%s: rank %u has no device", function, rank);
	Comm *c = fake_new(COMM, sizeof *c);
	c->ranks = ranks, c->rank = rank, c->device = fake_device();
	pthread_mutex_init(&c->busy, 0);
	snprintf(c->name, sizeof c->name, "%s", name && *name ? name : id);
	int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int bad = door < 0 ? E_SYSCALL : meet(c, id, door);
	if (door >= 0)
		close(door);
	if (bad) {
		hang_up(c);
		return bad;
	}
	*comm = c;
	return OK;
}

EXPORT int HcclCommInitRootInfo(uint32_t ranks, const char *info, uint32_t rank, Comm **comm) {
	ENTER();
	return join(__func__, info, ranks, rank, 0, comm);
}

EXPORT int HcclCommInitRootInfoConfig(uint32_t ranks, const char *info, uint32_t rank, const char *config, Comm **comm) {
	ENTER();
	return join(__func__, info, ranks, rank, config ? config + CONFIG_NAME_AT : 0, comm);
}

// torch_npu 2.8 binds it when it is loaded.
EXPORT int HcclCommInitAll(uint32_t devices, int32_t *device, Comm **comms) {
	ENTER();
	(void)devices, (void)device, (void)comms;
	fake_violation("HcclCommInitAll is not part of this fake");
	return E_NOT_SUPPORT;
}

EXPORT uint32_t HcclGetCommConfigCapability(void) {
	return 3; // of the configuration: buffer size, determinism, name
}

EXPORT int HcclCommDestroy(Comm *c) {
	ENTER();
	if (!fake_is(c, COMM))
		return E_PTR;
	if (__atomic_load_n(&c->queued, __ATOMIC_SEQ_CST) && !c->error)
		fake_violation("HcclCommDestroy: %s has unfinished operations", c->name);
	while (__atomic_load_n(&c->queued, __ATOMIC_SEQ_CST))
		usleep(100);
	hang_up(c);
	return OK;
}

EXPORT int HcclGetCommAsyncError(Comm *c, int *error) {
	ENTER();
	if (!fake_is(c, COMM) || !error)
		return E_PTR;
	*error = c->error;
	return OK;
}

EXPORT int HcclGetCommName(Comm *c, char *name) {
	ENTER();
	if (!fake_is(c, COMM) || !name)
		return E_PTR;
	memcpy(name, c->name, NAME_BYTES);
	return OK;
}

EXPORT int HcclGetRankSize(Comm *c, uint32_t *n) {
	ENTER();
	if (!fake_is(c, COMM) || !n)
		return E_PTR;
	*n = c->ranks;
	return OK;
}

EXPORT int HcclGetRankId(Comm *c, uint32_t *rank) {
	ENTER();
	if (!fake_is(c, COMM) || !rank)
		return E_PTR;
	*rank = c->rank;
	return OK;
}

EXPORT const char *HcclGetErrorString(int error) {
	switch (error) {
	case OK: return "no error";
	case E_PARA: return "parameter error";
	case E_PTR: return "null or dead pointer";
	case E_NOT_SUPPORT: return "not supported";
	case E_TIMEOUT: return "timeout";
	case E_TCP_TRANSFER: return "a rank has left";
	}
	return "error";
}
