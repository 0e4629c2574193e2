"""Gated DeltaNet for PyTorch: the functions that models call."""

from . import library
from . import autograd  # noqa: F401  registers the gradients
from ._keywords import settle

_fwd = library.operator("fwd")
_recurrent_fwd = library.operator("recurrent_fwd")


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    *,
    cp=None,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
    transpose_state_layout=None,
    head_first=None,
    backend=None,
):
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464) over whole sequences, in chunks; for training and prefill.

    For each token, with S the K x V state of a value head, in this order::

        S = exp(g) S        e = v - S^T k        S = S + k (beta e)^T        o = scale S^T q

    Shapes: B batch, T tokens, H heads of q and k, HV heads of v (a multiple of H; value head h uses key head h // (HV / H)), K and V from 1
    to 512, N sequences (B, or the number of packed ones). Tensors may have any strides. Each may be float32, bfloat16 or float16; with
    float64 q, k and v all are float64. States, sums and gates are computed in float32 (float64) whatever the dtypes.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], the natural logarithm of the decay, at most 0; -inf resets the state. None: no decay. With
            ``use_gate_in_kernel`` the raw gate.
        beta: [B, T, HV], or [B, T, HV, V] for one per value channel. None: ones. With ``use_beta_sigmoid_in_kernel`` the logits.
        scale: factor of q in the output. None: K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``. None: zeros.
        output_final_state: whether to return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta); with ``allow_neg_eigval`` twice that.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64, the offsets of N sequences packed one after another, with B = 1. They start at 0, do not decrease
            (a sequence may be empty) and end at T or before: rows from the last offset on are zero in the output and in all gradients.
        cu_seqlens_cpu: the same in host memory, which saves copying it there; used when given.
        chunk_indices: accepted for compatibility. How the work is cut up follows from ``cu_seqlens``, and a list made for another cut would
            only be a way to go wrong.
        cp_context: flash-linear-attention's name for ``cp``, what ``gdn.parallel.build_cp_context`` returns; ``cu_seqlens`` are not looked at.
        cp: context parallelism, where tokens lie on several ranks: a ``gdn.parallel.ContextParallel``, or what its ``bind`` returns. The token
            tensors are this rank's, the plan says which documents they belong to, ``cu_seqlens`` is None. States are [N, HV, K, V] for the N
            documents of all ranks (for the batch if there is one document): of initial_state a rank reads the rows of documents that begin
            on it; of final_state it fills those of documents that end on it, the others are zero. Gradients of initial_state, A_log and
            dt_bias are this rank's part: their sum over the ranks is the whole. Options and which arguments are given must agree on all ranks.
        use_gate_in_kernel: g = -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias (None: 0) of HV elements in any shape.
            An A_log of -inf is an amplitude of 0: that head does not decay, and its A_log, dt_bias and g have zero gradients.
        chunk_size: 16, 32 or 64; does not change the result beyond rounding, and this library picks its own.
        transpose_state_layout: old name of ``state_v_first``.
        head_first: removed; tensors are [B, T, H, ...].
        backend: None, or the name of the device type on which the call is meant to run ("cpu"), refused if the tensors are elsewhere.

    Returns:
        (o, final_state): o is [B, T, HV, V] in the dtype of v. final_state is float32 (float64 with float64 inputs) and laid out like
        ``initial_state``, or None unless ``output_final_state``.

    All floating tensors have gradients, in their own dtypes. There are no second derivatives: asking for them raises RuntimeError.

    Raises:
        ValueError: a shape, dtype, offset or combination of arguments is wrong; the message names it.
        NotImplementedError: a device that no backend serves.
        MemoryError: no memory for scratch.
        RuntimeError: ``cp``: another rank failed.
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}, expected 16, 32 or 64")
    if cp_context is not None:
        cp, cu_seqlens, cu_seqlens_cpu = _context(cp_context, cp, initial_state, output_final_state), None, None
    if (head_first is not None or transpose_state_layout is not None or backend is not None
            or scale is not None or cu_seqlens is not None or cu_seqlens_cpu is not None or A_log is not None or dt_bias is not None):
        scale, state_v_first, cu_seqlens = _settle(q, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, None, transpose_state_layout,
                                                   head_first, backend)
        A_log, dt_bias = _flat(A_log), _flat(dt_bias)
    if cp is not None:
        from .parallel.delta_rule import GDN, run  # torch.distributed is not imported without need

        tensors = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
        numbers = dict(scale=scale or 0.0, qk_l2norm=use_qk_l2norm_in_kernel, gate=use_gate_in_kernel,
                       beta_sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval)
        return run(GDN, cp, tensors, numbers, cu_seqlens, output_final_state, state_v_first)
    o, final_state, _ = _fwd(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale or 0.0, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, output_final_state, False)
    return o, final_state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    *,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    chunk_size=64,
    cp_context=None,
    transpose_state_layout=None,
    head_first=None,
    backend=None,
):
    """Gated DeltaNet (arXiv:2412.06464) token by token; for decoding and short sequences.

    What ``chunk_gated_delta_rule`` computes, with two more decays that may be combined with g: gk [B, T, HV, K] per key channel and gv
    [B, T, HV, V] per value channel (natural logarithms)::

        S = exp(g) diag(exp(gk)) S diag(exp(gv))

    Note the order of the positional arguments: gk comes fifth, not beta. All other arguments, the result, the gradients and the errors are
    as there.
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}, expected 16, 32 or 64")
    if (cp_context is not None or head_first is not None or transpose_state_layout is not None or backend is not None
            or scale is not None or cu_seqlens is not None or cu_seqlens_cpu is not None or A_log is not None or dt_bias is not None):
        scale, state_v_first, cu_seqlens = _settle(q, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout,
                                                   head_first, backend)
        A_log, dt_bias = _flat(A_log), _flat(dt_bias)
    o, final_state, _ = _recurrent_fwd(
        q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, cu_seqlens, scale or 0.0, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, output_final_state, False)
    return o, final_state if output_final_state else None


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _flat(vector):
    return vector if vector is None or vector.dim() == 1 else vector.reshape(-1)


def _context(cp_context, cp, initial_state, output_final_state):
    if not hasattr(cp_context, "bound"):
        raise ValueError(f"cp_context is {type(cp_context).__name__}, expected what build_cp_context returns")
    if cp is not None:
        raise ValueError("cp and cp_context are both given; they are one argument, the second is what build_cp_context returns")
    if initial_state is not None or output_final_state:
        raise ValueError("cp_context is given with initial_state or output_final_state, which it does not carry; use cp")
    return cp_context


def _settle(q, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout, head_first, backend):
    state_v_first = settle(state_v_first, cp_context, transpose_state_layout, head_first, scale)
    if backend is not None and backend != q.device.type:
        raise ValueError(f"backend is {backend!r}, and the tensors are on {q.device}")
    if cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu
    elif cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        cu_seqlens = cu_seqlens.cpu()
    return scale, state_v_first, cu_seqlens
