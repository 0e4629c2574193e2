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
		if op.Tensors[i].Role.Required() {
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

var small = map[string]int64{"B": 2, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 16, "N": 2, "R": 3, "P": 3}

func TestDecodeFillsTheCall(t *testing.T) {
	b := newArgs(gdnFwd, small)
	b.view("k").strides = []int64{1000, 100, 10, 1}
	b.view("k").byteOffset = 8
	b.give("beta", small).dtype = testDTypes[BF16]
	b.give("tape", small).shape = []int64{4 * (2*5/64*32*32 + 2*5*32)}
	b.view("q").device.ID = 7 // one CPU, whatever number a framework gives it
	b.set("state_v_first", 1)
	b.numbers[0] = math.Float64bits(0.25)
	c, err := b.decode()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int64{"B": 2, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 16, "N": 2, "KP": 32, "VP": 32, "TAPE": 1280} {
		if got := c.Size(name); got != want {
			t.Errorf("%s = %d, want %d", name, got, want)
		}
	}
	if q := c.Tensor("q"); q.Stride != [MaxRank]int64{5 * 2 * 8, 2 * 8, 8, 1} || q.Rank != 4 || q.DType != F32 || q.Data != b.view("q").data {
		t.Errorf("q = %+v", *q)
	}
	if k := c.Tensor("k"); k.Stride != [MaxRank]int64{1000, 100, 10, 1} || k.Data != b.view("k").data+8 {
		t.Errorf("k = %+v", *k)
	}
	if c.Has("g") || !c.Has("beta") || c.Tensor("beta").DType != BF16 || c.Int("state_v_first") != 1 || c.Float("scale") != 0.25 || c.Device != (Device{CPU, 0}) {
		t.Errorf("call = %+v", c)
	}
}

// A right call stays right with these changes.
func TestDecodeAccepts(t *testing.T) {
	for name, change := range map[string]func(b *argsBuilder){
		"no time at all":         func(b *argsBuilder) { b.empty("T") },
		"no batch":               func(b *argsBuilder) { b.empty("B") },
		"shorter struct":         func(b *argsBuilder) { b.size = 8 + 8*10 },
		"longer struct of zeros": func(b *argsBuilder) { b.size += 24 },
		"every dtype":            func(b *argsBuilder) { b.view("q").dtype = testDTypes[BF16]; b.view("k").dtype = testDTypes[F16] },
		"broadcast input":        func(b *argsBuilder) { b.view("q").strides = []int64{80, 16, 0, 1} },
		"backwards input":        func(b *argsBuilder) { b.view("q").strides = []int64{80, -16, 8, 1} },
		"inputs that overlap":    func(b *argsBuilder) { b.view("k").data = b.view("q").data },
		"int32 offsets": func(b *argsBuilder) {
			b.batchOfOne()
			b.offsets(0|5<<32, 0).dtype = testDTypes[I32] // 0, 5, 0 as int32
			b.view("cu_seqlens").shape = []int64{2}
		},
		"empty sequences":         func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 0, 3, 3, 5) },
		"no sequences":            func(b *argsBuilder) { b.batchOfOne(); b.offsets(0) },
		"offsets short of T":      func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 2) },
		"beta per channel":        func(b *argsBuilder) { b.give("beta", small).set(2, 5, 4, 16) },
		"strided output":          func(b *argsBuilder) { b.view("o").strides = []int64{5 * 128, 128, 32, 2} },
		"output in permuted form": func(b *argsBuilder) { b.view("o").strides = []int64{320, 16, 80, 1} },
		"output stepping back":    func(b *argsBuilder) { b.view("o").strides = []int64{-320, -64, 16, 1} },
		"any stride where size is 1": func(b *argsBuilder) {
			b.batchOfOne()
			b.view("o").strides = []int64{0, 64, 16, 1}
		},
		"gate": func(b *argsBuilder) {
			b.set("gate", 1)
			b.give("g", small)
			b.give("A_log", small)
			b.give("dt_bias", small)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newArgs(gdnFwd, small)
			change(b)
			if _, err := b.decode(); err != nil {
				t.Error(err)
			}
		})
	}
}

func (v *view) set(shape ...int64) *view {
	v.shape, v.ndim = shape, int32(len(shape))
	return v
}

// empty sets a size to 0 and takes all memory of those tensors away.
func (b *argsBuilder) empty(letter string) {
	for i, v := range b.views {
		for j, d := range strings.Fields(b.op.Tensors[i].Dims) {
			if v != nil && d == letter {
				v.shape[j], v.data = 0, 0
			}
		}
	}
}

