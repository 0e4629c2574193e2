package conform

import (
	"fmt"
	"math/rand/v2"

	"libgdn/core"
)

func convCases(short bool) []*solo {
	var list []*solo
	for _, op := range []string{"conv_fwd", "conv_bwd"} {
		fresh := func() solo {
			return solo{Op: op, Size: map[string]int64{"B": 2, "T": 41, "D": 37, "W": 4}, IO: core.F32, Aux: core.F32,
				Numbers: map[string]float64{"silu": 1, "dilation": 1}}
		}
		add := func(name string, change func(c *solo)) {
			c := fresh()
			c.Name = name
			change(&c)
			if _, given := c.Numbers["state_len"]; !given {
				c.Numbers["state_len"] = float64(c.Size["W"]-1) * c.Numbers["dilation"]
			}
			list = append(list, &c)
		}
		everything := []string{"bias", "residual", "initial_state", "dht"}
		full := fresh()
		full.Give, full.Numbers["state_len"] = everything, 4
		list = append(list, everywhere(full, short)...)
		// Channels or tokens side by side, in and out
		for _, size := range [][3]int64{{2, 70, 64}, {1, 130, 300}, {3, 16, 5}} {
			for i, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
				if i > 0 && short {
					continue
				}
				for _, lie := range []layout{compact, across} {
					add(fmt.Sprintf("%v/%s", size, lie), func(c *solo) {
						c.Size["B"], c.Size["T"], c.Size["D"] = size[0], size[1], size[2]
						c.IO, c.Give = d, everything[:2]
						c.Layouts = map[string]layout{"x": lie, "residual": lie, "dout": lie, "y": compact, "weight": across}
						if size[0] == 1 {
							c.Layouts["y"], c.Layouts["dx"] = lie, lie
						}
					})
				}
			}
		}
		for _, W := range []int64{1, 2, 3, 4, 5, 7, 16} {
			for _, dilation := range []float64{1, 2, 5} {
				for silu := range 2 {
					add(fmt.Sprintf("W=%d/dilation=%g/%d", W, dilation, silu), func(c *solo) {
						c.Size["W"], c.Numbers["dilation"], c.Numbers["silu"] = W, dilation, float64(silu)
						c.Give = everything[:2*silu+2]
						c.Size["D"] = 20
					})
				}
			}
		}
		add("far taps", func(c *solo) { c.Numbers["dilation"], c.Give, c.Size["T"], c.Size["D"] = 300, everything, 1000, 3 })
		for _, T := range []int64{0, 1, 2, 3, 4, 15, 16, 17, 511, 512, 513, 515, 1030} {
			add(fmt.Sprintf("T=%d", T), func(c *solo) {
				c.Size["T"], c.Size["D"], c.Give = T, 5, everything
				c.Numbers["state_len"] = 3 + float64(T%3)
			})
			add(fmt.Sprintf("T=%d/without state", T), func(c *solo) { c.Size["T"], c.Size["D"], c.Size["B"] = T, 5, 1 })
		}
		add("largest numbers", func(c *solo) {
			c.Size, c.Give = map[string]int64{"B": 1, "T": 2, "D": 1, "W": 1}, everything
			c.Numbers["dilation"], c.Numbers["state_len"] = 1<<20, 1<<20
		})
		add("packed/stride 2", func(c *solo) { c.Cu, c.Size["B"], c.Layout = []int{0, 3, 30}, 1, gaps })
		add("long", func(c *solo) { c.Size["T"], c.Size["D"], c.Size["B"], c.Size["W"] = 33000, 1, 2, 3 })
		add("state longer than the sequence", func(c *solo) { c.Give, c.Size["T"], c.Numbers["state_len"] = everything, 5, 20 })
		add("final state without initial", func(c *solo) { c.Give, c.Size["T"] = everything[3:], 2 })
		add("few outputs", func(c *solo) { c.Give, c.Unwanted = everything, []string{"final_state", "dbias", "dresidual", "dh0"} })
		for _, cu := range [][]int{{0, 5, 5, 9}, {0, 0, 1, 2, 3, 40, 40}, {0}, {0, 0}, {0, 31, 32, 63}, {0, 500, 515, 1100}} {
			for i, d := range []core.DType{core.F32, core.BF16, core.F16, core.F64} {
				if i > 0 && short {
					continue
				}
				add(fmt.Sprintf("packed/%v", cu), func(c *solo) {
					c.Cu, c.Size["B"], c.Size["T"], c.IO, c.Narrow = cu, 1, int64(cu[len(cu)-1]+i), d, i%2 == 1
					c.Give, c.Numbers["state_len"], c.Size["D"] = everything, 4, 6
				})
			}
		}
		count := 150
		if short {
			count = 15
		}
		for i := range count {
			r := rand.New(rand.NewPCG(Seed, uint64(i)))
			pick := func(n ...int64) int64 { return n[r.IntN(len(n))] }
			floats := []core.DType{core.F32, core.BF16, core.F16, core.F64}
			add(fmt.Sprintf("random/%d", i), func(c *solo) {
				c.Size = map[string]int64{"B": pick(1, 2, 3), "T": pick(1, 5, 16, 33, 100), "D": pick(1, 7, 16, 33, 130), "W": pick(1, 2, 3, 4, 6)}
				c.IO, c.Aux = floats[r.IntN(4)], floats[r.IntN(4)]
				c.Numbers = map[string]float64{"silu": float64(pick(0, 1)), "dilation": float64(pick(1, 1, 3))}
				c.Numbers["state_len"] = float64(c.Size["W"]-1)*c.Numbers["dilation"] + float64(pick(0, 1, 4))
				for _, name := range everything {
					if r.IntN(2) == 0 {
						c.Give = append(c.Give, name)
					}
				}
				if c.Size["B"] == 1 && r.IntN(2) == 0 {
					T := int(c.Size["T"])
					for c.Cu = []int{0}; len(c.Cu) < 5; {
						c.Cu = append(c.Cu, min(T, c.Cu[len(c.Cu)-1]+r.IntN(T/2+2)))
					}
				}
				c.Layouts, c.Skew = map[string]layout{}, r.IntN(16)
				for _, name := range []string{"x", "weight", "bias", "residual", "initial_state", "cu_seqlens", "y", "final_state", "dout", "dht", "dx", "dweight",
					"dbias", "dresidual", "dh0"} {
					if r.IntN(3) == 0 {
						c.Layouts[name] = []layout{plain, heads, gaps, rows, reversed, broadcast, across}[r.IntN(7)]
					}
				}
			})
		}
	}
	return list
}
