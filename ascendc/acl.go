// Package ascendc runs the operators on Ascend NPUs, through whatever CANN and operator libraries the machine has. Nothing of CANN is
// linked: libraries are opened at the first call that carries a tensor on a device, and each function is looked up by its name.
package ascendc

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -fvisibility=hidden
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "trampoline.h"
*/
import "C"

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"libgdn/core"
)

// Statuses of CANN that are told apart here.
const (
	aclOK            = 0
	aclRepeatedInit  = 100002
	aclNoMemory      = 207001
	aclDeviceNoSpace = 207018
)

// CANN's numbers of dtypes, the plain format, kinds of copies, and where an address lies.
const (
	aclFloat  = 0
	aclHalf   = 1
	aclInt32  = 3
	aclInt64  = 9
	aclDouble = 11
	aclBF16   = 27

	aclFormatND = 2

	hostToDevice = 1
	deviceToHost = 2

	onDevice = 1
)

// acl is CANN's runtime in this process: the address of each function, 0 where this release has none.
type acl struct {
	version string // of CANN, "unknown" where it does not say
	soc     string // "Ascend910B2"

	init, getRecentErrMsg, getSocName                                      uintptr
	setDevice, getDevice, getCurrentContext, setCurrentContext             uintptr
	malloc, free, mallocHost, freeHost                                     uintptr
	memcpy, memcpyAsync, memsetAsync, synchronizeStream, synchronizeDevice uintptr
	pointerGetAttributes                                                   uintptr // optional
	createTensor, destroyTensor, createIntArray, destroyIntArray           uintptr
	createScalar, destroyScalar                                            uintptr
	destroyExecutor                                                        uintptr // optional

	stock    []uintptr // handles of the libraries with CANN's own operators
	stockErr error     // why there may be none
	fla      *flaNPU   // nil where it is not installed

	ops sync.Map // *opName -> *vendorOp
}

// home lists where CANN may lie, without the part below lib64.
func homes() []string {
	list := []string{}
	for _, name := range []string{"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"} {
		if dir := getenv(name); dir != "" {
			list = append(list, dir)
		}
	}
	list = append(list, "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
	if home := getenv("HOME"); home != "" {
		list = append(list, filepath.Join(home, "Ascend/ascend-toolkit/latest"), filepath.Join(home, "Ascend/cann"))
	}
	return list
}

// open opens the first of the libraries that is there, by its bare name and then below the homes. Where torch_npu is in the process, the
// bare name finds what it has loaded. Nothing is ever closed: others live on these libraries too.
func open(names ...string) (uintptr, error) {
	var tried []string
	for _, name := range names {
		handle, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err == nil {
			return handle, nil
		}
		tried = append(tried, err.Error())
	}
	for _, home := range homes() {
		for _, name := range names {
			path := filepath.Join(home, "lib64", name)
			if !exists(path) {
				continue
			}
			handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
			if err == nil {
				return handle, nil
			}
			tried = append(tried, err.Error())
		}
	}
	return 0, fmt.Errorf("%s", strings.Join(tried, "; "))
}

// symbol looks a function up in libraries, in their order; 0 where none has it.
func symbol(name string, handles ...uintptr) uintptr {
	for _, h := range handles {
		if h == 0 {
			continue
		}
		if f, err := purego.Dlsym(h, name); err == nil {
			return f
		}
	}
	return 0
}

// load opens CANN. The error is a whole sentence without the operator.
func load() (*acl, error) {
	rt, err := open("libascendcl.so", "libacl_rt.so")
	if err != nil {
		return nil, fmt.Errorf("CANN's runtime could not be loaded (%v); load CANN's set_env.sh before the process starts", err)
	}
	base, errBase := open("libnnopbase.so")
	a := &acl{version: "unknown"}
	var missing []string
	for _, s := range []struct {
		to       *uintptr
		name     string
		optional bool
	}{
		{&a.init, "aclInit", false},
		{&a.getRecentErrMsg, "aclGetRecentErrMsg", false},
		{&a.getSocName, "aclrtGetSocName", false},
		{&a.setDevice, "aclrtSetDevice", false},
		{&a.getDevice, "aclrtGetDevice", false},
		{&a.getCurrentContext, "aclrtGetCurrentContext", false},
		{&a.setCurrentContext, "aclrtSetCurrentContext", false},
		{&a.malloc, "aclrtMalloc", false},
		{&a.free, "aclrtFree", false},
		{&a.mallocHost, "aclrtMallocHost", false},
		{&a.freeHost, "aclrtFreeHost", false},
		{&a.memcpy, "aclrtMemcpy", false},
		{&a.memcpyAsync, "aclrtMemcpyAsync", false},
		{&a.memsetAsync, "aclrtMemsetAsync", false},
		{&a.synchronizeStream, "aclrtSynchronizeStream", false},
		{&a.synchronizeDevice, "aclrtSynchronizeDevice", false},
		{&a.pointerGetAttributes, "aclrtPointerGetAttributes", true},
		{&a.createTensor, "aclCreateTensor", false},
		{&a.destroyTensor, "aclDestroyTensor", false},
		{&a.createIntArray, "aclCreateIntArray", false},
		{&a.destroyIntArray, "aclDestroyIntArray", false},
		{&a.createScalar, "aclCreateScalar", false},
		{&a.destroyScalar, "aclDestroyScalar", false},
		{&a.destroyExecutor, "aclDestroyAclOpExecutor", true},
	} {
		if *s.to = symbol(s.name, rt, base); *s.to == 0 && !s.optional {
			missing = append(missing, s.name)
		}
	}
	a.readVersion(rt)
	if len(missing) > 0 {
		why := ""
		if errBase != nil {
			why = fmt.Sprintf(" (libnnopbase.so could not be loaded: %v)", errBase)
		}
		return nil, fmt.Errorf("CANN %s lacks %s, which this library needs%s", a.version, strings.Join(missing, ", "), why)
	}
	if err := a.start(); err != nil {
		return nil, err
	}
	for _, name := range []string{"libopapi_math.so", "libopapi.so"} {
		if h, err := open(name); err == nil {
			a.stock = append(a.stock, h)
		} else {
			a.stockErr = err
		}
	}
	a.fla = findFLA(a)
	return a, nil
}

// start initialises CANN where nobody has, and reads the name of the chip. A thread with a context shows that somebody has.
func (a *acl) start() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	context := make([]uintptr, 1)
	if r, _, _ := purego.SyscallN(a.getCurrentContext, uintptr(unsafe.Pointer(&context[0]))); int32(r) != aclOK || context[0] == 0 {
		if r, _, _ := purego.SyscallN(a.init, 0); int32(r) != aclOK && int32(r) != aclRepeatedInit {
			return a.failure("aclInit", int32(r))
		}
	}
	a.soc = "an unknown chip"
	if p, _, _ := purego.SyscallN(a.getSocName); p != 0 {
		a.soc = goString(p)
	}
	return nil
}

