"""Indices of packed sequences, and the inverse of a chunk's triangle. Plain PyTorch, on any device.

A packed batch is described by ``cu_seqlens`` [N + 1], the offsets of its N sequences. Nothing here is cached: the same tensor may hold other
offsets at the next call.
"""

import torch
import torch.nn.functional as F

__all__ = ["prepare_lens", "prepare_lens_from_mask", "prepare_cu_seqlens_from_lens", "prepare_cu_seqlens_from_mask", "prepare_position_ids",
           "prepare_sequence_ids", "prepare_token_indices", "prepare_chunk_indices", "prepare_chunk_offsets", "solve_tril"]


def prepare_lens(cu_seqlens):
    """[N], the sequences' lengths."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask):
    """[B] int32, how many tokens of each row of mask [B, T] count."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens, dtype=torch.int32):
    """[N + 1], the offsets of sequences of these lengths."""
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask, dtype=torch.int32):
    """[B + 1], the offsets of the rows of mask [B, T] once the tokens that do not count are removed."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_position_ids(cu_seqlens, cu_seqlens_cpu=None):
    """[T], each token's place in its sequence."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 1]


def prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu=None):
    """[T], the number of each token's sequence; empty sequences count."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 0]


def prepare_token_indices(cu_seqlens, cu_seqlens_cpu=None):
    """[T, 2], the sequence of each token and its place there."""
    return _numbered(prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)).to(cu_seqlens)


def prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
    """[NT, 2], the sequence of each chunk and its place there."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return _numbered((lens + chunk_size - 1) // chunk_size).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens, chunk_size):
    """[N + 1], the number of each sequence's first chunk, and that of all chunks."""
    return F.pad((prepare_lens(cu_seqlens) + chunk_size - 1) // chunk_size, (1, 0)).cumsum(0)


def solve_tril(A, cu_seqlens=None, chunk_indices=None, output_dtype=torch.float32):
    """(I + A)^-1 of each chunk, by substitution: [B, T, H, C] like A, whose row t holds the products of token t with its chunk's tokens.

    Args:
        A: [B, T, H, C], C the chunk's length. Only what lies strictly below a chunk's diagonal is read.
        cu_seqlens: [N + 1], offsets of packed sequences, with B = 1: chunks begin anew at each. Rows from the last offset on are zero.
        chunk_indices: accepted for compatibility; the chunks follow from ``cu_seqlens``.
        output_dtype: dtype of the result.
    """
    B, T, H, C = A.shape
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        pieces = [solve_tril(A[:, begin:end], output_dtype=output_dtype) for begin, end in zip(offsets, offsets[1:])]
        return torch.cat([*pieces, A.new_zeros(B, T - offsets[-1], H, C, dtype=output_dtype)], 1)
    wide = A.to(torch.promote_types(A.dtype, torch.float32))
    chunks = F.pad(wide, (0, 0, 0, 0, 0, -T % C)).view(B, -1, C, H, C).transpose(2, 3)
    one = torch.eye(C, dtype=wide.dtype, device=A.device)
    inverse = torch.linalg.solve_triangular(chunks.tril(-1) + one, one.expand_as(chunks), upper=False, unitriangular=True)
    return inverse.transpose(2, 3).reshape(B, -1, H, C)[:, :T].to(output_dtype)


def _numbered(counts):
    """[sum, 2]: for each of counts[i] things i and its own number."""
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.long())
    first = counts.cumsum(0) - counts
    return torch.stack([owner, torch.arange(len(owner), device=counts.device) - first[owner]], 1)
