"""Registers every operator of the table with torch.library: schema, implementation and fake.

The torch operator ``gdn::NAME`` takes the row's inputs, its numbers (a bool where the range is 0 to 1) and a bool for each output that is
made only on request. It returns all outputs of the row, a single one bare; one that is not made comes back as an empty tensor of shape
[0]. What a row updates in place is an input, and mutable in the schema.
"""

import struct

import torch

from . import _lib, _ops, memory, npu

NAMESPACE = "gdn"

_fragment = torch.library.Library(NAMESPACE, "FRAGMENT")

# By operator: the implementations for CPU tensors.
on_cpu = {}


def define():
    """Registers all rows; autograd.py adds the gradients."""
    for name, op in _lib.OPS.items():
        _fragment.define(schema(op.row))
        variants = on_cpu[name] = Variants(op)
        lines = [f"def run({', '.join(parameters(op.row))}):", f"    return {variants.call}"]
        _fragment.impl(name, compiled("run", lines, variants=variants), "CPU")
        # Other devices, and tensors on several: the library finds the backend, or says that there is none.
        general = _implementation(op)
        _fragment.impl(name, general, "CompositeExplicitAutograd")
        # Ascend NPUs, named too: torch_npu has a fallback for what is not.
        _fragment.impl(name, general, "PrivateUse1")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op.row), lib=_fragment)


def implement_autograd(name, kernel):
    """Registers the Autograd kernel of an operator; it gets the dispatch keys of the call as its first argument."""
    _fragment.impl(name, kernel, "Autograd", with_keyset=True)


def implement_mutation(name):
    """Registers what PyTorch's count of a tensor's versions needs of an operator with mutable arguments."""
    op, row = operator(name), _lib.OPS[name].row
    positions = [i for i, t in enumerate(inputs(row)) if t["role"] == "inout"]

    def kernel(keyset, *arguments):
        for i in positions:
            torch.autograd.graph.increment_version(arguments[i])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    _fragment.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def below_autograd(op, keyset, arguments):
    """Goes on with a call below the Autograd key."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def operator(name):
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def inputs(row):
    return [t for t in row["tensors"] if t["role"] in ("in", "opt_in", "inout")]


def outputs(row):
    return [t for t in row["tensors"] if t["role"] in ("out", "opt_out")]


def mutated(row):
    """The names of the inputs that are updated in place."""
    return [t["name"] for t in row["tensors"] if t["role"] == "inout"]


def wants(row):
    """The keywords that ask for an output."""
    return [t["want"] for t in outputs(row) if t["want"]]


def parameters(row):
    """The names of the torch operator's arguments: inputs, numbers, wants."""
    return [t["name"] for t in inputs(row)] + [n["name"] for n in row["numbers"]] + wants(row)


def schema(row):
    kinds = {"in": "Tensor", "opt_in": "Tensor?", **{name: f"Tensor({chr(97 + i)}!)" for i, name in enumerate(mutated(row))}}
    arguments = [f"{kinds.get(t['name']) or kinds[t['role']]} {t['name']}" for t in inputs(row)]
    for n in row["numbers"]:
        kind = "float" if n["float"] else "bool" if (n["min"], n["max"]) == (0, 1) else "int"
        arguments.append(f"{kind} {n['name']}")
    arguments += [f"bool {want}" for want in wants(row)]
    results = [f"Tensor {t['name']}" for t in outputs(row)]
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{row['name']}({', '.join(arguments)}) -> {returned}"


def offsets(cu_seqlens):
    """Sequence offsets, a tensor on any device or a sequence of ints, as a tensor in host memory."""
    if isinstance(cu_seqlens, torch.Tensor):
        return cu_seqlens if cu_seqlens.device.type == "cpu" else cu_seqlens.cpu()
    return torch.tensor(cu_seqlens, dtype=torch.int64)


# Functions of an operator are compiled from text made from its row: straight lines without a loop over the table. A call on one token
# costs more in Python than in the kernel, and this halves it.

def compiled(name, lines, **scope):
    """The function of a name that the lines define."""
    scope.update(float32=torch.float32, float64=torch.float64)
    exec(compile("\n".join(lines), f"<gdn {name}>", "exec"), scope)
    return scope[name]


