"""The functions of ``fla_npu.ops.ascendc`` that training calls: names, keywords and return slots are theirs, the arithmetic is ours.

What is wider here: any K and V up to 512, any group of value heads, float32, bfloat16, float16 and float64 data, empty sequences, gradients of
initial and final states. Gates, states of chunks (h, dh), maps and merges are float32 (float64) throughout; nothing is rounded to the data's
dtype on the way. Chunks have 64 tokens.

Tensors of tokens lie head-major, [B, H, T, D], or packed [H, T, D], except where a layout says otherwise. ``cu_seqlens`` and ``chunk_indices``
are ints in host memory; the second follows from the first and is only compared.

    T tokens, K and V head sizes, H query/key heads, HV value heads, N sequences, NT chunks
"""

# The package may be known under another name: absolute imports only.
import torch

from gdn import library, stages, summary

_CHUNK = 64


def chunk_gated_delta_rule_fwd(
    q,
    k,
    v,
    g,
    beta,
    *,
    layout="BSND",
    scale=None,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    chunk_indices=None,
    use_exp2=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    use_gate_in_kernel=False,
    allow_neg_eigval=False,
    disable_recompute=True,
    return_intermediate_states=False,
    state_v_first=False,
):
    """Gated DeltaNet. q, k, v have rank 4 and lie as ``layout`` says, packed with a batch of 1; g (log decays) and beta are [B, T, HV].

    Returns 10 slots, None where nothing is made: o [B, T, HV, V], final_state [N, HV, K, V], g_cumsum [B, T, HV], A [B, HV, T, 64] (both with
    ``disable_recompute``), beta_eff (with the sigmoid), h [B, NT, HV, K, V] (with ``return_intermediate_states``), q and k as normalised
    (themselves without the norm), and the factors of the norm.
    """
    if use_gate_in_kernel:
        raise NotImplementedError("chunk_gated_delta_rule_fwd: use_gate_in_kernel is True, expected the log decay itself")
    cu = _offsets("chunk_gated_delta_rule_fwd", chunk_size, cu_seqlens, chunk_indices)
    q, k, v = (_token_major("chunk_gated_delta_rule_fwd", t, layout) for t in (q, k, v))
    o, final_state, _ = library.operator("fwd")(
        q, k, v, g, beta, None, None, initial_state, cu, scale or 0.0, use_qk_l2norm_in_kernel, False, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, output_final_state, False)
    g_cumsum = A = beta_eff = h = q_rstd = k_rstd = None
    q_hat, k_hat = _turned(q, layout), _turned(k, layout)
    if disable_recompute or return_intermediate_states or use_qk_l2norm_in_kernel or use_beta_sigmoid_in_kernel:
        made = stages.prepare(q, k, v, g, beta, use_exp2=use_exp2, use_qk_l2norm=use_qk_l2norm_in_kernel, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
                              allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu)
        if disable_recompute:
            g_cumsum, A = made.g_cumsum, made.A.transpose(1, 2)
        if use_beta_sigmoid_in_kernel:
            beta_eff = made.beta_eff
        if use_qk_l2norm_in_kernel:
            q_hat, k_hat = _turned(made.q_norm, layout), _turned(made.k_norm, layout)
            q_rstd, k_rstd = made.q_rstd.transpose(1, 2), made.k_rstd.transpose(1, 2)
        if return_intermediate_states:
            h = _used(stages.state_pass(made.k_norm, made.w, made.u, made.g_cumsum, initial_state=initial_state, use_exp2=use_exp2,
                                        state_v_first=state_v_first, cu_seqlens=cu)[0], cu)
    return o, final_state if output_final_state else None, g_cumsum, A, beta_eff, h, q_hat, k_hat, q_rstd, k_rstd


