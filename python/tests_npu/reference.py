"""The gated delta rule token by token in float64, with autograd: the reference of these tests."""

import torch


def delta(q, k, v, g, beta, scale, h0=None):
    """One sequence, head-major: q, k [HK T K], v [HV T V], g [HV T] or [HV T K] natural log, beta [HV T], h0 [HV K V]. Returns o [HV T V], the
    last state."""
    heads = v.shape[0]
    q, k = (x.double().repeat_interleave(heads // x.shape[0], 0) for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    g = g if g.dim() == 3 else g[..., None]
    s = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=torch.float64) if h0 is None else h0.double()
    out = []
    for t in range(v.shape[1]):
        s = s * g[:, t].exp()[..., None]
        e = v[:, t] - torch.einsum("hkv,hk->hv", s, k[:, t])
        s = s + beta[:, t, None, None] * k[:, t, :, None] * e[:, None]
        out.append(scale * torch.einsum("hkv,hk->hv", s, q[:, t]))
    return (torch.stack(out, 1) if out else v.new_zeros(v.shape)), s


def close(got, want, rel):
    """Within rel of the largest value: bf16 results of sums over a row."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert not got.isnan().any()
    worst = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30)
    assert worst <= rel, worst.item()
