package conform

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
)

// data makes the values of an input. It depends on the case's name and the input's only, so both operators of a case see the same.
func (c *Case) data(name string, shape []int64) []float64 {
	n := int64(1)
	for _, s := range shape {
		n *= s
	}
	h := fnv.New64a()
	fmt.Fprint(h, c.dataName(), " ", name)
	r := rand.New(rand.NewPCG(Seed, h.Sum64()))
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	switch name {
	case "q", "k":
		c.keys(x, name, shape, r)
	case "g", "gk", "gv":
		c.gates(x, name, r)
	case "beta":
		c.betas(x, r)
	case "A_log":
		for i := range x {
			x[i] = math.Log(1 + 15*r.Float64())
		}
	case "cu_seqlens":
		for i := range x {
			x[i] = float64(c.Cu[i])
		}
	}
	return x
}

// Seed is that of all random data; failures print it.
const Seed = 42

func (c *Case) keys(x []float64, name string, shape []int64, r *rand.Rand) {
	if c.Flags["qk_l2norm"] != 0 {
		if c.Keys == tiny { // of the size of the norm's epsilon, and one of them 0
			for i := range x {
				x[i] *= 1e-3 * float64(min(i/int(shape[3]), 1))
			}
		}
		return // else of any length
	}
	row, width := int(shape[2]*shape[3]), int(shape[3])
	if name == "k" && c.Keys != unit {
		for i := row; i < len(x); i++ {
			x[i] = x[i%row]
			if c.Keys == collinear {
				x[i] += 1e-2 * r.NormFloat64()
			}
		}
	}
	for key := range slices.Chunk(x, width) {
		sum := 1e-30
		for _, a := range key {
			sum += a * a
		}
		for i := range key {
			key[i] /= math.Sqrt(sum)
		}
	}
}

func (c *Case) gates(x []float64, name string, r *rand.Rand) {
	if name == "g" && c.Flags["gate"] != 0 {
		if c.Gate == mixed { // raw gates where softplus is 0 or x to the last bit
			for i := range x {
				x[i] = []float64{math.Inf(-1), -100, -30, -17, 0, 30}[r.IntN(6)]
			}
		}
		return
	}
	regime := c.Gate
	if name != "g" && !slices.Contains([]Gate{zero, resets, strong}, regime) {
		regime = mild
	}
	for i := range x {
		switch regime {
		case mild:
			x[i] = -math.Log1p(math.Exp(-r.Float64()))
		case weak:
			x[i] = -math.Log1p(math.Exp(-x[i])) / 16
		case wide:
			x[i] = -100 * math.Log1p(math.Exp(-x[i]))
		case zero:
			x[i] = 0
		case strong:
			x[i] = -20
		case five:
			x[i] = -5
		case wiping:
			x[i] = -1000
		case resets:
			x[i] = -math.Abs(x[i])
			if r.IntN(8) == 0 {
				x[i] = math.Inf(-1)
			}
		case mixed:
			x[i] = -60 * float64(r.IntN(2))
		case perHead:
			head := i
			if c.Family == kda && name == "g" {
				head = i / c.K
			}
			x[i] = []float64{-0.01, -3, -0.3}[head%c.HV%3]
		default:
			panic("conform: no gate regime " + string(regime))
		}
	}
}

func (c *Case) betas(x []float64, r *rand.Rand) {
	if c.Flags["beta_sigmoid"] != 0 {
		return // logits
	}
	for i := range x {
		switch c.Beta {
		case sigmoid:
			x[i] = 1 / (1 + math.Exp(-x[i]))
		case toTwo:
			x[i] = 2 * r.Float64()
		case one:
			x[i] = 1
		case oneNine:
			x[i] = 1.9
		case zeroBeta:
			x[i] = 0
		default:
			panic("conform: no beta regime " + string(c.Beta))
		}
	}
}

func (c *Case) dataName() string {
	if c.Data != "" {
		return c.Data
	}
	return c.String()
}
