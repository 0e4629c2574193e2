package core

import "slices"

// The stages of the chunk form, for whoever has to get between them: chunks of 64 tokens that start anew with each sequence, and the
// intermediates by which flash-linear-attention and the Ascend operators know them. In a chunk, b the inclusive sum of the log decays and
// E_ij = exp(b_i - b_j):
//
//	L_ij = beta_i k_i.k_j E_ij (i>j)    A = (1 + L)^-1    w = A (beta k exp(b))    u = A (beta v)    Aqk_ij = scale q_i.k_j E_ij (i>=j)
//	v_new = u - w S    o = scale (q exp(b)) S + Aqk v_new    S <- exp(b_last) S + (k exp(b_last - b))^T v_new
//
// with the products inside E where decays go by channels. Gated DeltaNet hands on q and k as they are and b as g_cumsum; Kimi Delta Attention
// hands on qg = q exp(b), kg = k exp(b_last - b) and b as gk. The composites do not go this way; they agree within rounding.
//
// Cumulative gates are natural logarithms, or with exp2 those to base 2. They are finite: a decay below exp(-128) (exp(-1000) in float64) is
// 0, so such a gate counts as that, and what comes behind it in the chunk is kept.
var stageOps = []*Op{prepare, statePass, output, bwdPrepare, stateGrad, finish, kdaPrepare, kdaOutput, kdaBwdPrepare, kdaFinish}

func stageIn(name, dims, doc string) TensorArg {
	return TensorArg{Name: name, Role: In, Rule: Io, Dims: dims, Doc: doc}
}

func stageOut(name, like, dims, doc string) TensorArg {
	return TensorArg{Name: name, Role: Out, Rule: Same, Like: like, Dims: dims, Doc: doc}
}

func stageAcc(name, dims, doc string) TensorArg {
	return TensorArg{Name: name, Role: Out, Rule: Acc, Dims: dims, Doc: doc}
}

var (
	stG     = TensorArg{Name: "g", Role: OptIn, Rule: Float, Dims: "B T HV", Doc: "log decay; NULL: no decay"}
	stSum   = TensorArg{Name: "g_cumsum", Role: OptIn, Rule: Float, Dims: "B T HV", Doc: "its sums within each chunk; NULL: no decay"}
	stGk    = TensorArg{Name: "gk", Role: OptIn, Rule: Float, Dims: "B T HV K", Doc: "sums of the log decays by channels; then H is HV, and q and k are qg and kg"}
	stBeta  = TensorArg{Name: "beta", Role: In, Rule: Float, Dims: "B T HV", Doc: "write strength, the sigmoid applied"}
	stA     = stageIn("A", "B T HV C", "(1 + L)^-1 of each chunk by rows; what is above the diagonal is not read")
	stH     = TensorArg{Name: "h", Role: In, Rule: Float, Dims: "B P HV K V", State: true, Doc: "state before each chunk. P is at least the number of chunks: of a row of the batch, or of all packed sequences, one behind the other"}
	stDh    = TensorArg{Name: "dh", Role: In, Rule: Float, Dims: "B P HV K V", State: true, Doc: "gradient of the state behind each chunk, as h"}
	stQrstd = TensorArg{Name: "q_rstd", Role: OptIn, Rule: Float, Dims: "B T H", Doc: "factors by which q was normalised: dq is that of q before; NULL: q was not normalised"}
	stKrstd = TensorArg{Name: "k_rstd", Role: OptIn, Rule: Float, Dims: "B T H", Doc: "those of k"}
	outNorm = []TensorArg{
		stageOut("q_norm", "q", "B T H K", "q, normalised where qk_l2norm is 1"),
		stageOut("k_norm", "k", "B T H K", "k likewise"),
		stageAcc("q_rstd", "B T H", "1/sqrt(sum of squares + 1e-6) of q, or 1"),
		stageAcc("k_rstd", "B T H", "that of k"),
		stageAcc("beta_eff", "B T HV", "beta, the sigmoid applied where beta_sigmoid is 1"),
	}
	stDq    = TensorArg{Name: "dq", Role: Out, Rule: Same, Like: "q", Dims: "B T H K", Doc: "gradient of q before its norm, summed over the value heads of each key head"}
	stDk    = TensorArg{Name: "dk", Role: Out, Rule: Same, Like: "k", Dims: "B T H K", Doc: "gradient of k likewise"}
	stDbeta = TensorArg{Name: "dbeta", Role: Out, Rule: Same, Like: "beta", Dims: "B T HV", Doc: "gradient of beta (of its logit where beta_sigmoid is 1)"}

	numExp2 = NumberArg{Name: "exp2", Max: 1, Doc: "1: sums of gates are logarithms to base 2"}
	chunk64 = Derived{"C", "64"}
	// As in the composite: ceil(T/64) a batch entry, and with packed sequences as many as N of them can have at most; what is left is zero.
	chunksN = Derived{"NT", "(T + 63*(N//(B + 1//(B+1))))//64"}
)

