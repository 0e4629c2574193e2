"""A wheel for one platform and any Python 3: libgdn.so is called through ctypes, so nothing in the wheel depends on the interpreter."""

import os
import shutil
import sysconfig

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARY = os.path.join("build", "out", "libgdn.so")


class WithLibrary(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # an editable install finds the library in build/out
            if not os.path.exists(LIBRARY):
                raise SystemExit(f"{LIBRARY} is missing: run `make lib` first")
            target = os.path.join(self.build_lib, "gdn", "lib")
            os.makedirs(target, exist_ok=True)
            shutil.copy2(LIBRARY, target)


class WithPlatform(Distribution):
    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(
    distclass=WithPlatform,
    cmdclass={"build_py": WithLibrary, "bdist_wheel": PlatformWheel},
    # setuptools would fill build/, which is the project's own.
    options={"build": {"build_base": os.path.join("build", "out", "py")}},
)
