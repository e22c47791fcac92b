"""MPT's steepest slope is what the file says; transformers' class leaves it at its default."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from harness import all_cases
from transformers.models.mpt import modeling_mpt

from polyhead.checkpoints import load_checkpoint


@pytest.mark.parametrize("heads", [4, 12])
def test_steepest_slope_is_read(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = all_cases()["mpt"]
    options = {"attn_config": {"alibi_bias_max": 4}, "n_heads": heads, "d_model": 12 * heads}
    theirs = case.build(options)
    theirs.save_pretrained(tmp_path)
    ids = case.ids()
    build = partial(modeling_mpt.build_mpt_alibi_tensor, alibi_bias_max=4)
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *args: build(*args[:2]))
    with torch.no_grad():
        wanted = theirs(ids).logits
        error = (load_checkpoint(tmp_path).model(ids) - wanted).abs().max() / wanted.std()
    assert error < 5e-5