def chunk_gated_delta_rule_bwd(
    q,
    k,
    v,
    g_cumsum,
    beta,
    A,
    dO,
    scale,
    *,
    layout="BNSD",
    chunk_size=64,
    initial_state=None,
    dht=None,
    cu_seqlens=None,
    chunk_indices=None,
    use_exp2=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    use_gate_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    q_rstd=None,
    k_rstd=None,
):
    """Gradients of ``chunk_gated_delta_rule_fwd``: q, k as normalised and beta as effective there, g_cumsum as it came from there.

    A is accepted and not needed: the library's own backward does without. With ``use_qk_l2norm_in_kernel`` q_rstd and k_rstd [B, H, T] are, and
    dq and dk are those of q and k before the norm; with ``use_beta_sigmoid_in_kernel`` dbeta is that of the logit.

    Returns 8 slots: dq, dk, dv, dbeta, dg (of the log decay itself, not of its sum), dh0 (None without ``initial_state``), None, None.
    """
    name = "chunk_gated_delta_rule_bwd"
    if use_gate_in_kernel:
        raise NotImplementedError(f"{name}: use_gate_in_kernel is True, expected the log decay itself")
    if use_qk_l2norm_in_kernel and (q_rstd is None or k_rstd is None):
        raise ValueError(f"{name}: use_qk_l2norm_in_kernel is True and q_rstd or k_rstd is None, expected [B, H, T]")
    cu = _offsets(name, chunk_size, cu_seqlens, chunk_indices)
    q, k, v = (_token_major(name, t, layout) for t in (q, k, v))
    g = _from_sums(g_cumsum, cu, use_exp2)
    numbers = (scale or 0.0, False, False, False, False, state_v_first)
    tape = library.operator("fwd")(q, k, v, g, beta, None, None, initial_state, cu, *numbers, False, True)[2]
    dq, dk, dv, dg, dbeta, _, _, dh0 = library.operator("bwd")(
        q, k, v, g, beta, None, None, initial_state, cu, tape, dO, None if dht is None else dht.to(_accumulator(q)), *numbers)
    if use_qk_l2norm_in_kernel:
        dq, dk = (_through_norm(dy, y, r.transpose(1, 2)) for dy, y, r in ((dq, q, q_rstd), (dk, k, k_rstd)))
    if use_beta_sigmoid_in_kernel:
        b = beta.to(_accumulator(q))
        dbeta = (dbeta * (b * (1 - b / (2 if allow_neg_eigval else 1)))).to(beta.dtype)
    return (*(_turned(t, layout) for t in (dq, dk, dv)), dbeta, dg, None if initial_state is None else dh0, None, None)


def chunk_kda_fwd_prepare(
    q,
    k,
    v,
    g,
    beta,
    scale,
    *,
    layout="BSND",
    chunk_size=64,
    safe_gate=False,
    lower_bound=None,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    epsilon=1e-6,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    use_exp2=True,
    backward_mode="save",
    cu_seqlens=None,
    chunk_indices=None,
    a_log=None,
):
    """First stage of Kimi Delta Attention; q, k, v, g [.., HV, K], beta lie as ``layout`` says, packed without a batch or with one of 1.

    The gate in the kernel is lower_bound sigmoid(exp(A_log) (g + dt_bias)) with ``safe_gate``, else -exp(A_log) softplus(g + dt_bias).

    Returns 13 slots, head-major: gk, Aqk, Akk, w, u, qg, kg, qg_scaled, q and k as normalised, the factors of the norm, beta as effective. With
    ``backward_mode`` "none", "forward" or "recompute" those that the vendor leaves out are None.
    """
    name = "chunk_kda_fwd_prepare"
    if epsilon != 1e-6:
        raise ValueError(f"{name}: epsilon is {epsilon}, expected 1e-6")
    if backward_mode not in _MODES:
        raise ValueError(f"{name}: backward_mode is {backward_mode!r}, expected one of {', '.join(_MODES)}")
    if use_gate_in_kernel and safe_gate and lower_bound is None:
        raise ValueError(f"{name}: safe_gate is True and lower_bound is None, expected a number below 0")
    cu = _offsets(name, chunk_size, cu_seqlens, chunk_indices)
    packed = q.dim() == 3
    if packed != (layout in ("TND", "NTD")) and not (q.dim() == 4 and q.shape[0] == 1):
        raise ValueError(f"{name}: q has shape {list(q.shape)}, which is not {layout}")
    if not packed and layout in ("TND", "NTD"):
        layout = {"TND": "BSND", "NTD": "BNSD"}[layout]
    token_major = [stages._tokens(t, layout) for t in (q, k, v, g, beta)]
    bound = lower_bound if use_gate_in_kernel and safe_gate else None
    made = stages.kda_prepare(*token_major, scale=scale, use_exp2=use_exp2, use_gate=use_gate_in_kernel, A_log=a_log if A_log is None else A_log,
                              dt_bias=dt_bias, lower_bound=bound, use_qk_l2norm=use_qk_l2norm_in_kernel, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
                              allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu)
    heads = [stages._back(t, "NTD" if packed else "BNSD") for t in made]
    return tuple(t if slot in _MODES[backward_mode] else None for slot, t in zip(stages.KDAPrepared._fields, heads))


