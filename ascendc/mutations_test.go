package ascendc

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// mutations are bugs as they are made in such code. The suite, or that part of it which is named, must fail with each of them. make test-slow
// builds and runs them in turn.
var mutations = []struct {
	name, file, old, new, tests string
	environment                 []string
}{
	{name: "workspaces lie on each other", file: "run.go", old: "b.used += size\n\t\t\treturn b.at + uintptr(b.used-size)", new: "return b.at", tests: "TestStockForward|TestFLAStages"},
	{name: "workspace of another size", file: "run.go", old: "work := r.memory(int64(size))", new: "work := r.memory(int64(size) / 2)", tests: "TestAllocator|TestFLAStages"},
	{name: "wrong stream", file: "run.go", old: "r.call(op.phase2, work, size, executor, r.caller.Stream)", new: "r.call(op.phase2, work, size, executor, 0)", tests: "TestThreads|TestHeld"},
	{name: "copies on another stream", file: "run.go", old: "uintptr(size), hostToDevice, r.caller.Stream)", new: "uintptr(size), hostToDevice, 0)", tests: "TestThreads|TestHeld"},
	{name: "descriptors are not destroyed", file: "run.go", old: "\tdefer r.destroy()\n", new: "", tests: "TestStockForward"},
	{name: "an executor that nobody launches is not destroyed", file: "run.go", old: "if r.destroyExecutor != 0 {", new: "if false {", tests: "TestMemory|TestFaults|TestAllocator"},
	{name: "q and k exchanged", file: "gdn.go", old: `r.exec(stockChunk, shaped(r.rows("q", core.None, s), n, h, 128), shaped(r.rows("k", core.None, s), n, h, 128)`,
		new: `r.exec(stockChunk, shaped(r.rows("k", core.None, s), n, h, 128), shaped(r.rows("q", core.None, s), n, h, 128)`, tests: "TestStockForward"},
	{name: "the device is not entered", file: "run.go", old: `if r.check("aclrtSetDevice", r.call(r.setDevice, uintptr(r.device))); r.err == nil {`, new: "if r.err == nil {", tests: "TestDevices"},
	{name: "the device is not left", file: "run.go", old: "if r.context != 0 {", new: "if false {", tests: "TestDevices"},
	{name: "a float passed as a double", file: "run.go", old: "r.floats[floats] = math.Float64frombits(uint64(math.Float32bits(float32(x))))", new: "r.floats[floats] = x", tests: "TestStockForward"},
	{name: "offsets instead of lengths", file: "sequences.go", old: "int32(s.cu[i+1] - s.cu[i])", new: "int32(s.cu[i+1])", tests: "TestStockForward|TestStockRecurrent"},
	{name: "staged memory overwritten before it was copied", file: "run.go", old: "s.used += (size + 63) / 64 * 64", new: "", tests: "TestHeld"},
	{name: "decays of 0 go to the operators", file: "gdn.go", old: "r.exec(clampMin, g, scalar(least), to)", new: "r.copy(to, g)", tests: "TestFLAStages|TestFLAComposite|TestStockForward"},
	{name: "an address that CANN does not take", file: "run.go", old: "if t.Data%32 != 0 {", new: "if t.Data%2 != 0 {", tests: "TestFLAStages|TestKDA"},
	{name: "rows that belong to no sequence are left as they were", file: "sequences.go", old: "rest > 0 {\n\t\tr.zero(sliced(t, 1, s.tokens, rest))", new: "rest > 1<<40 {\n\t\tr.zero(sliced(t, 1, s.tokens, rest))", tests: "TestStockForward|TestFLAStages"},
	{name: "empty sequences go to the operators", file: "sequences.go", old: "if n == 0 {\n\t\t\tcontinue\n\t\t}", new: "", tests: "TestFLAStages|TestKDA"},
	{name: "states turned the wrong way", file: "sequences.go", old: `if (r.c.Int("state_v_first") != 0) != vFirst {`, new: `if (r.c.Int("state_v_first") != 0) == vFirst {`, tests: "TestStockForward"},
	{name: "the layout of states is guessed", file: "selftest.go", old: "answer.chunkFirst, answer.err = r.probe(op)", new: "answer.chunkFirst = true", tests: "TestFLAStages", environment: []string{"GDN_TEST_CANN=cann-old"}},
	{name: "unknown argument lists are called", file: "prototype.go", old: "if v.letters == d.letters {", new: "if v.letters != \"\" {", tests: "TestUnknownDeclaration"},
	{name: "host memory is taken for the device's", file: "run.go", old: "r.err == nil && where != onDevice {", new: "r.err == nil && where == 99 {", tests: "TestAddresses"},
	{name: "streams share memory", file: "backend.go", old: "key := laneKey{device, stream}", new: "key := laneKey{device, 0}", tests: "TestThreads"},
	{name: "the scale is left out", file: "gdn.go", old: `if s := r.c.Float("scale"); s != 0 {`, new: `if s := r.c.Float("scale"); s == 99 {`, tests: "TestStockForward"},
	{name: "the caller's memory is kept", file: "run.go", old: "for _, b := range r.held {", new: "for _, b := range r.held[:0] {", tests: "TestAllocator"},
	{name: "the gradient of the cumulated gate for that of the gate", file: "gdn_fla.go", old: `s.cu, s.chunks, chunk, true, 1.0, true, "float32\x00", raw)`, new: `s.cu, s.chunks, chunk, false, 1.0, true, "float32\x00", raw)`, tests: "TestFLAStages"},
	{name: "half of the gradient of k", file: "gdn_fla.go", old: "r.exec(plainAdd, dk, dk2, scalar(1), sumK)", new: "r.exec(plainAdd, dk, dk2, scalar(0), sumK)", tests: "TestFLAStages"},
	{name: "the error text of another call", file: "run.go", old: "r.err = r.failure(name, status)", new: "r.call(r.getDevice, 0)\n\t\tr.err = r.failure(name, status)", tests: "TestFaults"},
	{name: "windows in natural logarithms", file: "summary.go", old: "false, log2E, true", new: "false, 1.0, true", tests: "TestSummaries"},
}

func TestMutations(t *testing.T) {
	if os.Getenv("GDN_TEST_MUTATIONS") == "" {
		t.Skip("make test-slow runs it")
	}
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			file := filepath.Join(here, m.file)
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Count(string(text), m.old) != 1 {
				t.Fatalf("%d times in %s: %s", strings.Count(string(text), m.old), m.file, m.old)
			}
			changed, overlay := filepath.Join(t.TempDir(), m.file), filepath.Join(t.TempDir(), "overlay.json")
			os.WriteFile(changed, []byte(strings.Replace(string(text), m.old, m.new, 1)), 0o644)
			list, _ := json.Marshal(map[string]map[string]string{"Replace": {file: changed}})
			os.WriteFile(overlay, list, 0o644)
			c := exec.Command("go", "test", "-overlay", overlay, "-short", "-count", "1", "-run", "^("+m.tests+")$", ".")
			c.Env = append(os.Environ(), append([]string{"GDN_TEST_MUTATIONS=", "GDN_TEST_CANN=cann", "HOME=" + userHome}, m.environment...)...)
			out, err := c.CombinedOutput()
			switch {
			case err == nil:
				t.Errorf("not caught by %s", m.tests)
			case strings.Contains(string(out), "[build failed]"), !strings.Contains(string(out), "FAIL\tlibgdn/ascendc"):
				t.Fatalf("it did not come to a test:\n%s", out)
			default:
				t.Logf("caught: %.200s", strings.TrimSpace(string(out)))
			}
		})
	}
}
