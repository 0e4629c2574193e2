package core

import (
	"errors"
	"strings"
	"sync"
	"unsafe"
)

// Backend runs the operators on one kind of device.
type Backend interface {
	Name() string
	Device() DeviceType
	Supports(c *Call) (path string, err error) // what would run, in a few words; or why nothing would: the sentence that the user will read
	Run(c *Call) error                         // returns when done (CPU) or enqueued (device); refuses what Supports refuses
}

// calls keeps Calls for reuse: a new one costs ten times the decoding.
var calls = sync.Pool{New: func() any { return new(Call) }}

// Dispatch decodes a call, chooses the backend by the device of the tensors and runs it there, or, where run is false, says by which path
// it would run. Nothing is copied to another device and nothing else is tried: a caller who meant the other device should hear of it.
func Dispatch(backends []Backend, op *Op, args unsafe.Pointer, run bool) (path string, err error) {
	c := calls.Get().(*Call)
	defer calls.Put(c)
	if err := Decode(op, args, c); err != nil {
		return "", err
	}
	for _, b := range backends {
		if b.Device() != c.Device.Type {
			continue
		}
		if !run {
			return b.Supports(c)
		}
		return "", b.Run(c)
	}
	names := make([]string, len(backends))
	for i, b := range backends {
		names[i] = b.Name()
	}
	return "", c.Errorf(NoBackend, "the tensors are on %v, for which this build has no backend; it has: %s", c.Device, strings.Join(names, ", "))
}

// StatusOf is the status of an error; one that carries none is a bug of ours.
func StatusOf(err error) Status {
	var e *Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e.Status
	}
	return Internal
}
