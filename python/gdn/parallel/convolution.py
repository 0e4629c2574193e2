"""The short convolution where a document continues from other ranks."""

import torch
from torch.autograd.function import once_differentiable

from .recompute import kept


def halo(x, rows, cp):
    """[B, rows, D]: the rows of x before this rank's first, as far as they belong to the document that continues here; zeros before them.

    They may lie on several ranks where shards are short. Backward, the gradient of each row goes back to the rank that has it.

    Args:
        x: [B, T, D].
        rows: how many, (kernel width - 1) * dilation for a convolution.
        cp: ContextParallel, or what its ``bind`` returns.
    """
    bound = cp.bound(x)
    if x.dim() != 3 or x.shape[1] != bound.plan.tokens:
        raise ValueError(f"gdn.parallel: x has shape {list(x.shape)}, expected [B, T={bound.plan.tokens}, D]")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"gdn.parallel: the halo has {rows!r} rows, expected an integer of at least 0")
    if bound.plan.num_documents != 1 and x.shape[0] != 1:
        raise ValueError(f"gdn.parallel: x has shape {list(x.shape)}, expected B=1 with {bound.plan.num_documents} packed documents")
    return _Halo.apply(x, rows, bound)


def parts(plan, rows):
    """What this rank sends and what it receives: [(peer, slice of its tokens)] and [(peer, slice of the halo)]. An empty shard needs none."""
    sends, receives, shift = [], [], rows - plan.start
    for peer in range(plan.rank + 1, plan.size):
        if not plan.edges[peer - 1] or plan.borders[peer] - plan.end >= rows:
            break
        if plan.borders[peer] < plan.borders[peer + 1]:
            sends += [(peer, slice(begin - plan.start, end - plan.start)) for rank, begin, end in plan.halo(rows, peer) if rank == plan.rank]
    if plan.tokens:
        receives = [(rank, slice(begin + shift, end + shift)) for rank, begin, end in plan.halo(rows)]
    return sends, receives


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, bound):
        ctx.rows, ctx.bound, ctx.shape = rows, bound, x.shape
        return kept.get(lambda: receive(x, rows, bound)) if bound.plan.crosses else x.new_zeros(x.shape[0], rows, x.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        bound = ctx.bound
        dx = gradient.new_zeros(ctx.shape)
        if not bound.plan.crosses:
            return dx, None, None
        sent, received = parts(bound.plan, ctx.rows)  # the other way round now
        buffers = [gradient.new_empty(ctx.shape[0], part.stop - part.start, ctx.shape[2]) for _, part in sent]
        works = bound.transport.exchange([(gradient[:, part].contiguous(), peer) for peer, part in received],
                                         [(buffer, peer) for buffer, (peer, _) in zip(buffers, sent)])
        bound.transport.wait(works)
        for buffer, (_, part) in zip(buffers, sent):
            dx[:, part] += buffer
        return dx, None, None


def receive(x, rows, bound):
    sent, received = parts(bound.plan, rows)
    made = x.new_zeros(x.shape[0], rows, x.shape[2])
    buffers = [x.new_empty(x.shape[0], part.stop - part.start, x.shape[2]) for _, part in received]
    works = bound.transport.exchange([(x[:, part].contiguous(), peer) for peer, part in sent],
                                     [(buffer, peer) for buffer, (peer, _) in zip(buffers, received)])
    bound.transport.wait(works)
    for buffer, (_, part) in zip(buffers, received):
        made[:, part] = buffer
    return made


def causal_conv1d(x, weight, bias=None, activation=None, *, cp, dilation=1):
    """Causal depthwise convolution along the tokens of each document, wherever its tokens lie.

    Args:
        x: [B, T, D], this rank's tokens.
        weight: [D, W] or [D, 1, W]; its last column is the token's own.
        bias: [D] or None.
        activation: None, "silu" or "swish".
        cp: ContextParallel, or what its ``bind`` returns.
        dilation: distance of the columns in tokens.

    Returns:
        [B, T, D].
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"gdn.parallel: activation is {activation!r}, expected None, 'silu' or 'swish'")
    bound = cp.bound(x)
    weight = weight.reshape(weight.shape[0], 1, weight.shape[-1])
    rows = (weight.shape[-1] - 1) * dilation
    before = halo(x, rows, bound)
    # A fragment's first tokens look at rows of zeros; only the first fragment may continue a document.
    offsets = bound.plan.local_offsets
    pieces = [piece for f, (begin, end) in enumerate(zip(offsets, offsets[1:]))
              for piece in (torch.zeros_like(before) if f else before, x[:, begin:end])]
    if x.shape[1] == 0:
        pieces.append(before.new_zeros(x.shape[0], 1, x.shape[2]))  # conv1d refuses to have no result
    padded = torch.cat(pieces, 1)
    y = torch.nn.functional.conv1d(padded.transpose(1, 2), weight, bias, groups=weight.shape[0], dilation=dilation).transpose(1, 2)
    kept_rows = [y[:, begin + rows * f:end + rows * f] for f, (begin, end) in enumerate(zip(offsets, offsets[1:]))]
    y = torch.cat(kept_rows, 1) if len(kept_rows) > 1 else kept_rows[0]
    return torch.nn.functional.silu(y) if activation else y
