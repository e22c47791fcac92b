"""The rotary settings of config.json, read in both of their spellings and written in one.

transformers up to 4 writes ``rope_theta`` and ``rope_scaling`` at the top; 5 and later writes all
of it into ``rope_parameters``. Half-applied rotary settings are the commonest way for a model to
load cleanly and be wrong past its trained length, so a key that is not applied is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from polyhead.config import RopeConfig
from polyhead.errors import ConfigError, shortened
from polyhead.families.common.keys import Keys

# Keys of the file that are fields of RopeConfig, under which name.
ROPE_FIELDS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}

PROPORTIONAL = "proportional"
_KNOWS_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


def read_rope(
    keys: Keys,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10_000.0,
    partial_rotary_factor: float | None = None,
    states_trained: bool = False,
    alpha: bool = False,
    mscales: bool = False,
    interleaved_sections: bool | None = None,
    filled_in: bool = False,
    read_elsewhere: Collection[str] = (),
    unstated: RopeConfig | None = None,
) -> RopeConfig:
    """The rotary embedding that a config.json means.

    Args:
        keys: the whole file; ``rope_parameters``, ``rope_scaling``, ``rope_theta``,
            ``partial_rotary_factor`` and ``original_max_position_embeddings`` are taken from it.
        head_dim: features of a head, of which ``partial_rotary_factor`` rotates a part.
        max_positions: max_position_embeddings, the trained length where no other is given.
        theta: the family's base where the file gives none.
        partial_rotary_factor: the family's own, where the file gives none; None: the family
            rotates whole heads and has no such key.
        states_trained: the family writes original_max_position_embeddings whatever the type, at the
            top or among the rope parameters, and types that do not read it leave it out.
        alpha: with the type "dynamic" the family has a number that stretches the base for good,
            whatever the length, and reads no other field then.
        mscales: with the type "longrope" the family has factors of its own for cos and sin, one in
            short and one in long sequences, which have to be the same.
        interleaved_sections: how the family's code takes sections of coordinates (M-RoPE), whether
            or not the file says so; None: as the file says.
        filled_in: transformers writes the family's own rope_theta at the top whatever
            rope_parameters says, and reads no rope_scaling.
        read_elsewhere: keys among the rope parameters that the family's reader takes itself.
        unstated: the family's own embedding where the file has none of these objects.

    Raises:
        ConfigError: a key is not understood, contradicts another, or is not read by the type.
    """
    if filled_in:
        keys.expect("rope_scaling", None)
    if unstated is not None and not states_rope(keys):
        return unstated
    name, values = _either(keys, "rope_parameters", "rope_scaling")
    if values.get("rope_type") == PROPORTIONAL and partial_rotary_factor is None:
        partial_rotary_factor = 1.0
    inner = Keys(
        {key: value for key, value in values.items() if value is not None},
        f"{keys.where}: {keys.named(name)}",
    )
    theta = _once(keys, inner, "rope_theta", theta, filled_in=filled_in)
    part, usual = 1.0, 1.0 if partial_rotary_factor is None else partial_rotary_factor
    if "partial_rotary_factor" not in read_elsewhere:
        part = _once(keys, inner, "partial_rotary_factor", usual)
    if partial_rotary_factor is None and part != 1.0:
        raise keys.refused("partial_rotary_factor", part, "1: this family rotates whole heads")
    stated_type = inner.take("rope_type", None)
    legacy_type = inner.take("type", stated_type)
    if (
        stated_type is not None
        and stated_type != legacy_type
        and (stated_type, legacy_type) != ("default", "mrope")
    ):
        raise inner.refused("type", legacy_type, f"the same as rope_type, {shortened(stated_type)}")
    rope_type: Any = "default" if legacy_type is None else legacy_type
    if rope_type == "mrope":  # so before transformers 4.46
        rope_type = "default"

    fields = {
        ours: _value(inner, theirs) for theirs, ours in ROPE_FIELDS.items() if inner.has(theirs)
    }
    stretch = inner.number("alpha", None) if alpha and rope_type == "dynamic" else None
    if mscales and rope_type == "longrope" and inner.has("short_mscale"):
        fields["attention_factor"] = inner.number("short_mscale")
        inner.expect("long_mscale", fields["attention_factor"])
    for key in read_elsewhere:
        inner.take(key, None)
    sections = _read_sections(inner, interleaved_sections)
    inner.finish()
    if stretch:
        if stretch < 0 or head_dim < 3:
            raise inner.refused(
                "alpha", stretch, "a number from 0, and heads of 3 features or more"
            )
        rope_type, fields = "default", {}
        theta *= stretch ** (head_dim / (head_dim - 2))
    fields |= sections
    if states_trained and rope_type not in _KNOWS_TRAINED_LENGTH:
        fields.pop("original_max_positions", None)
    trained = keys.whole("original_max_position_embeddings", None)
    if trained is not None and (rope_type in _KNOWS_TRAINED_LENGTH or not states_trained):
        fields["original_max_positions"] = trained
    if rope_type in _KNOWS_TRAINED_LENGTH:
        fields.setdefault("original_max_positions", max_positions)
    elif rope_type == "dynamic":
        if "original_max_positions" in fields:
            raise ConfigError(
                f"{keys.where}: rope type 'dynamic' starts from max_position_embeddings and does "
                f"not read original_max_position_embeddings: got {fields['original_max_positions']}"
            )
        fields["original_max_positions"] = max_positions
    trained = fields.get("original_max_positions")
    if trained is not None and trained < 1:
        raise inner.refused("original_max_position_embeddings", trained, "a whole number from 1")
    if rope_type == "yarn" or (rope_type == "longrope" and "attention_factor" not in fields):
        fields.setdefault("factor", max_positions / fields["original_max_positions"])
    if rope_type == PROPORTIONAL:
        return RopeConfig(theta, rope_type, rotated=int(part * head_dim // 2) * 2, **fields)
    rotated = int(head_dim * part)
    return RopeConfig(theta, rope_type, dim=None if rotated == head_dim else rotated, **fields)


def states_rope(keys: Keys) -> bool:
    """Whether a file says more of its rotary embedding than the base."""
    new, old = keys.take("rope_parameters", None), keys.take("rope_scaling", None)
    return new is not None or bool(old)


def read_ropes(
    keys: Keys, head_dim: int, max_positions: int, thetas: Mapping[str, float | None], **how: Any
) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer, where ``rope_parameters`` has one for each.

    Args:
        keys: the whole file.
        head_dim: features of a head.
        max_positions: max_position_embeddings.
        thetas: by kind of layer, the family's base where the file gives none; None: the file has
            to, and a kind that it gives nothing for is left out.
        **how: as for ``read_rope``.

    Raises:
        ConfigError: another key than these kinds, or what ``read_rope`` refuses.
    """
    values = keys.take("rope_parameters")
    if not isinstance(values, Mapping) or values.keys() - thetas.keys():
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(thetas)}")
    ropes: dict[str, RopeConfig] = {}
    for kind, theta in thetas.items():
        inner, where = values.get(kind), f"{keys.where}: rope_parameters.{kind}"
        if inner is None and theta is None:
            continue
        if not isinstance(inner or {}, Mapping):
            raise keys.refused(f"rope_parameters.{kind}", inner, "an object")
        stated = Keys(inner or {}, where).number("rope_theta") if theta is None else theta
        one = Keys({"rope_parameters": inner}, where)
        ropes[kind] = read_rope(one, head_dim, max_positions, theta=stated, **how)
    return ropes


