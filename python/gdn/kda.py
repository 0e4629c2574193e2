"""Kimi Delta Attention for PyTorch: the functions that models call."""

import torch

from . import library
from . import autograd  # noqa: F401  registers the gradients
from ._keywords import settle_gate
from .delta_rule import _context, _settle

_fwd = library.operator("kda_fwd")
_recurrent_fwd = library.operator("kda_recurrent_fwd")

# Tokens from one intermediate state to the next.
_CHUNK = 64


def chunk_kda(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    *,
    cp=None,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
    chunk_indices=None,
    transpose_state_layout=None,
    head_first=None,
    backend=None,
):
    """Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) over whole sequences, in chunks; for training and prefill.

    Gated DeltaNet with a decay for each key channel. For each token, with S the K x V state of a value head, in this order::

        S = diag(exp(g)) S        e = v - S^T k        S = S + k (beta e)^T        o = scale S^T q

    Shapes: B batch, T tokens, H heads of q and k, HV heads of v (a multiple of H; value head h uses key head h // (HV / H)), K and V from 1
    to 512, N sequences (B, or the number of packed ones). Tensors may have any strides. Each may be float32, bfloat16 or float16; with
    float64 q, k and v all are float64. States, sums and gates are computed in float32 (float64) whatever the dtypes.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], the natural logarithm of the decay, at most 0; -inf resets the channel. None: no decay. With
            ``use_gate_in_kernel`` the raw gate, of any size.
        beta: [B, T, HV], or [B, T, HV, V] for one per value channel. None: ones. With ``use_beta_sigmoid_in_kernel`` the logits.
        scale: factor of q in the output. None: K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``. None: zeros.
        output_final_state: whether to return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        use_gate_in_kernel: g = -exp(A_log) softplus(g + dt_bias), or with a ``lower_bound`` g = lower_bound sigmoid(exp(A_log) (g + dt_bias)).
            A_log has HV elements, dt_bias HV * K, in any shape. dt_bias None: 0. A_log None, only with a ``lower_bound``: zeros.
            Without ``use_gate_in_kernel`` neither they nor ``lower_bound`` are looked at.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta); with ``allow_neg_eigval`` twice that.
        safe_gate: accepted as a hint that decays are mild; the result is the same, for decays are exact at any strength. With
            ``use_gate_in_kernel`` it needs -5 <= lower_bound < 0.
        lower_bound: below 0; see ``use_gate_in_kernel``.
        disable_recompute: accepted for compatibility; what the backward reads again is the same.
        return_intermediate_states: also return the state before each 64 tokens of a sequence. Only under ``torch.inference_mode()`` and
            without ``disable_recompute``.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64, the offsets of N sequences packed one after another, with B = 1. They start at 0, do not decrease
            (a sequence may be empty) and end at T or before: rows from the last offset on are zero in the output and in all gradients.
        cu_seqlens_cpu: the same in host memory, which saves copying it there; used when given.
        cp_context: flash-linear-attention's name for ``cp``, what ``gdn.parallel.build_cp_context`` returns; ``cu_seqlens`` are not looked at.
        cp: context parallelism, where tokens lie on several ranks: a ``gdn.parallel.ContextParallel``, or what its ``bind`` returns. The token
            tensors are this rank's, the plan says which documents they belong to, ``cu_seqlens`` is None. States are [N, HV, K, V] for the N
            documents of all ranks (for the batch if there is one document): of initial_state a rank reads the rows of documents that begin
            on it; of final_state it fills those of documents that end on it, the others are zero. Gradients of initial_state, A_log and
            dt_bias are this rank's part: their sum over the ranks is the whole. Options and which arguments are given must agree on all ranks.
        chunk_size: 16, 32 or 64; does not change the result beyond rounding, and this library picks its own.
        chunk_indices: accepted for compatibility; how the work is cut up follows from ``cu_seqlens``.
        transpose_state_layout: old name of ``state_v_first``.
        head_first: False; tensors are [B, T, H, ...].
        backend: None, or the name of the device type on which the call is meant to run ("cpu"), refused if the tensors are elsewhere.

    Returns:
        (o, final_state), or (o, final_state, h) with ``return_intermediate_states``: o is [B, T, HV, V] in the dtype of v. final_state is
        float32 (float64 with float64 inputs) and laid out like ``initial_state``, or None unless ``output_final_state``. h is
        [B, NT, HV, K, V] in the dtype of q (its last two dimensions exchanged with ``state_v_first``), NT = ceil(T / 64) states a batch
        entry; with ``cu_seqlens`` [1, NT, HV, K, V], ceil(length / 64) of each sequence one behind the other.

    All floating tensors have gradients, in their own dtypes. There are no second derivatives: asking for them raises RuntimeError.

    Raises:
        ValueError: a shape, dtype, offset or combination of arguments is wrong; the message names it.
        AssertionError: ``return_intermediate_states`` where it cannot be.
        NotImplementedError: a device that no backend serves.
        MemoryError: no memory for scratch.
        RuntimeError: ``cp``: another rank failed.
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}, expected 16, 32 or 64")
    if return_intermediate_states:
        if disable_recompute:
            raise AssertionError("return_intermediate_states and disable_recompute are both set, expected one of them")
        if not torch.is_inference_mode_enabled():
            raise AssertionError("return_intermediate_states is set outside torch.inference_mode(); states have no gradients")
    A_log, dt_bias, bound = settle_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, q, v)
    if cp_context is not None:
        cp, cu_seqlens, cu_seqlens_cpu = _context(cp_context, cp, initial_state, output_final_state), None, None
    if (head_first or transpose_state_layout is not None or backend is not None or scale is not None
            or cu_seqlens is not None or cu_seqlens_cpu is not None):
        scale, state_v_first, cu_seqlens = _settle(q, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, None, transpose_state_layout,
                                                   head_first or None, backend)
    if cp is not None:
        from .parallel.delta_rule import KDA, run  # torch.distributed is not imported without need

        if return_intermediate_states:
            raise ValueError("return_intermediate_states is set, which cp does not go with")
        tensors = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
        numbers = dict(scale=scale or 0.0, qk_l2norm=use_qk_l2norm_in_kernel, gate=use_gate_in_kernel, lower_bound=bound,
                       beta_sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval)
        return run(KDA, cp, tensors, numbers, cu_seqlens, output_final_state, state_v_first)
    o, final_state, _, h = _fwd(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale or 0.0, use_qk_l2norm_in_kernel, use_gate_in_kernel, bound,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, output_final_state, False, return_intermediate_states)
    final_state = final_state if output_final_state else None
    if not return_intermediate_states:
        return o, final_state
    if cu_seqlens is not None:  # the operator has room for as many states as so many sequences can have
        h = h[:, :int(((cu_seqlens.diff() + _CHUNK - 1) // _CHUNK).sum())]
    return o, final_state, h


def fused_recurrent_kda(
    q,
    k,
    v,
    g=None,
    beta=None,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
    *,
    safe_gate=False,
    disable_recompute=False,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    chunk_size=64,
    cp_context=None,
    transpose_state_layout=None,
    head_first=None,
    backend=None,
):
    """Kimi Delta Attention (arXiv:2510.26692) token by token; for decoding and short sequences.

    What ``chunk_kda`` computes, with the same arguments, result, gradients and errors. Note the order of the positional arguments: A_log and
    dt_bias come before scale. Intermediate states are not returned.
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}, expected 16, 32 or 64")
    A_log, dt_bias, bound = settle_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, q, v)
    if (cp_context is not None or head_first or transpose_state_layout is not None or backend is not None or scale is not None
            or cu_seqlens is not None or cu_seqlens_cpu is not None):
        scale, state_v_first, cu_seqlens = _settle(q, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout,
                                                   head_first or None, backend)
    o, final_state, _ = _recurrent_fwd(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale or 0.0, use_qk_l2norm_in_kernel, use_gate_in_kernel, bound,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, output_final_state, False)
    return o, final_state if output_final_state else None
