"""Recording of one text in one forward pass for the report page: maps, value norms, output shares, next token."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from headwise.analysis.attribution.logit_attribution import LogitAttribution, logit_attribution
from headwise.analysis.recording.batching import TextSample, forward_batch, make_batch, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import PerHeadOutput
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol
from headwise.spec import Address

MAX_FULL_WEIGHTS = 1 << 22  # full maps are stored up to this number of weights: 12 × 12 heads at 170 tokens
# Larger maps are stored as thumbnails (pixels per side) and the largest weights of each row (number, minimum weight).
THUMBNAIL_SIZE, EDGES_PER_ROW, MIN_EDGE_WEIGHT = 32, 3, 0.02
TOP_TOKENS = 10  # number of next tokens


class SentenceRecorder:
    """Record maps, value norms and output shares of some heads on one text.

    If all maps together are too large, a thumbnail and the largest weights of every row are stored for each head.

    Args:
        selected: Addresses of the heads.
        tokens: Number of tokens of the text.
        max_weights: Maximum number of weights for full maps. None selects MAX_FULL_WEIGHTS.
    """

    def __init__(self, selected: tuple[Address, ...], tokens: int, max_weights: int | None = None) -> None:
        self.selected, self.tokens = selected, tokens
        self.is_full = len(selected) * tokens * tokens <= (MAX_FULL_WEIGHTS if max_weights is None else max_weights)
        self.arrays: dict[str, dict[Address, np.ndarray]] = {}

    def run(self, model: ModelProtocol, sample: TextSample) -> Any:
        """Run the model on a sample. Return the final hidden states, or for an image the output of the model."""
        with ExitStack() as stack:
            for hook_point in model.gathered_hook_points():
                stack.enter_context(hook_point.listen(self.on_call))
            return forward_batch(model, make_batch([sample], device=model.device))

    def on_call(self, call: AttentionCall) -> None:
        """Record one attention call."""
        indices = [i for i, address in enumerate(call.hook_point.head_addresses) if address in self.selected]
        if not indices:
            return
        v = call.v[0, list(call.params.kv_of_head)][indices].float()  # (h, S, e)
        value_norms = PerHeadOutput(v[None], call.hook_point.W_O_for_listeners[indices].float(), None).head_norms()[
            0
        ]  # ‖v_j W_O‖: (h, S)
        output_norms = PerHeadOutput(call.z.float(), call.hook_point.W_O_for_listeners.float(), None).head_norms()[
            0
        ]  # (H, T)
        total = output_norms.sum(0)  # (T,)
        fractions = (output_norms / total.where(total > 0, 1.0))[indices]  # (h, T)
        self.add_layer(
            [call.hook_point.head_addresses[i] for i in indices],
            call.maps()[0, indices].float(),
            value_norms,
            fractions,
        )

    def add_layer(self, addresses: list[Address], maps: Tensor, value_norms: Tensor, fractions: Tensor) -> None:
        """Store the maps (h, T, S), value output norms (h, S) and output shares (h, T) of the heads of a layer."""
        arrays = {"norms": value_norms, "shares": fractions}
        if self.is_full:
            arrays["maps"] = maps
        else:
            arrays["thumbs"] = adaptive_max_pool2d(maps[None], min(THUMBNAIL_SIZE, self.tokens))[0]  # (h, 32, 32)
            weights, columns = maps.topk(min(EDGES_PER_ROW, maps.shape[-1]), dim=-1)  # (h, T, k)
            arrays |= {"weights": weights.where(weights >= MIN_EDGE_WEIGHT, 0.0), "columns": columns}
            arrays["totals"] = (maps @ value_norms[..., None])[..., 0]  # Σ_j p_ij ‖v_j W_O‖: (h, T)
        for name, values in arrays.items():
            stored = self.arrays.setdefault(name, {})
            stored.update(zip(addresses, values.cpu().numpy(), strict=True))

    def stacked(self) -> dict[str, np.ndarray]:
        """Return the arrays with the selected heads as first axis."""
        return {
            name: np.stack([by_address[address] for address in self.selected])
            for name, by_address in self.arrays.items()
        }


def truncated_sample(model: ModelProtocol, text: str, max_tokens: int) -> TextSample:
    """Tokenize a text with special tokens and truncate it to `max_tokens`."""
    max_length = min(max_tokens, model.spec.context) if model.spec.positions == "learned" else max_tokens
    return next(iter(TokenizedCorpus.of(model, [text], max_length)))


@dataclass(frozen=True)
class NextTokenPrediction:
    """Prediction of the next token.

    Attributes:
        probable: The most probable tokens with their probabilities.
        parts: Attribution of the logit of the first token to model components. None if the logit is not a sum over heads,
            as in a post-norm model.
    """

    probable: list[tuple[str, float]]
    parts: LogitAttribution | None


def predict_next_token(model: ModelProtocol, ids: Sequence[int], hidden: Tensor) -> NextTokenPrediction | None:
    """Return the most probable next tokens for final hidden states (1, T, D). None if the model is not a language model."""
    if model.output is None or model.spec.output != "lm":
        return None
    best = torch.softmax(to_float64(model.output(hidden[:, -1:])[0, -1]), -1).topk(min(TOP_TOKENS, model.spec.vocab))
    words = [_token_text(model, i) for i in best.indices.tolist()]
    probable = list(zip(words, best.values.tolist(), strict=True))
    try:
        return NextTokenPrediction(probable, logit_attribution(model, list(ids), int(best.indices[0])))
    except HeadwiseError:  # a post-norm model, or a model with unknown components
        return NextTokenPrediction(probable, None)


def _token_text(model: ModelProtocol, token_id: int) -> str:
    """Return the text of a token, or its id if the vocabulary is larger than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return (
        tokenizer.backend.decode([token_id], skip_special_tokens=False) if token_id < len(tokenizer) else f"#{token_id}"
    )
