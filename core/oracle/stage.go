package oracle

import "math"

// stages are the references of the chunk form's stages, by the sums that define them.
var stages = map[string]func(p *Plain) Tensors{
	"prepare":         func(p *Plain) Tensors { return p.prepare(1) },
	"kda_prepare":     func(p *Plain) Tensors { return p.prepare(int(p.Size["K"])) },
	"state_pass":      (*Plain).statePass,
	"output":          (*Plain).output,
	"kda_output":      (*Plain).output,
	"bwd_prepare":     (*Plain).bwdPrepare,
	"kda_bwd_prepare": (*Plain).bwdPrepare,
	"state_grad":      (*Plain).stateGrad,
	"finish":          (*Plain).finish,
	"kda_finish":      (*Plain).finish,
}

// piece is one chunk of a sequence.
type piece struct{ n, row, len, b, slot int } // sequence, first row over B and T, tokens, batch entry, place in h

const chunkTokens = 64

// pieces are the chunks, sequence by sequence.
func (p *Plain) pieces() (all [][]piece) {
	first, length := p.Sequences()
	next := 0
	for n := range first {
		var list []piece
		for t := 0; t < length[n]; t += chunkTokens {
			c := piece{n: n, row: first[n] + t, len: min(length[n]-t, chunkTokens), slot: t / chunkTokens}
			if p.Cu != nil {
				c.slot, next = next, next+1
			} else {
				c.b = n
			}
			list = append(list, c)
		}
		all = append(all, list)
	}
	return all
}

func (p *Plain) n(letter string) int { return int(p.Size[letter]) }

// at is row i of a tensor of tokens at a head: width numbers.
func (p *Plain) at(x []float64, row, heads, h, width int) []float64 {
	return x[(row*heads+h)*width:][:width]
}

func (p *Plain) scale() float64 {
	if s := p.Numbers["scale"]; s != 0 {
		return s
	}
	return 1 / math.Sqrt(float64(p.Size["K"]))
}

// natural is what a sum of gates is in natural logarithms.
func (p *Plain) natural() float64 {
	if p.Numbers["exp2"] != 0 {
		return math.Ln2
	}
	return 1
}

// state is entry (d, v) of the state at a chunk in a tensor with `places` chunks a row.
func (p *Plain) state(c piece, places, hv, d, v int) int {
	K, V := p.n("K"), p.n("V")
	at := ((c.b*places+c.slot)*p.n("HV") + hv) * K * V
	if p.Numbers["state_v_first"] != 0 {
		return at + v*K + d
	}
	return at + d*V + v
}

// end is the same in a tensor of states of sequences.
func (p *Plain) end(n, hv, d, v int) int { return p.state(piece{slot: n}, 0, hv, d, v) }

// gates returns the cumulated log decays of a chunk's tokens, by channels, from the sums that came.
func (p *Plain) gates(c piece, hv int) [][]float64 {
	K, HV := p.n("K"), p.n("HV")
	g := make([][]float64, c.len)
	for i := range g {
		g[i] = make([]float64, K)
		for d := range g[i] {
			sum := func(i int) float64 {
				switch {
				case i < 0:
					return 0
				case p.In["gk"] != nil:
					return p.at(p.In["gk"], c.row+i, HV, hv, K)[d] * p.natural()
				case p.In["g_cumsum"] != nil:
					return p.at(p.In["g_cumsum"], c.row+i, HV, hv, 1)[0] * p.natural()
				}
				return 0
			}
			g[i][d] = sum(i) - sum(i-1)
		}
	}
	return cumulate(g, K)
}

// cumulate turns the gates of tokens 0, 1, .. into their sums before tokens 0, 1, .. and behind the last. Finite gates only.
func cumulate(g [][]float64, K int) [][]float64 {
	sums := [][]float64{make([]float64, K)}
	for i := range g {
		sums = append(sums, append([]float64{}, sums[i]...))
		for d := range g[i] {
			sums[i+1][d] += g[i][d]
		}
	}
	return sums
}

