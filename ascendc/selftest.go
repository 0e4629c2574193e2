package ascendc

import (
	"sync"
	"unsafe"

	"libgdn/core"
)

// The states of all chunks were [B HV NT K V] in older versions of fla-npu and are [B NT HV K V] in newer ones, under one signature. So
// before an operator that makes them is first used on a device, a case of which the answer is known tells which it is.

type layoutKey struct {
	device int32
	op     *opName
}

type layoutAnswer struct {
	once       sync.Once
	chunkFirst bool
	err        error
}

// chunkStates is a tensor for the states of all chunks as the operator lays them out.
func (r *run) chunkStates(op *opName, d core.DType, s *sequences, hv, k, v int64) *core.Tensor {
	if r.chunkFirst(op) {
		return r.temp(d, s.batch, s.nt, hv, k, v)
	}
	return r.temp(d, s.batch, hv, s.nt, k, v)
}

// chunkFirst tells whether an operator's states are [B NT HV K V].
func (r *run) chunkFirst(op *opName) bool {
	if r.err != nil {
		return true
	}
	found, _ := r.b.layouts.LoadOrStore(layoutKey{r.device, op}, new(layoutAnswer))
	answer := found.(*layoutAnswer)
	answer.once.Do(func() { answer.chunkFirst, answer.err = r.probe(op) })
	if answer.err != nil && r.err == nil {
		r.err = answer.err
		// A device that failed may do better next time.
		r.b.layouts.Delete(layoutKey{r.device, op})
	}
	return answer.chunkFirst
}

// The probe has two heads and three chunks, so that a wrong guess of the layout shows: number 3 of the six matrices is of the second
// chunk and head in one, of the first chunk and second head in the other.
const (
	probeHeads  = 2
	probeChunks = 3
	probeTokens = probeChunks * chunk
	probeSize   = 128
)

// probe runs an operator on keys e0, on values (or, backward, gradients of the output) of head+1 times e0, without decay and without
// what a token sees of the others. The first element of the state before chunk c is then c*64*(head+1), of its gradient behind chunk c
// (2-c)*64*(head+1).
func (r *run) probe(op *opName) (chunkFirst bool, err error) {
	wide := func(values ...int32) *core.Tensor { // [1 heads tokens 128] bf16, every row of a head the same
		full := r.zeros(core.I32, probeHeads, probeSize/2)
		for h, v := range values {
			r.copy(sliced(sliced(full, 0, int64(h), 1), 1, 0, 1), shaped(r.upload([]int32{v}), 1, 1))
		}
		to := r.temp(core.BF16, 1, probeHeads, probeTokens, probeSize)
		r.copy(to, &core.Tensor{Data: full.Data, DType: core.BF16, Rank: 4, Shape: to.Shape, Stride: [core.MaxRank]int64{0, probeSize, 0, 1}})
		return to
	}
	const one, two = 0x3F80, 0x4000 // in bfloat16, in the low half of a word
	s := &sequences{batch: 1, tokens: probeTokens, count: 1, nt: probeChunks}
	keys, values, zero := wide(one, one), wide(one, two), r.zeros(core.BF16, 1, probeHeads, probeTokens, probeSize)
	gate := r.zeros(core.F32, 1, probeHeads, probeTokens)
	var wide4 *core.Tensor
	if op == chunkFwdH || op == bwdDhu {
		wide4 = r.zeros(core.F32, 1, probeHeads, probeTokens, probeSize)
	}
	spare := r.temp(core.BF16, 1, probeHeads, probeTokens, probeSize)
	shapes := [2][]int64{{1, probeChunks, probeHeads, probeSize, probeSize}, {1, probeHeads, probeChunks, probeSize, probeSize}}
	want := map[*opName][2]float32{gdnFwdH: {128, 0}, chunkFwdH: {128, 0}, bwdDhu: {128, 256}}[op]
	var got float32
	var failed error
	for i, shape := range shapes {
		h := r.zeros(core.BF16, shape...)
		switch op {
		case gdnFwdH:
			r.exec(op, keys, zero, values, gate, nil, nil, false, chunk, s.cu, s.chunks, false, h, spare, nil)
		case chunkFwdH:
			r.exec(op, keys, zero, values, nil, wide4, nil, false, chunk, true, s.cu, s.chunks, true, false, h, spare, nil)
		case bwdDhu:
			args := []any{keys, zero, zero, values, zero, nil, wide4, nil, nil, s.cu, s.chunks, 1.0, chunk, true}
			if op.in(r.acl).variant == "new" {
				args = append(args, false)
			}
			r.exec(op, append(args, h, nil, spare)...)
		}
		if got = r.download(h, probeHeads+1); r.err != nil {
			// An operator that checks shapes refuses the wrong one.
			if failed == nil {
				failed = r.err
			}
			r.err = nil
			continue
		}
		if got == want[i] {
			return i == 0, nil
		}
	}
	if failed != nil {
		return false, failed
	}
	return false, core.Errorf(core.Unsupported, "the self-test of %s failed: it lays the states of chunks out in no way that this version of gdn knows (%v, expected %v or %v)",
		op.symbol(), got, want[0], want[1])
}

// download waits for the stream and reads the first element of matrix i of a bf16 tensor.
func (r *run) download(t *core.Tensor, i int64) float32 {
	if r.err == nil {
		r.check("aclrtSynchronizeStream", r.call(r.synchronizeStream, r.caller.Stream))
	}
	if r.err == nil {
		at := t.Data + uintptr(i*t.Stride[2]*2)
		r.check("aclrtMemcpy", r.call(r.memcpy, uintptr(unsafe.Pointer(&r.word[2])), 2, at, 2, deviceToHost))
	}
	return bfloat(uint16(r.word[2]))
}

func bfloat(b uint16) float32 {
	x := uint32(b) << 16
	return *(*float32)(unsafe.Pointer(&x))
}
