package ascendc

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"libgdn/core"
)

// sample is one call on tensors that stay on the device, for tests that care about the way and not about the numbers.
type sample struct {
	d       *npu
	op      *core.Op
	tensors map[string]*tensor
	numbers map[string]float64
	words   []uint64
}

type tensor struct {
	dl    dlTensor
	shape []int64
	bytes []byte
	at    uintptr
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

// newSample makes compact tensors from a fixed pattern; sizes are of the letters, give names the optional tensors.
func newSample(d *npu, op string, kind core.DType, size map[string]int64, give []string, numbers map[string]float64) *sample {
	i := slices.IndexFunc(core.Ops, func(o *core.Op) bool { return o.Name == op })
	s := &sample{d: d, op: core.Ops[i], tensors: map[string]*tensor{}, numbers: numbers}
	if size["N"] == 0 {
		size["N"] = size["B"]
	}
	s.op.Derive(size)
	for i := range s.op.Tensors {
		a := &s.op.Tensors[i]
		if a.Role != core.In && a.Role != core.Out && !slices.Contains(give, a.Name) {
			continue
		}
		var shape []int64
		for _, w := range strings.Fields(a.Dims) {
			if strings.HasPrefix(w, "[") {
				continue
			}
			n, plus := size[strings.TrimSuffix(w, "+1")], strings.HasSuffix(w, "+1")
			if plus {
				n++
			}
			shape = append(shape, n)
		}
		t := core.F32
		if a.Rule == core.Io || a.Rule == core.Same && (a.Like == "q" || a.Like == "k" || a.Like == "v") || a.Name == "dout" {
			t = kind
		}
		s.tensors[a.Name] = s.put(a.Name, t, shape)
	}
	return s
}

func (s *sample) put(name string, kind core.DType, shape []int64) *tensor {
	x := &tensor{shape: shape}
	n := kind.Size()
	for _, d := range shape {
		n *= d
	}
	x.bytes = make([]byte, n)
	for i := range n / kind.Size() {
		v := float32(0.2 * math.Sin(float64(i)*0.7+float64(len(name))))
		if name == "g" {
			v = -v * v
		}
		if bits := math.Float32bits(v); kind == core.F32 {
			*(*uint32)(unsafe.Pointer(&x.bytes[4*i])) = bits
		} else {
			*(*uint16)(unsafe.Pointer(&x.bytes[2*i])) = uint16(bits >> 16)
		}
	}
	x.at = s.d.Place(x.bytes)
	x.dl = dlTensor{data: x.at, deviceType: 12, ndim: int32(len(shape)), code: core.DTypes[kind].Code, bits: core.DTypes[kind].Bits, lanes: 1, shape: &x.shape[0]}
	return x
}

// pack makes the argument struct.
func (s *sample) pack() unsafe.Pointer {
	s.words = make([]uint64, 1+len(s.op.Tensors)+len(s.op.Numbers))
	*(*uint32)(unsafe.Pointer(&s.words[0])) = uint32(8 * len(s.words))
	for i := range s.op.Tensors {
		if x := s.tensors[s.op.Tensors[i].Name]; x != nil {
			s.words[1+i] = uint64(uintptr(unsafe.Pointer(&x.dl)))
		}
	}
	for i := range s.op.Numbers {
		n := &s.op.Numbers[i]
		w := &s.words[1+len(s.op.Tensors)+i]
		if *w = uint64(int64(s.numbers[n.Name])); n.Float {
			*w = math.Float64bits(s.numbers[n.Name])
		}
	}
	return unsafe.Pointer(&s.words[0])
}

func (s *sample) run() error {
	_, err := core.Dispatch([]core.Backend{s.d}, s.op, s.pack(), true)
	runtime.KeepAlive(s)
	return err
}

func (s *sample) path() (string, error) {
	path, err := core.Dispatch([]core.Backend{s.d}, s.op, s.pack(), false)
	runtime.KeepAlive(s)
	return path, err
}

// read brings an output back without freeing it.
func (s *sample) read(name string) []byte {
	x := s.tensors[name]
	r := s.d.on()
	defer r.leave()
	to := make([]byte, len(x.bytes))
	s.d.must("aclrtSynchronizeDevice", r.call(s.d.a.synchronizeDevice))
	s.d.must("aclrtMemcpy", r.call(s.d.a.memcpy, uintptr(unsafe.Pointer(&to[0])), uintptr(len(to)), x.at, uintptr(len(to)), deviceToHost))
	return to
}

func (s *sample) free() {
	for _, x := range s.tensors {
		s.d.Fetch(x.bytes, x.at)
	}
}

func sizes(T, HV int64) map[string]int64 {
	return map[string]int64{"B": 1, "T": T, "H": 1, "HV": HV, "K": 128, "V": 128}
}

// scenarios are calls that between them take every path.
var scenarios = []struct {
	name    string
	op      string
	chip    string
	not     []*path
	give    []string
	numbers map[string]float64
	T       int64
	output  string
}{
	{"stock forward", "fwd", "Ascend910B2", []*path{flaForward, flaStagesForward}, []string{"g", "beta", "initial_state", "final_state"}, nil, 70, "o"},
	{"composite forward", "fwd", "Ascend950PR_9599", nil, []string{"g", "beta", "initial_state", "final_state", "tape"}, nil, 70, "o"},
	{"composite forward with norm", "fwd", "Ascend950PR_9599", nil, []string{"g", "beta", "tape"}, map[string]float64{"qk_l2norm": 1, "beta_sigmoid": 1}, 70, "o"},
	{"composite backward", "bwd", "Ascend950PR_9599", nil, []string{"g", "beta", "initial_state", "dht", "dg", "dbeta", "dh0"}, nil, 70, "dq"},
	{"stages forward", "fwd", "Ascend910B2", []*path{flaForward}, []string{"g", "beta", "initial_state", "final_state", "tape"}, nil, 70, "o"},
	{"stages backward", "bwd", "Ascend910B2", nil, []string{"g", "beta", "initial_state", "dht", "dg", "dbeta", "dh0"}, nil, 70, "dq"},
	{"stock step", "recurrent_fwd", "Ascend910B2", []*path{flaRecurrent}, []string{"g", "gk", "initial_state", "final_state"}, nil, 3, "o"},
	{"KDA stages forward", "kda_fwd", "Ascend910B2", nil, []string{"g", "beta", "initial_state", "final_state"}, nil, 70, "o"},
	{"KDA composite", "kda_fwd", "Ascend910B2", []*path{kdaForward}, []string{"g", "beta", "initial_state", "final_state"}, nil, 70, "o"},
	{"KDA backward", "kda_bwd", "Ascend950PR_9599", nil, []string{"g", "beta", "A_log", "dt_bias", "initial_state", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"},
		map[string]float64{"gate": 1, "lower_bound": -5, "qk_l2norm": 1, "beta_sigmoid": 1}, 70, "dq"},
	{"KDA step", "kda_recurrent_fwd", "Ascend910B2", nil, []string{"g", "beta", "initial_state", "final_state"}, nil, 3, "o"},
	{"summary", "summary_fwd", "Ascend910B2", nil, []string{"g", "beta"}, nil, 70, "map"},
	{"gradient's summary", "summary_bwd", "Ascend910B2", nil, []string{"g", "beta"}, nil, 70, "map"},
	{"fla step", "recurrent_fwd", "Ascend910B2", []*path{stockRecurrent}, []string{"g", "beta", "initial_state", "final_state"}, nil, 3, "o"},
}

// TestFaults fails each call of CANN once, at each position of each scenario, and each piece of work on the stream: the call that meets the
// failure, or the synchronization after it, says so in CANN's words; nothing is left; the next call is right.
func TestFaults(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			d := newNPU(t)
			d.chip(sc.chip)
			defer only(t, sc.not...)()
			s := newSample(d, sc.op, core.BF16, sizes(sc.T, 2), sc.give, sc.numbers)
			if err := s.run(); err != nil { // the layouts are known after that
				t.Fatal(err)
			}
			want := s.read(sc.output)
			if err := d.Trim(); err != nil {
				t.Fatal(err)
			}
			d.fake("gdnfake_reset")
			if err := s.run(); err != nil {
				t.Fatal(err)
			}
			d.on().leave()
			calls := int(d.fake("gdnfake_calls", 0))
			stuck := map[string]int64{}
			if calls < 20 {
				t.Fatalf("%d calls of CANN", calls)
			}
			for n := 1; n <= calls; n++ {
				if testing.Short() && n%5 != 0 {
					continue
				}
				if err := d.Trim(); err != nil {
					t.Fatal(err)
				}
				const words = "scripted: the device has gone fishing"
				d.fake("gdnfake_fail", text("*"), uintptr(n), 507899, text(words))
				err := s.run()
				if d.fake("gdnfake_pending_failures") != 0 {
					d.fake("gdnfake_reset") // this run made fewer calls
					continue
				}
				e, ok := err.(*core.Error)
				if !ok || e.Status != core.DeviceFailure || !strings.Contains(e.Msg, words) || !strings.HasPrefix(e.Msg, "gdn_"+sc.op+": ") || !strings.Contains(e.Msg, "507899") && !strings.Contains(e.Msg, "aclCreate") {
					// Some calls are asked for a yes or no, and a failure is a no.
					if err != nil || n > 3 {
						t.Fatalf("call %d of %d failed, and the operator said %v", n, calls, err)
					}
				}
				for kind, name := range map[string]string{"tensor": "aclDestroyTensor", "int array": "aclDestroyIntArray", "scalar": "aclDestroyScalar"} {
					if strings.Contains(fmt.Sprint(err), name+" ") {
						stuck[kind]++ // what failed to be destroyed
					}
				}
				if err := s.run(); err != nil {
					t.Fatalf("the call after a failure of call %d: %v", n, err)
				}
				if got := s.read(sc.output); !slices.Equal(got, want) {
					t.Fatalf("another result after a failure of call %d", n)
				}
				d.lawful()
				if t.Failed() {
					t.Fatalf("after a failure of call %d", n)
				}
			}
			s.free()
			d.settledBut(stuck)
		})
	}
}

