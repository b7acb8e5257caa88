"""Text of a scan: sections for the terminal, printed as the scan proceeds, and the short text of the result object."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwise.ui.terminal_table import TextTable, make_table

if TYPE_CHECKING:
    from headwise.analysis.attribution.scan import LayerPrediction, Scan, ScannedHead

LAST_LAYERS = 5  # layers listed at the end of the model
EARLIER_LAYERS = 3  # layers listed before them, at equal distances
MAX_MLPS = 5
MAX_HEADS = 5  # heads listed in the sentence about contributions


def prediction_text(scan: "Scan") -> str:
    """Return the sentence about the prediction."""
    if scan.answer is None:
        return " ".join(scan.notes)
    others = ", ".join(
        f"{item.token!r} {percent(item.probability)}" for item in scan.predictions if item.id != scan.answer.id
    )
    place = "" if scan.position == len(scan.tokens) - 1 else f" at token {scan.position} ({scan.token!r})"
    label = "Prediction" if scan.predictions[0].id == scan.answer.id else "Answer"
    return (
        f"{label}{place}: {scan.answer.token!r} with probability {percent(scan.answer.probability)} "
        f"(loss {scan.loss:.3f} nats). Other candidates: {others}."
    )


def answer_layer_sentence(scan: "Scan") -> str:
    """Return the sentence about the layers at which the answer appears. Empty without a logit lens."""
    if scan.answer is None or not scan.layers:
        return ""
    token, layer = repr(scan.answer.token), scan.answer_layer
    if layer is None:
        best = min(scan.layers, key=lambda item: (item.rank, item.layer))
        return (
            f"{token} is not the most probable token after the last layer. "
            f"Best rank: {best.rank}, {after_layer_phrase(best)}."
        )
    last = scan.layers[-1].layer
    where = "only after the last layer" if layer == last else f"from {layer_label(layer)} on"
    first_top10 = next(item for item in scan.layers if item.rank <= 10)
    near = f" It enters the 10 most probable tokens {after_layer_phrase(first_top10)}."
    return f"{token} is the most probable token {where} ({layer_label(layer)} of {last + 1}).{near}"


def layer_table(scan: "Scan") -> TextTable:
    """Return the table of the logit lens."""
    rows = [
        (
            "embedding" if item.layer < 0 else item.layer, repr(item.top_token), percent(item.top_probability),
            percent(item.probability), item.rank,
        )
        for item in shown_layers(scan)
    ]  # fmt: skip
    answer = "" if scan.answer is None else repr(scan.answer.token)
    title = "Logit lens: prediction read from the residual stream after each layer"
    return make_table(title, ["layer", "top token", "probability", answer, "rank"], rows)


def shown_layers(scan: "Scan") -> list["LayerPrediction"]:
    """Return the last layers and a few earlier ones."""
    count = len(scan.layers)
    first_of_last = max(0, count - LAST_LAYERS)
    step = max(1, math.ceil(first_of_last / EARLIER_LAYERS))
    return [scan.layers[i] for i in (*range(0, first_of_last, step), *range(first_of_last, count))]


def contribution_text(scan: "Scan") -> str:
    """Return the sentences about the parts that write for the answer. Empty without attribution."""
    attribution = scan.attribution
    if attribution is None or scan.answer is None:
        return ""
    mlps = sorted(attribution.mlps.items(), key=lambda item: -abs(item[1]))[:MAX_MLPS]
    heads = sorted(attribution.heads.items(), key=lambda item: -abs(item[1]))[:MAX_HEADS]
    check = "" if attribution.is_complete else f" Rounding error of the sum: {attribution.relative_error:.1e}."
    named_mlps = [(f"MLP {layer}", value) for layer, value in mlps]
    return (
        f"The logit of {scan.answer.token!r} is {attribution.logit:+.2f} above the mean of the vocabulary. "
        f"Direct contributions: heads {sum(attribution.heads.values()):+.2f} ({_format_named_values(heads)}), "
        f"MLPs {sum(attribution.mlps.values()):+.2f} ({_format_named_values(named_mlps)}), "
        f"embedding {attribution.embedding:+.2f}, biases {attribution.biases:+.2f}.{check}"
    )


def head_table(scan: "Scan") -> TextTable:
    """Return the table of heads: contribution, attention, loss without the head, role."""
    has_contributions = any(head.contribution is not None for head in scan.heads)
    cost = "loss without it" if scan.answer is not None else "1 − cosine without it"
    columns = ["head", "contribution", "attends to", "first token", cost, "increase", "then predicts", "role"]
    rows = [
        (
            head.head, head.contribution if has_contributions else "", attention_text(head),
            "" if head.first_token_weight is None else percent(head.first_token_weight),
            head.loss, head.loss_increase if scan.answer is not None else "", _changed_prediction(scan, head), head.role,
        )
        for head in scan.heads
    ]  # fmt: skip
    title = f"The {len(rows)} heads with the largest loss increase without the head"
    if has_contributions:
        title = f"The {len(rows)} heads with the largest contributions, without effects through later layers"
    return make_table(title, columns, rows)


def attention_text(head: "ScannedHead") -> str:
    """Return where a head attends, without the first token."""
    return ", ".join(f"{item.token.strip() or repr(item.token)} {item.weight:.2f}" for item in head.attended)


def scan_text(scan: "Scan") -> str:
    """Return the short text of a scan for a Python shell."""
    from headwise.ui.result_text import ResultTable

    rows = tuple(
        (
            head.head,
            "" if head.contribution is None else head.contribution,
            attention_text(head),
            head.loss_increase,
            head.role,
        )
        for head in scan.heads
    )
    title = " ".join(
        part for part in (prediction_text(scan), answer_layer_sentence(scan), contribution_text(scan)) if part
    )
    columns = ("head", "contribution", "attends to", "loss increase", "role")
    hint = 'More: .layers, .attribution.parts, .heads, .to_dict(), .report("scan.html")'
    return ResultTable(title, columns, rows, hint).as_text()


def role_note(scan: "Scan") -> str:
    """Return where the roles come from, or how to get them."""
    if not scan.heads:
        return ""
    if scan.profile_name:
        return f"Roles: profile on {scan.profile_name}."
    return "Roles: no profile of this model was given or found."


def layer_label(layer: int) -> str:
    """Return the name of a layer in a sentence."""
    return "the embedding" if layer < 0 else f"layer {layer}"


def after_layer_phrase(prediction: "LayerPrediction") -> str:
    """Return a layer in a sentence, with its preposition."""
    return f"after {layer_label(prediction.layer)}"


def percent(value: float) -> str:
    """Return a probability in percent, with one decimal below 10%."""
    if value < 0.0005:
        return "<0.1%" if value else "0%"
    return f"{100 * value:.1f}%" if value < 0.1 else f"{100 * value:.0f}%"


def _changed_prediction(scan: "Scan", head: "ScannedHead") -> str:
    """Return the prediction without a head if it differs from that of the model."""
    return repr(head.prediction) if scan.predictions and head.prediction != scan.predictions[0].token else ""


def _format_named_values(parts: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {value:+.2f}" for name, value in parts)


def sections_of_stage(scan: "Scan", stage: int) -> Iterator[str | TextTable]:
    """Yield the sections that a stage of `scan_steps` adds: 0 the prediction, 1 layers and contributions, 2 the heads."""
    if stage == 0:
        yield prediction_text(scan)
    elif stage == 1 and scan.answer is not None:
        if scan.layers:
            yield from (answer_layer_sentence(scan), layer_table(scan), contribution_text(scan))
        else:
            yield f"No layers and contributions: {' '.join(scan.notes)}"
    elif stage == 2 and scan.heads:
        yield head_table(scan)
        yield role_note(scan)
