// libacl_rtc, the compiler at run time: its handles and rules. There is no compiler behind it: a program that is compiled gets an error and
// a log that says so.
#include <string.h>

#include "fake.h"

typedef struct {
	Handle handle;
	int compiled;
} Program;

static const char text[] = "this fake has no compiler for device code";

#define PROGRAM_ARGUMENT(program)                                                                                                            \
	if (!fake_is(program, PROGRAM))                                                                                                          \
	return RT_HANDLE

EXPORT int aclrtcCreateProg(void **program, const char *source, const char *name, int headers, const char **texts, const char **names) {
	ENTER();
	NEED(program && source);
	(void)name;
	if (headers < 0 || (headers && !(texts && names)))
		return fake_error(RT_PARAM, "aclrtcCreateProg: %d headers", headers);
	return *program = fake_new(PROGRAM, sizeof(Program)), OK;
}

EXPORT int aclrtcCompileProg(void *program, int options, const char **option) {
	ENTER();
	PROGRAM_ARGUMENT(program);
	int target = 0;
	for (int i = 0; i < options; i++) {
		NEED(option && option[i]);
		target |= !strncmp(option[i], "--npu-arch=", 11);
	}
	if (!target)
		return fake_error(RT_PARAM, "aclrtcCompileProg: no option --npu-arch=");
	((Program *)program)->compiled = 1;
	return fake_error(RT_INTERNAL, "aclrtcCompileProg: %s", text);
}

EXPORT int aclrtcGetCompileLogSize(void *program, size_t *n) {
	ENTER();
	NEED(n);
	PROGRAM_ARGUMENT(program);
	return *n = ((Program *)program)->compiled ? sizeof text : 0, OK;
}

EXPORT int aclrtcGetCompileLog(void *program, char *log) {
	ENTER();
	NEED(log);
	PROGRAM_ARGUMENT(program);
	if (((Program *)program)->compiled)
		memcpy(log, text, sizeof text);
	return OK;
}

EXPORT int aclrtcGetBinDataSize(void *program, size_t *n) {
	ENTER();
	NEED(n);
	PROGRAM_ARGUMENT(program);
	return fake_error(RT_INTERNAL, "aclrtcGetBinDataSize: the program was not compiled");
}

EXPORT int aclrtcGetBinData(void *program, char *data) {
	ENTER();
	NEED(data);
	PROGRAM_ARGUMENT(program);
	return fake_error(RT_INTERNAL, "aclrtcGetBinData: the program was not compiled");
}

EXPORT int aclrtcDestroyProg(void **program) {
	ENTER();
	NEED(program);
	int status = fake_delete(*program, PROGRAM);
	*program = 0;
	return status;
}
