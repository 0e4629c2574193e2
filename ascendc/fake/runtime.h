// What the files of libascendcl share among themselves.
#ifndef FAKE_RUNTIME_H
#define FAKE_RUNTIME_H

#include "fake.h"

// memory.c
int memory_take(int device, size_t n, void **p);
int memory_give(void *p);
Span memory_block(const void *p);
void memory_info(int device, size_t *left, size_t *total);

// races.c. A clock says how much of each stream's work is known to be over; all calls are made under one lock, the runtime's.
typedef struct {
	uint64_t of[MAX_STREAMS];
} Clock;

void clock_join(Clock *a, const Clock *b);
extern Clock host_clock; // what the host has waited for
void race_work(Clock *stream, int slot, const char *name, const Span *spans, int n); // the stream's next piece of work
void race_host(const char *name, Span span);                                        // the host itself, now

#endif
