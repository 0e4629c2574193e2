package conform

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"libgdn/core"
)

// Case is one set of arguments of a forward and its backward. Its zero values are the plain choice.
type Case struct {
	Name          string // below the operator's and the dtype's
	Family        Family
	Recurrent     bool
	B, T, H, HV   int
	K, V          int
	Cu            []int // of packed sequences; nil: B sequences
	Cu32          bool  // as int32
	IO, Aux       core.DType
	Types         map[string]core.DType // where a tensor has neither IO (q, k, v, dout) nor Aux (inputs that may have any dtype)
	Gate          Gate
	Keys          Keys
	Beta          Beta
	GK, GV, BetaV bool // gates and a beta per channel
	Bias, H0, Dht bool // give dt_bias, initial_state, dht
	NoAmplitude   bool // give no A_log to the gate, which a lower bound allows
	Unwanted      []string
	Flags         map[string]float64
	Layout        layout
	Layouts       map[string]layout // where a tensor has another one
	Around        fence
	Skew          int    // how many elements the first one lies behind an aligned address
	Data          string // what the data is drawn by; "": the name
	Given         given  // data that is not drawn
}

// Family begins the names of the operators; Gate, Keys and Beta name what the inputs hold.
type (
	Family string

	Gate string
	Keys string
	Beta string
)

const (
	gdn Family = ""
	kda Family = "kda_"

	mild    Gate = ""         // -0.7 to -0.3
	none    Gate = "none"     // no g
	weak    Gate = "weak"     // 0 to -0.1: the state remembers across chunks
	zero    Gate = "0"        //
	five    Gate = "-5"       // the weakest that overflows where decays are factored over 16 rows
	strong  Gate = "-20"      // overflows in every factored form
	wiping  Gate = "-1000"    // exp is 0
	resets  Gate = "-inf"     // here and there, else normal
	mixed   Gate = "0 or -60" // overflows what divides decays; as raw gates, where softplus is 0 or x to the last bit
	wide    Gate = "wide"     // 0 to -400
	perHead Gate = "by head"  // shows the gate of another head

	unit      Keys = "" // random
	identical Keys = "identical"
	collinear Keys = "collinear" // identical but for 1e-2 of noise
	tiny      Keys = "tiny"      // where the norm is applied

	sigmoid  Beta = "" // 0 to 1
	absent   Beta = "none"
	toTwo    Beta = "0 to 2"
	one      Beta = "1"
	oneNine  Beta = "1.9"
	zeroBeta Beta = "0"
)

// given is data under the inputs' names. It prints as those: the numbers come from other cases.
type given map[string][]float64

func (g given) String() string { return fmt.Sprint(slices.Sorted(maps.Keys(g))) }

func (c *Case) forward() string {
	if c.Recurrent {
		return string(c.Family) + "recurrent_fwd"
	}
	return string(c.Family) + "fwd"
}

func (c *Case) backward() string {
	if c.Recurrent {
		return string(c.Family) + "recurrent_bwd"
	}
	return string(c.Family) + "bwd"
}

// has tells whether the case gives a tensor to an operator, be it input or output.
func (c *Case) has(a *core.TensorArg) bool {
	switch a.Name {
	case "g":
		return c.Gate != none
	case "gk":
		return c.GK
	case "gv":
		return c.GV
	case "beta":
		return c.Beta != absent
	case "A_log":
		return c.Flags["gate"] != 0 && !c.NoAmplitude
	case "dt_bias":
		return c.Bias
	case "initial_state":
		return c.H0
	case "cu_seqlens":
		return c.Cu != nil
	case "dht":
		return c.Dht
	}
	switch {
	case a.Role == core.In, a.Role == core.Out:
		return true
	case a.Role == core.OptOut:
		return !slices.Contains(c.Unwanted, a.Name) && (a.With == "" || c.has(&core.TensorArg{Name: a.With, Role: core.OptIn}))
	}
	panic("conform: no case says when to give " + a.Name)
}

