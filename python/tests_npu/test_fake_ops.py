"""The fake's fla-npu operators against a token recurrence with autograd: composites directly, stages as the chains that they are made for.
With GDN_FAKE_CANN naming build/out/cann-old, the same for the package of August 2026."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import normalize, softplus

import fake
from reference import close, delta

bf16, f16, f32, C = torch.bfloat16, torch.float16, torch.float32, 64
LETTERS = fake.declared()
NEW = "ChunkFwdH" in LETTERS
new = pytest.mark.skipif(not NEW, reason="not in the package of August 2026")
BF16, F16 = 2**-7, 2**-9  # some roundings of intermediate results to the type, relative to the largest value


def op(name, *args):
    fake.call(fake.fla, name, LETTERS.get(name, "TLLsT"), list(args))  # SolveTri of old is not declared


def rand(*shape, dtype=f32):
    return torch.randn(shape).to(dtype)


class Case:
    """Random inputs, head-major; packed: three sequences, one of them shorter than a chunk."""

    def __init__(self, packed, HK=1, HV=2, K=128, V=128, T=150, dtype=bf16, channels=False, seed=0):
        torch.manual_seed(seed)
        self.B, self.T, self.HK, self.HV, self.K, self.V = (1 if packed else 2), T, HK, HV, K, V
        self.cu = [0, 70, 81, T] if packed else None
        self.spans = [(0, a, b) for a, b in zip(self.cu, self.cu[1:])] if packed else [(b, 0, T) for b in range(2)]
        self.N = len(self.spans)
        self.idx = [x for s, (_, a, b) in enumerate(self.spans) for c in range(-(-(b - a) // C)) for x in (s, c)] if packed else None
        self.NT = len(self.idx) // 2 if packed else -(-T // C)
        self.q, self.k = (normalize(rand(self.B, HK, T, K), dim=-1).to(dtype) for _ in range(2))
        self.v = rand(self.B, HV, T, V, dtype=dtype)
        self.g = -torch.rand(self.B, HV, T, K) if channels else -torch.rand(self.B, HV, T)
        self.beta = torch.rand(self.B, HV, T)
        self.h0, self.dht = rand(self.N, HV, K, V), rand(self.N, HV, K, V)
        self.dO = rand(self.B, HV, T, V, dtype=dtype)
        self.scale, self.dtype = 0.3, dtype

    def chunks(self):
        """(batch, first token, end, chunk index in the tensor of states, first of its sequence, last)"""
        for b, a, e in self.spans:
            base = 0 if not self.cu else sum(-(-(y - x) // C) for _, x, y in self.spans if y <= a)
            n = -(-(e - a) // C)
            for c in range(n):
                yield b, a + c * C, min(a + (c + 1) * C, e), base + c, c == 0, c == n - 1

    def cumsum(self, g=None):
        g = self.g if g is None else g
        out = torch.empty_like(g)
        for b, a, e, *_ in self.chunks():
            out[b, :, a:e] = g[b, :, a:e].cumsum(1)
        return out

    def reverse_cumsum(self, g):
        out = torch.empty_like(g)
        for b, a, e, *_ in self.chunks():
            out[b, :, a:e] = g[b, :, a:e].flip(1).cumsum(1).flip(1)
        return out

    def reference(self, h0=True, dht=True, **inputs):
        """o, final state, and the gradients of q, k, v, g, beta, h0; inputs take the place of the case's."""
        x = [inputs.get(n, getattr(self, n)).double().requires_grad_() for n in ("q", "k", "v", "g", "beta", "h0")]
        o, last = torch.zeros(self.v.shape, dtype=torch.float64), []
        for i, (b, a, e) in enumerate(self.spans):
            y, s = delta(*(t[b, :, a:e] for t in x[:5]), self.scale, x[5][i] if h0 else None)
            o = torch.cat([o[:b], torch.cat([o[b:b + 1, :, :a], y[None], o[b:b + 1, :, e:]], 2), o[b + 1:]])
            last.append(s)
        last = torch.stack(last)
        loss = (o * self.dO.double()).sum() + ((last * self.dht.double()).sum() if dht else 0)
        return [o.detach(), last.detach()] + list(torch.autograd.grad(loss, x[:5] + ([x[5]] if h0 else [])))

    def states(self, dtype):
        shape = (self.B, self.NT, self.HV, self.K, self.V) if NEW else (self.B, self.HV, self.NT, self.K, self.V)
        return torch.empty(shape, dtype=dtype)

    def like(self, letters, dtype=None):
        sizes = {"B": self.B, "T": self.T, "HK": self.HK, "HV": self.HV, "K": self.K, "V": self.V, "C": C, "N": self.N, "NT": self.NT}
        return torch.empty([sizes[w] for w in letters.split()], dtype=dtype or self.dtype)


