package ascendc

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"libgdn/core"
)

// Caller is what a thread said about its calls: the stream they run on, 0 for the device's default one, and where their device memory
// comes from. Allocate and Release are C functions, 0 for memory of the library's own:
//
//	void *allocate(void *user, int32_t device, size_t bytes, void *stream)
//	void release(void *user, int32_t device, void *memory, size_t bytes, void *stream)
type Caller struct {
	Stream            uintptr
	Allocate, Release uintptr
	User              uintptr
}

// run is one call on its way through CANN. After the first failure its methods do nothing, so that the code of an operator reads without
// a check on every line; what was made until then is still taken down.
type run struct {
	*acl
	b      *Backend
	c      *core.Call
	lane   *lane
	caller Caller
	device int32
	err    error

	context uintptr // the thread's context where it is to be put back
	held    []block // from the caller's allocator
	late    []late  // outputs that were computed in another place

	// What CANN writes to or reads from lies here, in memory that does not move.
	word       [4]uintptr
	attributes [7]uint32
	ints       [40]uint64
	floats     [8]float64
	dims       [3 * core.MaxRank]int64
	made       []made
}

// made is a descriptor and the function that destroys it.
type made struct {
	handle, destroy uintptr
	name            string // of what made it
}

// late is an output and where it was computed.
type late struct{ to, from core.Tensor }

// block is memory, on the device or on the host.
type block struct {
	at         uintptr
	size, used int64
}

// lane is what belongs to a stream between calls: memory that only work on this stream uses. One call after another uses it from its
// beginning, for the stream runs them in that order; so one call enqueues at a time.
type lane struct {
	sync.Mutex
	blocks  []block
	staging block // pinned host memory from which small arrays are copied; used counts what may still be waiting for its copy
}

var runs = sync.Pool{New: func() any { return new(run) }}

// begin enters the tensors' device on this thread. The run must be ended in any case.
func (b *Backend) begin(a *acl, c *core.Call) *run {
	r := runs.Get().(*run)
	*r = run{acl: a, b: b, c: c, device: c.Device.ID, caller: b.caller(), held: r.held[:0], late: r.late[:0], made: r.made[:0]}
	r.enter()
	r.lane = b.lane(r.device, r.caller.Stream)
	r.lane.Lock()
	for i := range r.lane.blocks {
		r.lane.blocks[i].used = 0
	}
	return r
}

// enter makes the device current on this OS thread, to which device, context and error text belong.
func (r *run) enter() {
	runtime.LockOSThread()
	if status := r.call(r.getCurrentContext, uintptr(unsafe.Pointer(&r.word[0]))); status == aclOK && r.word[0] != 0 {
		context := r.word[0]
		if r.check("aclrtGetDevice", r.call(r.getDevice, uintptr(unsafe.Pointer(&r.word[1])))); r.err != nil || int32(r.word[1]) == r.device {
			return
		}
		if r.check("aclrtSetDevice", r.call(r.setDevice, uintptr(r.device))); r.err == nil {
			r.context = context
		}
		return
	}
	// This thread has not used CANN yet. It keeps the device's own context, as there is none to put back.
	r.check("aclrtSetDevice", r.call(r.setDevice, uintptr(r.device)))
}

// end finishes outputs that were computed elsewhere, gives back what was taken, and returns the first error.
func (r *run) end() error {
	for i := range r.late {
		r.copy(&r.late[i].to, &r.late[i].from)
	}
	for _, b := range r.held {
		purego.SyscallN(r.caller.Release, r.caller.User, uintptr(r.device), b.at, uintptr(b.size), r.caller.Stream)
	}
	r.lane.Unlock()
	err := r.leave()
	r.acl, r.c, r.lane, r.err = nil, nil, nil, nil
	runs.Put(r)
	return err
}

// leave puts the thread's context back and returns the first error.
func (r *run) leave() error {
	if r.context != 0 {
		r.check("aclrtSetCurrentContext", r.call(r.setCurrentContext, r.context))
	}
	runtime.UnlockOSThread()
	return r.err
}

// call calls a function of CANN with integers only.
func (r *run) call(fn uintptr, args ...uintptr) int32 {
	status, _, _ := purego.SyscallN(fn, args...)
	return int32(status)
}

// check keeps the first failure, with the text that CANN has for it on this thread.
func (r *run) check(name string, status int32) {
	if status != aclOK && r.err == nil {
		r.err = r.failure(name, status)
	}
}

