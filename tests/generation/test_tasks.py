"""What encoders with heads answer has the numbers of transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import polyhead as ph
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.errors import ContextLengthError, InputError, UnsupportedError
from polyhead.generation import TextEncoder
from polyhead.generation.pipelines.tasks import _spans

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] paris is the capital of france in ##s a city berlin , . !"
TEXTS = [
    "Paris is the capital of France.",
    "a city",
    "Berlins, in the Paris is!",
    "zzz a city of capitals . Berlin is in France",
]
NAMES = {0: "O", 1: "B-LOC", 2: "I-LOC", 3: "PER"}


def _backend() -> Backend:
    vocabulary = {token: i for i, token in enumerate(WORDS.split())}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(WORDS.split()[:5])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


def _pair(folder: Path, head: str, **options: Any) -> tuple[Any, Any, TextEncoder]:
    """A tiny BERT of transformers with its tokenizer, and the same loaded here."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(WORDS.split()), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=32, max_position_embeddings=24, **options,
    )  # fmt: skip
    theirs = getattr(transformers, f"BertFor{head}")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    theirs.save_pretrained(folder)
    names = ("pad", "unk", "cls", "sep", "mask")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        **{f"{name}_token": f"[{name.upper()}]" for name in names},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    return theirs, tokenizer, ph.load(folder, expect=TextEncoder)


def _same(ours: float, theirs: float) -> None:
    assert ours == pytest.approx(theirs, abs=2e-6)


@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_texts(labels: int, tmp_path: Path) -> None:
    theirs, tokenizer, ours = _pair(tmp_path, "SequenceClassification", num_labels=labels)
    pipeline = transformers.pipeline("text-classification", model=theirs, tokenizer=tokenizer)
    wanted = pipeline(TEXTS, top_k=None)
    made = ours.classify(TEXTS, batch_size=3)
    for row, their_row in zip(made, wanted, strict=True):
        assert [each.label for each in row] == [each["label"] for each in their_row]
        for each, other in zip(row, their_row, strict=True):
            _same(each.score, other["score"])
    both = ours.classify((TEXTS[0], TEXTS[1]), function="none")
    wanted = pipeline(
        {"text": TEXTS[0], "text_pair": TEXTS[1]}, top_k=None, function_to_apply="none"
    )
    for each, other in zip(both, wanted, strict=True):
        assert each.label == other["label"]
        _same(each.score, other["score"])
    alone = ours.classify(TEXTS[0])
    assert [each.label for each in alone] == [each.label for each in made[0]]


def test_masked_tokens(tmp_path: Path) -> None:
    theirs, tokenizer, ours = _pair(tmp_path, "MaskedLM")
    pipeline = transformers.pipeline("fill-mask", model=theirs, tokenizer=tokenizer, top_k=4)
    text = "The capital of France is [MASK]."
    for each, other in zip(ours.fill(text, top_k=4), pipeline(text), strict=True):
        assert (each.token_id, each.token, each.text) == (
            other["token"],
            other["token_str"],
            other["sequence"],
        )
        _same(each.score, other["score"])
    two = ours.fill("[MASK] is [MASK].", top_k=2)
    wanted = [each for mask in pipeline("[MASK] is [MASK].", top_k=2) for each in mask]
    assert [each.token_id for each in two] == [each["token"] for each in wanted]
    assert [each.position for each in two] == [1, 1, 3, 3]
    with pytest.raises(InputError, match=r"text must hold \[MASK\].*got 'Paris'"):
        ours.fill("Paris")


def test_classes_of_tokens(tmp_path: Path) -> None:
    back = {name: i for i, name in NAMES.items()}
    theirs, tokenizer, ours = _pair(tmp_path, "TokenClassification", id2label=NAMES, label2id=back)
    for group in (True, False):
        pipeline = transformers.pipeline(
            "token-classification",
            model=theirs,
            tokenizer=tokenizer,
            aggregation_strategy="simple" if group else "none",
        )
        for text, made in zip(TEXTS, ours.tag(TEXTS, group=group), strict=True):
            wanted = pipeline(text)
            assert len(made) == len(wanted)
            for each, other in zip(made, wanted, strict=True):
                label = other["entity_group"] if group else other["entity"]
                assert (each.label, each.start, each.end) == (label, other["start"], other["end"])
                assert each.text == text[each.start : each.end]
                _same(each.score, float(other["score"]))
    assert {each.label for each in ours.tag(TEXTS[0], ignored=())} >= {"O"}