// TestHeld holds the device until each call has returned: what work on the stream reads must still be there then, and lie on that stream.
func TestHeld(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			d := newNPU(t)
			d.chip(sc.chip)
			defer only(t, sc.not...)()
			r := d.on()
			d.must("aclrtCreateStream", r.call(symbol("aclrtCreateStream", mustOpen(t)), uintptr(unsafe.Pointer(&r.word[0]))))
			stream := r.word[0]
			r.leave()
			s := newSample(d, sc.op, core.BF16, sizes(sc.T, 2), sc.give, sc.numbers)
			if err := s.run(); err != nil {
				t.Fatal(err)
			}
			want := s.read(sc.output)
			d.caller.Stream = stream
			if err := s.run(); err != nil { // the memory of the lane is there after that
				t.Fatal(err)
			}
			s.read(sc.output)
			d.fake("gdnfake_hold", 1)
			for range 3 {
				if err := s.run(); err != nil {
					t.Fatal(err)
				}
			}
			if got := s.read(sc.output); !slices.Equal(got, want) {
				t.Error("another result")
			}
			d.fake("gdnfake_hold", 0)
			d.caller.Stream = 0
			s.free()
			r = d.on()
			d.must("aclrtDestroyStream", r.call(symbol("aclrtDestroyStream", mustOpen(t)), stream))
			r.leave()
			d.settled()
		})
	}
}

