"""Healing: better on texts it did not see, never worse; what was converted is trained."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from small import small

from polyhead.conversion import convert, heal
from polyhead.conversion import healing as healing_module
from polyhead.conversion.healing import RATES
from polyhead.conversion.measure import Teacher, mean_kl
from polyhead.errors import InputError
from polyhead.training import run as run_module


def _texts(seed: int, count: int = 24) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (64,), generator=drawn) for _ in range(count)]


def _converted():
    model = small("llama")
    return model, convert(model, num_kv_heads=1, calibration=_texts(1), alone=False)[0]


def test_healing_brings_a_model_nearer_to_its_teacher_and_touches_what_was_converted():
    model, new = _converted()
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    told: list[tuple[str, int, int]] = []
    healed, healing = heal(
        new,
        teacher=model,
        texts=_texts(2),
        minutes=0.1,
        window=64,
        unseen={"other": _texts(3, 2)},
        progress=lambda *words: told.append(words),
    )
    assert [each.name for each in healing.domains] == ["other"]
    assert healing.domains[0].tokens == 128
    assert "unseen" in str(healing)
    assert healing.after < 0.9 * healing.before
    assert healing.rate in RATES
    assert healing.after == min(each.kl for each in healing.curve)
    assert healing.seconds < 30
    assert all(torch.equal(before[name], tensor) for name, tensor in new.state_dict().items())
    touched = {n for n, tensor in healed.state_dict().items() if not torch.equal(before[n], tensor)}
    parts = {name.split(".")[2] for name in touched}
    assert parts == {"attention"}
    assert all(parameter.requires_grad for parameter in healed.parameters())
    assert not healed.training
    assert f"KL {healing.before:.4f} → {healing.after:.4f}" in str(healing)
    assert {words[0][:11] for words in told} == {"healing, KL", "evaluation"}
    assert str(healing).count(" s  step ") == len(healing.curve) > 0


def test_the_rate_is_constant_while_it_is_sought_and_then_falls_to_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
):
    ticks = itertools.count()
    runs: list[list[float]] = []

    class Watched(healing_module.Run):
        def __iter__(self):
            runs.append([])
            for step in super().__iter__():
                runs[-1].append(step.lr)
                yield step

    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: next(ticks))
    for module in (healing_module, run_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(healing_module, "Run", Watched)
    model, new = _converted()
    _, healing = heal(new, teacher=model, texts=_texts(2), minutes=5, window=64)
    sought, trained = runs[: len(RATES)], runs[len(RATES) :]
    assert [set(run) for run in sought] == [{rate} for rate in RATES]
    halves = [healing.rate / 2**i for i in range(len(trained))]
    assert all(run[0] <= rate for run, rate in zip(trained, halves, strict=True))
    assert all(run == sorted(run, reverse=True) for run in trained)
    assert trained[0][0] > 0.9 * healing.rate
    assert trained[-1][-1] == pytest.approx(0.1 * halves[-1], rel=0.1)
    assert sum(map(len, runs)) == healing.curve[-1].steps


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_keeps_what_is_healed_so_far(again: bool):
    model, new = _converted()
    seen = 0

    def interrupted(what: str, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 8 or (again and what == "evaluation"):
            raise KeyboardInterrupt

    healed, healing = heal(
        new,
        teacher=model,
        texts=_texts(2),
        minutes=0.05,
        window=64,
        unseen={"other": _texts(3, 2)},
        progress=interrupted,
    )
    assert len(healing.domains) == (0 if again else 1)
    assert healing.interrupted
    validated = [_texts(2)[5], _texts(2)[15]]
    kl = mean_kl(healed, Teacher(model), validated)
    assert kl == pytest.approx(healing.after, rel=1e-4)
    assert healing.after <= healing.before
    assert "interrupted" in str(healing)
    assert str(healing).count(" s  step ") == len(healing.curve)
    assert healed.config == new.config


def test_a_rate_that_destroys_is_gone_back_on(monkeypatch: pytest.MonkeyPatch):
    # So high that it still destroys when it has been halved a dozen times.
    monkeypatch.setattr("polyhead.conversion.healing.RATES", (1e6,))
    model, new = _converted()
    healed, healing = heal(new, teacher=model, texts=_texts(2), minutes=0.02, window=64)
    assert healing.after == healing.before
    assert not any(each.kept for each in healing.curve)
    assert any(each.rate < 1e6 for each in healing.curve) or len(healing.curve) < 3
    assert all(
        torch.equal(a, b) for a, b in zip(healed.parameters(), new.parameters(), strict=True)
    )
    assert math.isfinite(healing.after)


def test_what_cannot_be_healed_is_named():
    model, new = _converted()
    with pytest.raises(InputError, match="at least ten windows of 64 tokens: got 3"):
        heal(new, teacher=model, texts=_texts(2, 3), window=64)
    with pytest.raises(InputError, match="of healing and of a overlap"):
        heal(new, teacher=model, texts=_texts(2), window=64, unseen={"a": _texts(2)[:1]})
    with pytest.raises(InputError, match="nothing to heal"):
        heal(model, teacher=model, texts=_texts(2), window=64)
    with pytest.raises(ValueError, match="minutes must be"):
        heal(new, teacher=model, texts=_texts(2), minutes=0)
    with pytest.raises(ValueError, match="teacher must be the model that was converted"):
        heal(new, teacher=small("llama", num_hidden_layers=3), texts=_texts(2), window=64)
    with pytest.raises(InputError, match="training mode"):
        heal(new.train(), teacher=model, texts=_texts(2), window=64)