// refuse keeps a reason of our own as the first failure.
func (r *run) refuse(s core.Status, format string, args ...any) {
	if r.err == nil {
		r.err = core.Errorf(s, format, args...)
	}
}

// confirm asks CANN whether a tensor lies in the memory of the device that it names: DLPack's number 12 is shared by devices of all kinds.
func (r *run) confirm(name string, t *core.Tensor) {
	if r.err != nil || r.pointerGetAttributes == 0 || t.Data == 0 {
		return
	}
	r.check("aclrtPointerGetAttributes", r.call(r.pointerGetAttributes, t.Data, uintptr(unsafe.Pointer(&r.attributes))))
	if where, id := r.attributes[1], r.attributes[0]; r.err == nil && where != onDevice {
		r.refuse(core.InvalidArgument, "%s is at address %#x, which is not memory of Ascend NPU:%d", name, t.Data, r.device)
	} else if r.err == nil && int32(id) != r.device {
		r.refuse(core.InvalidArgument, "%s is at address %#x, which is memory of Ascend NPU:%d, expected NPU:%d", name, t.Data, id, r.device)
	}
}

const alignment = 512 // of all device memory that is handed out here, as the allocators of frameworks do it

// memory is device memory that work enqueued during this call may use, and nothing after it.
func (r *run) memory(size int64) uintptr {
	if r.err != nil || size == 0 {
		return 0
	}
	size = (size + alignment - 1) / alignment * alignment
	if r.caller.Allocate != 0 {
		at, _, _ := purego.SyscallN(r.caller.Allocate, r.caller.User, uintptr(r.device), uintptr(size), r.caller.Stream)
		if at == 0 {
			r.refuse(core.OutOfMemory, "the caller's allocator has no %d bytes on Ascend NPU:%d", size, r.device)
			return 0
		}
		r.held = append(r.held, block{at: at, size: size})
		return at
	}
	for i := range r.lane.blocks {
		if b := &r.lane.blocks[i]; b.size-b.used >= size {
			b.used += size
			return b.at + uintptr(b.used-size)
		}
	}
	// Each block is as large as all before it together: a lane soon has what its calls need, in a few pieces.
	b := block{size: size, used: size}
	for _, other := range r.lane.blocks {
		b.size = max(b.size, other.size*2)
	}
	const hugePagesFirst = 0
	r.check("aclrtMalloc", r.call(r.malloc, uintptr(unsafe.Pointer(&r.word[0])), uintptr(b.size), hugePagesFirst))
	if r.err != nil {
		return 0
	}
	b.at = r.word[0]
	r.lane.blocks = append(r.lane.blocks, b)
	return b.at
}

const stagingSize = 64 << 10

// upload copies a small array to device memory, in stream order.
func (r *run) upload(values []int32) *core.Tensor {
	size := int64(4 * len(values))
	to := r.temp(core.I32, int64(len(values)))
	s := &r.lane.staging
	if r.err == nil && s.size-s.used < size {
		// What was staged before may not be copied yet.
		if r.check("aclrtSynchronizeStream", r.call(r.synchronizeStream, r.caller.Stream)); r.err == nil {
			s.used = 0
		}
		if r.err == nil && s.size < size {
			old := *s
			r.check("aclrtMallocHost", r.call(r.mallocHost, uintptr(unsafe.Pointer(&r.word[0])), uintptr(max(size, stagingSize))))
			if r.err == nil {
				*s = block{at: r.word[0], size: max(size, stagingSize)}
				if old.at != 0 {
					r.check("aclrtFreeHost", r.call(r.freeHost, old.at))
				}
			}
		}
	}
	if r.err != nil {
		return to
	}
	at := s.at + uintptr(s.used)
	copy(unsafe.Slice((*int32)(pointer(at)), len(values)), values)
	s.used += (size + 63) / 64 * 64
	r.check("aclrtMemcpyAsync", r.call(r.memcpyAsync, to.Data, uintptr(size), at, uintptr(size), hostToDevice, r.caller.Stream))
	return to
}

// compact is a compact tensor at an address.
func compact(at uintptr, d core.DType, shape ...int64) *core.Tensor {
	t := &core.Tensor{Data: at, DType: d, Rank: int32(len(shape))}
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		t.Shape[i], t.Stride[i] = shape[i], step
		step *= max(shape[i], 1)
	}
	return t
}

// temp is a new tensor in memory of this call.
func (r *run) temp(d core.DType, shape ...int64) *core.Tensor {
	n := d.Size()
	for _, s := range shape {
		n *= s
	}
	return compact(r.memory(n), d, shape...)
}

