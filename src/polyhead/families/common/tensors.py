"""A family's tensors: rules from the file's names to polyhead's, which read both ways.

A rule names a *module*, whose leaf (``weight``, ``bias``) stays, or a whole tensor. ``{i}`` stands
for a layer's number, ``{j}`` for an expert's. A rule with several of polyhead's names cuts a fused
tensor; ``{j}`` on polyhead's side alone cuts stacked experts, on the file's side alone it stacks
tensors (a norm for each head). ``{part}`` on the file's side joins tensors with names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, shortened
from polyhead.families.common.steps import At, Each, Step, Transposed, backward, forward

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")
_LETTER = re.compile(r"\{[ij]\}")


class Rule:
    """One line of a table: ``Rule("h.{i}.attn.c_attn", (Q, K, V), Transposed(), QKVRows())``.

    Args:
        theirs: The file's name, without the table's prefix.
        ours: polyhead's name, or the names of the tensors that it becomes.
        steps: What happens on the way, in the order of reading.
        parts: What ``{part}`` stands for, in the order in which rows are joined.
        cut: Cuts polyhead's tensor into these parts again, by its ``to_ours``.
    """

    def __init__(
        self,
        theirs: str,
        ours: str | Sequence[str],
        *steps: Step | Each,
        parts: Sequence[str] = (),
        cut: Step | None = None,
    ) -> None:
        self.theirs = theirs
        self.ours = (ours,) if isinstance(ours, str) else tuple(ours)
        self.steps, self.parts, self.cut = steps, tuple(parts), cut

    @property
    def stacks(self) -> bool:
        """Whether several tensors of the file become one, in the order of ``{j}``."""
        return "{j}" in self.theirs and not any("{j}" in name for name in self.ours)

    @property
    def their_names(self) -> tuple[str, ...]:
        """The file's names, one for each part."""
        return tuple(self.theirs.replace("{part}", part) for part in self.parts) or (self.theirs,)

    def with_(self, theirs: str, *steps: Step | Each) -> Rule:
        """The same under another name of the file, with other steps."""
        return Rule(theirs, self.ours, *steps)

    def at(self, number: int | str, place: int | None = None) -> Rule:
        """The same of one layer.

        Args:
            number: The file's.
            place: polyhead's, where that is another.
        """
        own = str(number if place is None else place)
        ours = [name.replace("{i}", own) for name in self.ours]
        theirs = self.theirs.replace("{i}", str(number))
        return Rule(theirs, ours, *self.steps, parts=self.parts, cut=self.cut)

    def cuts(self, numbers: Mapping[str, str]) -> bool:
        """Whether one tensor of the file becomes one for each expert."""
        return "j" not in numbers and any("{j}" in name for name in self.ours)

    def our_names(self, numbers: Mapping[str, str], leaf: str, experts: int) -> list[str]:
        """The tensors that one of the file becomes, in the order of the steps' results."""
        if not self.cuts(numbers):
            return [name.format(**numbers) + leaf for name in self.ours]
        return [name.format(**numbers, j=j) + leaf for j in range(experts) for name in self.ours]


@dataclass(frozen=True)
class Found:
    """A name that a rule knows: the numbers in it and the leaf that the rule does not name.

    Attributes:
        part: Which of the rule's names on that side.
    """

    rule: Rule
    numbers: Mapping[str, str]
    leaf: str
    part: int = 0


