"""The short convolution before the recurrence: depthwise and causal, whole sequences and step by step."""

import torch
import torch.nn.functional as F

from . import library
from . import autograd  # noqa: F401  registers the gradients

__all__ = ["causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update", "ShortConvolution"]

_fwd = library.operator("conv_fwd")


def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend=None,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    *,
    dilation=1,
    halo=None,
    cp=None,
):
    """Depthwise causal convolution along the tokens, with gradients::

        z_t = bias + sum over w of weight[:, w] x_{t - (W - 1 - w) dilation}        y = act(z) + residual

    Everything is computed in float32 (float64 for float64 x) whatever the dtypes, and rounded once.

    Args:
        x: [B, T, D], any float dtype and strides; fastest where channels or tokens lie side by side.
        weight: [D, W] or [D, 1, W], W from 1 to 16; the last tap is the token's own.
        bias: [D] or None.
        residual: shaped like x, or None.
        initial_state: [N, D, S], the S inputs before each sequence's first, the latest last, S at least (W - 1) dilation. None: zeros.
        output_final_state: whether to return the last S inputs of each sequence, which continue it as ``initial_state``.
        activation: None, "silu" or "swish".
        backend: names of other implementations ("triton", "cuda") are accepted and change nothing; else None or x's device type.
        cu_seqlens: [N + 1] int32 or int64, the offsets of N sequences packed one after another, with B = 1; no sequence sees another. Rows
            from the last offset on are zero in the output and the gradients.
        cu_seqlens_cpu: the same in host memory, used when given.
        chunk_indices: accepted for compatibility.
        cp_context: flash-linear-attention's name for ``cp``, what ``gdn.parallel.build_cp_context`` returns; ``cu_seqlens`` are not looked at.
        dilation: tokens from tap to tap, (W - 1) dilation at most 4096.
        halo: [B, R, D], the R rows before x where the (first) sequence continues from elsewhere, zero where it does not reach; a gradient
            comes back for each row. It is ``initial_state`` in another layout, and takes the place of the first sequence's.
        cp: a ``gdn.parallel.ContextParallel`` or what its ``bind`` returns: x holds this rank's tokens, the halo comes from the other ranks and
            the offsets from the plan.

    Returns:
        (y, final_state): y like x; final_state [N, D, S] in the dtype of x, or None. S is that of ``initial_state`` or ``halo``, and without
        them W, or (W - 1) dilation if that is more.

    Raises:
        ValueError: a shape, dtype, offset or combination of arguments is wrong; the message names it.
        NotImplementedError: a device that no backend serves.
    """
    if weight is None:
        raise ValueError("weight is None, expected [D, W]")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation is {activation!r}, expected None, 'silu' or 'swish'")
    if cp_context is not None:
        if cp is not None or not hasattr(cp_context, "bound"):
            raise ValueError(f"cp_context is {type(cp_context).__name__}, expected what build_cp_context returns, and no cp beside it")
        cp, cu_seqlens, cu_seqlens_cpu = cp_context, None, None
    if backend not in (None, "triton", "cuda", x.device.type):
        raise ValueError(f"backend is {backend!r}, and x is on {x.device}")
    if weight.dim() == 3:
        if weight.shape[1] != 1:
            raise ValueError(f"weight has shape {list(weight.shape)}, expected [D, W] or [D, 1, W]")
        weight = weight.squeeze(1)
    if cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu
    if cu_seqlens is not None:
        cu_seqlens = library.offsets(cu_seqlens)
    reach = (weight.shape[-1] - 1) * dilation
    if cp is not None:
        if halo is not None or cu_seqlens is not None or output_final_state:
            raise ValueError("cp is given with halo, cu_seqlens or output_final_state, which follow from the plan")
        from . import parallel

        cp = cp.bound(x)
        halo = parallel.halo(x, reach, cp)
        if cp.plan.num_documents != 1:
            cu_seqlens = library.offsets(cp.plan.local_offsets)
    if halo is not None:
        initial_state = _with_halo(halo, initial_state, cu_seqlens, reach, x)
    state_len = max(weight.shape[-1], reach) if initial_state is None else initial_state.shape[-1]
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
    y, final_state = _fwd(x, weight, bias, residual, initial_state, cu_seqlens, activation is not None, dilation, state_len, output_final_state)
    return y, final_state if output_final_state else None


