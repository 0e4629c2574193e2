"""The sequences of calls that trainers make to ``fla_npu.ops.ascendc``, against the composite operators."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

import gdn
from gdn import summary
from gdn.compat.fla_npu.ops import ascendc as ops
from test_stages import draw, wanted
from test_summary import close

# What callers look for by inspect.signature, and how many arguments they pass by position.
SIGNATURES = {
    "chunk_gated_delta_rule_fwd": (5, "scale layout chunk_size initial_state output_final_state disable_recompute return_intermediate_states state_v_first use_exp2 "
                                      "use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel use_gate_in_kernel cu_seqlens chunk_indices"),
    "chunk_gated_delta_rule_bwd": (8, "layout chunk_size initial_state dht use_exp2 use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel use_gate_in_kernel "
                                      "state_v_first cu_seqlens chunk_indices"),
    "chunk_kda_fwd_prepare": (6, "layout chunk_size safe_gate lower_bound use_gate_in_kernel A_log dt_bias epsilon use_qk_l2norm_in_kernel "
                                 "use_beta_sigmoid_in_kernel use_exp2 backward_mode cu_seqlens chunk_indices"),
    "chunk_fwd_h": (3, "gk initial_state output_final_state use_exp2 cu_seqlens chunk_indices"),
    "chunk_kda_fwd_finalize": (4, "output_layout cu_seqlens chunk_indices"),
    "chunk_kda_bwd_prepare": (4, "scale layout chunk_size cu_seqlens chunk_indices"),
    "pre_process_fwd_kernel_merged": (3, "gk cu_seqlens"),
    "pre_process_bwd_kernel_merged": (7, "gk cu_seqlens"),
    "merge_fwd_bwd_kernel": (4, "forward"),
    "chunk_gated_delta_rule_bwd_dhu": (7, "gK h0 dht use_exp2 cu_seqlens chunk_indices"),
    "chunk_kda_bwd_finalize": (15, "scale lower_bound chunk_size q_rstd k_rstd use_beta_sigmoid_in_kernel output_layout cu_seqlens chunk_indices"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    positional, keywords = SIGNATURES[name]
    signature = inspect.signature(getattr(ops, name))
    assert set(keywords.split()) <= set(signature.parameters)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values())
    signature.bind(*range(positional), **dict.fromkeys(keywords.split()))


def test_found_under_its_name():
    code = ("import importlib, sys\nimport gdn.compat.fla_npu as stand_in\n"
            "if sys.argv[1] == 'install': stand_in.install()\nelse: sys.modules['fla_npu'] = stand_in\n"
            "print(callable(importlib.import_module('fla_npu.ops.ascendc').chunk_fwd_h))")
    for how in ("install", "sys.modules"):
        out = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True, env={"PYTHONPATH": sys.path[0] + ":" + ":".join(sys.path)})
        assert out.stdout.strip() == "True"
    assert importlib.import_module("gdn.compat.fla_npu.ops.ascendc") is ops


def metadata(cu):
    if cu is None:
        return {}
    pairs = tuple(i for s, (a, b) in enumerate(zip(cu, cu[1:])) for c in range((b - a + 63) // 64) for i in (s, c))
    return {"cu_seqlens": cu, "chunk_indices": pairs}


DTYPES = [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 1.5e-2)]


@pytest.mark.parametrize("cu", [None, (0, 70, 134, 150), (0, 0, 150)])
@pytest.mark.parametrize("dtype, ratio", DTYPES, ids=["fp64", "fp32", "bf16"])
def test_gdn(cu, dtype, ratio):
    B, N = (1, len(cu) - 1) if cu else (2, 2)
    q, k, v, g, beta, h0, dht, do, _, _ = draw(dtype, B, 150, 2, 4, 24, 40, False, False, None, N)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    g, h0, dht, scale = g.to(real), h0.to(real), dht.to(real), 24 ** -0.5
    want = wanted(gdn.chunk_gdn, [q, k, v, g, beta, h0], [do, dht], cu_seqlens=cu and torch.tensor(cu))
    layout = "TND" if cu else "BSND"
    made = ops.chunk_gated_delta_rule_fwd(q, k, v, g, beta, scale=scale, layout=layout, chunk_size=64, initial_state=h0, output_final_state=True,
                                          disable_recompute=True, return_intermediate_states=True, state_v_first=False, use_exp2=False,
                                          use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, use_gate_in_kernel=False, **metadata(cu))
    assert len(made) == 10 and made[3].shape == (B, 4, 150, 64) and made[2].shape == g.shape
    assert made[5].shape[1] == (len(metadata(cu)["chunk_indices"]) // 2 if cu else 3)
    back = ops.chunk_gated_delta_rule_bwd(q, k, v, made[2], beta, made[3], do.contiguous(), scale, layout=layout, chunk_size=64, initial_state=h0, dht=dht,
                                          use_exp2=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, use_gate_in_kernel=False,
                                          state_v_first=False, **metadata(cu))
    assert len(back) == 8
    dq, dk, dv, dbeta, dg, dh0, *_ = back
    for got, due in zip((made[0], made[1], dq, dk, dv, dg, dbeta, dh0), want):
        close(got, due, ratio)


def kda_loop(q, k, v, g, beta, A_log, dt_bias, do, lower_bound, cu, h0, dht):
    """As a trainer's autograd function calls the stages; tensors of tokens are [B, T, H, D]."""
    meta, packed, scale = metadata(cu), cu is not None, q.shape[-1] ** -0.5
    q, k, value = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    result = ops.chunk_kda_fwd_prepare(q, k, value, g.transpose(1, 2).contiguous(), beta.transpose(1, 2).contiguous(), scale, layout="BNSD", chunk_size=64,
                                       safe_gate=True, lower_bound=lower_bound, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias.flatten(), epsilon=1e-6,
                                       use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_exp2=True, backward_mode="save", **meta)
    assert len(result) == 13 and all(isinstance(t, torch.Tensor) for t in result)
    gk, Aqk, Akk, w, u, qg, kg, qg_scaled, q_norm, k_norm, q_rstd, k_rstd, beta_eff = result
    h, v_new, ht = ops.chunk_fwd_h(kg, w, u, gk=gk, initial_state=h0, output_final_state=True, use_exp2=True, **meta)
    o = ops.chunk_kda_fwd_finalize(qg_scaled, Aqk, v_new, h, output_layout="BSND", **meta)
    view = (lambda t: t.squeeze(0)) if packed else (lambda t: t)
    layout = "NTD" if packed else "BNSD"
    grad = do.transpose(1, 2).contiguous()
    dAqk, local, dq_raw = ops.chunk_kda_bwd_prepare(*(view(t) for t in (Aqk, v_new, grad, h)), scale=scale, layout=layout, chunk_size=64, **meta)
    local_head = local.unsqueeze(0) if packed else local
    dh, dh0, dv_scan = ops.chunk_gated_delta_rule_bwd_dhu(qg, kg, w, grad, local_head, scale, 64, gK=gk, h0=h0, dht=dht, use_exp2=True, **meta)
    dq, dk, dv, dbeta, dg, dA, dbias = ops.chunk_kda_bwd_finalize(
        *(view(t) for t in (q_norm, k_norm, value, gk, g.transpose(1, 2).contiguous(), beta_eff)), A_log, dt_bias,
        *(view(t) for t in (Akk, v_new, h, dh, dv_scan)), dAqk, dq_raw, scale=scale, lower_bound=lower_bound, chunk_size=64, q_rstd=view(q_rstd),
        k_rstd=view(k_rstd), use_beta_sigmoid_in_kernel=True, output_layout=layout, **meta)
    if packed:
        dq, dk, dv, dbeta, dg = (t.unsqueeze(0) for t in (dq, dk, dv, dbeta, dg))
    return (o, ht, *(t.transpose(1, 2) for t in (dq, dk, dv, dg, dbeta)), dh0, dA, dbias), (gk, w, u, qg, kg, grad, local_head)