// TestMemory runs out of device memory, and out of what the caller's allocator has.
func TestMemory(t *testing.T) {
	d := newNPU(t)
	s := newSample(d, "fwd", core.BF16, sizes(70, 2), []string{"g", "beta"}, nil)
	d.fake("gdnfake_fail", text("aclrtMalloc"), 1, aclNoMemory, text("out of it"))
	if e, ok := s.run().(*core.Error); !ok || e.Status != core.OutOfMemory || !strings.Contains(e.Msg, "out of it") {
		t.Errorf("%v", e)
	}
	if err := s.run(); err != nil {
		t.Error(err)
	}
	s.free()
	d.settled()
}

// TestThreads has 32 threads call on 4 streams, each with tensors of its own.
func TestThreads(t *testing.T) {
	const threads, streams = 32, 4
	calls := 1000
	if testing.Short() {
		calls = 20
	}
	d := newNPU(t)
	r := d.on()
	var handles [streams]uintptr
	create := symbol("aclrtCreateStream", mustOpen(t))
	for i := range handles {
		d.must("aclrtCreateStream", r.call(create, uintptr(unsafe.Pointer(&r.word[0]))))
		handles[i] = r.word[0]
	}
	r.leave()
	var all sync.WaitGroup
	for n := range threads {
		all.Add(1)
		go func() {
			defer all.Done()
			runtime.LockOSThread()
			d.callers.Store(syscall.Gettid(), Caller{Stream: handles[n%streams]})
			s := newSample(d, "recurrent_fwd", core.BF16, map[string]int64{"B": 1, "T": int64(1 + n%3), "H": 1, "HV": 2, "K": 32, "V": 16},
				[]string{"g", "initial_state", "final_state"}, map[string]float64{"scale": 1 + float64(n)})
			var want []byte
			for i := range calls {
				if err := s.run(); err != nil {
					t.Error(err)
					return
				}
				if i%10 == 0 || i == calls-1 {
					got := s.read("o")
					if want == nil {
						want = got
					} else if !slices.Equal(got, want) {
						t.Errorf("thread %d, call %d: another result", n, i)
						return
					}
				}
			}
			s.free()
		}()
	}
	all.Wait()
	r = d.on()
	destroy := symbol("aclrtDestroyStream", mustOpen(t))
	for _, h := range handles {
		d.must("aclrtDestroyStream", r.call(destroy, h))
	}
	r.leave()
	d.settled()
}

func mustOpen(t *testing.T) uintptr {
	h, err := open("libascendcl.so")
	if err != nil {
		t.Fatal(err)
	}
	return h
}
