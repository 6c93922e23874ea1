"""On the path of a process: it finds none of the packages that ABSENT_PACKAGES names.

They stand for a machine that has torch and little else. That they exist is not denied, as torch
asks for some at its own import, but they cannot be imported.
"""

import os
import sys
from importlib.machinery import ModuleSpec


class AbsentPackages:
    names = frozenset(os.environ.get("ABSENT_PACKAGES", "").split())

    def find_spec(self, name, _path=None, _target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, _module):
        raise AssertionError("it is never created")


sys.meta_path.insert(0, AbsentPackages())
