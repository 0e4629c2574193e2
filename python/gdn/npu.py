"""Tensors on Ascend NPUs: the stream, the device and the memory of torch_npu for the library's calls.

torch_npu is never imported here: where there is an NPU tensor, somebody has. The operators run on the current stream of the tensors' device,
behind all that torch_npu has been given so far, and take their workspaces from its caching allocator.
"""

import ctypes
import importlib.util
import os
import sys
import threading

from . import _lib

# The releases of torch_npu that the tests run with, on a fake CANN.
TESTED = ("2.9.0.post9",)

# The formats in which elements lie in the order that strides tell: ND, and what torch_npu calls tensors of rank 4 and 5.
_PLAIN = (2, 0, 30)

_thread = threading.local()


def call(op, views, numbers, index):
    """Runs an operator on NPU tensors of one device."""
    c = sys.modules["torch_npu"]._C
    if c._npu_getDevice() != index:
        # torch_npu has a current device of its own beside CANN's, by which it allocates.
        with sys.modules["torch_npu"].npu.device(index):
            return call(op, views, numbers, index)
    library = _lib.library()
    if not hasattr(_thread, "ready"):
        _prepare(library)
    # This call, unlike others that give the stream, first has torch_npu's own thread enqueue what waits there.
    library.gdn_set_stream(c._npu_getCurrentRawStream(index))
    op(views, numbers)


def check_format(t):
    if sys.modules["torch_npu"].get_npu_format(t) not in _PLAIN:
        raise ValueError(f"gdn: a tensor of shape {list(t.shape)} has the private NPU format {sys.modules['torch_npu'].get_npu_format(t)}, "
                         "expected ND; convert it with torch_npu.npu_format_cast(t, 2)")


def _prepare(library):
    """Once in each thread."""
    if "FLA_NPU_OPP_PATH" not in os.environ:
        # flash-linear-attention-npu as a Python package carries its operators with it.
        try:
            spec = importlib.util.find_spec("fla_npu")
        except (ImportError, ValueError):
            spec = None
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if os.path.isdir(os.path.join(place, "opp")):
                os.environ["FLA_NPU_OPP_PATH"] = os.path.join(place, "opp")
    _lib.check(library.gdn_set_allocator(_allocate, _release, None))
    _thread.ready = True


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p)
def _allocate(user, device, size, stream):
    try:
        return sys.modules["torch_npu"]._C._npu_npuCachingAllocator_raw_alloc(size, stream or 0)
    except Exception:  # out of memory; the library says so
        return None


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
def _release(user, device, memory, size, stream):
    sys.modules["torch_npu"]._C._npu_npuCachingAllocator_raw_delete(memory)