def _with_halo(halo, initial_state, cu_seqlens, reach, x):
    """The initial states that say the same."""
    if halo.dim() != 3 or halo.shape[0] != x.shape[0] or halo.shape[2] != x.shape[2]:
        raise ValueError(f"halo has shape {list(halo.shape)}, expected [B, R, D] with B={x.shape[0]}, D={x.shape[2]}")
    state = halo.transpose(1, 2)
    if state.shape[2] < reach:
        state = F.pad(state, (reach - state.shape[2], 0))
    if cu_seqlens is None:
        if initial_state is not None:
            raise ValueError("halo and initial_state are both given without cu_seqlens; they are the same rows")
        return state
    others = len(cu_seqlens) - 2
    if initial_state is None:
        rest = state.new_zeros(max(others, 0), *state.shape[1:])
    else:
        rest = initial_state[1:].to(state.dtype)
        state = F.pad(state, (rest.shape[2] - state.shape[2], 0)) if rest.shape[2] > state.shape[2] else state[..., state.shape[2] - rest.shape[2]:]
    return torch.cat([state, rest])[:others + 1]


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None):
    """``causal_conv1d`` with the arguments of the package of that name: x and the result are [B, D, T].

    Args:
        seq_idx: [B, T] int, the number of each token's sequence; where it changes the convolution begins anew. Tokens with a negative one
            belong to none, and their outputs are zero. Not together with states.
        initial_states: [B, D, W - 1].
        return_final_states: return (y, [B, D, W - 1]), the last in ``final_states_out`` if that is given.
    """
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}, expected [B, D, T]")
    tokens = x.transpose(1, 2)
    if seq_idx is None:
        if return_final_states and initial_states is None:
            initial_states = x.new_zeros(x.shape[0], x.shape[1], weight.shape[-1] - 1)
        y, final = causal_conv1d(tokens, weight, bias, initial_state=initial_states, output_final_state=return_final_states, activation=activation)
        if return_final_states and final_states_out is not None:
            final = final_states_out.copy_(final)
        return (y.transpose(1, 2), final) if return_final_states else y.transpose(1, 2)
    if initial_states is not None or return_final_states:
        raise ValueError("seq_idx is given with states, expected one of them")
    B, T, D = tokens.shape
    if seq_idx.shape != (B, T):
        raise ValueError(f"seq_idx has shape {list(seq_idx.shape)}, expected [B, T] with B={B}, T={T}")
    begins = torch.ones(B, T, dtype=torch.bool, device=seq_idx.device)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    cu_seqlens = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=B * T)
    if B * T == 0:
        cu_seqlens = cu_seqlens.new_zeros(1)
    y, _ = causal_conv1d(tokens.reshape(1, B * T, D), weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    y = y.view(B, T, D)
    none = (seq_idx < 0).unsqueeze(-1)
    return (y.masked_fill(none, 0) if none.any() else y).transpose(1, 2)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None):
    """The next token or tokens of sequences whose last inputs are in ``conv_state``, which is updated in place. For inference.

    Args:
        x: [B, D] or [B, D, T].
        conv_state: [B, D, S], S at least W - 1: the last inputs, the latest last.
        cache_seqlens: [B] int, how many inputs each sequence had: then the states are circular, input i lies in column i % S.
        conv_state_indices: [B] int, the row of ``conv_state`` for each row of x; a negative one: the row is padding, its output zero.

    Returns:
        Shaped like x.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, conv_state, weight, bias)):
        raise RuntimeError("causal_conv1d_update is for inference: it overwrites the states that a gradient would need; use torch.no_grad()")
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}, expected [B, D] or [B, D, T]")
    if x.dim() == 2:
        return causal_conv1d_update(x.unsqueeze(-1), conv_state, weight, bias, activation, cache_seqlens, conv_state_indices).squeeze(-1)
    if conv_state.dim() != 3 or conv_state.shape[-1] < weight.shape[-1] - 1:
        raise ValueError(f"conv_state has shape {list(conv_state.shape)}, expected [B, D, S] with S at least W - 1 = {weight.shape[-1] - 1}")
    if conv_state_indices is not None:
        real = (conv_state_indices >= 0).nonzero().flatten()
        rows = conv_state_indices[real].long()
        states = conv_state[rows]
        y = torch.zeros_like(x)
        y[real] = causal_conv1d_update(x[real], states, weight, bias, activation, None if cache_seqlens is None else cache_seqlens[real])
        conv_state[rows] = states
        return y
    state = conv_state
    if cache_seqlens is not None:
        T, S = x.shape[-1], conv_state.shape[-1]

        def columns(first, last):
            at = (torch.arange(first, last, device=x.device) + cache_seqlens.long().unsqueeze(1)) % S
            return at.unsqueeze(1).expand(-1, x.shape[1], -1)

        state = conv_state.gather(2, columns(1 - weight.shape[-1], 0))
        late = min(T, S)  # of more tokens than columns the last are kept
        conv_state.scatter_(2, columns(T - late, T), x[..., T - late:].to(conv_state.dtype))
    y, last = causal_conv1d(x.transpose(1, 2), weight, bias, initial_state=state, output_final_state=cache_seqlens is None, activation=activation)
    if last is not None:
        conv_state.copy_(last)
    return y.transpose(1, 2)


class ShortConvolution(torch.nn.Conv1d):
    """``causal_conv1d`` as a module; ``weight`` is [D, 1, W] as torch.nn.Conv1d has it.

    Args:
        hidden_size: D.
        kernel_size: W.
        bias: whether there is a ``bias`` [D].
        activation: None, "silu" or "swish".
        backend: accepted for compatibility.
    """

    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", backend=None, device=None, dtype=None):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1, device=device, dtype=dtype)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation is {activation!r}, expected None, 'silu' or 'swish'")
        self.hidden_size, self.activation = hidden_size, activation

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
                chunk_indices=None, cp=None):
        """(y, state) of x [B, T, D].

        Args:
            residual: added to the result.
            mask: [B, T], multiplied into x first.
            cache: [N, D, S], ``initial_state``. Without gradients, and with one token a sequence, it is updated in place and returned.
            output_final_state: whether to return the state.
            cu_seqlens, cu_seqlens_cpu, cp: as in ``causal_conv1d``.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask and cu_seqlens are both given, expected one of them")
            x = x * mask.unsqueeze(-1)
        if cache is not None and x.shape[1] == 1 and cu_seqlens is None and residual is None and cp is None and not torch.is_grad_enabled():
            y = causal_conv1d_update(x.transpose(1, 2), cache, self.weight.squeeze(1), self.bias, self.activation)
            return y.transpose(1, 2), cache if output_final_state else None
        return causal_conv1d(x, self.weight, self.bias, residual, cache, output_final_state, self.activation, None, cu_seqlens, cu_seqlens_cpu,
                             chunk_indices, dilation=self.dilation[0], cp=cp)

    def extra_repr(self):
        return super().extra_repr() + f", activation={self.activation}"

    @property
    def state_size(self):
        """Numbers of a sequence's state."""
        return self.hidden_size * self.kernel_size[0]
