package ascendc

import (
	"fmt"
	"math"

	"libgdn/core"
)

// Maps of windows through fla-npu's context-parallel operators, and their merge by CANN's matrix product.

var (
	preProcessFwd = &opName{"PreProcessFwdKernelMerged", fla}
	preProcessBwd = &opName{"PreProcessBwdKernelMerged", fla}
	batchMatMul   = &opName{"BatchMatMul", stock}
)

// log2E turns natural logarithms into those to base 2, which these operators take whatever the chain before them has.
const log2E = 1 / math.Ln2

// windows cuts all tokens of a call into sequences of one token axis: the operators want offsets in any case.
func (r *run) windows() *sequences {
	s := r.sequences()
	if s.packed || s.empty() {
		return s
	}
	n := s.tokens
	s.packed, s.tokens, s.nt = true, s.batch*n, 0
	s.cu = []int64{0}
	for b := range s.batch {
		s.cu = append(s.cu, (b+1)*n)
		for c := int64(0); c*chunk < n; c++ {
			s.chunks = append(s.chunks, b, c)
			s.nt++
		}
	}
	s.batch = 1
	return s
}

// tokens is an input [B T ...] as [1 B*T ...] without the rows that belong to no sequence.
func (r *run) tokens(name string, d core.DType, s *sequences) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	if t.Shape[0] != 1 {
		t = r.asCompact(t, d)
		shape := append([]int64{1, t.Shape[0] * t.Shape[1]}, t.Shape[2:t.Rank]...)
		return compact(t.Data, t.DType, shape...)
	}
	return r.asCompact(sliced(t, 1, 0, s.tokens), d)
}

// windowStages prepares w and what goes with it. q and v are what the operators are given in their place where the call has none.
func (r *run) windowStages(s *sequences, q, k, v *core.Tensor) *stages {
	hv := r.c.Size("HV")
	x := &stages{d: k.DType, h2: r.c.Size("H"), hv: hv, kn: r.c.Size("K"), vn: r.c.Size("V")}
	if q != nil {
		x.q = r.headMajor(q)
	}
	x.k, x.v = r.headMajor(k), r.headMajor(v)
	g, beta := r.tokens("g", core.F32, s), r.tokens("beta", core.F32, s)
	if g == nil {
		g = r.zeros(core.F32, 1, s.tokens, hv)
	} else {
		g = r.finite(g)
	}
	if beta == nil {
		beta = r.ones(core.F32, 1, s.tokens, hv)
	}
	x.g, x.beta = r.headMajor(g), r.headMajor(beta)
	x.a = r.temp(x.d, 1, hv, s.tokens, chunk)
	raw := x.g
	r.cumulate(x, s)
	r.inverse(x, s)
	x.w, x.u = r.temp(x.d, 1, hv, s.tokens, x.kn), r.temp(x.d, 1, hv, s.tokens, x.vn)
	r.exec(recomputeWU, x.k, x.v, x.beta, x.a, x.g, nil, s.cu, s.chunks, chunk, x.w, x.u)
	x.gate2 = r.temp(core.F32, 1, hv, s.tokens)
	r.exec(localCumsum, raw, s.cu, s.chunks, chunk, false, log2E, true, "float32\x00", x.gate2)
	return x
}

// maps is where the maps of the sequences with tokens are computed, zero as the operators want it; those without get 0 and the identity.
func (r *run) maps(s *sequences) *core.Tensor {
	t := r.c.Tensor("map")
	k, v := r.c.Size("K"), r.c.Size("V")
	if s.which == nil && !s.empty() && isCompact(t) {
		r.zero(t)
		return t
	}
	from := r.zeros(core.F32, s.count, t.Shape[1], k, v+k)
	next := 0
	for n := range t.Shape[0] {
		here := sliced(t, 0, n, 1)
		if !s.empty() && (s.which == nil || next < len(s.which) && s.which[next] == n) {
			r.later(here, sliced(from, 0, int64(next), 1))
			next++
			continue
		}
		r.zero(here)
		// The diagonal of the columns behind the first V.
		diagonal := &core.Tensor{Data: t.Data + uintptr((n*t.Stride[0]+v*t.Stride[3])*4), DType: core.F32, Rank: 2}
		diagonal.Shape[0], diagonal.Stride[0] = t.Shape[1], t.Stride[1]
		diagonal.Shape[1], diagonal.Stride[1] = k, t.Stride[2]+t.Stride[3]
		r.exec(inplaceOne, diagonal)
	}
	return from
}

