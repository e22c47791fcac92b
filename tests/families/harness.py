"""One harness for every family: a tiny random transformers model through the real loader.

A family's entry in ``cases/`` is its tiny config and the options that change its arithmetic.
"""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import transformers
from gguf_files import GgufCase, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.checkpoints.formats.gguf_export import as_gguf
from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.checkpoints.formats.hugging_face import read_directory
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.families import families
from polyhead.planning.weights import counts, parameter_groups
from polyhead.semantics import KeyLengths

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHUNKS = (5, 1, 1, 9)
STRETCHED = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on how long the sequence is so far."""
Axis = Sequence[Mapping[str, Any]]


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}}


def ropes(head_dim: int, **options: Any) -> Axis:
    """An axis with every rotary type, for heads that rotate so many features.

    ``options`` are added to each, such as the part of a head that this is.
    """
    short = [1.0 + i / 10 for i in range(head_dim // 2)]
    return (
        {},
        rope("linear", factor=4.0, **options),
        rope("dynamic", factor=4.0, **options),
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
            **options,
        ),
        rope("yarn", factor=4.0, original_max_position_embeddings=16, **options),
        rope(
            "longrope",
            short_factor=short,
            long_factor=[2 * each for each in short],
            original_max_position_embeddings=16,
            factor=4.0,
            **options,
        ),
    )


def heads(*names: str) -> Axis:
    """An axis with the class that builds the model; the first is the body alone."""
    return ({}, *({"auto": f"AutoModelFor{name}"} for name in names))


ENCODER_HEADS = heads(
    "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"
)
LABELS: Axis = (
    {},
    {
        "id2label": {0: "good", 1: "bad", 2: "neither"},
        "label2id": {"good": 0, "bad": 1, "neither": 2},
    },
    {"num_labels": 1},
)
TIED: Axis = ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})


Exact = Callable[[], Tensor] | None
"""What transformers' model gives in float64."""


