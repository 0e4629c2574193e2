package ascendc

import (
	"fmt"

	"libgdn/core"
)

// Gated DeltaNet through fla-npu: its composites, which newer versions have, and the stages of which they consist, which all have.

// flaSaved is what a forward leaves for the backward, in tensors of the operators' own layouts.
type flaSaved struct {
	g     *core.Tensor // cumulated gate of each chunk, fp32 [B T HV]
	a     *core.Tensor // inverse of identity plus A, [B HV T 64]
	beta  *core.Tensor // after the sigmoid, fp32 [B T HV]; nil without it
	q, k  *core.Tensor // normalised; nil without the norm
	qRstd *core.Tensor // fp32 [B H T]
	kRstd *core.Tensor
}

// saved gives the tensors their places: in the tape where it is large enough, else, and without a tape, in memory of this call. kept tells
// that they are in the tape. Both directions ask with the same sizes and flags and get the same answer. The layout is that of both families
// of operators, so any backward can follow any forward.
func (r *run) saved(s *sequences) (m flaSaved, kept bool) {
	d, b, n, h, hv, k := r.c.Tensor("q").DType, s.batch, s.tokens, r.c.Size("H"), r.c.Size("HV"), r.c.Size("K")
	list := []struct {
		to    **core.Tensor
		dtype core.DType
		shape []int64
		want  bool
	}{
		{&m.g, core.F32, []int64{b, n, hv}, true},
		{&m.a, d, []int64{b, hv, n, chunk}, true},
		{&m.beta, core.F32, []int64{b, n, hv}, r.c.Int("beta_sigmoid") != 0},
		{&m.qRstd, core.F32, []int64{b, h, n}, r.c.Int("qk_l2norm") != 0},
		{&m.kRstd, core.F32, []int64{b, h, n}, r.c.Int("qk_l2norm") != 0},
		{&m.q, d, []int64{b, n, h, k}, r.c.Int("qk_l2norm") != 0},
		{&m.k, d, []int64{b, n, h, k}, r.c.Int("qk_l2norm") != 0},
	}
	const align = 32
	tape := r.c.Tensor("tape")
	at := (tape.Data + align - 1) &^ (align - 1)
	end := tape.Data + uintptr(4*tape.Shape[0])
	for _, x := range list {
		if x.want {
			*x.to = compact(at, x.dtype, x.shape...)
			at += uintptr((count(*x.to)*x.dtype.Size() + align - 1) &^ (align - 1))
		}
	}
	if tape.DType != core.None && at <= end {
		return m, true
	}
	for _, x := range list {
		if x.want {
			*x.to = r.temp(x.dtype, x.shape...)
		}
	}
	return m, false
}

// layout names the order of dimensions for the operators that ask for it.
func layout(s *sequences, dense, packed string) string {
	if s.packed {
		return packed
	}
	return dense
}

// ---- the composites ----

var flaForward = &path{
	what:   "aclnnChunkGatedDeltaRuleFwd of fla-npu",
	needs:  []*opName{flaFwd, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string { return firstOf(refuseFLA(c), refuseExtended(a, c, flaFwd)) },
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			return
		}
		m, _ := r.saved(s)
		if !r.c.Has("tape") {
			m.g, m.a = nil, nil
		}
		r.composite(s, m, r.rowsOut("o", core.None, s), r.stateOut("final_state", "initial_state", core.F32, r.c.Int("state_v_first") != 0, s))
	},
}

// refuseFLA says what no GDN operator of fla-npu takes.
func refuseFLA(c *core.Call) string {
	if c.Int("gate") != 0 {
		return "it does not compute the gate (gate is 1); do so before the call"
	}
	return firstOf(refuseInputs(c, core.BF16, core.F16), refuseSizes(c, []int64{128}, []int64{128, 256}))
}

// refuseExtended says why norm and sigmoid cannot be part of a composite: one chip has them, for one size.
func refuseExtended(a *acl, c *core.Call, op *opName) string {
	group := c.Size("HV") / c.Size("H")
	switch {
	case c.Int("qk_l2norm") == 0 && c.Int("beta_sigmoid") == 0:
	case a.chip() != a5:
		return firstOf(refuseFused(c), "") + fmt.Sprintf("; with it built in it is for A5, this is %s", a.soc)
	case op.in(a).variant == "without norm" && c.Int("qk_l2norm") != 0:
		return "this version of it does not normalise q and k"
	case c.Tensor("q").DType != core.BF16 || c.Size("V") != 128 || group > 4:
		return fmt.Sprintf("with norm or sigmoid built in it takes bfloat16, V=128 and HV/H up to 4, and came with %v, V=%d and HV/H=%d", c.Tensor("q").DType, c.Size("V"), group)
	}
	return ""
}

