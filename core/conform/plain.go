package conform

import (
	"bytes"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"libgdn/core"
	"libgdn/core/oracle"
)

// solo is one set of arguments of an operator that stands for itself: no chunk form, no tape, its backward an operator like any other.
// Its zero values are the plain choice.
type solo struct {
	Name     string // below the operator's and the dtype's
	Op       string
	Size     map[string]int64 // of the letters; N follows
	Cu       []int            // of packed sequences; nil: B sequences
	Narrow   bool             // offsets and indices as int32
	IO, Aux  core.DType
	Types    map[string]core.DType                          // where a tensor has neither IO (the first, and all with Rule Io) nor Aux (inputs that may have any dtype)
	Give     []string                                       // optional inputs that are given
	Unwanted []string                                       // optional outputs that are not
	Short    []string                                       // tensors that come without their dimension in brackets
	Draw     map[string]draw                                // how an input is drawn; absent: normally
	Given    func(in oracle.Tensors, size map[string]int64) // changes what was drawn, or adds what follows from it
	Numbers  map[string]float64
	Layout   layout
	Layouts  map[string]layout
	Around   fence
	Skew     int
	Ratio    float64 // of the error allowed in fp32, where sums lose more than boundOf grants; 0: boundOf's
}

// draw makes element i of an input.
type draw func(r *rand.Rand, i int) float64

// plainCases lists the cases of all families.
func plainCases(short bool) []*solo {
	return slices.Concat(gateCases(short), convCases(short), stageCases(short), summaryCases(short), frameCases(short), pagedCases(short))
}

// everywhere turns one case into its variants: all dtypes, all layouts, guard pages. short keeps a few.
func everywhere(c solo, short bool) []*solo {
	var list []*solo
	add := func(name string, change func(c *solo)) {
		x := c
		x.Name, x.Skew = strings.Trim(c.Name+"/"+name, "/"), len(list)%16
		change(&x)
		list = append(list, &x)
	}
	for _, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
		add("", func(c *solo) {
			c.IO, c.Aux = d, core.F32
			if d == core.F64 {
				c.Aux = d
			}
		})
		if d != core.F64 {
			add("aux as io", func(c *solo) { c.IO, c.Aux = d, d })
		}
	}
	add("aux fp64", func(c *solo) { c.IO, c.Aux, c.Narrow = core.F32, core.F64, true })
	lies := []layout{plain, heads, gaps, rows, reversed, broadcast}
	if short {
		lies = []layout{heads, gaps}
	}
	for _, lie := range lies {
		for _, d := range []core.DType{core.F32, core.BF16, core.F64} {
			if d == core.F32 || !short {
				add("layout "+string(lie), func(c *solo) { c.IO, c.Aux, c.Layout = d, d, lie })
			}
		}
	}
	for _, around := range []fence{before, after} {
		for _, d := range []core.DType{core.F32, core.BF16} {
			add(string(around), func(c *solo) { c.IO, c.Aux, c.Around = d, d, around })
		}
	}
	return list
}

func (c *solo) String() string { return fmt.Sprintf("%s/%s/%s", c.Op, shortNames[c.IO], c.Name) }

func (c *solo) has(op *core.Op, a *core.TensorArg) bool {
	switch {
	case a.Role.Required():
		return true
	case a.Host:
		return c.Cu != nil
	case a.Role == core.OptIn:
		return slices.Contains(c.Give, a.Name)
	}
	if slices.Contains(c.Unwanted, a.Name) {
		return false
	}
	for i := range op.Tensors {
		if op.Tensors[i].Name == a.With {
			return c.has(op, &op.Tensors[i])
		}
	}
	return true
}

func (c *solo) dtype(op *core.Op, a *core.TensorArg) core.DType {
	if d, ok := c.Types[a.Name]; ok {
		return d
	}
	switch a.Rule {
	case core.Io:
		return c.IO
	case core.Float:
		if a == &op.Tensors[0] {
			return c.IO
		}
		return c.Aux
	case core.Acc:
		if first := c.dtype(op, &op.Tensors[0]); first == core.F64 {
			return core.F64
		}
		return core.F32
	case core.Same:
		for i := range op.Tensors {
			if op.Tensors[i].Name == a.Like {
				return c.dtype(op, &op.Tensors[i])
			}
		}
	case core.Integer:
		if c.Narrow {
			return core.I32
		}
		return core.I64
	}
	panic("conform: no dtype for " + a.Name)
}

// sizes are those of the letters and the derived ones.
func (c *solo) sizes(op *core.Op) map[string]int64 {
	size := maps.Clone(c.Size)
	if _, ok := size["N"]; !ok {
		size["N"] = size["B"]
	}
	if c.Cu != nil {
		size["N"] = int64(len(c.Cu) - 1)
	}
	for name, x := range c.Numbers {
		size[name] = int64(x)
	}
	op.Derive(size)
	return size
}

