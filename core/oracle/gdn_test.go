package oracle

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

const seed = 42

func normal(r *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

func each(x []float64, f func(float64) float64) []float64 {
	y := slices.Clone(x)
	for i := range y {
		y[i] = f(y[i])
	}
	return y
}

func constant(n int, x float64) []float64 {
	return each(make([]float64, n), func(float64) float64 { return x })
}

// unit scales each row of n numbers to length 1.
func unit(x []float64, n int) []float64 {
	y := slices.Clone(x)
	for row := range slices.Chunk(y, n) {
		sum := 0.
		for _, a := range row {
			sum += a * a
		}
		for i := range row {
			row[i] /= math.Sqrt(sum)
		}
	}
	return y
}

// small is a problem that uses every plain feature: two value heads a key head, K != V, a state, a decay, beta.
func small(r *rand.Rand) *GDN {
	p := &GDN{B: 2, T: 5, H: 2, HV: 4, K: 3, V: 2, Scale: 0.7}
	tokens, states := p.B*p.T, p.B*p.HV*p.K*p.V
	p.In = Tensors{
		"q": normal(r, tokens*p.H*p.K), "k": unit(normal(r, tokens*p.H*p.K), p.K), "v": normal(r, tokens*p.HV*p.V),
		"g":             each(normal(r, tokens*p.HV), func(x float64) float64 { return -math.Abs(x) }),
		"beta":          each(normal(r, tokens*p.HV), sigmoid),
		"initial_state": normal(r, states), "dout": normal(r, tokens*p.HV*p.V), "dht": normal(r, states),
	}
	return p
}

// pack makes one row of packed sequences of the batch, the second of them empty.
func pack(p *GDN) {
	p.Cu = []int{0, p.T - 1, p.T - 1, p.B * p.T}
	p.T, p.B = p.B*p.T, 1
	states := 3 * p.HV * p.K * p.V
	r := rand.New(rand.NewPCG(seed, 1))
	p.In["initial_state"], p.In["dht"] = normal(r, states), normal(r, states)
}

func loss(p *GDN) float64 {
	out := p.Forward()
	return dot(out["o"], p.In["dout"]) + dot(out["final_state"], p.In["dht"])
}

func dot(a, b []float64) float64 {
	sum := 0.
	for i := range b {
		sum += a[i] * b[i]
	}
	return sum
}

func TestGradients(t *testing.T) {
	for name, change := range map[string]func(*GDN, *rand.Rand){
		"plain":          func(*GDN, *rand.Rand) {},
		"default scale":  func(p *GDN, _ *rand.Rand) { p.Scale = 0 },
		"no gate":        func(p *GDN, _ *rand.Rand) { delete(p.In, "g") },
		"no beta":        func(p *GDN, _ *rand.Rand) { delete(p.In, "beta") },
		"no states":      func(p *GDN, _ *rand.Rand) { delete(p.In, "initial_state"); delete(p.In, "dht") },
		"v first":        func(p *GDN, _ *rand.Rand) { p.StateVFirst = true },
		"l2norm":         func(p *GDN, r *rand.Rand) { p.L2Norm = true; p.In["k"] = normal(r, len(p.In["k"])) },
		"beta channels":  func(p *GDN, r *rand.Rand) { p.In["beta"] = each(normal(r, len(p.In["v"])), sigmoid) },
		"sigmoid":        func(p *GDN, r *rand.Rand) { p.BetaSigmoid = true; p.In["beta"] = normal(r, len(p.In["v"])) },
		"negative":       func(p *GDN, r *rand.Rand) { p.BetaSigmoid, p.NegEigval = true, true },
		"key channels":   func(p *GDN, r *rand.Rand) { p.In["gk"] = each(normal(r, p.B*p.T*p.HV*p.K), negative) },
		"value channels": func(p *GDN, r *rand.Rand) { p.In["gv"] = each(normal(r, len(p.In["v"])), negative) },
		"packed":         func(p *GDN, _ *rand.Rand) { pack(p) },
		"gate": func(p *GDN, r *rand.Rand) {
			p.Gate, p.In["A_log"] = true, normal(r, p.HV)
			p.In["g"] = normal(r, len(p.In["g"]))
		},
		"gate with bias": func(p *GDN, r *rand.Rand) {
			p.Gate, p.In["A_log"], p.In["dt_bias"] = true, normal(r, p.HV), normal(r, p.HV)
			p.In["g"] = normal(r, len(p.In["g"]))
		},
		"kda": func(p *GDN, r *rand.Rand) { channels(p, each(normal(r, p.B*p.T*p.HV*p.K), negative)) },
		"kda gate": func(p *GDN, r *rand.Rand) {
			channels(p, normal(r, p.B*p.T*p.HV*p.K))
			p.Gate, p.In["A_log"], p.In["dt_bias"] = true, normal(r, p.HV), normal(r, p.HV*p.K)
		},
		"kda lower bound": func(p *GDN, r *rand.Rand) {
			channels(p, normal(r, p.B*p.T*p.HV*p.K))
			p.Gate, p.LowerBound, p.In["A_log"], p.In["dt_bias"] = true, -5, normal(r, p.HV), normal(r, p.HV*p.K)
			pack(p)
		},
		"kda lower bound alone": func(p *GDN, r *rand.Rand) {
			channels(p, normal(r, p.B*p.T*p.HV*p.K))
			p.Gate, p.LowerBound = true, -0.5
		},
		"all": func(p *GDN, r *rand.Rand) {
			p.In["gk"], p.In["gv"] = each(normal(r, p.B*p.T*p.HV*p.K), negative), each(normal(r, len(p.In["v"])), negative)
			p.Gate, p.In["A_log"], p.In["dt_bias"] = true, normal(r, p.HV), normal(r, p.HV)
			p.L2Norm, p.BetaSigmoid, p.NegEigval, p.StateVFirst = true, true, true, true
			p.In["beta"] = normal(r, len(p.In["v"]))
			pack(p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			p := small(r)
			change(p, r)
			grad := p.Backward()
			for _, input := range slices.Sorted(maps.Keys(p.In)) {
				got := grad[map[bool]string{false: "d" + input, true: "dh0"}[input == "initial_state"]]
				if input == "dout" || input == "dht" {
					continue
				}
				x := p.In[input]
				if len(got) != len(x) {
					t.Fatalf("d%s has %d elements, expected %d", input, len(got), len(x))
				}
				// Richardson's central difference: error of order h^4, some 1e-11 here, against 1e-12/h of rounding.
				const h = 1e-3
				at := func(i int, step float64) float64 {
					was := x[i]
					defer func() { x[i] = was }()
					x[i] = was + step
					return loss(p)
				}
				diff, norm := 0., 0.
				for i := range x {
					want := (8*(at(i, h)-at(i, -h)) - (at(i, 2*h) - at(i, -2*h))) / (12 * h)
					diff, norm = math.Hypot(diff, got[i]-want), math.Hypot(norm, want)
				}
				if !(diff <= 1e-8*norm) {
					t.Errorf("d%s is off by %.2e of its norm %.2e, seed %d", input, diff/norm, norm, seed)
				}
			}
		})
	}
}

// channels makes Kimi Delta Attention of it.
func channels(p *GDN, g []float64) { p.Channels, p.In["g"] = true, g }

func negative(x float64) float64 { return -math.Abs(x) / 2 }

// near compares with an absolute bound fit for values of order 1: a few hundred roundings.
func near(t *testing.T, what string, got, want []float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s has %d elements, expected %d", what, len(got), len(want))
	}
	for i := range want {
		if !(math.Abs(got[i]-want[i]) <= 1e-13) {
			t.Fatalf("%s[%d] is %v, expected %v, seed %d", what, i, got[i], want[i], seed)
		}
	}
}

