"""gdn.array: arrays of NumPy and of anything that has __dlpack__, among them strange ones made here field by field."""

import ctypes
import gc
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import gdn
import gdn.array
import gdn.env
from gdn.array import _DLTensor, _Versioned

both = pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])


def arrays(B=1, T=9, H=1, HV=2, K=4, V=3, seed=0, dtype=np.float32):
    r = np.random.default_rng(seed)
    x = dict(q=r.normal(size=(B, T, H, K)), k=r.normal(size=(B, T, H, K)) / K, v=r.normal(size=(B, T, HV, V)), g=-r.random((B, T, HV)),
             beta=r.random((B, T, HV)), initial_state=r.normal(size=(B, HV, K, V)))
    return {n: a.astype(dtype) for n, a in x.items()}


def run(name, x, **options):
    return getattr(gdn.array, name)(**x, output_final_state=True, **options)


def same(got, expected):
    for a, b in zip(got, expected):
        assert type(a) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b)


class Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_raw_name = ctypes.PyDLL(None).PyCapsule_GetName
_raw_name.restype, _raw_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
_raw_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_raw_pointer.restype, _raw_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule):
    """The destructor that DLPack asks of a producer: an unconsumed capsule is given back."""
    kind = _raw_name(capsule)
    if kind in (b"dltensor", b"dltensor_versioned"):
        address = _raw_pointer(capsule, kind)
        deleter = (Managed if kind == b"dltensor" else _Versioned).from_address(address).deleter
        if deleter:
            _DELETER(deleter)(address)


class Producer:
    """An array that exports itself with the fields of the DLTensor as the test wants them."""

    def __init__(self, array, versioned=True, deleter=True, flags=0, device=1, version=(1, 1), **fields):
        self.array, self.versioned, self.flags, self.device, self.version, self.fields = array, versioned, flags, device, version, fields
        self.alive = self.given_back = 0
        self.deleter = _DELETER(self._delete) if deleter else None

    def _delete(self, address):
        self.given_back += 1

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, *, stream=None, **more):
        if more and not self.versioned:
            raise TypeError("unexpected keyword max_version")
        a = self.array
        self.shape = (ctypes.c_int64 * max(a.ndim, 1))(*a.shape)
        self.strides = (ctypes.c_int64 * max(a.ndim, 1))(*(s // a.itemsize for s in a.strides))
        code = {"f": 2, "i": 0, "u": 1}[a.dtype.kind]
        t = _DLTensor(a.ctypes.data, self.device, a.ndim, code | a.itemsize * 8 << 8 | 1 << 16, ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
                      ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)), 0)
        for field, value in self.fields.items():
            setattr(t, field, value)
        deleter = ctypes.cast(self.deleter, ctypes.c_void_p) if self.deleter else None
        if self.versioned:
            self.managed = _Versioned(*self.version, None, deleter, self.flags, t)
        else:
            self.managed = Managed(t, None, deleter)
        return _new(ctypes.addressof(self.managed), b"dltensor_versioned" if self.versioned else b"dltensor", ctypes.cast(_destroy, ctypes.c_void_p))


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_numpy_is_torch(name, dtype):
    x = arrays(T=70, dtype=dtype)
    o, ht = run(name, x, use_qk_l2norm_in_kernel=True)
    to, tht = getattr(gdn, name)(**{n: torch.from_numpy(a) for n, a in x.items()}, output_final_state=True, use_qk_l2norm_in_kernel=True)
    same((o, ht), (to.numpy(), tht.numpy()))
    assert getattr(gdn.array, name)(**x)[1] is None


@both
def test_every_option(name):
    x = arrays(T=20)
    x["initial_state"] = np.random.default_rng(1).normal(size=(2, 2, 3, 4)).astype(np.float32)
    options = dict(cu_seqlens=np.array([0, 5, 18]), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=np.ones((2, 1), np.float32),
                   dt_bias=np.zeros((1, 2)), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True, scale=0.3)
    got = run(name, x, **options)
    t = torch.as_tensor
    expected = getattr(gdn, name)(**{n: t(a) for n, a in x.items()}, output_final_state=True,
                                  **{n: t(a) if isinstance(a, np.ndarray) else a for n, a in options.items()})
    same(got, [e.numpy() for e in expected])


