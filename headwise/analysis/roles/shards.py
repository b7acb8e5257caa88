"""A profile of a corpus of any size: shard by shard into a folder, by one process or by many workers, then merged.

Each finished shard is a profile in a file of its own, written whole or not at all. Killed at any moment and started again, by
whatever executor, the work goes on with the shards that are missing. What the merged profile tells is what one pass would.
"""

import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.variability import VARIABILITY, read_alike
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.causal import climb
from headwise.analysis.roles.profile import KeptTexts, profile, run_tasks
from headwise.analysis.roles.profile_result import Profile, Supports
from headwise.analysis.roles.prompt_roles import PROMPTED, prompted_measures
from headwise.distributed.executor import check_executor, work
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_file
from headwise.model import AnyModel, quiet
from headwise.progress import Progress
from headwise.text.corpus import Corpus
from headwise.text.shards import TextShard, cut_shards, sources_of
from headwise.training.setup import weights_digest
from headwise.weights import load

SHARD = 1 << 20  # characters of a shard: about a quarter of a million tokens of English
INDEX, WHOLE = "shards.json", "profile.npz"
PROBE = "the probe set"


@dataclass(frozen=True)
class _How:
    """What every shard is asked."""

    longest: int | None
    tokens: int
    every: int
    detail: str
    seed: int


