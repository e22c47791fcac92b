"""The converted copy: made once, never half, never wrong, and never in the way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_tiny import write_gguf
from hf_tiny import DECODERS
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead.checkpoints import cache_directory, converted, load_checkpoint

TINY = DECODERS["llama, GQA"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TINY.build())


def _copies(cache: Path) -> list[Path]:
    return sorted((cache / "converted").iterdir())


def _steps(source: Path) -> set[str]:
    """What a load reports: nothing where the copy was used."""
    seen: list[tuple[str, int, int]] = []
    load_checkpoint(source, progress=lambda *step: seen.append(step))
    assert all(0 <= done <= total for _, done, total in seen)
    return {step for step, _, _ in seen}


def test_second_load_uses_the_copy_and_is_the_same(source: Path, cache_folder: Path) -> None:
    first = load_checkpoint(source)
    assert len(_copies(cache_folder)) == 1
    assert _steps(source) == set()
    second = load_checkpoint(source)
    assert second.config == first.config
    assert second.tokenizer.encode("abc") == first.tokenizer.encode("abc")
    assert second.tokenizer.stop_ids == first.tokenizer.stop_ids
    with torch.no_grad():
        assert torch.equal(second.model(TINY.ids()), first.model(TINY.ids()))


def test_conversion_reports_its_progress(source: Path) -> None:
    assert _steps(source) == {"reading tensors", "keeping a converted copy"}


def test_no_copy_on_request(source: Path, cache_folder: Path) -> None:
    load_checkpoint(source, cache=False)
    assert not (cache_folder / "converted").exists()


def test_hugging_face_directories_need_no_copy(tmp_path: Path, cache_folder: Path) -> None:
    TINY.save(tmp_path)
    load_checkpoint(tmp_path)
    assert not (cache_folder / "converted").exists()


def test_changed_source_is_converted_again(source: Path, cache_folder: Path) -> None:
    load_checkpoint(source)
    before = _copies(cache_folder)
    later = source.stat().st_mtime_ns + 1
    os.utime(source, ns=(later, later))
    assert "reading tensors" in _steps(source)
    after = _copies(cache_folder)
    assert len(after) == 1
    assert after != before


def test_other_sources_keep_their_copies(source: Path, cache_folder: Path, tmp_path: Path) -> None:
    load_checkpoint(source)
    (tmp_path / "other").mkdir()
    load_checkpoint(write_gguf(tmp_path / "other" / "tiny.gguf", TINY.build()))
    assert len(_copies(cache_folder)) == 2
    assert _steps(source) == set()


def test_copies_of_another_version_are_not_read(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_checkpoint(source)
    monkeypatch.setattr(converted, "FORMAT", converted.FORMAT + 1)
    assert "reading tensors" in _steps(source)
    assert len(_copies(cache_folder)) == 1


@pytest.mark.parametrize(
    ("file", "at", "value"),
    [
        ("model.safetensors", 0, b""),
        ("model.safetensors", 8, b"\xff\xff"),
        ("model.safetensors", -1000, b"\x40"),
        ("polyhead.json", 0, b""),
        ("polyhead.json", 10, b"\0\0\0\0"),
        ("tokenizer.json", 0, b""),
        ("tokenizer.json", 5, b"}}"),
    ],
)
def test_corrupt_copy_is_made_again(
    file: str, at: int, value: bytes, source: Path, cache_folder: Path
) -> None:
    with torch.no_grad():
        wanted = load_checkpoint(source).model(TINY.ids())
    path = _copies(cache_folder)[0] / file
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data if value else b"")
    with pytest.warns(UserWarning, match="is corrupt and is made again"):
        again = load_checkpoint(source)
    with torch.no_grad():
        assert torch.equal(again.model(TINY.ids()), wanted)
    assert _steps(source) == set()


@pytest.mark.parametrize("file", ["model.safetensors", "polyhead.json", "tokenizer.json"])
def test_incomplete_copy_is_made_again(file: str, source: Path, cache_folder: Path) -> None:
    load_checkpoint(source)
    (_copies(cache_folder)[0] / file).unlink()
    with pytest.warns(UserWarning, match="is corrupt and is made again"):
        load_checkpoint(source)
    assert _steps(source) == set()


def test_cache_directory_that_cannot_be_made(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_CACHE", str(source / "below-a-file"))
    with pytest.warns(UserWarning, match="no converted copy is kept in .* so loading stays slow"):
        load_checkpoint(source)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_full_or_read_only_cache_directory(
    error: int, source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(converted, "write_json", fails)
    with pytest.warns(UserWarning, match=os.strerror(error)):
        load_checkpoint(source)
    assert _copies(cache_folder) == []


def test_concurrent_writers_leave_one_good_copy(source: Path, cache_folder: Path) -> None:
    # Forked from one that has imported everything, so that all three write at the same time.
    code = """
import os, sys, traceback
from polyhead.checkpoints import load_checkpoint
children = []
for _ in range(3):
    children.append(os.fork())
    if not children[-1]:
        try:
            load_checkpoint(sys.argv[1])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
    command = [sys.executable, "-W", "error", "-c", code, str(source)]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert len(_copies(cache_folder)) == 1
    assert _steps(source) == set()


def test_a_writer_that_comes_second_drops_its_copy(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_checkpoint(source)
    monkeypatch.setattr("polyhead.checkpoints.load.read_copy", lambda path: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(source)
    assert len(_copies(cache_folder)) == 1


def test_leftovers_of_killed_writers_are_removed(source: Path, cache_folder: Path) -> None:
    folder = cache_folder / "converted"
    old, new = folder / ".partial-old", folder / ".partial-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 10**6,) * 2)
    load_checkpoint(source)
    assert not old.exists()
    assert new.exists()


def test_a_partial_copy_that_vanishes_while_others_are_tidied(
    source: Path, cache_folder: Path
) -> None:
    folder = cache_folder / "converted"
    folder.mkdir(parents=True)
    # Listed, but gone when it is looked at: what another writer's copy is once it is published.
    (folder / ".partial-gone").symlink_to(folder / "nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(source)
    assert len([copy for copy in _copies(cache_folder) if copy.is_dir()]) == 1


def test_changing_a_loaded_model_leaves_the_copy_alone(source: Path) -> None:
    load_checkpoint(source)
    loaded = load_checkpoint(source)
    with torch.no_grad():
        wanted = loaded.model(TINY.ids())
        for tensor in loaded.model.parameters():
            tensor.add_(1)
        assert torch.equal(load_checkpoint(source).model(TINY.ids()), wanted)


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYHEAD_CACHE", "~/somewhere")
    assert cache_directory() == Path.home() / "somewhere"
    monkeypatch.delenv("POLYHEAD_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_directory() == tmp_path / "polyhead"


class _Numbers(TorchDispatchMode):
    """Counts the numbers that torch's operations read and write; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.set_.source_Storage:
            tensors = [x for x in (*args, found) if isinstance(x, torch.Tensor)]
            self.count += sum(x.numel() for x in tensors if x.device.type != "meta")
        return found


@pytest.mark.slow
@pytest.mark.model
def test_second_load_of_smollm2_computes_nothing(
    smollm2_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes it take less than a second: no number is converted, filled or copied."""
    first = load_checkpoint("smollm2")
    monkeypatch.setattr("polyhead.checkpoints.load.read_gguf", None)
    with _Numbers() as numbers:
        second = load_checkpoint("smollm2")
    size = sum(parameter.numel() for parameter in first.model.parameters())
    assert numbers.count < size / 1000
    assert torch.equal(second.model.embedding.tokens.weight, first.model.embedding.tokens.weight)