_LEAST = ("gk", "Aqk", "w", "u", "kg", "qg_scaled")
_MODES = {
    "none": _LEAST,
    "forward": (*_LEAST, "Akk"),
    "recompute": (*_LEAST, "Akk", "q_norm", "k_norm", "q_rstd", "k_rstd", "beta_eff"),
    "save": stages.KDAPrepared._fields,
}


def chunk_fwd_h(
    k,
    w,
    u,
    *,
    g=None,
    gk=None,
    initial_state=None,
    output_final_state=False,
    chunk_size=64,
    save_new_value=True,
    cu_seqlens=None,
    chunk_indices=None,
    use_exp2=False,
    state_v_first=False,
):
    """The states: k with g, the sums of the gates [.., HV, T], or kg with gk [.., HV, T, K].

    Returns h [B, NT, HV, K, V], the state before each chunk, v_new, and final_state or None.
    """
    cu = _offsets("chunk_fwd_h", chunk_size, cu_seqlens, chunk_indices)
    h, v_new, final_state = stages.state_pass(k, w, u, g, gk, initial_state, layout=_heads(k), use_exp2=use_exp2, output_final_state=output_final_state,
                                              state_v_first=state_v_first, cu_seqlens=cu)
    return _used(h, cu), v_new if save_new_value else None, final_state


def chunk_kda_fwd_finalize(qg_scaled, Aqk, v_new, h, *, cu_seqlens=None, chunk_indices=None, output_layout="BSND", state_v_first=False):
    """Last stage of Kimi Delta Attention. Returns o as ``output_layout`` says."""
    cu = _offsets("chunk_kda_fwd_finalize", _CHUNK, cu_seqlens, chunk_indices)
    o = stages.kda_output(qg_scaled, Aqk, v_new, _batched(h), layout=_heads(v_new), state_v_first=state_v_first, cu_seqlens=cu)
    return _laid_out("chunk_kda_fwd_finalize", o, output_layout)


def chunk_kda_bwd_prepare(Aqk, v_new, dO, h, scale, *, layout="BNSD", chunk_size=64, cu_seqlens=None, chunk_indices=None, state_v_first=False):
    """First stage of the backward; all tensors head-major, with ``layout`` "NTD" without a batch, h too.

    Returns dAqk (the gradient of Aqk / scale), dv_local, and dq_raw = dO h^T.
    """
    cu = _offsets("chunk_kda_bwd_prepare", chunk_size, cu_seqlens, chunk_indices)
    _expect("chunk_kda_bwd_prepare", "layout", layout, v_new)
    return stages.kda_bwd_prepare(Aqk, v_new, dO, _batched(h), scale=scale, layout=_heads(v_new), state_v_first=state_v_first, cu_seqlens=cu)


