package conform

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"libgdn/core"
	"libgdn/core/oracle"
)

// Inputs of the delta rule for operators outside the chunk family: keys of length 1, log decays and betas.
func unitKeys(names ...string) func(in oracle.Tensors, size map[string]int64) {
	return func(in oracle.Tensors, size map[string]int64) {
		for _, name := range names {
			for key := range slices.Chunk(in[name], int(size["K"])) {
				sum := 1e-30
				for _, x := range key {
					sum += x * x
				}
				for i := range key {
					key[i] /= math.Sqrt(sum)
				}
			}
		}
	}
}

var (
	decays = map[string]draw{
		"mild":   func(r *rand.Rand, _ int) float64 { return -math.Log1p(math.Exp(-r.Float64())) },
		"weak":   func(r *rand.Rand, _ int) float64 { return -math.Log1p(math.Exp(-r.NormFloat64())) / 16 },
		"zero":   func(*rand.Rand, int) float64 { return 0 },
		"strong": func(*rand.Rand, int) float64 { return -20 },
		"wide":   func(r *rand.Rand, _ int) float64 { return -100 * math.Log1p(math.Exp(-r.NormFloat64())) },
		"resets": func(r *rand.Rand, _ int) float64 {
			if r.IntN(8) == 0 {
				return math.Inf(-1)
			}
			return -math.Abs(r.NormFloat64())
		},
	}
	betas = func(r *rand.Rand, _ int) float64 { return 1 / (1 + math.Exp(-r.NormFloat64())) }
	aLogs = func(r *rand.Rand, _ int) float64 { return math.Log(1 + 15*r.Float64()) }
	// Maps that do not blow up however many follow each other.
	contraction = func(r *rand.Rand, _ int) float64 { return r.NormFloat64() / 8 }
)

func summaryCases(short bool) []*solo {
	var list []*solo
	for _, op := range []string{"summary_fwd", "summary_grad", "summary_bwd", "kda_summary_fwd", "kda_summary_grad", "kda_summary_bwd"} {
		base := solo{Op: op, Size: map[string]int64{"B": 2, "T": 70, "H": 2, "HV": 4, "K": 24, "V": 20}, Give: []string{"g", "beta"},
			Draw: map[string]draw{"g": decays["weak"], "beta": betas, "A_log": aLogs}, Given: unitKeys("q", "k"), IO: core.F32, Aux: core.F32}
		raw := base
		raw.Name, raw.Give, raw.Given = "raw", []string{"g", "beta", "A_log", "dt_bias"}, nil
		raw.Draw = map[string]draw{"A_log": aLogs}
		raw.Numbers = map[string]float64{"scale": 0.1, "qk_l2norm": 1, "gate": 1, "beta_sigmoid": 1, "neg_eigval": 1}
		list = append(list, everywhere(base, short)...)
		list = append(list, everywhere(raw, short)...)
		one := func(name string, change func(c *solo)) {
			for i, d := range []core.DType{core.F32, core.BF16, core.F64} {
				if short && i > 0 {
					break
				}
				c := base
				c.Name, c.IO, c.Aux = name, d, core.F32
				if d == core.F64 {
					c.Aux = d
				}
				c.Size, c.Draw = map[string]int64{"B": 1, "T": 70, "H": 1, "HV": 2, "K": 24, "V": 20}, map[string]draw{"g": decays["weak"], "beta": betas, "A_log": aLogs}
				change(&c)
				list = append(list, &c)
			}
		}
		for i, T := range []int64{0, 1, 7, 16, 63, 64, 65, 129, 200} {
			one(fmt.Sprintf("T=%d", T), func(c *solo) { c.Size["T"], c.Size["B"] = T, int64(1+i%2) })
		}
		for _, s := range [][2]int64{{1, 1}, {33, 1}, {1, 33}, {60, 60}, {128, 128}, {96, 192}} {
			one(fmt.Sprintf("K=%d V=%d", s[0], s[1]), func(c *solo) { c.Size["K"], c.Size["V"] = s[0], s[1] })
		}
		one("K=512 V=512", func(c *solo) { c.Size["K"], c.Size["V"], c.Size["T"], c.Size["HV"] = 512, 512, 5, 1 })
		one("no heads", func(c *solo) { c.Size["B"] = 0 })
		for name, d := range decays {
			one(name, func(c *solo) { c.Draw["g"], c.Size["T"] = d, 150 })
		}
		one("plain", func(c *solo) { c.Give = nil })
		if strings.HasPrefix(op, "kda_") {
			one("lower bound", func(c *solo) {
				c.Give, c.Draw["g"], c.Size["T"] = []string{"g", "beta", "A_log", "dt_bias"}, nil, 150
				c.Numbers = map[string]float64{"gate": 1, "lower_bound": -5}
			})
			one("lower bound alone", func(c *solo) {
				c.Give, c.Draw["g"] = []string{"g", "beta"}, nil
				c.Numbers = map[string]float64{"gate": 1, "lower_bound": -2.5}
			})
		}
		one("no bias", func(c *solo) {
			c.Give, c.Draw["g"] = []string{"g", "A_log"}, nil
			c.Numbers = map[string]float64{"gate": 1}
		})
		for _, cu := range [][]int{{0}, {0, 0}, {0, 70}, {0, 3, 3, 66, 70}, {0, 17, 40}, {0, 0, 64, 65}} {
			one(fmt.Sprint("packed ", cu), func(c *solo) { c.Cu, c.Narrow, c.Layout = cu, len(cu)%2 == 0, []layout{compact, gaps}[len(cu)%2] })
		}
	}
	for _, op := range []string{"summary_merge", "summary_merge_bwd", "summary_compose", "summary_compose_bwd"} {
		base := solo{Op: op, Size: map[string]int64{"R": 3, "B": 2, "HV": 3, "K": 20, "V": 24}, Draw: map[string]draw{"m": contraction}, Give: []string{"state"}}
		for _, d := range []core.DType{core.F32, core.F64} {
			one := func(name string, change func(c *solo)) {
				c := base
				c.Name, c.IO, c.Aux, c.Skew = name, d, d, len(list)%16
				c.Types = map[string]core.DType{"s": d}
				c.Size, c.Numbers = map[string]int64{"R": 3, "B": 2, "HV": 3, "K": 20, "V": 24}, map[string]float64{}
				change(&c)
				list = append(list, &c)
			}
			for reverse := range 2 {
				for transpose := range 2 {
					one(fmt.Sprintf("reverse=%d transpose=%d", reverse, transpose), func(c *solo) {
						c.Numbers["reverse"], c.Numbers["transpose"] = float64(reverse), float64(transpose)
					})
				}
			}
			one("from zero", func(c *solo) { c.Give = nil })
			one("gradients unwanted", func(c *solo) { c.Unwanted = []string{"dstate"} })
			for _, lie := range []layout{plain, heads, gaps, rows, reversed, broadcast} {
				one("layout "+string(lie), func(c *solo) { c.Layout = lie })
			}
			one(string(before), func(c *solo) { c.Around = before })
			one(string(after), func(c *solo) { c.Around = after })
			for _, R := range []int64{0, 1, 9} {
				one(fmt.Sprintf("R=%d", R), func(c *solo) { c.Size["R"] = R })
			}
			for _, s := range [][2]int64{{1, 1}, {1, 33}, {33, 1}, {128, 128}, {64, 200}} {
				one(fmt.Sprintf("K=%d V=%d", s[0], s[1]), func(c *solo) {
					c.Size["K"], c.Size["V"], c.Size["HV"] = s[0], s[1], 1
					c.Draw = map[string]draw{"m": func(r *rand.Rand, _ int) float64 { return r.NormFloat64() / (1 + float64(s[0])/4) }}
				})
			}
		}
	}
	return list
}
