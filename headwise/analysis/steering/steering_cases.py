# ruff: noqa: E501 (texts)
"""Three cases of steering with their texts, held-out prompts, judges and rule: sentiment, tense and format.

The rule, fixed before the final run (seed 2026, SmolLM2-135M-Instruct):

1. `find_steering` (mean difference, 16 heads) finds a steering from the texts of the case, strength within KL 0.2 on other text.
2. The steered model, the plain model, five random steerings (random heads, random directions of the same norms)
   continue the held-out prompts greedily. No prompt or answer of these is among the texts of step 1.
3. A judge gives each continuation a score from -1 to 1. The outcome is the mean over prompts.
4. A case works if the result of step 1 is effective on held-out texts, the 95% bootstrap interval over prompts of steered minus plain
   and of steered minus random is above 0, and the one-sided sign-flip p-value of steered minus random, Holm-corrected
   over the three cases, is at most 0.05. Otherwise it does not work, and is reported as such.

The second judge of sentiment is a linear classifier of MiniLM embeddings, trained on other sentences. It is reported,
not part of the rule.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.metrics.statistics import bootstrap_interval, holm_correction, sign_flip_test
from headwise.analysis.steering.contrast_texts import random_directions
from headwise.analysis.steering.find_steering import find_steering
from headwise.analysis.steering.resumable_steps import ResumableStepRunner
from headwise.analysis.steering.steering import Steering
from headwise.analysis.steering.steering_result import MeanEstimate, SteeringResult
from headwise.errors import ArgumentError, UnsupportedModelError, suggest_names
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import ProgressOption, callback_of, shows_progress

MAX_NEW_TOKENS = 20
MAX_TEXTS = 16  # other texts for side effects
NUM_RANDOM_CONTINUATIONS = 5
NUM_EXAMPLES = 4  # continuations that are printed
Judge = Callable[[str], float]

_SUBJECTS = (
    "The food", "The staff", "The room", "The film", "The concert", "The book", "The service", "The trip", "The lesson",
    "The garden", "The party", "The hotel",
)  # fmt: skip
_SENTIMENTS = (
    (" was wonderful and everyone loved it.", " was terrible and everyone hated it."),
    (" was excellent, better than we had hoped.", " was awful, worse than we had feared."),
)
_VERBS = (
    ("walks to the market", "walked to the market"), ("opens the old door", "opened the old door"),
    ("writes a long letter", "wrote a long letter"), ("sings in the kitchen", "sang in the kitchen"),
    ("carries the bags home", "carried the bags home"), ("finds a small coin", "found a small coin"),
    ("drinks a cup of tea", "drank a cup of tea"), ("takes the early train", "took the early train"),
    ("is very tired", "was very tired"), ("has two brothers", "had two brothers"),
    ("waits near the river", "waited near the river"), ("sees a bright light", "saw a bright light"),
)  # fmt: skip
_PERSONS = ("She", "The farmer")
_THREES = (
    ("fruits", "Apple", "banana", "orange"), ("colors", "Red", "blue", "green"), ("animals", "Dog", "cat", "horse"),
    ("countries", "France", "Japan", "Brazil"), ("planets", "Mars", "Venus", "Jupiter"), ("metals", "Iron", "copper", "gold"),
    ("sports", "Tennis", "football", "golf"), ("tools", "Hammer", "saw", "drill"), ("rivers", "Nile", "Amazon", "Rhine"),
    ("drinks", "Tea", "coffee", "milk"), ("flowers", "Rose", "tulip", "lily"), ("birds", "Eagle", "owl", "robin"),
    ("cities", "Paris", "London", "Rome"), ("languages", "French", "Hindi", "Arabic"), ("months", "May", "June", "July"),
    ("trees", "Oak", "pine", "birch"),
)  # fmt: skip
_STORY_PROMPTS = (
    "My cousin opened the envelope and", "After the meeting, the manager", "On Sunday morning, the two neighbors",
    "When the bus arrived, the passengers", "The new phone from the shop", "Our visit to the museum", "The report about the school",
    "Her first day at the office", "The soup that my uncle cooked", "The children came home from the lake and",
    "In the evening, the old captain", "The painting on the wall", "The letter from the bank", "The car that he bought",
    "The speech of the mayor", "The weekend at the farm", "The doctor looked at the results and", "The team from the north",
    "The song on the radio", "The shoes in the window", "The answer of the company", "The game on Saturday",
    "The tour through the castle", "The baker around the corner", "The beach behind the hotel", "The cake on the table",
    "The laptop that I ordered", "The nurse at the front desk", "The journey by train", "The house on the hill",
    "The course about statistics", "The puppy in the yard",
)  # fmt: skip
_TENSE_PROMPTS = (
    "In the village, the old man", "Near the harbor, a boy", "My neighbor Anna", "The king of the island", "A young doctor",
    "The woman with the red hat", "The teacher of the class", "My best friend", "The captain of the ship", "A tired soldier",
    "The girl next door", "The owner of the shop", "Our new manager", "The driver of the truck", "A famous painter",
    "The baker in our street", "The youngest son", "The lawyer from the city", "A clever fox", "The queen of the forest",
    "The nurse at the hospital", "My grandmother", "The engineer", "A lonely traveler", "The student in the back row",
    "The dog of the family", "The mayor of the town", "A rich merchant", "The boy with the kite", "The judge", "The waiter",
    "The pilot of the plane",
)  # fmt: skip
_QUESTIONS = (
    "What are good habits for the morning?", "How can I save money?", "What do I need to bake bread?", "How can I sleep better?",
    "What should I pack for a hike?", "Which instruments are in an orchestra?", "How do I prepare for an interview?",
    "What are the benefits of exercise?", "How can I learn a language?", "What are signs of stress?",
    "How do I clean a bicycle?", "What are popular board games?", "How can I help the environment?", "What are parts of a plant?",
    "How do I write a good letter?", "What are common pets?", "How can I become a better reader?", "What belongs in a salad?",
    "How do I plan a birthday party?", "What are famous museums?", "How can I drink more water?", "What are kinds of weather?",
    "How do I stay safe online?", "What are simple science experiments?", "How can I be more polite?", "What makes a good friend?",
    "How do I take better photos?", "What are healthy snacks?", "How can I improve my memory?", "What are types of music?",
    "How do I grow tomatoes?", "What are important inventions?",
)  # fmt: skip

POSITIVE_WORDS = frozenset(
    """amazing beautiful best better bright brilliant celebrate charming cheerful comfortable delicious delight delighted delightful
    enjoy enjoyed excited exciting fantastic favorite friendly fun glad good gorgeous grateful great happily happy
    helpful honor impressed joy laughed lovely love loved lucky nice outstanding perfect pleasant pleased pleasure
    positive praised proud smiled
    smiling succeed success successful superb thankful thrilled warm welcoming win won wonderful""".split()  # noqa: SIM905
)
NEGATIVE_WORDS = frozenset(
    """abandoned accident afraid angry annoyed anxious awful bad boring broke broken cold complained complaint cried crying damage
    dangerous dead death died difficult dirty disappointed disappointing disappointment disaster disgusting
    embarrassed fail failed failure fear frustrated horrible hurt lost mess miserable missing mistake nervous pain
    poor problem problems rude sad scared
    shocked sick terrible tired trouble ugly unhappy upset worried worse worst wrong""".split()  # noqa: SIM905
)
_PAST = frozenset(
    """was were had did went came saw said took made got gave found knew thought told became left felt brought began kept held wrote
    stood heard let meant set met ran paid sat spoke lay led grew lost fell sent built understood drew broke spent
    rose drove bought
    wore chose ate sang drank slept stole taught threw woke won could would""".split()  # noqa: SIM905
)
_PRESENT = frozenset(
    """is are has does goes comes sees says takes makes gets gives finds knows thinks tells becomes leaves feels brings begins keeps
    holds writes stands hears lets means sets meets runs pays sits speaks lies leads grows loses falls sends builds
    understands draws breaks spends rises drives buys wears chooses eats sings drinks sleeps steals teaches throws
    wakes wins can will lives works likes
    loves wants needs looks walks plays helps uses enjoys decides starts tries asks calls""".split()  # noqa: SIM905
)
# Sentences for the classifier. None of them, and none of their subjects, is among the texts of the sentiment case.
_CLASSIFIER_SENTENCES = {
    1.0: (
        "I am so glad that my sister came.", "He smiled because the test went well.", "What a beautiful sunny afternoon!",
        "They won the match and danced all night.", "The kind waiter helped us a lot.", "She is proud of her great results.",
        "We laughed together and felt at home.", "This phone is the best I have owned.", "Thank you, it was a perfect evening.",
        "The children were happy with their presents.", "A delicious meal in a charming place.", "Our guide was friendly and fun.",
        "I love the bright colors of this painting.", "The doctor had good news for us.", "It works perfectly and looks great.",
        "The view from the tower is amazing.",
    ),
    -1.0: (
        "I am upset that my sister left.", "He cried because the test went badly.", "What a cold and gray afternoon.",
        "They lost the match and blamed each other.", "The rude waiter ignored us all evening.", "She is ashamed of her poor results.",
        "We argued and felt lonely.", "This phone broke after two days.", "Sorry, it was a boring evening.",
        "The children were sad without their presents.", "A cold meal in a dirty place.", "Our guide was late and angry.",
        "I dislike the dull colors of this painting.", "The doctor had bad news for us.", "It never works and looks cheap.",
        "The view from the tower is disappointing.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SteeringCase:
    """Texts, held-out prompts and judge of a case.

    Attributes:
        name: Name.
        positive: Pairs (prompt, completion) to steer to.
        negative: Pairs of the opposite set.
        prompts: Held-out prompts.
        judge: Score of a continuation, from -1 to 1.
    """

    name: str
    positive: tuple[tuple[str, str], ...]
    negative: tuple[tuple[str, str], ...]
    prompts: tuple[str, ...]
    judge: Judge


@dataclass(frozen=True, eq=False, repr=False)
class SteeringCaseResult:
    """Result of one case.

    Attributes:
        name: Name of the case.
        search: Result of `find_steering`.
        scores: Mean score of the continuations by condition: plain, steered and random.
        above_plain: Steered minus plain, with its interval over prompts.
        above_random: Steered minus the mean of the random steerings.
        p_value: One-sided sign-flip p-value of steered minus random, before the correction for several cases.
        prompts: Held-out prompts.
        continuations: Continuation of each prompt by condition: plain, steered, random 0 and so on.
    """

    name: str
    search: SteeringResult
    scores: dict[str, float]
    above_plain: MeanEstimate
    above_random: MeanEstimate
    p_value: float
    prompts: tuple[str, ...]
    continuations: dict[str, list[str]]

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {score:+.3f}" for name, score in self.scores.items())
        lines = [
            f"continuations of held-out prompts, score from -1 to 1: {scores}",
            f"  steered minus plain           {self.above_plain}",
            f"  steered minus random          {self.above_random}, p = {self.p_value:.4f}",
        ]
        continuations = (self.prompts, self.continuations["plain"], self.continuations["steered"])
        for prompt, plain, steered in list(zip(*continuations, strict=True))[:NUM_EXAMPLES]:
            lines += [f"  {prompt!r}", f"    plain    {plain!r}", f"    steered  {steered!r}"]
        return "\n".join(lines)

    def mean_score(self, condition: str, judge: Judge) -> float:
        """Return the mean score of the continuations of a condition by another judge."""
        return float(np.mean([judge(text) for text in self.continuations[condition]]))

    def works(self, corrected_p: float) -> bool:
        """Apply the rule with the corrected p-value."""
        above = self.above_plain.low > 0 and self.above_random.low > 0
        return self.search.is_effective and above and corrected_p <= 0.05

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "case": self.name, "scores": self.scores, "above_plain": asdict(self.above_plain),
            "above_random": asdict(self.above_random), "p_value": self.p_value,
            "prompts": list(self.prompts),
            "continuations": self.continuations, "search": self.search.to_dict(),
        }  # fmt: skip


def word_balance(text: str, up: frozenset[str], down: frozenset[str]) -> float:
    """Return (words in `up` − words in `down`) / their number, 0 if there are none.

    >>> word_balance("A lovely, lovely and sad day", POSITIVE_WORDS, NEGATIVE_WORDS)
    0.3333333333333333
    """
    words = re.findall(r"[a-z]+", text.lower())
    ups, downs = sum(word in up for word in words), sum(word in down for word in words)
    return (ups - downs) / (ups + downs) if ups + downs else 0.0


def sentiment_score(text: str) -> float:
    """Score the sentiment of a text by word lists, from -1 to 1."""
    return word_balance(text, POSITIVE_WORDS, NEGATIVE_WORDS)


def tense_score(text: str) -> float:
    """Score past against present verbs of a text, from -1 (present) to 1 (past). Words in -ed count as past.

    >>> tense_score("She walked home and is here"), tense_score("He sings")
    (0.0, -1.0)
    """
    words = re.findall(r"[a-z]+", text.lower())
    regular = frozenset(word for word in words if word.endswith("ed") and len(word) > 4)
    return word_balance(text, _PAST | regular, _PRESENT)


def list_score(text: str) -> float:
    """Return 1 if a line of a text begins with a number and a point, or with a bullet, else -1.

    >>> list_score("1. Apple"), list_score("Apples are fruits. 1 is a number.")
    (1.0, -1.0)
    """
    return 1.0 if re.search(r"(?m)^\s*(\d+[.)]|[-*•])\s", text) else -1.0


def _chat_prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _list_and_prose_examples() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    lists = tuple(
        (_chat_prompt(f"Name three {k}."), f"1. {a}\n2. {b.capitalize()}\n3. {c.capitalize()}")
        for k, a, b, c in _THREES
    )
    prose = tuple((_chat_prompt(f"Name three {k}."), f"{a}, {b} and {c} are three {k}.") for k, a, b, c in _THREES)
    return lists, prose


CASES = {
    "sentiment": SteeringCase(
        "sentiment",
        tuple((subject, up) for subject in _SUBJECTS for up, _ in _SENTIMENTS),
        tuple((subject, down) for subject in _SUBJECTS for _, down in _SENTIMENTS),
        _STORY_PROMPTS,
        sentiment_score,
    ),
    "tense": SteeringCase(
        "tense",
        tuple(("", f"{person} {past}.") for past in (pair[1] for pair in _VERBS) for person in _PERSONS),
        tuple(("", f"{person} {present}.") for present in (pair[0] for pair in _VERBS) for person in _PERSONS),
        _TENSE_PROMPTS,
        tense_score,
    ),
    "format": SteeringCase("format", *_list_and_prose_examples(), tuple(map(_chat_prompt, _QUESTIONS)), list_score),
}


@shows_progress
def run_steering_case(
    model: ModelProtocol,
    case: str,
    *,
    num_heads: int = 16,
    strengths: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    num_random: int = 19,
    seed: int = 0,
    steps_file: str | Path | None = None,
    progress: ProgressOption = None,
) -> SteeringCaseResult:
    """Find a steering for a shipped case and judge continuations of held-out prompts.

    Args:
        model: A decoder with a tokenizer. The cases were written for SmolLM2-135M-Instruct.
        case: "sentiment", "tense" or "format".
        num_heads: Number of heads to steer.
        strengths: Strengths to try.
        num_random: Number of random baselines of the search.
        seed: Seed of halves and random baselines.
        steps_file: File of finished steps, to resume an interrupted run. The continuations are in a file next to it.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The result of the case.
    """
    progress = callback_of(progress)
    model.check_native("the shipped cases generate in batches, which only headwise's own models do; use hw.load")
    if case not in CASES:
        raise ArgumentError(f"case: {suggest_names(case, CASES)} Got {case!r}.")
    if model.spec.output != "lm" or model.spec.kind != "decoder":
        raise UnsupportedModelError(
            f"case: the shipped cases judge continuations, which need a decoder with an output layer. Got kind "
            f"{model.spec.kind!r}, output {model.spec.output!r}. Pass two sets of texts instead."
        )
    texts = CASES[case]
    search = find_steering(
        model, texts.positive, texts.negative, num_heads=num_heads, strengths=strengths, max_texts=MAX_TEXTS, seed=seed,
        num_random=num_random, name=case, steps_file=steps_file, progress=progress,
    )  # fmt: skip
    settings = {
        "case": case,
        "heads": list(search.steering.vectors),
        "strength": search.steering.strength,
        "seed": seed,
    }
    file = None if steps_file is None else Path(steps_file).with_suffix(".continuations.jsonl")
    runner = ResumableStepRunner(file, settings, progress, 2 + NUM_RANDOM_CONTINUATIONS)
    value_dims = {head.address: head.layer.spec.value_dim for head in model.heads}
    conditions: dict[str, Steering | None] = {"plain": None, "steered": search.steering}
    for draw in range(NUM_RANDOM_CONTINUATIONS):
        directions = random_directions(
            search.steering.vectors, model.heads.addresses, value_dims, 10_000 + 100 * seed + draw
        )
        conditions[f"random {draw}"] = Steering(directions, search.steering.strength)
    continuations = {
        name: runner.run(name, lambda steering=steering: _greedy_continuations(model, texts.prompts, steering))
        for name, steering in conditions.items()
    }
    scores = {name: np.array([texts.judge(text) for text in rows]) for name, rows in continuations.items()}
    random_scores = np.mean([rows for name, rows in scores.items() if name.startswith("random")], 0)
    means = {name: float(rows.mean()) for name, rows in scores.items() if not name.startswith("random")}
    means["random"] = float(random_scores.mean())
    above = scores["steered"] - random_scores
    return SteeringCaseResult(
        case,
        search,
        means,
        _mean_estimate(scores["steered"] - scores["plain"]),
        _mean_estimate(above),
        float(sign_flip_test(above, np.ones(len(above)))),
        texts.prompts,
        continuations,
    )


def corrected_p_values(results: Sequence[SteeringCaseResult]) -> dict[str, float]:
    """Return the p-values of several cases after the Holm correction."""
    corrected = holm_correction([result.p_value for result in results])
    return {result.name: float(p) for result, p in zip(results, corrected, strict=True)}


def sentiment_classifier(encoder: ModelProtocol) -> tuple[Judge, float]:
    """Train a linear sentiment classifier of sentence embeddings on sentences that no case uses.

    Args:
        encoder: An encoder for sentence embeddings, such as hw.load("minilm").

    Returns:
        The classifier, from a text to -1 or 1, and its leave-one-out accuracy on its sentences.
    """
    from headwise.text.sentence_embeddings import embed

    sentences = [sentence for group in _CLASSIFIER_SENTENCES.values() for sentence in group]
    labels = np.array([label for label, group in _CLASSIFIER_SENTENCES.items() for _ in group])
    vectors = embed(encoder, sentences).double().numpy()  # pyright: ignore[reportArgumentType]

    def fit(rows: np.ndarray) -> np.ndarray:
        x = vectors[rows]
        return np.linalg.solve(x.T @ x + 0.1 * np.eye(x.shape[1]), x.T @ labels[rows])

    everything = np.arange(len(sentences))
    hits = [np.sign(vectors[i] @ fit(everything != i)) == labels[i] for i in everything]
    weights = fit(everything >= 0)

    def judge(text: str) -> float:
        if not text.strip():
            return 0.0
        return float(np.sign(embed(encoder, [text]).double().numpy()[0] @ weights))  # pyright: ignore[reportArgumentType]

    return judge, float(np.mean(hits))


def _greedy_continuations(model: ModelProtocol, prompts: Sequence[str], steering: Steering | None) -> list[str]:
    """Return the greedy continuations of prompts, computed in one batch."""
    tokenizer: Any = model.tokenizer
    rows, end = [tokenizer.encode(prompt) for prompt in prompts], tokenizer.special.get("eos")
    options: dict[str, Any] = {} if end is None else {"stop": end}
    with eval_mode(model), nullcontext() if steering is None else steering.applied(model, check=False):
        generated = model.generate(rows, MAX_NEW_TOKENS, **options)
    return [tokenizer.decode(ids[len(row) :]) for row, ids in zip(rows, generated, strict=True)]


def _mean_estimate(values: np.ndarray) -> MeanEstimate:
    low, high = bootstrap_interval(values, np.ones(len(values)))
    return MeanEstimate(float(values.mean()), float(low), float(high))
