"""What polyhead calls the arguments that other libraries' attention takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

_WEIGHTS = "`with polyhead.probe(layer) as seen:`, which shows exact weights"
_GIVEN_MASK = "mask=Keep(tensor) (True: may attend), or bias=tensor for numbers that are added"
_OTHER_NAMES = {
    "is_causal": "mask=Causal()",
    "causal": "mask=Causal()",
    "attn_mask": _GIVEN_MASK,
    "attention_mask": _GIVEN_MASK,
    "attn_bias": "bias",
    "key_padding_mask": "mask=KeyLengths(lengths), or mask=Drop(padding[:, None, None])",
    "block_mask": "a mask expression, such as mask=Causal() & Window(size)",
    "score_mod": "bias, softcap and mask",
    "window_size": "mask=Causal() & Window(size), where size counts the query itself",
    "sliding_window": "mask=Causal() & Window(size)",
    "softmax_scale": "scale",
    "scaling": "scale",
    "logits_soft_cap": "softcap",
    "alibi_slopes": "bias=ALiBi(slopes)",
    "dropout": "dropout_p",
    "s_aux": "sinks",
    "enable_gqa": "nothing: kv heads that are fewer than query heads are shared",
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_softmax_lse": "return_lse",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "backend": "kernel",
    "impl": "kernel",
    "past_key_value": "cache",
    "past_key_values": "cache",
    "use_cache": "cache=polyhead.DenseCache()",
    "key": "context",
    "value": "context=(for_keys, for_values)",
    "position_ids": "positions",
}


def refuse(function: str, names: Iterable[str]) -> NoReturn:
    """Raises TypeError for an argument that ``function`` does not have, with polyhead's name."""
    name = next(iter(names))
    said = f"{function} has no argument {name!r}"
    if name in _OTHER_NAMES:
        raise TypeError(f"{said}; in polyhead that is {_OTHER_NAMES[name]}")
    raise TypeError(said)
