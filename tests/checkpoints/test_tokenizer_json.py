"""tokenizer.json of SentencePiece-like vocabularies, and the small files that go with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer

from polyhead.checkpoints import Tokenizer
from polyhead.errors import CheckpointError

WORDS = ["▁", "▁the", "▁cat", "th", "e", "t", "h", "c", "a", "▁t", "▁c", "at", "he", "s", "▁th"]
MERGES = [("▁", "t"), ("▁", "c"), ("t", "h"), ("a", "t"), ("▁t", "h"), ("▁th", "e"), ("▁c", "at")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of Llama 2: words begin with ▁, and unknown characters fall back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    path = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(path / "tokenizer.json"))
    return path


def _configured(folder: Path, **config: Any) -> Path:
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


def test_ids_equal_transformers_and_nothing_is_cut_or_padded(folder: Path) -> None:
    ours = Tokenizer.from_directory(_configured(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("the cat", "the cats  ate 🐟 the cats, ate the cat", "x", ""):
        assert ours.encode(text) == theirs(text).input_ids
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_pieces_are_readable(folder: Path) -> None:
    tokenizer = Tokenizer.from_directory(_configured(folder))
    pieces = tokenizer.pieces(tokenizer.encode("the cats é"))
    assert pieces == ["<s>", " the", " cat", "s", " ", "é₁", "é₂"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="the cats🐟é", max_size=30))
def test_streams_give_the_text_and_never_half_a_character(text: str, folder: Path) -> None:
    tokenizer = Tokenizer.from_directory(_configured(folder))
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    parts = [stream.push(token_id) for token_id in ids]
    assert not any("�" in part for part in parts)
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_eos_token": True}])
def test_what_surrounds_a_text_is_said_by_tokenizer_json_alone(
    flags: dict[str, bool], folder: Path
) -> None:
    ids = Tokenizer.from_directory(_configured(folder, **flags)).encode("the cat")
    assert ids == AutoTokenizer.from_pretrained(folder)("the cat").input_ids
    assert (ids[0], ids[-1] == 2) == (1, False)


def test_special_tokens_may_be_objects_and_lie_in_either_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    pad = {"pad_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(pad))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, None, 2)
    assert tokenizer.stop_ids == {0, 2}


def test_template_may_be_a_file_a_string_or_one_of_several(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    message = [{"role": "user", "content": "the cat"}]

    def rendered(**config: Any) -> str:
        return Tokenizer.from_directory(_configured(tmp_path, **config)).apply_chat_template(
            message
        )

    assert rendered(chat_template="{{ bos_token }}a") == "<s>a"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(chat_template=named) == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert rendered(chat_template="from the key") == "from the file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8 text"):
        rendered()


def test_broken_companions_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("place", ["model", "post_processor"])
def test_a_file_that_makes_rust_panic_is_refused_and_shows_no_backtrace(
    place: str, tmp_path: Path
) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    ends = [("</s>", 3)]
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends)
    values = json.loads(backend.to_str())
    if place == "model":
        values["model"]["continuing_subword_prefix"] = "a long prefix"
    else:
        values["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    script = f"""
import os
from pathlib import Path
from polyhead.checkpoints import Tokenizer
try:
    Tokenizer.from_directory(Path({str(tmp_path)!r}))
except ValueError as error:
    os.write(2, b"stderr is back")
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("CheckpointError ")
    assert "is not a valid tokenizer file: " in done.stdout
    assert done.stderr == "stderr is back"
