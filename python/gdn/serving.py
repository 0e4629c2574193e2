"""Decoding for serving engines, for PyTorch: a few tokens of each sequence, with the states in a pool of slots."""

import torch

from . import library
from . import autograd  # noqa: F401  registers the kernels
from ._keywords import settle_gate
from .delta_rule import _settle

_decode = library.operator("decode")


def fused_recurrent_kda_fwd(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    output_final_state=False,
    inplace_final_state=True,
    state_v_first=False,
    cu_seqlens=None,
    ssm_state_indices=None,
    num_accepted_tokens=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    out=None,
    *,
    safe_gate=False,
    cu_seqlens_cpu=None,
    transpose_state_layout=None,
    backend=None,
):
    """Kimi Delta Attention (arXiv:2510.26692) on the next few tokens of each sequence, from and to states in a pool; for inference.

    Computes what ``fused_recurrent_kda`` does, with the same q, k, v, g, beta, gates and norms. Sequence n goes on from the state in slot
    ``ssm_state_indices[n, num_accepted_tokens[n] - 1]``, and its state after token t is stored in slot ``ssm_state_indices[n, t]``, for each
    t: when only some of the tokens turn out to be accepted, the state to go on from is there. All other slots keep every bit.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K] or None; beta: [B, T, HV], [B, T, HV, V] or None.
        A_log, dt_bias, lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, scale,
            safe_gate: as in ``fused_recurrent_kda``.
        initial_state: the pool, [P, HV, K, V], or [P, HV, V, K] with ``state_v_first``, in any strides without overlap: float32, bfloat16 or
            float16, whatever the other dtypes (float64 if q is). States are computed in float32 (float64) throughout a call and rounded to the
            pool's dtype where they are stored. Without ``ssm_state_indices`` P is N, and slot n belongs to sequence n. None, only with
            ``inplace_final_state=False``: every sequence begins with zeros.
        output_final_state: with ``inplace_final_state=False`` whether to return the last states.
        inplace_final_state: whether to store states in the pool. If not, it is only read.
        cu_seqlens: [N + 1], offsets of N packed sequences, with B = 1; N is B without it.
        ssm_state_indices: [N, R] int32 or int64, R at least the number of tokens of any sequence; or [N] for one token each. A sequence whose
            first state is in a negative slot is padding: its states are neither read nor written, and its rows of the output (and of a final
            state that is returned) are 0. A negative slot of a later token means that its state is not stored. Entries that a call does not
            need may hold anything.
        num_accepted_tokens: [N] int32 or int64, from 1 to R. None: ones.
        out: a tensor to receive the output, shaped like v and in its dtype.
        cu_seqlens_cpu, transpose_state_layout, backend: as in ``fused_recurrent_kda``.

    Returns:
        (o, final_state): o is [B, T, HV, V] in the dtype of v, or ``out``. final_state is ``initial_state`` itself if it was updated in place.
        Else it is the state after each sequence's last token, [N, HV, K, V] float32 (float64 with float64 inputs; laid out like the
        pool), or None unless ``output_final_state``.

    There are no gradients: a backward pass through the result raises RuntimeError.

    Raises:
        ValueError: a shape, dtype, offset, slot or combination of arguments is wrong, among them a slot beyond the pool, and a slot that one
            sequence writes and another reads or writes. The message names it, and nothing was written.
        NotImplementedError: a device that no backend serves.
        MemoryError: no memory for scratch.
    """
    if g is not None and g.dim() != 4:
        raise ValueError(f"g has shape {list(g.shape)}, expected [B, T, HV, K]")
    A_log, dt_bias, bound = settle_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, q, v)
    return _run(q, k, v, g, beta, A_log, dt_bias, initial_state, scale, output_final_state, inplace_final_state, state_v_first, cu_seqlens,
                ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, bound, out, cu_seqlens_cpu, transpose_state_layout, backend)


def fused_recurrent_gated_delta_rule_fwd(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    output_final_state=False,
    inplace_final_state=True,
    state_v_first=False,
    cu_seqlens=None,
    ssm_state_indices=None,
    num_accepted_tokens=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    out=None,
    *,
    cu_seqlens_cpu=None,
    transpose_state_layout=None,
    backend=None,
):
    """Gated DeltaNet (arXiv:2412.06464) on the next few tokens of each sequence, from and to states in a pool; for inference.

    ``fused_recurrent_kda_fwd`` with one decay a head: g is [B, T, HV] and, with ``use_gate_in_kernel``, g = -exp(A_log) softplus(g + dt_bias)
    with A_log and dt_bias (None: 0) of HV elements in any shape. All else is as there.
    """
    if g is not None and g.dim() != 3:
        raise ValueError(f"g has shape {list(g.shape)}, expected [B, T, HV]")
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    else:
        A_log, dt_bias = (None if t is None else t.reshape(-1) for t in (A_log, dt_bias))
    return _run(q, k, v, g, beta, A_log, dt_bias, initial_state, scale, output_final_state, inplace_final_state, state_v_first, cu_seqlens,
                ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                allow_neg_eigval, 0.0, out, cu_seqlens_cpu, transpose_state_layout, backend)


def _run(q, k, v, g, beta, A_log, dt_bias, pool, scale, output_final_state, in_place, v_first, cu_seqlens, slots, accepted, l2norm, gate,
         beta_sigmoid, neg_eigval, bound, out, cu_seqlens_cpu, transpose_state_layout, backend):
    if (transpose_state_layout is not None or backend is not None or scale is not None or cu_seqlens is not None
            or cu_seqlens_cpu is not None):
        scale, v_first, cu_seqlens = _settle(q, scale, v_first, cu_seqlens, cu_seqlens_cpu, None, transpose_state_layout, None, backend)
    if out is not None and (out.shape != v.shape or out.dtype != v.dtype):
        raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected {list(v.shape)} of {v.dtype} like v")
    state = pool
    if pool is None:
        if in_place:
            raise ValueError("inplace_final_state is set and initial_state is None, expected the pool to update")
        state, slots, accepted = _zeros(q, v, v_first, cu_seqlens)
    o, final_state = _decode(q, k, v, g, beta, A_log, dt_bias, state, slots, accepted, cu_seqlens, scale or 0.0, l2norm, gate, bound,
                             beta_sigmoid, neg_eigval, v_first, in_place, output_final_state and not in_place)
    if out is not None:
        o = out.copy_(o)
    return o, pool if in_place else final_state if output_final_state else None


def _zeros(q, v, v_first, cu_seqlens):
    """A pool of one slot of zeros, and indices by which every sequence begins with it."""
    N, T = (q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1), q.shape[1]
    sizes = (v.shape[2], q.shape[3], v.shape[3]) if q.dim() == v.dim() == 4 else (1, 1, 1)  # the operator says what is wrong with them
    if v_first:
        sizes = sizes[0], sizes[2], sizes[1]
    return q.new_zeros(1, *sizes), torch.zeros((), dtype=torch.int32, device=q.device).expand(N, T), None
