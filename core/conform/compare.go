package conform

import (
	"fmt"
	"math"
	"strings"

	"libgdn/core"
)

// bound says how far an output may be from the oracle: by the rounding of each element to its dtype, and beyond that by ratio, as
// rms(x-ref)/rms(ref). Where all differences are below floor*max|ref| or least they do not count: there the ratio measures the rounding of
// what cancels, or the smallest numbers of the dtype. squares, if not 0, is a sum of squares to take for that of ref where it is larger.
type bound struct{ ratio, round, floor, least, squares float64 }

// boundOf gives the bound of a tensor whose call computes in double precision or not. The ratio is what sums of a few thousand terms lose;
// gradients of gates and beta are differences and sums of more.
func boundOf(name string, d core.DType, double bool) bound {
	b := bound{ratio: 1e-5, floor: 1e-6, least: 1e-35} // fp32 loses bits below 1.2e-38, and such numbers are summed over up to 512 channels
	switch {
	case double:
		b = bound{ratio: 1e-12, floor: 1e-13, least: 1e-300}
	case gateGradient(name):
		b.ratio = 3e-5
	}
	switch d {
	case core.F32:
		if double {
			b.round, b.least = 0x1p-24, 1e-38
		}
	case core.BF16:
		b.round, b.least = 0x1p-8, max(b.least, 1e-38)
	case core.F16:
		b.round, b.least = 0x1p-11, 0x1p-24 // the spacing of fp16 numbers near 0
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

// overall holds 16-bit outputs also in the whole: rounding to nearest errs by 0.42 of what it may at most.
func (b bound) overall() float64 {
	switch b.round {
	case 0x1p-8:
		return 2.5e-3
	case 0x1p-11:
		return 4e-4
	}
	return math.Inf(1)
}

// few is up to how many elements the mean of the roundings may be far from what it is of many.
const few = 4096

// compare says how got misses want, or nothing.
func compare(got, want []float64, b bound) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d elements, expected %d", len(got), len(want))
	}
	var diff, excess, norm, worst, most float64
	at := 0
	for i := range want {
		if math.IsInf(want[i], 0) && got[i] == want[i] {
			continue
		}
		if math.IsNaN(got[i]) || math.IsInf(got[i], 0) {
			return fmt.Errorf("element %d is %v, expected %v", i, got[i], want[i])
		}
		d := math.Abs(got[i] - want[i])
		if d > worst {
			worst, at = d, i
		}
		most = max(most, math.Abs(want[i]))
		beyond := max(d-max(b.round*math.Abs(want[i]), b.least), 0)
		diff, excess, norm = diff+d*d, excess+beyond*beyond, norm+want[i]*want[i]
	}
	norm = max(norm, b.squares)
	if worst <= max(b.floor*most, b.least) {
		return nil
	}
	if ratio := math.Sqrt(excess / norm); excess > 0 && !(ratio <= b.ratio) {
		return fmt.Errorf("rms error beyond rounding is %.2e of the rms, expected at most %.1e; worst is element %d: %v, expected %v", ratio, b.ratio, at,
			got[at], want[at])
	}
	if ratio := math.Sqrt(diff / norm); len(want) >= few && !(ratio <= b.overall()) {
		return fmt.Errorf("rms error is %.2e of the rms, expected at most %.1e", ratio, b.overall())
	}
	return nil
}
