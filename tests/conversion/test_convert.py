"""Lossy conversions: nothing is lost where nothing must be, prices order what is, bad input."""

from __future__ import annotations

import pytest
import torch
from small import small
from torch.nn import functional as F

import far
from polyhead.conversion import convert
from polyhead.conversion.budget import Offer, cheapest
from polyhead.conversion.calibration import _Sums, calibrate, refuse_overlap, windows_of
from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import copy_kv_heads, rotate_keys
from polyhead.conversion.lossy import Latents, merge_kv_heads, to_small_latent
from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.models import Transformer

FAMILIES = ("llama", "qwen2", "gpt2", "stablelm")


def _texts(seed: int, count: int = 6, length: int = 100) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (length,), generator=drawn) for _ in range(count)]


def _logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(_texts(9, 1, 40)[0][None])


def _differ(a: Transformer, b: Transformer) -> float:
    return float((_logits(a) - _logits(b)).abs().max() / _logits(a).abs().max())


def _turned_copies(family: str) -> tuple[Transformer, Transformer]:
    """A model with one kv head, and the same with two that look unlike each other."""
    options = {"num_key_value_heads": 1}
    one = small(family, **options)
    draft = Draft.of(one)
    D = draft.heads(0, "a test").head_dim
    rope = draft.heads(0, "a test").rope
    pairs = (D if rope is None or rope.dim is None else rope.dim) // 2
    for layer in draft.layers:
        copy_kv_heads(draft, layer, 2)
        drawn = torch.Generator().manual_seed(layer)
        angles = torch.rand(2, pairs, dtype=torch.float64, generator=drawn) * 6
        sizes = torch.rand(2, pairs, dtype=torch.float64, generator=drawn) + 0.5
        rotate_keys(draft, layer, torch.polar(sizes, angles))
        noise = torch.randn(2, D, D, dtype=torch.float64, generator=drawn)
        _mix_values(draft, layer, torch.eye(D, dtype=torch.float64) + 0.2 * noise)
    return one, draft.build(torch.float32)


