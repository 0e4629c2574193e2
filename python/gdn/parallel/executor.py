"""The executor that a model is built with, and the plan that a batch brings."""

import hashlib
from typing import Any, NamedTuple

from . import protocols
from .plan import SequencePlan
from .transport import Transport


class Bound(NamedTuple):
    """An executor with the plan of a batch: what the ``cp`` argument of the functions takes."""

    transport: Any
    protocol: Any
    plan: SequencePlan

    def bound(self, q):
        return self

    @property
    def degree(self):
        return self.protocol.degree_of(self.plan.size)

    @property
    def row(self):
        """Transport of the ranks that exchange tokens for heads."""
        begin = self.plan.rank - self.plan.rank % self.degree
        return self.transport.sub(range(begin, begin + self.degree))

    @property
    def inner(self):
        """What hands states from row to row."""
        column = self.transport.sub(range(self.plan.rank % self.degree, self.plan.size, self.degree))
        return Bound(column, self.protocol.states, self.plan.rows(self.degree))


class ContextParallel:
    """Runs sequences that lie on the ranks of a group, cut along the tokens; rank r of the group holds the r-th shard.

    Built once with the model, on all ranks of the group at the same time. It holds no tensors and serves all layers, both delta rules and the
    short convolution; calls may overlap, and their backwards may run in any order that is the same on all ranks.

    Args:
        group: process group, one-dimensional DeviceMesh, or None for all ranks.
        protocol: how states or heads are exchanged: ``p2p``, ``all_gather``, ``grouped(width)``, ``recursive_doubling``, ``ulysses``,
            ``hybrid(ulysses_degree, state protocol)`` of this module or the names of those without arguments; or ``auto``.

    Raises:
        ValueError: the group cannot run the protocol, or the ranks have brought different ones.
    """

    def __init__(self, group=None, protocol="auto", *, transport=None):
        self.protocol = protocols.named(protocol)
        self.transport = Transport(group) if transport is None else transport
        self.protocol.check(self.transport.size)
        # The first collective, which some engines need before they let some ranks of a group exchange messages.
        self.transport.agree("protocol", repr(self.protocol))

    @property
    def rank(self):
        return self.transport.rank

    @property
    def size(self):
        return self.transport.size

    @property
    def traffic(self):
        """What this rank has sent: messages, bytes, collectives; ``traffic.reset()`` begins anew."""
        return self.transport.traffic

    def plan(self, offsets, lengths=None):
        """SequencePlan of this rank; ``lengths`` None: shards of equal length."""
        return SequencePlan(offsets, self.size if lengths is None else lengths, self.rank)

    def bind(self, plan, agree=True):
        """This executor with the plan of a batch, for ``cp=``. One bound plan serves all layers.

        Args:
            plan: SequencePlan of this rank, or the documents' offsets, for shards of equal length.
            agree: compare the plans of all ranks first, in a small collective: ranks whose plans differ would wait for messages that nobody
                sends. False where the caller has made sure.

        Raises:
            ValueError: the plan is for another rank or another number of ranks, or the plans of the ranks differ.
        """
        if not isinstance(plan, SequencePlan):
            plan = self.plan(plan)
        if (plan.size, plan.rank) != (self.size, self.rank):
            raise ValueError(f"gdn.parallel: the plan is for rank {plan.rank} of {plan.size}, this is rank {self.rank} of {self.size}")
        if agree:
            layout = repr((plan.global_offsets, plan.borders))
            digest = hashlib.sha256(layout.encode()).hexdigest()[:16]
            self.transport.agree("plan", f"{layout[:160]}{'...' if len(layout) > 160 else ''} (digest {digest})")
        return Bound(self.transport, self.protocol, plan)

    def bound(self, q):
        """For sequences that are not packed and equally long on all ranks, no plan is needed."""
        return Bound(self.transport, self.protocol, SequencePlan.dense((q.shape[1],) * self.size, self.rank))

    def __repr__(self):
        return f"ContextParallel({self.protocol!r}, rank {self.rank} of {self.size})"
