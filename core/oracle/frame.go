package oracle

// Frame GDN: S <- S W + U for each frame, and z <- Wz z + uz, which is the same with one row and Wz transposed.
var frameReferences = map[string]func(p *Plain) Tensors{
	"frame_fwd":         frameFwd,
	"frame_bwd":         frameBwd,
	"frame_pullback":    framePullback,
	"frame_summary_fwd": frameSummaryFwd,
	"frame_summary_bwd": frameSummaryBwd,
	"frame_merge_fwd":   frameMergeFwd,
	"frame_merge_bwd":   frameMergeBwd,
	"frame_build_fwd":   frameBuildFwd,
	"frame_build_bwd":   frameBuildBwd,
	"frame_project_fwd": frameProjectFwd,
	"frame_project_bwd": frameProjectBwd,
}

// chain is one head's stream of states with rows x K numbers. Absent inputs are nil.
type chain struct {
	T, K, rows, active int
	reverse, exclusive bool
	W, U, dS           func(t int) []float64
	S                  func(t int) []float64 // states that the backward goes by; nil: its own
	S0, dST            []float64
}

func (c *chain) order() []int {
	var ts []int
	for i := range c.T {
		if c.reverse {
			i = c.T - 1 - i
		}
		ts = append(ts, i)
	}
	return ts
}

func orZero(x []float64, n int) []float64 {
	if x == nil {
		return make([]float64, n)
	}
	return x
}

// forward returns the states before and after each frame, by frame, and the last.
func (c *chain) forward() (before, after [][]float64, last []float64) {
	before, after = make([][]float64, c.T), make([][]float64, c.T)
	s := orZero(c.S0, c.rows*c.K)
	for _, t := range c.order() {
		before[t] = s
		if t < c.active {
			w, next := c.W(t), append([]float64{}, c.U(t)...)
			for r := range c.rows {
				for i := range c.K {
					for j := range c.K {
						next[r*c.K+j] += s[r*c.K+i] * w[i*c.K+j]
					}
				}
			}
			s = next
		}
		after[t] = s
	}
	return before, after, s
}

// backward returns the gradients of W and U by frame and of S0.
func (c *chain) backward() (dW, dU [][]float64, dS0 []float64) {
	dW, dU = make([][]float64, c.T), make([][]float64, c.T)
	ts := c.order()
	before := make([][]float64, c.T)
	switch {
	case c.S == nil && c.U != nil:
		before, _, _ = c.forward()
	case c.S != nil:
		for i, t := range ts {
			switch {
			case c.exclusive:
				before[t] = c.S(t)
			case i > 0:
				before[t] = c.S(ts[i-1])
			default:
				before[t] = orZero(c.S0, c.rows*c.K)
			}
		}
	}
	g := append([]float64{}, orZero(c.dST, c.rows*c.K)...)
	for n := len(ts) - 1; n >= 0; n-- {
		t := ts[n]
		var ds []float64
		if c.dS != nil {
			ds = c.dS(t)
		}
		add := func() {
			for i := range ds {
				g[i] += ds[i]
			}
		}
		dW[t], dU[t] = make([]float64, c.K*c.K), make([]float64, c.rows*c.K)
		if t >= c.active { // S of the frame is the state on either side
			add()
			continue
		}
		if !c.exclusive {
			add()
		}
		copy(dU[t], g)
		w, next := c.W(t), make([]float64, c.rows*c.K)
		for r := range c.rows {
			for i := range c.K {
				for j := range c.K {
					if before[t] != nil {
						dW[t][i*c.K+j] += before[t][r*c.K+i] * g[r*c.K+j]
					}
					next[r*c.K+i] += g[r*c.K+j] * w[i*c.K+j]
				}
			}
		}
		g = next
		if c.exclusive {
			add()
		}
	}
	return dW, dU, g
}

