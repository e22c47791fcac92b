"""Cases of a speech recogniser: Whisper tiny.en, its encoder and its decoder, in three programs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.checkpoints import find
from polyhead.generation import SpeechToText, load
from polyhead.generation.pipelines.sound import RATE
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Differs, Settings, seconds
from polyhead.lab.benchmarks.limits import matrix_rate, read_rate
from polyhead.lab.benchmarks.peers import WHISPER, in_transformers, installed
from polyhead.models.transformer import Transformer

MODEL, NEW = "whisper-tiny.en", 48
CTRANSLATE2, INT8 = "CTranslate2", "CTranslate2, int8"
PACKED = "polyhead, Q8_0 and int8 activations"
"""Our model with weights and activations in 8 bits, as CTranslate2 has them."""
_KINDS = {CTRANSLATE2: "float32", INT8: "int8_float32"}
"""On a CPU CTranslate2 computes in float32, or rounds weights and activations to 8 bits."""


def cases(settings: Settings) -> Iterator[Case]:
    """Whisper tiny.en: a window of 30 s encoded, and 48 tokens written of one.

    CTranslate2 computes in float32 and in 8 bits, whatever the case's dtype.
    """
    if not installed(WHISPER):
        return
    theirs = {}
    if installed(CTRANSLATE2):
        theirs = {name: _ctranslate2(kind) for name, kind in _KINDS.items()}
    for dtype in settings.dtypes:
        ours = load(MODEL, dtype=dtype, expect=SpeechToText)
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        peer = None
        if installed("transformers"):
            name = "WhisperForConditionalGeneration"
            peer = in_transformers(ours.transformer, name, **options)
        features = ours.features(_sound())[None]
        packed = None
        if native.code() is not None:
            packed = load(
                MODEL, dtype=dtype, quantize="Q8_0", activations="int8", expect=SpeechToText
            )
        yield _encode(ours, packed, theirs, peer, features, dtype)
        yield _decode(ours, packed, theirs, peer, features, dtype)


def _encode(
    ours: SpeechToText,
    packed: SpeechToText | None,
    theirs: dict[str, Any],
    peer: Any,
    features: Tensor,
    dtype: torch.dtype,
) -> Case:
    """One window through the encoder."""
    model, mels = ours.transformer, features.to(dtype)
    given = _view(features) if theirs else None
    same, alike = _near(1e-4 if dtype is torch.float32 else 0.1), _near(0.1)
    peers = {
        name: Contestant(
            lambda them=them: _tensor(them.encode(given)),  # type: ignore[misc]
            same if name == CTRANSLATE2 else alike,
        )
        for name, them in theirs.items()
    }
    if packed is not None:
        peers[PACKED] = Contestant(lambda: packed.transformer.encode(mels), alike)
    if peer is not None:
        encoder = peer.get_encoder()
        peers["transformers"] = Contestant(lambda: encoder(mels).last_hidden_state, same)
    length, width = ours.max_source, model.config.encoder.embed_dim or model.config.embed_dim
    products = sum(p.numel() for p in model.encoder_layers.parameters() if p.ndim == 2)
    embedding: Any = model.encoder_embedding
    convolved = [p.numel() for p in embedding.parameters() if p.ndim == 3]
    # The first convolution runs at the rate of the frames, two for each position.
    operations = 2.0 * length * (products + 2 * convolved[0] + sum(convolved[1:]))
    operations += 4.0 * length**2 * width * len(model.encoder_layers)
    return Case(
        "encode, windows of 30 s:", 1, dtype, lambda: model.encode(mels), peers,
        (matrix_rate(dtype, operations),), 1.0, "windows/s", _rested,
    )  # fmt: skip


def _decode(
    ours: SpeechToText,
    packed: SpeechToText | None,
    theirs: dict[str, Any],
    peer: Any,
    features: Tensor,
    dtype: torch.dtype,
) -> Case:
    """The likeliest 48 tokens, one by one; the end of the text is left out."""
    model, prompt = ours.transformer, ours.prompt_ids()
    end = sorted(model.config.eos_token_ids)
    hidden = model.encode(features.to(dtype))
    encoded = _view(hidden.float()) if theirs else None

    def run(model: Transformer = model) -> Tensor:
        cache = model.new_cache(len(prompt) + NEW)
        ids, found = torch.tensor([prompt]), []
        context = {"encoder_hidden": hidden}
        for _ in range(NEW):
            logits = model(ids, cache=cache, last=1, **context)[:, -1]
            logits[:, end] = -math.inf
            ids, context = logits.argmax(-1, keepdim=True), {}
            found.append(ids)
        return torch.cat(found, dim=1)

    def generated(them: Any) -> Tensor:
        made = them.generate(
            encoded, [prompt], beam_size=1, max_length=2 * NEW,  # it writes half of that
            suppress_blank=False, suppress_tokens=end,
        )  # fmt: skip
        return torch.tensor(made[0].sequences_ids)

    exact = dtype is torch.float32
    peers = {
        name: Contestant(
            lambda them=them: generated(them),  # type: ignore[misc]
            _same_tokens if exact and name == CTRANSLATE2 else _as_many_tokens,
        )
        for name, them in theirs.items()
    }
    if packed is not None:
        peers[PACKED] = Contestant(lambda: run(packed.transformer), _as_many_tokens)
    if peer is not None:
        peers["transformers"] = Contestant(
            lambda: _in_transformers(peer, prompt, hidden, end),
            _same_tokens if exact else _as_many_tokens,
        )
    weights = sum(p.nbytes for p in model.layers.parameters()) + model.embedding.table.nbytes
    size = weights + 2.0 * hidden.nbytes * len(model.layers)
    return Case(
        "decode, new tokens:", NEW, dtype, run, peers,
        (read_rate(size).times(NEW),), NEW, "tokens/s", _rested,
    )  # fmt: skip


def _in_transformers(model: Any, prompt: list[int], hidden: Tensor, end: list[int]) -> Tensor:
    from transformers.modeling_outputs import BaseModelOutput

    encoded: Any = BaseModelOutput(last_hidden_state=hidden)
    past, ids, found = None, torch.tensor([prompt]), []
    for _ in range(NEW):
        out = model(
            encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=past, use_cache=True
        )
        logits, past = out.logits[:, -1], out.past_key_values
        logits[:, end] = -math.inf
        ids = logits.argmax(-1, keepdim=True)
        found.append(ids)
    return torch.cat(found, dim=1)


def _rested(run: Call) -> float:
    """Seconds of a call, begun when CTranslate2's threads, which spin for 200 ms, sleep."""
    time.sleep(0.3)
    return seconds(run)


