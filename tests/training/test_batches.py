"""Texts to batches: what files may hold, and that packed documents are as if they were apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polyhead as ph
from polyhead._utils.checks import needed
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import InputError
from polyhead.models import Transformer
from polyhead.training.batches import Batches, Packed, PackedDocuments, PaddedPairs, Row, pack
from polyhead.training.corpora import Pair
from polyhead.training.corpora.bible import RULES, by_rules
from polyhead.training.corpora.numbers import numbers
from polyhead.training.texts import documents_of, pairs_of_files, pairs_of_table
from polyhead.training.vocabulary import make_tokenizer

V = 31
LAYER = LayerConfig(AttentionConfig(4, 2, 8, rope=RopeConfig()), FeedForwardConfig(48))
ROTARY = TransformerConfig("decoder", V, 16, 64, (LAYER,) * 2)
LEARNED = replace(
    ROTARY,
    embedding=EmbeddingConfig("learned"),
    layers=(replace(LAYER, attention=replace(LAYER.attention, rope=None)),) * 2,
)


@pytest.mark.parametrize(
    ("config", "positions"), [(ROTARY, False), (ROTARY, True), (LEARNED, True)]
)
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(
    config: TransformerConfig, positions: bool
) -> None:
    torch.manual_seed(0)
    model = ph.Trainable(Transformer(config)).train()
    documents = [torch.randint(V, (n,)).tolist() for n in (7, 12, 1, 5, 9, 4)]
    rows = pack(documents, 16)
    assert [row.lengths for row in rows] == [[7, 9], [3, 1, 5, 7], [2, 4]]
    assert [i for row in rows for i in row.ids] == [i for each in documents for i in each]
    batch = PackedDocuments(positions=positions)(rows)
    assert ("position_ids" in batch) == positions
    packed = model(**batch)["loss"]
    packed.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    pieces: list[list[int]] = []
    for row in rows:
        rest = list(row.ids)
        for length in row.lengths:
            pieces.append(rest[:length])
            rest = rest[length:]
    predicted = sum(len(piece) - 1 for piece in pieces)
    total = 0.0
    for piece in pieces:
        ids = torch.tensor([piece])
        loss = model(ids, labels=ids, num_items_in_batch=predicted)["loss"]
        loss.backward()
        total += float(loss.detach())
    assert float(packed.detach()) == pytest.approx(total, rel=1e-5)
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs is not None
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp_min(1e-3)


def test_padded_pairs_and_batches_of_similar_length() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (200, 2), generator=generator).tolist()
    rows = [Row([5] * a, [6] * b) for a, b in lengths]
    batches = Batches(rows, PaddedPairs(0), 64, seed=1)
    count = len(batches.epoch())
    seen = [batches(number) for number in range(2 * count)]
    first = [len(batch["labels"]) for batch in seen]
    assert all(max(b["input_ids"].numel(), b["labels"].numel()) <= 64 for b in seen)
    assert sum(first[:count]) > 150
    real = sum(int((b["input_ids"] == 5).sum()) for b in seen)
    assert real > 0.6 * sum(b["input_ids"].numel() for b in seen)
    batch = PaddedPairs(9)([Row([1, 2, 3], [4]), Row([5], [6, 7])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[4, -100], [6, 7]]
    again = Batches(rows, PaddedPairs(0), 64, seed=1)
    for number in (2 * count - 1, 0, 5):  # in any order
        for name, tensor in again(number).items():
            assert torch.equal(tensor, seen[number][name])
    other = Batches(rows, PaddedPairs(0), 64, seed=2)
    assert any(not torch.equal(other(n)["labels"], seen[n]["labels"]) for n in range(3))
    packed = Batches([Packed([1, 2], [2])] * 3, PackedDocuments(), 2)
    assert [packed(n)["input_ids"].shape for n in range(4)] == [(1, 2)] * 4
    with pytest.raises(InputError, match="no rows"):
        Batches([], PaddedPairs(0), 64)


@pytest.mark.parametrize("count", [50, 300])
def test_every_row_comes_once_in_an_epoch(count: int) -> None:
    """Of more rows than are sorted by length together (114 here), too."""
    rows = [Row([number] * (1 + number % 7), [1]) for number in range(count)]
    batches = Batches(rows, PaddedPairs(99), 16, seed=3)
    seen: list[int] = []
    number = 0
    while len(seen) < 2 * count:
        seen += batches(number)["input_ids"][:, 0].tolist()
        number += 1
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(range(count))
    assert seen[:count] != seen[count:]


def test_files_that_cannot_be_used_are_said_with_their_line(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    good = file("a.tsv", b"eins\tone\nzwei\ttwo\n")
    assert pairs_of_table(good)[1] == Pair("zwei", "two", f"{good}, line 2")
    for content, message in (
        (b"eins\tone\nzwei two\n", r"b\.tsv, line 2: a pair is two texts with a tab .* got 1"),
        (b"eins\tone\nzwei\ttwo\tdue\n", r"line 2: a pair is .* got 3"),
        (b"eins\tone\n\n", r"line 2: a pair is .* got 1"),
        (b"eins\tone\n \ttwo\n", r"line 2: the source is empty"),
        (b"eins\tone\nzwei\t\xff\n", r"b\.tsv, line 2: not UTF-8: a byte is 0xff"),
        (b"\n\n", r"b\.tsv is empty"),
    ):
        with pytest.raises(InputError, match=message):
            pairs_of_table(file("b.tsv", content))
    ours, theirs = file("x.de", b"eins\nzwei\n"), file("x.en", b"one\ntwo\n")
    assert [pair.target for pair in pairs_of_files(ours, theirs)] == ["one", "two"]
    with pytest.raises(InputError, match=r"x\.de has 2 lines and .*short 1: line by line"):
        pairs_of_files(ours, file("short", b"one\n"))
    with pytest.raises(InputError, match=r"line 2: the target is empty"):
        pairs_of_files(ours, file("gap", b"one\n\n"))
    with pytest.raises(InputError, match=r"cannot read .*absent"):
        pairs_of_files(ours, tmp_path / "absent")
    text = file("t.txt", b"\nfirst\nstill\n\n\nsecond\n")
    assert documents_of([text], "paragraphs") == ["first\nstill", "second"]
    assert documents_of([text, text], "files") == ["\nfirst\nstill\n\n\nsecond"] * 2
    assert documents_of([text], "lines") == ["first", "still", "second"]
    with pytest.raises(InputError, match="no text files"):
        documents_of([])


@pytest.mark.parametrize("kind", ["bytes", "characters", "words"])
def test_a_vocabulary_spells_its_texts(kind: str, tmp_path: Path) -> None:
    texts = ["siebenundachtzig und acht", "eighty-seven", "ein Zeile\nund noch eine  ä"]
    made = make_tokenizer(texts, kind, 300)  # type: ignore[arg-type]
    assert (made.eos_token_id, made.pad_token_id) == (0, made.vocab_size - 1)
    made.save(tmp_path)
    again = type(made).from_directory(tmp_path)
    for text in texts:
        ids = again.encode(text)
        assert ids[-1] == 0
        said = again.decode(ids[:-1])
        assert said == (" ".join(text.split()) if kind == "words" else text)
    if kind == "bytes":
        assert again.decode(again.encode("ὁ λόγος")[:-1]) == "ὁ λόγος"
    with pytest.raises(InputError, match="no texts"):
        make_tokenizer([" "], "bytes")


@pytest.mark.slow
def test_the_corpus_of_numbers() -> None:
    corpus = numbers()
    held = {pair.source for pair in corpus.held_out}
    assert len(held) == 300
    assert not held & {pair.source for pair in corpus.training}
    by_name = {pair.source: pair.target for pair in (*corpus.training, *corpus.held_out)}
    assert by_name["siebenundachtzig"] == "eighty-seven"


def test_rules_of_the_bible() -> None:
    assert len(RULES) == 13
    said = "And the LORD said unto Moses, Whither walkest thou? He giveth [it] to thy son."
    assert by_rules(said) == "And Yahweh said to Moses, Whither walk you? He givs it to your son."
    with pytest.raises(InputError, match=r"the package no-such: pip install 'polyhead\[bible\]'"):
        needed("no_such.part", "polyhead[bible]")
