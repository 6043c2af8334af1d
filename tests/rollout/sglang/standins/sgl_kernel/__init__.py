"""In the place of SGLang's kernels, which are built for CUDA alone: they can be imported, and raise when called."""

import torchvision  # noqa: F401  # answers for the submodules

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    return missing