def pre_process_fwd_kernel_merged(k, w, u, *, g=None, gk=None, cu_seqlens, chunk_size=64):
    """The forward maps of windows: cu_seqlens are their borders, which need neither start at 0 nor end at T; sums of gates are to base 2.

    Returns [N, HV, K, V + K], float32 (float64), S and then M: h_out = M h_in + S. Summaries of gdn.summary are the better way where q, k, v are
    at hand.
    """
    cu, (k, w, u, g, gk) = _window("pre_process_fwd_kernel_merged", chunk_size, cu_seqlens, k, w, u, g, gk)
    layout, (HV, K, N) = _heads(k), (u.shape[-3], k.shape[-1], len(cu) - 1)
    kw = dict(layout=layout, use_exp2=True, output_final_state=True, cu_seqlens=cu)
    S = stages.state_pass(k, w, u, g, gk, **kw)[2]
    none = u.new_zeros(()).expand(*u.shape[:-1], K)
    M = stages.state_pass(k, w, none, g, gk, torch.eye(K, dtype=S.dtype, device=S.device).expand(N, HV, K, K), **kw)[2]
    return torch.cat([S, M], -1)


def pre_process_bwd_kernel_merged(q, k, w, dO, dv, scale, chunk_size, *, g=None, gk=None, cu_seqlens):
    """The backward map of one window, or of several: q, k as ``chunk_gated_delta_rule_bwd_dhu`` takes them, dv is dv_local.

    Returns [HV, K, V + K], for several [N, HV, K, V + K], float32 (float64), G and then N: dh_in = N dh_out + G, without a transpose.
    """
    cu, (q, k, w, dO, dv, g, gk) = _window("pre_process_bwd_kernel_merged", chunk_size, cu_seqlens, q, k, w, dO, dv, g, gk)
    layout, (HV, K, V, N) = _heads(k), (dO.shape[-3], k.shape[-1], dO.shape[-1], len(cu) - 1)
    kw = dict(scale=scale, layout=layout, use_exp2=True, cu_seqlens=cu)
    real = _accumulator(q)
    asked = [q.new_zeros((), dtype=real).expand(N, HV, K, n) for n in (V, K)]
    G = stages.state_grad(q, k, w, dO, dv, g, gk, asked[0], **kw)[2]
    none = dO.new_zeros(()).expand(*dO.shape[:-1], K)
    n = stages.state_grad(q, k, w, none, none, g, gk, asked[1], torch.eye(K, dtype=real, device=q.device).expand(N, HV, K, K), **kw)[2]
    maps = torch.cat([G, n], -1)
    return maps[0] if N == 1 else maps


def merge_fwd_bwd_kernel(h, ag_hm, pre_or_post_num_ranks, rank, forward, state_v_first=False):
    """Writes into h [HV, K, V] what the maps ag_hm [R, HV, K, V + K] of the n ranks before ``rank``, or backward behind it, make of a state of 0,
    and returns it."""
    n = pre_or_post_num_ranks
    first, last = (rank - n, rank) if forward else (rank + 1, rank + 1 + n)
    if not (n >= 0 and 0 <= first and last <= ag_hm.shape[0]):
        raise ValueError(f"merge_fwd_bwd_kernel: {n} ranks {'before' if forward else 'behind'} rank {rank}, and {ag_hm.shape[0]} maps")
    maps = ag_hm if ag_hm.dtype in (torch.float32, torch.float64) else ag_hm.float()
    state = summary.merge_summaries(maps[first:last], reverse=not forward)
    h.copy_(state.mT if state_v_first else state)
    return h


