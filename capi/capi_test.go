package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"libgdn/core"
)

// run fails the test with what the command printed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

var buildOnce sync.Once
var buildDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if buildDir != "" {
		os.RemoveAll(buildDir)
	}
	os.Exit(code)
}

// library builds libgdn.so as it is shipped, once for all tests.
func library(t *testing.T) string {
	t.Helper()
	buildOnce.Do(func() {
		var err error
		if buildDir, err = os.MkdirTemp("", "libgdn"); err != nil {
			t.Fatal(err)
		}
		version, err := filepath.Abs("gdn.map")
		if err != nil {
			t.Fatal(err)
		}
		run(t, "go", "build", "-buildmode=c-shared", "-trimpath", "-ldflags", `-s -w -extldflags "-Wl,--version-script=`+version+` -Wl,-soname,libgdn.so.0"`,
			"-o", filepath.Join(buildDir, "libgdn.so"), ".")
		// Programs are linked with libgdn.so and look for its soname.
		if err := os.Symlink("libgdn.so", filepath.Join(buildDir, "libgdn.so.0")); err != nil {
			t.Fatal(err)
		}
	})
	so := filepath.Join(buildDir, "libgdn.so")
	if _, err := os.Stat(so); err != nil {
		t.Fatal("libgdn.so was not built")
	}
	return so
}

func compile(t *testing.T, name string, flags ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	run(t, "gcc", append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I../include", "-o", program, "testdata/" + name + ".c"}, flags...)...)
	return program
}

func TestExports(t *testing.T) {
	so := library(t)
	var entries []string
	for _, line := range strings.Split(strings.TrimSpace(run(t, "nm", "-D", "--defined-only", so)), "\n") {
		f := strings.Fields(line)
		if name := f[len(f)-1]; name != "LIBGDN_0" { // the version node itself
			if !regexp.MustCompile(`^gdn_\w+@@LIBGDN_0$`).MatchString(name) {
				t.Errorf("%s is exported", name)
			}
			entries = append(entries, strings.TrimSuffix(name, "@@LIBGDN_0"))
		}
	}
	exported := " " + strings.Join(entries, " ") + " "
	header, err := os.ReadFile("../include/gdn.h")
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^(?:int32_t |const char \*)(gdn_\w+)\(`).FindAllStringSubmatch(string(header), -1)
	for _, d := range declared {
		if !strings.Contains(exported, " "+d[1]+" ") {
			t.Errorf("%s is declared and not exported", d[1])
		}
	}
	if len(declared) != len(entries) {
		t.Errorf("%d functions declared, %d exported:%s", len(declared), len(entries), exported)
	}
	if dynamic := run(t, "readelf", "-d", so); !strings.Contains(dynamic, "soname: [libgdn.so.0]") || !strings.Contains(dynamic, "NODELETE") {
		t.Errorf("soname or NODELETE is missing:\n%s", dynamic)
	}
}

func TestHeaderAlone(t *testing.T) {
	for _, compiler := range [][]string{{"gcc", "-x", "c", "-std=c99"}, {"g++", "-x", "c++", "-std=c++11"}} {
		source := filepath.Join(t.TempDir(), "source")
		if err := os.WriteFile(source, []byte("#include \"gdn.h\"\nint main(void) { return gdn_fwd(0); }\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		run(t, compiler[0], append(compiler[1:], "-Wall", "-Wextra", "-pedantic", "-Werror", "-I../include", "-fsyntax-only", source)...)
	}
}

func TestPrograms(t *testing.T) {
	dir := filepath.Dir(library(t))
	for _, name := range []string{"ops", "bad", "frame", "stage", "threads"} {
		t.Run(name, func(t *testing.T) {
			run(t, compile(t, name, "-L"+dir, "-lgdn", "-lm", "-lpthread", "-Wl,-rpath,"+dir))
		})
	}
}

func TestFork(t *testing.T) {
	so, program := library(t), compile(t, "fork", "-ldl")
	for _, when := range []string{"loaded", "called", "child"} {
		t.Run(when, func(t *testing.T) { run(t, program, so, when) })
	}
}

func TestSIGPIPE(t *testing.T) {
	so, program := library(t), compile(t, "sigpipe", "-ldl")
	for _, host := range []string{"ignored", "default", "later"} {
		t.Run(host, func(t *testing.T) { run(t, program, so, host) })
	}
}

func TestPanicIsAnError(t *testing.T) {
	_, err := enter(nil, len(core.Ops), nil, true) // one beyond the table
	if core.StatusOf(err) != core.Internal || !regexp.MustCompile(`^libgdn: internal error, please report it: runtime error: index out of range .* \(at libgdn/capi\.enter:\d+\)$`).MatchString(err.Error()) {
		t.Errorf("status %d: %v", core.StatusOf(err), err)
	}
}
