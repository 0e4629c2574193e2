"""The shapes, data and switches that flash-linear-attention and FlashQLA test with, against the float64 recurrence at the tolerances of the CPU
(reference.py). The operator runs whole; the recurrence, which costs nearly all the time, only some heads and batches of the large
shapes: nothing passes between heads or batches, and A_log and dt_bias, which sum over batches, get all of those."""

import pytest
import torch
import torch.nn.functional as F

import gdn
import reference
from harness import check, expected, run, same, upstream

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
slow = pytest.mark.slow

chunk, recurrent = gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule


def rows(cases, fast):
    """Parametrised cases, all but those numbered in `fast` marked slow."""
    return [pytest.param(*case, id="-".join(str(x).replace("torch.", "").replace(" ", "") for x in case), marks=() if i in fast else slow)
            for i, case in enumerate(cases)]


def gates(norm, mask_p, *shape):
    g = F.logsigmoid(torch.rand(shape)) / norm
    return g * (torch.rand(shape) > mask_p)


def unit(x):
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def some(H, B, T, all_batches=False):
    """The heads and batches that the recurrence sees: all of a small call, the first and the last of others, the last of long ones."""
    if B * H * T <= 1024:
        return {}
    if all_batches:
        return {"heads": [H - 1]}
    if T > 1500:
        return {"heads": [H - 1], "batches": [B - 1]}
    return {"heads": sorted({0, H - 1}), "batches": sorted({0, B - 1})}


# Recurrent

RECURRENT = [
    (1, 63, 1, 1, 64, 1, 1, f32), (2, 500, 4, 4, 60, 1, 1, f32), (2, 1000, 2, 8, 128, 1, .1, f32), (3, 1024, 2, 2, 128, .1, 1, f32),
    (4, 1024, 3, 3, 128, 1, 10, f32), (4, 2048, 4, 4, 64, .1, 1, f32), (2, 1024, 4, 4, 128, .1, 1, f16), (2, 1024, 4, 8, 128, 1, 10, f16)]


def recurrent_data(B, T, H, HV, D, norm, dtype):
    q, k = (torch.randn(B, T, H, D).to(dtype) for _ in range(2))
    v = torch.randn(B, T, HV, D).to(dtype)
    return dict(q=q, k=k, v=v, g=gates(norm, -1, B, T, HV), beta=torch.rand(B, T, HV).sigmoid(), initial_state=torch.randn(B, HV, D, D))


@pytest.mark.parametrize("B,T,H,HV,D,scale,norm,dtype", rows(RECURRENT, {0}))
def test_recurrent(B, T, H, HV, D, scale, norm, dtype):
    tensors = recurrent_data(B, T, H, HV, D, norm, dtype)
    do, dht = upstream(tensors)
    check(recurrent, tensors, dict(scale=scale, use_qk_l2norm_in_kernel=True, output_final_state=True), do, dht, **some(H, B, T))


@pytest.mark.parametrize("B,T,H,HV,D,scale,has_dt_bias,dtype", rows([
    (1, 64, 1, 1, 64, 1, False, f32), (2, 256, 2, 2, 64, 1, True, f32), (2, 512, 2, 4, 64, .1, True, f16), (3, 1000, 2, 8, 128, 1, False, f16),
    (4, 1024, 4, 4, 128, .1, True, f16)], {0, 1}))
def test_recurrent_gate_in_kernel(B, T, H, HV, D, scale, has_dt_bias, dtype):
    tensors = recurrent_data(B, T, H, HV, D, 1, dtype)
    raw_gate(tensors, has_dt_bias)
    do, dht = upstream(tensors)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, output_final_state=True)
    check(recurrent, tensors, options, do, dht, **some(H, B, T, all_batches=True))


def raw_gate(tensors, has_dt_bias, normal=False):
    B, T, HV = tensors["v"].shape[:3]
    tensors["g"] = torch.randn(B, T, HV)
    tensors["A_log"] = torch.randn(HV) if normal else torch.empty(HV).uniform_(1, 16).log()
    if has_dt_bias:
        tensors["dt_bias"] = torch.randn(HV)


@pytest.mark.parametrize("cu", [[0, 15, 100, 300], pytest.param([0, 256, 500, 1000], marks=slow),
                                pytest.param([0, 15, 100, 300, 1200, 2000], marks=slow)], ids=str)
