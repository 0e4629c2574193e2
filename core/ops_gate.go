package core

// What the layers put around the recurrence: gates (also beta's), their cumulative sums, and norms.
var (
	gateG     = TensorArg{Name: "g", Role: In, Rule: Io, Dims: "B T HV K", Doc: "raw gate, or log decay with gate 0; K is 1 where a head has one gate"}
	gateA     = TensorArg{Name: "A_log", Role: OptIn, Rule: Float, Dims: "HV", Doc: "log of the amplitude a; NULL: a is 1"}
	gateBias  = TensorArg{Name: "dt_bias", Role: OptIn, Rule: Float, Dims: "HV K", Doc: "bias of the raw gate; NULL: 0"}
	gateDA    = TensorArg{Name: "dA_log", Role: OptOut, Rule: Acc, Dims: "HV", With: "A_log", Doc: "gradient of A_log"}
	gateDbias = TensorArg{Name: "ddt_bias", Role: OptOut, Rule: Acc, Dims: "HV K", With: "dt_bias", Doc: "gradient of dt_bias"}

	gateNumbers = []NumberArg{
		{Name: "gate", Max: 2, Doc: "0: y = g; 1: y = -a softplus(g + dt_bias); 2: y = bound sigmoid(a (g + dt_bias))"},
		{Name: "bound", Float: true, Doc: "gate 2: the lower bound of a decay, or the upper one of a beta"},
		{Name: "chunk", Max: 1 << 40, Doc: "0: no sum; C: y becomes its cumulative sum in each C tokens of a sequence, counted from the sequence's first"},
		{Name: "reverse", Max: 1, Doc: "1: the sum runs from a chunk's last token to its first"},
		{Name: "scale", Float: true, Doc: "factor of y; 0 stands for 1"},
	}

	normX      = TensorArg{Name: "x", Role: In, Rule: Io, Dims: "B T H K", Doc: "rows of K numbers"}
	normWeight = TensorArg{Name: "weight", Role: OptIn, Rule: Float, Dims: "K", Doc: "factors of the normalised numbers; NULL: ones"}
	normZ      = TensorArg{Name: "z", Role: OptIn, Rule: Float, Dims: "B T H K", Doc: "output gate, where activation is not 0"}

	normNumbers = []NumberArg{
		{Name: "eps", Float: true, Doc: "added under the root, not negative"},
		{Name: "mean", Max: 1, Doc: "0: the root of the sum of squares (l2norm); 1: of their mean (RMSNorm)"},
		{Name: "activation", Max: 2, Doc: "of z: 0: no z; 1: z sigmoid(z); 2: sigmoid(z)"},
	}
)

var gateOps = []*Op{gateFwd, gateBwd, normFwd, normBwd}

var gateFwd = &Op{
	Name: "gate_fwd",
	Doc: "Gates standing alone: the softplus gate of Gated DeltaNet and Kimi Delta Attention, the bounded gate, sigmoid for beta, and cumulative sums in " +
		"chunks of those or of log decays.",
	Tensors: []TensorArg{gateG, gateA, gateBias, argCu,
		{Name: "y", Role: Out, Rule: Acc, Dims: "B T HV K", Doc: "the gate; a softplus that underflows gives 0 whatever the amplitude"}},
	Numbers: gateNumbers,
	Check:   checkGate,
}

var gateBwd = &Op{
	Name: "gate_bwd",
	Doc:  "Gradients of gdn_gate_fwd.",
	Tensors: []TensorArg{gateG, gateA, gateBias, argCu,
		{Name: "dout", Role: In, Rule: Float, Dims: "B T HV K", Doc: "gradient of y"},
		{Name: "dg", Role: Out, Rule: Same, Like: "g", Dims: "B T HV K", Doc: "gradient of g"}, gateDA, gateDbias},
	Numbers: gateNumbers,
	Check:   checkGate,
}

var normFwd = &Op{
	Name:    "norm_fwd",
	Doc:     "Rows divided by a root of their squares, with weight and output gate: y = x / sqrt(sum or mean of x^2 + eps) weight act(z). l2norm and gated RMSNorm.",
	Tensors: []TensorArg{normX, normWeight, normZ, {Name: "y", Role: Out, Rule: Same, Like: "x", Dims: "B T H K", Doc: "output"}},
	Numbers: normNumbers,
	Check:   checkNorm,
}

var normBwd = &Op{
	Name: "norm_bwd",
	Doc:  "Gradients of gdn_norm_fwd.",
	Tensors: []TensorArg{normX, normWeight, normZ, {Name: "dout", Role: In, Rule: Float, Dims: "B T H K", Doc: "gradient of y"},
		{Name: "dx", Role: Out, Rule: Same, Like: "x", Dims: "B T H K", Doc: "gradient of x"},
		{Name: "dweight", Role: OptOut, Rule: Acc, Dims: "K", With: "weight", Doc: "gradient of weight"},
		{Name: "dz", Role: OptOut, Rule: Same, Like: "z", Dims: "B T H K", With: "z", Doc: "gradient of z"}},
	Numbers: normNumbers,
	Check:   checkNorm,
}

func checkGate(c *Call) error {
	if err := c.inRange("g", "HV", c.Sizes[sizeHV], maxSize); err != nil {
		return err
	}
	if err := c.inRange("g", "K", c.Sizes[sizeK], maxSize); err != nil {
		return err
	}
	switch gate, chunk := c.Int("gate"), c.Int("chunk"); {
	case gate == 0 && c.Has("A_log"):
		return c.invalid("A_log is given and gate is 0, expected gate 1 or 2 with it")
	case gate == 0 && c.Has("dt_bias"):
		return c.invalid("dt_bias is given and gate is 0, expected gate 1 or 2 with it")
	case gate == 2 && c.Float("bound") == 0:
		return c.invalid("gate is 2 and bound is 0, expected another number")
	case gate != 2 && c.Float("bound") != 0:
		return c.invalid("bound is %g and gate is %d, expected gate 2 with it", c.Float("bound"), gate)
	case c.Int("reverse") != 0 && chunk == 0:
		return c.invalid("reverse is 1 and chunk is 0, expected the length of a chunk with it")
	}
	return nil
}

func checkNorm(c *Call) error {
	if err := c.inRange("x", "H", c.Sizes[sizeH], maxSize); err != nil {
		return err
	}
	if err := c.inRange("x", "K", c.Sizes[sizeK], maxNorm); err != nil {
		return err
	}
	switch act := c.Int("activation"); {
	case c.Float("eps") < 0:
		return c.invalid("eps is %g, expected 0 or more", c.Float("eps"))
	case act != 0 && !c.Has("z"):
		return c.invalid("activation is %d and z is NULL, expected [B T H K]", act)
	case act == 0 && c.Has("z"):
		return c.invalid("z is given and activation is 0, expected activation 1 or 2 with it")
	}
	return nil
}

// maxNorm is the longest row that a norm takes: some of them have to lie in a thread's scratch.
const maxNorm = 1 << 20
