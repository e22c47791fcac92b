"""The search over an encoder-decoder: beams of a sentence share its source."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    MergedAttentionConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.search import BeamSearch
from polyhead.generation.decoding.steps import TranslationSteps
from polyhead.models import Transformer
from polyhead.semantics import KeyLengths

EOS, START = 2, 1


@pytest.fixture(scope="module", params=["cross", "merged"])
def model(request):
    torch.manual_seed(0)
    attention = AttentionConfig(4, 2, 6)
    network = FeedForwardConfig(20)
    norm = NormConfig("layernorm", bias=True)
    layer = LayerConfig(attention, network, norm, norm_placement="post")
    decoder = LayerConfig(attention, network, norm, "post", cross_attention=attention)
    if request.param == "merged":
        decoder = LayerConfig(MergedAttentionConfig(4, 2, 6, window=5), network, norm, "post")
    config = TransformerConfig(
        "encoder-decoder", 30, 24, 64, (decoder,) * 2, (layer,) * 2,
        embedding=EmbeddingConfig(positions="sinusoidal"), final_norm=None,
    )  # fmt: skip
    made = Transformer(config).eval()
    for tensor in made.parameters():
        torch.nn.init.normal_(tensor, std=0.5)
    return made


class Slowly:
    """The same steps without a cache: every row is computed whole, with a source of its own."""

    def __init__(self, model, sources, prompts):
        self.model, self.sources = model, list(sources)
        self.rows = [(i, list(prompt)) for i, prompt in enumerate(prompts)]

    def start(self):
        return torch.stack([self._logits(source, ids) for source, ids in self.rows])

    def step(self, tokens):
        for (_, ids), token in zip(self.rows, tokens, strict=True):
            ids.append(token)
        return self.start()

    def reorder(self, rows, sentences):
        self.rows = [(self.rows[row][0], [*self.rows[row][1]]) for row in rows]

    @torch.inference_mode()
    def _logits(self, source, ids):
        source = torch.tensor([self.sources[source]])
        return self.model(torch.tensor([ids]), encoder_ids=source, last=1)[0, -1]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    beams=st.integers(2, 5),
    kind=st.sampled_from(["dense", "paged"]),
    seed=st.integers(0, 99),
)
def test_beams_that_share_a_source_equal_rows_with_sources_of_their_own(
    model, lengths, beams, kind, seed
):
    torch.manual_seed(seed)
    sources = [torch.randint(3, 30, (n,)).tolist() for n in lengths]
    prompts = [[START]] * len(sources)
    options = GenerationOptions(num_beams=beams, num_return_sequences=2, length_penalty=0.8)
    search = BeamSearch(options, (), frozenset([EOS]), 7)
    cache = model.new_cache(kind=kind, page_size=4)
    steps = TranslationSteps(model, sources, prompts, cache)
    found = search.run(steps, prompts)
    wanted = search.run(Slowly(model, sources, prompts), prompts)
    assert [[each.ids for each in texts] for texts in found] == [
        [each.ids for each in texts] for texts in wanted
    ]
    rows = {len(cross.lengths) for cross in cache.cross}
    assert rows <= set(range(1, len(sources) + 1)), "a source is held once, not once for each beam"


@torch.no_grad()
def test_rows_that_are_no_multiple_of_the_contexts_are_refused(model):
    cache = model.new_cache()
    mask = KeyLengths(torch.tensor([3, 2]))
    ids = torch.full((2, 1), START)
    model(ids, encoder_ids=torch.full((2, 3), 5), encoder_mask=mask, cache=cache)
    cache.reorder([0, 0, 1], [0, 1])
    with pytest.raises(ValueError, match="a multiple of its 2"):
        model(torch.full((3, 1), START), cache=cache)