func count(t *core.Tensor) int64 {
	n := int64(1)
	for _, s := range t.Shape[:t.Rank] {
		n *= s
	}
	return n
}

// isCompact tells whether a tensor is as operators of vendors like it: row-major without gaps, at an address that CANN takes.
func isCompact(t *core.Tensor) bool {
	if t.Data%32 != 0 {
		return false
	}
	step := int64(1)
	for i := t.Rank - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Stride[i] != step {
			return false
		}
		step *= t.Shape[i]
	}
	return true
}

// shaped is a compact tensor in another shape.
func shaped(t *core.Tensor, shape ...int64) *core.Tensor {
	if t == nil {
		return nil
	}
	return compact(t.Data, t.DType, shape...)
}

// permuted is a view with the dimensions in another order.
func permuted(t *core.Tensor, order ...int) *core.Tensor {
	p := &core.Tensor{Data: t.Data, DType: t.DType, Rank: t.Rank}
	for i, j := range order {
		p.Shape[i], p.Stride[i] = t.Shape[j], t.Stride[j]
	}
	return p
}

// sliced is a view of n entries of one dimension from the given one on.
func sliced(t *core.Tensor, dim int, from, n int64) *core.Tensor {
	s := *t
	s.Data += uintptr(from * t.Stride[dim] * t.DType.Size())
	s.Shape[dim] = n
	return &s
}

// in is an input as a compact tensor of the given dtype (None: its own), copied where it is not one; nil where it was not given.
func (r *run) in(name string, d core.DType) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	return r.asCompact(t, d)
}

func (r *run) asCompact(t *core.Tensor, d core.DType) *core.Tensor {
	if d == core.None {
		d = t.DType
	}
	if d == t.DType && isCompact(t) {
		return t
	}
	to := r.temp(d, t.Shape[:t.Rank]...)
	r.copy(to, t)
	return to
}

// out is where an output is computed: itself, or, where it is not compact or has another dtype, memory of this call from which it is
// copied at the end; nil where it is not wanted.
func (r *run) out(name string, d core.DType) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	if d == core.None {
		d = t.DType
	}
	if d == t.DType && isCompact(t) {
		return t
	}
	from := r.temp(d, t.Shape[:t.Rank]...)
	r.later(t, from)
	return from
}

// later has a tensor copied to another at the end of the call.
func (r *run) later(to, from *core.Tensor) { r.late = append(r.late, late{*to, *from}) }

// copy copies between tensors of one shape, whatever their strides and dtypes.
func (r *run) copy(to, from *core.Tensor) {
	if count(to) > 0 {
		r.exec(inplaceCopy, to, from)
	}
}

// zero fills a tensor with zeros.
func (r *run) zero(t *core.Tensor) {
	n := count(t) * t.DType.Size()
	switch {
	case r.err != nil || n == 0:
	case isCompact(t):
		r.check("aclrtMemsetAsync", r.call(r.memsetAsync, t.Data, uintptr(n), 0, uintptr(n), r.caller.Stream))
	default:
		r.exec(inplaceZero, t)
	}
}

var aclTypes = [...]int64{core.F32: aclFloat, core.BF16: aclBF16, core.F16: aclHalf, core.F64: aclDouble, core.I32: aclInt32, core.I64: aclInt64}

// describe makes a tensor descriptor. CANN takes only addresses that are multiples of 32 as a tensor's storage; the rest is an offset.
func (r *run) describe(t *core.Tensor) uintptr {
	base := t.Data &^ 31
	rank := int(t.Rank)
	shape, strides, storage := r.dims[:rank], r.dims[core.MaxRank:][:rank], r.dims[2*core.MaxRank:]
	copy(shape, t.Shape[:rank])
	copy(strides, t.Stride[:rank])
	offset := int64(t.Data-base) / t.DType.Size()
	n := 1
	if isCompact(t) {
		n = copy(storage, shape)
	} else {
		storage[0] = offset + 1
		for i := range rank {
			storage[0] += (shape[i] - 1) * strides[i]
		}
	}
	h, _, _ := purego.SyscallN(r.createTensor, uintptr(unsafe.Pointer(&shape[0])), uintptr(rank), uintptr(aclTypes[t.DType]),
		uintptr(unsafe.Pointer(&strides[0])), uintptr(offset), aclFormatND, uintptr(unsafe.Pointer(&storage[0])), uintptr(n), base)
	r.keep("aclCreateTensor", h, r.destroyTensor)
	return h
}