func transposed(x []float64, n int) []float64 {
	y := make([]float64, len(x))
	for i := range n {
		for j := range n {
			y[j*n+i] = x[i*n+j]
		}
	}
	return y
}

// frames reads tensors of a call by head and frame; partsFirst: [T B ...] instead of [B T ...].
type frames struct {
	p          *Plain
	B, T, K, V int
	partsFirst bool
}

func framesOf(p *Plain, partsFirst bool) *frames {
	return &frames{p, int(p.Size["B"]), int(p.Size["T"]), int(p.Size["K"]), int(p.Size["V"]), partsFirst}
}

func (f *frames) at(x []float64, b, t, n int) []float64 {
	i := b*f.T + t
	if f.partsFirst {
		i = t*f.B + b
	}
	return x[i*n:][:n]
}

// frame reads an input of n numbers a frame; nil where it is absent.
func (f *frames) frame(name string, b, n int) func(t int) []float64 {
	x, ok := f.p.In[name]
	if !ok {
		return nil
	}
	return func(t int) []float64 { return f.at(x, b, t, n) }
}

// state reads an input of n numbers a head; nil where it is absent.
func (f *frames) state(name string, b, n int) []float64 {
	if x, ok := f.p.In[name]; ok {
		return x[b*n:][:n]
	}
	return nil
}

func (f *frames) chain(rows int) *chain {
	return &chain{T: f.T, K: f.K, rows: rows, active: f.T - int(f.p.Numbers["padding"]), reverse: f.p.Numbers["reverse"] != 0,
		exclusive: f.p.Numbers["exclusive"] != 0}
}

func (f *frames) across(w func(t int) []float64) func(t int) []float64 {
	if w == nil {
		return nil
	}
	return func(t int) []float64 { return transposed(w(t), f.K) }
}

func (f *frames) put(out Tensors, name string, b, t int, x []float64) {
	if out[name] == nil {
		out[name] = make([]float64, f.B*f.T*len(x))
	}
	copy(f.at(out[name], b, t, len(x)), x)
}

func (f *frames) putState(out Tensors, name string, b int, x []float64) {
	if out[name] == nil {
		out[name] = make([]float64, f.B*len(x))
	}
	copy(out[name][b*len(x):], x)
}

// scan runs both streams forward: the names are those of a stream's tensors.
func (f *frames) scan(out Tensors, W, U, S0, S, ST string, rows int, left bool) {
	for b := range f.B {
		c := f.chain(rows)
		c.W, c.U, c.S0 = f.frame(W, b, f.K*f.K), f.frame(U, b, rows*f.K), f.state(S0, b, rows*f.K)
		if left {
			c.W = f.across(c.W)
		}
		before, after, last := c.forward()
		for t := range f.T {
			if x := after[t]; c.exclusive {
				f.put(out, S, b, t, before[t])
			} else {
				f.put(out, S, b, t, x)
			}
		}
		f.putState(out, ST, b, last)
	}
}

func frameFwd(p *Plain) Tensors {
	out, f := empty("S", "z", "final_state", "final_z"), framesOf(p, false)
	f.scan(out, "W", "U", "initial_state", "S", "final_state", f.V, false)
	if p.In["Wz"] != nil {
		f.scan(out, "Wz", "uz", "initial_z", "z", "final_z", 1, true)
	}
	return out
}

func empty(names ...string) Tensors {
	out := Tensors{}
	for _, n := range names {
		out[n] = nil
	}
	return out
}

func frameMergeFwd(p *Plain) Tensors {
	out, f := empty("S", "z"), framesOf(p, true)
	f.scan(out, "M", "h", "initial_state", "S", "", f.V, false)
	if p.In["Mz"] != nil {
		f.scan(out, "Mz", "hz", "initial_z", "z", "", 1, true)
	}
	return out
}

// names of a stream's tensors
type scanNames struct{ W, U, S, S0, dS, dST, dW, dU, dS0 string }