@pytest.mark.parametrize("form", ["", "recurrent_"])
def test_backward_is_torchs(form):
    x = arrays(T=70)
    h0 = x["initial_state"]
    made = getattr(gdn.array, form + "fwd")(**x, output_final_state=True, save=True)
    dout, dht = np.cos(made["o"]), np.sin(made["final_state"])
    grads = getattr(gdn.array, form + "bwd")(**x, tape=made["tape"], dout=dout, dht=dht)
    t = {n: torch.from_numpy(a).requires_grad_() for n, a in x.items()}
    function = gdn.fused_recurrent_gdn if form else gdn.chunk_gdn
    expected = torch.autograd.grad(function(**t, output_final_state=True), list(t.values()), [torch.from_numpy(dout), torch.from_numpy(dht)])
    assert set(grads) == {"dq", "dk", "dv", "dg", "dbeta", "dh0"} and grads["dh0"].shape == h0.shape
    for n, e in zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), expected):
        assert np.array_equal(grads[n], e.numpy())


@both
def test_out(name):
    x = arrays()
    expected = run(name, x)
    o, ht = np.full((1, 9, 2, 3), np.nan, np.float32), np.full((1, 2, 4, 3), np.nan, np.float32)
    got = run(name, x, out=(o, ht))
    assert got[0] is o and got[1] is ht
    same(got, expected)
    strided = np.full((1, 9, 3, 2), 7, np.float32).transpose(0, 1, 3, 2)
    assert run(name, x, out=strided)[0] is strided and np.array_equal(strided, expected[0])
    torch_out = torch.empty(1, 9, 2, 3)
    run(name, x, out=torch_out)
    assert np.array_equal(torch_out.numpy(), expected[0])
    # A buffer for the state is a wish for it.
    assert getattr(gdn.array, name)(**x, out=(None, ht))[1] is ht


@both
@pytest.mark.parametrize("spoil, message", [
    (lambda o: o[:, :8], r"o has shape \[1 8 2 3\], expected \[B T HV V\] with T=9"),
    (lambda o: o.astype(np.float64), "o has dtype float64, expected float32 like v"),
    (lambda o: np.broadcast_to(o[:, :, :1], o.shape), "read-only"),
])
def test_wrong_out(name, spoil, message):
    with pytest.raises(ValueError, match=message):
        run(name, arrays(), out=spoil(np.empty((1, 9, 2, 3), np.float32)))


@both
def test_overlapping_out(name):
    """D9 on the side of outputs, and an output that is an input."""
    x = arrays()
    o = np.lib.stride_tricks.as_strided(np.empty((1, 9, 1, 3), np.float32), (1, 9, 2, 3), (108, 12, 0, 4), writeable=True)
    with pytest.raises(ValueError, match="overlap"):
        run(name, x, out=o)
    before = x["v"].copy()
    with pytest.raises(ValueError, match="overlap"):
        run(name, x, out=x["v"])
    assert np.array_equal(x["v"], before)


@both
def test_null_strides_are_compact(name):  # D1
    x = arrays()
    expected = run(name, x)
    for versioned in (True, False):
        got = run(name, {n: Producer(a, versioned, strides=None) for n, a in x.items()})
        same(got, expected)


@both
def test_rank_0_without_a_shape(name):  # D3
    x = arrays()
    x["q"] = Producer(np.array(1, np.float32), shape=None, strides=None)
    with pytest.raises(ValueError, match=r"q has rank 0, expected \[B T H K\]"):
        run(name, x)


@both
def test_empty_with_null_data(name):  # D4
    x = arrays(T=0)
    null = {n: Producer(a, data=0) if a.size == 0 else a for n, a in x.items()}
    o, ht = run(name, null)
    assert o.shape == (1, 0, 2, 3) and np.array_equal(ht, x["initial_state"])
    del null["initial_state"]
    assert not run(name, null)[1].any()


@both
def test_byte_offset(name):  # D6
    x = arrays()
    expected = run(name, x)
    shifted = {}
    for n, a in x.items():
        buffer = np.full(a.size + 2, np.nan, np.float32)
        buffer[2:] = a.ravel()
        shifted[n] = Producer(a, data=buffer.ctypes.data, byte_offset=8)
        shifted[n].buffer = buffer
    same(run(name, shifted), expected)


@both
def test_strides_of_sizes_1_do_not_count(name):  # D8
    x = arrays()
    odd = {n: np.lib.stride_tricks.as_strided(a, a.shape, [77 * 4 if s == 1 else b for s, b in zip(a.shape, a.strides)]) for n, a in x.items()}
    assert odd["q"].strides != x["q"].strides
    same(run(name, odd), run(name, x))
    o = np.lib.stride_tricks.as_strided(np.empty((1, 9, 2, 3), np.float32), (1, 9, 2, 3), (0, 24, 12, 4), writeable=True)
    assert np.array_equal(run(name, x, out=o)[0], run(name, x)[0])