def _sizes(row):
    """Lines that bind the sizes from the required inputs' shapes, where a wrong rank raises ValueError; and the names of the sizes of those
    inputs, by input."""
    lines, known, names = [], set(), {}
    for t in inputs(row):
        letters = t["dims"].split()
        new = [d for d in letters if d in _ops.LETTERS and d not in known]
        if t["role"] in ("in", "inout") and new:
            names[t["name"]] = [d if d in new else f"{t['name']}_{i}" for i, d in enumerate(letters)]
            lines.append(f"    {', '.join(names[t['name']])} = {t['name']}.shape")
            known.update(new)
        if "N+1" in letters:
            lines.append(f"    N = B if {t['name']} is None else {t['name']}.shape[0] - 1")
    lines += [f"    {name} = {expression}" for name, expression in row["derived"]]
    lines.append(f"    acc = float64 if {row['tensors'][0]['name']}.dtype is float64 else float32")
    return lines, names


def _shape(t):
    """The sizes of a new output, comma-separated. An optional dimension, and so the whole shape, is the input's."""
    letters = t["dims"].split()
    if letters[-1].startswith("["):
        return f"*{t['with']}.shape"
    return ", ".join(letters)


def _allocation(row, t, recycle=False):
    """An expression that allocates an output; with recycle a large one in memory that is used again."""
    source, dtype = (t["like"], "") if t["rule"] == "same" else (row["tensors"][0]["name"], ", dtype=acc")
    letters = t["dims"].split()

    def new(shape):
        made = f"{source}.new_empty({shape}{dtype})"
        if not recycle or "*" in shape:
            return made
        return f"({made} if {' * '.join(letters)} < {memory.ELEMENTS} else recycled(({shape},), {'acc' if dtype else source + '.dtype'}))"

    if not t["state"]:
        return new(_shape(t))
    return f"({new(', '.join(letters[:-2] + letters[:-3:-1]))} if state_v_first else {new(_shape(t))})"


def _nothing(row):
    """An expression for an output that is not made."""
    return f"{row['tensors'][0]['name']}.new_empty(0)"


def _allocator(row):
    """allocate(all arguments) -> outputs, for real tensors, fake ones and symbolic sizes."""
    lines = [f"def allocate({', '.join(parameters(row))}):"] + _sizes(row)[0]
    made = []
    for t in outputs(row):
        text = _allocation(row, t)
        if t["role"] == "opt_out":
            text = f"{text} if {t['want'] or t['with'] + ' is not None'} else {_nothing(row)}"
        made.append(text)
    lines.append(f"    return {', '.join(made)},")
    return compiled("allocate", lines)


_DTYPES = {getattr(torch, name): word for name, word in _lib.DTYPES.items() if hasattr(torch, name)}
_DEVICES = {"cpu": _lib.CPU, "cuda": 2, "npu": _lib.NPU}


def view(t):
    """A tensor as _lib takes it."""
    kind = _DEVICES.get(t.device.type)
    if kind is None:
        raise NotImplementedError(f"gdn: no backend for tensors on {t.device}")
    dtype = _DTYPES.get(t.dtype)
    if dtype is None:
        raise ValueError(f"gdn: no operator takes tensors of {t.dtype}")
    if kind == _lib.NPU:
        npu.check_format(t)
    return t.data_ptr(), _lib.device_word(kind, t.device.index or 0), dtype, t.shape, t.stride()


def _implementation(op):
    """The operator for any arguments, right or wrong."""
    row, allocate = op.row, _allocator(op.row)
    names = parameters(row)
    n_inputs = len(inputs(row))
    numbers = slice(n_inputs, n_inputs + len(row["numbers"]))
    # The argument that an output depends on, by position.
    needs = [None if t["role"] == "out" else names.index(t["want"] or t["with"]) for t in outputs(row)]

    def run(*arguments):
        views = [None if t is None else view(t) for t in arguments[:n_inputs]]
        try:
            results = allocate(*arguments)
        except (ValueError, IndexError, RuntimeError):
            # Shapes from which no sizes follow: the library says what is wrong with them.
            op.supports(views + _no_outputs(row, views), arguments[numbers])
            raise
        views += [view(t) if i is None or not (arguments[i] is None or arguments[i] is False) else None for t, i in zip(results, needs)]
        if arguments[0].device.type == "npu":
            npu.call(op, views, arguments[numbers], arguments[0].device.index)
        else:
            op(views, arguments[numbers])
        return results if len(results) > 1 else results[0]

    return run


def _no_outputs(row, views):
    """Views of the required outputs with all sizes 0."""
    position = {t["name"]: i for i, t in enumerate(row["tensors"])}
    empty = []
    for t in outputs(row):
        zeros = (0,) * len(t["dims"].split())
        empty.append((0, views[0][1], views[position[t["like"]]][2], zeros, zeros) if t["role"] == "out" else None)
    return empty