func (f *frames) scanBackward(out Tensors, n scanNames, rows int, left bool) {
	for b := range f.B {
		c := f.chain(rows)
		c.W, c.U, c.S, c.S0 = f.frame(n.W, b, f.K*f.K), f.frame(n.U, b, rows*f.K), f.frame(n.S, b, rows*f.K), f.state(n.S0, b, rows*f.K)
		c.dS, c.dST = f.frame(n.dS, b, rows*f.K), f.state(n.dST, b, rows*f.K)
		if c.U != nil {
			c.S = nil // it comes where S is too coarse
		}
		if left {
			c.W = f.across(c.W)
		}
		dW, dU, dS0 := c.backward()
		for t := range f.T {
			if left {
				dW[t] = transposed(dW[t], f.K)
			}
			f.put(out, n.dW, b, t, dW[t])
			f.put(out, n.dU, b, t, dU[t])
		}
		f.putState(out, n.dS0, b, dS0)
	}
}

func frameBwd(p *Plain) Tensors {
	out, f := empty("dW", "dU", "dWz", "duz", "dinitial_state", "dinitial_z"), framesOf(p, false)
	f.scanBackward(out, scanNames{"W", "U", "S", "initial_state", "dS", "dfinal_state", "dW", "dU", "dinitial_state"}, f.V, false)
	if p.In["Wz"] != nil {
		f.scanBackward(out, scanNames{"Wz", "uz", "z", "initial_z", "dz", "dfinal_z", "dWz", "duz", "dinitial_z"}, 1, true)
	}
	return out
}

func framePullback(p *Plain) Tensors {
	out, f := empty("dinitial_state", "dinitial_z"), framesOf(p, false)
	f.scanBackward(out, scanNames{W: "W", dS: "dS", dW: "-", dU: "--", dS0: "dinitial_state"}, f.V, false)
	if p.In["Wz"] != nil {
		f.scanBackward(out, scanNames{W: "Wz", dS: "dz", dW: "-", dU: "---", dS0: "dinitial_z"}, 1, true)
	}
	return out
}

func frameMergeBwd(p *Plain) Tensors {
	out, f := empty("dM", "dh", "dMz", "dhz", "dinitial_state", "dinitial_z"), framesOf(p, true)
	f.scanBackward(out, scanNames{W: "M", S: "S", S0: "initial_state", dS: "dS", dW: "dM", dU: "dh", dS0: "dinitial_state"}, f.V, false)
	if p.In["Mz"] != nil {
		f.scanBackward(out, scanNames{W: "Mz", S: "z", S0: "initial_z", dS: "dz", dW: "dMz", dU: "dhz", dS0: "dinitial_z"}, 1, true)
	}
	return out
}

// composite is a chain whose state has K rows more that begin as the identity: they become the product of the W.
func (f *frames) composite(W, U string, b, rows int, left bool) *chain {
	c := f.chain(rows + f.K)
	c.W = f.frame(W, b, f.K*f.K)
	if left {
		c.W = f.across(c.W)
	}
	u := f.frame(U, b, rows*f.K)
	c.U = func(t int) []float64 { return append(append([]float64{}, u(t)...), make([]float64, f.K*f.K)...) }
	c.S0 = make([]float64, c.rows*f.K)
	for i := range f.K {
		c.S0[(rows+i)*f.K+i] = 1
	}
	return c
}

func frameSummaryFwd(p *Plain) Tensors {
	out, f := empty("h", "M", "hz", "Mz"), framesOf(p, false)
	for b := range f.B {
		_, _, last := f.composite("W", "U", b, f.V, false).forward()
		f.putState(out, "h", b, last[:f.V*f.K])
		f.putState(out, "M", b, last[f.V*f.K:])
		if p.In["Wz"] != nil {
			_, _, last = f.composite("Wz", "uz", b, 1, true).forward()
			f.putState(out, "hz", b, last[:f.K])
			f.putState(out, "Mz", b, transposed(last[f.K:], f.K))
		}
	}
	return out
}

