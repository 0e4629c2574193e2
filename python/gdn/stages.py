"""The stages of the chunk form as functions of their own, for those who have to get between them.

Chunks have 64 tokens and start anew with each sequence. The intermediates are those that flash-linear-attention and the Ascend operators
know; gdn.h has the formulas. Composite operators do not go this way, and agree with it within rounding.

``layout`` says how all tensors of tokens lie: "BSND" [B, T, H, D], "BNSD" [B, H, T, D], and packed without the batch "TND" [T, H, D] and
"NTD" [H, T, D]; numbers for each token and head are the same without D. Outputs are views in the same layout. States are [N, HV, K, V], the
states of chunks ``h`` and ``dh`` [B, NT, HV, K, V] in every layout. With ``cu_seqlens`` (host memory, or a sequence of ints) B is 1, the chunks
of all sequences lie one behind the other, and NT may be larger than their number, with zeros there.

Cumulative gates are natural logarithms, or with ``use_exp2`` those to base 2. No stage has a gradient of its own: the backward is stages too.
"""

from typing import NamedTuple

import torch

from . import library

LAYOUTS = ("BSND", "BNSD", "TND", "NTD")


class Prepared(NamedTuple):
    """Of Gated DeltaNet."""

    g_cumsum: torch.Tensor
    A: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    q_rstd: torch.Tensor
    k_rstd: torch.Tensor
    beta_eff: torch.Tensor


class KDAPrepared(NamedTuple):
    """Of Kimi Delta Attention: 13 tensors in the order of the Ascend operators."""

    gk: torch.Tensor
    Aqk: torch.Tensor
    Akk: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    qg_scaled: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    q_rstd: torch.Tensor
    k_rstd: torch.Tensor
    beta_eff: torch.Tensor


def prepare(q, k, v, g, beta, *, layout="BSND", use_exp2=False, use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False, cu_seqlens=None):
    """First stage of Gated DeltaNet: q, k [B, T, H, K], v [B, T, HV, V], g (log decays) and beta [B, T, HV] or None. Returns ``Prepared``."""
    made = _run("prepare", layout, [q, k, v, g, beta], [], cu_seqlens, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, use_exp2)
    return Prepared(*made)


def kda_prepare(q, k, v, g, beta, *, scale=None, layout="BSND", use_exp2=True, use_gate=False, A_log=None, dt_bias=None, lower_bound=None,
                use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False, cu_seqlens=None):
    """First stage of Kimi Delta Attention: g [B, T, HV, K], with ``use_gate`` as ``chunk_kda`` takes it. Returns ``KDAPrepared``."""
    K = q.shape[-1]
    parameters = [None if A_log is None else A_log.reshape(-1), None if dt_bias is None else dt_bias.reshape(-1, K)]
    made = _run("kda_prepare", layout, [q, k, v, g, beta], parameters, cu_seqlens, scale or 0.0, use_qk_l2norm, use_gate, lower_bound or 0.0,
                use_beta_sigmoid, allow_neg_eigval, use_exp2)
    return KDAPrepared(*made)


def state_pass(k, w, u, g_cumsum=None, gk=None, initial_state=None, *, layout="BSND", use_exp2=False, output_final_state=False,
               state_v_first=False, cu_seqlens=None):
    """Second stage of both: k with g_cumsum, or kg with gk. Returns h, v_new, and the final state or None."""
    h, v_new, final = _run("state_pass", layout, [k, w, u, g_cumsum, gk], [initial_state], cu_seqlens, use_exp2, state_v_first, output_final_state,
                           states=(0, 2))
    return h, v_new, final if output_final_state else None


def output(q, k, v_new, g_cumsum, h, *, scale=None, layout="BSND", use_exp2=False, state_v_first=False, cu_seqlens=None):
    """Last stage of Gated DeltaNet. Returns o."""
    return _run("output", layout, [q, k, v_new, g_cumsum], [h], cu_seqlens, scale or 0.0, use_exp2, state_v_first)


def kda_output(qg_scaled, Aqk, v_new, h, *, layout="BSND", state_v_first=False, cu_seqlens=None):
    """Last stage of Kimi Delta Attention. Returns o."""
    return _run("kda_output", layout, [qg_scaled, Aqk, v_new], [h], cu_seqlens, state_v_first)


def bwd_prepare(q, k, v, g_cumsum, beta, A, dout, *, scale=None, layout="BSND", use_exp2=False, cu_seqlens=None):
    """First stage of the backward of Gated DeltaNet: w and u again, and dv_local."""
    return _run("bwd_prepare", layout, [q, k, v, g_cumsum, beta, A, dout], [], cu_seqlens, scale or 0.0, use_exp2)