func (c *solo) shape(a *core.TensorArg, size map[string]int64) []int64 {
	shape := []int64{}
	for _, d := range strings.Fields(a.Dims) {
		if letter, optional := strings.CutPrefix(d, "["); optional {
			if slices.Contains(c.Short, a.Name) {
				continue
			}
			d = strings.TrimSuffix(letter, "]")
		}
		letter, more := strings.CutSuffix(d, "+1")
		n, ok := size[letter]
		if !ok {
			panic("conform: " + c.Op + ": no size " + letter)
		}
		if more {
			n++
		}
		shape = append(shape, n)
	}
	if n := len(shape); a.State && c.Numbers["state_v_first"] != 0 {
		shape[n-1], shape[n-2] = shape[n-2], shape[n-1]
	}
	return shape
}

func (c *solo) layout(a *core.TensorArg) layout {
	lie, ok := c.Layouts[a.Name]
	if !ok {
		lie = c.Layout
	}
	if (lie == broadcast || lie == expanded) && a.Role != core.In && a.Role != core.OptIn {
		return compact
	}
	return lie
}

// draws makes the inputs' values, in float64.
func (c *solo) draws(op *core.Op, size map[string]int64) oracle.Tensors {
	in := oracle.Tensors{}
	for i := range op.Tensors {
		a := &op.Tensors[i]
		if a.Role == core.Out || a.Role == core.OptOut || !c.has(op, a) {
			continue
		}
		n := int64(1)
		for _, s := range c.shape(a, size) {
			n *= s
		}
		h := fnv.New64a()
		fmt.Fprint(h, c, " ", a.Name)
		r := rand.New(rand.NewPCG(Seed, h.Sum64()))
		x := make([]float64, n)
		for i := range x {
			switch f := c.Draw[a.Name]; {
			case a.Host:
				x[i] = float64(c.Cu[i])
			case f != nil:
				x[i] = f(r, i)
			default:
				x[i] = r.NormFloat64()
			}
		}
		in[a.Name] = x
	}
	if c.Given != nil {
		c.Given(in, size)
	}
	return in
}

// try runs the case and holds every output to the oracle.
func (c *solo) try(t testing.TB, b core.Backend) error {
	f, err := c.run(t, b)
	if err != nil {
		return err
	}
	op := f.op
	p := &oracle.Plain{Op: c.Op, Size: c.sizes(op), Cu: c.Cu, Numbers: c.Numbers, In: oracle.Tensors{}}
	for i := range op.Tensors {
		a := &op.Tensors[i]
		if x := f.arrays[a.Name]; x != nil && a.Role != core.Out && a.Role != core.OptOut && !a.Host {
			p.In[a.Name] = x.before()
		}
	}
	want := p.Run()
	double := c.dtype(op, &op.Tensors[0]) == core.F64
	var all []error
	for _, x := range f.outputs() {
		limit := f.limit(x, double)
		if c.Ratio != 0 && !double && f.device == nil {
			limit.ratio = c.Ratio
		}
		got, expected := x.values(), want[x.name]
		if p.In[x.name] != nil {
			var err error
			if got, expected, err = x.updated(expected); err != nil {
				all = append(all, err)
			}
		}
		if err := compare(got, expected, limit); err != nil {
			all = append(all, fmt.Errorf("%s, %v of shape %v: %w", x.name, x.dtype, x.shape, err))
		}
	}
	return errors.Join(all...)
}

// run makes the arrays, NaN in the outputs and in the rows of inputs that belong to no sequence, and calls.
func (c *solo) run(t testing.TB, b core.Backend) (*call, error) {
	op := find(c.Op)
	size := c.sizes(op)
	in := c.draws(op, size)
	f := &call{op: op, arrays: map[string]*array{}, numbers: c.Numbers}
	for i := range op.Tensors {
		a := &op.Tensors[i]
		if !c.has(op, a) {
			continue
		}
		x := newArray(t, a.Name, c.dtype(op, a), c.shape(a, size), c.layout(a), c.Around, c.Skew+i)
		f.arrays[a.Name] = x
		if values, ok := in[a.Name]; ok {
			x.set(values)
			if c.Cu != nil && strings.HasPrefix(a.Dims, "B T") {
				x.poisonRows(int64(c.Cu[len(c.Cu)-1]))
			}
		}
	}
	return f, f.run(b)
}

// updated returns the elements that a call was to change, and what they were to become. Where want is NaN the element's bits must be what they
// were.
func (a *array) updated(want []float64) (got, expected []float64, err error) {
	size := a.dtype.Size()
	a.offsets(func(i int, at int64) bool {
		switch {
		case !math.IsNaN(want[i]):
			got, expected = append(got, decode(a.mem[at:], a.dtype)), append(expected, want[i])
		case !bytes.Equal(a.mem[at:at+size], a.was[at:at+size]) && err == nil:
			err = fmt.Errorf("element %d of %s has changed from %v to %v, expected its bits to stay", i, a.name, decode(a.was[at:], a.dtype), decode(a.mem[at:], a.dtype))
		}
		return true
	})
	return got, expected, err
}

// poisonRows puts NaN into the rows from one on of the second dimension.
func (a *array) poisonRows(from int64) {
	row := int64(1)
	for _, n := range a.shape[2:] {
		row *= n
	}
	a.offsets(func(i int, at int64) bool {
		if int64(i) >= from*row {
			for j := range a.dtype.Size() {
				a.mem[at+j] = 0xFF
			}
		}
		return true
	})
}