var prepare = &Op{
	Name: "prepare",
	Doc:  "First stage of gdn_fwd: all that a chunk needs of itself.",
	Tensors: append([]TensorArg{argQ, argK, argV, stG, sumBeta, argCu,
		stageAcc("g_cumsum", "B T HV", "sums of the log decays within each chunk"),
		stageOut("A", "k", "B T HV C", "(1 + L)^-1 of each chunk by rows, zero above the diagonal"),
		stageOut("w", "k", "B T HV K", "A (beta k exp(b))"),
		stageOut("u", "v", "B T HV V", "A (beta v)")}, outNorm...),
	Numbers: []NumberArg{gdnNumbers[1], gdnNumbers[3], gdnNumbers[4], numExp2},
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var statePass = &Op{
	Name: "state_pass",
	Doc:  "Second stage of both families: the state before each chunk, and what each token writes.",
	Tensors: []TensorArg{
		stageIn("k", "B T H K", "keys, or kg with gk"),
		stageIn("w", "B T HV K", "as prepared"),
		stageIn("u", "B T HV V", "as prepared"),
		stSum, stGk, argH0, argCu,
		{Name: "h", Role: Out, Rule: Float, Dims: "B NT HV K V", State: true, Doc: "state before each chunk; the chunks of packed sequences lie one behind the other, and what is left of NT is zero"},
		stageOut("v_new", "u", "B T HV V", "u - w S"), argHT},
	Numbers: []NumberArg{numExp2, gdnNumbers[5]},
	Derived: []Derived{chunksN},
	Check:   checkStage,
}

var output = &Op{
	Name: "output",
	Doc:  "Last stage of gdn_fwd.",
	Tensors: []TensorArg{argQ, argK, stageIn("v_new", "B T HV V", "as the state pass made it"), stSum, stH, argCu,
		stageOut("o", "v_new", "B T HV V", "output")},
	Numbers: []NumberArg{gdnNumbers[0], numExp2, gdnNumbers[5]},
	Check:   checkStage,
}

var bwdPrepare = &Op{
	Name: "bwd_prepare",
	Doc:  "First stage of gdn_bwd: w and u again, and the part of v_new's gradient that comes from the chunk's own outputs.",
	Tensors: []TensorArg{argQ, argK, argV, stSum, stBeta, stA, argDo, argCu,
		stageOut("w", "k", "B T HV K", "A (beta k exp(b))"),
		stageOut("u", "v", "B T HV V", "A (beta v)"),
		stageOut("dv_local", "v", "B T HV V", "Aqk^T dout")},
	Numbers: []NumberArg{gdnNumbers[0], numExp2},
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var stateGrad = &Op{
	Name: "state_grad",
	Doc:  "Second stage of both families' backward: the gradient of the state behind each chunk, and that of v_new.",
	Tensors: []TensorArg{
		stageIn("q", "B T H K", "queries, or qg with gk"),
		stageIn("k", "B T H K", "keys, or kg with gk"),
		stageIn("w", "B T HV K", "as prepared"),
		argDo,
		stageIn("dv_local", "B T HV V", "the part of v_new's gradient that is known"),
		stSum, stGk, {Name: "initial_state", Role: OptIn, Rule: Float, Dims: "N HV K V", State: true, Doc: "asks for dh0; what it holds does not matter"},
		{Name: "dht", Role: OptIn, Rule: Float, Dims: "N HV K V", State: true, Doc: "gradient of the final state; NULL: 0"},
		argCu,
		{Name: "dh", Role: Out, Rule: Float, Dims: "B NT HV K V", State: true, Doc: "gradient of the state behind each chunk, laid out as h"},
		stageOut("dv_scan", "dv_local", "B T HV V", "gradient of v_new"), outDh0},
	Numbers: []NumberArg{gdnNumbers[0], numExp2, gdnNumbers[5]},
	Derived: []Derived{chunksN},
	Check:   checkStage,
}

var finish = &Op{
	Name: "finish",
	Doc:  "Last stage of gdn_bwd.",
	Tensors: []TensorArg{
		stageIn("q", "B T H K", "queries, normalised"), stageIn("k", "B T H K", "keys, normalised"), argV,
		stageIn("v_new", "B T HV V", "as the state pass made it"), argDo,
		stageIn("dv_scan", "B T HV V", "gradient of v_new"), stSum, stBeta, stH, stDh, stA, stQrstd, stKrstd, argCu,
		stDq, stDk, outDv, stDbeta,
		{Name: "dg", Role: OptOut, Rule: Acc, Dims: "B T HV", With: "g_cumsum", Doc: "gradient of the log decay"}},
	Numbers: []NumberArg{gdnNumbers[0], gdnNumbers[3], gdnNumbers[4], numExp2, gdnNumbers[5]},
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var kdaPrepare = &Op{
	Name: "kda_prepare",
	Doc:  "First stage of gdn_kda_fwd: all that a chunk needs of itself.",
	Tensors: append([]TensorArg{argQ, argK, argV, kdaArgG, sumBeta, kdaArgALog, kdaArgBias, argCu,
		stageAcc("gk", "B T HV K", "sums of the log decays within each chunk"),
		stageOut("Aqk", "q", "B T HV C", "by rows, zero above the diagonal"),
		stageOut("Akk", "k", "B T HV C", "(1 + L)^-1 likewise"),
		stageOut("w", "k", "B T HV K", "Akk (beta k exp(b))"),
		stageOut("u", "v", "B T HV V", "Akk (beta v)"),
		stageOut("qg", "q", "B T HV K", "q exp(b)"),
		stageOut("kg", "k", "B T HV K", "k exp(b_last - b)"),
		stageOut("qg_scaled", "q", "B T HV K", "scale qg")}, outNorm...),
	Numbers: append(append([]NumberArg{}, kdaNumbers[:6]...), numExp2),
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var kdaOutput = &Op{
	Name: "kda_output",
	Doc:  "Last stage of gdn_kda_fwd.",
	Tensors: []TensorArg{stageIn("qg_scaled", "B T HV K", "as prepared"), stageIn("Aqk", "B T HV C", "as prepared; what is above the diagonal is not read"),
		stageIn("v_new", "B T HV V", "as the state pass made it"), stH, argCu, stageOut("o", "v_new", "B T HV V", "output")},
	Numbers: []NumberArg{gdnNumbers[5]},
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var kdaBwdPrepare = &Op{
	Name: "kda_bwd_prepare",
	Doc:  "First stage of gdn_kda_bwd: the gradients that come from the chunk's own outputs.",
	Tensors: []TensorArg{stageIn("Aqk", "B T HV C", "as prepared"), stageIn("v_new", "B T HV V", "as the state pass made it"), argDo, stH, argCu,
		stageAcc("dAqk", "B T HV C", "scale dout v_new^T on and below the diagonal: the gradient of Aqk/scale"),
		stageOut("dv_local", "v_new", "B T HV V", "Aqk^T dout"),
		stageAcc("dq_raw", "B T HV K", "dout h^T")},
	Numbers: []NumberArg{gdnNumbers[0], gdnNumbers[5]},
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

var kdaFinish = &Op{
	Name: "kda_finish",
	Doc:  "Last stage of gdn_kda_bwd.",
	Tensors: []TensorArg{
		stageIn("q", "B T H K", "queries, normalised"), stageIn("k", "B T H K", "keys, normalised"), argV,
		{Name: "gk", Role: In, Rule: Float, Dims: "B T HV K", Doc: "sums of the log decays; this library takes the decays from g, which loses nothing"},
		kdaArgG, stBeta, kdaArgALog, kdaArgBias, stageIn("Akk", "B T HV C", "as prepared"), stageIn("v_new", "B T HV V", "as the state pass made it"), stH, stDh,
		stageIn("dv_scan", "B T HV V", "gradient of v_new"),
		{Name: "dAqk", Role: In, Rule: Float, Dims: "B T HV C", Doc: "as its stage made it; what is above the diagonal is not read"},
		{Name: "dq_raw", Role: In, Rule: Float, Dims: "B T HV K", Doc: "dout h^T"},
		stQrstd, stKrstd, argCu,
		stDq, stDk, outDv, stDbeta, kdaOutDg, outDA, kdaOutBias},
	Numbers: append(append([]NumberArg{}, kdaNumbers[:1]...), append(append([]NumberArg{}, kdaNumbers[2:6]...), numExp2, gdnNumbers[5])...),
	Derived: []Derived{chunk64},
	Check:   checkStage,
}

// checkStage holds the rules of the stages that no shape expresses.
func checkStage(c *Call) error {
	if err := c.checkOperands(); err != nil {
		return err
	}
	if c.takes("gk") && c.takes("g_cumsum") && c.Has("gk") {
		switch {
		case c.Has("g_cumsum"):
			return c.invalid("g_cumsum and gk are both given, expected one of them")
		case c.Sizes[sizeH] != c.Sizes[sizeHV]:
			return c.invalid("k has H=%d, expected HV=%d with gk", c.Sizes[sizeH], c.Sizes[sizeHV])
		}
	}
	reads := slices.ContainsFunc(c.Op.Tensors, func(a TensorArg) bool { return a.Name == "h" && a.Role == In })
	if n := c.chunks(); reads && c.Sizes[sizeP] < n {
		return c.invalid("h has P=%d, expected at least %d: one for each chunk of 64 tokens", c.Sizes[sizeP], n)
	}
	return nil
}

// chunks counts the chunks of 64 tokens in a row of the batch, or in all packed sequences, whose offsets were found right.
func (c *Call) chunks() int64 {
	offsets := c.Offsets()
	if offsets == nil {
		return (c.Sizes[sizeT] + 63) / 64
	}
	n, last := int64(0), int64(0)
	for _, at := range offsets {
		n, last = n+(at-last+63)/64, at
	}
	return n
}