// decay is exp of the sum of channel d's gates over the tokens from..to-1; g are the cumulated gates.
func decay(g [][]float64, d, from, to int) float64 { return math.Exp(g[to][d] - g[from][d]) }

// pairs is sum over d of x_i y_j and the decay from j to i, for i > j and with diagonal also i = j.
func pairs(x, y [][]float64, g [][]float64, diagonal bool) [][]float64 {
	a := make([][]float64, len(x))
	for i := range a {
		a[i] = make([]float64, len(x))
		for j := 0; j < i || diagonal && j == i; j++ {
			for d := range x[i] {
				a[i][j] += x[i][d] * y[j][d] * decay(g, d, j+1, i+1)
			}
		}
	}
	return a
}

// decayed are rows times the decays up to and with their tokens.
func decayed(x, g [][]float64) [][]float64 {
	y := make([][]float64, len(x))
	for i := range x {
		y[i] = make([]float64, len(x[i]))
		for d := range y[i] {
			y[i][d] = x[i][d] * decay(g, d, 0, i+1)
		}
	}
	return y
}

// rowsOf are a chunk's rows of a tensor.
func (p *Plain) rowsOf(name string, c piece, heads, h, width int) [][]float64 {
	x := make([][]float64, c.len)
	for i := range x {
		x[i] = p.at(p.In[name], c.row+i, heads, h, width)
	}
	return x
}

// inverse is (1 + beta a)^-1.
func inverse(a [][]float64, beta []float64) [][]float64 {
	x := make([][]float64, len(a))
	for i := range x {
		x[i] = make([]float64, len(a))
		x[i][i] = 1
		for j := range i {
			for e := range j + 1 {
				x[i][e] -= beta[i] * a[i][j] * x[j][e]
			}
		}
	}
	return x
}

// tokens makes an output of a width a token and head.
func (p *Plain) tokens(heads, width int) []float64 {
	return make([]float64, p.n("B")*p.n("T")*heads*width)
}

func (p *Plain) prepare(gates int) Tensors {
	H, HV, K, V := p.n("H"), p.n("HV"), p.n("K"), p.n("V")
	x := p.delta()
	x.Channels = gates > 1 || p.Op == "kda_prepare"
	out := Tensors{"q_norm": p.tokens(H, K), "k_norm": p.tokens(H, K), "q_rstd": p.tokens(H, 1), "k_rstd": p.tokens(H, 1), "beta_eff": p.tokens(HV, 1),
		"g_cumsum": p.tokens(HV, gates), "gk": p.tokens(HV, gates), "A": p.tokens(HV, chunkTokens), "Akk": p.tokens(HV, chunkTokens),
		"Aqk": p.tokens(HV, chunkTokens), "w": p.tokens(HV, K), "u": p.tokens(HV, V), "qg": p.tokens(HV, K), "kg": p.tokens(HV, K), "qg_scaled": p.tokens(HV, K)}
	for _, sequence := range p.pieces() {
		for _, c := range sequence {
			for hv := range HV {
				var q, k, v, g [][]float64
				var beta []float64
				sums := make([]float64, gates)
				h := hv / (HV / H)
				for i := range c.len {
					t := x.token(c.row+i, hv)
					q, k, v, beta = append(q, t.q), append(k, t.k), append(v, t.v), append(beta, t.beta[0])
					g = append(g, make([]float64, K))
					for d := range K {
						g[i][d] = t.g[d%len(t.g)]
					}
					for d := range gates {
						sums[d] += t.g[d]
						p.at(out["gk"], c.row+i, HV, hv, gates)[d] = sums[d] / p.natural()
					}
					copy(p.at(out["q_norm"], c.row+i, H, h, K), t.q)
					copy(p.at(out["k_norm"], c.row+i, H, h, K), t.k)
					p.at(out["q_rstd"], c.row+i, H, h, 1)[0], p.at(out["k_rstd"], c.row+i, H, h, 1)[0] = t.rq, t.rk
					p.at(out["beta_eff"], c.row+i, HV, hv, 1)[0] = t.beta[0]
				}
				g = cumulate(g, K)
				P, X, scale := pairs(q, k, g, true), inverse(pairs(k, k, g, false), beta), p.scale()
				kb := decayed(k, g)
				for i := range c.len {
					copy(p.at(out["A"], c.row+i, HV, hv, chunkTokens), X[i])
					for j := range c.len {
						p.at(out["Aqk"], c.row+i, HV, hv, chunkTokens)[j] = P[i][j] * scale
						for d := range K {
							p.at(out["w"], c.row+i, HV, hv, K)[d] += X[i][j] * beta[j] * kb[j][d]
						}
						for d := range V {
							p.at(out["u"], c.row+i, HV, hv, V)[d] += X[i][j] * beta[j] * v[j][d]
						}
					}
					for d := range K {
						qg := q[i][d] * decay(g, d, 0, i+1)
						p.at(out["qg"], c.row+i, HV, hv, K)[d] = qg
						p.at(out["qg_scaled"], c.row+i, HV, hv, K)[d] = qg * scale
						p.at(out["kg"], c.row+i, HV, hv, K)[d] = k[i][d] * decay(g, d, i+1, c.len)
					}
				}
			}
		}
	}
	out["g_cumsum"], out["Akk"] = out["gk"], out["A"]
	return out
}

