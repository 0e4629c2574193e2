"""State summaries: what a window of tokens does to the recurrent state, so that windows can be computed apart and joined.

Forward ``S_out = M S_in + S``, backward ``dS_in = N dS_out + G`` with ``N = M^T``. A map is one tensor [..., HV, K, V + K], float32
(float64 with float64 inputs): S (or G) in the first V columns, M (or N) behind them, K rows first whatever the layout of the states.
"""

from . import autograd, library  # noqa: F401  autograd registers the gradients
from ._keywords import settle_gate

_summary_fwd = library.operator("summary_fwd")
_summary_bwd = library.operator("summary_bwd")
_kda_summary_fwd = library.operator("kda_summary_fwd")
_kda_summary_bwd = library.operator("kda_summary_bwd")
_merge = library.operator("summary_merge")
_compose = library.operator("summary_compose")


def state_summary(
    k,
    v,
    g=None,
    beta=None,
    *,
    A_log=None,
    dt_bias=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    cu_seqlens=None,
):
    """The forward maps of Gated DeltaNet over windows of tokens, or with g by key channels those of Kimi Delta Attention.

    Args:
        k, v, g, beta, A_log, dt_bias, lower_bound and the flags: as ``chunk_gated_delta_rule`` and ``chunk_kda`` take them; beta is [B, T, HV].
        cu_seqlens: [N + 1] int32 or int64 in host memory, or a sequence of ints: the borders of N windows, with B = 1. They do not decrease
            and lie in 0..T, but need neither start at 0 nor end at T. None: each row of the batch is a window.

    Returns:
        [N, HV, K, V + K], a new tensor: S is the state behind the window from a state of 0, M what the window does to a state before it.
        An empty window has S = 0 and M the identity.

    The maps have gradients with respect to k, v, g, beta, A_log and dt_bias.
    """
    cu_seqlens, (k, v, g, beta) = _windows(cu_seqlens, k, v, g, beta)
    if _by_channels(g, lower_bound):
        A_log, dt_bias, bound = settle_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, False, k, v)
        return _kda_summary_fwd(k, v, g, beta, A_log, dt_bias, cu_seqlens, use_qk_l2norm_in_kernel, use_gate_in_kernel, bound,
                                use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _summary_fwd(k, v, g, beta, _flat(A_log), _flat(dt_bias), cu_seqlens, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                        use_beta_sigmoid_in_kernel, allow_neg_eigval)


def state_gradient_summary(
    q,
    k,
    g,
    beta,
    dout,
    *,
    scale=None,
    A_log=None,
    dt_bias=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    cu_seqlens=None,
):
    """The backward maps of the same windows: G is the gradient of the entry state where that of the exit state is 0.

    Args:
        dout: [B, T, HV, V], the gradient of the output.
        scale: factor of q in the output. None: K ** -0.5.
        All others: as ``state_summary`` and the chunk functions take them.

    Returns:
        [N, HV, K, V + K], a new tensor: G, and N to be applied as it stands. It has no gradient.
    """
    cu_seqlens, (q, k, g, beta, dout) = _windows(cu_seqlens, q, k, g, beta, dout)
    if _by_channels(g, lower_bound):
        A_log, dt_bias, bound = settle_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, False, q, dout)
        return _kda_summary_bwd(q, k, g, beta, A_log, dt_bias, cu_seqlens, dout, scale or 0.0, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                                bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _summary_bwd(q, k, g, beta, _flat(A_log), _flat(dt_bias), cu_seqlens, dout, scale or 0.0, use_qk_l2norm_in_kernel,
                        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)


def merge_summaries(maps, state=None, *, reverse=False, transpose=False):
    """Sends a state through maps one after the other: state = M state + S for each.

    Args:
        maps: [R, ..., HV, K, V + K], R maps in the order of their windows.
        state: [..., HV, K, V], the state to begin with. None: zeros.
        reverse: the last map comes first: how backward maps follow each other.
        transpose: M^T takes the place of M: backward with [G, M] where N was not kept.

    Returns:
        [..., HV, K, V], the state behind the last map. Gradients with respect to maps and state.
    """
    s, m, shape = _split(maps)
    return _merge(s, m, None if state is None else state.reshape(s.shape[1:]), reverse, transpose).reshape(shape[1:-1] + s.shape[-1:])


def apply_summary(map, state=None, *, transpose=False):
    """One map [..., HV, K, V + K] applied to a state [..., HV, K, V] (None: zeros): M state + S, or with ``transpose`` M^T state + S."""
    return merge_summaries(map.unsqueeze(0), state, transpose=transpose)


def compose_summaries(maps, *, reverse=False, transpose=False):
    """The one map [..., HV, K, V + K] that does what ``merge_summaries`` does with the same arguments, for any state. Has gradients."""
    s, m, shape = _split(maps)
    return _compose(s, m, reverse, transpose).reshape(shape[1:])


def _split(maps):
    K = maps.shape[-2]
    V = maps.shape[-1] - K
    if maps.dim() < 4 or maps.dim() > 5 or V < 1:
        raise ValueError(f"maps have shape {list(maps.shape)}, expected [R, HV, K, V+K] or [R, B, HV, K, V+K]")
    five = maps if maps.dim() == 5 else maps.unsqueeze(1)
    return five[..., :V], five[..., V:], maps.shape


def _by_channels(g, lower_bound):
    channels = g is not None and g.dim() == 4
    if lower_bound is not None and not channels:
        raise ValueError("lower_bound is given and g does not go by key channels: only Kimi Delta Attention has such a gate")
    return channels


def _flat(parameter):
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


def _windows(cu_seqlens, *tensors):
    """Offsets from 0 and the tokens that they are of: a window is a slice."""
    if cu_seqlens is None:
        return None, tensors
    offsets = library.offsets(cu_seqlens)
    first, T = offsets[0].item() if len(offsets) else 0, tensors[0].shape[1]
    if first:
        ends = offsets.tolist()
        if first < 0 or ends[-1] > T or ends != sorted(ends):
            raise ValueError(f"cu_seqlens is {ends}, expected offsets that do not decrease, from 0 to T={T}")
        tensors = [t if t is None else t[:, first:] for t in tensors]
        offsets = offsets - first
    return offsets, tensors