def _mix_values(draft: Draft, layer: int, matrices: torch.Tensor) -> None:
    """Values in other coordinates, which the output projection takes back."""
    G, D, _ = matrices.shape
    for leaf in ("weight", "bias"):
        if (found := draft.find(layer, f"v_proj.{leaf}")) is not None:
            mixed = (matrices @ found.view(G, D, -1)).reshape(found.shape)
            draft.put(layer, **{"v_proj" + "_bias" * (leaf == "bias"): mixed})
    out = draft.get(layer, "o_proj.weight")
    H = out.shape[1] // D
    inverse = torch.linalg.inv(matrices).repeat_interleave(H // G, dim=0)
    mixed = torch.einsum("ehv,hvw->ehw", out.view(-1, H, D), inverse)
    draft.put(layer, o_proj=mixed.flatten(1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "stablelm"])
def test_merging_finds_what_copies_have_in_common(family):
    one, two = _turned_copies(family)
    found = calibrate(two, _texts(1))
    for pooled in (False, True):
        draft = Draft.of(two)
        prices = [merge_kv_heads(draft, i, 1, found.layers[i], pooled=pooled) for i in draft.layers]
        lost = _differ(one, draft.build(torch.float32))
        if pooled:
            assert lost > 0.05
            assert min(prices) > 1e-3
        else:
            assert lost < 1e-3
            assert max(prices) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_latent_of_the_whole_size_loses_nothing_and_prices_fall_with_size(family):
    model = small(family)
    found = calibrate(model, _texts(1))
    draft = Draft.of(model)
    prices = []
    for layer in draft.layers:
        latents = Latents.of(draft, layer, found.layers[layer])
        n, G = latents.worth.shape
        V = draft.heads(layer, "a test").value_dim
        whole = G * V + G * (V - 2 * n)
        assert latents.elements == 2 * n * G + whole
        by_size = latents.prices(n)
        assert bool((by_size[1:] <= by_size[:-1] + 1e-12).all())
        if draft.config.layers[layer].attention.rope is not None:
            assert latents.prices(n)[0] > latents.prices(2 * n)[0]
        prices.append(to_small_latent(draft, layer, latents, 2 * n * G, whole))
        assert draft.latent(layer, "a test").kv.elements == latents.elements
    assert max(prices) < 1e-8
    # None is a view that keeps a larger tensor.
    assert all(each.is_contiguous() for each in draft.state.values())
    made = draft.build(torch.float32)
    assert _differ(model, made) < 1e-4
    copy = Transformer(type(made.config).from_json(made.config.to_json()))
    copy.load_state_dict(made.state_dict())


def test_pairs_that_turn_slowly_go_first():
    frequencies = {"rope_type": "default", "rope_theta": 1e9}
    latents = Latents.of(
        draft := Draft.of(small("llama", rope_parameters=frequencies)),
        0,
        calibrate(draft.build(torch.float32), _texts(1)).layers[0],
    )
    share = latents.worth.sum(1) / latents.worth.sum()
    assert float(share[0]) > 0.5  # 1 radian a token
    assert float(share[-1]) < 0.01  # 2e-7
    kept = latents.kept(2)
    assert int(kept.sum()) == 1
    assert bool(kept[0].any())


def test_the_gradient_of_keys_without_rotation_is_that_of_their_scores():
    """Calibration's wide heads against autograd on scores that are written out."""
    model = small("llama", num_hidden_layers=1)
    row = _texts(3, 1, 12)[0]
    moments = calibrate(model, [row]).layers[0]
    K = 2 * 8
    turned, still = moments.gradients[:K, :K], moments.gradients[K : 2 * K, K : 2 * K]
    # Both parts of the first pair: a rotation of the key alone would leave their energy as it is.
    energies = [float(each[0, 0] + each[4, 4]) for each in (turned, still)]
    assert abs(energies[0] / energies[1] - 1) > 0.01
    slow = small(
        "llama",
        num_hidden_layers=1,
        rope_parameters={"rope_type": "linear", "factor": 1e9, "rope_theta": 10.0},
    )
    moments = calibrate(slow, [row]).layers[0]
    turned, still = moments.gradients[:K, :K], moments.gradients[K : 2 * K, K : 2 * K]
    torch.testing.assert_close(turned, still, rtol=1e-3, atol=1e-6 * float(turned.abs().max()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "_attend" not in model.layers[0].attention.__dict__


def test_the_cheapest_mix_spends_where_prices_fall():
    lists = {
        0: [Offer(4, 1.0, 2, 2), Offer(8, 0.1, 4, 4), Offer(12, 0.05, 4, 8)],
        1: [Offer(4, 0.2, 2, 2), Offer(8, 0.19, 4, 4), Offer(12, 0.0, 4, 8)],
    }
    assert {i: o.elements for i, o in cheapest(lists, 12).items()} == {0: 8, 1: 4}
    assert {i: o.elements for i, o in cheapest(lists, 20).items()} == {0: 8, 1: 12}
    with pytest.raises(InputError, match="smallest latents of all layers hold 8"):
        cheapest(lists, 7)


def test_reports_say_what_was_measured():
    model = small("llama")
    told: list[tuple[object, ...]] = []
    new, report = convert(
        model,
        cache=0.5,
        calibration=_texts(1, 12),
        evaluation={"seen": _texts(2)},
        unseen={"other": _texts(3)},
        progress=lambda *words: told.append(words),
    )
    assert report.elements_before == 64
    assert report.elements_after <= 32
    assert report.elements_after == sum(layer.attention.kv.elements for layer in new.config.layers)
    assert report.speed_after.cache_bytes <= 0.55 * report.speed_before.cache_bytes
    assert [(each.name, each.calibrated) for each in report.domains] == [
        ("seen", True),
        ("other", False),
    ]
    assert report.calibration_tokens == 1200
    assert all(step.error < 1e-11 for step in report.steps)
    assert report.steps[-1].control > 1e-6
    assert all(each.alone > 0 for each in report.layers)
    assert report.sum_of_layers == pytest.approx(sum(each.alone for each in report.layers))
    for words in ("exact steps", "unseen", "top-1", "adds up to KL", report.calibration_hash):
        assert words in str(report)
    assert {words[0] for words in told} >= {"calibration", "price list", "evaluation"}
    for what in {words[0] for words in told}:
        counted = [(done, total) for words, done, total in told if words == what]
        assert counted == [(i + 1, len(counted)) for i in range(len(counted))], what
    assert ("calibration", 12, 12) in told
    # The figures are those of the models.
    rows = _texts(3)
    with torch.no_grad():
        nats = sum(
            float(F.cross_entropy(new(row[None])[0, :-1], row[1:], reduction="sum")) for row in rows
        )
    other = report.domains[1]
    assert other.after == pytest.approx(float(torch.tensor(nats / (99 * 6)).exp()), rel=1e-4)
    assert report.to_dict()["warnings"] == report.warnings


def test_exact_targets_need_no_texts():
    model = small("llama")
    same, report = convert(model, latent=(16, 16))
    assert report.calibration_tokens == 0
    assert report.steps[0].error < 1e-11
    assert _differ(model, same) < 1e-4
    more, _ = convert(model, num_kv_heads=4)
    assert more.config.layers[0].attention.layout == "MHA"
    assert _differ(model, more) < 1e-4


def test_what_cannot_be_converted_is_named():
    model, texts = small("llama"), _texts(1, 12)
    for options, words in (
        ({}, "give one target"),
        ({"num_kv_heads": 1, "cache": 0.5}, "got num_kv_heads and cache"),
        ({"num_kv_heads": 2}, "num_kv_heads must be a divisor of 2 below it"),
        ({"num_kv_heads": 3}, "got 3"),
        ({"latent": (16, 17)}, "latent must be smaller than what layer 0 holds"),
        ({"latent": (18, 2)}, "latent must be smaller"),
        ({"latent": (3, 4)}, "an even number: got 3"),
        ({"latent": (0, 4)}, "at least 2"),
        ({"cache": 1.0}, "cache must be"),
        ({"cache": 0.01}, "smallest latents"),
        ({"latent": (8, 8), "calibration": None}, "give calibration texts"),
        ({"latent": (8, 8), "calibration": _texts(1, 1, 8)}, "fewer tokens than the rank"),
        ({"latent": (8, 8), "evaluation": {"a": _texts(1, 12)}}, "of calibration and of a overlap"),
    ):
        with pytest.raises(InputError, match=words):
            convert(model, **{"calibration": texts, **options})
    with pytest.raises(InputError, match="training mode"):
        convert(small("llama").train(), num_kv_heads=1, calibration=texts)
    with pytest.raises(UnsupportedError, match="normalizes queries and keys"):
        convert(small("qwen3", head_dim=8), num_kv_heads=1, calibration=texts)
    with pytest.raises(UnsupportedError, match="layer 0 is MLA"):
        convert(small("deepseek_v3"), num_kv_heads=1, calibration=texts)
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    windows = small("qwen2", **window, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedError, match="layer 1 has a window"):
        convert(windows, latent=(8, 8), calibration=texts)
    made, _ = convert(windows, num_kv_heads=1, calibration=texts, alone=False)
    assert made.config.layers[1].attention.window == 7


def test_texts_may_not_share_a_run_of_tokens():
    rows = _texts(1, 2, 64)
    refuse_overlap([("a", rows[:1]), ("b", rows[1:]), ("c", [rows[0][:31]])])
    with pytest.raises(InputError, match="a and of b overlap"):
        refuse_overlap([("a", rows), ("b", [torch.cat((rows[1][5:40], rows[1]))])])


def test_windows_are_spread_over_all_texts():
    model = small("llama")
    rows = windows_of(model, _texts(1, 4, 100), 200, 50)
    assert [len(row) for row in rows] == [50] * 4
    assert torch.equal(rows[1], _texts(1, 4, 100)[1][:50])


def test_a_language_model_keeps_its_tokenizer():
    from tiny import byte_tokenizer, decoder

    model = LanguageModel(decoder(), byte_tokenizer()).eval()
    new, _ = convert(model, num_kv_heads=4)
    assert new.tokenizer is model.tokenizer
    assert new.generate("ab", max_new_tokens=4).ids == model.generate("ab", max_new_tokens=4).ids


def test_moments_of_a_device_are_summed_in_float64_on_the_cpu():
    model = small("llama", num_hidden_layers=1)
    here, away = (_Sums(model.layers[0].attention) for _ in range(2))
    drawn = torch.Generator().manual_seed(3)
    with far.Away():
        for sums, device in ((here, torch.device("cpu")), (away, far.DEVICE)):
            drawn.manual_seed(3)
            sums.x = torch.randn(1, 9, 32, generator=drawn).to(device)
            for name in ("k", "v"):
                made = torch.zeros(1, 9, 16).to(device)
                made.grad = torch.randn(1, 9, 16, generator=drawn).to(device)
                sums.made[name] = made
            sums.add()
    for found in (away.inputs, away.gradients):
        assert found.device.type == "cpu"
        assert found.dtype == torch.float64
    assert torch.equal(away.inputs, here.inputs)
    assert torch.equal(away.gradients, here.gradients)