// carriers are what takes a state over a chunk: qg, kg and the decay of each channel.
func (p *Plain) carriers(c piece, hv int) (qg, kg [][]float64, all []float64) {
	H, HV, K := p.n("H"), p.n("HV"), p.n("K")
	g, h := p.gates(c, hv), hv/(HV/H)
	gated := p.In["gk"] != nil
	rows := func(name string, from, to func(i int) int) [][]float64 {
		if p.In[name] == nil {
			return nil
		}
		y := make([][]float64, c.len)
		for i, x := range p.rowsOf(name, c, H, h, K) {
			y[i] = append([]float64{}, x...)
			for d := range y[i] {
				if !gated {
					y[i][d] *= decay(g, d, from(i), to(i))
				}
			}
		}
		return y
	}
	qg = rows("q", func(int) int { return 0 }, func(i int) int { return i + 1 })
	kg = rows("k", func(i int) int { return i + 1 }, func(int) int { return c.len })
	for d := range K {
		all = append(all, decay(g, d, 0, c.len))
	}
	return qg, kg, all
}

func (p *Plain) statePass() Tensors {
	HV, K, V, NT := p.n("HV"), p.n("K"), p.n("V"), p.n("NT")
	out := Tensors{"h": make([]float64, p.n("B")*NT*HV*K*V), "v_new": p.tokens(HV, V), "final_state": make([]float64, p.n("N")*HV*K*V)}
	for n, sequence := range p.pieces() {
		for hv := range HV {
			s := make([]float64, K*V)
			for i := range s {
				if p.In["initial_state"] != nil {
					s[i] = p.In["initial_state"][p.end(n, hv, i/V, i%V)]
				}
			}
			for _, c := range sequence {
				_, kg, all := p.carriers(c, hv)
				for i := range s {
					out["h"][p.state(c, NT, hv, i/V, i%V)] = s[i]
				}
				next := make([]float64, K*V)
				for i := range s {
					next[i] = all[i/V] * s[i]
				}
				for i := range c.len {
					w, u, v := p.at(p.In["w"], c.row+i, HV, hv, K), p.at(p.In["u"], c.row+i, HV, hv, V), p.at(out["v_new"], c.row+i, HV, hv, V)
					for e := range V {
						v[e] = u[e]
						for d := range K {
							v[e] -= w[d] * s[d*V+e]
						}
						for d := range K {
							next[d*V+e] += kg[i][d] * v[e]
						}
					}
				}
				s = next
			}
			for i := range s {
				out["final_state"][p.end(n, hv, i/V, i%V)] = s[i]
			}
		}
	}
	return out
}

// lower is a chunk's square of pairs without what is above the diagonal.
func (p *Plain) lower(name string, c piece, hv int) [][]float64 {
	a := p.rowsOf(name, c, p.n("HV"), hv, chunkTokens)
	for i := range a {
		a[i] = append([]float64{}, a[i][:c.len]...)
		for j := i + 1; j < c.len; j++ {
			a[i][j] = 0
		}
	}
	return a
}

