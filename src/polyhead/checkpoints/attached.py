"""LoRA adapters beside the weights of a model: to train, switch, merge or take off.

    model = ph.load("base")
    adapter = ph.attach_adapter(model, "adapter")     # model computes with it
    with adapter.off(): ...                           # and here without
    adapter.save("trained"); adapter.merge()          # or adapter.remove()

``adapters`` merges one while the model is loaded, which costs nothing afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from polyhead._utils.atomic_write import write_tensors
from polyhead.checkpoints import adapters
from polyhead.checkpoints.json_file import write_json
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, InputError, UnsupportedError, shortened
from polyhead.families import Tensors, families
from polyhead.families.common.config_json import write_config
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.lora import Change, LoraLinear
from polyhead.layers.quantized import QuantizedLinear, refuse_quantized
from polyhead.models.transformer import Transformer

_HALVES = (torch.bfloat16, torch.float16)


class Adapter:
    """A LoRA adapter that is attached to a model; ``attach_adapter`` returns it.

    Args:
        model: Whose projections have it.
        lora: What its files say.
        table: Names of the tensors in them.
        names: For each module of the files polyhead's weights, of which there are several where
            the files fuse projections.
    """

    def __init__(
        self,
        model: Transformer,
        lora: adapters.Lora,
        table: Tensors,
        names: dict[str, list[str]],
    ) -> None:
        self._model, self._lora, self._table, self._names = model, lora, table, names
        self.layers = {
            name: model.get_submodule(name.removesuffix(".weight"))
            for each in names.values()
            for name in each
        }

    def parameters(self) -> list[nn.Parameter]:
        """The adapter's parameters, for an optimizer; the model's are not included."""
        found = [each for layer in self._loras() for each in (layer.down, layer.up)]
        return list(dict.fromkeys(found))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the ``with`` block the model runs without the adapter."""
        layers = self._loras()
        before = [layer.active for layer in layers]
        for layer in layers:
            layer.active = False
        try:
            yield
        finally:
            for layer, active in zip(layers, before, strict=True):
                layer.active = active

    def remove(self) -> None:
        """Removes the adapter; the model is as it was before."""
        for name, layer in self._loras_by_name():
            _put(self._model, name, layer.base)
        self.layers = {}

    def merge(self) -> None:
        """Adds the adapter to the model's weights and removes it."""
        for name, layer in self._loras_by_name():
            _put(self._model, name, layer.merged())
        self.layers = {}

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves the adapter in PEFT's form, with the tensor names of the files it was read from.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        self._loras()
        folder, tensors = Path(directory), dict[str, Tensor]()
        for module, names in self._names.items():
            parts = {name: self._lora_of(name).up.detach() for name in names}
            up = next(iter(self._table.to_theirs(parts, self._model.config).values()))
            up = up.T if self._lora.transposed else up
            down = self._lora_of(names[0]).down.detach()
            for kind, tensor in (("A", down), ("B", up)):
                tensors[f"{adapters.PREFIX}{module}.lora_{kind}.weight"] = tensor.cpu().contiguous()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(folder / adapters.WEIGHTS, tensors, {"format": "pt"})
            write_json(folder / adapters.CONFIG, dict(self._lora.values))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error.strerror or error}"
            ) from error

    def _lora_of(self, name: str) -> LoraLinear:
        layer = self.layers[name]
        if not isinstance(layer, LoraLinear):
            raise InputError(f"{name} has no adapter any more")
        return layer

    def _loras(self) -> list[LoraLinear]:
        return [layer for _, layer in self._loras_by_name()]

    def _loras_by_name(self) -> list[tuple[str, LoraLinear]]:
        if not self.layers:
            raise InputError("this adapter was merged or removed: attach it again")
        return [(name, self._lora_of(name)) for name in self.layers]


def attach_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> Adapter:
    """Attaches a LoRA adapter of the PEFT library to a loaded model.

    Its parameters are float32 if the model's are 16-bit, as in PEFT.

    Args:
        model: A ``LanguageModel``, ``TextEncoder`` or ``Transformer``; it is changed in place.
        directory: With adapter_config.json and adapter_model.safetensors.

    Raises:
        CheckpointError: The files are corrupt, or belong to another model.
        ConfigError: A form of adapter that is not supported, by its key.
        UnsupportedError: It changes something else than projections of attention and feed-forward
            networks (embeddings, whole modules): ``load(adapter=...)`` merges such a one.
        InputError: The model has an adapter on one of them already.
    """
    transformer = transformer_in(model)
    refuse_quantized(transformer, "an adapter")
    read = read_changes(transformer, Path(directory))
    made: dict[str, LoraLinear] = {}
    for names in read.names.values():
        # Projections that the files fuse share one A, as they do there.
        down = nn.Parameter(read.changes[names[0]].down)
        for name in names:
            base, change = read.bases[name], read.changes[name]
            assert isinstance(base, nn.Linear)  # nothing is quantized
            up = nn.Parameter(change.up)
            made[name] = LoraLinear(base, down, up, change.scale, read.lora.dropout)
    for name, layer in made.items():
        _put(transformer, name, layer.train(transformer.training))
    return Adapter(transformer, read.lora, read.table, read.names)


