// Package oracle computes the operators in float64, token by token, straight from their formulas. It is what the tests of every backend
// compare with, so it is written to be read, not to be fast.
package oracle

import "math"

// Tensors holds compact row-major tensors under the table's names; an absent one is not in it.
type Tensors map[string][]float64

// GDN is one call of the Gated DeltaNet family, with the letters and the numbers of the table.
type GDN struct {
	Channels          bool // Kimi Delta Attention: g goes by key channels, and so does dt_bias
	B, T, H, HV, K, V int
	Cu                []int // offsets of packed sequences; nil: B sequences of T tokens
	Scale             float64
	L2Norm            bool
	Gate              bool
	LowerBound        float64
	BetaSigmoid       bool
	NegEigval         bool
	StateVFirst       bool

	// q k v g gk gv beta A_log dt_bias initial_state, and for Backward dout dht. beta may be [B T HV] or [B T HV V].
	In Tensors

	// Set by Backward: for dA_log and ddt_bias the sum of the squares of what each element sums up. Their rounding errors go by its root,
	// however small the sum may come out.
	Squares Tensors
}

const l2Epsilon = 1e-6

// Sequences returns the first row, counted over B and T, and the length of each sequence.
func (p *GDN) Sequences() (first, length []int) { return sequences(p.B, p.T, p.Cu) }

func sequences(batch, tokens int, cu []int) (first, length []int) {
	if cu == nil {
		for b := range batch {
			first, length = append(first, b*tokens), append(length, tokens)
		}
		return first, length
	}
	for n := range len(cu) - 1 {
		first, length = append(first, cu[n]), append(length, cu[n+1]-cu[n])
	}
	return first, length
}

// betaWidth is how many betas a value head has.
func (p *GDN) betaWidth() int {
	if p.B*p.T*p.HV > 0 && len(p.In["beta"]) > p.B*p.T*p.HV {
		return p.V
	}
	return 1
}

// gateWidth is how many gates a value head has.
func (p *GDN) gateWidth() int {
	if p.Channels {
		return p.K
	}
	return 1
}

// Kept is how many tokens lie between two states that h keeps.
const Kept = 64

// Forward returns o, final_state and, of Kimi Delta Attention, h: the states before each Kept tokens.
func (p *GDN) Forward() Tensors {
	out := Tensors{"o": make([]float64, p.B*p.T*p.HV*p.V)}
	first, length := p.Sequences()
	out["final_state"] = make([]float64, len(first)*p.HV*p.K*p.V)
	at, kept := make([]int, len(first)), p.B*((p.T+Kept-1)/Kept) // where the states of a sequence begin in h
	for n := range first {
		if n > 0 {
			at[n] = at[n-1] + (length[n-1]+Kept-1)/Kept
		}
	}
	if p.Cu != nil {
		kept = (p.T + (Kept-1)*len(first)) / Kept // as many as so many sequences can have
	}
	if p.Channels {
		out["h"] = make([]float64, kept*p.HV*p.K*p.V)
	}
	for n := range first {
		for hv := range p.HV {
			s := make([]float64, p.K*p.V)
			p.readState(s, "initial_state", n, hv)
			for t := range length[n] {
				if p.Channels && t%Kept == 0 {
					p.writeState(s, out["h"], at[n]+t/Kept, hv)
				}
				x := p.token(first[n]+t, hv)
				after := make([]float64, p.K*p.V)
				x.step(s, after, nil)
				x.read(after, x.scale, out["o"][x.at*p.V:][:p.V])
				s = after
			}
			p.writeState(s, out["final_state"], n, hv)
		}
	}
	return out
}

// Backward returns the gradients of sum(dout o) + sum(dht final_state), each under "d" and the name of its input.
func (p *GDN) Backward() Tensors {
	grad := Tensors{}
	for name, x := range p.In {
		if name != "dout" && name != "dht" && name != "initial_state" {
			grad["d"+name] = make([]float64, len(x))
		}
	}
	p.Squares = Tensors{"dA_log": make([]float64, p.HV), "ddt_bias": make([]float64, p.HV*p.gateWidth())}
	first, length := p.Sequences()
	if p.In["initial_state"] != nil {
		grad["dh0"] = make([]float64, len(p.In["initial_state"]))
	}
	for n := range first {
		for hv := range p.HV {
			// states[t] is the state before token t.
			states := make([][]float64, length[n]+1)
			states[0] = make([]float64, p.K*p.V)
			p.readState(states[0], "initial_state", n, hv)
			for t := range length[n] {
				states[t+1] = make([]float64, p.K*p.V)
				x := p.token(first[n]+t, hv)
				x.step(states[t], states[t+1], nil)
			}
			ds := make([]float64, p.K*p.V)
			p.readState(ds, "dht", n, hv)
			for t := length[n] - 1; t >= 0; t-- {
				x := p.token(first[n]+t, hv)
				x.backward(grad, states[t], states[t+1], ds)
			}
			if grad["dh0"] != nil {
				p.writeState(ds, grad["dh0"], n, hv)
			}
		}
	}
	return grad
}

