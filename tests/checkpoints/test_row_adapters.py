"""Rows of a batch with adapters of their own have the bits of a model with that adapter alone."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyhead as ph
from generation.tiny import decoder, lora
from polyhead import native
from polyhead.layers.lora import RowLora
from polyhead.layers.quantized import QuantizedLinear
from polyhead.models.quantized import pack_weights
from polyhead.quantization import block_type

needs_native = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
PARTS = {
    "attention": "q_proj v_proj",
    "network": "gate_proj down_proj",
    "all": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
}
ROWS = ("network", None, "attention", "all", "attention", None)
IDS = torch.arange(6 * 9).view(6, 9) % 250


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: lora(folder / name, decoder(), parts, seed=seed, rank=3 + seed)
        for seed, (name, parts) in enumerate(PARTS.items())
    }


def logits(model: ph.Transformer, ids: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Of a prompt and of tokens that are decoded, one after the other."""
    cache = model.new_cache()
    return torch.cat([model(part, cache=cache) for part in ids.split(sizes, dim=1)], dim=1)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_rows_have_the_bits_of_a_model_with_their_adapter_alone(
    dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    model = decoder().to(dtype)
    adapters = ph.RowAdapters(model, folders)
    with ph.batch_invariant():
        plain = logits(model, IDS, 5, 1, 1, 2)
        with adapters.rows(ROWS):
            together = logits(model, IDS, 5, 1, 1, 2)
        for place, name in enumerate(ROWS):
            single = copy.deepcopy(model)
            if name is not None:
                ph.attach_adapter(single, folders[name])
            alone = logits(single, IDS[place : place + 1], 5, 1, 1, 2)
            assert torch.equal(together[place], alone[0])
            assert torch.equal(together[place], plain[place]) == (name is None)
            if name is not None:
                with adapters.rows(name):
                    assert torch.equal(logits(model, IDS[place : place + 1], 9), alone)
        assert torch.equal(logits(model, IDS, 9), plain)
    with adapters.rows(ROWS):  # elsewhere within rounding
        assert (logits(model, IDS, 9) - together).abs().max() < together.abs().max() / 20


def explained(
    model: ph.Transformer, adapters: ph.RowAdapters, names: Sequence[str | None]
) -> list[str]:
    cache = model.new_cache()
    with adapters.rows(names):
        model(IDS[: len(names), :4], cache=cache)
        model(IDS[: len(names), 4:5], cache=cache)
    return model.decode_plan(cache).explain().split("\n")


@needs_native
@torch.inference_mode()
def test_rows_over_quantized_weights_have_the_bits_that_they_have_alone(
    folders: dict[str, Path],
) -> None:
    model = decoder()
    pack_weights(model, block_type("Q8_0"))
    assert any(type(part) is QuantizedLinear for part in model.modules())
    adapters = ph.RowAdapters(model, folders)
    with ph.batch_invariant():
        plain = logits(model, IDS, 5, 1, 1, 2)
        with adapters.rows(ROWS):
            together = logits(model, IDS, 5, 1, 1, 2)
        for place, name in enumerate(ROWS):
            with adapters.rows([name]):
                alone = logits(model, IDS[place : place + 1], 5, 1, 1, 2)
            assert torch.equal(together[place], alone[0])
            assert torch.equal(together[place], plain[place]) == (name is None)
    exact, wide = decoder(), together.abs().max()
    with ph.RowAdapters(exact, folders).rows(ROWS):
        assert (logits(exact, IDS, 9) - together).abs().max() < wide / 4
        assert (logits(exact, IDS, 9) - plain).abs().max() > wide / 2


@needs_native
@torch.inference_mode()
def test_layers_without_a_change_keep_their_native_step(folders: dict[str, Path]) -> None:
    model = decoder()
    adapters = ph.RowAdapters(model, folders)
    cache = model.new_cache()
    for token in IDS[:1].split(1, dim=1):
        model(token, cache=cache)
    plan = model.decode_plan(cache)
    assert plan.explain() == "layers 0 to 1: native"
    known = [plan[0].known, plan[1].known]
    said = "it is a RowLora, not exactly a Linear"
    assert explained(model, adapters, ["attention", None]) == [
        f"layers 0 to 1: modules; attention.q_proj: {said}"
    ]
    assert explained(model, adapters, ["network"]) == [
        f"layers 0 to 1: native up to its self-attention; then modules: feed_forward.gate_proj: "
        f"{said}"
    ]
    assert explained(model, adapters, [None, None]) == ["layers 0 to 1: native"]
    model(IDS[:1, :1], cache=cache)  # and what was read of it before holds
    assert [plan[0].known, plan[1].known] == known
    assert not any(isinstance(part, RowLora) for part in model.modules())


@torch.no_grad()
def test_rows_that_do_not_fit_are_refused_and_leave_the_model_as_it_was(
    folders: dict[str, Path],
) -> None:
    model = decoder()
    adapters = ph.RowAdapters(model, folders)
    assert adapters.names == tuple(PARTS)
    assert adapters.bytes == sum(
        tensor.nbytes
        for folder in folders.values()
        for tensor in load_file(folder / "adapter_model.safetensors").values()
    )
    plain = model(IDS)
    with (
        pytest.raises(
            ph.InputError,
            match=r"adapter must be one of the model's \(attention, network, all\): got",
        ),
        adapters.rows(["law"]),
    ):
        pass
    for name in ("attention", "network"):
        with (
            pytest.raises(ph.InputError, match="chosen for 3 rows: got 6"),
            adapters.rows([name, None, None]),
        ):
            model(IDS)
    seen: list[torch.Tensor] = []
    with adapters.rows(ROWS):
        other = threading.Thread(target=torch.no_grad()(lambda: seen.append(model(IDS))))
        other.start()
        other.join()
        with adapters.rows([None] * 6):
            assert (model(IDS) - plain).abs().max() < 1e-3
    assert (seen[0] - plain).abs().max() < 1e-3  # another thread has chosen nothing
    assert torch.equal(model(IDS), plain)
    adapter = ph.attach_adapter(model, folders["all"])
    with (
        pytest.raises(ph.InputError, match=r"q_proj\.weight has been replaced .* a LoraLinear"),
        adapters.rows("attention"),
    ):
        pass
    with pytest.raises(ph.InputError, match="has an adapter already"):
        ph.RowAdapters(model, folders)
    adapter.remove()
    assert torch.equal(model(IDS), plain)


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("self_attn.q_proj.lora_B", (9, 4), r"q_proj does not fit .* is \[9, 32\].*\[32, 32\]"),
        ("self_attn.q_proj.lora_A", (4, 7), r"q_proj does not fit .* is \[32, 7\].*\[32, 32\]"),
        ("self_attn.q_proj.lora_A", (5, 32), r"q_proj does not fit: lora_A .*\[5, 32\]"),
        ("self_attn.v_proj.lora_B", None, "v_proj has one of lora_A and lora_B only"),
        ("mlp.router.lora_A", (4, 32), "mlp.router has one of lora_A and lora_B only"),
    ],
)
def test_adapters_that_do_not_fit_name_the_file_and_the_module(
    key: str, shape: tuple[int, ...] | None, words: str, tmp_path: Path
) -> None:
    folder = lora(tmp_path / "bad", decoder(), "q_proj v_proj")
    path = folder / "adapter_model.safetensors"
    tensors, name = load_file(path), f"base_model.model.model.layers.1.{key}.weight"
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path)
    with pytest.raises(ph.CheckpointError, match=rf"adapter_model.safetensors: .*{words}"):
        ph.RowAdapters(decoder(), {"bad": folder})


def test_other_forms_name_the_file_and_the_key(tmp_path: Path) -> None:
    folder = lora(tmp_path / "bad", decoder(), "q_proj")
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"use_dora": True}))
    with pytest.raises(ph.ConfigError, match=r"adapter_config.json: use_dora is True"):
        ph.RowAdapters(decoder(), {"bad": folder})
    path.write_text(json.dumps(values | {"r": 8}))
    with pytest.raises(ph.CheckpointError, match=r"has rank 4, and adapter_config\.json says 8"):
        ph.RowAdapters(decoder(), {"bad": folder})
    with pytest.raises(ph.InputError, match="an adapter's name must be a text: got ''"):
        ph.RowAdapters(decoder(), {"": folder})
