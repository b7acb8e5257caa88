"""Books made by hand: every field filled as full as a real profile fills it, every value known beforehand."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.spec import Address
from headwise.ui.glossary import WORDS
from headwise.ui.role_badges import sign
from headwise.ui.sentence_view import Sights

ROLES = ("induction", "previous token", "delimiter", "subject-verb", "unclear")
RUNGS = ("causal", "effective", "selective", "effective", "unclear")
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


def make_book(
    layers: int, heads: int, sentences: list[dict[str, Any]] | None = None, name: str = "made"
) -> dict[str, Any]:
    """So many layers of so many heads; head h of layer l has score (l + h/100) / (layers + 1)."""
    addresses = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
    return {
        "version": 1,
        "model": {
            "name": name, "kind": "decoder", "width": 64 * heads, "heads": len(addresses), "parameters": 123_400_000,
            "layers": [{"address": str(x), "heads": [f"{x}.{h}" for h in range(heads)]} for x in range(layers)],
        },
        "about": {
            "texts": 640, "tokens": 10_240, "documents": 600, "family": 5_395, "unasked": {"successor": "too <b>weak</b>."},
        },
        "words": {name: list(word) for name, word in WORDS.items()},
        "signs": {role: [*sign(role), f"means {role}"] for role in (*ROLES[:-1], "possessive")},
        "heads": [make_head(address, addresses, layers) for address in addresses],
        "relations": {"heads": addresses, "rows": [_relation(name, addresses) for name in ("subject-verb", "bracket")]},
        "importance": {"by": "ablation", "how": "mean", "metric": "loss", "texts": 64, "clean": 3.2},
        "history": {"steps": list(range(0, 500, 50)), "measures": ["induction", "entropy"]},
        "curves": [
            {
                "title": "Pruning", "x": "share of heads kept", "y": "loss", "base": 3.2,
                "series": [_series("ablation", 0.05), _series("random", 0.2)],
            }
        ],
        "plan": {
            "given": True, "told": ["3 of 12 key heads keep less, chosen by writes.", "  <b>on</b> a text"],
            "weights": [538_000_000, 151_000_000], "cache": [188_700_000, 97_400_000], "whole": 188_700_000, "length": 4096,
            "score": "how far what its heads write moves, against the stream", "metric": "nats a token", "texts": 8,
            "basis": "balanced",
        },
        "claims": make_claims(),
        "sentences": sentences or [],
    }  # fmt: skip


def make_claims() -> list[dict[str, Any]]:
    """Four claims, one of each verdict: lines on an axis of doublings, bars with a negative one, bars far from zero."""
    heads = [_figure("loss", 2**k, [2.5 - k / 8, 2.75 - k / 8, 2.625 - k / 8]) for k in range(7)]
    roles = [_figure("gain", at, [value]) for at, value in (("induction", 0.5), ("<i>copy</i>", -0.25))]
    scales = [_figure("loss", at, values) for at, values in (("usual", [2.25, 2.3, 2.275]), ("none", [2.4, 2.5, 2.45]))]
    points = [[row["at"], row["mean"], row["low"], row["high"]] for row in heads]
    made = [
        ("more-heads", "depends", "on the width: <b>64</b> alone", heads,
         {"x": "heads", "y": "held-out loss", "log": True, "series": [{"name": "loss", "points": points}]}),
        ("roles", "holds", "", roles, _bars("loss gained", roles)),
        ("scale", "does not hold", "", scales, _bars("held-out loss", scales)),
        ("sums", "true by construction", "for heads of their own", roles, _bars("share", roles)),
    ]  # fmt: skip
    return [
        {
            "number": place, "name": name, "says": f"What {name} <u>says</u> of heads.", "against": "A count that moves.",
            "setup": "Models of one width.", "rule": "Holds if it falls.", "verdict": verdict, "depends_on": on,
            "indicative": len(rows[0]["values"]) < 3, "seeds": list(range(len(rows[0]["values"]))), "on": "",
            "identity": "a sum is a sum" if name == "sums" else "", "seen": True,
            "figures": rows, "picture": picture, "again": f"headwise claims {name}", "ends": "95 %",
        }
        for place, (name, verdict, on, rows, picture) in enumerate(made, 1)
    ]  # fmt: skip


def make_price(layer: int, head: int) -> dict[str, Any]:
    """Heads share keys two by two; head 0 of a layer is cut, 2 and 3 stream, weights of layer 1 are at 4 and 3 bits."""
    cut, streams = head == 0, head in (2, 3)
    cost = {"bits": 4, "more": 0.001 * (head // 2) - 0.0005, "low": -0.002, "high": 0.012, "drift": 0.002 * (head // 2)}
    costs = [{"part": part, **cost} for part in ("qk", "vo")]
    return {
        "cut": cut, "bits": None if cut else {"qk": 4, "vo": 3} if layer == 1 else {"qk": 32, "vo": 32},
        "shares": [f"{layer}.{head ^ 1}"], "costs": costs,
        "cache": {
            "key": f"{layer}.{head // 2}", "keeps": "streaming 4 + 128" if streams else "everything", "less": streams,
            "streams": streams, "bits": 32, "bytes": 67_584 if streams else 2_097_152, "whole": 2_097_152,
            "score": 0.0123456 * (head // 2),
        },
    }  # fmt: skip


def make_head(address: str, addresses: list[str], layers: int) -> dict[str, Any]:
    """One head's record."""
    layer, head = map(int, address.split("."))
    kind = (layer + head) % len(ROLES)
    score = None if ROLES[kind] == "unclear" else (layer + head / 100) / (layers + 1)
    support = {
        "role": ROLES[kind], "detail": ">", "on": "the probe set", "rung": RUNGS[kind], "score": score or 0.25,
        "null": 0.0625, "interval": [0.21875, 0.71875], "p": 0.0004997501249375312, "rows": 314, "coverage": 0.875,
        "probe": "repeats", "effect": 0.123456789, "cost": 0.23456789, "bar": 0.0123456789, "control": 0.03456789,
    }  # fmt: skip
    context = {
        "token": "ship", "attended": "painter", "weight": 0.8079661130905151, "unit": 429,
        "parts": [
            ["", "the old"], ["attended", " painter "], ["", " ".join(TEXT[3:7])], ["token", " <b>ship</b> "], ["", "left"],
        ],
    }  # fmt: skip
    example = {
        "hit": True, "weight": 0.7079661130905151, "attended": "painter", "most": 0.8,
        "parts": [
            ["", "the old "], ["attended", "painter"], ["", " sees the "], ["meant", "<i>sea</i>"], ["", " "],
            ["token", "ship"],
        ],
    }  # fmt: skip
    names = ["entropy", "confidence", "distance", "first", "write share", *(f"measure number {i}" for i in range(15))]
    place = addresses.index(address)
    return {
        "address": address, "layer": str(layer), "head": head, "role": ROLES[kind], "detail": "", "rung": RUNGS[kind],
        "score": score, "null": None if score is None else 0.0625, "interval": None if score is None else [0.21875, 0.71875],
        "effect": 0.123456789 if RUNGS[kind] == "causal" else None, "rest": ["sink"] if head % 2 else [],
        "supports": [support, {**support, "role": "possessive", "family": 1_617}, *[support] * 3],
        "measures": {name: round(0.123456 + i + place / 4096, 6) for i, name in enumerate(names)},
        "offsets": [[offset, round(0.5 / (offset + 1), 6)] for offset in range(31, -1, -1)],
        "roles": [] if score is None else [ROLES[kind], "possessive"], "on": "" if score is None else "the probe set",
        "cases": [] if score is None else [
            {"role": role, "detail": ">", "on": "the probe set", "examples": [{**example, "hit": i != 3} for i in range(4)]}
            for role in (ROLES[kind], "possessive")
        ],
        "story": [["role", f"Head {address} tells a <b>story</b>."], ["rests", "It rests on the first token."]],
        "hardest": [context] * 5,
        "writes": {
            "copying": 0.345678901, "spread": 0.0234,
            "effect": {"mean": 0.6615085, "low": 0.474489, "high": 0.847086, "queries": 27, "share": 0.007, "texts": 22},
            "words": [
                {"token": " ship", "promotes": [[" harbour", 12.345678]] * 6, "suppresses": [[" paint", -9.87654321]] * 6}
            ] * 3,
        },
        "price": make_price(layer, head),
        "nearest": [[addresses[(place + i) % len(addresses)], 0.0123456 * i] for i in range(1, 6)],
        "importance": {
            "head": address, "worth": place / 1024, "low": 0.001, "high": 0.9,
            "above_layer": 0.01, "above_low": -0.01, "above_high": 0.02,
        },
        "history": [[round(0.01 * step, 4) for step in range(10)] for _ in range(2)],
    }  # fmt: skip


