package conform

import (
	"math"
	"math/rand/v2"
	"slices"

	"libgdn/core/oracle"
)

// pagedCases are those of decoding from a pool. A slot that no sequence names holds 1e30, or infinity where the dtype has none so large.
func pagedCases(short bool) []*solo {
	base := func(c solo) solo {
		c.Op = "decode"
		c.Draw = map[string]draw{"g": logDecays, "beta": unitNormal, "A_log": logAmplitudes}
		if c.Numbers["gate"] != 0 {
			delete(c.Draw, "g")
		}
		if c.Numbers["beta_sigmoid"] != 0 {
			delete(c.Draw, "beta")
		}
		given := c.Given
		c.Given = func(in oracle.Tensors, size map[string]int64) {
			if given != nil {
				given(in, size)
			}
			if c.Numbers["qk_l2norm"] == 0 {
				unitRows(in["k"], int(size["K"]))
			}
			if slots := in["ssm_state_indices"]; slots != nil {
				state := len(in["pool"]) / int(size["P"])
				for i := range in["pool"] {
					if !slices.Contains(slots, float64(i/state)) {
						in["pool"][i] = 1e30
					}
				}
			}
		}
		return c
	}
	indices := func(slots, accepted []float64) func(oracle.Tensors, map[string]int64) {
		return func(in oracle.Tensors, _ map[string]int64) {
			copy(in["ssm_state_indices"], slots)
			copy(in["num_accepted_tokens"], accepted)
		}
	}
	pooled, speculative := []string{"g", "beta", "ssm_state_indices"}, []string{"g", "beta", "ssm_state_indices", "num_accepted_tokens"}
	list := []solo{
		{Name: "one token", Size: map[string]int64{"B": 4, "T": 1, "H": 2, "HV": 4, "K": 64, "V": 64, "P": 9, "R": 1}, Give: pooled,
			Short: []string{"g", "beta", "ssm_state_indices"}, Unwanted: []string{"final_state"}, Given: indices([]float64{7, -1, 0, 3}, nil),
			Numbers: map[string]float64{"in_place": 1, "qk_l2norm": 1}},
		{Name: "speculative", Size: map[string]int64{"B": 3, "T": 3, "H": 1, "HV": 3, "K": 20, "V": 33, "P": 13, "R": 5}, Give: speculative, Short: []string{"beta"},
			// Sequences 0 and 2 go on from one slot that neither writes; a later slot that is negative is not written; entries that no token needs say nothing.
			Given:   indices([]float64{1, 2, 1, 99, 5, 4, -7, 4, 8, 99, 11, 0, 12, 5, -1}, []float64{5, 1, 4}),
			Numbers: map[string]float64{"in_place": 1, "scale": 0.1}},
		{Name: "channels", Size: map[string]int64{"B": 2, "T": 2, "H": 2, "HV": 6, "K": 64, "V": 48, "P": 7, "R": 2}, Give: append([]string{"A_log", "dt_bias"}, speculative...),
			Given:   indices([]float64{6, 5, 2, 0}, []float64{2, 1}),
			Numbers: map[string]float64{"in_place": 1, "gate": 1, "beta_sigmoid": 1, "neg_eigval": 1, "state_v_first": 1, "qk_l2norm": 1}},
		{Name: "packed", Size: map[string]int64{"B": 1, "T": 9, "H": 1, "HV": 2, "K": 32, "V": 64, "P": 12, "R": 4}, Cu: []int{0, 4, 4, 5, 7, 7}, Give: append([]string{"dt_bias"}, speculative...),
			// The second sequence is empty, and so is the last, which is padding besides.
			Given:   indices([]float64{3, 1, 4, 0, 5, 5, 5, 5, -2, 9, 9, 9, 7, 7, 6, -3, -1, -1, -1, -1}, []float64{4, 2, 1, 3, 1}),
			Numbers: map[string]float64{"in_place": 1, "gate": 1, "lower_bound": -5}},
		{Name: "gate a head", Size: map[string]int64{"B": 2, "T": 2, "H": 2, "HV": 2, "K": 7, "V": 5, "P": 4, "R": 2}, Give: append([]string{"A_log", "dt_bias"}, pooled...),
			Short: []string{"g", "dt_bias"}, Given: indices([]float64{0, 3, 2, 1}, nil), Numbers: map[string]float64{"gate": 1, "state_v_first": 1, "in_place": 1}},
		{Name: "final state", Size: map[string]int64{"B": 3, "T": 2, "H": 1, "HV": 10, "K": 64, "V": 96, "P": 5, "R": 2}, Give: pooled, Short: []string{"g"},
			// Nothing is written to the pool, so all may go on from one slot.
			Given: indices([]float64{4, -1, 4, 99, 4, 4}, nil), Numbers: map[string]float64{}},
		{Name: "slots by number", Size: map[string]int64{"B": 3, "T": 4, "H": 1, "HV": 2, "K": 16, "V": 32, "P": 3}, Give: []string{"g"}, Short: []string{"g"},
			Numbers: map[string]float64{"in_place": 1, "state_v_first": 1}},
		{Name: "no decay", Size: map[string]int64{"B": 1, "T": 1, "H": 1, "HV": 1, "K": 1, "V": 1, "P": 1}, Give: nil, Numbers: map[string]float64{}},
		{Name: "resets", Size: map[string]int64{"B": 2, "T": 3, "H": 1, "HV": 2, "K": 40, "V": 32, "P": 8, "R": 3}, Give: pooled,
			Given: func(in oracle.Tensors, size map[string]int64) {
				copy(in["ssm_state_indices"], []float64{0, 1, 2, 5, 6, 7})
				for i := range in["g"] {
					if i%3 == 0 {
						in["g"][i] = math.Inf(-1)
					}
				}
			}, Numbers: map[string]float64{"in_place": 1}},
	}
	var all []*solo
	for _, c := range list {
		all = append(all, everywhere(base(c), short)...)
	}
	return all
}

func logDecays(r *rand.Rand, _ int) float64     { return -math.Log1p(math.Exp(r.NormFloat64())) }
func unitNormal(r *rand.Rand, _ int) float64    { return 1 / (1 + math.Exp(-r.NormFloat64())) }
func logAmplitudes(r *rand.Rand, _ int) float64 { return math.Log(1 + 15*r.Float64()) }

// unitRows makes each row of a width one long.
func unitRows(x []float64, width int) {
	for row := range slices.Chunk(x, width) {
		sum := 1e-30
		for _, a := range row {
			sum += a * a
		}
		for i := range row {
			row[i] /= math.Sqrt(sum)
		}
	}
}
