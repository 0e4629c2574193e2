package core

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"unsafe"
)

// argsBuilder lays out an argument struct as a C caller would.
type argsBuilder struct {
	op      *Op
	views   []*view // by position in op.Tensors
	numbers []uint64
	size    uint32
	words   []uint64
	pinner  runtime.Pinner
}

// view is what a test changes in a DLTensor.
type view struct {
	dlTensor
	shape, strides []int64 // strides nil: NULL
	noShape        bool    // shape NULL
}

var testDTypes = map[DType]dlDataType{F32: {kDLFloat, 32, 1}, BF16: {kDLBfloat, 16, 1}, F16: {kDLFloat, 16, 1}, F64: {kDLFloat, 64, 1},
	I32: {kDLInt, 32, 1}, I64: {kDLInt, 64, 1}}

// newArgs gives every required tensor of the operator, compact, at made-up addresses that no one reads.
func newArgs(op *Op, sizes map[string]int64) *argsBuilder {
	b := &argsBuilder{op: op, views: make([]*view, len(op.Tensors)), numbers: make([]uint64, len(op.Numbers)), size: uint32(8 + 8*(len(op.Tensors)+len(op.Numbers)))}
	for i := range op.Tensors {
		if r := op.Tensors[i].Role; r == In || r == Out {
			b.give(op.Tensors[i].Name, sizes)
		}
	}
	return b
}

// give adds a compact tensor by the row's dimensions.
func (b *argsBuilder) give(name string, sizes map[string]int64) *view {
	i := b.index(name)
	a := &b.op.Tensors[i]
	v := &view{dlTensor: dlTensor{data: uintptr(i+1) << 32, device: Device{CPU, 0}, dtype: testDTypes[F32]}}
	if a.Rule == Integer {
		v.dtype = testDTypes[I64]
	}
	for _, d := range strings.Fields(a.Dims) {
		letter, plus := strings.CutSuffix(d, "+1")
		if strings.HasPrefix(letter, "[") {
			continue
		}
		n := sizes[letter]
		if plus {
			n++
		}
		v.shape = append(v.shape, n)
	}
	v.ndim = int32(len(v.shape))
	b.views[i] = v
	return v
}

func (b *argsBuilder) index(name string) int {
	for i := range b.op.Tensors {
		if b.op.Tensors[i].Name == name {
			return i
		}
	}
	panic(name)
}

func (b *argsBuilder) view(name string) *view { return b.views[b.index(name)] }
func (b *argsBuilder) drop(name string)       { b.views[b.index(name)] = nil }
func (b *argsBuilder) set(name string, n int64) {
	for i := range b.op.Numbers {
		if b.op.Numbers[i].Name == name {
			b.numbers[i] = uint64(n)
			return
		}
	}
	panic(name)
}

// offsets gives cu_seqlens with real memory.
func (b *argsBuilder) offsets(values ...int64) *view {
	v := b.give("cu_seqlens", nil)
	v.shape = []int64{int64(len(values))}
	if len(values) > 0 {
		b.pinner.Pin(&values[0])
		v.data = uintptr(unsafe.Pointer(&values[0]))
	}
	return v
}

// pointer writes the struct and returns its address, good until the builder is.
func (b *argsBuilder) pointer() unsafe.Pointer {
	b.words = make([]uint64, max(int(b.size+7)/8, 1+len(b.views)+len(b.numbers)))
	*(*uint32)(unsafe.Pointer(&b.words[0])) = b.size
	for i, v := range b.views {
		if v == nil {
			continue
		}
		v.dlTensor.shape, v.dlTensor.strides = nil, nil
		if len(v.shape) > 0 && !v.noShape {
			v.dlTensor.shape = &v.shape[0]
		}
		if len(v.strides) > 0 {
			v.dlTensor.strides = &v.strides[0]
		}
		b.pinner.Pin(&v.dlTensor)
		b.words[1+i] = uint64(uintptr(unsafe.Pointer(&v.dlTensor)))
	}
	copy(b.words[1+len(b.views):], b.numbers)
	return unsafe.Pointer(&b.words[0])
}

func (b *argsBuilder) decode() (*Call, error) {
	c := new(Call)
	err := Decode(b.op, b.pointer(), c)
	runtime.KeepAlive(b)
	b.pinner.Unpin()
	return c, err
}

var small = map[string]int64{"B": 2, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 16, "N": 2}

func BenchmarkDecode(b *testing.B) {
	args := newArgs(gdnFwd, small)
	args.give("g", small)
	args.give("beta", small)
	args.give("initial_state", small)
	args.give("final_state", small)
	p := args.pointer()
	defer args.pinner.Unpin()
	c := new(Call)
	b.ReportAllocs()
	for b.Loop() {
		if err := Decode(gdnFwd, p, c); err != nil {
			b.Fatal(err)
		}
	}
}

var _ = fmt.Sprint
var _ = math.Inf