def write_ropes(
    ropes: Mapping[str, RopeConfig | None], head_dim: int | Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The inverse of ``read_ropes``; null for layers that do not rotate.

    Args:
        ropes: By kind of layer.
        head_dim: Of a family that says which part of a head is rotated; by kind where they differ.
    """
    written: dict[str, Any] = dict.fromkeys(ropes)
    for kind, rope in ropes.items():
        if rope is not None:
            size = head_dim[kind] if isinstance(head_dim, Mapping) else head_dim
            turned = rope.rotated if rope.type == PROPORTIONAL else rope.dim
            part = (
                {}
                if size is None
                else {"partial_rotary_factor": (size if turned is None else turned) / size}
            )
            scaling = write_scaling(rope)
            written[kind] = {"rope_type": rope.type, "rope_theta": rope.theta, **part, **scaling}
    return {"rope_parameters": written}


def write_plain_rope(rope: RopeConfig | None) -> dict[str, Any]:
    """For families where to say nothing is to say a scaled type."""
    plain = rope is not None and rope.type == "default"
    return {"rope_scaling": {"rope_type": "default"}} if plain else {}


def read_ropes_of_kinds(
    keys: Keys,
    head_dim: int,
    max_positions: int,
    defaults: Mapping[str, Mapping[str, Any] | None],
    partial_rotary_factor: float = 1.0,
) -> dict[str, RopeConfig | None]:
    """As ``read_ropes``, where an absent object says something.

    Args:
        keys: The whole file.
        head_dim: Features of a head.
        max_positions: max_position_embeddings.
        defaults: By kind of layer, what an absent object says; None: nothing is rotated.
        partial_rotary_factor: Where an object of the type "default" has none.

    Raises:
        ConfigError: As ``read_ropes``.
    """
    values = keys.take("rope_parameters", None) or {}
    if not isinstance(values, Mapping) or values.keys() - defaults.keys():
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(defaults)}")
    found: dict[str, RopeConfig | None] = dict.fromkeys(defaults)
    for kind, default in defaults.items():
        inner = values.get(kind, default)
        plain = isinstance(inner, Mapping) and inner.get("rope_type", "default") == "default"
        found |= read_ropes(
            Keys({"rope_parameters": {kind: inner}}, keys.where),
            head_dim,
            max_positions,
            {kind: None if inner is None else 1e4},
            partial_rotary_factor=partial_rotary_factor if plain else 1.0,
        )
    return found


def reach(rope: RopeConfig, stated: int) -> int:
    """How many positions a model reads: files state the trained length, scaling stretches it."""
    if rope.type in ("linear", "dynamic"):
        return round(stated * (rope.factor or 1.0))
    if rope.type == "yarn":
        return max(stated, round((rope.original_max_positions or 0) * (rope.factor or 1.0)))
    return stated


def _value(keys: Keys, key: str) -> Any:
    if key == "truncate":
        return keys.flag(key)
    if key == "original_max_position_embeddings":
        return keys.whole(key)
    if key not in ("short_factor", "long_factor"):
        return keys.number(key)
    values = keys.take(key)
    if not isinstance(values, list) or not all(type(entry) in (int, float) for entry in values):
        raise keys.refused(key, values, "a list of numbers")
    return tuple(float(entry) for entry in values)


def _read_sections(keys: Keys, interleaved: bool | None) -> dict[str, Any]:
    """``mrope_section``: how many frequencies each coordinate has, and whether they take turns."""
    stated = keys.flag("mrope_interleaved", bool(interleaved))
    if interleaved is not None and stated != interleaved:
        raise keys.refused("mrope_interleaved", stated, f"{interleaved}, as this family rotates")
    counts = keys.take("mrope_section", [])
    whole = isinstance(counts, list) and all(type(each) is int and each >= 0 for each in counts)
    if not whole or len(counts) not in (0, 3):
        raise keys.refused("mrope_section", counts, "three whole numbers from 0")
    return {"sections": tuple(counts), "interleaved_sections": stated} if counts else {}


def _either(keys: Keys, new: str, old: str) -> tuple[str, Mapping[str, Any]]:
    """The one of two keys that is there, and its name; both only if they agree."""
    first, second = keys.take(new, None), keys.take(old, None)
    if first and second and first != second:
        raise keys.refused(old, second, f"only one of {new} and {old}, or both the same")
    name, values = (old, second or {}) if not first else (new, first)
    if not isinstance(values, Mapping):
        raise keys.refused(name, values, "an object")
    return name, values


def _once(outer: Keys, inner: Keys, key: str, default: float, *, filled_in: bool = False) -> float:
    """A number that may stand at the top or among the rope parameters."""
    at_top = outer.number(key, None) if outer.has(key) else None
    inside = inner.number(key, None)
    if filled_in and at_top == default:
        at_top = None
    if at_top is not None and inside is not None and at_top != inside:
        raise inner.refused(key, inside, f"the same as at the top of the file, {at_top}")
    return next((value for value in (inside, at_top) if value is not None), default)


def write_rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """In the older spelling, which every version of transformers reads."""
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim is not None:
        values["partial_rotary_factor"] = rope.dim / head_dim
    if scaling := write_scaling(rope):
        values["rope_scaling"] = {"rope_type": rope.type} | scaling
    return values


def write_parameters(rope: RopeConfig) -> dict[str, Any]:
    """In the newer spelling alone, of a rotation of whole heads."""
    parameters = {"rope_type": rope.type, "rope_theta": rope.theta, **write_scaling(rope)}
    return {"rope_theta": rope.theta, "rope_scaling": None, "rope_parameters": parameters}


def write_scaling(rope: RopeConfig) -> dict[str, Any]:
    """The numbers of the scaling type, and sections of coordinates."""
    fields = {theirs: getattr(rope, ours) for theirs, ours in ROPE_FIELDS.items()}
    if rope.type == "dynamic":  # starts from max_position_embeddings
        del fields["original_max_position_embeddings"]
    if rope.truncate:
        del fields["truncate"]
    if rope.sections is not None:
        fields["mrope_section"] = [*rope.sections]
        fields["mrope_interleaved"] = rope.interleaved_sections or None
    return {key: value for key, value in fields.items() if value is not None}


def stated_length(rope: RopeConfig, max_positions: int) -> int:
    """max_position_embeddings: the inverse of ``reach``."""
    if rope.type in ("linear", "dynamic"):
        return round(max_positions / (rope.factor or 1.0))
    return max_positions