func (b *argsBuilder) batchOfOne() {
	for i, v := range b.views {
		if v != nil && strings.HasPrefix(b.op.Tensors[i].Dims, "B ") {
			v.shape[0] = 1
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	huge := int64(1) << 62
	for _, test := range []struct {
		name   string
		op     *Op
		change func(b *argsBuilder)
		want   string
	}{
		{"size never set", gdnFwd, func(b *argsBuilder) { b.size = 0 }, "gdn_fwd: args->size is 0, expected sizeof(gdn_fwd_args), which is 152 here"},
		{"size of garbage", gdnFwd, func(b *argsBuilder) { b.size = 1 << 20 }, "gdn_fwd: args->size is 1048576, expected sizeof(gdn_fwd_args), which is 152 here"},
		{"half a field", gdnFwd, func(b *argsBuilder) { b.size = 12 }, "gdn_fwd: args->size is 12, expected sizeof(gdn_fwd_args), which is 152 here"},
		{"nothing but the head", gdnFwd, func(b *argsBuilder) { b.size = 8 }, "gdn_fwd: q is NULL, expected [B T H K]"},
		{"input missing", gdnFwd, func(b *argsBuilder) { b.drop("v") }, "gdn_fwd: v is NULL, expected [B T HV V]"},
		{"output missing", gdnFwd, func(b *argsBuilder) { b.drop("o") }, "gdn_fwd: o is NULL, expected [B T HV V]"},
		{"rank 0", gdnFwd, func(b *argsBuilder) { b.view("q").set() }, "gdn_fwd: q has rank 0, expected [B T H K]"},
		{"rank 3", gdnFwd, func(b *argsBuilder) { b.view("k").set(2, 5, 16) }, "gdn_fwd: k has rank 3, expected [B T H K]"},
		{"rank -1", gdnFwd, func(b *argsBuilder) { b.view("k").ndim = -1 }, "gdn_fwd: k has rank -1, expected [B T H K]"},
		{"rank of garbage", gdnFwd, func(b *argsBuilder) { b.view("k").ndim = math.MaxInt32 }, "gdn_fwd: k has rank 2147483647, expected [B T H K]"},
		{"rank of two forms", gdnFwd, func(b *argsBuilder) { b.give("beta", small).set(2) }, "gdn_fwd: beta has rank 1, expected [B T HV] or [B T HV V]"},
		{"shape NULL", gdnFwd, func(b *argsBuilder) { b.view("k").noShape = true }, "gdn_fwd: k has rank 4 and no shape (NULL)"},
		{"one size", gdnFwd, func(b *argsBuilder) { b.view("k").set(2, 5, 2, 6) }, "gdn_fwd: k has shape [2 5 2 6], expected [B T H K] with K=8"},
		{"two sizes", gdnFwd, func(b *argsBuilder) { b.view("v").set(3, 6, 4, 16) }, "gdn_fwd: v has shape [3 6 4 16], expected [B T HV V] with B=2, T=5"},
		{"state exchanged", gdnFwd, func(b *argsBuilder) { b.give("initial_state", small); b.set("state_v_first", 1) },
			"gdn_fwd: initial_state has shape [2 4 8 16], expected [N HV V K] with V=16, K=8"},
		{"state of other sequences", gdnFwd, func(b *argsBuilder) {
			b.batchOfOne()
			b.offsets(0, 2, 5, 5)
			b.give("initial_state", small)
		}, "gdn_fwd: initial_state has shape [2 4 8 16], expected [N HV K V] with N=3"},
		{"pool missing", decode, func(b *argsBuilder) { b.drop("pool") }, "gdn_decode: pool is NULL, expected [P HV K V]"},
		{"pool that overlaps itself", decode, func(b *argsBuilder) { b.view("pool").set(2, 4, 8, 16).strides = []int64{0, 128, 16, 1} },
			"gdn_decode: pool has shape [2 4 8 16] and strides [0 128 16 1], expected an output whose elements do not overlap"},
		{"pool that is an input too", decode, func(b *argsBuilder) { b.view("pool").set(2, 4, 8, 16).data = b.view("v").data },
			"gdn_decode: pool overlaps v, expected an output with memory of its own"},
		{"pool of another precision", decode, func(b *argsBuilder) { b.view("pool").set(2, 4, 8, 16).dtype = testDTypes[F64] },
			"gdn_decode: pool has dtype float64, expected float32, bfloat16 or float16, as q is not float64"},
		{"too few slots", decode, func(b *argsBuilder) { b.give("ssm_state_indices", small).set(2, 4) },
			"gdn_decode: ssm_state_indices has shape [2 4], expected a slot for each of T=5 tokens"},
		{"bias a head, gate a channel", decode, func(b *argsBuilder) {
			b.view("pool").set(2, 4, 8, 16)
			b.give("g", small).set(2, 5, 4, 8)
			b.give("dt_bias", small)
		}, "gdn_decode: dt_bias has shape [4] and g [2 5 4 8], expected a bias per key channel exactly if g is"},
		{"tape", gdnFwd, func(b *argsBuilder) { b.give("tape", small).set(7) }, "gdn_fwd: tape has shape [7], expected [TAPE] with TAPE=1280"},
		{"gradient unlike its input", gdnBwd, func(b *argsBuilder) {
			b.view("tape").set(1280)
			b.give("beta", small)
			b.give("dbeta", small).set(2, 5, 4, 16)
		}, "gdn_bwd: dbeta has shape [2 5 4 16], expected the shape of beta, [2 5 4]"},
		{"gradient of nothing", gdnBwd, func(b *argsBuilder) { b.give("dg", small) }, "gdn_bwd: dg is given without g"},
		{"negative size", gdnFwd, func(b *argsBuilder) { b.view("q").set(2, -5, 2, 8) }, "gdn_fwd: q has shape [2 -5 2 8], expected sizes from 0"},
		{"huge size", gdnFwd, func(b *argsBuilder) { b.view("q").set(huge, 5, 2, 8) },
			"gdn_fwd: q has shape [4611686018427387904 5 2 8] at address 0x100000000, which no memory can hold"},
		{"huge though empty", gdnFwd, func(b *argsBuilder) { b.view("q").set(0, huge, 2, 8) },
			"gdn_fwd: q has shape [0 4611686018427387904 2 8] at address 0x100000000, which no memory can hold"},
		{"huge stride", gdnFwd, func(b *argsBuilder) { b.view("q").strides = []int64{math.MinInt64, 16, 8, 1} },
			"gdn_fwd: q has shape [2 5 2 8] and strides [-9223372036854775808 16 8 1] at address 0x100000000, which no memory can hold"},
		{"below address 0", gdnFwd, func(b *argsBuilder) { b.view("q").strides = []int64{-(1 << 50), 16, 8, 1} },
			"gdn_fwd: q has shape [2 5 2 8] and strides [-1125899906842624 16 8 1] at address 0x100000000, which no memory can hold"},
		{"byte_offset around the end", gdnFwd, func(b *argsBuilder) { b.view("q").byteOffset = math.MaxUint64 - 3 },
			"gdn_fwd: q has shape [2 5 2 8] at address 0xfffffffc, which no memory can hold"},
		{"no data", gdnFwd, func(b *argsBuilder) { b.view("q").data = 0 }, "gdn_fwd: q has shape [2 5 2 8] and no data (NULL)"},
		{"no data but an offset", gdnFwd, func(b *argsBuilder) { b.view("q").data, b.view("q").byteOffset = 0, 4096 },
			"gdn_fwd: q has shape [2 5 2 8] and no data (NULL)"},
		{"not aligned", gdnFwd, func(b *argsBuilder) { b.view("q").byteOffset = 2 }, "gdn_fwd: q is at address 0x100000002, expected a multiple of 4 for float32"},
		{"dtype unknown", gdnFwd, func(b *argsBuilder) { b.view("q").dtype = dlDataType{kDLUInt, 8, 1} },
			"gdn_fwd: q has dtype uint8, expected float32, bfloat16, float16 or float64"},
		{"complex", gdnFwd, func(b *argsBuilder) { b.give("g", small).dtype = dlDataType{kDLComplex, 64, 1} }, "gdn_fwd: g has dtype complex64, expected float32, bfloat16, float16 or float64"},
		{"lanes", gdnFwd, func(b *argsBuilder) { b.view("v").dtype.lanes = 4 }, "gdn_fwd: v has dtype float32 with 4 lanes, expected float32, bfloat16 or float16"},
		{"float64 alone", gdnFwd, func(b *argsBuilder) { b.view("v").dtype = testDTypes[F64] },
			"gdn_fwd: v has dtype float64, expected float32, bfloat16 or float16, as q is not float64"},
		{"float32 among float64", gdnFwd, func(b *argsBuilder) { b.view("q").dtype = testDTypes[F64] }, "gdn_fwd: k has dtype float32, expected float64 like q"},
		{"output of another dtype", gdnFwd, func(b *argsBuilder) { b.view("o").dtype = testDTypes[BF16] }, "gdn_fwd: o has dtype bfloat16, expected float32 like v"},
		{"state of low precision", gdnFwd, func(b *argsBuilder) { b.give("final_state", small).dtype = testDTypes[BF16] },
			"gdn_fwd: final_state has dtype bfloat16, expected float32"},
		{"float offsets", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 5).dtype = testDTypes[F32] },
			"gdn_fwd: cu_seqlens has dtype float32, expected int32 or int64"},
		{"two devices", gdnFwd, func(b *argsBuilder) { b.view("v").device = Device{2, 1} }, "gdn_fwd: v is on CUDA:1, expected CPU like q"},
		{"offsets on a device", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 5).device = Device{2, 0} },
			"gdn_fwd: cu_seqlens is on CUDA:0, expected host memory (CPU) on any device"},
		{"offsets not from 0", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(1, 5) }, "gdn_fwd: cu_seqlens[0] is 1, expected 0"},
		{"offsets decreasing", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 4, 3) },
			"gdn_fwd: cu_seqlens[2] is 3 after 4, expected offsets that do not decrease"},
		{"offsets negative", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, -1) },
			"gdn_fwd: cu_seqlens[1] is -1 after 0, expected offsets that do not decrease"},
		{"offsets beyond T", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets(0, 6) }, "gdn_fwd: cu_seqlens[1] is 6, expected at most T=5"},
		{"no offsets", gdnFwd, func(b *argsBuilder) { b.batchOfOne(); b.offsets() }, "gdn_fwd: cu_seqlens has shape [0], expected [N+1], at least [1]"},
		{"offsets of a batch", gdnFwd, func(b *argsBuilder) { b.offsets(0, 5) }, "gdn_fwd: q has B=2, expected B=1 with cu_seqlens"},
		{"output on an input", gdnFwd, func(b *argsBuilder) { b.view("o").data = b.view("v").data }, "gdn_fwd: o overlaps v, expected an output with memory of its own"},
		{"outputs on each other", gdnBwd, func(b *argsBuilder) {
			b.view("tape").set(1280)
			b.view("dk").data = b.view("dq").data + 4
		}, "gdn_bwd: dq overlaps dk, expected an output with memory of its own"},
		{"output broadcast", gdnFwd, func(b *argsBuilder) { b.view("o").strides = []int64{320, 64, 0, 1} },
			"gdn_fwd: o has shape [2 5 4 16] and strides [320 64 0 1], expected an output whose elements do not overlap"},
		{"output windows", gdnFwd, func(b *argsBuilder) { b.view("o").strides = []int64{320, 64, 15, 1} },
			"gdn_fwd: o has shape [2 5 4 16] and strides [320 64 15 1], expected an output whose elements do not overlap"},
		{"flag out of range", gdnFwd, func(b *argsBuilder) { b.set("gate", 2) }, "gdn_fwd: gate is 2, expected 0 or 1"},
		{"flag negative", gdnFwd, func(b *argsBuilder) { b.set("qk_l2norm", -1) }, "gdn_fwd: qk_l2norm is -1, expected 0 or 1"},
		{"scale NaN", gdnFwd, func(b *argsBuilder) { b.numbers[0] = math.Float64bits(math.NaN()) }, "gdn_fwd: scale is NaN, expected a finite number"},
		{"scale infinite", gdnFwd, func(b *argsBuilder) { b.numbers[0] = math.Float64bits(math.Inf(1)) }, "gdn_fwd: scale is +Inf, expected a finite number"},
		{"heads do not divide", gdnFwd, func(b *argsBuilder) { b.view("v").set(2, 5, 3, 16); b.view("o").set(2, 5, 3, 16) },
			"gdn_fwd: v has HV=3, expected a multiple of H=2"},
		{"no heads", gdnFwd, func(b *argsBuilder) { b.view("q").set(2, 5, 0, 8); b.view("k").set(2, 5, 0, 8) }, "gdn_fwd: q has H=0, expected at least 1"},
		{"key too long", gdnFwd, func(b *argsBuilder) { b.view("q").set(2, 5, 2, 513); b.view("k").set(2, 5, 2, 513) }, "gdn_fwd: q has K=513, expected 1 to 512"},
		{"value empty", gdnFwd, func(b *argsBuilder) { b.empty("V") }, "gdn_fwd: v has V=0, expected 1 to 512"},
		{"gate without g", gdnFwd, func(b *argsBuilder) { b.set("gate", 1) }, "gdn_fwd: gate is 1 and g is NULL, expected the raw gate"},
		{"gate without A_log", gdnFwd, func(b *argsBuilder) { b.set("gate", 1); b.give("g", small) }, "gdn_fwd: gate is 1 and A_log is NULL, expected [HV]"},
		{"A_log without gate", gdnFwd, func(b *argsBuilder) { b.give("A_log", small) }, "gdn_fwd: A_log is given and gate is 0, expected gate 1 with it"},
		{"dt_bias without gate", gdnFwd, func(b *argsBuilder) { b.give("dt_bias", small) }, "gdn_fwd: dt_bias is given and gate is 0, expected gate 1 with it"},
		{"sigmoid of nothing", gdnFwd, func(b *argsBuilder) { b.set("beta_sigmoid", 1) }, "gdn_fwd: beta_sigmoid is 1 and beta is NULL, expected the logits"},
		{"neg_eigval alone", gdnFwd, func(b *argsBuilder) { b.set("neg_eigval", 1) },
			"gdn_fwd: neg_eigval is 1 and beta_sigmoid is 0, expected beta_sigmoid 1 with it"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newArgs(test.op, small)
			test.change(b)
			_, err := b.decode()
			if err == nil {
				t.Fatalf("accepted, want %q", test.want)
			}
			if err.Error() != test.want {
				t.Errorf("\n got %q\nwant %q", err, test.want)
			}
			if s := StatusOf(err); s != InvalidArgument {
				t.Errorf("status %d", s)
			}
		})
	}
}

