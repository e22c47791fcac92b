"""``polyhead quantize``: a file that polyhead and the gguf package read, and what it costs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from process import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from gguf_tiny import write_gguf
from hf_tiny import Tiny

from polyhead.checkpoints import load_checkpoint
from polyhead.checkpoints.formats import gguf_writing
from polyhead.checkpoints.formats.gguf_writing import quantize_gguf
from polyhead.quantization import block_type


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose down projections have rows of 256, all others of 96."""
    model = Tiny("Llama", {"hidden_size": 96, "intermediate_size": 256}).build()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_a_file_of_fewer_bits_is_written_and_measured(
    run: Run, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 3)
    result = run(
        *("quantize", str(source), "--type", "Q4_K", "--out", "new.gguf"),
        *("--text", "text.txt", "--json"),
    )
    assert (result.code, result.err) == (0, "")
    shown = json.loads(result.out)
    assert shown["types"]["Q4_K"] == 3  # the down projections
    assert shown["types"]["Q5_0"] > 10  # rows that are no whole blocks of 256
    assert shown["after"]["bytes"] == (tmp_path / "new.gguf").stat().st_size
    assert shown["after"]["bytes"] < shown["before"]["bytes"] / 2
    assert abs(shown["after"]["perplexity"] / shown["before"]["perplexity"] - 1) < 0.2
    assert run("quantize", str(source), "--type", "Q8_0", "--out", "b.gguf").out.count("MB") == 2


def test_a_directory_counts_by_its_weights(run: Run, tiny: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "folder")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["th"] = vocabulary.pop("Ā")  # a GGUF file has merges
    tokens["model"]["merges"] = ["t h"]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (tmp_path / "text.txt").write_text("that is the thing " * 3)
    result = run("quantize", "folder", "--type", "Q8_0", "--out", "new.gguf",
                 "--text", "text.txt", "--json")  # fmt: skip
    assert (result.code, result.err) == (0, "")
    weights = (folder / "model.safetensors").stat().st_size
    assert json.loads(result.out)["before"]["bytes"] == weights


def test_a_larger_file_of_quantized_weights_is_said_before_it_is_written(
    run: Run, source: Path, tmp_path: Path
) -> None:
    quantize_gguf(source, tmp_path / "q4.gguf", block_type("Q4_0"))
    seen: list[int] = []
    with pytest.warns(UserWarning, match="the new file will have") as warned:
        quantize_gguf(tmp_path / "q4.gguf", tmp_path / "new.gguf", block_type("Q8_0"),
                      lambda _, done, __: seen.append(len(warned.list)))  # fmt: skip
    assert seen[0] == 1, "before the first tensor"
    new, old = ((tmp_path / name).stat().st_size for name in ("new.gguf", "q4.gguf"))
    said = str(warned[0].message)
    assert f"{new / 1e6:,.1f} MB, the source has {old / 1e6:,.1f}" in said
    assert "quantized already" in said
    result = run("quantize", "q4.gguf", "--type", "Q4_K", "--out", "k.gguf")
    assert result.code == 0
    assert "tensors become Q5_0, since their rows are no multiple of 256 numbers" in result.err


def test_the_predicted_size_is_exact(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(gguf_writing, "_warn", lambda *given: sizes.append(given[-1]))
    for kind in ("Q4_K", "Q8_0", "Q4_0"):
        quantize_gguf(source, tmp_path / kind, block_type(kind))
        assert sizes[-1] == (tmp_path / kind).stat().st_size


@torch.no_grad()
def test_the_package_reads_the_same_settings_and_numbers(source: Path, tmp_path: Path) -> None:
    kind = block_type("Q6_K")
    quantize_gguf(source, tmp_path / "new.gguf", kind)
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "new.gguf")
    changed = {"general.file_type", "general.quantization_version"}
    names = {name for name in new.fields if not name.startswith("GGUF.")} - changed
    assert names == {name for name in old.fields if not name.startswith("GGUF.")} - changed
    for name in names:
        assert new.fields[name].contents() == old.fields[name].contents(), name
    numbers = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in old.tensors}
    for tensor in new.tensors:
        made = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        error = np.abs(made - numbers[tensor.name].reshape(made.shape)).max()
        assert error <= 0.02 * np.abs(made).max(), tensor.name
    ids = torch.arange(5, 15)[None]
    wanted = load_checkpoint(source).model(ids)
    found = load_checkpoint(tmp_path / "new.gguf", None).model(ids)
    assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_what_cannot_be_done_is_said_and_leaves_nothing(
    run: Run, source: Path, tiny: str, tmp_path: Path
) -> None:
    for arguments, said in {
        (str(source), "--type", "Q4"): "type must be one of",
        (str(source), "--type", "IQ3_S"): "got IQ3_S",
        (tiny, "--type", "Q4_K"): "key 'tokenizer.ggml.merges' is missing",
        ("nothing.gguf", "--type", "Q4_K"): "nothing.gguf",
    }.items():
        result = run("quantize", *arguments, "--out", "new.gguf")
        assert result.code == 2, arguments
        assert said in " ".join(result.err.split()), arguments
    assert "cannot be written" in run("quantize", str(source), "--out", "no/new.gguf").err
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ValueError, match="another file than the source"):
        quantize_gguf(source, source, block_type("Q8_0"))
