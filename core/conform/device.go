package conform

import (
	"maps"
	"testing"

	"libgdn/core"
)

// Device is a backend whose tensors lie in memory of its own, and that rounds between the steps of an operator as vendors' operators do.
type Device interface {
	core.Backend
	ID() int32
	Place(bytes []byte) (address uintptr)    // copies to new memory of the device, at a multiple of 512
	Fetch(bytes []byte, address uintptr)     // waits for the device, copies back and frees the memory
	Ratio(name string, d core.DType) float64 // of the error allowed in an output of a dtype, as rms(x-ref)/rms(ref)
}

// RunOn tries a device with cases of its own, forward and, where it is asked for, backward.
func RunOn(t *testing.T, d Device, list []*Case, backward bool) {
	for _, c := range list {
		ops := []string{c.forward()}
		if backward {
			ops = append(ops, c.backward())
		}
		for _, op := range ops {
			t.Run(op+"/"+shortNames[c.IO]+"/"+c.Name, func(t *testing.T) {
				if err := c.try(t, d, op); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// RunPlainOn tries a device with the cases of operators outside the chunk family, their sizes (where it has them) and dtypes changed. What the
// device refuses is left out; most may not be.
func RunPlainOn(t *testing.T, d Device, op string, size map[string]int64, io core.DType) {
	ran, all, seen := 0, 0, map[string]bool{}
	for _, c := range plainCases(testing.Short()) {
		if c.Op != op || seen[c.Name] {
			continue
		}
		seen[c.Name] = true
		x := *c
		x.Size, x.IO, x.Aux, x.Types = maps.Clone(c.Size), io, core.F32, map[string]core.DType{find(op).Tensors[0].Name: io}
		for letter, n := range size {
			if _, ok := x.Size[letter]; ok {
				x.Size[letter] = n
			}
		}
		all++
		t.Run(op+"/"+shortNames[io]+"/"+c.Name, func(t *testing.T) {
			err := x.try(t, d)
			if core.StatusOf(err) == core.Unsupported {
				t.Skip(err)
			}
			ran++
			if err != nil {
				t.Errorf("%v\nseed %d, %+v", err, Seed, x)
			}
		})
	}
	if ran*2 < all {
		t.Errorf("%s: %d of %d cases ran", op, ran, all)
	}
}

// place puts all arrays but those of the host on the backend's device, if it has one, and returns what brings them back.
func (c *call) place(b core.Backend) (back func()) {
	d, ok := b.(Device)
	if !ok {
		return func() {}
	}
	c.device = d
	for i := range c.op.Tensors {
		arg := &c.op.Tensors[i]
		if a := c.arrays[arg.Name]; a != nil && !arg.Host {
			a.placed = d.Place(a.mem)
		}
	}
	return func() {
		for _, a := range c.arrays {
			if a.placed != 0 {
				d.Fetch(a.mem, a.placed)
				a.placed = 0
			}
		}
	}
}

// limit is the bound of an output, a coarser one where the call ran on a device.
func (c *call) limit(a *array, double bool) bound {
	if c.device == nil {
		return boundOf(a.name, a.dtype, double)
	}
	r := c.device.Ratio(a.name, a.dtype)
	return bound{ratio: r, floor: r / 10, least: 1e-6}
}

// Lie lays out all tensors of the case that can be laid out so.
func (c *Case) Lie(name string) { c.Layout = layout(name) }
