package conform

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"libgdn/core"
)

// array is a tensor in memory of our own, fenced on both sides. All of it that no element covers, and every output before the call,
// holds 0xFF bytes: NaN in each float dtype, -1 in the integers. So what is read by mistake shows in the result, and what is written by
// mistake shows here.
type array struct {
	name          string
	dtype         core.DType
	shape, stride []int64
	mem, was      []byte
	origin        int64   // byte of the first element
	noStrides     bool    // hand over strides = NULL
	placed        uintptr // where mem is a copy of memory of a device: its address there
}

// layout says how an array lies in memory.
type layout string

const (
	compact   layout = ""
	plain     layout = "null strides" // compact, and strides is NULL
	heads     layout = "heads first"  // the second and third dimension exchanged in memory
	gaps      layout = "stride 2"     // between elements of the last dimension
	rows      layout = "fused rows"   // the last dimension is a slice of a longer one
	reversed  layout = "reversed"     // the second dimension runs backwards
	broadcast layout = "broadcast"    // one copy for all heads
	expanded  layout = "expanded"     // one number for all elements
	across    layout = "columns"      // the last two dimensions exchanged in memory
)

// fence is what surrounds an array.
type fence string

const (
	words  fence = ""             // 0xFF bytes, compared afterwards
	before fence = "guard before" // the array begins where an inaccessible page ends
	after  fence = "guard after"  // the array ends where an inaccessible page begins
)

const fenceBytes = 256

// newArray lays out an array; skew moves its first element, so that no kernel can count on an alignment beyond the element's.
func newArray(t testing.TB, name string, dtype core.DType, shape []int64, lie layout, around fence, skew int) *array {
	a := &array{name: name, dtype: dtype, shape: shape, noStrides: lie == plain}
	a.stride = make([]int64, len(shape))
	order := make([]int, len(shape)) // outermost first
	for i := range order {
		order[i] = i
	}
	if lie == heads && len(shape) > 2 {
		order[1], order[2] = 2, 1
	}
	if n := len(shape); lie == across && n > 1 {
		order[n-2], order[n-1] = n-1, n-2
	}
	step := int64(1)
	if lie == gaps {
		step = 2
	}
	for j := len(order) - 1; j >= 0; j-- {
		d := order[j]
		a.stride[d] = step
		extent := shape[d]
		switch {
		case lie == expanded, lie == broadcast && d == 2:
			a.stride[d], extent = 0, 1
		case lie == rows && j == len(order)-1:
			extent += 5
		}
		step *= max(extent, 1)
	}
	if lie == reversed && len(shape) > 1 {
		a.stride[1] = -a.stride[1]
	}
	below, above, empty := int64(0), int64(0), false
	for i, n := range shape {
		reach := (n - 1) * a.stride[i]
		below, above, empty = below+max(-reach, 0), above+max(reach, 0), empty || n == 0
	}
	size := dtype.Size()
	length := (below + above + 1) * size
	if empty {
		below, length = 0, 0
	}
	start := int64(0)
	if around == words || empty {
		start = fenceBytes + int64(skew)*size
		a.mem = make([]byte, start+length+fenceBytes)
	} else {
		a.mem, start = guarded(t, length, around)
	}
	for i := range a.mem {
		a.mem[i] = 0xFF
	}
	a.origin = start + below*size
	return a
}