func frameSummaryBwd(p *Plain) Tensors {
	out, f := empty("dW", "dU", "dWz", "duz"), framesOf(p, false)
	one := func(b, rows int, left bool, W, U, dh, dM, dW, dU string) {
		c := f.composite(W, U, b, rows, left)
		m := orZero(f.state(dM, b, f.K*f.K), f.K*f.K)
		if left {
			m = transposed(m, f.K)
		}
		c.dST = append(append([]float64{}, orZero(f.state(dh, b, rows*f.K), rows*f.K)...), m...)
		gW, gU, _ := c.backward()
		for t := range f.T {
			if left {
				gW[t] = transposed(gW[t], f.K)
			}
			f.put(out, dW, b, t, gW[t])
			f.put(out, dU, b, t, gU[t][:rows*f.K])
		}
	}
	for b := range f.B {
		one(b, f.V, false, "W", "U", "dh", "dM", "dW", "dU")
		if p.In["Wz"] != nil {
			one(b, 1, true, "Wz", "uz", "dhz", "dMz", "dWz", "duz")
		}
	}
	return out
}

// frameTokens reads the tensors of a frame's tokens.
type frameTokens struct{ B, T, R, H, K, V int }

func tokensOf(p *Plain) frameTokens {
	n := func(l string) int { return int(p.Size[l]) }
	return frameTokens{n("B"), n("T"), n("R"), n("H"), n("K"), n("V")}
}

// each calls f for every frame of every head: cell is its place in [B H T], token that of its token r in [B T R H].
func (n frameTokens) each(f func(cell, frame int, token func(r int) int)) {
	for b := range n.B {
		for h := range n.H {
			for t := range n.T {
				f((b*n.H+h)*n.T+t, (b*n.T+t)*n.H+h, func(r int) int { return ((b*n.T+t)*n.R+r)*n.H + h })
			}
		}
	}
}

func (n frameTokens) tensors(sizes map[string]int) Tensors {
	out := Tensors{}
	for name, size := range sizes {
		out[name] = make([]float64, size)
	}
	return out
}

func row(x []float64, i, n int) []float64 { return x[i*n:][:n] }

func frameBuildFwd(p *Plain) Tensors {
	n := tokensOf(p)
	K, V, cells := n.K, n.V, n.B*n.H*n.T
	out := n.tensors(map[string]int{"W": cells * K * K, "U": cells * V * K, "Wz": cells * K * K, "uz": cells * K})
	n.each(func(cell, frame int, token func(r int) int) {
		decay := p.In["decay"][frame]
		transition := func(W []float64, keys string) {
			for r := range n.R {
				k, beta := row(p.In[keys], token(r), K), p.In["beta"][token(r)]
				for i := range K {
					for j := range K {
						W[i*K+j] -= decay * beta * k[i] * k[j]
					}
				}
			}
			for i := range K {
				W[i*K+i] += decay
			}
		}
		transition(row(out["W"], cell, K*K), "k")
		for r := range n.R {
			k, v, beta := row(p.In["k"], token(r), K), row(p.In["v"], token(r), V), p.In["beta"][token(r)]
			for i := range V {
				for j := range K {
					out["U"][(cell*V+i)*K+j] += beta * v[i] * k[j]
				}
			}
		}
		if p.In["kz"] == nil {
			return
		}
		transition(row(out["Wz"], cell, K*K), "kz")
		for r := range n.R {
			for j, k := range row(p.In["kz"], token(r), K) {
				out["uz"][cell*K+j] += p.In["beta"][token(r)] * k
			}
		}
	})
	return out
}

