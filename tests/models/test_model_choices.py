"""Choices of embeddings, stacks, frontends and heads, against transformers' modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead import KeyLengths
from polyhead.caches.sizes import Ring
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    AudioConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    EncoderConfig,
    FeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    PatchConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
    SinusoidConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.layers import SinusoidalPositions
from polyhead.models import Transformer

E, T = 24, 11
HEADS = AttentionConfig(4, 4, 6, qkv_bias=True, out_bias=True)
NORM = NormConfig("layernorm", bias=True)
LAYER = LayerConfig(HEADS, FeedForwardConfig(40, "gelu", gated=False, bias=True), NORM)
CROSSED = replace(LAYER, cross_attention=HEADS)


def config(kind: str = "encoder", **fields) -> TransformerConfig:
    given = {"head": None, "final_norm": NORM, "layers": (LAYER, LAYER)} | fields
    return TransformerConfig(kind, 50, E, 40, **given)


def model(data: TransformerConfig) -> Transformer:
    assert TransformerConfig.from_json(data.to_json()) == data
    torch.manual_seed(0)
    made = Transformer(data).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.4)
    return made


def ids(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 50, shape or (2, T), generator=generator)


def in_chunks(decoder: Transformer, tokens: Tensor, **first) -> Tensor:
    cache, parts = decoder.new_cache(), []
    with torch.no_grad():
        for part in tokens.split([4, 1, 1, 5], dim=1):
            parts.append(decoder(part, cache=cache, **first))
            first = {}
    return torch.cat(parts, dim=1)


def test_sinusoids_are_transformers() -> None:
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    spread = SinusoidalPositions(E, SinusoidConfig("halves", spread=True))
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(40, E, None)
    torch.testing.assert_close(spread(0, 40), theirs, atol=1e-6, rtol=1e-6)
    marian = MarianSinusoidalPositionalEmbedding(40, E)
    torch.testing.assert_close(
        SinusoidalPositions(E, SinusoidConfig("halves"))(0, 40), marian.create_weight(),
        atol=1e-6, rtol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_with_an_offset(positions: str) -> None:
    made = model(config(embedding=EmbeddingConfig(positions, position_offset=2)))
    embedding = made.embedding
    got = embedding(ids(), 3)
    rows = embedding.positions(torch.arange(5, 5 + T), T)
    torch.testing.assert_close(got, embedding.tokens(ids()) + rows)
    torch.testing.assert_close(embedding(ids(), torch.arange(3, 3 + T)), got)
    if positions == "learned":
        assert len(embedding.positions.weight) == 42
        made(ids(1, 40))  # as many tokens as there are positions


@pytest.mark.parametrize("of", ["sum", "tokens"])
def test_an_embedding_of_another_size_and_its_head(of: str) -> None:
    projection = EmbeddingProjectionConfig(10, of, bias=of == "sum")
    data = config(
        "decoder",
        embedding=EmbeddingConfig("learned", norm=NORM, projection=projection),
        head="tied",
        head_bias=True,
        logit_scale=0.25,
        head_transforms=(HeadTransformConfig(10, "gelu", norm=NORM),),
    )
    made = model(data)
    part = made.embedding
    x, places = part.tokens(ids()), part.positions(0, T)
    if of == "sum":
        expected = part.projection(part.norm(x + places))
    else:
        expected = part.norm(part.projection(x) + places)
    torch.testing.assert_close(part(ids()), expected)
    hidden = made.hidden_states(ids())
    (before,) = made.head.transforms
    y = before.norm(nn.functional.gelu(before.dense(hidden)))
    logits = 0.25 * (y @ part.tokens.weight.T + made.head.bias)
    torch.testing.assert_close(made(ids()), logits)
    torch.testing.assert_close(in_chunks(made, ids()), logits)
    with pytest.raises(ConfigError, match="embedding's size 10: got 24"):
        replace(data, head_transforms=())


def test_a_tied_transform_is_the_embeddings_projection_transposed() -> None:
    tied = HeadTransformConfig(10, bias=False, tied=True)
    projection = EmbeddingProjectionConfig(10, "tokens", bias=False)
    embedding = EmbeddingConfig(projection=projection)
    data = config("encoder", embedding=embedding, head="tied", head_transforms=(tied,))
    made = copy.deepcopy(model(data))
    part = made.embedding
    wanted = made.hidden_states(ids()) @ part.projection.weight @ part.tokens.weight.T
    torch.testing.assert_close(made(ids()), wanted)
    assert not [name for name in made.state_dict() if name.startswith("head.")]
    with pytest.raises(ConfigError, match="no bias, activation or norm: got bias=True"):
        replace(tied, bias=True)
    with pytest.raises(ConfigError, match="stands before logits"):
        TaskHeadConfig("mean", transforms=(tied,))
    for wrong in (
        {"embedding": EmbeddingConfig()},
        {"head_transforms": (tied, tied)},
        {"head_transforms": (replace(tied, dim=9),), "head": "untied"},
    ):
        with pytest.raises(ConfigError, match="a tied head transform is the only one"):
            replace(data, **wrong)


@pytest.mark.parametrize("kind", ["t5", "mpnet"])
def test_relative_bias_is_shared_by_the_layers(kind: str) -> None:
    """Against a bias tensor that transformers' own buckets make."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(T) - torch.arange(T)[:, None]
    encoder = kind == "mpnet"
    table = RelativeBiasConfig(8, 9)
    made = model(config("encoder" if encoder else "decoder", relative_bias=table))
    bucket = (
        MPNetEncoder.relative_position_bucket(distance, 8, 9)
        if encoder
        else T5Attention._relative_position_bucket(distance, False, 8, 9)
    )
    bias = made.relative_bias.weight[bucket].permute(2, 0, 1)[None]
    x = made.embedding(ids())
    for layer in made.layers:
        x = layer(x, mask=None if encoder else made._causal, bias=bias)
    expected, got = made.final_norm(x), made(ids())
    torch.testing.assert_close(got, expected)
    weight = made.relative_bias.weight
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), weight),
        torch.autograd.grad(expected.square().sum(), weight),
    )
    if not encoder:
        torch.testing.assert_close(in_chunks(made, ids()), expected)
    assert made.parameter_counts().total == sum(p.numel() for p in made.parameters())


