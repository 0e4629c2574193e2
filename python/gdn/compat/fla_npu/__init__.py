"""Stands in for ``fla_npu`` where that is not installed: the same functions, on every device that this library serves.

``install()`` makes ``import fla_npu.ops.ascendc`` find it.
"""

import sys


def install():
    """Maps ``fla_npu`` to this package for all later imports; ImportError where another ``fla_npu`` is imported already."""
    name = "fla_npu"
    there = sys.modules.get(name)
    if there is not None and there is not sys.modules[__name__]:
        raise ImportError(f"{name} is imported already, from {getattr(there, '__file__', 'somewhere')}")
    from gdn.compat.fla_npu import ops
    from gdn.compat.fla_npu.ops import ascendc

    sys.modules[name], sys.modules[f"{name}.ops"], sys.modules[f"{name}.ops.ascendc"] = sys.modules[__name__], ops, ascendc
