package conform

import (
	"fmt"
	"math"
	"runtime"
	"unsafe"

	"libgdn/core"
)

// call is one call as a C program would make it: an argument struct, packed here and decoded by the library.
type call struct {
	op      *core.Op
	arrays  map[string]*array
	numbers map[string]float64

	device Device // on which it ran, or nil
	words  []uint64
	pinned runtime.Pinner
}

// dlTensor is DLPack's DLTensor, as a caller declares it.
type dlTensor struct {
	data       uintptr
	deviceType int32
	deviceID   int32
	ndim       int32
	code, bits uint8
	lanes      uint16
	shape      *int64
	strides    *int64
	byteOffset uint64
}

// byteOffset is what data is short of the first element where the case asks for it.
const byteOffset = 64

// pack lays out the argument struct. Unpin when done.
func (c *call) pack() {
	c.words = make([]uint64, 1+len(c.op.Tensors)+len(c.op.Numbers))
	*(*uint32)(unsafe.Pointer(&c.words[0])) = uint32(8 * len(c.words))
	for i := range c.op.Tensors {
		a := c.arrays[c.op.Tensors[i].Name]
		if a == nil {
			continue
		}
		d := &dlTensor{data: a.address(), deviceType: int32(core.CPU), ndim: int32(len(a.shape)), lanes: 1}
		if a.placed != 0 {
			d.deviceType, d.deviceID = int32(c.device.Device()), c.device.ID()
		}
		d.code, d.bits = core.DTypes[a.dtype].Code, core.DTypes[a.dtype].Bits
		if len(a.shape) > 0 {
			d.shape, d.strides = &a.shape[0], &a.stride[0]
		}
		if a.noStrides {
			d.strides, d.data, d.byteOffset = nil, d.data-byteOffset, byteOffset
		}
		c.pinned.Pin(d)
		c.words[1+i] = uint64(uintptr(unsafe.Pointer(d)))
	}
	for i := range c.op.Numbers {
		n := &c.op.Numbers[i]
		x := c.numbers[n.Name]
		if n.Float {
			c.words[1+len(c.op.Tensors)+i] = math.Float64bits(x)
		} else {
			c.words[1+len(c.op.Tensors)+i] = uint64(int64(x))
		}
	}
}

// sizes decodes the call without running it.
func (c *call) sizes() (*core.Call, error) {
	c.pack()
	defer c.pinned.Unpin()
	decoded := new(core.Call)
	err := core.Decode(c.op, unsafe.Pointer(&c.words[0]), decoded)
	runtime.KeepAlive(c)
	return decoded, err
}

// run decodes and runs the call, and looks at all memory that it was not to change.
func (c *call) run(b core.Backend) error {
	for _, a := range c.arrays {
		a.remember()
	}
	back := c.place(b)
	defer back()
	c.pack()
	defer c.pinned.Unpin()
	if _, err := core.Dispatch([]core.Backend{b}, c.op, unsafe.Pointer(&c.words[0]), true); err != nil {
		return err
	}
	back()
	// The backend knew the arrays by their addresses only.
	runtime.KeepAlive(c)
	for i := range c.op.Tensors {
		arg := &c.op.Tensors[i]
		if a := c.arrays[arg.Name]; a != nil {
			if err := a.touched(arg.Role.Written()); err != nil {
				return fmt.Errorf("gdn_%s: %w", c.op.Name, err)
			}
		}
	}
	return nil
}

// outputs lists the given outputs in the table's order, with what is updated in place and without the tape.
func (c *call) outputs() []*array {
	var list []*array
	for i := range c.op.Tensors {
		arg := &c.op.Tensors[i]
		if a := c.arrays[arg.Name]; a != nil && arg.Role.Written() && arg.Name != "tape" {
			list = append(list, a)
		}
	}
	return list
}
