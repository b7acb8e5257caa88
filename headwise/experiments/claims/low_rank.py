"""Each head is a low-rank bilinear form."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.tokenized_corpus import Reading, documents_for
from headwise.analysis.similarity.weight_similarity import effective_rank
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.head_counts import head_counts
from headwise.heads.head import Circuit
from headwise.heads.hook_point import Seen
from headwise.kernels.score_params import raw_scores, spread
from headwise.model import AnyModel, quiet
from headwise.spec import Address

TOKENS = 128  # or twice head_dim, where that is more
SMALL = 1e-9  # singular values below this share of the largest are rounding, in float64
EXACT = 1e-3  # what the form may leave unexplained, relative: x is known in float32
ENERGY = "energy in the first half of directions"


@dataclass(frozen=True)
class Form:
    """One head as it compares tokens: the rank of its scores, and what x W_Q W_Kᵀ xᵀ leaves of them unexplained."""

    head: Address
    head_dim: int
    tokens: int
    rank: int
    unexplained: float


@torch.no_grad()
def forms(model: AnyModel, corpus: Any = None) -> list[Form]:
    """Every head on a stretch of text of more tokens than head_dim: its scores before mask, bias and softmax, in float64.

    However many tokens there are, q kᵀ has at most the rank of head_dim. That it is one form of what the layer reads, the
    same for all pairs of tokens (a bias counts as a constant it reads), fails with rotary positions, which turn it with the
    offset, and with norms on q and k.
    """
    ids = _stretch(model, corpus)
    found: list[Form] = []
    reads: list[Tensor] = []

    def see(seen: Seen) -> None:
        x = reads[-1][0].double()  # (T, D)
        k = spread(seen.k, seen.terms.groups)
        scores = raw_scores(seen.q.double(), k.double(), seen.terms)[0]  # (H, T, T)
        for address, own in zip(seen.site.addresses, scores, strict=True):
            head = model.heads[address]
            made = _projected(x, head.W_Q, head.b_Q) @ _projected(x, head.W_K, head.b_K).mT * seen.terms.scale
            rest = float((own - made).norm() / own.norm())
            found.append(Form(address, seen.q.shape[-1], len(x), numerical_rank(own), rest))

    with quiet(model), ExitStack() as stack:
        for layer in model.attention_layers():
            hook = layer.register_forward_pre_hook(lambda part, given: reads.append(given[0]))
            stack.callback(hook.remove)
            stack.enter_context(layer.site.listen(see))
        model(ids, hidden=True)
    return found


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = x @ weight.double()  # (T, d)
    return made if bias is None else made + bias.double()


def numerical_rank(matrix: Tensor) -> int:
    """How many singular values stand out from rounding.

    >>> numerical_rank(torch.ones(5, 7).double())
    1
    """
    sigma = torch.linalg.svdvals(matrix)
    return int((sigma > SMALL * sigma[0]).sum())


def first_half(circuit: Circuit) -> float:
    """The share of Σσ² in the first half of a circuit's directions."""
    power = circuit.singular_values().double().square()  # (d,)
    return float(power[: -(-len(power) // 2)].sum() / power.sum())


def _stretch(model: AnyModel, corpus: Any) -> Tensor:
    """Texts end to end, more tokens than head_dim, as far as the model can read: (1, T)."""
    spec = model.spec
    longest = min(max(TOKENS, 2 * spec.attention.head_dim), spec.context)
    ids: list[int] = []
    for unit in Reading.of(model, corpus):
        ids += unit.ids
        if len(ids) >= longest:
            break
    if len(ids) <= spec.attention.head_dim or longest <= spec.attention.head_dim:
        raise HeadwiseError(
            f"rank shows on more tokens than head_dim, {spec.attention.head_dim}; there are {min(len(ids), longest)}, "
            f"give a longer text."
        )
    return torch.tensor([ids[:longest]], device=model.device)


@torch.no_grad()
def _spectra(model: AnyModel) -> dict[str, float]:
    """Means over heads, and what random weights of the same shape would give."""
    circuits = {"W_QK": [head.QK for head in model.heads], "W_OV": [head.OV for head in model.heads]}
    circuits = {name: [Circuit(c.left.float(), c.right.float()) for c in some] for name, some in circuits.items()}
    D, d = circuits["W_QK"][0].left.shape
    dice = torch.Generator().manual_seed(0)
    circuits["random weights"] = [
        Circuit(torch.randn(D, d, generator=dice), torch.randn(d, D, generator=dice)) for _ in range(8)
    ]
    found = {}
    for name, some in circuits.items():
        found[f"effective rank of {name}"] = sum(map(effective_rank, some)) / len(some)
        found[f"{ENERGY}, {name}"] = sum(map(first_half, some)) / len(some)
    return found


def points(lab: Lab) -> list[Point]:
    """Every head count."""
    return [lab.point(seed, heads) for heads in head_counts(lab.size.width) for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """Trained models of every head_dim."""
    figures = Figures()
    for heads in reversed(head_counts(lab.size.width)):
        models = [lab.made(lab.point(seed, heads)).model() for seed in lab.seeds]
        _add(figures, [(model, lab.documents(seed)) for model, seed in zip(models, lab.seeds, strict=True)])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """A model as it is."""
    return _add(Figures(), [(model, documents_for(model) if text is None else text)])


def _add(figures: Figures, models: list[tuple[AnyModel, Any]]) -> Figures:
    made = [forms(model, corpus) for model, corpus in models]
    d = made[0][0].head_dim
    figures.add("rank of the scores", d, [sum(form.rank for form in some) / len(some) for some in made])
    figures.add("largest rank over head_dim", d, [max(form.rank / form.head_dim for form in some) for some in made])
    figures.add("tokens", d, [some[0].tokens for some in made])
    figures.add("unexplained by one form", d, [max(form.unexplained for form in some) for some in made])
    spectra = [_spectra(model) for model, _ in models]
    for name in spectra[0]:
        figures.add(name, d, [one[name] for one in spectra])
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    if any(max(figure.values) > 1 for figure in figures.at("largest rank over head_dim").values()):
        return Verdict("does not hold")
    worst = max(max(figure.values) for figure in figures.at("unexplained by one form").values())
    if worst > EXACT:
        told = f"rank is at most head_dim, but one form misses the scores of a head by {worst:.2g} of their size"
        return Verdict("depends", f"on positions: {told}; rotary positions turn it with the offset")
    return Verdict("true by construction")


CLAIM = Claim(
    number=21,
    name="low-rank",
    says="Each head compares tokens by a bilinear form of low rank, at most head_dim.",
    against="A head whose scores on a long text have a rank above head_dim, or are not a form of what it reads.",
    setup=f"Models of every head count at one width, on a stretch of text of {TOKENS} tokens: the rank of each head's scores "
    "before mask and softmax, and what x W_Q W_Kᵀ xᵀ leaves of them unexplained (the largest of all heads). Beside it the "
    "spectra of W_Q W_Kᵀ and W_V W_O: effective rank, energy in the first half, and random weights of that shape. With one "
    "head head_dim is the width, and the bound binds nothing.",
    rule=f"Does not hold if some head's rank is above head_dim. True by construction if moreover one form explains every "
    f"head's scores within {EXACT:g}; else depends on positions, or what else acts on q and k. The spectra, what heads make "
    "of their rank, are told and not judged.",
    identity="q kᵀ is a product of matrices with head_dim columns: its rank cannot be more",
    words=("true by construction", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    picture=Picture(
        ("rank of the scores", "effective rank of W_QK", "effective rank of W_OV", "effective rank of random weights"),
        x="head_dim", y="rank", log=True,
    ),
    points=points,
    on=on,
)  # fmt: skip
