"""Synthetic report data with every field filled and every value known."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.sentence_recording import SentenceRecorder
from headwise.spec import Address
from headwise.ui.claims_page_data import REPORT_VERSION
from headwise.ui.glossary import GLOSSARY
from headwise.ui.role_badges import role_badge
from headwise.ui.sentence_page_data import pack_maps

ROLES = ("induction", "previous token", "delimiter", "subject-verb", "unclear")
EVIDENCE_LEVELS = ("causal", "value-weighted", "attention", "value-weighted", "none")
TEXT = [
    "the",
    "old",
    "painter",
    "told",
    "us",
    "about",
    "a",
    "<b>ship</b>",
    "that",
    "never",
    "&",
    "ever",
    "left",
    "the",
    "harbour",
]


def make_report_data(
    layers: int, heads: int, sentences: list[dict[str, Any]] | None = None, name: str = "made"
) -> dict[str, Any]:
    """Return report data in which head h of layer l has the score (l + h/100) / (layers + 1)."""
    addresses = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
    return {
        "version": REPORT_VERSION,
        "model": {
            "name": name, "kind": "decoder", "width": 64 * heads, "heads": len(addresses), "parameters": 123_400_000,
            "layers": [{"address": str(x), "heads": [f"{x}.{h}" for h in range(heads)]} for x in range(layers)],
        },
        "metadata": {
            "texts": 640, "tokens": 10_240, "documents": 600, "family_size": 5_395,
            "skipped": {"successor": "too <b>weak</b>."},
        },
        "glossary": {name: list(entry) for name, entry in GLOSSARY.items()},
        "role_badges": {role: [*role_badge(role), f"means {role}"] for role in (*ROLES[:-1], "possessive")},
        "heads": [make_head(address, addresses, layers) for address in addresses],
        "relations": {"heads": addresses, "rows": [_relation(name, addresses) for name in ("subject-verb", "bracket")]},
        "importance": {"ranking": "ablation", "ablation": "mean", "metric": "loss", "texts": 64, "clean": 3.2},
        "history": {"steps": list(range(0, 500, 50)), "metrics": ["induction", "entropy"]},
        "curves": [
            {
                "title": "Pruning", "x": "share of heads kept", "y": "loss", "base": 3.2,
                "series": [_series("ablation", 0.05), _series("random", 0.2)],
            }
        ],
        "plan": {
            "has_plan": True, "description": ["3 of 12 key heads keep less, chosen by output.", "  <b>on</b> a text"],
            "weights": [538_000_000, 151_000_000], "cache": [188_700_000, 97_400_000], "full_cache": 188_700_000,
            "tokens": 4096,
            "score_description": "how far what its heads write moves, against the stream", "metric": "nats per token",
            "texts": 8,
            "basis": "balanced",
        },
        "claims": make_claims(),
        "sentences": sentences or [],
    }  # fmt: skip


def make_claims() -> list[dict[str, Any]]:
    """Return five claims, one per verdict: lines on a log axis, bars with a negative value, bars far from zero."""
    heads = [_statistic("loss", 2**k, [2.5 - k / 8, 2.75 - k / 8, 2.625 - k / 8]) for k in range(7)]
    roles = [_statistic("gain", position, [value]) for position, value in (("induction", 0.5), ("<i>copy</i>", -0.25))]
    scales = [
        _statistic("loss", position, values)
        for position, values in (("usual", [2.25, 2.3, 2.275]), ("none", [2.4, 2.5, 2.45]))
    ]
    points = [[row["condition"], row["mean"], row["low"], row["high"]] for row in heads]
    cases = [
        ("more-heads", "depends", "on the width: <b>64</b> alone", heads,
         {"x": "heads", "y": "held-out loss", "log": True, "series": [{"name": "loss", "points": points}]}),
        ("roles", "holds", "", roles, _bars("loss gained", roles)),
        ("scale", "does not hold", "", scales, _bars("held-out loss", scales)),
        ("noise", "undecided", "the interval includes 0", roles, _bars("gain", roles)),
        ("sums", "true by construction", "for heads of their own", roles, _bars("share", roles)),
    ]  # fmt: skip
    return [
        {
            "number": number, "name": name, "statement": f"What {name} <u>says</u> of heads.",
            "counterevidence": "A count that moves.",
            "setup": "Models of one width.", "rule": "Holds if it falls.", "verdict": verdict, "depends_on": depends_on,
            "preliminary": len(rows[0]["values"]) < 3, "seeds": list(range(len(rows[0]["values"]))), "model": "",
            "identity": "a sum is a sum" if name == "sums" else "", "exploratory": True,
            "statistics": rows, "plot": plot, "command": f"headwise claims {name}", "interval_note": "95 %",
        }
        for number, (name, verdict, depends_on, rows, plot) in enumerate(cases, 1)
    ]  # fmt: skip


def make_cost(layer: int, head: int) -> dict[str, Any]:
    """Pairs of heads share keys; head 0 of each layer is pruned, 2 and 3 stream, layer 1 has 4-bit and 3-bit weights."""
    is_pruned, is_streaming = head == 0, head in (2, 3)
    cost = {
        "bits": 4,
        "loss_increase": 0.001 * (head // 2) - 0.0005,
        "low": -0.002,
        "high": 0.012,
        "kl_divergence": 0.002 * (head // 2),
    }
    costs = [{"part": part, **cost} for part in ("qk", "vo")]
    return {
        "pruned": is_pruned, "bits": None if is_pruned else {"qk": 4, "vo": 3} if layer == 1 else {"qk": 32, "vo": 32},
        "kv_siblings": [f"{layer}.{head ^ 1}"], "costs": costs,
        "cache": {
            "kv_head": f"{layer}.{head // 2}", "policy": "streaming 4 + 128" if is_streaming else "everything",
            "reduced": is_streaming,
            "streaming": is_streaming, "bits": 32, "bytes": 67_584 if is_streaming else 2_097_152, "full_bytes": 2_097_152,
            "score": 0.0123456 * (head // 2),
        },
    }  # fmt: skip


def make_head(address: str, addresses: list[str], layers: int) -> dict[str, Any]:
    """Return the record of one head."""
    layer, head = map(int, address.split("."))
    kind = (layer + head) % len(ROLES)
    score = None if ROLES[kind] == "unclear" else (layer + head / 100) / (layers + 1)
    evidence = {
        "role": ROLES[kind], "detail": ">", "corpus_label": "the probe set", "evidence_level": EVIDENCE_LEVELS[kind],
        "score": score or 0.25,
        "baseline": 0.0625, "interval": [0.21875, 0.71875], "p": 0.0004997501249375312, "rows": 314, "coverage": 0.875,
        "probe": "repeats", "effect": 0.123456789, "cost": 0.23456789, "cost_threshold": 0.0123456789,
        "control_cost": 0.03456789,
    }  # fmt: skip
    context = {
        "token": "ship", "attended": "painter", "weight": 0.8079661130905151, "sample": 429,
        "segments": [
            ["", "the old"], ["attended", " painter "], ["", " ".join(TEXT[3:7])], ["token", " <b>ship</b> "], ["", "left"],
        ],
    }  # fmt: skip
    example = {
        "hit": True, "weight": 0.7079661130905151, "attended": "painter", "max_weight": 0.8,
        "segments": [
            ["", "the old "], ["attended", "painter"], ["", " sees the "], ["meant", "<i>sea</i>"], ["", " "],
            ["token", "ship"],
        ],
    }  # fmt: skip
    names = ["entropy", "confidence", "distance", "first", "output share", *(f"metric number {i}" for i in range(15))]
    index = addresses.index(address)
    return {
        "address": address, "layer": str(layer), "head": head, "role": ROLES[kind], "detail": "",
        "evidence_level": EVIDENCE_LEVELS[kind],
        "score": score, "baseline": None if score is None else 0.0625,
        "interval": None if score is None else [0.21875, 0.71875],
        "effect": 0.123456789 if EVIDENCE_LEVELS[kind] == "causal" else None, "idle_patterns": ["sink"] if head % 2 else [],
        "evidence": [evidence, {**evidence, "role": "possessive", "family_size": 1_617}, *[evidence] * 3],
        "metrics": {name: round(0.123456 + i + index / 4096, 6) for i, name in enumerate(names)},
        "offsets": [[offset, round(0.5 / (offset + 1), 6)] for offset in range(31, -1, -1)],
        "roles": [] if score is None else [ROLES[kind], "possessive"],
        "corpus_label": "" if score is None else "the probe set",
        "examples": [] if score is None else [
            {"role": role, "detail": ">", "corpus_label": "the probe set",
             "examples": [{**example, "hit": i != 3} for i in range(4)]}
            for role in (ROLES[kind], "possessive")
        ],
        "summary": [["role", f"Head {address} tells a <b>story</b>."], ["idle pattern", "It rests on the first token."]],
        "top_contexts": [context] * 5,
        "ov": {
            "copying": 0.345678901, "random_std": 0.0234,
            "effect": {"mean": 0.6615085, "low": 0.474489, "high": 0.847086, "queries": 27, "share": 0.007, "texts": 22},
            "token_effects": [
                {"token": " ship", "promotes": [[" harbour", 12.345678]] * 6, "suppresses": [[" paint", -9.87654321]] * 6}
            ] * 3,
        },
        "cost": make_cost(layer, head),
        "similar_heads": [[addresses[(index + i) % len(addresses)], 0.0123456 * i] for i in range(1, 6)],
        "importance": {
            "head": address, "importance": index / 1024, "low": 0.001, "high": 0.9,
            "above_layer": 0.01, "above_low": -0.01, "above_high": 0.02,
        },
        "history": [[round(0.01 * step, 4) for step in range(10)] for _ in range(2)],
    }  # fmt: skip


def make_maps(layers: int, heads: int, tokens: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield peaked random maps (h, T, S), value norms (h, S) and output shares (h, T) of a decoder, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    for _ in range(layers):
        scores = 3 * torch.randn(heads, tokens, tokens, generator=generator)
        lengths = 0.1 + torch.rand(heads, tokens, generator=generator)
        fractions = torch.softmax(torch.randn(heads, tokens, generator=generator), 0)
        yield torch.softmax(scores.masked_fill(future, -torch.inf), -1), lengths, fractions


def make_sentence(layers: int, heads: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Pack the maps like those of real sentences."""
    addresses = tuple(Address.parse(f"{layer}.{head}") for layer in range(layers) for head in range(heads))
    recorder = SentenceRecorder(addresses, tokens)
    for layer, tensors in enumerate(make_maps(layers, heads, tokens, seed)):
        recorder.add_layer(list(addresses[layer * heads : (layer + 1) * heads]), *tensors)
    words = [TEXT[i % len(TEXT)] for i in range(tokens)]
    return {
        "text": " ".join(words), "truncated_from": None, "tokens": words, "special": [False] * tokens, "words": words,
        "word_of": list(range(tokens)), "heads": list(map(str, addresses)), **pack_maps(recorder),
        "next": {
            "likely": [[" harbour", 0.25], [" <i>sea</i>", 0.125]], "logit": 3.0,
            "shares": {str(a): (i % 7 - 3) / 8 for i, a in enumerate(addresses)},
            "other_parts": {"embedding": 0.5, "MLPs": 1.0, "biases": 0.0},
        },
    }  # fmt: skip