func (c *Case) dtype(op *core.Op, a *core.TensorArg) core.DType {
	if d, ok := c.Types[a.Name]; ok {
		return d
	}
	switch a.Rule {
	case core.Io:
		return c.IO
	case core.Float:
		if a.Name == "dout" {
			return c.IO
		}
		return c.Aux
	case core.Acc:
		if c.double() {
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
		if c.Cu32 {
			return core.I32
		}
		return core.I64
	}
	panic(fmt.Sprintf("conform: no dtype for %s", a.Name))
}

func (c *Case) double() bool { return c.IO == core.F64 }

func (c *Case) sequences() int {
	if c.Cu != nil {
		return len(c.Cu) - 1
	}
	return c.B
}

// cases lists what every backend is tried with: each size, dtype, regime, flag and layout with a few of the others, then random mixtures.
func cases(short bool) []*Case {
	var list []*Case
	add := func(name string, change func(c *Case)) {
		for _, family := range []Family{gdn, kda} {
			for _, recurrent := range []bool{false, true} {
				n := len(list)
				c := &Case{Name: name, Family: family, Recurrent: recurrent, B: 1, T: 70, H: 1, HV: 2, K: 16, V: 16, IO: core.F32, Aux: core.F32, H0: true,
					Dht: true, Skew: n % 16}
				change(c)
				list = append(list, c)
			}
		}
	}

	groups := [][2]int{{1, 1}, {2, 2}, {2, 6}, {3, 3}}
	for i, T := range []int{0, 1, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200} {
		for j, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			if j > 0 && (short || i%3 != j-1) {
				continue
			}
			add(fmt.Sprintf("T=%d", T), func(c *Case) {
				c.T, c.IO, c.B = T, d, 1+(i+j)%3
				c.H, c.HV = groups[i%4][0], groups[i%4][1]
				c.K, c.V = []int{16, 8, 24}[i%3], []int{16, 12, 20}[i%3]
				c.Gate = []Gate{mild, weak}[i%2]
				if d != core.F32 && i%2 == 0 || d == core.F64 {
					c.Aux = d
				}
			})
		}
	}
	// Without a decay nothing hides drift.
	add("long", func(c *Case) { c.T, c.HV, c.K, c.V, c.Gate, c.Beta = 2048, 1, 16, 8, zero, one })
	add("long", func(c *Case) { c.T, c.HV, c.K, c.V, c.Gate, c.IO = 2048, 1, 8, 16, weak, core.BF16 })
	// All tails of a block of 16 behind a whole chunk.
	for r := 1; r <= 15 && !short; r++ {
		add(fmt.Sprintf("T=64+%d", r), func(c *Case) { c.T, c.K, c.V, c.HV = 64+r, 8, 8, 1 })
	}

	for i, size := range [][2]int{{1, 1}, {8, 12}, {48, 40}, {60, 60}, {64, 64}, {100, 100}, {96, 192}, {128, 128}, {1, 33}, {33, 1}, {256, 512}} {
		for j, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			if big := size[0]*size[1] > 5000; j > 0 && (big || short && j != 1) || size[0] == 256 && short {
				continue
			}
			add(fmt.Sprintf("D=%d,%d", size[0], size[1]), func(c *Case) {
				c.K, c.V, c.IO = size[0], size[1], d
				c.H, c.HV = 1, 1+i%2
				if d == core.F64 {
					c.Aux = d
				}
			})
		}
	}

	for _, g := range []Gate{none, zero, weak, five, strong, wiping, resets, mixed, wide, perHead} {
		for j, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			if j > 0 && short {
				continue
			}
			add("g="+string(g), func(c *Case) {
				c.T, c.Gate, c.IO, c.H, c.HV, c.K, c.V = 129, g, d, 2, 4, 24, 16
				if d == core.F64 || d == core.F16 {
					c.Aux = d
				}
			})
		}
	}
	for _, g := range []Gate{zero, strong, resets} {
		add("channel gates/g="+string(g), func(c *Case) { c.Gate, c.GK, c.GV = g, c.Recurrent && c.Family == gdn, c.Recurrent && c.Family == gdn })
	}

	for _, k := range []Keys{identical, collinear} {
		for _, b := range []Beta{sigmoid, absent, one, oneNine} {
			for _, d := range []core.DType{core.F32, core.BF16, core.F64} {
				if d != core.F32 && short {
					continue
				}
				add(fmt.Sprintf("keys %s/beta %s", k, b), func(c *Case) {
					c.T, c.Keys, c.Beta, c.IO, c.Gate, c.K = 129, k, b, d, zero, 32
					if d == core.F64 {
						c.Aux = d
					}
				})
			}
		}
	}
	for _, b := range []Beta{absent, zeroBeta, toTwo, one} {
		add("beta="+string(b), func(c *Case) { c.Beta, c.T = b, 81 })
		add("beta per channel="+string(b), func(c *Case) { c.Beta, c.T, c.BetaV = b, 81, b != absent })
	}

	for i, cu := range [][]int{{0, 70}, {0, 15}, {0, 5, 5, 9}, {0, 0, 1, 2, 70, 70}, {0, 64, 128}, {0, 40, 89}, {0, 0}, {0}, {0, 1, 18, 34, 49, 114, 177},
		{0, 3, 9, 9, 9, 100}} {
		for j, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			if j > 0 && short {
				continue
			}
			add(fmt.Sprintf("packed/%v", cu), func(c *Case) {
				c.Cu, c.IO, c.Cu32 = cu, d, i%2 == 0
				c.T = cu[len(cu)-1] + i%3*2 // rows that belong to no sequence, NaN where they are inputs
				c.H, c.HV = 2, 4
				c.H0, c.Dht = i%4 != 1, i%4 != 2
				if d == core.F64 {
					c.Aux = d
				}
			})
		}
	}

	for _, f := range []string{"qk_l2norm", "gate", "gate with bias", "beta_sigmoid", "neg_eigval", "state_v_first", "scale", "no h0", "no dht", "neither",
		"few outputs", "tiny keys"} {
		for _, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			add(f, func(c *Case) {
				c.IO, c.T, c.H, c.HV, c.K, c.V, c.B = d, 67, 2, 4, 8, 12, 2
				if d == core.F64 || f != "gate" {
					c.Aux = d
				}
				switch f {
				case "gate":
					c.Flags = map[string]float64{"gate": 1}
				case "gate with bias":
					c.Flags, c.Bias = map[string]float64{"gate": 1}, true
				case "neg_eigval":
					c.Flags = map[string]float64{"beta_sigmoid": 1, f: 1}
				case "no h0":
					c.H0 = false
				case "no dht":
					c.Dht = false
				case "neither":
					c.H0, c.Dht = false, false
				case "few outputs":
					c.Unwanted = []string{"final_state", "dg", "dgk", "dgv", "dbeta", "dA_log", "ddt_bias", "dh0", "h"}
				case "tiny keys":
					c.Keys, c.Flags = tiny, map[string]float64{"qk_l2norm": 1}
				case "scale":
					c.Flags = map[string]float64{f: 0.3}
				default:
					c.Flags = map[string]float64{f: 1}
				}
			})
		}
	}
	add("gate/extreme", func(c *Case) { c.Flags, c.Bias, c.Gate = map[string]float64{"gate": 1}, true, mixed })
	bounded := func(name string, change func(c *Case)) {
		add("lower bound"+name, func(c *Case) {
			change(c)
			if c.Flags = map[string]float64{"gate": 1}; c.Family == kda {
				c.Flags["lower_bound"] = -5
			} else {
				c.NoAmplitude = false
			}
		})
	}
	for _, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
		bounded("", func(c *Case) {
			c.IO, c.T, c.H, c.HV, c.B = d, 67, 2, 4, 2
			if d == core.F64 || d == core.F16 {
				c.Aux = d
			}
		})
	}
	bounded("/with bias", func(c *Case) { c.Bias, c.K, c.V = true, 40, 24 })
	bounded("/alone", func(c *Case) { c.NoAmplitude = true })
	bounded("/bias alone", func(c *Case) { c.NoAmplitude, c.Bias, c.IO = true, true, core.BF16 })
	bounded("/extreme", func(c *Case) { c.Bias, c.Gate = true, mixed })

	for _, lie := range []layout{plain, heads, gaps, rows, reversed, broadcast, expanded} {
		for _, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			if d != core.F32 && short {
				continue
			}
			add("layout "+string(lie), func(c *Case) {
				c.Layout, c.IO, c.B, c.T, c.H, c.HV, c.K, c.V = lie, d, 2, 67, 2, 4, 24, 40
				if lie == expanded {
					c.Layout, c.Layouts = compact, map[string]layout{"dout": expanded, "dht": expanded, "beta": expanded}
				}
				c.Flags = map[string]float64{"gate": 1}
				c.Bias = true
				if d == core.F64 {
					c.Aux = d
				}
			})
		}
	}
	for _, around := range []fence{before, after} {
		for _, d := range []core.DType{core.F32, core.BF16} {
			for _, T := range []int{1, 33, 70} {
				for _, size := range [][2]int{{48, 40}, {5, 3}, {64, 128}} {
					if short && T != 33 {
						continue
					}
					add(fmt.Sprintf("%s/T=%d/D=%d,%d", around, T, size[0], size[1]), func(c *Case) {
						c.Around, c.IO, c.T, c.K, c.V = around, d, T, size[0], size[1]
						c.Flags = map[string]float64{"gate": 1, "qk_l2norm": float64(T % 2)}
						c.Bias = true
					})
				}
			}
		}
	}

	r := rand.New(rand.NewPCG(Seed, 0))
	count := 600
	if short {
		count = 50
	}
	for i := range count {
		x := mixture(r)
		add(fmt.Sprintf("random/%d", i), func(c *Case) {
			was := *c
			*c = x
			c.Name, c.Family, c.Recurrent = was.Name, was.Family, was.Recurrent
			c.GK, c.GV = c.GK && c.Recurrent && c.Family == gdn, c.GV && c.Recurrent && c.Family == gdn
			if c.Family == kda && c.Flags["gate"] != 0 {
				c.Flags = maps.Clone(c.Flags)
				c.Flags["lower_bound"] = []float64{0, 0, -5, -0.5}[i%4]
				c.NoAmplitude = i%8 == 3
			}
		})
	}
	return list
}

