"""Where every head looked hardest, whatever for, kept as it streams by. What speaks for a role is in cases.py."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import FIRST
from headwise.analysis.metrics.metric import Measure, Taker
from headwise.analysis.metrics.role_examples import marked, written
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.recording.batching import Unit
from headwise.distributed.process_group import Team

KEPT = 8  # contexts per head


@dataclass(frozen=True)
class Context:
    """One place: which token looked at which, how hard, and the text around with both marked."""

    token: str
    attended: str
    weight: float
    unit: int
    row: int
    column: int
    text: str


class Evidence(Measure):
    """The strongest contexts of every head. Rows that rest, on the first token or on themselves, are passed over."""

    full = True

    def __init__(self, heads: int, kept: int = KEPT) -> None:
        self.weights = np.zeros((heads, kept))
        self.places = np.full((heads, kept, 3), -1, dtype=np.int64)  # unit, row, column
        self.units: dict[int, Unit] = {}
        self._named: dict[tuple[int, int, int], list[str]] = {}  # what other processes found, in words

    def at(self, call: Call) -> "Strongest":
        """One call at one site."""
        return Strongest(self, call)

    def add(self, heads: slice, block: RowBlock, resting: Tensor, units: Sequence[Unit], starts: Tensor) -> None:
        """Take the best rows of a block. `resting` (B, h, R) marks rows that do not count, `starts` (B,) the left padding."""
        confidence = torch.where(resting, 0.0, 1 / block.total)  # the largest e is 1: (B, h, R)
        B, h, R = confidence.shape
        mine = self.weights[heads]
        if not (confidence.amax((0, 2)).cpu().numpy() > mine[:, -1]).any():
            return  # the usual case, once a few blocks have passed
        kept = self.weights.shape[1]
        best, where = confidence.transpose(0, 1).reshape(h, B * R).topk(min(kept, B * R), dim=1)  # (h, kept)
        row, example = where % R, where // R
        index = torch.arange(h, device=where.device)[:, None].expand_as(where)
        column = block.e[example, index, row].argmax(-1)  # (h, kept)
        first = starts[example]
        places = torch.stack(
            (example, row + block.rows.start + block.past - first, column + block.cols.start - first), -1
        )
        found, weights = places.cpu().numpy(), best.double().cpu().numpy()
        numbers = np.array([unit.number for unit in units])
        found = np.concatenate((numbers[found[..., :1]], found[..., 1:]), -1)
        weights, found = np.concatenate((mine, weights), 1), np.concatenate((self.places[heads], found), 1)
        order = np.argsort(-weights, axis=1, kind="stable")[:, :kept]
        self.weights[heads] = np.take_along_axis(weights, order, 1)
        self.places[heads] = np.take_along_axis(found, order[..., None], 1)
        there = set(self.places[heads, :, 0].ravel().tolist())
        self.units |= {
            unit.number: replace(unit) for unit in units if unit.number in there
        }  # without what was worked out
        if len(self.units) > 2 * self.weights.size:
            self.tidy()

    def gather(self, team: Team) -> None:
        """The strongest of what all processes found; each tells the others what stands at its own places."""
        heads, kept = self.weights.shape
        weights, places = np.zeros((team.size, heads, kept)), np.zeros((team.size, heads, kept, 3), dtype=np.int64)
        weights[team.rank], places[team.rank] = self.weights, self.places
        team.add_up(weights)
        team.add_up(places)
        flat = weights.transpose(1, 0, 2).reshape(heads, -1)
        order = np.argsort(-flat, axis=1, kind="stable")[:, :kept]
        self.weights = np.take_along_axis(flat, order, 1)
        self.places = np.take_along_axis(places.transpose(1, 0, 2, 3).reshape(heads, -1, 3), order[..., None], 1)
        mine = [(unit, row, column) for unit, row, column in self.places.reshape(-1, 3).tolist()]
        told = [self._words(*place) if place[0] in self.units else [] for place in mine]
        lengths = np.zeros(team.size, dtype=np.int64)
        written = [json.dumps(words).encode() if words else b"" for words in told]
        lengths[team.rank] = max(map(len, written))
        team.add_up(lengths)
        shared = np.zeros(
            (len(mine), int(lengths.max())), dtype=np.uint8
        )  # a text was read by one process: the rest is 0
        for row, words in enumerate(written):
            shared[row, : len(words)] = np.frombuffer(words, dtype=np.uint8)
        team.add_up(shared)
        found = (bytes(row).rstrip(b"\0") for row in shared)
        self._named = {place: json.loads(words) for place, words in zip(mine, found, strict=True) if words}

    def tidy(self) -> None:
        """Forget the texts that no head's evidence is in."""
        wanted = set(self.places[..., 0].ravel().tolist())
        self.units = {number: unit for number, unit in self.units.items() if number in wanted}

    def contexts(self) -> list[list[Context]]:
        """For every head its contexts, strongest first, with their texts."""
        self.tidy()
        return [
            [
                self._context(weight, *place)
                for weight, place in zip(weights, places.tolist(), strict=True)
                if weight > 0
            ]
            for weights, places in zip(self.weights.tolist(), self.places, strict=True)
        ]

    def _context(self, weight: float, number: int, row: int, column: int) -> Context:
        token, attended, text = self._named.get((number, row, column)) or self._words(number, row, column)
        return Context(token, attended, weight, number, row, column, text)

    def _words(self, number: int, row: int, column: int) -> list[str]:
        """Who looked, at what, and the text around."""
        names, picture = self.units[number].pieces, self.units[number].picture
        if picture is not None:
            return [names[row], names[column], f"{picture.name}: [{names[row]}] looks at *{names[column]}*"]
        return [names[row], names[column], written(marked(names, {column: "attended", row: "token"}))]


class Strongest(Taker):
    """Shows evidence the rows of each block that do not rest, on the first token or on themselves."""

    def __init__(self, evidence: Evidence, call: Call) -> None:
        self.evidence, self.call, self.first = evidence, call, call.scene.layout.place[FIRST]

    def see(self, block: RowBlock) -> None:
        """One block."""
        call, batch = self.call, self.call.scene.batch
        itself = (block.at(0, 1)[..., 0] == 1) & (not call.across)
        real = batch.real[:, block.rows.start : block.rows.stop]
        resting = itself | (block.features[..., self.first] == 1) | ~real[:, None]
        heads = slice(call.first_head + block.heads.start, call.first_head + block.heads.stop)
        self.evidence.add(heads, block, resting, batch.units, batch.first)

    def take(self) -> None:
        """It has no numbers."""
