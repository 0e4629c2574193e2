package oracle

import "math"

var gateReferences = map[string]func(p *Plain) Tensors{
	"gate_fwd": gateForward, "gate_bwd": gateBackward, "norm_fwd": normForward, "norm_bwd": normBackward,
}

// gate is one number of a gate and its derivatives by the raw gate and by A_log.
func (p *Plain) gate(at int, g float64) (y, dx, dA float64) {
	K, HV := int(p.Size["K"]), int(p.Size["HV"])
	h, k := at/K%HV, at%K
	a, x := 1., g
	if A := p.In["A_log"]; A != nil {
		a = math.Exp(A[h])
	}
	if bias := p.In["dt_bias"]; bias != nil {
		x += bias[h*K+k]
	}
	switch p.Numbers["gate"] {
	case 1:
		sp := softplus(x)
		if sp == 0 {
			return 0, 0, 0
		}
		return -a * sp, -a * sigmoid(x), -a * sp
	case 2:
		bound, u := p.Numbers["bound"], a*x
		d := bound * sigmoid(u) * sigmoid(-u)
		if d == 0 {
			return bound * sigmoid(u), 0, 0
		}
		return bound * sigmoid(u), d * a, d * a * x
	}
	return g, 1, 0
}

// chunks calls f with the elements of one column and chunk, first to last in the order of the sum; without a sum every element is a chunk.
func (p *Plain) chunks(f func(elements []int)) {
	columns, chunk := int(p.Size["HV"]*p.Size["K"]), int(p.Numbers["chunk"])
	first, length := p.Sequences()
	for n := range first {
		for c := range columns {
			var list []int
			for t := range length[n] {
				if t > 0 && (chunk == 0 || t%chunk == 0) {
					f(list)
					list = nil
				}
				list = append(list, (first[n]+t)*columns+c)
				if p.Numbers["reverse"] != 0 { // the latest first
					copy(list[1:], list)
					list[0] = (first[n]+t)*columns + c
				}
			}
			f(list)
		}
	}
}

func (p *Plain) factor() float64 {
	if scale := p.Numbers["scale"]; scale != 0 {
		return scale
	}
	return 1
}

func gateForward(p *Plain) Tensors {
	y := make([]float64, len(p.In["g"]))
	p.chunks(func(elements []int) {
		sum := 0.
		for _, i := range elements {
			v, _, _ := p.gate(i, p.In["g"][i])
			sum += v
			y[i] = sum * p.factor()
		}
	})
	return Tensors{"y": y}
}

func gateBackward(p *Plain) Tensors {
	K, HV := int(p.Size["K"]), int(p.Size["HV"])
	grad := Tensors{"dg": make([]float64, len(p.In["g"])), "dA_log": make([]float64, HV), "ddt_bias": make([]float64, HV*K)}
	p.chunks(func(elements []int) {
		sum := 0.
		for j := len(elements) - 1; j >= 0; j-- {
			i := elements[j]
			sum += p.In["dout"][i] * p.factor()
			_, dx, dA := p.gate(i, p.In["g"][i])
			if sum == 0 { // the derivatives may be infinite there
				continue
			}
			grad["dg"][i] = sum * dx
			grad["ddt_bias"][i%(HV*K)] += sum * dx
			grad["dA_log"][i/K%HV] += sum * dA
		}
	})
	return grad
}

// normRow is a row before weight and gate, and the factor that made it.
func (p *Plain) normRow(row int) (y []float64, r float64) {
	K := int(p.Size["K"])
	x := p.In["x"][row*K:][:K]
	sum := 0.
	for _, xi := range x {
		sum += xi * xi
	}
	if p.Numbers["mean"] != 0 {
		sum /= float64(K)
	}
	r = 1 / math.Sqrt(sum+p.Numbers["eps"])
	for _, xi := range x {
		y = append(y, xi*r)
	}
	return y, r
}

// activation is that of z at an element, with its derivative.
func (p *Plain) activation(i int) (act, d float64) {
	switch p.Numbers["activation"] {
	case 1:
		z := p.In["z"][i]
		return z * sigmoid(z), sigmoid(z) + z*sigmoid(z)*sigmoid(-z)
	case 2:
		z := p.In["z"][i]
		return sigmoid(z), sigmoid(z) * sigmoid(-z)
	}
	return 1, 0
}

func (p *Plain) normWeight(k int) float64 {
	if w := p.In["weight"]; w != nil {
		return w[k]
	}
	return 1
}

func normForward(p *Plain) Tensors {
	var out []float64
	for row := range len(p.In["x"]) / int(p.Size["K"]) {
		y, _ := p.normRow(row)
		for k := range y {
			act, _ := p.activation(len(out))
			out = append(out, y[k]*p.normWeight(k)*act)
		}
	}
	return Tensors{"y": out}
}

func normBackward(p *Plain) Tensors {
	K := int(p.Size["K"])
	grad := Tensors{"dx": make([]float64, len(p.In["x"])), "dz": make([]float64, len(p.In["x"])), "dweight": make([]float64, K)}
	for row := range len(p.In["x"]) / K {
		y, r := p.normRow(row)
		u, dot := make([]float64, K), 0. // gradient of y, and its product with it
		for k := range y {
			i := row*K + k
			act, dact := p.activation(i)
			g := p.In["dout"][i]
			grad["dweight"][k] += g * y[k] * act
			grad["dz"][i] = g * y[k] * p.normWeight(k) * dact
			u[k] = g * p.normWeight(k) * act
			dot += u[k] * y[k]
		}
		if p.Numbers["mean"] != 0 {
			dot /= float64(K)
		}
		for k := range y {
			grad["dx"][row*K+k] = r * (u[k] - dot*y[k])
		}
	}
	return grad
}
