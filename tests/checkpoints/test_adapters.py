"""LoRA adapters of the PEFT library, merged on load, equal PEFT's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_tiny import DECODERS
from safetensors.torch import load_file, save_file

from polyhead.checkpoints import attach_adapter, load_checkpoint, save_checkpoint
from polyhead.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from polyhead.interpret.circuits import HeadCircuits
from polyhead.interpret.pruning import prune
from polyhead.layers.lora import LoraLinear

peft = pytest.importorskip("peft")


def _adapted(folder: Path, model: Any, **options: Any) -> Any:
    """A base in ``base``, a random adapter in ``adapter``, and PEFT's model of both."""
    model.save_pretrained(folder / "base")
    torch.manual_seed(3)
    model.name_or_path = str(folder / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **options))
    for name, tensor in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    made.save_pretrained(folder / "adapter")
    return made.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": ["k_proj"], "use_rslora": True},
        {
            "target_modules": "all-linear",
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {"o_proj": 3},
        },
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rank-stabilised", "patterns", "embedding and whole modules"],
)
@torch.no_grad()
def test_merged_adapter_equals_peft(options: dict[str, Any], tmp_path: Path) -> None:
    tiny = DECODERS["llama, GQA"]
    theirs = _adapted(tmp_path, tiny.build(), **options)
    ids = tiny.ids()
    wanted = theirs(ids).logits
    ours = load_checkpoint(tmp_path / "adapter").model(ids)
    assert (ours - wanted).abs().max() < 1e-4
    named = load_checkpoint(tmp_path / "base", adapter=tmp_path / "adapter").model(ids)
    assert torch.equal(named, ours)
    assert (load_checkpoint(tmp_path / "base").model(ids) - wanted).abs().max() > 1e-2