def transformer_in(model: nn.Module) -> Transformer:
    """The Transformer of a model that takes an adapter."""
    transformer = getattr(model, "transformer", model)
    if not isinstance(transformer, Transformer):
        raise TypeError(f"model must be a model of polyhead: got {type(model).__name__}")
    return transformer


class Changes(NamedTuple):
    """What an adapter changes of a model.

    Attributes:
        lora: What its files say.
        table: Names of the tensors in them.
        names: For each module of the files polyhead's weights.
        bases: The projections that are changed, by polyhead's name of the weight.
        changes: Their changes, by the same names.
    """

    lora: adapters.Lora
    table: Tensors
    names: dict[str, list[str]]
    bases: dict[str, nn.Module]
    changes: dict[str, Change]


def read_changes(model: Transformer, path: Path) -> Changes:
    """Reads an adapter, as changes of a model's projections.

    Args:
        model: It; it stays as it is.
        path: The adapter's directory.

    Raises:
        CheckpointError, ConfigError, UnsupportedError, InputError: As ``attach_adapter``.
    """
    lora = adapters.read_adapter(path)
    if lora.whole:
        raise UnsupportedError(
            f"{path / adapters.WEIGHTS}: {next(iter(lora.whole))} replaces a tensor: load the "
            "model with adapter=, which merges it"
        )
    table, ups = _placed(lora, model.config, path)
    bases, changes = dict[str, nn.Module](), dict[str, Change]()
    kind, device = model.embedding.like.dtype, model.embedding.like.device
    kind = torch.float32 if kind in _HALVES else kind
    for module, pair in lora.pairs.items():
        down = pair.down.to(device, kind).contiguous()
        for name, up in ups[module].items():
            base = bases[name] = _projection(model, name, path)
            wanted, got = [base.out_features, base.in_features], [len(up), down.shape[1]]
            if wanted != got:
                raise CheckpointError(
                    f"{path / adapters.WEIGHTS}: {module} does not fit {name}: lora_B times lora_A "
                    f"is {got}, the model's weight {wanted}"
                )
            changes[name] = Change(down, up.to(device, kind).contiguous(), pair.scale)
    names = {module: [*ups[module]] for module in lora.pairs}
    return Changes(lora, table, names, bases, changes)


def _placed(
    lora: adapters.Lora, config: TransformerConfig, path: Path
) -> tuple[Tensors, dict[str, dict[str, Tensor]]]:
    """The tensor table of a family that knows all names, and every B split as its weight is."""
    unknown = ""
    for family in families().values():
        try:
            table = family.tensors_of(write_config(config, [family]))
        except ConfigError:
            continue
        ups, unknown = {}, ""
        for module, pair in lora.pairs.items():
            name = f"{module}.weight"
            up = pair.up.T if lora.transposed else pair.up
            found, _ = table.to_ours({name: up}, config, path / adapters.WEIGHTS)
            if name in found or pair.embeds:
                unknown = module
                break
            ups[module] = found
        else:
            return table, ups
    raise CheckpointError(
        f"{path / adapters.WEIGHTS}: the model has no projection {shortened(unknown)}"
    )


def _projection(model: Transformer, name: str, path: Path) -> nn.Linear | QuantizedLinear:
    """The projection with this weight name."""
    owner, _, leaf = name.removesuffix(".weight").rpartition(".")
    try:
        parent = model.get_submodule(owner)
    except AttributeError as error:
        raise CheckpointError(f"{path / adapters.WEIGHTS}: the model has no {name}") from error
    found = getattr(parent, leaf, None)
    if isinstance(found, LoraLinear):
        raise InputError(f"{name} has an adapter already: merge() or remove() it first")
    if type(found) not in (nn.Linear, QuantizedLinear) or not isinstance(
        parent, MultiHeadAttention | FeedForward
    ):
        raise UnsupportedError(
            f"an adapter beside {name} is not built: load the model with adapter=, which merges it"
        )
    return cast("nn.Linear | QuantizedLinear", found)


def _put(model: Transformer, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.removesuffix(".weight").rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