// guarded maps pages with an inaccessible one on either side, and returns the accessible ones and where in them the array begins.
func guarded(t testing.TB, length int64, around fence) (mem []byte, start int64) {
	page := int64(syscall.Getpagesize())
	inner := (length + page - 1) / page * page
	all, err := syscall.Mmap(-1, 0, int(inner+2*page), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err == nil {
		t.Cleanup(func() { syscall.Munmap(all) })
		err = syscall.Mprotect(all[:page], syscall.PROT_NONE)
	}
	if err == nil {
		err = syscall.Mprotect(all[page+inner:], syscall.PROT_NONE)
	}
	if err != nil {
		t.Fatalf("guard pages: %v", err)
	}
	if around == after {
		start = inner - length
	}
	return all[page : page+inner], start
}

// offsets yields the byte at which each element lies, in row-major order.
func (a *array) offsets(yield func(i int, at int64) bool) {
	for _, n := range a.shape {
		if n == 0 {
			return
		}
	}
	size := a.dtype.Size()
	index := make([]int64, len(a.shape))
	at := a.origin
	for i := 0; ; i++ {
		if !yield(i, at) {
			return
		}
		d := len(index) - 1
		for ; d >= 0; d-- {
			index[d]++
			at += a.stride[d] * size
			if index[d] < a.shape[d] {
				break
			}
			at -= a.stride[d] * size * a.shape[d]
			index[d] = 0
		}
		if d < 0 {
			return
		}
	}
}

func (a *array) count() int {
	n := int64(1)
	for _, s := range a.shape {
		n *= s
	}
	return int(n)
}

// set writes x, rounded to the array's dtype.
func (a *array) set(x []float64) {
	if len(x) != a.count() {
		panic(fmt.Sprintf("conform: %d values for %s of shape %v", len(x), a.name, a.shape))
	}
	a.offsets(func(i int, at int64) bool {
		encode(a.mem[at:], a.dtype, x[i])
		return true
	})
}

// values reads the elements in row-major order.
func (a *array) values() []float64 {
	x := make([]float64, a.count())
	a.offsets(func(i int, at int64) bool {
		x[i] = decode(a.mem[at:], a.dtype)
		return true
	})
	return x
}

// before reads the elements as they were at remember.
func (a *array) before() []float64 {
	then := *a
	then.mem = a.was
	return then.values()
}

// bits gathers the elements' bytes in row-major order.
func (a *array) bits() []byte {
	size := a.dtype.Size()
	b := make([]byte, 0, int64(a.count())*size)
	a.offsets(func(_ int, at int64) bool {
		b = append(b, a.mem[at:at+size]...)
		return true
	})
	return b
}

func (a *array) remember() { a.was = slices.Clone(a.mem) }

// touched reports a byte that changed since remember and that no call may change: any of an input, those between and around the
// elements of an output.
func (a *array) touched(output bool) error {
	if bytes.Equal(a.mem, a.was) {
		return nil
	}
	if !output {
		return fmt.Errorf("input %s was written to", a.name)
	}
	now := slices.Clone(a.mem)
	size := a.dtype.Size()
	a.offsets(func(_ int, at int64) bool {
		copy(now[at:at+size], a.was[at:])
		return true
	})
	for i := range now {
		if now[i] != a.was[i] {
			return fmt.Errorf("%s was written to outside its elements, %d bytes from the first", a.name, int64(i)-a.origin)
		}
	}
	return nil
}

func (a *array) address() uintptr {
	if a.placed != 0 {
		return a.placed + uintptr(a.origin)
	}
	return uintptr(unsafe.Pointer(unsafe.SliceData(a.mem))) + uintptr(a.origin)
}

func encode(to []byte, d core.DType, x float64) {
	switch d {
	case core.F64:
		binary.NativeEndian.PutUint64(to, math.Float64bits(x))
	case core.F32:
		binary.NativeEndian.PutUint32(to, math.Float32bits(float32(x)))
	case core.BF16:
		binary.NativeEndian.PutUint16(to, toBF16(float32(x)))
	case core.F16:
		binary.NativeEndian.PutUint16(to, toF16(x))
	case core.I32:
		binary.NativeEndian.PutUint32(to, uint32(int32(x)))
	case core.I64:
		binary.NativeEndian.PutUint64(to, uint64(int64(x)))
	default:
		panic("conform: cannot write " + d.String())
	}
}

func decode(from []byte, d core.DType) float64 {
	switch d {
	case core.F64:
		return math.Float64frombits(binary.NativeEndian.Uint64(from))
	case core.F32:
		return float64(math.Float32frombits(binary.NativeEndian.Uint32(from)))
	case core.BF16:
		return float64(math.Float32frombits(uint32(binary.NativeEndian.Uint16(from)) << 16))
	case core.F16:
		return fromF16(binary.NativeEndian.Uint16(from))
	case core.I32:
		return float64(int32(binary.NativeEndian.Uint32(from)))
	case core.I64:
		return float64(int64(binary.NativeEndian.Uint64(from)))
	}
	panic("conform: cannot read " + d.String())
}

func toBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if x != x {
		return 0x7FC0
	}
	return uint16((b + 0x7FFF + b>>16&1) >> 16)
}

func toF16(x float64) uint16 {
	sign := uint16(math.Float64bits(x) >> 48 & 0x8000)
	x = math.Abs(x)
	switch {
	case x == 0:
		return sign
	case math.IsNaN(x):
		return sign | 0x7E00
	case x >= 65520: // halfway from the largest number to what would follow it
		return sign | 0x7C00
	}
	// In units of the spacing of numbers near x, of which no more than 2^11 fit: rounding to even carries into the exponent by itself.
	_, e := math.Frexp(x)
	e = max(e-1, -14)
	return sign | uint16(int(math.RoundToEven(math.Ldexp(x, 10-e)))+(e+14)<<10)
}

func fromF16(b uint16) float64 {
	e, m := int(b>>10&31), float64(b&0x3FF)
	var x float64
	switch e {
	case 0:
		x = math.Ldexp(m, -24)
	case 31:
		x = math.Inf(1)
		if m != 0 {
			x = math.NaN()
		}
	default:
		x = math.Ldexp(m+1024, e-25)
	}
	if b&0x8000 != 0 {
		return -x
	}
	return x
}
