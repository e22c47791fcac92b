"""Arguments of another kind, or of another library, get a sentence that says what to write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.generation import LanguageModel
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.gated_attention import GatedAttention
from polyhead.layers.norms import RMSNorm
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions

DRAWN = torch.Generator().manual_seed(0)
Q = torch.randn(2, 4, 5, 8, generator=DRAWN)
K = torch.randn(2, 2, 16, 8, generator=DRAWN)
X = torch.randn(1, 3, 16, generator=DRAWN)
MHA = ph.MultiHeadAttention(16, 2)
MLA = ph.MultiHeadLatentAttention(
    16, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
)
MODEL = LanguageModel(decoder(), byte_tokenizer())


def opened(**options: object) -> None:
    with ph.probe(MHA, **options):
        pass


def attend(**options: object) -> Callable[[], object]:
    return lambda: ph.attention(Q, K, K, **options)


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "call it: Causal": (TypeError, attend(mask=ph.Causal)),
    "call it: Window": (TypeError, lambda: ph.Causal() & ph.Window),
    "S = 16: got 99": (ValueError, attend(mask=ph.KeyLengths(99))),
    "S = 16: got 17": (ValueError, attend(mask=ph.KeyLengths([16, 17]) & ph.Causal())),
    "scale must be a finite number: got 'a'": (TypeError, attend(scale="a")),
    "scale must be a finite number: got True": (TypeError, attend(scale=True)),
    "scale must be a finite number: got inf": (ValueError, attend(scale=float("inf"))),
    "softcap must be a finite number, above 0, or None for off: got 'a'": (
        TypeError,
        attend(softcap="a"),
    ),
    "softcap must be .*: got 0": (ValueError, attend(softcap=0)),
    "sinks must be a floating-point tensor or None: got int": (TypeError, attend(sinks=3)),
    "a tensor or None: got the class ALiBi": (
        TypeError,
        attend(bias=ph.ALiBi),
    ),
    "dropout_p must be .*: got 'a'": (TypeError, attend(dropout_p="a")),
    "dropout_p must be a finite number, at least 0 and below 1": (ValueError, attend(dropout_p=1)),
    "generator must be a torch.Generator": (TypeError, attend(generator=3)),
    "return_lse must be True or False: got 1": (TypeError, attend(return_lse=1)),
    "kernel must be": (ValueError, attend(kernel=3)),
    "'is_causal'; in polyhead that is mask=Causal": (TypeError, attend(is_causal=True)),
    "'enable_gqa'; in polyhead that is nothing": (TypeError, attend(enable_gqa=True)),
    "'window_size'; in polyhead that is mask=Causal": (TypeError, attend(window_size=(4, 0))),
    "'attn_mask'; in polyhead that is mask=Keep": (TypeError, attend(attn_mask=None)),
    "attention has no argument 'sclae'$": (TypeError, attend(sclae=1.0)),
    "explain has no argument 'dropout'; in polyhead": (
        TypeError,
        lambda: ph.explain(Q, K, K, dropout=0.1),
    ),
    "'key_padding_mask'; in polyhead": (TypeError, lambda: MHA(X, key_padding_mask=None)),
    "'need_weights'; in polyhead": (TypeError, lambda: MHA(X, need_weights=True)),
    r"torch's \(query, key, value\) is": (TypeError, lambda: MHA(X, X, X)),
    "'attn_mask'; in polyhead that is mask=Keep.tensor. .True": (
        TypeError,
        lambda: ph.TransformerLayer(16, 2)(X, attn_mask=None),
    ),
    "'is_causal'; in polyhead that is mask=Causal..$": (TypeError, lambda: MLA(X, is_causal=True)),
    "top_k must be a whole number.*1.*: got 0": (ValueError, lambda: opened(top_k=0)),
    "MultiHeadAttention has no argument 'batch_first'; in polyhead that is nothing: tensors": (
        TypeError,
        lambda: ph.MultiHeadAttention(512, 8, batch_first=True),
    ),
    "'add_bias_kv'; in polyhead that is polyhead.integrations.torch.MultiheadAttention": (
        TypeError,
        lambda: ph.MultiHeadAttention(512, 8, add_bias_kv=True),
    ),
    "MultiHeadLatentAttention has no argument 'dtype'; in polyhead that is to": (
        TypeError,
        lambda: ph.MultiHeadLatentAttention(16, 2, dtype=torch.float16),
    ),
    "TransformerLayer has no argument 'd_model'; in polyhead that is embed_dim": (
        TypeError,
        lambda: ph.TransformerLayer(d_model=512, nhead=8),
    ),
    "TransformerLayer has no argument 'norm_first'; in polyhead that is norm_placement='pre'": (
        TypeError,
        lambda: ph.TransformerLayer(512, 8, norm_first=True),
    ),
    "GatedAttention has no argument 'is_causal'; in polyhead that is mask=Causal.. in every": (
        TypeError,
        lambda: GatedAttention(512, 8, is_causal=True),
    ),
    "class DenseCache; call it": (
        TypeError,
        lambda: MHA(X, cache=ph.DenseCache),
    ),
    "cache must be a cache of one layer.*: got int": (TypeError, lambda: MHA(X, cache=3)),
    "cache must be what new_cache": (
        TypeError,
        lambda: MODEL(torch.tensor([[1]]), cache=ph.DenseCache()),
    ),
    "bias must be True or False: got 'x'": (
        ValueError,
        lambda: ph.MultiHeadAttention(512, 8, bias="x"),
    ),
    "num_heads must divide embed_dim": (
        ValueError,
        lambda: ph.MultiHeadAttention(2**62, 7),
    ),
    "num_kv_heads must divide num_heads": (
        ValueError,
        lambda: ph.MultiHeadAttention(8, 2**20, 7, head_dim=8),
    ),
    "embed_dim must be a whole number": (ValueError, lambda: ph.MultiHeadAttention(10**40, 8)),
    "cross_attention must be True or False": (
        ValueError,
        lambda: ph.TransformerLayer(16, 2, cross_attention=3),
    ),
    "gated must be True or False": (ValueError, lambda: FeedForward(16, 32, gated="no")),
    "hidden_dim must be a whole number": (ValueError, lambda: FeedForward(16, 2.5)),
    "eps must be a finite number": (ValueError, lambda: RMSNorm(16, eps="a")),
    "theta must be a finite number": (ValueError, lambda: ph.RoPE("a")),
    "max_positions must be": (ValueError, lambda: LearnedPositions(0, 16)),
    "embed_dim must be a whole number of at least 1: got '8'": (
        ValueError,
        lambda: SinusoidalPositions("8"),
    ),
    "prompt must be text, token ids, or messages": (TypeError, lambda: MODEL.generate(3)),
    "cache must be arguments of new_cache, such as .*: got ModelCache": (
        TypeError,
        lambda: MODEL.generate("a", cache=MODEL.new_cache(), num_beams=2),
    ),
    "cache must be arguments of new_cache, .'capacity', .*: got 'knid'": (
        TypeError,
        lambda: MODEL.generate("a", cache={"knid": "paged"}),
    ),
    "stop must be a string or a list of strings: got 3": (
        TypeError,
        lambda: MODEL.generate("a", stop=3),
    ),
    "'do_sample'; in polyhead that is temperature": (
        TypeError,
        lambda: MODEL.generate("a", do_sample=True),
    ),
    "prompt must be text": (TypeError, lambda: MODEL.generate([3.5])),
    "source must be a model's name or a path": (TypeError, lambda: ph.load(3)),
    "adapter must be the path of a directory: got int": (
        TypeError,
        lambda: ph.load("smollm2", adapter=3),
    ),
    "dtype must be text or a torch.dtype: got int": (
        TypeError,
        lambda: ph.load("smollm2", dtype=3),
    ),
    "device 'nothing' is unavailable": (
        ValueError,
        lambda: ph.load("smollm2", device="nothing"),
    ),
    "device must be one that holds numbers": (
        ValueError,
        lambda: ph.load("smollm2", device="meta"),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_another_kind_of_argument_is_refused_by_a_sentence(words: str) -> None:
    error, call = REFUSED[words]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="device 'cuda' is unavailable"):
        ph.load("no such model", device="cuda")


def test_numbers_of_any_real_type_serve() -> None:
    wanted = ph.attention(Q, K, K, scale=1.0, softcap=2.0)
    assert torch.equal(ph.attention(Q, K, K, scale=1, softcap=2), wanted)
