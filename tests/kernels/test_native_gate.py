"""What native code is handed: the gate, the table of the interface, and far positions."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polyhead as ph
from polyhead import native
from polyhead.errors import NotPlainError
from polyhead.layers import TransformerLayer
from polyhead.native import interface, tensor_check
from polyhead.native.arguments import (
    NO_SCORE_MODS,
    KVSegment,
    Network,
    NormWeight,
    TileSums,
    Weight,
)

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cut_short(x):
    """x, most of its storage given back."""
    x.untyped_storage().resize_(16)
    return x


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["native", "sdpa", "tiled", "reference"])
def test_storage_that_was_given_back_is_an_error(kernel, index):
    tensors = [draw(1, 2, 64, 64) for _ in range(3)]
    cut_short(tensors[index])
    with pytest.raises(NotPlainError, match=rf"storage of {'qkv'[index]} holds 16 bytes.* 32768"):
        ph.attention(*tensors, kernel=kernel)


def test_what_must_be_copied_first_is_looked_at_before():
    q, v = draw(1, 2, 64, 64), draw(1, 2, 64, 64)
    with pytest.raises(NotPlainError, match="storage of a tensor that must be copied"):
        ph.attention(q, cut_short(draw(1, 2, 64, 64).mT), v, kernel="native")
    slopes = cut_short(draw(12).bfloat16())
    many = draw(1, 12, 2, 8)
    with pytest.raises(NotPlainError, match="storage of bias"):
        ph.attention(many, many, many, bias=ph.ALiBi(slopes), kernel="native")


def test_every_tensor_of_a_call_passes_the_gate():
    q, k, v = draw(1, 2, 3, 8), draw(1, 2, 5, 8), draw(1, 2, 5, 8)
    code, at = native.code(), torch.arange(3)[None]

    def attend(**mods):
        code.attend(q, [KVSegment(k, v)], 1.0, NO_SCORE_MODS._replace(**mods))

    with pytest.raises(ValueError, match="storage of bias"):
        attend(bias=cut_short(draw(1, 2, 3, 5)))
    with pytest.raises(ValueError, match="storage of slopes"):
        attend(slopes=cut_short(draw(12)[10:]), q_positions=at)
    with pytest.raises(NotPlainError, match="keep must be a plain tensor"):
        attend(keep=torch.ones(1, 1, 3, 5, dtype=torch.bool, device="meta"))
    with pytest.raises(NotPlainError, match=r"slopes .* a Strange"):
        attend(slopes=draw(2).as_subclass(Strange), q_positions=at)
    with pytest.raises(NotPlainError, match=r"bounds .* negated view"):
        attend(bounds=(torch._neg_view(at), at))
    with pytest.raises(ValueError, match="storage of x"):
        code.norm(cut_short(draw(4, 64)), NormWeight(draw(64), 1e-5, 0.0))
    with pytest.raises(ValueError, match="storage of up"):
        code.feed_forward(
            draw(1, 64),
            Network(None, Weight(cut_short(draw(8, 64)), None), Weight(draw(64, 8), None), 0),
        )
    with pytest.raises(ValueError, match="storage of a weight"):
        code.product(draw(1, 64), [Weight(cut_short(draw(8, 64)), None)])
    with pytest.raises(ValueError, match="storage of cos"):
        code.rotate(draw(1, 3, 2, 8), cut_short(draw(3, 8)), draw(3, 8))
    for name in ("entropy", "squares", "received"):
        with pytest.raises(ValueError, match=f"storage of {name}"):
            code.weigh(draw(1, 30, 5), 0, TileSums(**{name: cut_short(draw(1, 30))}))
    with pytest.raises(NotPlainError, match="got a tensor without memory of its own"):
        attend(bias=draw(1, 2, 3, 5).to_sparse())


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("mods", "words"),
    [
        ({"bias": draw(1, 2, 3, 4)}, "bias must be"),
        ({"bias": draw(1, 2, 3, 5).double()}, "dtype that native code does not read"),
        ({"keep": torch.ones(1, 1, 3, 4, dtype=torch.bool)}, "keep must be"),
        ({"slopes": draw(3)}, "slopes must be"),
        ({"slopes": torch.tensor(0.5)}, "slopes .* a tensor of no or more than four dimensions"),
        ({"bias": draw(1, 1, 2, 3, 5)}, "bias .* a tensor of no or more than four dimensions"),
        ({"slopes": draw(2)}, "needs q_positions"),
        ({"by_distance": draw(2, 4)}, "by_distance must be"),
        ({"by_distance": draw(2, 5)}, "needs q_positions"),
        ({"bounds": (torch.zeros(1, 2).long(), torch.zeros(1, 3).long())}, "bounds must be"),
        ({"q_positions": torch.zeros(2).long()}, "q_positions must be"),
    ],
)
def test_what_does_not_go_together_is_refused(mods, words):
    q, k, v = draw(1, 2, 3, 8), draw(1, 2, 5, 8), draw(1, 2, 5, 8)
    with pytest.raises((ValueError, TypeError), match=words):
        native.code().attend(q, [KVSegment(k, v)], 1.0, NO_SCORE_MODS._replace(**mods))


@pytest.mark.parametrize("number", [0, 17])
def test_a_call_has_1_to_16_segments(number):
    q, k, out = draw(1, 2, 3, 8), draw(1, 2, 5, 8), torch.empty(1, 2, 3, 8)
    with pytest.raises(ValueError, match="segments of keys and values must be 1 to 16"):
        tensor_check.MODULE.attend(
            0, 1, q, [KVSegment(k, k)] * number, 1.0, NO_SCORE_MODS, out, None
        )


@pytest.mark.parametrize("page", [-1, 4, 1 << 40])
def test_a_page_that_is_not_there_is_an_error(page):
    q, k, v = draw(1, 2, 1, 16), draw(4, 2, 8, 16), draw(4, 2, 8, 16)
    piece = KVSegment(k, v, pages=torch.tensor([[0, page]]), skipped=3, paged=10)
    with pytest.raises(ValueError, match=f"page {page} of 4"):
        native.code().attend(q, [piece], 1.0)
    few = piece._replace(pages=torch.tensor([[0]]))
    with pytest.raises(ValueError, match="enough for the tokens"):
        native.code().attend(q, [few], 1.0)
    # A page that no token lies in is not read.
    piece = piece._replace(paged=5)
    native.code().attend(q, [piece], 1.0)


def test_weights_that_were_given_back_do_not_end_a_step():
    layer = TransformerLayer(16, 2, 32).eval()
    cache = ph.DenseCache()
    layer(draw(1, 3, 16), cache=cache, mask=ph.Causal())
    layer.feed_forward.up_proj.weight = nn.Parameter(cut_short(draw(32, 16)))
    with pytest.raises(ValueError, match="storage of up"):
        layer(draw(1, 1, 16), cache=cache, mask=ph.Causal())


FAR = [1 << 31, 1 << 33, (1 << 53) + 8, (1 << 62) + 5, -(1 << 33)]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("listed", [False, True])
def test_positions_beyond_32_bits_count(far, T, listed):
    q, k, v = draw(1, 4, T, 16), draw(1, 2, 70, 16), draw(1, 2, 70, 16)
    q_positions, at = torch.arange(far, far + T), torch.arange(70)
    slopes = torch.tensor([4.0, 1.0, 0.1, 0.0]) / abs(far)  # float32 has no digits for more
    for arguments in (
        {"bias": ph.ALiBi(slopes)},
        {"bias": ph.RelativeBias(draw(12, 4), max_distance=20)},
        {"mask": ph.Causal()},
        {"mask": ph.Causal() & ph.Window(30)},
        {"mask": ph.Window(abs(far) - 50 + T, ahead=3)},
        {"mask": ph.Window(30, ahead=abs(far))},
        {"mask": ph.Prefix(40) & ph.Causal()},
    ):
        arguments |= {"q_positions": q_positions, "kv_positions": at if listed else None}
        arguments["return_lse"] = True
        found = ph.attention(q, k, v, kernel="native", **arguments)
        exact = ph.attention(q.double(), k.double(), v.double(), kernel="reference", **arguments)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("far", [1 << 33, (1 << 62) + 5])
def test_gradients_of_biases_know_far_positions(far):
    arguments = {"q_positions": torch.arange(far, far + 3)}
    tensors = draw(1, 4, 3, 16), draw(1, 2, 70, 16), draw(1, 2, 70, 16)
    with torch.enable_grad():
        for make, learned in (
            (ph.ALiBi, torch.full((4,), 4.0 / far)),
            (ph.RelativeBias, draw(12, 4)),
        ):
            found = []
            for kernel in ("native", "reference"):
                leaf = learned.clone().requires_grad_()
                # Of out itself they are differences of numbers of this size.
                _, lse = ph.attention(
                    *tensors, bias=make(leaf), kernel=kernel, return_lse=True, **arguments
                )
                lse.sum().backward()
                found.append(leaf.grad)
            assert found[0].abs().amax() >= 1
            torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_the_compiled_table_of_the_interface_is_that_of_the_tuples():
    assert tensor_check.MODULE is not None
    assert interface.differences(tensor_check.MODULE) == []
    table = tensor_check.MODULE.interface()
    table["Heads"] = ", ".join(reversed(table["Heads"].split(", ")))
    table["limits"]["rows"] = 9
    table["step"] = table["step"].replace("calls, ", "")
    del table["CacheSegment"]

    def module(**instead):
        functions = dict.fromkeys(dir(tensor_check.MODULE), print)
        return SimpleNamespace(**functions | {"interface": lambda: table} | instead)

    found = [words.split(":")[0] for words in interface.differences(module())]
    assert found == ["step", "Heads", "CacheSegment", "limits"]
    assert interface.differences(SimpleNamespace())[0] == "codes: there is none"
    for nothing in (None, []):
        said = interface.differences(module(interface=lambda nothing=nothing: nothing))
        assert said == ["interface: there is none"]


def test_functions_take_the_arguments_that_the_table_lists():
    table = tensor_check.MODULE.interface()
    for name in (
        "product",
        "feed_forward",
        "norm",
        "rotate",
        "attend",
        "gradients",
        "tile_sums",
        "step",
    ):
        count = len(table[name].split(", "))
        with pytest.raises(TypeError, match=f"{name} takes {count} arguments: got 0"):
            getattr(tensor_check.MODULE, name)()
        with pytest.raises(ValueError, match="no code 99"):
            getattr(tensor_check.MODULE, name)(99, *[None] * (count - 1))


def test_no_other_python_code_asks_for_an_address():
    found = {
        (path.relative_to(ROOT / "src/polyhead").as_posix(), line.strip())
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\bdata_ptr\(", line)
    }
    assert found == {
        # Are values part of their keys?
        (
            "semantics/sources.py",
            "same_place = v.data_ptr() == k.data_ptr() and v.stride() == k.stride()",
        ),
        # Does what a CUDA graph reads lie where it lay?
        (
            "generation/decoding/graphs.py",
            "self._addresses += [(x, x.data_ptr()) for x in tensors if x is not None]",
        ),
        (
            "generation/decoding/graphs.py",
            "and all(x.data_ptr() == address for x, address in self._addresses)",
        ),
    }
