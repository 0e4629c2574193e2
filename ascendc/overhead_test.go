package ascendc

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"libgdn/core"
)

// BenchmarkOverhead times a whole forward of Kimi Delta Attention with a CANN that does nothing: what remains is the library's own work on
// the host, from the argument struct to the last launch. Operators are found and checked on the fake first.
func BenchmarkOverhead(b *testing.B) {
	dir := b.TempDir()
	source, lib := filepath.Join(dir, "idle.c"), filepath.Join(dir, "libidle.so")
	os.WriteFile(source, []byte("int zero(void) { return 0; }\nvoid *handle(void) { static int x; return &x; }\n"+
		"int device(void *p, unsigned *a) { (void)p; a[0] = 0, a[1] = 1; return 0; }\n"), 0o644)
	if out, err := exec.Command("gcc", "-O2", "-shared", "-fPIC", "-o", lib, source).CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	idle, err := purego.Dlopen(lib, purego.RTLD_NOW)
	if err != nil {
		b.Fatal(err)
	}
	zero, handle := symbol("zero", idle), symbol("handle", idle)

	d := newNPU(b)
	s := newSample(d, "kda_fwd", core.BF16, sizes(128, 2), []string{"g", "beta", "initial_state", "final_state"}, nil)
	if err := s.run(); err != nil {
		b.Fatal(err)
	}
	if path, _ := s.path(); path != "ascend, the KDA stages of fla-npu, CANN 9.0.0 on Ascend910B2" {
		b.Fatal(path)
	}
	// The same operators with addresses of the idle functions.
	still := &acl{version: d.a.version, soc: d.a.soc, stock: d.a.stock, fla: d.a.fla}
	for i := range reflect.TypeOf(acl{}).NumField() {
		f := reflect.TypeOf(acl{}).Field(i)
		if f.Type.Kind() == reflect.Uintptr {
			to := (*uintptr)(unsafe.Add(unsafe.Pointer(still), f.Offset))
			if *to = zero; len(f.Name) > 6 && f.Name[:6] == "create" {
				*to = handle
			}
		}
	}
	still.pointerGetAttributes = symbol("device", idle)
	still.malloc = d.a.malloc // the lane has what it needs
	d.a.ops.Range(func(name, op any) bool {
		o := *op.(*vendorOp)
		o.phase1, o.phase2 = zero, zero
		still.ops.Store(name, &o)
		return true
	})
	busy := d.Backend.acl
	d.Backend.acl = still
	defer func() { d.Backend.acl = busy; s.free() }()
	args := s.pack()
	if _, err := core.Dispatch([]core.Backend{d}, s.op, args, true); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := core.Dispatch([]core.Backend{d}, s.op, args, true); err != nil {
			b.Fatal(err)
		}
	}
}