def tm(x):
    """Head-major to token-major."""
    return x.transpose(1, 2).contiguous()


PACKED = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


def gdn_forward_stages(c):
    g, A = c.like("B HV T", f32), c.like("B HV T C", f32)
    op("ChunkLocalCumsum", c.g, c.cu, c.idx, C, False, 1.0, True, "float32", g)
    close(g, c.cumsum(), 1e-6)
    op("ChunkScaledDotKkt", c.k, g, c.beta, c.cu, c.idx, C, A)
    X = c.like("B HV T C")
    op("SolveTri", A.nan_to_num().to(c.dtype), c.cu, c.idx, "bnsd", X)
    X = X.nan_to_num()  # columns beyond a chunk are unspecified
    w, u = c.like("B HV T K"), c.like("B HV T V")
    op("RecomputeWUFwd", c.k, c.v, c.beta, X, g, None, c.cu, c.idx, C, w, u)
    h, v_new, last = c.states(c.dtype), c.like("B HV T V"), c.like("N HV K V", f32)
    op("ChunkGatedDeltaRuleFwdH", c.k, w, u, g, None, c.h0, True, C, c.cu, c.idx, False, h, v_new, last)
    return g, X, w, u, h, v_new, last


@PACKED
@pytest.mark.parametrize("HK, V", [(1, 128), (2, 256)])
def test_gdn_stages(packed, HK, V):
    c = Case(packed, HK=HK, V=V, dtype=f16)
    g, X, w, u, h, v_new, last = gdn_forward_stages(c)
    o = c.like("B T HV V" if NEW else "B HV T V")
    op("ChunkFwdO", c.q, c.k, v_new, h, g, c.cu, c.idx, c.scale, C, *((False, False, "BSND") if NEW else ()), o)
    want = c.reference(dht=NEW)
    close(tm(o) if NEW else o, want[0], F16)
    close(last, want[1], F16)

    dv, dh, dh0, dv2 = c.like("B HV T V"), c.states(c.dtype), c.like("N HV K V") if NEW else c.states(c.dtype), c.like("B HV T V")
    op("ChunkBwdDvLocal", c.q, c.k, c.dO, g, None, None, c.cu, c.idx, c.scale, C, dv)
    op("ChunkGatedDeltaRuleBwdDhu", c.q, c.k, w, c.dO, dv, g, None, c.h0, c.dht, c.cu, c.idx, c.scale, C, False, *((False,) if NEW else ()), dh, dh0, dv2)
    if NEW:
        close(dh0, want[7], F16)
    dq, dk, dw, dg = c.like("B HK T K"), c.like("B HK T K"), c.like("B HV T K"), c.like("B HV T", f32)
    op("ChunkBwdDqkwg", c.q, c.k, v_new, g, h, c.dO, dh, dv2, c.cu, c.idx, None, None, c.scale, C, False, False, dq, dk, dw, dg)
    dA, wy = c.like("B HV T C"), [c.like("B HK T K"), c.like("B HV T V"), c.like("B HV T", f32), c.like("B HV T", f32)]
    op("PrepareWyReprBwdDa", c.k, c.v, c.beta, X, dw, dv2, g, c.cu, c.idx, C, dA)
    op("PrepareWyReprBwdFull", c.k, c.v, c.beta, X, dA.nan_to_num(), dw, dv2, g, c.cu, c.idx, C, *wy)
    fused = [torch.empty_like(x) for x in wy]
    op("PrepareWyReprBwd", c.k, c.v, c.beta, X, dw, dv2, g, c.cu, c.idx, C, *fused)
    for one, two in zip(wy, fused):
        close(one, two, F16)
    got = dq, dk.float() + wy[0].float(), wy[1], c.reverse_cumsum(dg + wy[3]), wy[2]
    for x, y in zip(got, want[2:7]):
        close(x, y, 2 * F16)


