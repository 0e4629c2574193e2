"""flash-linear-attention's description of a shard, on the executors of this package."""

import weakref
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from .executor import Bound
from .plan import SequencePlan
from .protocols import auto
from .transport import Transport


@dataclass
class FLACPContext:
    """What the functions' ``cp_context`` argument takes: this rank's part of packed documents on equal shards.

    ``cu_seqlens`` (int32, on the device of the offsets given) and ``cu_seqlens_cpu`` are the local offsets, ``pre_num_ranks`` and
    ``post_num_ranks`` count the ranks before and after this one that share its first and its last document, and ``pre_num_conv_tokens`` the
    tokens of its first document that lie before it.
    """

    group: Any = None
    cu_seqlens: Optional[torch.Tensor] = None
    cu_seqlens_cpu: Optional[torch.Tensor] = None
    is_last_rank: Optional[bool] = None
    pre_num_ranks: Optional[int] = None
    is_first_rank: Optional[bool] = None
    post_num_ranks: Optional[int] = None
    conv1d_kernel_size: Optional[int] = None
    pre_num_conv_tokens: Optional[int] = None
    plan: Optional[SequencePlan] = None

    @property
    def num_seqs(self):
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def is_cp_enabled(self):
        return self.group is not None

    def copy_for_backward(self):
        return replace(self)

    def bound(self, q):
        if self.plan is None:
            raise ValueError("gdn.parallel: the cp_context says nothing about the other ranks; make it with build_cp_context")
        return Bound(_transport(self.group), auto, self.plan)


def build_cp_context(cu_seqlens, group, conv1d_kernel_size=None, cu_seqlens_cpu=None):
    """FLACPContext of this rank.

    Args:
        cu_seqlens: [N + 1] int32 or int64, the offsets of the documents over all ranks.
        group: process group; its ranks hold equal shares of the tokens in their order.
        conv1d_kernel_size: width of the short convolution, if there is one.
        cu_seqlens_cpu: the same offsets in host memory, which saves copying them there.

    Raises:
        ValueError: there are fewer tokens than ranks, or they cannot be cut into equal shards.
    """
    transport = _transport(group)
    offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).cpu()
    tokens = int(offsets[-1])
    if tokens < transport.size or tokens % transport.size:
        raise ValueError(f"build_cp_context: {tokens} tokens cannot be cut into equal shards for {transport.size} ranks")
    plan = SequencePlan(offsets, transport.size, transport.rank)
    return FLACPContext(
        group=group, cu_seqlens=plan.cu_seqlens.to(cu_seqlens.device, torch.int32), cu_seqlens_cpu=plan.cu_seqlens.to(torch.int32),
        is_first_rank=not plan.continues_previous, is_last_rank=not plan.continues_next, pre_num_ranks=plan.prefix,
        post_num_ranks=plan.suffix, conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=plan.preceding_sample_tokens, plan=plan)


_transports = weakref.WeakKeyDictionary()


def _transport(group):
    """One transport for each group."""
    if group is None:
        raise ValueError("gdn.parallel: the cp_context has no group; make it with build_cp_context")
    if group not in _transports:
        made = _transports[group] = Transport(group)
        made.agree("size of the group", made.size)  # the first collective, which some engines need before messages between some ranks
    return _transports[group]
