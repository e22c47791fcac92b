"""The cache directory: what polyhead wrote is listed and removed, and nothing else."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from gguf_tiny import write_gguf
from hf_tiny import DECODERS

from polyhead.checkpoints import cache_directory, cached_files, load_checkpoint

DIGEST = "0123456789ab"


def _file(path: Path, size: int = 1, days: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    then = time.time() - days * 86_400
    os.utime(path, (then, then))
    return path


def _copy(cache: Path, name: str = f"gone-{DIGEST}-{DIGEST}", days: float = 0.0) -> Path:
    for file in ("polyhead.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        _file(cache / "converted" / name / file, 10, days)
    return cache / "converted" / name


def test_a_gguf_file_is_loaded_without_a_copy(tmp_path: Path, cache_folder: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    path = write_gguf(tmp_path / "tiny.gguf", DECODERS["llama, GQA"].build())
    load_checkpoint(path, progress=lambda *step: steps.append(step))
    assert {step for step, _, _ in steps} == {"reading tensors"}
    assert all(0 <= done <= total for _, done, total in steps)
    assert [*cache_folder.iterdir()] == []


def test_files_are_listed_with_kind_size_and_last_use(cache_folder: Path) -> None:
    _file(cache_folder / "joined" / f"some.model-{DIGEST}.gguf", 7, days=2)
    _copy(cache_folder, days=3)
    _file(cache_folder / "joined" / ".partial-0011223344556677", 3, days=1.1)
    found = cached_files()
    assert [(each.name, each.kind, each.num_bytes) for each in found] == [
        ("gone", "converted", 40),
        ("some.model", "joined", 7),
        (".partial-0011223344556677", "unfinished", 3),
    ]
    assert [round((time.time() - each.used) / 86_400, 1) for each in found] == [3.0, 2.0, 1.1]
    assert all(each.remove() for each in found)
    assert cached_files() == []
    assert sorted(path.name for path in cache_folder.rglob("*")) == ["converted", "joined"]


def test_what_polyhead_did_not_write_is_neither_listed_nor_removed(
    tmp_path: Path, cache_folder: Path
) -> None:
    other = _file(tmp_path / "other" / f"mine-{DIGEST}.gguf")
    kept = [
        _file(cache_folder / "notes.txt"),
        _file(cache_folder / "joined" / "notes.txt"),
        _file(cache_folder / "joined" / f"folder-{DIGEST}.gguf" / "inside"),
        _file(_copy(cache_folder, f"more-{DIGEST}-{DIGEST}") / "notes.txt"),
        _file(cache_folder / "elsewhere" / f"x-{DIGEST}.gguf"),
        _file(cache_folder / "joined" / ".partial-0011223344556677"),  # being written
    ]
    (cache_folder / "joined" / f"link-{DIGEST}.gguf").symlink_to(other)
    (cache_folder / "converted" / f"link-{DIGEST}-{DIGEST}").symlink_to(other.parent)
    linked = _copy(cache_folder, f"linked-{DIGEST}-{DIGEST}") / "tokenizer.json"
    linked.unlink()
    linked.symlink_to(other)
    assert cached_files() == []
    assert all(path.exists() for path in (*kept, other, linked))


def test_a_folder_that_is_a_link_is_left_alone(tmp_path: Path, cache_folder: Path) -> None:
    mine = _file(tmp_path / "mine" / f"x-{DIGEST}.gguf")
    (cache_folder / "joined").symlink_to(mine.parent)
    assert cached_files() == []
    assert mine.exists()


def test_what_changes_between_listing_and_removing_is_safe(
    tmp_path: Path, cache_folder: Path
) -> None:
    file = _file(cache_folder / "joined" / f"x-{DIGEST}.gguf")
    copy = _copy(cache_folder)
    listed = {each.kind: each for each in cached_files()}
    file.unlink()
    assert listed["joined"].remove(), "another process has removed it"
    mine = _file(copy / "notes.txt")
    assert not listed["converted"].remove()
    assert mine.exists()
    assert (copy / "model.safetensors").exists()
    other = _file(tmp_path / "other" / "model.safetensors")
    for path in copy.iterdir():
        path.unlink()
    copy.rmdir()
    copy.symlink_to(other.parent)
    listed["converted"].remove()
    assert other.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to remove an open file")
def test_a_file_in_use_keeps_its_numbers(cache_folder: Path) -> None:
    path = _file(cache_folder / "joined" / f"x-{DIGEST}.gguf", 5)
    with path.open("rb") as file:
        (entry,) = cached_files()
        assert entry.remove()
        assert file.read() == b"xxxxx"


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYHEAD_CACHE", "~/somewhere")
    assert cache_directory() == Path.home() / "somewhere"
    monkeypatch.delenv("POLYHEAD_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_directory() == tmp_path / "polyhead"