@new
@PACKED
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_gdn_composites(packed, layout):
    c = Case(packed)
    fake.acl.gdnfake_soc(b"Ascend950PR_9599")
    order = tm if layout == "BSND" else lambda x: x
    o, last, cum, A = c.like("B T HV V"), c.like("N HV K V", f32), c.like("B T HV", f32), c.like("B HV T C")
    op("ChunkGatedDeltaRuleFwd", order(c.q), order(c.k), order(c.v), tm(c.g), tm(c.beta), None, None, c.h0, c.cu, c.idx, layout, c.scale, C, False, False, False,
       False, o, last, None, None, None, None, None, cum, A, None)
    h0, dht = c.h0.to(bf16), c.dht.to(bf16)
    want = c.reference()
    close(tm(o), want[0], BF16)
    close(last, want[1], 1e-6)
    close(tm(cum), c.cumsum(), 1e-6)
    c.h0, c.dht = h0, dht  # the backward's are bfloat16
    want = c.reference()
    out = [order(c.like(x)) for x in ("B HK T K", "B HK T K", "B HV T V")] + [c.like("B T HV", f32), c.like("B T HV", f32), c.like("N HV K V")]
    op("ChunkGatedDeltaRuleBwd", order(c.q), order(c.k), order(c.v), cum, tm(c.beta), A.nan_to_num(), tm(c.dO), h0, dht, None, None, None, None, None, c.cu, c.idx,
       layout, c.scale, C, False, False, False, False, False, out[0], out[1], out[2], out[3], out[4], out[5], None, None)
    for x, y, rel in zip([order(out[0]), order(out[1]), order(out[2]), tm(out[4]), tm(out[3]), out[5]], want[2:], [BF16] * 3 + [1e-5] * 2 + [BF16]):
        close(x, y, rel)


@new
@PACKED
def test_gdn_composite_with_norm_sigmoid_exp2_and_states(packed):
    c = Case(packed)
    c.q, c.k, raw = rand(c.B, c.HK, c.T, c.K, dtype=bf16), rand(c.B, c.HK, c.T, c.K, dtype=bf16), rand(c.B, c.HV, c.T)
    c.h0, c.dht = c.h0.to(bf16), c.dht.to(bf16)
    o, last, cum, A, eff = c.like("B T HV V"), c.like("N HV K V", bf16), c.like("B T HV", f32), c.like("B HV T C"), c.like("B T HV", f32)
    hats, norms, h = [c.like("B HK T K") for _ in range(2)], [c.like("B HK T", f32) for _ in range(2)], c.states(bf16)
    args = (c.q, c.k, c.v, tm(c.g), tm(raw), None, None, c.h0, c.cu, c.idx, "BNSD", c.scale, C, True, True, True, False, o, last, *hats, *norms, eff, cum, A, h)
    with pytest.raises(fake.Error, match="561003"):  # not on A2
        op("ChunkGatedDeltaRuleFwd", *args)
    fake.acl.gdnfake_soc(b"Ascend950PR_9599")
    op("ChunkGatedDeltaRuleFwd", *args)

    q, k, z = (x.double().requires_grad_() for x in (c.q, c.k, raw))
    unit = [x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k)]
    beta = 2 * z.sigmoid()
    want = c.reference(q=unit[0].detach(), k=unit[1].detach(), beta=beta.detach())
    close(tm(o), want[0], BF16)
    close(last, want[1], BF16)
    close(tm(cum), c.cumsum() / math.log(2), 1e-6)
    close(tm(eff), beta, 1e-6)
    close(hats[0], unit[0], BF16)
    for b, _, _, i, first, _ in c.chunks():
        if first:
            n = [s for s, span in enumerate(c.spans) if span[0] == b and any(x[3] == i and x[0] == b and x[1] == span[1] for x in c.chunks())][0]
            close(h[b, i], c.h0[n], 0)
    dq, dk, dbeta = want[2], want[3], want[6]
    dq, dk = (torch.autograd.grad(u, x, d)[0] for u, x, d in zip(unit, (q, k), (dq, dk)))
    dz = torch.autograd.grad(beta, z, dbeta)[0]
    out = [c.like("B HK T K"), c.like("B HK T K"), c.like("B HV T V"), c.like("B T HV", f32), c.like("B T HV", f32), c.like("N HV K V")]
    op("ChunkGatedDeltaRuleBwd", *hats, c.v, cum, eff, A.nan_to_num(), tm(c.dO), c.h0, c.dht, *norms, tm(raw), None, None, c.cu, c.idx, "BNSD", c.scale, C, True,
       False, True, True, False, *out, None, None)
    for x, y in zip(out, [dq, dk, want[4], tm(dz), tm(want[5]), want[7]]):
        close(x, y, 2 * BF16)  # the hats are bfloat16


