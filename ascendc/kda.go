package ascendc

import (
	"fmt"

	"libgdn/core"
)

// Kimi Delta Attention through fla-npu: in stages, whose tensors are [B HV T ...] whatever the layout of the inputs, in an older composite,
// and token by token.

var (
	kdaFwdPrepare  = &opName{"ChunkKdaFwdPrepare", fla}
	chunkFwdH      = &opName{"ChunkFwdH", fla}
	kdaFwdFinalize = &opName{"ChunkKdaFwdFinalize", fla}
	kdaBwdPrepare  = &opName{"ChunkKdaBwdPrepare", fla}
	kdaBwdFinalize = &opName{"ChunkKdaBwdFinalize", fla}
	kdaComposite   = &opName{"ChunkKdaFwd", fla}
	kdaStep        = &opName{"RecurrentKda", fla}
	plainSub       = &opName{"Sub", stock}
	plainMul       = &opName{"Mul", stock}
	plainMuls      = &opName{"Muls", stock}
)

// refuseGate says what of KDA's gate no operator computes.
func refuseGate(c *core.Call) string {
	if b := c.Float("lower_bound"); b < -5 {
		return fmt.Sprintf("lower_bound is %v, and it takes -5 to 0", b)
	}
	return ""
}

// kdaGate is what the operators ask about the gate.
type kdaGate struct {
	g, aLog, bias *core.Tensor // g [B T HV K], raw where use
	use, safe     bool
	bound         float64
}

// gateRows is g [B T HV K] as the operators take it, zero where there is none.
func (r *run) gateRows(s *sequences) *core.Tensor {
	g := r.rows("g", core.F32, s)
	if g == nil {
		return r.zeros(core.F32, s.batch, s.tokens, r.c.Size("HV"), r.c.Size("K"))
	}
	if r.c.Int("gate") != 0 {
		return g
	}
	return r.finite(g)
}

func (r *run) kdaGate(rows *core.Tensor) kdaGate {
	hv, k := r.c.Size("HV"), r.c.Size("K")
	g := kdaGate{g: rows, use: r.c.Int("gate") != 0, bound: r.c.Float("lower_bound")}
	g.safe = g.bound != 0
	if g.use {
		if g.aLog = r.in("A_log", core.F32); g.aLog == nil {
			g.aLog = r.zeros(core.F32, hv)
		}
		g.bias = shaped(r.in("dt_bias", core.F32), hv*k)
	}
	return g
}

// kdaStages holds what the stages hand on.
type kdaStages struct {
	gate                       kdaGate
	beta                       *core.Tensor // [B T HV] as it came, in fp32
	gk, aqk, akk, w, u, qg, kg *core.Tensor
	scaled                     *core.Tensor // scale qg
	qHat, kHat, qRstd, kRstd   *core.Tensor
	effective                  *core.Tensor // beta [B HV T] after the sigmoid
	h, vNew                    *core.Tensor
}

// kdaPrepare runs the first stage; with save it leaves what the backward needs.
func (r *run) kdaPrepare(s *sequences, q, key, value *core.Tensor, gate kdaGate, beta *core.Tensor, norm, save bool) *kdaStages {
	h, hv, k, v := r.c.Size("H"), r.c.Size("HV"), r.c.Size("K"), r.c.Size("V")
	x := &kdaStages{gate: gate, beta: beta}
	of := func(d core.DType, heads int64, width ...int64) *core.Tensor {
		return r.temp(d, append([]int64{s.batch, heads, s.tokens}, width...)...)
	}
	x.gk, x.aqk, x.w, x.u = of(core.F32, hv, k), of(core.BF16, hv, chunk), of(core.BF16, hv, k), of(core.BF16, hv, v)
	x.kg, x.scaled = of(core.BF16, hv, k), of(core.BF16, hv, k)
	if save {
		x.akk, x.qg, x.qHat, x.kHat = of(core.BF16, hv, chunk), of(core.BF16, hv, k), of(core.BF16, h, k), of(core.BF16, h, k)
		x.qRstd, x.kRstd, x.effective = of(core.F32, h), of(core.F32, h), of(core.F32, hv)
	}
	const epsilon = 1e-6
	scale := 1.0
	if r.c.Op.Tensors[0].Name == "q" {
		scale = r.scale()
	}
	r.exec(kdaFwdPrepare, q, key, value, x.gate.g, x.beta, x.gate.aLog, x.gate.bias, s.cu, s.chunks, "BSND\x00", scale, chunk, epsilon,
		norm, x.gate.use, r.c.Int("beta_sigmoid") != 0, r.c.Int("neg_eigval") != 0, x.gate.safe, x.gate.bound, true,
		x.gk, x.aqk, x.akk, x.w, x.u, x.qg, x.kg, x.scaled, x.qHat, x.kHat, x.qRstd, x.kRstd, x.effective)
	return x
}

