package oracle

var convReferences = map[string]func(p *Plain) Tensors{"conv_fwd": convForward, "conv_bwd": convBackward}

// convolution is one channel of one sequence, with the inputs before its first token at its beginning.
type convolution struct {
	in       []float64 // S from the state, then the tokens'
	at       []int     // where each element lies in x (from S on) or the state
	weight   []float64
	bias     float64
	S        int
	dilation int
}

// each calls f for every channel of every sequence.
func (p *Plain) each(f func(c *convolution, n, d int)) {
	D, W, S := int(p.Size["D"]), int(p.Size["W"]), int(p.Size["S"])
	first, length := p.Sequences()
	for n := range first {
		for d := range D {
			c := &convolution{weight: p.In["weight"][d*W:][:W], S: S, dilation: int(p.Numbers["dilation"])}
			if bias := p.In["bias"]; bias != nil {
				c.bias = bias[d]
			}
			for j := range S {
				at, x := (n*D+d)*S+j, 0.
				if h0 := p.In["initial_state"]; h0 != nil {
					x = h0[at]
				}
				c.in, c.at = append(c.in, x), append(c.at, at)
			}
			for t := range length[n] {
				at := (first[n]+t)*D + d
				c.in, c.at = append(c.in, p.In["x"][at]), append(c.at, at)
			}
			f(c, n, d)
		}
	}
}

// tap is where tap w of element i reads; negative: before everything that is known, where all is zero.
func (c *convolution) tap(i, w int) int { return i - (len(c.weight)-1-w)*c.dilation }

func (c *convolution) z(i int) float64 {
	z := c.bias
	for w := range c.weight {
		if j := c.tap(i, w); j >= 0 {
			z += c.weight[w] * c.in[j]
		}
	}
	return z
}

func convForward(p *Plain) Tensors {
	D, S := int(p.Size["D"]), int(p.Size["S"])
	out := Tensors{"y": make([]float64, len(p.In["x"])), "final_state": make([]float64, int(p.Size["N"])*D*S)}
	p.each(func(c *convolution, n, d int) {
		for i := c.S; i < len(c.in); i++ {
			y := c.z(i)
			if p.Numbers["silu"] != 0 {
				y *= sigmoid(y)
			}
			if residual := p.In["residual"]; residual != nil {
				y += residual[c.at[i]]
			}
			out["y"][c.at[i]] = y
		}
		copy(out["final_state"][(n*D+d)*S:], c.in[len(c.in)-S:])
	})
	return out
}

func convBackward(p *Plain) Tensors {
	D, W, S := int(p.Size["D"]), int(p.Size["W"]), int(p.Size["S"])
	grad := Tensors{"dx": make([]float64, len(p.In["x"])), "dweight": make([]float64, D*W), "dbias": make([]float64, D), "dh0": make([]float64, int(p.Size["N"])*D*S)}
	grad["dresidual"] = make([]float64, len(p.In["x"]))
	p.each(func(c *convolution, n, d int) {
		din := make([]float64, len(c.in))
		if dht := p.In["dht"]; dht != nil {
			copy(din[len(din)-S:], dht[(n*D+d)*S:][:S])
		}
		for i := c.S; i < len(c.in); i++ {
			dz := p.In["dout"][c.at[i]]
			grad["dresidual"][c.at[i]] = dz
			if p.Numbers["silu"] != 0 {
				z := c.z(i)
				dz *= sigmoid(z) + z*sigmoid(z)*sigmoid(-z)
			}
			grad["dbias"][d] += dz
			for w := range c.weight {
				if j := c.tap(i, w); j >= 0 {
					grad["dweight"][d*W+w] += dz * c.in[j]
					din[j] += dz * c.weight[w]
				}
			}
		}
		for i, x := range din {
			if i < S {
				grad["dh0"][c.at[i]] = x
			} else {
				grad["dx"][c.at[i]] = x
			}
		}
	})
	return grad
}
