package core

// span is the range of addresses that a view touches, [lo, hi); empty where the view is.
type span struct{ lo, hi uintptr }

func (a span) meets(b span) bool { return max(a.lo, b.lo) < min(a.hi, b.hi) }

// checkOverlap refuses outputs, and what is updated in place, that share memory with anything.
//
// Two views are taken to be apart where their address ranges are, or where, for some stride P of either, their addresses modulo P are:
// the dimensions whose strides are multiples of P then fall away, and what is left must be two ranges that do not meet on a circle of
// length P. That covers slices of one buffer along any dimension, such as the halves of fused rows. It never calls apart what is not;
// it may call overlapping what only a search would find apart.
func (c *Call) checkOverlap(p *plan) *Error {
	given := c.given[:c.n]
	for k, i := range given {
		out := &c.Tensors[i]
		if !p.tensors[i].out || c.spans[i] == (span{}) {
			continue
		}
		if !nested(out) {
			return c.invalid("%s has shape %v and strides %v, expected an output whose elements do not overlap", c.Op.Tensors[i].Name,
				out.Shape[:out.Rank], out.Stride[:out.Rank])
		}
		for l, j := range given {
			if !c.spans[i].meets(c.spans[j]) || p.tensors[j].out && l <= k {
				continue
			}
			if p.tensors[j].host && c.Device.Type != CPU {
				continue // another address space
			}
			if !apart(out, &c.spans[i], &c.Tensors[j], &c.spans[j]) {
				return c.invalid("%s overlaps %s, expected an output with memory of its own", c.Op.Tensors[i].Name, c.Op.Tensors[j].Name)
			}
		}
	}
	return nil
}

// nested tells whether, from the smallest stride on, each stride steps over all that the smaller ones reach: then no two elements are
// one. Strides that interleave in another way are refused too; no framework makes them.
func nested(t *Tensor) bool {
	// Tensors that come compact are the rule: strides fall, and each is at least the size of what follows.
	reach := int64(1)
	for j := t.Rank - 1; j >= 0; j-- {
		if t.Shape[j] > 1 {
			if t.Stride[j] < reach {
				return nestedInAnyOrder(t)
			}
			reach += (t.Shape[j] - 1) * t.Stride[j]
		}
	}
	return true
}

func nestedInAnyOrder(t *Tensor) bool {
	var done [MaxRank]bool
	reach := int64(1)
	for range t.Rank {
		next := -1
		for j := range int(t.Rank) {
			if t.Shape[j] > 1 && !done[j] && (next < 0 || abs(t.Stride[j]) < abs(t.Stride[next])) {
				next = j
			}
		}
		if next < 0 {
			return true
		}
		if abs(t.Stride[next]) < reach {
			return false
		}
		reach += (t.Shape[next] - 1) * abs(t.Stride[next])
		done[next] = true
	}
	return true
}

func apart(a *Tensor, sa *span, b *Tensor, sb *span) bool {
	for _, t := range [2]*Tensor{a, b} {
		for j := range t.Shape[:t.Rank] {
			period := abs(t.Stride[j]) * t.DType.Size()
			if t.Shape[j] > 1 && period > 1 && apartModulo(a, sa, b, sb, period) {
				return true
			}
		}
	}
	return false
}

// apartModulo compares what remains of both views on a circle of length period, from the lowest address of each.
func apartModulo(a *Tensor, sa *span, b *Tensor, sb *span, period int64) bool {
	la, lb := remainder(a, period), remainder(b, period)
	if la+lb > period { // also where either is longer than the circle
		return false
	}
	// How far b begins after a, going round.
	gap := int64((sb.lo%uintptr(period) + uintptr(period) - sa.lo%uintptr(period)) % uintptr(period))
	return gap >= la && gap+lb <= period
}

// remainder is the length in bytes of a view without the dimensions that step by whole periods, at most 2^62.
func remainder(t *Tensor, period int64) int64 {
	size := t.DType.Size()
	length := size
	for j := range t.Shape[:t.Rank] {
		if step := abs(t.Stride[j]) * size; t.Shape[j] > 1 && step%period != 0 {
			length += (t.Shape[j] - 1) * step
		}
	}
	return length
}

func abs(n int64) int64 { return max(n, -n) }
