package core

import (
	"slices"
	"testing"
)

func TestExpr(t *testing.T) {
	names, numbers := []string{"A", "B"}, []NumberArg{{Name: "x", Float: true}, {Name: "n", Max: 9}, {Name: "low", Min: -1}}
	for _, test := range []struct {
		text string
		a, b int64
		want int64
		ok   bool
	}{
		{"A+B*2", 3, 4, 11, true},
		{"(A+B)*2", 3, 4, 14, true},
		{"A*B//5*5", 3, 4, 10, true},
		{" ( A + 31 ) // 32 * 32 ", 33, 0, 64, true},
		{"A*B", 1 << 40, 1 << 40, 0, false},
		{"A*B*2", 1 << 30, 1 << 27, 0, false},
		{"A+B", maxSize, 1, 0, false},
		{"A*B", 1 << 62, 0, 0, true},
		{"A//B", 1, 0, 0, false},
		{"A*n + 1", 2, 0, 15, true},
	} {
		got, ok := parseExpr(test.text, names, numbers).eval(&[MaxSizes]int64{test.a, test.b}, &[MaxNumbers]int64{0, 7})
		if ok != test.ok || ok && got != test.want {
			t.Errorf("%s with A=%d B=%d: %d, %v", test.text, test.a, test.b, got, ok)
		}
	}
	for _, text := range []string{"", "A+", "(A", "A)", "C", "A B", "A-B", "A/B", "x", "low"} {
		if !panics(func() { parseExpr(text, names, numbers) }) {
			t.Errorf("%q is taken for an expression", text)
		}
	}
}

func panics(f func()) (p bool) {
	defer func() { p = recover() != nil }()
	f()
	return
}

func TestTable(t *testing.T) {
	if want := []string{"B", "T", "H", "HV", "K", "V", "N", "D", "W", "P", "R"}; !slices.Equal(Letters, want) {
		t.Errorf("Letters are %v, the decoder counts on %v", Letters, want)
	}
	seen := map[string]bool{}
	for _, op := range Ops {
		if seen[op.Name] {
			t.Errorf("two operators are called %s", op.Name)
		}
		seen[op.Name] = true
		fields := map[string]bool{}
		for i := range op.Tensors {
			a := &op.Tensors[i]
			if fields[a.Name] || a.Doc == "" {
				t.Errorf("%s: %s is there twice, or has no doc", op.Name, a.Name)
			}
			fields[a.Name] = true
			// The decoder looks for With and Like among the tensors it has read already.
			for _, other := range []string{a.With, a.Like} {
				if other != "" && !fields[other] {
					t.Errorf("%s: %s refers to %s, which does not come before it", op.Name, a.Name, other)
				}
			}
		}
		for _, n := range op.Numbers {
			if fields[n.Name] {
				t.Errorf("%s: %s is there twice", op.Name, n.Name)
			}
			fields[n.Name] = true
		}
		op.compiled() // panics where the row is wrong
	}
	broken := &Op{Name: "broken", Tensors: []TensorArg{{Name: "x", Role: In, Dims: "B"}, {Name: "y", Role: OptIn, Dims: "T"}, {Name: "z", Role: Out, Dims: "T"}}}
	if !panics(func() { newPlan(broken) }) {
		t.Error("a size of an output that only an optional tensor gives is accepted")
	}
}
