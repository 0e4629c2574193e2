package ascendc

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"libgdn/core"
)

// What a machine may have and lack. Each of these tests runs in a process of its own, for CANN is loaded once.

func forward(d *npu) *sample {
	return newSample(d, "fwd", core.BF16, sizes(70, 2), []string{"g", "beta"}, nil)
}

// TestNoCANN is on a machine that has none: the sentence says what was tried and what helps.
func TestNoCANN(t *testing.T) {
	if os.Getenv("GDN_TEST_CANN") != "nowhere" {
		again(t, "TestNoCANN", "GDN_TEST_CANN=nowhere")
		return
	}
	b := New(func() Caller { return Caller{} })
	c := &core.Call{Op: core.Ops[0], Device: core.Device{Type: core.Ascend, ID: 1}}
	for range 2 {
		err := b.Run(c)
		if core.StatusOf(err) != core.NoBackend || !regexp.MustCompile(`^gdn_fwd: the tensors are on Ascend NPU:1, and CANN's runtime could not be loaded \(libascendcl\.so: .*\); load CANN's set_env\.sh`).MatchString(err.Error()) {
			t.Fatal(err)
		}
	}
	if err := b.Trim(); err != nil {
		t.Error(err)
	}
}

// TestMissingSymbols is on a CANN that lacks functions: all of them in one sentence, with the release.
func TestMissingSymbols(t *testing.T) {
	dir := t.TempDir()
	lib := filepath.Join(dir, "lib64")
	if os.Getenv("GDN_TEST_CANN") != "stump" {
		os.Mkdir(lib, 0o755)
		source := filepath.Join(dir, "stump.c")
		os.WriteFile(source, []byte(`#include <string.h>
int aclInit(const char *c) { (void)c; return 0; }
int aclsysGetCANNVersion(int what, char *v) { (void)what; strcpy(v, "7.0.RC1"); return 0; }`), 0o644)
		if out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", filepath.Join(lib, "libascendcl.so"), source).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		again(t, "TestMissingSymbols", "GDN_TEST_CANN=stump", "GDN_TEST_HOME="+dir)
		return
	}
	_, err := load()
	if err == nil || !strings.HasPrefix(err.Error(), "CANN 7.0.RC1 lacks aclGetRecentErrMsg, aclrtGetSocName, aclrtSetDevice, ") || !strings.Contains(err.Error(), "aclDestroyScalar, which this library needs (libnnopbase.so could not be loaded: ") {
		t.Error(err)
	}
}

