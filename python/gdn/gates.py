"""Gates of Gated DeltaNet and Kimi Delta Attention standing alone, sigmoid for beta, and cumulative sums in chunks.

The operators can apply all of this themselves (``use_gate_in_kernel``, ``use_beta_sigmoid_in_kernel``), which saves memory; here it is for those
who need the decays. Everything is computed in float32 (float64 for float64 inputs) whatever the dtypes; sums over tokens are double.
"""

import torch
import torch.nn.functional as F

from . import library
from . import autograd  # noqa: F401  registers the gradients

__all__ = ["naive_gdn_gate", "fused_gdn_gate", "gdn_gate_fwd", "gdn_gate_bwd", "gdn_gate_chunk_cumsum", "naive_kda_gate",
           "naive_kda_lowerbound_gate", "fused_kda_gate", "kda_gate_fwd", "kda_gate_bwd", "kda_gate_chunk_cumsum", "fused_beta_sigmoid",
           "fused_beta_sigmoid_fwd", "fused_beta_sigmoid_bwd", "chunk_local_cumsum", "chunk_global_cumsum"]

_fwd = library.operator("gate_fwd")
_bwd = library.operator("gate_bwd")

# The operator's forms
_PLAIN, _SOFTPLUS, _BOUNDED = 0, 1, 2


def naive_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """``fused_gdn_gate`` written in PyTorch."""
    return naive_kda_gate(g.unsqueeze(-1), A_log, dt_bias, output_dtype).squeeze(-1)


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """The gate of Gated DeltaNet, -exp(A_log) softplus(g + dt_bias), with gradients.

    Args:
        g: [..., HV], raw gates of any float dtype.
        A_log: HV elements in any shape. An amplitude of 0 or a softplus that underflows gives 0.
        dt_bias: HV elements, or None for 0.
        output_dtype: dtype of the result.

    Returns:
        Log decays, [..., HV].

    Raises:
        ValueError: a shape or dtype is wrong; the message names it.
    """
    return _head_gate(g, A_log, dt_bias, output_dtype)


