package ascendc

import (
	"fmt"
	"os"
	"testing"

	"libgdn/core"
	"libgdn/core/conform"
)

// chunkCases have sizes that all of the vendors' chunk operators take. short keeps every fourth.
func chunkCases(d core.DType, short bool, change func(c *conform.Case)) []*conform.Case {
	var list []*conform.Case
	n := int(d) // so that a short run has other cases for other dtypes
	add := func(name string, set func(c *conform.Case)) {
		always := name == "g=-inf" || name == "scale" || name == "packed/[0 5 5 9]"
		if n++; short && n%4 != 1 && !always {
			return
		}
		c := &conform.Case{Name: name, B: 1, T: 70, H: 1, HV: 2, K: 128, V: 128, IO: d, Aux: core.F32, H0: true, Dht: true, Skew: n % 16}
		set(c)
		change(c)
		list = append(list, c)
	}
	for i, T := range []int{1, 15, 64, 65, 129, 200} {
		add(fmt.Sprintf("T=%d", T), func(c *conform.Case) { c.T, c.B, c.H, c.HV = T, 1+i%2, 1+i%3, (1+i%3)*(1+i%2) })
	}
	for _, g := range []conform.Gate{"none", "weak", "0", "by head", "-20", "-inf", "wide"} {
		add("g="+string(g), func(c *conform.Case) { c.Gate = g })
	}
	for _, b := range []conform.Beta{"none", "1", "0"} {
		add("beta="+string(b), func(c *conform.Case) { c.Beta = b })
	}
	for i, cu := range [][]int{{0, 70}, {0, 5, 5, 9}, {0, 0, 1, 2, 70, 70}, {0, 64, 128}, {0, 40, 89}, {0, 0}, {0}, {0, 3, 9, 9, 9, 100}} {
		add(fmt.Sprintf("packed/%v", cu), func(c *conform.Case) {
			c.Cu, c.Cu32, c.H, c.HV = cu, i%2 == 0, 1, 2
			c.T = cu[len(cu)-1] + i%3*2
			c.H0 = i%4 != 1
		})
	}
	add("empty", func(c *conform.Case) { c.T = 0 })
	add("aux as io", func(c *conform.Case) { c.Aux = d })
	add("no h0", func(c *conform.Case) { c.H0 = false })
	add("no final state", func(c *conform.Case) { c.Unwanted = []string{"final_state"} })
	add("V first", func(c *conform.Case) { c.Flags = map[string]float64{"state_v_first": 1} })
	add("scale", func(c *conform.Case) { c.Flags = map[string]float64{"scale": 0.3} })
	for _, lie := range []string{"null strides", "heads first", "stride 2", "fused rows", "broadcast"} {
		add("layout "+lie, func(c *conform.Case) { c.Lie(lie) })
	}
	return list
}

func without(names ...string) func(c *conform.Case) {
	return func(c *conform.Case) { c.Unwanted = append(c.Unwanted, names...) }
}

func TestStockForward(t *testing.T) {
	d := newNPU(t)
	defer only(t, flaForward, flaStagesForward)()
	conform.RunOn(t, d, chunkCases(core.BF16, testing.Short(), without("tape")), false)
	d.settled()
}

func TestStockRecurrent(t *testing.T) { recurrent(t, flaRecurrent, "") }
func TestFLARecurrent(t *testing.T)   { recurrent(t, stockRecurrent, "") }

func recurrent(t *testing.T, not *path, family conform.Family) {
	d := newNPU(t)
	defer only(t, not)()
	list := chunkCases(core.BF16, testing.Short(), func(c *conform.Case) {
		c.Recurrent, c.Family, c.GK = true, family, c.Skew%2 == 0 && family == ""
		c.T = min(c.T, 8)
		if c.Cu != nil {
			last := 0
			for i := range c.Cu {
				c.Cu[i] = min(c.Cu[i], last+8)
				last = c.Cu[i]
			}
			c.T = last + c.T%3
		}
		if c.Skew%3 == 0 {
			if c.K, c.V = 64, 96; family == kda {
				c.K, c.V = 128, 256
			}
		}
		c.Unwanted = append(c.Unwanted, "tape")
	})
	conform.RunOn(t, d, list, false)
	d.settled()
}

func TestFLAComposite(t *testing.T) {
	d := newNPU(t)
	d.chip("Ascend950PR_9599")
	for _, kind := range []core.DType{core.BF16, core.F16} {
		conform.RunOn(t, d, chunkCases(kind, testing.Short(), func(c *conform.Case) {}), kind == core.BF16)
	}
	d.settled()
}

