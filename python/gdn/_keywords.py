"""What the rarer keywords of the public functions mean, for tensors of any kind."""

import warnings


def settle(state_v_first, cp_context, transpose_state_layout, head_first, scale):
    """Refuses what cannot be, and returns state_v_first, whichever of its names was used."""
    if head_first is not None:
        raise DeprecationWarning("head_first was removed: tensors are [B, T, H, ...], so transpose(1, 2) what is laid out otherwise")
    if cp_context is not None:
        raise NotImplementedError("cp_context is given, but context parallelism is not available yet")
    if scale is not None and scale == 0:
        raise ValueError("scale is 0, expected another number: every output would be 0")
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout are both given; they are one argument, the second is its old name")
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
    return transpose_state_layout
