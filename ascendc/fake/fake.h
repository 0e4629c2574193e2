// What the fake CANN libraries share. They are libraries of our own with the names of the real ones, on host memory, so that the path to
// an NPU can be tested where none is. Interfaces are declared here from their documented facts; see README.md.
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

// The release that is imitated: 900 is CANN 9.0, 803 is CANN 8.3. It decides which symbols exist.
#ifndef CANN
#define CANN 900
#endif

#define EXPORT __attribute__((visibility("default")))
#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

// Statuses of the runtime and of the operators.
enum {
	OK = 0,
	BAD_PARAM = 100000,
	NOT_INITIALISED = 100001,
	REPEAT_INIT = 100002,
	REPEAT_FINALIZE = 100037,
	RT_PARAM = 107000,
	RT_DEVICE = 107001,
	RT_NO_CONTEXT = 107002,
	RT_STREAM_CONTEXT = 107003,
	RT_HANDLE = 107017,
	RT_TIMEOUT = 107019,
	RT_UNSUPPORTED = 207000,
	RT_MEMORY = 207001,
	RT_INTERNAL = 500000,
	RT_AICORE = 507015,
	NN_NULL = 161001,
	NN_ARGUMENT = 161002,
	NN_RUNTIME = 361001,
	NN_INNER = 561000,
	NN_TILING = 561002,
	NN_NO_KERNEL = 561003,
	NN_NO_EXECUTOR = 561101,
};

enum { DEVICES = 8, MAX_STREAMS = 512 };

// ---- control.c: entries, handles, errors, scripted failures ----

typedef enum { DEVICE_MEMORY, HOST_MEMORY, CONTEXT, STREAM, EVENT, TENSOR, SCALAR, INT_ARRAY, TENSOR_LIST, EXECUTOR, COMM, PROGRAM, KINDS } Kind;

// Every handle begins with this. Destroyed handles stay readable for a while, so that their second use is recognised.
typedef struct {
	uint64_t magic;
	Kind kind;
} Handle;

EXPORT void *fake_new(Kind kind, size_t bytes);                        // zeroed, registered
EXPORT int fake_is(const void *handle, Kind kind);                     // alive and of that kind; else the error text says what it is
EXPORT int fake_delete(void *handle, Kind kind);                       // 0, or like fake_is and a violation
EXPORT void fake_count(Kind kind, int64_t by);                         // for what is no handle: memory
EXPORT int fake_error(int status, const char *format, ...) __attribute__((format(printf, 2, 3))); // sets the thread's text, returns status
EXPORT void fake_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));        // what real hardware would not notice
EXPORT const char *aclGetRecentErrMsg(void);                           // the thread's text, once
EXPORT int fake_enter(const char *function);                           // counts the call; not 0: it is to fail with that status

EXPORT int64_t fake_began(void);
EXPORT void fake_left(const int64_t *began); // adds to the time that callers have spent in here

// The first line of an entry.
#define TIMED() __attribute__((cleanup(fake_left), unused)) const int64_t began_ = fake_began()
#define ENTER()                                                                                                                              \
	TIMED();                                                                                                                                 \
	const int scripted_ = fake_enter(__func__);                                                                                              \
	if (scripted_)                                                                                                                           \
	return scripted_
#define NEED(pointer)                                                                                                                        \
	do {                                                                                                                                     \
		if (!(pointer))                                                                                                                      \
			return fake_error(RT_PARAM, "%s: %s is null", __func__, #pointer);                                                               \
	} while (0)

// ---- memory.c: device memory lies at addresses that the host cannot touch; the fakes reach it through a second mapping ----

typedef struct {
	uintptr_t at; // as the client knows it
	size_t bytes;
	int write;
} Span;

// Where the fakes find n bytes of a client's device memory. 0 with an error text when they are not inside one allocation of this device.
EXPORT void *fake_reach(const void *p, size_t n, int device);
EXPORT int fake_device_of(const void *p); // -1: not device memory

// ---- runtime.c ----

// Puts work on a stream (0: the default stream of the thread's context). The spans are the device memory that it reads and writes.
// run's status, if not 0, comes back from the stream's next synchronization. drop, if any, frees the argument.
typedef struct {
	const char *name; // for messages and scripted failures: "run:" and the name; a literal, or in arg
	int (*run)(void *arg);
	void (*drop)(void *arg);
	void *arg;
	const Span *spans;
	int nspans;
} Work;
EXPORT int fake_enqueue(void *stream, const Work *work);
EXPORT int fake_device(void); // of the calling thread, -1: none
EXPORT const char *fake_soc(void);

#endif
