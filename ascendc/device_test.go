package ascendc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"libgdn/core"
)

// The tests run on the fake CANN of ascendc/fake, one of its releases a process. GDN_TEST_CANN chooses it; the tests of others start
// this program again.

var userHome = os.Getenv("HOME") // which go needs

func TestMain(m *testing.M) {
	release := os.Getenv("GDN_TEST_CANN")
	if release == "" {
		release = "cann"
		if out, err := exec.Command("make", "-s", "-C", "..", "cann").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "make cann: %v\n%s", err, out)
			os.Exit(1)
		}
	}
	home, err := filepath.Abs("../build/out/" + release)
	if err != nil {
		panic(err)
	}
	if other := os.Getenv("GDN_TEST_HOME"); other != "" {
		home = other
	}
	opp := filepath.Join(home, "opp")
	if other := os.Getenv("GDN_TEST_OPP"); other != "" {
		opp = other
	}
	// No CANN that this machine may have.
	os.Setenv("ASCEND_HOME_PATH", home)
	os.Setenv("ASCEND_OPP_PATH", opp)
	for _, name := range []string{"ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH", "FLA_NPU_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "GDN_ASCEND", "HOME"} {
		os.Unsetenv(name)
	}
	os.Exit(m.Run())
}

// again runs one test of this program on another release of CANN, or with other variables.
func again(t *testing.T, test string, variables ...string) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^"+test+"$", "-test.v")
	if testing.Short() {
		c.Args = append(c.Args, "-test.short")
	}
	c.Env = append(os.Environ(), variables...)
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+strings.ReplaceAll(test, "$", "")) {
		t.Errorf("%s with %v: %v\n%s", test, variables, err, out)
	}
}

// npu is the backend on the fake device, with what the tests need beside it.
type npu struct {
	*Backend
	t       testing.TB
	a       *acl
	caller  Caller
	callers sync.Map         // thread -> Caller, for threads that have one of their own
	left    map[string]int64 // alive before this test
	ratio   float64          // of the errors allowed; 0: by dtype
}

// newNPU is a backend of its own on a device that nothing has happened on.
func newNPU(t testing.TB) *npu {
	d := &npu{t: t, left: map[string]int64{}}
	d.Backend = New(func() Caller {
		if c, ok := d.callers.Load(syscall.Gettid()); ok {
			return c.(Caller)
		}
		return d.caller
	})
	// CANN is of the process and stays.
	d.once.Do(func() { d.Backend.acl, d.err = load() })
	if d.err != nil {
		t.Fatal(d.err)
	}
	d.a = d.Backend.acl
	d.fake("gdnfake_reset")
	for _, kind := range []string{"tensor", "scalar", "int array"} {
		d.left[kind] = d.live(kind)
	}
	d.chip("Ascend910B2")
	return d
}

// fake calls one of the fake's own functions.
func (d *npu) fake(name string, args ...uintptr) uintptr {
	h, err := purego.Dlopen("libascendcl.so", purego.RTLD_NOW)
	if err != nil {
		h, err = purego.Dlopen(filepath.Join(os.Getenv("ASCEND_HOME_PATH"), "lib64/libascendcl.so"), purego.RTLD_NOW)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	f, err := purego.Dlsym(h, name)
	if err != nil {
		d.t.Fatal(err)
	}
	r, _, _ := purego.SyscallN(f, args...)
	return r
}

func text(s string) uintptr {
	b := append([]byte(s), 0)
	texts.Store(&b[0], b)
	return uintptr(unsafe.Pointer(&b[0]))
}

// texts keeps what the fake may still read.
var texts sync.Map

// chip tells the fake which product it is.
func (d *npu) chip(name string) {
	d.fake("gdnfake_soc", text(name))
	d.a.soc = name
}

func (d *npu) live(kind string) int64 {
	if kind == "" {
		return int64(d.fake("gdnfake_live", 0))
	}
	return int64(d.fake("gdnfake_live", text(kind)))
}

// settled fails the test where something is left or a rule was broken.
func (d *npu) settled() {
	d.t.Helper()
	d.settledBut(nil)
}

// settledBut allows for what the fake was told not to destroy.
func (d *npu) settledBut(left map[string]int64) {
	d.t.Helper()
	if err := d.Trim(); err != nil {
		d.t.Error(err)
	}
	for _, kind := range []string{"device memory", "host memory", "tensor", "scalar", "int array", "tensor list", "executor"} {
		if n := d.live(kind) - left[kind] - d.left[kind]; n != 0 {
			d.t.Errorf("%d of %s left", n, kind)
		}
	}
	d.lawful()
}

func (d *npu) lawful() {
	d.t.Helper()
	for i := range d.fake("gdnfake_violations") {
		d.t.Errorf("violation: %s", goString(d.fake("gdnfake_violation", i)))
	}
}

func (d *npu) must(name string, status int32) {
	d.t.Helper()
	if status != aclOK {
		d.t.Fatal(d.a.failure(name, status))
	}
}

// on makes the device current on this thread.
func (d *npu) on() *run {
	r := &run{acl: d.a, b: d.Backend}
	r.enter()
	if r.err != nil {
		d.t.Fatal(r.err)
	}
	return r
}

// conform.Device.

func (d *npu) ID() int32 { return 0 }

func (d *npu) Place(bytes []byte) uintptr {
	r := d.on()
	defer r.leave()
	d.must("aclrtMalloc", r.call(d.a.malloc, uintptr(unsafe.Pointer(&r.word[0])), uintptr(max(len(bytes), 1)), 0))
	at := r.word[0]
	if len(bytes) > 0 {
		d.must("aclrtMemcpy", r.call(d.a.memcpy, at, uintptr(len(bytes)), uintptr(unsafe.Pointer(&bytes[0])), uintptr(len(bytes)), hostToDevice))
	}
	return at
}

func (d *npu) Fetch(bytes []byte, at uintptr) {
	r := d.on()
	defer r.leave()
	d.must("aclrtSynchronizeStream", r.call(d.a.synchronizeStream, d.caller.Stream))
	if len(bytes) > 0 {
		d.must("aclrtMemcpy", r.call(d.a.memcpy, uintptr(unsafe.Pointer(&bytes[0])), uintptr(len(bytes)), at, uintptr(len(bytes)), deviceToHost))
	}
	d.must("aclrtFree", r.call(d.a.free, at))
}

// Ratio allows what rounding to 16 bits between the steps costs: 1e-3 to 1.5e-2 in bfloat16 for the pipelines of vendors, an eighth of that
// in float16.
func (d *npu) Ratio(name string, kind core.DType) float64 {
	if d.ratio != 0 {
		return d.ratio
	}
	return 2e-2
}