// attention is qg_scaled and Aqk of a chunk, from themselves or from q and k.
func (p *Plain) attention(c piece, hv int) (qg, a [][]float64) {
	H, HV, K := p.n("H"), p.n("HV"), p.n("K")
	if p.In["Aqk"] != nil {
		if p.In["qg_scaled"] != nil {
			qg = p.rowsOf("qg_scaled", c, HV, hv, K)
		}
		return qg, p.lower("Aqk", c, hv)
	}
	h := hv / (HV / H)
	qg, _, _ = p.carriers(c, hv)
	a = pairs(p.rowsOf("q", c, H, h, K), p.rowsOf("k", c, H, h, K), p.gates(c, hv), true)
	for i := range a {
		for d := range qg[i] {
			qg[i][d] *= p.scale()
		}
		for j := range a[i] {
			a[i][j] *= p.scale()
		}
	}
	return qg, a
}

func (p *Plain) output() Tensors {
	HV, K, V := p.n("HV"), p.n("K"), p.n("V")
	out := Tensors{"o": p.tokens(HV, V)}
	for _, sequence := range p.pieces() {
		for _, c := range sequence {
			for hv := range HV {
				qg, a := p.attention(c, hv)
				for i := range c.len {
					o := p.at(out["o"], c.row+i, HV, hv, V)
					for e := range V {
						for d := range K {
							o[e] += qg[i][d] * p.In["h"][p.state(c, p.n("P"), hv, d, e)]
						}
						for j := range i + 1 {
							o[e] += a[i][j] * p.at(p.In["v_new"], c.row+j, HV, hv, V)[e]
						}
					}
				}
			}
		}
	}
	return out
}

func inner(x, y []float64) (sum float64) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

func (p *Plain) bwdPrepare() Tensors {
	H, HV, K, V := p.n("H"), p.n("HV"), p.n("K"), p.n("V")
	out := Tensors{"dAqk": p.tokens(HV, chunkTokens), "dv_local": p.tokens(HV, V), "dq_raw": p.tokens(HV, K), "w": p.tokens(HV, K), "u": p.tokens(HV, V)}
	for _, sequence := range p.pieces() {
		for _, c := range sequence {
			for hv := range HV {
				_, a := p.attention(c, hv)
				dout := p.rowsOf("dout", c, HV, hv, V)
				for i := range c.len {
					for j := range i + 1 {
						for e := range V {
							p.at(out["dv_local"], c.row+j, HV, hv, V)[e] += a[i][j] * dout[i][e]
						}
						if p.In["v_new"] != nil {
							p.at(out["dAqk"], c.row+i, HV, hv, chunkTokens)[j] = p.scale() * inner(dout[i], p.at(p.In["v_new"], c.row+j, HV, hv, V))
						}
					}
					if p.In["h"] != nil {
						for d := range K {
							for e := range V {
								p.at(out["dq_raw"], c.row+i, HV, hv, K)[d] += dout[i][e] * p.In["h"][p.state(c, p.n("P"), hv, d, e)]
							}
						}
					}
				}
				if p.In["A"] == nil {
					continue
				}
				X := p.lower("A", c, hv)
				kb := decayed(p.rowsOf("k", c, H, hv/(HV/H), K), p.gates(c, hv))
				for i := range c.len {
					for j := range i + 1 {
						f := X[i][j] * p.at(p.In["beta"], c.row+j, HV, hv, 1)[0]
						for d := range K {
							p.at(out["w"], c.row+i, HV, hv, K)[d] += f * kb[j][d]
						}
						for e := range V {
							p.at(out["u"], c.row+i, HV, hv, V)[e] += f * p.at(p.In["v"], c.row+j, HV, hv, V)[e]
						}
					}
				}
			}
		}
	}
	return out
}

