"""Prompts made here, whose next token is known: what heads look at where it is due, what they write for it, and whether the
model itself would say it.

What a head writes for a token is z W_O through the last norm's gain onto the token's row of the unembedding, up to the
norm's scale, which is positive and the same for all tokens; so tokens are compared with each other and never summed.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.metric import ALIKE, Number, Target
from headwise.analysis.metrics.role_examples import Cases, Place
from headwise.analysis.metrics.row_blocks import fetched
from headwise.analysis.metrics.statistics import FEWEST
from headwise.analysis.metrics.tasks import TaskMeasure, token_names
from headwise.analysis.recording.batching import read, tokenizer_of
from headwise.analysis.recording.text_buckets import BUCKETS
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen, Site
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel, Wiring
from headwise.progress import Progress
from headwise.text import Tokenizer

ENOUGH = 2 * FEWEST  # units a role needs, half of them for choosing
CELLS = 1 << 23  # logits held at once
MOST_SHOWN = 32  # cases that are kept to be shown


@dataclass(frozen=True)
class Due:
    """One place where a token is due: where it is foretold, at what a head should look, what should be said, and the tokens
    it is held against."""

    row: int
    place: int
    answer: int
    rivals: tuple[int, ...]


@dataclass(frozen=True)
class DuePrompt:
    """A text as a model reads it, and the tokens due in it."""

    ids: tuple[int, ...]
    dues: tuple[Due, ...]
    unit: int | None = None  # of the statistics, where its first due is a case of the role: it may be shown


class Looks(NamedTuple):
    """What every head does at every due, (dues, heads) each, and whether the model is right, (dues,)."""

    weight: np.ndarray  # on the place
    fetched: np.ndarray  # the share of what is fetched that comes from there
    lead: np.ndarray  # what it writes for the answer, above the mean of its rivals
    wins: np.ndarray  # whether it writes more for the answer than for any of them
    right: np.ndarray  # whether the model itself would say the answer
    cases: Cases  # the same where a prompt's first due is a case of the role, to be shown


class PromptMeasure(TaskMeasure):
    """A measure on prompts: three numbers for each unit of the statistics and each head. Only for decoders whose logits are a
    sum over what heads write; `run` says in a sentence why others, or those too weak for the task, are not asked."""

    def __init__(self, name: str, label: str, more: str, on: str) -> None:
        target = Target("prompt", name)
        self.numbers = Number(name, label, more=more, on=on, merge=ALIKE, placed=True, target=target).three()
        self._shown: Cases | None = None

    @property
    def shown(self) -> Cases | None:
        """Where heads looked at some of the places due."""
        return self._shown

    def run(self, model: AnyModel, tally: Tally, seed: int = 0, progress: Progress | None = None) -> str:
        """Ask, and add up what is found. What comes back says why nothing is; empty where something was."""
        tally.expect(self.names)
        if progress is not None:
            progress(self.score.on, 0, 1)
        try:
            made, self._shown = self.measure(model, seed)
        except HeadwiseError as error:
            return str(error)
        finally:
            if progress is not None:
                progress(self.score.on, 1, 1)
        sums = np.stack((made.score, made.null, made.valued), -1)  # (units, heads, 3)
        for unit, counted in enumerate(made.counts):
            if counted:
                tally.sums[self.names[0]][unit % BUCKETS] += sums[unit]
                tally.counts[self.names[0]][unit % BUCKETS] += counted
        return ""

    @abstractmethod
    def measure(self, model: AnyModel, seed: int) -> tuple["UnitSums", Cases]:
        """Sums over the cases of each unit, and those to be shown; a HeadwiseError says why there are none."""


class UnitSums(NamedTuple):
    """What a measure on prompts gives: sums over the cases of each unit, (units, heads), and how many, (units,)."""

    score: np.ndarray
    null: np.ndarray
    valued: np.ndarray
    counts: np.ndarray

    def checked(self, what: str, why: str) -> "UnitSums":
        """The same if it is enough to judge by; else it says what the model is too weak for."""
        there = int((self.counts > 0).sum())
        if there < ENOUGH:
            raise HeadwiseError(
                f"too weak for it: of {len(self.counts)} {what} {why} {there}; {ENOUGH} are needed to judge a head by."
            )
        return self


def check_reads_words(model: AnyModel, role: str) -> Wiring:
    """How the stream becomes logits; refused, in a sentence, where no head writes for a next token."""
    if model.spec.kind != "decoder" or model.output is None:
        raise HeadwiseError(f"{role} is about the next token of a text, which only a decoder with an output foretells.")
    return model.wiring()


def too_few(what: str, made: int, needed: int) -> HeadwiseError:
    """What is said where a tokenizer leaves too little to ask."""
    return HeadwiseError(
        f"of {what} only {made} are single tokens of this tokenizer, and {needed} are needed; those of several are left out."
    )


def next_token(tokenizer: Tokenizer, text: str, word: str) -> int | None:
    """The token a word is behind a text, or None where it is several, unknown, or changes how the text is cut.

    >>> from headwise.text.build_tokenizers import word_tokenizer
    >>> words = word_tokenizer(["the", "cat"])
    >>> next_token(words, "the", "cat"), next_token(words, "the", "dog")
    (1, None)
    """
    before, after = (tokenizer.encode(some, special=False) for some in (text, f"{text} {word}"))
    if len(after) != len(before) + 1 or after[:-1] != before or after[-1] == tokenizer.special["unk"]:
        return None
    return after[-1]


def ask_prompts(
    model: AnyModel, prompts: Sequence[DuePrompt], wiring: Wiring, name: str = "", batch: int = 1024
) -> Looks:
    """Let the model read prompts, those of one shape side by side without padding, and look where tokens are due. `name`: of
    the number they are for."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if longest > model.spec.room:
        raise HeadwiseError(f"the prompts have up to {longest} tokens, and this model has {model.spec.room} positions.")
    heads = sum(len(site.head_ids) for site in model.all_sites())
    starts = np.cumsum([0, *(len(prompt.dues) for prompt in prompts)])
    arrays = {kind: np.zeros((int(starts[-1]), heads)) for kind in ("weight", "fetched", "lead", "wins")}
    right = np.zeros(int(starts[-1]), dtype=bool)
    there = [number for number, prompt in enumerate(prompts) if prompt.unit is not None and prompt.dues]
    shown_at = sorted(
        np.random.default_rng(len(there)).permutation(there)[:MOST_SHOWN].tolist()
    )  # whatever comes first
    cases = _blank_cases(model, name, [prompts[number] for number in shown_at], heads)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, prompt in enumerate(prompts):
        alike.setdefault((len(prompt.ids), tuple(due.row for due in prompt.dues)), []).append(number)
    for (length, rows), numbers in alike.items():
        step = max(1, min(batch // length, CELLS // (max(1, len(rows)) * model.spec.vocab)))
        for first in range(0, len(numbers) if rows else 0, step):
            some = numbers[first : first + step]
            shown = _Shown([prompts[i] for i in some], rows, wiring, model.device)
            with listening(model.all_sites(), shown.see):
                states = read(model, shown.ids)  # (B, T, D)
            assert model.output is not None
            said = model.output(states[:, list(rows)]).argmax(-1)  # (B, R)
            places = [int(starts[i]) + r for i in some for r in range(len(rows))]
            right[places] = (said == shown.answer).flatten().cpu().numpy()
            for kind, into in arrays.items():
                for at, found in shown.found[kind].items():
                    into[places, at : at + found.shape[1]] = found.permute(0, 2, 1).flatten(0, 1).double().cpu().numpy()
            for row, number in enumerate(shown_at):
                if number in some:
                    cases.arrays["met"][row] = 1
                    for at, maps in shown.maps.items():
                        taken = maps[some.index(number)].float().cpu().numpy()  # (H, S)
                        cases.arrays["maps"][row, at : at + len(taken), : taken.shape[1]] = taken
    return Looks(**arrays, right=right, cases=cases)


def _blank_cases(model: AnyModel, name: str, prompts: Sequence[DuePrompt], heads: int) -> Cases:
    """The first dues of some prompts, before anybody looked."""
    places = []
    for prompt in prompts:
        unit, due = prompt.unit or 0, prompt.dues[0]
        names = token_names(tokenizer_of(model), prompt.ids)
        places.append(Place(name, unit, unit % BUCKETS, unit, due.row, names, (due.place,)))
    return Cases(heads, rows=tuple(places))


class _Shown:
    """What the sites show while prompts of one shape are read: by the first head of a site, (B, H, R) each."""

    def __init__(
        self, prompts: Sequence[DuePrompt], rows: tuple[int, ...], wiring: Wiring, device: torch.device | str
    ) -> None:
        dues = [prompt.dues for prompt in prompts]
        self.rows, self.wiring = rows, wiring
        self.ids = torch.tensor([prompt.ids for prompt in prompts], device=device)  # (B, T)
        self.answer = torch.tensor([[due.answer for due in some] for some in dues], device=device)  # (B, R)
        self.place = torch.tensor([[due.place for due in some] for some in dues], device=device)  # (B, R)
        most = max(len(due.rivals) for some in dues for due in some)
        rivals = [[[*due.rivals, *[-1] * (most - len(due.rivals))] for due in some] for some in dues]
        held = torch.tensor(rivals, device=device)  # (B, R, K), -1: none
        self.there = held >= 0
        self.words, index = torch.cat((self.answer[..., None], held.clamp(min=0)), -1).unique(return_inverse=True)
        self.index = index  # (B, R, 1 + K): where each stands among the words
        self.found: dict[str, dict[int, Tensor]] = {name: {} for name in ("weight", "fetched", "lead", "wins")}
        self.maps: dict[int, Tensor] = {}  # of the first due, (B, H, S)

    def see(self, seen: Seen, first_head: int) -> None:
        """One call."""
        if not seen.q.shape[1]:
            return
        maps = seen.rows(self.rows)  # (B, H, R, S)
        self.maps[first_head] = maps[:, :, 0]
        at = self.place[:, None, :, None].expand(-1, maps.shape[1], -1, -1)
        valued = maps * fetched(seen)[:, :, None]
        weight, part = (some.gather(-1, at)[..., 0] for some in (maps, valued))  # (B, H, R)
        wrote = at_least_float32(seen.z[:, :, list(self.rows)])  # (B, H, R, e)
        said = torch.einsum("bhre,hec->bhrc", wrote, to_words(self.wiring, seen.site, self.words))
        said = said.gather(-1, self.index[:, None].expand(-1, maps.shape[1], -1, -1))  # (B, H, R, 1 + K)
        answer, rivals, there = said[..., 0], said[..., 1:], self.there[:, None]
        lead = answer - (rivals * there).sum(-1) / there.sum(-1).clamp(min=1)
        wins = answer > rivals.masked_fill(~there, -torch.inf).amax(-1)
        made = {"weight": weight, "fetched": part / valued.sum(-1).clamp(min=1e-30), "lead": lead, "wins": wins}
        for name, value in made.items():
            self.found[name][first_head] = value


def to_words(wiring: Wiring, site: Site, words: Tensor) -> Tensor:
    """From z to what is written for some tokens, up to the scale of norms on the way: (H, e, words); at least float32."""
    step, W_O = wiring.steps[site.address.layer], at_least_float32(site.W_O)  # (H, e, D)
    W_O = W_O if step.after is None else step.after.turn(W_O)
    return wiring.norm.turn(W_O) @ wiring.vocabulary.weight[words].mT.to(W_O) * wiring.scale