@both
def test_strided_and_broadcast_inputs(name):  # D9
    x = arrays(H=2, HV=4, T=70)
    x["q"] = np.broadcast_to(x["q"][:, :, :1], x["q"].shape)
    x["k"] = np.asfortranarray(x["k"])
    x["v"] = np.repeat(x["v"], 2, 3)[..., ::2]
    x["g"] = x["g"][:, ::-1]
    x["beta"] = np.broadcast_to(np.float32(0.5), x["beta"].shape)
    x["initial_state"] = x["initial_state"].transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)
    assert 0 in x["q"].strides and x["g"].strides[1] < 0
    same(run(name, x), run(name, {n: a.copy("C") for n, a in x.items()}))


@both
def test_read_only(name):  # D11
    x = arrays()
    expected = run(name, x)
    for a in x.values():
        a.flags.writeable = False
    same(run(name, x), expected)
    same(run(name, {n: Producer(a, flags=1) for n, a in x.items()}), expected)
    o = np.empty((1, 9, 2, 3), np.float32)
    with pytest.raises(ValueError, match="o is read-only"):
        run(name, x, out=Producer(o, flags=1))
    o.flags.writeable = False
    with pytest.raises(ValueError, match="o is read-only"):
        run(name, x, out=o)
    with pytest.raises(ValueError, match="final_state is read-only"):
        run(name, x, out=(None, x["initial_state"]))


@both
def test_torch_tensor_that_requires_its_gradient(name):  # D14
    x = arrays()
    same(run(name, {n: torch.from_numpy(a).requires_grad_() for n, a in x.items()}), run(name, x))


@both
def test_capsules_are_given_back_once(name):  # D16
    x = arrays()
    expected = run(name, x)
    for versioned in (True, False):
        p = {n: Producer(a, versioned) for n, a in x.items()}
        for calls in (1, 2, 3):
            same(run(name, p), expected)
            gc.collect()
            assert all(a.given_back == calls for a in p.values())
        with pytest.raises(ValueError):
            run(name, {**p, "q": Producer(x["q"][..., :3])})
        gc.collect()
        assert all(a.given_back == 4 for n, a in p.items() if n != "q")
        same(run(name, {n: Producer(a, versioned, deleter=False) for n, a in x.items()}), expected)


@both
def test_used_capsule_and_other_version(name):  # D16
    class Used:
        def __dlpack__(self, **more):
            return _new(1, b"used_dltensor", None)

    with pytest.raises(TypeError, match="used_dltensor"):
        run(name, {**arrays(), "q": Used()})
    with pytest.raises(BufferError, match="version 2.0"):
        run(name, {**arrays(), "q": Producer(arrays()["q"], version=(2, 0))})


@pytest.mark.slow
def test_memory_is_flat():  # D16
    x = {n: torch.from_numpy(a) for n, a in arrays(T=1).items()}

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for count in (2000, 20000):
        before = resident()
        for _ in range(count):
            gdn.array.fused_recurrent_gdn(**x)
        grown = resident() - before
    assert grown < 2 << 20


@both
@pytest.mark.parametrize("kind, label", [(12, "Ascend NPU"), (2, "CUDA")])
def test_device(name, kind, label):  # D17
    x = arrays()
    nowhere = 1 << 46  # read as memory of this process, it ends it
    with pytest.raises(ValueError, match=f"k is on {label}:0, expected CPU like q"):
        run(name, {**x, "k": Producer(x["k"], device=kind, data=nowhere)})
    there = {n: Producer(a, device=kind, data=nowhere) for n, a in x.items()}
    with pytest.raises(ValueError, match=f"o is on CPU, expected {label}:0"):
        run(name, there)
    out = (Producer(np.empty((1, 9, 2, 3), np.float32), device=kind, data=nowhere + 4096),
           Producer(np.empty((1, 2, 4, 3), np.float32), device=kind, data=nowhere + 8192))
    with pytest.raises(NotImplementedError, match=label):
        run(name, there, out=out)