func (p *Plain) stateGrad() Tensors {
	HV, K, V, NT := p.n("HV"), p.n("K"), p.n("V"), p.n("NT")
	out := Tensors{"dh": make([]float64, p.n("B")*NT*HV*K*V), "dv_scan": p.tokens(HV, V), "dh0": make([]float64, p.n("N")*HV*K*V)}
	for n, sequence := range p.pieces() {
		for hv := range HV {
			s := make([]float64, K*V)
			for i := range s {
				if p.In["dht"] != nil {
					s[i] = p.In["dht"][p.end(n, hv, i/V, i%V)]
				}
			}
			for m := len(sequence) - 1; m >= 0; m-- {
				c := sequence[m]
				qg, kg, all := p.carriers(c, hv)
				next := make([]float64, K*V)
				for i := range s {
					out["dh"][p.state(c, NT, hv, i/V, i%V)] = s[i]
					next[i] = all[i/V] * s[i]
				}
				for i := range c.len {
					w, dout := p.at(p.In["w"], c.row+i, HV, hv, K), p.at(p.In["dout"], c.row+i, HV, hv, V)
					local, dv := p.at(p.In["dv_local"], c.row+i, HV, hv, V), p.at(out["dv_scan"], c.row+i, HV, hv, V)
					for e := range V {
						dv[e] = local[e]
						for d := range K {
							dv[e] += kg[i][d] * s[d*V+e]
						}
						for d := range K {
							next[d*V+e] += p.scale()*qg[i][d]*dout[e] - w[d]*dv[e]
						}
					}
				}
				s = next
			}
			for i := range s {
				out["dh0"][p.end(n, hv, i/V, i%V)] = s[i]
			}
		}
	}
	return out
}

