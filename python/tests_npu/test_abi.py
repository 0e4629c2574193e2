"""Calling conventions: what the headers inside the installed torch-npu package declare, against what the fake defines and what ascendc/ calls.
A program made at test time includes those headers and prints one letter an argument; nothing of them is kept."""

import pathlib
import re
import subprocess

import pytest
import torch_npu

ROOT = pathlib.Path(__file__).parents[2]
FAKE = ROOT / "ascendc/fake"
INCLUDE = pathlib.Path(torch_npu.__file__).parent / "include"

# p pointer, 4 and 8 integers of that many bytes (1 for bool and char), f float, d double, v nothing, S a struct by value
PRINTER = r"""
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "third_party/hccl/inc/hccl/hccl.h"
struct aclTensor; struct aclScalar; struct aclIntArray; struct aclTensorList; struct aclOpExecutor;
%s
template <class T> constexpr char letter() {
	using U = std::remove_cv_t<T>;
	if constexpr (std::is_void_v<U>) return 'v';
	else if constexpr (std::is_pointer_v<U>) return 'p';
	else if constexpr (std::is_same_v<U, float>) return 'f';
	else if constexpr (std::is_same_v<U, double>) return 'd';
	else if constexpr (std::is_integral_v<U> || std::is_enum_v<U>) return '0' + sizeof(U);
	else return 'S';
}
template <class R, class... A> void show(const char *name, R (*)(A...)) {
	const char letters[] = {letter<R>(), ' ', letter<A>()..., 0};
	std::printf("%%s %%s\n", name, letters);
}
template <class R, class... A> void show(const char *name, R (*)(A..., ...)) { // a variadic one by its named arguments
	show(name, (R (*)(A...)) nullptr);
}
int main() {
%s
}
"""


def declared(names, scratch):
    """{name: (result, arguments)} of those functions that the package's headers declare."""
    acl = INCLUDE / "third_party/acl/inc"
    text = "".join(h.read_text(errors="replace") for h in [*(acl / "acl").glob("*.h"), INCLUDE / "third_party/hccl/inc/hccl/hccl.h"])
    shows = [f'\tshow("{n}", (decltype(&{n}))nullptr);' for n in sorted(names) if re.search(rf"\b{n}\s*\(", text)]
    # aclnn's descriptors are looked up by dlsym, through pointer types.
    made = {}
    for h in (INCLUDE / "third_party/op-plugin/op_plugin/utils").glob("op_api_common*.h"):
        for m in re.finditer(r"typedef\s+[\w\s*]+\(\*_(acl\w+)\)\s*\([^;]*\);", h.read_text(errors="replace")):
            if m[1] in names:
                made[m[1]] = m[0]
    shows += [f'\tshow("{n}", (_{n})nullptr);' for n in made]
    source, program = scratch / "abi.cpp", scratch / "abi"
    source.write_text(PRINTER % ("\n".join(made.values()), "\n".join(shows)))
    done = subprocess.run(["g++", "-std=c++17", "-w", f"-I{acl}", f"-I{INCLUDE}", str(source), "-o", str(program)], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    found = {}
    for line in subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines():
        name, result, *arguments = line.split(" ")
        found[name] = result, "".join(arguments)
    return found


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    return declared(defined().keys() | set(bound().values()), tmp_path_factory.mktemp("abi"))


def letter(argument):
    for pattern, as_ in (r"\*|\[|\b[TL] ", "p"), (r"\b(u?int64_t|size_t)\b", "8"), (r"\b(u?int32_t|int|unsigned)\b", "4"), (r"\b(u?int8_t|_Bool)\b", "1"), (r"\bfloat\b", "f"), (r"\bdouble\b", "d"):
        if re.search(pattern, argument):
            return as_
    raise ValueError(argument)


def defined():
    """{name: (result, arguments)} of the fake's own definitions, but for those that only have to exist."""
    absent = set(re.findall(r"^ABSENT\((\w+)\)", (FAKE / "client.c").read_text(), re.M))
    found = {}
    for file in FAKE.glob("*.c"):
        text = subprocess.run(["gcc", "-E", "-P", str(file)], capture_output=True, text=True, check=True).stdout
        text = re.sub(r"\s+", " ", re.sub(r'__attribute__\(\(visibility\("default"\)\)\)', "@", text))
        text += " ".join(f"@ {m} {{" for m in re.findall(r"(const char \*aclGetRecentErrMsg\(void\)) \{", text))
        for result, name, arguments in re.findall(r"@ ([\w ]+ \*?)\s?(\w+)\(([^)]*)\) \{", text):
            if name in absent or not re.match(r"acl(?!nn)|Hccl", name):
                continue
            arguments = [a for a in arguments.split(",") if a.strip() not in ("void", "...")]
            found[name] = "p" if "*" in result else "v" if "void" in result else letter(result), "".join(map(letter, arguments))
    return found


def test_the_fake_defines_what_the_headers_declare(headers):
    ours = defined()
    both = ours.keys() & headers.keys()
    assert len(both) > 70, sorted(ours.keys() - headers.keys())
    assert {n: ours[n] for n in both} == {n: headers[n] for n in both}


GO = {f.name: f.read_text() for f in (ROOT / "ascendc").glob("*.go") if not f.name.endswith("_test.go")}


def bound():
    """{field: name} of the functions that ascendc/ looks up."""
    return dict(re.findall(r'\{&a\.(\w+), "(acl\w+)"', "".join(GO.values())))


def top_level_commas(text):
    depth = count = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            break
        count += c == "," and depth == 0
    return count


def test_ascendc_calls_what_the_headers_declare(headers):
    """Through SyscallN: integers and pointers only, as many as declared."""
    assert len(bound()) > 20
    called = set()
    for field, name in bound().items():
        result, arguments = headers[name] if name in headers else defined()[name]
        assert not set(arguments) & set("fdS"), (name, arguments)
        for text in GO.values():
            for m in re.finditer(r"\.call(?:Pointer)?\([ra]\.%s\b" % field, text):
                n = top_level_commas(text[m.end():])
                assert n == len(arguments), f"{name} takes {len(arguments)} arguments, ascendc passes {n}: {text[m.start():m.start() + 120]}"
                called.add(name)
    assert len(called) > 10, called