@dataclass(frozen=True)
class Tensors:
    """The table of a family.

    Attributes:
        rules: Under the prefix. Of several rules for one of polyhead's tensors the first is used
            for saving; all are read, and copies have to agree.
        prefix: Stands before the file's names, or does not: a bare body is saved without it.
        outside: Rules that never carry the prefix.
        leaves: Other spellings of the last part of a name.
        dropped: Patterns (full match, without the prefix) of tensors that no output depends on, and
            why.
        constants: Numbers that transformers wants to find in the file, of every layer where the
            name has ``{i}``; lists of them are float32. Tensors follow from the configuration, and
            those that a file has must be equal.
        left_out: Modules of a multimodal file that ids do not pass through; they are dropped too.
    """

    rules: tuple[Rule, ...]
    prefix: str = "model."
    outside: tuple[Rule, ...] = (Rule("lm_head", "head"),)
    leaves: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float | Sequence[float] | Tensor] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def to_ours(
        self, tensors: Mapping[str, Tensor], config: TransformerConfig, where: object
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """polyhead's tensors, and what the file calls each.

        A tensor that the table does not know keeps its own name, and so is found to be one too many
        when the state is checked.

        Raises:
            CheckpointError: Two copies of one tensor differ, or one from what must be there.
        """
        state: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        stacks: dict[str, dict[int, Tensor]] = {}
        joined: dict[str, int] = {}
        for name, tensor in tensors.items():
            if self.is_dropped(name):
                known = self.constants.get(name.removeprefix(self.prefix))
                if isinstance(known, Tensor) and not torch.equal(tensor.cpu(), known):
                    raise CheckpointError(
                        f"{where}: tensor {shortened(name)} must be what follows from the "
                        "configuration, but it differs"
                    )
                continue
            found = self._find(name.removeprefix(self.prefix), self._by_theirs)
            if found is None:
                state[name] = tensor
                names[name] = name
                continue
            for ours, made in _made(
                self._respelt(found), tensor, config, f"{where}: {shortened(name)}"
            ):
                if found.rule.stacks or found.rule.parts:
                    number = found.part if found.rule.parts else int(found.numbers["j"])
                    stacks.setdefault(ours, {})[number] = made
                    names[ours] = name
                    joined[ours] = len(found.rule.parts)
                    continue
                if ours in state and not torch.equal(state[ours], made):
                    raise CheckpointError(
                        f"{where}: tensors {shortened(names[ours])} and {shortened(name)} must "
                        f"be the same ({ours}), but they differ"
                    )
                if ours not in state:
                    state[ours], names[ours] = made, name
        for ours, parts in stacks.items():
            state[ours] = _stacked(parts, joined[ours], f"{where}: {shortened(names[ours])}")
        return state, names

    def to_theirs(
        self, state: Mapping[str, Tensor], config: TransformerConfig
    ) -> dict[str, Tensor]:
        """The file's tensors: the inverse of ``to_ours``.

        Raises:
            ConfigError: The family has no place for a tensor.
        """
        written: dict[str, Tensor] = {}
        done: set[str] = set()
        for name in state:
            if name in done:
                continue
            found = self._find(name, self._by_ours)
            if found is None:
                raise ConfigError(f"tensor {shortened(name)} has no name in files of this family")
            rule = found.rule
            numbers = found.numbers
            if "{j}" not in rule.theirs:
                numbers = {letter: n for letter, n in numbers.items() if letter != "j"}
            at = At(config, name)
            names = rule.our_names(numbers, found.leaf, at.experts)
            missing = [each for each in names if each not in state]
            if missing:
                raise ConfigError(
                    f"tensor {shortened(missing[0])} is missing beside {shortened(name)}"
                )
            prefix = "" if rule in self.outside else self.prefix
            done.update(names)
            if rule.stacks:
                for j, part in enumerate(state[name]):
                    theirs = prefix + rule.theirs.format(**numbers, j=j) + found.leaf
                    written[theirs] = backward(rule.steps, [part], at)
                continue
            if rule.cut is not None:
                pieces = rule.cut.to_ours(state[name], at)
                for theirs, piece in zip(rule.their_names, pieces, strict=True):
                    theirs = prefix + theirs.format(**numbers) + found.leaf
                    written[theirs] = backward(rule.steps, [piece], at)
                continue
            theirs = prefix + rule.theirs.format(**numbers) + found.leaf
            written[theirs] = backward(rule.steps, [state[each] for each in names], at)
        kind = next(iter(state.values())).dtype
        for name, value in self.constants.items():
            if not isinstance(value, Tensor):
                dtype = torch.float32 if isinstance(value, Sequence) else kind
                value = torch.tensor(value, dtype=dtype, device="cpu")
            for i in range(len(config.layers)):
                written[self.prefix + name.format(i=i)] = value.clone()
        return written

    def is_dropped(self, name: str) -> bool:
        """Whether it can be dropped, because no output depends on it."""
        bare = name.removeprefix(self.prefix)
        return any(pattern.fullmatch(bare) for pattern in self._dropped)

    def modules_left_out(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of ``left_out`` of which the file has tensors."""
        bare = [name.removeprefix(self.prefix) for name in names]
        return tuple(
            module
            for module in self.left_out
            if any(name.startswith(f"{module}.") for name in bare)
        )

    def moves_rows(self, name: str, transposed: bool = False) -> bool:
        """Whether the steps only reorder rows, so that they also work on rows of packed bytes.

        Args:
            name: The file's.
            transposed: Whether its last two dimensions may change places too.
        """
        found = self._find(name.removeprefix(self.prefix), self._by_theirs)
        return found is not None and all(
            step.moves_rows or (transposed and isinstance(step, Transposed))
            for step in found.rule.steps
        )

    def our_name(self, name: str) -> str | None:
        """What polyhead calls the first tensor that one of the file becomes; None: nothing."""
        return next(iter(self.our_names(name)), None)

    def our_names(self, name: str) -> list[str]:
        """What polyhead calls the tensors that one of the file becomes; of experts the first."""
        found = self._find(name.removeprefix(self.prefix), self._by_theirs)
        return [] if found is None else found.rule.our_names(found.numbers, found.leaf, 1)

    def only_renames(self, name: str) -> bool:
        """Whether one of the file's tensors is one of polyhead's as it is."""
        found = self._find(name.removeprefix(self.prefix), self._by_theirs)
        if found is None:
            return False
        rule = found.rule
        return not (rule.steps or rule.parts or rule.stacks or len(rule.ours) > 1)

    def extended(self, *rules: Rule) -> Tensors:
        """With further rules, which come before those that are there."""
        return replace(self, rules=(*rules, *self.rules))

    def _respelt(self, found: Found) -> Found:
        """With polyhead's spelling of the leaf."""
        leaf = self.leaves.get(found.leaf.removeprefix("."))
        return found if leaf is None else replace(found, leaf="." + leaf)

    def _find(self, name: str, table: Mapping[str, list[_Pattern]]) -> Found | None:
        stem, dot, leaf = name.rpartition(".")
        for text, rest in ((name, ""), (stem, dot + leaf)):
            for pattern in table.get(_NUMBER.sub("#", text), ()):
                numbers = pattern.numbers(text)
                if numbers is not None:
                    return Found(pattern.rule, numbers, rest, pattern.part)
        return None

    @cached_property
    def _by_theirs(self) -> dict[str, list[_Pattern]]:
        rules = (*self.rules, *self.outside)
        return _table((rule, i, name) for rule in rules for i, name in enumerate(rule.their_names))

    @cached_property
    def _by_ours(self) -> dict[str, list[_Pattern]]:
        rules = (*self.rules, *self.outside)
        return _table((rule, i, name) for rule in rules for i, name in enumerate(rule.ours))

    @cached_property
    def _dropped(self) -> list[re.Pattern[str]]:
        modules = (rf"{re.escape(module)}\..+" for module in self.left_out)
        return [re.compile(pattern) for pattern in (*self.dropped, *modules)]


def _made(
    found: Found, tensor: Tensor, config: TransformerConfig, named: str
) -> Iterable[tuple[str, Tensor]]:
    """polyhead's tensors of one of the file's."""
    rule = found.rule
    at = At(config, rule.ours[0].format(**{"j": "0", **found.numbers}) + found.leaf)
    try:
        tensors = forward(rule.steps, tensor, at)
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{named} of shape {list(tensor.shape)} does not fit the configuration: {error}"
        ) from error
    count = len(rule.ours) * (at.experts if rule.cuts(found.numbers) else 1)
    if len(tensors) != count:
        raise CheckpointError(
            f"{named} of shape {list(tensor.shape)} holds {len(tensors)} parts where the "
            f"configuration has {count}"
        )
    return zip(rule.our_names(found.numbers, found.leaf, at.experts), tensors, strict=True)


def _stacked(parts: Mapping[int, Tensor], joined: int, named: str) -> Tensor:
    """Tensors with the numbers 0, 1, 2, ... as one; of ``joined`` many parts the rows."""
    missing = next((j for j in range(joined or len(parts)) if j not in parts), None)
    if missing is None and joined:
        return torch.cat([parts[j] for j in range(joined)])
    shapes = {tuple(part.shape) for part in parts.values()}
    if missing is not None or len(shapes) > 1:
        wrong = "of one shape" if missing is None else f"complete: number {missing} is missing"
        raise CheckpointError(f"{named} and the tensors numbered like it must be {wrong}")
    return torch.stack([parts[j] for j in range(len(parts))])


class _Pattern:
    """A name with ``{i}`` and ``{j}`` in it, matched against names with numbers."""

    def __init__(self, text: str, rule: Rule, part: int) -> None:
        self.rule, self.part = rule, part
        escaped = re.escape(text).replace(r"\{", "{").replace(r"\}", "}")
        self._regex = re.compile(_LETTER.sub(lambda m: f"(?P<{m[0][1]}>\\d+)", escaped))

    def numbers(self, name: str) -> dict[str, str] | None:
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()


def _table(rules: Iterable[tuple[Rule, int, str]]) -> dict[str, list[_Pattern]]:
    """Patterns by their name with every number as ``#``, so that few are tried."""
    table: dict[str, list[_Pattern]] = {}
    for rule, part, text in rules:
        key = _NUMBER.sub("#", _LETTER.sub("0", text))
        table.setdefault(key, []).append(_Pattern(text, rule, part))
    return table


def under(theirs: str, ours: str, modules: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules of plain renamings with a common beginning on either side."""
    return tuple(Rule(theirs + left, ours + right) for left, right in modules.items())
