"""The examples of README.md run as they are written there."""

import os
import re
import shlex
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def readme():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return f.read()


def block(text, language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]


def python(readme, number, tmp_path):
    """The lines that a Python example prints."""
    script = tmp_path / "example.py"
    script.write_text(block(readme, "python", number))
    path = os.pathsep.join(filter(None, [os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_python(readme, tmp_path):
    first, second = python(readme, 0, tmp_path)
    assert first.startswith("torch.Size([1, 512, 4, 64]) tensor(") and "nan" not in first
    assert second == "torch.Size([1, 1, 4, 64]) torch.Size([1, 4, 64, 64])"


def test_frames(readme, tmp_path):
    assert python(readme, 1, tmp_path) == ["torch.Size([1, 200, 2, 16]) torch.Size([2, 5, 16, 16])"]


def test_c(readme, tmp_path):
    with open(os.path.join(ROOT, "examples", "c", "hello.c"), encoding="utf-8") as f:
        assert block(readme, "c") == f.read()
    command = re.search(r"^    (gcc .*hello\.c.*?) && ", readme, re.MULTILINE).group(1)
    program = tmp_path / "hello"
    words = shlex.split(command.replace("$PWD", ROOT).replace("-o build/out/hello", f"-o {shlex.quote(str(program))}"))
    subprocess.run([*words, "-Wall", "-Wextra", "-Werror"], cwd=ROOT, check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "the last token reads 511, it wrote 511"


def test_links(readme):
    for target in re.findall(r"\]\(((?!http)[^)]*)\)", readme):
        assert os.path.exists(os.path.join(ROOT, target)), f"README.md links to {target}, which does not exist"
