"""Paths under which there is no file: pipes and devices without an end, loops, names of no file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polyhead as ph
from polyhead._utils.paths import kind_of
from polyhead.checkpoints import load_checkpoint
from polyhead.errors import PolyheadError
from polyhead.generation.pipelines.sound import read_audio


def loaded_cache(path: Path) -> None:
    ph.DenseCache().load(path)


READERS: tuple[Callable[[Path], object], ...] = (
    ph.load,
    load_checkpoint,
    loaded_cache,
    ph.Probe.load,
    read_audio,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.gguf")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["pipe", "endless"])
def test_pipes_and_devices_are_refused_before_they_are_read(read, name, folder):
    with pytest.raises(PolyheadError, match=f"{name} cannot be read: it is a pipe or a device"):
        read(folder / name)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["loop", "n" * 300, "a\0b"])
def test_names_under_which_nothing_can_be_are_refused(read, name, folder):
    with pytest.raises(PolyheadError, match=r"cannot be read|no such file|no model"):
        read(folder / name)


def test_pipes_with_a_models_name_are_refused(folder):
    with pytest.raises(PolyheadError, match="it is a pipe or a device"):
        load_checkpoint(folder / "pipe.gguf")
    for name in ("pipe.json", "endless.json"):
        with pytest.raises(PolyheadError, match=f"{name} cannot be read: it is a pipe or a device"):
            ph.plan(folder / name, tokens=8)
    with pytest.raises(PolyheadError, match="neither a path nor a preset"):
        ph.plan(folder / ("n" * 300), tokens=8)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    shutil.move(folder / "pipe", folder / "model.safetensors")
    with pytest.raises(PolyheadError, match="it is a pipe or a device"):
        load_checkpoint(folder)


def test_what_may_not_be_looked_at_is_said(monkeypatch, tmp_path):
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(PolyheadError, match="cannot be read: Permission denied"):
        ph.load(tmp_path / "x")


@torch.no_grad()
def test_no_file_takes_the_place_of_a_pipe(folder):
    cache = ph.DenseCache()
    cache.append(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    with pytest.raises(FileExistsError, match="cannot replace a pipe or a device by a file"):
        cache.save(folder / "pipe")
    assert kind_of(folder / "pipe") == "other"
    assert len(list(folder.iterdir())) == 6
    with pytest.raises(ValueError, match="no file can be called"):
        cache.save(folder / "a\0b")
