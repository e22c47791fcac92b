"""Positions of tokens: rotary, learned and sinusoidal.

Rotary embedding (Su et al. 2021) turns each pair of features of a query and a key by an angle that
grows with the position, so that their product depends on the distance alone. The pairs are
(i, i + d/2), the "half-split" row order of Hugging Face checkpoints:

    rotated = x · cos + swap_halves(x) · (−sin, sin)

Shape letters: B batch, N heads, T tokens, D head size, d rotated features of a head, E embed size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead._utils.checks import check_int
from polyhead.config import AxialConfig, RopeConfig, RopeType, SinusoidConfig
from polyhead.errors import ConfigError, ContextLengthError, UnsupportedError
from polyhead.layers import fused
from polyhead.layers.fixed import Fixed
from polyhead.layers.frequencies import coordinates_of_pairs, inverse_frequencies, regime
from polyhead.layers.packed import following
from polyhead.native import batch_invariant
from polyhead.semantics.tokens import GraphCapture, active_capture, is_traced, is_tracing


class _Rotation(NamedTuple):
    """``cos`` and ``(−sin, sin)``, ``[T, d]`` or ``[B, T, d]``."""

    cos: Tensor
    sin: Tensor

    def with_heads(self, axis: int) -> _Rotation:
        return _Rotation(self.cos.unsqueeze(axis), self.sin.unsqueeze(axis))


class RoPE:
    """Rotary position embedding, shared freely between layers: it has no parameters.

    Consecutive positions are looked up in a table that doubles when it is too small; explicit
    positions are computed. ``dynamic`` and ``longrope`` take their frequencies from the greatest
    position of the call, as transformers does: keys that a cache holds keep the rotation they came
    with, so a sequence that crosses the trained length in chunks differs from one pass.

    Args:
        theta: Base of the wavelengths.
        type: ``"default"``, ``"linear"``, ``"dynamic"``, ``"llama3"``, ``"yarn"``, ``"longrope"``.
        dim: Rotated features of a head, from the first; default all.
        factor: How much further the scaling reaches.
        original_max_positions: The trained length that the scaling starts from.
        **scaling: The further fields of ``RopeConfig`` that the type reads.

    Raises:
        ConfigError: A field that is missing, impossible, or not read by the type.
        TypeError: A field that ``RopeConfig`` does not have.
    """

    _tables: dict[tuple[int, int, torch.dtype, torch.device, bool], _Rotation]
    _last: tuple[tuple[Any, ...], _Rotation] | None

    def __init__(
        self,
        theta: float = 10_000.0,
        *,
        type: RopeType = "default",
        dim: int | None = None,
        factor: float | None = None,
        original_max_positions: int | None = None,
        **scaling: Any,
    ) -> None:
        self._config = RopeConfig(
            theta=theta,
            type=type,
            dim=dim,
            factor=factor,
            original_max_positions=original_max_positions,
            **scaling,
        )
        self._forget_tables()

    @classmethod
    def from_config(cls, config: RopeConfig, head_dim: int | None = None) -> Self:
        """Builds it from data; with ``head_dim`` the number of rotated features is checked now."""
        rope = cls.__new__(cls)
        rope._config = config
        rope._forget_tables()
        if head_dim is not None:
            rope._rotated_dim(head_dim)
            inverse_frequencies(config, rope._rotated_dim(head_dim))
        return rope

    @property
    def config(self) -> RopeConfig:
        """What the tables are made of; for others build another: layers share this one."""
        return self._config

    @config.setter
    def config(self, config: RopeConfig) -> None:
        raise AttributeError(
            "config of a RoPE cannot be assigned, since layers share its tables: build another "
            "with RoPE.from_config(config)"
        )

    def __call__(self, q: Tensor, k: Tensor, positions: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys of the same tokens; see ``apply``."""
        return self.apply(q, positions), self.apply(k, positions)

    def apply(self, x: Tensor, positions: int | Tensor = 0, *, head_axis: int = 1) -> Tensor:
        """Rotates every head of ``x``; cos and sin are rounded to the dtype of ``x`` first.

        Args:
            x: ``[B, N, T, D]``, or ``[B, T, N, D]`` with ``head_axis=2``.
            positions: The first token's position, the others following on; or ``[T]`` or
                ``[B, T]`` whole numbers; or ``[C, B, T]`` of C coordinates, with
                ``config.sections`` of as many.
            head_axis: Which axis of ``x`` counts heads.

        Returns:
            A new tensor like ``x``.

        Raises:
            ValueError: Coordinates without sections, or of another number.
        """
        head_dim = x.shape[-1]
        dim = self.config.dim
        if dim is None or dim == head_dim:
            rotation = self._rotation(x, positions, x.shape[3 - head_axis], head_axis, head_dim)
            half = head_dim // 2
            code = native.code_for(x) if head_axis == 2 and x.stride(-1) == 1 else None
            if code is not None:
                rows = positions.shape[:-1] if isinstance(positions, Tensor) else ()
                own = rows[-1:] not in ((), (1,))  # of every batch row
                tokens = x.reshape(1, -1, *x.shape[2:]) if own else x
                return code.rotate(tokens, rotation.cos, rotation.sin).view(x.shape)
            plain = head_axis == 2 and not isinstance(positions, Tensor) and x.stride(-1) == 1
            rotated = fused.rotate(x, rotation.cos, rotation.sin) if plain else None
            if rotated is not None:
                return rotated
            return (x * rotation.cos).addcmul_(torch.roll(x, half, -1), rotation.sin)
        self._rotated_dim(head_dim)
        rotated = self.apply(x[..., :dim], positions, head_axis=head_axis)
        return torch.cat((rotated, x[..., dim:]), dim=-1)

    def cos_sin(
        self, positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, ``[..., d]`` each, as transformers' rotary modules give them.

        Args:
            positions: ``[T]`` or ``[B, T]`` whole numbers, or ``[C, B, T]`` of C coordinates.
            head_dim: D; d is ``dim`` where that was given.
            dtype: Dtype of the result; the angles are float32.
        """
        length = int(positions.max()) + 1 if positions.numel() else 0
        return self._angles(positions, self._rotated_dim(head_dim), length, dtype)

    def tables_at(
        self, x: Tensor, starts: int | list[int], count: int | list[int], head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """cos and signed sin of ``count`` positions, as ``Code.rotate`` takes them.

        Args:
            x: Tensor whose dtype and device the tables shall have.
            starts: Position of the first token; or that of every row's first.
            count: Tokens of every row; or of each, and the tables are of all, one after the other.
            head_dim: D, all of which is rotated.
        """
        last = self._last  # all layers of a model ask for the same tokens one after another
        first = starts if isinstance(starts, int) else tuple(starts)
        counts = count if isinstance(count, int) else tuple(count)
        key = first, counts, 2, head_dim, x.dtype, x.device, batch_invariant.is_enabled()
        if last is not None and last[0] == key:
            return last[1]
        if not isinstance(count, int):
            firsts = [starts] * len(count) if isinstance(starts, int) else starts
            positions = torch.tensor(following(firsts, count), device="cpu")
        elif isinstance(starts, int):
            return self._rotation(x, starts, count, 2, head_dim)
        else:
            new = torch.arange(count, device="cpu")
            positions = torch.tensor(starts, device="cpu")[:, None] + new
        table = self._looked_up(0, int(positions.max()) + 1, head_dim, x.dtype, x.device)
        rotation = _Rotation(table.cos[positions], table.sin[positions])
        self._last = key, rotation
        return rotation

    def _rotation(
        self, x: Tensor, positions: int | Tensor, length: int, head_axis: int, dim: int
    ) -> _Rotation:
        """cos and sin in a shape that multiplies ``x``."""
        if isinstance(positions, Tensor):
            axis = head_axis if positions.ndim > 1 else head_axis - 1
            if (step := active_capture()) is not None:
                return self._with_captured(step, positions, dim, x).with_heads(axis)
            return self._computed(positions, dim, x.dtype).with_heads(axis)
        if is_tracing():  # and a comparison would fix a length that is traced
            rotation = self._looked_up(positions, length, dim, x.dtype, x.device)
            return rotation.with_heads(head_axis - 1)
        # All layers of a model ask for the same tokens one after another.
        key = (positions, length, head_axis, dim, x.dtype, x.device, batch_invariant.is_enabled())
        last = self._last
        if last is None or last[0] != key:
            rotation = self._looked_up(positions, length, dim, x.dtype, x.device)
            # Key and rotation change at once: threads share a model's rotary embedding.
            self._last = last = key, rotation.with_heads(head_axis - 1)
        return last[1]

    def _with_captured(
        self, step: GraphCapture, positions: Tensor, dim: int, x: Tensor
    ) -> _Rotation:
        """Looked up on the device, once for all layers of a step."""
        key = id(self), id(positions), dim, x.dtype  # both outlive the step
        found: _Rotation | None = step.made.get(key)
        if found is None:
            table = self._table(step.positions, dim, x.dtype, x.device)
            found = _Rotation(*(part.index_select(0, positions) for part in table))
            step.made[key] = found
            step.held.append(table)
        return found

    def _computed(self, positions: Tensor, dim: int, dtype: torch.dtype) -> _Rotation:
        length = 0
        if self.config.type in ("dynamic", "longrope") and positions.numel():
            if is_traced(positions):
                raise ConfigError(
                    f"rope type {self.config.type!r} chooses its frequencies by the greatest "
                    "position, which is not known under tracing"
                )
            length = int(positions.max()) + 1
        cos, sin = self._angles(positions, dim, length, dtype)
        return _signed(cos, sin)

    def _looked_up(
        self, first: int, count: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> _Rotation:
        length = first + count
        regime_ = regime(self.config, length)
        own_frequencies = self.config.type == "dynamic" and regime_ == length
        if own_frequencies or is_tracing():
            # A table would never be read again, or would fix the length that is being traced.
            return self._computed_span(first, length, dim, length, dtype, device)
        table = self._table(length, dim, dtype, device)
        return _Rotation(table.cos[first:length], table.sin[first:length])

    def _table(self, length: int, dim: int, dtype: torch.dtype, device: torch.device) -> _Rotation:
        """Of positions from 0 on, ``length`` of them or more; kept."""
        key = (regime(self.config, length), dim, dtype, device, batch_invariant.is_enabled())
        table = self._tables.get(key)
        if table is None or table.cos.shape[0] < length:
            capacity = max(length, 256, 2 * table.cos.shape[0] if table is not None else 0)
            table = self._computed_span(0, capacity, dim, length, dtype, device)
            self._tables[key] = table
        return table

    def _computed_span(
        self, first: int, stop: int, dim: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> _Rotation:
        if is_tracing():
            return _signed(
                *self._angles(torch.arange(first, stop, device=device), dim, length, dtype)
            )
        # Tables outlive the call: they must be ordinary tensors whatever mode it runs in.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(first, stop, device=device)
            return _signed(*self._angles(positions, dim, length, dtype))

    def _angles(
        self, positions: Tensor, dim: int, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if batch_invariant.is_enabled() and regime(self.config, length) != regime(self.config, 1):
            raise UnsupportedError(
                f"batch_invariant() cannot keep the bits of rope type {self.config.type!r} beyond "
                f"original_max_positions={self.config.original_max_positions}: every token's "
                "frequencies depend on the greatest position of the call"
            )
        frequencies, factor = inverse_frequencies(self.config, self._rotated_dim(dim), length)
        at = positions[..., None]
        if positions.ndim == 3:
            at = self._by_pair(positions, len(frequencies))
        angles = at.float() * frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _by_pair(self, positions: Tensor, pairs: int) -> Tensor:
        """``[B, T, pairs]`` of ``[C, B, T]``: the coordinate that turns each pair."""
        sections = self.config.sections
        if sections is None or len(sections) != len(positions):
            count = "no sections" if sections is None else f"{len(sections)} sections"
            raise ValueError(
                "positions [C, B, T] need rope sections, one of each coordinate: got C="
                f"{len(positions)} and {count}"
            )
        chosen = coordinates_of_pairs(self.config, pairs)
        return positions.movedim(0, -1)[..., torch.tensor(chosen, device=positions.device)]

    def _rotated_dim(self, head_dim: int) -> int:
        dim = head_dim if self.config.dim is None else self.config.dim
        if dim % 2 or dim > head_dim:
            raise ConfigError(
                f"rope rotates an even number of features, at most head_dim={head_dim}: got {dim}"
            )
        if self.config.sections is not None:
            coordinates_of_pairs(self.config, dim // 2)
        return dim

    def _forget_tables(self) -> None:
        self._tables = {}
        self._last = None

    def __getstate__(self) -> RopeConfig:
        return self.config

    def __setstate__(self, config: RopeConfig) -> None:
        self._config = config
        self._forget_tables()

    def __repr__(self) -> str:
        default = RopeConfig()
        fields = {
            name: value
            for name, value in vars(self.config).items()
            if name == "theta" or value != getattr(default, name)
        }
        return f"RoPE({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _signed(cos: Tensor, sin: Tensor) -> _Rotation:
    half = sin.shape[-1] // 2
    return _Rotation(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))


class LearnedPositions(nn.Module):
    """A vector per position, learned (BERT, GPT-2).

    Args:
        max_positions: Number of positions in the table.
        embed_dim: Embedding size E of the residual stream.
    """

    def __init__(self, max_positions: int, embed_dim: int) -> None:
        super().__init__()
        check_int("max_positions", max_positions, least=1, error=ConfigError)
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        self.weight = nn.Parameter(torch.empty(max_positions, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: int | Tensor, length: int) -> Tensor:
        """``[T, E]`` or ``[B, T, E]``.

        Args:
            positions: The first token's position, the others following on; or ``[T]``, ``[B, T]``.
            length: Number of tokens T.

        Raises:
            ContextLengthError: More tokens than there are positions.
        """
        if isinstance(positions, Tensor):
            return F.embedding(positions, self.weight)
        if positions + length > len(self.weight):
            raise ContextLengthError(
                f"there are {len(self.weight)} learned positions: got tokens up to position "
                f"{positions + length - 1}"
            )
        return self.weight[positions : positions + length]


class AxialPositions(nn.Module):
    """A learned vector per row of a grid of positions beside one per column (Reformer).

    Args:
        config: Rows and columns, and features of both.

    Attributes:
        rows: ``[rows, dims[0]]``.
        columns: ``[columns, dims[1]]``.
    """

    def __init__(self, config: AxialConfig) -> None:
        super().__init__()
        self.config = config
        self.rows, self.columns = (
            nn.Parameter(torch.empty(count, features))
            for count, features in zip(config.shape, config.dims, strict=True)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows)
        nn.init.normal_(self.columns)

    def forward(self, positions: int | Tensor, length: int) -> Tensor:
        """``[T, E]`` or ``[B, T, E]``; see ``LearnedPositions.forward``."""
        rows, columns = self.config.shape
        if not isinstance(positions, Tensor):
            if positions + length > rows * columns:
                raise ContextLengthError(
                    f"there are {rows} · {columns} axial positions: got tokens up to position "
                    f"{positions + length - 1}"
                )
            positions = torch.arange(positions, positions + length, device=self.rows.device)
        parts = (self.rows, positions // columns), (self.columns, positions % columns)
        return torch.cat([F.embedding(index, table) for table, index in parts], dim=-1)


class SinusoidalPositions(Fixed):
    """PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, §3.5).

    Args:
        embed_dim: Embedding size E, an even number.
        config: Another layout or other frequencies.

    Raises:
        ConfigError: ``embed_dim`` is odd.
    """

    _fixed = frozenset({"config", "embed_dim"})

    def __init__(self, embed_dim: int, config: SinusoidConfig | None = None) -> None:
        super().__init__()
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        if embed_dim % 2:
            raise ConfigError(f"sinusoidal positions need an even embed_dim: got {embed_dim}")
        self.embed_dim = embed_dim
        self.config = SinusoidConfig() if config is None else config

    def forward(
        self,
        positions: int | Tensor,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """``[T, E]`` or ``[B, T, E]``; see ``LearnedPositions.forward``."""
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + length, device=device)
        steps = torch.arange(0, self.embed_dim, 2, device=positions.device, dtype=torch.float32)
        spread = self.embed_dim - 2 if self.config.spread else self.embed_dim
        frequencies = torch.exp(steps * (-math.log(10_000.0) / max(spread, 1)))
        angles = positions[..., None].float() * frequencies
        parts = angles.sin(), angles.cos()
        if self.config.layout == "halves":
            return torch.cat(parts, dim=-1).to(dtype)
        return torch.stack(parts, dim=-1).flatten(-2).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}"
