package core

import (
	"fmt"
	"math"
	"strings"
	"unsafe"
)

// Call is one checked call. It owns all it says, so nothing in it dangles and a pooled one costs no allocation. Entries beyond those of
// the operator are left over from earlier calls.
type Call struct {
	Op      *Op
	Tensors [MaxTensors]Tensor // by position in Op.Tensors
	Floats  [MaxNumbers]float64
	Ints    [MaxNumbers]int64 // both by position in Op.Numbers
	Sizes   [MaxSizes]int64   // by position in Letters, then in Op.Derived
	Device  Device            // of all tensors but the Host ones
	Refusal [192]byte         // C string: what a kernel has to say about a value that only it may read

	given [MaxTensors]uint8 // positions of the n tensors that came
	n     int
	spans [MaxTensors]span
	dims  [MaxTensors][]dim // what the dimensions of each mean
}

// Tensor finds a tensor by its name; an absent one has DType None.
func (c *Call) Tensor(name string) *Tensor {
	for i := range c.Op.Tensors {
		if c.Op.Tensors[i].Name == name {
			return &c.Tensors[i]
		}
	}
	panic("core: " + c.Op.Name + " has no tensor " + name)
}

// Has tells whether the caller gave a tensor.
func (c *Call) Has(name string) bool { return c.Tensor(name).DType != None }

// Int finds an integer by its name.
func (c *Call) Int(name string) int64 { return c.Ints[c.number(name)] }

// Float finds a float by its name.
func (c *Call) Float(name string) float64 { return c.Floats[c.number(name)] }

func (c *Call) number(name string) int {
	for i := range c.Op.Numbers {
		if c.Op.Numbers[i].Name == name {
			return i
		}
	}
	panic("core: " + c.Op.Name + " has no number " + name)
}

// Size finds a size by its letter or derived name.
func (c *Call) Size(name string) int64 {
	return c.Sizes[mustIndex(c.Op.compiled().sizes, name, c.Op.Name)]
}

// Errorf refuses the call with a sentence that begins with the operator's name.
func (c *Call) Errorf(s Status, format string, args ...any) *Error {
	return Errorf(s, "%s: %s", c.Op.compiled().symbol, fmt.Sprintf(format, args...))
}

func (c *Call) invalid(format string, args ...any) *Error {
	return c.Errorf(InvalidArgument, format, args...)
}

// Decode checks a caller's argument struct against the operator's row and copies it into c. The struct is two 32-bit words, size in bytes
// and a reserved 0, then 8 bytes a field: the tensors as pointers to DLTensor, then the numbers. After an error c is undefined.
func Decode(op *Op, args unsafe.Pointer, c *Call) error {
	c.Op = op
	p := op.compiled()
	// The steps are in the order in which each may lean on the last; a concrete type inside, so that success is a plain nil.
	f, err := c.fields(args)
	if err == nil {
		err = c.readNumbers(p, f)
	}
	if err == nil {
		err = c.readTensors(p, f)
	}
	if err == nil {
		err = c.bindSizes(p)
	}
	if err == nil && p.offsets >= 0 && c.Tensors[p.offsets].DType != None {
		err = c.checkOffsets(p.offsets)
	}
	if err == nil && op.Check != nil {
		if err := op.Check(c); err != nil {
			return err
		}
	}
	if err == nil {
		err = c.deriveSizes(p)
	}
	if err == nil {
		err = c.checkOverlap(p)
	}
	if err != nil {
		return err
	}
	return nil
}

// fields is the caller's struct: what lies beyond his size reads as zero, so a program built against an older header goes on working.
type fields struct {
	first unsafe.Pointer
	n     int
}

// Any pointer below the first page is a number or an error code that strayed here; Go's stack scan does not survive one.
const firstPage = 4096

