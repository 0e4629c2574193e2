package core

import "slices"

// State summaries. What a window of tokens does to a state is an affine map,
//
//	S_out = M S_in + S        and backward        dS_in = N dS_out + G,    N = M^T,
//
// so that tokens may be cut into windows that are computed apart: arXiv:2412.06464 for the chunk form, of which this is the scan of a
// state with K more columns. A packed map is [K, V+K]: S (or G) in the first V columns, M (or N) behind them. Maps are K-first.
var summaryOps = []*Op{summaryFwd, summaryGrad, summaryBwd, kdaSummaryFwd, kdaSummaryGrad, kdaSummaryBwd, summaryMerge, summaryMergeBwd, summaryCompose, summaryComposeBwd}

var (
	sumBeta = TensorArg{Name: "beta", Role: OptIn, Rule: Float, Dims: "B T HV", Doc: "write strength, or its logit where beta_sigmoid is 1; NULL: ones"}
	sumDb   = TensorArg{Name: "dbeta", Role: OptOut, Rule: Same, Like: "beta", Dims: "B T HV", With: "beta", Doc: "gradient of beta (of the logit where beta_sigmoid is 1)"}
	sumMap  = TensorArg{Name: "map", Role: Out, Rule: Acc, Dims: "N HV K VK", Doc: "S in the columns [0,V), M in [V,V+K); of a sequence without tokens 0 and the identity"}
	sumDmap = TensorArg{Name: "dmap", Role: In, Rule: Acc, Dims: "N HV K VK", Doc: "gradient of map"}
	sumGMap = TensorArg{Name: "map", Role: Out, Rule: Acc, Dims: "N HV K VK", Doc: "G, the gradient of the entry state where that of the exit state is 0, in the columns [0,V), N in [V,V+K)"}
	sumS    = TensorArg{Name: "s", Role: In, Rule: Acc, Dims: "R B HV K V", Doc: "the S of R maps, in the order of their windows; the first V columns of packed maps"}
	sumM    = TensorArg{Name: "m", Role: In, Rule: Acc, Dims: "R B HV K K", Doc: "their M; the last K columns of packed maps"}
	sumX    = TensorArg{Name: "state", Role: OptIn, Rule: Acc, Dims: "B HV K V", Doc: "the state to begin with; NULL: 0"}
	sumDx   = TensorArg{Name: "dstate", Role: OptOut, Rule: Acc, Dims: "B HV K V", With: "state", Doc: "gradient of state"}
	sumDs   = TensorArg{Name: "ds", Role: Out, Rule: Same, Like: "s", Dims: "R B HV K V", Doc: "gradient of s"}
	sumDm   = TensorArg{Name: "dm", Role: Out, Rule: Same, Like: "m", Dims: "R B HV K K", Doc: "gradient of m"}

	sumPacked  = []Derived{{"VK", "V+K"}}
	sumNumbers = gdnNumbers[1:5] // no scale, and no state to turn
	mapNumbers = []NumberArg{
		{Name: "reverse", Max: 1, Doc: "1: the last map comes first, as in the backward"},
		{Name: "transpose", Max: 1, Doc: "1: the maps' M^T takes the place of M"},
	}
)