// oneHead is a problem of one head with K=8, V=5 and everything absent but q, k, v and dout.
func oneHead(r *rand.Rand, T int) *GDN {
	p := &GDN{B: 1, T: T, H: 1, HV: 1, K: 8, V: 5, Scale: 0.5}
	p.In = Tensors{"q": normal(r, T*p.K), "k": unit(normal(r, T*p.K), p.K), "v": normal(r, T*p.V), "dout": normal(r, T*p.V)}
	return p
}

func (p *GDN) row(name string, t, n int) []float64 { return p.In[name][t*n : (t+1)*n] }

func TestClosedForms(t *testing.T) {
	source := func() *rand.Rand { return rand.New(rand.NewPCG(seed, 2)) }

	t.Run("one token", func(t *testing.T) {
		r := source()
		p := oneHead(r, 1)
		p.In["g"], p.In["beta"], p.In["initial_state"] = []float64{-0.3}, []float64{0.7}, normal(r, p.K*p.V)
		q, k, v := p.In["q"], p.In["k"], p.In["v"]
		want := make([]float64, p.V)
		for j := range want {
			var qs, ks float64
			for i := range q {
				s := math.Exp(-0.3) * p.In["initial_state"][i*p.V+j]
				qs, ks = qs+q[i]*s, ks+k[i]*s
			}
			want[j] = p.Scale * (qs + 0.7*dot(q, k)*(v[j]-ks))
		}
		near(t, "o", p.Forward()["o"], want)
	})

	t.Run("identical keys hold the last value", func(t *testing.T) {
		p := oneHead(source(), 70)
		for i := range p.In["k"] {
			p.In["k"][i] = p.In["k"][i%p.K]
		}
		var want []float64
		for i := range p.T {
			qk := dot(p.row("q", i, p.K), p.row("k", i, p.K))
			want = append(want, each(p.row("v", i, p.V), func(v float64) float64 { return p.Scale * qk * v })...)
		}
		near(t, "o", p.Forward()["o"], want)
	})

	t.Run("beta 2 reflects", func(t *testing.T) {
		r := source()
		p := oneHead(r, 6)
		for i := range p.In["k"] {
			p.In["k"][i] = p.In["k"][i%p.K]
		}
		p.In["v"], p.In["beta"], p.In["initial_state"] = constant(len(p.In["v"]), 0), constant(p.T, 2), normal(r, p.K*p.V)
		near(t, "final_state", p.Forward()["final_state"], p.In["initial_state"])
	})

	t.Run("beta 0 only decays", func(t *testing.T) {
		r := source()
		p := oneHead(r, 6)
		p.In["g"], p.In["beta"], p.In["initial_state"] = constant(p.T, -0.1), constant(p.T, 0), normal(r, p.K*p.V)
		want := make([]float64, p.T*p.V)
		for n := range want {
			for i := range p.K {
				want[n] += p.Scale * math.Exp(-0.1*float64(n/p.V+1)) * p.row("q", n/p.V, p.K)[i] * p.In["initial_state"][i*p.V+n%p.V]
			}
		}
		near(t, "o", p.Forward()["o"], want)
		near(t, "dv", p.Backward()["dv"], make([]float64, p.T*p.V))
	})

	t.Run("orthonormal keys are linear attention", func(t *testing.T) {
		p := oneHead(source(), 8)
		for i := range p.In["k"] {
			p.In["k"][i] = map[bool]float64{true: 1}[i/p.K == i%p.K]
		}
		want := make([]float64, p.T*p.V)
		for n := range want {
			for j := range n/p.V + 1 {
				want[n] += p.Scale * dot(p.row("q", n/p.V, p.K), p.row("k", j, p.K)) * p.row("v", j, p.V)[n%p.V]
			}
		}
		near(t, "o", p.Forward()["o"], want)
	})

	t.Run("no gradient of the first decay", func(t *testing.T) {
		p := small(source())
		delete(p.In, "initial_state")
		dg := p.Backward()["dg"]
		for b := range p.B {
			for hv := range p.HV {
				if x := dg[b*p.T*p.HV+hv]; x != 0 {
					t.Errorf("dg of row %d, head %d is %v, expected 0", b, hv, x)
				}
			}
		}
	})

	t.Run("splits", func(t *testing.T) {
		r := source()
		p := oneHead(r, 9)
		p.In["g"], p.In["beta"], p.In["initial_state"] = each(normal(r, p.T), negative), each(normal(r, p.T), sigmoid), normal(r, p.K*p.V)
		whole := p.Forward()
		for cut := range p.T + 1 {
			a, b := part(p, 0, cut), part(p, cut, p.T)
			first := a.Forward()
			b.In["initial_state"] = first["final_state"]
			second := b.Forward()
			near(t, fmt.Sprint("o cut at ", cut), append(first["o"], second["o"]...), whole["o"])
			near(t, fmt.Sprint("final_state cut at ", cut), second["final_state"], whole["final_state"])
		}
	})

	t.Run("equal channel decays are one decay", func(t *testing.T) {
		for name, wide := range map[string]func(p *GDN) int{"gk": func(p *GDN) int { return p.K }, "gv": func(p *GDN) int { return p.V }} {
			p := small(source())
			want, wantGrad := p.Forward(), p.Backward()
			n := wide(p)
			for _, g := range p.In["g"] {
				p.In[name] = append(p.In[name], constant(n, g)...)
			}
			delete(p.In, "g")
			got, gotGrad := p.Forward(), p.Backward()
			near(t, "o", got["o"], want["o"])
			near(t, "dk", gotGrad["dk"], wantGrad["dk"])
			sums := make([]float64, len(wantGrad["dg"]))
			for i := range gotGrad["d"+name] {
				sums[i/n] += gotGrad["d"+name][i]
			}
			near(t, "d"+name, sums, wantGrad["dg"])
		}
		p := small(source())
		want, wantGrad := p.Forward(), p.Backward()
		var g []float64
		for _, x := range p.In["g"] {
			g = append(g, constant(p.K, x)...)
		}
		channels(p, g)
		got, gotGrad := p.Forward(), p.Backward()
		near(t, "o of KDA", got["o"], want["o"])
		near(t, "dk of KDA", gotGrad["dk"], wantGrad["dk"])
		near(t, "dh0 of KDA", gotGrad["dh0"], wantGrad["dh0"])
	})

	t.Run("kept states", func(t *testing.T) {
		r := source()
		p := oneHead(r, 200)
		p.Channels = true
		p.Cu = []int{0, 130, 130, 195} // 3, 0 and 2 states, and rows of no sequence
		p.In["initial_state"] = normal(r, 3*p.K*p.V)
		h := p.Forward()["h"]
		near(t, "the first", h[:p.K*p.V], p.In["initial_state"][:p.K*p.V])
		a := part(p, 0, 128)
		a.Cu, a.In["initial_state"] = nil, p.In["initial_state"][:p.K*p.V]
		near(t, "the third", h[2*p.K*p.V:3*p.K*p.V], a.Forward()["final_state"])
		b := part(p, 130, 194)
		b.Cu, b.In["initial_state"] = nil, p.In["initial_state"][2*p.K*p.V:]
		near(t, "the fifth", h[4*p.K*p.V:5*p.K*p.V], b.Forward()["final_state"])
		near(t, "the rest", h[5*p.K*p.V:], make([]float64, p.K*p.V))
	})

	t.Run("scale and v are linear", func(t *testing.T) {
		p := small(source())
		was := p.Forward()
		triple := func(x float64) float64 { return 3 * x }
		p.Scale *= 3
		near(t, "o", p.Forward()["o"], each(was["o"], triple))
		near(t, "final_state", p.Forward()["final_state"], was["final_state"])
		p.Scale /= 3
		p.In["v"], p.In["initial_state"] = each(p.In["v"], triple), each(p.In["initial_state"], triple)
		near(t, "o", p.Forward()["o"], each(was["o"], triple))
		near(t, "final_state", p.Forward()["final_state"], each(was["final_state"], triple))
	})

	t.Run("packed is one by one", func(t *testing.T) {
		r := source()
		p := oneHead(r, 9)
		p.Cu = []int{0, 4, 4, 5, 8} // an empty one, and a row that belongs to none
		n := len(p.Cu) - 1
		p.In["g"], p.In["initial_state"], p.In["dht"] = each(normal(r, p.T), negative), normal(r, n*p.K*p.V), normal(r, n*p.K*p.V)
		out, grad := p.Forward(), p.Backward()
		for i := range n {
			a := part(p, p.Cu[i], p.Cu[i+1])
			a.Cu = nil
			a.In["initial_state"], a.In["dht"] = p.row("initial_state", i, p.K*p.V), p.row("dht", i, p.K*p.V)
			one, oneGrad := a.Forward(), a.Backward()
			near(t, "o", out["o"][p.Cu[i]*p.V:p.Cu[i+1]*p.V], one["o"])
			near(t, "final_state", out["final_state"][i*p.K*p.V:(i+1)*p.K*p.V], one["final_state"])
			near(t, "dk", grad["dk"][p.Cu[i]*p.K:p.Cu[i+1]*p.K], oneGrad["dk"])
			near(t, "dg", grad["dg"][p.Cu[i]:p.Cu[i+1]], oneGrad["dg"])
			near(t, "dh0", grad["dh0"][i*p.K*p.V:(i+1)*p.K*p.V], oneGrad["dh0"])
		}
		near(t, "o beyond", out["o"][8*p.V:], make([]float64, p.V))
		near(t, "dq beyond", grad["dq"][8*p.K:], make([]float64, p.K))
	})
}

