package conform

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"libgdn/core"
	"libgdn/core/oracle"
)

// frameCases are those of frame GDN: scans and composites in all directions, and the tokens' side.
func frameCases(short bool) []*solo {
	return slices.Concat(frameScans(short), frameTokens(short))
}

// matrices draws K x K matrices whose products neither grow nor vanish.
func matrices(K int64) draw {
	return func(r *rand.Rand, _ int) float64 { return r.NormFloat64() / math.Sqrt(float64(K)) }
}

func frameScans(short bool) []*solo {
	var list []*solo
	optional := map[string][]string{
		"frame_fwd":         {"Wz", "uz", "initial_state", "initial_z"},
		"frame_bwd":         {"initial_state", "Wz", "z", "initial_z", "dS", "dz", "dfinal_state", "dfinal_z"},
		"frame_pullback":    {"Wz", "dz"},
		"frame_summary_fwd": {"Wz", "uz"},
		"frame_summary_bwd": {"Wz", "uz", "dM", "dhz", "dMz"},
		"frame_merge_fwd":   {"Mz", "hz", "initial_state", "initial_z"},
		"frame_merge_bwd":   {"initial_state", "Mz", "z", "initial_z", "dS", "dz"},
	}
	for _, op := range []string{"frame_fwd", "frame_bwd", "frame_pullback", "frame_summary_fwd", "frame_summary_bwd", "frame_merge_fwd", "frame_merge_bwd"} {
		base := func(name string, B, T, K, V int64) solo {
			m := matrices(K)
			return solo{Name: name, Op: op, IO: core.F32, Aux: core.F32, Size: map[string]int64{"B": B, "T": T, "K": K, "V": V}, Give: optional[op],
				Numbers: map[string]float64{}, Draw: map[string]draw{"W": m, "Wz": m, "M": m, "Mz": m}}
		}
		add := func(c solo) { list = append(list, &c) }
		for _, x := range everywhere(base("all", 3, 5, 17, 9), short) {
			x.set("padding", 2)
			list = append(list, x)
		}
		// All that is optional left out; nothing to do; one number; what fills no tile, and what fills many
		c := base("none", 2, 4, 20, 6)
		c.Give, c.Unwanted = nil, []string{"z", "final_state", "final_z", "M", "Mz", "hz", "duz", "dWz", "dinitial_z"}
		add(c)
		c = base("numerator", 2, 4, 20, 6)
		c.Give = slices.DeleteFunc(slices.Clone(c.Give), func(s string) bool { return !slices.Contains([]string{"initial_state", "dS", "dfinal_state", "dM"}, s) })
		add(c)
		for _, n := range [][4]int64{{2, 0, 5, 3}, {0, 3, 5, 3}, {1, 1, 1, 1}, {5, 3, 33, 47}, {1, 7, 48, 1}, {2, 3, 112, 112}, {1, 2, 130, 24}, {1, 2, 10, 301}} {
			if !short || n[2] < 100 {
				add(base(fmt.Sprintf("B%d T%d K%d V%d", n[0], n[1], n[2], n[3]), n[0], n[1], n[2], n[3]))
			}
		}
		// Directions, with any number of frames of padding, and the garbage that padding may hold
		for _, padding := range []float64{0, 1, 4, 6} {
			for mode := range 8 {
				c := base(fmt.Sprintf("padding %v reverse %d exclusive %d start %d", padding, mode&1, mode>>1&1, mode>>2), 2, 6, 20, 6)
				if !c.set("padding", padding) && padding > 0 || !c.set("exclusive", float64(mode>>1&1)) && mode>>1&1 == 1 {
					continue
				}
				c.set("reverse", float64(mode&1))
				if mode>>2 == 0 {
					c.Give = slices.DeleteFunc(slices.Clone(c.Give), func(s string) bool { return s == "initial_state" || s == "initial_z" })
				}
				c.Given = func(in oracle.Tensors, size map[string]int64) {
					for _, name := range []string{"W", "U", "Wz", "uz"} {
						x := in[name]
						for i := range x {
							if frame := int64(i) / (int64(len(x)) / (size["B"] * size["T"])); float64(size["T"]-frame%size["T"]) <= padding {
								x[i] = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[i%3]
							}
						}
					}
				}
				add(c)
			}
		}
		if op == "frame_bwd" { // states of 16 bits are computed anew
			c := base("coarse", 3, 5, 17, 9)
			c.Give = append(slices.Clone(c.Give), "U", "uz")
			c.Types = map[string]core.DType{"S": core.BF16, "z": core.F16}
			for _, x := range everywhere(c, short) {
				x.set("padding", 1)
				x.set("reverse", 1)
				list = append(list, x)
			}
		}
	}
	return list
}

// set gives a number its value, and tells whether the operator has it.
func (c *solo) set(name string, x float64) bool {
	if !slices.ContainsFunc(find(c.Op).Numbers, func(n core.NumberArg) bool { return n.Name == name }) {
		return false
	}
	c.Numbers = maps.Clone(c.Numbers)
	c.Numbers[name] = x
	return true
}

func frameTokens(short bool) []*solo {
	var list []*solo
	optional := map[string][]string{
		"frame_build_fwd":   {"kz"},
		"frame_build_bwd":   {"kz", "dWz", "duz"},
		"frame_project_fwd": {"qz", "z"},
		"frame_project_bwd": {"qz", "z", "dden"},
	}
	for _, op := range []string{"frame_build_fwd", "frame_build_bwd", "frame_project_fwd", "frame_project_bwd"} {
		base := func(name string, B, T, R, H, K, V int64) solo {
			unit := func(r *rand.Rand, _ int) float64 { return r.NormFloat64() / math.Sqrt(float64(K)) }
			between := func(r *rand.Rand, _ int) float64 { return r.Float64() }
			return solo{Name: name, Op: op, IO: core.F32, Aux: core.F32, Size: map[string]int64{"B": B, "T": T, "R": R, "H": H, "K": K, "V": V}, Give: optional[op],
				Numbers: map[string]float64{}, Draw: map[string]draw{"k": unit, "kz": unit, "beta": between, "decay": between}, Ratio: 3e-5}
		}
		add := func(c solo) { list = append(list, &c) }
		list = append(list, everywhere(base("all", 2, 3, 5, 2, 17, 9), short)...)
		c := base("numerator", 2, 2, 5, 2, 12, 9)
		c.Give = nil
		add(c)
		c = base("partly", 2, 2, 5, 2, 12, 9)
		c.Give, c.Unwanted = slices.DeleteFunc(slices.Clone(c.Give), func(s string) bool { return s == "dWz" || s == "duz" || s == "dden" }), []string{"dkz", "dqz", "dz", "uz", "Wz", "den"}
		add(c)
		for _, n := range [][6]int64{{1, 1, 0, 1, 5, 3}, {1, 0, 3, 1, 5, 3}, {1, 1, 1, 1, 1, 1}, {1, 1, 130, 2, 20, 33}, {1, 2, 300, 1, 112, 112}, {2, 1, 7, 1, 130, 24}} {
			if !short || n[4] < 100 {
				add(base(fmt.Sprint("sizes ", n), n[0], n[1], n[2], n[3], n[4], n[5]))
			}
		}
		c = base("resets", 1, 8, 4, 1, 20, 20)
		c.Draw["decay"] = func(_ *rand.Rand, i int) float64 { return float64(i % 2) }
		add(c)
	}
	return list
}
