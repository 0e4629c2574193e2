package oracle

import "strings"

// summaries are the references of the state summaries: the recurrence itself, with a state that has K more columns.
var summaries = map[string]func(p *Plain) Tensors{
	"summary_fwd":         (*Plain).mapForward,
	"summary_grad":        (*Plain).mapGradient,
	"summary_bwd":         (*Plain).mapBackward,
	"kda_summary_fwd":     (*Plain).mapForward,
	"kda_summary_grad":    (*Plain).mapGradient,
	"kda_summary_bwd":     (*Plain).mapBackward,
	"summary_merge":       func(p *Plain) Tensors { return Tensors{"out": p.chain(int(p.Size["V"]), p.In["state"])} },
	"summary_compose":     func(p *Plain) Tensors { return Tensors{"map": p.chain(p.wide(), nil)} },
	"summary_merge_bwd":   func(p *Plain) Tensors { return p.chainBackward(int(p.Size["V"]), p.In["state"], p.In["dout"]) },
	"summary_compose_bwd": func(p *Plain) Tensors { return p.chainBackward(p.wide(), nil, p.In["dmap"]) },
}

func (p *Plain) mapForward() Tensors { return Tensors{"map": p.widened().Forward()["final_state"]} }

func (p *Plain) mapGradient() Tensors {
	g := p.widened()
	g.In["dout"] = make([]float64, len(g.In["v"]))
	g.In["dht"] = p.In["dmap"]
	out := g.Backward()
	out["dv"] = columns(out["dv"], g.V, g.V-g.K)
	return out
}

func (p *Plain) mapBackward() Tensors {
	g := p.widened()
	g.In["dht"] = g.In["initial_state"]
	return Tensors{"map": g.Backward()["dh0"]}
}

func (p *Plain) wide() int { return int(p.Size["K"] + p.Size["V"]) }

// delta is the call of the composite that has this call's inputs.
func (p *Plain) delta() *GDN {
	n := func(letter string) int { return int(p.Size[letter]) }
	on := func(name string) bool { return p.Numbers[name] != 0 }
	g := &GDN{Channels: strings.HasPrefix(p.Op, "kda_"), LowerBound: p.Numbers["lower_bound"], B: n("B"), T: n("T"), H: n("H"), HV: n("HV"), K: n("K"), V: n("V"), Cu: p.Cu, Scale: p.Numbers["scale"], L2Norm: on("qk_l2norm"), Gate: on("gate"),
		BetaSigmoid: on("beta_sigmoid"), NegEigval: on("neg_eigval"), In: Tensors{}}
	for name, x := range p.In {
		g.In[name] = x
	}
	return g
}

// widened is that call with K more value columns: zero in v and dout, and in the state at first the identity.
func (p *Plain) widened() *GDN {
	g := p.delta()
	V, K := g.V, g.K
	g.V = V + K
	for _, name := range []string{"v", "dout"} {
		wide := make([]float64, g.B*g.T*g.HV*g.V)
		for i := range g.B * g.T * g.HV {
			copy(wide[i*g.V:][:V], p.In[name][min(i*V, len(p.In[name])):])
		}
		g.In[name] = wide
	}
	if g.In["q"] == nil { // reads nothing that is asked for
		g.In["q"] = g.In["k"]
	}
	N := int(p.Size["N"])
	g.In["initial_state"] = make([]float64, N*g.HV*K*g.V)
	for i := range N * g.HV * K {
		g.In["initial_state"][i*g.V+V+i%K] = 1
	}
	return g
}

// columns keeps the first n of each row of x.
func columns(x []float64, width, n int) []float64 {
	var out []float64
	for i := 0; i < len(x); i += width {
		out = append(out, x[i:i+n]...)
	}
	return out
}

// link is one map of a chain at one batch entry and head.
type link struct {
	s, m      []float64
	r         int // its place among the maps
	transpose bool
}

func (l *link) at(i, j, K int) float64 {
	if l.transpose {
		i, j = j, i
	}
	return l.m[i*K+j]
}

// links are the maps of head bh, in the order in which they act.
func (p *Plain) links(bh int) []link {
	K, V, R, heads := int(p.Size["K"]), int(p.Size["V"]), int(p.Size["R"]), int(p.Size["B"]*p.Size["HV"])
	var list []link
	for i := range R {
		r := i
		if p.Numbers["reverse"] != 0 {
			r = R - 1 - i
		}
		at := r*heads + bh
		list = append(list, link{p.In["s"][at*K*V:][:K*V], p.In["m"][at*K*K:][:K*K], r, p.Numbers["transpose"] != 0})
	}
	return list
}

// states are those before each map and behind the last, of W columns: from the given one, or of a composition from [0, identity].
func (p *Plain) states(bh, W int, first []float64) [][]float64 {
	K, V := int(p.Size["K"]), int(p.Size["V"])
	x := make([]float64, K*W)
	if first != nil {
		copy(x, first[bh*K*W:])
	} else if W > V {
		for i := range K {
			x[i*W+V+i] = 1
		}
	}
	all := [][]float64{x}
	for _, l := range p.links(bh) {
		y := make([]float64, K*W)
		for i := range K {
			copy(y[i*W:][:V], l.s[i*V:][:V])
			for d := range K {
				for j := range W {
					y[i*W+j] += l.at(i, d, K) * x[d*W+j]
				}
			}
		}
		all, x = append(all, y), y
	}
	return all
}

func (p *Plain) chain(W int, first []float64) []float64 {
	var out []float64
	for bh := range int(p.Size["B"] * p.Size["HV"]) {
		states := p.states(bh, W, first)
		out = append(out, states[len(states)-1]...)
	}
	return out
}

func (p *Plain) chainBackward(W int, first, dout []float64) Tensors {
	K, V, heads := int(p.Size["K"]), int(p.Size["V"]), int(p.Size["B"]*p.Size["HV"])
	out := Tensors{"ds": make([]float64, len(p.In["s"])), "dm": make([]float64, len(p.In["m"]))}
	for bh := range heads {
		states, links := p.states(bh, W, first), p.links(bh)
		d := append([]float64{}, dout[bh*K*W:][:K*W]...)
		for n := len(links) - 1; n >= 0; n-- {
			l, before := links[n], make([]float64, K*W)
			at := l.r*heads + bh
			for i := range K {
				copy(out["ds"][(at*K+i)*V:][:V], d[i*W:])
				for e := range K {
					to := &out["dm"][at*K*K+i*K+e]
					if l.transpose {
						to = &out["dm"][at*K*K+e*K+i]
					}
					for j := range W {
						*to += d[i*W+j] * states[n][e*W+j]
						before[e*W+j] += l.at(i, e, K) * d[i*W+j]
					}
				}
			}
			d = before
		}
		out["dstate"] = append(out["dstate"], d...)
	}
	return out
}
