"""What the live view asks of a model: how a sentence is seen, what comes next with and without some heads, one step on.

Heads are silenced by gates of the one call that asks, so nobody else sees anything of it and the model stays as it is.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.score_attribution import explain
from headwise.analysis.recording.attention_maps import TokenGroups
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import select
from headwise.text import Tokenizer
from headwise.ui.report_data import make_sentence_data
from headwise.ui.request_guard import RequestError

MAX_CHARACTERS = 8192  # of a text
MAX_TOKENS = 512  # of a text, or what the model can read
TOP_TOKENS = 10  # predictions shown
MAX_PAIRS = 12  # of what was written, shown as reasons
MAX_TOKENS_PER_CHARACTER = 4  # tokens a character may be made of: bytes of UTF-8


@dataclass(frozen=True, eq=False)
class LiveSession:
    """A model that is asked about texts, one at a time.

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

    def __post_init__(self) -> None:
        if self.model.image_input is None:  # of pictures the page shows what was made; nothing is typed
            tokenizer_of(self.model)
        if self.model.spec.kind == "encoder-decoder":
            raise HeadwiseError(
                "the live view reads one text at a time; an encoder-decoder needs two. Use hw.attention_maps with source=…."
            )

    def sentence_data(self, text: str) -> dict[str, Any]:
        """A text as every head sees it."""
        self._ids(text)
        return make_sentence_data(self.model, text, max_tokens=self.max_tokens)

    def predict(self, text: str, silenced: Sequence[str] = ()) -> dict[str, Any]:
        """What probably comes next, or stands at the mask: (token, probability), the best first, with all heads and without
        the silenced ones."""
        ids = self._ids(text)
        position, gates = self._target_position(ids), self._gates(silenced)
        before = self._top_tokens(self._probabilities(ids, position))
        return {
            "before": before,
            "after": self._top_tokens(self._probabilities(ids, position, gates)) if gates else before,
        }

    def generate_next_token(self, text: str, silenced: Sequence[str] = ()) -> dict[str, Any]:
        """The most probable next token, the text with it, and where each head looked from the last token to choose it."""
        if self.model.spec.kind != "decoder":
            raise HeadwiseError("this model reads a text in both directions and writes none on; it has no next token.")
        ids, gates = self._ids(text), self._gates(silenced)
        rows: dict[str, list[float]] = {}
        with ExitStack() as stack:
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
            extended_ids = [*ids, *new_ids]  # part of a character: it cannot be put into a text alone
            new_ids.append(int(self._probabilities(extended_ids, len(extended_ids) - 1, gates).argmax()))
        return {
            "token": _token_text(tokenizer, new_ids[0]) if len(new_ids) == 1 else _added_text(tokenizer, ids, new_ids),
            "text": text if ended else text + _added_text(tokenizer, ids, new_ids),
            "ended": ended,
            "tokens": list(TokenGroups.of(tokenizer.align(text), words=False).labels),
            "rows": rows,
        }  # fmt: skip

    def explain(self, text: str, head: str, query: int, key: int, words: bool) -> dict[str, Any]:
        """Why one token, or word, looked at another in a head: the pairs that add most to its lead, and where they began."""
        self._ids(text)
        return explain(self.model, text, head, query, key, relative_to_mean=True, words=words).to_dict(
            max_pairs=MAX_PAIRS
        )

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text that can be read."""
        if len(text) > MAX_CHARACTERS:
            raise RequestError(413, f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are read here.")
        if "\0" in text:
            raise HeadwiseError("the text holds a NUL character, which is no text; leave it out.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise HeadwiseError("the text holds half a character (a lone surrogate); leave it out.")
        ids = tokenizer_of(self.model).encode(text) if text.strip() else []
        if not ids:
            raise HeadwiseError("the text is empty; give at least one word.")
        max_tokens = min(self.max_tokens, self.model.spec.context)
        if len(ids) > max_tokens:
            raise RequestError(413, f"the text has {len(ids)} tokens; at most {max_tokens} are read here.")
        return ids

    def _gates(self, silenced: Sequence[str]) -> dict[str, float]:
        selected = select(
            silenced,
            [address for hook_point in self.model.gathered_hook_points() for address in hook_point.head_addresses],
        )
        return {",".join(map(str, selected)): 0.0} if selected else {}

    def _target_position(self, ids: list[int]) -> int:
        """Where the model is asked for a token: behind the last one, or at the mask."""
        if self.model.output is None:
            raise HeadwiseError(
                "this model has no output: it makes vectors, not tokens, so there is nothing to predict. Where its heads "
                "look can be seen."
            )
        if self.model.spec.kind == "decoder":
            return len(ids) - 1
        tokenizer = tokenizer_of(self.model)
        if tokenizer.mask is None or tokenizer.mask not in ids:
            mask = "a mask, which its tokenizer lacks" if tokenizer.mask is None else tokenizer.token(tokenizer.mask)
            raise HeadwiseError(f"this model guesses hidden tokens; write {mask} where it shall guess.")
        return ids.index(tokenizer.mask)

    def _probabilities(self, ids: list[int], position: int, gates: dict[str, float] | None = None) -> Tensor:
        """The probability of every token, (V,)."""
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
    """Where the last token looks in each head of a layer."""
    weights = call.map_rows([call.q.shape[2] - 1])[0, :, 0].double()  # (H, S)
    return {
        str(address): [round(weight, 6) for weight in row]
        for address, row in zip(call.hook_point.head_addresses, weights.tolist(), strict=True)
    }


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as it reads in a text; its name in the vocabulary where it is part of a character, or nothing at all."""
    text = tokenizer.decode([token_id], keep_special_tokens=True)
    return text if text and "\ufffd" not in text else tokenizer.backend.id_to_token(token_id) or f"<{token_id}>"


def _added_text(tokenizer: Tokenizer, ids: list[int], new_ids: list[int]) -> str:
    """What new tokens add to a text; the space before a word may belong to either side."""
    before, after = tokenizer.decode(ids), tokenizer.decode([*ids, *new_ids])
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(new_ids)