// finish has e, the error before beta, in place of u and w: dbeta = Tu.e with Tu = A^T dv, and F = -beta Tu v_new^T below the diagonal.
func (p *Plain) finish() Tensors {
	H, HV, K, V := p.n("H"), p.n("HV"), p.n("K"), p.n("V")
	kda := p.In["dAqk"] != nil
	x := p.delta()
	x.Channels = kda
	grad := Tensors{"dg": make([]float64, len(p.In["g"])), "dA_log": make([]float64, HV), "ddt_bias": make([]float64, HV*K)}
	if p.In["A_log"] == nil {
		grad["dA_log"] = nil
	}
	x.Squares = Tensors{"dA_log": make([]float64, HV), "ddt_bias": make([]float64, HV*K)}
	out := Tensors{"dq": p.tokens(H, K), "dk": p.tokens(H, K), "dv": p.tokens(HV, V), "dbeta": p.tokens(HV, 1), "dg": grad["dg"]}
	if !kda {
		out["dg"] = p.tokens(HV, 1)
	}
	inverseName := "A"
	if kda {
		inverseName = "Akk"
	}
	for _, sequence := range p.pieces() {
		for _, c := range sequence {
			for hv := range HV {
				h := hv / (HV / H)
				q, k, v, vn := p.rowsOf("q", c, H, h, K), p.rowsOf("k", c, H, h, K), p.rowsOf("v", c, HV, hv, V), p.rowsOf("v_new", c, HV, hv, V)
				g := p.gates(c, hv)
				if kda {
					x.In["q"], x.In["k"], x.In["v"] = p.In["q"], p.In["k"], p.In["v"]
					g = nil
					for i := range c.len {
						g = append(g, make([]float64, K))
						copy(g[i], x.token(c.row+i, hv).g)
					}
					g = cumulate(g, K)
				}
				X, KK, kb := p.lower(inverseName, c, hv), pairs(k, k, g, false), decayed(k, g)
				var P, dO [][]float64
				if kda {
					P = p.lower("dAqk", c, hv)
				} else {
					dO = p.rowsOf("dout", c, HV, hv, V)
					for i := range c.len {
						P = append(P, make([]float64, c.len))
						for j := range i + 1 {
							P[i][j] = p.scale() * inner(dO[i], vn[j])
						}
					}
				}
				state := func(name string, d, e int) float64 { return p.In[name][p.state(c, p.n("P"), hv, d, e)] }
				dg := make([][]float64, c.len)
				add := func(i, d int, x float64) { dg[i][d] += x }
				m := make([][]float64, c.len)
				for i := range c.len {
					dg[i], m[i] = make([]float64, K), make([]float64, V)
				}
				for i := range c.len {
					beta, dbeta := p.at(p.In["beta"], c.row+i, HV, hv, 1)[0], 0.0
					for e := range V {
						tu, err := 0.0, v[i][e]
						for j := i; j < c.len; j++ {
							tu += X[j][i] * p.at(p.In["dv_scan"], c.row+j, HV, hv, V)[e]
						}
						for d := range K {
							err -= kb[i][d] * state("h", d, e)
						}
						for j := range i {
							err -= KK[i][j] * vn[j][e]
						}
						dbeta += tu * err
						m[i][e] = -beta * tu
						p.at(out["dv"], c.row+i, HV, hv, V)[e] = beta * tu
					}
					if p.Numbers["beta_sigmoid"] != 0 {
						most := 1 + p.Numbers["neg_eigval"]
						dbeta *= beta * (1 - beta/most)
					}
					p.at(out["dbeta"], c.row+i, HV, hv, 1)[0] = dbeta
				}
				F := make([][]float64, c.len)
				for i := range F {
					for j := range i {
						F[i] = append(F[i], inner(m[i], vn[j]))
					}
				}
				for d := range K {
					for i := range c.len {
						b := decay(g, d, 0, i+1)
						gs, ms, vd := 0.0, 0.0, 0.0
						for e := range V {
							if !kda {
								gs += dO[i][e] * state("h", d, e)
							}
							ms += m[i][e] * state("h", d, e)
							vd += vn[i][e] * state("dh", d, e)
						}
						if kda {
							gs = p.at(p.In["dq_raw"], c.row+i, HV, hv, K)[d]
						}
						dq, dk, behind := p.scale()*b*gs, b*ms, decay(g, d, i+1, c.len)*vd
						for t := range i + 1 {
							add(t, d, q[i][d]*dq+k[i][d]*dk)
						}
						for t := i + 1; t < c.len; t++ {
							add(t, d, k[i][d]*behind)
						}
						p.at(out["dq"], c.row+i, H, h, K)[d] += dq + P[i][i]*k[i][d]
						p.at(out["dk"], c.row+i, H, h, K)[d] += dk + behind + P[i][i]*q[i][d]
						for j := range i {
							f, gam := F[i][j], decay(g, d, j+1, i+1)
							p.at(out["dq"], c.row+i, H, h, K)[d] += P[i][j] * k[j][d] * gam
							p.at(out["dk"], c.row+i, H, h, K)[d] += f * k[j][d] * gam
							u := (P[i][j]*q[i][d] + f*k[i][d]) * gam
							p.at(out["dk"], c.row+j, H, h, K)[d] += u
							for t := j + 1; t <= i; t++ {
								add(t, d, u*k[j][d])
							}
						}
					}
					z := 0.0
					for e := range V {
						z += state("h", d, e) * state("dh", d, e)
					}
					for t := range c.len {
						add(t, d, decay(g, d, 0, c.len)*z)
					}
				}
				for i := range c.len {
					if kda {
						if p.In["g"] != nil {
							x.token(c.row+i, hv).gateBackward(grad, dg[i])
						}
						continue
					}
					for d := range K {
						p.at(out["dg"], c.row+i, HV, hv, 1)[0] += dg[i][d]
					}
				}
			}
		}
	}
	for _, name := range []string{"q", "k"} {
		if p.In[name+"_rstd"] == nil {
			continue
		}
		first, length := p.Sequences()
		for n := range first {
			for at := first[n] * H; at < (first[n]+length[n])*H; at++ {
				y, dy := p.In[name][at*K:][:K], out["d"+name][at*K:][:K]
				sum := inner(y, dy)
				for d := range dy {
					dy[d] = p.In[name+"_rstd"][at] * (dy[d] - sum*y[d])
				}
			}
		}
	}
	out["dA_log"], out["ddt_bias"] = grad["dA_log"], grad["ddt_bias"]
	return out
}