@torch.no_grad()
def test_transposed_weights_take_an_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    theirs = _adapted(tmp_path, model, target_modules=["c_attn"], fan_in_fan_out=True)
    ids = torch.arange(20)[None]
    ours = load_checkpoint(tmp_path / "adapter").model(ids)
    assert (ours - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_attached_adapter_equals_peft(family: str, tmp_path: Path) -> None:
    """phi3 fuses projections, GPT-2 transposes them too."""
    tiny = DECODERS["llama, GQA"]
    torch.manual_seed(0)
    options: dict[str, Any] = {"target_modules": "all-linear", "use_rslora": True}
    if family == "llama":
        model: Any = tiny.build()
        options["exclude_modules"] = ["lm_head"]
    elif family == "phi3":
        config = transformers.Phi3Config(
            vocab_size=60, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        model = transformers.Phi3ForCausalLM(config).eval()
        options["exclude_modules"] = ["lm_head"]
    else:
        gpt2 = transformers.GPT2Config(
            vocab_size=60, n_embd=24, n_layer=2, n_head=4, n_positions=32
        )
        model = transformers.GPT2LMHeadModel(gpt2).eval()
        options = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    theirs = _adapted(tmp_path, model, **options)
    ids = torch.arange(1, 20)[None]
    ours = load_checkpoint(tmp_path / "base")
    with torch.no_grad():
        plain, wanted = ours.model(ids), theirs(ids).logits
        merged = load_checkpoint(tmp_path / "base", adapter=tmp_path / "adapter").model(ids)
    adapter = attach_adapter(ours.model, tmp_path / "adapter")
    with torch.no_grad():
        _same(ours.model(ids), wanted)
        cache = ours.model.new_cache()
        steps = [ours.model(part, cache=cache) for part in ids.split([16, 1, 1, 1], dim=1)]
        _same(torch.cat(steps, dim=1), wanted)
        with adapter.off():
            assert torch.equal(ours.model(ids), plain)
    with pytest.raises(InputError, match="has an adapter already"):
        attach_adapter(ours.model, tmp_path / "adapter")
    ours.model(ids).square().mean().backward()
    theirs(ids).logits.square().mean().backward()
    grads = [each.grad for each in adapter.parameters()]
    their_grads = [each.grad for name, each in theirs.named_parameters() if "lora_" in name]
    assert len(grads) >= len(their_grads) > 8
    total, their_total = (
        sum(float(each.square().sum()) for each in all_ if each is not None)
        for all_ in (grads, their_grads)
    )
    assert total == pytest.approx(their_total, rel=1e-3)

    adapter.save(tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(
        type(model).from_pretrained(tmp_path / "base"), tmp_path / "saved"
    )
    with torch.no_grad():
        _same(again.eval()(ids).logits, wanted)
        adapter.merge()
        _same(ours.model(ids), merged)
    with pytest.raises(InputError, match="merged or removed"):
        adapter.remove()
    second = attach_adapter(ours.model, tmp_path / "saved")
    second.remove()
    with torch.no_grad():
        _same(ours.model(ids), merged)
    assert {type(each) for each in ours.model.modules()}.isdisjoint({LoraLinear})


def _same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got - wanted).abs().max() < 1e-4 * wanted.std()


def test_attached_adapter_is_never_left_out_in_silence(tmp_path: Path) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj", "o_proj"])
    ours = load_checkpoint(tmp_path / "base")
    attach_adapter(ours.model, tmp_path / "adapter")
    for reads in (lambda: HeadCircuits(ours.model, 0), lambda: prune(ours.model, {0: [1]})):
        with pytest.raises(UnsupportedError, match="an adapter beside them"):
            reads()
    with pytest.raises(UnsupportedError, match="an adapter beside its weight"):
        _ = ours.model.layers[0].attention.q_proj.weight
    with pytest.raises(ConfigError, match=r"merge\(\) or remove\(\) its adapter"):
        save_checkpoint(ours, tmp_path / "saved")
    half = load_checkpoint(tmp_path / "base", torch.bfloat16)
    parameters = attach_adapter(half.model, tmp_path / "adapter").parameters()
    assert {each.dtype for each in parameters} == {torch.float32}
    assert half.model(torch.arange(5)[None]).dtype == torch.bfloat16


def test_what_cannot_be_attached_is_named(tmp_path: Path) -> None:
    tiny = DECODERS["llama, GQA"]
    for number, (options, words) in enumerate(
        (
            ({"target_modules": ["embed_tokens"]}, r"model\.embed_tokens\.weight replaces"),
            (
                {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
                r"lm_head\.weight replaces a tensor",
            ),
        )
    ):
        folder = tmp_path / str(number)
        _adapted(folder, tiny.build(), **options)
        ours = load_checkpoint(folder / "base")
        with pytest.raises((CheckpointError, UnsupportedError), match=words):
            attach_adapter(ours.model, folder / "adapter")
    with pytest.raises(TypeError, match="model must be a model of polyhead"):
        attach_adapter(torch.nn.Linear(2, 2), tmp_path / "0" / "adapter")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is 'LORA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"novel": 1}, "key 'novel' .*not understood"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; supported is True"),
        (
            {"alpha_pattern": {r"layers\.[01]\.": 4}},
            "alpha_pattern is .*modules' names and numbers",
        ),
        ({"lora_dropout": -1.0}, r"lora_dropout is -1.0; supported is a probability"),
        ({"alpha_pattern": [3]}, r"alpha_pattern is \[3\]"),
        ({"alpha_pattern": {"q_proj": []}}, r"alpha_pattern: q_proj must be a number: got \[\]"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "alpha_pattern: q_proj must be a number up to"),
    ],
)
def test_other_forms_are_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(tmp_path / "adapter")


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    DECODERS["llama, MQA"].save(tmp_path / "other")
    narrow = tmp_path / "other"
    values = json.loads((narrow / "config.json").read_text())
    assert values["num_key_value_heads"] == 1
    loaded = load_checkpoint(narrow, adapter=tmp_path / "adapter")
    assert loaded.config.layers[0].attention.num_kv_heads == 1  # q has the same shape here
    DECODERS["llama, explicit head_dim"].save(tmp_path / "wide")
    with pytest.raises(CheckpointError, match="q_proj does not fit"):
        load_checkpoint(tmp_path / "wide", adapter=tmp_path / "adapter")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((0, 48), (48, 0)), "q_proj does not fit: lora_A torch.float32 .0, 48."),
        (((4, 48), (48, 5)), "q_proj does not fit: lora_A"),
        (((4,), (48, 4)), "q_proj does not fit: lora_A"),
        (((4, 96), (24, 4)), "the base's weight is .48, 48., the change .24, 96."),
        (((3, 48), (48, 3)), "q_proj has rank 3, and adapter_config.json says 4"),
    ],
)
def test_a_pair_of_another_shape_is_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    pair = {
        f"{Q}{side}.weight": torch.ones(shape) for side, shape in zip("AB", shapes, strict=True)
    }
    save_file(load_file(path) | pair, path)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "adapter")


def test_whole_numbers_are_no_adapter(tmp_path: Path) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"lora_A torch.int8"):
        load_checkpoint(tmp_path / "adapter")