def test_recurrent_gate_in_kernel_varlen(cu):
    H, HV, D = 2, 4, 64
    tensors = recurrent_data(1, cu[-1], H, HV, D, 1, f16)
    raw_gate(tensors, has_dt_bias=True)
    tensors["initial_state"] = torch.randn(len(cu) - 1, HV, D, D)
    tensors["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    do, dht = upstream(tensors, len(cu) - 1)
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, output_final_state=True)
    check(recurrent, tensors, options, do, dht, **some(H, 1, cu[-1], all_batches=True))


@pytest.mark.parametrize("B,T,H,HV,D,scale,neg,dtype", rows([
    (1, 64, 1, 1, 64, 1, False, f32), (2, 512, 2, 4, 64, .1, True, f16), (3, 1000, 2, 8, 128, 1, True, f16), (4, 1024, 4, 4, 128, .1, False, f16)
], {0}))
def test_recurrent_beta_sigmoid(B, T, H, HV, D, scale, neg, dtype):
    tensors = recurrent_data(B, T, H, HV, D, 1, dtype)
    tensors["beta"] = torch.randn(B, T, HV)
    do, dht = upstream(tensors)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg, output_final_state=True)
    check(recurrent, tensors, options, do, dht, **some(H, B, T))


@pytest.mark.parametrize("dtype", [f32, f16])
def test_recurrent_per_channel(dtype):
    """Decays per key and per value channel, write strength per value channel, at K = V = 256 with value-first states."""
    B, T, H, HV, D = 1, 40, 1, 2, 256
    tensors = recurrent_data(B, T, H, HV, D, 1, dtype)
    tensors.update(gk=gates(1, -1, B, T, HV, D), gv=gates(1, -1, B, T, HV, D), beta=torch.rand(B, T, HV, D).sigmoid())
    do, dht = upstream(tensors)
    check(recurrent, tensors, dict(use_qk_l2norm_in_kernel=True, state_v_first=True, output_final_state=True), do, dht)


# Chunk

def chunk_data(B, T, H, HV, D, norm, mask_p, dtype, in_kernel_norm):
    q, k = (torch.rand(B, T, H, D).to(dtype) for _ in range(2))
    if not in_kernel_norm:
        q, k = unit(q), unit(k)
    v = torch.rand(B, T, HV, D).to(dtype)
    return dict(q=q, k=k, v=v, g=gates(norm, mask_p, B, T, HV), beta=torch.rand(B, T, HV).sigmoid(), initial_state=torch.zeros(B, HV, D, D))


@pytest.mark.parametrize("B,T,H,HV,D,scale,norm,mask_p,l2norm", rows([
    (4, 1024, 4, 4, 128, .1, 1, 1.0, False), (2, 75, 4, 4, 64, 1, .01, 0, False), (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, .1, 1, .5, False), (3, 1024, 4, 4, 100, 1, .1, 0, False), (4, 1024, 4, 4, 128, .1, 1, 0, True),
    (2, 1500, 4, 4, 128, .1, 10, 0, False), (4, 2048, 8, 8, 64, .1, 1, 0, False), (2, 256, 2, 4, 64, 1, 1, 0, False),
    (2, 512, 2, 8, 64, 1, .1, 0, True), (2, 1024, 4, 8, 128, .1, 1, 0, False)], {1, 8}))
def test_chunk(B, T, H, HV, D, scale, norm, mask_p, l2norm):
    tensors = chunk_data(B, T, H, HV, D, norm, mask_p, f16, l2norm)
    do, dht = upstream(tensors)
    check(chunk, tensors, dict(scale=scale, use_qk_l2norm_in_kernel=l2norm, output_final_state=True), do, dht, **some(H, B, T))


def test_chunk_size():
    tensors = chunk_data(1, 64, 2, 4, 32, 1.0, 0, f32, False)
    do, dht = upstream(tensors, 1)
    want = expected(tensors, dict(scale=.1), do, dht)
    for size in (16, 32, 64):
        found = run(chunk, tensors, dict(scale=.1, chunk_size=size, output_final_state=True), do, dht)
        for name, t in found.items():
            reference.check(name, want[name], t)


