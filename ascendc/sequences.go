package ascendc

import "libgdn/core"

// chunk is the number of tokens that all vendors' chunk operators take at a time.
const chunk = 64

// sequences is how a call's tokens are cut up. Vendors' operators differ in whether they stand an empty sequence, so they get to see none.
type sequences struct {
	packed bool
	tokens int64   // rows of the token dimension that belong to sequences
	batch  int64   // B
	which  []int64 // the sequences that have tokens; nil: all of them
	count  int64   // how many these are
	cu     []int64 // their offsets, and
	chunks []int64 // the pairs (sequence, chunk in it); both nil unless packed
	nt     int64   // chunks per row of the batch
	most   int64   // tokens of the longest sequence
}

func (r *run) sequences() *sequences {
	s := &sequences{tokens: r.c.Size("T"), batch: r.c.Size("B"), count: r.c.Size("N")}
	s.nt, s.most = (s.tokens+chunk-1)/chunk, s.tokens
	cu := r.c.Offsets()
	if cu == nil {
		return s
	}
	s.packed, s.nt, s.most, s.tokens, s.count = true, 0, 0, cu[len(cu)-1], 0
	s.cu = append(make([]int64, 0, len(cu)), 0)
	s.which = make([]int64, 0, len(cu))
	for i := range len(cu) - 1 {
		n := cu[i+1] - cu[i]
		if n == 0 {
			continue
		}
		for c := int64(0); c*chunk < n; c++ {
			s.chunks = append(s.chunks, s.count, c)
			s.nt++
		}
		s.most = max(s.most, n)
		s.count++
		s.cu, s.which = append(s.cu, cu[i+1]), append(s.which, int64(i))
	}
	if s.count == int64(len(cu)-1) {
		s.which = nil
	}
	return s
}

// lengths is how many tokens each sequence has.
func (s *sequences) lengths() []int32 {
	n := make([]int32, s.count)
	for i := range n {
		n[i] = int32(s.tokens)
		if s.packed {
			n[i] = int32(s.cu[i+1] - s.cu[i])
		}
	}
	return n
}

// empty tells whether there is no token at all, for which no operator of a vendor can be called.
func (s *sequences) empty() bool { return s.tokens == 0 || s.batch == 0 }

// rows is an input [B T ...] without the rows that belong to no sequence; nil where it was not given.
func (r *run) rows(name string, d core.DType, s *sequences) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	return r.asCompact(sliced(t, 1, 0, s.tokens), d)
}

// rowsOut is where an output [B T ...] is computed; the rows that belong to no sequence become zero. nil where it is not wanted.
func (r *run) rowsOut(name string, d core.DType, s *sequences) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	if d == core.None {
		d = t.DType
	}
	if rest := t.Shape[1] - s.tokens; rest > 0 {
		r.zero(sliced(t, 1, s.tokens, rest))
	}
	used := sliced(t, 1, 0, s.tokens)
	if d == t.DType && isCompact(used) {
		return used
	}
	from := r.temp(d, used.Shape[:used.Rank]...)
	r.later(used, from)
	return from
}

// stateView is a state [N HV K V] of the call with K first, or with V first if vFirst, whatever the caller's layout.
func (r *run) stateView(name string, vFirst bool) *core.Tensor {
	t := r.c.Tensor(name)
	if t.DType == core.None {
		return nil
	}
	if (r.c.Int("state_v_first") != 0) != vFirst {
		return permuted(t, 0, 1, 3, 2)
	}
	return t
}

// state is the state of the sequences that have tokens, compact; nil where it was not given.
func (r *run) state(name string, d core.DType, vFirst bool, s *sequences) *core.Tensor {
	t := r.stateView(name, vFirst)
	if t == nil || s.which == nil {
		if t == nil {
			return nil
		}
		return r.asCompact(t, d)
	}
	if d == core.None {
		d = t.DType
	}
	to := r.temp(d, s.count, t.Shape[1], t.Shape[2], t.Shape[3])
	for i, n := range s.which {
		r.copy(sliced(to, 0, int64(i), 1), sliced(t, 0, n, 1))
	}
	return to
}

// stateOut is where the state after those sequences is computed. A sequence without tokens keeps what is in the state named before, or zero;
// nil where it is not wanted.
func (r *run) stateOut(name, before string, d core.DType, vFirst bool, s *sequences) *core.Tensor {
	t := r.stateView(name, vFirst)
	if t == nil {
		return nil
	}
	if s.which == nil && !s.empty() {
		if d == t.DType && isCompact(t) {
			return t
		}
		from := r.temp(d, t.Shape[:4]...)
		r.later(t, from)
		return from
	}
	old := r.stateView(before, vFirst)
	from := r.temp(d, s.count, t.Shape[1], t.Shape[2], t.Shape[3])
	next := 0
	for n := range t.Shape[0] {
		here := sliced(t, 0, n, 1)
		switch {
		case !s.empty() && next < len(s.which) && s.which[next] == n:
			r.later(here, sliced(from, 0, int64(next), 1))
			next++
		case old != nil:
			r.copy(here, sliced(old, 0, n, 1))
		default:
			r.zero(here)
		}
	}
	return from
}

// headMajor is a compact copy [B H T ...] of a compact [B T H ...].
func (r *run) headMajor(t *core.Tensor) *core.Tensor {
	if t == nil {
		return nil
	}
	v := exchanged(t)
	to := r.temp(t.DType, v.Shape[:v.Rank]...)
	r.copy(to, v)
	return to
}

// exchanged is a view with the second and third dimension exchanged.
func exchanged(t *core.Tensor) *core.Tensor {
	if t.Rank == 3 {
		return permuted(t, 0, 2, 1)
	}
	return permuted(t, 0, 2, 1, 3)
}
