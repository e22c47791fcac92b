"""A multi-token predictor from tiny directories of several families, against its formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import polyhead as ph
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, RelativeBiasConfig
from polyhead.layers.quantized import QuantizedMatrix

E, W, LAYERS = 32, 61, 2
SIZES: dict[str, Any] = {
    "vocab_size": W,
    "hidden_size": E,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 9}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | INDEXER,
    "glm_moe_dsa": LATENT | INDEXER,
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True},
    "glm4_moe_lite": LATENT,
}
EACH = pytest.mark.parametrize("family", FAMILIES)
OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types")
PREFIX = f"model.layers.{LAYERS}."
IDS = torch.randint(3, W, (2, 25), generator=torch.Generator().manual_seed(1))


class Tiny:
    """transformers' model with a layer more than config.json says, and the predictor's tensors."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(5)
        config = transformers.AutoConfig.for_model(
            family, num_hidden_layers=LAYERS + 1, **{**SIZES, **FAMILIES[family]}
        )
        config._attn_implementation = config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                nn.init.normal_(tensor, std=0.3)
            elif tensor.requires_grad:
                norm = tensor.ndim == 1 and name.endswith("weight")
                nn.init.normal_(tensor, mean=float(norm), std=0.4 if tensor.ndim < 2 else 0.15)
        model.save_pretrained(folder)
        self.folder, self.model, self.config = folder, model.double(), config
        self.own = {
            "enorm.weight": 1 + 0.4 * torch.randn(E),
            "hnorm.weight": 1 + 0.4 * torch.randn(E),
            "eh_proj.weight": 0.15 * torch.randn(E, 2 * E),
            "shared_head.norm.weight": 1 + 0.4 * torch.randn(E),
        }
        tensors = load_file(folder / "model.safetensors")
        tensors |= {PREFIX + name: tensor for name, tensor in self.own.items()}
        tensors[PREFIX + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[PREFIX + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text())
        lists = {key: values[key][:LAYERS] for key in OF_LAYERS if values.get(key)}
        self.says(num_hidden_layers=LAYERS, num_nextn_predict_layers=1, **lists)

    def says(self, **values: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def change(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        path = self.folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    def hidden(self, ids: Tensor) -> Tensor:
        """The model's, behind its own layers and norm."""
        self.model.config.num_hidden_layers = LAYERS
        found: Tensor = self.model.model(ids, use_cache=False).last_hidden_state
        return found

    def predicted(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Equations 21 and 22 in float64, by transformers' decoder layer."""
        own = {name: tensor.double() for name, tensor in self.own.items()}
        eps = self.config.rms_norm_eps

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * own[name]

        body, head = self.model.model, own["eh_proj.weight"]
        embedded = body.embed_tokens.weight[ids]
        x = norm(embedded, "enorm.weight") @ head[:, :E].T
        x = x + norm(hidden, "hnorm.weight") @ head[:, E:].T
        layers, final = body.layers, body.norm
        self.model.config.num_hidden_layers = 1
        body.layers, body.norm = nn.ModuleList([layers[LAYERS]]), nn.Identity()
        try:
            y = body(inputs_embeds=x, use_cache=False).last_hidden_state
        finally:
            body.layers, body.norm = layers, final
        return norm(y, "shared_head.norm.weight")


def loaded(folder: Path, dtype: Any = torch.float32) -> tuple[Any, ph.MultiTokenPredictor]:
    model = ph.load(folder, dtype=dtype)
    return model, ph.load_predictor(folder, model)


@EACH
def test_output_and_gradients_are_those_of_the_formula(family: str, tmp_path: Path) -> None:
    tiny = Tiny(family, tmp_path)
    model, predictor = loaded(tmp_path, torch.float64)
    ids = IDS[:, 1:]
    with torch.no_grad():
        wanted = tiny.hidden(IDS[:, :-1])
        found = model.transformer.hidden_states(IDS[:, :-1])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)  # the model's, as it was
    theirs, ours = (wanted.clone().requires_grad_() for _ in range(2))
    exact = tiny.predicted(ids, theirs)
    got = predictor.hidden_states(ids, ours)
    scores = tiny.model.lm_head(exact)
    assert scores.std() > 0.5, "too small to tell models apart"
    # transformers rounds norms, rotary factors and gates to float32.
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(predictor.logits(got), scores, rtol=0, atol=1e-5)
    weights = torch.randn(exact.shape, dtype=torch.float64)
    for each in ((exact * weights).sum(), (got * weights).sum()):
        each.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-4)
    assert all(each.grad is not None for each in predictor.projection.parameters())


@EACH
@torch.no_grad()
def test_chunks_and_packed_rows_equal_one_pass(family: str, tmp_path: Path) -> None:
    Tiny(family, tmp_path)
    model, predictor = loaded(tmp_path)
    hidden, ids = model.transformer.hidden_states(IDS[:, :-1]), IDS[:, 1:]
    whole = predictor.hidden_states(ids, hidden)
    for kind in ("auto", "paged"):
        cache, cuts, parts = predictor.new_cache(kind=kind, page_size=4), (5, 1, 1, 9, 8), []
        for x, h in zip(ids.split(cuts, 1), hidden.split(cuts, 1), strict=True):
            parts.append(predictor.hidden_states(x, h, cache=cache))
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    cache, at = predictor.new_cache(kind="paged", page_size=4), [0, 0]
    for counts in ((7, 2), (1, 1), (2, 5), (6, 1)):
        spans = [slice(a, a + n) for a, n in zip(at, counts, strict=True)]

        def packed(x: Tensor, spans: list[slice] = spans) -> Tensor:
            return torch.cat([x[row, span] for row, span in enumerate(spans)])[None]

        found = predictor.hidden_states(packed(ids), packed(hidden), cache=cache, counts=counts)
        torch.testing.assert_close(found, packed(whole), rtol=0, atol=1e-5)
        at = [span.stop for span in spans]
    assert cache.lengths == at == [16, 9]


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    Tiny("deepseek_v3", tmp_path)
    model, predictor = loaded(tmp_path)
    hidden, ids = model.transformer.hidden_states(IDS[:, :-1]), IDS[:, 1:]
    cache = predictor.new_cache(kind="paged", page_size=4)
    first = predictor.hidden_states(ids[:, :9], hidden[:, :9], cache=cache)

    def call(x: Tensor, h: Any, **options: Any) -> Tensor:
        return predictor.hidden_states(x, h, **{"cache": cache, **options})

    with pytest.raises(ValueError, match=r"hidden must be \[B, T, E\] = \[2, 3, 32\]"):
        call(ids[:, 9:12], hidden[:, 9:11])
    with pytest.raises(TypeError, match="hidden must be a tensor of floating-point numbers"):
        call(ids[:, 9:12], ids[:, 9:12])
    with pytest.raises(ph.ContextLengthError, match="64 tokens: got 56 after the 9"):
        call(ids[:, :1].expand(2, 56), hidden[:, :1].expand(2, 56, E))
    with pytest.raises(ValueError, match="counts must be of each row"):
        call(ids[:1, 9:12], hidden[:1, 9:12], counts=[3])
    with pytest.raises(ValueError, match="the cache was made for 2 layers, the model has 1"):
        call(ids, hidden, cache=model.transformer.new_cache())
    network = predictor.layers[0].feed_forward
    stop = network.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        call(ids[:, 9:14], hidden[:, 9:14])
    stop.remove()
    assert cache.lengths == [9, 9]
    rest = call(ids[:, 9:], hidden[:, 9:])
    whole = predictor.hidden_states(ids, hidden)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_embedding_and_head_are_the_models(tmp_path: Path) -> None:
    tiny = Tiny("glm4_moe", tmp_path)
    model, predictor = loaded(tmp_path)
    names = {name.partition(".")[0] for name in predictor.state_dict()}
    assert names == {"embedding_norm", "hidden_norm", "projection", "layers", "final_norm"}
    theirs = {id(each) for each in model.parameters()}
    assert not any(id(each) in theirs for each in predictor.parameters())
    assert predictor.model is model.transformer
    assert not predictor.training
    hidden = torch.randn(1, 4, E)
    before = predictor.hidden_states(IDS[:1, :4], hidden)
    model.transformer.embedding.tokens.weight.mul_(-1)
    assert not torch.allclose(predictor.hidden_states(IDS[:1, :4], hidden), before)
    model.transformer.head.weight.zero_()
    assert not predictor.logits(hidden).any()
    # A second module is for later tokens, and left out.
    tiny.change(lambda each: each.update({"model.layers.3.enorm.weight": torch.ones(E)}))
    tiny.says(num_nextn_predict_layers=2)
    _, again = loaded(tmp_path)
    assert all(map(torch.equal, again.parameters(), predictor.parameters()))
    held = predictor.new_cache(capacity=24)
    predictor.hidden_states(IDS[:, 1:], torch.randn(2, 24, E), cache=held)
    made = ph.plan(predictor.config, tokens=24, batch_size=2, dtype="float32")
    assert made.cache_bytes == held.bytes


@torch.no_grad()
def test_codes_stay_where_the_models_do(tmp_path: Path) -> None:
    """DeepSeek-V3's files are float8 with a scale for blocks of 128 × 128."""

    def encode(tensors: dict[str, Tensor]) -> None:
        for name, tensor in [*tensors.items()]:
            if "_proj.weight" in name and "eh_proj" not in name:
                scale = tensor.abs().max() / 448
                tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = scale.view(1, 1)

    tiny = Tiny("deepseek_v3", tmp_path)
    tiny.change(encode)
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tiny.says(quantization_config=scheme)
    _, numbers = loaded(tmp_path)
    _, codes = loaded(tmp_path, None)
    kept = [name for name, each in codes.named_modules() if isinstance(each, QuantizedMatrix)]
    assert "layers.0.attention.q_a_proj" in kept
    assert not any("head" in name for name in kept)
    hidden = torch.randn(2, 24, E)
    got, wanted = (each.hidden_states(IDS[:, 1:], hidden) for each in (codes, numbers))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_only_one_layer_of_a_decoder_of_the_models_sizes_is_a_predictor() -> None:
    layer = LayerConfig(AttentionConfig(4, 2, 8), FeedForwardConfig(40))
    config = ph.TransformerConfig("decoder", W, E, 64, (layer,))
    model = ph.Transformer(config)
    assert ph.MultiTokenPredictor(config, model).projection.weight.std() > 0
    for words, changes in {
        "embed_dim and vocab_size must be the model's, 32 and 61": {"vocab_size": 60},
        "one layer of a decoder .*: got kind='decoder', 2 layers": {"layers": (layer, layer)},
        "takes no part in relative_bias": {"relative_bias": RelativeBiasConfig()},
    }.items():
        with pytest.raises(ph.ConfigError, match=words):
            ph.MultiTokenPredictor(replace(config, **changes), model)


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    tiny = Tiny("glm4_moe", tmp_path / "tiny")
    folder = tiny.folder
    model = ph.load(folder)

    def refused(kind: type[Exception], words: str, source: Path = folder, of: Any = model) -> None:
        with pytest.raises(kind, match=words):
            ph.load_predictor(source, of)

    refused(TypeError, "model must be what load", of="a name")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    refused(ph.UnsupportedError, "is a GGUF file: a multi-token", source=tmp_path / "model.gguf")
    tiny.says(rms_norm_eps=0.5)
    refused(ph.ConfigError, "the model is another than this: it has .*eps=1e-05")
    tiny.says(rms_norm_eps=1e-5, num_nextn_predict_layers=0)
    refused(ph.CheckpointError, "num_nextn_predict_layers is 0: the directory has no multi-token")
    tiny.says(num_nextn_predict_layers=1)
    copy = PREFIX + "shared_head.head.weight"
    tiny.change(lambda each: each.update({copy: torch.ones(W + 1, E)}))
    refused(ph.CheckpointError, r"shared_head.head.weight' must have shape \[61, 32\]")
    tiny.change(lambda each: (each.pop(copy), each.pop(PREFIX + "self_attn.o_proj.weight")))
    refused(ph.CheckpointError, r"layer 2: tensor .*attention.o_proj.weight' is missing")
    tiny.change(lambda each: each.pop(PREFIX + "hnorm.weight"))
    refused(ph.CheckpointError, r"predictor are missing: model\.layers\.2\.hnorm\.weight$")
    other = transformers.LlamaConfig(**{key: SIZES[key] for key in [*SIZES][:5]})
    transformers.LlamaForCausalLM(other).save_pretrained(tmp_path / "llama")
    words = "'llama', of which no .* it is: deepseek_v3, deepseek_v32, glm4_moe, "
    refused(ph.UnsupportedError, words, tmp_path / "llama", ph.load(tmp_path / "llama"))
