"""The fake CANN libraries through ctypes, without torch_npu: what a test of the fake itself needs. CPU tensors stand for device tensors;
they are copied there and back around each operator."""

import ctypes as C
import os
import pathlib
import re

import torch

CANN = pathlib.Path(os.environ.get("GDN_FAKE_CANN", pathlib.Path(__file__).parents[2] / "build/out/cann"))
TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4, torch.int16: 6, torch.int64: 9, torch.float64: 11, torch.bool: 12,
         torch.bfloat16: 27}
ND = 2
H2D, D2H = 1, 2

acl = C.CDLL(str(CANN / "lib64/libascendcl.so"), C.RTLD_GLOBAL)
nn = C.CDLL(str(CANN / "lib64/libnnopbase.so"), C.RTLD_GLOBAL)
opapi = C.CDLL(str(CANN / "lib64/libopapi.so"), C.RTLD_GLOBAL)
VENDOR = CANN / "opp/vendors/fla_npu_transformer/op_api"
fla = C.CDLL(str(VENDOR / "lib/libcust_opapi.so"))
acl.aclGetRecentErrMsg.restype = acl.gdnfake_violation.restype = C.c_char_p
acl.gdnfake_ns.restype = acl.gdnfake_live.restype = acl.gdnfake_violations.restype = acl.gdnfake_calls.restype = acl.gdnfake_pending_failures.restype = C.c_int64
acl.gdnfake_fail.argtypes = [C.c_char_p, C.c_int64, C.c_int, C.c_char_p]
acl.gdnfake_violation.argtypes = [C.c_int64]
for name in "aclCreateTensor", "aclCreateScalar", "aclCreateIntArray", "aclCreateTensorList":
    getattr(nn, name).restype = C.c_void_p

size_t, pointer = C.c_size_t, C.c_void_p


class Error(Exception):
    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


def check(status):
    if status:
        raise Error(status, acl.aclGetRecentErrMsg().decode())


def start(device=0):
    status = acl.aclInit(None)
    if status == 100002:  # initialised already: its text is not for others
        acl.aclGetRecentErrMsg()
    else:
        check(status)
    check(acl.aclrtSetDevice(device))


def malloc(n):
    p = pointer()
    check(acl.aclrtMalloc(C.byref(p), size_t(n), 0))
    return p


def free(p):
    check(acl.aclrtFree(p))


def new_stream():
    s = pointer()
    check(acl.aclrtCreateStream(C.byref(s)))
    return s


def new_event():
    e = pointer()
    check(acl.aclrtCreateEventExWithFlag(C.byref(e), 0))
    return e


def violations():
    return [acl.gdnfake_violation(i).decode() for i in range(acl.gdnfake_violations())]


class Memory:
    """The storage of a CPU tensor on the device."""

    def __init__(self, t):
        self.host = t
        self.bytes = t.untyped_storage().nbytes()
        self.p = malloc(max(self.bytes, 1))
        self.copy(H2D)

    def copy(self, kind):
        host = pointer(self.host.untyped_storage().data_ptr())
        if self.bytes:
            to, source = (self.p, host) if kind == H2D else (host, self.p)
            check(acl.aclrtMemcpy(to, size_t(self.bytes), source, size_t(self.bytes), kind))


def ints(values):
    return (C.c_int64 * len(values))(*values)


def descriptor(t, p, storage=None, form=ND):
    """A descriptor of a tensor whose storage is at p."""
    storage = storage or (list(t.shape) if t.is_contiguous() and not t.storage_offset() else [t.untyped_storage().nbytes() // t.element_size()])
    made = nn.aclCreateTensor(ints(t.shape), C.c_uint64(t.dim()), TYPES[t.dtype], ints(t.stride()), C.c_int64(t.storage_offset()), form, ints(storage),
                              C.c_uint64(len(storage)), p)
    if not made:
        raise Error(161002, acl.aclGetRecentErrMsg().decode())
    return pointer(made)


def declared():
    """The argument letters of each fla-npu operator, from the headers that come with the library."""
    letters = {"aclTensor *": "T", "aclIntArray *": "L", "char *": "s", "double ": "d", "float ": "f", "bool ": "b", "int64_t ": "i"}
    found = {}
    for header in (VENDOR / "include/aclnnop").glob("*.h"):
        for name, args in re.findall(r"aclnn(\w+)GetWorkspaceSize\(([^)]*)\)", header.read_text()):
            kinds = [re.sub(r"\bconst\b", "", a).strip() for a in args.split(",")[:-2]]
            found[name] = "".join(next(v for k, v in letters.items() if a.startswith(k)) for a in kinds)
    return found


def call(library, op, letters, args, stream=None, outputs=(), before_launch=None):
    """One operator on copies of its tensors: args in the order of the header, None for NULL. outputs: indices of the arguments that are
    copied back afterwards. Everything is released, whatever happens."""
    assert len(letters) == len(args), (op, letters, len(args))
    if library is fla:
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = str(VENDOR.parent)  # by which CANN finds the kernels
    made, memory, values = [], {}, []
    kinds = {"d": C.c_double, "f": C.c_float, "b": C.c_bool, "i": C.c_int64, "e": C.c_int8, "I": C.c_int}
    workspace = None
    try:
        for letter, a in zip(letters, args):
            if letter in kinds:
                values.append(kinds[letter](a))
            elif letter == "s":
                values.append(None if a is None else C.c_char_p(a.encode()))
            elif a is None:
                values.append(None)
            elif letter == "T":
                key = a.untyped_storage().data_ptr(), a.untyped_storage().nbytes()
                if key not in memory:
                    memory[key] = Memory(a)
                made.append(("Tensor", descriptor(a, memory[key].p)))
                values.append(made[-1][1])
            elif letter == "L":
                made.append(("IntArray", pointer(nn.aclCreateIntArray(ints(a), C.c_uint64(len(a))))))
                values.append(made[-1][1])
            elif letter == "c":
                made.append(("Scalar", pointer(nn.aclCreateScalar(C.byref(C.c_double(a)), TYPES[torch.float64]))))
                values.append(made[-1][1])
        n, executor = C.c_uint64(), pointer()
        check(getattr(library, f"aclnn{op}GetWorkspaceSize")(*values, C.byref(n), C.byref(executor)))
        if n.value:
            workspace = malloc(n.value)
        if before_launch:
            before_launch()
        check(getattr(library, f"aclnn{op}")(workspace, n, executor, stream))
        check(acl.aclrtSynchronizeStream(stream))
        for m in memory.values():
            m.copy(D2H)
    finally:
        for kind, p in made:
            check(getattr(nn, f"aclDestroy{kind}")(p))
        for m in memory.values():
            free(m.p)
        if workspace:
            free(workspace)
