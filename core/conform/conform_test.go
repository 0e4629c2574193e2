package conform

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"libgdn/core"
	"libgdn/core/oracle"
)

// TestCasesCoverTheTable fails when the table grows by something that no case tries.
func TestCasesCoverTheTable(t *testing.T) {
	names := map[string]bool{}
	seen := map[string]bool{}
	for _, c := range cases(false) {
		if names[c.String()] {
			t.Errorf("two cases are named %v", c)
		}
		names[c.String()] = true
		for _, name := range []string{c.forward(), c.backward()} {
			op := find(name)
			for i := range op.Tensors {
				a := &op.Tensors[i]
				if a.Name == "tape" {
					continue
				}
				state := "absent"
				if c.has(a) {
					state = c.dtype(op, a).String()
					seen[fmt.Sprint(name, " ", a.Name, " ", c.layout(a))] = true
				}
				seen[fmt.Sprint(name, " ", a.Name, " ", state)] = true
			}
			for _, n := range op.Numbers {
				seen[fmt.Sprint(name, " ", n.Name, " ", c.Flags[n.Name])] = true
			}
		}
	}
	for _, c := range plainCases(false) {
		if names[c.String()] {
			t.Errorf("two cases are named %v", c)
		}
		names[c.String()] = true
		op := find(c.Op)
		for i := range op.Tensors {
			a := &op.Tensors[i]
			state := "absent"
			if c.has(op, a) {
				state = c.dtype(op, a).String()
				seen[fmt.Sprint(c.Op, " ", a.Name, " ", c.layout(a))] = true
			}
			seen[fmt.Sprint(c.Op, " ", a.Name, " ", state)] = true
		}
		for _, n := range op.Numbers {
			seen[fmt.Sprint(c.Op, " ", n.Name, " ", c.Numbers[n.Name])] = true
		}
	}
	want := func(what ...any) {
		if s := fmt.Sprint(what...); !seen[s] {
			t.Errorf("no case has %s", s)
		}
	}
	double := []core.DType{core.F32, core.F64}
	dtypes := map[core.Rule][]core.DType{core.Float: {core.F32, core.BF16, core.F16, core.F64}, core.Io: {core.F32, core.BF16, core.F16, core.F64},
		core.Acc: double, core.Integer: {core.I32, core.I64}}
	for _, op := range core.Ops {
		for _, a := range op.Tensors {
			if a.Name == "tape" {
				continue
			}
			for _, d := range dtypes[a.Rule] {
				want(op.Name, " ", a.Name, " ", d)
			}
			if a.Role == core.OptIn || a.Role == core.OptOut {
				want(op.Name, " ", a.Name, " absent")
			}
			want(op.Name, " ", a.Name, " ", gaps)
			if strings.HasPrefix(a.Dims, "B T") {
				want(op.Name, " ", a.Name, " ", heads)
			}
		}
		for _, n := range op.Numbers {
			if n.Name == "lower_bound" {
				want(op.Name, " ", n.Name, " ", -5)
			} else if n.Float {
				want(op.Name, " ", n.Name, " ", 0.1)
			}
			want(op.Name, " ", n.Name, " ", n.Min)
			if n.Max < 1<<20 { // else it is a count, bounded by a size
				want(op.Name, " ", n.Name, " ", n.Max)
			}
		}
	}
}