@dataclass(frozen=True)
class Case:
    """A family's entry.

    Attributes:
        model_type: Of the family.
        sizes: The tiny config: what is added to ``SIZES``; None takes a key out.
        axes: Each a list of options of which one is drawn; the first is the plain one.
        auto: The class of transformers that builds the model.
        tokens: So many in a sequence; more than the windows and than the original rotary length.
        global_tokens: Places of tokens that are global, of which some rows have fewer.
        spread: Standard deviation of the matrices.
        attention: How transformers computes it: ``"sdpa"`` where ``"eager"`` is not what it means.
        gguf: How a GGUF file of it is written; None: none is read.
        more_gguf: Other forms of such files.
        alter: Changes transformers' model, for what no option says.
        features: Of an encoder of sound, mel features and frames; None: it reads ids.
        pixels: Channels, height and width, of a model that reads images in place of ids.
        alone: Texts of a batch are compared one by one: transformers lets padding into them.
        error: Standard deviations by which float32 results may differ: more than the usual where
            transformers' own are further from float64 than that.
        segments: Whether its layers score segments.
        shortest: Tokens of the shortest text that is compared, where transformers fails on less.
        pads_left: Whether transformers' class wants padding before the text, not behind it.
        gradient_error: The same of a gradient, as a part of its largest number.
        float64_gradient_error: The same in float64, where transformers then has no part in float32:
            for what float32 rounds too much, as a root near 0; None: float32 is enough.
    """

    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    axes: Sequence[Axis] = ()
    auto: str = "AutoModelForCausalLM"
    tokens: int = 24
    spread: float = 0.15
    attention: str = "eager"
    gguf: GgufCase | None = None
    more_gguf: Sequence[GgufCase] = ()
    alter: Callable[[Any, Mapping[str, Any]], None] | None = None
    features: tuple[int, int] | None = None
    pixels: tuple[int, int, int] | None = None
    global_tokens: tuple[int, ...] = ()
    alone: bool = False
    error: float = 5e-5
    gradient_error: float = 1e-4
    float64_gradient_error: float | None = None
    segments: bool = False
    pads_left: bool = False
    shortest: int = 1

    def with_head(self, *options: Mapping[str, Any]) -> Case:
        """With the class of the options that name one."""
        return replace(self, auto=next((o["auto"] for o in options if "auto" in o), self.auto))

    def config(self, *options: Mapping[str, Any]) -> Any:
        """transformers' config with some options."""
        values = {**SIZES, **self.sizes}
        for each in options:
            values |= each
        if values.pop("auto", "").endswith("QuestionAnswering"):
            for key in ("num_labels", "id2label", "label2id"):
                values.pop(key, None)
        said = {key for each in options for key in each}
        known = {key: value for key, value in values.items() if value is not None or key in said}
        made = transformers.AutoConfig.for_model(self.model_type, **known)
        made._attn_implementation = self.attention
        return made

    def build(self, *options: Mapping[str, Any]) -> Any:
        """transformers' model with random weights, biases and norms."""
        torch.manual_seed(len(json.dumps(options)))
        kind = getattr(transformers, self.auto)
        config = self.config(*options)
        build = getattr(kind, "from_config", None) or kind._from_config
        model = build(config, attn_implementation=self.attention).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
            elif name.endswith(("e_score_correction_bias", "expert_bias", "final_logits_bias")):
                torch.nn.init.normal_(tensor, std=0.3)
            elif tensor.requires_grad:  # sinusoids are parameters that are not trained
                # Biases start at 0 and norms at 1, where nothing would notice their loss.
                norm = tensor.ndim == 1 and name.endswith("weight")
                # A head of a few labels gives a few numbers, which have to differ between texts.
                few = tensor.ndim == 2 and len(tensor) < 4
                std = 1.0 if few else 0.4 if tensor.ndim < 2 else self.spread
                torch.nn.init.normal_(tensor, mean=float(norm), std=std)
        if self.alter is not None:
            self.alter(model, {key: value for each in options for key, value in each.items()})
        return model

    def ids(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        if self.pixels is not None:
            return torch.randn(batch, *self.pixels, generator=generator)
        vocab = {**SIZES, **self.sizes}["vocab_size"]
        ids = torch.randint(3, vocab, (batch, self.tokens), generator=generator)
        ids[:, -1] = vocab - 1  # ends a text, where a model looks for that
        return ids

    def named(self, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Our segments or global tokens and theirs, or none where their default is tried."""
        if self.segments:
            kinds = (torch.arange(ids.shape[1]) // 7 % 3).expand_as(ids)
            return {"segments": kinds}, {"token_type_ids": kinds}
        if not self.global_tokens or self.auto.endswith("SequenceClassification"):
            return {}, {}
        tokens = torch.zeros(ids.shape, dtype=torch.bool)
        for row in range(len(ids)):
            tokens[row, list(self.global_tokens[row % 3 :])] = True
        return {"global_tokens": tokens}, {"global_attention_mask": tokens.long()}

    def source(self) -> Tensor:
        """What the encoder of an encoder-decoder reads: ids, or mel features of two sounds."""
        if self.features is None:
            return self.ids()[:, : self.tokens // 2]
        return torch.randn(2, *self.features, generator=torch.Generator().manual_seed(5))


def all_cases() -> dict[str, Case]:
    """Every family's entry, by ``model_type``."""
    found: list[Case] = []
    for module in pkgutil.iter_modules(cases.__path__):
        found += importlib.import_module(f"cases.{module.name}").CASES
    return {case.model_type: case for case in found}


def check(case: Case, folder: Path, *options: Mapping[str, Any]) -> None:
    """Everything that holds of a model that was loaded."""
    case = case.with_head(*options)
    theirs = case.build(*options)
    theirs.save_pretrained(folder / "theirs")
    _say_type(folder / "theirs" / "config.json", case.model_type)
    ours = load_checkpoint(folder / "theirs")
    assert ours.family == case.model_type
    KINDS[ours.config.kind](case, theirs, ours)
    _same_number_of_parameters(theirs, ours, folder)
    _same_gradients(case, theirs, ours, folder)
    _saved_back(case, theirs, ours, folder)


def _say_type(path: Path, model_type: str) -> None:
    """transformers reads some types as another, and writes that one's name."""
    values = json.loads(path.read_text())
    if values["model_type"] != model_type:
        path.write_text(json.dumps(values | {"model_type": model_type}))


def check_gguf(case: Case, gguf: GgufCase, folder: Path) -> None:
    """A GGUF file is the model that it was written from."""
    theirs = case.with_head(gguf.options or {}).build(gguf.options or {})
    path = write(folder / "tiny.gguf", gguf, theirs)
    ours = load_checkpoint(path)
    KINDS[ours.config.kind](case, theirs, ours)
    others = (each.arch for each in families()[case.model_type].more_gguf if each.saved)
    if (gguf is case.gguf or gguf.arch in others) and gguf.kind == "gpt2":
        _same_as_converter(path, written=gguf.written)


def _same_as_converter(path: Path, *, written: bool) -> None:
    """What polyhead makes of the directory that the file was written from."""
    file, parts = GGUFFile(path), read_directory(path.parent / "for-gguf")
    words = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    if not written:
        with pytest.raises(ConfigError, match="cannot be written as a GGUF file: "):
            as_gguf(parts, words, path)
        return
    made = as_gguf(parts, words, path)
    arch = file.metadata["general.architecture"]
    assert made.metadata["general.architecture"] == arch
    for name in ("embedding_length", "attention.head_count", "vocab_size"):
        assert made.metadata[f"{arch}.{name}"] == file.metadata[f"{arch}.{name}"]
    for name in (key for key in file.metadata if key.startswith("xielu.alpha")):
        assert made.metadata[name] == file.metadata[name]
    # Of layers without positions the order of rows in queries and keys is free.
    still = [getattr(layer.attention, "rope", None) is None for layer in parts.config.layers]
    names = {name for name in file.tensors if "nextn" not in name}
    free = {
        name
        for name in names
        if name.endswith((".attn_q.weight", ".attn_k.weight"))
        and (all(still) or still[int(name.split(".")[1])])
    }
    assert {*made.tensors} == names
    for name in names - free:
        assert torch.equal(made.tensors[name].float(), file.tensor(name).float()), name


def _decoder(case: Case, theirs: Any, ours: Checkpoint) -> None:
    ids = case.ids()
    exact: Exact = lambda: _output(_in_float64(case, theirs)(ids))  # noqa: E731
    with torch.no_grad():
        wanted = _output(theirs(ids))
        _close(ours.model(ids), wanted, case.error, exact)
        if ours.config.task is not None:
            return
        if any(layer.attention.one_pass for layer in ours.config.layers):
            with pytest.raises(UnsupportedError, match="has no cache"):
                ours.model.new_cache()
            return
        chunks = ids.split([*CHUNKS, case.tokens - sum(CHUNKS)], dim=1)
        if any(
            getattr(layer.attention.rope, "type", "") in STRETCHED for layer in ours.config.layers
        ):
            # What a cache holds was rotated before the switch, in both libraries.
            wanted, exact = _through_their_cache(theirs, chunks, use_cache=True), None
        cache = ours.model.new_cache()
        steps = [ours.model(chunk, cache=cache) for chunk in chunks]
        _close(torch.cat(steps, dim=1), wanted, case.error, exact)


def _through_their_cache(
    theirs: Any, chunks: Sequence[Tensor], called: str = "input_ids", **context: Any
) -> Tensor:
    past, steps = None, []
    for chunk in chunks:
        made = theirs(**{called: chunk}, past_key_values=past, **context)
        past = made.past_key_values
        steps.append(_output(made))
    return torch.cat(steps, dim=1)


def _encoder(case: Case, theirs: Any, ours: Checkpoint) -> None:
    ids = case.ids(batch=8)  # of one number each, where a head has one label
    if case.pixels is not None:
        with torch.no_grad():
            _close(ours.model(ids), _output(theirs(ids)))
        return
    lengths = torch.tensor([case.tokens, case.tokens // 2, 5, case.shortest] * 2)
    keep = torch.arange(case.tokens) < lengths[:, None]
    ids = ids.masked_fill(~keep, theirs.config.pad_token_id or 0)
    if ours.config.task is not None and ours.config.task.pooling == "end":
        ids[torch.arange(8), lengths - 1] = ours.config.eos_token_ids[0]
    segments, their_segments = case.named(ids)
    embedding = ours.config.embedding
    if embedding.num_segments > 1:
        segments["segments"] = (torch.arange(case.tokens) > 4).long().expand_as(ids)
        called = "langs" if embedding.segments_optional else "token_type_ids"
        their_segments[called] = segments["segments"]
    given = {"input_ids": ids, "attention_mask": keep.long(), **their_segments}
    moved = case.tokens - lengths if case.pads_left else torch.zeros_like(lengths)

    def tokens_of(made: Tensor) -> Tensor:
        """Without padding."""
        return made[keep] if made.ndim == 3 and made.shape[1] == case.tokens else made

    def wanted(theirs: Any) -> Tensor:
        made = _output(theirs(**{name: _rolled(x, moved) for name, x in given.items()}))
        if made.ndim == 3 and made.shape[1] == case.tokens:
            made = _rolled(made, -moved)
        if case.alone:
            for row, length in enumerate(lengths.tolist()):
                one = {name: each[row : row + 1, :length] for name, each in their_segments.items()}
                text = _output(theirs(ids[row : row + 1, :length], **one))[0]
                made[row, : len(text)] = text
        return tokens_of(made)

    with torch.no_grad():
        got = tokens_of(ours.model(ids, mask=KeyLengths(lengths), **segments))
        _close(got, wanted(theirs), case.error, lambda: wanted(_in_float64(case, theirs)))


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """Every row's tokens so many places further on."""
    return torch.stack([row.roll(int(n), 0) for row, n in zip(x, by, strict=True)])


def _output(made: Any) -> Tensor:
    """What our model gives, of transformers' several outputs."""
    if hasattr(made, "start_logits"):
        return torch.stack((made.start_logits, made.end_logits), dim=-1)
    names = ("logits", "prediction_logits", "text_embeds", "last_hidden_state")
    found: Tensor = next(getattr(made, name) for name in names if hasattr(made, name))
    # One number a token, for which transformers has no dimension.
    return found[..., None] if type(made).__name__ == "ElectraForPreTrainingOutput" else found


def _encoder_decoder(case: Case, theirs: Any, ours: Checkpoint) -> None:
    source, ids = case.source(), case.ids()
    context: dict[str, Any] = {"encoder_ids": source}
    their_context = {"input_features": source}
    if case.features is None:
        lengths = torch.tensor([source.shape[1], 3])
        keep = torch.arange(source.shape[1]) < lengths[:, None]
        context["encoder_mask"] = KeyLengths(lengths)
        their_context = {"input_ids": source, "attention_mask": keep.long()}
        named, theirs_named = case.named(source)
        context, their_context = context | named, their_context | theirs_named
    with torch.no_grad():
        # With a cache to fill, FSMT's decoder sees tokens ahead.
        made = theirs(decoder_input_ids=ids, use_cache=False, **their_context)
        wanted = made.logits if ours.config.head else made.last_hidden_state
        _close(ours.model(ids, **context), wanted)
        cache, steps = ours.model.new_cache(), []
        chunks = ids.split([*CHUNKS, case.tokens - sum(CHUNKS)], dim=1)
        if any(getattr(layer.feed_forward, "capacity", None) for layer in ours.config.layers):
            # Experts have room for so many tokens of a call, whatever they took before.
            wanted = _through_their_cache(theirs, chunks, "decoder_input_ids", **their_context)
        for chunk in chunks:
            steps.append(ours.model(chunk, cache=cache, **context))
            context = {}
        _close(torch.cat(steps, dim=1), wanted)


KINDS: Mapping[str, Callable[[Case, Any, Checkpoint], None]] = {
    "decoder": _decoder,
    "encoder": _encoder,
    "encoder-decoder": _encoder_decoder,
}


def _close(got: Tensor, wanted: Tensor, most: float = 5e-5, exact: Exact = None) -> None:
    """Both round to float32: where they differ by more, ours is near to what float64 gives."""
    assert got.shape == wanted.shape
    assert wanted.std() > 0.02, "the model's outputs are too small to tell them apart"
    error = float((got - wanted).abs().max() / wanted.std())
    if error >= most and exact is not None:
        error = float((got - exact()).abs().max() / wanted.std())
    assert error < most, f"largest difference is {error:.2g} standard deviations"


class _Float64(TorchFunctionMode):
    """In float64 also what code asks for in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _in_float64(case: Case, theirs: Any) -> Any:
    """The same model; experts' grouped products know no float64."""
    exact = copy.deepcopy(theirs).double()
    exact.set_experts_implementation("eager")
    if case.float64_gradient_error is not None:
        forward = exact.forward

        def throughout(*arguments: Any, **named: Any) -> Any:
            with _Float64():
                return forward(*arguments, **named)

        exact.forward = throughout
    return exact


def _same_number_of_parameters(theirs: Any, ours: Checkpoint, folder: Path) -> None:
    """As many as transformers writes, of which the table drops none that counts."""
    table = families()[ours.family or ""].tensors_of(theirs.config.to_dict())
    written = load_file(folder / "theirs" / "model.safetensors")
    wanted = sum(tensor.numel() for name, tensor in written.items() if not table.is_dropped(name))
    assert ours.model.parameter_counts().total == wanted
    assert counts(parameter_groups(ours.config)) == ours.model.parameter_counts()


def _loss(model: Any, case: Case, kind: str, *, is_ours: bool) -> Tensor:
    """A number that depends on every parameter, in the same way for both models."""
    ids = case.ids()
    if kind == "encoder-decoder":
        source = case.source()
        called = "input_ids" if case.features is None else "input_features"
        named, theirs_named = case.named(source)
        made = (
            model(ids, encoder_ids=source, **named)
            if is_ours
            else model(
                **{called: source, "decoder_input_ids": ids}, use_cache=False, **theirs_named
            )
        )
    else:
        made = model(ids, **case.named(ids)[not is_ours])
    out = made if is_ours else _output(made)
    if case.pixels is None and out.ndim == 3 and out.shape[-1] > int(ids.max()):
        return F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    generator = torch.Generator().manual_seed(3)
    return (out * torch.randn(out.shape, generator=generator)).mean()


def _same_gradients(case: Case, theirs: Any, ours: Checkpoint, folder: Path) -> None:
    """Both round to float32: where they differ by more, ours are near to what float64 gives."""
    in_float64 = _in_float64(case, theirs)  # before modules keep states with gradients
    wanted, exact = _their_gradients(case, theirs, ours, folder), None
    _loss(ours.model, case, ours.config.kind, is_ours=True).backward()
    seen = 0
    gradients = [tensor.grad for tensor in ours.model.parameters() if tensor.grad is not None]
    # Adding a number to all of a query's scores changes nothing, so the gradients of keys' biases
    # are 0 but for rounding.
    noise = 8 * torch.finfo(torch.float32).eps * float(max(g.abs().max() for g in gradients))
    for name, tensor in ours.model.named_parameters():
        if wanted[name].isnan().all():  # transformers does not train it
            continue
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        scale = wanted[name].abs().max()
        most = case.gradient_error * scale + noise
        if (grad - wanted[name]).abs().max() > most:
            exact = exact or _their_gradients(case, in_float64, ours, folder)
            assert (grad - exact[name]).abs().max() <= most, name
        seen += bool(scale > 0)
    assert seen > 3, "no parameter had a gradient"
    ours.model.zero_grad()
    if case.float64_gradient_error is not None:
        exact = exact or _their_gradients(case, in_float64, ours, folder)
        model = copy.deepcopy(ours.model).double()
        _loss(model, case, ours.config.kind, is_ours=True).backward()
        for name, tensor in model.named_parameters():
            if tensor.grad is not None:
                most = case.float64_gradient_error * exact[name].abs().max() + noise
                assert (tensor.grad - exact[name]).abs().max() <= most, name


def _their_gradients(
    case: Case, theirs: Any, ours: Checkpoint, folder: Path
) -> Mapping[str, Tensor]:
    """transformers' gradients, written as if they were weights, and read by the same loader."""
    written = copy.deepcopy(theirs)
    _loss(theirs, case, ours.config.kind, is_ours=False).backward()
    for tensor, source in zip(written.parameters(), theirs.parameters(), strict=True):
        tensor.data = torch.zeros_like(tensor) if source.grad is None else source.grad.clone()
    for tensor in (*written.buffers(), *written.parameters()):
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.data = torch.full_like(tensor, torch.nan)
    written.save_pretrained(folder / "gradients")
    values = json.loads((folder / "theirs" / "config.json").read_text())
    table = families()[values["model_type"]].tensors_of(values)
    found, _ = table.to_ours(
        load_file(folder / "gradients" / "model.safetensors"), ours.config, folder
    )
    return found


def _saved_back(case: Case, theirs: Any, ours: Checkpoint, folder: Path) -> None:
    save_checkpoint(ours, folder / "ours")
    again, report = getattr(transformers, case.auto).from_pretrained(
        folder / "ours", attn_implementation=case.attention, output_loading_info=True
    )
    assert again.config.model_type == case.model_type
    table = families()[case.model_type].tensors_of(theirs.config.to_dict())
    assert not report["unexpected_keys"]
    assert all(table.is_dropped(name) for name in report["missing_keys"])
    missing = set(report["missing_keys"])
    state = again.state_dict()
    if getattr(again.config, "rope_interleave", None) != getattr(
        theirs.config, "rope_interleave", None
    ):  # the same rows in the order that the family's files usually have
        state = {}
    for name, tensor in theirs.state_dict().items():
        if state and name not in missing and (name in state or not table.is_dropped(name)):
            assert torch.equal(state[name], tensor), name
    KINDS[ours.config.kind](case, again.eval(), ours)
