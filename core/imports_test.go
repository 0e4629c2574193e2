package core

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const purego = "github.com/ebitengine/purego"

// Who may import whom: a package of ours, and all of ours that it may reach. Go's own packages are free, others are listed.
var mayImport = map[string][]string{
	"libgdn/core":         {},
	"libgdn/include":      {},
	"libgdn/core/opgen":   {"libgdn/core"},
	"libgdn/core/oracle":  {"libgdn/core"},
	"libgdn/core/conform": {"libgdn/core", "libgdn/core/oracle"},
	"libgdn/kernels/cpu":  {"libgdn/core", "libgdn/include"},
	"libgdn/ascendc":      {"libgdn/core", purego, purego + "/internal/cgo", purego + "/internal/strings"},
	"libgdn/capi": {"libgdn/ascendc", "libgdn/core", "libgdn/include", "libgdn/kernels/cpu", purego, purego + "/internal/cgo",
		purego + "/internal/strings"},
}

func TestImports(t *testing.T) {
	list := func(args ...string) []string {
		out, err := exec.Command("go", append([]string{"list"}, args...)...).Output()
		if err != nil {
			t.Fatalf("go list %v: %v", args, err)
		}
		return strings.Fields(string(out))
	}
	for _, pkg := range list("libgdn/...") {
		allowed, known := mayImport[pkg]
		if !known {
			if strings.HasPrefix(pkg, "libgdn/build/") {
				continue // drivers, which nothing imports
			}
			t.Errorf("%s is new: say here what it may import", pkg)
			continue
		}
		for _, dep := range list("-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", pkg) {
			if dep != pkg && !slices.Contains(allowed, dep) {
				t.Errorf("%s reaches %s, which it may not", pkg, dep)
			}
		}
	}
	if slices.Contains(list("-deps", "libgdn/core"), "runtime/cgo") {
		t.Error("core needs cgo")
	}
}