func (c *Call) fields(args unsafe.Pointer) (fields, *Error) {
	const head = 8
	if args == nil {
		return fields{}, c.invalid("args is NULL")
	}
	if uintptr(args) < firstPage || uintptr(args)%8 != 0 {
		return fields{}, c.invalid("args is %#x, not the address of a struct", uintptr(args))
	}
	size, reserved := *(*uint32)(args), *(*uint32)(unsafe.Add(args, 4))
	known := len(c.Op.Tensors) + len(c.Op.Numbers)
	// A larger struct comes from a newer header. The bound keeps a size that was never set from being read as one.
	if size < head || size%8 != 0 || size > 4096 {
		return fields{}, c.invalid("args->size is %d, expected sizeof(gdn_%s_args), which is %d here", size, c.Op.Name, head+8*known)
	}
	if reserved != 0 {
		return fields{}, c.invalid("args->reserved is %d, expected 0", reserved)
	}
	f := fields{unsafe.Add(args, head), int(size-head) / 8}
	for i := known; i < f.n; i++ {
		if f.bits(i) != 0 {
			return fields{}, c.invalid("args has a field at byte %d that this library, version %s, does not know", head+8*i, Version)
		}
	}
	return f, nil
}

func (f fields) bits(i int) uint64 {
	if i >= f.n {
		return 0
	}
	return *(*uint64)(unsafe.Add(f.first, 8*i))
}

// tensor must have been looked at with bits before.
func (f fields) tensor(i int) *dlTensor { return *(**dlTensor)(unsafe.Add(f.first, 8*i)) }

func (c *Call) readNumbers(p *plan, f fields) *Error {
	for i := range c.Op.Numbers {
		a, bits := &c.Op.Numbers[i], f.bits(len(c.Op.Tensors)+i)
		if a.Float {
			x := math.Float64frombits(bits)
			if math.IsNaN(x) || math.IsInf(x, 0) {
				return c.invalid("%s is %v, expected a finite number", a.Name, x)
			}
			c.Floats[i], c.Ints[i] = x, 0
			continue
		}
		n := int64(bits)
		if n < a.Min || n > a.Max {
			or := "to"
			if a.Max == a.Min+1 {
				or = "or"
			}
			return c.invalid("%s is %d, expected %d %s %d", a.Name, n, a.Min, or, a.Max)
		}
		c.Floats[i], c.Ints[i] = 0, n
	}
	return nil
}

// readTensors checks each tensor by itself, and that dtypes and devices agree.
func (c *Call) readTensors(p *plan, f fields) *Error {
	c.n = 0
	for i := range p.tensors {
		a, t := &c.Op.Tensors[i], &c.Tensors[i]
		*t = Tensor{}
		address := f.bits(i)
		if address == 0 {
			if a.Role.Required() {
				return c.invalid("%s is NULL, expected %s", a.Name, p.expected(i, c))
			}
			continue
		}
		if address < firstPage || address%8 != 0 {
			return c.invalid("%s is %#x, not the address of a DLTensor", a.Name, address)
		}
		c.given[c.n] = uint8(i)
		c.n++
		if w := p.tensors[i].with; w >= 0 && c.Tensors[w].DType == None {
			return c.invalid("%s is given without %s", a.Name, a.With)
		}
		d := f.tensor(i)
		if err := c.checkDType(p, i, d.dtype); err != nil {
			return err
		}
		if err := c.readView(p, i, d); err != nil {
			return err
		}
		if err := c.checkDevice(i, d.device); err != nil {
			return err
		}
	}
	return nil
}

// readView copies shape, strides and address, and finds the memory that the view touches.
func (c *Call) readView(p *plan, i int, d *dlTensor) *Error {
	t, rank := &c.Tensors[i], int(d.ndim)
	if c.dims[i] = p.dims(i, rank, c); c.dims[i] == nil {
		return c.invalid("%s has rank %d, expected %s", c.Op.Tensors[i].Name, rank, p.expected(i, c))
	}
	if rank > 0 && d.shape == nil {
		return c.invalid("%s has rank %d and no shape (NULL)", c.Op.Tensors[i].Name, rank)
	}
	t.Rank = d.ndim
	if d.data != 0 { // an empty tensor may have none
		t.Data = d.data + uintptr(d.byteOffset)
	}
	shape, least := unsafe.Slice(d.shape, rank), int64(1)
	var strides []int64
	if d.strides != nil {
		strides = unsafe.Slice(d.strides, rank)
	}
	// Elements and reach are counted a second time as floats, which do not wrap around. An empty dimension counts as 1: what is derived
	// from the others may not overflow either.
	compact, below, above, count, reach := int64(1), int64(0), int64(0), 1.0, 0.0
	for j := rank - 1; j >= 0; j-- {
		n, stride := shape[j], compact
		least = min(least, n)
		t.Shape[j] = n
		if n > 1 {
			// Only here may strides differ from those of a compact tensor: a dimension of 1 may carry any, and this way kernels see
			// contiguous what is contiguous.
			if strides != nil {
				stride = strides[j]
			}
			way := (n - 1) * stride
			above += max(way, 0)
			below -= min(way, 0)
			count *= float64(n)
			reach += math.Abs(float64(n-1) * float64(stride))
			compact = stride * n
		}
		t.Stride[j] = stride
	}
	c.spans[i] = span{}
	switch {
	case least < 0:
		return c.invalid("%s has shape %v, expected sizes from 0", c.Op.Tensors[i].Name, shape)
	case count > maxSize || reach > maxSize:
		return c.outside(i, d)
	case least == 0:
		return nil
	case d.data == 0:
		return c.invalid("%s has shape %v and no data (NULL)", c.Op.Tensors[i].Name, shape)
	}
	size := uintptr(t.DType.Size())
	s := span{t.Data - uintptr(below)*size, t.Data + uintptr(above+1)*size}
	if t.Data < d.data || s.lo > t.Data || s.hi <= t.Data || s.lo < firstPage {
		return c.outside(i, d)
	}
	if t.Data&(size-1) != 0 {
		return c.invalid("%s is at address %#x, expected a multiple of %d for %v", c.Op.Tensors[i].Name, t.Data, size, t.DType)
	}
	c.spans[i] = s
	return nil
}