func TestHalfPrecision(t *testing.T) {
	for b := range 1 << 16 {
		for d, conv := range map[core.DType]func(float64) uint16{core.F16: toF16, core.BF16: func(x float64) uint16 { return toBF16(float32(x)) }} {
			mem := []byte{byte(b), byte(b >> 8)}
			if x := decode(mem, d); !math.IsNaN(x) && conv(x) != uint16(b) {
				t.Fatalf("%v: %#04x is %v and back %#04x", d, b, x, conv(x))
			}
		}
	}
	for x, want := range map[float64]uint16{1: 0x3C00, 1 + 0x1p-11: 0x3C00, 1 + 0x3p-11: 0x3C02, 65504: 0x7BFF, 65519.9: 0x7BFF, 65520: 0x7C00, 0x1p-25: 0,
		0x1.1p-25: 1, -0x1p-14: 0x8400, 0x1.ff8p-15: 0x03FF, 0x1.ffcp-15: 0x0400} {
		if got := toF16(x); got != want {
			t.Errorf("fp16 of %v is %#04x, expected %#04x", x, got, want)
		}
	}
	for x, want := range map[float32]uint16{1: 0x3F80, 1 + 0x1p-8: 0x3F80, 1 + 0x3p-8: 0x3F82, 1 + 0x1.01p-8: 0x3F81} {
		if got := toBF16(x); got != want {
			t.Errorf("bf16 of %v is %#04x, expected %#04x", x, got, want)
		}
	}
	// The poison must be NaN, or nothing would show.
	for _, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
		if x := decode([]byte{255, 255, 255, 255, 255, 255, 255, 255}, d); !math.IsNaN(x) {
			t.Errorf("0xFF bytes are %v as %v", x, d)
		}
	}
}

func TestCompare(t *testing.T) {
	n := 5000
	want := make([]float64, n)
	for i := range want {
		want[i] = math.Sin(float64(i + 1))
	}
	changed := func(f func(x []float64)) []float64 {
		x := slices.Clone(want)
		f(x)
		return x
	}
	rounded := func(d core.DType) []float64 {
		return changed(func(x []float64) {
			for i := range x {
				mem := make([]byte, 8)
				encode(mem, d, x[i])
				x[i] = decode(mem, d)
			}
		})
	}
	noisy := func(e float64) []float64 {
		return changed(func(x []float64) {
			for i := range x {
				x[i] *= 1 + e*math.Cos(float64(7*i))
			}
		})
	}
	for name, c := range map[string]struct {
		got  []float64
		d    core.DType
		pass bool
	}{
		"equal":                         {want, core.F32, true},
		"fp32 rounding":                 {rounded(core.F32), core.F32, true},
		"bf16 rounding":                 {rounded(core.BF16), core.BF16, true},
		"fp16 rounding":                 {rounded(core.F16), core.F16, true},
		"bf16 rounding passed for fp32": {rounded(core.BF16), core.F32, false},
		"bf16 rounding passed for fp16": {rounded(core.BF16), core.F16, false},
		"small noise":                   {noisy(1e-5), core.F32, true},
		"noise":                         {noisy(2e-5), core.F32, false},
		"bf16 noise":                    {noisy(8e-3), core.BF16, false},
		"bf16 noise within rounding":    {noisy(3.9e-3), core.BF16, false},
		"one wrong":                     {changed(func(x []float64) { x[17] *= 1.01 }), core.F32, false},
		"one wrong in bf16":             {changed(func(x []float64) { x[17] *= 1.01 }), core.BF16, false},
		"NaN":                           {changed(func(x []float64) { x[17] = math.NaN() }), core.F32, false},
		"infinite":                      {changed(func(x []float64) { x[17] = math.Inf(1) }), core.F32, false},
		"all zero":                      {make([]float64, n), core.F32, false},
		"sign":                          {changed(func(x []float64) { x[17] = -x[17] }), core.F32, false},
		"short":                         {want[1:], core.F32, false},
	} {
		if err := compare(c.got, want, boundOf("o", c.d, false)); (err == nil) != c.pass {
			t.Errorf("%s: %v", name, err)
		}
	}
	zeros := make([]float64, 4)
	if err := compare(zeros, zeros, boundOf("o", core.F32, false)); err != nil {
		t.Errorf("zeros: %v", err)
	}
	if compare([]float64{0, 0, 0, 1e-20}, zeros, boundOf("o", core.F32, false)) == nil {
		t.Error("1e-20 passed for 0")
	}
	if compare(noisy(1e-9), want, boundOf("o", core.F64, true)) == nil {
		t.Error("an error of 1e-9 passed in double precision")
	}
}

