"""Weights of Hugging Face directories that are codes of 4 or 8 bits, their scales beside them.

DeepSeek-V3 (2024), §3.3.2: float8 e4m3, ``weight_scale_inv`` for blocks of 128 × 128.
compressed-tensors has the same, whole numbers (``weight``) or eight of 4 bits in 32
(``weight_packed``), with ``weight_scale``. GPTQ and AWQ have eight codes in 32 bits of ``qweight``,
features of the input first: those are put in the order of rows here, as many bytes as before. All
others stay where they are. torchao has such codes in tensors of its own (``_weight_qdata``).

Activations are not quantized, which only faster kernels would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.errors import CheckpointError, shortened
from polyhead.families.common.quantization import Scheme
from polyhead.native.arguments import Scales
from polyhead.quantization import scaled, unpack
from polyhead.quantization.blocks import BlockType

if TYPE_CHECKING:
    from polyhead.checkpoints.formats.hqq_codes import Numbers
    from polyhead.checkpoints.formats.table_codes import TableCoded

_PART = 1 << 20  # numbers that are computed at a time
_LARGEST = 1e30
_SCALES = torch.float32, torch.bfloat16, torch.float16
_WHOLE = torch.int32, torch.int64
_OF_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
"""Which of the eight codes of a word belongs to each of its columns."""
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale")


@dataclass(frozen=True)
class Coded:
    """A weight in codes.

    Attributes:
        blocks: ``[out, bytes of a row]`` uint8.
        kind: Block type of the codes.
        scales: Those of its numbers.
        order: The group of every feature, where groups do not lie next to each other.
    """

    blocks: Tensor
    kind: BlockType
    scales: Scales
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape."""
        return self.blocks.shape[0], self.blocks.shape[1] * self.kind.numbers // self.kind.octets

    @property
    def dtype(self) -> torch.dtype:
        """That the numbers have where nobody says: of 8-bit floats DeepSeek's, else the scales'."""
        return torch.bfloat16 if self.kind == scaled.F8_E4M3 else self.scales.scales.dtype

    @property
    def in_runs(self) -> bool:
        """Whether numbers share scales in runs of 32, as they must to stay in blocks."""
        features, numbers = self.shape[1], self.scales.numbers
        whole = numbers >= features or numbers % self.kind.numbers == 0
        return self.order is None and whole and features % self.kind.numbers == 0

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of them, rounded from float32."""
        if self.in_runs:
            return unpack(self.blocks, self.kind, dtype, self.scales)
        made = torch.empty(self.shape, dtype=dtype, device="cpu")
        each = max(1, _PART // self.shape[1])
        for first in range(0, len(made), each):
            rows = torch.arange(first, min(first + each, len(made)), device="cpu")
            by = scaled.of_rows(self.scales, rows)
            made[rows] = scaled.numbers_of(self.blocks[rows], self.kind, by, self.order).to(dtype)
        return made


class Codes:
    """The weights of a directory that are codes.

    Args:
        tensors: By the file's names. What belongs to codes is taken out.
        scheme: How they became codes.
        where: The directory, for messages.
    """

    def __init__(self, tensors: dict[str, Tensor], scheme: Scheme, where: object) -> None:
        self._tensors, self._scheme, self._where = tensors, scheme, where
        for name in [name for name in tensors if name.endswith(_OF_ACTIVATIONS)]:
            del tensors[name]

    def __iter__(self) -> Iterator[tuple[str, Coded | TableCoded | Numbers]]:
        """Names of weights, as if they were numbers, with the codes of each.

        Raises:
            CheckpointError: A scale is missing, of another shape than it must have, or no scale.
        """
        from polyhead.checkpoints.formats import table_codes as tables
        from polyhead.checkpoints.formats.hqq_codes import read_hqq

        of_tables = {
            "mxfp4": ("_blocks", torch.uint8, tables.read_mxfp4),
            "nvfp4-pack-quantized": (".weight_packed", torch.uint8, tables.read_nvfp4),
            "modelopt": (".weight", torch.uint8, tables.read_modelopt),
            "bitsandbytes-4": (".weight", torch.uint8, tables.read_bitsandbytes),
            "bitsandbytes-8": (".weight", torch.int8, tables.read_bitsandbytes),
            "hqq": (".W_q", torch.uint8, read_hqq),
        }
        layout = self._scheme.layout
        end, dtype, read = of_tables.get(layout) or _LAYOUTS[layout]
        stacked = layout == "mxfp4"
        for name in [*self._tensors]:
            if name.endswith(end) and self._tensors[name].dtype == dtype:
                codes = self._tensors.pop(name)
                if (codes.ndim != 2 and not stacked) or not codes.numel():
                    raise self.wrong(name, f"has codes and shape {[*codes.shape]}: no matrix")
                stem = name.removesuffix(end)
                yield stem if stacked else f"{stem}.weight", read(self, stem, codes)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self._scheme.bits

    def has(self, name: str) -> bool:
        """Whether the directory has a tensor that is not taken yet."""
        return name in self._tensors

    def pop(self, name: str) -> None:
        """Takes out a tensor that says nothing, if it is there."""
        self._tensors.pop(name, None)

    def take(self, name: str, bits: int) -> Tensor:
        """Takes out a tensor that belongs to codes.

        Raises:
            CheckpointError: It is missing.
        """
        found = self._tensors.pop(name, None)
        if found is None:
            raise self.wrong(name, f"is missing: the weight has {bits} bits")
        return found

    def wrong(self, name: str, words: str) -> CheckpointError:
        """The error about a tensor."""
        return CheckpointError(f"{self._where}: tensor {shortened(name)} {words}")

    def fit(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], words: str, *dtypes: torch.dtype
    ) -> Tensor:
        """A tensor, if it has the shape and one of the dtypes.

        Raises:
            CheckpointError: It has not.
        """
        if tuple(tensor.shape) != shape:
            raise self.wrong(name, f"must have shape {[*shape]}, {words}: got {[*tensor.shape]}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.wrong(name, f"must be {wanted}: got {tensor.dtype}")
        return tensor

    def finite(self, name: str, scales: Tensor) -> None:
        """Raises an error unless all scales are finite, and none is beyond all sense."""
        wrong = scales[~(scales.abs() <= _LARGEST)]
        if len(wrong):
            raise self.wrong(name, f"must hold finite scales: got {float(wrong[0])}")

    def _scales(
        self, name: str, scales: Tensor, zeros: Tensor | None, shape: tuple[int, int]
    ) -> Scales:
        """Scales for codes of ``shape``, checked."""
        rows = self._scheme.rows or shape[0]
        numbers = self._scheme.numbers or shape[1]
        if self._scheme.rows is None:
            scales = scales.reshape(-1, 1)
        counts = -(-shape[0] // rows), -(-shape[1] // numbers)
        words = f"a number for each block of {rows} × {numbers}"
        self.fit(name, scales, counts, words, *_SCALES)
        self.finite(name, scales)
        return Scales(scales.contiguous(), zeros, numbers, rows)

    def _float8(self, stem: str, codes: Tensor, name: str) -> Coded:
        blocks = codes.contiguous().view(torch.uint8)
        scales = self._scales(name, self.take(name, 8), None, (codes.shape[0], codes.shape[1]))
        return Coded(blocks, scaled.F8_E4M3, scales)

    def _deepseek(self, stem: str, codes: Tensor) -> Coded:
        return self._float8(stem, codes, f"{stem}.weight_scale_inv")

    def _float_quantized(self, stem: str, codes: Tensor, part: str = "weight") -> Coded:
        return self._float8(stem, codes, f"{stem}.{part}_scale")

    def _int_quantized(self, stem: str, codes: Tensor, part: str = "weight") -> Coded:
        name, shape = f"{stem}.{part}_scale", (codes.shape[0], codes.shape[1])
        scales = self._scales(name, self.take(name, 8), None, shape)
        zeros = self._tensors.pop(f"{stem}.{part}_zero_point", None)
        if zeros is not None:
            zeros = zeros.reshape(-1, 1) if self._scheme.rows is None else zeros
            size = scales.scales.shape[0], scales.scales.shape[1]
            name = f"{stem}.{part}_zero_point"
            self.fit(name, zeros, size, "that of the scales", torch.int8)
            zeros = zeros.contiguous().view(torch.uint8) if zeros.any() else None
        blocks = codes.contiguous().view(torch.uint8)
        return Coded(blocks, scaled.I8, scales._replace(zeros=zeros))

    def _pack_quantized(self, stem: str, words: Tensor) -> Coded:
        bits, per = self._scheme.bits, 32 // self._scheme.bits
        kind = scaled.U4 if bits == 4 else scaled.U8
        name, stated = f"{stem}.weight_scale", f"{stem}.weight_shape"
        sizes = self.fit(stated, self.take(stated, bits), (2,), "a matrix's", *_WHOLE)
        shape = [int(size) for size in sizes]
        if (words.shape[0], words.shape[1]) != (shape[0], -(-shape[1] // per)):
            got = f"got {shape} for codes of shape {[*words.shape]}"
            raise self.wrong(stated, f"must be the shape of the weight: {got}")
        scales = self._scales(name, self.take(name, bits), None, (shape[0], shape[1]))
        size = scales.scales.shape[0], scales.scales.shape[1]
        zeros = self._tensors.pop(f"{stem}.weight_zero_point", None)
        if zeros is not None:
            packed, name = (-(-size[0] // per), size[1]), f"{stem}.weight_zero_point"
            self.fit(name, zeros, packed, f"{per} zeros in each number", torch.int32)
            zeros = self._zeros(name, _spread(zeros.mT, bits).mT[: size[0]])
        order = self._order(f"{stem}.weight_g_idx", shape[1], size[1])
        blocks = words.contiguous().view(torch.uint8)[:, : -(-shape[1] * bits // 8)]
        return Coded(blocks, kind, scales._replace(zeros=zeros), order)

    def _gptq(self, stem: str, words: Tensor) -> Coded:
        bits, per = self._scheme.bits, 32 // self._scheme.bits
        outputs, inputs = words.shape[1], words.shape[0] * per
        scales = self._turned(stem, (outputs, inputs))
        zeros = self._zeros_of(stem, scales, bits, _spread)
        order = self._order(f"{stem}.g_idx", inputs, scales.scales.shape[1])
        blocks = words.mT.contiguous().view(torch.uint8)
        kind = scaled.U4 if bits == 4 else scaled.U8
        return Coded(blocks, kind, scales._replace(zeros=zeros), order)

    def _awq(self, stem: str, words: Tensor) -> Coded:
        inputs, outputs = words.shape[0], words.shape[1] * 8
        if inputs % 2:
            raise self.wrong(f"{stem}.qweight", f"must have an even number of rows: got {inputs}")
        scales = self._turned(stem, (outputs, inputs))
        zeros = self._zeros_of(stem, scales, 4, _spread_by_awq)
        blocks = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="cpu")
        each = max(1, _PART // inputs // 8)
        for first in range(0, words.shape[1], each):
            codes = _spread_by_awq(words[:, first : first + each], 4).mT
            part = slice(8 * first, 8 * first + len(codes))
            blocks[part] = codes[:, ::2] | codes[:, 1::2] << 4
        return Coded(blocks, scaled.U4, scales._replace(zeros=zeros))

    def _turned(self, stem: str, shape: tuple[int, int]) -> Scales:
        """Scales that a file holds as [groups, out]."""
        name, bits = f"{stem}.scales", self._scheme.bits
        numbers = self._scheme.numbers or shape[1]
        found = self.take(name, bits)
        size = -(-shape[1] // numbers), shape[0]
        self.fit(name, found, size, f"a number for each group of {numbers} features", *_SCALES)
        return self._scales(name, found.mT, None, shape)

    def _zeros_of(
        self, stem: str, scales: Scales, bits: int, spread: Callable[[Tensor, int], Tensor]
    ) -> Tensor | None:
        """The zeros of words [groups, outs in words]."""
        name, (outputs, groups) = f"{stem}.qzeros", scales.scales.shape
        words = self.take(name, bits)
        per = 32 // bits
        size = groups, -(-outputs // per)
        self.fit(name, words, size, f"{per} zeros in each number", torch.int32)
        return self._zeros(name, spread(words, bits)[:, :outputs].mT)

    def _zeros(self, name: str, zeros: Tensor) -> Tensor | None:
        """As bytes; None where they are all the middle code."""
        found = zeros.to(torch.int16) + self._scheme.plus
        if int(found.max()) > 255:
            raise self.wrong(name, "must hold zeros up to 255: got 256")
        middle = 1 << self._scheme.bits - 1
        return None if bool((found == middle).all()) else found.to(torch.uint8).contiguous()

    def _order(self, name: str, inputs: int, groups: int) -> Tensor | None:
        """The groups of features, if they are not those that they would have in a row."""
        found = self._tensors.pop(name, None)
        if found is None:
            return None
        self.fit(name, found, (inputs,), "the group of each feature", *_WHOLE)
        if bool((found == -1).all()):
            return None
        for each in (int(found.min()), int(found.max())):
            if not 0 <= each < groups:
                raise self.wrong(name, f"must hold numbers of groups below {groups}: got {each}")
        plain = torch.arange(inputs, device="cpu") // (self._scheme.numbers or inputs)
        return None if torch.equal(found.long(), plain) else found.long()


def _spread(words: Tensor, bits: int) -> Tensor:
    """``[..., n]`` whole numbers of 32 bits as ``[..., n · 32 / bits]`` codes, low bits first."""
    octets = words.contiguous().view(torch.uint8)
    return scaled.codes_of(octets, scaled.U4) if bits == 4 else octets


def _spread_by_awq(words: Tensor, bits: int) -> Tensor:
    codes = _spread(words, bits)
    return codes.view(*codes.shape[:-1], -1, 8)[..., _OF_AWQ].flatten(-2)


_TORCHAO = "._weight_qdata"
_LAYOUTS: dict[str, tuple[str, torch.dtype, Callable[[Codes, str, Tensor], Coded]]] = {
    "fp8": (".weight", torch.float8_e4m3fn, Codes._deepseek),
    "float-quantized": (".weight", torch.float8_e4m3fn, Codes._float_quantized),
    "int-quantized": (".weight", torch.int8, Codes._int_quantized),
    "pack-quantized": (".weight_packed", torch.int32, Codes._pack_quantized),
    "gptq": (".qweight", torch.int32, Codes._gptq),
    "awq": (".qweight", torch.int32, Codes._awq),
    "torchao-int8": (_TORCHAO, torch.int8, partial(Codes._int_quantized, part="_weight")),
    "torchao-float8": (
        _TORCHAO,
        torch.float8_e4m3fn,
        partial(Codes._float_quantized, part="_weight"),
    ),
}
"""How the name of codes ends, their dtype, and what reads them."""
