"""Memory of large outputs, used again.

The C library maps each block of more than 32 MB anew and gives it back when it is freed, so a loop pays for its pages at every call: the
system clears them, which for the state of a batch in decoding takes as long as the step itself. What is handed out here comes back when the
last tensor on it dies, and the next output of about that size gets it.
"""

import ctypes
import mmap
import os
import threading
import weakref

import torch

ELEMENTS = 1 << 22  # outputs from here on are large
_PAGE = 2 << 20  # of a large page
_LINE = 64

# Blocks that nobody holds, the latest last, and how much of them is kept: what a loop frees and takes again is far less.
_idle = []
_most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16
_lock = threading.Lock()
_made = 0


def recycled(shape, dtype):
    """An uninitialised tensor in such memory."""
    count = 1
    for n in shape:
        count *= n
    size = count * dtype.itemsize
    block = _take(size) or _new(size)
    lease = (ctypes.c_char * size).from_buffer(block.memory, block.start)
    # torch holds the lease as long as anything uses the storage.
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)


class _Block:
    def __init__(self, memory, start, size):
        self.memory, self.start, self.size = memory, start, size


def _take(size):
    with _lock:
        for i in range(len(_idle) - 1, -1, -1):
            if size <= _idle[i].size <= size + size // 4:
                return _idle.pop(i)
    return None


def _give_back(block):
    _idle.append(block)
    # Tensors die anywhere, even in the middle of _take when it runs the garbage collector: never wait here.
    if _lock.acquire(blocking=False):
        try:
            kept = sum(b.size for b in _idle)
            while kept > _most:
                kept -= _idle.pop(0).size
        finally:
            _lock.release()


def _forked():
    """A thread that does not exist in the child may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forked)


def _new(size):
    global _made
    memory = mmap.mmap(-1, size + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.c_char.from_buffer(memory)
    # The kernels ask for large pages themselves. Blocks begin at different distances from a large page's start: tensors that lie a power of two apart would share cache sets.
    start = -ctypes.addressof(first) % _PAGE + _made * 13 * _LINE % 4096
    _made += 1
    return _Block(memory, start, size)
