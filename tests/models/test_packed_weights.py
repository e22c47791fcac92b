"""``load(quantize=…)``: the model whose weights are the numbers of its blocks."""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models.quantized import pack_weights, quantizable
from polyhead.quantization import block_type, pack, unpack

NAMES = {"minilm": ("Q8_0", "float32"), "whisper-tiny.en": ("Q4_0", "float32")}


def numbers_of_blocks(model: ph.Transformer, name: str) -> int:
    """Rounds each weight to the nearest blocks, and leaves it a parameter."""
    kind, rounded = block_type(name), 0
    for path, numbers in model.named_parameters():
        if quantizable(model, path) and numbers.shape[1] % kind.numbers == 0:
            numbers.copy_(unpack(pack(numbers, kind), kind, torch.float32))
            rounded += 1
    return rounded


@torch.no_grad()
@pytest.mark.parametrize("source", NAMES)
def test_a_packed_model_computes_with_the_numbers_of_its_blocks(source: str) -> None:
    name, dtype = NAMES[source]
    plain, packed = ph.load(source, dtype), ph.load(source, dtype, quantize=name)
    rounded = numbers_of_blocks(plain.transformer, name)
    blocks = [m for m in packed.transformer.modules() if isinstance(m, QuantizedMatrix)]
    assert len(blocks) == rounded > 10
    assert {m.kind.name for m in blocks} == {name}
    if source == "minilm":
        texts = ["A cat sat on the mat.", "注意力"]
        found, wanted = packed.encode(texts), plain.encode(texts)
    else:
        mels, ids = torch.randn(1, 80, 3000), torch.tensor([[50257, 50362, 440]])
        found, wanted = (
            m.transformer(ids, encoder_hidden=m.transformer.encode(mels)) for m in (packed, plain)
        )
    assert torch.allclose(found, wanted, atol=1e-4 * wanted.abs().max().item())
    size = sum(each.nbytes for each in packed.transformer.buffers())
    assert size < 0.4 * sum(p.nbytes for p in plain.transformer.parameters())


@torch.no_grad()
def test_dtype_and_8_bit_activations_go_with_packed_weights() -> None:
    exact = ph.load("minilm").encode(["A cat sat on the mat."])
    for options in ({"dtype": "bfloat16"}, {"activations": "int8"}):
        packed = ph.load("minilm", quantize="Q8_0", **options)  # type: ignore[call-overload]
        found = packed.encode(["A cat sat on the mat."])
        assert 1e-4 < (found.float() - exact).norm() < 0.05


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quantize must be one of Q4_0, .*: got 'IQ2_S'"):
        ph.load("minilm", quantize="IQ2_S")
    with pytest.raises(ph.UnsupportedError, match="quantize='Q8_0' needs device='cpu': got 'meta'"):
        ph.load("minilm", quantize="Q8_0", device="meta")
    with pytest.raises(ph.UnsupportedError, match="this model has none that is not in blocks"):
        ph.load("smollm2", quantize="Q8_0")
    model = ph.load("minilm").transformer
    with torch.no_grad():
        model.layers[2].feed_forward.down_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.2\.feed_forward\.down_proj.*finite: got NaN"):
        pack_weights(model, block_type("Q8_0"))
