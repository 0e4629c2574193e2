"""libgdn.so: found and loaded at the first call that computes, called through ctypes.

A tensor comes here as a view, the tuple (address, device, dtype, shape, strides): strides in elements, device and dtype as the words that
DLPack's DLTensor holds, made by ``device_word`` and ``DTYPES``. ``OPS[name](views, numbers)`` packs the views and numbers of one
call into one piece of memory, calls, and raises what the library says. The GIL is free while the library computes.
"""

import ctypes
import os
import struct
import sys
import threading

from . import _ops

CPU = 1
NPU = 12  # kDLExtDev


def device_word(kind, index=0):
    """DLDevice {int32 type, int32 id} as one word."""
    return kind | index << 32


def dtype_word(code, bits):
    """The words that hold DLTensor's {int32 ndim; uint8 code, bits; uint16 lanes}, for ndim 0."""
    return (code | bits << 8 | 1 << 16) << 32


DTYPES = {name: dtype_word(code, bits) for name, code, bits in _ops.DTYPES}
# Types that no operator takes, so that the library can name what came.
DTYPES.update({f"int{bits}": dtype_word(0, bits) for bits in (8, 16)})
DTYPES.update({f"uint{bits}": dtype_word(1, bits) for bits in (8, 16, 32, 64)})
DTYPES.update(bool=dtype_word(6, 8), complex64=dtype_word(5, 64), complex128=dtype_word(5, 128))

_ERRORS = {
    "INVALID_ARGUMENT": ValueError,
    "UNSUPPORTED": NotImplementedError,
    "NO_BACKEND": NotImplementedError,
    "OUT_OF_MEMORY": MemoryError,
}


def path():
    """Where libgdn.so is: $GDN_LIBRARY, or beside the package (a wheel), or build/out of a source checkout."""
    chosen = os.environ.get("GDN_LIBRARY")
    if chosen:
        return chosen
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.join(here, "lib", "libgdn.so"),
              os.path.join(os.path.dirname(os.path.dirname(here)), "build", "out", "libgdn.so")]
    for place in places:
        if os.path.exists(place):
            return place
    raise FileNotFoundError("libgdn.so is neither at " + " nor at ".join(places) +
                            "; build it with `make lib`, or say where it is with GDN_LIBRARY")


def libc():
    """The name and version of the C library if it is glibc, else None."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None


_library = None
_loading = threading.Lock()


def library():
    """libgdn.so, loaded once."""
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                _library = _load()
    return _library


def loaded():
    return _library is not None


def _load():
    if not sys.platform.startswith("linux"):
        raise OSError(f"libgdn is for Linux, this is {sys.platform}")
    if libc() is None:
        # A Go library needs static TLS, which musl does not give to libraries loaded late: it would crash, not fail.
        raise OSError("libgdn is for glibc only, this Python runs on another C library (musl?)")
    lib = ctypes.CDLL(path())
    for name, result, arguments in (
        ("gdn_last_error", ctypes.c_char_p, []),
        ("gdn_version", ctypes.c_char_p, []),
        ("gdn_build_info", ctypes.c_char_p, []),
        ("gdn_isa", ctypes.c_char_p, []),
        ("gdn_set_num_threads", ctypes.c_int32, [ctypes.c_int32]),
        ("gdn_get_num_threads", ctypes.c_int32, []),
        ("gdn_last_path", ctypes.c_char_p, []),
        ("gdn_ascend_info", ctypes.c_char_p, []),
        ("gdn_set_stream", ctypes.c_int32, [ctypes.c_void_p]),
        ("gdn_set_allocator", ctypes.c_int32, [ctypes.c_void_p] * 3),
        ("gdn_trim", ctypes.c_int32, []),
        ("gdn_supports", ctypes.c_int32, [ctypes.c_char_p, ctypes.c_void_p]),
        *((f"gdn_{row['name']}", ctypes.c_int32, [ctypes.c_void_p]) for row in _ops.OPS),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.gdn_get_num_threads()  # the first entry puts SIGPIPE back to what it was before the load
    return lib


def check(status):
    """Raises what a status other than 0 means, with the library's sentence. Must follow the call on the same thread."""
    if status:
        name = _ops.STATUSES[status] if 0 < status < len(_ops.STATUSES) else f"status {status}"
        text = library().gdn_last_error().decode("utf-8", "replace")
        raise _ERRORS.get(name, RuntimeError)(text or f"libgdn: {name}")


class Layout:
    """Where the parts of a call lie in one piece of memory: the args struct, then a DLTensor with its shape and strides for each tensor that
    is given, for the others the rank is None. With `compact_outputs` outputs have no strides. `form` describes for `struct` what
    changes from call to call: everything from byte `head` on, which is the numbers and the tensors."""

    def __init__(self, row, ranks, compact_outputs=False):
        self.head = 8 + 8 * len(ranks)
        self.end = self.head + 8 * len(row["numbers"])
        self.form = "=" + "".join("d" if n["float"] else "q" for n in row["numbers"])
        self.extents = []  # by tensor: None, or (rank, how many words follow its DLTensor)
        for rank, t in zip(ranks, row["tensors"]):
            words = 0
            if rank is not None:
                words = rank if compact_outputs and t["role"] in ("out", "opt_out") else 2 * rank
                self.form += f"QqqQQQ{words}q"
            self.extents.append(None if rank is None else (rank, words))

    def frame(self):
        """Memory for a call: (address, memory, address of the first tensor's shape, of its strides, of the second's shape, ...)."""
        memory = bytearray(self.head + struct.calcsize(self.form))
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        at, slots, links = base + self.end, [], []
        for extent in self.extents:
            if extent is None:
                slots.append(0)
                continue
            rank, words = extent
            slots.append(at)
            links += at + 48, at + 48 + 8 * rank
            at += 48 + 8 * words
        struct.pack_into(f"=II{len(slots)}Q", memory, 0, self.end, 0, *slots)
        return (base, memory, *links)


class Op:
    """One operator of the library, for tensors in any memory."""

    def __init__(self, row):
        self.name = row["name"]
        self.row = row
        self._address = None

    def function(self, address):
        """Calls the operator with the args struct at an address and returns its status."""
        if self._address is None:
            self._address = getattr(library(), "gdn_" + self.name)
        return self._address(address)

    def _packed(self, views, numbers):
        layout = Layout(self.row, [None if view is None else len(view[3]) for view in views])
        frame = layout.frame()
        words, links = list(numbers), iter(frame[2:])
        for view in views:
            if view is not None:
                address, device, dtype, shape, strides = view
                words += (address, device, dtype | len(shape), next(links), next(links), 0, *shape, *strides)
        struct.pack_into(layout.form, frame[1], layout.head, *words)
        return frame

    def __call__(self, views, numbers):
        """Runs the operator: views and numbers by position in the table, None for a tensor that is not given."""
        frame = self._packed(views, numbers)
        check(self.function(frame[0]))

    def supports(self, views, numbers):
        """Raises what the call would raise, without running it; returns by which path it would run."""
        frame = self._packed(views, numbers)
        check(library().gdn_supports(self.name.encode(), frame[0]))
        return library().gdn_last_path().decode()


OPS = {row["name"]: Op(row) for row in _ops.OPS}


def set_num_threads(n):
    """Sets how many threads compute in calls that begin later, the caller's included. Without it the library takes GDN_NUM_THREADS, then
    OMP_NUM_THREADS, then what the affinity mask and the cgroup's CPU quota allow."""
    check(library().gdn_set_num_threads(n))


def get_num_threads():
    """How many threads compute, the caller's included."""
    return library().gdn_get_num_threads()
