package ascendc

import (
	"fmt"
	"math"

	"libgdn/core"
)

// Gated DeltaNet through CANN's own operators and through fla-npu's.

var (
	stockChunk    = &opName{"ChunkGatedDeltaRule", stock}
	stockStep     = &opName{"RecurrentGatedDeltaRule", stock}
	flaFwd        = &opName{"ChunkGatedDeltaRuleFwd", fla}
	flaBwd        = &opName{"ChunkGatedDeltaRuleBwd", fla}
	flaStep       = &opName{"RecurrentGatedDeltaRule", fla}
	localCumsum   = &opName{"ChunkLocalCumsum", fla}
	scaledDotKkt  = &opName{"ChunkScaledDotKkt", fla}
	solveTri      = &opName{"SolveTri", fla}
	recomputeWU   = &opName{"RecomputeWUFwd", fla}
	gdnFwdH       = &opName{"ChunkGatedDeltaRuleFwdH", fla}
	chunkFwdO     = &opName{"ChunkFwdO", fla}
	bwdDvLocal    = &opName{"ChunkBwdDvLocal", fla}
	bwdDhu        = &opName{"ChunkGatedDeltaRuleBwdDhu", fla}
	bwdDqkwg      = &opName{"ChunkBwdDqkwg", fla}
	prepareWYDa   = &opName{"PrepareWyReprBwdDa", fla}
	prepareWYFull = &opName{"PrepareWyReprBwdFull", fla}
	plainAdd      = &opName{"Add", stock}
)

// scale is the factor of q.
func (r *run) scale() float64 {
	if s := r.c.Float("scale"); s != 0 {
		return s
	}
	return 1 / math.Sqrt(float64(r.c.Size("K")))
}

// ones is a tensor of ones where an optional input was not given.
func (r *run) ones(d core.DType, shape ...int64) *core.Tensor {
	t := r.temp(d, shape...)
	r.exec(inplaceOne, t)
	return t
}

// zeros likewise.
func (r *run) zeros(d core.DType, shape ...int64) *core.Tensor {
	t := r.temp(d, shape...)
	r.zero(t)
	return t
}

// finite replaces decays of 0, which are -inf as logarithms: vendors' operators add them up and take differences of the sums. exp of the
// least is 6e-39, nothing beside numbers of 16 bits.
func (r *run) finite(g *core.Tensor) *core.Tensor {
	const least = -88
	to := r.temp(core.F32, g.Shape[:g.Rank]...)
	r.exec(clampMin, g, scalar(least), to)
	return to
}

// gateOf is the log decay [B T HV] in fp32, zero where there is none.
func (r *run) gateOf(s *sequences) *core.Tensor {
	if g := r.rows("g", core.F32, s); g != nil {
		return r.finite(g)
	}
	return r.zeros(core.F32, s.batch, s.tokens, r.c.Size("HV"))
}

// betaOf is beta [B T HV], ones where there is none.
func (r *run) betaOf(d core.DType, s *sequences) *core.Tensor {
	if beta := r.rows("beta", d, s); beta != nil {
		return beta
	}
	return r.ones(d, s.batch, s.tokens, r.c.Size("HV"))
}

// refuseInputs says what no operator of a vendor takes. kinds are the dtypes that q, k and v may have.
func refuseInputs(c *core.Call, kinds ...core.DType) string {
	q := c.Tensor("q").DType
	ok := false
	names := ""
	for i, d := range kinds {
		ok = ok || d == q
		if i > 0 {
			names += " or "
		}
		names += d.String()
	}
	switch {
	case !ok:
		return fmt.Sprintf("q is %v, and it takes %s", q, names)
	case c.Tensor("k").DType != q || c.Tensor("v").DType != q:
		return fmt.Sprintf("q, k and v are %v, %v and %v, and it takes one dtype", q, c.Tensor("k").DType, c.Tensor("v").DType)
	case c.Has("beta") && c.Tensor("beta").Rank == 4:
		return "it takes one beta per value head, not one per channel"
	}
	return refuseStrides(c)
}

func refuseStrides(c *core.Call) string {
	for i := range c.Op.Tensors {
		t := &c.Tensors[i]
		if t.DType == core.None || c.Op.Tensors[i].Host {
			continue
		}
		for _, stride := range t.Stride[:t.Rank] {
			if stride < 0 {
				return fmt.Sprintf("%s has a negative stride, which CANN does not know", c.Op.Tensors[i].Name)
			}
		}
	}
	return ""
}

// refuseFused says which of the fused steps before the recurrence were asked for.
func refuseFused(c *core.Call) string {
	for _, flag := range []struct{ name, what string }{{"qk_l2norm", "normalise q and k"}, {"gate", "compute the gate"}, {"beta_sigmoid", "apply the sigmoid to beta"}} {
		if c.Int(flag.name) != 0 {
			return fmt.Sprintf("it does not %s (%s is 1); do so before the call", flag.what, flag.name)
		}
	}
	return ""
}

func refuseSizes(c *core.Call, k, v []int64) string {
	if n := c.Size("K"); !among(n, k) {
		return fmt.Sprintf("K is %d, and it takes %v", n, k)
	}
	if n := c.Size("V"); !among(n, v) {
		return fmt.Sprintf("V is %d, and it takes %v", n, v)
	}
	return ""
}

func among(n int64, list []int64) bool {
	for _, x := range list {
		if x == n {
			return true
		}
	}
	return false
}

// firstOf is the first reason that is one.
func firstOf(reasons ...string) string {
	for _, r := range reasons {
		if r != "" {
			return r
		}
	}
	return ""
}

