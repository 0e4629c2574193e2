"""Context parallelism: one token axis over several ranks, for Gated DeltaNet, Kimi Delta Attention and the short convolution before them.

    cp = gdn.parallel.ContextParallel(group, "p2p")              # once, with the model, on all ranks
    plan = gdn.parallel.SequencePlan(offsets, lengths, cp.rank)  # how a batch's documents lie on the ranks
    o, state = gdn.chunk_gated_delta_rule(q, k, v, g, beta, cp=cp.bind(plan))

Each rank passes its own tokens and gets their outputs and gradients, which are those of a single process. ``cp=cp`` without a plan stands for
sequences that are not packed and equally long on all ranks.
"""

from .context import FLACPContext, build_cp_context
from .convolution import halo
from .cost import Machine
from .executor import ContextParallel
from .plan import SequencePlan
from .protocols import all_gather, auto, automatic, grouped, hybrid, p2p, recursive_doubling, ulysses
from .recompute import checkpoint

__all__ = ["ContextParallel", "FLACPContext", "Machine", "SequencePlan", "all_gather", "auto", "automatic", "build_cp_context",
           "checkpoint", "grouped", "halo", "hybrid", "p2p", "recursive_doubling", "ulysses"]
