"""Weights in blocks: the results of the unpacked weights, by every path."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, RopeConfig
from polyhead.layers import quantized, transformer_layer
from polyhead.layers.decode_plan import plan_for
from polyhead.layers.linear import fused_linear
from polyhead.layers.quantized import QuantizedEmbedding, QuantizedLinear
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.native.arguments import Scales
from polyhead.quantization import block_type
from polyhead.quantization.scaled import TYPES
from random_blocks import by_package, random_blocks

needs_native = pytest.mark.skipif(native.code() is None, reason="no native code here")
Q4_K, Q8_0 = block_type("Q4_K"), block_type("Q8_0")


def both(name: str, inputs: int, outputs: int, seed: int = 0) -> tuple[QuantizedLinear, nn.Linear]:
    """A module with a bias, and the same unpacked."""
    kind = block_type(name)
    blocks = random_blocks(kind, outputs, inputs, seed)
    plain = nn.Linear(inputs, outputs)
    plain.weight = nn.Parameter(by_package(blocks, kind))
    assert plain.bias is not None
    return QuantizedLinear(blocks, kind, plain.bias.detach()), plain


@torch.no_grad()
@pytest.mark.parametrize("with_native", [pytest.param(True, marks=needs_native), False])
def test_products_are_those_of_the_unpacked_weights(
    with_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows by native code, prompts a panel at a time, and both without it."""
    monkeypatch.setattr(quantized, "_PANEL", 7 * 512)
    module, plain = both("Q4_K", 512, 40)
    if not with_native:
        monkeypatch.setattr(native, "code", lambda: None)
        monkeypatch.setattr(native, "code_for", lambda x: None)
        monkeypatch.setattr("polyhead.native.code_for", lambda x: None)
    for shape in ((1, 1, 512), (2, 3, 512), (3, 7, 512)):
        x = torch.randn(shape) * 0.02
        assert torch.allclose(module(x), plain(x), atol=1e-5), shape
        assert torch.allclose(module.double()(x.double()).float(), plain(x), atol=1e-5)
        module.float()
    half = module.bfloat16()(x.bfloat16())
    assert half.dtype is torch.bfloat16
    assert torch.allclose(half.float(), plain(x), atol=0.05)


@needs_native
@torch.no_grad()
def test_few_rows_have_the_bits_of_float32_weights() -> None:
    (q, plain_q), (k, plain_k) = both("Q4_K", 256, 30), both("Q8_0", 256, 12, seed=1)
    x = torch.randn(2, 2, 256)
    joined = fused_linear(x, q, k)
    assert joined is not None
    wanted = fused_linear(x, plain_q, plain_k)
    assert wanted is not None
    assert torch.equal(joined, wanted)
    assert torch.equal(q(x), joined[..., :30])
    seen: list[Tensor] = []
    handle = k.register_forward_hook(lambda *call: seen.append(call[2]))
    assert fused_linear(x, q, k) is None  # a hook is obeyed
    k(x)
    handle.remove()
    assert len(seen) == 1
    k.double()
    assert fused_linear(x, q, k) is None  # a bias of another dtype


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_prompt_have_their_own_bits_where_that_is_asked(dtype: torch.dtype) -> None:
    module, x = both("Q4_K", 512, 40)[0].to(dtype), torch.randn(19, 512).to(dtype)
    with ph.batch_invariant():
        assert torch.equal(module(x), torch.cat([module(row) for row in x.split(1)]))


def test_gradients_of_inputs_are_those_of_the_unpacked_weights() -> None:
    module, plain = both("Q4_K", 256, 20)
    x = torch.randn(2, 256) * 0.02
    found, wanted = (
        torch.autograd.grad(each(leaf).square().sum(), leaf)[0]
        for each, leaf in (
            (module, x.clone().requires_grad_()),
            (plain, x.clone().requires_grad_()),
        )
    )
    assert torch.allclose(found, wanted, atol=1e-4)
    assert module.weight.requires_grad is False
    assert module(x).requires_grad is False  # nothing of the module learns


@torch.no_grad()
def test_a_table_gives_its_rows() -> None:
    blocks = random_blocks(Q8_0, 50, 96)
    table, ids = QuantizedEmbedding(blocks, Q8_0), torch.tensor([[3, 49, 0], [7, 7, 1]])
    assert torch.equal(table(ids), by_package(blocks, Q8_0)[ids])
    assert torch.equal(table.weight, by_package(blocks, Q8_0))
    half = table.bfloat16()(ids)
    assert torch.equal(half, by_package(blocks, Q8_0)[ids].bfloat16())
    assert torch.equal(table.blocks, blocks)


@torch.no_grad()
def test_a_module_is_saved_copied_and_shown_as_it_is() -> None:
    module, _ = both("Q4_K", 256, 8)
    x = torch.randn(1, 256)
    assert [*module.state_dict()] == ["bias", "blocks"]
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    other, _ = both("Q4_K", 256, 8, seed=5)
    other.load_state_dict(module.state_dict())
    for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), module(x))
    assert repr(module) == (
        "QuantizedLinear(in_features=256, out_features=8, bias=True, type=Q4_K)"
    )


