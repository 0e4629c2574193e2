"""The operators for NumPy arrays and all other arrays in CPU memory that have ``__dlpack__``; PyTorch is not needed.

``chunk_gated_delta_rule``, ``fused_recurrent_gated_delta_rule``, ``chunk_kda`` and ``fused_recurrent_kda`` are the functions of ``gdn`` for
arrays. Below them every operator of the library is a function here, the backward passes among them: ``fwd``, ``bwd``, ``kda_fwd``,
and so on. Such a function takes the operator's inputs and numbers as keywords and returns a dict of its outputs.

Inputs are read where they lie, whatever their strides, and may be read-only. Outputs are new NumPy arrays, or the caller's buffers given as
``out``. NumPy has no bfloat16: such arrays have the dtype of the package ml_dtypes, as in JAX, which is needed only where the library has
to make one.
"""

import ctypes
import inspect

from . import _lib, _ops
from ._keywords import settle, settle_gate

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda"]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("device", ctypes.c_uint64), ("rank", ctypes.c_int32), ("dtype", ctypes.c_uint32),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_READ_ONLY = 1

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]

_NAMES = {word: name for name, word in _lib.DTYPES.items()}


def _view(name, array, write=False):
    """(view, owner) of an array: the view is good as long as the owner lives."""
    if hasattr(array, "__array_interface__") and not hasattr(array, "__dlpack_device__"):
        return _numpy_view(name, array.__array_interface__, write), array  # NumPy before 1.22
    if type(array).__module__ == "numpy":
        # NumPy exports by DLPack neither read-only arrays (before 2.1) nor the dtypes of ml_dtypes.
        return _numpy_view(name, array.__array_interface__, write, array.dtype.name), array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is of type {type(array).__name__}, expected an array that has __dlpack__, such as NumPy's")
    if hasattr(array, "detach"):
        array = array.detach()  # a torch tensor that requires its gradient is not exported
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # before DLPack 1.0
        capsule = array.__dlpack__()
    # The capsule stays unconsumed: its own destructor gives the memory back when it goes.
    kind = _capsule_name(capsule)
    if kind not in (b"dltensor", b"dltensor_versioned"):
        raise TypeError(f"{name}: __dlpack__ returned a capsule named {kind!r}, expected dltensor or dltensor_versioned")
    address = _capsule_pointer(capsule, kind)
    if kind == b"dltensor":
        t = _DLTensor.from_address(address)
    else:
        managed = _Versioned.from_address(address)
        if managed.major != 1:
            raise BufferError(f"{name}: __dlpack__ returned DLPack version {managed.major}.{managed.minor}, expected 1.x")
        if write and managed.flags & _READ_ONLY:
            raise ValueError(f"{name} is read-only, expected an array to write to")
        t = managed.tensor
    shape = tuple(t.shape[:t.rank]) if t.rank else ()
    strides = tuple(t.strides[:t.rank]) if t.rank and t.strides else _compact(shape)
    return ((t.data or 0) + t.byte_offset, t.device, t.dtype << 32, shape, strides), capsule


