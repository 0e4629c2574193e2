package core

import (
	"math/rand/v2"
	"testing"
)

// layout is a view for these tests: offset and strides in elements of a common buffer.
func layout(offset int64, shape, stride []int64) Tensor {
	t := Tensor{Data: uintptr(1<<20 + 4*offset), DType: F32, Rank: int32(len(shape))}
	copy(t.Shape[:], shape)
	copy(t.Stride[:], stride)
	return t
}

func spanOf(t *Tensor) span {
	lo, hi := t.Data, t.Data+4
	for j := range t.Shape[:t.Rank] {
		if way := (t.Shape[j] - 1) * t.Stride[j] * 4; way > 0 {
			hi += uintptr(way)
		} else {
			lo -= uintptr(-way)
		}
	}
	return span{lo, hi}
}

func areApart(a, b Tensor) bool {
	sa, sb := spanOf(&a), spanOf(&b)
	return !sa.meets(sb) || apart(&a, &sa, &b, &sb)
}

type dims = []int64

func TestApart(t *testing.T) {
	for _, test := range []struct {
		name string
		a, b Tensor
		want bool
	}{
		{"halves of fused rows", layout(0, dims{6, 4}, dims{8, 1}), layout(4, dims{6, 4}, dims{8, 1}), true},
		{"rows shifted into each other", layout(0, dims{6, 4}, dims{8, 1}), layout(3, dims{6, 4}, dims{8, 1}), false},
		{"even and odd elements", layout(0, dims{9}, dims{2}), layout(1, dims{9}, dims{2}), true},
		{"q and v of one projection, heads of 4 and 8", layout(0, dims{2, 5, 3, 4}, dims{180, 36, 4, 1}), layout(12, dims{2, 5, 3, 8}, dims{180, 36, 8, 1}), true},
		{"heads side by side", layout(0, dims{2, 5, 3, 4}, dims{120, 24, 8, 1}), layout(4, dims{2, 5, 3, 4}, dims{120, 24, 8, 1}), true},
		{"halves of time within each head", layout(0, dims{2, 3, 4}, dims{24, 4, 1}), layout(12, dims{2, 3, 4}, dims{24, 4, 1}), true},
		{"every third row, and the two after it as one", layout(0, dims{4, 4}, dims{12, 1}), layout(4, dims{4, 8}, dims{12, 1}), true},
		{"one of them backwards", layout(40, dims{6, 4}, dims{-8, 1}), layout(4, dims{6, 4}, dims{8, 1}), true},
		{"the same, meeting", layout(44, dims{6, 4}, dims{-8, 1}), layout(4, dims{6, 4}, dims{8, 1}), false},
		{"a broadcast input in the other half", layout(0, dims{6, 3, 4}, dims{8, 0, 1}), layout(4, dims{6, 4}, dims{8, 1}), true},
		{"row against column", layout(0, dims{4}, dims{1}), layout(3, dims{4}, dims{4}), false},
	} {
		if got := areApart(test.a, test.b); got != test.want || areApart(test.b, test.a) != got {
			t.Errorf("%s: apart is %v and %v", test.name, got, areApart(test.b, test.a))
		}
	}
}

// Whatever the views, "apart" and "nested" must be true of every element.
func TestApartAgainstEveryElement(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func() Tensor {
		rank := 1 + rng.IntN(3)
		shape, stride := make(dims, rank), make(dims, rank)
		for j := range shape {
			shape[j], stride[j] = 1+rng.Int64N(4), rng.Int64N(25)-8
		}
		return layout(rng.Int64N(40), shape, stride)
	}
	proved := 0
	for range 20000 {
		a, b := random(), random()
		ea, eb := elements(&a), elements(&b)
		common := false
		for e := range ea {
			common = common || eb[e] > 0
		}
		if areApart(a, b) {
			proved++
			if common {
				t.Fatalf("%+v and %+v share memory", a, b)
			}
		}
		if nested(&a) {
			for _, n := range ea {
				if n > 1 {
					t.Fatalf("%+v overlaps itself", a)
				}
			}
		}
	}
	if proved < 1000 {
		t.Errorf("only %d pairs were apart", proved)
	}
}

// elements counts how often each address is an element of the view.
func elements(t *Tensor) map[uintptr]int {
	all := map[uintptr]int{t.Data: 1}
	for j := range t.Shape[:t.Rank] {
		next := map[uintptr]int{}
		for i := range t.Shape[j] {
			for e, n := range all {
				next[e+uintptr(4*i*t.Stride[j])] += n
			}
		}
		all = next
	}
	return all
}