def gate(c, raw, a_log, bias, safe):
    a, x = a_log.exp()[None, :, None, None], raw + bias.view(c.HV, 1, c.K)
    return -5.0 * torch.sigmoid(a * x) if safe else -a * softplus(x)


@PACKED
@pytest.mark.parametrize("safe", [False, True])
def test_kda_composite_and_gate(packed, safe):
    c = Case(packed, channels=True)
    raw, a_log, bias = rand(c.B, c.HV, c.T, c.K), rand(c.HV) * 0.3 - 2, rand(c.HV * c.K)
    c.g = gate(c, raw, a_log, bias, safe)
    want = c.reference(dht=False)
    out = [c.like("B T HV V"), c.like("N HV K V", f32), c.like("B HV T K", f32), c.like("B HV T C"), c.like("B HV T C"), c.like("B HV T K"), c.like("B HV T V"),
           c.like("B HV T K"), c.like("B HV T K"), c.like("B HV T V"), torch.empty(c.B, c.NT, c.HV, c.K, c.V, dtype=bf16)]
    op("ChunkKdaFwd", c.q, c.k, c.v, raw, c.beta, a_log, bias, c.h0, c.cu, c.idx, "BNSD", c.scale, C, safe, -5.0, True, False, *out)
    close(tm(out[0]), want[0], BF16)
    close(out[1], want[1], 1e-5)
    close(out[2], c.cumsum() / math.log(2), 1e-5)
    gk = torch.empty_like(out[2])
    op("KdaGateCumsum", raw, a_log, bias, c.cu, C, True, safe, -5.0, gk)
    close(gk, out[2], 1e-6)
    if NEW:
        o = c.like("B T HV V")
        qg_scaled = (c.scale * out[7].float()).to(bf16)
        op("ChunkKdaFwdFinalize", qg_scaled, out[3].nan_to_num(), out[9], out[10], c.cu, c.idx, "BSND", False, o)
        close(tm(o), want[0], BF16)


