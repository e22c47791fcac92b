"""Which source token each target token reads, and which heads say so."""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.errors import InputError
from polyhead.interpret.source_alignment import SourceAlignment, alignment_scores
from polyhead.models import Transformer


def _model() -> Transformer:
    torch.manual_seed(0)
    attention = AttentionConfig(4, 2, 8)
    layer = LayerConfig(attention, FeedForwardConfig(16))
    decoder = LayerConfig(attention, FeedForwardConfig(16), cross_attention=attention)
    model = Transformer(
        TransformerConfig("encoder-decoder", 30, 32, 40, (decoder,) * 3, (layer,) * 2)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model.eval()


def test_a_head_that_reads_one_token_each_scores_1_and_one_that_reads_alike_1_over_t() -> None:
    T, S = 5, 9
    own = torch.eye(S)[[3, 0, 8, 4, 1]]
    sink = torch.zeros(T, S)
    sink[:, 2] = 1.0
    spread = torch.zeros(T, 10)
    for t in range(T):
        spread[t, 2 * t : 2 * t + 2] = 0.5  # two of its own
    assert alignment_scores(own) == 1.0
    torch.testing.assert_close(alignment_scores(sink), torch.tensor(1 / T))
    torch.testing.assert_close(alignment_scores(torch.full((T, S), 1 / S)), torch.tensor(1 / T))
    assert alignment_scores(spread) == 1.0
    both = torch.stack((own, sink))
    assert alignment_scores(both).tolist() == pytest.approx([1.0, 1 / T])
    # By hand: p(s|t) = [[1, 0], [1/2, 1/2]], read = [3/2, 1/2], p(t|s) = [[2/3, 0], [1/3, 1]].
    half = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(alignment_scores(half), torch.tensor((2 / 3 + 1 / 6 + 1 / 2) / 2))


def test_the_best_path_that_never_goes_back_is_found() -> None:
    weights = torch.tensor([[0.1, 0.8, 0.1], [0.9, 0.0, 0.1], [0.0, 0.3, 0.7]])
    found = SourceAlignment(((0, 0),), torch.ones(1, 1), weights)
    assert found.sources.tolist() == [1, 0, 2]
    paths = torch.cartesian_prod(*[torch.arange(3)] * 3)
    allowed = paths[(paths.diff(dim=1) >= 0).all(dim=1)]
    sums = torch.stack([weights[torch.arange(3), path].sum() for path in allowed])
    best = allowed[sums.argmax()]
    assert found.monotone().tolist() == best.tolist() == [0, 0, 2]


def test_weights_are_those_of_the_steps_that_wrote_the_tokens() -> None:
    model = _model()
    source, target = torch.tensor([3, 9, 4, 1, 7, 2]), torch.tensor([1, 5, 8, 6, 2])
    found = ph.align(model, source, target, prompt=2)
    with ph.probe(model) as seen, torch.no_grad():
        model(target[None], encoder_ids=source[None])
    assert [view.layer for view in seen.cross] == [f"layers.{i}.cross_attention" for i in range(3)]
    assert [view.layer for view in seen.decoder] == [0, 1, 2]
    assert [view.layer for view in seen.encoder] == [3, 4]
    rows = torch.stack([view.rows()[0, :, 1:4] for view in seen.cross])  # steps 1 to 3 write 2 to 4
    torch.testing.assert_close(found.scores, alignment_scores(rows))
    best = found.scores.max()
    close = ph.align(model, source, target, prompt=2, above=0.97)
    for alignment, share in ((found, 0.5), (close, 0.97)):
        assert {*alignment.heads} == {
            (layer, head)
            for layer in range(3)
            for head in range(4)
            if found.scores[layer, head] >= share * best
        }
    assert 1 <= len(close.heads) < len(found.heads)
    assert found.scores[found.heads[0]] == best
    wanted = torch.stack([rows[place] for place in found.heads]).mean(dim=0)
    torch.testing.assert_close(found.weights, wanted)
    chosen = ph.align(model, source, target.tolist(), heads=[(2, 1)])
    assert chosen.heads == ((2, 1),)
    torch.testing.assert_close(chosen.weights, seen.cross[2].rows([1])[0, 0, :4])


def test_what_cannot_be_aligned_is_refused() -> None:
    model, source = _model(), torch.tensor([3, 4])
    for arguments, words in (
        ({"target": [1]}, "new tokens after a prompt of 1: got 1"),
        ({"target": [1, 2], "heads": [(3, 0)]}, r"layers 0 to 2: got \(3, 0\)"),
        ({"target": [1, 2], "heads": []}, "at least one"),
    ):
        with pytest.raises(InputError, match=words):
            ph.align(model, source, **arguments)
    with pytest.raises(ValueError, match="above"):
        ph.align(model, source, [1, 2], above=2.0)
    decoder = Transformer(
        TransformerConfig(
            "decoder", 9, 8, 9, (LayerConfig(AttentionConfig(1, 1, 8), FeedForwardConfig(8)),)
        )
    )
    with pytest.raises(InputError, match="no cross-attention"):
        ph.align(decoder, source, [1, 2])