def gdn_gate_fwd(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """``fused_gdn_gate`` under its other name."""
    return _head_gate(g, A_log, dt_bias, output_dtype)


def gdn_gate_bwd(g, A_log, dt_bias, dyg, cu_seqlens=None):
    """Gradients (dg, dA_log, ddt_bias or None) of ``fused_gdn_gate`` for the gradient dyg of its result, in the inputs' dtypes and shapes.
    Rows from ``cu_seqlens[-1]`` on have none."""
    return _backward(g, g.unsqueeze(-1), A_log, dt_bias, dyg.unsqueeze(-1), _SOFTPLUS, 0.0, cu_seqlens)


def gdn_gate_chunk_cumsum(g, A_log, chunk_size, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float32, chunk_indices=None):
    """``fused_gdn_gate`` of g [B, T, HV], then ``chunk_local_cumsum``, in one pass."""
    return _head_gate(g, A_log, dt_bias, output_dtype, _chunk(chunk_size), scale, cu_seqlens)


def naive_kda_gate(g, A_log=None, dt_bias=None, output_dtype=torch.float32):
    """``fused_kda_gate`` without a bound, written in PyTorch."""
    x, a = _biased(g, A_log, dt_bias)
    y = F.softplus(x)
    return -(y if a is None else torch.where((y == 0) | (a == 0), 0.0, a * y)).to(output_dtype)


def naive_kda_lowerbound_gate(g, A_log=None, dt_bias=None, lower_bound=-5.0, output_dtype=torch.float32):
    """``fused_kda_gate`` with a bound, written in PyTorch."""
    x, a = _biased(g, A_log, dt_bias)
    return (lower_bound * torch.sigmoid(x if a is None else a * x)).to(output_dtype)


def fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """The gate of Kimi Delta Attention, with gradients: -exp(A_log) softplus(g + dt_bias), or with a ``lower_bound``
    lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    Args:
        g: [..., HV, K], raw gates of any float dtype and size.
        A_log: HV elements in any shape; None: an amplitude of 1.
        dt_bias: HV * K elements in any shape, or None for 0.
        lower_bound: below 0; its presence selects the second form.
        output_dtype: dtype of the result.

    Returns:
        Log decays, [..., HV, K].

    Raises:
        ValueError: a shape, dtype or the bound is wrong; the message names it.
    """
    return _channel_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_fwd(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """``fused_kda_gate`` under its other name."""
    return _channel_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_bwd(g, A_log=None, dt_bias=None, dyg=None, lower_bound=None):
    """Gradients (dg, dA_log or None, ddt_bias or None) of ``fused_kda_gate`` for the gradient dyg of its result."""
    return _backward(g, g, A_log, dt_bias, dyg, *_form(lower_bound))


def kda_gate_chunk_cumsum(g, A_log, chunk_size, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float32, chunk_indices=None,
                          lower_bound=None):
    """``fused_kda_gate`` of g [B, T, HV, K], then ``chunk_local_cumsum``, in one pass."""
    return _channel_gate(g, A_log, dt_bias, lower_bound, output_dtype, _chunk(chunk_size), scale, cu_seqlens)


def fused_beta_sigmoid(x, scale=1.0):
    """scale sigmoid(x) in float32 (float64 for float64) with gradients, for x of any shape and float dtype; scale is not 0."""
    y = _fwd(_flat(x), None, None, None, _BOUNDED, float(scale), 0, False, 0.0)
    return y.reshape(x.shape)


def fused_beta_sigmoid_fwd(x, scale=1.0):
    """``fused_beta_sigmoid`` under its other name."""
    return fused_beta_sigmoid(x, scale)


def fused_beta_sigmoid_bwd(x, dy, scale=1.0):
    """Gradient of x, in its dtype, for the gradient dy of ``fused_beta_sigmoid(x, scale)``."""
    with torch.no_grad():
        return _bwd(_flat(x), None, None, None, _flat(dy), _BOUNDED, float(scale), 0, False, 0.0)[0].reshape(x.shape)


def chunk_local_cumsum(g, chunk_size, reverse=False, scale=None, cu_seqlens=None, head_first=False, output_dtype=torch.float32,
                       chunk_indices=None):
    """Cumulative sum along the tokens of each chunk of ``chunk_size``, counted from its sequence's first token; with gradients.

    Args:
        g: [B, T, H] or [B, T, H, K]; [B, H, T] or [B, H, T, K] with ``head_first``.
        chunk_size: tokens of a chunk, from 1.
        reverse: whether the sum runs from a chunk's last token to its first.
        scale: factor of the result; None: 1.
        cu_seqlens: [N + 1], offsets of packed sequences, with B = 1. Rows from the last offset on are zero.
        output_dtype: dtype of the result; None: that of g. The sums themselves are never below float32.
        chunk_indices: accepted for compatibility; the chunks follow from ``cu_seqlens``.

    Raises:
        ValueError: a shape, dtype or offset is wrong; the message names it.
    """
    return _cumsum(g, _chunk(chunk_size), reverse, scale, cu_seqlens, head_first, output_dtype)


def chunk_global_cumsum(s, reverse=False, cu_seqlens=None, scale=None, head_first=False, output_dtype=torch.float32):
    """``chunk_local_cumsum`` over whole sequences."""
    return _cumsum(s, max(s.shape[2 if head_first else 1], 1), reverse, scale, cu_seqlens, head_first, output_dtype)


def _cumsum(g, chunk, reverse, scale, cu_seqlens, head_first, output_dtype):
    if g.dim() not in (3, 4):
        raise ValueError(f"g has shape {list(g.shape)}, expected rank 3 or 4")
    x = g.transpose(1, 2) if head_first else g
    y = _run(x if g.dim() == 4 else x.unsqueeze(-1), None, None, _PLAIN, 0.0, chunk, scale, cu_seqlens, reverse).view(x.shape)
    return (y.transpose(1, 2) if head_first else y).to(output_dtype or g.dtype)


def _head_gate(g, A_log, dt_bias, output_dtype, chunk=0, scale=None, cu_seqlens=None):
    if A_log is None:
        raise ValueError("A_log is None, expected HV elements")
    if g.dim() == 0 or chunk and g.dim() != 3:
        raise ValueError(f"g has shape {list(g.shape)}, expected {'[B, T, HV]' if chunk else '[..., HV]'}")
    x = (g if g.dim() == 3 else g.reshape(1, -1, g.shape[-1])).unsqueeze(-1)
    y = _run(x, A_log, dt_bias, _SOFTPLUS, 0.0, chunk, scale, cu_seqlens)
    return y.reshape(g.shape).to(output_dtype or g.dtype)


def _channel_gate(g, A_log, dt_bias, lower_bound, output_dtype, chunk=0, scale=None, cu_seqlens=None):
    if g.dim() < 2 or chunk and g.dim() != 4:
        raise ValueError(f"g has shape {list(g.shape)}, expected {'[B, T, HV, K]' if chunk else '[..., HV, K]'}")
    x = g if g.dim() == 4 else g.reshape(1, -1, *g.shape[-2:])
    y = _run(x, A_log, dt_bias, *_form(lower_bound), chunk, scale, cu_seqlens)
    return y.reshape(g.shape).to(output_dtype or g.dtype)


def _run(x, A_log, dt_bias, gate, bound, chunk, scale, cu_seqlens, reverse=False):
    if scale is not None and scale == 0:
        raise ValueError("scale is 0, expected another number: every output would be 0")
    A_log, dt_bias = _parameters(x, A_log, dt_bias)
    cu_seqlens = None if cu_seqlens is None else library.offsets(cu_seqlens)
    return _fwd(x, A_log, dt_bias, cu_seqlens, gate, bound, chunk, reverse, float(scale or 0))


def _backward(g, x, A_log, dt_bias, dy, gate, bound, cu_seqlens=None):
    if x.dim() != 4:
        x, dy = x.reshape(1, -1, *x.shape[-2:]), dy.reshape(1, -1, *dy.shape[-2:])
    flat = _parameters(x, A_log, dt_bias)
    cu_seqlens = None if cu_seqlens is None else library.offsets(cu_seqlens)
    with torch.no_grad():
        dg, dA, dbias = _bwd(x, *flat, cu_seqlens, dy, gate, bound, 0, False, 0.0)
    return dg.reshape(g.shape), *(None if p is None else d.reshape(p.shape).to(p.dtype) for d, p in ((dA, A_log), (dbias, dt_bias)))


def _parameters(x, A_log, dt_bias):
    """As the operator takes them: [HV] and [HV, K]."""
    if A_log is not None and A_log.dim() != 1:
        A_log = A_log.reshape(-1)
    if dt_bias is not None and dt_bias.shape != x.shape[2:]:
        if dt_bias.numel() != x.shape[2] * x.shape[3]:
            raise ValueError(f"dt_bias has shape {list(dt_bias.shape)}, expected {x.shape[2] * x.shape[3]} elements")
        dt_bias = dt_bias.reshape(x.shape[2:])
    return A_log, dt_bias


def _form(lower_bound):
    if lower_bound is None:
        return _SOFTPLUS, 0.0
    if not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}, expected a number below 0")
    return _BOUNDED, float(lower_bound)


def _chunk(chunk_size):
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}, expected an integer from 1")
    return chunk_size


def _flat(x):
    """[B, T, H, 1] of a tensor of any shape."""
    if x.dim() == 3:
        return x.unsqueeze(-1)
    return x.reshape(1, -1, x.shape[-1] if x.dim() else 1, 1)


def _biased(g, A_log, dt_bias):
    """Raw gates with their bias, and amplitudes, at least in float32."""
    wide = torch.promote_types(g.dtype, torch.float32)
    x = g.to(wide)
    if dt_bias is not None:
        x = x + dt_bias.to(wide).reshape(g.shape[-2:])
    return x, None if A_log is None else A_log.to(wide).exp().reshape(-1, 1)