@pytest.mark.parametrize("B,T,H,HV,D,scale,l2norm,neg", rows([
    (2, 500, 4, 4, 64, 1, False, False), (3, 1024, 4, 4, 128, .1, True, True), (2, 1024, 4, 8, 128, .1, False, True),
    (4, 2048, 8, 8, 64, .1, True, False)], ()))
def test_chunk_beta_sigmoid(B, T, H, HV, D, scale, l2norm, neg):
    tensors = chunk_data(B, T, H, HV, D, 1, 0, f16, l2norm)
    tensors["beta"] = torch.randn(B, T, HV)
    do, dht = upstream(tensors)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg, output_final_state=True)
    check(chunk, tensors, options, do, dht, **some(H, B, T))


@pytest.mark.parametrize("function", [chunk, recurrent])
@pytest.mark.parametrize("B,T,H,HV,D", rows(
    [(1, 63, 1, 1, 64), (2, 500, 3, 3, 60), (3, 1024, 4, 4, 128), (4, 2048, 8, 8, 64), (2, 1000, 2, 8, 128)], {0, 1}))
def test_state_v_first(B, T, H, HV, D, function):
    """The same bits as with key-first states, transposed."""
    tensors = recurrent_data(B, T, H, HV, D, 1, f16)
    do, dht = upstream(tensors)
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    first = run(function, tensors, options, do, dht)
    tensors["initial_state"] = tensors["initial_state"].transpose(-1, -2).contiguous()
    found = run(function, tensors, dict(options, state_v_first=True), do, dht.transpose(-1, -2).contiguous())
    same(first, {name: t.transpose(-1, -2) if name in ("ht", "dh0") else t for name, t in found.items()})


# Packed sequences

VARLEN = [
    (4, 4, 60, 0, [0, 15]), (4, 4, 64, 0, [0, 256, 500, 1000]), (4, 4, 64, .5, [0, 256, 500, 1000]),
    (4, 4, 100, 0, [0, 15, 100, 300, 1200, 2000]), (2, 4, 64, 0, [0, 256, 500, 1000]), (2, 8, 64, 0, [0, 256, 500, 1000])]


def varlen_data(H, HV, D, mask_p, cu, dtype=f16):
    T, N = cu[-1], len(cu) - 1
    q = torch.randn(1, T, H, D).to(dtype)
    k = unit(torch.randn(1, T, H, D)).to(dtype)
    v = torch.randn(1, T, HV, D).to(dtype)
    return dict(q=q, k=k, v=v, g=gates(1, mask_p, 1, T, HV), beta=torch.rand(1, T, HV).sigmoid(),
                initial_state=torch.randn(N, HV, D, D).to(dtype), cu_seqlens=torch.tensor(cu))


@pytest.mark.parametrize("H,HV,D,mask_p,cu", rows(VARLEN, {0}))
def test_chunk_varlen(H, HV, D, mask_p, cu):
    tensors = varlen_data(H, HV, D, mask_p, cu)
    do, dht = upstream(tensors, len(cu) - 1)
    check(chunk, tensors, dict(output_final_state=True), do, dht, **some(H, 1, cu[-1], all_batches=True))


@pytest.mark.parametrize("H,HV,D,mask_p,cu", rows(VARLEN[:4] + [(4, 4, 60, 0, [0, 8192])], {0, 1}))
def test_chunk_varlen_prefill(H, HV, D, mask_p, cu):
    check(chunk, varlen_data(H, HV, D, mask_p, cu), dict(output_final_state=True), **some(H, 1, cu[-1], all_batches=True))


def documents(tensors, T, first, last):
    """Some of the packed sequences of T tokens each."""
    piece = {name: t[:, first * T:last * T] for name, t in tensors.items() if name not in ("initial_state", "cu_seqlens")}
    return dict(piece, initial_state=tensors["initial_state"][first:last], cu_seqlens=torch.arange(last - first + 1) * T)


@slow
def test_many_documents():
    """2050 documents of 16 tokens are the same as two halves, to the bit."""
    N, T, H, D = 2050, 16, 32, 32
    tensors = varlen_data(H, H, D, 0, [T * n for n in range(N + 1)])
    do, dht = upstream(tensors, N)
    found = run(chunk, tensors, dict(output_final_state=True), do, dht)
    half = N // 2
    for first, last in ((0, half), (half, N)):
        part = run(chunk, documents(tensors, T, first, last), dict(output_final_state=True), do[:, first * T:last * T], dht[first:last])
        same(part, {name: t[first:last] if name in ("ht", "dh0") else t[:, first * T:last * T] for name, t in found.items()})
    check(chunk, documents(tensors, T, N - 64, N), dict(output_final_state=True), do[:, -64 * T:], dht[-64:], heads=[H - 1])