// idle does a forward that has no tokens.
func (r *run) idle(s *sequences) bool {
	if !s.empty() {
		return false
	}
	r.rowsOut("o", core.None, s)
	r.stateOut("final_state", "initial_state", core.F32, false, s)
	return true
}

// ---- CANN's own chunk operator: inference on A2 and A3 ----

var stockForward = &path{
	what:  "aclnnChunkGatedDeltaRule of CANN",
	needs: []*opName{stockChunk, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		switch {
		case a.chip() != a2 && a.chip() != a3:
			return "it is for A2 and A3, this is " + a.soc
		case c.Has("tape"):
			return "it has no backward, so a forward that saves for one cannot use it"
		case c.Size("H") > 64 || c.Size("HV") > 64:
			return fmt.Sprintf("H is %d and HV %d, and it takes up to 64", c.Size("H"), c.Size("HV"))
		}
		return firstOf(refuseInputs(c, core.BF16), refuseFused(c), refuseSizes(c, []int64{128}, []int64{128}))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			return
		}
		h, hv, n := r.c.Size("H"), r.c.Size("HV"), s.batch*s.tokens
		h0 := r.state("initial_state", core.BF16, true, s)
		if h0 == nil {
			h0 = r.zeros(core.BF16, s.count, hv, 128, 128)
		}
		ht := r.stateOut("final_state", "initial_state", core.BF16, true, s)
		if ht == nil {
			ht = r.temp(core.BF16, s.count, hv, 128, 128)
		}
		var g *core.Tensor
		if r.c.Has("g") {
			g = shaped(r.gateOf(s), n, hv)
		}
		r.exec(stockChunk, shaped(r.rows("q", core.None, s), n, h, 128), shaped(r.rows("k", core.None, s), n, h, 128),
			shaped(r.rows("v", core.None, s), n, hv, 128), shaped(r.betaOf(core.BF16, s), n, hv), h0, r.upload(s.lengths()), g, r.scale(),
			shaped(r.rowsOut("o", core.None, s), n, hv, 128), ht)
	},
}

// ---- token by token: CANN's operator and fla-npu's, which have one argument list ----

// stepMost is how many tokens of a sequence the step operators take.
const stepMost = 8

var (
	stockRecurrent = &path{what: "aclnnRecurrentGatedDeltaRule of CANN", needs: []*opName{stockStep, inplaceCopy, inplaceOne, clampMin},
		refuse: func(a *acl, c *core.Call) string { return firstOf(refuseStep(512)(a, c), refuseFused(c)) }, run: func(r *run) { r.step(stockStep, core.BF16, false) }}
	flaRecurrent = &path{what: "aclnnRecurrentGatedDeltaRule of fla-npu", needs: []*opName{flaStep, inplaceCopy, inplaceOne, clampMin},
		refuse: func(a *acl, c *core.Call) string { return firstOf(refuseStep(128)(a, c), refuseFused(c)) }, run: func(r *run) { r.step(flaStep, core.F32, true) }}
)

func refuseStep(most int64) func(a *acl, c *core.Call) string {
	return func(a *acl, c *core.Call) string {
		longest := c.Size("T")
		if cu := c.Offsets(); cu != nil {
			longest = 0
			for i := range len(cu) - 1 {
				longest = max(longest, cu[i+1]-cu[i])
			}
		}
		switch {
		case c.Has("tape"):
			return "it has no backward, so a forward that saves for one cannot use it"
		case c.Op.Name == "recurrent_fwd" && c.Has("gv"):
			return "it has no decay per value channel (gv)"
		case longest > stepMost:
			return fmt.Sprintf("a sequence has %d tokens, and it takes up to %d", longest, stepMost)
		case c.Size("H") > 256 || c.Size("HV") > 256:
			return fmt.Sprintf("H is %d and HV %d, and it takes up to 256", c.Size("H"), c.Size("HV"))
		case c.Size("K") > most || c.Size("V") > most:
			return fmt.Sprintf("K is %d and V %d, and it takes up to %d", c.Size("K"), c.Size("V"), most)
		}
		return refuseInputs(c, core.BF16)
	}
}

// step runs the operator on states of this call, of a dtype that it knows: it updates them in place, one slot a sequence. fla-npu's takes a first entry in front of
// the lengths, the number of tokens to skip.
func (r *run) step(name *opName, kind core.DType, skip bool) {
	s := r.sequences()
	if r.idle(s) {
		return
	}
	h, hv, k, v, n := r.c.Size("H"), r.c.Size("HV"), r.c.Size("K"), r.c.Size("V"), s.batch*s.tokens
	state := r.stateOut("final_state", "initial_state", kind, true, s)
	if state == nil {
		state = r.temp(kind, s.count, hv, v, k)
	}
	if h0 := r.state("initial_state", kind, true, s); h0 != nil {
		r.copy(state, h0)
	} else {
		r.zero(state)
	}
	lengths := s.lengths()
	slots := make([]int32, 0, n)
	for i, length := range lengths {
		for range length {
			slots = append(slots, int32(i))
		}
	}
	if skip {
		lengths = append([]int32{0}, lengths...)
	}
	var gk *core.Tensor
	if r.c.Has("gk") {
		gk = shaped(r.finite(r.rows("gk", core.F32, s)), n, hv, k)
	}
	r.exec(name, shaped(r.rows("q", core.None, s), n, h, k), shaped(r.rows("k", core.None, s), n, h, k), shaped(r.rows("v", core.None, s), n, hv, v),
		shaped(r.betaOf(core.BF16, s), n, hv), state, r.upload(lengths), r.upload(slots), shaped(r.gateOf(s), n, hv), gk, nil, r.scale(),
		shaped(r.rowsOut("o", core.None, s), n, hv, v))
}
