// Accesses to memory that nothing orders. Work on one stream is ordered; between streams and with the host only events and
// synchronizations order anything. Each access is compared, when it is called for and whatever the timing, with those before it that are
// not known to be over by then: what overlaps one of them, either of the two writing, is a violation.
//
// The host counts as one thread: how its threads order themselves is not seen here.
#include "runtime.h"

#include <stdio.h>
#include <string.h>

enum { KEPT = 4096 };

typedef struct {
	Span span;
	int slot;
	uint64_t number;
	char name[48];
} Access;

Clock host_clock;
static Access history[KEPT];
static int known;

void clock_join(Clock *a, const Clock *b) {
	for (int i = 0; i < MAX_STREAMS; i++)
		if (a->of[i] < b->of[i])
			a->of[i] = b->of[i];
}

// Compares and, with a slot, remembers.
static void check(const Clock *over, int slot, uint64_t number, const char *name, Span span) {
	int kept = 0, same = -1;
	if (!span.bytes)
		return;
	for (int i = 0; i < known; i++) {
		const Access *a = &history[i];
		if (a->number <= host_clock.of[a->slot])
			continue; // over for everybody
		if (a->slot != slot && a->number > over->of[a->slot] && (a->span.write || span.write) && a->span.at < span.at + span.bytes &&
		    span.at < a->span.at + a->span.bytes)
			fake_violation("%s %s %zu bytes at %p, which %s %s; nothing orders the two", name, span.write ? "writes" : "reads",
			               span.bytes, (void *)span.at, a->name, a->span.write ? "writes" : "reads");
		if (a->slot == slot && a->span.at == span.at && a->span.bytes == span.bytes && a->span.write == span.write)
			same = kept;
		if (kept != i)
			history[kept] = *a;
		kept++;
	}
	known = kept;
	if (slot < 0)
		return;
	if (same < 0 && known == KEPT) {
		memmove(history, history + 1, (KEPT - 1) * sizeof *history);
		known--;
	}
	Access *a = &history[same < 0 ? known++ : same];
	a->span = span, a->slot = slot, a->number = number;
	snprintf(a->name, sizeof a->name, "%s", name);
}

void race_work(Clock *stream, int slot, const char *name, const Span *spans, int n) {
	clock_join(stream, &host_clock);
	stream->of[slot]++;
	for (int i = 0; i < n; i++)
		check(stream, slot, stream->of[slot], name, spans[i]);
}

void race_host(const char *name, Span span) {
	check(&host_clock, -1, 0, name, span);
}
