package core

import (
	"fmt"
	"unsafe"
)

// DType is an element type of the library. The kernels' C side has the same numbers.
type DType int32

const (
	None DType = iota // no tensor was given
	F32
	BF16
	F16
	F64
	I32
	I64
)

// DTypes describes every DType by its number: DLPack's code and bits, and the name that messages use.
var DTypes = [...]struct {
	Name string
	Code uint8
	Bits uint8
}{
	None: {"none", 0, 0},
	F32:  {"float32", kDLFloat, 32},
	BF16: {"bfloat16", kDLBfloat, 16},
	F16:  {"float16", kDLFloat, 16},
	F64:  {"float64", kDLFloat, 64},
	I32:  {"int32", kDLInt, 32},
	I64:  {"int64", kDLInt, 64},
}

// DLPack's type codes.
const (
	kDLInt     = 0
	kDLUInt    = 1
	kDLFloat   = 2
	kDLBfloat  = 4
	kDLComplex = 5
	kDLBool    = 6
)

func (d DType) String() string { return DTypes[d].Name }

// Size is the number of bytes of an element.
func (d DType) Size() int64 { return int64(DTypes[d].Bits >> 3) }

// DeviceType is DLPack's number of a kind of device.
type DeviceType int32

const (
	CPU    DeviceType = 1
	Ascend DeviceType = 12 // kDLExtDev, as torch_npu exports its tensors; kDLMAIA (21) is read as the same
)

const kDLMAIA = 21

// Device is one device of a kind.
type Device struct {
	Type DeviceType
	ID   int32
}

// deviceNames covers DLPack's list, so that a message can say "CUDA" instead of 2.
var deviceNames = map[DeviceType]string{1: "CPU", 2: "CUDA", 3: "CUDA host memory", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI",
	10: "ROCm", 11: "ROCm host memory", 12: "Ascend NPU", 13: "CUDA managed memory", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon", 18: "Trainium"}

func (t DeviceType) String() string {
	if name, ok := deviceNames[t]; ok {
		return name
	}
	return fmt.Sprintf("device type %d", int32(t))
}

func (d Device) String() string {
	if d.Type == CPU {
		return "CPU"
	}
	return fmt.Sprintf("%v:%d", d.Type, d.ID)
}

// dlTensor is DLPack's DLTensor.
type dlTensor struct {
	data       uintptr // a number: Go reads no tensor memory through it
	device     Device
	ndim       int32
	dtype      dlDataType
	shape      *int64
	strides    *int64
	byteOffset uint64
}

type dlDataType struct {
	code, bits uint8
	lanes      uint16
}

// The caller's bytes are read through this layout; a compiler that laid it out differently must not build.
var _ = [1]struct{}{}[unsafe.Sizeof(dlTensor{})-48]

// dtype is None where the library has no such type.
func (t dlDataType) dtype() DType {
	for d := F32; d <= I64 && t.lanes == 1; d++ {
		if t.code == DTypes[d].Code && t.bits == DTypes[d].Bits {
			return d
		}
	}
	return None
}

func (t dlDataType) String() string {
	if d := t.dtype(); d != None {
		return d.String()
	}
	name := fmt.Sprintf("DLPack type code %d with %d bits", t.code, t.bits)
	switch t.code {
	case kDLInt:
		name = fmt.Sprintf("int%d", t.bits)
	case kDLUInt:
		name = fmt.Sprintf("uint%d", t.bits)
	case kDLFloat:
		name = fmt.Sprintf("float%d", t.bits)
	case kDLComplex:
		name = fmt.Sprintf("complex%d", t.bits)
	case kDLBool:
		name = "bool"
	}
	if t.lanes != 1 {
		name += fmt.Sprintf(" with %d lanes", t.lanes)
	}
	return name
}

// Tensor is the library's copy of a caller's view, laid out as the kernels read it. An absent tensor has DType None.
type Tensor struct {
	Data   uintptr // of the first element; DLPack's byte_offset is added already
	DType  DType
	Rank   int32
	Shape  [MaxRank]int64
	Stride [MaxRank]int64 // in elements, also where the caller gave none
}
