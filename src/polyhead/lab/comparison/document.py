"""What a comparison found, as one JSON document; sentences and a table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.table import Table

from polyhead.lab.comparison.experiment import Experiment
from polyhead.lab.comparison.heads import IDLE
from polyhead.lab.comparison.statistics import MOST_PAIRS, paired
from polyhead.lab.comparison.variants import REFERENCE, Variant, decoder, parameters
from polyhead.planning.units import decimal

FEW_TOKENS = 1_000_000
"""In runs of fewer tokens the order of layouts differed from that in longer runs."""

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]


def document(
    experiment: Experiment,
    variants: Sequence[Variant],
    results: Results,
    speeds: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that is known, ready for JSON.

    Args:
        speeds: As ``measure.speeds`` gives them; None: not measured.
    """
    configs = {each.name: decoder(each, experiment.sizes) for each in variants}
    reference = parameters(configs[REFERENCE])
    rows = []
    for name, config in configs.items():
        found = results.get(name, {})
        network = config.layers[0].feed_forward
        row: dict[str, Any] = {
            "variant": name,
            "described": " and ".join(
                dict.fromkeys(layer.attention.described for layer in config.layers)
            ),
            "parameters": parameters(config),
            "parameters_more": parameters(config) - reference,
            "hidden_dim": 0 if network is None else network.widths()["hidden_dim"],
            "runs": len(found),
            "speed": None if speeds is None else speeds.get(name),
        }
        if found:
            row["loss"] = mean(run["loss"] for run in found.values())
            row["bits_per_byte"] = mean(run["bits_per_byte"] for run in found.values())
            worth = [run["heads"] for run in found.values() if "heads" in run]
            if worth:
                row["heads"] = {
                    "idle": mean(each["idle"] for each in worth),
                    "halved": mean(each["halved"] or 0.0 for each in worth),
                    "one_head": worth[0]["halved"] is None,
                }
        if name != REFERENCE:
            row["difference"] = _difference(found, results.get(REFERENCE, {}), experiment)
        row["course"] = _course(found, results.get(REFERENCE, {}))
        rows.append(row)
    made = {**experiment.to_dict(), "variants": rows}
    return made | {"warnings": _warnings(made)}


def _difference(
    found: Mapping[int, Any], reference: Mapping[int, Any], experiment: Experiment
) -> dict[str, Any] | None:
    """The paired difference to MHA; None below two pairs."""
    seeds = sorted(set(found) & set(reference))
    if len(seeds) < 2:
        return None
    said = paired([found[s]["loss"] for s in seeds], [reference[s]["loss"] for s in seeds])
    needed = None if said.needed is None else 2 * said.needed * experiment.schedule.tokens
    return asdict(said) | {
        "low": said.mean - said.half_width,
        "high": said.mean + said.half_width,
        "distinguishable": said.distinguishable,
        "needed_tokens": needed,
    }


def _course(found: Mapping[int, Any], reference: Mapping[int, Any]) -> list[tuple[int, float]]:
    """Tokens read, and the mean difference to MHA there."""
    seeds = sorted(set(found) & set(reference))
    if not seeds:
        return []
    marks = [tokens for tokens, _ in found[seeds[0]]["curve"]]
    return [
        (tokens, mean(found[s]["curve"][i][1] - reference[s]["curve"][i][1] for s in seeds))
        for i, tokens in enumerate(marks)
    ]


def _warnings(made: Mapping[str, Any]) -> list[str]:
    found = []
    tokens = made["schedule"]["tokens"]
    if tokens < FEW_TOKENS:
        found.append(
            f"each run read {tokens:,} tokens: below {FEW_TOKENS:,}, short runs invert the order "
            "of layouts (MLA was best at 200,000 and worst at 1,000,000)"
        )
    fewest = min(row["runs"] for row in made["variants"])
    if fewest < 2:
        found.append("a variant has fewer than two runs: no interval without two pairs")
    return found


