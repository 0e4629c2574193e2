// Command capi is libgdn.so: C entries in front of one Go function, and the list of backends. It is built with -buildmode=c-shared.
package main

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -fvisibility=default -I${SRCDIR}/../include
#cgo LDFLAGS: -lpthread -ldl
#include "abi.h"
*/
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"

	"libgdn/ascendc"
	"libgdn/core"
	_ "libgdn/include" // the C files include these headers
	"libgdn/kernels/cpu"
)

// backends are asked in this order; each serves a device.
var (
	ascend   = ascendc.New(caller)
	backends = []core.Backend{cpu.New(), ascend}
)

// caller is what this thread has set for its calls on devices.
func caller() ascendc.Caller {
	c := C.gdnc_get_caller()
	return ascendc.Caller{Stream: uintptr(c.stream), Allocate: uintptr(unsafe.Pointer(c.allocate)), Release: uintptr(unsafe.Pointer(c.release)),
		User: uintptr(c.user)}
}

// gdnCall is the only way from C into Go. It stays on the caller's thread, so the error text it leaves is that thread's.
//
//export gdnCall
func gdnCall(op C.int32_t, args unsafe.Pointer, run C.int32_t) C.int32_t {
	path, err := enter(backends, int(op), args, run != 0)
	if err == nil {
		if path != "" {
			C.gdnc_set_path((*C.char)(unsafe.Pointer(unsafe.StringData(path))), C.size_t(len(path)))
		}
		return C.int32_t(core.OK)
	}
	text := err.Error()
	C.gdnc_set_error((*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.size_t(len(text)))
	return C.int32_t(core.StatusOf(err))
}

func main() {} // c-shared wants one and never calls it

// enter turns a panic into an error: one that left here would end the host process.
func enter(backends []core.Backend, op int, args unsafe.Pointer, run bool) (path string, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = core.Errorf(core.Internal, "%s: internal error, please report it: %v (at %s)", symbol(op), r, origin())
		}
	}()
	if op >= 0 {
		return core.Dispatch(backends, core.Ops[op], args, run)
	}
	if op == C.GDNC_ASCEND_INFO {
		return ascend.Info(), nil
	}
	return "", service(op, args)
}

func symbol(op int) string {
	if op >= 0 && op < len(core.Ops) {
		return "gdn_" + core.Ops[op].Name
	}
	return "libgdn"
}

// origin is the place that panicked: the first caller outside the runtime, seen from the deferred function.
func origin() string {
	var pcs [16]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs[:])])
	for {
		f, more := frames.Next()
		if !more || len(f.Function) < 8 || f.Function[:8] != "runtime." {
			return fmt.Sprintf("%s:%d", f.Function, f.Line)
		}
	}
}

// service answers the calls that are no operators.
func service(op int, args unsafe.Pointer) error {
	switch op {
	case C.GDNC_START:
	case C.GDNC_GET_THREADS:
		*(*C.int32_t)(args) = C.int32_t(cpu.NumThreads())
	case C.GDNC_SET_THREADS:
		n := *(*C.int32_t)(args)
		if n < 1 {
			return core.Errorf(core.InvalidArgument, "gdn_set_num_threads: n is %d, expected at least 1", n)
		}
		cpu.SetNumThreads(int(n))
	case C.GDNC_TRIM:
		return ascend.Trim()
	case C.GDNC_ISA:
		write(args, cpu.ISA())
	case C.GDNC_BUILD_INFO:
		write(args, fmt.Sprintf("libgdn %s, %s/%s, instruction set %s, %d threads, %s, C compiler %s", core.Version, runtime.GOOS, runtime.GOARCH,
			cpu.ISA(), cpu.NumThreads(), runtime.Version(), C.GDNC_COMPILER))
	default:
		return core.Errorf(core.Internal, "libgdn: door %d does not exist", op)
	}
	return nil
}

// write fills a gdnc_text, whose last byte stays 0.
func write(args unsafe.Pointer, s string) {
	t := (*C.gdnc_text)(args)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&t.text[0])), len(t.text))
	b[min(copy(b, s), len(b)-1)] = 0
}