@pytest.mark.parametrize("cu", [None, (0, 70, 134, 150)])
@pytest.mark.parametrize("dtype, ratio", DTYPES, ids=["fp64", "fp32", "bf16"])
def test_kda(cu, dtype, ratio):
    B, N = (1, len(cu) - 1) if cu else (2, 2)
    q, k, v, g, beta, h0, dht, do, A_log, dt_bias = draw(dtype, B, 150, 2, 4, 24, 40, True, True, None, N)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    h0, dht, A_log, dt_bias = (t.to(real) for t in (h0, dht, A_log, dt_bias))
    want = wanted(gdn.chunk_kda, [q, k, v, g, beta, h0, A_log, dt_bias], [do, dht], use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                  use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, cu_seqlens=cu and torch.tensor(cu))
    got, _ = kda_loop(q, k, v, g, beta, A_log, dt_bias, do, -5.0, cu, h0, dht)
    for name, x, due in zip(("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"), got, want):
        close(x, due, 4 * ratio if name == "dA_log" else ratio)


def test_maps_and_merge():
    """Four ranks of one sequence: each makes its maps from the stages' tensors, merges those before and behind it, and has the whole's gradients."""
    q, k, v, g, beta, _, _, do, A_log, dt_bias = draw(torch.float64, 1, 280, 2, 2, 16, 24, True, True)
    options = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
    want = wanted(gdn.chunk_kda, [q, k, v, g, beta, torch.zeros(1, 2, 16, 24, dtype=torch.float64), A_log, dt_bias],
                  [do, torch.zeros(1, 2, 16, 24, dtype=torch.float64)], **options)
    cut = lambda t, r: t[:, 70 * r:70 * (r + 1)]  # noqa: E731
    maps, back = [], []
    for r in range(4):
        _, (gk, w, u, qg, kg, grad, local) = kda_loop(*(cut(t, r) for t in (q, k, v, g, beta)), A_log, dt_bias, cut(do, r), -5.0, None, None, None)
        maps.append(ops.pre_process_fwd_kernel_merged(kg, w, u, gk=gk, cu_seqlens=(0, 70))[0])
        back.append(ops.pre_process_bwd_kernel_merged(qg, kg, w, grad, local, 16 ** -0.5, 64, gk=gk, cu_seqlens=(0, 70)))
        close(maps[-1], summary.state_summary(*(cut(t, r) for t in (k, v, g, beta)), A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, use_gate_in_kernel=True,
                                              use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)[0], 1e-12)
        close(back[-1][..., 24:], maps[-1][..., 24:].mT, 1e-12)
    maps, back, sums = torch.stack(maps), torch.stack(back), 0
    for r in range(4):
        h0, dht = torch.full((2, 2, 16, 24), float("nan"), dtype=torch.float64)
        ops.merge_fwd_bwd_kernel(h0, maps, r, r, forward=True)
        ops.merge_fwd_bwd_kernel(dht, back, 3 - r, r, forward=False)
        got, _ = kda_loop(*(cut(t, r) for t in (q, k, v, g, beta)), A_log, dt_bias, cut(do, r), -5.0, None, h0[None], dht[None])
        close(got[0], cut(want[0], r), 1e-12)
        for i in range(2, 7):
            close(got[i], cut(want[i], r), 1e-11)
        sums = sums + got[8]
    close(sums, want[8], 1e-11)


