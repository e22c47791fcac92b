"""Families that are refused as a whole, and why."""

from __future__ import annotations

from collections.abc import Mapping

_RECURRENT = "its layers are linear recurrences, not attention"
_DRAFTS = "it drafts tokens from another model's keys, values and hidden states"
_CODES = "it reads and writes several codes of sound at a time"
_SPEECH = "it is several models in one: of text, of speech, and of sound made from units"

REFUSED: Mapping[str, str] = {
    "rwkv": _RECURRENT,
    "xlstm": _RECURRENT,
    "prophetnet": "its decoder predicts several tokens ahead in streams of their own",
    "transfo-xl": "transformers no longer has its classes, so no result is known",
    "git": "a text follows the patches of a picture in one sequence",
    "voxtral_realtime": "every layer reads how long the text waits for the sound",
    "fnet": "it mixes tokens by a Fourier transform, not attention",
    "nystromformer": "its weights are a product through means of runs of tokens, with an inverse "
    "found by iterations",
    "mra": "it attends to the blocks that a coarse score chooses, and approximates the others",
    "yoso": "it weighs keys by how likely hashes collide, not by softmax",
    "perceiver": "its layers are over learned latents, which attend to the text once",
    "blt": "its layers are over patches of bytes, cut where a smaller model is uncertain",
    "inkling2_text": "some convolutions have weights that depend on the text, and its layers "
    "choose among sums of earlier ones",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "moshi": "beside text it reads and writes codes of sound, by a second decoder",
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "trocr": "it is the decoder of an image encoder, which is another model",
    "encoder-decoder": "it joins an encoder and a decoder of any two types",
    "seamless_m4t": _SPEECH,
    "seamless_m4t_v2": _SPEECH,
    "nllb-moe": "transformers' own class uses two of its experts alone, so no result is known",
}

GGUF_REFUSED: Mapping[str, str] = {
    "baichuan": "of all but 7B's 32 layers it has ALiBi, which no family has with RMSNorm",
    "chameleon": "its queries and keys have a LayerNorm with weights and biases for each head",
    "chatglm": "the converter takes the norm's epsilon and the rotary base from keys that GLM-4's "
    "config.json has not, so files have others",
    "deepseek": "no family has heads of their own keys and values beside experts whose weights do "
    "not sum to 1 and a network for all tokens",
    "gemma-embedding": "its tokens see those after them, which is not built for Gemma 3",
    "gptj": "llama.cpp's converter writes no such files",
    "mistral4": "the converter writes no setting of how queries grow with their position",
    "nomic-bert-moe": "transformers' Nomic BERT has no mixture of experts",
    "plamo": "no family has attention and network side by side behind an RMSNorm",
    "refact": "no family has ALiBi with RMSNorm",
    "smallthinker": "its router reads what enters the layer, before attention",
    "step35": "the divisors of rotary frequencies are computed for whole heads, of which layers "
    "without a window rotate a half",
}
"""Architectures of GGUF files of which a family is near, and why they are not read."""
