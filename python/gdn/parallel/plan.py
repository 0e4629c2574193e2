"""Where documents and their fragments lie when one token axis is cut over ranks. Host integers only, no communication."""

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import NamedTuple

import torch


class DevicePlan(NamedTuple):
    """A shard's fragments as tensors on a device, for kernels that read them there."""

    cu_seqlens: torch.Tensor  # [fragments + 1] int32
    chunk_indices: torch.Tensor  # [chunks, 2] int32: (fragment, chunk in it)


class SequencePlan:
    """How the documents of one token axis lie on the shards of P ranks, seen from one of them.

    Rank r holds the tokens from ``borders[r]`` to ``borders[r + 1]``. A document may be empty, may lie on many ranks and need not begin or end
    where a shard does; a shard may be empty and shards need not be equally long. The part of a document on a rank is a fragment. Everything
    follows from offsets and lengths, which must be the same on all ranks.

    Args:
        offsets: the documents' offsets on the whole axis: D + 1 integers from 0, not decreasing, a CPU tensor (int32, int64) or a sequence.
        lengths: the tokens on each rank, P integers whose sum is the last offset; or P itself, for shards of equal length.
        rank: which of the ranks this is.

    Attributes:
        start, end: the shard's place on the axis; end is exclusive.
        global_offsets, local_offsets: offsets of the documents, and of the fragments within the shard. An empty shard has one empty fragment.
        num_sequences: number of fragments here.
        head, tail: slices of the first and the last fragment.
        preceding_sample_tokens: tokens of the first fragment's document that lie on earlier ranks.
        continues_previous, continues_next: whether a document crosses the border before and the one after this shard.
        transfer_active: the shard has one fragment and it continues the previous rank, so what comes in reaches the exit.

    Raises:
        ValueError: offsets, lengths and rank are no such layout; the message says what is wrong.
    """

    def __init__(self, offsets, lengths, rank):
        offsets = _integers("offsets", offsets)
        if len(offsets) < 2:
            raise ValueError(f"SequencePlan: offsets has {len(offsets)} elements, expected at least 2")
        if offsets[0] != 0:
            raise ValueError(f"SequencePlan: offsets begins with {offsets[0]}, expected 0")
        for i in range(1, len(offsets)):
            if offsets[i] < offsets[i - 1]:
                raise ValueError(f"SequencePlan: offsets decreases from {offsets[i - 1]} to {offsets[i]} at {i}")
        if _integer(lengths):
            if lengths < 1 or offsets[-1] % lengths:
                raise ValueError(f"SequencePlan: {offsets[-1]} tokens cannot be cut into {lengths} shards of equal length; "
                                 "give the lengths of the shards")
            lengths = (offsets[-1] // lengths,) * int(lengths)
        lengths = _integers("lengths", lengths)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"SequencePlan: lengths is {list(lengths)}, expected a length of at least 0 for each rank")
        borders = (0, *accumulate(lengths))
        if borders[-1] != offsets[-1]:
            raise ValueError(f"SequencePlan: the shards hold {borders[-1]} tokens, the documents {offsets[-1]}")
        if not _integer(rank) or not 0 <= rank < len(lengths):
            raise ValueError(f"SequencePlan: rank is {rank!r}, expected one of 0 to {len(lengths) - 1}")
        self._place(offsets, borders, int(rank))

    @classmethod
    def dense(cls, lengths, rank):
        """The plan of sequences that are not packed: each batch row is one document over all ranks, ``lengths`` tokens of it on each.
        Equal to the plan of one document, which any batch size may use."""
        lengths = _integers("lengths", lengths)
        return cls((0, sum(lengths)), lengths, rank)

    def _place(self, offsets, borders, rank):
        self.global_offsets, self.borders, self.rank, self.size = offsets, borders, rank, len(borders) - 1
        self.start, self.end = start, end = borders[rank], borders[rank + 1]
        inner = sorted({o - start for o in offsets[bisect_right(offsets, start):bisect_left(offsets, end)]})
        self.local_offsets = (0, *inner, end - start)
        self.num_sequences = len(self.local_offsets) - 1
        self.head, self.tail = slice(0, self.local_offsets[1]), slice(self.local_offsets[-2], end - start)
        self.preceding_sample_tokens = start - offsets[bisect_right(offsets, start) - 1]
        self.continues_previous = self.preceding_sample_tokens > 0
        self.continues_next = not self._is_offset(end)
        self.transfer_active = self.num_sequences == 1 and self.continues_previous
        return self

    def _is_offset(self, token):
        return self.global_offsets[bisect_left(self.global_offsets, token)] == token

    def at(self, rank):
        """The same layout seen from another rank."""
        return object.__new__(SequencePlan)._place(self.global_offsets, self.borders, rank)

    def rows(self, degree):
        """The layout after each ``degree`` consecutive ranks have put their shards together, seen from the row of this rank."""
        return object.__new__(SequencePlan)._place(self.global_offsets, self.borders[::degree], self.rank // degree)

    @property
    def tokens(self):
        """Number of tokens on this rank."""
        return self.end - self.start

    @property
    def num_documents(self):
        return len(self.global_offsets) - 1

    @cached_property
    def edges(self):
        """Whether a document crosses the border between rank r and r + 1, for r from 0 to P - 2."""
        return tuple(not self._is_offset(border) for border in self.borders[1:-1])

    @cached_property
    def crosses(self):
        """Whether any document crosses a border, that is, whether there is anything to communicate."""
        return any(self.edges)

    @cached_property
    def passes(self):
        """For each rank, whether a state that comes in over one border goes out over the other: the shard lies strictly inside a document."""
        edges = (False, *self.edges, False)
        offsets = self.global_offsets
        return tuple(edges[r] and edges[r + 1] and bisect_right(offsets, self.borders[r]) == bisect_left(offsets, self.borders[r + 1])
                     for r in range(self.size))

    @cached_property
    def sources(self):
        """For each rank, the one where what comes in from the previous rank began: the rank that holds the beginning of the document which
        crosses the border before this shard. The rank itself where none does."""
        found = []
        for r in range(self.size):
            inward = r > 0 and self.edges[r - 1]
            found.append(r if not inward else found[-1] if self.passes[r - 1] else r - 1)
        return tuple(found)

    @cached_property
    def sinks(self):
        """For each rank, the one that holds the end of the document which crosses the border after this shard; the rank itself where none does."""
        found = []
        for r in reversed(range(self.size)):
            outward = r < self.size - 1 and self.edges[r]
            found.append(r if not outward else found[-1] if self.passes[r + 1] else r + 1)
        return tuple(reversed(found))

    @property
    def first_rank(self):
        return self.sources[self.rank]

    @property
    def last_rank(self):
        return self.sinks[self.rank]

    @property
    def prefix(self):
        """How many earlier ranks contribute to the state that comes in."""
        return self.rank - self.first_rank

    @property
    def suffix(self):
        """How many later ranks contribute to the gradient that comes in."""
        return self.last_rank - self.rank

    @cached_property
    def fragments(self):
        """The document of each fragment. An empty shard's fragment belongs to the document that spans it, or to none (None)."""
        if self.start == self.end:
            return (bisect_right(self.global_offsets, self.start) - 1 if self.continues_previous else None,)
        return tuple(bisect_right(self.global_offsets, self.start + o) - 1 for o in self.local_offsets[:-1])

    def owner(self, document):
        """(first, last): the ranks where a document's initial state enters and its final state leaves, those of its first and its last
        token. An empty document's are the one that holds the next token, or the last rank where no token follows."""
        begin, end = self.global_offsets[document:document + 2]
        if begin < end:
            return bisect_right(self.borders, begin) - 1, bisect_right(self.borders, end - 1) - 1
        rank = min(bisect_right(self.borders, begin) - 1, self.size - 1)
        return rank, rank

    @cached_property
    def _here(self):
        begins = [(f, d) for f, d in enumerate(self.fragments) if d is not None and not (f == 0 and self.continues_previous)]
        last = self.num_sequences - 1
        ends = [(f, d) for f, d in enumerate(self.fragments) if d is not None and not (f == last and self.continues_next)]
        if self.start == self.end:
            begins = ends = []
        offsets = self.global_offsets
        stop = bisect_right(offsets, self.end) if self.rank == self.size - 1 else bisect_left(offsets, self.end)
        empty = [d for d in range(bisect_left(offsets, self.start), min(stop, self.num_documents))
                 if offsets[d] == offsets[d + 1] and self.owner(d)[0] == self.rank]
        return begins, ends, empty

    @property
    def begins(self):
        """(fragment, document) of the documents whose first token is on this rank."""
        return self._here[0]

    @property
    def ends(self):
        """(fragment, document) of the documents whose last token is on this rank."""
        return self._here[1]

    @property
    def empty(self):
        """The empty documents whose states enter and leave on this rank."""
        return self._here[2]

    def first_state(self, state):
        """[num_sequences, HV, K, V]: the state [1, HV, K, V] that came from the previous rank, for the first fragment; zeros for the others,
        and everywhere if no document continues the previous rank."""
        made = state.new_zeros(self.num_sequences, *state.shape[1:])
        if self.continues_previous:
            made[0] = state[0]
        return made

    def last_state(self, state):
        """As ``first_state``, for the gradient that came from the next rank and the last fragment."""
        made = state.new_zeros(self.num_sequences, *state.shape[1:])
        if self.continues_next:
            made[-1] = state[0]
        return made

    @cached_property
    def cu_seqlens(self):
        """``local_offsets`` as an int64 tensor in host memory."""
        return torch.tensor(self.local_offsets, dtype=torch.int64)

    def chunk_indices(self, chunk_size=64):
        """(fragment, chunk in it, fragment, chunk, ...) in order; an empty fragment has no chunk."""
        return tuple(i for f, (begin, end) in enumerate(zip(self.local_offsets, self.local_offsets[1:]))
                     for chunk in range((end - begin + chunk_size - 1) // chunk_size) for i in (f, chunk))

    def materialize(self, device, chunk_size=64):
        """The fragments as tensors on a device; made once for each device and chunk size."""
        made = self.__dict__.setdefault("_device_plans", {})
        key = torch.device(device), chunk_size
        if key not in made:
            indices = torch.tensor(self.chunk_indices(chunk_size), dtype=torch.int32).view(-1, 2)
            made[key] = DevicePlan(self.cu_seqlens.to(device, torch.int32), indices.to(device))
        return made[key]

    def halo(self, rows, rank=None):
        """[(rank, begin, end)]: where the last ``rows`` tokens before the shard of a rank (None: this one) lie that belong to the document
        which continues there; begin and end are tokens of the axis, the parts follow one another and the last ends where the shard begins.
        Empty where no document continues, shorter than ``rows`` where the document begins later."""
        plan = self if rank is None or rank == self.rank else self.at(rank)
        begin, parts = plan.start - min(rows, plan.preceding_sample_tokens), []
        r = plan.rank
        while r > 0 and self.borders[r] > begin:
            r -= 1
            low, high = max(begin, self.borders[r]), self.borders[r + 1]
            if low < high:
                parts.append((r, low, high))
        return parts[::-1]

    def __eq__(self, other):
        if not isinstance(other, SequencePlan):
            return NotImplemented
        return (self.global_offsets, self.borders, self.rank) == (other.global_offsets, other.borders, other.rank)

    def __hash__(self):
        return hash((self.global_offsets, self.borders, self.rank))

    def __repr__(self):
        return f"SequencePlan(offsets={_short(self.global_offsets)}, borders={_short(self.borders)}, rank={self.rank})"


def _integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integers(name, values) -> tuple:
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu" or values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"SequencePlan: {name} is a tensor of {values.dtype} {list(values.shape)} on {values.device}, "
                             "expected one dimension of int32 or int64 in host memory")
        return tuple(values.tolist())
    try:
        values = tuple(values)
    except TypeError:
        raise ValueError(f"SequencePlan: {name} is {values!r}, expected a sequence of integers") from None
    for i, value in enumerate(values):
        if not _integer(value):
            raise ValueError(f"SequencePlan: {name}[{i}] is {value!r}, expected an integer")
    return tuple(int(value) for value in values)


def _short(values: tuple, limit=8) -> str:
    return str(list(values)) if len(values) <= limit else f"[{', '.join(map(str, values[:limit]))}, ... ({len(values)})]"
