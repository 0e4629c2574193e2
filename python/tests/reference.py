"""The token recurrence of Gated DeltaNet and Kimi Delta Attention in float64, and how results are compared with it.

    S~ = exp(g) diag(exp(gk)) S diag(exp(gv))      e = v - S~^T k      S = S~ + k (beta e)^T      o = scale S^T q

Everything around the recurrence (gate, sigmoid, normalisation, head groups, conversions) is differentiated by autograd; the recurrence
itself has its backward written out, because autograd would keep some ten states a token. test_reference.py holds that backward
to autograd's.
"""

import torch

SEGMENT = 64


class Recurrence(torch.autograd.Function):
    """q, k [M, T, K], v [M, T, V], row decay a [M, T, K or 1], column decay c [M, T, V or 1], beta [M, T, V or 1], state [M, K, V], all
    float64. Keeps the state of every 64th token and computes those between again."""

    @staticmethod
    def forward(ctx, q, k, v, a, c, beta, state):
        entries = []
        o, s = torch.empty_like(v), state.clone()
        for t in range(q.shape[1]):
            if t % SEGMENT == 0:
                entries.append(s.clone())
            Recurrence.step(s, k, v, a, c, beta, t)
            torch.bmm(q[:, t, None], s, out=o[:, t, None])
        ctx.save_for_backward(q, k, v, a, c, beta)
        ctx.entries = entries
        return o, s

    @staticmethod
    def step(s, k, v, a, c, beta, t):
        s *= a[:, t, :, None]
        if c.shape[2] > 1:
            s *= c[:, t, None]
        e = v[:, t] - torch.bmm(k[:, t, None], s)[:, 0]
        s.addcmul_(k[:, t, :, None], (beta[:, t] * e)[:, None])
        return e

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, ds):
        q, k, v, a, c, beta = ctx.saved_tensors
        dq, dk, dv, da, dc, dbeta = (torch.empty_like(x) for x in (q, k, v, a, c, beta))
        d = ds.clone()
        for segment in reversed(range(len(ctx.entries))):
            start, states, errors = segment * SEGMENT, [ctx.entries[segment]], []
            for t in range(start, min(start + SEGMENT, q.shape[1])):
                s = states[-1].clone()
                errors.append(Recurrence.step(s, k, v, a, c, beta, t))
                states.append(s)
            for i in reversed(range(len(errors))):
                t, before, after, e = start + i, states[i], states[i + 1], errors[i]
                kt, bt, at, ct = k[:, t, :, None], beta[:, t], a[:, t, :, None], c[:, t, None]
                dq[:, t] = torch.bmm(after, do[:, t, :, None])[..., 0]
                d.addcmul_(q[:, t, :, None], do[:, t, None])
                dw = torch.bmm(k[:, t, None], d)[:, 0]  # of w = beta e, what is written
                db, de = dw * e, bt * dw
                dbeta[:, t] = db if beta.shape[2] > 1 else db.sum(-1, keepdim=True)
                dv[:, t] = de
                decayed = before * at * ct
                dk[:, t] = torch.bmm(d, (bt * e)[..., None])[..., 0] - torch.bmm(decayed, de[..., None])[..., 0]
                d.addcmul_(kt, de[:, None], value=-1)
                dd = d * before  # d is now that of the decayed state
                row = (dd * ct).sum(2)
                da[:, t] = row if a.shape[2] > 1 else row.sum(1, keepdim=True)
                if c.shape[2] > 1:
                    dc[:, t] = (dd * at).sum(1)
                d *= at
                if c.shape[2] > 1:
                    d *= ct
        return dq, dk, dv, da, dc if c.shape[2] > 1 else None, dbeta, d


