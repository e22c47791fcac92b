"""Several LoRA adapters of one model, chosen for each row of a batch.

    adapters = ph.RowAdapters(model, {"law": "adapters/law", "poems": "adapters/poems"})
    with adapters.rows(["law", None, "poems"]): logits = model(ids)      # ids [3, T]

The model's own weights are read once for all rows; a row's low-rank products are added to it alone
(Chen et al. 2023, Punica; Sheng et al. 2023, S-LoRA). Outside the block the model is as it was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from polyhead._utils.checks import shown
from polyhead.checkpoints import adapters as files
from polyhead.checkpoints.attached import read_changes, transformer_in
from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.lora import Change, ChosenRows, RowLora

_BY_ROW = re.compile(r"layers\.\d+\.(attention|feed_forward)\.\w+\.weight")
"""Parts of a model that are called with all rows of a batch."""


class RowAdapters:
    """Named LoRA adapters of a model, of which each row of a batch chooses one or none.

    A row's logits are those of a model with its adapter alone (``attach_adapter``), within
    ``batch_invariant()`` bit for bit. A layer that an adapter of a row changes is computed by its
    modules; the others keep their native step (``DecodePlan.explain`` says which). One thread at a
    time may call the model while rows are chosen.

    Args:
        model: A decoder: a ``LanguageModel`` or ``Transformer``. Its weights may be quantized.
        directories: By name a directory of the PEFT library, with adapter_config.json and
            adapter_model.safetensors. Numbers are float32 if the model's are 16-bit.

    Attributes:
        names: Of the adapters.
        bytes: Memory that they take.

    Raises:
        CheckpointError: Files that are corrupt, or belong to another model, by file and module.
        ConfigError: A form of adapter that is not supported, by its key.
        UnsupportedError: It changes something else than projections of attention and feed-forward
            networks (embeddings, experts, whole modules).
        InputError: The model has an adapter attached, or an empty name.
    """

    def __init__(self, model: nn.Module, directories: Mapping[str, str | os.PathLike[str]]) -> None:
        self._model, self._rows = transformer_in(model), ChosenRows()
        self._layers: dict[str, RowLora] = {}
        self._changed: dict[str, list[str]] = {}
        self.bytes = 0
        for name, directory in directories.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"an adapter's name must be a text: got {shown(name)}")
            path = Path(directory)
            read = read_changes(self._model, path)
            self._changed[name] = [*read.changes]
            for place, change in read.changes.items():
                if _BY_ROW.fullmatch(place) is None:
                    raise UnsupportedError(
                        f"{path / files.WEIGHTS}: rows of a batch do not choose a change of {place}"
                    )
                self._add(name, place, read.bases[place], change)

    def _add(self, name: str, place: str, base: nn.Module, change: Change) -> None:
        layer = self._layers.get(place)
        if layer is None:
            layer = self._layers[place] = RowLora(base, {}, self._rows).eval()
        layer.changes = {**layer.changes, name: change}
        self.bytes += change.down.nbytes + change.up.nbytes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._changed)

    def check(self, name: str | None) -> None:
        """Raises InputError for an adapter that there is not."""
        if name is not None and name not in self._changed:
            held = ", ".join(self._changed) or "there are none"
            raise InputError(f"adapter must be one of the model's ({held}): got {shown(name)}")

    @contextmanager
    def rows(self, names: str | Sequence[str | None]) -> Iterator[None]:
        """Chooses adapters for the calls of the model within the block, in this thread.

        Args:
            names: Of each row of the batch, None for the model as it is; or one name for all rows.

        Raises:
            InputError: No such adapter; or a projection has been replaced since they were read. A
                call with another number of rows raises it too.
        """
        wanted = dict.fromkeys([names] if isinstance(names, str) else names)
        for name in wanted:
            self.check(name)
        places = {place: None for name in wanted if name for place in self._changed[name]}
        put: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for place in places:
                owner, _, leaf = place.removesuffix(".weight").rpartition(".")
                parent, layer = self._model.get_submodule(owner), self._layers[place]
                before = parent._modules[leaf]
                if before is not layer.base and before is not layer:
                    raise InputError(
                        f"{place} has been replaced since its adapters were read: it is a "
                        f"{type(before).__name__}"
                    )
                put.append((parent, leaf, before))
                parent._modules[leaf] = layer
            with self._rows.chosen(names):
                yield
        finally:
            for parent, leaf, module in put:
                parent._modules[leaf] = module
