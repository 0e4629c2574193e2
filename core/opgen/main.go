// Command opgen writes every file that follows from the table core.Ops. Run it from the root of the repository: go run ./core/opgen
package main

import (
	"fmt"
	"os"
)

// products are the generated files, by their path from the root.
var products = []struct {
	path  string
	write func() string
}{
	{"include/gdn.h", header},
	{"capi/ops_gen.c", entries},
	{"kernels/cpu/ops_gen.h", indices},
	{"python/gdn/_ops.py", python},
}

func main() {
	for _, p := range products {
		if err := os.WriteFile(p.path, []byte(p.write()), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "opgen:", err)
			os.Exit(1)
		}
	}
}
