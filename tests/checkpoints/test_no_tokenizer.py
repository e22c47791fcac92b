"""Token ids as prompts, and models whose directory holds no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import BERTS, DECODERS

import polyhead as ph
from polyhead.errors import CheckpointError, InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ph.LanguageModel:
    folder = tmp_path_factory.mktemp("ids")
    DECODERS["llama, tied"].save(folder)
    found: ph.LanguageModel = ph.load(folder, expect=ph.LanguageModel)
    return found


def test_a_model_without_a_tokenizer_continues_ids(model: ph.LanguageModel) -> None:
    ids = [3, 1, 4, 1, 5]
    wanted: list[int] = []
    for _ in range(6):
        logits = model(torch.tensor([[*ids, *wanted]]))
        wanted.append(int(logits[0, -1].argmax()))
    made = model.generate(ids, max_new_tokens=6)
    assert made.ids == tuple(wanted)
    assert made.text == ""
    assert model.generate(torch.tensor(ids), max_new_tokens=6).ids == made.ids
    several = model.generate([torch.tensor(ids), torch.tensor([7, 7])], max_new_tokens=6)
    assert [each.ids for each in several] == [
        made.ids, model.generate([7, 7], max_new_tokens=6).ids
    ]  # fmt: skip
    assert model.tokenizer.pieces(ids) == ["[3]", "[1]", "[4]", "[1]", "[5]"]


def test_a_model_without_a_tokenizer_refuses_text(model: ph.LanguageModel, tmp_path: Path) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json .*give token ids"):
            call("text")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        model.generate([{"role": "user", "content": "text"}])
    BERTS["bert"].save(tmp_path)
    encoder = ph.load(tmp_path, expect=ph.TextEncoder)
    assert encoder(torch.tensor([[1, 2, 3]])).shape[:2] == (1, 3)
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        encoder.encode("text")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3, 131], "0 to 130: got 131"),
        ([-1], "0 to 130: got -1"),
        (torch.tensor([[1, 2]]), r"\[T\] and whole numbers: got torch.int64 of shape \[1, 2\]"),
        (torch.tensor([1.0]), "whole numbers: got torch.float32"),
    ],
)
def test_ids_that_cannot_be(model: ph.LanguageModel, ids: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        model.generate(ids)


def test_ids_have_no_chat_template(model: ph.LanguageModel) -> None:
    with pytest.raises(InputError, match="chat=True needs a text or messages: got token ids"):
        model.generate([1, 2], chat=True)


@pytest.mark.parametrize("case", [DECODERS["llama, tied"], BERTS["bert"]])
def test_a_loaded_model_is_saved_and_loads_again(case: Any, tmp_path: Path) -> None:
    case.save(tmp_path / "theirs")
    model = ph.load(tmp_path / "theirs")
    assert ph.save(model, tmp_path / "ours") == "hugging-face"
    again = ph.load(tmp_path / "ours", expect=type(model))
    assert again.config == model.config
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "ours" / "tokenizer.json").exists()
    with pytest.raises(TypeError, match="must be a Transformer or hold one: got Linear"):
        ph.save(torch.nn.Linear(2, 2), tmp_path)
