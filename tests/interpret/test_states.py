"""Probes of heads that remember a state: signed weights, and shares everywhere else."""

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    HeadLayout,
    KimiDeltaAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    Mamba2Config,
    MambaConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import InputError, UnsupportedError
from polyhead.interpret import kept_rows
from polyhead.layers.recurrent import RecurrentLayer

E, T = 32, 40
PLAIN = AttentionConfig(4, 2, 8, rope=RopeConfig())
KINDS: dict[str, HeadLayout] = {
    "gated delta": GatedDeltaNetConfig(4, 2, 8, 6),
    "KDA": KimiDeltaAttentionConfig(4, 4, 8, 8),
    "lightning": LightningAttentionConfig(4, 8),
    "Mamba-2": Mamba2Config(4, 2, 16, 8),
}
IDS = torch.randint(50, (2, T), generator=torch.Generator().manual_seed(1))


def model(*attentions: HeadLayout) -> ph.Transformer:
    torch.manual_seed(0)
    layers = tuple(LayerConfig(each, FeedForwardConfig(48)) for each in attentions)
    return ph.Transformer(TransformerConfig("decoder", 50, E, 512, layers)).eval()


@pytest.mark.parametrize("rows", [7, 512])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_are_the_weights_that_the_output_is_a_sum_of_values_by(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_rows, "_ROWS", rows)
    made = model(PLAIN, KINDS[kind])
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer = made.layers[1].attention
    assert isinstance(layer, RecurrentLayer)
    inner = layer._recurrence

    def noted(q, k, v, *more, **options):
        out = inner(q, k, v, *more, **options)
        calls.append((v, out))
        return out

    layer._recurrence = noted
    without = made(IDS)
    with ph.probe(made) as seen:
        assert torch.equal(made(IDS), without)
    (v, out) = calls[-1]
    view = seen[1]
    assert view.heads == tuple(range(out.shape[1]))
    signed = view.signed_rows(slice(None))
    found = signed @ v.repeat_interleave(out.shape[1] // v.shape[1], dim=1).float()
    torch.testing.assert_close(found, out.float(), atol=1e-4, rtol=1e-4)
    assert torch.equal(signed.triu(1), torch.zeros_like(signed))
    assert bool((signed < 0).any())
    torch.testing.assert_close(view.signed_rows(slice(30, 33)), signed[:, :, 30:33])

    shares = signed.abs() / signed.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(view.rows(), shares, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(view.rows([2], 17), shares[:, 2:3, 17:18], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(view.tile(1, slice(5, 20), slice(3, 9)), shares[:, 1, 5:20, 3:9])
    torch.testing.assert_close(view.map(1, T), shares[:, 1], atol=1e-5, rtol=1e-4)
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum(-1)
    torch.testing.assert_close(view.entropy, entropy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(view.received, shares.sum(2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(view.lse.exp(), signed.abs().sum(-1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_some_heads_and_statistics_alone_are_those_of_all() -> None:
    made = model(KINDS["gated delta"], PLAIN)
    with ph.probe(made) as whole:
        made(IDS)
    with ph.probe(made, heads=[3, 1]) as some:
        made(IDS)
    with ph.probe(made, statistics=["entropy", "previous_token"]) as few:
        made(IDS)
    torch.testing.assert_close(some[0].rows([1]), whole[0].rows([1]))
    torch.testing.assert_close(some[0].entropy, whole[0].entropy[:, [3, 1]])
    torch.testing.assert_close(few[0].entropy, whole[0].entropy)
    torch.testing.assert_close(few[0].previous_token, whole[0].previous_token)
    assert whole[0].nbytes > some[0].nbytes > few[0].nbytes
    assert torch.equal(whole[1].signed_rows(slice(3, 9)), whole[1].rows(queries=slice(3, 9)))
    with pytest.raises(InputError, match="entropy, previous_token alone"):
        few[0].signed_rows(slice(None))


@torch.no_grad()
def test_padding_behind_a_text_has_no_weights() -> None:
    made = model(KINDS["gated delta"])
    lengths = torch.tensor([T, 25])
    with ph.probe(made) as seen:
        made(IDS, mask=ph.Causal() & ph.KeyLengths(lengths))
    with ph.probe(made) as alone:
        made(IDS[1:, :25])
    rows = seen[0].rows()
    torch.testing.assert_close(rows[1:, :, :25, :25], alone[0].rows())
    assert not rows[1, :, 25:].any()
    assert torch.isfinite(seen[0].entropy).all()


@torch.no_grad()
def test_what_cannot_be_shown_is_left_out_or_refused_by_name(tmp_path) -> None:
    made = model(PLAIN, MambaConfig(10, 4, 3), KINDS["lightning"])
    with ph.probe(made) as seen:
        made(IDS)
    assert seen.layers == (0, 2)
    with (
        ph.probe(made, layers=[1]),
        pytest.raises(UnsupportedError, match="no weights that a hook"),
    ):
        made(IDS)
    with pytest.raises(UnsupportedError):
        seen.save(tmp_path / "seen.safetensors")
    assert not [*tmp_path.iterdir()]
    cache = made.new_cache()
    with ph.probe(made), pytest.raises(UnsupportedError, match="whole texts: got a cache"):
        made(IDS, cache=cache)
    hook = made.layers[2].attention.register_attention_hook(lambda record: None)
    with hook, pytest.raises(UnsupportedError, match=r"polyhead\.recurrence_rows"):
        made(IDS)
