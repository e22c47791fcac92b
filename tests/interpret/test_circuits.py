"""Circuits equal the full matrices that they stand for; contributions add up to the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import decoder, encoder
from torch import Tensor, nn

import polyhead as ph
from polyhead.config import HeadTransformConfig, NormGateConfig
from polyhead.errors import InputError, UnsupportedError
from polyhead.interpret.attribution import LogitAttribution
from polyhead.interpret.circuits import HeadCircuits
from polyhead.interpret.contributions import Contributions


@pytest.fixture(scope="module")
def model() -> ph.Transformer:
    model = decoder()
    for layer in model.layers:  # gains that are not 1, or a forgotten one would not show
        nn.init.uniform_(layer.attention_norm.weight, 0.5, 2.0)
    nn.init.uniform_(model.final_norm.weight, 0.5, 2.0)
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def _share(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues.sum().real / eigenvalues.abs().sum()


@pytest.mark.parametrize("head", range(4))
def test_scores_are_eigenvalues_of_the_whole_vocabulary_matrices(
    model: ph.Transformer, head: int
) -> None:
    circuits = HeadCircuits(model, 1)
    attention, gain = model.layers[1].attention, model.layers[1].attention_norm.weight.double()
    embedded = model.embedding.tokens.weight.detach().double().T  # [E, W]
    own, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
    w_q, w_k, w_v = (
        getattr(attention, f"{name}_proj").weight.detach().double()[rows] * gain.detach()
        for name, rows in (("q", own), ("k", shared), ("v", shared))
    )
    w_o = attention.o_proj.weight.detach().double()[:, own]
    torch.testing.assert_close(circuits.qk(head), (w_q, w_k))
    torch.testing.assert_close(circuits.ov(head), (w_o, w_v))
    unembedded = embedded.T * model.final_norm.weight.detach().double()
    copying = _share(unembedded @ w_o @ w_v @ embedded)
    torch.testing.assert_close(circuits.copying()[head], copying, atol=1e-6, rtol=1e-6)
    matching = _share(embedded.T @ w_q.T @ w_k @ embedded)
    torch.testing.assert_close(circuits.matching()[head], matching, atol=1e-6, rtol=1e-6)


def test_head_that_copies_scores_one() -> None:
    model = decoder()
    attention = model.layers[0].attention
    with torch.no_grad():
        attention.v_proj.weight[:8] = torch.eye(8, 32)
        attention.o_proj.weight[:, :8] = torch.eye(32, 8)
    assert HeadCircuits(model, 0).copying()[0] > 0.99
    with torch.no_grad():
        attention.o_proj.weight[:, :8] *= -1
    assert HeadCircuits(model, 0).copying()[0] < -0.99


def test_heads_add_up_to_what_the_layer_writes(model: ph.Transformer, ids: Tensor) -> None:
    written: list[Tensor] = []
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.register_forward_hook(lambda m, x, out: written.append(out))
        found = Contributions(model, ids)
    for layer, whole in enumerate(written):
        torch.testing.assert_close(found.residual(layer).sum(1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.norms()[1], found.residual(1).norm(dim=-1))


def test_share_of_a_logit_is_what_vanishes_with_the_last_layers_head(ids: Tensor) -> None:
    """With the feed-forward silenced and the final norm's scale held, a head's term is linear."""
    model = decoder()
    nn.init.zeros_(model.layers[1].feed_forward.down_proj.weight)
    found = Contributions(model, ids)
    inputs: list[Tensor] = []
    model.final_norm.register_forward_pre_hook(lambda m, x: inputs.append(x[0]))
    with torch.no_grad():
        model(ids)
        size = inputs[0].square().mean(-1, keepdim=True).add(model.final_norm.eps).rsqrt()
        without = inputs[0] - found.residual(1)[:, 2]
        shrunk = (without * size * model.final_norm.weight) @ model.embedding.tokens.weight[65]
        share = found.logits[..., 65] - shrunk
    torch.testing.assert_close(found.logit(65, 7)[1][:, 2], share[:, 7], atol=1e-3, rtol=1e-4)


def test_contributions_know_the_bytes_that_they_keep(model: ph.Transformer, ids: Tensor) -> None:
    B, T = ids.shape
    config = model.config
    # The heads of two layers, what the last norm read, and logits.
    wanted = 4 * B * T * (2 * 4 * 8 + config.embed_dim + config.vocab_size)
    assert Contributions(model, ids).nbytes == wanted


@pytest.mark.parametrize("kind", [Contributions, LogitAttribution])
def test_logits_behind_transforms_have_no_shares(
    kind: type[Contributions], model: ph.Transformer, ids: Tensor
) -> None:
    """An activation and a norm between stream and logits leave no sum over heads."""
    transforms = (HeadTransformConfig(None, "gelu"),)
    other = ph.Transformer(replace(model.config, head_transforms=transforms)).eval()
    with pytest.raises(UnsupportedError, match="not linear in its stream: head_transforms"):
        kind(other, ids).logit(65)
    with pytest.raises(UnsupportedError, match="has no output head"):
        kind(ph.Transformer(replace(model.config, head=None)).eval(), ids).logit(65)


def test_what_has_no_such_circuits_is_refused(model: ph.Transformer, ids: Tensor) -> None:
    with pytest.raises(InputError, match="counted from 0 to 1: got 2"):
        HeadCircuits(model, 2)
    with pytest.raises(InputError, match="heads must be from 0 to 3: got 4"):
        HeadCircuits(model, 0).ov(4)
    with pytest.raises(UnsupportedError, match="needs logits"):
        HeadCircuits(encoder(), 0).copying()
    with pytest.raises(UnsupportedError, match="post-norm"):
        Contributions(encoder(), ids)
    layers = tuple(replace(layer, norm_gate=NormGateConfig(2)) for layer in model.config.layers)
    with pytest.raises(UnsupportedError, match=r"the same for every token: got norm_gate=NormGate"):
        HeadCircuits(ph.Transformer(replace(model.config, layers=layers)), 0)
    with pytest.raises(InputError, match="Linear holds no"):
        HeadCircuits(nn.Linear(2, 2), 0)


def test_sandwich_norms_are_part_of_what_is_written(ids: Tensor) -> None:
    torch.manual_seed(0)
    config = decoder().config
    layers = tuple(replace(layer, norm_placement="sandwich") for layer in config.layers)
    model = ph.Transformer(replace(config, layers=layers)).eval()
    nn.init.uniform_(model.layers[0].attention_out_norm.weight, 0.5, 2.0)
    written: list[Tensor] = []
    model.layers[0].attention_out_norm.register_forward_hook(lambda m, x, y: written.append(y))
    found = Contributions(model, ids)
    torch.testing.assert_close(found.residual(0).sum(1), written[0], atol=1e-5, rtol=1e-5)