// token is what the recurrence sees of one row and value head: gates, beta and norms applied.
type token struct {
	p      *GDN
	at     int // row*HV + value head
	atQ    int // row*H + key head
	hv     int
	scale  float64
	q, k   []float64 // normalised
	rq, rk float64   // the factors of that
	v      []float64
	g      []float64 // log decays, of the head or of its key channels
	decayK []float64 // exp(g + gk), per key channel
	decayV []float64 // exp(gv), per value channel
	beta   []float64 // per value channel
}

func (p *GDN) token(row, hv int) *token {
	x := &token{p: p, hv: hv, at: row*p.HV + hv, scale: p.Scale, rq: 1, rk: 1}
	x.atQ = row*p.H + hv/(p.HV/p.H)
	if x.scale == 0 {
		x.scale = 1 / math.Sqrt(float64(p.K))
	}
	x.q, x.k = p.In["q"][x.atQ*p.K:][:p.K], p.In["k"][x.atQ*p.K:][:p.K]
	if p.L2Norm {
		x.q, x.rq = normalised(x.q)
		x.k, x.rk = normalised(x.k)
	}
	x.v = p.In["v"][x.at*p.V:][:p.V]

	gates := p.gateWidth()
	x.g = make([]float64, gates)
	if p.In["g"] != nil {
		copy(x.g, p.In["g"][x.at*gates:])
		for i := range x.g {
			switch raw := p.raw(x.at, hv, i); {
			case p.Gate && p.LowerBound != 0:
				x.g[i] = p.LowerBound * sigmoid(p.amplitude(hv)*raw)
			case p.Gate:
				x.g[i] = -p.amplitude(hv) * softplus(raw)
			}
		}
	}
	x.decayK, x.decayV, x.beta = make([]float64, p.K), make([]float64, p.V), make([]float64, p.V)
	for i := range x.decayK {
		x.decayK[i] = math.Exp(x.g[i%gates])
		if gk := p.In["gk"]; gk != nil {
			x.decayK[i] *= math.Exp(gk[x.at*p.K+i])
		}
	}
	for j := range x.decayV {
		x.decayV[j] = 1
		if gv := p.In["gv"]; gv != nil {
			x.decayV[j] = math.Exp(gv[x.at*p.V+j])
		}
		x.beta[j] = p.betaAt(x.at, j)
	}
	return x
}

// step makes the state after the token from the one before; e, if wanted, receives the error before beta.
func (x *token) step(before, after, e []float64) {
	if e == nil {
		e = make([]float64, x.p.V)
	}
	V := x.p.V
	copy(e, x.v)
	for i, ki := range x.k {
		for j := range e {
			s := x.decayK[i] * x.decayV[j] * before[i*V+j]
			after[i*V+j] = s
			e[j] -= s * ki
		}
	}
	for i, ki := range x.k {
		for j := range e {
			after[i*V+j] += ki * x.beta[j] * e[j]
		}
	}
}

// read computes factor S^T q.
func (x *token) read(s []float64, factor float64, o []float64) {
	for i, qi := range x.q {
		for j := range o {
			o[j] += factor * qi * s[i*x.p.V+j]
		}
	}
}

// backward adds the token's share to the gradients and takes ds, the gradient of the state after the token, to that before it.
func (x *token) backward(grad Tensors, before, after, ds []float64) {
	p, K, V := x.p, x.p.K, x.p.V
	do := p.In["dout"][x.at*V:][:V]
	e := make([]float64, V)
	x.step(before, make([]float64, K*V), e)

	dq, dk := make([]float64, K), make([]float64, K)
	write := make([]float64, V) // D^T k, the gradient of beta e
	for i := range K {
		for j := range V {
			dq[i] += x.scale * after[i*V+j] * do[j]
			ds[i*V+j] += x.scale * x.q[i] * do[j]
			write[j] += ds[i*V+j] * x.k[i]
		}
	}
	de := make([]float64, V)
	for j := range V {
		de[j] = x.beta[j] * write[j]
		grad["dv"][x.at*V+j] = de[j]
		x.betaBackward(grad, j, write[j]*e[j])
	}
	dg, dgk, dgv := make([]float64, len(x.g)), make([]float64, K), make([]float64, V)
	for i := range K {
		for j := range V {
			decayed := x.decayK[i] * x.decayV[j] * before[i*V+j]
			dk[i] += ds[i*V+j]*x.beta[j]*e[j] - decayed*de[j]
			d := ds[i*V+j] - x.k[i]*de[j]
			dgk[i] += d * decayed
			dgv[j] += d * decayed
			ds[i*V+j] = x.decayK[i] * x.decayV[j] * d
		}
	}
	for i, d := range dgk {
		dg[i%len(dg)] += d
	}
	x.gateBackward(grad, dg)
	if grad["dgk"] != nil {
		copy(grad["dgk"][x.at*K:], dgk)
	}
	if grad["dgv"] != nil {
		copy(grad["dgv"][x.at*V:], dgv)
	}
	addNorm(grad["dq"][x.atQ*K:][:K], x.q, dq, x.rq, p.L2Norm)
	addNorm(grad["dk"][x.atQ*K:][:K], x.k, dk, x.rk, p.L2Norm)
}

