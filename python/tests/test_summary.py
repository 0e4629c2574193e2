"""State summaries: maps of windows, chained, against the composite operators."""

import pytest
import torch

import gdn
from gdn import summary

FLAGS = [{}, {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}]


def inputs(B, T, H, HV, K, V, dtype=torch.float64, raw=False, g_scale=0.3):
    """q, k, v, g, beta and what the raw gate needs."""
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(B, T, HV, V, dtype=torch.float64)
    g = torch.randn(B, T, HV, dtype=torch.float64) if raw else -torch.rand(B, T, HV, dtype=torch.float64) * g_scale
    beta = torch.randn(B, T, HV, dtype=torch.float64) if raw else torch.rand(B, T, HV, dtype=torch.float64)
    gate = {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV)} if raw else {}
    return [t.to(dtype) for t in (q, k, v, g, beta)], {n: t.to(dtype) for n, t in gate.items()}


def close(got, want, ratio):
    got, want = got.detach(), want.detach()
    assert torch.isfinite(got).all()
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= ratio, float(error)


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "raw"])
@pytest.mark.parametrize("dtype, ratio", [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_apply_is_running_the_tokens(flags, dtype, ratio):
    (q, k, v, g, beta), gate = inputs(2, 90, 2, 4, 24, 40, dtype, bool(flags))
    h0 = torch.randn(2, 4, 24, 40, dtype=dtype)
    maps = summary.state_summary(k, v, g, beta, **gate, **flags)
    want = gdn.chunk_gdn(q, k, v, g, beta, initial_state=h0, output_final_state=True, **gate, **flags)[1]
    close(summary.apply_summary(maps, h0), want, ratio)
    close(summary.apply_summary(maps), maps[..., :40], 0)


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "raw"])
def test_gradient_maps_are_the_backward(flags):
    (q, k, v, g, beta), gate = inputs(2, 90, 2, 4, 24, 40, raw=bool(flags))
    h0 = torch.randn(2, 4, 24, 40, dtype=torch.float64, requires_grad=True)
    o, ht = gdn.chunk_gdn(q, k, v, g, beta, scale=0.3, initial_state=h0, output_final_state=True, **gate, **flags)
    do, dht = torch.randn_like(o), torch.randn_like(ht)
    want, = torch.autograd.grad([o, ht], h0, [do, dht])
    back = summary.state_gradient_summary(q, k, g, beta, do, scale=0.3, **gate, **flags)
    close(summary.apply_summary(back, dht), want, 1e-12)
    M = summary.state_summary(k, v, g, beta, **gate, **flags)[..., 40:]
    close(back[..., 40:], M.mT, 1e-13)
    # The older form keeps M of the forward and transposes it.
    close(summary.apply_summary(torch.cat([back[..., :40], M], -1), dht, transpose=True), want, 1e-12)


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "raw"])
def test_windows_compose(flags):
    """The map of a whole sequence is that of its windows, one after the other, forward and backward."""
    (q, k, v, g, beta), gate = inputs(1, 150, 2, 4, 20, 12, raw=bool(flags))
    do = torch.randn(1, 150, 4, 12, dtype=torch.float64)
    cuts = [7, 20, 20, 64, 130]
    parts = summary.state_summary(k, v, g, beta, cu_seqlens=cuts, **gate, **flags)
    whole = summary.state_summary(k, v, g, beta, cu_seqlens=torch.tensor([7, 130]), **gate, **flags)
    close(summary.compose_summaries(parts), whole[0], 1e-12)
    close(parts[1], torch.cat([torch.zeros(4, 20, 12), torch.eye(20).expand(4, 20, 20)], -1), 0)
    back = summary.state_gradient_summary(q, k, g, beta, do, cu_seqlens=cuts, **gate, **flags)
    close(summary.compose_summaries(back, reverse=True), summary.state_gradient_summary(q, k, g, beta, do, cu_seqlens=(7, 130), **gate, **flags)[0], 1e-12)
    h = torch.randn(4, 20, 12, dtype=torch.float64)
    close(summary.merge_summaries(parts, h), summary.apply_summary(whole[0], h), 1e-12)
    close(summary.merge_summaries(parts[1:3], h), summary.apply_summary(summary.compose_summaries(parts[1:3]), h), 1e-12)
    close(summary.merge_summaries(parts[:0], h), h, 0)


@pytest.mark.parametrize("gate", [0.0, -20.0, float("-inf")])
def test_decay(gate):
    (q, k, v, g, beta), _ = inputs(1, 70, 1, 2, 16, 16, torch.float32)
    g = g.clone()
    g[:, 30:] = gate
    do = torch.randn_like(v)
    for got, want in ((summary.state_summary(k, v, g, beta), summary.state_summary(k.double(), v.double(), g.double(), beta.double())),
                      (summary.state_gradient_summary(q, k, g, beta, do),
                       summary.state_gradient_summary(q.double(), k.double(), g.double(), beta.double(), do.double()))):
        close(got, want, 1e-6)


