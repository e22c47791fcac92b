"""replace(): every nn.MultiheadAttention of a torch model, taken over by polyhead's."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from polyhead import UnsupportedError
from polyhead.integrations import torch as torch_integration
from polyhead.integrations.torch import MultiheadAttention, replace, replaced


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_replace_inside_a_transformer(mode, batch_first, norm_first):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # why torch's encoder skips its fast path
        theirs = nn.Transformer(
            16, 2, 2, 2, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        ).double()
    ours = copy.deepcopy(theirs)
    assert replace(ours) is ours
    assert len(replaced(ours)) == 6
    source, target = torch.randn(2, 7, 16).double(), torch.randn(2, 5, 16).double()
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    hidden = torch.arange(7) >= torch.tensor([[7], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    keywords = {
        "tgt_mask": causal,
        "tgt_is_causal": True,
        "src_key_padding_mask": hidden,
        "memory_key_padding_mask": hidden,
    }
    for model in (theirs, ours):
        model.train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # masks of two dtypes; nested tensors
        want = theirs(source, target, **keywords)
        got = ours(source, target, **keywords)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    if mode != "no_grad":
        wanted = torch.autograd.grad(want.square().sum(), list(theirs.parameters()))
        gradients = torch.autograd.grad(got.square().sum(), list(ours.parameters()))
        for g, w in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoders_fused_path_never_goes_round_the_module(monkeypatch):
    calls = []
    attend = torch_integration.attention
    monkeypatch.setattr(
        torch_integration, "attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    built_before = replace(copy.deepcopy(theirs))
    # torch makes nested tensors of the padding for an encoder that is built after.
    built_after = nn.TransformerEncoder(replace(copy.deepcopy(layer)), 2).eval()
    built_after.load_state_dict(theirs.state_dict())
    loaded = pickle.loads(pickle.dumps(built_before))
    x, hidden = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        want = theirs(x, src_key_padding_mask=hidden)
        for ours in (built_before, built_after, copy.deepcopy(built_before), loaded):
            calls.clear()
            got = ours(x, src_key_padding_mask=hidden)
            assert len(calls) == 2
            torch.testing.assert_close(got[~hidden], want[~hidden], rtol=1e-5, atol=1e-6)
        assert not built_after(x, src_key_padding_mask=hidden)[hidden].any()


def test_modules_that_were_pickled_without_the_hook_get_it():
    module = MultiheadAttention(4, 2)
    module._forward_hooks.clear()
    assert len(copy.deepcopy(module)._forward_hooks) == 1
    assert len(copy.deepcopy(copy.deepcopy(module))._forward_hooks) == 1


def test_replace_keeps_parameters_hooks_and_mode():
    module = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)).eval()
    parameters = list(module.parameters())
    seen = []
    module[1].register_forward_hook(lambda *_: seen.append(1))
    replace(module)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    x = torch.randn(3, 1, 4)
    module[1](x, x, x)
    assert seen
    assert not module[1].training
    assert replaced(replace(module)) == ["1"]


def test_replace_refuses_what_it_cannot_know():
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(4, 2), Own(4, 2))
    with pytest.raises(UnsupportedError, match="1: Own is a subclass"):
        replace(model)
    assert replaced(model) == []
    with pytest.raises(ValueError, match="nothing to replace"):
        replace(nn.Linear(2, 2))
