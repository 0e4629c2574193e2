"""Norms that the layers use: l2norm of queries and keys, and the gated RMSNorm of the output."""

import torch

from . import library
from . import autograd  # noqa: F401  registers the gradients

__all__ = ["l2norm", "l2norm_fwd", "l2norm_bwd", "rms_norm_gated", "FusedRMSNormGated"]

_fwd = library.operator("norm_fwd")

_ACTIVATIONS = {"silu": 1, "swish": 1, "sigmoid": 2}


def l2norm(x, eps=1e-6, output_dtype=None):
    """x / sqrt(sum of squares + eps) along the last dimension, in float32 (float64 for float64), with gradients.

    Args:
        x: [..., K], any float dtype and strides.
        eps: not negative.
        output_dtype: dtype of the result; None: that of x. A wider one is not rounded to that of x on the way.

    Raises:
        ValueError: a shape, dtype or eps is wrong; the message names it.
    """
    wide = x if output_dtype is None else x.to(torch.promote_types(x.dtype, output_dtype))
    y = _normed(wide, None, None, eps, False, 0)
    return y if output_dtype is None else y.to(output_dtype)


def l2norm_fwd(x, eps=1e-6, output_dtype=None):
    """(l2norm(x), the factors [...] that the rows were multiplied by, in float32)."""
    with torch.no_grad():
        squares = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)
        return l2norm(x, eps, output_dtype), (squares + eps).rsqrt()


def l2norm_bwd(y, rstd, dy, eps=1e-6):
    """Gradient of x, in the dtype of y, from the results (y, rstd) of ``l2norm_fwd`` and the gradient dy of y."""
    wide = torch.promote_types(y.dtype, torch.float32)
    u, v = y.to(wide), dy.to(wide)
    return (rstd.unsqueeze(-1) * (v - (u * v).sum(-1, keepdim=True) * u)).to(y.dtype)


def rms_norm_gated(x, g=None, weight=None, eps=1e-6, activation="swish"):
    """x / sqrt(mean of squares + eps) weight act(g) along the last dimension, with gradients.

    All of it is float32 (float64 for float64); the result is rounded once, to the dtype of x.

    Args:
        x: [..., K], any float dtype and strides.
        g: the gate, shaped like x, any float dtype; None: no gate.
        weight: [K], or None for ones.
        eps: not negative.
        activation: of g, "swish" (or "silu") or "sigmoid".

    Raises:
        ValueError: a shape, dtype, eps or the activation is wrong; the message names it.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(map(repr, _ACTIVATIONS))}")
    if g is not None and g.shape != x.shape:
        raise ValueError(f"g has shape {list(g.shape)}, expected that of x, {list(x.shape)}")
    return _normed(x, weight, g, eps, True, 0 if g is None else _ACTIVATIONS[activation])


class FusedRMSNormGated(torch.nn.Module):
    """The gated RMSNorm at the end of Gated DeltaNet ("swish") and Kimi Delta Attention ("sigmoid"): see ``rms_norm_gated``.

    Args:
        hidden_size: K, the size of the last dimension.
        elementwise_affine: whether there is a ``weight`` [K].
        eps, activation: as there.
    """

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}, expected one of {', '.join(map(repr, _ACTIVATIONS))}")
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None

    def forward(self, x, g=None, residual=None, prenorm=False, residual_in_fp32=False):
        """The norm of x + residual. With ``prenorm`` a tuple: it, and the sum (in float32 with ``residual_in_fp32``)."""
        if residual is not None:
            x = x + residual
        y = rms_norm_gated(x, g, self.weight, self.eps, self.activation)
        return (y, x.float() if residual_in_fp32 else x) if prenorm else y

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"


def _normed(x, weight, z, eps, mean, activation):
    if x.dim() == 0:
        raise ValueError("x has shape [], expected [..., K]")
    y = _fwd(_rows(x), weight, None if z is None else _rows(z), float(eps), mean, activation)
    return y.view(x.shape)


def _rows(x):
    """[B, T, H, K] of a tensor of any rank, a view where there can be one."""
    if x.dim() == 4:
        return x
    return x.unsqueeze(2) if x.dim() == 3 else x.reshape(1, -1, 1, x.shape[-1])
