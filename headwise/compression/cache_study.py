"""Reduce the KV cache and measure the result against random plans of equal size. Called by `headwise cache`."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.passkey_test import make_passkey_cases, run_passkeys
from headwise.compression.plan import apply, plan_pruning, plan_streaming
from headwise.compression.plan_report import apply_random_compression
from headwise.compression.streaming_loss_evaluator import StreamingHeadLossEvaluator, TextKindStreamingCost
from headwise.compression.streaming_selection import StreamingRequest
from headwise.distributed.parallel_strategy_cost import cache_bytes
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.io.atomic_write import atomic_folder
from headwise.model import ModelProtocol
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address, CachePolicy, Plan
from headwise.spec.cache_policy import CACHE_BITS as CACHE_BITS
from headwise.spec.cache_policy import KEEP_ALL
from headwise.text.corpus import Corpus

DEFAULT_LENGTH = 1024  # tokens per text
CACHE_USAGE = (
    "fraction, heads, bits, plan: say how to reduce the cache. Use fraction=0.5 (select streaming KV heads), heads='5.*' "
    "(name them), bits=8 (quantize the cache), or a saved plan; at most one of fraction, heads and plan."
)


@dataclass(frozen=True)
class CacheStudyConfig:
    """Options of `cache_study`: the cache policies of KV heads and the texts that evaluate them.

    KV heads are ranked on one half of the corpus and evaluated on the other half, unless `test` gives separate texts. Only
    tokens after the first eviction are evaluated, because earlier tokens cannot differ.

    Attributes:
        fraction: Fraction of the KV heads that stream, selected by `ranking`.
        heads: KV heads that stream, by address or pattern, instead of `fraction`.
        sink_tokens: First tokens of a text that a streaming KV head caches.
        window: Last tokens that it caches.
        bits: Bits of the cached keys and values of all KV heads.
        ranking: Ranking method of `StreamingRequest`.
        pattern: File with a score per KV head, such as DuoAttention's `full_attention_heads.tsv`, instead of `ranking`.
        plan: A plan made before, instead of the fields above.
        corpus: A text, a list of texts, a path or a Corpus. None: the embedded probe set, its sentences joined.
        test: Texts for the evaluation. None takes half of the corpus.
        max_texts: Maximum number of texts of the corpus and of `test`.
        max_length: Tokens per text. None: 1024, or the context of the model if it is shorter.
        seed: Seed of random rankings, gates and pass keys.
        gate_steps: Training steps of learned gates.
        rounds: Number of selection rounds.
        protected_fraction: Fraction of the KV heads that never stream: those that find repeated or copied tokens best.
        seeds: Number of random plans to compare with.
        fractions: Also measure a curve with each of these fractions of KV heads streaming.
        passkeys: Number of pass-key prompts of `max_length` tokens. If positive, losses on retrieval texts are also measured.

    >>> CacheStudyConfig(fraction=0.5, window=64).applies_plan
    True
    """

    fraction: float | None = None
    heads: str | None = None
    sink_tokens: int = 4
    window: int = 128
    bits: int = 32
    ranking: str = "output"
    plan: Plan | None = None
    corpus: Any = None
    test: Any = None
    max_texts: int = 8
    max_length: int | None = None
    seed: int = 0
    gate_steps: int = 60
    rounds: int = 1
    protected_fraction: float = 0.0
    seeds: int = 3
    fractions: tuple[float, ...] = ()
    passkeys: int = 0
    pattern: str | Path | None = None

    def __post_init__(self) -> None:
        selections = [self.fraction is not None, self.heads is not None, self.plan is not None]
        if sum(selections) > 1 or not (any(selections) or self.bits != KEEP_ALL.bits or self.fractions):
            raise ArgumentError(CACHE_USAGE)
        if self.plan is not None and (not self.plan.cache or self.plan.pruned_heads or self.plan.weight_rules):
            raise ArgumentError(
                "plan: a cache study needs a plan that changes only caches, and this plan prunes heads, quantizes weights or "
                "has no cache rules. Use hw.apply(plan, model), or make a plan with hw.plan_streaming(model)."
            )
        CachePolicy(self.bits, self.sink_tokens, self.window)  # raises if the policy is not valid

    @property
    def applies_plan(self) -> bool:
        """Whether the study changes caches. If False, it only measures a curve."""
        return (
            self.fraction is not None or self.heads is not None or self.plan is not None or self.bits != KEEP_ALL.bits
        )

    def streaming_request(
        self, fraction: float, protected_fraction: float, corpus: TokenizedCorpus, max_length: int
    ) -> StreamingRequest:
        """Return the request that selects this fraction of the KV heads on a corpus."""
        return StreamingRequest(
            fraction=fraction,
            sink_tokens=self.sink_tokens,
            window=self.window,
            bits=self.bits,
            ranking=self.ranking if self.pattern is None else "pattern",
            pattern=self.pattern,
            corpus=corpus,
            max_length=max_length,
            seed=self.seed,
            gate_steps=self.gate_steps,
            rounds=self.rounds,
            protected_fraction=protected_fraction,
        )

    @property
    def needs_corpus_split(self) -> bool:
        """Whether KV heads are selected on texts, so that other texts must be held out for the evaluation."""
        return self.fraction is not None or bool(self.fractions)


@dataclass(frozen=True)
class CacheCurvePoint:
    """One point of the curve.

    Attributes:
        label: Ranking method, "random" or "all at fewer bits".
        streaming_heads: Number of streaming KV heads.
        bits: Bits of cached keys and values.
        cache_bytes: Bytes of a cache of `length` tokens.
        loss_increase: Loss minus the loss with the full cache, paired by text. Random plans: mean, minimum and maximum.
    """

    label: str
    streaming_heads: int
    bits: int
    cache_bytes: int
    loss_increase: LossEstimate


@dataclass(frozen=True)
class CacheReport:
    """Size and loss of a reduced cache, compared with the full cache. Confidence intervals are over texts.

    Attributes:
        metric: Unit of the losses.
        texts: Number of texts.
        skip_tokens: First tokens of each text that are not evaluated, because no KV head has evicted a token yet.
        length: Number of tokens for which cache bytes are given.
        bytes_before: Bytes of the full cache.
        bytes_after: Bytes of the reduced cache.
        loss_before: Loss with the full cache.
        loss_after: Loss with the reduced cache.
        loss_increase: Loss after minus loss before.
        random: Loss of each random plan of equal size.
        increase_over_random: Loss of the plan minus the mean loss of the random plans.
        passkeys: (n, m): the full cache finds m pass keys, and the reduced cache finds n of these.
        retrieval: Loss increases on repeated lists and on questions about facts.
    """

    metric: str
    texts: int
    skip_tokens: int
    length: int
    bytes_before: int
    bytes_after: int
    loss_before: LossEstimate
    loss_after: LossEstimate
    loss_increase: LossEstimate
    random: tuple[float, ...] = ()
    increase_over_random: LossEstimate | None = None
    passkeys: tuple[int, int] | None = None
    retrieval: tuple[TextKindStreamingCost, ...] = ()

    @property
    def compression_ratio(self) -> float:
        """Bytes of the full cache divided by bytes of the reduced cache."""
        return self.bytes_before / self.bytes_after

    def loss_rows(self) -> list[list[str | float]]:
        """Return rows of label, mean, low and high."""
        estimates = {
            "full cache": self.loss_before,
            "this plan": self.loss_after,
            "this plan − full cache": self.loss_increase,
        }
        if self.increase_over_random is not None:
            seeds = f"random plans, {len(self.random)} seeds: mean, min, max"
            mean_min_max = LossEstimate(float(np.mean(self.random)), min(self.random), max(self.random))
            estimates |= {seeds: mean_min_max, "this plan − random": self.increase_over_random}
        estimates |= {f"this plan − full cache, {cost.kind}": cost.loss_increase for cost in self.retrieval}
        return [[name, *asdict(estimate).values()] for name, estimate in estimates.items()]


@dataclass(frozen=True, eq=False)
class CacheStudyResult:
    """Result of `cache_study`.

    Attributes:
        plan: The plan that was applied. None if only a curve was measured.
        model: The model with the cache policies of the plan in its spec. None if only a curve was measured.
        report: Sizes and losses. None if only a curve was measured.
        curve: Points of the curve. Empty if it was not requested.
    """

    plan: Plan | None
    model: ModelProtocol | None
    report: CacheReport | None
    curve: tuple[CacheCurvePoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        plan, report_dict = self.plan, None
        if self.report is not None:
            report_dict = asdict(self.report, dict_factory=nan_to_none) | {
                "compression_ratio": self.report.compression_ratio
            }
        return {
            "plan": None if plan is None else {
                "ranking": plan.cache_ranking, "corpus": plan.cache_corpus, "rules": [asdict(rule) for rule in plan.cache],
                "scores": dict(zip(map(str, plan.spec.cached_kv_head_addresses), plan.cache_scores, strict=False)),
            },
            "report": report_dict,
            "curve": [asdict(point, dict_factory=nan_to_none) for point in self.curve],
        }  # fmt: skip


@shows_progress
def cache_study(
    model: ModelProtocol,
    study: CacheStudyConfig,
    *,
    out: str | Path | None = None,
    save_plan: str | Path | None = None,
    progress: ProgressOption = None,
) -> CacheStudyResult:
    """Reduce the KV cache of a model and report bytes and loss, compared with random plans of equal size.

    Args:
        model: A decoder with a tokenizer, native or attached. It is not changed.
        study: Cache policies, texts and baselines.
        out: Folder for the model with the new cache policies. None writes no model.
        save_plan: File for the plan. None writes no plan. Model and plan are written before the evaluation starts.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The plan, the model, the report and the curve. A part that was not requested is None or empty.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> from headwise.model import Transformer
    >>> model = Transformer(ModelSpec(vocab=257, context=64, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> lines = [f"{n} and {n} are {2 * n}, and so on and so on, and on and on." for n in range(8)]
    >>> result = cache_study(model, CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, corpus=lines, seeds=1))
    >>> result.plan.cache[0].policy, result.report.skip_tokens, result.report.texts
    (CachePolicy(bits=32, sink_tokens=1, window=8), 9, 4)
    """
    progress = callback_of(progress)
    _check(model, study, saves_output=out is not None or save_plan is not None)
    length = min(DEFAULT_LENGTH, model.spec.context) if study.max_length is None else study.max_length
    selection_corpus, test_corpus = _split_texts(model, study, length)
    plan = changed_model = report = None
    # Open the output folder first, so that an unwritable folder raises before the long computation.
    with nullcontext() if out is None else atomic_folder(out, ("spec.json", "headwise.json")) as folder:
        if study.applies_plan:
            plan = _make_plan(model, study, selection_corpus, length, progress)
            changed_model = apply(plan, model, check=study.plan is not None)
        if plan is not None and save_plan is not None:
            plan.save(save_plan)
        if changed_model is not None and folder is not None:
            changed_model.save(folder)
    skip_tokens = _tokens_before_eviction(study, plan)
    evaluation = PairedEvaluator.of(model, test_corpus, skip_tokens=skip_tokens)
    if plan is not None and changed_model is not None:
        report = _make_report(model, changed_model, evaluation, study, skip_tokens, length, test_corpus, progress)
    points = _make_curve(model, study, plan, selection_corpus, evaluation, length, progress) if study.fractions else ()
    return CacheStudyResult(plan, changed_model, report, points)


def _make_plan(
    model: ModelProtocol,
    study: CacheStudyConfig,
    selection_corpus: TokenizedCorpus,
    length: int,
    progress: Progress | None,
) -> Plan:
    if study.plan is not None:
        return study.plan
    if study.fraction is not None:
        request = study.streaming_request(study.fraction, study.protected_fraction, selection_corpus, length)
        return plan_streaming(model, request, progress=progress)
    base_policies = {} if study.bits == KEEP_ALL.bits else {"*": study.bits}
    named_policies = (
        {} if study.heads is None else {study.heads: CachePolicy(study.bits, study.sink_tokens, study.window)}
    )
    return plan_pruning(model, cache=base_policies | named_policies)


def _make_report(
    model: ModelProtocol,
    changed_model: ModelProtocol,
    evaluation: PairedEvaluator,
    study: CacheStudyConfig,
    skip_tokens: int,
    length: int,
    test_corpus: TokenizedCorpus,
    progress: Progress | None,
) -> CacheReport:
    losses, random_losses = evaluation.losses_per_text(changed_model), list[np.ndarray]()
    same_everywhere = len(changed_model.spec.cache) == 1 and len(changed_model.spec.cache[0].heads) == len(
        changed_model.spec.cached_kv_head_addresses
    )
    for seed in range(
        0 if same_everywhere else study.seeds
    ):  # with one policy for all KV heads, no random plan differs
        random_losses.append(
            evaluation.losses_per_text(apply_random_compression(model, changed_model.spec, None, seed))
        )
        if progress is not None:
            progress("random plans", seed + 1, study.seeds)
    passkey_counts, retrieval = None, ()
    if study.passkeys:
        retrieval = _retrieval_loss_increases(model, changed_model, test_corpus)
        cases = make_passkey_cases(
            model, " ".join(sample.text for sample in test_corpus), length, study.passkeys, study.seed
        )
        full_results = run_passkeys(model, cases)
        passkey_counts = run_passkeys(changed_model, cases).count_retained(full_results)
    return CacheReport(
        metric=evaluation.metric,
        texts=int((evaluation.counts > 0).sum()),
        skip_tokens=skip_tokens,
        length=length,
        bytes_before=cache_bytes(model.spec, length),
        bytes_after=cache_bytes(changed_model.spec, length),
        loss_before=evaluation.mean_loss(evaluation.full_losses_per_text),
        loss_after=evaluation.mean_loss(losses),
        loss_increase=evaluation.difference(losses, evaluation.full_losses_per_text),
        random=tuple(float(plan_losses.sum() / evaluation.counts.sum()) for plan_losses in random_losses),
        increase_over_random=evaluation.difference_from_random(losses, random_losses) if random_losses else None,
        passkeys=passkey_counts,
        retrieval=retrieval,
    )


def _retrieval_loss_increases(
    model: ModelProtocol, changed_model: ModelProtocol, test_corpus: TokenizedCorpus
) -> tuple[TextKindStreamingCost, ...]:
    """Return loss increases on texts longer than the longest window of the plan. Empty if no KV head streams."""
    policies = [rule.policy for rule in changed_model.spec.cache if rule.policy.window is not None]
    if not policies:
        return ()
    largest = max(policies, key=lambda policy: policy.sink_tokens + (policy.window or 0))
    return (
        StreamingHeadLossEvaluator.of(model, largest, test_corpus, include_running_text=False).test(changed_model).costs
    )


def _make_curve(
    model: ModelProtocol,
    study: CacheStudyConfig,
    plan: Plan | None,
    selection_corpus: TokenizedCorpus,
    evaluation: PairedEvaluator,
    length: int,
    progress: Progress | None,
) -> tuple[CacheCurvePoint, ...]:
    """Return points for each fraction, by the requested ranking and at random, and for all KV heads at fewer bits."""
    ranked_plan = plan
    if ranked_plan is None or not ranked_plan.cache_scores:
        fraction = max(study.fractions)
        protected_fraction = min(study.protected_fraction, 1 - fraction)
        request = study.streaming_request(fraction, protected_fraction, selection_corpus, length)
        ranked_plan = plan_streaming(model, request, progress=progress)
    heads = model.spec.cached_kv_head_addresses
    order = [heads[i] for i in np.argsort(ranked_plan.cache_scores, kind="stable")]
    policy = CachePolicy(study.bits, study.sink_tokens, study.window)
    make_point = partial(_curve_point, model, evaluation, length)
    fractions, points = sorted(set(study.fractions)), list[CacheCurvePoint]()
    for done, fraction in enumerate(fractions, 1):
        count = round(fraction * len(heads))
        points.append(
            make_point(
                ranked_plan.cache_ranking, count, study.bits, [_streaming_policies(order[:count], policy, heads)]
            )
        )
        random_subsets = [np.random.default_rng(seed).permutation(len(heads))[:count] for seed in range(study.seeds)]
        if random_subsets:
            rules = [_streaming_policies([heads[i] for i in subset], policy, heads) for subset in random_subsets]
            points.append(make_point("random", count, study.bits, rules))
        if progress is not None:
            progress("plans of the curve", done, len(fractions))
    points += [make_point("all at fewer bits", 0, bits, [{"*": bits}]) for bits in CACHE_BITS[1:]]
    return tuple(points)


def _streaming_policies(
    streaming_heads: Sequence[Address], policy: CachePolicy, heads: Sequence[Address]
) -> dict[str, CachePolicy | int]:
    """Return policies with some KV heads streaming and the others with a full cache, all at the same bits."""
    policies: dict[str, CachePolicy | int] = (
        {} if policy.bits == KEEP_ALL.bits else {",".join(map(str, heads)): policy.bits}
    )
    return policies | ({",".join(map(str, streaming_heads)): policy} if streaming_heads else {})


def _curve_point(
    model: ModelProtocol,
    evaluation: PairedEvaluator,
    length: int,
    label: str,
    count: int,
    bits: int,
    policy_sets: list[dict[str, CachePolicy | int]],
) -> CacheCurvePoint:
    """Return the loss increase of one plan with its interval, or the mean, minimum and maximum over several plans."""
    models = [model.prune((), cache=rules) if rules else model for rules in policy_sets]
    losses = [evaluation.losses_per_text(item) for item in models]
    differences = [evaluation.difference(model_losses, evaluation.full_losses_per_text) for model_losses in losses]
    means = [item.mean for item in differences]
    loss_increase = (
        differences[0]
        if len(differences) == 1 and label != "random"
        else LossEstimate(float(np.mean(means)), min(means), max(means))
    )
    return CacheCurvePoint(label, count, bits, cache_bytes(models[0].spec, length), loss_increase)


def _tokens_before_eviction(study: CacheStudyConfig, plan: Plan | None) -> int:
    """Return the number of first tokens that no KV head of the plan or the curve has evicted yet."""
    rules = () if plan is None else plan.cache
    capacities = [rule.policy.sink_tokens + rule.policy.window for rule in rules if rule.policy.window is not None]
    capacities += [study.sink_tokens + study.window] if study.fractions else []
    return min(capacities) if capacities else 0


def _split_texts(model: ModelProtocol, study: CacheStudyConfig, length: int) -> tuple[TokenizedCorpus, TokenizedCorpus]:
    """Return the texts on which KV heads are ranked and the texts for the evaluation."""
    corpus = study.corpus
    if corpus is None:  # single sentences are shorter than the window
        corpus = " ".join(item.text for item in Corpus.probe_set().items())
    texts = TokenizedCorpus.of(model, corpus, length).first(study.max_texts)
    if study.test is not None:
        return texts, TokenizedCorpus.of(model, study.test, length).first(study.max_texts)
    return texts.halves() if study.needs_corpus_split else (texts, texts)


def _check(model: ModelProtocol, study: CacheStudyConfig, *, saves_output: bool) -> None:
    if model.spec.kind != "decoder":
        raise UnsupportedModelError(
            f"model: only a decoder generates text with a KV cache. Got an {model.spec.kind}. Use a decoder."
        )
    if model.tokenizer is None or model.output is None:
        raise UnsupportedModelError(
            "model: it has no tokenizer or no language modeling head, so the loss with a smaller cache cannot be measured. "
            "Make a plan without evaluation: hw.plan_pruning(model, cache=…)."
        )
    if saves_output and not study.applies_plan:
        raise ArgumentError(CACHE_USAGE)
    if study.max_texts < 2 and study.needs_corpus_split and study.test is None:
        raise ArgumentError(
            "max_texts: ranking KV heads and evaluating them need different texts, so at least 2. "
            f"Got {study.max_texts}. Increase max_texts, or give test=…."
        )