# Gate in the kernel

def gate_case(tensors, bias, scale, l2norm, sequences):
    raw_gate(tensors, bias, normal=True)
    HV, K = tensors["v"].shape[2], tensors["q"].shape[3]
    do, dht = upstream(tensors, sequences)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=True, output_final_state=True)
    B, T, H = tensors["q"].shape[:3]
    check(chunk, tensors, options, do, dht, **some(H, B, T, all_batches=True))


@pytest.mark.parametrize("B,T,H,HV,D,scale,bias,l2norm", rows([
    (2, 75, 4, 4, 64, 1, True, True), (2, 500, 3, 3, 60, 1, False, False), (2, 1000, 3, 3, 64, .1, True, False),
    (3, 1024, 4, 4, 100, 1, True, True), (4, 1024, 4, 4, 128, .1, False, True), (4, 2048, 8, 8, 64, .1, True, False),
    (2, 256, 2, 4, 64, 1, True, False), (2, 512, 1, 4, 64, .1, False, False), (2, 512, 2, 8, 64, 1, True, False),
    (2, 1024, 4, 8, 128, .1, True, False)], {0, 6}))
def test_chunk_gate_in_kernel(B, T, H, HV, D, scale, bias, l2norm):
    gate_case(chunk_data(B, T, H, HV, D, 1, 0, f16, l2norm), bias, scale, l2norm, B)


@pytest.mark.parametrize("bias,D,cu", rows([
    (True, 60, [0, 15]), (True, 64, [0, 256, 500, 1000]), (False, 64, [0, 256, 500, 1000]), (True, 100, [0, 15, 100, 300, 1200, 2000])], {0}))
def test_chunk_gate_in_kernel_varlen(bias, D, cu):
    gate_case(varlen_data(4, 4, D, 0, cu), bias, None, False, len(cu) - 1)


@pytest.mark.parametrize("B,T,H,HV,D", [(1, 128, 1, 1, 64), (2, 256, 2, 4, 64)])
def test_no_gate_is_gate_zero(B, T, H, HV, D):
    tensors = chunk_data(B, T, H, HV, D, 1, 1, f32, False)
    do, dht = upstream(tensors)
    zero = run(chunk, tensors, dict(output_final_state=True), do, dht)
    del tensors["g"]
    none = check(chunk, tensors, dict(output_final_state=True), do, dht)
    del zero["dg"]
    same(none, zero)


# FlashQLA's shapes

def qla_data(B, T, H, HV, D, dtype):
    q, k = (unit(torch.randn(B, T, H, D)).to(dtype) for _ in range(2))
    v = torch.randn(B, T, HV, D).to(dtype)
    return dict(q=q, k=k, v=v, g=F.logsigmoid(torch.randn(B, T, HV)), beta=torch.randn(B, T, HV).sigmoid())


@pytest.mark.parametrize("B,T,H,HV,D,dtype", rows([
    (1, 1024, 4, 4, 128, bf16), (2, 2048, 8, 8, 128, bf16), (1, 4096, 16, 16, 128, bf16), (1, 1024, 4, 4, 128, f16),
    (2, 2048, 8, 8, 128, f16), (1, 1024, 2, 8, 128, bf16), (2, 2048, 4, 16, 128, bf16)], ()))
def test_qla_shapes(B, T, H, HV, D, dtype):
    tensors = qla_data(B, T, H, HV, D, dtype)
    do, dht = upstream(tensors)
    check(chunk, tensors, dict(output_final_state=True), do, dht, **some(H, B, T))


@pytest.mark.parametrize("H,cu", rows([
    (4, [0, 256, 500, 1000]), (8, [0, 100, 300, 1200, 2000]), (16, [0, 101, 303, 1205, 3007, 4096])], ()))
def test_qla_varlen(H, cu):
    tensors = qla_data(1, cu[-1], H, H, 128, bf16)
    tensors["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    do, dht = upstream(tensors, len(cu) - 1)
    check(chunk, tensors, dict(output_final_state=True), do, dht, **some(H, 1, cu[-1], all_batches=True))