// mixture draws a case from everything that may come together. From 2 tokens on: gradients of a single one are multiples of one product,
// and now and then that cancels.
func mixture(r *rand.Rand) Case {
	pick := func(n ...int) int { return n[r.IntN(len(n))] }
	yes := func() bool { return r.IntN(2) == 0 }
	hv := [][2]int{{1, 1}, {2, 2}, {2, 6}, {3, 3}, {1, 3}}[r.IntN(5)]
	c := Case{B: pick(1, 1, 2, 3), T: pick(2, 3, 15, 16, 17, 30, 63, 64, 65, 90, 129), H: hv[0], HV: hv[1], K: pick(1, 4, 8, 16, 17, 24, 32, 40),
		V: pick(1, 4, 8, 16, 17, 24, 32, 40), GK: yes(), GV: yes(), BetaV: yes(), H0: yes(), Dht: yes(), Cu32: yes(), Skew: r.IntN(16)}
	c.Gate = []Gate{mild, none, weak, zero, five, strong, wiping, resets, mixed, wide, perHead}[r.IntN(11)]
	c.Beta = []Beta{sigmoid, sigmoid, absent, toTwo, one}[r.IntN(5)]
	c.Keys = []Keys{unit, unit, unit, identical, collinear}[r.IntN(5)]
	if (c.K == 1 || c.Keys != unit) && (c.Beta == absent || c.Beta == one) {
		c.Beta = sigmoid // else each token replaces what the last one wrote, and the gate's gradient is nothing but rounding
	}
	flag := func(name string, possible bool) bool {
		on := possible && yes()
		if on {
			c.Flags[name] = 1
		}
		return on
	}
	c.Flags = map[string]float64{"scale": []float64{0, 1, 0.1}[r.IntN(3)]}
	if flag("gate", c.Gate != none) {
		c.Bias = yes()
	}
	if flag("beta_sigmoid", c.Beta != absent) {
		flag("neg_eigval", true)
	}
	c.BetaV = c.BetaV && c.Beta != absent
	flag("qk_l2norm", c.K > 1) // of one channel nothing but the sign is left, and the gradient is rounding
	flag("state_v_first", true)
	for _, name := range []string{"final_state", "dg", "dgk", "dgv", "dbeta", "dA_log", "ddt_bias", "dh0", "h"} {
		if r.IntN(8) == 0 {
			c.Unwanted = append(c.Unwanted, name)
		}
	}
	if c.B == 1 && yes() {
		for c.Cu = []int{0}; len(c.Cu) < 5; {
			c.Cu = append(c.Cu, min(c.T, c.Cu[len(c.Cu)-1]+r.IntN(c.T/2+2)))
		}
	}
	floats := []core.DType{core.F32, core.BF16, core.F16}
	if r.IntN(6) == 0 {
		c.IO, c.Aux = core.F64, core.F64
		if yes() {
			c.Aux = floats[r.IntN(3)]
		}
	} else {
		c.IO, c.Types = floats[r.IntN(3)], map[string]core.DType{}
		c.Aux = append(floats, core.F32, core.F64)[r.IntN(5)]
		for _, name := range []string{"q", "k", "v", "dout", "beta", "initial_state"} {
			if r.IntN(4) == 0 {
				c.Types[name] = floats[r.IntN(3)]
			}
		}
	}
	c.Layouts = map[string]layout{}
	for _, name := range []string{"q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "o", "final_state", "dout", "dht",
		"dq", "dk", "dv", "dg", "dgk", "dgv", "dbeta", "dA_log", "ddt_bias", "dh0", "h"} {
		if r.IntN(3) == 0 {
			c.Layouts[name] = []layout{plain, heads, gaps, rows, reversed, broadcast}[r.IntN(6)]
		}
	}
	return c
}
