package conform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"libgdn/core"
)

// oneOf draws among numbers.
func oneOf(list ...float64) draw {
	return func(r *rand.Rand, _ int) float64 { return list[r.IntN(len(list))] }
}

func gateCases(short bool) []*solo {
	var list []*solo
	for _, op := range []string{"gate_fwd", "gate_bwd"} {
		add := func(name string, change func(c *solo)) {
			c := &solo{Name: name, Op: op, Size: map[string]int64{"B": 2, "T": 37, "HV": 3, "K": 5}, IO: core.F32, Aux: core.F32, Numbers: map[string]float64{},
				Draw: map[string]draw{"A_log": func(r *rand.Rand, _ int) float64 { return math.Log(1 + 15*r.Float64()) }}}
			change(c)
			list = append(list, c)
		}
		vary := func(name string, change func(c *solo)) {
			var c *solo
			add(name, func(x *solo) { change(x); c = x })
			list = append(list[:len(list)-1], everywhere(*c, short)...)
		}
		both := []string{"A_log", "dt_bias"}
		vary("softplus", func(c *solo) { c.Numbers["gate"], c.Give = 1, both })
		vary("bounded", func(c *solo) { c.Numbers["gate"], c.Numbers["bound"], c.Give = 2, -5, both })
		add("scales", func(c *solo) { c.Numbers["gate"], c.Numbers["bound"], c.Numbers["scale"] = 2, 0.1, 0.1 })
		add("packed/stride 2", func(c *solo) {
			c.Numbers["chunk"], c.Cu, c.Size["B"], c.Layout = 16, []int{0, 3, 30}, 1, gaps
		})
		vary("softplus sum", func(c *solo) {
			c.Numbers["gate"], c.Numbers["chunk"], c.Numbers["scale"], c.Give = 1, 16, 1.4426950408889634, both
			c.Size["HV"], c.Size["K"] = 70, 1
		})
		for i, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
			some := func(name string, change func(c *solo)) {
				if i == 0 || !short {
					add(name, func(c *solo) {
						if c.IO = d; d == core.F64 {
							c.Aux = d
						}
						change(c)
					})
				}
			}
			some("beta", func(c *solo) { c.Numbers["gate"], c.Numbers["bound"] = 2, 2 })
			some("no amplitude", func(c *solo) { c.Numbers["gate"], c.Give = 1, both[1:] })
			some("no bias", func(c *solo) { c.Numbers["gate"], c.Give = 1, both[:1] })
			some("bounded/no amplitude", func(c *solo) { c.Numbers["gate"], c.Numbers["bound"], c.Give = 2, -5, both[1:] })
			some("few outputs", func(c *solo) { c.Numbers["gate"], c.Give, c.Unwanted = 1, both, []string{"dA_log", "ddt_bias"} })
			for _, chunk := range []float64{1, 16, 64, 1 << 40} {
				for reverse := range 2 {
					some(fmt.Sprintf("sum/%g/%d", chunk, reverse), func(c *solo) {
						c.Numbers["chunk"], c.Numbers["reverse"], c.Size["T"], c.Size["K"] = chunk, float64(reverse), 150, 1
					})
				}
			}
			some("resets", func(c *solo) {
				c.Numbers["chunk"] = 64 // of gates of which some are -inf: the tail of a sum is -inf, and the gradients know nothing of it
				if c.Op == "gate_bwd" {
					c.Draw["g"] = oneOf(-1, math.Inf(-1), -0.5)
				}
			})
			// Softplus is 0 or x to the last bit, the bounded gate is one end or the other; amplitudes are 0, normal, and beyond fp32's exp.
			some("extreme", func(c *solo) {
				c.Numbers["gate"], c.Give = 1, both[:1]
				c.Draw["g"] = oneOf(-200, -50, -17, -1, 0, 1, 30, 100)
				c.Draw["A_log"] = oneOf(-3, 0, 3)
			})
			some("bounded/extreme", func(c *solo) {
				c.Numbers["gate"], c.Numbers["bound"], c.Give = 2, -5, both[:1]
				c.Draw["g"] = oneOf(-3, 0, 3)
				c.Draw["A_log"] = oneOf(-100, 0, 100)
				if c.Op == "gate_bwd" { // half of the derivatives are 0, and those at 0 would be infinite
					c.Draw["g"] = oneOf(-3, 3)
				}
			})
			for _, cu := range [][]int{{0, 5, 5, 9}, {0, 0, 1, 64, 100}, {0}, {0, 0}} {
				some(fmt.Sprintf("packed/%v", cu), func(c *solo) {
					c.Numbers["gate"], c.Numbers["chunk"], c.Give, c.Cu, c.Narrow = 1, 16, both, cu, i%2 == 1
					c.Size["B"], c.Size["T"] = 1, int64(cu[len(cu)-1]+3)
				})
			}
			for _, size := range [][4]int64{{1, 0, 2, 3}, {0, 4, 2, 3}, {1, 1, 1, 1}, {3, 1, 64, 128}, {1, 130, 2, 300}, {2, 70, 1, 17}} {
				some(fmt.Sprintf("%v", size), func(c *solo) {
					c.Size = map[string]int64{"B": size[0], "T": size[1], "HV": size[2], "K": size[3]}
					c.Numbers["gate"], c.Numbers["bound"], c.Numbers["chunk"], c.Give = 2, -5, 64, both
				})
			}
		}
	}
	for _, op := range []string{"norm_fwd", "norm_bwd"} {
		add := func(name string, all bool, change func(c *solo)) {
			c := solo{Name: name, Op: op, Size: map[string]int64{"B": 2, "T": 9, "H": 3, "K": 24}, IO: core.F32, Aux: core.F32, Numbers: map[string]float64{"eps": 1e-6}}
			change(&c)
			if all {
				list = append(list, everywhere(c, short)...)
			} else {
				list = append(list, &c)
			}
		}
		add("l2norm", true, func(c *solo) {})
		add("silu", true, func(c *solo) { c.Numbers["mean"], c.Numbers["activation"], c.Give = 1, 1, []string{"weight", "z"} })
		add("sigmoid", true, func(c *solo) {
			c.Numbers["mean"], c.Numbers["activation"], c.Give, c.Size["K"] = 1, 2, []string{"weight", "z"}, 33
		})
		add("rms", false, func(c *solo) { c.Numbers["mean"], c.Numbers["eps"] = 1, 1e-5 })
		add("eps", false, func(c *solo) { c.Numbers["eps"] = 0.1 })
		add("no eps", false, func(c *solo) { c.Numbers["eps"] = 0 })
		add("weight", false, func(c *solo) { c.Numbers["mean"], c.Give = 1, []string{"weight"} })
		add("gate without weight", false, func(c *solo) { c.Numbers["activation"], c.Give = 2, []string{"z"} })
		add("few outputs", false, func(c *solo) {
			c.Numbers["activation"], c.Give, c.Unwanted = 1, []string{"weight", "z"}, []string{"dweight", "dz"}
		})
		// Rows of zeros and of the size of the root of epsilon; gates where the sigmoid is 0 or 1.
		add("tiny", false, func(c *solo) {
			c.Draw = map[string]draw{"x": func(r *rand.Rand, i int) float64 { return 1e-3 * r.NormFloat64() * float64(min(i/24, 1)) }}
		})
		add("extreme gates", false, func(c *solo) {
			c.Numbers["mean"], c.Numbers["activation"], c.Give, c.Draw = 1, 1, []string{"z"}, map[string]draw{"z": oneOf(-200, -20, 0, 20, 200)}
		})
		for _, K := range []int64{1, 8, 60, 64, 100, 128, 1024, 2048} {
			for i, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
				if i == 0 || !short {
					add(fmt.Sprintf("K=%d", K), false, func(c *solo) { // of one number nothing but the sign is left, and the gradient is rounding
						c.IO, c.Size["K"], c.Numbers["eps"] = d, K, map[bool]float64{true: 0.5, false: 1e-6}[K == 1]
					})
				}
			}
		}
		for _, size := range [][3]int64{{0, 3, 2}, {1, 0, 2}, {1, 700, 1}, {3, 100, 8}} {
			add(fmt.Sprintf("%v", size), false, func(c *solo) {
				c.Size["B"], c.Size["T"], c.Size["H"], c.Give = size[0], size[1], size[2], []string{"weight"}
			})
		}
	}
	return list
}
