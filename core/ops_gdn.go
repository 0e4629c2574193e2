package core

// Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464). Per token, in this order, with S the K x V state of a value head:
//
//	S~ = exp(g) S      e = v - S~^T k      S = S~ + k (beta e)^T      o = scale S^T q

var gdnOps = []*Op{gdnFwd, gdnBwd, recurrentFwd, recurrentBwd}

// Inputs and numbers that all ops of the family share.
var (
	argQ    = TensorArg{Name: "q", Role: In, Rule: Io, Dims: "B T H K", Doc: "queries"}
	argK    = TensorArg{Name: "k", Role: In, Rule: Io, Dims: "B T H K", Doc: "keys"}
	argV    = TensorArg{Name: "v", Role: In, Rule: Io, Dims: "B T HV V", Doc: "values; HV is a multiple of H, value head h uses key head h/(HV/H)"}
	argG    = TensorArg{Name: "g", Role: OptIn, Rule: Float, Dims: "B T HV", Doc: "log decay (natural logarithm, <= 0, -inf resets the state), or the raw gate where gate is 1; NULL: no decay"}
	argGK   = TensorArg{Name: "gk", Role: OptIn, Rule: Float, Dims: "B T HV K", Doc: "log decay per key channel"}
	argGV   = TensorArg{Name: "gv", Role: OptIn, Rule: Float, Dims: "B T HV V", Doc: "log decay per value channel"}
	argBeta = TensorArg{Name: "beta", Role: OptIn, Rule: Float, Dims: "B T HV [V]", Doc: "write strength per value head or per value channel, or its logit where beta_sigmoid is 1; NULL: ones"}
	argALog = TensorArg{Name: "A_log", Role: OptIn, Rule: Float, Dims: "HV", Doc: "gate 1: log of the gate's amplitude"}
	argBias = TensorArg{Name: "dt_bias", Role: OptIn, Rule: Float, Dims: "HV", Doc: "gate 1: bias of the raw gate; NULL: 0"}
	argH0   = TensorArg{Name: "initial_state", Role: OptIn, Rule: Float, Dims: "N HV K V", State: true, Doc: "state before the first token of each sequence; NULL: 0"}
	argCu   = TensorArg{Name: "cu_seqlens", Role: OptIn, Rule: Integer, Dims: "N+1", Host: true, Doc: "offsets of N packed sequences, from 0, not decreasing, at most T; B must be 1. Rows from the last offset on are zero in every output. NULL: B sequences of T tokens"}
	argHT   = TensorArg{Name: "final_state", Role: OptOut, Rule: Acc, Dims: "N HV K V", State: true, Want: "output_final_state", Doc: "state after the last token of each sequence"}
	argDo   = TensorArg{Name: "dout", Role: In, Rule: Float, Dims: "B T HV V", Doc: "gradient of o"}
	argDht  = TensorArg{Name: "dht", Role: OptIn, Rule: Acc, Dims: "N HV K V", State: true, Doc: "gradient of final_state; NULL: 0"}

	outO     = TensorArg{Name: "o", Role: Out, Rule: Same, Like: "v", Dims: "B T HV V", Doc: "output"}
	outDq    = TensorArg{Name: "dq", Role: Out, Rule: Same, Like: "q", Dims: "B T H K", Doc: "gradient of q, summed over the value heads of each key head"}
	outDk    = TensorArg{Name: "dk", Role: Out, Rule: Same, Like: "k", Dims: "B T H K", Doc: "gradient of k, summed likewise"}
	outDv    = TensorArg{Name: "dv", Role: Out, Rule: Same, Like: "v", Dims: "B T HV V", Doc: "gradient of v"}
	outDg    = TensorArg{Name: "dg", Role: OptOut, Rule: Same, Like: "g", Dims: "B T HV", With: "g", Doc: "gradient of g (of the raw gate where gate is 1)"}
	outDgk   = TensorArg{Name: "dgk", Role: OptOut, Rule: Same, Like: "gk", Dims: "B T HV K", With: "gk", Doc: "gradient of gk"}
	outDgv   = TensorArg{Name: "dgv", Role: OptOut, Rule: Same, Like: "gv", Dims: "B T HV V", With: "gv", Doc: "gradient of gv"}
	outDbeta = TensorArg{Name: "dbeta", Role: OptOut, Rule: Same, Like: "beta", Dims: "B T HV [V]", With: "beta", Doc: "gradient of beta, shaped like it (of the logit where beta_sigmoid is 1)"}
	outDA    = TensorArg{Name: "dA_log", Role: OptOut, Rule: Acc, Dims: "HV", With: "A_log", Doc: "gradient of A_log"}
	outDbias = TensorArg{Name: "ddt_bias", Role: OptOut, Rule: Acc, Dims: "HV", With: "dt_bias", Doc: "gradient of dt_bias"}
	outDh0   = TensorArg{Name: "dh0", Role: OptOut, Rule: Acc, Dims: "N HV K V", State: true, With: "initial_state", Doc: "gradient of initial_state"}

	gdnNumbers = []NumberArg{
		{Name: "scale", Float: true, Doc: "factor of q; 0 stands for K^-1/2"},
		{Name: "qk_l2norm", Max: 1, Doc: "1: q and k are divided by sqrt(sum of squares + 1e-6) along K first"},
		{Name: "gate", Max: 1, Doc: "1: g = -exp(A_log) softplus(g + dt_bias)"},
		{Name: "beta_sigmoid", Max: 1, Doc: "1: beta = sigmoid(beta)"},
		{Name: "neg_eigval", Max: 1, Doc: "1: beta = 2 sigmoid(beta); needs beta_sigmoid"},
		{Name: "state_v_first", Max: 1, Doc: "1: states and their gradients are [N HV V K]"},
	}

	// What the backward reads again, K and V padded to the kernels' panels: the state every 64 tokens (the first of a sequence is
	// initial_state) and the error before beta of each token.
	gdnPad  = []Derived{{"KP", "(K+31)//32*32"}, {"VP", "(V+31)//32*32"}}
	gdnTape = append(gdnPad, Derived{"TAPE", "HV*(B*T//64*KP*VP + B*T*VP)"})
	recTape = []Derived{{"TAPE", "HV*(B*T//64)*K*V"}}
	outTape = TensorArg{Name: "tape", Role: OptOut, Rule: Acc, Dims: "TAPE", Want: "save", Doc: "what the backward needs again, opaque; NULL: inference"}
	argTape = TensorArg{Name: "tape", Role: In, Rule: Acc, Dims: "TAPE", Doc: "as the forward of the same arguments wrote it"}
)

