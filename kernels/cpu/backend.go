// Package cpu computes the operators with C kernels: one source compiled for each instruction set and chosen at run time, and a thread
// pool in C.
package cpu

/*
#cgo CFLAGS: -std=gnu11 -O3 -Wall -Wextra -fvisibility=hidden
#cgo LDFLAGS: -lm -lpthread
#include "cpu.h"
*/
import "C"

import (
	"bytes"
	"slices"
	"unsafe"

	"libgdn/core"
)

type backend struct{}

// New returns the CPU backend. It has no state of its own: the pool and its scratch belong to the process.
func New() core.Backend { return backend{} }

func (backend) Name() string            { return "cpu" }
func (backend) Device() core.DeviceType { return core.CPU }

// Supports says yes: the kernels take whatever the table allows.
func (backend) Supports(*core.Call) (string, error) { return "cpu, " + ISA(), nil }

// Run computes the call and returns when it is done.
func (backend) Run(c *core.Call) error {
	// The views, numbers and sizes lie in the Call as the C side declares them. None of them holds a Go pointer.
	status := C.gdnk_run(C.int(slices.Index(core.Ops, c.Op)), (*C.gdnk_tensor)(unsafe.Pointer(&c.Tensors)), (*C.double)(unsafe.Pointer(&c.Floats)),
		(*C.int64_t)(unsafe.Pointer(&c.Ints)), (*C.int64_t)(unsafe.Pointer(&c.Sizes)), (*C.char)(unsafe.Pointer(&c.Refusal)))
	switch status {
	case C.GDNK_REFUSED:
		return c.Errorf(core.InvalidArgument, "%s", c.Refusal[:bytes.IndexByte(c.Refusal[:], 0)])
	case C.GDNK_NO_MEMORY:
		return core.Errorf(core.OutOfMemory, "gdn_%s: no memory for the kernel's scratch", c.Op.Name)
	}
	return nil
}

// SetNumThreads sets how many threads compute, the caller's included.
func SetNumThreads(n int) { C.gdnk_set_num_threads(C.int(n)) }

// NumThreads returns how many threads compute.
func NumThreads() int { return int(C.gdnk_get_num_threads()) }

// ISA names the instruction set whose kernels run.
func ISA() string { return C.GoString(C.gdnk_isa()) }