def profile_shards(
    model: AnyModel | str,
    corpus: Any,
    out: str | Path,
    *,
    relations: Any = None,
    longest: int | None = None,
    tokens: int = 2048,
    every: int = 1,
    detail: str = "full",
    causal: bool = True,
    prompts: bool = False,
    seed: int = 0,
    shard: int = SHARD,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What every head does, over a corpus of any size: `profile`, shard by shard into the folder `out`, with the whole in
    `profile.npz` when all are there. Run again after it was stopped or killed, it goes on with what is missing.

    A shard has about so many characters (`shard`). With `processes`, or an `executor`, shards are shared out; then model and
    corpus are named, a name or a path, and files, so that workers can read them too. All else is as in `profile`. Relations
    that are not the texts' own, prompts and ablations are asked once for all.
    """
    check_executor(executor)
    out, told = Path(out), progress or (lambda what, done, of: None)
    texts, alone = Corpus.of(corpus), executor is None and processes in (None, 1)
    if texts.paired:
        raise HeadwiseError("pairs are for what is asked of an encoder-decoder; give texts: each is source and target.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HeadwiseError(
            "shards are shared out over workers, --workers or an executor; torchrun is for profile itself."
        )
    if not alone and not (isinstance(model, str) and texts.files):
        raise HeadwiseError(
            "workers read the model and the corpus by themselves: give the model's name or path, and a corpus of files."
        )
    how, loaded = _How(longest, tokens, every, detail, seed), load(model) if isinstance(model, str) else model
    digest = weights_digest(loaded)
    shards = _prepare(out, texts, digest, how, relations, {"causal": causal, "prompts": prompts or None}, shard)
    if (out / WHOLE).is_file():
        return Profile.load(out / WHOLE)
    own = relations is None and any(one.related for one in shards)
    todo = [number for number in range(len(shards)) if not _place(out, number).is_file()]
    done = len(shards) - len(todo)
    asked = {number: _documents_for(number, shards[number], relations, own) for number in todo}
    if alone:
        sources = sources_of(texts.files) or [texts.items]
        for number in todo:
            told("shards", done, len(shards))
            part = shards[number].read(sources, texts.name)
            _profile(loaded, part, asked[number], how, progress).save(_place(out, number))
            done += 1
    else:
        files = [str(file.resolve()) for file in texts.files]
        jobs = [
            (
                str(model),
                digest,
                files,
                texts.name,
                asdict(shards[n]),
                _named(asked[n]),
                asdict(how),
                str(_place(out, n)),
            )
            for n in todo
        ]
        for _ in work(_elsewhere, jobs, processes, executor=executor, folder=out):
            done += 1
            told("shards", done, len(shards))
    told("shards", len(shards), len(shards))
    merged = Profile.load(_place(out, 0))
    for number in range(1, len(shards)):
        merged = merged.merge(Profile.load(_place(out, number)))
        told("merging", number + 1, len(shards))
    made = _finish(loaded, merged, texts, relations, own, how, causal, prompts, told)
    made.save(out / WHOLE)
    return made


def _prepare(
    out: Path, corpus: Corpus, model: str, how: _How, relations: Any, at_last: dict[str, Any], characters: int
) -> list[TextShard]:
    """The shards of a folder: those it has, if it was begun with the same, or new ones."""
    said = {
        **asdict(how), "model": model, "corpus": corpus.fingerprint, "shard": characters, **at_last,
        "relations": relations if relations in (None, False) else Corpus.of(relations).fingerprint,
    }  # fmt: skip
    del said["tokens"]  # of a batch: they decide nothing but the time
    index = out / INDEX
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))
            before, shards = found["asked"], [TextShard(**one) for one in found["shards"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise HeadwiseError(f"{index} cannot be read; give another folder, or delete this one.") from None
        other = [name for name in {**before, **said} if before.get(name) != said.get(name)]
        if other:
            raise HeadwiseError(
                f"{out} holds shards of another profile: {', '.join(other)} differ; give another folder, or the same as then."
            )
        return shards
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise HeadwiseError(f"{out} is there already and holds something else; choose another folder.")
    shards = cut_shards(corpus, characters)
    whole_file(index, json.dumps({"asked": said, "shards": [asdict(one) for one in shards]}, indent=1).encode())
    return shards


def _place(out: Path, number: int) -> Path:
    return out / f"shard-{number:05d}.npz"


def _documents_for(number: int, shard: TextShard, relations: Any, own: bool) -> Any:
    """Where a shard takes relations from: its own documents; else the first asks for all."""
    if own:
        return None if shard.related else False
    return relations if number == 0 else False


def _profile(model: AnyModel, part: Corpus, relations: Any, how: _How, progress: Progress | None) -> Profile:
    return profile(model, part, relations=relations, causal=False, progress=progress, **asdict(how))


def _named(relations: Any) -> Any:
    """Relations as a worker can find them."""
    if relations in (None, False):
        return relations
    given = Corpus.of(relations)
    if given.name == PROBE:
        return PROBE
    if not given.files:
        raise HeadwiseError("workers read relations by themselves: give a file of them.")
    return [str(file.resolve()) for file in given.files]


def _elsewhere(
    name: str, digest: str, files: list[str], called: str, shard: dict, relations: Any, how: dict, place: str
) -> None:
    """One shard, by a worker that knows no more than this."""
    if Path(place).is_file():
        return  # somebody was quicker
    model = _model(name)
    if weights_digest(model) != digest:
        raise HeadwiseError(
            f"{name} has other weights at this worker than where the work was begun; give all the same."
        )
    given = Corpus.probe() if relations == PROBE else [Path(one) for one in relations] if relations else relations
    part = TextShard(**shard).read(sources_of(files), called)
    _profile(model, part, given, _How(**how), None).save(place)


@lru_cache(maxsize=1)
def _model(name: str) -> AnyModel:
    return load(name)


def _finish(
    model: AnyModel,
    merged: Profile,
    corpus: Corpus,
    arcs: Any,
    own: bool,
    how: _How,
    causal: bool,
    prompts: bool,
    progress: Progress,
) -> Profile:
    """What looks at texts of several shards, or at none of them: how far attention varies between the first ones, prompts,
    and ablations."""
    texts = Reading.of(model, corpus, how.longest)
    asks = causal and model.spec.kind == "decoder" and model.output is not None
    kept = KeptTexts(asks)
    for unit in texts:
        kept.see_text(unit)
        if own and asks:
            kept.see_document(unit)
        elif kept.full:
            break
    if asks and not own and arcs is not False:
        for unit in Reading.of(model, arcs, how.longest):
            if unit.document is not None:
                kept.see_document(unit)
    tally = merged.tally
    if len(kept.long) > 1:
        fresh = Tally(len(merged.addresses))
        with quiet(model), torch.no_grad():
            read_alike(model, kept.long, fresh)
        for mine, new in ((tally.sums, fresh.sums), (tally.counts, fresh.counts)):
            mine[VARIABILITY.name] = new[VARIABILITY.name]

    roles, numbers, about, cases = merged.own, dict(merged.numbers), merged.about, merged.cases
    if prompts:
        tasks = prompted_measures()
        with quiet(model), torch.no_grad():
            more, cases = run_tasks(model, tasks, tally, cases, how.seed, progress)
        about = {**about, **more}
        roles, numbers = PROMPTED, numbers | {number.name: number for task in tasks for number in task.numbers}

    def climbs(found: Supports) -> Supports:
        with quiet(model), torch.no_grad():
            related = kept.few.units.values()
            return climb(model, merged.addresses, found, related, kept.first, how.seed + 1, progress)

    return Profile.of(
        merged.addresses, tally, merged.relations, merged.hardest, cases, about, numbers, roles, climbs if asks else None,
    )  # fmt: skip
