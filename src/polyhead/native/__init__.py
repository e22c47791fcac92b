"""The C++ code in csrc/: GEMV, GEMM, attention and decoding on a CPU.

``code()`` is the compiled code for this processor, chosen at first use among those compiled: the
first whose instruction set is here and whose results agree with float64, and of several for a dtype
the fastest, which is measured (``fastest``). One that disagrees is switched off with a warning. If
there was no compiler at installation, torch's operations are used instead.
"""

from polyhead.native.arguments import Heads, LayerForm, LayerWeights, NormWeight, TileSums
from polyhead.native.code import Code
from polyhead.native.selection import (
    all_codes,
    choices,
    code,
    code_for,
    code_with_autograd,
    is_plain,
    left_out,
    switched_off,
    unavailable,
    using,
)

__all__ = [
    "Code", "Heads", "LayerForm", "LayerWeights", "NormWeight", "TileSums", "all_codes", "choices",
    "code", "code_for", "code_with_autograd", "is_plain", "left_out", "switched_off", "unavailable",
    "using",
]  # fmt: skip
