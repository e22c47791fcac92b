"""polyhead's models in Hugging Face's trainers and accelerate: the losses of transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from pairs import make_pair

import polyhead as ph
from polyhead.errors import ConfigError, InputError

STEPS = 6


def _rows(*, pairs: bool) -> list[dict[str, Any]]:
    """Rows of uneven length, padded on the right: ids, their mask, and labels."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(24):
        ids = torch.randint(4, 30, (12,), generator=generator)
        real = torch.arange(12) < 6 + number % 7
        ids = ids.masked_fill(~real, 1)
        labels = ids.masked_fill(~real, -100)
        if pairs:
            labels = torch.randint(4, 30, (8,), generator=generator)
            labels[4 + number % 4 :] = -100
        rows.append({"input_ids": ids, "attention_mask": real.long(), "labels": labels})
    return rows


def _arguments(folder: Path, kind: type[Any] = hf.TrainingArguments, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2,
        "optim": "sgd",  # Adam makes whole steps of gradients that are 0 but for rounding
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "lr_scheduler_type": "constant", "seed": 5,
    }  # fmt: skip
    return kind(output_dir=str(folder), **values | changes)


def _losses(trainer: Any, **options: Any) -> list[float]:
    trainer.train(**options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "name",
    ["llama", "t5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "bart"))],
)
def test_a_trainer_sees_the_losses_of_transformers(name: str, tmp_path: Path) -> None:
    pairs = name in ("t5", "bart")
    theirs, ours = make_pair(name, tmp_path / "model", **{"dropout": 0.0} if name == "bart" else {})
    rows = _rows(pairs=pairs)
    trainer, kind = hf.Trainer, hf.TrainingArguments
    if pairs:
        trainer, kind = hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments
    # transformers' T5 and BART ignore how many labels the accumulated batches have together.
    options = {
        "gradient_accumulation_steps": 1 if pairs else 2,
        "activation_checkpointing": name == "llama",
    }
    reference = trainer(
        theirs.train(), _arguments(tmp_path / "a", kind, **options), train_dataset=rows
    )
    model = ph.Trainable(ours.train())
    made = trainer(model, _arguments(tmp_path / "b", kind, **options), train_dataset=rows)
    before = made.evaluate(rows[:8])["eval_loss"]
    assert _losses(made) == pytest.approx(_losses(reference), rel=2e-4)
    assert model.transformer.recompute == (name == "llama")
    after = made.evaluate(rows[:8])["eval_loss"]
    assert after == pytest.approx(reference.evaluate(rows[:8])["eval_loss"], rel=2e-4)
    assert abs(after - before) > 0.01 * before


def test_a_run_that_was_stopped_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    rows = _rows(pairs=False)

    def trainer(**changes: Any) -> Any:
        _, ours = make_pair("llama", tmp_path / "model")
        arguments = _arguments(tmp_path / "run", save_strategy="steps", save_steps=3, **changes)
        return hf.Trainer(ph.Trainable(ours.train()), arguments, train_dataset=rows)

    whole = _losses(trainer())
    assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").exists()
    again = _losses(trainer(), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again == pytest.approx(whole, rel=1e-5)


def test_accelerate_and_a_plain_loop_train_alike(tmp_path: Path) -> None:
    from accelerate import Accelerator

    rows = {key: torch.stack([row[key] for row in _rows(pairs=False)[:8]])
            for key in ("input_ids", "attention_mask", "labels")}  # fmt: skip
    found = []
    for accelerated in (False, True):
        _, ours = make_pair("llama", tmp_path / str(accelerated))
        model: Any = ph.Trainable(ours.train())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        accelerator = Accelerator(cpu=True)
        if accelerated:
            model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(4):
            made = model(**rows)["loss"]
            if accelerated:
                accelerator.backward(made)
            else:
                made.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(made.detach()))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0][-1] < found[0][0]


def test_padding_on_either_side_and_packed_documents_do_not_reach_the_loss(tmp_path: Path) -> None:
    _, ours = make_pair("llama", tmp_path)
    model = ph.Trainable(ours).eval()
    ids = torch.randint(4, 30, (1, 9), generator=torch.Generator().manual_seed(0))
    wanted = model(ids, labels=ids)["loss"]
    for left in (0, 3):
        padded = torch.full((1, 12), 1)
        padded[:, left : left + 9] = ids
        real = torch.zeros(1, 12, dtype=torch.long)
        real[:, left : left + 9] = 1
        labels = padded.masked_fill(real == 0, -100)
        labels[:, left] = -100  # the first token is not predicted
        positions = (real.cumsum(1) - 1).clamp_min(0)
        found = model(padded, attention_mask=real, labels=labels, position_ids=positions)
        torch.testing.assert_close(found["loss"], wanted, rtol=1e-5, atol=1e-5)
    other = torch.randint(4, 30, (1, 5), generator=torch.Generator().manual_seed(1))
    packed = torch.cat((other, ids), dim=1)
    positions = torch.cat((torch.arange(5), torch.arange(9)))
    labels = packed.clone()
    labels[:, :6] = -100
    found = model(
        packed, labels=labels, position_ids=positions, document_lengths=torch.tensor([[5, 9]])
    )
    torch.testing.assert_close(found["loss"], wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_belong_together_is_said(tmp_path: Path) -> None:
    _, decoder = make_pair("llama", tmp_path / "a")
    _, both = make_pair("t5", tmp_path / "b")
    ids = torch.randint(4, 30, (2, 9))
    with pytest.raises(InputError, match=r"attention_mask must be \[2, 9\].*got \[2, 8\]"):
        ph.Trainable(decoder)(ids, attention_mask=torch.ones(2, 8))
    with pytest.raises(
        InputError, match=r"labels must have the shape of the inputs, \[2, 9\].*got \[2, 4\]"
    ):
        ph.Trainable(decoder)(ids, labels=ids[:, :4])
    with pytest.raises(InputError, match=r"decoder_input_ids .* belong to an encoder-decoder"):
        ph.Trainable(decoder)(ids, decoder_input_ids=ids)
    with pytest.raises(InputError, match="needs labels or decoder_input_ids: got neither"):
        ph.Trainable(both)(ids)
    with pytest.raises(ConfigError, match="Linear holds no Transformer"):
        ph.Trainable(torch.nn.Linear(2, 2))
