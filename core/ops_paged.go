package core

// Decoding for serving: the states of many sequences lie in a pool of slots, and each sequence names its slots. The recurrence is that of
// Gated DeltaNet or, with a decay per key channel, of Kimi Delta Attention.
var pagedOps = []*Op{decode}

var decode = &Op{
	Name: "decode",
	Doc: "A few tokens of each sequence, from and to slots of a pool of states, in one pass over each state: S~ = exp(g) S, e = v - S~^T k, S = S~ + k (beta e)^T, " +
		"o = scale S^T q. g per head: Gated DeltaNet; per key channel: Kimi Delta Attention. With in_place 1 the state after token t of sequence n goes to slot " +
		"ssm_state_indices[n, t] and all other slots stay as they are, bit for bit. A slot that one sequence writes may not be read or written by another. " +
		"Wrong indices are refused before anything is written.",
	Tensors: []TensorArg{argQ, argK, argV,
		{Name: "g", Role: OptIn, Rule: Float, Dims: "B T HV [K]", Doc: "log decay per head or per key channel (natural logarithm, <= 0, -inf resets), or the raw gate where gate is 1; NULL: no decay"},
		argBeta, kdaArgALog,
		{Name: "dt_bias", Role: OptIn, Rule: Float, Dims: "HV [K]", Doc: "gate 1: bias of the raw gate, per key channel exactly if g is; NULL: 0"},
		{Name: "pool", Role: InOut, Rule: Io, Dims: "P HV K V", State: true, Doc: "states, computed in float32 (or float64) and rounded where they are stored; only read where in_place is 0"},
		{Name: "ssm_state_indices", Role: OptIn, Rule: Integer, Dims: "N [R]", Doc: "slots of each sequence, one for each of its tokens and any more; one alone as [N]. A sequence whose first state is in a " +
			"negative slot is padding: its states are neither read nor written, its outputs are 0. A negative slot further on: that token's state is not stored. NULL: sequence n " +
			"has slot n for all its tokens, and P is N"},
		{Name: "num_accepted_tokens", Role: OptIn, Rule: Integer, Dims: "N", With: "ssm_state_indices", Doc: "1 to R: sequence n goes on from the state in slot ssm_state_indices[n, num_accepted_tokens[n] - 1]; NULL: ones"},
		argCu, outO, argHT},
	Numbers: append(kdaNumbers[:len(kdaNumbers):len(kdaNumbers)], NumberArg{Name: "in_place", Max: 1, Doc: "1: states are stored in the pool"}),
	Check:   checkDecode,
}

func checkDecode(c *Call) error {
	g, bias, slots := c.Tensor("g"), c.Tensor("dt_bias"), c.Tensor("ssm_state_indices")
	switch {
	case bias.DType != None && g.DType != None && bias.Rank != g.Rank-2:
		return c.invalid("dt_bias has shape %v and g %v, expected a bias per key channel exactly if g is", bias.Shape[:bias.Rank], g.Shape[:g.Rank])
	case slots.DType == None && c.Sizes[sizeP] != c.Sizes[sizeN]:
		return c.invalid("pool has P=%d, expected N=%d without ssm_state_indices", c.Sizes[sizeP], c.Sizes[sizeN])
	case slots.Rank == 1:
		c.Sizes[sizeR] = 1
	}
	// How long packed sequences are is in cu_seqlens, which the kernel reads.
	if !c.Has("cu_seqlens") && slots.DType != None && c.Sizes[sizeT] > c.Sizes[sizeR] {
		return c.invalid("ssm_state_indices has shape %v, expected a slot for each of T=%d tokens", slots.Shape[:slots.Rank], c.Sizes[sizeT])
	}
	return c.checkBound()
}