// kdaFirst is that stage of a composite.
func (r *run) kdaFirst(s *sequences, save bool) *kdaStages {
	q, k, v := r.rows("q", core.None, s), r.rows("k", core.None, s), r.rows("v", core.None, s)
	return r.kdaPrepare(s, q, k, v, r.kdaGate(r.gateRows(s)), r.betaOf(core.F32, s), r.c.Int("qk_l2norm") != 0, save)
}

// kdaStates runs the pass over the chunks.
func (r *run) kdaStates(x *kdaStages, s *sequences, ht *core.Tensor) {
	hv, k, v := r.c.Size("HV"), r.c.Size("K"), r.c.Size("V")
	x.h, x.vNew = r.chunkStates(chunkFwdH, core.BF16, s, hv, k, v), r.temp(core.BF16, s.batch, hv, s.tokens, v)
	r.exec(chunkFwdH, x.kg, x.w, x.u, nil, x.gk, r.state("initial_state", core.F32, false, s), ht != nil, chunk, true, s.cu, s.chunks, true, false,
		x.h, x.vNew, ht)
}

// flat is a tensor without its first dimension where sequences are packed, as some stages want it.
func flat(t *core.Tensor, s *sequences) *core.Tensor {
	if t == nil || !s.packed {
		return t
	}
	return shaped(t, t.Shape[1:t.Rank]...)
}

var kdaForward = &path{
	what:  "the KDA stages of fla-npu",
	needs: []*opName{kdaFwdPrepare, chunkFwdH, kdaFwdFinalize, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		return firstOf(refuseInputs(c, core.BF16), refuseSizes(c, []int64{128}, []int64{128}), refuseGate(c))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			r.entryStates(nil, s)
			return
		}
		x := r.kdaFirst(s, false)
		r.kdaStates(x, s, r.stateOut("final_state", "initial_state", core.F32, false, s))
		r.entryStates(x.h, s)
		o := r.rowsOut("o", core.BF16, s)
		layout := layout(s, "BSND\x00", "TND\x00")
		// h keeps its first dimension.
		r.exec(kdaFwdFinalize, flat(x.scaled, s), flat(x.aqk, s), flat(x.vNew, s), x.h, s.cu, s.chunks, layout, false, flat(o, s))
	},
}

// entryStates copies the states before all chunks to the output h, which has room for more than packed sequences may need.
func (r *run) entryStates(h *core.Tensor, s *sequences) {
	to := r.stateView5("h")
	if to == nil {
		return
	}
	used := int64(0)
	if h != nil {
		used = s.nt
		if !r.chunkFirst(chunkFwdH) {
			h = permuted(h, 0, 2, 1, 3, 4)
		}
		r.copy(sliced(to, 1, 0, used), h)
	}
	if rest := to.Shape[1] - used; rest > 0 {
		r.zero(sliced(to, 1, used, rest))
	}
}

// stateView5 is an output [B NT HV K V] with K first; nil where it is not wanted.
func (r *run) stateView5(name string) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	if r.c.Int("state_v_first") != 0 {
		return permuted(t, 0, 1, 2, 4, 3)
	}
	return t
}

