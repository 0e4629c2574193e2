"""The public functions: signatures, keywords, errors."""

import inspect
import warnings

import pytest
import torch

import gdn
import gdn.array

CHUNK, RECURRENT = gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule
both = pytest.mark.parametrize("function", [CHUNK, RECURRENT])

POSITIONAL = {
    CHUNK: "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval "
           "state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    RECURRENT: "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias "
               "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
}
KEYWORDS = {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout", "head_first", "cu_seqlens_cpu",
            "chunk_indices", "cp_context", "backend"}


def tensors(B=2, T=7, H=1, HV=2, K=8, V=6):
    return dict(q=torch.randn(B, T, H, K), k=torch.randn(B, T, H, K) / K, v=torch.randn(B, T, HV, V), g=-torch.rand(B, T, HV),
                beta=torch.rand(B, T, HV), initial_state=torch.randn(B, HV, K, V))


@both
@pytest.mark.parametrize("module", ["torch", "array"])
def test_signature(function, module):
    signature = inspect.signature(function if module == "torch" else getattr(gdn.array, function.__name__))
    positional = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[function].split()
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values())
    assert KEYWORDS <= set(signature.parameters)
    defaults = {"output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "allow_neg_eigval": False,
                "use_beta_sigmoid_in_kernel": False, "state_v_first": False, "chunk_size": 64}
    for p in list(signature.parameters.values())[3:]:
        assert p.default is defaults.get(p.name), p.name


def test_aliases():
    assert gdn.chunk_gdn is CHUNK and gdn.fused_recurrent_gdn is RECURRENT
    assert gdn.array.chunk_gdn is gdn.array.chunk_gated_delta_rule


def test_positional_call_is_the_keyword_call():
    x = tensors()
    o, ht = CHUNK(x["q"], x["k"], x["v"], x["g"], x["beta"], 0.3, x["initial_state"], True)
    by_name = CHUNK(**x, scale=0.3, output_final_state=True)
    assert torch.equal(o, by_name[0]) and torch.equal(ht, by_name[1])
    o, ht = RECURRENT(x["q"], x["k"], x["v"], x["g"], None, None, x["beta"], 0.3, x["initial_state"], True)
    by_name = RECURRENT(**x, scale=0.3, output_final_state=True)
    assert torch.equal(o, by_name[0]) and torch.equal(ht, by_name[1])


@both
def test_final_state_only_on_request(function):
    assert function(**tensors())[1] is None
    assert function(**tensors(), output_final_state=True)[1].shape == (2, 2, 8, 6)


@both
def test_unknown_keyword(function):
    with pytest.raises(TypeError, match="hed_first"):
        function(**tensors(), hed_first=True)


@both
def test_absent_gate_and_beta(function):
    x = tensors()
    for absent, neutral in (("g", torch.zeros(2, 7, 2)), ("beta", torch.ones(2, 7, 2))):
        given = function(**{**x, absent: neutral})[0]
        assert torch.equal(function(**{**x, absent: None})[0], given)
        del x[absent]
        assert torch.equal(function(**x)[0], given)


@both
def test_default_scale(function):
    x = tensors()
    torch.testing.assert_close(function(**x)[0], function(**x, scale=8 ** -0.5)[0], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="scale is 0"):
        function(**x, scale=0.0)


@both
@pytest.mark.parametrize("size", [16, 32, 64])
def test_chunk_size(function, size):
    x = tensors()
    torch.testing.assert_close(function(**x, chunk_size=size)[0], function(**x)[0], rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("size", [0, 8, 128, None])
def test_chunk_size_refused(function, size):
    with pytest.raises(ValueError, match="chunk_size is .*, expected 16, 32 or 64"):
        function(**tensors(), chunk_size=size)


@both
def test_old_name_of_state_v_first(function):
    x = tensors()
    x["initial_state"] = x["initial_state"].transpose(2, 3)
    new = function(**x, state_v_first=True, output_final_state=True)
    with pytest.warns(DeprecationWarning, match="state_v_first") as record:
        old = function(**x, transpose_state_layout=True, output_final_state=True)
    assert record[0].filename == __file__
    assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
    with pytest.raises(ValueError, match="both given"):
        function(**x, transpose_state_layout=True, state_v_first=True)
    with pytest.warns(DeprecationWarning):
        function(**tensors(), transpose_state_layout=False)


@both
def test_head_first_was_removed(function):
    for value in (True, False):
        with pytest.raises(DeprecationWarning, match="head_first"):
            function(**tensors(), head_first=value)


def test_context_parallelism_is_refused():
    with pytest.raises(NotImplementedError, match="cp_context"):
        gdn.fused_recurrent_gated_delta_rule(**tensors(), cp_context=object())
    with pytest.raises(ValueError, match="cp_context is object, expected what build_cp_context returns"):
        gdn.chunk_gated_delta_rule(**tensors(), cp_context=object())


@both
def test_backend(function):
    function(**tensors(), backend="cpu")
    with pytest.raises(ValueError, match="backend is 'npu'"):
        function(**tensors(), backend="npu")


@both
def test_chunk_indices_are_ignored_and_host_offsets_used(function):
    x = tensors(B=1)
    x["initial_state"] = torch.randn(2, 2, 8, 6)
    plain = function(**x, cu_seqlens=torch.tensor([0, 3, 7]), output_final_state=True)
    for offsets in (dict(cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32)), dict(cu_seqlens_cpu=torch.tensor([0, 3, 7])),
                    dict(cu_seqlens=torch.tensor([0, 3, 7], device="meta"), cu_seqlens_cpu=torch.tensor([0, 3, 7])),
                    dict(cu_seqlens=torch.tensor([0, 9, 3, 9, 7])[::2])):
        other = function(**x, **offsets, chunk_indices=torch.tensor([[9, 9]]), output_final_state=True)
        assert torch.equal(other[0], plain[0]) and torch.equal(other[1], plain[1])