def make_maps(layers: int, heads: int, tokens: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Peaked random maps of a decoder, a layer at a time: (h, T, S), lengths fetched (h, S), shares written (h, T)."""
    dice = torch.Generator().manual_seed(seed)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    for _ in range(layers):
        scores = 3 * torch.randn(heads, tokens, tokens, generator=dice)
        lengths = 0.1 + torch.rand(heads, tokens, generator=dice)
        shares = torch.softmax(torch.randn(heads, tokens, generator=dice), 0)
        yield torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), lengths, shares


def make_sentence(layers: int, heads: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Those maps through the packing that real sentences take."""
    chosen = tuple(Address.parse(f"{layer}.{head}") for layer in range(layers) for head in range(heads))
    sights = Sights(chosen, tokens)
    for layer, made in enumerate(make_maps(layers, heads, tokens, seed)):
        sights.keep(list(chosen[layer * heads : (layer + 1) * heads]), *made)
    words = [TEXT[i % len(TEXT)] for i in range(tokens)]
    return {
        "text": " ".join(words), "cut_from": None, "tokens": words, "special": [False] * tokens, "words": words,
        "word_of": list(range(tokens)), "heads": list(map(str, chosen)), **sights.packed(),
        "next": {
            "likely": [[" harbour", 0.25], [" <i>sea</i>", 0.125]], "logit": 3.0,
            "shares": {str(a): (i % 7 - 3) / 8 for i, a in enumerate(chosen)},
            "rest": {"embedding": 0.5, "MLPs": 1.0, "biases": 0.0},
        },
    }  # fmt: skip


def six_digits(book: dict[str, Any]) -> dict[str, Any]:
    """A book as a report holds it."""
    return json.loads(json.dumps(book), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def _series(by: str, up: float) -> dict[str, Any]:
    return {"name": by, "points": [[k / 10, 3.2 + (10 - k) * up, 3.1, 3.3 + (10 - k) * up] for k in range(1, 10)]}


def _figure(name: str, at: str | int, values: list[float]) -> dict[str, Any]:
    mean, many = sum(values) / len(values), len(values) > 1
    return {
        "name": name, "at": at, "mean": mean, "low": mean - 0.0625 if many else None, "high": mean + 0.0625 if many else None,
        "values": values,
    }  # fmt: skip


def _bars(y: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    told = [[row["at"], row["mean"], row["low"], row["high"]] for row in rows]
    return {"x": "", "y": y, "bars": [{"name": rows[0]["name"], "rows": told}]}


def _relation(name: str, addresses: list[str]) -> dict[str, Any]:
    scores = [0.71875 * (i + 1) / len(addresses) for i in range(len(addresses))]
    return {
        "relation": name, "way": ">", "arcs": 40, "head": addresses[-1], "accuracy": 0.71875, "low": 0.5, "high": 0.875,
        "offset": -2, "offset_accuracy": 0.125, "excess": 0.25, "p": 0.001, "scores": scores,
    }  # fmt: skip