def kda_bwd_prepare(Aqk, v_new, dout, h, *, scale, layout="BSND", state_v_first=False, cu_seqlens=None):
    """First stage of the backward of Kimi Delta Attention: dAqk (the gradient of Aqk / scale), dv_local, dq_raw = dout h^T."""
    return _run("kda_bwd_prepare", layout, [Aqk, v_new, dout], [h], cu_seqlens, scale, state_v_first)


def state_grad(q, k, w, dout, dv_local, g_cumsum=None, gk=None, initial_state=None, dht=None, *, scale, layout="BSND", use_exp2=False,
               state_v_first=False, cu_seqlens=None):
    """Second stage of the backward of both: q and k with g_cumsum, or qg and kg with gk. Returns dh, dv_scan (the gradient of v_new), and
    with ``initial_state`` its gradient, else None."""
    dh, dv, dh0 = _run("state_grad", layout, [q, k, w, dout, dv_local, g_cumsum, gk], [initial_state, dht], cu_seqlens, scale, use_exp2, state_v_first,
                       states=(0, 2))
    return dh, dv, None if initial_state is None else dh0


def finish(q, k, v, v_new, dout, dv_scan, g_cumsum, beta, h, dh, A, q_rstd=None, k_rstd=None, *, scale=None, layout="BSND", use_exp2=False,
           use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None):
    """Last stage of the backward of Gated DeltaNet: q, k and beta as the forward used them. With rstds dq and dk are those before the norm,
    with ``use_beta_sigmoid`` dbeta that of the logit. Returns dq, dk, dv, dbeta, dg, the last of the log decay itself."""
    return _run("finish", layout, [q, k, v, v_new, dout, dv_scan, g_cumsum, beta], [h, dh], cu_seqlens, scale or 0.0, use_beta_sigmoid, allow_neg_eigval,
                use_exp2, state_v_first, behind=[A, q_rstd, k_rstd])


def kda_finish(q, k, v, gk, g, beta, A_log, dt_bias, Akk, v_new, h, dh, dv_scan, dAqk, dq_raw, q_rstd=None, k_rstd=None, *, scale=None, layout="BSND",
               use_exp2=True, use_gate=False, lower_bound=None, use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None):
    """Last stage of the backward of Kimi Delta Attention; g is the gate as the forward took it. Returns dq, dk, dv, dbeta, dg, dA_log, ddt_bias;
    of the last two one whose input is None is None."""
    K = q.shape[-1]
    turned = [_tokens(t, layout) for t in (q, k, v, gk, g, beta)]
    turned += [None if A_log is None else A_log.reshape(-1), None if dt_bias is None else dt_bias.reshape(-1, K)]
    turned += [_tokens(t, layout) for t in (Akk, v_new)] + [h, dh] + [_tokens(t, layout) for t in (dv_scan, dAqk, dq_raw, q_rstd, k_rstd)]
    made = library.operator("kda_finish")(*turned, _offsets(cu_seqlens), scale or 0.0, use_gate, lower_bound or 0.0, use_beta_sigmoid, allow_neg_eigval,
                                          use_exp2, state_v_first)
    return (*(_back(t, layout) for t in made[:5]), None if A_log is None else made[5], None if dt_bias is None else made[6].reshape(dt_bias.shape))


def _run(name, layout, tokens, others, cu_seqlens, *numbers, states=(), behind=()):
    """The operator on tensors of tokens, then others, then again some of tokens. states: the outputs that are not of tokens."""
    given = [_tokens(t, layout) for t in tokens] + list(others) + [_tokens(t, layout) for t in behind]
    made = library.operator(name)(*given, _offsets(cu_seqlens), *numbers)
    if isinstance(made, torch.Tensor):
        return _back(made, layout)
    return tuple(t if i in states else _back(t, layout) for i, t in enumerate(made))


def _offsets(cu_seqlens):
    return None if cu_seqlens is None else library.offsets(cu_seqlens)


def _tokens(t, layout):
    """A view [B, T, H, ...] of a tensor."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if t is None or layout == "BSND":
        return t
    if layout == "BNSD":
        return t.transpose(1, 2)
    return (t if layout == "TND" else t.transpose(0, 1)).unsqueeze(0)


def _back(t, layout):
    if layout == "BSND" or t.dim() < 3:  # what was not made is [0]
        return t
    if layout == "BNSD":
        return t.transpose(1, 2)
    return t.squeeze(0) if layout == "TND" else t.squeeze(0).transpose(0, 1)
