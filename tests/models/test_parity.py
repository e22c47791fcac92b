"""Whole models, judged by transformers (eager) and torch.nn.Transformer with the same weights."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from polyhead import Keep, KeyLengths
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.models import Transformer


def renamed(state: dict[str, torch.Tensor], rules: list[tuple[str, str]]) -> dict:
    out = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        out[name] = tensor
    return out


def randomised(module: nn.Module, std: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, std)
    return module.eval()


def llama(**rope) -> tuple[nn.Module, Transformer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            attn_implementation="eager",
            rope_parameters={"rope_theta": 1e4, **(rope or {"rope_type": "default"})},
        )
    )
    randomised(theirs)
    data = RopeConfig()
    if rope:
        data = RopeConfig(type="linear", factor=rope["factor"])
    layer = LayerConfig(
        AttentionConfig(6, 2, 8, rope=data), FeedForwardConfig(80), NormConfig(eps=1e-6)
    )
    ours = Transformer(
        TransformerConfig(
            "decoder", 97, 48, 128, (layer,) * 3, final_norm=NormConfig(eps=1e-6), head="untied"
        )
    ).eval()
    rules = [
        (r"^model\.embed_tokens", "embedding.tokens"),
        (r"^model\.norm", "final_norm"),
        (r"^model\.", ""),
        (r"^lm_head", "head"),
        (r"self_attn", "attention"),
        (r"mlp", "feed_forward"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "feed_forward_norm"),
    ]
    ours.load_state_dict(renamed(theirs.state_dict(), rules))
    return theirs, ours


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}])
def test_a_llama_equals_transformers(rope, grad):
    theirs, ours = llama(**rope)
    ids = torch.randint(0, 97, (2, 50))
    with torch.no_grad():
        want = theirs(ids).logits
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours(ids), want, rtol=1e-4, atol=1e-4)


def test_left_padding_equals_transformers():
    theirs, ours = llama()
    ids = torch.randint(0, 97, (2, 12))
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, :5] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = theirs(ids, attention_mask=real, position_ids=positions).logits
        have = ours(ids, positions=positions, mask=Keep(real.bool()[:, None, None, :]))
    torch.testing.assert_close(have[0], want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(have[1, 5:], want[1, 5:], rtol=1e-4, atol=1e-4)


def test_the_gradients_of_a_llama_equal_transformers():
    theirs, ours = llama()
    ids = torch.randint(0, 97, (2, 20))
    theirs(ids).logits.square().mean().backward()
    ours(ids).square().mean().backward()
    for name, want in (
        ("layers.1.attention.k_proj", theirs.model.layers[1].self_attn.k_proj),
        ("layers.0.feed_forward.gate_proj", theirs.model.layers[0].mlp.gate_proj),
        ("embedding.tokens", theirs.model.embed_tokens),
    ):
        have = ours.get_submodule(name).weight.grad
        torch.testing.assert_close(have, want.weight.grad, rtol=1e-3, atol=1e-5)


def test_a_bert_equals_transformers():
    from transformers import BertConfig, BertModel

    theirs = BertModel(
        BertConfig(
            vocab_size=61,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
            max_position_embeddings=32,
            attn_implementation="eager",
        ),
        add_pooling_layer=False,
    )
    randomised(theirs)
    norm = NormConfig("layernorm", 1e-12, bias=True)
    layer = LayerConfig(
        AttentionConfig(3, 3, 8, qkv_bias=True, out_bias=True),
        FeedForwardConfig(40, "gelu", gated=False, bias=True),
        norm,
        "post",
    )
    ours = Transformer(
        TransformerConfig(
            "encoder",
            61,
            24,
            32,
            (layer,) * 2,
            embedding=EmbeddingConfig("learned", num_segments=2, norm=norm),
            final_norm=None,
            head=None,
        )
    ).eval()
    rules = [
        (r"^embeddings\.word_embeddings", "embedding.tokens"),
        (r"^embeddings\.position_embeddings", "embedding.positions"),
        (r"^embeddings\.token_type_embeddings", "embedding.segments"),
        (r"^embeddings\.LayerNorm", "embedding.norm"),
        (r"^encoder\.layer", "layers"),
        (r"attention\.self\.(query|key|value)", lambda m: f"attention.{m[1][0]}_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"attention\.output\.LayerNorm", "attention_norm"),
        (r"intermediate\.dense", "feed_forward.up_proj"),
        (r"(\d)\.output\.dense", r"\1.feed_forward.down_proj"),
        (r"(\d)\.output\.LayerNorm", r"\1.feed_forward_norm"),
    ]
    ours.load_state_dict(renamed(theirs.state_dict(), rules))
    ids, segments = torch.randint(0, 61, (2, 9)), torch.randint(0, 2, (2, 9))
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    with torch.no_grad():
        for types in (None, segments):
            want = theirs(ids, attention_mask=real, token_type_ids=types).last_hidden_state
            have = ours(ids, segments=types, mask=KeyLengths([9, 6]))
            torch.testing.assert_close(have[0], want[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(have[1, :6], want[1, :6], rtol=1e-4, atol=1e-4)
            assert torch.equal(ours.encode(ids, segments=types, mask=KeyLengths([9, 6])), have)


def encoder_decoder(placement: str) -> tuple[nn.Transformer, Transformer]:
    theirs = nn.Transformer(
        24, 3, 2, 3, 40, batch_first=True, norm_first=placement == "pre", layer_norm_eps=1e-5
    )
    randomised(theirs)
    norm = NormConfig("layernorm", bias=True)
    attention = AttentionConfig(3, 3, 8, qkv_bias=True, out_bias=True)
    feed_forward = FeedForwardConfig(40, "relu", gated=False, bias=True)
    ours = Transformer(
        TransformerConfig(
            "encoder-decoder",
            61,
            24,
            32,
            (LayerConfig(attention, feed_forward, norm, placement, attention),) * 3,
            (LayerConfig(attention, feed_forward, norm, placement),) * 2,
            embedding=EmbeddingConfig("sinusoidal", scale=24**0.5),
            final_norm=norm,
            head_bias=True,
        )
    )
    randomised(ours)
    state = {}
    for name, tensor in theirs.state_dict().items():
        stack = "layers" if name.startswith("decoder") else "encoder_layers"
        name = re.sub(r"^(en|de)coder\.layers", stack, name)
        name = re.sub(r"^decoder\.norm", "final_norm", name)
        name = re.sub(r"^encoder\.norm", "encoder_final_norm", name)
        name = name.replace("self_attn", "attention").replace("multihead_attn", "cross_attention")
        name = name.replace("out_proj", "o_proj").replace("linear1", "feed_forward.up_proj")
        name = name.replace("linear2", "feed_forward.down_proj").replace("norm1", "attention_norm")
        second = "cross_attention_norm" if stack == "layers" else "feed_forward_norm"
        name = name.replace("norm2", second).replace("norm3", "feed_forward_norm")
        if "in_proj_" in name:
            for proj, rows in zip("qkv", tensor.chunk(3), strict=True):
                state[name.replace("in_proj_", f"{proj}_proj.")] = rows
        else:
            state[name] = tensor
    kept = {n: t for n, t in ours.state_dict().items() if n.startswith(("embedding", "head"))}
    ours.load_state_dict({**state, **kept})
    return theirs, ours


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_an_encoder_decoder_equals_torchs(placement):
    theirs, ours = encoder_decoder(placement)
    source, target = torch.randint(0, 61, (2, 7)), torch.randint(0, 61, (2, 9))
    padding = torch.tensor([[0] * 7, [0] * 5 + [1] * 2]).bool()
    with torch.no_grad():
        hidden = theirs(
            ours.embedding(source),
            ours.embedding(target),
            tgt_mask=torch.ones(9, 9).triu(1).bool(),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        want = hidden @ ours.embedding.tokens.weight.T + ours.head.bias
        mask = KeyLengths([7, 5])
        have = ours(target, encoder_ids=source, encoder_mask=mask)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)

        encoded = ours.encode(source, mask=mask)
        have = ours(target, encoder_hidden=encoded, encoder_mask=mask)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)

        cache = ours.new_cache()
        first = ours(target[:, :4], cache=cache, encoder_ids=source, encoder_mask=mask)
        rest = [ours(part, cache=cache) for part in target[:, 4:].split([1, 3, 1], dim=1)]
        have = torch.cat([first, *rest], dim=1)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