class Variants(dict):
    """The operator for tensors in CPU memory: a function for each set of given tensors, compiled when it is first needed.

    The text for one such set, shortened:

        def run(q, k, ..., beta, ..., scale, ..., output_final_state, save):
            try:
                B, T, H, K = q.shape
                ...
                o = v.new_empty(B, T, HV, V)
                k_0, k_1, k_2, k_3 = k.shape
                ...
                frame = frames.pop() if frames else new_frame()
                at, memory, a0, b0, a1, ... = frame
                pack(memory, head, scale, ..., q.data_ptr(), 1, dtype4[q.dtype], a0, b0, 0, B, T, H, K, *q.stride(), ...)
            except (ValueError, KeyError, IndexError, RuntimeError):
                return general(q, ...)
            status = function(at)
            frames.append(frame)
            if status:
                check(status)
            return o, ...

    A wrong rank or dtype lands in the general implementation, where the library words the error.
    """

    def __init__(self, op):
        self.op, self.general = op, _implementation(op)
        optional = [t for t in inputs(op.row) if t["role"] == "opt_in"]
        self.names = [t["name"] for t in optional] + wants(op.row)
        # The text of a call: variants[g is not None, ..., save](q, k, ...). A tensor with an optional dimension counts by its rank, for the
        # words to pack depend on it.
        key = [f"{t['name']} is not None" + (f" and {t['name']}.dim()" if "[" in t["dims"] else "") for t in optional] + wants(op.row)
        self.call = f"variants[{', '.join(key) + ',' if key else '()'}]({', '.join(parameters(op.row))})"

    def __missing__(self, key):
        self[key] = _variant(self.op, self.general, dict(zip(self.names, key)))
        return self[key]


def _variant(op, general, chosen):
    row = op.row
    names = ", ".join(parameters(row))
    body, sizes = _sizes(row)
    body = [line.strip() for line in body]
    given, ranks, shapes = [], [], []
    for t in row["tensors"]:
        letters = t["dims"].split()
        rank, new = len(letters), t["role"] in ("out", "opt_out")
        present = t["role"] in ("in", "inout", "out") or chosen.get(t["name"] if t["role"] == "opt_in" else t["want"] or t["with"])
        if present and letters[-1].startswith("["):
            rank = chosen[t["with"] or t["name"]]
            if rank not in (len(letters) - 1, len(letters)):
                return general
        ranks.append(rank if present else None)
        if new:
            body.append(f"{t['name']} = {_allocation(row, t, recycle=True) if present else _nothing(row)}")
        if not present:
            continue
        given.append(t)
        if new and not t["state"] and "[" not in t["dims"]:
            shapes.append(letters)
        elif t["name"] in sizes:
            shapes.append(sizes[t["name"]])
        else:
            shapes.append([f"{t['name']}_{i}" for i in range(rank)])
            body.append(f"{', '.join(shapes[-1])}, = {t['name']}.shape")
    words = [n["name"] for n in row["numbers"]]
    for i, (t, shape) in enumerate(zip(given, shapes)):
        name, new = t["name"], t["role"] in ("out", "opt_out")
        words += [f"{name}.data_ptr()", str(_lib.CPU), f"dtype{len(shape)}[{name}.dtype]", f"a{i}", "0" if new else f"b{i}", "0", *shape]
        words += [] if new else [f"*{name}.stride()"]
    body.append("frame = frames.pop() if frames else new_frame()")
    body.append(f"at, memory, {', '.join(f'a{i}, b{i}' for i in range(len(given)))} = frame")
    body.append(f"pack(memory, head, {', '.join(words)})")
    lines = [f"def run({names}):", "    try:"] + ["        " + line for line in body]
    lines += ["    except (ValueError, KeyError, IndexError, RuntimeError):", f"        return general({names})"]
    lines += ["    status = function(at)", "    frames.append(frame)", "    if status:", "        check(status)"]
    made = ", ".join(t["name"] for t in outputs(row))
    lines.append(f"    return {made}")

    layout = _lib.Layout(row, ranks, compact_outputs=True)
    scope = {f"dtype{r}": {dtype: word | r for dtype, word in _DTYPES.items()} for r in range(1, 6)}
    return compiled("run", lines, frames=[], new_frame=layout.frame, pack=struct.Struct(layout.form).pack_into, head=layout.head,
                    general=general, function=op.function, check=_lib.check, recycled=memory.recycled, **scope)


def _fake(row):
    allocate = _allocator(row)

    def fake(*arguments):
        try:
            made = allocate(*arguments)
            return made if len(made) > 1 else made[0]
        except (ValueError, IndexError) as error:
            shapes = ", ".join(f"{t['name']} {list(a.shape)} for [{t['dims']}]" for t, a in zip(inputs(row), arguments) if a is not None)
            raise ValueError(f"{NAMESPACE}::{row['name']}: shapes do not fit: {shapes}") from error

    return fake


define()
