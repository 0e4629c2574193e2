"""How a state travels along the ranks that a document lies on.

A rank that a document leaves hands on what its last (first, backward) fragment does to the state, an affine map x -> M x + S packed as
[B, HV, K, V + K] with S first. Where the document begins on the rank, nothing comes in and S alone says all; there the map is [B, HV, K, V].
Each protocol brings every rank the state that enters it:

    x_r = S_{r-1} + M_{r-1} (S_{r-2} + M_{r-2} (... S_s)),    s = plan.sources[r], where the document begins

Backward is the same in reversed order. All ranks derive from the same plan who sends what to whom, so nothing is negotiated, and where no
document crosses nothing is sent. A protocol holds no tensors: one Exchange belongs to one direction of one call.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Tuple

import torch

from .cost import Machine, cheapest


class Line(NamedTuple):
    """The ranks of a plan in the order in which the state travels: of positions, 0 the first that it visits."""

    position: int  # of this rank
    size: int
    reverse: bool
    inward: Tuple[bool, ...]  # by position: something comes in from the one before
    passes: Tuple[bool, ...]  # and what comes in goes out, through M
    sources: Tuple[int, ...]  # by position: where what comes in began; itself if nothing comes in

    def rank(self, position):
        return self.size - 1 - position if self.reverse else position

    @property
    def receives(self):
        return self.inward[self.position]

    @property
    def sends(self):
        return self.position + 1 < self.size and self.inward[self.position + 1]

    @property
    def needs_matrix(self):
        """Whether this rank's map has an M: something comes in and goes on."""
        return self.passes[self.position]


@lru_cache(maxsize=64)
def line(plan, reverse):
    last = plan.size - 1
    if not reverse:
        return Line(plan.rank, plan.size, False, (False, *plan.edges), plan.passes, plan.sources)
    return Line(last - plan.rank, plan.size, True, (False, *plan.edges[::-1]), plan.passes[::-1], tuple(last - s for s in plan.sinks[::-1]))


def apply_map(packed, state):
    """M x + S for a packed map; S where there is no state."""
    V = packed.shape[-1] if state is None else state.shape[-1]
    S = packed[..., :V]
    if state is None:
        return S
    # The caller's autocast must not round a state.
    with torch.autocast(packed.device.type, enabled=False):
        M = packed[..., V:]
        return torch.baddbmm(S.flatten(0, -3), M.flatten(0, -3), state.flatten(0, -3)).view_as(state)


def join(second, first, V):
    """The map that does what ``first`` does and then ``second``; it has an M where ``first`` has one."""
    if first.shape[-1] == V:
        return apply_map(second, first)
    with torch.autocast(second.device.type, enabled=False):
        made = torch.matmul(second[..., V:], first)
        made[..., :V] += second[..., :V]
    return made


class Exchange:
    """One direction of one call. Made before the local work, so that receives are posted; then ``state`` is called once, on every rank,
    and ``close`` when the local output is made.

    Args:
        plan: SequencePlan.
        reverse: whether this is the way of the gradients.
        like: tensor whose device the states are on, and their dtype.
        shape: (B, HV, K, V) of the state.
    """

    def __init__(self, transport, plan, reverse, like, shape):
        self.transport, self.line, self.like, self.shape = transport, line(plan, reverse), like, tuple(shape)
        self.pending = []  # sends under way; each keeps its tensor alive
        self.post()

    @property
    def needs_map(self):
        return self.line.sends

    @property
    def needs_matrix(self):
        return self.line.needs_matrix

    def post(self):
        """Posts the receives that can be posted early."""

    def state(self, packed):
        """The state that enters this rank, or None; ``packed`` is this rank's map where ``needs_map``, else None."""
        raise NotImplementedError

    def close(self):
        """Waits for what this rank has sent."""
        works, self.pending = self.pending, []
        self.transport.wait(works)

    def check(self, packed):
        if not self.needs_map:
            return
        expected = (*self.shape[:3], self.columns(self.needs_matrix))
        if tuple(packed.shape[:3]) != expected[:3] or packed.shape[3] < expected[3]:
            raise ValueError(f"gdn.parallel: the map has shape {list(packed.shape)}, expected {list(expected)}")

    def columns(self, matrix):
        return self.shape[3] + self.shape[2] if matrix else self.shape[3]

    def buffer(self, matrix=False):
        return self.like.new_empty(*self.shape[:3], self.columns(matrix))

    def send(self, tensor, position):
        self.pending += self.transport.send(tensor.contiguous(), self.line.rank(position))

    def receive(self, tensor, position):
        return self.transport.receive(tensor, self.line.rank(position))


