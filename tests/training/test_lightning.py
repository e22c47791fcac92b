"""A polyhead model in a Lightning module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.config import TransformerConfig

lightning = pytest.importorskip("lightning")

CONFIG = TransformerConfig.vanilla(30, 32, 1, 4, 64, dropout=0.0)


def _batches() -> Any:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(3):
        ids = torch.randint(4, 30, (4, 12), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.flip(1)})
    return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]  # a list


class Pairs(lightning.LightningModule):  # type: ignore[misc]  # lightning may be missing
    """What a user of Lightning writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = ph.Trainable(ph.Transformer(CONFIG))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
        made = self.model(**batch)["loss"]
        self.losses.append(float(made.detach()))
        return made

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _trainer(folder: Path, epochs: int) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=epochs,
    )


@pytest.mark.slow
def test_lightning_sees_the_losses_of_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    plain = Pairs()
    optimizer = plain.configure_optimizers()
    for batch in [*_batches()] * 2:
        plain.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = Pairs()
    _trainer(tmp_path / "whole", 2).fit(whole, _batches())
    assert whole.losses == pytest.approx(plain.losses, rel=1e-6)
    assert whole.losses[-1] != whole.losses[0]

    first = Pairs()
    trainer = _trainer(tmp_path / "first", 1)
    trainer.fit(first, _batches())
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    again = Pairs()
    trainer = _trainer(tmp_path / "again", 2)
    trainer.fit(again, _batches(), ckpt_path=tmp_path / "state.ckpt")
    assert first.losses + again.losses == pytest.approx(whole.losses, rel=1e-6)
