"""Output heads of encoders, by the class that ``architectures`` names.

The same body comes as ``...Model``, ``...ForMaskedLM``, ``...ForSequenceClassification``,
``...ForTokenClassification`` and ``...ForQuestionAnswering``; only the class says which. Some also
come as a decoder, ``...ForCausalLM``, with the head of masked tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyhead.config import HeadTransformConfig, TaskHeadConfig, TransformerConfig
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Rule, Tensors

BARE, MASKED, PRE_TRAINING = "Model", "ForMaskedLM", "ForPreTraining"
CAUSAL, LM_HEAD = "ForCausalLM", "LMHeadModel"
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
ANSWERS = "ForQuestionAnswering"
_LOGITS = (MASKED, PRE_TRAINING, CAUSAL, LM_HEAD)
_ENDING = re.compile(r"(For[A-Z]\w*|(LMHead)?Model(With\w*)?)$")

QA = Rule("qa_outputs", "task.classifier")
CLASSIFIER = Rule("classifier", "task.classifier")
CLASSIFICATION_HEAD = (
    Rule("classifier.dense", "task.transforms.0.dense"),
    Rule("classifier.out_proj", "task.classifier"),
)


def ending(architectures: Any) -> str:
    """What the class's name ends with, such as ``"ForMaskedLM"``; without a class the body's."""
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else BARE
    found = _ENDING.search(name)
    return name if found is None else found[0]


def read_head(
    keys: Keys,
    *masked: HeadTransformConfig,
    head_bias: bool = True,
    pooled: tuple[HeadTransformConfig, ...] = (),
    each: tuple[HeadTransformConfig, ...] = (),
    pooling: Literal["first", "last", "mean"] = "first",
    late: bool = False,
    own: Mapping[str, TaskHeadConfig] | None = None,
    without: tuple[str, ...] = (),
    logits: str = MASKED,
) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` about what stands behind the last layer.

    Args:
        keys: Keys of config.json: ``architectures``, ``tie_word_embeddings`` and the labels.
        *masked: Before the logits of masked tokens.
        head_bias: Whether the logits of masked tokens have a bias.
        pooled: Before the classes of a text.
        each: Before the classes of a token.
        pooling: Of the classes of a text.
        late: As of ``TaskHeadConfig``.
        own: Further endings of the family's.
        without: Endings that the family has not.
        logits: The ending of the class with logits.

    Raises:
        ConfigError: Another class.
    """
    tied = keys.flag("tie_word_embeddings", True)
    names = keys.take("architectures", None)
    found = ending(names)
    known = [
        each for each in (BARE, logits, SEQUENCE, TOKENS, ANSWERS, *(own or {}))
        if each not in without
    ]  # fmt: skip
    if found in (own or {}):
        return {"head": None, "task": (own or {})[found]}
    if found not in known and (found, logits) != (PRE_TRAINING, MASKED):
        raise keys.refused("architectures", names, f"a class named ...{' or ...'.join(known)}")
    if found in _LOGITS:
        head = "tied" if tied else "untied"
        return {"head": head, "head_bias": head_bias, "head_transforms": masked}
    if found == BARE:
        return {"head": None}
    labels = {"num_labels": 2, "spans": True} if found == ANSWERS else read_labels(keys)
    if found == SEQUENCE:
        return {
            "head": None,
            "task": TaskHeadConfig(pooling, transforms=pooled, late=late, **labels),
        }
    return {"head": None, "task": TaskHeadConfig(None, transforms=each, **labels)}


def read_labels(keys: Keys) -> dict[str, Any]:
    """``num_labels`` and the names in ``id2label``, as fields of ``TaskHeadConfig``.

    Raises:
        ConfigError: They contradict each other.
    """
    names = keys.take("id2label", None)
    if names is None:
        return {"num_labels": keys.whole("num_labels", 2)}
    if not isinstance(names, Mapping) or {*map(str, names)} != {*map(str, range(len(names)))}:
        raise keys.refused("id2label", names, "an object with the keys 0, 1, 2, ...")
    keys.expect("num_labels", len(names), None)
    ordered = tuple(str(name) for _, name in sorted((int(i), name) for i, name in names.items()))
    plain = ordered == _numbered(len(ordered))
    return {"num_labels": len(ordered), "labels": () if plain else ordered}


