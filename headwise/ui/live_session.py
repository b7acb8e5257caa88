"""What the live view asks of a model: how a sentence is seen, what comes next with and without some heads, one step on.

Heads are silenced by gates of the one call that asks, so nobody else sees anything of it and the model stays as it is.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.score_attribution import why
from headwise.analysis.recording.attention_maps import Parts
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, quiet
from headwise.spec import select
from headwise.text import Tokenizer
from headwise.ui.report_data import make_sentence
from headwise.ui.request_guard import RequestError

CHARACTERS = 8192  # of a text
TOKENS = 512  # of a text, or what the model can read
BEST = 10  # predictions shown
PAIRS = 12  # of what was written, shown as reasons
PIECES = 4  # tokens a character may be made of: bytes of UTF-8


@dataclass(frozen=True, eq=False)
class Live:
    """A model that is asked about texts, one at a time.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> told = Live(model).predict("Hi", ["5.1", "3.0"])
    >>> len(told["before"]), len(told["after"])
    (10, 10)
    """

    model: AnyModel
    most_tokens: int = TOKENS

    def __post_init__(self) -> None:
        if self.model.pictures is None:  # of pictures the page shows what was made; nothing is typed
            tokenizer_of(self.model)
        if self.model.spec.kind == "encoder-decoder":
            raise HeadwiseError(
                "the live view reads one text at a time; an encoder-decoder needs two. Use hw.attend with source=…."
            )

    def sentence(self, text: str) -> dict[str, Any]:
        """A text as every head sees it."""
        self._ids(text)
        return make_sentence(self.model, text, most_tokens=self.most_tokens)

    def predict(self, text: str, silenced: Sequence[str] = ()) -> dict[str, Any]:
        """What probably comes next, or stands at the mask: (token, probability), the best first, with all heads and without
        the silenced ones."""
        ids = self._ids(text)
        place, gates = self._place(ids), self._gates(silenced)
        before = self._best(self._chances(ids, place))
        return {"before": before, "after": self._best(self._chances(ids, place, gates)) if gates else before}

    def step(self, text: str, silenced: Sequence[str] = ()) -> dict[str, Any]:
        """The most probable next token, the text with it, and where each head looked from the last token to choose it."""
        if self.model.spec.kind != "decoder":
            raise HeadwiseError("this model reads a text in both directions and writes none on; it has no next token.")
        ids, gates = self._ids(text), self._gates(silenced)
        rows: dict[str, list[float]] = {}
        with ExitStack() as listening:
            for site in self.model.all_sites():
                if site.head_ids:
                    listening.enter_context(site.listen(lambda seen: rows.update(_last_rows(seen))))
            made = [int(self._chances(ids, self._place(ids), gates).argmax())]
        tokenizer = tokenizer_of(self.model)
        ended = made[0] == tokenizer.eos
        while not ended and _added(tokenizer, ids, made).endswith("\ufffd") and len(made) < PIECES:
            more = [*ids, *made]  # part of a character: it cannot be put into a text alone
            made.append(int(self._chances(more, len(more) - 1, gates).argmax()))
        return {
            "token": _spelled(tokenizer, made[0]) if len(made) == 1 else _added(tokenizer, ids, made),
            "text": text if ended else text + _added(tokenizer, ids, made),
            "ended": ended,
            "tokens": list(Parts.of(tokenizer.align(text), words=False).labels),
            "rows": rows,
        }  # fmt: skip

    def why(self, text: str, head: str, at: int, to: int, words: bool) -> dict[str, Any]:
        """Why one token, or word, looked at another in a head: the pairs that add most to its lead, and where they began."""
        self._ids(text)
        return why(self.model, text, head, at, to, lead=True, words=words).to_dict(most=PAIRS)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text that can be read."""
        if len(text) > CHARACTERS:
            raise RequestError(413, f"the text has {len(text)} characters; at most {CHARACTERS} are read here.")
        if "\0" in text:
            raise HeadwiseError("the text holds a NUL character, which is no text; leave it out.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise HeadwiseError("the text holds half a character (a lone surrogate); leave it out.")
        ids = tokenizer_of(self.model).encode(text) if text.strip() else []
        if not ids:
            raise HeadwiseError("the text is empty; give at least one word.")
        most = min(self.most_tokens, self.model.spec.context)
        if len(ids) > most:
            raise RequestError(413, f"the text has {len(ids)} tokens; at most {most} are read here.")
        return ids

    def _gates(self, silenced: Sequence[str]) -> dict[str, float]:
        chosen = select(silenced, [address for site in self.model.all_sites() for address in site.addresses])
        return {",".join(map(str, chosen)): 0.0} if chosen else {}

    def _place(self, ids: list[int]) -> int:
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

    def _chances(self, ids: list[int], place: int, gates: dict[str, float] | None = None) -> Tensor:
        """The probability of every token, (V,)."""
        assert self.model.output is not None
        with quiet(self.model), torch.no_grad():
            read = torch.tensor([ids], device=self.model.device)  # (1, T)
            states = self.model(read, gates=gates or None, hidden=True)[:, place : place + 1]  # (1, 1, D)
            return self.model.output(states)[0, 0].float().softmax(0)  # (V,)

    def _best(self, chances: Tensor) -> list[tuple[str, float]]:
        values, ids = chances.topk(min(BEST, len(chances)))
        tokenizer = tokenizer_of(self.model)
        return [(_spelled(tokenizer, id), value) for id, value in zip(ids.tolist(), values.tolist(), strict=True)]


def _last_rows(seen: Seen) -> dict[str, list[float]]:
    """Where the last token looks in each head of a layer."""
    weights = seen.rows([seen.q.shape[2] - 1])[0, :, 0].double()  # (H, S)
    return {
        str(address): [round(weight, 6) for weight in row]
        for address, row in zip(seen.site.addresses, weights.tolist(), strict=True)
    }


def _spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as it reads in a text; its name in the vocabulary where it is part of a character, or nothing at all."""
    text = tokenizer.decode([id], special=True)
    return text if text and "\ufffd" not in text else tokenizer.backend.id_to_token(id) or f"<{id}>"


def _added(tokenizer: Tokenizer, ids: list[int], made: list[int]) -> str:
    """What new tokens add to a text; the space before a word may belong to either side."""
    before, after = tokenizer.decode(ids), tokenizer.decode([*ids, *made])
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(made)