// TestUnknownDeclaration has a header with an argument list that nobody has seen.
func TestUnknownDeclaration(t *testing.T) {
	opp := os.Getenv("GDN_TEST_OPP")
	if opp == "" {
		opp = filepath.Join(t.TempDir(), "opp")
		if out, err := exec.Command("cp", "-r", os.Getenv("ASCEND_OPP_PATH"), opp).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		files, _ := filepath.Glob(filepath.Join(opp, "vendors/*/op_api/include/aclnnop/aclnn_*.h"))
		changed := 0
		for _, file := range files {
			text, _ := os.ReadFile(file)
			// One argument more, as vendors have done it; another operator loses its header.
			if bytes.Contains(text, []byte("aclnnChunkGatedDeltaRuleFwdGetWorkspaceSize(")) {
				os.WriteFile(file, bytes.Replace(text, []byte("const char *layout"), []byte("const aclTensor *timerOptional, const char *layout"), 1), 0o644)
				changed++
			}
			if bytes.Contains(text, []byte("aclnnRecomputeWUFwdGetWorkspaceSize(")) {
				os.Remove(file)
				changed++
			}
		}
		if changed != 2 {
			t.Fatalf("%d headers changed", changed)
		}
		again(t, "TestUnknownDeclaration", "GDN_TEST_CANN=cann", "GDN_TEST_OPP="+opp)
		return
	}
	d := newNPU(t)
	s := forward(d)
	s.tensors["tape"] = s.put("tape", core.F32, []int64{2 * (70/64*128*128 + 70*128)}) // so that CANN's own is out of the question
	err := s.run()
	for _, want := range []string{"gdn_fwd: no way to run this on Ascend NPU:0 (Ascend910B2, CANN 9.0", "aclnnChunkGatedDeltaRuleFwd of fla-npu: " + opp,
		"const aclTensor *timerOptional", "an argument list that this version of gdn does not know (TTTTTTTTLLTsdibbbbTTTTTTTTTT)",
		"aclnn_chunk_gated_delta_rule_fwd.h declares", "the GDN stages of fla-npu: no header in " + opp, "declares aclnnRecomputeWUFwdGetWorkspaceSize, so its argument list is not known",
		"aclnnChunkGatedDeltaRule of CANN: it has no backward"} {
		if core.StatusOf(err) != core.Unsupported || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	s.free()
	d.settled()
}

// TestAlias has a libopapi.so in the vendor's folder, which would take the place of CANN's.
func TestAlias(t *testing.T) {
	opp := os.Getenv("GDN_TEST_OPP")
	if opp == "" {
		opp = filepath.Join(t.TempDir(), "opp")
		if out, err := exec.Command("cp", "-r", os.Getenv("ASCEND_OPP_PATH"), opp).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		libs, _ := filepath.Glob(filepath.Join(opp, "vendors/*/op_api/lib"))
		os.WriteFile(filepath.Join(libs[0], "libopapi.so"), nil, 0o644)
		again(t, "TestAlias", "GDN_TEST_CANN=cann", "GDN_TEST_OPP="+opp)
		return
	}
	d := newNPU(t)
	if err := flaFwd.in(d.a).err; err == nil || !strings.Contains(err.Error(), "op_api/lib/libopapi.so would take the place of CANN's own libopapi.so; remove it") {
		t.Error(err)
	}
	if err := stockChunk.in(d.a).err; err != nil {
		t.Error(err)
	}
}

func TestReduce(t *testing.T) {
	for list, want := range map[string]string{
		"const aclTensor *q, aclTensor* out, const aclIntArray *cu, int64_t n, double s, float f, bool b, const char *l, char * m, uint64_t *workspaceSize, aclOpExecutor **executor": "TTLidfbss",
		"const aclTensor *x, const aclScalar *alpha, int8_t mode, uint64_t* workspaceSize, aclOpExecutor** executor":                                                                  "Tce",
		"aclTensor **x, uint64_t *workspaceSize, aclOpExecutor **executor":                                                                                                            "?",
		"const aclTensor *x, uint64_t *workspaceSize":                                                                                                                                 "??",
		"const aclTensor *x, std::string s, uint64_t *workspaceSize, aclOpExecutor **executor":                                                                                        "T?",
	} {
		if got := reduce(list); got != want {
			t.Errorf("%s: %s, expected %s", list, got, want)
		}
	}
	file := filepath.Join(t.TempDir(), "x.h")
	os.WriteFile(file, []byte("/* aclnnOldGetWorkspaceSize(const aclTensor *x) */\n#define X \\\n aclnnY(\n// aclnnZGetWorkspaceSize(int64_t a)\n"+
		"__attribute__((visibility(\"default\"))) aclnnStatus aclnnRealGetWorkspaceSize(\n\tconst aclTensor *x, // aclTensor *hidden,\n\tint64_t /* really */ n,\n\tuint64_t *workspaceSize, aclOpExecutor **executor);\n"), 0o644)
	if d := readDeclarations(file); len(d) != 1 || d["Real"].letters != "Ti" || d["Real"].file != file {
		t.Errorf("%v", d)
	}
}

// TestLists looks at the table of known argument lists: none is longer than the trampoline, and no two of one operator are alike.
func TestLists(t *testing.T) {
	for op, variants := range known {
		seen := map[string]bool{}
		for _, v := range variants {
			floats := strings.Count(v.letters, "d") + strings.Count(v.letters, "f")
			if ints := len(v.letters) - floats + 2; ints > 40 || floats > 8 || seen[v.letters] {
				t.Errorf("%s: %s", op, v.letters)
			}
			seen[v.letters] = true
		}
	}
}

func TestChoice(t *testing.T) {
	d := newNPU(t)
	s := forward(d)
	for way, want := range map[string]string{"": "ascend, aclnnChunkGatedDeltaRuleFwd of fla-npu, CANN 9.0.0 on Ascend910B2", "auto": "ascend, aclnn", "vendor": "ascend, aclnn",
		"own": "gdn_fwd: GDN_ASCEND is own, and this version has no NPU kernels of its own", "mine": `gdn_fwd: the environment variable GDN_ASCEND is "mine", expected vendor, own or auto`} {
		os.Setenv("GDN_ASCEND", way)
		path, err := s.path()
		if err != nil {
			path = err.Error()
		}
		if !strings.HasPrefix(path, want) {
			t.Errorf("%q: %s", way, path)
		}
	}
	os.Unsetenv("GDN_ASCEND")
	s.tensors["q"].dl.code, s.tensors["q"].dl.bits = 2, 32
	if _, err := s.path(); err == nil || !strings.Contains(err.Error(), "q is float32, and it takes bfloat16 or float16") {
		t.Error(err)
	}
	s.tensors["q"].dl.code, s.tensors["q"].dl.bits = 4, 16
	s.free()

	wide := newSample(d, "fwd", core.BF16, map[string]int64{"B": 1, "T": 5, "H": 1, "HV": 1, "K": 64, "V": 128}, []string{"g"}, nil)
	if _, err := wide.path(); err == nil || !strings.Contains(err.Error(), "K is 64, and it takes [128]") {
		t.Error(err)
	}
	if err := wide.run(); core.StatusOf(err) != core.Unsupported {
		t.Error(err)
	}
	wide.free()
	d.settled()
}

// TestAddresses has tensors that are not where they say.
func TestAddresses(t *testing.T) {
	d := newNPU(t)
	s := forward(d)
	host := make([]byte, len(s.tensors["k"].bytes)+64)
	k := s.tensors["k"]
	k.dl.data = (uintptr(unsafe.Pointer(&host[0])) + 63) &^ 63
	if err := s.run(); core.StatusOf(err) != core.InvalidArgument || !strings.Contains(err.Error(), "gdn_fwd: k is at address") || !strings.Contains(err.Error(), "which is not memory of Ascend NPU:0") {
		t.Error(err)
	}
	k.dl.data = k.at
	for _, x := range s.tensors {
		x.dl.deviceID = 1
	}
	if err := s.run(); core.StatusOf(err) != core.InvalidArgument || !strings.Contains(err.Error(), "gdn_fwd: q is at address") || !strings.Contains(err.Error(), "memory of Ascend NPU:0, expected NPU:1") {
		t.Error(err)
	}
	for _, x := range s.tensors {
		x.dl.deviceID, x.dl.deviceType = 0, 21
	}
	if err := s.run(); err != nil {
		t.Errorf("device type 21: %v", err)
	}
	for _, x := range s.tensors {
		x.dl.deviceID = 99
	}
	if err := s.run(); core.StatusOf(err) != core.DeviceFailure || !strings.Contains(err.Error(), "aclrtSetDevice failed") {
		t.Error(err)
	}
	for _, x := range s.tensors {
		x.dl.deviceID, x.dl.deviceType = 0, 12
	}
	s.free()
	d.settled()
}

// TestDevices has tensors on device 1 while the thread works on device 0, and finds its device as it was.
func TestDevices(t *testing.T) {
	d := newNPU(t)
	here := d.on()
	defer here.leave()
	r := &run{acl: d.a, b: d.Backend, device: 1}
	r.enter()
	s := forward(d)
	r.leave()
	// Place made the tensors on device 0; move them.
	move := func(device int32) {
		for _, x := range s.tensors {
			r := &run{acl: d.a, b: d.Backend, device: device}
			r.enter()
			d.must("aclrtMalloc", r.call(d.a.malloc, uintptr(unsafe.Pointer(&r.word[0])), uintptr(len(x.bytes)), 0))
			d.must("aclrtMemcpy", r.call(d.a.memcpy, r.word[0], uintptr(len(x.bytes)), uintptr(unsafe.Pointer(&x.bytes[0])), uintptr(len(x.bytes)), hostToDevice))
			old := x.at
			x.at, x.dl.data, x.dl.deviceID = r.word[0], r.word[0], device
			r.leave()
			back := &run{acl: d.a, b: d.Backend, device: 1 - device}
			back.enter()
			d.must("aclrtFree", back.call(d.a.free, old))
			back.leave()
		}
	}
	move(1)
	if err := s.run(); err != nil {
		t.Error(err)
	}
	var now [2]uintptr
	d.must("aclrtGetDevice", here.call(d.a.getDevice, uintptr(unsafe.Pointer(&here.word[2]))))
	if now[0] = here.word[2]; int32(now[0]) != 0 {
		t.Errorf("the thread is on device %d", int32(now[0]))
	}
	r = &run{acl: d.a, b: d.Backend, device: 1}
	r.enter()
	d.must("aclrtSynchronizeDevice", r.call(d.a.synchronizeDevice))
	r.leave()
	move(0)
	s.free()
	d.settled()
}

// TestAllocator takes workspaces from the caller, who gets each piece back.
func TestAllocator(t *testing.T) {
	d := newNPU(t)
	pieces := map[uintptr]uintptr{}
	empty := false
	r := d.on()
	defer r.leave()
	allocate := purego.NewCallback(func(user uintptr, device int32, bytes uintptr, stream uintptr) uintptr {
		if user != 7 || empty {
			return 0
		}
		d.must("aclrtMalloc", r.call(d.a.malloc, uintptr(unsafe.Pointer(&r.word[0])), bytes, 0))
		pieces[r.word[0]] = bytes
		return r.word[0]
	})
	release := purego.NewCallback(func(user uintptr, device int32, memory uintptr, bytes uintptr, stream uintptr) {
		if pieces[memory] != bytes {
			t.Errorf("%#x of %d bytes given back, taken were %d", memory, bytes, pieces[memory])
		}
		delete(pieces, memory)
		d.must("aclrtSynchronizeStream", r.call(d.a.synchronizeStream, stream))
		d.must("aclrtFree", r.call(d.a.free, memory))
	})
	s := forward(d)
	want := func() string { s.run(); return string(s.read("o")) }()
	d.caller = Caller{Allocate: allocate, Release: release, User: 7}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	if string(s.read("o")) != want || len(pieces) != 0 {
		t.Errorf("another result, or %d pieces were kept", len(pieces))
	}
	empty = true
	if err := s.run(); core.StatusOf(err) != core.OutOfMemory || !strings.Contains(err.Error(), "the caller's allocator has no ") {
		t.Error(err)
	}
	d.caller = Caller{}
	s.free()
	d.settled()
}
