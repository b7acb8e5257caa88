"""Heads that are laid side by side are parallel paths for gradients, like the branches of a grouped convolution."""

import copy
from itertools import chain, islice
from typing import Any

import torch

from headwise.analysis.recording.tokenized_corpus import Reading, documents_for
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.gradient_paths import compare, convolution, heads_of
from headwise.model import AnyModel, Transformer
from headwise.spec import AttentionSpec, ModelSpec

BAR = 1e-9  # relative, in float64: rounding
SHARED = "heads, shared keys"
KINDS: dict[str, dict[str, Any]] = {  # of layers
    "heads": {},
    "heads, sliced input": {"input": "slice"},
    SHARED: {"kv_heads": 2},
}
CONVOLUTION = "grouped convolution"
TOKENS = 12  # of a text


def measure(lab: Lab) -> Figures:
    """Small untrained layers of several kinds, and a grouped convolution, in float64."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in lab.seeds:
        for kind, fields in KINDS.items():
            torch.manual_seed(seed)
            spec = ModelSpec(vocab=13, context=8, layers=1, attention=AttentionSpec(width=24, heads=4, **fields))
            model = Transformer(spec).double()
            layer = next(model.attention_layers())
            ids = torch.randint(13, (1, 6))
            found.setdefault(kind, []).append(compare(heads_of(model, layer, ids), seed))
        found.setdefault(CONVOLUTION, []).append(compare(convolution(24, 4, 6, seed), seed))
    return _figures(found)


def on(model: AnyModel, text: Any = None) -> Figures:
    """Three layers of a copy of the model, in float64, on the beginning of a text, beside a grouped convolution."""
    twin: Any = copy.deepcopy(model).eval()
    twin.double().requires_grad_(True)
    units = Reading.of(twin, documents_for(twin) if text is None else text)
    ids = torch.tensor([list(islice(chain.from_iterable(unit.ids for unit in units), TOKENS))], device=twin.device)
    found: dict[str, list[dict[str, float]]] = {}
    layers = [layer for layer in twin.attention_layers() if layer.spec.head_ids]
    for place in sorted({0, len(layers) // 2, len(layers) - 1}):
        layer = layers[place]
        groups = layer.spec.kv_of_head
        kind = SHARED if len(set(groups)) < len(groups) else "heads"
        found.setdefault(kind, []).append(compare(heads_of(twin, layer, ids)))
    found[CONVOLUTION] = [compare(convolution(24, 4, 6))]
    return _figures(found)


def _figures(found: dict[str, list[dict[str, float]]]) -> Figures:
    figures = Figures()
    for kind, made in found.items():
        for name in made[0]:
            figures.add(name, kind, [each[name] for each in made])
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    left, moved = ({str(k): max(f.values) for k, f in figures.at(n).items()} for n in ("left over", "moved by others"))
    own = [kind for kind in moved if kind not in (SHARED, CONVOLUTION)]
    if not max(left.values()) <= BAR or any(not moved[kind] <= BAR for kind in (*own, CONVOLUTION)):
        return Verdict("does not hold", "which breaks the chain rule: the code is wrong")
    if not own:
        return Verdict("does not hold", "where heads share keys and values, by construction too")
    if SHARED not in moved:
        return Verdict("true by construction")
    told = f"where they share keys, paths meet ({moved[SHARED]:.2g} of a gradient), by construction too"
    return Verdict("true by construction", f"for heads with weights of their own; {told}")


CLAIM = Claim(
    number=25,
    name="jacobians",
    says="Concatenated heads are parallel paths for gradients, like the branches of a grouped convolution.",
    against="A layer whose Jacobian is not the sum of its heads', or heads whose gradients hang on each other's weights.",
    setup="Layers with 4 heads of several kinds, and a grouped convolution of 4 branches, in float64: what the sum of the "
    "branches' Jacobians leaves of the whole's; how far a branch's own gradient moves when all others are drawn anew, with "
    "the gradient from above fixed and through a squared loss; and the share of input channels a branch reads.",
    rule=f"True by construction if, to {BAR:g}, the Jacobians add up and the gradient of no head with weights of its own "
    "moves while the gradient from above is fixed; does not hold if one of these fails, or if every layer's heads "
    "share keys. What "
    "moves through a loss and what is read are told beside it: a head reads every channel, a branch its own.",
    identity="a layer is a sum over heads, and the derivative of a sum is the sum of derivatives",
    words=("true by construction", "does not hold"),
    measure=measure,
    judge=judge,
    picture=Picture(("moved by others", "moved through a loss", "channels read"), y="share"),
    on=on,
)
