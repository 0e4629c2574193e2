"""`python -m gdn.env [--json]`: what this installation consists of, for bug reports."""

import argparse
import importlib.metadata
import json
import os
import platform

from . import _lib, _ops
from .npu import TESTED


# What decides which CANN and which operators are found.
_ASCEND = ("GDN_ASCEND", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "FLA_NPU_OPP_PATH", "TASK_QUEUE_ENABLE")


def collect():
    """The facts as a dict of plain values; "error" says why the library could not be loaded."""
    facts = {
        "gdn": _ops.VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "libc": _lib.libc() or "not glibc",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    for package in ("torch", "torch-npu", "numpy", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    facts["npu tested"] = " ".join(TESTED)
    facts["variables"] = {name: os.environ[name] for name in ("GDN_LIBRARY", "GDN_ISA", "GDN_NUM_THREADS", "OMP_NUM_THREADS", *_ASCEND)
                          if name in os.environ}
    try:
        facts["library"] = _lib.path()
        library = _lib.library()
        facts["version"] = library.gdn_version().decode()
        facts["isa"] = library.gdn_isa().decode()
        facts["threads"] = _lib.get_num_threads()
        facts["build"] = library.gdn_build_info().decode()
        facts["ascend"] = library.gdn_ascend_info().decode()
    except OSError as error:
        facts["error"] = str(error)
    return facts


def main():
    parser = argparse.ArgumentParser(prog="python -m gdn.env", description="What this installation of gdn consists of.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    facts = collect()
    if parser.parse_args().json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = " ".join(f"{n}={v}" for n, v in value.items()) or "none"
        text = "not installed" if value is None else str(value)
        print(f"{name:12} " + text.replace("\n", "\n" + 13 * " "))


if __name__ == "__main__":
    main()