func refuseMaps(c *core.Call, first string) string {
	if d := c.Tensor(first).DType; d != core.BF16 {
		return fmt.Sprintf("%s is %v, and it takes bfloat16", first, d)
	}
	for i := range c.Op.Tensors {
		a, t := &c.Op.Tensors[i], &c.Tensors[i]
		if a.Rule == core.Io && t.DType != core.None && t.DType != core.BF16 {
			return fmt.Sprintf("%s is %v, and it takes bfloat16", a.Name, t.DType)
		}
	}
	return firstOf(refuseStrides(c), refuseSizes(c, []int64{128}, []int64{128}))
}

var gdnStagesNeeded = []*opName{localCumsum, scaledDotKkt, solveTri, recomputeWU, inplaceCopy, inplaceOne, clampMin}

var flaSummary = &path{
	what:  "aclnnPreProcessFwdKernelMerged of fla-npu",
	needs: append([]*opName{preProcessFwd}, gdnStagesNeeded...),
	refuse: func(a *acl, c *core.Call) string {
		return firstOf(refuseMaps(c, "k"), refuseFused(c))
	},
	run: func(r *run) {
		s := r.windows()
		to := r.maps(s)
		if s.empty() {
			return
		}
		x := r.windowStages(s, nil, r.tokens("k", core.BF16, s), r.tokens("v", core.BF16, s))
		r.exec(preProcessFwd, x.k, x.w, x.u, x.gate2, nil, nil, nil, s.cu, chunk, to)
	},
}

var flaSummaryBwd = &path{
	what:  "aclnnPreProcessBwdKernelMerged of fla-npu",
	needs: append([]*opName{preProcessBwd, bwdDvLocal}, gdnStagesNeeded...),
	refuse: func(a *acl, c *core.Call) string {
		return firstOf(refuseMaps(c, "q"), refuseFused(c))
	},
	run: func(r *run) {
		s := r.windows()
		to := r.maps(s)
		if s.empty() {
			return
		}
		dout := r.tokens("dout", core.BF16, s)
		x := r.windowStages(s, r.tokens("q", core.BF16, s), r.tokens("k", core.BF16, s), dout) // of which u is not read
		local := r.temp(core.BF16, 1, x.hv, s.tokens, x.vn)
		r.exec(bwdDvLocal, x.q, x.k, x.v, x.g, nil, nil, s.cu, s.chunks, r.scale(), chunk, local)
		r.eachWindow(s, to, func(cu []int64, to *core.Tensor) {
			r.exec(preProcessBwd, x.q, x.k, x.w, x.v, local, x.gate2, nil, cu, r.scale(), chunk, to)
		})
	},
}

// eachWindow calls an operator that takes one window at a time, with a place [HV K V+K] for each.
func (r *run) eachWindow(s *sequences, to *core.Tensor, f func(cu []int64, to *core.Tensor)) {
	for i := range s.count {
		m := sliced(to, 0, i, 1)
		f(s.cu[i:i+2], compact(m.Data, core.F32, to.Shape[1], to.Shape[2], to.Shape[3]))
	}
}

// stockMerge sends a state through maps by matrix products, fp32 throughout.
var stockMerge = &path{
	what:  "aclnnBatchMatMul of CANN",
	needs: []*opName{batchMatMul, plainAdd, inplaceCopy},
	refuse: func(a *acl, c *core.Call) string {
		if d := c.Tensor("s").DType; d != core.F32 {
			return fmt.Sprintf("s is %v, and it takes float32", d)
		}
		return refuseStrides(c)
	},
	run: func(r *run) {
		s, m, state, out := r.c.Tensor("s"), r.c.Tensor("m"), r.c.Tensor("state"), r.c.Tensor("out")
		n, b, k, v := s.Shape[0], s.Shape[1]*s.Shape[2], s.Shape[3], s.Shape[4]
		if b*k*v == 0 {
			return
		}
		var x *core.Tensor
		if state.DType != core.None {
			x = shaped(r.asCompact(state, core.F32), b, k, v)
		}
		for step := range n {
			i := step
			if r.c.Int("reverse") != 0 {
				i = n - 1 - step
			}
			part := shaped(r.asCompact(sliced(s, 0, i, 1), core.F32), b, k, v)
			if x == nil {
				x = part
				continue
			}
			matrix := shaped(r.asCompact(sliced(m, 0, i, 1), core.F32), b, k, k)
			if r.c.Int("transpose") != 0 {
				matrix = permuted(matrix, 0, 2, 1)
			}
			product, next := r.temp(core.F32, b, k, v), r.temp(core.F32, b, k, v)
			const exact = 0 // the arithmetic of the operands' type
			r.exec(batchMatMul, matrix, x, product, exact)
			r.exec(plainAdd, product, part, scalar(1), next)
			x = next
		}
		if x == nil {
			r.zero(out)
			return
		}
		r.copy(out, shaped(x, out.Shape[:4]...))
	},
}