// What no builder can make: pointers that are none, and words beyond the struct.
func TestDecodeRefusesStrayWords(t *testing.T) {
	c := new(Call)
	check := func(err error, want string) {
		t.Helper()
		if err == nil || err.Error() != want {
			t.Errorf("\n got %v\nwant %s", err, want)
		}
	}
	check(Decode(gdnFwd, nil, c), "gdn_fwd: args is NULL")
	words := make([]uint64, 64)
	p := unsafe.Pointer(&words[0])
	words[0] = 152
	words[1] = 8
	check(Decode(gdnFwd, p, c), "gdn_fwd: q is 0x8, not the address of a DLTensor")
	words[1] = 1<<40 + 4
	check(Decode(gdnFwd, p, c), "gdn_fwd: q is 0x10000000004, not the address of a DLTensor")
	check(Decode(gdnFwd, unsafe.Add(p, 4), c), fmt.Sprintf("gdn_fwd: args is %#x, not the address of a struct", uintptr(p)+4))
	words[0] = 152 | 1<<32
	check(Decode(gdnFwd, p, c), "gdn_fwd: args->reserved is 1, expected 0")
	words[0] = 152 + 16
	words[20] = 1
	check(Decode(gdnFwd, p, c), "gdn_fwd: args has a field at byte 160 that this library, version "+Version+", does not know")
}

func TestDecodeAllocatesNothing(t *testing.T) {
	args, c := benchmarkArgs()
	p := args.pointer()
	defer args.pinner.Unpin()
	if n := testing.AllocsPerRun(100, func() { Decode(gdnFwd, p, c) }); n != 0 {
		t.Errorf("Decode allocates %v times", n)
	}
	backends := []Backend{&fakeBackend{device: CPU}}
	if n := testing.AllocsPerRun(100, func() { Dispatch(backends, gdnFwd, p, true) }); n != 0 {
		t.Errorf("Dispatch allocates %v times", n)
	}
}

func benchmarkArgs() (*argsBuilder, *Call) {
	args := newArgs(gdnFwd, small)
	for _, name := range []string{"g", "beta", "initial_state", "final_state"} {
		args.give(name, small)
	}
	return args, new(Call)
}

// 8 tensors.
func BenchmarkDecode(b *testing.B) {
	args, c := benchmarkArgs()
	p := args.pointer()
	defer args.pinner.Unpin()
	b.ReportAllocs()
	for b.Loop() {
		if err := Decode(gdnFwd, p, c); err != nil {
			b.Fatal(err)
		}
	}
}
