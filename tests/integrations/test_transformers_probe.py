"""A probe watches transformers models that run on polyhead as it watches polyhead's own."""

import copy

import pytest
import torch

import families
import polyhead as ph
from polyhead.integrations import transformers as integration

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
IDS = torch.tensor([[5, 9, 17, 5, 9, 33, 2, 17, 5, 9], [8, 8, 3, 60, 7, 3, 60, 8, 1, 2]])
FAMILIES = ["llama", "gemma2", "gpt_oss", "mistral", "qwen3", "deepseek_v3", "bert", "albert"]


@pytest.fixture
def pair(request):
    """A tiny model in eager attention, and on polyhead."""
    torch.manual_seed(0)
    model = (families.DECODERS | families.ENCODERS)[request.param]().eval()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    return eager, integration.use(model)


def _weights(eager, **inputs):
    with torch.no_grad():
        return eager(**inputs, output_attentions=True, return_dict=True).attentions


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_rows_are_the_weights_of_eager_attention(pair):
    eager, ours = pair
    with torch.no_grad():
        plain = ours(IDS)[0]
        with ph.probe(ours) as seen:
            probed = ours(IDS)[0]
        after = ours(IDS)[0]
    assert torch.equal(plain, probed)
    assert torch.equal(plain, after)
    wanted = _weights(eager, input_ids=IDS)
    assert seen.layers == tuple(range(len(wanted)))
    for view, weights in zip(seen, wanted, strict=True):
        torch.testing.assert_close(view.rows(), weights[..., : IDS.shape[1]], **CLOSE)
        entropy = torch.special.entr(weights).sum(-1)
        if view.call.spec.sinks is None:  # a sink is one more key, which eager does not return
            torch.testing.assert_close(view.entropy, entropy, **CLOSE)


@pytest.mark.parametrize("pair", ["llama", "albert"], indirect=True)
def test_tokens_are_known_and_induction_is_measured(pair):
    eager, ours = pair
    with ph.probe(ours) as seen, torch.no_grad():
        ours(input_ids=IDS)
    distance = torch.arange(10)[:, None] - torch.arange(10)
    before = torch.cat([torch.full((2, 1), -1), IDS[:, :-1]], dim=1)
    follows = (IDS[:, :, None] == before[:, None, :]) & (distance >= 0)
    for view, weights in zip(seen, _weights(eager, input_ids=IDS), strict=True):
        wanted = (weights * follows[:, None]).sum(-1)
        torch.testing.assert_close(view.induction, wanted, **CLOSE)


@pytest.mark.parametrize("pair", ["albert"], indirect=True)
def test_each_call_of_a_shared_layer_is_a_layer_of_its_own(pair, tmp_path):
    eager, ours = pair
    with ph.probe(ours, layers=[1]) as seen, torch.no_grad():
        ours(IDS)
        ours(IDS[:1])
    assert seen.layers == (1,)
    torch.testing.assert_close(seen[1].rows(), _weights(eager, input_ids=IDS[:1])[1], **CLOSE)
    seen.save(tmp_path / "seen.safetensors")
    assert torch.equal(ph.Probe.load(tmp_path / "seen.safetensors")[1].rows(), seen[1].rows())


@pytest.mark.parametrize("pair", ["llama", "gemma2"], indirect=True)
def test_padding_and_a_cache_are_seen_as_they_were(pair):
    eager, ours = pair
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    with ph.probe(ours) as seen, torch.no_grad():
        ours(input_ids=IDS, attention_mask=mask)
    for view, weights in zip(
        seen, _weights(eager, input_ids=IDS, attention_mask=mask), strict=True
    ):
        torch.testing.assert_close(view.rows(), weights, **CLOSE)
    with ph.probe(ours) as seen, torch.no_grad():
        ours.generate(IDS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    full = seen[1]  # layer 0 of gemma2 has a window, and a cache of as many keys
    assert (full.q.shape[2], full.k.shape[2]) == (1, IDS.shape[1] + 2)
    torch.testing.assert_close(full.rows().sum(-1), torch.ones(1, 4, 1), **CLOSE)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("bart", "model.decoder.layers.1.encoder_attn"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention"),
    ],
)
def test_cross_attention_goes_by_its_path_and_is_no_layer_number(name, path):
    torch.manual_seed(0)
    model = families.ENCODER_DECODERS[name]().eval()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ours = integration.use(model)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]}
    with ph.probe(ours) as seen, torch.no_grad():
        ours(**inputs)
    with torch.no_grad():
        wanted = eager(**inputs, output_attentions=True)
    assert seen.layers == (0, 1, 2, 3)
    assert [view.layer for view in seen.encoder] == [0, 1]
    assert [view.layer for view in seen.decoder] == [2, 3]
    assert seen.cross[1] is seen[path]
    cross = seen[path].rows()
    torch.testing.assert_close(cross, wanted.cross_attentions[1], **CLOSE)
    torch.testing.assert_close(seen[2].rows(), wanted.decoder_attentions[0], **CLOSE)
    assert seen[0].call.ids.keys.equal(IDS)
    assert seen[2].call.ids.keys.equal(IDS[:, :6])


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_hooks_are_gone_afterwards_and_other_attention_is_not_taken_for_ours(pair):
    eager, ours = pair
    with ph.probe(ours) as seen, torch.no_grad():
        ours(IDS)
    kept = seen[0]
    ours(IDS[:, :4])
    assert seen[0] is kept
    with pytest.raises(ph.InputError, match="no polyhead attention"), ph.probe(eager):
        pass
    with ph.probe(ours, layers=[7]) as seen, torch.no_grad():
        ours(IDS)
    with pytest.raises(ph.InputError, match="counted from 0 to 1: got 7"):
        seen[7]
