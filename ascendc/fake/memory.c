// Device memory. Each device has one range of addresses that the client sees and that no process may touch (PROT_NONE), and a second
// mapping of the same pages by which the fakes work. So host code that dereferences a device pointer dies at that instruction, and every
// access of the fakes goes through fake_reach, which checks it.
#define _GNU_SOURCE
#include "fake.h"
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGN = 512, PAD = 32 };
static const size_t DEVICE_BYTES = (size_t)16 << 30;

typedef struct {
	uintptr_t at;
	size_t asked, bytes; // bytes: rounded up and padded, as the runtime does
} Block;

static struct {
	uintptr_t base;   // as the client knows it
	char *own;        // as the fakes reach it
	Block *blocks;    // by address
	int count, room;
	uintptr_t next;   // where to look for a free place first: freed addresses come back as late as possible
	size_t used;
} devices[DEVICES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The lock is held.
static int open_device(int d) {
	if (devices[d].base)
		return 1;
	int fd = memfd_create("fake-cann", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)DEVICE_BYTES))
		return 0;
	void *client = mmap(0, DEVICE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	void *own = mmap(0, DEVICE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	close(fd);
	if (client == MAP_FAILED || own == MAP_FAILED)
		return 0;
	devices[d].base = devices[d].next = (uintptr_t)client;
	devices[d].own = own;
	return 1;
}

// The index of the last block at or before an address, -1: none. The lock is held.
static int before(int d, uintptr_t at) {
	int low = -1, high = devices[d].count;
	while (high - low > 1) {
		int middle = low + (high - low) / 2;
		*(devices[d].blocks[middle].at <= at ? &low : &high) = middle;
	}
	return low;
}

int memory_take(int d, size_t n, void **p) {
	size_t bytes = (n + 31) / 32 * 32 + PAD;
	bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
	pthread_mutex_lock(&lock);
	int place = -1; // the new block's index
	uintptr_t at = 0;
	if (n <= DEVICE_BYTES && open_device(d)) {
		for (int round = 0; round < 2 && place < 0; round++) {
			uintptr_t from = round ? devices[d].base : devices[d].next;
			for (int i = before(d, from); i < devices[d].count; i++) {
				at = i < 0 ? devices[d].base : devices[d].blocks[i].at + devices[d].blocks[i].bytes;
				at = at < from ? from : at;
				uintptr_t end = i + 1 < devices[d].count ? devices[d].blocks[i + 1].at : devices[d].base + DEVICE_BYTES;
				if (end >= at && end - at >= bytes) {
					place = i + 1;
					break;
				}
			}
		}
	}
	if (place >= 0) {
		if (devices[d].count == devices[d].room) {
			devices[d].room = devices[d].room ? 2 * devices[d].room : 64;
			devices[d].blocks = realloc(devices[d].blocks, (size_t)devices[d].room * sizeof(Block));
		}
		Block *b = devices[d].blocks + place;
		memmove(b + 1, b, (size_t)(devices[d].count - place) * sizeof *b);
		*b = (Block){at, n, bytes};
		devices[d].count++, devices[d].used += bytes, devices[d].next = at + bytes;
	}
	pthread_mutex_unlock(&lock);
	if (place < 0)
		return fake_error(RT_MEMORY, "device %d is out of memory: %zu bytes were asked for", d, n);
	memset(devices[d].own + (at - devices[d].base), 0xff, bytes); // NaN in every float type
	fake_count(DEVICE_MEMORY, 1);
	*p = (void *)at;
	return OK;
}

// The block that starts here, or 0 bytes.
Span memory_block(const void *p) {
	int d = fake_device_of(p);
	Span s = {(uintptr_t)p, 0, 1};
	if (d < 0)
		return s;
	pthread_mutex_lock(&lock);
	int i = before(d, s.at);
	if (i >= 0 && devices[d].blocks[i].at == s.at)
		s.bytes = devices[d].blocks[i].bytes;
	pthread_mutex_unlock(&lock);
	return s;
}

int memory_give(void *p) {
	int d = fake_device_of(p);
	pthread_mutex_lock(&lock);
	int i = d < 0 ? -1 : before(d, (uintptr_t)p);
	int found = i >= 0 && devices[d].blocks[i].at == (uintptr_t)p;
	if (found) {
		Block b = devices[d].blocks[i];
		devices[d].count--, devices[d].used -= b.bytes;
		memmove(devices[d].blocks + i, devices[d].blocks + i + 1, (size_t)(devices[d].count - i) * sizeof b);
		size_t page = 4096, low = (b.at - devices[d].base + page - 1) / page * page, high = (b.at - devices[d].base + b.bytes) / page * page;
		if (high > low)
			madvise(devices[d].own + low, high - low, MADV_REMOVE);
	}
	pthread_mutex_unlock(&lock);
	if (found) {
		fake_count(DEVICE_MEMORY, -1);
		return OK;
	}
	fake_violation("aclrtFree: %p is not the start of a live allocation", p);
	return RT_PARAM;
}

void memory_info(int d, size_t *left, size_t *total) {
	pthread_mutex_lock(&lock);
	*total = DEVICE_BYTES, *left = DEVICE_BYTES - devices[d].used;
	pthread_mutex_unlock(&lock);
}

int fake_device_of(const void *p) {
	for (int d = 0; d < DEVICES; d++)
		if (devices[d].base && (uintptr_t)p >= devices[d].base && (uintptr_t)p < devices[d].base + DEVICE_BYTES)
			return d;
	return -1;
}

void *fake_reach(const void *p, size_t n, int device) {
	int d = fake_device_of(p);
	uintptr_t at = (uintptr_t)p;
	if (d < 0) {
		fake_error(OK, "%p is not device memory", p);
		return 0;
	}
	if (d != device) {
		fake_error(OK, "%p is memory of device %d, not of device %d", p, d, device);
		return 0;
	}
	pthread_mutex_lock(&lock);
	int i = before(d, at);
	Block b = i < 0 ? (Block){0} : devices[d].blocks[i];
	pthread_mutex_unlock(&lock);
	if (at >= b.at + b.bytes) {
		fake_error(OK, "%p lies in no live allocation", p);
		return 0;
	}
	if (n > b.at + b.asked - at) {
		fake_error(OK, "%zu bytes at %p reach beyond their allocation of %zu bytes at %p", n, p, b.asked, (void *)b.at);
		return 0;
	}
	return devices[d].own + (at - devices[d].base);
}
