package core

// Depthwise causal convolution along the tokens, with the tokens before a sequence's first in a state:
//
//	z_t = bias + sum_w weight[:,w] x_{t-(W-1-w)*dilation}      y = z or silu(z), plus residual
var (
	convX        = TensorArg{Name: "x", Role: In, Rule: Io, Dims: "B T D", Doc: "input, any strides; channels that lie side by side are fastest"}
	convWeight   = TensorArg{Name: "weight", Role: In, Rule: Float, Dims: "D W", Doc: "a filter for each channel, the last tap for the token itself"}
	convBias     = TensorArg{Name: "bias", Role: OptIn, Rule: Float, Dims: "D", Doc: "NULL: 0"}
	convResidual = TensorArg{Name: "residual", Role: OptIn, Rule: Same, Like: "x", Dims: "B T D", Doc: "added to the activated output; NULL: 0"}
	convH0       = TensorArg{Name: "initial_state", Role: OptIn, Rule: Float, Dims: "N D S", Doc: "the S inputs before each sequence's first, the latest last: the end of the sequence so far, or the halo from the shard before; NULL: 0"}

	convNumbers = []NumberArg{
		{Name: "silu", Max: 1, Doc: "1: y = z sigmoid(z)"},
		{Name: "dilation", Min: 1, Max: 1 << 20, Doc: "tokens from tap to tap"},
		{Name: "state_len", Max: 1 << 20, Doc: "S of the states, at least (W-1)*dilation where there is one"},
	}
	convSizes = []Derived{{"S", "state_len"}}
)

var convOps = []*Op{convFwd, convBwd}

var convFwd = &Op{
	Name: "conv_fwd",
	Doc:  "Depthwise causal convolution: z_t = bias + sum over taps of weight[:,w] x_{t-(W-1-w)*dilation}, y = z or silu(z), plus residual.",
	Tensors: []TensorArg{convX, convWeight, convBias, convResidual, convH0, argCu,
		{Name: "y", Role: Out, Rule: Same, Like: "x", Dims: "B T D", Doc: "output"},
		{Name: "final_state", Role: OptOut, Rule: Same, Like: "x", Dims: "N D S", Want: "output_final_state", Doc: "the last S inputs of each sequence, those of initial_state counted: the initial_state of what follows"}},
	Numbers: convNumbers,
	Derived: convSizes,
	Check:   checkConv,
}

var convBwd = &Op{
	Name: "conv_bwd",
	Doc:  "Gradients of gdn_conv_fwd.",
	Tensors: []TensorArg{convX, convWeight, convBias, convResidual, convH0, argCu,
		{Name: "dout", Role: In, Rule: Float, Dims: "B T D", Doc: "gradient of y"},
		{Name: "dht", Role: OptIn, Rule: Float, Dims: "N D S", Doc: "gradient of final_state; NULL: 0"},
		{Name: "dx", Role: Out, Rule: Same, Like: "x", Dims: "B T D", Doc: "gradient of x"},
		{Name: "dweight", Role: Out, Rule: Acc, Dims: "D W", With: "weight", Doc: "gradient of weight"},
		{Name: "dbias", Role: OptOut, Rule: Acc, Dims: "D", With: "bias", Doc: "gradient of bias"},
		{Name: "dresidual", Role: OptOut, Rule: Same, Like: "residual", Dims: "B T D", With: "residual", Doc: "gradient of residual: dout, zero in rows of no sequence"},
		{Name: "dh0", Role: OptOut, Rule: Acc, Dims: "N D S", With: "initial_state", Doc: "gradient of initial_state"}},
	Numbers: convNumbers,
	Derived: convSizes,
	Check:   checkConv,
}

// Of a convolution: the longest filter, and how far it may reach back.
const (
	maxTaps  = 16
	maxReach = 4096
)

func checkConv(c *Call) error {
	w, reach := c.Sizes[sizeW], (c.Sizes[sizeW]-1)*c.Int("dilation")
	if err := c.inRange("x", "D", c.Sizes[sizeD], maxSize); err != nil {
		return err
	}
	if err := c.inRange("weight", "W", w, maxTaps); err != nil {
		return err
	}
	if reach > maxReach {
		return c.invalid("dilation is %d with W=%d, expected (W-1)*dilation up to %d", c.Int("dilation"), w, maxReach)
	}
	for i := range c.Op.Tensors {
		if a := &c.Op.Tensors[i]; a.Dims == convH0.Dims && c.Tensors[i].DType != None && c.Int("state_len") < reach {
			return c.invalid("state_len is %d with %s, expected at least (W-1)*dilation=%d", c.Int("state_len"), a.Name, reach)
		}
	}
	return nil
}