@both
def test_bfloat16(name):
    x = arrays()
    t = {n: torch.from_numpy(a).bfloat16() for n, a in x.items()}
    o = torch.empty(1, 9, 2, 3, dtype=torch.bfloat16)
    run(name, t, out=o)
    expected, ht = getattr(gdn, name)(**t, output_final_state=True)
    assert torch.equal(o, expected)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    low = {n: a.astype(ml_dtypes.bfloat16) for n, a in x.items()}
    got = run(name, low)
    assert got[0].dtype == ml_dtypes.bfloat16 and np.array_equal(got[0].astype(np.float32), expected.float().numpy())
    assert np.array_equal(got[1], ht.numpy())


@both
def test_bfloat16_without_ml_dtypes(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    t = {n: torch.from_numpy(a).bfloat16() for n, a in arrays().items()}
    with pytest.raises(ImportError, match="ml_dtypes"):
        run(name, t)


@both
@pytest.mark.parametrize("spoil, error, message", [
    (lambda x: x.update(q=x["q"].tolist()), TypeError, "q is of type list, expected an array that has __dlpack__"),
    (lambda x: x.update(q=x["q"][0]), ValueError, r"q has rank 3, expected \[B T H K\]"),
    (lambda x: x.update(q=x["q"].astype(">f4")), ValueError, "q has dtype big-endian"),
    (lambda x: x.update(q=x["q"].astype(str)), ValueError, "q has dtype"),
    (lambda x: x.update(q=x["q"].astype(int)), ValueError, "q has dtype int64, expected float32"),
    (lambda x: x.update(v=np.zeros((1, 9, 2, 3), [("x", "f4"), ("y", "u1")])["x"]), ValueError, "v has a stride of 30 bytes, expected a multiple"),
    (lambda x: x.update(cu_seqlens=np.zeros(0, np.int64)), ValueError, r"cu_seqlens has shape \[0\]"),
    (lambda x: x.update(q=None), TypeError, "needs q"),
    (lambda x: x.update(chunk_size=7), ValueError, "chunk_size is 7"),
    (lambda x: x.update(backend="npu"), ValueError, "backend is 'npu'"),
    (lambda x: x.update(out=(None, None), hed_first=1), TypeError, "hed_first"),
])
def test_wrong_argument(name, spoil, error, message):
    x = arrays()
    spoil(x)
    with pytest.raises(error, match=message):
        run(name, x)


def test_operators_describe_themselves():
    for name in ("fwd", "bwd", "recurrent_fwd", "recurrent_bwd"):
        function = getattr(gdn.array, name)
        assert "cu_seqlens [N+1]" in function.__doc__
        with pytest.raises(TypeError, match="needs q"):
            function()
    x = arrays()
    with pytest.raises(TypeError, match="no argument 'gamma'"):
        gdn.array.fwd(**x, gamma=1)
    with pytest.raises(TypeError, match="no argument 'p'"):
        gdn.array.fwd(**x, out={"p": x["q"]})


def test_without_torch(tmp_path):
    """In a process that cannot import torch, arrays work and the torch functions say what is missing."""
    program = """
import sys, importlib.abc
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
sys.meta_path.insert(0, NoTorch())
import numpy as np, gdn, gdn.array
a = np.ones((1, 5, 1, 4), np.float32)
o, ht = gdn.array.chunk_gated_delta_rule(a, a, a, use_qk_l2norm_in_kernel=True, output_final_state=True)
assert o.shape == a.shape and ht.shape == (1, 1, 4, 4)
try:
    gdn.chunk_gated_delta_rule
except ImportError as error:
    print(error)
try:
    gdn.nonsense
except AttributeError as error:
    print(error)
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(gdn.__file__))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gdn.chunk_gated_delta_rule needs PyTorch" in done.stdout and "no attribute 'nonsense'" in done.stdout


def test_environment(tmp_path, monkeypatch, capsys):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(gdn.__file__))}
    done = subprocess.run([sys.executable, "-m", "gdn.env", "--json"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["gdn"] == facts["version"] == gdn.__version__ and facts["torch"] == torch.__version__.split("+")[0]
    assert os.path.samefile(facts["library"], gdn._lib.path()) and facts["threads"] >= 1 and facts["isa"]
    monkeypatch.setattr(sys, "argv", ["gdn.env"])
    gdn.env.main()
    assert f"isa          {facts['isa']}" in capsys.readouterr().out
    monkeypatch.setattr(gdn._lib, "_library", None)
    monkeypatch.setenv("GDN_LIBRARY", str(tmp_path / "libgdn.so"))
    gdn.env.main()
    said = capsys.readouterr().out
    assert "error" in said and "libgdn.so" in said and "isa " not in said
