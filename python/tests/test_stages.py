"""The stages, one after the other, against the composite operators."""

import pytest
import torch

import gdn
from gdn import stages
from test_summary import close


def draw(dtype, B, T, H, HV, K, V, raw, channels, g=None, N=None):
    """q, k, v, g, beta, h0, dht, dout, A_log, dt_bias."""
    r = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    gates = (B, T, HV, K) if channels else (B, T, HV)
    q, k, v, beta = r(B, T, H, K), r(B, T, H, K), r(B, T, HV, V), r(B, T, HV)
    if not raw:
        q, k, beta = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k)), None, beta.sigmoid()
        q, k = q
    decay = r(*gates) if raw and channels else -torch.rand(*gates, dtype=torch.float64) * 0.3
    if g is not None:
        decay[:, T // 3:T // 2] = g
    states = N or B
    return [t.to(dtype) for t in (q, k, v, decay, beta, r(states, HV, K, V), r(states, HV, K, V), r(B, T, HV, V), r(HV), r(HV, K))]


def wanted(function, tensors, upstream, **options):
    leaves = [t.clone().requires_grad_() for t in tensors]
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    o, ht = function(**dict(zip(names, leaves)), output_final_state=True, **options)
    return [o, ht, *torch.autograd.grad([o, ht], leaves, upstream)]


def turn(t, layout):
    """[B, T, H, ..] as a layout wants it, in memory of its own."""
    return {"BSND": lambda: t, "BNSD": lambda: t.transpose(1, 2).contiguous(), "TND": lambda: t[0], "NTD": lambda: t[0].transpose(0, 1).contiguous()}[layout]()


def turned(t, layout):
    return {"BSND": lambda: t, "BNSD": lambda: t.transpose(1, 2), "TND": lambda: t[None], "NTD": lambda: t.transpose(0, 1)[None]}[layout]()


CASES = [
    ("BSND", None, False, None), ("BSND", None, True, None), ("BNSD", None, True, None),
    ("TND", (0, 0, 70, 70, 134, 150), True, None), ("NTD", (0, 33, 130), False, None), ("BSND", (0, 65, 150), False, float("-inf")),
    ("BNSD", None, False, -1000.0),
]


@pytest.mark.parametrize("layout, cu, raw, g", CASES)
@pytest.mark.parametrize("dtype, ratio", [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_gdn(layout, cu, raw, g, dtype, ratio):
    B, T, H, HV, K, V = 1 if cu else 2, 150, 2, 4, 24, 40
    q, k, v, gate, beta, h0, dht, do, _, _ = draw(dtype, B, T, H, HV, K, V, raw, False, g, cu and len(cu) - 1)
    cut = cu and torch.tensor(cu)
    if g is not None:  # 25 resets in a chunk make its sums 3200 (25,000 in float64), whose last bit is 2^-12 (2^-38): decays behind them err by half of it
        ratio = 2 ** -13 if dtype == torch.float32 else 2 ** -39
    want = wanted(gdn.chunk_gdn, [q, k, v, gate, beta, h0], [do, dht], scale=0.2, use_qk_l2norm_in_kernel=raw, use_beta_sigmoid_in_kernel=raw, cu_seqlens=cut)
    q, k, v, gate, beta, do = (turn(t, layout) for t in (q, k, v, gate, beta, do))
    for exp2 in (False, True):
        kw = dict(layout=layout, use_exp2=exp2, cu_seqlens=cu)
        p = stages.prepare(q, k, v, gate, beta, use_qk_l2norm=raw, use_beta_sigmoid=raw, **kw)
        assert torch.isfinite(p.g_cumsum).all()
        h, v_new, ht = stages.state_pass(p.k_norm, p.w, p.u, p.g_cumsum, initial_state=h0, output_final_state=True, **kw)
        o = stages.output(p.q_norm, p.k_norm, v_new, p.g_cumsum, h, scale=0.2, **kw)
        w, u, local = stages.bwd_prepare(p.q_norm, p.k_norm, v, p.g_cumsum, p.beta_eff, p.A, do, scale=0.2, **kw)
        dh, dv_scan, dh0 = stages.state_grad(p.q_norm, p.k_norm, w, do, local, p.g_cumsum, None, h0, dht, scale=0.2, **kw)
        rstd = (p.q_rstd, p.k_rstd) if raw else (None, None)
        dq, dk, dv, dbeta, dg = stages.finish(p.q_norm, p.k_norm, v, v_new, do, dv_scan, p.g_cumsum, p.beta_eff, h, dh, p.A, *rstd, scale=0.2,
                                              use_beta_sigmoid=raw, **kw)
        for got, due in zip([turned(o, layout), ht, *(turned(t, layout) for t in (dq, dk, dv, dg, dbeta)), dh0], want):
            close(got, due, ratio)


@pytest.mark.parametrize("layout, cu, raw, g", CASES)
@pytest.mark.parametrize("dtype, ratio", [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_kda(layout, cu, raw, g, dtype, ratio):
    B, T, H, HV, K, V = 1 if cu else 2, 150, 2, 4, 24, 40
    q, k, v, gate, beta, h0, dht, do, A_log, dt_bias = draw(dtype, B, T, H, HV, K, V, raw, True, g, cu and len(cu) - 1)
    cut = cu and torch.tensor(cu)
    given = [q, k, v, gate, beta, h0] + ([A_log, dt_bias] if raw else [])
    gated = dict(use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0) if raw else {}
    want = wanted(gdn.chunk_kda, given, [do, dht], scale=0.2, use_qk_l2norm_in_kernel=raw, use_beta_sigmoid_in_kernel=raw, cu_seqlens=cut, **gated)
    q, k, v, gate, beta, do = (turn(t, layout) for t in (q, k, v, gate, beta, do))
    A_log, dt_bias = (A_log, dt_bias) if raw else (None, None)
    gated = dict(use_gate=raw, lower_bound=-5.0 if raw else None, use_beta_sigmoid=raw)
    for exp2 in (False, True):
        kw = dict(layout=layout, cu_seqlens=cu)
        p = stages.kda_prepare(q, k, v, gate, beta, scale=0.2, use_exp2=exp2, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm=raw, **gated, **kw)
        assert all(torch.isfinite(t).all() for t in p)
        h, v_new, ht = stages.state_pass(p.kg, p.w, p.u, None, p.gk, h0, output_final_state=True, use_exp2=exp2, **kw)
        o = stages.kda_output(p.qg_scaled, p.Aqk, v_new, h, **kw)
        dAqk, local, dq_raw = stages.kda_bwd_prepare(p.Aqk, v_new, do, h, scale=0.2, **kw)
        dh, dv_scan, dh0 = stages.state_grad(p.qg, p.kg, p.w, do, local, None, p.gk, h0, dht, scale=0.2, use_exp2=exp2, **kw)
        rstd = (p.q_rstd, p.k_rstd) if raw else (None, None)
        dq, dk, dv, dbeta, dg, dA, dbias = stages.kda_finish(p.q_norm, p.k_norm, v, p.gk, gate, p.beta_eff, A_log, dt_bias, p.Akk, v_new, h, dh, dv_scan, dAqk,
                                                             dq_raw, *rstd, scale=0.2, use_exp2=exp2, **gated, **kw)
        got = [turned(o, layout), ht, *(turned(t, layout) for t in (dq, dk, dv, dg, dbeta)), dh0] + ([dA, dbias] if raw else [])
        for name, x, due in zip(("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"), got, want):
            close(x, due, 3e-6 if name == "dA_log" and dtype == torch.float32 else ratio)  # dA_log is a sum of terms of both signs over all tokens


@pytest.mark.parametrize("change, message", [
    (dict(layout="SBND"), "layout is 'SBND'"),
    (dict(h=torch.zeros(1, 1, 2, 4, 3)), "h has P=1, expected at least 2"),
    (dict(cu_seqlens=[0, 1, 70]), "h has P=2, expected at least 3"),
    (dict(cu_seqlens=[0, 80]), "at most T=70"),
    (dict(g_cumsum=torch.zeros(1, 70, 3)), "g_cumsum has shape"),
])
def test_hostile(change, message):
    a = dict(q=torch.rand(1, 70, 2, 4), k=torch.rand(1, 70, 2, 4), v_new=torch.rand(1, 70, 2, 3), g_cumsum=torch.zeros(1, 70, 2), h=torch.zeros(1, 2, 2, 4, 3))
    with pytest.raises(ValueError, match=message):
        stages.output(**{**a, **change})