def test_answers_are_the_likeliest_spans_of_the_context(tmp_path: Path) -> None:
    theirs, tokenizer, ours = _pair(tmp_path, "QuestionAnswering")
    question, context = "the capital of France!", "Berlins is a city, Paris is the capital."
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets, inner = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
    with torch.no_grad():
        made = theirs(**encoded)
    allowed = np.array([kind == 1 or i == 0 for i, kind in enumerate(inner)])
    sides = []
    for logits in (made.start_logits[0].numpy(), made.end_logits[0].numpy()):
        powers = np.exp(np.where(allowed, logits, -np.inf).astype(np.float64))
        sides.append(powers / powers.sum())
    spans = {
        (i, j): sides[0][i] * sides[1][j]
        for i in range(len(inner))
        for j in range(i, min(len(inner), i + 3))
        if inner[i] == inner[j] == 1
    }
    best = sorted(spans, key=lambda each: -spans[each])[:4]
    found = ours.answer(question, context, top_k=4, longest=3)
    for span, (i, j) in zip(found, best, strict=True):
        _same(span.score, spans[i, j])
        assert span.text == context[span.start : span.end]
        assert span.start <= offsets[i][0]
        assert span.end >= offsets[j][1]
        assert not context[span.start - 1 : span.start].isalpha()
        assert not context[span.end : span.end + 1].isalpha()
    with pytest.raises(ContextLengthError, match=r"text 0 has 29 tokens.*holds 24"):
        ours.answer("a " * 13, "a " * 13)
    with pytest.raises(InputError, match="context must be a text that is not empty"):
        ours.answer("a", "")


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken", "median_tokens"])
def test_vectors_are_pooled_as_the_files_say(mode: str, tmp_path: Path) -> None:
    theirs, tokenizer, _ = _pair(tmp_path, "MaskedLM")
    (tmp_path / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", mode)}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"width": 24} | modes))
    ours = ph.load(tmp_path, expect=TextEncoder)
    for form in ("hugging-face", "polyhead"):
        save_checkpoint(load_checkpoint(tmp_path), tmp_path / "saved", form=form)
        assert load_checkpoint(tmp_path / "saved").pooling == ours.pooling
    if mode == "median_tokens":
        with pytest.raises(
            UnsupportedError, match=r"pooling is 'pooling_mode_median_tokens'.*'first'"
        ):
            ours.encode(TEXTS)
        return
    for text, vector in zip(TEXTS, ours.encode(TEXTS, normalize=False), strict=True):
        with torch.no_grad():
            hidden = theirs.bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        kinds = {"cls_token": hidden[0], "lasttoken": hidden[-1]}
        assert torch.allclose(vector, kinds.get(mode, hidden.mean(dim=0)), atol=1e-5)


def test_a_question_that_the_head_does_not_answer_is_refused(tmp_path: Path) -> None:
    _, _, ours = _pair(tmp_path, "MaskedLM")
    with pytest.raises(
        UnsupportedError, match=r"classify needs a head of classes of texts.*fill\(\)"
    ):
        ours.classify("a")
    for ask in (lambda: ours.tag("a"), lambda: ours.answer("a", "a city")):
        with pytest.raises(UnsupportedError, match=r"needs a head of .*masked tokens: use fill"):
            ask()
    _, _, other = _pair(tmp_path, "SequenceClassification")
    with pytest.raises(UnsupportedError, match=r"fill needs a head of masked tokens.*classify\(\)"):
        other.fill("[MASK]")
    with pytest.raises(InputError, match="text 1 is empty"):
        other.classify(["a", ""])
    with pytest.raises(InputError, match="at least one text: got none"):
        other.classify([])
    with pytest.raises(ValueError, match=r"function must be 'softmax'.*got 'tanh'"):
        other.classify("a", function="tanh")


def test_neighbours_of_one_class_are_one_span_unless_a_new_one_begins() -> None:
    class Encoding:
        offsets = ((0, 0), (0, 3), (4, 7), (8, 11), (12, 15), (16, 19))
        special_tokens_mask = (1, 0, 0, 0, 0, 0)

    scores = torch.eye(4)[[0, 1, 2, 1, 3, 3]]  # -, B-LOC, I-LOC, B-LOC, PER, PER
    found = _spans("aaa bbb ccc ddd eee", Encoding, scores, list(NAMES.values()), True, ())
    assert [(span.text, span.label) for span in found] == [
        ("aaa bbb", "LOC"), ("ccc", "LOC"), ("ddd eee", "PER"),
    ]  # fmt: skip