func (c *Call) outside(i int, d *dlTensor) *Error {
	t := &c.Tensors[i]
	strides := ""
	if d.strides != nil {
		strides = fmt.Sprintf(" and strides %v", unsafe.Slice(d.strides, t.Rank))
	}
	return c.invalid("%s has shape %v%s at address %#x, which no memory can hold", c.Op.Tensors[i].Name, t.Shape[:t.Rank], strides, t.Data)
}

func (c *Call) checkDType(p *plan, i int, came dlDataType) *Error {
	a, t := &c.Op.Tensors[i], &c.Tensors[i]
	d := came.dtype()
	t.DType = d
	float, double := F32 <= d && d <= F64, c.Tensors[0].DType == F64
	first := c.Op.Tensors[0].Name
	var expected string
	switch a.Rule {
	case Float:
		if !float {
			expected = "float32, bfloat16, float16 or float64"
		}
	case Io:
		switch {
		case i == 0 && !float:
			expected = "float32, bfloat16, float16 or float64"
		case i > 0 && double && d != F64:
			expected = "float64 like " + first
		case i > 0 && !double && (!float || d == F64):
			expected = "float32, bfloat16 or float16"
			if d == F64 {
				expected += ", as " + first + " is not float64"
			}
		}
	case Acc:
		if double && d != F64 {
			expected = "float64 like " + first
		} else if !double && d != F32 {
			expected = "float32"
		}
	case Same:
		if like := c.Tensors[p.tensors[i].like].DType; d != like {
			expected = like.String() + " like " + a.Like
		}
	case Integer:
		if d != I32 && d != I64 {
			expected = "int32 or int64"
		}
	}
	if expected != "" {
		return c.invalid("%s has dtype %v, expected %s", a.Name, came, expected)
	}
	return nil
}

func (c *Call) checkDevice(i int, d Device) *Error {
	switch d.Type {
	case kDLMAIA:
		d.Type = Ascend
	case CPU:
		d.ID = 0 // frameworks disagree on it, and there is one
	}
	name := c.Op.Tensors[i].Name
	switch {
	case i == 0:
		c.Device = d
	case c.Op.Tensors[i].Host:
		if d.Type != CPU {
			return c.invalid("%s is on %v, expected host memory (CPU) on any device", name, d)
		}
	case d != c.Device:
		return c.invalid("%s is on %v, expected %v like %s", name, d, c.Device, c.Op.Tensors[0].Name)
	}
	return nil
}

