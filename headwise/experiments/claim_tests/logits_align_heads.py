"""Students' heads become aligned through the teacher's logits rather than by imitating each head."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headwise.analysis import match_heads, profile
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider

LAYERS = 4, 2  # layers of the teacher, and of its students
STEP_FRACTION = 0.5  # fraction of the default steps
MIN_GAP = 0.01  # nats per token
TEXTS = 64  # texts on which heads are matched
MAP_PAIRINGS = {"maps, by order": "order", "maps, first layers": "first", "maps, best assignment": "best"}
STUDENT_LOSSES = {"text": "", "logits": "logits", **{name: f"maps {pairs}" for name, pairs in MAP_PAIRINGS.items()}}
STUDENT_LOSSES |= {"qkv": "qkv", "logits and maps": "logits+maps best"}
LOSS, ACCURACY = "held-out loss", "right answers"
DISTANCE, ROLES = "bits from the nearest of the teacher's heads", "share of heads with a role"
GAP, APPROACH = "nats of maps above logits", "bits nearer to the teacher's heads"


def teacher_and_student_configs(experiment: TrainedModelProvider, seed: int) -> dict[str, ExperimentConfig]:
    """Return a teacher, and a student with half its layers and heads for each loss, with equal initialization and data."""
    steps = {"steps": max(8, int(experiment.size.steps * STEP_FRACTION))}
    teacher = replace(experiment.make_config(seed, layers=LAYERS[0], recipe=steps), checkpoint_steps=())
    student = replace(
        experiment.make_config(seed, max(1, experiment.size.heads // 2), layers=LAYERS[1], recipe=steps),
        checkpoint_steps=(),
    )
    students = {
        name: replace(student, distill_losses=losses, teacher=teacher if losses else None)
        for name, losses in STUDENT_LOSSES.items()
    }
    return {"teacher": teacher, **students}


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return the configurations of every seed, teachers first because students need them."""
    families = [teacher_and_student_configs(experiment, seed) for seed in experiment.seeds]
    yield from (models["teacher"] for models in families)
    yield from (config for models in families for name, config in models.items() if name != "teacher")


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure loss, synthetic evaluation, distance to the teacher's heads, and roles. Differences are paired by seed."""
    trained = [
        {
            name: experiment.train_or_load(config)
            for name, config in teacher_and_student_configs(experiment, seed).items()
        }
        for seed in experiment.seeds
    ]
    documents = experiment.held_out_corpus()
    statistics = StatisticTable()
    for name in ("teacher", *STUDENT_LOSSES):
        statistics.add(LOSS, name, [models[name].loss for models in trained])
        statistics.add(ACCURACY, name, [_mean_cloze_accuracy(models[name]) for models in trained])
        profiles = [profile(models[name].load_model(), documents, causal=False) for models in trained]
        statistics.add(
            ROLES, name, [float(np.mean([bool(head.roles) for head in head_profile])) for head_profile in profiles]
        )
    distances = {
        name: [_mean_distance(models["teacher"], models[name], experiment) for models in trained]
        for name in STUDENT_LOSSES
    }
    for name in STUDENT_LOSSES:
        statistics.add(DISTANCE, name, distances[name])
    for name in MAP_PAIRINGS:
        statistics.add(GAP, name, [models[name].loss - models["logits"].loss for models in trained])
    statistics.add(APPROACH, "logits, beside text", _reductions(distances["logits"], distances["text"]))
    for name in MAP_PAIRINGS:
        statistics.add("bits nearer than by text", name, _reductions(distances[name], distances["text"]))
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    gaps = statistics.by_condition(GAP)
    beaten = [str(name) for name, gap in gaps.items() if gap.is_interval_below(-MIN_GAP)]
    as_good = all(gap.is_interval_above(-MIN_GAP) for gap in gaps.values())
    aligned = statistics[APPROACH, "logits, beside text"].is_interval_above(0)
    if as_good and aligned:
        return Verdict("holds")
    if beaten and not aligned:
        return Verdict("does not hold", f"{beaten[0]} teach better, and logits bring heads no closer than text does")
    if beaten:
        return Verdict("depends", f"on the criterion: logits bring heads closer, but {beaten[0]} teach better")
    if as_good:
        return Verdict("depends", "on the criterion: logits teach as well, but bring heads no closer than text does")
    return Verdict("undecided", "an interval includes the threshold")


def _mean_cloze_accuracy(trained: TrainedModel) -> float:
    """Return the mean accuracy over the cloze probes."""
    return float(np.mean(list(trained.probe_accuracy.values()))) if trained.probe_accuracy else float("nan")


def _mean_distance(teacher: TrainedModel, student: TrainedModel, experiment: TrainedModelProvider) -> float:
    """Return the mean distance of a student's heads to the closest teacher head, selected on other texts."""
    return float(
        np.mean(
            [
                pair.distance
                for pair in match_heads(
                    teacher.load_model(), student.load_model(), experiment.held_out_corpus(), max_texts=TEXTS
                )
            ]
        )
    )


def _reductions(first: list[float], second: list[float]) -> list[float]:
    return [b - a for a, b in zip(first, second, strict=True)]


CLAIM = Claim(
    number=27,
    name="distillation",
    statement="Students' heads become aligned indirectly, through the teacher's logits, rather than by imitating each head.",
    counterevidence="A student trained on attention maps that is better than one trained on logits, or heads of a "
    "logit-trained student that are no closer to the teacher's heads than those of a student trained on the same text "
    "alone.",
    setup=f"A teacher of {LAYERS[0]} layers with the default heads, and students of {LAYERS[1]} layers with half as "
    f"many, each trained on the same documents for {STEP_FRACTION:.0%} of the default steps: on text alone, on logits, "
    "on maps (heads paired by order, with the teacher's first layers, or by the best assignment of the initial maps), on "
    "relations of q, k and v, on logits and maps. In addition to the loss and the synthetic evaluation: the distance to "
    "the closest teacher head (per word, selected on half of the texts, evaluated on the other), and the number of heads "
    "with a role.",
    rule="The loss with maps minus the loss with logits, for each pairing, and how much closer to the teacher's heads logits "
    "bring a student than text does, paired by seed. Holds if every pairing is significantly not better by "
    f"{MIN_GAP:g} nats per token, and heads are significantly closer. Does not hold if some pairing is significantly better "
    "by that and heads are not significantly closer. Depends on the criterion if only one of both is so. Otherwise "
    "undecided.",
    judged=statistic_key_selector(GAP, APPROACH),
    primary=PrimaryQuantity(GAP, "maps, by order", -MIN_GAP, "above", planned_seeds=20),
    measure=measure,
    judge=judge,
    plot=PlotSpec((LOSS,), x="", y="held-out loss, nats per token"),
    training_configs=training_configs,
)
