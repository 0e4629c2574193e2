package oracle

import "math"

var pagedReferences = map[string]func(p *Plain) Tensors{"decode": decode}

// decode returns o, final_state, and the pool: NaN where it stays as it was.
func decode(p *Plain) Tensors {
	size := func(letter string) int { return int(p.Size[letter]) }
	on := func(name string) bool { return p.Numbers[name] != 0 }
	T, HV, K, V := size("T"), size("HV"), size("K"), size("V")
	rows := size("B") * T
	// Both kinds of decay as one per key channel.
	x := &GDN{B: size("B"), T: T, H: size("H"), HV: HV, K: K, V: V, Cu: p.Cu, Scale: p.Numbers["scale"], L2Norm: on("qk_l2norm"),
		BetaSigmoid: on("beta_sigmoid"), NegEigval: on("neg_eigval"), StateVFirst: on("state_v_first"),
		In: Tensors{"q": p.In["q"], "k": p.In["k"], "v": p.In["v"], "initial_state": p.In["pool"]}}
	if p.In["beta"] != nil {
		x.In["beta"] = p.In["beta"]
	}
	if p.In["g"] != nil {
		x.In["gk"] = make([]float64, rows*HV*K)
		for i := range x.In["gk"] {
			x.In["gk"][i] = p.logDecay(i/K, i%K, HV, K, rows)
		}
	}
	pool := make([]float64, len(p.In["pool"]))
	for i := range pool {
		pool[i] = math.NaN()
	}
	first, length := p.Sequences()
	out := Tensors{"o": make([]float64, rows*HV*V), "final_state": make([]float64, len(first)*HV*K*V), "pool": pool}
	slots, R := p.In["ssm_state_indices"], size("R")
	for n := range first {
		from := n
		if slots != nil {
			accepted := 1
			if p.In["num_accepted_tokens"] != nil {
				accepted = int(p.In["num_accepted_tokens"][n])
			}
			from = int(slots[n*R+accepted-1])
		}
		if from < 0 {
			continue
		}
		for hv := range HV {
			s := make([]float64, K*V)
			x.readState(s, "initial_state", from, hv)
			for t := range length[n] {
				token, after := x.token(first[n]+t, hv), make([]float64, K*V)
				token.step(s, after, nil)
				token.read(after, token.scale, out["o"][token.at*V:][:V])
				s = after
				to := n
				if slots != nil {
					to = int(slots[n*R+t])
				}
				if on("in_place") && to >= 0 {
					x.writeState(s, pool, to, hv)
				}
			}
			x.writeState(s, out["final_state"], n, hv)
		}
	}
	return out
}

// logDecay is that of channel i in row and head at, after the gate.
func (p *Plain) logDecay(at, i, HV, K, rows int) float64 {
	hv, width := at%HV, len(p.In["g"])/(rows*HV)
	if width == 1 {
		i = 0
	}
	g := p.In["g"][at*width+i]
	if p.Numbers["gate"] == 0 {
		return g
	}
	if p.In["dt_bias"] != nil {
		g += p.In["dt_bias"][hv*width+i]
	}
	amplitude := 1.
	if p.In["A_log"] != nil {
		amplitude = math.Exp(p.In["A_log"][hv])
	}
	if bound := p.Numbers["lower_bound"]; bound < 0 {
		return bound / (1 + math.Exp(-amplitude*g))
	}
	return -amplitude * softplus(g)
}
