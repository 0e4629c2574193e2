package conform

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"libgdn/core"
)

// pair is what both operators of a case were given and what came out.
type pair struct {
	*Case
	fwd, bwd *call // bwd nil if only the forward ran
}

func (c *Case) mustRun(t *testing.T, b core.Backend) pair {
	t.Helper()
	p := pair{Case: c}
	p.fwd = c.newCall(t, c.forward(), nil)
	if err := p.fwd.run(b); err != nil {
		t.Fatal(c.wrap(err))
	}
	if tape := p.fwd.arrays["tape"]; tape != nil {
		p.bwd = c.newCall(t, c.backward(), tape)
		if err := p.bwd.run(b); err != nil {
			t.Fatal(c.wrap(err))
		}
	}
	return p
}

// outputs are those of both operators by their names, which do not meet.
func (p pair) outputs() map[string]*array {
	out := map[string]*array{}
	for _, f := range []*call{p.fwd, p.bwd} {
		if f != nil {
			for _, a := range f.outputs() {
				out[a.name] = a
			}
		}
	}
	return out
}

// inputs are the values that both operators were given, as they were rounded.
func (p pair) inputs() given {
	in := given{}
	for _, f := range []*call{p.fwd, p.bwd} {
		if f == nil {
			continue
		}
		for i := range f.op.Tensors {
			arg := &f.op.Tensors[i]
			if a := f.arrays[arg.Name]; a != nil && (arg.Role == core.In || arg.Role == core.OptIn) && arg.Name != "tape" && arg.Rule != core.Integer {
				in[arg.Name] = a.values()
			}
		}
	}
	return in
}

// isState tells states, which go by sequences, from what goes by tokens; isShared what neither has.
func isState(name string) bool {
	return slices.Contains([]string{"initial_state", "final_state", "dht", "dh0"}, name)
}

func isShared(name string) bool {
	return slices.Contains([]string{"A_log", "dt_bias", "dA_log", "ddt_bias"}, name)
}

// part cuts elements lo to hi out of n along the first dimension that is longer than 1.
func part[E any](x []E, n, lo, hi int) []E { return x[len(x)/n*lo : len(x)/n*hi] }