func (p *GDN) amplitude(hv int) float64 {
	if p.In["A_log"] == nil {
		return 1
	}
	return math.Exp(p.In["A_log"][hv])
}

// raw is gate i of a value head, as it came and with its bias.
func (p *GDN) raw(at, hv, i int) float64 {
	n := p.gateWidth()
	x := p.In["g"][at*n+i]
	if bias := p.In["dt_bias"]; bias != nil {
		x += bias[hv*n+i]
	}
	return x
}

// gateBackward takes the gradients of the log decays to the gate's inputs.
func (x *token) gateBackward(grad Tensors, dg []float64) {
	p, n := x.p, len(dg)
	if grad["dg"] == nil {
		return
	}
	if !p.Gate {
		copy(grad["dg"][x.at*n:], dg)
		return
	}
	for i, d := range dg {
		raw, a := p.raw(x.at, x.hv, i), p.amplitude(x.hv)
		draw, dA := -a*sigmoid(raw)*d, d*x.g[i]
		if p.LowerBound != 0 {
			draw = p.LowerBound * a * sigmoid(a*raw) * sigmoid(-a*raw) * d
			dA = draw * raw
		}
		if draw == 0 { // also where the raw gate is infinite
			dA = 0
		}
		grad["dg"][x.at*n+i] = draw
		if dA_log := grad["dA_log"]; dA_log != nil {
			dA_log[x.hv] += dA
		}
		if dbias := grad["ddt_bias"]; dbias != nil {
			dbias[x.hv*n+i] += draw
		}
		p.Squares["dA_log"][x.hv] += dA * dA
		p.Squares["ddt_bias"][x.hv*n+i] += draw * draw
	}
}

func (p *GDN) betaMax() float64 {
	if p.NegEigval {
		return 2
	}
	return 1
}

func (p *GDN) betaIndex(at, j int) int {
	if p.betaWidth() > 1 {
		return at*p.V + j
	}
	return at
}

func (p *GDN) betaAt(at, j int) float64 {
	beta := p.In["beta"]
	if beta == nil {
		return 1
	}
	b := beta[p.betaIndex(at, j)]
	if p.BetaSigmoid {
		b = p.betaMax() * sigmoid(b)
	}
	return b
}

func (x *token) betaBackward(grad Tensors, j int, db float64) {
	p := x.p
	if grad["dbeta"] == nil {
		return
	}
	i := p.betaIndex(x.at, j)
	if p.BetaSigmoid {
		z := p.In["beta"][i]
		db *= p.betaMax() * sigmoid(z) * sigmoid(-z)
	}
	grad["dbeta"][i] += db
}

// stateIndex is where element (i, j) of a state lies in the caller's layout.
func (p *GDN) stateIndex(n, hv, i, j int) int {
	base := (n*p.HV + hv) * p.K * p.V
	if p.StateVFirst {
		return base + j*p.K + i
	}
	return base + i*p.V + j
}

func (p *GDN) readState(s []float64, name string, n, hv int) {
	if from := p.In[name]; from != nil {
		for i := range p.K {
			for j := range p.V {
				s[i*p.V+j] = from[p.stateIndex(n, hv, i, j)]
			}
		}
	}
}

func (p *GDN) writeState(s, to []float64, n, hv int) {
	for i := range p.K {
		for j := range p.V {
			to[p.stateIndex(n, hv, i, j)] = s[i*p.V+j]
		}
	}
}

func normalised(x []float64) (y []float64, r float64) {
	sum := l2Epsilon
	for _, xi := range x {
		sum += xi * xi
	}
	r = 1 / math.Sqrt(sum)
	y = make([]float64, len(x))
	for i, xi := range x {
		y[i] = xi * r
	}
	return y, r
}

// addNorm adds to dx the gradient dy of y, which is x normalised with the factor r, or x itself.
func addNorm(dx, y, dy []float64, r float64, norm bool) {
	dot := 0.
	if norm {
		for i := range y {
			dot += y[i] * dy[i]
		}
	}
	for i := range dx {
		dx[i] += r * (dy[i] - dot*y[i])
	}
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// softplus is log(1 + exp(x)), without overflow at one end and without loss at the other.
func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }
