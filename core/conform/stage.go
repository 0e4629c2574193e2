package conform

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"libgdn/core"
	"libgdn/core/oracle"
)

// stageGiven makes what single draws cannot: keys of length 1, sums of gates within chunks, squares with NaN above the diagonal.
func stageGiven(cu []int) func(in oracle.Tensors, size map[string]int64) {
	return func(in oracle.Tensors, size map[string]int64) {
		unitKeys("q", "k")(in, size)
		p := &oracle.Plain{Size: size, Cu: cu}
		first, length := p.Sequences()
		for _, name := range []string{"g_cumsum", "gk"} {
			x := in[name]
			if x == nil {
				continue
			}
			row := len(x) / int(max(size["B"]*size["T"], 1))
			for n := range first {
				for t := 1; t < length[n]; t++ {
					for i := (first[n] + t) * row; i < (first[n]+t+1)*row && t%64 != 0; i++ {
						x[i] += x[i-row]
					}
				}
			}
		}
		for _, name := range []string{"A", "Aqk", "Akk", "dAqk"} {
			x := in[name]
			for n := range first {
				for t := range length[n] {
					for hv := range int(size["HV"]) {
						for j := t%64 + 1; j < 64 && x != nil; j++ {
							x[((first[n]+t)*int(size["HV"])+hv)*64+j] = math.NaN()
						}
					}
				}
			}
		}
	}
}

func stageCases(short bool) []*solo {
	small := func(r *rand.Rand, _ int) float64 { return r.NormFloat64() / 8 }
	rstd := func(r *rand.Rand, _ int) float64 { return 0.5 + r.Float64() }
	draws := map[string]draw{"g": decays["weak"], "g_cumsum": decays["weak"], "gk": decays["weak"], "beta": betas, "A_log": aLogs, "w": small, "u": small,
		"A": small, "Aqk": small, "Akk": small, "dAqk": small, "q_rstd": rstd, "k_rstd": rstd}
	// For each operator what its plain case gives, and what its other one gives and sets.
	ops := []struct {
		name, give, more string
		numbers          map[string]float64
	}{
		{"prepare", "g beta", "g beta", map[string]float64{"qk_l2norm": 1, "beta_sigmoid": 1, "neg_eigval": 1, "exp2": 1}},
		{"kda_prepare", "g beta", "g beta A_log dt_bias", map[string]float64{"scale": 0.1, "qk_l2norm": 1, "gate": 1, "lower_bound": -5, "beta_sigmoid": 1, "neg_eigval": 1, "exp2": 1}},
		{"state_pass", "g_cumsum initial_state", "gk", map[string]float64{"exp2": 1, "state_v_first": 1}},
		{"output", "g_cumsum", "g_cumsum", map[string]float64{"scale": 0.1, "exp2": 1, "state_v_first": 1}},
		{"kda_output", "", "", map[string]float64{"state_v_first": 1}},
		{"bwd_prepare", "g_cumsum", "g_cumsum", map[string]float64{"scale": 0.1, "exp2": 1}},
		{"kda_bwd_prepare", "", "", map[string]float64{"scale": 0.1, "state_v_first": 1}},
		{"state_grad", "g_cumsum initial_state dht", "gk", map[string]float64{"scale": 0.1, "exp2": 1, "state_v_first": 1}},
		{"finish", "g_cumsum q_rstd k_rstd", "g_cumsum", map[string]float64{"scale": 0.1, "beta_sigmoid": 1, "neg_eigval": 1, "exp2": 1, "state_v_first": 1}},
		{"kda_finish", "g q_rstd k_rstd", "g A_log dt_bias", map[string]float64{"scale": 0.1, "gate": 1, "lower_bound": -5, "beta_sigmoid": 1, "neg_eigval": 1, "exp2": 1, "state_v_first": 1}},
	}
	var list []*solo
	for _, op := range ops {
		base := solo{Op: op.name, Size: map[string]int64{"B": 2, "T": 70, "H": 1, "HV": 2, "K": 20, "V": 12, "P": 2}, Give: strings.Fields(op.give), Draw: draws,
			Given: stageGiven(nil), IO: core.F32, Aux: core.F32, Numbers: map[string]float64{}}
		more := base
		more.Name, more.Give, more.Numbers = "more", strings.Fields(op.more), op.numbers
		if op.more == "gk" { // q and k are per value head
			more.Size = map[string]int64{"B": 2, "T": 70, "H": 2, "HV": 2, "K": 20, "V": 12, "P": 3}
		}
		if op.numbers["gate"] != 0 {
			more.Draw = maps.Clone(draws)
			delete(more.Draw, "g")
		}
		list = append(list, everywhere(base, short)...)
		list = append(list, everywhere(more, short)...)
		for i, from := range []solo{base, more} {
			one := func(name string, change func(c *solo)) {
				for j, d := range []core.DType{core.F32, core.BF16, core.F64} {
					if short && j != i {
						continue
					}
					c := from
					c.Name, c.IO, c.Aux = fmt.Sprint(name, " ", i), d, core.F32
					if d == core.F64 {
						c.Aux = d
					}
					c.Size, c.Draw, c.Numbers = map[string]int64{"B": 1, "T": 70, "H": 1, "HV": 2, "K": 24, "V": 20, "P": 2}, maps.Clone(from.Draw), maps.Clone(from.Numbers)
					change(&c)
					if slices.Contains(c.Give, "gk") {
						c.Size["H"] = c.Size["HV"]
					}
					list = append(list, &c)
				}
			}
			for _, T := range []int64{0, 1, 15, 16, 17, 48, 64, 65, 130} {
				one(fmt.Sprintf("T=%d", T), func(c *solo) { c.Size["T"], c.Size["P"] = T, (T+63)/64 })
			}
			for _, s := range [][2]int64{{1, 1}, {33, 2}, {2, 33}, {60, 60}, {128, 128}, {64, 200}} {
				one(fmt.Sprintf("K=%d V=%d", s[0], s[1]), func(c *solo) { c.Size["K"], c.Size["V"] = s[0], s[1] })
			}
			one("K=512 V=512", func(c *solo) { c.Size["K"], c.Size["V"], c.Size["T"], c.Size["HV"] = 512, 512, 5, 1 })
			one("no batch", func(c *solo) { c.Size["B"] = 0 })
			for _, gates := range []string{"mild", "zero", "strong"} {
				one(gates, func(c *solo) {
					for _, name := range []string{"g", "g_cumsum", "gk"} {
						if c.Draw[name] != nil {
							c.Draw[name] = decays[gates]
						}
					}
				})
			}
			for _, cu := range [][]int{{0}, {0, 0}, {0, 70}, {0, 3, 3, 67, 70}, {0, 17, 40}, {0, 0, 64, 65}} {
				one(fmt.Sprint("packed ", cu), func(c *solo) {
					c.Cu, c.Narrow, c.Size["P"], c.Given = cu, len(cu)%2 == 0, 5, stageGiven(cu)
					c.Layout = []layout{compact, gaps}[len(cu)%2]
				})
			}
			if from.Numbers["lower_bound"] != 0 {
				one("softplus", func(c *solo) { delete(c.Numbers, "lower_bound") })
			}
			one("few", func(c *solo) {
				c.Give, c.Numbers = nil, map[string]float64{}
				c.Unwanted = []string{"final_state", "dh0", "dg", "dA_log", "ddt_bias"}
			})
		}
	}
	return list
}
