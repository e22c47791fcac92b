"""Every argument is checked: of the right kind, in its range, and named in the sentence."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
import torch

from polyhead._utils import checks
from polyhead.config import AttentionConfig, Data, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.config.data import OneOfSeveral
from polyhead.config.layout import HeadLayout, Network
from polyhead.errors import ConfigError

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
LAYER = LayerConfig(ATTENTION, FeedForwardConfig(8))
MODEL = TransformerConfig("decoder", 16, 8, 32, (LAYER,))


def test_a_whole_number_is_one_of_any_type_in_its_range() -> None:
    assert checks.check_int("n", torch.tensor(3)) == 3
    assert checks.check_int("n", 3, least=3, most=3) == 3
    for wrong in (True, 1.0, "1", None, [1], torch.tensor([1, 2]), torch.tensor(1.5)):
        with pytest.raises(TypeError, match="n must be a whole number"):
            checks.check_int("n", wrong)
    with pytest.raises(ValueError, match="n must be a whole number of at least 1: got 0"):
        checks.check_int("n", 0, least=1)
    with pytest.raises(ValueError, match="n must be a whole number from 0 to 2,000: got -1"):
        checks.check_int("n", -1, least=0, most=2000)
    for huge in (10**40, 10**5000, -(10**5000)):
        with pytest.raises(ValueError, match="64 bits"):
            checks.check_int("n", huge)
    with pytest.raises(ConfigError):
        checks.check_int("n", "x", error=ConfigError)


def test_a_number_is_finite_and_in_its_range() -> None:
    assert checks.check_number("x", 2, above=1, most=2) == 2
    for wrong in (True, "1", None, 1j, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="x must be a finite number"):
            checks.check_number("x", wrong)
    limits = {"above": (0, 0), "least": (0, -1), "below": (1, 1), "most": (1, 2)}
    for name, (end, outside) in limits.items():
        with pytest.raises(ValueError, match="x must be a finite number, "):
            checks.check_number("x", outside, **{name: end})
    for wrong in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="finite"):
            checks.check_number("x", wrong)
    with pytest.raises(
        ValueError, match="p must be a finite number, at least 0 and below 1: got 1"
    ):
        checks.check_probability("p", 1)


def test_a_flag_and_a_choice_are_what_they_say() -> None:
    assert checks.check_bool("f", False) is False
    with pytest.raises(TypeError, match="f must be True or False: got 1"):
        checks.check_bool("f", 1)
    assert checks.check_one_of("c", None, (None, "a")) is None
    for wrong in (1, [], torch.ones(2), "ab"):
        with pytest.raises(ValueError, match="c must be one of True, 'a': got"):
            checks.check_one_of("c", wrong, (True, "a"))


def _every_field() -> list[tuple[type[Data], str]]:
    kinds, found = [Data], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        ours = kind.__module__.startswith("polyhead.")
        if ours and not inspect.isabstract(kind) and kind not in (Data, OneOfSeveral):
            found += [(kind, field.name) for field in dataclasses.fields(kind)]
    return found


class _Nothing:
    """Of no kind that a configuration takes."""


def test_every_field_of_every_configuration_refuses_another_kind() -> None:
    assert len(_every_field()) > 60
    for kind, name in _every_field():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            kind(**(_required(kind) | {name: _Nothing()}))


def _example(hint: typing.Any) -> typing.Any:
    """Some value that a field takes."""
    first, *_ = (*typing.get_args(hint), None)
    if typing.get_origin(hint) is tuple:
        return (_example(first),)
    if typing.get_origin(hint) is not None:
        return first if typing.get_origin(hint) is typing.Literal else _example(first)
    by_hand = {HeadLayout: ATTENTION, Network: LAYER.feed_forward, TransformerConfig: MODEL}
    if hint in by_hand:
        return by_hand[hint]
    if isinstance(hint, type) and issubclass(hint, Data):
        return hint(**_required(hint))
    return {int: 2, float: 1.0, str: "silu", bool: True}[hint]


def _required(kind: type[Data]) -> dict[str, typing.Any]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: _example(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    }


def test_what_a_field_takes_is_said() -> None:
    for name, value, words in (
        ("qkv_bias", "x", "qkv_bias must be True or False: got 'x'"),
        ("num_heads", 2.0, "num_heads must be a whole number"),
        ("num_heads", True, "num_heads must be a whole number"),
        ("num_heads", 10**5000, "num_heads must be a whole number of 64 bits"),
        ("scale", "a", r"scale must be a finite number of at most 1e\+18 or None: got 'a'"),
        ("scale", float("nan"), "scale must be a finite number"),
        ("scale", 10**400, "scale must be a finite number"),
        ("softcap", "a", "softcap must be a finite number of at most .* or None"),
        ("window", 2.5, "window must be a whole number"),
        ("rope", 3, "rope must be RopeConfig or None: got 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(ATTENTION, **{name: value})


def test_lists_become_tuples_so_that_configurations_compare_and_hash() -> None:
    listed = dataclasses.replace(MODEL, layers=[LAYER])
    assert listed == MODEL
    assert hash(listed) == hash(MODEL)
    with pytest.raises(ConfigError, match="layers must be a tuple, each entry LayerConfig"):
        dataclasses.replace(MODEL, layers=[LAYER, 3])