// ---- the same for Kimi Delta Attention, from the stages of its own ----

// windowKDA runs the first stage of KDA on tokens of one axis; q and v as in windowStages.
func (r *run) windowKDA(s *sequences, q, k, v *core.Tensor, save bool) *kdaStages {
	hv, n := r.c.Size("HV"), r.c.Size("K")
	g, beta := r.tokens("g", core.F32, s), r.tokens("beta", core.F32, s)
	if g == nil {
		g = r.zeros(core.F32, 1, s.tokens, hv, n)
	} else if r.c.Int("gate") == 0 {
		g = r.finite(g)
	}
	if beta == nil {
		beta = r.ones(core.F32, 1, s.tokens, hv)
	}
	return r.kdaPrepare(s, q, k, v, r.kdaGate(g), beta, r.c.Int("qk_l2norm") != 0, save)
}

var kdaSummary = &path{
	what:  "aclnnPreProcessFwdKernelMerged of fla-npu",
	needs: []*opName{preProcessFwd, kdaFwdPrepare, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		return firstOf(refuseMaps(c, "k"), refuseGate(c))
	},
	run: func(r *run) {
		s := r.windows()
		to := r.maps(s)
		if s.empty() {
			return
		}
		k := r.tokens("k", core.BF16, s)
		x := r.windowKDA(s, k, k, r.tokens("v", core.BF16, s), false) // what q makes is not read
		r.exec(preProcessFwd, x.kg, x.w, x.u, nil, x.gk, nil, nil, s.cu, chunk, to)
	},
}

var kdaSummaryBwd = &path{
	what:  "aclnnPreProcessBwdKernelMerged of fla-npu",
	needs: []*opName{preProcessBwd, kdaFwdPrepare, kdaBwdPrepare, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		if a.chip() != a5 {
			return "its backward is for A5, this is " + a.soc
		}
		return firstOf(refuseMaps(c, "q"), refuseGate(c))
	},
	run: func(r *run) {
		s := r.windows()
		to := r.maps(s)
		if s.empty() {
			return
		}
		dout := r.tokens("dout", core.BF16, s)
		x := r.windowKDA(s, r.tokens("q", core.BF16, s), r.tokens("k", core.BF16, s), dout, true) // of which u is not read
		hv, k, v := r.c.Size("HV"), r.c.Size("K"), r.c.Size("V")
		dO := r.headMajor(dout)
		// Of that stage only the part of v's gradient is wanted, which needs no states.
		none, states := r.zeros(core.BF16, 1, hv, s.tokens, v), r.zeros(core.BF16, 1, s.nt, hv, k, v)
		dAqk, local, dqRaw := r.temp(core.F32, 1, hv, s.tokens, chunk), r.temp(core.BF16, 1, hv, s.tokens, v), r.temp(core.F32, 1, hv, s.tokens, k)
		r.exec(kdaBwdPrepare, flat(x.aqk, s), flat(none, s), flat(dO, s), flat(states, s), s.cu, s.chunks, r.scale(), chunk, false, flat(dAqk, s),
			flat(local, s), flat(dqRaw, s))
		r.eachWindow(s, to, func(cu []int64, to *core.Tensor) {
			r.exec(preProcessBwd, x.qg, x.kg, x.w, dO, local, nil, x.gk, cu, r.scale(), chunk, to)
		})
	},
}