// bindSizes gives each letter its number, from the first tensor that has it, and holds all other tensors to it.
func (c *Call) bindSizes(p *plan) *Error {
	for i := range Letters {
		c.Sizes[i] = -1
	}
	if p.offsets >= 0 && c.Tensors[p.offsets].DType != None {
		n := c.Tensors[p.offsets].Shape[0]
		if n == 0 {
			return c.invalid("%s has shape [0], expected [N+1], at least [1]", c.Op.Tensors[p.offsets].Name)
		}
		c.Sizes[sizeN] = n - 1
	}
	for _, i := range c.given[:c.n] {
		t := &c.Tensors[i]
		for j, d := range c.dims[i] {
			n := t.Shape[j] - int64(d.plus)
			switch known := c.Sizes[d.size]; {
			case n == known || int(d.size) >= len(Letters):
			case known >= 0:
				return c.wrongShape(p, int(i))
			default:
				c.Sizes[d.size] = n
				if d.size == sizeB && c.Sizes[sizeN] < 0 {
					c.Sizes[sizeN] = n // without offsets each row of the batch is a sequence
				}
			}
		}
		// The optional dimension of a gradient is the one of its input.
		if w := p.tensors[i].with; w >= 0 && p.tensors[i].short != nil && t.Rank != c.Tensors[w].Rank {
			return c.invalid("%s has shape %v, expected the shape of %s, %v", c.Op.Tensors[i].Name, t.Shape[:t.Rank], c.Op.Tensors[w].Name,
				c.Tensors[w].Shape[:c.Tensors[w].Rank])
		}
	}
	for i := range Letters {
		c.Sizes[i] = max(c.Sizes[i], 0) // letters that this operator does not use
	}
	if p.offsets >= 0 && c.Tensors[p.offsets].DType != None && c.Sizes[sizeB] != 1 {
		return c.invalid("%s has B=%d, expected B=1 with %s", c.Op.Tensors[0].Name, c.Sizes[sizeB], c.Op.Tensors[p.offsets].Name)
	}
	return nil
}

func (c *Call) deriveSizes(p *plan) *Error {
	for i, e := range p.derived {
		n, ok := e.eval(&c.Sizes, &c.Ints)
		if !ok {
			return c.invalid("%s = %s is more than memory can hold", c.Op.Derived[i].Name, c.Op.Derived[i].Expr)
		}
		c.Sizes[len(Letters)+i] = n
	}
	for _, i := range c.given[:c.n] {
		if !p.tensors[i].derived {
			continue
		}
		for j, d := range c.dims[i] {
			if c.Tensors[i].Shape[j] != c.Sizes[d.size]+int64(d.plus) {
				return c.wrongShape(p, int(i))
			}
		}
	}
	return nil
}

// wrongShape names the letters that do not fit.
func (c *Call) wrongShape(p *plan, i int) *Error {
	t := &c.Tensors[i]
	var wrong []string
	for j, d := range c.dims[i] {
		if c.Sizes[d.size] >= 0 && t.Shape[j] != c.Sizes[d.size]+int64(d.plus) {
			wrong = append(wrong, fmt.Sprintf("%s=%d", p.sizes[d.size], c.Sizes[d.size]))
		}
	}
	return c.invalid("%s has shape %v, expected %s with %s", c.Op.Tensors[i].Name, t.Shape[:t.Rank], p.text(c.dims[i]), strings.Join(wrong, ", "))
}

// checkOffsets reads sequence offsets: the one place where Go reads what a tensor holds, in host memory by rule.
func (c *Call) checkOffsets(i int) *Error {
	t, name := &c.Tensors[i], c.Op.Tensors[i].Name
	last := int64(0)
	for j := int64(0); j < t.Shape[0]; j++ {
		n := t.integer(j)
		switch {
		case j == 0 && n != 0:
			return c.invalid("%s[0] is %d, expected 0", name, n)
		case n < last:
			return c.invalid("%s[%d] is %d after %d, expected offsets that do not decrease", name, j, n, last)
		case n > c.Sizes[sizeT]:
			return c.invalid("%s[%d] is %d, expected at most T=%d", name, j, n, c.Sizes[sizeT])
		}
		last = n
	}
	return nil
}

// integer reads element j of a vector of integers in host memory.
func (t *Tensor) integer(j int64) int64 {
	address := unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&t.Data)), j*t.Stride[0]*t.DType.Size())
	if t.DType == I32 {
		return int64(*(*int32)(address))
	}
	return *(*int64)(address)
}

// Offsets returns the sequence offsets that came with the call, nil where there are none.
func (c *Call) Offsets() []int64 {
	i := c.Op.compiled().offsets
	if i < 0 || c.Tensors[i].DType == None {
		return nil
	}
	list := make([]int64, c.Tensors[i].Shape[0])
	for j := range list {
		list[j] = c.Tensors[i].integer(int64(j))
	}
	return list
}