// kdaOldForward is for what the stages do not take: older versions of fla-npu, float16, other head sizes.
var kdaOldForward = &path{
	what:  "aclnnChunkKdaFwd of fla-npu",
	needs: []*opName{kdaComposite, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		k, v := c.Size("K"), c.Size("V")
		switch newer := kdaFwdPrepare.in(a).err == nil; {
		case newer && (k != v || k != 64 && k != 128):
			return fmt.Sprintf("K is %d and V %d, and it takes K = V = 64 or 128", k, v)
		case k%16 != 0 || v%16 != 0 || k > 256 || v > 256:
			return fmt.Sprintf("K is %d and V %d, and it takes multiples of 16 up to 256", k, v)
		case c.Size("HV") > 128:
			return fmt.Sprintf("HV is %d, and it takes up to 128", c.Size("HV"))
		case c.Size("N") > 1024:
			return fmt.Sprintf("there are %d sequences, and it takes up to 1024", c.Size("N"))
		case c.Has("h"):
			return "it is not asked for the states of chunks, of which it has changed the layout"
		case c.Int("qk_l2norm") != 0:
			return "it does not normalise q and k (qk_l2norm is 1); do so before the call"
		case c.Int("beta_sigmoid") != 0:
			return "it does not apply the sigmoid to beta (beta_sigmoid is 1); do so before the call"
		}
		return firstOf(refuseInputs(c, core.BF16, core.F16), refuseGate(c))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			return
		}
		d, hv := r.c.Tensor("q").DType, r.c.Size("HV")
		gate := r.kdaGate(r.gateRows(s))
		vFirst := r.c.Int("state_v_first") != 0
		square := func() *core.Tensor { return flat(r.temp(d, s.batch, hv, s.tokens, chunk), s) }
		r.exec(kdaComposite, flat(r.rows("q", core.None, s), s), flat(r.rows("k", core.None, s), s), flat(r.rows("v", core.None, s), s), flat(gate.g, s),
			flat(r.betaOf(core.F32, s), s), gate.aLog, gate.bias, r.state("initial_state", core.F32, vFirst, s), s.cu, s.chunks,
			layout(s, "BSND\x00", "TND\x00"), r.scale(), chunk, gate.safe, gate.bound, gate.use, vFirst, flat(r.rowsOut("o", core.None, s), s),
			r.stateOut("final_state", "initial_state", core.F32, vFirst, s), nil, square(), square(), nil, nil, nil, nil, nil, nil)
	},
}

// kdaBackward computes the forward's stages again: what they leave is twice what the tape holds.
var kdaBackward = &path{
	what: "the KDA stages of fla-npu",
	needs: []*opName{kdaFwdPrepare, chunkFwdH, kdaBwdPrepare, bwdDhu, kdaBwdFinalize, plainSub, plainMul, plainMuls,
		inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		switch {
		case a.chip() != a5:
			return "its backward is for A5, this is " + a.soc
		case c.Int("gate") == 0 || c.Float("lower_bound") == 0:
			return "its backward is for the gate that it computes itself from a lower bound (gate 1 and lower_bound below 0)"
		case c.Has("dht"):
			return "on A5 aclnnChunkGatedDeltaRuleBwdDhu leaves dht out"
		}
		return firstOf(refuseInputs(c, core.BF16), refuseSizes(c, []int64{128}, []int64{128}), refuseGate(c))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idleBackward(s) {
			for _, name := range []string{"dA_log", "ddt_bias"} {
				if t := r.c.Tensor(name); t.DType != core.None {
					r.zero(t)
				}
			}
			return
		}
		h, hv, k, v := r.c.Size("H"), r.c.Size("HV"), r.c.Size("K"), r.c.Size("V")
		x := r.kdaFirst(s, true)
		r.kdaStates(x, s, nil)
		of := func(d core.DType, heads int64, width ...int64) *core.Tensor {
			return r.temp(d, append([]int64{s.batch, heads, s.tokens}, width...)...)
		}
		dO := r.headMajor(r.rows("dout", core.BF16, s))
		dAqk, local, dqRaw := of(core.F32, hv, chunk), of(core.BF16, hv, v), of(core.F32, hv, k)
		r.exec(kdaBwdPrepare, flat(x.aqk, s), flat(x.vNew, s), flat(dO, s), flat(x.h, s), s.cu, s.chunks, r.scale(), chunk, false, flat(dAqk, s), flat(local, s),
			flat(dqRaw, s))
		dh, scan := r.chunkStates(bwdDhu, core.BF16, s, hv, k, v), of(core.BF16, hv, v)
		var h0, dh0 *core.Tensor
		if r.c.Has("dh0") {
			h0, dh0 = r.state("initial_state", core.F32, false, s), r.stateOut("dh0", "dht", core.BF16, false, s)
		}
		r.exec(bwdDhu, x.qg, x.kg, x.w, dO, local, nil, x.gk, h0, nil, s.cu, s.chunks, r.scale(), chunk, true, false, dh, dh0, scan)

		rawG, value := r.headMajor(x.gate.g), r.headMajor(r.rows("v", core.None, s))
		bias := shaped(x.gate.bias, hv, k)
		if bias == nil {
			bias = r.zeros(core.F32, hv, k)
		}
		qRstd, kRstd := x.qRstd, x.kRstd
		if r.c.Int("qk_l2norm") == 0 {
			qRstd, kRstd = nil, nil
		}
		dq, dk, dv, dbeta, dg := of(core.BF16, h, k), of(core.BF16, h, k), of(core.BF16, hv, v), of(core.F32, hv), of(core.F32, hv, k)
		dA, dBias := r.out("dA_log", core.F32), r.out("ddt_bias", core.F32)
		if dA == nil {
			dA = r.temp(core.F32, hv)
		}
		if dBias == nil {
			dBias = r.temp(core.F32, hv, k)
		}
		r.exec(kdaBwdFinalize, flat(x.qHat, s), flat(x.kHat, s), flat(value, s), flat(x.gk, s), flat(rawG, s), flat(x.effective, s), x.gate.aLog, bias,
			flat(x.akk, s), flat(x.vNew, s), flat(x.h, s), flat(dh, s), flat(scan, s), flat(dAqk, s), flat(dqRaw, s), flat(qRstd, s), flat(kRstd, s),
			s.cu, s.chunks, r.scale(), x.gate.bound, chunk, true, true, true, false, flat(dq, s), flat(dk, s), flat(dv, s), flat(dbeta, s), flat(dg, s), dA, dBias)
		if r.c.Int("beta_sigmoid") != 0 {
			dbeta = r.logitGradient(dbeta, x.effective)
		}
		for _, made := range []struct {
			name string
			t    *core.Tensor
		}{{"dq", dq}, {"dk", dk}, {"dv", dv}, {"dbeta", dbeta}, {"dg", dg}} {
			if to := r.rowsOut(made.name, core.None, s); to != nil {
				r.copy(to, exchanged(made.t))
			}
		}
	},
}

