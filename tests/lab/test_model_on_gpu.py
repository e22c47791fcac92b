"""Whole models on a GPU, as ``polyhead bench model --device cuda`` takes them, seen without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from replaying import Replayed
from tiny import byte_tokenizer

import polyhead as ph
from polyhead.checkpoints import load_checkpoint
from polyhead.errors import DisagreementError, UnsupportedError
from polyhead.generation.decoding import graphs
from polyhead.lab.benchmarks import ROUTINES, Settings, measure, model, peers
from polyhead.lab.benchmarks.stepping import UNCAPTURED, decode_on_device, prefill_on_device

PROMPT = 20


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ph.LanguageModel, Any]:
    """A tiny Llama here and in transformers."""
    path: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=88, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(path)
    ours = ph.LanguageModel(load_checkpoint(path).model, byte_tokenizer(), "tiny").eval()
    return ours.requires_grad_(False), theirs.requires_grad_(False)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replayed]]:
    """A recording in the place of a CUDA graph."""
    monkeypatch.setitem(graphs.MAKERS, "cpu", Replayed)
    monkeypatch.setattr(graphs, "_of_kernel", lambda model: None)
    monkeypatch.setattr(graphs, "KERNEL", "tiled")
    Replayed.made.clear()
    return Replayed.made


IDS = torch.randint(3, 131, (1, 40), generator=torch.Generator().manual_seed(1))


def test_decoding_is_measured_from_a_graph_beside_steps_and_transformers(
    both: tuple[ph.LanguageModel, Any], captured: list[Replayed]
) -> None:
    case = decode_on_device(*both, IDS, torch.float32, PROMPT)
    assert case.group == "captured, decode after 20 tokens, steps:"
    assert set(case.peers) == {UNCAPTURED, "transformers"}
    before = captured[-1].replays
    result = measure(case, Settings(rounds=2))
    assert captured[-1].replays >= before + 3 * 16
    assert set(result.ratios) == {UNCAPTURED, "transformers"}
    assert result.bound is not None
    assert result.bound.kind == "bytes"


def test_a_prompt_is_measured_beside_transformers(both: tuple[ph.LanguageModel, Any]) -> None:
    result = measure(prefill_on_device(*both, IDS, torch.float32), Settings(rounds=1))
    assert set(result.ratios) == {"transformers"}
    assert result.bound is not None
    assert result.bound.kind == "operations"


def test_another_result_ends_it_before_anything_is_timed(
    both: tuple[ph.LanguageModel, Any], captured: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = decode_on_device(*both, IDS, torch.float32, PROMPT)
    monkeypatch.setattr(Replayed, "replay", lambda self: None)
    with pytest.raises(DisagreementError):
        measure(case, Settings(rounds=1))


def test_steps_that_are_not_captured_are_no_captured_steps(
    both: tuple[ph.LanguageModel, Any], captured: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise RuntimeError("not permitted")

    monkeypatch.setitem(graphs.MAKERS, "cpu", failing)
    with pytest.raises(UnsupportedError, match=r"steps are not captured: .* not permitted"):
        decode_on_device(*both, IDS, torch.float32, PROMPT)
    monkeypatch.setattr(graphs, "_of_kernel", lambda model: "kernel 'triton' is switched off")
    case = decode_on_device(both[0], None, IDS, torch.float32, PROMPT)
    assert case.group == "decode after 20 tokens, steps:"
    assert not case.peers


def test_the_routine_on_a_device_reads_files_here_and_computes_there(
    both: tuple[ph.LanguageModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meta device stands for a GPU: nothing is computed there.
    ours = ph.LanguageModel(both[0].transformer, byte_tokenizer(), "tiny").to("meta")
    asked = []

    def loaded(name: str, **options: Any) -> ph.LanguageModel:
        asked.append((name, options["device"], torch.get_default_device().type))
        return ours

    monkeypatch.setattr(model, "load", loaded)
    monkeypatch.setattr(model, "installed", lambda name: name == peers.SMOLLM2)
    monkeypatch.setattr(model, "topics", {"compound": "a" * 150})
    on = Settings(quick=True, dtypes=(torch.float32,), device="meta")
    decode, prefill = ROUTINES["model"].drawn(on)
    assert asked == [("smollm2", "meta", "cpu")]
    assert decode.group.startswith("SmolLM2, decode")
    assert prefill.ours().is_meta
    assert prefill.limits[0].run().is_meta
    assert ROUTINES["model"].meets(on) == (peers.SMOLLM2, peers.GEMMA3, "transformers")
