package ascendc

import (
	"fmt"
	"strings"
	"sync"

	"libgdn/core"
)

// Backend serves Ascend NPUs.
type Backend struct {
	caller func() Caller

	once sync.Once
	acl  *acl
	err  error // why there is no CANN; later calls say the same

	layouts sync.Map // layoutKey -> *layoutAnswer

	mu    sync.Mutex
	lanes map[laneKey]*lane
}

type laneKey struct {
	device int32
	stream uintptr
}

// New returns the backend. Nothing is loaded until a call comes that has tensors on a device. caller says what the calling thread has set.
func New(caller func() Caller) *Backend {
	return &Backend{caller: caller, lanes: map[laneKey]*lane{}}
}

// Name is "ascend".
func (*Backend) Name() string { return "ascend" }

// Device is DLPack's number of Ascend NPUs.
func (*Backend) Device() core.DeviceType { return core.Ascend }

// path is one way to run an operator.
type path struct {
	what   string                            // in a few words, for people
	needs  []*opName                         // operators of vendors that it calls in any case
	refuse func(a *acl, c *core.Call) string // what of this call it cannot do; "" if nothing
	run    func(r *run)                      // enqueues the work
}

// paths lists the ways to run each operator, the first that can is taken. All of them are made of vendors' operators.
var paths = map[string][]*path{
	"fwd":               {flaForward, flaStagesForward, stockForward},
	"bwd":               {flaBackward, flaStagesBackward},
	"recurrent_fwd":     {flaRecurrent, stockRecurrent},
	"summary_fwd":       {flaSummary},
	"summary_bwd":       {flaSummaryBwd},
	"kda_summary_fwd":   {kdaSummary},
	"kda_summary_bwd":   {kdaSummaryBwd},
	"summary_merge":     {stockMerge},
	"kda_fwd":           {kdaForward, kdaOldForward},
	"kda_bwd":           {kdaBackward},
	"kda_recurrent_fwd": {kdaRecurrent},
}

// choose finds the path of a call, or says for each one why not.
func (b *Backend) choose(a *acl, c *core.Call) (*path, error) {
	switch way := getenv("GDN_ASCEND"); way {
	case "", "auto", "vendor":
	case "own":
		return nil, c.Errorf(core.Unsupported, "GDN_ASCEND is own, and this version has no NPU kernels of its own; expected vendor or auto")
	default:
		return nil, c.Errorf(core.InvalidArgument, "the environment variable GDN_ASCEND is %q, expected vendor, own or auto", way)
	}
	list := paths[c.Op.Name]
	if len(list) == 0 {
		return nil, c.Errorf(core.Unsupported, "no operator of CANN %s or of flash-linear-attention-npu computes it on %v; move the tensors to the CPU", a.version, c.Device)
	}
	var reasons []string
next:
	for _, p := range list {
		for _, op := range p.needs {
			if v := op.in(a); v.err != nil {
				reasons = append(reasons, fmt.Sprintf("%s: %v", p.what, v.err))
				continue next
			}
		}
		if why := p.refuse(a, c); why != "" {
			reasons = append(reasons, fmt.Sprintf("%s: %s", p.what, why))
			continue
		}
		return p, nil
	}
	return nil, c.Errorf(core.Unsupported, "no way to run this on %v (%s, CANN %s): %s", c.Device, a.soc, a.version, strings.Join(reasons, "; "))
}

// open loads CANN at the first call and names the chip that the tensors are on.
func (b *Backend) open(c *core.Call) (*acl, error) {
	b.once.Do(func() { b.acl, b.err = load() })
	if b.err != nil {
		return nil, c.Errorf(core.NoBackend, "the tensors are on %v, and %v", c.Device, b.err)
	}
	return b.acl, nil
}

// Supports says which path a call would take.
func (b *Backend) Supports(c *core.Call) (string, error) {
	a, err := b.open(c)
	if err != nil {
		return "", err
	}
	p, err := b.choose(a, c)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("ascend, %s, CANN %s on %s", p.what, a.version, a.soc), nil
}

// Info reports what this machine has for Ascend NPUs.
func (b *Backend) Info() string {
	b.once.Do(func() { b.acl, b.err = load() })
	if b.err != nil {
		return b.err.Error()
	}
	a := b.acl
	lines := []string{fmt.Sprintf("CANN %s, %s", a.version, a.soc)}
	switch {
	case a.fla == nil:
		lines = append(lines, "fla-npu: not found")
	case a.fla.err != nil:
		lines = append(lines, fmt.Sprintf("fla-npu: %v", a.fla.err))
	default:
		lines = append(lines, fmt.Sprintf("fla-npu: %s, version %s", a.fla.library, a.fla.version))
	}
	for _, op := range core.Ops {
		for _, p := range paths[op.Name] {
			state := "present"
			for _, need := range p.needs {
				if v := need.in(a); v.err != nil {
					state = v.err.Error()
					break
				}
			}
			lines = append(lines, fmt.Sprintf("gdn_%s by %s: %s", op.Name, p.what, state))
		}
	}
	return strings.Join(lines, "\n")
}

// Run enqueues a call on the caller's stream.
func (b *Backend) Run(c *core.Call) (err error) {
	a, err := b.open(c)
	if err != nil {
		return err
	}
	p, err := b.choose(a, c)
	if err != nil {
		return err
	}
	r := b.begin(a, c)
	defer func() {
		failed := r.end()
		if e, ok := failed.(*core.Error); ok && err == nil {
			err = c.Errorf(e.Status, "%s", e.Msg)
		}
	}()
	for i := range c.Op.Tensors {
		if arg := &c.Op.Tensors[i]; !arg.Host && c.Tensors[i].DType != core.None {
			r.confirm(arg.Name, &c.Tensors[i])
		}
	}
	if r.err == nil {
		p.run(r)
	}
	return nil
}

func (b *Backend) lane(device int32, stream uintptr) *lane {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := laneKey{device, stream}
	l := b.lanes[key]
	if l == nil {
		l = &lane{}
		b.lanes[key] = l
	}
	return l
}

// Trim waits for the devices and gives back all memory that is kept between calls.
func (b *Backend) Trim() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var first error
	for key, l := range b.lanes {
		if err := l.empty(b, key); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (l *lane) empty(b *Backend, key laneKey) error {
	l.Lock()
	defer l.Unlock()
	if len(l.blocks) == 0 && l.staging.at == 0 {
		return nil
	}
	r := &run{acl: b.acl, b: b, device: key.device}
	r.enter()
	// Not the stream: its owner may have destroyed it.
	if r.err == nil {
		r.check("aclrtSynchronizeDevice", r.call(r.synchronizeDevice))
	}
	for len(l.blocks) > 0 && r.err == nil {
		n := len(l.blocks) - 1
		r.check("aclrtFree", r.call(r.free, l.blocks[n].at))
		l.blocks = l.blocks[:n]
	}
	if l.staging.at != 0 && r.err == nil {
		r.check("aclrtFreeHost", r.call(r.freeHost, l.staging.at))
		l.staging = block{}
	}
	return r.leave()
}

// chip sorts SoCs by what vendors build for.
type chip int

const (
	unknownChip chip = iota
	a2               // Ascend 910B
	a3               // Ascend 910_93
	a5               // Ascend 950
)

func (a *acl) chip() chip {
	switch {
	case strings.HasPrefix(a.soc, "Ascend910B"):
		return a2
	case strings.HasPrefix(a.soc, "Ascend910_93"), strings.HasPrefix(a.soc, "Ascend910C"):
		return a3
	case strings.HasPrefix(a.soc, "Ascend950"):
		return a5
	}
	return unknownChip
}