def l2norm(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None, use_qk_l2norm_in_kernel=False,
               use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, use_gate_in_kernel=False,
               A_log=None, dt_bias=None, gk=None, gv=None, lower_bound=None, safe_gate=False, disable_recompute=False,
               recurrence=Recurrence.apply):
    """o and final_state in float64, for arguments as the public functions take them: those of Kimi Delta Attention if g has a gate for each
    channel."""
    double = [None if x is None else x.double() for x in (q, k, v, g, beta, initial_state, A_log, dt_bias, gk, gv)]
    q, k, v, g, beta, initial_state, A_log, dt_bias, gk, gv = double
    b, t, h, kk = q.shape
    hv, vv = v.shape[2:]
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        amplitude = torch.ones((), dtype=torch.float64) if A_log is None else A_log.reshape(hv, *[1] * (g.dim() - 3)).exp()
        x = g if dt_bias is None else g + dt_bias.reshape(g.shape[2:])
        if lower_bound is None:
            g = -amplitude * torch.nn.functional.softplus(x, threshold=40)
        else:
            g = lower_bound * torch.sigmoid(amplitude * x)
    if beta is None:
        beta = torch.ones(b, t, hv, dtype=torch.float64)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if beta.dim() == 3:
        beta = beta[..., None]
    q = q.repeat_interleave(hv // h, 2) * (kk ** -0.5 if scale is None else scale)
    k = k.repeat_interleave(hv // h, 2)
    rows = torch.zeros(b, t, hv, 1, dtype=torch.float64) if g is None else g if g.dim() == 4 else g[..., None]
    a = (rows if gk is None else rows + gk).exp()
    c = torch.ones(b, t, hv, 1, dtype=torch.float64) if gv is None else gv.exp()
    ends = [[0, t]] if cu_seqlens is None else [list(map(int, pair)) for pair in zip(cu_seqlens[:-1], cu_seqlens[1:])]
    n = b if cu_seqlens is None else len(ends)
    if initial_state is None:
        initial_state = torch.zeros(n, hv, kk, vv, dtype=torch.float64)
    elif state_v_first:
        initial_state = initial_state.transpose(2, 3)
    outputs, states = [], []
    for i, (start, end) in enumerate(ends):
        flat = [x[:, start:end].transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v, a, c, beta)]
        s = initial_state if cu_seqlens is None else initial_state[i:i + 1]
        o, s = recurrence(*flat, s.flatten(0, 1).contiguous())
        outputs.append(o.unflatten(0, (b, hv)).transpose(1, 2))
        states.append(s.unflatten(0, (-1, hv)))
    last = ends[-1][1] if ends else 0
    o = torch.cat(outputs + [torch.zeros(b, t - last, hv, vv, dtype=torch.float64)], 1)
    state = torch.cat(states) if states else initial_state
    return o, state.transpose(2, 3) if state_v_first else state


# Relative root-mean-square error by the dtype of the tensor: about ten times what float32 arithmetic leaves, and for the 16-bit types
# one and a half times the rounding of the tensor itself (2^-8 / sqrt(6) = 1.7e-3, 2^-11 / sqrt(6) = 2e-4 at worst).
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def error(expected, got):
    """rms(got - expected) / rms(expected), 0 where all differences are below 1e-6 of the largest value."""
    expected, got = expected.double(), got.double()
    assert expected.shape == got.shape, f"shape {list(got.shape)}, expected {list(expected.shape)}"
    assert got.isfinite().all(), "not finite"
    difference = got - expected
    if expected.numel() == 0 or difference.abs().max() <= 1e-6 * expected.abs().max():
        return 0.0
    return float(difference.square().mean().sqrt() / (expected.square().mean().sqrt() + 1e-300))


def check(name, expected, got, bound=None):
    """Holds a result to the reference, by the bound of its dtype."""
    if bound is None:
        bound = BOUNDS[got.dtype] * (3 if name in ("dg", "dbeta", "dgk", "dgv") and got.dtype == torch.float32 else 1)
    e = error(expected, got)
    assert e <= bound, f"{name}: relative error {e:.2e}, bound {bound:.1e}"