@both
def test_vectors_of_any_shape_and_dtype(function):
    x = tensors()
    a, b = torch.randn(2), torch.randn(2)
    plain = function(**x, use_gate_in_kernel=True, A_log=a, dt_bias=b)[0]
    for shape in ((2, 1), (1, 1, 2)):
        assert torch.equal(function(**x, use_gate_in_kernel=True, A_log=a.reshape(shape), dt_bias=b.reshape(shape))[0], plain)
    a, b = a.bfloat16(), b.half()
    low = function(**x, use_gate_in_kernel=True, A_log=a, dt_bias=b)[0]
    assert torch.equal(low, function(**x, use_gate_in_kernel=True, A_log=a.double(), dt_bias=b.float())[0])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_initial_state_of_any_dtype(function, dtype):
    x = tensors()
    h0 = x.pop("initial_state").to(dtype)
    o, ht = function(**x, initial_state=h0, output_final_state=True)
    same = function(**x, initial_state=h0.float(), output_final_state=True)
    assert ht.dtype == torch.float32 and torch.equal(o, same[0]) and torch.equal(ht, same[1])


@both
def test_beta_per_value_channel(function):
    x = tensors()
    wide = x["beta"][..., None].expand(2, 7, 2, 6)
    torch.testing.assert_close(function(**{**x, "beta": wide})[0], function(**x)[0], rtol=1e-5, atol=1e-6)


def change(name, make):
    return lambda x: x.update({name: make(x.get(name))})


WRONG = {
    "rank of q": (change("q", lambda t: t[0]), r"q has rank 3, expected \[B T H K\]"),
    "rank of k": (change("k", lambda t: t[None]), r"k has rank 5, expected \[B T H K\]"),
    "rank of beta": (change("beta", lambda t: t[0]), r"beta has rank 2, expected"),
    "rank of beta and state": (lambda x: x.update(g=x["g"][..., None], initial_state=x["initial_state"][0]), r"g has rank 4, expected"),
    "scalar q": (change("q", lambda t: torch.tensor(1.0)), r"q has rank 0, expected"),
    "K": (change("k", lambda t: t[..., :5]), r"k has shape \[2 7 1 5\], expected \[B T H K\] with K=8"),
    "T": (change("v", lambda t: t[:, :5]), r"v has shape .*, expected \[B T HV V\] with T=7"),
    "heads": (lambda x: x.update(q=torch.randn(2, 7, 2, 8), k=torch.randn(2, 7, 2, 8), v=torch.randn(2, 7, 3, 6), g=None, beta=None,
                                 initial_state=None), r"v has HV=3, expected a multiple of H=2"),
    "large K": (lambda x: x.update(q=torch.randn(2, 7, 1, 513), k=torch.randn(2, 7, 1, 513), initial_state=None), r"q has K=513, expected 1 to 512"),
    "shape of g": (change("g", lambda t: t[..., :1]), r"g has shape \[2 7 1\], expected \[B T HV\] with HV=2"),
    "layout of the state": (change("initial_state", lambda t: t.transpose(2, 3)), r"initial_state has shape \[2 2 6 8\], expected \[N HV K V\]"),
    "number of states": (change("initial_state", lambda t: t[:1]), r"initial_state has shape \[1 2 8 6\], expected .* with N=2"),
    "integer q": (change("q", lambda t: t.long()), r"q has dtype int64, expected float32, bfloat16, float16 or float64"),
    "boolean beta": (change("beta", lambda t: t > 0), r"beta has dtype bool, expected"),
    "complex v": (change("v", lambda t: t.to(torch.complex64)), r"v has dtype complex64, expected"),
    "mixed float64": (change("q", lambda t: t.double()), r"k has dtype float32, expected float64 like q"),
    "neg_eigval alone": (lambda x: x.update(allow_neg_eigval=True), r"neg_eigval is 1 and beta_sigmoid is 0"),
    "sigmoid of nothing": (lambda x: x.update(use_beta_sigmoid_in_kernel=True, beta=None), r"beta_sigmoid is 1 and beta is NULL"),
    "gate without A_log": (lambda x: x.update(use_gate_in_kernel=True), r"gate is 1 and A_log is NULL"),
    "A_log without gate": (lambda x: x.update(A_log=torch.zeros(2)), r"A_log is given and gate is 0"),
    "length of A_log": (lambda x: x.update(use_gate_in_kernel=True, A_log=torch.zeros(3)), r"A_log has shape \[3\], expected \[HV\] with HV=2"),
    "offsets and a batch": (lambda x: x.update(cu_seqlens=torch.tensor([0, 3, 7])), r"q has B=2, expected B=1 with cu_seqlens"),
    "infinite scale": (lambda x: x.update(scale=float("inf")), r"scale is \+Inf, expected a finite number"),
}
OFFSETS = {
    "start": ([1, 3, 7], r"cu_seqlens\[0\] is 1, expected 0"),
    "decreasing": ([0, 5, 3], r"cu_seqlens\[2\] is 3 after 5, expected offsets that do not decrease"),
    "beyond T": ([0, 3, 8], r"cu_seqlens\[2\] is 8, expected at most T=7"),
    "none": ([], r"cu_seqlens has shape \[0\], expected \[N\+1\], at least \[1\]"),
    "rank": ([[0, 3, 7]], r"cu_seqlens has rank 2, expected \[N\+1\]"),
    "scalar": (0, r"cu_seqlens has rank 0, expected \[N\+1\]"),
}


