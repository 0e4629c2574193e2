// What lies between the public entries, all C, and the one Go function behind them.
#ifndef GDNC_ABI_H
#define GDNC_ABI_H
#include <stddef.h>
#include <stdint.h>

extern const char *const gdnc_ops[]; // names by position in core.Ops, then 0

// gdnCall's op is a position in core.Ops, or one of these with args as said.
enum {
	GDNC_START = -1,       // nothing: returns when the Go runtime runs
	GDNC_GET_THREADS = -2, // int32_t * to write
	GDNC_SET_THREADS = -3, // int32_t * to read
	GDNC_ISA = -4,         // gdnc_text * to write
	GDNC_BUILD_INFO = -5,  // gdnc_text * to write
	GDNC_TRIM = -6,        // nothing
	GDNC_ASCEND_INFO = -7, // nothing: the answer is the thread's path
};

#ifdef __clang__
#define GDNC_COMPILER __VERSION__ // begins with the name
#else
#define GDNC_COMPILER "gcc " __VERSION__
#endif

typedef struct {
	char text[256];
} gdnc_text;

// Clears the error text, then goes to Go, unless this is a forked child. run 0 stops after the checks.
int32_t gdnc_enter(int32_t op, const void *args, int32_t run);

// What this thread has set for its calls on devices.
typedef struct {
	void *stream;
	void *(*allocate)(void *user, int32_t device, size_t bytes, void *stream);
	void (*release)(void *user, int32_t device, void *memory, size_t bytes, void *stream);
	void *user;
} gdnc_caller;

gdnc_caller gdnc_get_caller(void);

// Keeps a copy of the text for gdn_last_path on this thread.
void gdnc_set_path(const char *text, size_t length);

// Keeps a copy of the text, which need not end in 0, for gdn_last_error on this thread.
void gdnc_set_error(const char *text, size_t length);
#endif
