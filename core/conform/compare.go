package conform

import (
	"fmt"
	"math"
	"strings"

	"libgdn/core"
)

// bound is the largest rms(x-ref)/rms(ref) of an output. Differences below floor*max|ref| or below least do not count: there the ratio
// measures the rounding of what cancels, or the smallest numbers of the dtype.
type bound struct{ ratio, floor, least float64 }

// boundOf gives the bounds of a tensor whose call computes in double precision or not. Where a 16-bit dtype comes out, the bound is its own
// rounding of each element (2^-9 and 2^-12 at most, half of that in the mean) with a little room; the others are what fp32 sums of a few
// thousand terms lose. Gradients of gates and beta are differences and sums over more terms.
func boundOf(name string, d core.DType, double bool) bound {
	b := bound{ratio: 1e-5, floor: 1e-6, least: 1e-35} // fp32 loses bits below 1.2e-38; such numbers are summed over up to 512 channels
	switch {
	case double:
		b = bound{ratio: 1e-12, floor: 1e-13, least: 1e-300}
	case gateGradient(name):
		b.ratio = 3e-5
	}
	switch d {
	case core.F32:
		b.ratio, b.least = max(b.ratio, 1e-7), max(b.least, 1e-38)
	case core.BF16:
		b.ratio, b.least = 2.5e-3, max(b.least, 1e-38)
	case core.F16:
		b = bound{ratio: 4e-4, floor: 1e-6, least: 0x1p-24} // the spacing of fp16 numbers near 0
	}
	return b
}

func gateGradient(name string) bool {
	switch strings.TrimPrefix(name, "d") {
	case "g", "gk", "gv", "beta", "A_log", "dt_bias":
		return true
	}
	return false
}

// compare says how got misses want, or nothing.
func compare(got, want []float64, b bound) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d elements, expected %d", len(got), len(want))
	}
	var diff, norm, worst, most float64
	at := 0
	for i := range want {
		if math.IsNaN(got[i]) || math.IsInf(got[i], 0) {
			return fmt.Errorf("element %d is %v, expected %v", i, got[i], want[i])
		}
		d := got[i] - want[i]
		if math.Abs(d) > worst {
			worst, at = math.Abs(d), i
		}
		most = max(most, math.Abs(want[i]))
		diff, norm = diff+d*d, norm+want[i]*want[i]
	}
	if worst <= max(b.floor*most, b.least) {
		return nil
	}
	if ratio := math.Sqrt(diff / norm); !(ratio <= b.ratio) {
		return fmt.Errorf("rms error is %.2e of the rms, expected at most %.1e; worst is element %d: %v, expected %v", ratio, b.ratio, at, got[at], want[at])
	}
	return nil
}
