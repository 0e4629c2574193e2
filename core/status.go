package core

import "fmt"

// Status is what every entry of the C library returns. Each one is something a caller can act on.
type Status int32

const (
	OK Status = iota
	InvalidArgument
	Unsupported
	NoBackend
	OutOfMemory
	DeviceFailure
	Forked
	Internal
)

// Statuses lists every status by its number: the name in C is GDN_ and Name, the sentence goes into the header.
var Statuses = []struct{ Name, Doc string }{
	OK:              {"OK", "done"},
	InvalidArgument: {"INVALID_ARGUMENT", "an argument is wrong by the contract of the operator"},
	Unsupported:     {"UNSUPPORTED", "the arguments are right, but this build or device cannot do it"},
	NoBackend:       {"NO_BACKEND", "no backend serves the device of the tensors"},
	OutOfMemory:     {"OUT_OF_MEMORY", "scratch memory ran out; nothing was written"},
	DeviceFailure:   {"DEVICE", "the device or its driver reported an error"},
	Forked:          {"FORKED", "called in a child process made by fork() after the library was loaded"},
	Internal:        {"INTERNAL", "a bug in the library, caught"},
}

// Error is a refusal: the status for programs, the sentence for people.
type Error struct {
	Status Status
	Msg    string
}

func (e *Error) Error() string { return e.Msg }

// Errorf builds an Error. The sentence begins with the operator and names the argument, what came and what was expected.
func Errorf(s Status, format string, args ...any) *Error {
	return &Error{Status: s, Msg: fmt.Sprintf(format, args...)}
}