// TestArraysKeepElementsApart also shows that a write beside any element is noticed.
func TestArraysKeepElementsApart(t *testing.T) {
	for _, lie := range []layout{compact, plain, heads, gaps, rows, reversed} {
		for _, around := range []fence{words, before, after} {
			a := newArray(t, "x", core.F32, []int64{2, 3, 4, 5}, lie, around, 3)
			x := make([]float64, a.count())
			for i := range x {
				x[i] = float64(i)
			}
			a.set(x)
			if !slices.Equal(a.values(), x) {
				t.Fatalf("%s: elements overlap", lie)
			}
			a.remember()
			covered := map[int64]bool{}
			a.offsets(func(_ int, at int64) bool {
				for j := range int64(4) {
					covered[at+j] = true
				}
				return true
			})
			for at := 0; at < len(a.mem); at += 5 { // all places within an element, in turn
				a.mem[at] ^= 1
				if a.touched(false) == nil {
					t.Fatalf("%s, %s: an input's byte %d changed unnoticed", lie, around, at)
				}
				if got := a.touched(true) == nil; got != covered[int64(at)] {
					t.Fatalf("%s, %s: an output's byte %d, element %v, changed: noticed %v", lie, around, at, covered[int64(at)], !got)
				}
				a.mem[at] ^= 1
			}
		}
	}
	for _, lie := range []layout{broadcast, expanded} {
		a := newArray(t, "x", core.F32, []int64{2, 3, 4, 5}, lie, words, 0)
		if a.stride[2] != 0 {
			t.Errorf("%s has strides %v", lie, a.stride)
		}
	}
}

// plainBackend is the oracle as a backend, with a fault of choice.
type plainBackend struct {
	fault func(c *core.Call, name string, x []float64) // changes an output's values before they are written
	after func(c *core.Call)
}

func (plainBackend) Name() string                        { return "oracle" }
func (plainBackend) Device() core.DeviceType             { return core.CPU }
func (plainBackend) Supports(*core.Call) (string, error) { return "plain", nil }

// elements visits the memory of each element.
func elements(t *core.Tensor, f func(i int, mem []byte)) {
	a := &array{dtype: t.DType, shape: t.Shape[:t.Rank], stride: t.Stride[:t.Rank]}
	base := *(*unsafe.Pointer)(unsafe.Pointer(&t.Data))
	a.offsets(func(i int, at int64) bool {
		f(i, unsafe.Slice((*byte)(unsafe.Add(base, at)), t.DType.Size()))
		return true
	})
}

func (b plainBackend) Run(c *core.Call) error {
	p := &oracle.GDN{Channels: strings.HasPrefix(c.Op.Name, "kda"), B: int(c.Size("B")), T: int(c.Size("T")), H: int(c.Size("H")), HV: int(c.Size("HV")), K: int(c.Size("K")), V: int(c.Size("V")),
		Scale: c.Float("scale"), L2Norm: c.Int("qk_l2norm") != 0, Gate: c.Int("gate") != 0, BetaSigmoid: c.Int("beta_sigmoid") != 0,
		NegEigval: c.Int("neg_eigval") != 0, StateVFirst: c.Int("state_v_first") != 0, In: oracle.Tensors{}}
	for i, a := range c.Op.Tensors {
		if c.Has(a.Name) && (a.Role == core.In || a.Role == core.OptIn) && a.Name != "tape" {
			x := make([]float64, 0, 16)
			elements(&c.Tensors[i], func(_ int, mem []byte) { x = append(x, decode(mem, c.Tensors[i].DType)) })
			p.In[a.Name] = x
		}
	}
	if p.Channels {
		p.LowerBound = c.Float("lower_bound")
	}
	if cu, ok := p.In["cu_seqlens"]; ok {
		for _, x := range cu {
			p.Cu = append(p.Cu, int(x))
		}
		delete(p.In, "cu_seqlens")
	}
	out := p.Forward
	if strings.HasSuffix(c.Op.Name, "bwd") {
		out = p.Backward
	}
	for name, x := range out() {
		if !slices.ContainsFunc(c.Op.Tensors, func(a core.TensorArg) bool { return a.Name == name }) || !c.Has(name) {
			continue
		}
		if b.fault != nil {
			b.fault(c, name, x)
		}
		elements(c.Tensor(name), func(i int, mem []byte) { encode(mem, c.Tensor(name).DType, x[i]) })
	}
	if b.after != nil {
		b.after(c)
	}
	return nil
}