// composite runs the forward composite into o and the final state, each nil where it is not wanted.
func (r *run) composite(s *sequences, m flaSaved, o, ht *core.Tensor) {
	vFirst, norm := r.c.Int("state_v_first") != 0, r.c.Int("qk_l2norm") != 0
	beta := r.betaOf(core.F32, s)
	h0 := r.state("initial_state", core.F32, vFirst, s)
	if o == nil {
		o = r.temp(r.c.Tensor("q").DType, s.batch, s.tokens, r.c.Size("HV"), r.c.Size("V"))
	}
	flags := []any{false, norm, r.c.Int("neg_eigval") != 0, vFirst} // base 2, ...
	if flaFwd.in(r.acl).variant == "without norm" {
		flags = []any{false, r.c.Int("neg_eigval") != 0, vFirst}
	}
	args := []any{r.rows("q", core.None, s), r.rows("k", core.None, s), r.rows("v", core.None, s), r.gateOf(s), beta, nil, nil, h0, s.cu, s.chunks,
		layout(s, "BSND\x00", "TND\x00"), r.scale(), chunk}
	args = append(append(args, flags...), o, ht, m.q, m.k, m.qRstd, m.kRstd, m.beta, m.g, m.a, nil)
	r.exec(flaFwd, args...)
}

var flaBackward = &path{
	what:  "aclnnChunkGatedDeltaRuleBwd of fla-npu",
	needs: []*opName{flaBwd, flaFwd, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		switch {
		case a.chip() != a5:
			return "it is for A5, this is " + a.soc
		case c.Size("HV")/c.Size("H") > 4:
			return fmt.Sprintf("HV/H is %d, and it takes up to 4", c.Size("HV")/c.Size("H"))
		}
		return firstOf(refuseFLA(c), refuseInputs(c, core.BF16), refuseSizes(c, []int64{128}, []int64{128}), refuseExtended(a, c, flaFwd))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idleBackward(s) {
			return
		}
		m, kept := r.saved(s)
		if !kept {
			r.composite(s, m, nil, nil)
		}
		sigmoid, norm, vFirst := r.c.Int("beta_sigmoid") != 0, r.c.Int("qk_l2norm") != 0, r.c.Int("state_v_first") != 0
		q, k := m.q, m.k
		if !norm {
			q, k = r.rows("q", core.None, s), r.rows("k", core.None, s)
		}
		beta := r.betaOf(core.F32, s)
		var raw *core.Tensor
		if sigmoid {
			beta, raw = m.beta, beta
		}
		var dh0 *core.Tensor
		if r.c.Has("initial_state") {
			if dh0 = r.stateOut("dh0", "dht", core.BF16, vFirst, s); dh0 == nil {
				dh0 = r.temp(core.BF16, s.count, r.c.Size("HV"), 128, 128)
			}
		}
		r.exec(flaBwd, q, k, r.rows("v", core.None, s), m.g, beta, m.a, r.rows("dout", core.BF16, s), r.state("initial_state", core.BF16, vFirst, s),
			r.state("dht", core.BF16, vFirst, s), m.qRstd, m.kRstd, raw, nil, nil, s.cu, s.chunks, layout(s, "BSND\x00", "TND\x00"), r.scale(), chunk,
			false, false, norm, sigmoid, vFirst, r.grad("dq", core.BF16, s), r.grad("dk", core.BF16, s), r.grad("dv", core.BF16, s),
			r.grad("dbeta", core.F32, s), r.grad("dg", core.F32, s), dh0, nil, nil)
	},
}

// grad is where the gradient of an input with rows is computed; it has a place also where the caller does not want it.
func (r *run) grad(name string, d core.DType, s *sequences) *core.Tensor {
	if t := r.rowsOut(name, d, s); t != nil {
		return t
	}
	return r.temp(d, s.batch, s.tokens, r.c.Size("HV"))
}

// idleBackward does a backward that has no tokens: the gradient of the final state is that of the initial one.
func (r *run) idleBackward(s *sequences) bool {
	if !s.empty() {
		return false
	}
	for _, name := range []string{"dq", "dk", "dv", "dg", "dbeta"} {
		r.rowsOut(name, core.None, s)
	}
	r.stateOut("dh0", "dht", core.F32, false, s)
	return true
}