var gdnFwd = &Op{
	Name:    "fwd",
	Doc:     "Gated DeltaNet in chunk form: S~ = exp(g) S, e = v - S~^T k, S = S~ + k (beta e)^T, o = scale S^T q for each token (arXiv:2412.06464).",
	Tensors: []TensorArg{argQ, argK, argV, argG, argBeta, argALog, argBias, argH0, argCu, outO, argHT, outTape},
	Numbers: gdnNumbers,
	Derived: gdnTape,
	Check:   checkGDN,
}

var gdnBwd = &Op{
	Name: "bwd",
	Doc:  "Gradients of gdn_fwd.",
	Tensors: []TensorArg{argQ, argK, argV, argG, argBeta, argALog, argBias, argH0, argCu, argTape, argDo, argDht,
		outDq, outDk, outDv, outDg, outDbeta, outDA, outDbias, outDh0},
	Numbers: gdnNumbers,
	Derived: gdnTape,
	Check:   checkGDN,
}

var recurrentFwd = &Op{
	Name:    "recurrent_fwd",
	Doc:     "Gated DeltaNet token by token, for decoding and short sequences: as gdn_fwd, with S~ = exp(g) diag(exp(gk)) S diag(exp(gv)).",
	Tensors: []TensorArg{argQ, argK, argV, argG, argGK, argGV, argBeta, argALog, argBias, argH0, argCu, outO, argHT, outTape},
	Numbers: gdnNumbers,
	Derived: recTape,
	Check:   checkGDN,
}

var recurrentBwd = &Op{
	Name: "recurrent_bwd",
	Doc:  "Gradients of gdn_recurrent_fwd.",
	Tensors: []TensorArg{argQ, argK, argV, argG, argGK, argGV, argBeta, argALog, argBias, argH0, argCu, argTape, argDo, argDht,
		outDq, outDk, outDv, outDg, outDgk, outDgv, outDbeta, outDA, outDbias, outDh0},
	Numbers: gdnNumbers,
	Derived: recTape,
	Check:   checkGDN,
}