var summaryFwd = &Op{
	Name:    "summary_fwd",
	Doc:     "What the tokens of each sequence do to the state of Gated DeltaNet, S_out = M S_in + S; the inputs are those of gdn_fwd.",
	Tensors: []TensorArg{argK, argV, argG, sumBeta, argALog, argBias, argCu, sumMap},
	Numbers: sumNumbers,
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var summaryGrad = &Op{
	Name:    "summary_grad",
	Doc:     "Gradients of gdn_summary_fwd.",
	Tensors: []TensorArg{argK, argV, argG, sumBeta, argALog, argBias, argCu, sumDmap, outDk, outDv, outDg, sumDb, outDA, outDbias},
	Numbers: sumNumbers,
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var summaryBwd = &Op{
	Name:    "summary_bwd",
	Doc:     "What the tokens of each sequence do to the gradient of the state of Gated DeltaNet, dS_in = N dS_out + G; the inputs are those of gdn_bwd.",
	Tensors: []TensorArg{argQ, argK, argG, sumBeta, argALog, argBias, argCu, argDo, sumGMap},
	Numbers: gdnNumbers[:5],
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var kdaSummaryFwd = &Op{
	Name:    "kda_summary_fwd",
	Doc:     "What the tokens of each sequence do to the state of Kimi Delta Attention, S_out = M S_in + S; the inputs are those of gdn_kda_fwd.",
	Tensors: []TensorArg{argK, argV, kdaArgG, sumBeta, kdaArgALog, kdaArgBias, argCu, sumMap},
	Numbers: kdaNumbers[1:6],
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var kdaSummaryGrad = &Op{
	Name:    "kda_summary_grad",
	Doc:     "Gradients of gdn_kda_summary_fwd.",
	Tensors: []TensorArg{argK, argV, kdaArgG, sumBeta, kdaArgALog, kdaArgBias, argCu, sumDmap, outDk, outDv, kdaOutDg, sumDb, outDA, kdaOutBias},
	Numbers: kdaNumbers[1:6],
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var kdaSummaryBwd = &Op{
	Name:    "kda_summary_bwd",
	Doc:     "What the tokens of each sequence do to the gradient of the state of Kimi Delta Attention, dS_in = N dS_out + G; the inputs are those of gdn_kda_bwd.",
	Tensors: []TensorArg{argQ, argK, kdaArgG, sumBeta, kdaArgALog, kdaArgBias, argCu, argDo, sumGMap},
	Numbers: kdaNumbers[:6],
	Derived: sumPacked,
	Check:   (*Call).checkOperands,
}

var summaryMerge = &Op{
	Name:    "summary_merge",
	Doc:     "Sends a state through R maps one after the other, state = m state + s. With R = 1 it applies a map.",
	Tensors: []TensorArg{sumS, sumM, sumX, {Name: "out", Role: Out, Rule: Acc, Dims: "B HV K V", Doc: "the state behind the last map"}},
	Numbers: mapNumbers,
	Check:   checkMaps,
}

var summaryMergeBwd = &Op{
	Name:    "summary_merge_bwd",
	Doc:     "Gradients of gdn_summary_merge.",
	Tensors: []TensorArg{sumS, sumM, sumX, {Name: "dout", Role: In, Rule: Acc, Dims: "B HV K V", Doc: "gradient of out"}, sumDs, sumDm, sumDx},
	Numbers: mapNumbers,
	Check:   checkMaps,
}

var summaryCompose = &Op{
	Name:    "summary_compose",
	Doc:     "The one map that does what R maps do one after the other; (S2, M2) after (S1, M1) is (M2 S1 + S2, M2 M1).",
	Tensors: []TensorArg{sumS, sumM, {Name: "map", Role: Out, Rule: Acc, Dims: "B HV K VK", Doc: "S in the columns [0,V), M in [V,V+K)"}},
	Numbers: mapNumbers,
	Derived: sumPacked,
	Check:   checkMaps,
}

var summaryComposeBwd = &Op{
	Name:    "summary_compose_bwd",
	Doc:     "Gradients of gdn_summary_compose.",
	Tensors: []TensorArg{sumS, sumM, {Name: "dmap", Role: In, Rule: Acc, Dims: "B HV K VK", Doc: "gradient of map"}, sumDs, sumDm},
	Numbers: mapNumbers,
	Derived: sumPacked,
	Check:   checkMaps,
}

// checkOperands holds the rules of the delta rule that no shape expresses, for operators that may lack any of its tensors and numbers.
func (c *Call) checkOperands() error {
	keys, values := c.Op.Tensors[0].Name, "v"
	for _, other := range []string{"dout", "u", "v_new"} {
		if !c.takes(values) {
			values = other
		}
	}
	h, hv := c.Sizes[sizeH], c.Sizes[sizeHV]
	grouped := c.takes("k")
	if grouped {
		if err := c.inRange(keys, "H", h, maxSize); err != nil {
			return err
		}
	}
	if err := c.inRange(values, "HV", hv, maxSize); err != nil {
		return err
	}
	if err := c.inRange(keys, "K", c.Sizes[sizeK], maxHead); err != nil {
		return err
	}
	if err := c.inRange(values, "V", c.Sizes[sizeV], maxHead); err != nil {
		return err
	}
	if grouped && hv%h != 0 {
		return c.invalid("%s has HV=%d, expected a multiple of H=%d", values, hv, h)
	}
	gate, sigmoid := c.flag("gate"), c.flag("beta_sigmoid")
	bound := 0.0
	if slices.ContainsFunc(c.Op.Numbers, func(n NumberArg) bool { return n.Name == "lower_bound" }) {
		var err error
		if bound, _, err = c.kdaGate(); err != nil {
			return err
		}
	}
	switch {
	case gate && !c.Has("g"):
		return c.invalid("gate is 1 and g is NULL, expected the raw gate")
	case gate && bound == 0 && !c.Has("A_log"):
		return c.invalid("gate is 1 and A_log is NULL, expected [HV]")
	case !gate && c.takes("A_log") && c.Has("A_log"):
		return c.invalid("A_log is given and gate is 0, expected gate 1 with it")
	case !gate && c.takes("dt_bias") && c.Has("dt_bias"):
		return c.invalid("dt_bias is given and gate is 0, expected gate 1 with it")
	case sigmoid && !c.Has("beta"):
		return c.invalid("beta_sigmoid is 1 and beta is NULL, expected the logits")
	case c.flag("neg_eigval") && !sigmoid:
		return c.invalid("neg_eigval is 1 and beta_sigmoid is 0, expected beta_sigmoid 1 with it")
	}
	return nil
}

// flag is a number of range 0 to 1, false where the operator has none of that name.
func (c *Call) flag(name string) bool {
	return slices.ContainsFunc(c.Op.Numbers, func(n NumberArg) bool { return n.Name == name }) && c.Int(name) != 0
}

// takes tells whether the operator has a tensor of a name.
func (c *Call) takes(name string) bool {
	return slices.ContainsFunc(c.Op.Tensors, func(a TensorArg) bool { return a.Name == name })
}

func checkMaps(c *Call) error {
	if err := c.inRange("s", "K", c.Sizes[sizeK], maxHead); err != nil {
		return err
	}
	return c.inRange("s", "V", c.Sizes[sizeV], maxHead)
}