// ---- the stages ----

var flaStagesForward = &path{
	what:   "the GDN stages of fla-npu",
	needs:  []*opName{localCumsum, scaledDotKkt, solveTri, recomputeWU, gdnFwdH, chunkFwdO, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string { return firstOf(refuseFLA(c), refuseFused(c)) },
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			return
		}
		x := r.stages(s)
		x.a = r.temp(x.d, s.batch, x.hv, s.tokens, chunk)
		m, kept := r.saved(s)
		if kept {
			x.a = m.a
		}
		r.cumulate(x, s)
		if kept {
			r.copy(m.g, exchanged(x.g))
		}
		r.inverse(x, s)
		ht := r.stateOut("final_state", "initial_state", core.F32, false, s)
		r.statePass(x, s, ht)
		o := r.temp(x.d, s.batch, x.hv, s.tokens, x.vn)
		args := []any{x.q, x.k, x.vNew, x.h, x.g, s.cu, s.chunks, r.scale(), chunk}
		if chunkFwdO.in(r.acl).variant == "new" {
			args = append(args, false, false, "BNSD\x00") // base 2, V first, layout of the output
		}
		r.exec(chunkFwdO, append(args, o)...)
		if to := r.rowsOut("o", core.None, s); to != nil {
			r.copy(to, exchanged(o))
		}
	},
}

// stages holds the tensors of the stages, all [B H T ...].
type stages struct {
	d                core.DType
	h2, hv, kn, vn   int64 // H, HV, K, V
	q, k, v, g, beta *core.Tensor
	a, w, u, h, vNew *core.Tensor
	gate2            *core.Tensor // cumulated gate to base 2
}

func (r *run) stages(s *sequences) *stages {
	return &stages{d: r.c.Tensor("q").DType, h2: r.c.Size("H"), hv: r.c.Size("HV"), kn: r.c.Size("K"), vn: r.c.Size("V"),
		q: r.headMajor(r.rows("q", core.None, s)), k: r.headMajor(r.rows("k", core.None, s)), v: r.headMajor(r.rows("v", core.None, s)),
		g: r.headMajor(r.gateOf(s)), beta: r.headMajor(r.betaOf(core.F32, s))}
}

// cumulate replaces the gate by its sum from the beginning of each chunk.
func (r *run) cumulate(x *stages, s *sequences) {
	sum := r.temp(core.F32, s.batch, x.hv, s.tokens)
	r.exec(localCumsum, x.g, s.cu, s.chunks, chunk, false, 1.0, true, "float32\x00", sum)
	x.g = sum
}

// inverse computes a, the inverse of identity plus A.
func (r *run) inverse(x *stages, s *sequences) {
	// Zero, because the operator leaves what lies beyond a chunk's length as it was.
	full := r.zeros(core.F32, s.batch, x.hv, s.tokens, chunk)
	r.exec(scaledDotKkt, x.k, x.g, x.beta, s.cu, s.chunks, chunk, full)
	narrow := r.temp(x.d, s.batch, x.hv, s.tokens, chunk)
	r.copy(narrow, full)
	if s.packed {
		r.exec(solveTri, shaped(narrow, x.hv, s.tokens, chunk), s.cu, s.chunks, "ntd\x00", shaped(x.a, x.hv, s.tokens, chunk))
	} else {
		r.exec(solveTri, narrow, s.cu, s.chunks, "bnsd\x00", x.a)
	}
}

// statePass computes w, u, the state before each chunk, and v_new.
func (r *run) statePass(x *stages, s *sequences, ht *core.Tensor) {
	x.w, x.u = r.temp(x.d, s.batch, x.hv, s.tokens, x.kn), r.temp(x.d, s.batch, x.hv, s.tokens, x.vn)
	r.exec(recomputeWU, x.k, x.v, x.beta, x.a, x.g, nil, s.cu, s.chunks, chunk, x.w, x.u)
	x.h, x.vNew = r.chunkStates(gdnFwdH, x.d, s, x.hv, x.kn, x.vn), r.temp(x.d, s.batch, x.hv, s.tokens, x.vn)
	r.exec(gdnFwdH, x.k, x.w, x.u, x.g, nil, r.state("initial_state", core.F32, false, s), ht != nil, chunk, s.cu, s.chunks, false, x.h, x.vNew, ht)
}

