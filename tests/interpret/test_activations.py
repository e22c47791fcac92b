"""ph.trace: activations by name, saved and changed, in every kind of model, cached or not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, decoder
from torch import Tensor
from traced_models import CONFIGS, made, texts

import polyhead as ph
from polyhead.errors import InputError, UnsupportedError

ROUNDED = ("q_proj", "k_proj", "v_proj", "gate", "up", "hidden")
"""Names inside what native code computes at once: torch's products round differently."""


@pytest.fixture(params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def saved(model: ph.Transformer, names: list[str], **call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.no_grad(), ph.trace(model, **call) as t:
        asked = {name: t[name].save() for name in names}
    return t.output, {name: each.value for name, each in asked.items()}


def names_of(model: ph.Transformer) -> list[str]:
    with ph.trace(model) as t:
        return t.names()


def exact(names: list[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[2] not in ROUNDED]


@torch.no_grad()
def test_saving_changes_no_bit_and_inside_fused_products_no_more_than_rounding(kind: str) -> None:
    model, call = made(kind), texts(kind)
    plain, names = model(**call), names_of(model)
    out, seen = saved(model, exact(names), **call)
    assert torch.equal(out, plain)
    again, others = saved(model, names, **call)
    torch.testing.assert_close(again, plain, atol=2e-5, rtol=2e-5)
    assert others.keys() == set(names)
    for name, value in seen.items():
        torch.testing.assert_close(others[name], value, atol=2e-5, rtol=2e-5, msg=name)
    assert torch.equal(model(**call), plain)
    assert not any(vars(part).keys() & {"_attend", "_joined", "_added"} for part in model.modules())


@torch.no_grad()
def test_the_stream_is_the_sum_of_what_parts_add(kind: str) -> None:
    model, call = made(kind), texts(kind)
    _, seen = saved(model, names_of(model), **call)
    for number, layer in enumerate(model.layers):
        path = f"layers.{number}"
        added = [seen[name] for part in ("attention", "cross_attention", "mlp")
                 if (name := f"{path}.{part}.out") in seen]  # fmt: skip
        if layer.config.norm_placement != "post":
            total = seen[f"{path}.resid_pre"] + sum(added)
            torch.testing.assert_close(seen[f"{path}.resid_post"], total, atol=1e-5, rtol=1e-5)
            if f"{path}.resid_mid" in seen:
                middle = seen[f"{path}.resid_mid"] + added[-1]
                torch.testing.assert_close(seen[f"{path}.resid_post"], middle)
        if number:
            assert torch.equal(seen[f"{path}.resid_pre"], seen[f"layers.{number - 1}.resid_post"])


@torch.no_grad()
def test_the_stream_of_another_text_gives_its_output_bit_for_bit(kind: str) -> None:
    model, call = made(kind), texts(kind)
    other = texts(kind, seed=1)
    wanted, seen = saved(model, exact(names_of(model)), **other)
    if kind == "t5":
        call["encoder_ids"] = other["encoder_ids"]
    assert not torch.equal(model(**call), wanted)
    with ph.trace(model, **call) as t:
        t.layers[0].resid_pre.set(seen["layers.0.resid_pre"])
    assert torch.equal(t.output, wanted)
    with ph.trace(model, **call) as t:  # every activation at once: none of the text's own is left
        for name, value in seen.items():
            if not name.endswith(("scores", "weights")):
                t[name].set(value)
    assert torch.equal(t.output, wanted)


@torch.no_grad()
def test_each_activation_that_is_changed_changes_what_follows_and_not_what_precedes(
    kind: str,
) -> None:
    model, call = made(kind), texts(kind)
    names = names_of(model)
    plain, before = saved(model, names, **call)
    for at, name in enumerate(names):
        with ph.trace(model, **call) as t:
            watched = [t[each].save() for each in names[max(0, at - 3) : at + 1]]
            t[name].edit(lambda x: torch.where(x.isinf(), x, x * 0.3))
        assert not torch.allclose(t.output, plain, atol=1e-6), name
        for each in watched:
            torch.testing.assert_close(each.value, before[each.name], atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", [name for name in CONFIGS if name != "bert"])
def test_activations_of_steps_through_a_cache_are_those_of_one_pass(kind: str) -> None:
    model, call = made(kind), texts(kind)
    ids = call.pop("ids")
    names = [
        name for name in names_of(model)
        if not name.startswith("encoder") and name.rpartition(".")[2] not in ("k", "v")
    ]  # fmt: skip
    _, whole = saved(model, names, ids=ids, **call)
    cache = model.new_cache()
    with ph.trace(model) as t:
        asked = {name: t[name].save(all_calls=True) for name in names}
        last = t[names[-1]].save()
        model(ids[:, :5], cache=cache, **call)
        for i in range(5, 9):
            model(ids[:, i : i + 1], cache=cache)
    assert len(last.values) == 1
    for name, each in asked.items():
        ndim = whole[name].ndim
        if name.endswith(("scores", "weights")):
            assert len(each.values) == 5
            rows = each.values[-1][:, :, -1]
            if whole[name].shape[-1] == rows.shape[-1] and kind != "latent":  # a ring forgets
                torch.testing.assert_close(rows, whole[name][:, :, -1], atol=2e-5, rtol=2e-5)
        elif not (kind == "latent" and name.endswith(".q")):  # absorbed in steps
            joined = torch.cat(each.values, dim=1 if ndim == 3 else 2)
            torch.testing.assert_close(joined, whole[name], atol=5e-5, rtol=5e-5, msg=name)


@torch.no_grad()
def test_a_trace_opened_between_two_steps_sees_and_changes_the_next() -> None:
    model = decoder()
    ids = torch.randint(0, 256, (1, 12))
    for name in exact(names_of(model)):
        cache, plain = model.new_cache(), model.new_cache()
        for i in range(6):  # the decode plan is made, and steps are repeated
            model(ids[:, i : i + 1], cache=cache)
            model(ids[:, i : i + 1], cache=plain)
        with ph.trace(model) as t:
            watched = t[name].save()
            seen = model(ids[:, 6:7], cache=cache)
        assert torch.equal(seen, model(ids[:, 6:7], cache=plain)), name
        assert watched.value.isfinite().any()
        with ph.trace(model) as t:
            t[name].edit(lambda x: torch.where(x.isinf(), x, x * 0.3))
            changed = model(ids[:, 7:8], cache=cache.fork())
        assert not torch.equal(changed, model(ids[:, 7:8], cache=plain.fork())), name
        assert torch.equal(model(ids[:, 7:8], cache=cache), model(ids[:, 7:8], cache=plain))


@torch.no_grad()
def test_weights_are_those_of_a_probe_and_are_made_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polyhead.interpret.activations.pattern import Pattern

    made_now: list[int] = []
    own = Pattern.scores
    monkeypatch.setattr(Pattern, "scores", lambda self: made_now.append(1) or own(self))
    for kind in ("gemma", "sinks", "latent", "t5"):
        model, call = made(kind), texts(kind)
        with ph.probe(model) as seen, ph.trace(model, **call) as t:
            weights = [layer.attention.weights.save() for layer in t.layers]
        assert not made_now
        for number, each in enumerate(weights):
            view = seen[f"layers.{number}.attention"]
            torch.testing.assert_close(each.value, view.rows(), atol=1e-6, rtol=1e-5)
        made_now.clear()


@torch.no_grad()
def test_weights_that_are_put_back_give_the_same_output_and_rolled_ones_another() -> None:
    for kind in ("gemma", "sinks", "latent", "gated", "t5"):
        model, call = made(kind), texts(kind)
        plain = model(**call)
        with ph.trace(model, **call) as t:
            for layer in t.layers:
                layer.attention.weights.edit(torch.clone)
                layer.attention.scores.edit(torch.clone)
        torch.testing.assert_close(t.output, plain, atol=1e-5, rtol=1e-5)
    attention = made("llama").layers[1].attention
    model, call = made("llama"), texts("llama")
    with ph.trace(model, **call) as t:
        heads, values = t.layers[1].attention.heads.save(), t.layers[1].attention.v.save()
        t.layers[1].attention.weights.edit(lambda weights: torch.eye(9).expand_as(weights))
    own = values.value.repeat_interleave(attention.num_heads // attention.num_kv_heads, dim=1)
    torch.testing.assert_close(heads.value, own)  # each token sees itself alone


def test_saved_activations_are_part_of_the_graph() -> None:
    model, call = made("sinks"), texts("sinks")
    with ph.trace(model, **call) as t:
        stream, weights = t.layers[0].resid_mid.save(), t.layers[1].attention.weights.save()
        t.layers[1].attention.weights.edit(torch.clone)
        on_path = t.layers[1].attention.weights.save()
    (through,) = torch.autograd.grad(weights.value[..., 2].sum(), stream.value, retain_graph=True)
    assert through.abs().sum() > 0
    loss = t.output.square().sum()
    (of_weights,) = torch.autograd.grad(loss, on_path.value)

    def loss_of(values: Tensor) -> Tensor:
        with torch.no_grad(), ph.trace(model, **call) as changed:
            changed.layers[1].attention.weights.set(values)
        return changed.output.double().square().sum()

    step = torch.randn(on_path.value.shape, generator=torch.Generator().manual_seed(0)) * 1e-2
    value = on_path.value.detach()
    slope = (loss_of(value + step) - loss_of(value - step)) / 2
    torch.testing.assert_close(slope.float(), (of_weights * step).sum(), atol=1e-2, rtol=2e-2)


@torch.no_grad()
def test_what_is_asked_of_an_activation_happens_in_order_and_leaves_its_shape() -> None:
    model, call = made("llama"), texts("llama")
    with ph.trace(model, **call) as t:
        point = t.layers[0].mlp.out
        first = point.save()
        point.edit(lambda x: None)
        point.edit(lambda x: x + 1)
        second = t["layers.0.mlp.out"].save()
        point.set(0.0)
        third = point.save()
    torch.testing.assert_close(second.value, first.value + 1)
    assert not third.value.any()
    shapes = r"mlp\.out must keep its shape \[2, 9, 32\]: got \[2, 1"
    with pytest.raises(InputError, match=shapes), ph.trace(model, **call) as t:
        t.layers[0].mlp.out.edit(lambda x: x[:, :1])
    with pytest.raises(InputError, match="has ended"):
        point.save()
    unseen = r"nothing was seen of layers\.1\.resid_pre"
    with ph.trace(model) as t, pytest.raises(InputError, match=unseen):
        _ = t.layers[1].resid_pre.save().value


@torch.no_grad()
def test_traces_nest_end_in_any_order_and_belong_to_their_thread() -> None:
    model, call = made("llama"), texts("llama")
    plain = model(**call)
    first, second = ph.trace(model), ph.trace(model)
    for each in (first, second):
        each.__enter__().layers[0].resid_mid.edit(lambda x: x * 2)
    found: list[Tensor] = []

    def other() -> None:
        with torch.no_grad():
            found.append(model(**call))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert torch.equal(found[0], plain)
    both = model(**call)
    first.__exit__(None, None, None)
    one = model(**call)
    second.__exit__(None, None, None)
    with ph.trace(model, **call) as t:
        t.layers[0].resid_mid.edit(lambda x: x * 4)
    assert torch.equal(t.output, both)
    assert not torch.equal(one, both)
    assert torch.equal(model(**call), plain)


def test_what_a_layout_does_not_have_is_named_with_what_it_has() -> None:
    cases = {
        "parallel": (lambda t: t.layers[0].resid_mid, "a parallel layer has resid_pre, attention"),
        "states": (lambda t: t.layers[0].attention.q, ": Mamba2 has input, heads, out"),
        "experts": (lambda t: t.layers[1].mlp.hidden, ": Experts has input, out"),
        "bert": (lambda t: t.logits, "this model of kind 'encoder' has nothing"),
        "llama": (
            lambda t: t.encoder,
            "has no 'encoder': this model of kind 'decoder' has final, logits",
        ),
        "gemma": (lambda t: t["layers.0.mlp"], "is no activation"),
    }
    for kind, (name, message) in cases.items():
        with ph.trace(made(kind)) as t, pytest.raises(AttributeError, match=message):
            name(t)
    with ph.trace(made("llama")) as t:
        assert len(t.layers) == len(list(t.layers)) == len(t.layers[:]) == 2
        assert t.layers[-1].mlp.out is t.layers[1].mlp.out
        assert "resid_mid" in dir(t.layers[0])
        with pytest.raises(InputError, match="from 0 to 1: got 2"):
            _ = t.layers[2]
    with pytest.raises(InputError, match="holds no polyhead"):
        ph.trace(torch.nn.Linear(2, 2)).__enter__()


def test_generation_is_changed_by_an_edit_and_a_text_is_read_by_the_tokenizer() -> None:
    model = ph.LanguageModel(decoder(), byte_tokenizer(), "tiny")
    with torch.no_grad(), ph.trace(model, "some text") as t:
        logits = t.logits.save()
    assert torch.equal(logits.value, t.output)
    plain = model.generate("some text", max_new_tokens=8).text
    with ph.trace(model) as t:
        seen = t.layers[0].resid_post.save(all_calls=True)
        assert model.generate("some text", max_new_tokens=8).text == plain
        t.layers[1].mlp.out.set(0.0)
        assert model.generate("some text", max_new_tokens=8).text != plain
    assert len(seen.values) >= 16
    assert model.generate("some text", max_new_tokens=8).text == plain


def test_dropout_is_refused_where_weights_are_asked_for() -> None:
    from dataclasses import replace

    from traced_models import PLAIN, SMALL, _decoder

    layer = replace(PLAIN, attention=replace(SMALL, dropout=0.1))
    model = ph.Transformer(_decoder(layer)).train()
    with (
        pytest.raises(UnsupportedError, match=r"model\.eval"),
        ph.trace(model, **texts("llama")) as t,
    ):
        t.layers[0].attention.weights.save()