def _numpy_view(name, interface, write, dtype=None):
    address, read_only = interface["data"]
    if write and read_only:
        raise ValueError(f"{name} is read-only, expected an array to write to")
    form, shape = interface["typestr"], interface["shape"]
    size = int(form[2:])
    if dtype is None:
        dtype = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}.get(form[1], "?") + str(8 * size)
    word = _lib.DTYPES.get(dtype)
    if word is None or form[0] == ">":
        raise ValueError(f"{name} has dtype {'big-endian ' if form[0] == '>' else ''}{dtype}, expected one of " +
                         ", ".join(d[0] for d in _ops.DTYPES))
    strides = interface.get("strides")
    if strides is None:
        return address, _lib.CPU, word, shape, _compact(shape)
    odd = [s for s, n in zip(strides, shape) if s % size and n > 1]
    if odd:
        raise ValueError(f"{name} has a stride of {odd[0]} bytes, expected a multiple of its {size}-byte elements")
    return address, _lib.CPU, word, shape, tuple(s // size for s in strides)


def _compact(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _new(word, shape):
    import numpy

    name = _NAMES[word]
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError("an output is bfloat16, which NumPy has only with the package ml_dtypes; install it, or give the buffer as out"
                              ) from None
        name = ml_dtypes.bfloat16
    return numpy.empty(shape, dtype=name)


def _sizes(row, shapes, swap):
    """The sizes that the given shapes, by name, fix. A shape that does not fit is left to the library to refuse."""
    sizes = {}
    for t in row["tensors"]:
        letters = t["dims"].split()
        if t["state"] and swap:
            letters = letters[:-2] + letters[:-3:-1]
        for letter, n in zip(letters, shapes.get(t["name"], ())):
            if letter == "N+1":
                sizes["N"] = n - 1
            else:
                sizes.setdefault(letter, n)
    for letter in _ops.LETTERS:
        sizes.setdefault(letter, 0)
    if "cu_seqlens" not in shapes:
        sizes["N"] = sizes["B"]
    for name, expression in row["derived"]:
        sizes[name] = eval(expression, {}, sizes)
    return sizes


def _call(name, given, out=None):
    """Runs an operator: inputs, numbers and wishes for outputs by name in `given`, the caller's buffers by name in `out`. Returns the outputs by
    name."""
    op, out, views, owners, shapes = _lib.OPS[name], dict(out or {}), {}, [], {}
    row = op.row
    for t in row["tensors"]:
        if t["role"] in ("in", "opt_in", "inout"):
            array = given.pop(t["name"], None)
            if array is None and t["role"] != "opt_in":
                raise TypeError(f"gdn.array.{name} needs {t['name']}")
            if array is not None:
                views[t["name"]], owner = _view(t["name"], array, write=t["role"] == "inout")
                owners.append(owner)
                shapes[t["name"]] = views[t["name"]][3]
    numbers = [given.pop(n["name"], 0) for n in row["numbers"]]
    swap = bool(numbers[[n["name"] for n in row["numbers"]].index("state_v_first")])
    made = {}
    sizes = _sizes(row, shapes, swap)
    first = views[row["tensors"][0]["name"]][2]
    acc = first if _NAMES.get(first) == "float64" else _lib.DTYPES["float32"]
    for t in row["tensors"]:
        label = t["name"]
        if t["role"] not in ("out", "opt_out"):
            continue
        wanted = given.pop(t["want"], False) if t["want"] else t["role"] == "out" or t["with"] in views
        buffer = out.pop(label, None)
        if buffer is not None:
            views[label], owner = _view(label, buffer, write=True)
            owners.append(owner)
            made[label] = buffer
        elif wanted:
            word = views[t["like"]][2] if t["rule"] == "same" else acc
            letters = t["dims"].split()
            if t["state"] and swap:
                letters = letters[:-2] + letters[:-3:-1]
            if letters[-1].startswith("["):
                shape = shapes[t["with"]]
            else:
                shape = [max(0, sizes[letter]) for letter in letters]
            made[label] = _new(word if word in _NAMES else acc, shape)
            views[label] = _view(label, made[label], write=True)[0]
    unknown = [*given, *out]
    if unknown:
        raise TypeError(f"gdn.array.{name} has no argument {unknown[0]!r}")
    op([views.get(t["name"]) for t in row["tensors"]], numbers)
    return made


def _operator(name):
    row = _lib.OPS[name].row

    def function(*, out=None, **given):
        return _call(name, given, out)

    keyword = inspect.Parameter.KEYWORD_ONLY
    arguments, lines = [], []
    for t in row["tensors"]:
        if t["role"] in ("in", "opt_in", "inout"):
            arguments.append(inspect.Parameter(t["name"], keyword, default=None if t["role"] == "opt_in" else inspect.Parameter.empty))
            lines.append(f"    {t['name']} [{t['dims']}]: {t['doc']}")
    for n in row["numbers"]:
        arguments.append(inspect.Parameter(n["name"], keyword, default=0))
        lines.append(f"    {n['name']}: {n['doc']}")
    results = []
    for t in row["tensors"]:
        if t["role"] in ("out", "opt_out"):
            results.append(f"    {t['name']} [{t['dims']}]: {t['doc']}" + (f"; made if {t['want']} is true" if t["want"] else ""))
            if t["want"]:
                arguments.append(inspect.Parameter(t["want"], keyword, default=False))
    arguments.append(inspect.Parameter("out", keyword, default=None))
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature(arguments)
    function.__doc__ = "\n".join([row["doc"], "", "Arguments:", *lines, "    out: a dict of buffers for outputs, by name", "",
                                  "Outputs, in a dict:", *results])
    return function


for _name in _lib.OPS:
    globals()[_name] = _operator(_name)
    __all__.append(_name)


def _public(name, tensors, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout, head_first, backend,
            chunk_size, output_final_state, numbers, out):
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}, expected 16, 32 or 64")
    state_v_first = settle(state_v_first, cp_context, transpose_state_layout, head_first, scale)
    if backend not in (None, "cpu"):
        raise ValueError(f"backend is {backend!r}, and the arrays are in CPU memory")
    tensors["cu_seqlens"] = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if out is not None and not isinstance(out, tuple):
        out = (out, None)
    buffers = {label: buffer for label, buffer in zip(("o", "final_state", "h"), out or ()) if buffer is not None}
    return _call(name, {**tensors, **numbers, "scale": scale or 0.0, "state_v_first": bool(state_v_first),
                        "output_final_state": output_final_state}, buffers)


def _flat(vector):
    return vector.reshape(-1) if vector is not None and len(getattr(vector, "shape", ())) != 1 else vector


def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64,
    transpose_state_layout=None, head_first=None, backend=None, out=None,
):
    """Gated DeltaNet (arXiv:2412.06464) over whole sequences, for arrays in CPU memory.

    Arguments, result and errors are those of ``gdn.chunk_gated_delta_rule``, which says what is computed. ``out`` is a buffer for o, or a tuple
    of buffers for (o, final_state), None for one to be made. There are no gradients: ``bwd`` computes them from the tape that ``fwd``
    makes with ``save=True``.
    """
    tensors = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=_flat(A_log), dt_bias=_flat(dt_bias), initial_state=initial_state)
    numbers = dict(qk_l2norm=bool(use_qk_l2norm_in_kernel), gate=bool(use_gate_in_kernel), beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
                   neg_eigval=bool(allow_neg_eigval))
    made = _public("fwd", tensors, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout, head_first,
                   backend, chunk_size, output_final_state, numbers, out)
    return made["o"], made.get("final_state")


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, *, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64,
    cp_context=None, transpose_state_layout=None, head_first=None, backend=None, out=None,
):
    """Gated DeltaNet (arXiv:2412.06464) token by token, for arrays in CPU memory.

    Arguments, result and errors are those of ``gdn.fused_recurrent_gated_delta_rule``; ``out`` as in ``chunk_gated_delta_rule`` here.
    """
    tensors = dict(q=q, k=k, v=v, g=g, gk=gk, gv=gv, beta=beta, A_log=_flat(A_log), dt_bias=_flat(dt_bias), initial_state=initial_state)
    numbers = dict(qk_l2norm=bool(use_qk_l2norm_in_kernel), gate=bool(use_gate_in_kernel), beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
                   neg_eigval=bool(allow_neg_eigval))
    made = _public("recurrent_fwd", tensors, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout,
                   head_first, backend, chunk_size, output_final_state, numbers, out)
    return made["o"], made.get("final_state")


