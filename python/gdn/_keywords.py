"""What the rarer keywords of the public functions mean, for tensors of any kind."""

import warnings


def settle_gate(gate, A_log, dt_bias, lower_bound, safe_gate, q, v):
    """A_log, dt_bias and lower_bound (0.0: none) as the operators of Kimi Delta Attention take them."""
    if not gate:
        return None, None, 0.0
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}, expected a number below 0")
    if safe_gate and (lower_bound is None or lower_bound < -5):
        raise ValueError(f"safe_gate and use_gate_in_kernel are set and lower_bound is {lower_bound}, expected one from -5 to below 0")
    if A_log is not None and len(A_log.shape) != 1:
        A_log = A_log.reshape(-1)
    if dt_bias is not None and len(q.shape) == len(v.shape) == 4:
        HV, K = v.shape[2], q.shape[3]
        if tuple(dt_bias.shape) != (HV, K):
            if [n for n in dt_bias.shape if n != 1] not in ([n for n in (HV * K,) if n != 1], [n for n in (HV, K) if n != 1]):
                raise ValueError(f"dt_bias has shape {list(dt_bias.shape)}, expected [HV, K] or [HV * K] with HV={HV} and K={K}")
            dt_bias = dt_bias.reshape(HV, K)
    return A_log, dt_bias, float(lower_bound or 0)


def settle(state_v_first, cp_context, transpose_state_layout, head_first, scale):
    """Refuses what cannot be, and returns state_v_first, whichever of its names was used."""
    if head_first is not None:
        raise DeprecationWarning("head_first was removed: tensors are [B, T, H, ...], so transpose(1, 2) what is laid out otherwise")
    if cp_context is not None:
        raise NotImplementedError("cp_context is given, which the chunk functions for torch take; here there is no context parallelism")
    if scale is not None and scale == 0:
        raise ValueError("scale is 0, expected another number: every output would be 0")
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout are both given; they are one argument, the second is its old name")
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
    return transpose_state_layout