// keep remembers a descriptor until after the launch.
func (r *run) keep(name string, handle, destroy uintptr) {
	if handle == 0 {
		r.err = r.failure(name, noStatus)
		return
	}
	r.made = append(r.made, made{handle, destroy, name})
}

// scalar is an argument of type aclScalar.
type scalar float32

// exec runs an operator: descriptors, workspace size, workspace, launch on the caller's stream. The arguments are those of the operator's
// declaration: *core.Tensor (nil: NULL), []int64 for a list (empty: NULL), int, bool, float64, scalar, and strings that end in "\x00".
func (r *run) exec(name *opName, args ...any) {
	if r.err != nil {
		return
	}
	op := name.in(r.acl)
	if op.err != nil {
		r.refuse(core.Unsupported, "%v", op.err)
		return
	}
	if len(args) != len(op.letters) {
		panic(fmt.Sprintf("ascendc: %s takes %d arguments, %d given", name.symbol(), len(op.letters), len(args)))
	}
	defer r.destroy()
	ints, floats := 0, 0
	for i, a := range args {
		if r.err != nil {
			return
		}
		kind, bits := op.letters[i], uint64(0)
		switch x := a.(type) {
		case nil:
		case *core.Tensor:
			if kind != 'T' {
				panic(mismatch(name, i, kind))
			}
			if x != nil {
				bits = uint64(r.describe(x))
			}
		case []int64:
			if kind != 'L' {
				panic(mismatch(name, i, kind))
			}
			if len(x) > 0 {
				h, _, _ := purego.SyscallN(r.createIntArray, uintptr(unsafe.Pointer(&x[0])), uintptr(len(x)))
				r.keep("aclCreateIntArray", h, r.destroyIntArray)
				bits = uint64(h)
			}
		case scalar:
			if kind != 'c' {
				panic(mismatch(name, i, kind))
			}
			r.word[3] = uintptr(math.Float32bits(float32(x)))
			h, _, _ := purego.SyscallN(r.createScalar, uintptr(unsafe.Pointer(&r.word[3])), aclFloat)
			r.keep("aclCreateScalar", h, r.destroyScalar)
			bits = uint64(h)
		case string:
			if kind != 's' {
				panic(mismatch(name, i, kind))
			}
			bits = uint64(uintptr(unsafe.Pointer(unsafe.StringData(x))))
		case int:
			if kind != 'i' && kind != 'e' {
				panic(mismatch(name, i, kind))
			}
			bits = uint64(x)
		case bool:
			if kind != 'b' {
				panic(mismatch(name, i, kind))
			}
			if x {
				bits = 1
			}
		case float64:
			switch kind {
			case 'd':
				r.floats[floats] = x
			case 'f':
				r.floats[floats] = math.Float64frombits(uint64(math.Float32bits(float32(x))))
			default:
				panic(mismatch(name, i, kind))
			}
			floats++
			continue
		default:
			panic(mismatch(name, i, kind))
		}
		r.ints[ints] = bits
		ints++
	}
	if r.err != nil {
		return
	}
	r.word[0], r.word[1] = 0, 0 // workspace size, executor
	r.ints[ints] = uint64(uintptr(unsafe.Pointer(&r.word[0])))
	r.ints[ints+1] = uint64(uintptr(unsafe.Pointer(&r.word[1])))
	if status := trampoline(op.phase1, &r.ints, &r.floats); status != aclOK {
		r.check(op.name+"GetWorkspaceSize", status)
	}
	runtime.KeepAlive(args)
	if r.err != nil {
		return
	}
	size, executor := r.word[0], r.word[1]
	work := r.memory(int64(size))
	if r.err != nil {
		// An executor that no launch consumes.
		if r.destroyExecutor != 0 {
			r.call(r.destroyExecutor, executor)
		}
		return
	}
	r.check(op.name, r.call(op.phase2, work, size, executor, r.caller.Stream))
}

func mismatch(name *opName, i int, kind byte) string {
	return fmt.Sprintf("ascendc: argument %d of %s is of kind %c", i, name.symbol(), kind)
}

// destroy takes the descriptors down; CANN has copied what it needs.
func (r *run) destroy() {
	for _, m := range r.made {
		if status := r.call(m.destroy, m.handle); status != aclOK {
			r.check("aclDestroy"+m.name[len("aclCreate"):], status)
		}
	}
	r.made = r.made[:0]
}