def test_windows_of_packed_rows():
    """A window is part of a row of fragments: its maps are those of the fragment alone."""
    q, k, v, g, beta, _, _, do, A_log, dt_bias = draw(torch.float32, 1, 150, 2, 2, 16, 24, True, True)
    cu = (0, 40, 150)
    _, (gk, w, u, qg, kg, grad, local) = kda_loop(q, k, v, g, beta, A_log, dt_bias, do, -5.0, cu, None, None)
    raw = dict(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    for window in ((0, 40), (40, 150)):
        close(ops.pre_process_fwd_kernel_merged(kg, w, u, gk=gk, cu_seqlens=window), summary.state_summary(k, v, g, beta, cu_seqlens=window, **raw), 1e-6)
        close(ops.pre_process_bwd_kernel_merged(qg, kg, w, grad, local, 0.25, 64, gk=gk, cu_seqlens=window),
              summary.state_gradient_summary(q, k, g, beta, do, scale=0.25, cu_seqlens=window, **raw)[0], 1e-6)


@pytest.mark.parametrize("mode, made", [("none", 6), ("forward", 7), ("recompute", 12), ("save", 13)])
def test_backward_modes(mode, made):
    q, k, v, g, beta, *_ = draw(torch.float32, 1, 20, 2, 2, 16, 24, False, True)
    out = ops.chunk_kda_fwd_prepare(q, k, v, g, beta, 0.25, backward_mode=mode)
    assert len(out) == 13 and sum(t is not None for t in out) == made


def test_hostile():
    q, k, v, g, beta, *_ = draw(torch.float32, 1, 150, 2, 2, 16, 24, False, False)
    with pytest.raises(ValueError, match="chunk_indices are not those"):
        ops.chunk_gated_delta_rule_fwd(q, k, v, g, beta, layout="TND", cu_seqlens=(0, 150), chunk_indices=(0, 0))
    with pytest.raises(ValueError, match="chunk_size is 32"):
        ops.chunk_gated_delta_rule_fwd(q, k, v, g, beta, chunk_size=32)
    with pytest.raises(ValueError, match="backward_mode is 'all'"):
        ops.chunk_kda_fwd_prepare(q, k, v, g[..., None].expand(1, 150, 2, 16), beta, 1.0, backward_mode="all")
    with pytest.raises(ValueError, match="3 ranks before rank 2"):
        ops.merge_fwd_bwd_kernel(torch.zeros(2, 4, 3), torch.zeros(4, 2, 4, 7), 3, 2, forward=True)