// same compares the bits of all outputs that both have, cut by cutA and cutB.
func same(t *testing.T, a, b pair, cutA, cutB func(name string, bits []byte) []byte) {
	t.Helper()
	outA, outB := a.outputs(), b.outputs()
	compared := 0
	for _, name := range slices.Sorted(maps.Keys(outA)) {
		if outB[name] == nil {
			continue
		}
		x, y := cutA(name, outA[name].bits()), cutB(name, outB[name].bits())
		if x == nil || y == nil {
			continue
		}
		compared++
		if !bytes.Equal(x, y) {
			size := int(outA[name].dtype.Size())
			at := 0
			for at < min(len(x), len(y)) && x[at] == y[at] {
				at++
			}
			t.Errorf("%s differs from element %d of %d (%d) on, seed %d, %+v", name, at/size, len(x)/size, len(y)/size, Seed, *a.Case)
		}
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

func whole(_ string, bits []byte) []byte { return bits }

// runBits tries what must agree bit for bit whatever the algorithm: a result may depend on nothing but its own sequence's inputs.
func runBits(t *testing.T, b core.Backend, setThreads func(n int)) {
	for i := range 4 {
		for _, d := range []core.DType{core.F32, core.BF16, core.F64} {
			// h goes by chunks, which no comparison of parts knows.
			base := Case{Name: "bits", Family: []Family{gdn, kda}[i/2], Recurrent: i%2 == 1, Unwanted: []string{"h"}, B: 1, T: 129, H: 2, HV: 4, K: 24, V: 40, IO: d, Aux: core.F32, H0: true, Dht: true, Gate: weak,
				Flags: map[string]float64{"gate": 1, "qk_l2norm": 1}, Bias: true, Data: "bits"}
			if d == core.F64 {
				base.Aux = d
			}
			sub := func(name string, f func(t *testing.T, c Case)) {
				t.Run(base.forward()+"/"+shortNames[d]+"/"+name, func(t *testing.T) { f(t, base) })
			}
			sub("repeated", func(t *testing.T, c Case) {
				c.B = 2
				first := c.mustRun(t, b)
				for i := range 5 {
					again := c
					again.Skew = i // another alignment
					same(t, first, again.mustRun(t, b), whole, whole)
				}
			})
			if setThreads != nil {
				sub("threads", func(t *testing.T, c Case) {
					defer setThreads(runtime.GOMAXPROCS(0))
					c.B = 2
					packed := c
					packed.B, packed.Cu = 1, []int{0, 1, 20, 20, 90, 129}
					for _, c := range []Case{c, packed} {
						setThreads(1)
						first := c.mustRun(t, b)
						for _, n := range []int{2, 3} {
							setThreads(n)
							same(t, first, c.mustRun(t, b), whole, whole)
						}
					}
				})
			}
			sub("packed", func(t *testing.T, c Case) { tryPacked(t, b, c) })
			sub("contained", func(t *testing.T, c Case) { tryContained(t, b, c) })
			sub("batch", func(t *testing.T, c Case) { tryBatch(t, b, c) })
			sub("prefix", func(t *testing.T, c Case) { tryPrefix(t, b, c) })
			sub("few outputs", func(t *testing.T, c Case) {
				all := c.mustRun(t, b)
				c.Unwanted = []string{"tape"}
				same(t, all, c.mustRun(t, b), whole, whole)
				c.Unwanted = []string{"tape", "final_state"}
				same(t, all, c.mustRun(t, b), whole, whole)
				for _, name := range []string{"dg", "dbeta", "dA_log", "ddt_bias", "dh0"} {
					c.Unwanted = []string{name}
					same(t, all, c.mustRun(t, b), whole, whole)
				}
			})
			sub("no gate", func(t *testing.T, c Case) {
				c.Flags, c.Bias, c.Gate = nil, false, zero
				gated := c.mustRun(t, b)
				c.Gate = none
				same(t, gated, c.mustRun(t, b), whole, whole)
			})
			sub("state layouts", func(t *testing.T, c Case) { tryStateLayouts(t, b, c) })
			sub("layouts", func(t *testing.T, c Case) {
				c.T = 70
				first := c.mustRun(t, b)
				for _, lie := range []layout{plain, heads, gaps, rows, reversed} {
					c.Layout = lie
					same(t, first, c.mustRun(t, b), whole, whole)
				}
			})
			if d != core.F64 {
				sub("strided tape", func(t *testing.T, c Case) { tryStridedTape(t, b, c) })
			}
			if d == core.F32 {
				sub("many sequences", func(t *testing.T, c Case) { tryMany(t, b, c) })
			}
			sub("splits", func(t *testing.T, c Case) { trySplits(t, b, c) })
		}
	}
}

func tryPacked(t *testing.T, b core.Backend, c Case) {
	// A mixture of tiny and long ones, an empty one, and rows of none.
	c.Cu = []int{0, 3, 3, 36, 37, 102, 106, 122, 137, 202}
	c.T = 204
	all := c.mustRun(t, b)
	in := all.inputs()
	for n := range len(c.Cu) - 1 {
		lo, hi := c.Cu[n], c.Cu[n+1]
		one := c
		one.Cu, one.T, one.Given = nil, hi-lo, given{}
		for name, x := range in {
			switch {
			case isShared(name):
				one.Given[name] = x
			case isState(name):
				one.Given[name] = part(x, len(c.Cu)-1, n, n+1)
			default:
				one.Given[name] = part(x, c.T, lo, hi)
			}
		}
		same(t, all, one.mustRun(t, b), func(name string, x []byte) []byte {
			switch {
			case isShared(name):
				return nil
			case isState(name):
				return part(x, len(c.Cu)-1, n, n+1)
			}
			return part(x, c.T, lo, hi)
		}, func(name string, x []byte) []byte {
			if isShared(name) {
				return nil
			}
			return x
		})
	}
}

// tryContained fills one sequence with NaN, which no other may notice.
func tryContained(t *testing.T, b core.Backend, c Case) {
	c.Cu, c.T = []int{0, 30, 71, 100}, 100
	clean := c.mustRun(t, b)
	c.Given = clean.inputs()
	for name, x := range c.Given {
		var bad []float64
		switch {
		case isShared(name):
			continue
		case isState(name):
			bad = part(x, 3, 1, 2)
		default:
			bad = part(x, c.T, 30, 71)
		}
		for i := range bad {
			bad[i] = math.NaN()
		}
	}
	others := func(name string, x []byte) []byte {
		switch {
		case isShared(name):
			return nil
		case isState(name):
			return slices.Concat(part(x, 3, 0, 1), part(x, 3, 2, 3))
		}
		return slices.Concat(part(x, c.T, 0, 30), part(x, c.T, 71, 100))
	}
	same(t, clean, c.mustRun(t, b), others, others)
}

func tryBatch(t *testing.T, b core.Backend, c Case) {
	c.B, c.T = 3, 70
	all := c.mustRun(t, b)
	in := all.inputs()
	for n := range c.B {
		one := c
		one.B, one.Given = 1, given{}
		cut := func(name string, x []byte) []byte {
			if isShared(name) {
				return nil
			}
			return part(x, c.B, n, n+1)
		}
		for name, x := range in {
			one.Given[name] = x
			if !isShared(name) {
				one.Given[name] = part(x, c.B, n, n+1)
			}
		}
		same(t, all, one.mustRun(t, b), cut, func(name string, x []byte) []byte {
			if isShared(name) {
				return nil
			}
			return x
		})
	}
}

// tryPrefix cuts a sequence short, which no output before the cut may notice.
func tryPrefix(t *testing.T, b core.Backend, c Case) {
	all := c.mustRun(t, b)
	in := all.inputs()
	for _, n := range []int{1, 15, 64, 70, 128} {
		short := c
		short.T, short.Given, short.Unwanted = n, given{}, []string{"tape"}
		for name, x := range in {
			short.Given[name] = x
			if !isShared(name) && !isState(name) {
				short.Given[name] = part(x, c.T, 0, n)
			}
		}
		same(t, all, short.mustRun(t, b), func(name string, x []byte) []byte {
			if name != "o" {
				return nil
			}
			return part(x, c.T, 0, n)
		}, whole)
	}
}

func tryStateLayouts(t *testing.T, b core.Backend, c Case) {
	c.T, c.Given = 70, given{}
	first := c.mustRun(t, b)
	in := first.inputs()
	c.Flags = maps.Clone(c.Flags)
	c.Flags["state_v_first"] = 1
	for _, name := range []string{"initial_state", "dht"} {
		c.Given[name] = transposed(in[name], c.K, c.V)
	}
	same(t, first, c.mustRun(t, b), func(name string, x []byte) []byte {
		if !isState(name) {
			return x
		}
		size := len(x) / (c.HV * c.K * c.V)
		return slices.Concat(transposed(slices.Collect(slices.Chunk(x, size)), c.K, c.V)...)
	}, whole)
}

// transposed exchanges the last two dimensions, of n and m elements.
func transposed[E any](x []E, n, m int) []E {
	y := make([]E, 0, len(x))
	for s := 0; s < len(x); s += n * m {
		for j := range m {
			for i := range n {
				y = append(y, x[s+i*m+j])
			}
		}
	}
	return y
}

// tryStridedTape hands over a tape with gaps. It is opaque, so refusing is as good as heeding them.
func tryStridedTape(t *testing.T, b core.Backend, c Case) {
	f := c.newCall(t, c.forward(), nil)
	want := c.mustRun(t, b)
	f.arrays["tape"] = newArray(t, "tape", f.arrays["tape"].dtype, f.arrays["tape"].shape, gaps, words, 0)
	if err := f.run(b); err != nil {
		if s := core.StatusOf(err); s != core.InvalidArgument && s != core.Unsupported || !strings.Contains(err.Error(), "tape") {
			t.Error(c.wrap(err))
		}
		return
	}
	g := c.newCall(t, c.backward(), f.arrays["tape"])
	if err := g.run(b); err != nil {
		t.Fatal(c.wrap(err))
	}
	same(t, want, pair{&c, f, g}, whole, whole)
}

// tryMany goes beyond 65535 sequences times heads, the limit of a grid dimension on some devices.
func tryMany(t *testing.T, b core.Backend, c Case) {
	if testing.Short() {
		t.Skip("long")
	}
	c.Flags, c.Bias, c.H0, c.Dht = map[string]float64{"qk_l2norm": 1}, false, false, false
	c.K, c.V, c.H = 4, 4, 1
	for _, size := range []struct{ n, length, hv int }{{70000, 1, 1}, {2050, 3, 32}} {
		c.HV, c.T, c.Given, c.Cu = size.hv, size.n*size.length, nil, nil
		for i := range size.n + 1 {
			c.Cu = append(c.Cu, i*size.length)
		}
		all := c.mustRun(t, b)
		in := all.inputs()
		for i := range 2 {
			half := c
			half.Cu, half.T, half.Given = c.Cu[:size.n/2+1], c.T/2, given{}
			for name, x := range in {
				half.Given[name] = part(x, 2, i, i+1)
			}
			same(t, all, half.mustRun(t, b), func(_ string, x []byte) []byte { return part(x, 2, i, i+1) }, whole)
		}
	}
}

// trySplits hands the state from one call to the next, in either form. Here the sums run in another order.
func trySplits(t *testing.T, b core.Backend, c Case) {
	c.T, c.Unwanted = 70, []string{"tape"}
	in := c.mustRun(t, b)
	cuts := [][]int{{69}, {5, 6}, {16, 48, 64}, {}}
	for i := 1; i < c.T; i++ {
		cuts[3] = append(cuts[3], i) // token by token, as decoding goes
	}
	if !testing.Short() {
		for i := 1; i < c.T-1; i++ {
			cuts = append(cuts, []int{i})
		}
	}
	for _, cut := range cuts {
		var o []float64
		state := in.inputs()["initial_state"]
		for i, lo := range append([]int{0}, cut...) {
			hi := c.T
			if i < len(cut) {
				hi = cut[i]
			}
			piece := c
			piece.T, piece.Given = hi-lo, given{}
			piece.Recurrent = c.Recurrent || hi-lo == 1
			for name, x := range in.inputs() {
				piece.Given[name] = x
				if !isShared(name) && !isState(name) {
					piece.Given[name] = part(x, c.T, lo, hi)
				}
			}
			piece.Given["initial_state"] = state
			out := piece.mustRun(t, b).outputs()
			o, state = append(o, out["o"].values()...), out["final_state"].values()
		}
		want := in.outputs()
		for name, got := range map[string][]float64{"o": o, "final_state": state} {
			limit := boundOf(name, want[name].dtype, c.double())
			limit.ratio, limit.round = limit.ratio/10, 2*limit.round // both sides are rounded
			if err := compare(got, want[name].values(), limit); err != nil {
				t.Errorf("cut at %v: %s: %v", cut, name, c.wrap(fmt.Errorf("%w", err)))
			}
		}
	}
}
