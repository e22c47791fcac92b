"""Files of an unknown ``model_type``: the nearest family is named, and tried where it is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import all_cases
from safetensors.torch import load_file, save_file

import polyhead as ph
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.checkpoints.nearest import nearest
from polyhead.errors import CheckpointError, ConfigError

WORDS = r"config\.json: model_type is 'novel', which is not known; the nearest is "


def _saved(folder: Path, model_type: str, drop: str = "", **keys: Any) -> Any:
    """A tiny model of a family under another name, with further keys, or one with another name."""
    theirs = all_cases()[model_type].build()
    theirs.save_pretrained(folder)
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), "model_type": "novel", **keys}
    values.pop(drop, None)
    path.write_text(json.dumps(values))
    return theirs


def _add(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def _files(model_type: str) -> tuple[Mapping[str, Any], dict[str, tuple[int, ...]]]:
    model = all_cases()[model_type].build()
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    return json.loads(model.config.to_json_string()), shapes


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3", "gemma2", "olmo2", "cohere", "phi3", "gpt2", "bert", "deepseek_v3", "lfm2"],
)
def test_a_family_under_another_name_is_nearest_to_itself(model_type: str) -> None:
    values, shapes = _files(model_type)
    found = nearest({**values, "model_type": "novel"}, shapes)
    assert found[0].count == 0
    assert model_type in [each.family.model_type for each in found]


def test_another_name_alone_is_loaded_as_the_family_that_is_given(tmp_path: Path) -> None:
    theirs = _saved(tmp_path, "llama")
    with pytest.raises(
        ConfigError,
        match=WORDS + r"'llama' \(.* as near\): its keys and tensors are those of the file\. "
        r"load\(\.\.\., family='llama'\) reads the files as that or says what does not fit$",
    ):
        load_checkpoint(tmp_path)
    ours = load_checkpoint(tmp_path, family="llama")
    ids = all_cases()["llama"].ids()
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert (ours.model(ids) - wanted).abs().max() < 5e-5 * wanted.std()
        model = ph.load(tmp_path, family="llama", expect=ph.LanguageModel)
        assert torch.equal(model.transformer(ids), ours.model(ids))
    save_checkpoint(ours, tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").family == "llama"


def test_code_of_its_own_is_a_warning(tmp_path: Path) -> None:
    _saved(tmp_path, "llama", auto_map={"AutoModelForCausalLM": "modeling_novel.NovelForCausalLM"})
    with pytest.raises(ConfigError, match=r"code of its own \(auto_map\) may compute otherwise$"):
        load_checkpoint(tmp_path)


def test_keys_and_tensors_that_differ_are_named_and_refused(tmp_path: Path) -> None:
    _saved(tmp_path, "llama", residual_gain=0.5)
    _add(tmp_path, **{"model.layers.0.gain.weight": torch.ones(32)})
    with pytest.raises(
        ConfigError,
        match=WORDS + r"'llama' \(.* as near\): it has no key 'residual_gain'; "
        r"it has no tensor 'model\.layers\.0\.gain\.weight'",
    ):
        load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"key 'residual_gain' \(value 0\.5\) is not understood"):
        load_checkpoint(tmp_path, family="llama")
    with pytest.raises(ConfigError, match="model_type is 'lama'; supported are"):
        load_checkpoint(tmp_path, family="lama")


def test_extra_and_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    _saved(tmp_path, "llama")
    _add(tmp_path, **{"model.layers.0.gain.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.gain\.weight' is one that the"):
        load_checkpoint(tmp_path, family="llama")
    path = tmp_path / "model.safetensors"
    kept = {name: each for name, each in load_file(path).items() if "k_proj" not in name}
    save_file(kept, path)
    with pytest.raises(ConfigError, match=r"it needs the tensor 'layers\.0\.attention\.k_proj"):
        load_checkpoint(tmp_path)


def test_a_key_under_another_name_is_named(tmp_path: Path) -> None:
    _saved(tmp_path, "llama", drop="num_hidden_layers", depth=2)
    words = r"'llama' .*: it has no key 'depth'; it needs the key 'num_hidden_layers'"
    with pytest.raises(ConfigError, match=WORDS + words):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers", "inner_group_num"])
@pytest.mark.parametrize("count", [2_000_000_000, "2000000000"])
def test_as_many_layers_as_no_model_has_are_not_counted(
    tmp_path: Path, key: str, count: object
) -> None:
    _saved(tmp_path, "llama", **{key: count})
    with pytest.raises(ConfigError, match=WORDS):
        load_checkpoint(tmp_path)


def test_what_is_near_to_nothing_lists_what_is_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "novel", "waves": 3, "tides": [1, 2]}')
    save_file(
        {"ocean.salt": torch.ones(3), "ocean.waves.0": torch.ones(3)}, tmp_path / "m.safetensors"
    )
    with pytest.raises(ConfigError, match=r"and no family is near .*; supported are llama, bert, "):
        load_checkpoint(tmp_path)


def test_family_is_for_hugging_face_directories(tmp_path: Path) -> None:
    _saved(tmp_path / "theirs", "llama")
    ours = load_checkpoint(tmp_path / "theirs", family="llama")
    save_checkpoint(ours, tmp_path / "own", form="polyhead")
    with pytest.raises(CheckpointError, match="polyhead's own form is of no family: got llama"):
        load_checkpoint(tmp_path / "own", family="llama")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"family is for a Hugging Face directory: got .*\.gguf"):
        load_checkpoint(path, family="llama")