def chunk_gated_delta_rule_bwd_dhu(
    q,
    k,
    w,
    d_o,
    dv,
    scale,
    chunk_size,
    *,
    g=None,
    gK=None,
    h0=None,
    dht=None,
    cu_seqlens=None,
    chunk_indices=None,
    use_exp2=None,
    state_v_first=False,
):
    """The gradients of the states: q, k with g, the sums of the gates, or qg, kg with gK; dv is dv_local. ``use_exp2`` None: with gK.

    Returns dh [B, NT, HV, K, V], the gradient of the state behind each chunk, dh0, that of the initial state (also where ``h0`` is None), and
    the gradient of v_new. Nothing is written in place.
    """
    cu = _offsets("chunk_gated_delta_rule_bwd_dhu", chunk_size, cu_seqlens, chunk_indices)
    layout = _heads(k)
    N, (HV, K, V) = k.shape[0] if layout == "BNSD" else 1, (d_o.shape[-3], k.shape[-1], d_o.shape[-1])
    asked = q.new_zeros((), dtype=_accumulator(q)).expand(N if cu is None else len(cu) - 1, HV, *((V, K) if state_v_first else (K, V)))
    dh, dv2, dh0 = stages.state_grad(q, k, w, d_o, dv, g, gK, asked, dht, scale=scale, layout=layout, use_exp2=gK is not None if use_exp2 is None else use_exp2,
                                     state_v_first=state_v_first, cu_seqlens=cu)
    return _used(dh, cu), dh0, dv2


def chunk_kda_bwd_finalize(
    q,
    k,
    v,
    gk,
    g,
    beta,
    A_log,
    dt_bias,
    Akk,
    v_new,
    h,
    dh,
    dv_scan,
    dAqk,
    dq_raw,
    *,
    scale=None,
    lower_bound=None,
    chunk_size=64,
    safe_gate=True,
    use_gate_in_kernel=True,
    use_exp2=True,
    q_rstd=None,
    k_rstd=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    output_layout="BNSD",
    state_v_first=False,
    cu_seqlens=None,
    chunk_indices=None,
):
    """Last stage of the backward: q, k as normalised, g the gate as prepare took it, beta as effective; all head-major, packed without a batch.

    Returns dq, dk, dv, dbeta, dg as ``output_layout`` says, dA_log and ddt_bias, shaped like their inputs. The first two are those before the
    norm where the rstds are given; dbeta is that of the logit with ``use_beta_sigmoid_in_kernel``.
    """
    name = "chunk_kda_bwd_finalize"
    cu = _offsets(name, chunk_size, cu_seqlens, chunk_indices)
    gate = use_gate_in_kernel
    made = stages.kda_finish(q, k, v, gk, g, beta, A_log if gate else None, dt_bias if gate else None, Akk, v_new, _batched(h), _batched(dh), dv_scan, dAqk,
                             dq_raw, q_rstd, k_rstd, scale=scale, layout=_heads(v), use_exp2=use_exp2, use_gate=gate,
                             lower_bound=lower_bound if gate and safe_gate else None, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
                             allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu)
    dA = None if made[5] is None else made[5].reshape(A_log.shape)
    return (*(_laid_out(name, t, output_layout, head_major=_heads(v)) for t in made[:5]), dA, made[6])


