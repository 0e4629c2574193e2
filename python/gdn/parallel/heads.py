"""Ulysses: within a row of ranks, tokens are exchanged for heads, so that each rank sees all tokens of the row for its share of the heads."""

from itertools import accumulate

import torch
from torch.autograd.function import once_differentiable


def to_heads(row, lengths, tensors):
    """From [B, T_r, N, ...], all heads of this rank's tokens, to [B, sum of T, N / U, ...], the row's tokens for this rank's heads.

    Args:
        row: transport of the U ranks of a row.
        lengths: by tensor, the T of each rank.
    """
    return _Swap.apply(row, True, lengths, *tensors)


def to_tokens(row, lengths, tensors):
    """The inverse of ``to_heads``."""
    return _Swap.apply(row, False, lengths, *tensors)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, row, heads, lengths, *tensors):
        ctx.row, ctx.heads, ctx.lengths = row, heads, lengths
        return swap(row, heads, lengths, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return (None, None, None, *swap(ctx.row, not ctx.heads, ctx.lengths, gradients))


def swap(row, heads, lengths, tensors):
    """One message to each rank of the row holds its parts of all tensors."""
    places = [(0, *accumulate(counts)) for counts in lengths]
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())  # so that each part in a message is aligned

    def part(i, rank):
        x = tensors[i]
        if not heads:
            return x[:, places[i][rank]:places[i][rank + 1]]
        n = x.shape[2] // row.size
        return x[:, :, rank * n:(rank + 1) * n]

    def arriving(i, rank):
        shape = list(tensors[i].shape)
        shape[1] = lengths[i][rank if heads else row.rank]
        if heads:
            shape[2] //= row.size
        return shape

    peers = [rank for rank in range(row.size) if rank != row.rank]
    sends, receives = [], []
    for rank in peers:
        message = torch.cat([part(i, rank).contiguous().view(-1).view(torch.uint8) for i in order])
        if message.numel():
            sends.append((message, rank))
        size = sum(_product(arriving(i, rank)) * tensors[i].element_size() for i in order)
        receives.append((message.new_empty(size), rank))
    works = row.exchange(sends, [(t, rank) for t, rank in receives if t.numel()])
    row.wait(works)
    parts = {(i, row.rank): part(i, row.rank) for i in order}
    for message, rank in receives:
        at = 0
        for i in order:
            shape = arriving(i, rank)
            size = _product(shape) * tensors[i].element_size()
            parts[i, rank] = message[at:at + size].view(tensors[i].dtype).view(shape)
            at += size
    return tuple(torch.cat([parts[i, rank] for rank in range(row.size)], 1 if heads else 2) for i in range(len(tensors)))


def _product(shape):
    made = 1
    for size in shape:
        made *= size
    return made
