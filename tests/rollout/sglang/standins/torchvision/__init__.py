"""In torchvision's place, which SGLang imports for images that nobody sends: every name and submodule is a mock.

Also answers for the submodules of `sgl_kernel`, the package beside this one.
"""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

__version__ = "0.0"


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torchvision.", "sgl_kernel.")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module): ...


sys.meta_path.append(_Mocks())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
