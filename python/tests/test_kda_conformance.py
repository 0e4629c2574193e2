"""The shapes, data and switches that flash-linear-attention and FlashKDA test Kimi Delta Attention with, against the float64 recurrence at the
tolerances of the CPU. As in test_conformance.py the operator runs whole and the recurrence on some heads and batches of the large shapes."""

import pytest
import torch
import torch.nn.functional as F

import gdn
from harness import check, run, upstream
from test_conformance import bf16, f16, f32, rows, slow, some, unit

chunk, recurrent = gdn.chunk_kda, gdn.fused_recurrent_kda


def gates(norm, mask_p, *shape):
    return F.logsigmoid(torch.randn(shape)) / norm * (torch.rand(shape) > mask_p)


def data(B, T, H, HV, D, norm=1, mask_p=0, dtype=f16, in_kernel_norm=False, in_kernel_gate=False, mild=False):
    q, k = (torch.rand(B, T, H, D).to(dtype) for _ in range(2))
    if not in_kernel_norm:
        q, k = unit(q), unit(k)
    tensors = dict(q=q, k=k, v=torch.rand(B, T, HV, D).to(dtype), beta=torch.randn(B, T, HV).sigmoid(), initial_state=torch.randn(B, HV, D, D))
    if in_kernel_gate:
        tensors.update(g=torch.randn(B, T, HV, D), A_log=torch.randn(HV), dt_bias=torch.randn(HV, D))
    else:
        tensors["g"] = gates(norm, mask_p, B, T, HV, D).clamp(min=-5 if mild else -1e30)
    return tensors


def switches(gate, safe):
    """A safe gate in kernel has a lower bound."""
    return dict(use_gate_in_kernel=gate, safe_gate=safe, **({"lower_bound": -5} if gate and safe else {}))


# Recurrent

@pytest.mark.parametrize("B,T,H,HV,D,scale,norm,l2norm", rows([
    (1, 64, 1, 1, 64, 1, 1, False), (2, 512, 3, 3, 60, 1, 1, False), (3, 1000, 4, 4, 100, .1, 1, True), (4, 1024, 4, 4, 128, .1, 1, False),
    (2, 512, 2, 4, 60, 1, 1, False), (2, 1024, 2, 8, 128, .1, 1, True)], {0}))
def test_recurrent(B, T, H, HV, D, scale, norm, l2norm):
    tensors = data(B, T, H, HV, D, norm, dtype=f32, in_kernel_norm=l2norm)
    check(recurrent, tensors, dict(scale=scale, use_qk_l2norm_in_kernel=l2norm, output_final_state=True), *upstream(tensors), **some(H, B, T))


@pytest.mark.parametrize("B,T,H,HV,D,scale,amplitude,bias,safe,dtype", rows([
    (1, 64, 1, 1, 64, 1, True, False, False, f32), (2, 256, 2, 2, 64, 1, True, True, False, f32), (2, 512, 2, 4, 64, .1, True, True, True, f16),
    (3, 1000, 2, 8, 128, 1, True, False, False, f16), (4, 1024, 4, 4, 128, .1, True, True, True, f16), (1, 64, 1, 1, 64, 1, False, False, True, f32),
    (2, 256, 2, 4, 64, 1, False, True, True, f32)], {0, 1, 5}))
def test_recurrent_gate(B, T, H, HV, D, scale, amplitude, bias, safe, dtype):
    tensors = data(B, T, H, HV, D, dtype=dtype, in_kernel_gate=True)
    tensors = {n: t for n, t in tensors.items() if (amplitude or n != "A_log") and (bias or n != "dt_bias")}
    options = dict(scale=scale, output_final_state=True, **switches(True, safe))
    check(recurrent, tensors, options, *upstream(tensors), **some(H, B, T, all_batches=True))


@pytest.mark.parametrize("function", [chunk, recurrent])
@pytest.mark.parametrize("B,T,H,D,neg", rows([(2, 256, 4, 64, False), (2, 256, 4, 64, True), (1, 512, 3, 60, True)], {0, 1}))
def test_beta_sigmoid(B, T, H, D, neg, function):
    tensors = data(B, T, H, H, D, dtype=f32)
    tensors["beta"] = torch.randn(B, T, H)
    options = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg, output_final_state=True)
    check(function, tensors, options, *upstream(tensors), **some(H, B, T))