// logitGradient takes the gradient of beta = c sigmoid(z) to that of z: d beta (1 - beta/c).
func (r *run) logitGradient(d, beta *core.Tensor) *core.Tensor {
	most := 1.0
	if r.c.Int("neg_eigval") != 0 {
		most = 2
	}
	shape := beta.Shape[:beta.Rank]
	square, part, slope, dz := r.temp(core.F32, shape...), r.temp(core.F32, shape...), r.temp(core.F32, shape...), r.temp(core.F32, shape...)
	r.exec(plainMul, beta, beta, square)
	r.exec(plainMuls, square, scalar(1/most), part)
	r.exec(plainSub, beta, part, scalar(1), slope)
	r.exec(plainMul, d, slope, dz)
	return dz
}

var kdaRecurrent = &path{
	what:  "aclnnRecurrentKda of fla-npu",
	needs: []*opName{kdaStep, inplaceCopy, inplaceOne, clampMin},
	refuse: func(a *acl, c *core.Call) string {
		if c.Int("qk_l2norm") != 0 {
			return "it normalises q and k without an epsilon, so that a key of zeros gives NaN (qk_l2norm is 1); do so before the call"
		}
		return firstOf(refuseStep(256)(a, c), refuseSizes(c, []int64{128}, []int64{128, 256}), refuseGate(c))
	},
	run: func(r *run) {
		s := r.sequences()
		if r.idle(s) {
			return
		}
		vFirst := r.c.Int("state_v_first") != 0
		state := r.stateOut("final_state", "initial_state", core.F32, vFirst, s)
		if state == nil {
			k, v := r.c.Size("K"), r.c.Size("V")
			if vFirst {
				k, v = v, k
			}
			state = r.temp(core.F32, s.count, r.c.Size("HV"), k, v)
		}
		if h0 := r.state("initial_state", core.F32, vFirst, s); h0 != nil {
			r.copy(state, h0)
		} else {
			r.zero(state)
		}
		var cu *core.Tensor
		if s.packed {
			list := make([]int32, len(s.cu))
			for i, n := range s.cu {
				list[i] = int32(n)
			}
			cu = r.upload(list)
		}
		gate := r.kdaGate(r.gateRows(s))
		r.exec(kdaStep, flat(r.rows("q", core.None, s), s), flat(r.rows("k", core.None, s), s), flat(r.rows("v", core.None, s), s), flat(gate.g, s),
			flat(r.betaOf(core.F32, s), s), state, cu, nil, gate.aLog, gate.bias, nil, layout(s, "BSND\x00", "TND\x00"), r.scale(), true, true, false,
			gate.use, r.c.Int("beta_sigmoid") != 0, r.c.Int("neg_eigval") != 0, gate.safe, gate.bound, vFirst, flat(r.rowsOut("o", core.None, s), s), state)
	},
}