func TestFLAStages(t *testing.T) {
	d := newNPU(t)
	defer only(t, flaForward, flaBackward, stockForward)()
	change := func(c *conform.Case) {}
	if old() { // which has no gradients of states
		change = func(c *conform.Case) { c.Dht, c.Unwanted = false, append(c.Unwanted, "dh0") }
	}
	for _, kind := range []core.DType{core.BF16, core.F16} {
		conform.RunOn(t, d, chunkCases(kind, testing.Short(), change), true)
	}
	d.settled()
}

const kda conform.Family = "kda_"

// bounded gives the gate from a lower bound, which is what backward there is takes.
func bounded(c *conform.Case) {
	c.Family, c.Dht = kda, false
	if c.Flags == nil {
		c.Flags = map[string]float64{}
	}
	c.Flags["gate"], c.Flags["lower_bound"], c.Bias = 1, -5, c.Skew%2 == 0
	switch c.Skew % 4 {
	case 1:
		c.Flags["qk_l2norm"] = 1
	case 2:
		c.Flags["qk_l2norm"], c.Flags["beta_sigmoid"] = 1, 1
	case 3:
		c.Flags["beta_sigmoid"], c.Flags["neg_eigval"] = 1, 1
	}
	if c.Gate == "none" {
		c.Gate = ""
	}
	if c.Beta == "none" {
		delete(c.Flags, "beta_sigmoid")
		delete(c.Flags, "neg_eigval")
	}
}

func TestKDA(t *testing.T) {
	d := newNPU(t)
	d.chip("Ascend950PR_9599")
	conform.RunOn(t, d, chunkCases(core.BF16, testing.Short(), bounded), true)
	d.chip("Ascend910B2")
	conform.RunOn(t, d, chunkCases(core.BF16, testing.Short(), func(c *conform.Case) {
		c.Family = kda
		if c.Skew%3 == 0 && c.Gate != "none" {
			c.Flags, c.Bias = map[string]float64{"gate": 1}, true // the other gate
		}
	}), false)
	d.settled()
}

func TestKDAOlder(t *testing.T) {
	d := newNPU(t)
	defer only(t, kdaForward)()
	for _, kind := range []core.DType{core.BF16, core.F16} {
		conform.RunOn(t, d, chunkCases(kind, testing.Short(), func(c *conform.Case) {
			c.Family = kda
			c.Unwanted = append(c.Unwanted, "h")
			if c.Skew%4 == 0 {
				c.K, c.V = 64, 64
			}
		}), false)
	}
	d.settled()
}

func TestKDARecurrent(t *testing.T) { recurrent(t, nil, kda) }

func TestSummaries(t *testing.T) {
	d := newNPU(t)
	wide := map[string]int64{"K": 128, "V": 128}
	for _, op := range []string{"summary_fwd", "summary_bwd"} {
		conform.RunPlainOn(t, d, op, wide, core.BF16)
	}
	conform.RunPlainOn(t, d, "kda_summary_fwd", wide, core.BF16)
	d.chip("Ascend950PR_9599")
	conform.RunPlainOn(t, d, "kda_summary_bwd", wide, core.BF16)
	d.ratio = 1e-5
	conform.RunPlainOn(t, d, "summary_merge", nil, core.F32)
	d.settled()
}

// TestOldGeneration repeats them on CANN 8.3 with fla-npu as of August 2026: fewer symbols, other argument lists and layouts.
func TestOldGeneration(t *testing.T) {
	if old() || testing.Short() {
		t.Skip("this is it, or it is not asked for")
	}
	for _, test := range []string{"TestStockRecurrent", "TestFLARecurrent", "TestFLAStages", "TestKDAOlder", "TestKDARecurrent"} {
		t.Run(test, func(t *testing.T) { again(t, test, "GDN_TEST_CANN=cann-old") })
	}
}

func old() bool { return os.Getenv("GDN_TEST_CANN") == "cann-old" }

// only takes paths out of the table until the function that it returns is called.
func only(t *testing.T, not ...*path) func() {
	saved := map[string][]*path{}
	for op, list := range paths {
		saved[op] = list
		var rest []*path
	next:
		for _, p := range list {
			for _, n := range not {
				if p == n {
					continue next
				}
			}
			rest = append(rest, p)
		}
		paths[op] = rest
	}
	return func() { paths = saved }
}
