package core

// Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): Gated DeltaNet with a decay per key channel. Per token, in this order, with S
// the K x V state of a value head:
//
//	S~ = diag(exp(g)) S      e = v - S~^T k      S = S~ + k (beta e)^T      o = scale S^T q
var kdaOps = []*Op{kdaFwd, kdaBwd, kdaRecurrentFwd, kdaRecurrentBwd}

var (
	kdaArgG    = TensorArg{Name: "g", Role: OptIn, Rule: Float, Dims: "B T HV K", Doc: "log decay per key channel (natural logarithm, <= 0, -inf resets the channel), or the raw gate where gate is 1; NULL: no decay"}
	kdaArgALog = TensorArg{Name: "A_log", Role: OptIn, Rule: Float, Dims: "HV", Doc: "gate 1: log of the gate's amplitude; with lower_bound NULL stands for zeros"}
	kdaArgBias = TensorArg{Name: "dt_bias", Role: OptIn, Rule: Float, Dims: "HV K", Doc: "gate 1: bias of the raw gate; NULL: 0"}
	kdaOutDg   = TensorArg{Name: "dg", Role: OptOut, Rule: Same, Like: "g", Dims: "B T HV K", With: "g", Doc: "gradient of g (of the raw gate where gate is 1)"}
	kdaOutBias = TensorArg{Name: "ddt_bias", Role: OptOut, Rule: Acc, Dims: "HV K", With: "dt_bias", Doc: "gradient of dt_bias"}
	kdaOutH    = TensorArg{Name: "h", Role: OptOut, Rule: Same, Like: "q", Dims: "B NT HV K V", State: true, Want: "return_intermediate_states", Doc: "state before each 64 tokens of a sequence; packed sequences lie one behind the other, and what is left of NT is zero"}

	kdaNumbers = []NumberArg{
		gdnNumbers[0],
		gdnNumbers[1],
		{Name: "gate", Max: 1, Doc: "1: g = -exp(A_log) softplus(g + dt_bias), or as lower_bound says"},
		{Name: "lower_bound", Float: true, Doc: "gate 1: below 0, g = lower_bound sigmoid(exp(A_log) (g + dt_bias)); 0 stands for none"},
		gdnNumbers[3],
		gdnNumbers[4],
		gdnNumbers[5],
	}

	// NT: ceil(T/64) a batch entry, and with packed sequences (B = 1) as many as N of them can have at most. The divisor is B, or 1 for 0.
	kdaTape = append(gdnTape[:len(gdnTape):len(gdnTape)], Derived{"NT", "(T + 63*(N//(B + 1//(B+1))))//64"})
)

var kdaFwd = &Op{
	Name:    "kda_fwd",
	Doc:     "Kimi Delta Attention in chunk form: S~ = diag(exp(g)) S, e = v - S~^T k, S = S~ + k (beta e)^T, o = scale S^T q for each token (arXiv:2510.26692).",
	Tensors: []TensorArg{argQ, argK, argV, kdaArgG, argBeta, kdaArgALog, kdaArgBias, argH0, argCu, outO, argHT, outTape, kdaOutH},
	Numbers: kdaNumbers,
	Derived: kdaTape,
	Check:   checkKDA,
}

var kdaBwd = &Op{
	Name: "kda_bwd",
	Doc:  "Gradients of gdn_kda_fwd.",
	Tensors: []TensorArg{argQ, argK, argV, kdaArgG, argBeta, kdaArgALog, kdaArgBias, argH0, argCu, argTape, argDo, argDht,
		outDq, outDk, outDv, kdaOutDg, outDbeta, outDA, kdaOutBias, outDh0},
	Numbers: kdaNumbers,
	Derived: gdnTape,
	Check:   checkKDA,
}

var kdaRecurrentFwd = &Op{
	Name:    "kda_recurrent_fwd",
	Doc:     "Kimi Delta Attention token by token, for decoding and short sequences: as gdn_kda_fwd.",
	Tensors: []TensorArg{argQ, argK, argV, kdaArgG, argBeta, kdaArgALog, kdaArgBias, argH0, argCu, outO, argHT, outTape},
	Numbers: kdaNumbers,
	Derived: recTape,
	Check:   checkKDA,
}

var kdaRecurrentBwd = &Op{
	Name: "kda_recurrent_bwd",
	Doc:  "Gradients of gdn_kda_recurrent_fwd.",
	Tensors: []TensorArg{argQ, argK, argV, kdaArgG, argBeta, kdaArgALog, kdaArgBias, argH0, argCu, argTape, argDo, argDht,
		outDq, outDk, outDv, kdaOutDg, outDbeta, outDA, kdaOutBias, outDh0},
	Numbers: kdaNumbers,
	Derived: recTape,
	Check:   checkKDA,
}

// checkKDA holds the rules of Kimi Delta Attention that no shape expresses.
func checkKDA(c *Call) error {
	if err := c.checkBound(); err != nil {
		return err
	}
	return c.checkTape()
}

// checkBound is checkDelta where the gate has a form with a lower bound too.
func (c *Call) checkBound() error {
	bound, gate, err := c.kdaGate()
	if err != nil {
		return err
	}
	return c.checkDelta(gate && bound == 0)
}

// kdaGate returns what says which gate is computed in the kernel.
func (c *Call) kdaGate() (bound float64, gate bool, err error) {
	bound, gate = c.Float("lower_bound"), c.Int("gate") != 0
	switch {
	case bound > 0:
		err = c.invalid("lower_bound is %v, expected a number below 0, or 0 for none", bound)
	case bound != 0 && !gate:
		err = c.invalid("lower_bound is %v and gate is 0, expected gate 1 with it", bound)
	}
	return bound, gate, err
}