// part is rows lo to hi of a problem of one head.
func part(p *GDN, lo, hi int) *GDN {
	a := *p
	a.T, a.In = hi-lo, Tensors{}
	for name, x := range p.In {
		a.In[name] = x
		if name != "initial_state" && name != "dht" {
			n := len(x) / p.T
			a.In[name] = slices.Clone(x[lo*n : hi*n])
		}
	}
	return &a
}

func TestResetWipesTheState(t *testing.T) {
	r := rand.New(rand.NewPCG(seed, 3))
	p := oneHead(r, 7)
	p.In["g"], p.In["initial_state"] = each(normal(r, p.T), negative), normal(r, p.K*p.V)
	p.In["g"][4] = math.Inf(-1)
	after := part(p, 4, 7)
	delete(after.In, "initial_state")
	near(t, "o after the reset", p.Forward()["o"][4*p.V:], after.Forward()["o"])
	grad, alone := p.Backward(), after.Backward()
	near(t, "dk after the reset", grad["dk"][4*p.K:], alone["dk"])
	near(t, "dg of the reset", grad["dg"][4:5], []float64{0})
	for name, x := range grad {
		for i := range x {
			if math.IsNaN(x[i]) || math.IsInf(x[i], 0) {
				t.Fatalf("%s[%d] is %v", name, i, x[i])
			}
		}
	}
}

func TestSoftplus(t *testing.T) {
	// Values by arbitrary precision arithmetic; log(1 + exp x) would give 0 at -40 and +Inf at 800.
	for x, want := range map[float64]float64{-800: 0, -40: 4.248354255291589e-18, 0: math.Ln2, 1: 1.3132616875182228, 800: 800} {
		if got := softplus(x); !(math.Abs(got-want) <= 1e-15*want) {
			t.Errorf("softplus(%v) = %v, expected %v", x, got, want)
		}
	}
}
