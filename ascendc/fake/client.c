// What a client needs beyond the runtime proper: settings without effect here, profiling hooks, and functions that the released torch_npu
// binds when it is loaded and does not call.
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if CANN >= 900
#define RELEASE "9.0.0"
#else
#define RELEASE "8.3.RC1"
#endif

// A text of 128 bytes, then its parts.
EXPORT int aclsysGetCANNVersion(int package, char *version) {
	ENTER();
	NEED(version);
	(void)package;
	memset(version, 0, 512);
	strcpy(version, RELEASE);
	return OK;
}

EXPORT int aclsysGetVersionStr(char *package, char *version) {
	ENTER();
	NEED(version);
	(void)package;
	strcpy(version, RELEASE);
	return OK;
}

EXPORT void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
	(void)level, (void)function, (void)file, (void)line, (void)format;
}

// Settings are taken and change nothing.
#define SETTING(name, ...)                                                                                                                   \
	EXPORT int name(__VA_ARGS__) {                                                                                                           \
		ENTER();                                                                                                                             \
		return OK;                                                                                                                           \
	}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
SETTING(aclmdlInitDump, void)
SETTING(aclmdlFinalizeDump, void)
SETTING(aclmdlSetDump, const char *config)
SETTING(aclSetCompileopt, int option, const char *value)
SETTING(aclrtSetDeviceSatMode, int mode)
SETTING(aclrtSetOpExecuteTimeOut, uint32_t seconds)
SETTING(aclrtSetOpWaitTimeout, uint32_t seconds)
SETTING(aclrtSetSysParamOpt, int option, int64_t value)
SETTING(aclrtCtxSetSysParamOpt, int option, int64_t value)
SETTING(MsprofRegisterCallback, uint32_t id, void *function)
SETTING(MsprofReportApi, uint32_t aging, void *api)
SETTING(MsprofReportCompactInfo, uint32_t aging, void *data, uint32_t n)
SETTING(MsprofReportAdditionalInfo, uint32_t aging, void *data, uint32_t n)
#pragma GCC diagnostic pop

EXPORT uint64_t MsprofSysCycleTime(void) {
	return 0;
}

EXPORT uint64_t MsprofGetHashId(const char *text, size_t n) {
	(void)text, (void)n;
	return 0;
}

EXPORT int aclrtGetDeviceSatMode(int *mode) {
	ENTER();
	NEED(mode);
	return *mode = 1, OK;
}

EXPORT int aclrtGetSysParamOpt(int option, int64_t *value) {
	ENTER();
	NEED(value);
	(void)option;
	return *value = 0, OK;
}

EXPORT int aclrtCtxGetSysParamOpt(int option, int64_t *value) {
	ENTER();
	NEED(value);
	(void)option;
	return *value = 0, OK;
}

// Bound at load time. A call is refused, and is a violation: a client that ignores the status must not pass.
#define ABSENT(name)                                                                                                                         \
	EXPORT int name(void) {                                                                                                                  \
		fake_violation(#name " is not part of this fake");                                                                                   \
		return fake_error(RT_UNSUPPORTED, #name " is not part of this fake");                                                                \
	}
ABSENT(aclCreateDataBuffer)
ABSENT(aclCreateTensorDesc)
ABSENT(aclDestroyDataBuffer)
ABSENT(aclDestroyTensorDesc)
ABSENT(aclGetTensorDescDimV2)
ABSENT(aclGetTensorDescFormat)
ABSENT(aclGetTensorDescNumDims)
ABSENT(aclGetTensorDescType)
ABSENT(aclSetTensorDescName)
ABSENT(aclSetTensorFormat)
ABSENT(aclSetTensorPlaceMent)
ABSENT(aclSetTensorShape)
ABSENT(aclopCompileAndExecute)
ABSENT(aclopCreateAttr)
ABSENT(aclopDestroyAttr)
ABSENT(aclopSetAttrBool)
ABSENT(aclopSetAttrDataType)
ABSENT(aclopSetAttrFloat)
ABSENT(aclopSetAttrInt)
ABSENT(aclopSetAttrListBool)
ABSENT(aclopSetAttrListFloat)
ABSENT(aclopSetAttrListInt)
ABSENT(aclopSetAttrListListInt)
ABSENT(aclopSetAttrString)
ABSENT(aclrtBinaryGetFunction)
ABSENT(aclrtBinaryLoadFromData)
ABSENT(aclrtDeviceEnablePeerAccess)
ABSENT(aclrtFreePhysical)
ABSENT(aclrtGetFunctionAddr)
ABSENT(aclrtMallocPhysical)
ABSENT(aclrtMapMem)
ABSENT(aclrtMemExportToShareableHandle)
ABSENT(aclrtMemImportFromShareableHandle)
ABSENT(aclrtMemSetPidToShareableHandle)
ABSENT(aclrtProcessReport)
ABSENT(aclrtReleaseMemAddress)
ABSENT(aclrtReserveMemAddress)
ABSENT(aclrtUnmapMem)
ABSENT(rtDevBinaryRegister)
ABSENT(rtFunctionRegister)
ABSENT(rtGetC2cCtrlAddr)
ABSENT(rtKernelLaunch)