def _offsets(name, chunk_size, cu_seqlens, chunk_indices):
    """The offsets in host memory; chunk_indices must be the list that follows from them."""
    if chunk_size != _CHUNK:
        raise ValueError(f"{name}: chunk_size is {chunk_size}, expected {_CHUNK}")
    if cu_seqlens is None:
        if chunk_indices is not None:
            raise ValueError(f"{name}: chunk_indices are given without cu_seqlens")
        return None
    cu = library.offsets(cu_seqlens)
    if chunk_indices is not None:
        ends = cu.tolist()
        due = [i for s, (a, b) in enumerate(zip(ends, ends[1:])) for c in range(-(-(b - a) // _CHUNK)) for i in (s, c)]
        came = chunk_indices.reshape(-1).tolist() if isinstance(chunk_indices, torch.Tensor) else list(chunk_indices)
        if came != due:
            raise ValueError(f"{name}: chunk_indices are not those of cu_seqlens {ends}, expected pairs (sequence, chunk) of {_CHUNK} tokens")
    return cu


def _window(name, chunk_size, cu_seqlens, *tensors):
    """A window is a slice: offsets from 0, and the tensors from the first token on."""
    cu = _offsets(name, chunk_size, cu_seqlens, None)
    ends, T = cu.tolist(), tensors[1].shape[-2]
    if len(ends) < 2 or ends[0] < 0 or ends[-1] > T or ends != sorted(ends):
        raise ValueError(f"{name}: cu_seqlens is {ends}, expected two or more offsets that do not decrease, from 0 to T={T}")
    first = ends[0]
    rank = tensors[1].dim()
    cut = [t if t is None else t[..., first:, :] if t.dim() == rank else t[..., first:] for t in tensors]
    return cu - first, cut


def _heads(t):
    return "BNSD" if t.dim() == 4 else "NTD"


def _expect(name, argument, layout, t):
    if layout != _heads(t):
        raise ValueError(f"{name}: {argument} is {layout!r}, expected {_heads(t)!r} for tensors of rank {t.dim()}")


def _batched(h):
    return h if h.dim() == 5 else h.unsqueeze(0)


def _used(h, cu):
    """Without the places that no chunk takes."""
    return h if cu is None else h[:, :int(((cu[1:] - cu[:-1] + _CHUNK - 1) // _CHUNK).sum())]


def _token_major(name, t, layout):
    if t.dim() != 4 or layout not in stages.LAYOUTS:
        raise ValueError(f"{name}: a tensor of shape {list(t.shape)} with layout {layout!r}, expected rank 4 and one of {', '.join(stages.LAYOUTS)}")
    return _turned(t, layout)


def _turned(t, layout):
    return t if layout in ("BSND", "TND") else t.transpose(1, 2)


def _laid_out(name, t, layout, head_major=None):
    """Head-major rows as a layout says, which may leave a batch of 1 away or add it."""
    if layout not in stages.LAYOUTS:
        raise ValueError(f"{name}: output_layout is {layout!r}, expected one of {', '.join(stages.LAYOUTS)}")
    batch = t.dim() == 4 if head_major is None else head_major == "BNSD"
    if layout in ("TND", "NTD") and batch:
        if t.shape[0] != 1:
            raise ValueError(f"{name}: output_layout is {layout!r} and B={t.shape[0]}, expected B=1")
        t, batch = t.squeeze(0), False
    elif layout in ("BSND", "BNSD") and not batch:
        t, batch = t.unsqueeze(0), True
    return t.transpose(1 if batch else 0, 2 if batch else 1) if layout in ("BSND", "TND") else t


def _accumulator(t):
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _from_sums(g_cumsum, cu, use_exp2):
    """The log decays whose sums within chunks these are. What lies behind a sum of -inf is lost, and taken to be -inf too."""
    if g_cumsum is None:
        return None
    T = g_cumsum.shape[1]
    position = torch.arange(T, device=g_cumsum.device)
    if cu is not None:
        starts = cu.to(position.device)
        position = position - starts[torch.searchsorted(starts, position, right=True) - 1]
    before = torch.where((position % _CHUNK == 0)[:, None], 0, torch.nn.functional.pad(g_cumsum, (0, 0, 1, 0))[:, :-1])
    g = torch.where(before == float("-inf"), before, g_cumsum - before).clamp(max=0)
    return g * 0.6931471805599453 if use_exp2 else g


def _through_norm(dy, y, rstd):
    real = _accumulator(dy)
    d, u, r = dy.to(real), y.to(real), rstd.to(real)[..., None]
    return (r * (d - (d * u).sum(-1, keepdim=True) * u)).to(dy.dtype)
