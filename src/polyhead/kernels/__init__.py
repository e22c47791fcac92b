"""How attention is computed: a file per kernel; kernels do not import each other.

``KERNELS`` is in the order of preference: the dispatcher takes the first that can do all of what
is asked. ``tiled`` can do everything: what comes after it runs where it is named.
"""

from typing import Any

from polyhead.kernels.base import Kernel, Refusal, SwitchedOffError
from polyhead.kernels.flex import FlexKernel
from polyhead.kernels.native import NativeKernel
from polyhead.kernels.reference import ReferenceKernel
from polyhead.kernels.sdpa import SdpaKernel
from polyhead.kernels.tiled import TiledKernel
from polyhead.kernels.triton import TritonKernel

KERNELS: dict[str, Kernel[Any]] = {
    kernel.name: kernel
    for kernel in (
        NativeKernel(),
        SdpaKernel(),
        TritonKernel(),
        FlexKernel(),
        TiledKernel(),
        ReferenceKernel(),
    )
}

__all__ = ["KERNELS", "Kernel", "Refusal", "SwitchedOffError"]