@new
@PACKED
@pytest.mark.parametrize("HK", [1, 2])
def test_kda_stages(packed, HK):
    """prepare, scan, finalize; bwd_prepare, dhu, bwd_finalize, with the norm, the safe gate and the sigmoid of beta."""
    c = Case(packed, HK=HK, channels=True)
    c.q, c.k = rand(c.B, HK, c.T, c.K, dtype=bf16), rand(c.B, HK, c.T, c.K, dtype=bf16)
    raw, a_log, bias, logits = rand(c.B, c.HV, c.T, c.K), rand(c.HV) * 0.3, rand(c.HV * c.K), rand(c.B, c.HV, c.T)
    x = {n: t.double().requires_grad_() for n, t in dict(q=c.q, k=c.k, raw=raw, a_log=a_log, bias=bias).items()}
    unit = [t / (t * t).sum(-1, keepdim=True).add(1e-6).sqrt() for t in (x["q"], x["k"])]
    g = gate(c, x["raw"], x["a_log"], x["bias"], True)
    beta = logits.sigmoid()
    want = c.reference(q=unit[0].detach(), k=unit[1].detach(), g=g.detach(), beta=beta)

    keep = dict(gk=c.like("B HV T K", f32), aqk=c.like("B HV T C"), akk=c.like("B HV T C"), w=c.like("B HV T K"), u=c.like("B HV T V"), qg=c.like("B HV T K"),
                kg=c.like("B HV T K"), qs=c.like("B HV T K"), qh=c.like("B HK T K"), kh=c.like("B HK T K"), qr=c.like("B HK T", f32), kr=c.like("B HK T", f32),
                eff=c.like("B HV T", f32))
    prepare = (c.q, c.k, c.v, raw, logits, a_log, bias, c.cu, c.idx, "BNSD", c.scale, C, 1e-6, True, True, True, False, True, -5.0, True)
    op("ChunkKdaFwdPrepare", *prepare, *keep.values())
    m = {n: t.nan_to_num() for n, t in keep.items()}  # A's columns beyond a chunk or above the diagonal are unspecified
    close(m["eff"], beta, 1e-6)
    with pytest.raises(fake.Error, match="patterns"):
        op("ChunkKdaFwdPrepare", *prepare, *[None if n == "kr" else t for n, t in keep.items()])
    h, v_new, last = c.states(bf16), c.like("B HV T V"), c.like("N HV K V", f32)
    op("ChunkFwdH", m["kg"], m["w"], m["u"], None, m["gk"], c.h0, True, C, True, c.cu, c.idx, True, False, h, v_new, last)
    close(last, want[1], BF16)
    o = c.like("B T HV V")
    op("ChunkKdaFwdFinalize", m["qs"], m["aqk"], v_new, h, c.cu, c.idx, "BSND", False, o)
    close(tm(o), want[0], 2 * BF16)

    fake.acl.gdnfake_soc(b"Ascend950PR_9599")
    d_aqk, dv, dq_raw = c.like("B HV T C", f32), c.like("B HV T V"), c.like("B HV T K", f32)
    op("ChunkKdaBwdPrepare", m["aqk"], v_new, c.dO, h, c.cu, c.idx, c.scale, C, False, d_aqk, dv, dq_raw)
    dh, dh0, dv_scan = c.states(bf16), c.like("N HV K V"), c.like("B HV T V")
    op("ChunkGatedDeltaRuleBwdDhu", m["qg"], m["kg"], m["w"], c.dO, dv, None, m["gk"], c.h0, c.dht, c.cu, c.idx, c.scale, C, True, False, dh, dh0, dv_scan)
    close(dh0, want[7], 2 * BF16)
    out = [c.like("B HK T K"), c.like("B HK T K"), c.like("B HV T V"), c.like("B HV T", f32), c.like("B HV T K", f32), torch.empty(c.HV), torch.empty(c.HV * c.K)]
    op("ChunkKdaBwdFinalize", m["qh"], m["kh"], c.v, m["gk"], raw, m["eff"], a_log, bias, m["akk"], v_new, h, dh, dv_scan, d_aqk.nan_to_num(), dq_raw, m["qr"],
       m["kr"], c.cu, c.idx, c.scale, -5.0, C, True, True, True, False, *out)
    dq, dk = (torch.autograd.grad(u, x[n], d)[0] for u, n, d in zip(unit, "qk", want[2:4]))
    d_raw, d_a, d_bias = torch.autograd.grad(g, [x["raw"], x["a_log"], x["bias"]], want[5])
    for got, expected in zip(out, [dq, dk, want[4], want[6], d_raw, d_a, d_bias]):
        close(got, expected, 4 * BF16)


