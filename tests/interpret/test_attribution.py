"""Shares of logits add up, steering adds, autoencoders compute, weights are differentiable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from traced_models import made, texts

import polyhead as ph
from polyhead.errors import CheckpointError, InputError, UnsupportedError
from polyhead.interpret.attribution import LogitAttribution
from polyhead.interpret.autoencoder import SparseAutoencoder
from polyhead.interpret.steering import steer, steering_vector

IDS = texts("llama")["ids"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma", "sinks", "parallel", "experts"])
def test_shares_of_all_writers_add_up_to_the_logit(kind: str) -> None:
    model = made(kind)
    run = LogitAttribution(model, IDS)
    for token, other, position in ((3, None, -1), (3, 7, 4)):
        shares = run.parts(token, other, position)
        logits = model(IDS)[0, position]
        wanted = logits[token] - (0 if other is None else logits[other])
        torch.testing.assert_close(shares.values.sum(), wanted, atol=1e-4, rtol=1e-4)
    heads = model.config.layers[0].attention.num_heads
    assert shares.axes["writer"][: heads + 3] == (
        "embedding", *(f"0.{head}" for head in range(heads)), "0 bias", "0 mlp",
    )  # fmt: skip
    theirs = torch.stack(run.logit(3))[:, 0].flatten()
    ours = [float(x) for name, x in zip(run.parts(3).axes["writer"], run.parts(3).values,
                                        strict=True) if "." in name]  # fmt: skip
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma", "parallel"])
def test_shares_of_neurons_add_up_to_that_of_their_network(kind: str) -> None:
    run = LogitAttribution(made(kind), IDS)
    for layer in (0, 1):
        parts = run.parts(3, 7, 4)
        whole = parts.values[list(parts.axes["writer"]).index(f"{layer} mlp")]
        neurons = run.neurons(layer, 3, 7, 4)
        torch.testing.assert_close(neurons.values.sum(), whole, atol=1e-4, rtol=1e-4)
        assert neurons.values.std() > 1e-4


def test_what_does_not_add_up_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="post-norm"):
        LogitAttribution(made("bert"), IDS)
    with pytest.raises(UnsupportedError, match="layer 1 has a Experts"):
        LogitAttribution(made("experts"), IDS).neurons(1, 3)
    with pytest.raises(UnsupportedError, match="layer 0 writes more"):
        LogitAttribution(made("t5"), IDS)


@torch.no_grad()
def test_steering_adds_the_mean_difference_at_every_token() -> None:
    model = made("llama")
    groups = [[IDS[:1], IDS[1:]], [texts("llama", seed=5)["ids"][:1]]]
    vector = steering_vector(model, *groups, layer=0, position=4)
    means = []
    for group in groups:
        rows = []
        for ids in group:
            with ph.trace(model, ids) as t:
                saved = t.layers[0].resid_post.save()
            rows.append(saved.value[0, 4])
        means.append(torch.stack(rows).mean(dim=0))
    torch.testing.assert_close(vector, means[0] - means[1])
    with steer(model, {0: vector}, scale=1.5), ph.trace(model, IDS) as t:
        after = t.layers[1].resid_pre.save()
    with ph.trace(model, IDS) as t:
        before = t.layers[1].resid_pre.save()
    torch.testing.assert_close(after.value, before.value + 1.5 * vector)
    with steer(model, {0: vector}, scale=0.0):
        assert torch.equal(model(IDS), model(IDS))
        nothing = model(IDS)
    assert torch.equal(nothing, model(IDS))
    with pytest.raises(InputError, match="positive must be at least one text"):
        steering_vector(model, "text", [IDS], layer=0)


E, F = 48, 90


def written(folder: Path, **config: Any) -> Path:
    generator = torch.Generator().manual_seed(1)
    shapes = {"W_enc": (E, F), "b_enc": (F,), "W_dec": (F, E), "b_dec": (E,)}
    if config.get("architecture") == "jumprelu":
        shapes["threshold"] = (F,)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"d_in": E, "d_sae": F} | config), "utf-8")
    return folder


CASES: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard", "apply_b_dec_to_input": True},
    "old": {"architecture": "standard", "activation_fn_str": "relu", "hook_name": "blocks.0.x",
            "apply_b_dec_to_input": False, "normalize_activations": "layer_norm"},
    "jumprelu": {"architecture": "jumprelu", "apply_b_dec_to_input": False,
                 "normalize_activations": "constant_norm_rescale"},
    "topk": {"architecture": "topk", "k": 7},
    "old topk": {"architecture": "standard", "activation_fn_str": "topk",
                 "activation_fn_kwargs": {"k": 7}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_autoencoder_computes_the_formula_of_its_architecture(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = CASES[name]
    folder = written(tmp_path / "sae", **config)
    autoencoder = SparseAutoencoder.load(folder)
    w = {key: x.double() for key, x in load_file(folder / "sae_weights.safetensors").items()}
    x = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(2)) * 3 + 1
    scale, shift = torch.ones(1, 1, 1).double(), torch.zeros(1, 1, 1).double()
    if config.get("normalize_activations") == "layer_norm":
        shift = x.double().mean(-1, keepdim=True)
        scale = x.double().std(-1, keepdim=True)  # of E − 1, as SAELens
        scaled = (x.double() - shift) / (scale + 1e-5)
    elif config.get("normalize_activations") == "constant_norm_rescale":
        scale = x.double().norm(dim=-1, keepdim=True) / E**0.5
        scaled = x.double() / scale
    else:
        scaled = x.double()
    minus = w["b_dec"] if config.get("apply_b_dec_to_input", True) else 0.0
    hidden = (scaled - minus) @ w["W_enc"] + w["b_enc"]
    features = hidden.clamp(min=0)
    if "topk" in name:
        least = hidden.sort(dim=-1, descending=True).values[..., 6:7]
        features = features * (hidden >= least)
    if name == "jumprelu":
        features = features * (hidden > w["threshold"])
    torch.testing.assert_close(autoencoder.encode(x).double(), features, atol=1e-4, rtol=1e-4)
    wanted = (features @ w["W_dec"] + w["b_dec"]) * scale + shift
    torch.testing.assert_close(autoencoder.reconstruct(x).double(), wanted, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_with_the_error_term_only_a_change_of_features_matters(tmp_path: Path) -> None:
    model = made("states")  # embeds 32
    width = model.config.embed_dim
    generator = torch.Generator().manual_seed(1)
    config = {"d_in": width, "d_sae": F, "metadata": {"hook_name": "blocks.1.hook_resid_post"}}
    weights = {
        "W_enc": torch.randn(width, F, generator=generator),
        "b_enc": torch.randn(F, generator=generator),
        "W_dec": torch.randn(F, width, generator=generator),
        "b_dec": torch.randn(width, generator=generator),
    }
    autoencoder = SparseAutoencoder(config, weights)
    plain = model(IDS)
    with autoencoder.spliced(model) as features:
        assert torch.equal(model(IDS), plain)
    with ph.trace(model, IDS) as t:
        stream = t.layers[1].resid_post.save()
    assert torch.equal(features[0], autoencoder.encode(stream.value))

    def without(values: Tensor) -> Tensor:
        values = values.clone()
        values[..., 4] = 0.0
        return values

    with autoencoder.spliced(model, change=without), ph.trace(model, IDS) as t:
        changed = t.layers[2].resid_pre.save()
    step = features[0][..., 4:5] * weights["W_dec"][4]
    torch.testing.assert_close(changed.value, stream.value - step, atol=1e-3, rtol=1e-3)
    with autoencoder.spliced(model, "layers.1.resid_post", error_term=False):
        alone = model(IDS)
    with ph.trace(model, IDS) as t:
        t.layers[1].resid_post.set(autoencoder.reconstruct(stream.value))
    assert torch.equal(alone, t.output)


def test_files_that_are_no_autoencoder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no sparse autoencoder"):
        SparseAutoencoder.load(tmp_path)
    with pytest.raises(UnsupportedError, match=r"must be one of standard.*: got 'gated'"):
        SparseAutoencoder.load(written(tmp_path / "a", architecture="gated"))
    with pytest.raises(CheckpointError, match=r"W_enc must be \[48, 91\]: got \[48, 90\]"):
        SparseAutoencoder.load(written(tmp_path / "b", d_sae=91))
    with pytest.raises(CheckpointError, match="topk needs k"):
        SparseAutoencoder.load(written(tmp_path / "c", architecture="topk"))
    (tmp_path / "c" / "cfg.json").write_text("[]", "utf-8")
    with pytest.raises(CheckpointError, match="must hold an object"):
        SparseAutoencoder.load(tmp_path / "c")
    with pytest.raises(InputError, match="pass name="):
        SparseAutoencoder.load(written(tmp_path / "d")).spliced(made("llama")).__enter__()


def test_rows_of_a_probe_are_differentiable_where_it_kept_the_graph() -> None:
    model = made("sinks").double()
    with ph.probe(model, requires_grad=True) as seen, ph.trace(model, IDS) as t:
        stream = t.layers[1].resid_pre.save()
    view = seen[1]
    rows = view.rows([1, 3], slice(4, 8, 2), requires_grad=True)
    torch.testing.assert_close(rows.detach(), view.rows([1, 3], slice(4, 8, 2)))
    pick = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((rows * pick).sum(), stream.value)
    step = torch.randn(stream.value.shape, dtype=torch.float64) * 1e-5

    def value(moved: Tensor) -> Tensor:
        with torch.no_grad(), ph.probe(model) as other, ph.trace(model, IDS) as t:
            t.layers[1].resid_pre.set(moved)
            t.logits.save()
        return (other[1].rows([1, 3], slice(4, 8, 2)) * pick).sum()

    own = stream.value.detach()
    slope = (value(own + step) - value(own - step)) / 2
    torch.testing.assert_close(slope, (gradient * step).sum(), atol=1e-10, rtol=1e-4)
    few = ph.probe(model, heads=[2], requires_grad=True)
    with few as seen:
        model(IDS)
    torch.testing.assert_close(seen[0].rows([2], requires_grad=True), seen[0].rows([2]))
    for options in ({}, {"requires_grad": True}):
        with torch.set_grad_enabled(not options), ph.probe(model, **options) as seen:
            model(IDS)
        with pytest.raises(InputError, match="needs the graph of the run"):
            seen[0].rows(requires_grad=True)
