"""Activation checkpointing that keeps what came from other ranks, so that computing again does not communicate again."""

from threading import local

import torch.utils.checkpoint


class _Kept(local):
    """What the calls of this thread receive, where a checkpoint records or replays it."""

    memo = None

    def get(self, receive):
        return receive() if self.memo is None else self.memo.get(receive)


kept = _Kept()


class _Memo:
    """A context, which may be entered again and again, in which calls record what they receive, or replay it in the same order."""

    def __init__(self, received, replay):
        self.received, self.replay = received, replay

    def __enter__(self):
        self.outer, kept.memo, self.next = kept.memo, self, 0

    def __exit__(self, *exception):
        kept.memo = self.outer

    def get(self, receive):
        if not self.replay:
            self.received.append(receive())
            return self.received[-1]
        self.next += 1
        return self.received[self.next - 1]


def checkpoint(function, *args, **keywords):
    """``torch.utils.checkpoint.checkpoint`` (without reentrance) for functions that contain calls with ``cp=``: the states and halos that they
    receive, some [B, HV, K, V] a call, are kept, and the forward in the backward uses them instead of asking other ranks again. What Ulysses
    exchanges are activations, which are exchanged again."""
    received = []
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False,
                                             context_fn=lambda: (_Memo(received, False), _Memo(received, True)), **keywords)