@pytest.mark.parametrize("calls", range(4))
def test_a_module_that_could_not_be_moved_is_as_it_was(calls: int) -> None:
    kind = TYPES["I8"]
    blocks = torch.zeros(8, 64, dtype=torch.uint8)
    scales = Scales(torch.ones(8, 2, dtype=torch.bfloat16), None, 32, 1)
    module = QuantizedLinear(blocks, kind, torch.ones(8), scales)
    before = {**module._parameters, **module._buffers}
    moved = []

    def fails(x: torch.Tensor) -> torch.Tensor:
        moved.append(x)
        if len(moved) > calls:
            raise MemoryError("no room there")
        return x.double() if x.is_floating_point() else x.clone()

    with pytest.raises(MemoryError):
        module._apply(fails)
    after = {**module._parameters, **module._buffers}
    for name, x in before.items():
        assert after[name] is x
    assert after["bias"].dtype is torch.float32
    assert len(moved) == calls + 1


@torch.no_grad()
def test_compiled_and_vectorised_calls_see_the_same() -> None:
    module, plain = both("Q8_0", 64, 6)
    x = torch.randn(4, 3, 64) * 0.02
    assert torch.allclose(torch.func.vmap(module)(x), plain(x), atol=1e-5)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), plain(x), atol=1e-5)


CONFIG = LayerConfig(
    AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeConfig(), qkv_bias=True),
    FeedForwardConfig(hidden_dim=256),
)


def layers() -> tuple[TransformerLayer, TransformerLayer]:
    """One of blocks of several types, and the same unpacked."""
    torch.manual_seed(0)
    plain = TransformerLayer.from_config(128, CONFIG).eval().requires_grad_(False)
    packed = copy.deepcopy(plain)
    names = {"q_proj": "Q5_0", "k_proj": "Q4_0", "v_proj": "Q8_0", "o_proj": "Q4_1"}
    names |= {"gate_proj": "IQ4_NL", "up_proj": "MXFP4", "down_proj": "Q6_K"}
    for seed, (name, kind) in enumerate(names.items()):
        part = "attention" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "feed_forward"
        old = getattr(getattr(plain, part), name)
        blocks = random_blocks(block_type(kind), old.out_features, old.in_features, seed)
        old.weight.copy_(by_package(blocks, block_type(kind)))
        bias = None if old.bias is None else old.bias.detach()
        setattr(getattr(packed, part), name, QuantizedLinear(blocks, block_type(kind), bias))
    return packed, plain


@needs_native
@torch.no_grad()
def test_a_prompt_through_a_network_of_blocks_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch's products of numbers are the faster ones."""
    network, x = layers()[0].feed_forward, torch.randn(65, 128)
    parts = torch.cat([network(rows) for rows in x.split(5)])
    code = native.code(x.dtype)
    assert code is not None
    monkeypatch.setattr(code, "dtypes", frozenset())
    own, rows = code.feed_forward, []

    def counted(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        rows.append(len(x))
        return own(x, *arguments, **named)

    monkeypatch.setattr(code, "feed_forward", counted)
    y = network(x)
    assert rows == [65]
    assert (y - parts).abs().max() <= 1e-5 * parts.abs().max()


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_one_call_with_the_bits_of_the_modules(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = layers()
    packed.to(dtype)
    x, mask = torch.randn(2, 9, 128, dtype=dtype), ph.Causal()

    def decoded(layer: TransformerLayer, cache: DenseCache | None = None) -> Tensor:
        cache = DenseCache() if cache is None else cache
        layer(x[:, :3], mask=mask, cache=cache)
        rows = [x[:, i : i + 1].contiguous() for i in range(3, 9)]
        return torch.cat([layer(row, mask=mask, cache=cache) for row in rows], dim=1)

    cache = DenseCache()
    stepped = decoded(packed, cache)
    assert plan_for(cache, [packed]).explain() == "layer 0: native"
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *call: None)
        assert torch.equal(decoded(packed), stepped)
    if dtype is torch.float32:
        assert torch.equal(decoded(plain), stepped)
    # Other blocks are seen at once.
    cache.reset()
    q = packed.attention.q_proj
    q.blocks = random_blocks(q.kind, q.out_features, q.in_features, seed=99)
    changed = decoded(packed, cache)
    assert plan_for(cache, [packed]).explain() == "layer 0: native"
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *call: None)
        assert torch.equal(decoded(packed), changed)
    assert not torch.allclose(changed.float(), stepped.float(), atol=1e-3)


def test_what_changes_weights_is_refused_by_name(tmp_path: object) -> None:
    from polyhead.training import Trainable

    config = ph.TransformerConfig(
        kind="decoder", vocab_size=32, embed_dim=128, layers=(CONFIG,), max_positions=16
    )
    model = ph.Transformer(config).eval()
    model.layers[0], _ = layers()
    holds = r"layers\.0\.attention\.q_proj holds Q5_0 blocks .*dtype='float32'"
    with pytest.raises(
        ph.UnsupportedError, match="training needs weights that are numbers.*" + holds
    ):
        Trainable(model)
    with pytest.raises(ph.UnsupportedError, match="an adapter needs .*" + holds):
        ph.attach_adapter(model, str(tmp_path))
