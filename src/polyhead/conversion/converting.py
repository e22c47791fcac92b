"""``convert``: a model with another head layout, and a report of what that cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int, check_number
from polyhead.config import TransformerConfig
from polyhead.conversion import calibration as calibrating
from polyhead.conversion.budget import Offer, cheapest, offers
from polyhead.conversion.calibration import (
    EVALUATION_TOKENS,
    Calibration,
    calibrate,
    domains_of,
    refuse_overlap,
    windows_of,
)
from polyhead.conversion.draft import Draft, Model, source_of, wrapped
from polyhead.conversion.exact import copy_kv_heads, rotate_keys, to_latent
from polyhead.conversion.lossy import Latents, merge_kv_heads, to_small_latent
from polyhead.conversion.measure import Teacher, each_layer_alone, mean_kl, measure, speed
from polyhead.conversion.proof import ExactStep, Proof
from polyhead.conversion.refusals import refuse_linear, rotated_dim
from polyhead.conversion.report import LayerFigures, Report
from polyhead.errors import InputError
from polyhead.models import Transformer
from polyhead.training.evaluation import Progress, Texts

_ALONE_TOKENS = 256
_HELD_OUT = 4
"""Windows of the calibration texts that are kept for evaluation where no others are given."""


@dataclass(frozen=True)
class _Target:
    """The requested target, checked against the model."""

    num_kv_heads: int | None
    latent: tuple[int, int] | None
    cache: float | None

    def check(self, draft: Draft) -> bool:
        """Whether exact steps alone reach it."""
        exact = True
        for layer in draft.layers:
            config = draft.heads(layer, "converting")
            G, H = config.num_kv_heads, config.num_heads
            if self.num_kv_heads is not None:
                if (
                    self.num_kv_heads == G
                    or (G % self.num_kv_heads and self.num_kv_heads % G)
                    or (H % self.num_kv_heads)
                ):
                    raise InputError(
                        f"num_kv_heads must be a divisor of {G} below it, or a multiple of {G} "
                        f"that divides {H} query heads: got {self.num_kv_heads}"
                    )
                if self.num_kv_heads < G:
                    exact = False
                    refuse_linear(config, layer, "merging kv heads")
                continue
            trial = Draft(draft.config, dict(draft.state))
            to_latent(trial, layer)
            most = trial.latent(layer, "converting")
            P, R = most.qk_rope_head_dim, most.kv_lora_rank
            if self.latent is None:
                exact = False
            elif self.latent != (P, R):
                exact = False
                rotated, size = self.latent
                if rotated > P or rotated + size >= P + R:
                    raise InputError(
                        f"latent must be smaller than what layer {layer} holds of a token, "
                        f"{P} rotated and {R} other numbers: got {self.latent}"
                    )
        return exact


def convert(
    model: Model,
    *,
    num_kv_heads: int | None = None,
    latent: tuple[int, int] | None = None,
    cache: float | None = None,
    calibration: Texts | Calibration | None = None,
    evaluation: Mapping[str, Texts] | None = None,
    unseen: Mapping[str, Texts] | None = None,
    calibration_tokens: int = calibrating.TOKENS,
    evaluation_tokens: int = EVALUATION_TOKENS,
    alone: bool = True,
    progress: Progress | None = None,
) -> tuple[Model, Report]:
    """Gives a decoder another head layout.

        new, report = ph.convert(model, latent=(64, 128), calibration=texts)
        print(report)

    Exact targets (more kv heads; ``latent`` of the size of the whole cache) need no calibration.

    Args:
        model: What ``load`` makes of a decoder, or a ``Transformer`` with texts as tokens; in
            evaluation mode. It stays as it is.
        num_kv_heads: Key/value heads of each layer: 1 is MQA; a multiple of the present number
            copies heads.
        latent: Latent attention in each layer: (rotated features P, latent size R).
        cache: Latent attention of mixed sizes within this fraction of the cache, above 0 and below
            1.
        calibration: Texts that determine which errors matter, several domains are best; or a
            ``Calibration`` to share between conversions.
        evaluation: Texts by domain, of domains that were calibrated on. They may not share 32
            tokens in a row with ``calibration``. Default: a few windows of ``calibration`` that
            are then left out of it.
        unseen: Texts by domain that were not calibrated on.
        calibration_tokens: Largest number of calibration tokens, spread over all texts.
        evaluation_tokens: Largest number of tokens per domain.
        alone: Measure the KL divergence of each converted layer alone.
        progress: Called as ``progress(what, done, total)``.

    Returns:
        The new model, and its report.

    Raises:
        InputError: Not exactly one target; a target larger than the source; numbers that do not
            divide; missing or too few calibration texts; overlapping texts; a model in training
            mode.
        UnsupportedError: A feature of the layers that the target cannot express, by name.
        DisagreementError: An exact step that is not exact on this model.
    """
    target = _target(num_kv_heads, latent, cache)
    transformer = source_of(model)
    draft = Draft.of(model)
    exact = target.check(draft)
    started = time.monotonic()
    domains = domains_of(model, evaluation, unseen, evaluation_tokens)
    found: Calibration | None = None
    prices = [0.0] * len(draft.layers)
    if exact:
        steps = _exact(draft, target)
    else:
        rows = _calibration_rows(model, calibration, calibration_tokens, domains, draft, target)
        steps = _proof_of_alignment(draft, target)
        found = calibration if isinstance(calibration, Calibration) else None
        if found is None:
            found = calibrate(transformer, rows, progress=progress)
        prices = _lossy(draft, target, found, progress)
    like = next(transformer.parameters())
    made = draft.build(like.dtype, like.device)
    seconds = time.monotonic() - started
    if not domains:
        domains = {"random tokens": (True, [_random_window(draft.config)])}
    teacher, sample = Teacher(transformer), next(iter(domains.values()))[1][0][:_ALONE_TOKENS]
    each = together = None
    if alone and not exact:
        each = each_layer_alone(made, teacher, [sample], progress)
        together = mean_kl(made, teacher, [sample])
    report = Report(
        source=getattr(model, "origin", "") or type(model).__name__,
        steps=steps,
        layers=_layers(transformer, made, prices, each),
        domains=measure(made, teacher, domains, progress),
        speed_before=speed(transformer),
        speed_after=speed(made),
        elements_before=_elements(transformer),
        elements_after=_elements(made),
        calibration_tokens=0 if found is None else found.tokens,
        calibration_hash="" if found is None else found.hash,
        seconds=seconds,
        sum_of_layers=None if each is None else sum(each),
        together=together,
    )
    return wrapped(model, made, "converted"), report


def _layers(
    before: Transformer,
    after: Transformer,
    prices: Sequence[float],
    alone: Sequence[float] | None,
) -> tuple[LayerFigures, ...]:
    pairs = zip(before.config.layers, after.config.layers, strict=True)
    return tuple(
        LayerFigures(
            i,
            was.attention.described,
            now.attention.described,
            prices[i],
            None if alone is None else alone[i],
        )
        for i, (was, now) in enumerate(pairs)
    )


def _random_window(config: TransformerConfig) -> Tensor:
    """``[T]`` random tokens, always the same draw."""
    length = min(calibrating.WINDOW, config.max_positions)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (length,), generator=generator, device="cpu")


def _elements(model: Transformer) -> int:
    return sum(each.attention.kv.elements for each in model.config.layers)


def _target(
    num_kv_heads: int | None, latent: tuple[int, int] | None, cache: float | None
) -> _Target:
    given = [
        name
        for name, value in (("num_kv_heads", num_kv_heads), ("latent", latent), ("cache", cache))
        if value is not None
    ]
    if len(given) != 1:
        raise InputError(
            "give one target, num_kv_heads, latent or cache: got " + (" and ".join(given) or "none")
        )
    if num_kv_heads is not None:
        check_int("num_kv_heads", num_kv_heads, least=1, error=InputError)
    if latent is not None:
        if not isinstance(latent, Sequence) or len(latent) != 2:
            raise InputError(f"latent must be (rotated features, latent size): got {latent!r}")
        rotated = check_int("latent's rotated features", latent[0], least=2, error=InputError)
        if rotated % 2:
            raise InputError(f"latent's rotated features are pairs, an even number: got {rotated}")
        latent = (rotated, check_int("latent's size", latent[1], least=1, error=InputError))
    if cache is not None:
        check_number("cache", cache, above=0, below=1, error=InputError)
    return _Target(num_kv_heads, latent, cache)


def _calibration_rows(
    model: nn.Module,
    texts: Texts | Calibration | None,
    tokens: int,
    domains: dict[str, tuple[bool, list[Tensor]]],
    draft: Draft,
    target: _Target,
) -> list[Tensor]:
    """Windows to calibrate on; some are kept for evaluation if no other texts were given."""
    if texts is None:
        raise InputError("this target is lossy: give calibration texts")
    check_int("calibration_tokens", tokens, least=2, error=InputError)
    ready = isinstance(texts, Calibration)
    rows = [*texts.rows] if isinstance(texts, Calibration) else windows_of(model, texts, tokens)
    if (
        not ready
        and not any(calibrated for calibrated, _ in domains.values())
        and len(rows) > 2 * _HELD_OUT
    ):
        held = rows[:: len(rows) // _HELD_OUT][:_HELD_OUT]
        chosen = {id(row) for row in held}
        rows = [row for row in rows if id(row) not in chosen]
        domains["calibration, held out"] = True, held
    refuse_overlap([("calibration", rows), *((name, each) for name, (_, each) in domains.items())])
    count = sum(map(len, rows))
    if target.latent is not None:
        rank = sum(target.latent)
    else:
        shape = draft.layer(0).attention.kv
        rank = shape.elements // (shape.num_kv_heads if target.num_kv_heads else 1)
    if count < rank:
        raise InputError(
            f"calibration has fewer tokens than the rank that it determines: got {count:,} tokens "
            f"for {rank:,} numbers"
        )
    return rows


def _exact(draft: Draft, target: _Target) -> tuple[ExactStep, ...]:
    proof = Proof(draft)
    if target.num_kv_heads is not None:
        count = target.num_kv_heads

        def copied(changed: Draft) -> None:
            for layer in changed.layers:
                copy_kv_heads(changed, layer, count)

        proof.step("kv heads copied", copied)
    else:
        proof.step("latent attention of the same cache", _all_latent, turns=True)
    return tuple(proof.steps)


def _all_latent(draft: Draft) -> None:
    for layer in draft.layers:
        to_latent(draft, layer)


def _proof_of_alignment(draft: Draft, target: _Target) -> tuple[ExactStep, ...]:
    """Proves on a copy of this model that pairs may be turned as lossy steps turn them."""
    proof = Proof(draft.copy())

    def turned(changed: Draft) -> None:
        for layer in changed.layers:
            config = changed.heads(layer, "aligning")
            drawn = torch.Generator().manual_seed(layer)
            shape = config.num_kv_heads, rotated_dim(config) // 2
            angles = torch.rand(shape, dtype=torch.float64, generator=drawn, device="cpu") * 6.0
            rotate_keys(changed, layer, torch.polar(torch.ones_like(angles), angles))

    proof.step("keys and queries turned, pair by pair", turned)
    if target.num_kv_heads is None:
        proof.step("latent attention of the same cache", _all_latent, turns=True)
    return tuple(proof.steps)


def _lossy(
    draft: Draft, target: _Target, found: Calibration, progress: Progress | None
) -> list[float]:
    """Converts all layers; returns their prices."""
    prices, count = [], len(draft.layers)
    told = progress or (lambda what, done, total: None)
    if target.num_kv_heads is not None:
        for layer in draft.layers:
            prices.append(merge_kv_heads(draft, layer, target.num_kv_heads, found.layers[layer]))
            told("merging kv heads", layer + 1, count)
        return prices
    latents, lists = [], dict[int, list[Offer]]()
    for layer in draft.layers:
        latents.append(Latents.of(draft, layer, found.layers[layer]))
        if target.cache is not None:
            lists[layer] = offers(latents[layer])
        told("price list", layer + 1, count)
    sizes = dict.fromkeys(draft.layers, target.latent)
    if target.cache is not None:
        held = sum(draft.layer(i).attention.kv.elements for i in draft.layers)
        chosen = cheapest(lists, int(held * target.cache))
        sizes = {layer: (offer.rotated, offer.size) for layer, offer in chosen.items()}
    for layer in draft.layers:
        size = sizes[layer]
        assert size is not None
        prices.append(to_small_latent(draft, layer, latents[layer], *size))
        told("latent attention", layer + 1, count)
    return prices
