"""The rows that a short convolution needs from other ranks: ``gdn.causal_conv1d(x, ..., cp=cp)``."""

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