// readVersion asks CANN for its release: by the call of CANN 8.3 and later, else by that of the runtime.
func (a *acl) readVersion(rt uintptr) {
	text := make([]byte, 1024)
	if f := symbol("aclsysGetCANNVersion", rt); f != 0 {
		const wholePackage = 0
		if r, _, _ := purego.SyscallN(f, wholePackage, uintptr(unsafe.Pointer(&text[0]))); int32(r) == aclOK {
			if s := cut(text[:128]); s != "" {
				a.version = s
				return
			}
		}
	}
	if f := symbol("aclrtGetVersion", rt); f != 0 {
		v := make([]int32, 3)
		r, _, _ := purego.SyscallN(f, uintptr(unsafe.Pointer(&v[0])), uintptr(unsafe.Pointer(&v[1])), uintptr(unsafe.Pointer(&v[2])))
		if int32(r) == aclOK {
			a.version = fmt.Sprintf("with runtime %d.%d.%d", v[0], v[1], v[2])
		}
	}
}

func cut(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

const noStatus = -1 // of functions that return a handle, and NULL when they fail

// failure turns a status of CANN into an error with CANN's own text, which belongs to this OS thread and is gone once read.
func (a *acl) failure(name string, status int32) error {
	kind := core.DeviceFailure
	if status == aclNoMemory || status == aclDeviceNoSpace {
		kind = core.OutOfMemory
	}
	text := "no text"
	if p, _, _ := purego.SyscallN(a.getRecentErrMsg); p != 0 {
		if s := strings.TrimSpace(goString(p)); s != "" {
			text = s
		}
	}
	what := ""
	if status != noStatus {
		what = fmt.Sprintf(" with status %d", status)
		if m := aclStatuses[status]; m != "" {
			what += ", " + m
		}
	}
	return &core.Error{Status: kind, Msg: fmt.Sprintf("%s failed%s: %s", name, what, text)}
}

// aclStatuses are the codes that users meet.
var aclStatuses = map[int32]string{100000: "invalid parameter", 100001: "not initialised", 107000: "bad parameter", 107001: "bad device id",
	107002: "no current context on this thread", 107003: "the stream does not belong to this context", 107017: "invalid handle",
	107019: "the wait timed out", 207000: "not supported", 207001: "device memory exhausted", 207018: "device out of memory",
	500000: "internal error", 507000: "internal error of the runtime", 507014: "time-out of an AI core", 507015: "exception of an AI core",
	507035: "exception of a vector core", 507899: "internal error of the driver", 161001: "null argument", 161002: "bad argument",
	361001: "runtime error", 561000: "inner error, as without ASCEND_CUSTOM_OPP_PATH or with tiling libraries of another version",
	561002: "tiling error", 561003: "no kernel for this device or these dtypes", 561101: "no executor", 561103: "null inside"}

// goString copies a C string.
func goString(p uintptr) string { return C.GoString((*C.char)(pointer(p))) }

// pointer is an address of C memory as Go's pointer type.
func pointer(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

// getenv reads the C environment: that of Go is a copy from when the library was loaded.
func getenv(name string) string {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return C.GoString(C.getenv(c))
}

func setenv(name, value string) {
	n, v := C.CString(name), C.CString(value)
	defer C.free(unsafe.Pointer(n))
	defer C.free(unsafe.Pointer(v))
	C.setenv(n, v, 1)
}
