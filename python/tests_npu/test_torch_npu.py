"""The released torch_npu on the fake: what a client that we did not write needs of it."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

import fake
from reference import close, delta

import torch_npu
bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def drained(strict):
    yield
    for d in range(2):
        torch.npu.synchronize(d)
    torch.npu.set_device(0)


def test_copies_of_any_strides():
    x = torch.arange(120.0).view(2, 3, 4, 5)
    for y in x, x.transpose(1, 3), x[:, ::2], x[..., 1:4].permute(3, 0, 1, 2), x.expand(3, 2, 3, 4, 5), x[0, 0, 0, 0], x[:, :0]:
        for dtype in torch.float32, bf16, torch.float16, torch.int64, torch.bool:
            z = y.to(dtype)
            n = z.to("npu")
            assert n.device.type == "npu" and n.cpu().equal(z)
    n = x.to("npu")
    assert n.transpose(0, 2).contiguous().cpu().equal(x.transpose(0, 2))
    n.transpose(1, 2)[:, 1:3] = 7
    y = x.clone()
    y.transpose(1, 2)[:, 1:3] = 7
    assert n.cpu().equal(y)


def test_the_caching_allocator_takes_and_returns_memory():
    live = fake.acl.gdnfake_live
    torch.npu.empty_cache()
    before, used = live(b"device memory"), torch.npu.memory_allocated()
    x = [torch.empty(5_000_000, device="npu") for _ in range(3)]
    assert live(b"device memory") >= before + 3 and torch.npu.memory_allocated() >= used + 60_000_000
    del x
    assert torch.npu.memory_allocated() == used
    calls = fake.acl.gdnfake_calls(b"aclrtMallocAlign32") + fake.acl.gdnfake_calls(b"aclrtMalloc") + fake.acl.gdnfake_calls(b"aclrtMallocWithCfg")
    y = torch.empty(5_000_000, device="npu")  # from the cache
    assert calls == fake.acl.gdnfake_calls(b"aclrtMallocAlign32") + fake.acl.gdnfake_calls(b"aclrtMalloc") + fake.acl.gdnfake_calls(b"aclrtMallocWithCfg")
    del y
    torch.npu.empty_cache()
    assert live(b"device memory") == before
    with pytest.raises(RuntimeError, match="(?i)out of memory"):
        torch.empty(1 << 40, device="npu")


def test_streams_and_events():
    x = torch.arange(1000.0).npu()
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    done = side.record_event()
    torch.npu.current_stream().wait_event(done)
    z = y + 1
    y.record_stream(torch.npu.current_stream())
    assert z.cpu().equal(torch.arange(1000.0) * 2 + 1)
    raw = torch_npu._C._npu_getCurrentRawStream(0)
    assert raw == torch.npu.current_stream().npu_stream != side.npu_stream


def test_a_missing_wait_is_seen(expected):
    x = torch.arange(1000.0).npu() + 0
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.synchronize()
    found = expected()
    assert found and all("nothing orders" in v for v in found)
    assert y.cpu().equal(torch.arange(1000.0) * 2)


def test_devices():
    x = torch.arange(10.0)
    a, b = x.to("npu:0"), x.to("npu:1")
    assert a.device.index == 0 and b.device.index == 1
    assert fake.acl.fake_device_of(ctypes.c_void_p(b.data_ptr())) == 1
    with torch.npu.device(1):
        c = b + b
        assert torch.npu.current_device() == 1
    assert torch.npu.current_device() == 0
    assert c.device.index == 1 and c.cpu().equal(2 * x)
    assert a.to("npu:1").cpu().equal(x)


F = torch.nn.functional
LAYER = {  # what a small layer uses around the operators of gdn
    "linear": lambda x: F.linear(x, torch.ones(3, 6, device=x.device), torch.arange(3.0).to(x.device)),
    "silu": F.silu, "sigmoid": torch.sigmoid, "softplus": F.softplus, "exp": torch.exp, "neg": torch.neg, "square": lambda x: x**2,
    "rsqrt": lambda x: (x * x + 1).rsqrt(), "1-x": lambda x: 1 - x, "mean": lambda x: x.mean(0), "sum": lambda x: x.sum(1, keepdim=True),
    "divide": lambda x: x / (x * x + 1), "cast": lambda x: x.bfloat16().float(), "cat": lambda x: torch.cat([x, x], 1), "where": lambda x: torch.where(x > 0, x, -2 * x),
    "matmul": lambda x: torch.matmul(x[None], x.t()[None]), "scale": lambda x: x * x.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", LAYER)
def test_layers(name):
    x = torch.linspace(-2, 2, 24).view(4, 6)
    a, b = x.npu().requires_grad_(), x.clone().requires_grad_()
    got, want = LAYER[name](a), LAYER[name](b)
    torch.testing.assert_close(got.detach().cpu(), want.detach())
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_autograd():
    x = torch.randn(6, 5)
    w = torch.randn(5, 4)
    a, b = x.npu().requires_grad_(), w.npu().requires_grad_()
    ((a @ b) * 2 + 1).backward(torch.ones(6, 4).npu())
    c, d = x.requires_grad_(), w.requires_grad_()
    ((c @ d) * 2 + 1).backward(torch.ones(6, 4))
    torch.testing.assert_close(a.grad.cpu(), c.grad)
    torch.testing.assert_close(b.grad.cpu(), d.grad)


def test_dlpack_capsules_carry_device_type_12():
    x = torch.arange(12.0).view(3, 4).to("npu:1")
    capsule = torch.utils.dlpack.to_dlpack(x)
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    at = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
    data, kind, index = ctypes.c_void_p.from_address(at).value, ctypes.c_int.from_address(at + 8).value, ctypes.c_int.from_address(at + 12).value
    assert (data, kind, index) == (x.data_ptr(), 12, 1)
    with pytest.raises(ValueError, match="Unknown device type npu"):
        x.__dlpack_device__()


@pytest.mark.skipif(torch_npu.__version__ == "2.8.0", reason="torch_npu 2.8.0 has neither operator")
@pytest.mark.parametrize("seed", range(4))
def test_stock_chunk_operator(seed):
    """torch_npu's own call of aclnnChunkGatedDeltaRule: the argument list is the one that the fake declares, the values are the reference's."""
    torch.manual_seed(seed)
    HK, G, D = [(1, 1), (2, 2), (1, 4), (3, 2)][seed] + (128,)
    lengths = torch.randint(0, 40, (3,))
    T = int(lengths.sum())
    q, k = (torch.nn.functional.normalize(torch.randn(T, HK, D), dim=-1).to(bf16) for _ in range(2))
    v, beta, g = torch.randn(T, HK * G, D).to(bf16), torch.rand(T, HK * G).to(bf16), -torch.rand(T, HK * G)
    h0 = torch.randn(3, HK * G, D, D).to(bf16)
    o, last = torch.ops.npu.npu_chunk_gated_delta_rule(q.npu(), k.npu(), v.npu(), beta=beta.npu(), initial_state=h0.npu(),
                                                       actual_seq_lengths=lengths.int().npu(), scale=0.3, g=g.npu() if seed else None)
    start = 0
    for i, n in enumerate(lengths.tolist()):
        rows = slice(start, start + n)
        want, state = delta(*(x[rows].transpose(0, 1) for x in (q, k, v, g if seed else 0 * g, beta)), 0.3, h0[i].transpose(1, 2))
        if n:
            close(o[rows].cpu().transpose(0, 1), want, 2**-8)
        close(last[i].cpu().transpose(1, 2), state, 2**-8)
        start += n


def elsewhere(code, **environment):
    """Runs a text in a process of its own; no violation may come of it."""
    code = f"import torch, torch_npu, fake\n{code}\nassert not fake.violations(), fake.violations()"
    here = os.path.dirname(os.path.abspath(fake.__file__))
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=300,
                          env={k: v for k, v in {**os.environ, **environment}.items() if k != "ASCEND_CUSTOM_OPP_PATH"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch_npu.__version__ == "2.8.0", reason="torch_npu 2.8.0 has neither operator")
def test_stock_recurrent_operator():
    """In another process: once libgdn has told CANN where fla-npu lies, torch_npu finds that package's operator of the same name."""
    elsewhere("import test_torch_npu as t\nfor seed in range(4): t.stock_recurrent_operator(seed)")