def test_gradients():
    (q, k, v, g, beta), gate = inputs(1, 9, 1, 2, 4, 3, raw=True)
    a = [t.requires_grad_() for t in (k, v, g, beta, gate["A_log"], gate["dt_bias"])]

    def maps(k, v, g, beta, A_log, dt_bias):
        return summary.state_summary(k, v, g, beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=[2, 5, 8], **FLAGS[1])

    assert torch.autograd.gradcheck(maps, a, fast_mode=True)
    m, h = torch.randn(3, 2, 2, 4, 7, dtype=torch.float64, requires_grad=True), torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    for reverse in (False, True):
        for transpose in (False, True):
            assert torch.autograd.gradcheck(lambda m, h: summary.merge_summaries(m, h, reverse=reverse, transpose=transpose), (m, h))
            assert torch.autograd.gradcheck(lambda m: summary.compose_summaries(m, reverse=reverse, transpose=transpose), m)


def test_opcheck():
    (q, k, v, g, beta), _ = inputs(1, 9, 1, 2, 4, 3, torch.float32)
    k.requires_grad_()
    torch.library.opcheck(torch.ops.gdn.summary_fwd, (k, v, g, beta, None, None, None, False, False, False, False))
    torch.library.opcheck(torch.ops.gdn.summary_bwd, (q, k.detach(), g, beta, None, None, None, torch.randn_like(v), 0.0, False, False, False, False))
    m = torch.randn(3, 2, 2, 4, 7, requires_grad=True)
    torch.library.opcheck(torch.ops.gdn.summary_merge, (m[..., :3], m[..., 3:], None, False, True))
    torch.library.opcheck(torch.ops.gdn.summary_compose, (m[..., :3], m[..., 3:], True, False))


@pytest.mark.parametrize("change, message", [
    (dict(beta=torch.rand(1, 9, 2, 3)), "beta has rank 4"),
    (dict(v=torch.rand(1, 9, 3, 3), g=None, beta=None), "multiple of H=2"),
    (dict(g=torch.rand(1, 8, 2)), "g has shape"),
    (dict(cu_seqlens=[3, 2]), r"cu_seqlens is \[3, 2\], expected offsets"),
    (dict(cu_seqlens=[0, 3, 2]), r"cu_seqlens\[2\] is 2 after 3"),
    (dict(cu_seqlens=[-1, 2]), r"cu_seqlens is \[-1, 2\], expected offsets"),
    (dict(cu_seqlens=[4, 10]), r"cu_seqlens is \[4, 10\], expected offsets"),
    (dict(use_gate_in_kernel=True), "A_log is NULL"),
    (dict(k=torch.rand(1, 9, 2, 600), g=None, beta=None), "K=600"),
])
def test_hostile(change, message):
    a = dict(k=torch.rand(1, 9, 2, 4), v=torch.rand(1, 9, 2, 3), g=-torch.rand(1, 9, 2), beta=torch.rand(1, 9, 2))
    with pytest.raises(ValueError, match=message):
        summary.state_summary(**{**a, **change})
    with pytest.raises(ValueError, match="maps have shape"):
        summary.merge_summaries(torch.rand(4, 4))


CHANNELS = [{}, {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
            {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -4.0}]


@pytest.mark.parametrize("flags", CHANNELS, ids=["plain", "softplus", "bound"])
@pytest.mark.parametrize("dtype, ratio", [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_decays_by_channels(flags, dtype, ratio):
    """Kimi Delta Attention: a map applied is the tokens run, forward and backward, and windows compose."""
    (q, k, v, _, beta), _ = inputs(1, 130, 2, 4, 24, 40, dtype)
    raw = bool(flags)
    g = torch.randn(1, 130, 4, 24, dtype=dtype) if raw else -torch.rand(1, 130, 4, 24, dtype=dtype)
    gate = {"A_log": torch.rand(4, dtype=dtype), "dt_bias": torch.randn(4 * 24, dtype=dtype)} if raw else {}
    h0 = torch.randn(1, 4, 24, 40, dtype=dtype, requires_grad=True)
    o, ht = gdn.chunk_kda(q, k, v, g, beta, scale=0.3, initial_state=h0, output_final_state=True, **gate, **flags)
    do, dht = torch.randn_like(o), torch.randn_like(ht)
    dh0, = torch.autograd.grad([o, ht], h0, [do, dht])
    maps = summary.state_summary(k, v, g, beta, cu_seqlens=[0, 30, 30, 101, 130], **gate, **flags)
    close(summary.merge_summaries(maps, h0[0]), ht[0].detach(), ratio)
    back = summary.state_gradient_summary(q, k, g, beta, do, scale=0.3, cu_seqlens=[0, 30, 30, 101, 130], **gate, **flags)
    close(summary.merge_summaries(back, dht[0], reverse=True), dh0[0], ratio)
    close(back[..., 40:], maps[..., 40:].mT, ratio)


def test_gradients_by_channels():
    (q, k, v, _, beta), _ = inputs(1, 9, 1, 2, 4, 3)
    a = [t.requires_grad_() for t in (k, v, torch.randn(1, 9, 2, 4, dtype=torch.float64), beta, torch.rand(2, dtype=torch.float64),
                                      torch.randn(2, 4, dtype=torch.float64))]

    def maps(k, v, g, beta, A_log, dt_bias):
        return summary.state_summary(k, v, g, beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=[2, 5, 8], **CHANNELS[2])

    assert torch.autograd.gradcheck(maps, a, fast_mode=True)
    with pytest.raises(ValueError, match="lower_bound is given and g does not go by key channels"):
        summary.state_summary(k, v, lower_bound=-1.0)
