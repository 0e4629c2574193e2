// Package conform tries a backend against the float64 oracle: every operator, with awkward sizes, all dtypes, the corners of the numerics,
// any strides, and memory that is watched on all sides.
package conform

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"libgdn/core"
	"libgdn/core/oracle"
)

// Run tries backend b. setThreads sets how many threads it computes with; nil if it has no such setting.
//
// A subtest is named operator/dtype/case, so `go test -run 'TestConform/bwd/bf16'` runs a part; -short leaves out most dtypes. What must
// agree bit for bit is under bits/.
func Run(t *testing.T, b core.Backend, setThreads func(n int)) {
	for _, c := range cases(testing.Short()) {
		for _, op := range []string{c.forward(), c.backward()} {
			t.Run(op+"/"+shortNames[c.IO]+"/"+c.Name, func(t *testing.T) {
				if err := c.try(t, b, op); err != nil {
					t.Error(err)
				}
			})
		}
	}
	for _, c := range plainCases(testing.Short()) {
		t.Run(c.String(), func(t *testing.T) {
			if err := c.try(t, b); err != nil {
				t.Errorf("%v\nseed %d, %+v", err, Seed, *c)
			}
		})
	}
	t.Run("bits", func(t *testing.T) { runBits(t, b, setThreads) })
}

var shortNames = map[core.DType]string{core.F32: "fp32", core.BF16: "bf16", core.F16: "fp16", core.F64: "fp64"}

// try runs one operator of the case, a backward after its forward, and compares it with the oracle.
func (c *Case) try(t testing.TB, b core.Backend, op string) error {
	f := c.newCall(t, c.forward(), nil)
	if err := f.run(b); err != nil {
		return c.wrap(err)
	}
	if op == c.forward() {
		return c.wrap(compareAll(f, c.double(), c.reference(f).Forward(), nil))
	}
	g := c.newCall(t, op, f.arrays["tape"])
	if err := g.run(b); err != nil {
		return c.wrap(err)
	}
	ref := c.reference(g)
	want := ref.Backward()
	return c.wrap(compareAll(g, c.double(), want, ref.Squares))
}

// wrap adds what repeats the case.
func (c *Case) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w\nseed %d, %+v", err, Seed, *c)
}

// newCall makes the arrays of one of the case's operators, fills the inputs, and leaves NaN in the outputs. The tape of a backward is the
// one that its forward wrote.
func (c *Case) newCall(t testing.TB, op string, tape *array) *call {
	f := &call{op: find(op), arrays: map[string]*array{}, numbers: c.Flags}
	for i := range f.op.Tensors {
		a := &f.op.Tensors[i]
		if a.Name == "tape" || !c.has(a) {
			continue
		}
		x := newArray(t, a.Name, c.dtype(f.op, a), c.shape(a), c.layout(a), c.Around, c.Skew+i)
		f.arrays[a.Name] = x
		if a.Role == core.In || a.Role == core.OptIn {
			if given, ok := c.Given[a.Name]; ok {
				x.set(given)
			} else {
				x.set(c.data(a.Name, x.shape))
				c.poison(x)
			}
		}
	}
	switch {
	case tape != nil:
		f.arrays["tape"] = tape
	case !slices.Contains(c.Unwanted, "tape"):
		decoded, err := f.sizes()
		if err != nil {
			t.Fatal(c.wrap(err))
		}
		for i := range f.op.Tensors {
			if a := &f.op.Tensors[i]; a.Name == "tape" {
				f.arrays["tape"] = newArray(t, "tape", c.dtype(f.op, a), []int64{decoded.Size("TAPE")}, compact, c.Around, c.Skew)
			}
		}
	}
	return f
}

// shape follows the table's dimensions.
func (c *Case) shape(a *core.TensorArg) []int64 {
	size := map[string]int{"B": c.B, "T": c.T, "H": c.H, "HV": c.HV, "K": c.K, "V": c.V, "N": c.sequences(), "N+1": c.sequences() + 1, "NT": (c.T + oracle.Kept - 1) / oracle.Kept}
	if c.Cu != nil {
		size["NT"] = (c.T + (oracle.Kept-1)*c.sequences()) / oracle.Kept
	}
	shape := []int64{}
	for _, d := range strings.Fields(a.Dims) {
		if letter, optional := strings.CutPrefix(d, "["); optional {
			if !c.BetaV {
				continue
			}
			d = strings.TrimSuffix(letter, "]")
		}
		n, ok := size[d]
		if !ok {
			panic("conform: no size " + d)
		}
		shape = append(shape, int64(n))
	}
	if n := len(shape); a.State && c.Flags["state_v_first"] != 0 {
		shape[n-1], shape[n-2] = shape[n-2], shape[n-1]
	}
	return shape
}

func (c *Case) layout(a *core.TensorArg) layout {
	lie, ok := c.Layouts[a.Name]
	if !ok {
		lie = c.Layout
	}
	if (lie == broadcast || lie == expanded) && a.Role != core.In && a.Role != core.OptIn {
		return compact
	}
	if lie != gaps && lie != plain && !strings.HasPrefix(a.Dims, "B T") && !a.State {
		return compact
	}
	return lie
}

// poison puts NaN into the rows of an input that belong to no sequence.
func (c *Case) poison(a *array) {
	if c.Cu == nil || len(a.shape) < 3 || a.shape[1] != int64(c.T) || a.name == "initial_state" || a.name == "dht" {
		return
	}
	a.poisonRows(int64(c.Cu[len(c.Cu)-1]))
}

// reference is the oracle's view of a call: the inputs as they were rounded.
func (c *Case) reference(f *call) *oracle.GDN {
	on := func(name string) bool { return c.Flags[name] != 0 }
	p := &oracle.GDN{Channels: c.Family == kda, LowerBound: c.Flags["lower_bound"], B: c.B, T: c.T, H: c.H, HV: c.HV, K: c.K, V: c.V, Cu: c.Cu, Scale: c.Flags["scale"], L2Norm: on("qk_l2norm"), Gate: on("gate"),
		BetaSigmoid: on("beta_sigmoid"), NegEigval: on("neg_eigval"), StateVFirst: on("state_v_first"), In: oracle.Tensors{}}
	for i := range f.op.Tensors {
		a := &f.op.Tensors[i]
		if x := f.arrays[a.Name]; x != nil && (a.Role == core.In || a.Role == core.OptIn) && a.Rule != core.Integer && a.Name != "tape" {
			p.In[a.Name] = x.values()
		}
	}
	return p
}

// compareAll holds every output of a call but the tape, which is the backend's own, to the oracle.
func compareAll(f *call, double bool, want, squares oracle.Tensors) error {
	var all []error
	for _, x := range f.outputs() {
		limit := f.limit(x, double)
		for _, sum := range squares[x.name] {
			limit.squares += sum
		}
		if err := compare(x.values(), want[x.name], limit); err != nil {
			all = append(all, fmt.Errorf("%s, %v of shape %v: %w", x.name, x.dtype, x.shape, err))
		}
	}
	return errors.Join(all...)
}

func find(name string) *core.Op {
	i := slices.IndexFunc(core.Ops, func(op *core.Op) bool { return op.Name == name })
	if i < 0 {
		panic("conform: no operator " + strconv.Quote(name))
	}
	return core.Ops[i]
}

func (c *Case) String() string { return fmt.Sprintf("%s/%s/%s", c.forward(), shortNames[c.IO], c.Name) }
