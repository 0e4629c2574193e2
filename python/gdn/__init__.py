"""Gated DeltaNet and Kimi Delta Attention for PyTorch and, in ``gdn.array``, for NumPy and every other library that speaks DLPack.

Importing registers the torch operators (``torch.ops.gdn``) where torch is installed, and loads nothing: libgdn.so is loaded by the first
call that computes. ``python -m gdn.env`` prints what was found.
"""

import importlib.util

from ._lib import get_num_threads, set_num_threads
from ._ops import VERSION as __version__

_TORCH = ("chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda",
          "fused_recurrent_kda_fwd", "fused_recurrent_gated_delta_rule_fwd", "causal_conv1d",
          "fused_gdn_gate", "fused_kda_gate", "l2norm", "frame")

__all__ = [*_TORCH, "get_num_threads", "set_num_threads", "__version__"]

if importlib.util.find_spec("torch") is not None:
    from . import frame
    from .convolution import causal_conv1d
    from .delta_rule import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gated_delta_rule, fused_recurrent_gdn
    from .gates import fused_gdn_gate, fused_kda_gate
    from .kda import chunk_kda, fused_recurrent_kda
    from .norms import l2norm
    from .serving import fused_recurrent_gated_delta_rule_fwd, fused_recurrent_kda_fwd
else:

    def __getattr__(name):
        if name in _TORCH:
            raise ImportError(f"gdn.{name} needs PyTorch, which is not installed; gdn.array computes the same of other arrays")
        raise AttributeError(f"module 'gdn' has no attribute {name!r}")
