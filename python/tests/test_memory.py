"""Large outputs: memory that comes back and is used again."""

import gc
import os

import pytest
import torch

import gdn
from gdn import memory

# o has 4 Mi elements.
B, T, H, K, V = 1, 64, 128, 8, 512


def call(seed=0):
    x = torch.full((B, T, H, V), 1.0 + seed)
    k = torch.zeros(B, T, H, K)
    k[..., 0] = 1
    return gdn.fused_recurrent_gated_delta_rule(k, k, x, scale=1.0)[0]


@pytest.fixture(autouse=True)
def empty():
    gc.collect()
    memory._idle.clear()


def test_is_used_again():
    first = call()
    at = first.data_ptr()
    assert not memory._idle
    del first
    assert len(memory._idle) == 1
    again = call(1)
    assert again.data_ptr() == at and not memory._idle
    assert torch.all(again == 2)


def test_a_view_keeps_it():
    row = call()[0, 0, 0]
    other = call(1)
    assert not memory._idle
    assert torch.all(row == 1) and torch.all(other == 2)
    del other
    assert len(memory._idle) == 1 and torch.all(row == 1)


def test_in_a_graph():
    x = torch.randn(B, T, H, V, requires_grad=True)
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)
    o, _ = gdn.fused_recurrent_gated_delta_rule(k, k, x)
    (o * 2).sum().backward()
    gradient = x.grad.clone()
    x.grad = None
    for _ in range(2):
        o, _ = gdn.fused_recurrent_gated_delta_rule(k, k, x)
        (o * 2).sum().backward()
    assert torch.equal(x.grad, 2 * gradient)
    assert o.detach().numpy().shape == (B, T, H, V)


def test_small_outputs_are_torchs_own():
    x = torch.ones(1, 2, 1, 8)
    gdn.chunk_gated_delta_rule(x, x, x)
    assert not memory._idle


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(memory, "_most", 40 << 20)
    held = [call(i) for i in range(4)]  # of 16 MB
    held.clear()
    assert len(memory._idle) == 2


def test_a_much_smaller_output_does_not_take_a_large_block():
    large = memory.recycled((64 << 20,), torch.float32)
    del large
    small = memory.recycled((4 << 20,), torch.float32)
    assert len(memory._idle) == 1
    del small


def test_forked():
    held = call()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # the threads of OpenMP do not exist here
        again = memory.recycled((4 << 20,), torch.float32)
        again.zero_()
        os._exit(0 if not memory._idle and torch.all(held == 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.all(held == 1)