var flaStagesBackward = &path{
	what: "the GDN stages of fla-npu",
	needs: []*opName{localCumsum, scaledDotKkt, solveTri, recomputeWU, gdnFwdH, bwdDvLocal, bwdDhu, bwdDqkwg, prepareWYDa, prepareWYFull, plainAdd,
		inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		if bwdDhu.in(a).variant == "old" {
			switch {
			case c.Has("dht"):
				return "this version of fla-npu leaves dht out (aclnnChunkGatedDeltaRuleBwdDhu)"
			case c.Has("dh0"):
				return "this version of fla-npu writes dh0 in a shape of its own (aclnnChunkGatedDeltaRuleBwdDhu)"
			}
		} else if a.chip() == a5 && c.Has("dht") {
			return "on A5 aclnnChunkGatedDeltaRuleBwdDhu leaves dht out"
		}
		return firstOf(refuseFLA(c), refuseFused(c))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idleBackward(s) {
			return
		}
		x := r.stages(s)
		if m, kept := r.saved(s); kept {
			x.g, x.a = r.headMajor(m.g), m.a
		} else {
			x.a = r.temp(x.d, s.batch, x.hv, s.tokens, chunk)
			r.cumulate(x, s)
			r.inverse(x, s)
		}
		r.statePass(x, s, nil)
		dO := r.headMajor(r.rows("dout", x.d, s))
		local, dv := r.temp(x.d, s.batch, x.hv, s.tokens, x.vn), r.temp(x.d, s.batch, x.hv, s.tokens, x.vn)
		r.exec(bwdDvLocal, x.q, x.k, dO, x.g, nil, nil, s.cu, s.chunks, r.scale(), chunk, local)

		dh := r.chunkStates(bwdDhu, x.d, s, x.hv, x.kn, x.vn)
		flags := []any{false}
		if bwdDhu.in(r.acl).variant == "new" {
			flags = append(flags, false)
		}
		var h0, dh0 *core.Tensor
		if r.c.Has("dh0") {
			h0, dh0 = r.state("initial_state", core.F32, false, s), r.stateOut("dh0", "dht", x.d, false, s)
		}
		args := append([]any{x.q, x.k, x.w, dO, local, x.g, nil, h0, r.state("dht", core.F32, false, s), s.cu, s.chunks, r.scale(), chunk}, flags...)
		r.exec(bwdDhu, append(args, dh, dh0, dv)...)

		token := func(heads, width int64) *core.Tensor { return r.temp(x.d, s.batch, heads, s.tokens, width) }
		gate := func() *core.Tensor { return r.temp(core.F32, s.batch, x.hv, s.tokens) }
		dq, dk, dk2, dw, dg, dg2, dv2 := token(x.h2, x.kn), token(x.h2, x.kn), token(x.h2, x.kn), token(x.hv, x.kn), gate(), gate(), token(x.hv, x.vn)
		r.exec(bwdDqkwg, x.q, x.k, x.vNew, x.g, x.h, dO, dh, dv, s.cu, s.chunks, nil, nil, r.scale(), chunk, false, false, dq, dk, dw, dg)
		dA, dbeta := r.temp(x.d, s.batch, x.hv, s.tokens, chunk), gate()
		r.exec(prepareWYDa, x.k, x.v, x.beta, x.a, dw, dv, x.g, s.cu, s.chunks, chunk, dA)
		r.exec(prepareWYFull, x.k, x.v, x.beta, x.a, dA, dw, dv, x.g, s.cu, s.chunks, chunk, dk2, dv2, dbeta, dg2)
		sumK, sumG, raw := token(x.h2, x.kn), gate(), gate()
		r.exec(plainAdd, dk, dk2, scalar(1), sumK)
		r.exec(plainAdd, dg, dg2, scalar(1), sumG)
		// That was the gradient of the cumulated gate.
		r.exec(localCumsum, sumG, s.cu, s.chunks, chunk, true, 1.0, true, "float32\x00", raw)
		for _, made := range []struct {
			name string
			t    *core.Tensor
		}{{"dq", dq}, {"dk", sumK}, {"dv", dv2}, {"dbeta", dbeta}, {"dg", raw}} {
			if to := r.rowsOut(made.name, core.None, s); to != nil {
				r.copy(to, exchanged(made.t))
			}
		}
	},
}