@pytest.mark.parametrize("function, dtype", [(chunk, f16), (recurrent, f32)])
@pytest.mark.parametrize("B,T,H,D", rows([(1, 63, 1, 64), (2, 500, 3, 60), (3, 1024, 4, 128), (4, 2048, 8, 64), (3, 1000, 4, 100)], {0, 1}))
def test_state_v_first(B, T, H, D, function, dtype):
    tensors = data(B, T, H, H, D, dtype=dtype)
    do, dht = upstream(tensors)
    k_first = run(function, tensors, dict(output_final_state=True), do, dht)
    tensors["initial_state"] = tensors["initial_state"].transpose(2, 3)
    v_first = run(function, tensors, dict(output_final_state=True, state_v_first=True), do, dht.transpose(2, 3))
    for name, t in k_first.items():
        assert torch.equal(t, v_first[name].transpose(2, 3) if name in ("ht", "dh0") else v_first[name]), name


# Chunk

@pytest.mark.parametrize("B,T,H,HV,D,scale,norm,mask_p,l2norm,gate,dtype,safe,norecomp,C", rows([
    (1, 63, 1, 1, 64, 1, 1, 0, False, False, f16, True, False, 64), (2, 500, 3, 3, 60, 1, 1, 0, False, False, f16, True, True, 64),
    (2, 1000, 3, 3, 64, .1, 1, .5, False, False, f16, False, True, 64), (3, 1024, 4, 4, 100, 1, .1, 0, False, False, f16, False, False, 64),
    (4, 1024, 4, 4, 128, .1, 1, 0, False, False, f16, True, True, 64), (4, 1024, 4, 4, 128, .1, 1, 0, True, False, f16, True, False, 64),
    (2, 1500, 4, 4, 128, .1, 10, 0, False, True, f16, False, True, 64), (4, 2048, 8, 8, 64, .1, 1, 0, False, True, f16, True, True, 64),
    (2, 1024, 2, 4, 64, .1, 1, 0, False, False, f16, False, False, 64), (2, 1024, 2, 8, 64, .1, 1, 0, False, True, f16, False, False, 64),
    (2, 1024, 4, 8, 128, .1, 1, 0, True, True, f16, False, False, 64), (2, 160, 2, 4, 64, .1, 1, 0, False, True, f16, True, True, 32),
    (2, 1024, 2, 4, 64, .1, 1, 0, True, True, bf16, True, False, 64), (2, 1024, 2, 4, 64, .1, 1, 0, False, True, bf16, False, False, 64),
    (2, 160, 2, 4, 64, .1, 1, 0, False, True, bf16, True, True, 32), (2, 1024, 2, 8, 128, .1, 1, 0, True, True, bf16, False, False, 64),
    (2, 160, 2, 4, 64, .1, 1, 0, True, True, f32, True, True, 32)], {0, 11, 14, 16}))
def test_chunk(B, T, H, HV, D, scale, norm, mask_p, l2norm, gate, dtype, safe, norecomp, C):
    tensors = data(B, T, H, HV, D, norm, mask_p, dtype, l2norm, gate, safe)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=l2norm, disable_recompute=norecomp, chunk_size=C, output_final_state=True, **switches(gate, safe))
    check(chunk, tensors, options, *upstream(tensors), **some(H, B, T, all_batches=gate))


@pytest.mark.parametrize("B,T,H,D,neg,dtype", rows([(1, 8192, 96, 128, False, bf16), (1, 8192, 96, 128, True, bf16), (2, 96, 2, 64, True, f16)], {2}))
def test_chunk_beta_in_kernel_is_beta_given(B, T, H, D, neg, dtype):
    tensors = data(B, T, H, H, D, dtype=dtype)
    logits = torch.randn(B, T, H)
    with torch.no_grad():
        a = chunk(**{**tensors, "beta": logits}, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg, output_final_state=True)
        b = chunk(**{**tensors, "beta": logits.sigmoid() * (2 if neg else 1)}, output_final_state=True)
    for x, y in zip(a, b):
        assert (x.float() - y.float()).square().mean().sqrt() <= 1e-4 * y.float().square().mean().sqrt()


# Packed sequences

def varlen_data(H, D, mask_p, cu, gate, dtype=f16, mild=True):
    T, N = cu[-1], len(cu) - 1
    tensors = dict(q=torch.randn(1, T, H, D).to(dtype), k=unit(torch.randn(1, T, H, D).to(dtype)), v=torch.randn(1, T, H, D).to(dtype),
                   beta=torch.rand(1, T, H).sigmoid(), initial_state=torch.randn(N, H, D, D))
    if gate:
        tensors.update(g=torch.randn(1, T, H, D), A_log=torch.empty(H).uniform_(1, 16).log(), dt_bias=torch.randn(H, D))
    else:
        g = F.logsigmoid(torch.randn(1, T, H, D)).masked_fill(torch.rand(1, T, H, D) < mask_p, -1000)
        tensors["g"] = g.clamp(min=-5 if mild else -1e30)
    return tensors