// poke changes the byte at this offset from a tensor's first element.
func poke(t *core.Tensor, offset int64) {
	*(*byte)(unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&t.Data)), offset)) ^= 0x55
}

// TestSuiteCatchesFaults gives the suite a right backend and wrong ones.
func TestSuiteCatchesFaults(t *testing.T) {
	some := cases(true)
	some = slices.DeleteFunc(some, func(c *Case) bool { return c.B*c.T*c.HV*c.K*c.V > 30000 })
	for _, c := range some {
		for _, op := range []string{c.forward(), c.backward()} {
			if err := c.try(t, plainBackend{}, op); err != nil {
				t.Fatalf("%s %s: the oracle itself fails: %v", op, c.Name, err)
			}
		}
	}
	on := func(want string, f func(c *core.Call, x []float64)) plainBackend {
		return plainBackend{fault: func(c *core.Call, name string, x []float64) {
			if name == want && len(x) > 0 {
				f(c, x)
			}
		}}
	}
	faults := map[string]plainBackend{
		"one element a little off": on("o", func(_ *core.Call, x []float64) { x[len(x)/2] += 0.01 }),
		"an element left out":      on("o", func(_ *core.Call, x []float64) { x[len(x)-1] = math.NaN() }),
		"a state transposed": on("final_state", func(c *core.Call, x []float64) {
			if k, v := int(c.Size("K")), int(c.Size("V")); c.Int("state_v_first") != 0 {
				copy(x, transposed(x, v, k))
			}
		}),
		"rows of no sequence": on("dv", func(c *core.Call, x []float64) {
			if x[len(x)-1] == 0 {
				x[len(x)-1] = 1e-3
			}
		}),
		"an empty sequence's state": on("final_state", func(c *core.Call, x []float64) {
			if c.Size("T") == 0 {
				x[0]++
			}
		}),
		"the first gate's gradient": on("dg", func(c *core.Call, x []float64) {
			if !c.Has("initial_state") {
				x[0] += 1e-4
			}
		}),
		"ddt_bias a little off": on("ddt_bias", func(_ *core.Call, x []float64) { x[0] *= 1.001 }),
		"write behind the end": {after: func(c *core.Call) {
			if strings.HasSuffix(c.Op.Name, "fwd") && c.Has("final_state") {
				x := c.Tensor("final_state")
				last := int64(1)
				for i := range x.Shape[:x.Rank] {
					last += (x.Shape[i] - 1) * x.Stride[i]
				}
				poke(x, last*x.DType.Size())
			}
		}},
		"write before the first": {after: func(c *core.Call) {
			if strings.HasSuffix(c.Op.Name, "bwd") {
				return
			}
			if o := c.Tensor("o"); o.DType == core.F16 {
				poke(o, -1)
			}
		}},
		"write to an input": {after: func(c *core.Call) {
			if c.Has("beta") && c.Size("T") > 0 {
				poke(c.Tensor("beta"), 0)
			}
		}},
		"gap of a strided output": {after: func(c *core.Call) {
			if strings.HasSuffix(c.Op.Name, "bwd") && c.Tensor("dk").Stride[3] == 2 && c.Size("K") > 1 && c.Size("T") > 0 {
				poke(c.Tensor("dk"), c.Tensor("dk").DType.Size())
			}
		}},
	}
	some = slices.DeleteFunc(some, func(c *Case) bool { return c.Around != words }) // a stray write there would end the test
	for name, b := range faults {
		caught := 0
		for _, c := range some {
			for _, op := range []string{c.forward(), c.backward()} {
				if c.try(t, b, op) != nil {
					caught++
				}
			}
			if caught > 0 {
				break
			}
		}
		if caught == 0 { // a fault's function that never applied would show here too
			t.Errorf("%s: no case fails", name)
		}
	}
}
