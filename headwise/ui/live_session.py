"""Model operations of the live view: attention maps, predictions with silenced heads, one generation step, explanations.

Heads are silenced with gates of a single forward call. The model is not modified and concurrent requests are not affected.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.score_attribution import explain
from headwise.analysis.recording.attention_maps import TokenGroups
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.steering.steering import Steering
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import select
from headwise.text import Tokenizer
from headwise.ui.report_data import make_sentence_data
from headwise.ui.request_guard import RequestError

MAX_CHARACTERS = 8192  # characters of a text
MAX_TOKENS = 512  # tokens of a text; the model may have a smaller context
TOP_TOKENS = 10  # predictions shown
MAX_STRENGTH = 100.0  # largest strength of a steering
CONTINUATION_TOKENS = 24  # tokens of a continuation
MAX_PAIRS = 12  # pairs of components shown in an explanation
MAX_TOKENS_PER_CHARACTER = 4  # a UTF-8 character has at most four bytes


@dataclass(frozen=True, eq=False)
class LiveSession:
    """Run a model on one text at a time.

    Attributes:
        model: The model.
        max_tokens: Maximum number of tokens of a text.
        steerings: Steerings by name, which requests switch on with a strength.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> result = LiveSession(model).predict("Hi", ["5.1", "3.0"])
    >>> len(result["before"]), len(result["after"])
    (10, 10)
    """

    model: ModelProtocol
    max_tokens: int = MAX_TOKENS
    steerings: Mapping[str, Steering] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for steering in self.steerings.values():
            steering.check_model(self.model)
        if self.model.image_input is None:  # images come from the report, no text is typed
            tokenizer_of(self.model)
        if self.model.spec.kind == "encoder-decoder":
            raise UnsupportedModelError(
                "model: the live view reads one text at a time, an encoder-decoder needs two. Use hw.attention_maps with "
                "source=…."
            )

    def sentence_data(self, text: str) -> dict[str, Any]:
        """Return the attention maps of every head on a text."""
        self._ids(text)
        return make_sentence_data(self.model, text, max_tokens=self.max_tokens)

    def steering_list(self) -> list[dict[str, Any]]:
        """Return name, strength and heads of each steering, for the page."""
        return [
            {"name": name, "strength": steering.strength, "heads": list(steering.vectors), "edit": steering.edit}
            for name, steering in self.steerings.items()
        ]

    def continue_text(
        self, text: str, silenced: Sequence[str] = (), steering_strengths: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Continue a text by the most probable tokens.

        Args:
            text: The text.
            silenced: Addresses of heads whose output is set to zero.
            steering_strengths: Strength of each steering by name.

        Returns:
            The added text.
        """
        if self.model.spec.kind != "decoder":
            raise UnsupportedModelError("model: this is an encoder, which does not continue a text.")
        ids, gates, tokenizer = self._ids(text), self._gates(silenced), tokenizer_of(self.model)
        prompt, new_ids = torch.tensor([ids], device=self.model.device), []
        count = min(CONTINUATION_TOKENS, self.model.spec.context - len(ids))
        with self._steered(steering_strengths):
            for step in self.model.stream(prompt, count, gates=gates or None):
                if int(step) == tokenizer.eos:
                    break
                new_ids.append(int(step))
        return {"text": _added_text(tokenizer, ids, new_ids) if new_ids else ""}

    @contextmanager
    def _steered(self, steering_strengths: Mapping[str, float] | None) -> Iterator[None]:
        """Apply steerings with these steering_strengths inside the context."""
        with ExitStack() as stack:
            for name, strength in (steering_strengths or {}).items():
                if name not in self.steerings:
                    names = ", ".join(self.steerings) or "none"
                    raise ArgumentError(f"steering: unknown name {name[:40]!r}. The view was started with: {names}.")
                if not abs(strength) <= MAX_STRENGTH:
                    raise ArgumentError(f"steering: the strength must be from -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}.")
                steering = self.steerings[name]
                if steering.edit == "shift":
                    stack.enter_context(steering.applied(self.model, strength, check=False))
                elif strength:  # a projection or a clamp is on or off
                    stack.enter_context(steering.applied(self.model, check=False))
            yield

    def predict(
        self, text: str, silenced: Sequence[str] = (), steering_strengths: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Predict the next token, or the masked token.

        Args:
            text: The text. For an encoder it contains a mask token.
            silenced: Addresses of heads whose output is set to zero.
            steering_strengths: Strength of each steering by name.

        Returns:
            The most probable tokens with their probabilities: "before" with all heads, "after" without the silenced ones and
            with the steerings.
        """
        ids = self._ids(text)
        position, gates = self._target_position(ids), self._gates(silenced)
        before = self._top_tokens(self._probabilities(ids, position))
        if not gates and not any((steering_strengths or {}).values()):
            return {"before": before, "after": before}
        with self._steered(steering_strengths):
            return {"before": before, "after": self._top_tokens(self._probabilities(ids, position, gates))}

    def generate_next_token(
        self, text: str, silenced: Sequence[str] = (), steering_strengths: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Append the most probable token. Also return the attention of each head from the last token."""
        if self.model.spec.kind != "decoder":
            raise UnsupportedModelError(
                "model: this is an encoder, which does not predict a next token. Put a mask token into the text and press "
                "Predict instead."
            )
        ids, gates = self._ids(text), self._gates(silenced)
        rows: dict[str, list[float]] = {}
        with ExitStack() as stack:
            stack.enter_context(self._steered(steering_strengths))
            for hook_point in self.model.gathered_hook_points():
                if hook_point.head_ids:
                    stack.enter_context(hook_point.listen(lambda call: rows.update(_last_row_weights(call))))
            new_ids = [int(self._probabilities(ids, self._target_position(ids), gates).argmax())]
        tokenizer = tokenizer_of(self.model)
        ended = new_ids[0] == tokenizer.eos
        while (
            not ended
            and _added_text(tokenizer, ids, new_ids).endswith("\ufffd")
            and len(new_ids) < MAX_TOKENS_PER_CHARACTER
        ):
            extended_ids = [*ids, *new_ids]  # the token is part of a character and cannot be shown alone
            with self._steered(steering_strengths):
                new_ids.append(int(self._probabilities(extended_ids, len(extended_ids) - 1, gates).argmax()))
        return {
            "token": _token_text(tokenizer, new_ids[0]) if len(new_ids) == 1 else _added_text(tokenizer, ids, new_ids),
            "text": text if ended else text + _added_text(tokenizer, ids, new_ids),
            "ended": ended,
            "tokens": list(TokenGroups.of(tokenizer.align(text), words=False).labels),
            "rows": rows,
        }  # fmt: skip

    def explain(self, text: str, head: str, query: int, key: int, words: bool) -> dict[str, Any]:
        """Explain one attention score: the component pairs that contribute most, and the origin of the first pair."""
        self._ids(text)
        return explain(self.model, text, head, query, key, relative_to_mean=True, words=words).to_dict(
            max_pairs=MAX_PAIRS
        )

    def _ids(self, text: str) -> list[int]:
        """Tokenize a text and check its length."""
        if len(text) > MAX_CHARACTERS:
            raise RequestError(413, f"text: too long. Got {len(text)} characters. Send at most {MAX_CHARACTERS}.")
        if "\0" in text:
            raise ArgumentError("text: contains a NUL character. Remove it.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ArgumentError("text: contains half a character (a lone surrogate). Remove it.")
        ids = tokenizer_of(self.model).encode(text) if text.strip() else []
        if not ids:
            raise ArgumentError("text: empty. Enter at least one word.")
        max_tokens = min(self.max_tokens, self.model.spec.context)
        if len(ids) > max_tokens:
            raise RequestError(413, f"text: too long. Got {len(ids)} tokens. Send at most {max_tokens}.")
        return ids

    def _gates(self, silenced: Sequence[str]) -> dict[str, float]:
        selected = select(
            silenced,
            [address for hook_point in self.model.gathered_hook_points() for address in hook_point.head_addresses],
        )
        return {",".join(map(str, selected)): 0.0} if selected else {}

    def _target_position(self, ids: list[int]) -> int:
        """Return the position that predicts: the last token of a decoder, the mask token of an encoder."""
        if self.model.output is None:
            raise UnsupportedModelError(
                "model: it has no output layer and predicts no tokens. Its attention maps are available."
            )
        if self.model.spec.kind == "decoder":
            return len(ids) - 1
        tokenizer = tokenizer_of(self.model)
        if tokenizer.mask is None or tokenizer.mask not in ids:
            if tokenizer.mask is None:
                raise UnsupportedModelError("model: it predicts masked tokens, but its tokenizer has no mask token.")
            mask = tokenizer.token(tokenizer.mask)
            raise ArgumentError(
                f"text: this model predicts masked tokens. Write {mask} where it should predict a token."
            )
        return ids.index(tokenizer.mask)

    def _probabilities(self, ids: list[int], position: int, gates: dict[str, float] | None = None) -> Tensor:
        """Return the probability of every token, (V,)."""
        assert self.model.output is not None
        with eval_mode(self.model), torch.no_grad():
            input_ids = torch.tensor([ids], device=self.model.device)  # (1, T)
            states = self.model(input_ids, gates=gates or None, hidden=True)[:, position : position + 1]  # (1, 1, D)
            return self.model.output(states)[0, 0].float().softmax(0)  # (V,)

    def _top_tokens(self, probabilities: Tensor) -> list[tuple[str, float]]:
        values, ids = probabilities.topk(min(TOP_TOKENS, len(probabilities)))
        tokenizer = tokenizer_of(self.model)
        return [
            (_token_text(tokenizer, token_id), value)
            for token_id, value in zip(ids.tolist(), values.tolist(), strict=True)
        ]


def _last_row_weights(call: AttentionCall) -> dict[str, list[float]]:
    """Return the attention weights of the last token in each head of a layer."""
    weights = call.map_rows([call.q.shape[2] - 1])[0, :, 0].double()  # (H, S)
    return {
        str(address): [round(weight, 6) for weight in row]
        for address, row in zip(call.hook_point.head_addresses, weights.tolist(), strict=True)
    }


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token, or its vocabulary name if it is part of a character or has no text."""
    text = tokenizer.decode([token_id], keep_special_tokens=True)
    return text if text and "\ufffd" not in text else tokenizer.backend.id_to_token(token_id) or f"<{token_id}>"


def _added_text(tokenizer: Tokenizer, ids: list[int], new_ids: list[int]) -> str:
    """Return the text that new tokens append. The space before a word may belong to either part."""
    before, after = tokenizer.decode(ids), tokenizer.decode([*ids, *new_ids])
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(new_ids)