def verdict(row: Mapping[str, Any], tokens: int) -> str:
    """The difference of one variant to MHA in words."""
    said = row["difference"]
    if said is None:
        return f"{row['variant']}: no interval yet, finished runs: {row['runs']}"
    numbers = f"{said['mean']:+.4f} ± {said['half_width']:.4f} nats a token"
    pairs = f"95 %, {said['pairs']} pairs"
    if said["distinguishable"]:
        word = "worse" if said["mean"] > 0 else "better"
        return f"{row['variant']}: {numbers} ({pairs}): {word} than {REFERENCE}"
    if said["needed"] is None:
        needed = f"more than {MOST_PAIRS:,} seeds"
    else:
        needed = (
            f"{said['needed']} seeds of {tokens:,} tokens "
            f"({decimal(said['needed_tokens'])} tokens for both)"
        )
    return (
        f"{row['variant']}: {numbers} ({pairs}): not distinguishable from {REFERENCE}; to tell a "
        f"difference of this size from none takes {needed}, or longer runs that make it larger"
    )


def sentences(made: Mapping[str, Any]) -> list[str]:
    """The setting and the findings in sentences, without the table."""
    sizes, schedule, text = made["sizes"], made["schedule"], made["text"]
    most = max(abs(row["parameters_more"]) for row in made["variants"])
    total = made["variants"][0]["parameters"]
    said = [
        f"Text: {text['said']} (sha256 {text['sha256'][:12]}); tokens: byte-level BPE of "
        f"{text['vocab_size']:,}, trained on the training part.",
        f"Decoder: {sizes['layers']} layers, {sizes['embed_dim']} features, {sizes['heads']} query "
        f"heads, {total:,} parameters; after widening the others differ by at most {most:,} "
        f"({100 * most / total:.2f} %).",
        f"Each run: {schedule['tokens']:,} tokens, {schedule['batch']} × {schedule['context']} a "
        f"step, learning rate {schedule['rate']:g} for all, {schedule['dtype']}.",
    ]
    said += [
        verdict(row, schedule["tokens"]) for row in made["variants"] if row["variant"] != REFERENCE
    ]
    if any(row["course"] for row in made["variants"]):
        said.append(
            "… at: the mean difference to mha after so many tokens of the same runs, before their "
            "learning rate has come down."
        )
    if any("heads" in row for row in made["variants"]):
        said.append(
            f"Idle heads: the fraction whose ablation costs less than {IDLE:g} nats a token. Half "
            "pruned: nats a token that the loss rises without the lesser half of each layer's "
            "heads."
        )
    if any(row["speed"] for row in made["variants"]):
        said.append(
            "Training, prefill and decode are in tokens a second; cache is float32 bytes a token "
            "of the context, as allocated and as planned; step MiB is the most that a training "
            "step takes beside weights and the optimizer's state."
        )
    return said


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A variant's line of the table, by heading; "–": not known."""
    said, speed = row.get("difference"), row["speed"]
    made = {
        "variant": row["variant"],
        "parameters": f"{row['parameters']:,}",
        "runs": str(row["runs"]),
        "loss": f"{row['loss']:.4f}" if row["runs"] else "–",
        "less mha": f"{said['mean']:+.4f} ± {said['half_width']:.4f}" if said else "–",
    }
    for tokens, less in row["course"][:-1]:
        own = row["variant"] == REFERENCE
        made[f"… at {tokens // 1000:,}k"] = "–" if own else f"{less:+.4f}"
    if worth := row.get("heads"):
        made["idle heads"] = f"{worth['idle']:.0%}"
        made["half pruned"] = "–" if worth["one_head"] else f"{worth['halved']:+.3f}"
    if speed is None:
        return made
    made["training"] = f"{speed['train']:,.0f}"
    for name in ("prefill", "decode"):
        for length, rate in speed[name].items():
            made[f"{name} {_short(length)}"] = f"{rate:,.0f}"
    for length, held in speed["cache"].items():
        made[f"cache {_short(length)}"] = f"{held / int(length):,.0f}"
    step = speed["step_bytes"]
    made["step MiB"] = "–" if step is None else f"{step / 2**20:,.0f}"
    return made


def _short(length: str) -> str:
    """A length in headings: 8k for 8,192."""
    count = int(length)
    return length if count % 1024 else f"{count // 1024}k"


def tables(made: Mapping[str, Any]) -> list[Table]:
    """A table of losses, and one of costs if they were measured."""
    rows = [cells(row) for row in made["variants"]]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cut = headings.index("training") if "training" in headings else len(headings)
    parts = [headings[:cut], [headings[0], *headings[cut:]]]
    found = []
    for part in parts:
        if len(part) < 2:
            continue
        table = Table(box=None, pad_edge=False)
        for heading in part:
            table.add_column(heading, justify="left" if heading == "variant" else "right")
        for row in rows:
            table.add_row(*(row.get(heading, "–") for heading in part))
        found.append(table)
    return found
