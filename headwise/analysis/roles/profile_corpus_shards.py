"""Profile a corpus of any size in shards, by one process or many workers, and merge the results.

Each finished shard is a profile in its own file, written atomically. An interrupted run resumes with the missing shards, with
any executor. The merged profile equals that of a single pass.
"""

import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.variability import VARIABILITY, accumulate_variability
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.causal_test import causal_test, supports_causal_test
from headwise.analysis.roles.merge_profiles import merge_sums
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile, ProfileSums, build_profile
from headwise.analysis.roles.profile_sums import RetainedTextCollector, ignore_progress, metric_specs_by_name, run_tasks
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES, prompt_metrics
from headwise.analysis.roles.roles import DEFAULT_ROLES, assess, score
from headwise.distributed.job_executors import check_executor, run_jobs_as_completed
from headwise.errors import ArgumentError, FileFormatError
from headwise.io.atomic_write import write_atomic
from headwise.model import ModelProtocol, eval_mode
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.text.corpus import Corpus
from headwise.text.corpus_shards import CorpusRange, file_sources, split_shards
from headwise.weights import load

SHARD_CHARACTERS = 1 << 20  # characters per shard: about 250,000 tokens of English
INDEX_FILE, MERGED_FILE = "shards.json", "profile.npz"
PROBE_SET = "the probe set"


@dataclass(frozen=True)
class _ShardOptions:
    """Options that are the same for every shard."""

    max_length: int | None
    batch_tokens: int
    row_stride: int
    seed: int


@shows_progress
def profile_shards(
    model: ModelProtocol | str,
    corpus: Any,
    out: str | Path,
    *,
    relations: Any = None,
    max_length: int | None = None,
    batch_tokens: int = 2048,
    row_stride: int = 1,
    causal: bool = True,
    prompts: bool = False,
    seed: int = 0,
    shard_characters: int = SHARD_CHARACTERS,
    processes: int | None = None,
    executor: Executor | str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    progress: ProgressOption = None,
) -> Profile:
    """Profile a corpus of any size: run `profile` shard by shard into a folder, and merge the shards.

    The merged profile is written to `profile.npz` in the folder. Repeat the call to resume an interrupted run. Relations from
    other documents, prompts and causal tests are run once for all shards.

    Args:
        model: A model, or its name or path. Workers need a name or path.
        corpus: Texts, as in `profile`. Workers need files.
        out: Folder for the shards and the merged profile.
        relations: Documents with gold arcs, if not those of the corpus. False measures no relations.
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.
        row_stride: For very long texts: one of every `row_stride` blocks of 64 query rows is measured.
        causal: Test roles causally, by ablation.
        prompts: Also test the roles that need prompts.
        seed: Seed of repeated tokens, tasks and causal tests.
        shard_characters: Approximate number of characters per shard.
        processes: Number of worker processes. None runs in this process.
        executor: Executor, or its name, that runs the shards.
        device: Device of a model given by name, here and in the workers, as in `hw.load`.
        dtype: Data type of a model given by name, as in `hw.load`.
        progress: Called with a label, the number of items done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The merged profile.
    """
    progress = callback_of(progress)
    check_executor(executor)
    out, report = Path(out), progress or ignore_progress
    full_corpus, in_process = Corpus.of(corpus), executor is None and processes in (None, 1)
    _check_corpus_and_workers(model, full_corpus, in_process=in_process)
    options = _ShardOptions(max_length, batch_tokens, row_stride, seed)
    loaded = load(model, device=device, dtype=dtype) if isinstance(model, str) else model
    digest = weights_digest(loaded)
    shards = _prepare_shards(
        out, full_corpus, digest, options, relations, {"causal": causal, "prompts": prompts or None}, shard_characters
    )
    if (out / MERGED_FILE).is_file():
        return Profile.load(out / MERGED_FILE)
    has_own_relations = relations is None and any(text_shard.has_relations for text_shard in shards)
    missing = [index for index in range(len(shards)) if not _shard_path(out, index).is_file()]
    done = len(shards) - len(missing)
    relations_of = {
        index: _relations_for(index, shards[index], relations, has_own_relations=has_own_relations) for index in missing
    }
    if in_process:
        sources = file_sources(full_corpus.files) or [full_corpus.items]
        for index in missing:
            report("shards", done, len(shards))
            shard_corpus = shards[index].to_corpus(sources, full_corpus.name)
            _profile_shard(loaded, shard_corpus, relations_of[index], options, progress).save(_shard_path(out, index))
            done += 1
    else:
        files = [str(file.resolve()) for file in full_corpus.files]
        jobs = [
            (
                (str(model), str(device), None if dtype is None else str(dtype).removeprefix("torch.")),
                digest,
                files,
                full_corpus.name,
                asdict(shards[n]),
                _portable_relations(relations_of[n]),
                asdict(options),
                str(_shard_path(out, n)),
            )
            for n in missing
        ]
        for _ in run_jobs_as_completed(_profile_in_worker, jobs, processes, executor=executor, folder=out):
            done += 1
            report("shards", done, len(shards))
    report("shards", len(shards), len(shards))
    sums = _merge_shards([_shard_path(out, index) for index in range(len(shards))], report)
    samples = RetainedTextCollector(keep_for_causal_test=causal and supports_causal_test(loaded))
    _collect_retained_texts(loaded, full_corpus, relations, samples, max_length, has_own_relations=has_own_relations)
    result = _finish(loaded, sums, samples, seed, report, prompts=prompts)
    result.save(out / MERGED_FILE)
    return result


