"""sentence-transformers' directories: vectors by the formula, from transformers' hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_tasks import TEXTS, WORDS, _pair

import polyhead as ph
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.errors import (
    CheckpointError,
    ContextLengthError,
    InputError,
    UnsupportedError,
)
from polyhead.generation import MultiVectorEncoder, TextEncoder

LONG = "paris is the capital of france in a city , of a city . berlin is in france !"
MODES = {
    "cls": lambda h: h[0],
    "max": lambda h: h.max(0),
    "mean": lambda h: h.mean(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: np.average(h, axis=0, weights=np.arange(1, len(h) + 1)),
    "lasttoken": lambda h: h[-1],
}
NAMESPACE = "sentence_transformers.models"


def _modules(folder: Path, *kinds: str) -> None:
    """modules.json with a folder for each module but the first, unless a kind names its package."""
    rows = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind.rpartition('.')[2]}" if i else "",
            "type": kind if "." in kind else f"{NAMESPACE}.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    for row in rows[1:]:
        (folder / str(row["path"])).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(rows))


def _write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def _dense(folder: Path, size: tuple[int, int], **values: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    weights = {"linear.weight": torch.randn(size), "linear.bias": torch.randn(size[0])}
    save_file(weights, folder / "model.safetensors")
    _write(folder / "config.json", in_features=size[1], out_features=size[0], bias=True, **values)
    return weights


def _hidden(theirs: Any, tokenizer: Any, text: str) -> np.ndarray:
    with torch.no_grad():
        made = theirs.base_model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return np.asarray(made)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("mode", [*MODES, "cls+mean+lasttoken"])
def test_every_pooling_then_dense_then_length_1(mode: str, old: bool, tmp_path: Path) -> None:
    theirs, tokenizer, _ = _pair(tmp_path, "MaskedLM")
    modes = mode.split("+")
    _modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize")
    keys = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
    keys["weightedmean"] = "weightedmean_tokens"
    if old:
        values: dict[str, Any] = {f"pooling_mode_{keys.get(m, m)}": m in modes for m in MODES}
    else:
        values = {"pooling_mode": modes if len(modes) > 1 else mode, "embedding_dimension": 24}
    _write(tmp_path / "1_Pooling" / "config.json", **values)
    name = "torch.nn.modules.activation.Tanh"
    linear = _dense(tmp_path / "2_Dense", (5, 24 * len(modes)), activation_function=name)
    ours = ph.load(tmp_path, expect=TextEncoder)
    unit, plain = ours.encode(TEXTS), ours.encode(TEXTS, normalize=False)
    for text, vector, longer in zip(TEXTS, unit, plain, strict=True):
        hidden = _hidden(theirs, tokenizer, text)
        pooled = torch.tensor(np.concatenate([MODES[m](hidden) for m in modes])).float()
        wanted = torch.tanh(linear["linear.weight"] @ pooled + linear["linear.bias"])
        torch.testing.assert_close(longer, wanted, atol=2e-5, rtol=0.0)
        torch.testing.assert_close(vector, wanted / wanted.norm(), atol=2e-5, rtol=0.0)
    ph.save(ours, tmp_path / "saved")
    again = ph.load(tmp_path / "saved", expect=TextEncoder)
    torch.testing.assert_close(again.encode(TEXTS), unit, atol=0.0, rtol=0.0)


def test_without_normalize_vectors_keep_their_length(tmp_path: Path) -> None:
    _pair(tmp_path, "MaskedLM")
    _modules(tmp_path, "Transformer", "Pooling")
    _write(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean")
    ours = ph.load(tmp_path, expect=TextEncoder)
    made = ours.encode(TEXTS)
    assert not torch.allclose(made.norm(dim=-1), torch.ones(len(TEXTS)), atol=0.1)
    assert torch.equal(ours.encode(TEXTS, normalize=True), torch.nn.functional.normalize(made))


@pytest.mark.parametrize("include", [True, False])
def test_prompts_stand_before_texts_and_may_be_left_out_of_the_mean(
    include: bool, tmp_path: Path
) -> None:
    theirs, tokenizer, _ = _pair(tmp_path, "MaskedLM")
    _modules(tmp_path, "Transformer", "Pooling")
    _write(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean", include_prompt=include)
    _write(
        tmp_path / "config_sentence_transformers.json",
        prompts={"query": "a city . ", "document": "in "},
        default_prompt_name="query",
        similarity_fn_name="manhattan",
    )
    ours = ph.load(tmp_path, expect=TextEncoder)
    for prompt, before, tokens in (
        (None, "a city . ", 3),
        ("document", "in ", 1),
        ("of ", "of ", 1),
    ):
        for text, vector in zip(TEXTS, ours.encode(TEXTS, prompt=prompt), strict=True):
            hidden = _hidden(theirs, tokenizer, before + text)
            wanted = (hidden if include else hidden[1 + tokens :]).mean(0)
            assert np.allclose(vector, wanted, atol=2e-5)
    bare = ours.encode(TEXTS, prompt="")
    assert np.allclose(bare[1], _hidden(theirs, tokenizer, TEXTS[1]).mean(0), atol=2e-5)
    near = ours.similarity(bare[:2], bare)
    assert torch.allclose(near, -(bare[:2, None] - bare).abs().sum(-1), atol=1e-4)


def test_a_text_is_cut_only_where_the_caller_says_so(tmp_path: Path) -> None:
    theirs, tokenizer, _ = _pair(tmp_path, "MaskedLM")
    _modules(tmp_path, "Transformer", "Pooling")
    _write(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean")
    _write(tmp_path / "sentence_bert_config.json", max_seq_length=9, do_lower_case=True)
    ours = ph.load(tmp_path, expect=TextEncoder)
    with pytest.raises(ContextLengthError, match=r"has 21 tokens, max_length is 9.*truncate=True"):
        ours.encode(LONG)
    with torch.no_grad():
        batch = tokenizer(LONG, truncation=True, max_length=9, return_tensors="pt")
        wanted = theirs.bert(**batch).last_hidden_state[0].mean(0)
    assert torch.allclose(ours.encode(LONG.upper(), truncate=True)[0], wanted, atol=2e-5)


@pytest.mark.parametrize("most", [5, 6, 9, 14, 24])
def test_the_longer_of_two_texts_is_cut_first(most: int, tmp_path: Path) -> None:
    _, tokenizer, ours = _pair(tmp_path, "MaskedLM")
    for pair in ((LONG, "a city in france"), ("a city", LONG), (LONG, LONG), ("a", "a")):
        wanted = tokenizer(*pair, truncation="longest_first", max_length=most)
        made = ours.tokenizer.shortened(most, *pair)
        assert (made.ids, made.type_ids) == (wanted["input_ids"], wanted["token_type_ids"])


@pytest.mark.parametrize("labels", [1, 3])
def test_a_cross_encoder_scores_and_ranks(labels: int, tmp_path: Path) -> None:
    theirs, tokenizer, _ = _pair(tmp_path, "SequenceClassification", num_labels=labels)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    pairs = [(a, b) for a in TEXTS[:2] for b in TEXTS]
    with torch.no_grad():
        batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
        logits = theirs(**batch).logits
    kinds = {
        None: logits.sigmoid() if labels == 1 else logits,
        "torch.nn.modules.linear.Identity": logits,
        "torch.nn.modules.activation.Tanh": logits.tanh(),
    }
    for name, wanted in kinds.items():
        for key in ("sbert_ce_default_activation_function", "sentence_transformers"):
            value = {"activation_fn": name} if key == "sentence_transformers" else name
            path.write_text(json.dumps(config if name is None else config | {key: value}))
            ours = ph.load(tmp_path, expect=TextEncoder)
            made = ours.predict(pairs)
            assert torch.allclose(made, wanted[:, 0] if labels == 1 else wanted, atol=2e-5)
            save_checkpoint(load_checkpoint(tmp_path), tmp_path / "saved")
            again = ph.load(tmp_path / "saved", expect=TextEncoder)
            assert torch.equal(again.predict(pairs), made)
    assert torch.allclose(ours.predict(pairs, function="softmax").flatten(), (
        logits.softmax(-1).flatten()), atol=2e-5)  # fmt: skip
    if labels == 3:
        with pytest.raises(UnsupportedError, match="one class: this model has 3; use predict"):
            ours.rank(TEXTS[0], TEXTS)
        return
    order = logits[: len(TEXTS), 0].argsort(descending=True).tolist()
    found = ours.rank(TEXTS[0], TEXTS, top_k=3)
    assert [each.index for each in found] == order[:3]
    assert [each.text for each in found] == [TEXTS[i] for i in order[:3]]


def _vectors(theirs: Any, ids: list[int], real: int, weight: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor([[i < real for i in range(len(ids))]]).long()
    with torch.no_grad():
        hidden = theirs.base_model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden @ weight.mT, dim=-1)


def _late(folder: Path, own: bool, **options: Any) -> tuple[Any, torch.Tensor]:
    """A tiny ColBERT, in PyLate's files or in ColBERT's own; the words of, in mark texts."""
    theirs, _, _ = _pair(folder, "MaskedLM")
    torch.manual_seed(2)
    weight = torch.randn(5, 24)
    if not own:
        _modules(folder, "Transformer", "pylate.models.Dense.Dense")
        save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
        name = "torch.nn.modules.linear.Identity"
        sizes = {"in_features": 24, "out_features": 5, "bias": False}
        _write(folder / "1_Dense" / "config.json", **sizes, activation_function=name)
        _write(
            folder / "config_sentence_transformers.json",
            similarity_fn_name="MaxSim", query_prefix="of", document_prefix="in",
            query_length=10, document_length=12, skiplist_words=[".", "!"], **options,
        )  # fmt: skip
        return theirs, weight
    tensors = {k: v for k, v in theirs.state_dict().items() if k.startswith("bert.")}
    save_file({k: v.clone() for k, v in tensors.items()} | {"linear.weight": weight},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    _write(folder / "config.json", **config | {"architectures": ["HF_ColBERT"]})
    _write(
        folder / "artifact.metadata",
        query_token_id="of", doc_token_id="in", query_maxlen=10, doc_maxlen=12,
        attend_to_mask_tokens=options.get("attend_to_expansion_tokens", False),
    )  # fmt: skip
    return theirs, weight


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("attend", [False, True])
def test_late_interaction_compares_tokens(own: bool, attend: bool, tmp_path: Path) -> None:
    theirs, weight = _late(tmp_path, own, attend_to_expansion_tokens=attend)
    ours = ph.load(tmp_path, expect=TextEncoder)
    assert isinstance(ours, MultiVectorEncoder)
    place = {token: i for i, token in enumerate(WORDS.split())}
    dropped = {place[token] for token in ((".", "!", ",") if own else (".", "!"))}
    queries, documents = [], []
    for text in [*TEXTS, LONG]:
        ids = ours.tokenizer.encode(text)
        query = (
            [ids[0], place["of"], *ids[1:]]
            if len(ids) < 10
            else [ids[0], place["of"], *ids[1:8], 3]
        )
        real = 10 if attend else len(query)
        queries.append(
            _vectors(theirs, query + [place["[MASK]"]] * (10 - len(query)), real, weight)
        )
        cut = (
            [ids[0], place["in"], *ids[1:]]
            if len(ids) < 12
            else [ids[0], place["in"], *ids[1:10], 3]
        )
        kept = torch.tensor([token not in dropped for token in cut])
        documents.append(_vectors(theirs, cut, len(cut), weight)[kept])
    for made, wanted in (
        (ours.encode_queries([*TEXTS, LONG]), queries),
        (ours.encode_documents([*TEXTS, LONG], batch_size=2), documents),
    ):
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0.0)
    wanted = torch.tensor(
        [[float((q @ d.mT).max(1).values.sum()) for d in documents] for q in queries]
    )
    found = ours.scores(ours.encode_queries([*TEXTS, LONG]), ours.encode_documents([*TEXTS, LONG]))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)
    order = [each.index for each in ours.rank(TEXTS[0], [*TEXTS, LONG])]
    assert order == wanted[0].argsort(descending=True).tolist()
    with pytest.raises(UnsupportedError, match="encode_queries"):
        ours.encode(TEXTS)
    with pytest.raises(ContextLengthError, match="max_length is 11"):
        ours.encode_documents(LONG, truncate=False)
    ph.save(ours, tmp_path / "saved")
    again = ph.load(tmp_path / "saved", expect=TextEncoder)
    assert torch.equal(again.encode_queries(LONG)[0], ours.encode_queries(LONG)[0])


def test_queries_that_are_not_filled_up_have_their_own_tokens_alone(tmp_path: Path) -> None:
    _late(tmp_path, False, do_query_expansion=False, attend_to_expansion_tokens=True)
    ours = ph.load(tmp_path, expect=TextEncoder)
    assert [len(each) for each in ours.encode_queries(["a city", LONG])] == [5, 10]


def test_a_decoder_whose_modules_pool_gives_vectors(tmp_path: Path) -> None:
    _, tokenizer, _ = _pair(tmp_path, "MaskedLM")
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS.split()), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=64,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    theirs = transformers.Qwen3Model(config).eval()
    theirs.save_pretrained(tmp_path)
    _modules(tmp_path, "Transformer", "Pooling", "Normalize")
    _write(tmp_path / "1_Pooling" / "config.json", pooling_mode_lasttoken=True)
    ours = ph.load(tmp_path, expect=TextEncoder)
    for text, vector in zip(TEXTS, ours.encode(TEXTS), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            wanted = theirs(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, wanted / wanted.norm(), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            ("Transformer", "Pooling", "CNN"),
            r"models.CNN'? is not built: only Transformer, Pooling",
        ),
        (("WordEmbeddings", "Pooling"), r"models.WordEmbeddings'? is not built"),
        (("custom_st.Transformer", "Pooling"), r"custom_st.Transformer'? is not built"),
        (("Pooling",), r"built only as the first module"),
        (("Transformer", "Normalize", "Pooling"), r"built only once, behind Transformer"),
    ],
)
def test_a_module_that_is_not_built_is_refused_by_name(
    kinds: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    _pair(tmp_path, "MaskedLM")
    _modules(tmp_path, *kinds)
    with pytest.raises(UnsupportedError, match=message):
        ph.load(tmp_path)


def test_files_that_say_something_impossible_are_refused(tmp_path: Path) -> None:
    _pair(tmp_path, "MaskedLM")
    _modules(tmp_path, "Transformer", "Pooling", "Dense")
    _write(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean")
    dense = tmp_path / "2_Dense"
    _write(dense / "config.json", in_features=24, out_features=5)
    with pytest.raises(CheckpointError, match=r"no model.safetensors.*pickled weights are not"):
        ph.load(tmp_path)
    _dense(dense, (5, 24), activation_function="os.system")
    with pytest.raises(UnsupportedError, match=r"activation_function must be one of.*os.system"):
        ph.load(tmp_path)
    _dense(dense, (5, 24))
    _write(dense / "config.json", in_features=24, out_features=6)
    with pytest.raises(CheckpointError, match=r"must hold linear.weight \(6, 24\)"):
        ph.load(tmp_path)
    _dense(dense, (5, 24))
    settings = tmp_path / "config_sentence_transformers.json"
    for values, error, message in (
        ({"prompts": {"query": 3}}, CheckpointError, "prompts must be texts by name"),
        ({"default_prompt_name": "x"}, CheckpointError, "default_prompt_name must be one of"),
        ({"similarity_fn_name": "bm25"}, UnsupportedError, "similarity_fn_name must be one of"),
    ):
        _write(settings, **values)
        with pytest.raises(error, match=message):
            ph.load(tmp_path)
    settings.unlink()
    _write(tmp_path / "sentence_bert_config.json", max_seq_length=0)
    with pytest.raises(CheckpointError, match="max_seq_length must be a whole number of at least"):
        ph.load(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    with pytest.raises(CheckpointError, match="module 0 must have a type and a path"):
        ph.load(tmp_path)
    row = {"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}
    (tmp_path / "modules.json").write_text(json.dumps([row]))
    with pytest.raises(CheckpointError, match="path of module 0 leads out of the directory"):
        ph.load(tmp_path)


def test_late_interaction_needs_its_tokens(tmp_path: Path) -> None:
    _late(tmp_path, False)
    path = tmp_path / "config_sentence_transformers.json"
    said = json.loads(path.read_text())
    _write(path, **said | {"query_prefix": "[Q] "})
    with pytest.raises(InputError, match=r"no token '\[Q\] ', which late interaction needs"):
        ph.load(tmp_path)
    _write(path, **said | {"query_length": "ten"})
    with pytest.raises(CheckpointError, match="query_length must be a int: got 'ten'"):
        ph.load(tmp_path)