@new
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_summaries_and_merge(channels):
    """Maps of windows: S_out = M S_in + S, backward dH_start = N dH_end + G; two merged are the state of both."""
    c = Case(True, channels=channels)
    c.h0, c.dht = 0 * c.h0, rand(c.N, c.HV, c.K, c.V)
    A = torch.zeros(c.B, c.HV, c.T, C)
    G = c.cumsum()
    Gk = G if channels else G[..., None].expand(-1, -1, -1, c.K)
    w, u, kg, qg = (torch.zeros(c.B, c.HV, c.T, c.K) for _ in range(4))
    k, q = (t.float().repeat_interleave(c.HV // c.HK, 1) for t in (c.k, c.q))
    for b, a, e, *_ in c.chunks():
        n, r = e - a, slice(a, e)
        D = (Gk[b, :, r, None] - Gk[b, :, None, r]).exp()
        A = torch.tril(c.beta[b, :, r, None] * torch.einsum("hid,hjd,hijd->hij", k[b, :, r], k[b, :, r], D), -1)
        X = torch.linalg.inv(torch.eye(n) + A)
        w[b, :, r] = X @ (c.beta[b, :, r, None] * k[b, :, r] * Gk[b, :, r].exp())
        u[b, :, r] = X @ (c.beta[b, :, r, None] * c.v[b, :, r].float())
        kg[b, :, r] = k[b, :, r] * (Gk[b, :, e - 1:e] - Gk[b, :, r]).exp()
        qg[b, :, r] = q[b, :, r] * Gk[b, :, r].exp()
    log2 = (G / math.log(2)).contiguous()
    hm = torch.zeros(c.N, c.HV, c.K, c.V + c.K)
    keys = (kg.to(bf16), None, log2) if channels else (c.k, log2, None)
    op("PreProcessFwdKernelMerged", keys[0], w.to(bf16), u.to(bf16), keys[1], keys[2], None, None, c.cu, C, hm)
    zero = c.reference(h0=False)[1]
    close(hm[..., :c.V], zero, BF16)
    start = rand(c.N, c.HV, c.K, c.V)
    c.h0 = start
    want = c.reference()
    close(hm[..., :c.V] + hm[..., c.V:] @ start, want[1], BF16)

    # one window of the backward: the second sequence
    dv = torch.zeros_like(c.v)
    for b, a, e, *_ in c.chunks():
        r = slice(a, e)
        P = torch.tril(torch.einsum("hid,hjd,hijd->hij", q[b, :, r], k[b, :, r], (Gk[b, :, r, None] - Gk[b, :, None, r]).exp()))
        dv[b, :, r] = (c.scale * P.transpose(1, 2) @ c.dO[b, :, r].float()).to(bf16)
    dhm = torch.zeros(c.HV, c.K, c.V + c.K)
    keys = (qg.to(bf16), kg.to(bf16), w.to(bf16), c.dO, dv, None, log2) if channels else (c.q, c.k, w.to(bf16), c.dO, dv, log2, None)
    op("PreProcessBwdKernelMerged", *keys, c.cu[1:3], c.scale, C, dhm)
    close(dhm[..., :c.V] + dhm[..., c.V:] @ c.dht[1], want[7][1], BF16)

    # merge: ranks 0 and 1 of three before rank 2; and the two after rank 0
    maps = rand(3, c.HV, 128, 256) * 0.1
    S, M = maps[..., :128], maps[..., 128:]
    for forward, rank, want in (True, 2, S[1] + M[1] @ S[0]), (False, 0, S[1] + M[1] @ S[2]):
        h = torch.full((c.HV, 128, 128), math.nan)
        op("MergeFwdBwdKernel", h, maps, 2, rank, forward, False)
        close(h, want, 1e-5)
        op("MergeFwdBwdKernel", h, maps, 2, rank, forward, True)
        close(h.transpose(1, 2), want, 1e-5)
    with pytest.raises(fake.Error, match="rank 1"):
        op("MergeFwdBwdKernel", h, maps, 2, 1, True, False)


def test_recurrent_gdn():
    """The first of the lengths is a number of tokens to leave out."""
    torch.manual_seed(3)
    HK, HV, K, V, T = 1, 2, 128, 128, 9
    q, k = (normalize(rand(T, HK, K), dim=-1).to(bf16) for _ in range(2))
    v, beta, g, gk = rand(T, HV, V, dtype=bf16), torch.rand(T, HV).to(bf16), -torch.rand(T, HV), -torch.rand(T, HV, K)
    pool, slots, o = rand(6, HV, V, K), torch.tensor([0, 0, 3, 4, 1, 5, 2, 0, 0], dtype=torch.int32), torch.zeros(T, HV, V, dtype=bf16)
    before = pool.clone()
    op("RecurrentGatedDeltaRule", q, k, v, beta, pool, torch.tensor([2, 3, 2], dtype=torch.int32), slots, g, gk, torch.tensor([2, 1], dtype=torch.int32), 0.3, o)
    assert o[:2].isnan().all() and o[7:].isnan().all()  # no sequence's
    for first, n, accepted in (2, 3, 2), (5, 2, 1):
        s = before[slots[first + accepted - 1]].transpose(1, 2)
        for t in range(first, first + n):
            row = [x[t:t + 1].transpose(0, 1) for x in (q, k, v)]
            want, s = delta(*row, (g[t, :, None] + gk[t])[:, None], beta[t, :, None], 0.3, s)
            close(o[t], want[:, 0], BF16)
            close(pool[slots[t]].transpose(1, 2), s, 1e-5)


@pytest.mark.parametrize("table", [False, True], ids=["list", "table"])
def test_recurrent_kda(table):
    torch.manual_seed(4)
    HK, HV, K, V, T = 1, 2, 128, 128, 6
    q, k = (rand(T, HK, K, dtype=bf16) for _ in range(2))
    v, logits, raw = rand(T, HV, V, dtype=bf16), rand(T, HV), rand(T, HV, K)
    a_log, bias, cu = rand(HV) * 0.3, rand(HV * K), torch.tensor([0, 2, 5], dtype=torch.int32)  # a row after the last sequence
    rows = [[1, 3], [0, 2, 4]]
    slots = torch.tensor([[1, 3, 7], [0, 2, 4]], dtype=torch.int32) if table else torch.tensor([1, 3, 0, 2, 4, 9], dtype=torch.int32)
    pool, o = rand(5, HV, K, V), torch.zeros(T, HV, V, dtype=bf16)
    before = pool.clone()
    accepted = torch.tensor([1, 2], dtype=torch.int32)
    op("RecurrentKda", q, k, v, raw, logits, pool, cu, slots, a_log, bias, accepted, "TND", 0.3, False, True, True, True, True, True, True, -5.0, False, o, None)
    unit = [x.double() / x.double().norm(dim=-1, keepdim=True) for x in (q, k)]
    g = -5 * torch.sigmoid(a_log.exp()[None, :, None] * (raw + bias.view(HV, K)))
    for i, (first, n) in enumerate([(0, 2), (2, 3)]):
        s = before[rows[i][accepted[i] - 1]]
        for t in range(n):
            row = [x[first + t, :, None] for x in (*unit, v, g)]
            want, s = delta(*row, 2 * logits[first + t, :, None].sigmoid(), 0.3, s)
            close(o[first + t], want[:, 0], BF16)
            close(pool[rows[i][t]], s, 1e-5)


@pytest.mark.parametrize("activation", [0, 1])
def test_convolution(activation):
    torch.manual_seed(5)
    W, D, T, cu = 4, 32, 11, [0, 2, 2, 11]
    x, w, bias, states = rand(T, D, dtype=bf16), rand(W, D, dtype=bf16), rand(D, dtype=bf16), rand(4, W - 1, D, dtype=bf16)
    y, before, cache, modes = torch.empty(T, D, dtype=bf16), states.clone(), [2, 0, 3], [1, 0, 0]
    lists = (cu, cache, modes, None)
    if NEW:
        op("CausalConv1d", x, w, bias, states, None, None, None, None, *lists, "silu" if activation else "none", -1, -1, 0, 0, 0, y)
    else:
        op("CausalConv1d", x, w, bias, states, *lists, activation, -1, 0, 0, y)

    def conv(x, w, history):
        z = torch.cat([history, x])
        return sum(w[i] * z[i:i + x.shape[0]] for i in range(W)), z[z.shape[0] - (W - 1):]

    act = torch.nn.functional.silu if activation else lambda t: t
    for s, (a, e) in enumerate(zip(cu, cu[1:])):
        history = before[cache[s]].double() * modes[s]
        z, tail = conv(x[a:e].double(), w.double(), history)
        if e > a:
            close(y[a:e], act(z + bias.double()), BF16)
        close(states[cache[s]], tail, 0)
    assert states[1].equal(before[1])

    # backward, from the values before the activation; its states have W rows
    h0, dht, dy = rand(3, W, D), rand(3, W, D), rand(T, D)
    X, Wt, H, b = (t.double().requires_grad_() for t in (x, w, h0, bias))
    pre, tails = zip(*[conv(X[a:e], Wt, H[s][1:]) for s, (a, e) in enumerate(zip(cu, cu[1:]))])
    pre = torch.cat(pre) + b
    loss = (act(pre) * dy).sum() + sum((t * dht[s, 1:]).sum() for s, t in enumerate(tails))
    want = torch.autograd.grad(loss, [X, Wt, b, H])
    out = [torch.empty(T, D), torch.empty(W, D), torch.empty(D), torch.empty(3, W, D)]
    op("CausalConv1dBwd", x.float(), pre.float().detach(), w.float(), dy, h0, dht, cu, activation, None, *out)
    for got, expected in zip(out, want):
        close(got, expected, 1e-5)


def test_what_is_refused():
    c = Case(True, dtype=bf16)
    y = c.like("B HV T", f32)
    good = [c.g, c.cu, c.idx, C, False, 1.0, True, "float32", y]
    op("ChunkLocalCumsum", *good)
    for i, bad, says in [(0, c.g[:, :1], "HV"), (0, c.g.half(), None), (0, c.g.int(), "int32"), (0, c.g[0], "shape"), (0, None, "null"), (1, None, "chunkIndices without"),
                         (2, None, "without chunkIndices"), (1, [0, 70, 60, c.T], "offsets"), (1, [1, 70, 81, c.T], "offsets"), (2, c.idx[2:], "pair"), (3, 48, "power of two"),
                         (6, False, "headFirst"), (7, None, "outputDtype"), (8, torch.empty(c.B, c.T, c.HV), "shape")]:
        args = list(good)
        args[i] = bad
        if says is None:
            op("ChunkLocalCumsum", *args)
            continue
        with pytest.raises(fake.Error, match=says):
            op("ChunkLocalCumsum", *args)
    spread = torch.empty(c.B, c.T, c.HV).transpose(1, 2)  # an output that is not contiguous
    with pytest.raises(fake.Error, match="not contiguous"):
        op("ChunkLocalCumsum", *good[:-1], spread)
    op("ChunkLocalCumsum", torch.rand(c.B, c.T, c.HV).transpose(1, 2), *good[1:])  # an input may be


def test_format_and_storage(monkeypatch):
    """Formats other than ND are refused; the reverse scan reads the shape of the storage, a stage does not."""
    c = Case(False)
    made = fake.descriptor
    args = [c.g, None, None, C, False, 1.0, True, "float32", c.like("B HV T", f32)]
    monkeypatch.setattr(fake, "descriptor", lambda t, p: made(t, p, form=0))
    with pytest.raises(fake.Error, match="format 0, expected ND"):
        op("ChunkLocalCumsum", *args)
    monkeypatch.setattr(fake, "descriptor", lambda t, p: made(t, p, storage=[t.numel()]))
    op("ChunkLocalCumsum", *args)
    w, dv = c.like("B HV T K"), c.like("B HV T V")
    with pytest.raises(fake.Error, match="storage has another shape"):
        op("ChunkGatedDeltaRuleBwdDhu", c.q, c.k, w, c.dO, dv, c.g, None, None, None, None, None, c.scale, C, False, *((False,) if NEW else ()), c.states(bf16), None, dv)


def test_argument_lists():
    """As the table of known ones has them: letters in runs."""
    known = {"ChunkLocalCumsum": "T L2 i b d b s T", "ChunkScaledDotKkt": "T3 L2 i T", "RecomputeWUFwd": "T6 L2 i T2", "ChunkGatedDeltaRuleFwdH": "T6 b i L2 b T3",
             "ChunkBwdDvLocal": "T6 L2 d i T", "ChunkBwdDqkwg": "T8 L2 T2 f i b2 T4", "PrepareWyReprBwdDa": "T7 L2 i T", "PrepareWyReprBwdFull": "T8 L2 i T4",
             "PrepareWyReprBwd": "T7 L2 i T4", "KdaGateCumsum": "T3 L i b2 d T", "ChunkKdaFwd": "T8 L2 s d i b d b2 T11", "RecurrentGatedDeltaRule": "T10 f T",
             "RecurrentKda": "T11 s d b7 d b T2", "CausalConv1dBwd": "T6 L i s T4"}
    if NEW:
        known |= {"SolveTri": "T L2 s T", "ChunkFwdO": "T5 L2 d i b2 s T", "ChunkGatedDeltaRuleBwdDhu": "T9 L2 d i b2 T3", "ChunkGatedDeltaRuleFwd": "T8 L2 s d i b4 T10",
                  "ChunkGatedDeltaRuleBwd": "T14 L2 s d i b5 T8", "ChunkFwdH": "T6 b i b L2 b2 T3", "ChunkKdaFwdV2": "T8 L2 s d i b d b2 d b4 T16",
                  "ChunkKdaFwdPrepare": "T7 L2 s d i d b5 d b T13", "ChunkKdaFwdFinalize": "T4 L2 s b T", "ChunkKdaBwdPrepare": "T4 L2 d i b T3",
                  "ChunkKdaBwdFinalize": "T17 L2 d2 i b4 T7", "CausalConv1d": "T8 L4 s i5 T", "PreProcessFwdKernelMerged": "T7 L i T",
                  "PreProcessBwdKernelMerged": "T7 L d i T", "MergeFwdBwdKernel": "T2 i2 b2"}
    else:
        known |= {"ChunkFwdO": "T5 L2 d i T", "ChunkGatedDeltaRuleBwdDhu": "T9 L2 d i b T3", "CausalConv1d": "T4 L4 i4 T"}
    assert LETTERS == {name: "".join(run[0] * int(run[1:] or 1) for run in runs.split()) for name, runs in known.items()}


@new
def test_old_package():
    """This file again, with the libraries of the older package."""
    old = fake.CANN.parent / "cann-old"
    environment = {**os.environ, "GDN_FAKE_CANN": str(old), "LD_LIBRARY_PATH": str(old / "lib64")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