func frameBuildBwd(p *Plain) Tensors {
	n := tokensOf(p)
	K, V, tokens := n.K, n.V, n.B*n.T*n.R*n.H
	out := n.tensors(map[string]int{"dk": tokens * K, "dv": tokens * V, "dbeta": tokens, "ddecay": n.B * n.T * n.H, "dkz": tokens * K})
	n.each(func(cell, frame int, token func(r int) int) {
		decay := p.In["decay"][frame]
		transition := func(keys, dW string) {
			if p.In[dW] == nil {
				return
			}
			g := row(p.In[dW], cell, K*K)
			for i := range K {
				out["ddecay"][frame] += g[i*K+i]
			}
			for r := range n.R {
				k, dk, beta := row(p.In[keys], token(r), K), row(out["d"+keys], token(r), K), p.In["beta"][token(r)]
				for i := range K {
					for j := range K {
						out["ddecay"][frame] -= beta * k[i] * k[j] * g[i*K+j]
						out["dbeta"][token(r)] -= decay * k[i] * k[j] * g[i*K+j]
						dk[i] -= decay * beta * k[j] * (g[i*K+j] + g[j*K+i])
					}
				}
			}
		}
		transition("k", "dW")
		dU := row(p.In["dU"], cell, V*K)
		for r := range n.R {
			k, v, beta := row(p.In["k"], token(r), K), row(p.In["v"], token(r), V), p.In["beta"][token(r)]
			for i := range V {
				for j := range K {
					out["dv"][token(r)*V+i] += beta * dU[i*K+j] * k[j]
					out["dk"][token(r)*K+j] += beta * dU[i*K+j] * v[i]
					out["dbeta"][token(r)] += dU[i*K+j] * v[i] * k[j]
				}
			}
		}
		if p.In["kz"] == nil {
			return
		}
		transition("kz", "dWz")
		if p.In["duz"] == nil {
			return
		}
		for r := range n.R {
			for j, du := range row(p.In["duz"], cell, K) {
				out["dkz"][token(r)*K+j] += p.In["beta"][token(r)] * du
				out["dbeta"][token(r)] += du * p.In["kz"][token(r)*K+j]
			}
		}
	})
	return out
}

func frameProjectFwd(p *Plain) Tensors {
	n := tokensOf(p)
	K, V, tokens := n.K, n.V, n.B*n.T*n.R*n.H
	out := n.tensors(map[string]int{"num": tokens * V, "den": tokens})
	n.each(func(cell, _ int, token func(r int) int) {
		for r := range n.R {
			for i := range V {
				for j, q := range row(p.In["q"], token(r), K) {
					out["num"][token(r)*V+i] += p.In["S"][(cell*V+i)*K+j] * q
				}
			}
			if p.In["qz"] == nil {
				continue
			}
			for j, q := range row(p.In["qz"], token(r), K) {
				out["den"][token(r)] += p.In["z"][cell*K+j] * q
			}
		}
	})
	return out
}

func frameProjectBwd(p *Plain) Tensors {
	n := tokensOf(p)
	K, V, cells, tokens := n.K, n.V, n.B*n.H*n.T, n.B*n.T*n.R*n.H
	out := n.tensors(map[string]int{"dq": tokens * K, "dS": cells * V * K, "dqz": tokens * K, "dz": cells * K})
	n.each(func(cell, _ int, token func(r int) int) {
		for r := range n.R {
			for i := range V {
				g := p.In["dnum"][token(r)*V+i]
				for j := range K {
					out["dq"][token(r)*K+j] += g * p.In["S"][(cell*V+i)*K+j]
					out["dS"][(cell*V+i)*K+j] += g * p.In["q"][token(r)*K+j]
				}
			}
			if p.In["qz"] == nil || p.In["dden"] == nil {
				continue
			}
			g := p.In["dden"][token(r)]
			for j := range K {
				out["dqz"][token(r)*K+j] += g * p.In["z"][cell*K+j]
				out["dz"][cell*K+j] += g * p.In["qz"][token(r)*K+j]
			}
		}
	})
	return out
}