def round_six_digits(report_data: dict[str, Any]) -> dict[str, Any]:
    """Read the report data from a report file."""
    return json.loads(json.dumps(report_data), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def _series(name: str, slope: float) -> dict[str, Any]:
    return {
        "name": name,
        "points": [[k / 10, 3.2 + (10 - k) * slope, 3.1, 3.3 + (10 - k) * slope] for k in range(1, 10)],
    }


def _statistic(name: str, position: str | int, values: list[float]) -> dict[str, Any]:
    mean, has_interval = sum(values) / len(values), len(values) > 1
    return {
        "name": name, "condition": position, "mean": mean, "low": mean - 0.0625 if has_interval else None,
        "high": mean + 0.0625 if has_interval else None,
        "values": values,
    }  # fmt: skip


def _bars(y: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    bar_rows = [[row["condition"], row["mean"], row["low"], row["high"]] for row in rows]
    return {"x": "", "y": y, "bars": [{"name": rows[0]["name"], "rows": bar_rows}]}


def _relation(name: str, addresses: list[str]) -> dict[str, Any]:
    scores = [0.71875 * (i + 1) / len(addresses) for i in range(len(addresses))]
    return {
        "relation": name, "direction": ">", "arcs": 40, "head": addresses[-1], "accuracy": 0.71875, "low": 0.5, "high": 0.875,
        "offset": -2, "offset_accuracy": 0.125, "excess": 0.25, "p": 0.001, "scores": scores,
    }  # fmt: skip
