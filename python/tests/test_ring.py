"""examples/c/ring.c: an MPI program over the summary and merge entry points of the C library."""

import os
import shutil
import subprocess

import pytest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
LIBRARY = os.path.join(ROOT, "build", "out")

pytestmark = pytest.mark.skipif(not (shutil.which("mpicc") and shutil.which("mpirun")), reason="no MPI (Debian: openmpi-bin libopenmpi-dev)")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made = str(tmp_path_factory.mktemp("ring") / "ring")
    subprocess.run(["mpicc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", f"{ROOT}/examples/c/ring.c", f"-L{LIBRARY}",
                    "-lgdn", f"-Wl,-rpath,{os.path.abspath(LIBRARY)}", "-lm", "-o", made], check=True, timeout=120)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ring(program, ranks):
    """It ends with 1 where a result differs from that of one rank by more than 1e-5 of its largest value."""
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "GDN_NUM_THREADS": "1"}
    done = subprocess.run(["mpirun", "--oversubscribe", "-n", str(ranks), program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"1000 tokens on {ranks} ranks" in done.stdout and done.stdout.count("differs by") == 6