def stock_recurrent_operator(seed):
    """Slots and accepted tokens: the state after each token goes to its slot, the first comes from the slot of the last accepted one."""
    torch.manual_seed(10 + seed)
    HK, G, K, V = [(1, 1, 16, 16), (2, 2, 32, 16), (1, 4, 128, 128), (3, 2, 16, 48)][seed]
    lengths = torch.randint(1, 5, (3,))
    T, HV = int(lengths.sum()), HK * G
    q, k = (torch.nn.functional.normalize(torch.randn(T, HK, K), dim=-1).to(bf16) for _ in range(2))
    v, beta, g = torch.randn(T, HV, V).to(bf16), torch.rand(T, HV).to(bf16), -torch.rand(T, HV)
    pool, slots = torch.randn(T + 2, HV, V, K).to(bf16), torch.randperm(T + 2)[:T].int()
    accepted = torch.tensor([int(torch.randint(1, n + 1, ())) for n in lengths.tolist()]).int()
    state = pool.npu()
    o = torch.ops.npu.npu_recurrent_gated_delta_rule(q.npu(), k.npu(), v.npu(), state, beta=beta.npu(), scale=0.3, actual_seq_lengths=lengths.int().npu(),
                                                     ssm_state_indices=slots.npu(), num_accepted_tokens=accepted.npu() if seed % 2 else None, g=g.npu())
    start, want_pool = 0, pool.double()
    for i, n in enumerate(lengths.tolist()):
        s = pool[slots[start + (int(accepted[i]) - 1 if seed % 2 else 0)].item()].transpose(1, 2)
        for t in range(start, start + n):
            want, s = delta(*(x[t:t + 1].transpose(0, 1) for x in (q, k, v, g, beta)), 0.3, s)
            close(o[t].cpu(), want[:, 0], 2**-8)
            want_pool[slots[t].item()] = s.transpose(1, 2)
        start += n
    close(state.cpu(), want_pool, 2**-8)


@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_task_queue_modes(queue):
    """Work reaches the stream from torch_npu's own thread, or from the caller's; the raw stream drains the queue first."""
    elsewhere("""
x = torch.arange(100.0).npu()
for _ in range(50):
    x = x + 1
torch_npu._C._npu_getCurrentRawStream(0)
calls = fake.acl.gdnfake_calls(b"aclnnAdds") + fake.acl.gdnfake_calls(b"aclnnAdd")
assert calls == 50, calls
assert x.cpu().equal(torch.arange(100.0) + 50)
""", TASK_QUEUE_ENABLE=queue)
