"""Texts as vectors: the mean of the hidden states, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import CONTEXT, byte_tokenizer, decoder, encoder

from polyhead.config import EmbeddingConfig, HeadTransformConfig, PatchConfig, TaskHeadConfig
from polyhead.errors import ConfigError, ContextLengthError, InputError
from polyhead.generation import TextEncoder
from polyhead.models import Transformer

TEXTS = ["a", "The animal didn't cross the street", "注意力", "two words", "b" * CONTEXT]


@pytest.fixture(scope="module")
def model() -> TextEncoder:
    return TextEncoder(encoder(), byte_tokenizer(), "tiny").eval()


def test_vector_is_the_normalised_mean_of_the_hidden_states(model: TextEncoder) -> None:
    ids = torch.tensor([model.tokenizer.encode(TEXTS[1])])
    with torch.no_grad():
        mean = model(ids)[0].mean(dim=0)
    torch.testing.assert_close(model.encode(TEXTS[1])[0], mean / mean.norm())
    torch.testing.assert_close(model.encode(TEXTS[1], normalize=False)[0], mean)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_padded_rows_equal_their_solo_runs_in_order(model: TextEncoder, batch_size: int) -> None:
    together = model.encode(TEXTS, batch_size=batch_size)
    alone = torch.cat([model.encode(text) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0.0)
    assert together.shape == (len(TEXTS), model.config.embed_dim)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(len(TEXTS)))


def test_vectors_can_be_used_in_a_graph_of_gradients(model: TextEncoder) -> None:
    layer = torch.nn.Linear(model.config.embed_dim, 1)
    layer(model.encode(TEXTS[:2])).sum().backward()
    assert layer.weight.grad is not None


def test_text_beyond_the_context_is_refused_and_not_cut(model: TextEncoder) -> None:
    with pytest.raises(ContextLengthError, match=rf"text 1 has {CONTEXT + 1}.*holds {CONTEXT}"):
        model.encode(["short", "x" * (CONTEXT + 1)])


def test_bad_input_is_refused_by_name(model: TextEncoder) -> None:
    with pytest.raises(InputError, match="text 1 is empty"):
        model.encode(["a", ""])
    with pytest.raises(InputError, match="at least one text: got none"):
        model.encode([])
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1: got 0"):
        model.encode("a", batch_size=0)


def test_a_head_gives_logits_or_classes_and_leaves_the_vectors() -> None:
    body = encoder()
    bare = TextEncoder(body, byte_tokenizer()).eval()
    ids = torch.tensor([bare.tokenizer.encode(TEXTS[1])])
    for fields, shape in (
        ({"head": "tied"}, (*ids.shape, body.config.vocab_size)),
        ({"task": TaskHeadConfig("first", 3)}, (1, 3)),
        ({"task": TaskHeadConfig(None, 2, spans=True)}, (*ids.shape, 2)),
    ):
        model = TextEncoder(Transformer(replace(body.config, **fields)), byte_tokenizer()).eval()
        model.transformer.load_state_dict(body.state_dict(), strict=False)
        assert model(ids).shape == shape
        torch.testing.assert_close(model.encode(TEXTS), bare.encode(TEXTS))
    projected = TaskHeadConfig("mean", transforms=(HeadTransformConfig(5, bias=False),))
    model = TextEncoder(Transformer(replace(body.config, task=projected)), byte_tokenizer()).eval()
    with torch.no_grad():
        wanted = model(ids)
    torch.testing.assert_close(model.encode(TEXTS, normalize=False)[1:2], wanted)


def test_an_encoder_of_images_is_no_text_encoder() -> None:
    images = EmbeddingConfig("learned", frontend=PatchConfig((4, 4), (2, 2)))
    config = replace(encoder().config, embedding=images, vocab_size=0, max_positions=5, head=None)
    with pytest.raises(ConfigError, match="reads text: got an encoder of images"):
        TextEncoder(Transformer(config), byte_tokenizer())


def test_a_decoder_is_no_text_encoder() -> None:
    with pytest.raises(ConfigError, match="needs an encoder: got kind='decoder'"):
        TextEncoder(decoder(), byte_tokenizer())