VARLEN = [(4, 60, .1, [0, 15], True, False, False, 64), (4, 64, .9, [0, 256, 500, 1000], True, False, False, 64),
          (4, 128, .5, [0, 256, 500, 1000], False, False, False, 64), (4, 100, 0, [0, 15, 100, 300, 1200, 2000], True, False, False, 64),
          (4, 256, 0, [0, 100, 300, 1200, 3000, 4096], False, True, True, 64), (4, 60, .1, [0, 31, 96, 160], True, False, True, 32),
          (4, 64, .5, [0, 20, 96, 160], False, False, False, 64)]


@pytest.mark.parametrize("H,D,mask_p,cu,gate,safe,norecomp,C", rows(VARLEN, {0, 5, 6}))
def test_varlen(H, D, mask_p, cu, gate, safe, norecomp, C):
    tensors = varlen_data(H, D, mask_p, cu, gate, mild=safe)
    options = dict(cu_seqlens=torch.tensor(cu), disable_recompute=norecomp, chunk_size=C, output_final_state=True, **switches(gate, safe))
    check(chunk, tensors, options, *upstream(tensors, len(cu) - 1), **some(H, 1, cu[-1], all_batches=True))


@pytest.mark.parametrize("H,D,mask_p,cu,gate,safe,norecomp,C", rows([case for case in VARLEN if case[-1] == 64 and len(case[3]) > 2] + [
    (4, 60, .1, [0, 8192], True, False, False, 64)], {4}))
def test_varlen_prefill(H, D, mask_p, cu, gate, safe, norecomp, C):
    tensors = varlen_data(H, D, mask_p, cu, gate, mild=safe)
    options = dict(cu_seqlens=torch.tensor(cu), output_final_state=True, **switches(gate, safe))
    check(chunk, tensors, options, **some(H, 1, cu[-1], all_batches=True))


# FlashKDA

def flash_data(B, T, H, D, N=None, dtype=bf16):
    # beta in float32: its gradient is too few numbers here for the mean of their roundings.
    q, k, v = (torch.randn(B, T, H, D).to(dtype) for _ in range(3))
    return dict(q=q, k=k, v=v, g=torch.randn(B, T, H, D).to(dtype), beta=torch.randn(B, T, H), A_log=torch.rand(H).log(),
                dt_bias=torch.rand(H, D), initial_state=torch.randn(N or B, H, D, D))


FLASH = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5,
             output_final_state=True)


@pytest.mark.parametrize("B,T,H", rows([
    (1, 1024, 4), (2, 2048, 8), (1, 4096, 16), (1, 16, 1), (1, 17, 4), (1, 37, 4), (1, 64, 32), (1, 97, 4), (1, 256, 4), (2, 64, 4), (4, 256, 4),
    (8, 128, 4), (1, 8192, 4)], {3, 4, 5, 7}))
def test_flash_shapes(B, T, H):
    tensors = flash_data(B, T, H, 128)
    check(chunk, tensors, FLASH, *upstream(tensors), **some(H, B, T, all_batches=True))


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize("H,cu", rows([
    (4, [0, 256, 500, 1000]), (8, [0, 100, 300, 1200, 2000]), (16, [0, 101, 303, 1205, 3007, 4096]), (4, offsets([16])), (4, offsets([16, 16])),
    (4, offsets([4, 8, 12])), (4, offsets([64, 128, 256])), (4, offsets([20, 50, 100])), (4, offsets([17, 33, 65])),
    (4, offsets([1300, 547, 2048, 963, 271, 3063])), (4, offsets([1024] * 8))], {3, 4, 5, 8}))
def test_flash_varlen(H, cu):
    tensors = flash_data(1, cu[-1], H, 128, len(cu) - 1)
    check(chunk, tensors, dict(FLASH, cu_seqlens=torch.tensor(cu)), *upstream(tensors, len(cu) - 1), **some(H, 1, cu[-1], all_batches=True))


@slow
@pytest.mark.parametrize("cu", [[0, 131072], [0, 65536, 131072]])
def test_flash_long(cu):
    tensors = flash_data(1, cu[-1], 1, 128, len(cu) - 1)
    tensors = {n: t for n, t in tensors.items() if n != "initial_state"}
    with torch.no_grad():
        o, ht = chunk(**tensors, **FLASH, cu_seqlens=torch.tensor(cu))
        last = {n: t[:, -3000:] if t.dim() > 2 else t for n, t in tensors.items()}
        # With decays of some e^-2 a token nothing remembers that long.
        tail, tail_state = chunk(**last, **FLASH)
    assert o.isfinite().all()
    torch.testing.assert_close(o[:, -2000:], tail[:, -2000:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ht[-1:], tail_state, rtol=1e-3, atol=1e-3)