def _check_corpus_and_workers(model: ModelProtocol | str, full_corpus: Corpus, *, in_process: bool) -> None:
    """Raise if the corpus, the environment or the workers do not fit."""
    if full_corpus.paired:
        raise ArgumentError(
            "corpus: pairs (source, text) are not supported. Pass texts; an encoder-decoder uses each text as source and "
            "target."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ArgumentError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: profile_shards cannot run under torchrun. Start it without torchrun and "
            f"use --workers or an executor, or run hw.profile under torchrun."
        )
    if not in_process and not (isinstance(model, str) and full_corpus.files):
        raise ArgumentError(
            "model, corpus: workers load both themselves. Pass the model as a name or path, and the corpus as files."
        )


def _prepare_shards(
    out: Path,
    corpus: Corpus,
    model: str,
    options: _ShardOptions,
    relations: Any,
    final_options: dict[str, Any],
    characters: int,
) -> list[CorpusRange]:
    """Return the shards of a folder: the existing ones if the settings are equal, or new ones."""
    settings = {
        **asdict(options), "model": model, "corpus": corpus.fingerprint,
        "shard_characters": characters, **final_options,
        "relations": relations if relations in (None, False) else Corpus.of(relations).fingerprint,
    }  # fmt: skip
    del settings["batch_tokens"]  # affects only the speed
    index = out / INDEX_FILE
    if index.is_file():
        try:
            stored = json.loads(index.read_text(encoding="utf-8"))
            stored_settings, shards = stored["settings"], [CorpusRange(**entry) for entry in stored["shards"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise FileFormatError(
                f"{index}: cannot be read. Delete the folder {out}, or choose another folder."
            ) from None
        changed = [name for name in {**stored_settings, **settings} if stored_settings.get(name) != settings.get(name)]
        if changed:
            raise FileFormatError(
                f"{out}: has the shards of a profile with other settings. Different: {', '.join(changed)}. "
                f"Choose another folder, or use the same settings."
            )
        return shards
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileFormatError(f"{out}: already exists and is not a folder of shards. Choose another folder.")
    shards = split_shards(corpus, characters)
    write_atomic(
        index, json.dumps({"settings": settings, "shards": [asdict(entry) for entry in shards]}, indent=1).encode()
    )
    return shards


def _shard_path(out: Path, index: int) -> Path:
    return out / f"shard-{index:05d}.npz"


def _relations_for(index: int, shard: CorpusRange, relations: Any, *, has_own_relations: bool) -> Any:
    """Return the relations of a shard: those of its own documents, or all other relations for the first shard."""
    if has_own_relations:
        return None if shard.has_relations else False
    return relations if index == 0 else False


def _profile_shard(
    model: ModelProtocol, corpus: Corpus, relations: Any, options: _ShardOptions, progress: Progress | None
) -> Profile:
    return profile(model, corpus, relations=relations, causal=False, progress=progress, **asdict(options))


def _portable_relations(relations: Any) -> Any:
    """Return the relations in a form that workers can load."""
    if relations in (None, False):
        return relations
    corpus = Corpus.of(relations)
    if corpus.name == PROBE_SET:
        return PROBE_SET
    if not corpus.files:
        raise ArgumentError(
            "relations: worker processes load the relations from a file, so documents in memory cannot be used. "
            "Pass the path of a file with documents."
        )
    return [str(file.resolve()) for file in corpus.files]


def _profile_in_worker(
    load_arguments: tuple[str, str, str | None],
    digest: str,
    files: list[str],
    corpus_name: str,
    shard: dict,
    relations: Any,
    options: dict,
    path: str,
) -> None:
    """Profile one shard in a worker process."""
    if Path(path).is_file():
        return  # another worker was faster
    model = _load_cached(*load_arguments)
    if weights_digest(model) != digest:
        raise FileFormatError(
            f"{load_arguments[0]}: this worker has other weights than the process that started the run. "
            f"Give all workers the same model files."
        )
    relation_corpus = (
        Corpus.probe_set() if relations == PROBE_SET else [Path(file) for file in relations] if relations else relations
    )
    shard_corpus = CorpusRange(**shard).to_corpus(file_sources(files), corpus_name)
    _profile_shard(model, shard_corpus, relation_corpus, _ShardOptions(**options), None).save(path)


@lru_cache(maxsize=1)
def _load_cached(name: str, device: str, dtype: str | None) -> ModelProtocol:
    return load(name, device=device, dtype=dtype)


def _merge_shards(paths: list[Path], progress: Progress) -> ProfileSums:
    """Merge the sums of all shards. Roles are assessed later, on the merged sums."""
    sums: ProfileSums = Profile.load(paths[0])
    for count, path in enumerate(paths[1:], 2):
        sums = merge_sums(sums, Profile.load(path))
        progress("merging", count, len(paths))
    return sums


def _collect_retained_texts(
    model: ModelProtocol,
    corpus: Corpus,
    relations: Any,
    samples: RetainedTextCollector,
    max_length: int | None,
    *,
    has_own_relations: bool,
) -> None:
    """Collect the texts that variability and the causal test need, from all shards."""
    keep_documents = samples.keep_for_causal_test
    for sample in TokenizedCorpus.of(model, corpus, max_length):
        samples.add_text(sample)
        if has_own_relations and keep_documents:
            samples.add_document(sample)
        elif samples.is_full:
            break
    if keep_documents and not has_own_relations and relations is not False:
        for sample in TokenizedCorpus.of(model, relations, max_length):
            if sample.document is not None:
                samples.add_document(sample)


@torch.no_grad()
def _finish(
    model: ModelProtocol,
    merged: ProfileSums,
    samples: RetainedTextCollector,
    seed: int,
    progress: Progress,
    *,
    prompts: bool,
) -> Profile:
    """Measure variability, prompts and causal tests, which are not per shard, and assess all roles."""
    accumulator, examples, metadata = merged.accumulator, merged.examples, merged.metadata
    tasks = prompt_metrics() if prompts else ()
    roles = PROMPT_ROLES if prompts else ()
    with eval_mode(model):
        if len(samples.long_samples) > 1:
            fresh = Accumulator(len(merged.addresses))
            accumulate_variability(model, samples.long_samples, fresh)
            accumulator.sums[VARIABILITY.name] = fresh.sums[VARIABILITY.name]
            accumulator.counts[VARIABILITY.name] = fresh.counts[VARIABILITY.name]
        if prompts:
            task_metadata, examples = run_tasks(model, tasks, accumulator, examples, seed, progress)
            metadata = {**metadata, **task_metadata}
        metric_specs = {**merged.metric_specs, **metric_specs_by_name(tasks)}
        sums = ProfileSums(
            merged.addresses, accumulator, merged.relation_metric, merged.top_contexts, examples, metadata, metric_specs
        )
        scores = score(accumulator, sums.relation_metric, (*DEFAULT_ROLES, *roles))
        evidence, family_size = assess(scores, len(sums.addresses), metadata)
        if samples.keep_for_causal_test:
            documents, texts = samples.relation_documents.samples.values(), samples.first_samples
            evidence = causal_test(model, sums.addresses, evidence, documents, texts, seed + 1, progress)
    return build_profile(sums, evidence, family_size, roles)
