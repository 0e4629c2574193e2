"""Messages between the ranks of a group, over torch.distributed: whatever engine the group has, nothing here asks for its name."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


class Traffic:
    """What this rank has sent since ``reset``: point-to-point messages, and collectives with the bytes that this rank put in."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.messages = self.bytes = self.collectives = self.collective_bytes = 0

    def __repr__(self):
        return (f"Traffic(messages={self.messages}, bytes={self.bytes}, collectives={self.collectives}, "
                f"collective_bytes={self.collective_bytes})")


class Transport:
    """The ranks of a process group in its order, 0 to size - 1, and this one's place among them.

    Every wait that fails says what was waited for, and keeps the engine's own error as its cause.
    """

    def __init__(self, group=None):
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("gdn.parallel: torch.distributed has no process group; call init_process_group first")
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise ValueError(f"gdn.parallel: the device mesh has {group.ndim} dimensions, expected 1; take a slice of it")
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.size, self.rank = len(self.ranks), dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(f"gdn.parallel: rank {dist.get_rank()} is not in the group of ranks {list(self.ranks)}")
        self.traffic = Traffic()

    def sub(self, members):
        """Some of the ranks, this one among them, as a transport of their own. It shares the group, so none has to be made for it."""
        return _Part(self, members)

    def send(self, tensor, peer):
        """Begins to send; returns what ``wait`` takes. The tensor must stay as it is until then."""
        self._count(tensor)
        with self._explained("sending to", peer):
            return [(dist.isend(tensor, self.ranks[peer], self.group), "sending to", peer, tensor)]

    def receive(self, tensor, peer):
        """Begins to receive into a contiguous tensor."""
        with self._explained("receiving from", peer):
            return [(dist.irecv(tensor, self.ranks[peer], self.group), "receiving from", peer, tensor)]

    def exchange(self, sends, receives):
        """Begins all sends [(tensor, peer)] and receives at once, which engines that order their messages need."""
        if not sends and not receives:
            return []
        ops = [dist.P2POp(dist.irecv, t, self.ranks[peer], self.group) for t, peer in receives]
        ops += [dist.P2POp(dist.isend, t, self.ranks[peer], self.group) for t, peer in sends]
        for t, _ in sends:
            self._count(t)
        peers = tuple(dict.fromkeys(peer for _, peer in [*receives, *sends]))
        with self._explained("exchanging with", peers):
            works = dist.batch_isend_irecv(ops)
        if len(works) == len(ops):
            return [(work, "receiving from" if i < len(receives) else "sending to", peer, t)
                    for i, (work, (t, peer)) in enumerate(zip(works, [*receives, *sends]))]
        return [(work, "exchanging with", peers, ops) for work in works]

    def wait(self, works):
        for work, doing, peer, _ in works:
            with self._explained(doing, peer):
                work.wait()

    def gather(self, tensor):
        """[size, ...]: the tensors of all ranks; a collective."""
        made = tensor.new_empty(self.size * tensor.numel())
        self.traffic.collectives += 1
        self.traffic.collective_bytes += tensor.numel() * tensor.element_size()
        with self._explained("gathering from", tuple(range(self.size))):
            dist.all_gather_into_tensor(made, tensor.contiguous().view(-1), group=self.group)
        return made.view(self.size, *tensor.shape)

    def agree(self, what, value):
        """Raises on every rank where one brought another value; a collective. ``what`` names it."""
        values = [None] * self.size
        with self._explained(f"comparing the {what} with", tuple(range(self.size))):
            dist.all_gather_object(values, value, group=self.group)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(f"gdn.parallel: the {what} differs between the ranks: {values[0]} on rank 0, {other} on rank {rank} "
                                 f"(of the group {list(self.ranks)})")

    def _count(self, tensor):
        self.traffic.messages += 1
        self.traffic.bytes += tensor.numel() * tensor.element_size()

    @contextmanager
    def _explained(self, doing, peer):
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"gdn.parallel: rank {self.rank} of {self.size} failed {doing} rank {self._name(peer)}: {error}. Has it "
                               "ended, or was it called with another plan, in another order or not at all?") from error

    def _name(self, peer):
        if isinstance(peer, int):
            return f"{peer} (global rank {self.ranks[peer]})"
        return f"{', '.join(map(str, peer))} of the group {list(self.ranks)}"


class _Part:
    """Some ranks of a transport under numbers of their own."""

    def __init__(self, whole, members):
        self.whole, self.members = whole, tuple(members)
        self.size, self.rank, self.traffic = len(self.members), self.members.index(whole.rank), whole.traffic
        self.wait = whole.wait

    def sub(self, members):
        return _Part(self.whole, [self.members[m] for m in members])

    def send(self, tensor, peer):
        return self.whole.send(tensor, self.members[peer])

    def receive(self, tensor, peer):
        return self.whole.receive(tensor, self.members[peer])

    def exchange(self, sends, receives):
        return self.whole.exchange([(t, self.members[p]) for t, p in sends], [(t, self.members[p]) for t, p in receives])

    # A collective of some ranks would need a group of its own: where there is none, messages do.
    gather = None
