"""Weights that copy before anything is learned."""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from polyhead.errors import ConfigError
from polyhead.families import read_config
from polyhead.training.copying import begin_with_copying

V = 300
SIZES = {
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "max_position_embeddings": 64, "vocab_size": V, "scale_embedding": True, "eos_token_id": 0,
    "pad_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip


def _model(name: str, **changes: object) -> ph.Transformer:
    torch.manual_seed(0)
    return ph.Transformer(read_config({"model_type": name, **SIZES, **changes}, "config.json"))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_copier_writes_what_it_reads_from_the_first_step(scaled: bool) -> None:
    model = _model("pegasus", scale_embedding=scaled).eval()
    generator = torch.Generator().manual_seed(1)
    source = torch.stack([torch.randperm(V - 2, generator=generator)[:24] + 2 for _ in range(8)])
    written = torch.cat((torch.ones(8, 1, dtype=torch.long), source[:, :-1]), dim=1)

    def right() -> float:
        with torch.no_grad():
            found = model(written, encoder_ids=source).argmax(-1)
        return float((found == source).float().mean())

    assert right() < 0.1
    begin_with_copying(model)
    assert right() > 0.9
    dropped = torch.cat((source[:, :10], source[:, 12:]), dim=1)  # what is left out moves the rest
    read, source = dropped, dropped
    written = torch.cat((torch.ones(8, 1, dtype=torch.long), read[:, :-1]), dim=1)
    assert right() > 0.9


def test_a_copier_depends_on_no_default_device() -> None:
    here, elsewhere = _model("pegasus"), _model("pegasus")
    torch.manual_seed(1)
    begin_with_copying(here)
    torch.manual_seed(1)
    with torch.device("meta"):
        begin_with_copying(elsewhere)
    for mine, theirs in zip(here.parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_models_that_cannot_copy_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"norms first, .* model_type pegasus has them"):
        begin_with_copying(_model("marian", decoder_vocab_size=V))
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    with pytest.raises(ConfigError, match="embed_dim=128, head_dim=16, num_heads=8"):
        begin_with_copying(_model("pegasus", **heads))
