"""``polyhead.load``: the right kind of model for what is there, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import byte_tokenizer, decoder, encoder, write_decoder

import polyhead as ph
from polyhead.checkpoints.formats.sentence_modules import Sentences
from polyhead.generation.pipelines import loading


def test_directory_loads_as_the_model_it_holds(tmp_path: Path) -> None:
    model = ph.load(write_decoder(tmp_path / "tiny"))
    assert isinstance(model, ph.LanguageModel)
    assert not model.training
    ids = torch.tensor([model.tokenizer.encode("The animal")])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), decoder()(ids), atol=1e-5, rtol=1e-5)
    text = model.generate("The animal", max_new_tokens=8).text
    wanted = ph.LanguageModel(decoder(), byte_tokenizer()).generate("The animal", max_new_tokens=8)
    assert text == wanted.text


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_that_of_the_weights(tmp_path: Path, dtype: str | torch.dtype) -> None:
    model = ph.load(str(write_decoder(tmp_path / "tiny")), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert len(model.generate("Hello", max_new_tokens=3).ids) == 3


def test_encoder_loads_as_a_text_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    found = SimpleNamespace(
        config=model.config,
        model=model,
        tokenizer=byte_tokenizer(),
        origin="here",
        pooling="mean",
        sentences=Sentences(),
    )
    monkeypatch.setattr(loading, "load_checkpoint", lambda *arguments, **options: found)
    loaded = ph.load("anything")
    assert isinstance(loaded, ph.TextEncoder)
    assert loaded.origin == "here"


def test_encoder_of_images_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    images = SimpleNamespace(kind="encoder", embedding=SimpleNamespace(frontend=object()))
    found = SimpleNamespace(config=images, origin="here")
    monkeypatch.setattr(loading, "load_checkpoint", lambda *arguments, **options: found)
    with pytest.raises(ph.UnsupportedError, match="some-vit is a vision encoder"):
        ph.load("some-vit")


def test_unknown_dtype_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*: got 'int4'"):
        ph.load("no-such-model", dtype="int4")


def test_progress_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load_checkpoint(*arguments: object, **options: object) -> object:
        seen.append(arguments)
        raise ph.CheckpointError("enough")

    monkeypatch.setattr(loading, "load_checkpoint", load_checkpoint)

    def report(what: str, done: int, total: int) -> None: ...

    with pytest.raises(ph.CheckpointError, match="enough"):
        ph.load("x", progress=report)
    assert seen == [("x", None, report)]
