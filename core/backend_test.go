package core

import (
	"errors"
	"testing"
)

// fakeBackend answers as it is told and remembers what it was asked.
type fakeBackend struct {
	device   DeviceType
	supports error
	run      error
	runs     int
}

func (f *fakeBackend) Name() string       { return "fake" }
func (f *fakeBackend) Device() DeviceType { return f.device }
func (f *fakeBackend) Run(c *Call) error  { f.runs++; return f.run }
func (f *fakeBackend) Supports(*Call) (string, error) {
	if f.supports != nil {
		return "", f.supports
	}
	return "the fake one", nil
}

func TestDispatch(t *testing.T) {
	no := Errorf(Unsupported, "gdn_fwd: not this one")
	for _, test := range []struct {
		name    string
		device  Device
		backend fakeBackend
		run     bool
		status  Status
		want    string
		runs    int
	}{
		{"runs", Device{CPU, 0}, fakeBackend{device: CPU}, true, OK, "", 1},
		{"asks only", Device{CPU, 0}, fakeBackend{device: CPU}, false, OK, "", 0},
		{"not supported", Device{CPU, 0}, fakeBackend{device: CPU, supports: no}, false, Unsupported, "gdn_fwd: not this one", 0},
		{"refused", Device{CPU, 0}, fakeBackend{device: CPU, run: no}, true, Unsupported, "gdn_fwd: not this one", 1},
		{"fails", Device{CPU, 0}, fakeBackend{device: CPU, run: Errorf(OutOfMemory, "gdn_fwd: no memory")}, true, OutOfMemory, "gdn_fwd: no memory", 1},
		{"fails without a status", Device{CPU, 0}, fakeBackend{device: CPU, run: errors.New("odd")}, true, Internal, "odd", 1},
		{"Ascend", Device{12, 3}, fakeBackend{device: CPU}, true, NoBackend, "gdn_fwd: the tensors are on Ascend NPU:3, for which this build has no backend; it has: fake", 0},
		{"Ascend's other number", Device{21, 0}, fakeBackend{device: Ascend}, true, OK, "", 1},
		{"pinned memory is not the CPU's", Device{3, 0}, fakeBackend{device: CPU}, true, NoBackend,
			"gdn_fwd: the tensors are on CUDA host memory:0, for which this build has no backend; it has: fake", 0},
		{"unheard-of device", Device{99, 0}, fakeBackend{device: CPU}, false, NoBackend,
			"gdn_fwd: the tensors are on device type 99:0, for which this build has no backend; it has: fake", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newArgs(gdnFwd, small)
			for _, v := range b.views {
				if v != nil {
					v.device = test.device
				}
			}
			defer b.pinner.Unpin()
			path, err := Dispatch([]Backend{&test.backend}, gdnFwd, b.pointer(), test.run)
			if StatusOf(err) != test.status || err != nil && err.Error() != test.want || test.backend.runs != test.runs {
				t.Errorf("status %d, error %v, %d runs", StatusOf(err), err, test.backend.runs)
			}
			if asked := !test.run && test.status == OK; asked != (path == "the fake one") {
				t.Errorf("path %q", path)
			}
		})
	}
}