def chunk_kda(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None,
    *, A_log=None, dt_bias=None, chunk_size=64, chunk_indices=None, transpose_state_layout=None, head_first=None, backend=None, out=None,
):
    """Kimi Delta Attention (arXiv:2510.26692) over whole sequences, for arrays in CPU memory.

    Arguments, result and errors are those of ``gdn.chunk_kda``, but that intermediate states need no mode; ``out`` as in
    ``chunk_gated_delta_rule`` here, (o, final_state, h) where intermediate states are returned.
    """
    if return_intermediate_states and disable_recompute:
        raise AssertionError("return_intermediate_states and disable_recompute are both set, expected one of them")
    made = _kda("kda_fwd", q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first, cu_seqlens,
                cu_seqlens_cpu, cp_context, chunk_size, transpose_state_layout, head_first, backend, out, return_intermediate_states)
    if not return_intermediate_states:
        return made["o"], made.get("final_state")
    h, cu = made["h"], cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if cu is not None:  # the operator has room for as many states as so many sequences can have
        h = h[:, :sum((int(b) - int(a) + 63) // 64 for a, b in zip(cu[:-1], cu[1:]))]
    return made["o"], made.get("final_state"), h


def fused_recurrent_kda(
    q, k, v, g=None, beta=None, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
    state_v_first=False, cu_seqlens=None, *, safe_gate=False, disable_recompute=False, cu_seqlens_cpu=None, chunk_indices=None,
    chunk_size=64, cp_context=None, transpose_state_layout=None, head_first=None, backend=None, out=None,
):
    """Kimi Delta Attention (arXiv:2510.26692) token by token, for arrays in CPU memory.

    Arguments, result and errors are those of ``gdn.fused_recurrent_kda``; ``out`` as in ``chunk_gated_delta_rule`` here.
    """
    made = _kda("kda_recurrent_fwd", q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first, cu_seqlens,
                cu_seqlens_cpu, cp_context, chunk_size, transpose_state_layout, head_first, backend, out, False)
    return made["o"], made.get("final_state")


def _kda(name, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, l2norm, gate, beta_sigmoid, neg_eigval,
         safe_gate, lower_bound, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, chunk_size, transpose_state_layout, head_first,
         backend, out, intermediate):
    A_log, dt_bias, bound = settle_gate(gate, A_log, dt_bias, lower_bound, safe_gate, q, v)
    tensors = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
    numbers = dict(qk_l2norm=bool(l2norm), gate=bool(gate), lower_bound=bound, beta_sigmoid=bool(beta_sigmoid), neg_eigval=bool(neg_eigval))
    if intermediate:
        numbers["return_intermediate_states"] = True
    return _public(name, tensors, scale, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, transpose_state_layout, head_first or None,
                   backend, chunk_size, output_final_state, numbers, out)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