class Chain(Exchange):
    """Blocks of ``width`` consecutive ranks. Inside a block each rank hands its map to all that come after it on the document; between blocks
    a state is relayed from the last rank of one to the last rank of the next that the document reaches, which passes it to the others of
    its block. Width 1 is the plain wavefront, with the whole group as one block all maps are gathered at once. Either way the maps are
    applied one by one in the same order, so the width changes no bit of the result."""

    def __init__(self, transport, plan, reverse, like, shape, width):
        self.width = width
        super().__init__(transport, plan, reverse, like, shape)

    def post(self):
        at, here = self.line, self.line.position
        self.first = here - here % self.width  # of the block
        self.last = min(self.first + self.width, at.size) - 1
        # One document over the whole group, and that one block: everybody needs everything, so one collective brings it.
        self.collective = (self.width >= at.size > 2 and all(at.inward[1:]) and all(at.passes[1:-1]) and self.transport.gather is not None)
        self.entry, self.arriving, self.maps = None, [], []
        if self.collective or not at.receives:
            return
        source = at.sources[here]
        if source < self.first:
            self.entry = self.buffer()
            if here == self.relay(self.first):
                self.arriving = self.receive(self.entry, self.first - 1)
        for position in range(max(source, self.first), here):
            packed = self.buffer(at.passes[position])
            self.maps.append((packed, self.receive(packed, position)))

    def relay(self, first):
        """Who gets the state that enters the block beginning at a position: the last of the block that it reaches."""
        position = first
        while position + 1 < min(first + self.width, self.line.size) and self.line.inward[position + 1] and self.line.passes[position]:
            position += 1
        return position

    def state(self, packed):
        self.check(packed)
        at, here = self.line, self.line.position
        if self.collective:
            return self.gathered(packed)
        hands_on = at.sends and here == self.last
        if at.sends:
            payload = packed[..., :self.columns(at.needs_matrix)].contiguous()
            for position in range(here + 1, self.last + 1):
                if at.sources[position] > here or not at.inward[position]:
                    break
                self.send(payload, position)
            if hands_on and not at.needs_matrix:  # what goes out does not depend on what comes in
                self.send(payload, self.relay(here + 1))
        if not at.receives:
            return None
        x = self.entry
        if x is not None:
            relay = self.relay(self.first)
            if here != relay:
                # Posted behind the map that went the other way: an engine may keep the messages of two ranks in one order.
                self.arriving = self.receive(x, relay)
            self.transport.wait(self.arriving)
            if here == relay:
                for position in range(self.first, here):
                    self.send(x, position)
        for one, arriving in self.maps:
            self.transport.wait(arriving)
            x = apply_map(one, x)
        self.maps = self.arriving = None
        if hands_on and at.needs_matrix:
            self.send(apply_map(packed, x), self.relay(here + 1))
        return x

    def gathered(self, packed):
        at, V = self.line, self.shape[3]
        mine = self.buffer(matrix=True).zero_()  # the last has no map, the first no M
        if packed is not None:
            columns = self.columns(at.needs_matrix)
            mine[..., :columns] = packed[..., :columns]
        maps, x = self.transport.gather(mine), None
        for position in range(at.position):
            one = maps[at.rank(position)]
            x = one[..., :V] if x is None else apply_map(one, x)
        return x


class Doubling(Exchange):
    """Recursive doubling: in round d each rank joins its map with that of the rank d before it, so that after log2 P rounds it has the state
    at its end, which goes on to the next rank. Maps whose range reaches the beginning of the document have no M any more."""

    def state(self, packed):
        self.check(packed)
        at, here, V = self.line, self.line.position, self.shape[3]
        current = packed if packed is None or at.needs_matrix else packed[..., :V]
        d = 1
        while d < at.size:
            sends, receives = [], []
            if here + d < at.size and self.takes(here + d, d):
                sends.append((current.contiguous(), at.rank(here + d)))
            if self.takes(here, d):
                other = self.buffer(not self.whole(here - d, d))
                receives.append((other, at.rank(here - d)))
            self.swap(sends, receives)
            if receives:
                current = join(current, other, V)
            d *= 2
        x = self.buffer() if at.receives else None
        self.swap([(current[..., :V].contiguous(), at.rank(here + 1))] if at.sends else [], [(x, at.rank(here - 1))] if at.receives else [])
        return x

    def swap(self, sends, receives):
        """One round: waits for what comes; what goes may be under way until the end."""
        for work in self.transport.exchange(sends, receives):
            if work[1] == "sending to":
                self.pending.append(work)
            else:
                self.transport.wait([work])

    def takes(self, position, d):
        """Whether a rank receives in round d: it hands on what comes in, and the document began d ranks before it or earlier."""
        return self.line.passes[position] and position - d >= self.line.sources[position]

    def whole(self, position, d):
        """Whether before round d a rank's map, which covers d ranks, reaches back to the beginning of the document."""
        begin = self.line.sources[position] if self.line.passes[position] else position
        return position - d + 1 <= begin


