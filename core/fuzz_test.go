package core

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
)

// FuzzDecode changes a right call as the bytes say. Decode must refuse or accept, never panic, and what it accepts must be so.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{1, 0, 0, 3, 255})
	f.Add([]byte{2, 7, 1, 1, 2, 9, 3, 4, 4, 2, 2, 200, 0, 5, 5})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b)
		}
		number := func() int64 {
			interesting := []int64{0, 1, 2, 4, 5, 8, 16, -1, 511, 513, math.MaxInt64, math.MinInt64, 1 << 31, 1 << 57, 1 << 62}
			if i := next(); i < len(interesting) {
				return interesting[i]
			}
			var b [8]byte
			data = data[copy(b[:], data):]
			return int64(binary.LittleEndian.Uint64(b[:]))
		}
		op := Ops[next()%len(Ops)]
		b := newArgs(op, small)
		host := slices.IndexFunc(op.Tensors, func(a TensorArg) bool { return a.Host })
		if next()%2 == 1 && host >= 0 {
			b.batchOfOne()
			b.offsets(0, number(), number())
		}
		for len(data) > 0 {
			v := b.views[next()%len(b.views)]
			if v == nil {
				a := &op.Tensors[next()%len(op.Tensors)]
				if !a.Host { // their data must be memory, which only offsets gives
					b.give(a.Name, small)
				}
				continue
			}
			isHost := host >= 0 && v == b.views[host]
			switch next() % 8 {
			case 0:
				if len(v.shape) > 0 && !isHost {
					v.shape[next()%len(v.shape)] = number()
				}
			case 1:
				v.strides = make([]int64, len(v.shape))
				for j := range v.strides {
					if v.strides[j] = number(); isHost {
						v.strides[j] = 1
					}
				}
			case 2:
				v.device.Type = DeviceType(number())
			case 3:
				v.dtype = dlDataType{uint8(next()), uint8(next()), uint16(next())}
				if isHost {
					v.dtype = testDTypes[I32]
				}
			case 4:
				if !isHost {
					v.data = uintptr(number())
				}
			case 5:
				if !isHost {
					v.byteOffset = uint64(number())
				}
			case 6:
				if len(b.numbers) > 0 {
					b.numbers[next()%len(b.numbers)] = uint64(number())
				}
			case 7:
				if v.ndim = int32(number()); int(v.ndim) > len(v.shape) {
					v.noShape = true
				}
				v.strides = nil
			}
		}
		c, err := b.decode()
		if err != nil {
			if s := StatusOf(err); s != InvalidArgument {
				t.Fatalf("status %d: %v", s, err)
			}
			return
		}
		for i := range op.Tensors {
			x := &c.Tensors[i]
			if x.DType == None {
				continue
			}
			count := int64(1)
			for _, n := range x.Shape[:x.Rank] {
				count *= n
			}
			if count < 0 || count > 0 && (x.Data < firstPage || x.Data%uintptr(x.DType.Size()) != 0) {
				t.Fatalf("%s is accepted as %+v", op.Tensors[i].Name, *x)
			}
		}
		if h := c.Size("H"); slices.Contains(gdnOps, op) && (h < 1 || c.Size("HV")%h != 0) || c.Size("N") < 0 {
			t.Fatalf("sizes %v are accepted", c.Sizes)
		}
	})
}