def write_head(config: TransformerConfig, class_name: str) -> dict[str, Any]:
    """The inverse of ``read_head``, beyond what every family's writer knows."""
    task, tied = config.task, {"tie_word_embeddings": config.head != "untied"}
    if task is None:
        return tied
    found = ANSWERS if task.spans else TOKENS if task.pooling is None else SEQUENCE
    return {"architectures": [class_name + found], **tied, **write_labels(task)}


def write_labels(task: TaskHeadConfig) -> dict[str, Any]:
    """The inverse of ``read_labels``."""
    names = task.labels or _numbered(task.num_labels)
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _numbered(count: int) -> tuple[str, ...]:
    """transformers' own names."""
    return tuple(f"LABEL_{i}" for i in range(count))


def masked_rules(
    values: Mapping[str, Any], decoder: str, bias: str | None = None
) -> tuple[Rule, ...]:
    """The matrix of the logits and its bias.

    Args:
        values: Values of config.json.
        decoder: The matrix, which a tied model's file may hold or not.
        bias: A second name of the decoder's bias, which a tied model's file has.
    """
    tied = values.get("tie_word_embeddings", True)
    weight = "embedding.tokens.weight" if tied else "head.weight"
    own = Rule(f"{decoder}.bias", "head.bias")
    biases = (own,) if bias is None else (Rule(bias, "head.bias"), own) if tied else (own,)
    return (*biases, Rule(f"{decoder}.weight", weight))


@dataclass(frozen=True)
class Heads:
    """Where a family's files keep what stands behind the last layer.

    Attributes:
        decoder: The matrix of the logits of masked tokens.
        bias: A second name of its bias, or None.
        masked: What comes before those logits.
        texts: Of the classes of texts.
        pooled: Likewise, among the body's own tensors; other heads leave it out.
        own: By further endings.
        beside: Patterns of what stands beside the logits in the file, and why it is dropped.
        others: A pattern of the heads of masked tokens, which files with another may hold too.
        dropped: As of ``Tensors``, whatever the head.
    """

    decoder: str
    bias: str | None = None
    masked: tuple[Rule, ...] = ()
    texts: tuple[Rule, ...] = (CLASSIFIER,)
    pooled: Rule | None = None
    own: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    others: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)

    def table(
        self, values: Mapping[str, Any], rules: tuple[Rule, ...], prefix: str, **options: Any
    ) -> Tensors:
        """The tensor table, with the head that the class in config.json has.

        Args:
            values: Values of config.json.
            rules: Rules of the body.
            prefix: Prefix of its names.
            **options: Further fields of ``Tensors``.
        """
        found, dropped = ending(values.get("architectures")), dict(self.dropped)
        if self.pooled is not None:
            if found == SEQUENCE:
                rules = (*rules, self.pooled)
            else:
                pooler = re.escape(self.pooled.theirs) + r"\.(weight|bias)"
                dropped[pooler] = "comes after the hidden states"
        if found in _LOGITS and found not in self.own:
            outside = (*self.masked, *masked_rules(values, self.decoder, self.bias))
            dropped |= self.beside
            if self.bias is not None and not values.get("tie_word_embeddings", True):
                dropped[re.escape(self.bias)] = "only the decoder's is added, where it has its own"
        else:
            known = {ANSWERS: (QA,), SEQUENCE: self.texts, **self.own}
            outside = known.get(found, (CLASSIFIER,))
            if self.others and found not in self.own:
                dropped[self.others] = "comes after the hidden states"
        return Tensors(rules, prefix=prefix, outside=outside, dropped=dropped, **options)