def _sound() -> Tensor:
    """Ten seconds of tones that rise and fall, and silence."""
    time = torch.arange(10 * RATE) / RATE
    pitch = 180 + 60 * torch.sin(2 * math.pi * 0.4 * time)
    phase = 2 * math.pi * torch.cumsum(pitch, 0) / RATE
    voice = sum(torch.sin(n * phase) / n for n in range(1, 8))
    loudness = torch.sin(2 * math.pi * 1.5 * time).clamp(min=0)
    return 0.1 * torch.as_tensor(voice) * loudness


def _same_tokens(ours: Tensor, theirs: Tensor) -> str | None:
    same = ours.shape == theirs.shape and bool((ours == theirs).all())
    return None if same else f"they write {theirs.tolist()}, we {ours.tolist()}"


def _as_many_tokens(ours: Tensor, theirs: Tensor) -> str | None:
    """In fewer bits a text may be another one."""
    return None if ours.shape == theirs.shape else f"they write {theirs.shape[-1]} tokens"


def _near(share: float) -> Differs:
    """A test of the root mean square of the difference, relative to that of our result."""

    def differs(ours: Tensor, theirs: Tensor) -> str | None:
        difference = ours.float() - theirs.float()
        error = float((difference.square().mean() / ours.float().square().mean()).sqrt())
        return None if error <= share else f"they differ by {error:.2g} of the result"

    return differs


def _ctranslate2(kind: str) -> Any:
    import ctranslate2

    return ctranslate2.models.Whisper(
        str(find(MODEL).path), compute_type=kind, intra_threads=torch.get_num_threads()
    )


def _view(x: Tensor) -> Any:
    import ctranslate2

    return ctranslate2.StorageView.from_array(x.contiguous().numpy())


def _tensor(view: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(view))