@both
@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(function, case):
    spoil, message = WRONG[case]
    x = tensors()
    spoil(x)
    op = "gdn_fwd: " if function is CHUNK else "gdn_recurrent_fwd: "
    for grad in (False, True):
        given = {n: t.requires_grad_(grad and t.is_floating_point()) if isinstance(t, torch.Tensor) else t for n, t in x.items()}
        with pytest.raises(ValueError, match=op + message):
            function(**given)


@both
@pytest.mark.parametrize("case", OFFSETS)
def test_wrong_offsets(function, case):
    offsets, message = OFFSETS[case]
    x = tensors(B=1)
    del x["initial_state"]
    for final_state in (False, True):
        with pytest.raises(ValueError, match=message):
            function(**x, cu_seqlens=torch.tensor(offsets, dtype=torch.int64), output_final_state=final_state)
    with pytest.raises(ValueError, match="cu_seqlens has dtype float32, expected int32 or int64"):
        function(**x, cu_seqlens=torch.tensor([0.0, 7.0]))


@both
def test_number_of_packed_states(function):
    with pytest.raises(ValueError, match=r"initial_state has shape \[1 2 8 6\], expected .* with N=2"):
        function(**tensors(B=1), cu_seqlens=torch.tensor([0, 3, 7]))


@both
def test_other_devices_are_refused(function):
    x = tensors()
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match="sparse|Sparse|storage"):
        function(**{**x, "q": x["q"].to_sparse()})
    if torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="CUDA"):
            function(**{n: t.cuda() for n, t in x.items()})
        with pytest.raises(ValueError, match="is on"):
            function(**{**x, "k": x["k"].cuda()})


@both
def test_what_is_not_a_tensor(function):
    x = tensors()
    with pytest.raises((TypeError, RuntimeError), match="Tensor"):
        function(**{**x, "q": x["q"].numpy()})


@both
def test_nothing_is_written_after_an_error(function):
    x = tensors()
    before = {n: t.clone() for n, t in x.items()}
    for spoil, _ in WRONG.values():
        bad = dict(x)
        spoil(bad)
        with pytest.raises(ValueError):
            function(**bad)
    assert all(torch.equal(t, before[n]) for n, t in x.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(**x)[0].isfinite().all()


def test_status_of_the_library_becomes_an_exception(monkeypatch):
    from gdn import _lib

    kinds = {"INVALID_ARGUMENT": ValueError, "UNSUPPORTED": NotImplementedError, "NO_BACKEND": NotImplementedError,
             "OUT_OF_MEMORY": MemoryError, "DEVICE": RuntimeError, "FORKED": RuntimeError, "INTERNAL": RuntimeError}
    from gdn._ops import STATUSES

    assert set(STATUSES) == {"OK", *kinds}
    _lib.library().gdn_set_num_threads(0)  # leaves a sentence
    for name, kind in kinds.items():
        with pytest.raises(kind):
            _lib.check(STATUSES.index(name))
    with pytest.raises(RuntimeError):
        _lib.check(99)
    _lib.check(0)


def test_threads():
    n = gdn.get_num_threads()
    try:
        gdn.set_num_threads(1)
        assert gdn.get_num_threads() == 1
        with pytest.raises(ValueError, match="0"):
            gdn.set_num_threads(0)
        assert gdn.get_num_threads() == 1
    finally:
        gdn.set_num_threads(n)


def test_documentation_names_every_argument():
    for function in (CHUNK,):
        for name in inspect.signature(function).parameters:
            if name != "head_first":
                assert name in function.__doc__, name
    for function in (CHUNK, RECURRENT, gdn.array.chunk_gdn, gdn.array.fused_recurrent_gdn):
        assert "arXiv:2412.06464" in function.__doc__
