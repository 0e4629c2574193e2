package core

import (
	"fmt"
	"strings"
)

// plan is a row of the table made ready for decoding: names resolved to positions once, so that a call compares numbers only.
type plan struct {
	symbol  string // "gdn_fwd", the beginning of every message
	tensors []tensorPlan
	derived []expr
	sizes   []string // names by position in Call.Sizes
	offsets int      // position of the tensor of sequence offsets, or -1
	vFirst  int      // position of the number state_v_first, or -1
}

// tensorPlan is what Decode has to know of one tensor.
type tensorPlan struct {
	full    []dim
	short   []dim // full without the dimension in brackets; nil where there is none
	swapped []dim // full with the last two exchanged; nil unless State
	like    int   // position of Like, or -1
	with    int   // position of With, or -1
	out     bool
	host    bool
	derived bool // has a size that is derived
}

// dim is one dimension: a size plus a constant.
type dim struct {
	size uint8 // position in Call.Sizes
	plus int8
}

// Positions of the letters, in the order of Letters, which a test compares.
const (
	sizeB = iota
	sizeT
	sizeH
	sizeHV
	sizeK
	sizeV
	sizeN
	sizeD
	sizeW
	sizeP
	sizeR
)

func (op *Op) compiled() *plan {
	op.once.Do(func() { op.plan = newPlan(op) })
	return op.plan
}

// Derive adds the derived sizes to those of the letters, of which absent ones are 0; ok is false where one is too large to be a size. The
// numbers that they count on are in the map too.
func (op *Op) Derive(sizes map[string]int64) (ok bool) {
	var s [MaxSizes]int64
	var ints [MaxNumbers]int64
	for i := range op.Numbers {
		ints[i] = sizes[op.Numbers[i].Name]
	}
	p := op.compiled()
	for i, letter := range Letters {
		s[i] = sizes[letter]
	}
	for i, e := range p.derived {
		n, ok := e.eval(&s, &ints)
		if !ok {
			return false
		}
		s[len(Letters)+i] = n
		sizes[op.Derived[i].Name] = n
	}
	return true
}

// newPlan panics where the table is wrong; a test compiles every row.
func newPlan(op *Op) *plan {
	p := &plan{symbol: "gdn_" + op.Name, sizes: append([]string(nil), Letters...), offsets: -1, vFirst: -1}
	for i := range op.Derived {
		p.derived = append(p.derived, parseExpr(op.Derived[i].Expr, p.sizes, op.Numbers))
		p.sizes = append(p.sizes, op.Derived[i].Name)
	}
	for i := range op.Numbers {
		if op.Numbers[i].Name == "state_v_first" {
			p.vFirst = i
		}
	}
	if len(op.Tensors) > MaxTensors || len(op.Numbers) > MaxNumbers || len(p.sizes) > MaxSizes || op.Tensors[0].Role != In || op.Tensors[0].Host {
		panic("core: " + p.symbol + " is beyond the limits of a Call, or its first tensor is not a plain input")
	}
	names := make([]string, len(op.Tensors))
	for i := range op.Tensors {
		names[i] = op.Tensors[i].Name
	}
	bound := map[uint8]bool{sizeN: true}
	for i := range op.Tensors {
		a := &op.Tensors[i]
		tp := tensorPlan{like: -1, with: -1, out: a.Role.Written(), host: a.Host}
		if a.Like != "" {
			tp.like = mustIndex(names, a.Like, p.symbol)
		}
		if a.With != "" {
			tp.with = mustIndex(names, a.With, p.symbol)
		}
		if a.Host {
			p.offsets = i
		}
		bracket := -1
		for j, word := range strings.Fields(a.Dims) {
			name, isPlus := strings.CutSuffix(word, "+1")
			if strings.HasPrefix(name, "[") {
				bracket, name = j, strings.Trim(name, "[]")
			}
			d := dim{size: uint8(mustIndex(p.sizes, name, a.Dims))}
			if isPlus {
				d.plus = 1
			}
			tp.full = append(tp.full, d)
			tp.derived = tp.derived || int(d.size) >= len(Letters)
			bound[d.size] = bound[d.size] || a.Role == In || a.Role == InOut
		}
		if bracket >= 0 {
			tp.short = append(append([]dim{}, tp.full[:bracket]...), tp.full[bracket+1:]...)
		}
		if a.State {
			n := len(tp.full)
			tp.swapped = append(append([]dim{}, tp.full[:n-2]...), tp.full[n-1], tp.full[n-2])
		}
		p.tensors = append(p.tensors, tp)
	}
	for i := range p.tensors {
		for _, d := range p.tensors[i].full {
			if op.Tensors[i].Role != OptIn && int(d.size) < len(Letters) && !bound[d.size] {
				panic("core: " + p.symbol + ": no required tensor gives " + p.sizes[d.size])
			}
		}
	}
	return p
}

// dims are the dimensions of tensor i in this call, for the rank that came; nil where no form has that rank.
func (p *plan) dims(i int, rank int, c *Call) []dim {
	tp := &p.tensors[i]
	switch {
	case rank == len(tp.full) && tp.swapped != nil && p.vFirst >= 0 && c.Ints[p.vFirst] != 0:
		return tp.swapped
	case rank == len(tp.full):
		return tp.full
	case tp.short != nil && rank == len(tp.short):
		return tp.short
	}
	return nil
}

// text writes dimensions as the table does: [B T H K].
func (p *plan) text(dims []dim) string {
	words := make([]string, len(dims))
	for i, d := range dims {
		words[i] = p.sizes[d.size]
		if d.plus != 0 {
			words[i] += fmt.Sprintf("+%d", d.plus)
		}
	}
	return "[" + strings.Join(words, " ") + "]"
}

// expected names all forms that tensor i may have.
func (p *plan) expected(i int, c *Call) string {
	tp := &p.tensors[i]
	s := p.text(p.dims(i, len(tp.full), c))
	if tp.short != nil {
		s = p.text(tp.short) + " or " + s
	}
	return s
}