class Protocol:
    """How the ranks of a group share a sequence: a value without state, which ``ContextParallel`` puts on a group."""

    def check(self, size):
        """Raises ValueError where a group of that size cannot run it."""

    def degree_of(self, size):
        """How many consecutive ranks exchange tokens for heads; 1 for the protocols that hand on states."""
        return 1

    def exchange(self, transport, plan, reverse, like, shape):
        """The Exchange of one direction of a call."""
        raise NotImplementedError


@dataclass(frozen=True)
class grouped(Protocol):
    """Maps are gathered inside blocks of ``width`` consecutive ranks, between blocks a state is relayed. The width divides the size."""

    width: int

    def __post_init__(self):
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise ValueError(f"gdn.parallel: grouped has width {self.width!r}, expected a positive integer")

    def check(self, size):
        if size % self.width:
            raise ValueError(f"gdn.parallel: grouped({self.width}) on {size} ranks, expected a width that divides them")

    def exchange(self, transport, plan, reverse, like, shape):
        return Chain(transport, plan, reverse, like, shape, self.width)


@dataclass(frozen=True)
class _P2P(Protocol):
    def exchange(self, transport, plan, reverse, like, shape):
        return Chain(transport, plan, reverse, like, shape, 1)

    def __repr__(self):
        return "p2p"


@dataclass(frozen=True)
class _AllGather(Protocol):
    def exchange(self, transport, plan, reverse, like, shape):
        return Chain(transport, plan, reverse, like, shape, plan.size)

    def __repr__(self):
        return "all_gather"


@dataclass(frozen=True)
class _RecursiveDoubling(Protocol):
    def exchange(self, transport, plan, reverse, like, shape):
        return Doubling(transport, plan, reverse, like, shape)

    def __repr__(self):
        return "recursive_doubling"


@dataclass(frozen=True)
class automatic(Protocol):
    """The state protocol that ``cost.cheapest`` expects to bring the states first, for each plan and state anew."""

    machine: Machine = Machine()

    def exchange(self, transport, plan, reverse, like, shape):
        return self.choose(plan, shape, like.element_size()).exchange(transport, plan, reverse, like, shape)

    def choose(self, plan, shape, itemsize):
        ranks = max(r - s for r, s in enumerate(plan.sources))
        return named(cheapest(ranks, plan.size, shape, itemsize, self.machine))

    def __repr__(self):
        return "auto" if self.machine == Machine() else f"automatic({self.machine})"


@dataclass(frozen=True)
class hybrid(Protocol):
    """Rows of ``ulysses_degree`` consecutive ranks exchange tokens for heads; from row to row a state protocol (None: p2p) hands on the
    states of each rank's heads. The degree divides the ranks and both numbers of heads."""

    ulysses_degree: int
    states: Protocol = None

    def __post_init__(self):
        U = self.ulysses_degree
        if not isinstance(U, int) or isinstance(U, bool) or U < 1:
            raise ValueError(f"gdn.parallel: hybrid has the Ulysses degree {U!r}, expected a positive integer")
        object.__setattr__(self, "states", named("p2p" if self.states is None else self.states))
        if isinstance(self.states, (hybrid, _Ulysses)):
            raise ValueError(f"gdn.parallel: hybrid has {self.states!r} between its rows, expected a protocol that hands on states")

    def check(self, size):
        if size % self.ulysses_degree:
            raise ValueError(f"gdn.parallel: hybrid on {size} ranks has the Ulysses degree {self.ulysses_degree}, expected a divisor")
        self.states.check(size // self.ulysses_degree)

    def degree_of(self, size):
        return self.ulysses_degree

    def exchange(self, transport, plan, reverse, like, shape):
        return self.states.exchange(transport, plan, reverse, like, shape)


@dataclass(frozen=True)
class _Ulysses(Protocol):
    @property
    def states(self):
        return p2p  # of one row there is nothing to hand on

    def degree_of(self, size):
        return size

    def __repr__(self):
        return "ulysses"


p2p, all_gather, recursive_doubling, ulysses, auto = _P2P(), _AllGather(), _RecursiveDoubling(), _Ulysses(), automatic()


def named(protocol):
    """The protocol of a name; a protocol is its own."""
    if isinstance(protocol, Protocol):
        return protocol
    if isinstance(protocol, tuple):
        return grouped(protocol[1])
    names = {repr(p): p for p in (auto, p2p, all_gather, recursive_doubling, ulysses)}
    if protocol not in names:
        raise ValueError(f"gdn.parallel: protocol is {protocol!r}, expected one of {', '.join(names)}, or grouped(width) or "
                         "hybrid(ulysses_degree, protocol) of this module")
    return names[protocol]