def test_layers_that_share_weights() -> None:
    shared = model(config("decoder", layers=(LAYER,) * 3, weights_of=(0, 0, 2), head="tied"))
    state = shared.state_dict()
    assert not any(name.startswith("layers.1.") for name in state)
    apart = Transformer(config("decoder", layers=(LAYER,) * 3, head="tied")).double().eval()
    apart.load_state_dict(
        state | {n.replace("layers.0", "layers.1"): t for n, t in state.items() if "layers.0" in n}
    )
    assert len([*apart.parameters()]) > len([*shared.parameters()])
    expected = apart(ids())
    torch.testing.assert_close(shared(ids()), expected)
    torch.testing.assert_close(in_chunks(shared, ids()), expected)
    # They stay shared: copied, loaded by assignment, from meta.
    with torch.device("meta"):
        bare = Transformer(shared.config)
    bare.load_state_dict(state, assign=True)
    for again in (copy.deepcopy(shared), bare.eval()):
        weights = [layer.attention.q_proj.weight for layer in again.layers]
        assert [w is weights[0] for w in weights] == [True, True, False]
        torch.testing.assert_close(again(ids()), expected)
    for numbers, words in (
        ((0, 0), "each of the 3"),
        ((1, 1, 2), "layer 0"),
        ((0, 0, 1), "layer 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(shared.config, weights_of=numbers)


def test_an_encoder_with_an_embedding_and_width_of_its_own() -> None:
    wide = LayerConfig(AttentionConfig(2, 2, 8), FeedForwardConfig(20), NORM)
    own = EncoderConfig(
        EmbeddingConfig("learned", norm=NORM), True, 70, 32, 60, RelativeBiasConfig(8, 9)
    )
    data = config(
        "encoder-decoder", layers=(CROSSED, CROSSED), encoder_layers=(wide,), encoder=own,
        head="tied",
    )  # fmt: skip
    made = model(data)
    assert made.encoder_embedding.tokens.weight.shape == (70, 32)
    source = ids(2, 50) + 20
    hidden = made.encode(source)
    assert hidden.shape == (2, 50, 32)
    expected = made(ids(), encoder_hidden=hidden)
    torch.testing.assert_close(in_chunks(made, ids(), encoder_ids=source), expected)
    shares = EncoderConfig(EmbeddingConfig("learned", position_offset=1))
    both = model(replace(data, encoder_layers=(LAYER,), encoder=shares))
    assert "encoder_embedding.tokens.weight" not in both.state_dict()
    twin = copy.deepcopy(both)
    assert twin.encoder_embedding.tokens is twin.embedding.tokens
    x = both.embedding.tokens(ids()) + both.encoder_embedding.positions.weight[1 : T + 1]
    expected = both.encoder_final_norm(both.encoder_layers[0](x))
    torch.testing.assert_close(both.encode(ids()), expected)


def test_patches_are_vits() -> None:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    theirs = ViTEmbeddings(ViTConfig(hidden_size=E, image_size=12, patch_size=4)).double()
    data = config(
        embedding=EmbeddingConfig("learned", frontend=PatchConfig((12, 12), (4, 4))),
        task=TaskHeadConfig("first", 3),
    )
    made = model(replace(data, vocab_size=0, max_positions=10))
    part = made.embedding
    with torch.no_grad():
        theirs.cls_token.copy_(part.frontend.class_token)
        theirs.position_embeddings.copy_(part.positions.weight)
        theirs.patch_embeddings.projection.load_state_dict(part.frontend.projection.state_dict())
        images = torch.randn(2, 3, 12, 12).double()
        torch.testing.assert_close(part(images), theirs(images))
        assert made(images).shape == (2, 3)
    with pytest.raises(InputError, match="images must be"):
        made(images[:, :2])


def test_sound_is_whispers() -> None:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    small = {"d_model": E, "encoder_layers": 0, "num_mel_bins": 5, "max_source_positions": 8}
    theirs = WhisperEncoder(WhisperConfig(**small)).double().eval()
    own = EncoderConfig(EmbeddingConfig("learned", frontend=AudioConfig(5)), max_positions=8)
    made = model(config("encoder-decoder", layers=(CROSSED,), encoder_layers=(LAYER,), encoder=own))
    part = made.encoder_embedding
    with torch.no_grad():
        theirs.conv1.load_state_dict(part.frontend.conv1.state_dict())
        theirs.conv2.load_state_dict(part.frontend.conv2.state_dict())
        theirs.embed_positions.weight.copy_(part.positions.weight)
        theirs.layer_norm = nn.Identity()
        sound = torch.randn(2, 5, 16).double()
        torch.testing.assert_close(part(sound), theirs(sound).last_hidden_state)
        expected = made(ids(), encoder_hidden=made.encode(sound))
        torch.testing.assert_close(in_chunks(made, ids(), encoder_ids=sound), expected)


def test_task_heads_pool_what_is_no_padding() -> None:
    tanh = HeadTransformConfig(activation="tanh")
    lengths = [7, 11]
    mask = KeyLengths(lengths)
    for pooling in (None, "first", "last", "mean", "end"):
        data = config(task=TaskHeadConfig(pooling, 3, (tanh,)), eos_token_ids=(49,))
        made = model(data)
        tokens = ids().clamp(max=48)
        tokens[0, 4] = tokens[1, 9] = tokens[1, 10] = 49
        hidden = made.hidden_states(tokens, mask=mask)
        pooled = {
            None: hidden,
            "first": hidden[:, 0],
            "last": torch.stack([hidden[0, 6], hidden[1, 10]]),
            "mean": torch.stack([hidden[0, :7].mean(0), hidden[1].mean(0)]),
            "end": torch.stack([hidden[0, 4], hidden[1, 9]]),
        }[pooling]
        task = made.task
        expected = task.classifier(torch.tanh(task.transforms[0].dense(pooled)))
        torch.testing.assert_close(made(tokens, mask=mask), expected)
    late = Transformer(config(task=TaskHeadConfig("mean", 3, (tanh,), late=True))).double().eval()
    late.load_state_dict(made.state_dict())
    each = late.task.classifier(torch.tanh(late.task.transforms[0].dense(hidden)))
    expected = torch.stack([each[0, :7].mean(0), each[1].mean(0)])
    torch.testing.assert_close(late(tokens, mask=mask), expected)
    with pytest.raises(InputError, match="eos_token_ids"):
        made(ids().clamp(max=48))
    with pytest.raises(UnsupportedError, match="no mask but KeyLengths"):
        model(config(task=TaskHeadConfig("mean")))(ids(), mask=~KeyLengths(lengths))
    with pytest.raises(ConfigError, match="needs head=None"):
        config(task=TaskHeadConfig("mean"), head="tied")
    for wrong, words in (
        ({"num_labels": 3, "labels": ("one",)}, "num_labels=3"),
        ({"num_labels": 2, "late": True}, "late pooling"),
        ({"num_labels": 3, "spans": True}, "2 labels"),
    ):
        with pytest.raises(ConfigError, match=words):
            TaskHeadConfig(**wrong)


@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_caches_probe_and_ablation_serve_every_choice(kind: str) -> None:
    plain = AttentionConfig(4, 2, 6)
    layers = (
        LayerConfig(
            replace(plain, alibi=ALiBiConfig()), FeedForwardConfig(20), parallel="one norm"
        ),
        LayerConfig(replace(plain, chunk=4), FeedForwardConfig(20), norm_placement="after"),
        LayerConfig(
            replace(plain, query_temperature=QueryTemperatureConfig(0.5, 3)),
            FeedForwardConfig(20, "relu2", gated=False),
            residual_scale=0.5,
        ),
    )
    made = model(config("decoder", layers=layers, head="tied", final_norm=NormConfig()))
    tokens = ids(3, 14)
    expected = made(tokens)
    cache = made.new_cache(kind=kind, spare=4)
    with torch.no_grad():
        made(tokens[:, :9], cache=cache)
        made(tokens[:, 2:5], cache=cache)
        cache.truncate(9)
        cache.reorder([2, 0, 0])
        got = made(tokens[[2, 0, 0], 9:], cache=cache.fork())
    torch.testing.assert_close(got, expected[[2, 0, 0], 9:])
    if kind == "auto":
        # A chunk is held as a window is: no more than it is kept.
        assert cache.layers[1].layout == Ring(4, 4)
    # Rows of different lengths: positions below 0 are padding on the left.
    positions = torch.stack([torch.arange(14) - pad for pad in (0, 3, 5)])
    shifted = torch.stack([tokens[i].roll(pad) for i, pad in enumerate((0, 3, 5))])
    with torch.no_grad():
        ragged = made(shifted, positions=positions, cache=made.new_cache(kind=kind))
    for row, pad in enumerate((0, 3, 5)):
        torch.testing.assert_close(ragged[row, pad:], expected[row, : 14 - pad])
    with ph.probe(made) as seen, torch.no_grad():
        made(tokens)
    weights = seen[1].weights()
    assert float(weights[:, :, 13, :12].abs().max()) == 0.0
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    with ph.ablate(made, {0: [1]}):
        ablated = made(tokens)
    with torch.no_grad():
        made.layers[0].attention.o_proj.weight[:, 6:12] = 0
    torch.testing.assert_close(ablated, made(tokens))
    with pytest.raises(UnsupportedError, match="ALiBi"):
        ph.prune(made, {0: [0, 1]})
    tables = model(config("decoder", relative_bias=RelativeBiasConfig(8, 9)))
    with pytest.raises(UnsupportedError, match="share a bias"):
        ph.prune(tables, {0: [0]})
