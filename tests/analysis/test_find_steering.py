"""find_steering on a built model: one head reads whether words are good or bad, and writes it to the output."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.steering.contrast_texts import split_halves, tokenize_contrast_sets
from headwise.analysis.steering.steering_cases import (
    CASES,
    list_score,
    run_steering_case,
    sentiment_score,
    tense_score,
)
from headwise.errors import HeadwiseError
from headwise.text.build_tokenizers import word_tokenizer

transformers: Any = pytest.importorskip("transformers")

GOOD, BAD = [f"good{i}" for i in range(4)], [f"bad{i}" for i in range(4)]
FILLERS = [f"word{i}" for i in range(12)]
POSITIVE = [f"{a} {GOOD[i % 4]} {b} {GOOD[(i + 1) % 4]}" for i, (a, b) in enumerate(pairwise(FILLERS))]
NEGATIVE = [text.replace("good", "bad") for text in POSITIVE]
OTHER = [" ".join(np.random.default_rng(i).permutation(FILLERS)[:8]) for i in range(8)]
OPTIONS: dict[str, Any] = {"num_heads": 3, "strengths": (1.0, 4.0), "num_random": 19, "max_kl": 9.0, "corpus": OTHER}
SIGN_CHANNEL, READ_CHANNEL = 0, 1  # channels of the residual stream; READ_CHANNEL of z is the direction


def built_model() -> hw.Transformer:
    """Build a model in which only head 0.1 has outputs. Its z is ±1 in one channel, and W_O writes the sign to the stream."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer([*GOOD, *BAD, *FILLERS])
    spec = hw.ModelSpec(
        vocab=len(tokenizer), context=16, layers=2, mlp_width=4, positions="none", tied=False, norm="rms",
        attention=hw.AttentionSpec(width=16, heads=4),
    )  # fmt: skip
    model = hw.Transformer(spec).eval().double()
    model.tokenizer = tokenizer
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.qkv.weight_by_head("v").zero_()
            layer.qkv.weight_by_head("q").zero_()  # uniform attention
            layer.output_projection.weight.zero_()
        for block in model.blocks:
            block.mlp.down.weight.zero_()  # pyright: ignore
        embedding = model.embed.tokens.weight
        embedding.normal_(std=0.5)
        embedding[:, SIGN_CHANNEL] = 0.0
        signs = torch.zeros(len(tokenizer), dtype=torch.double)
        for words, sign in ((GOOD, 1.0), (BAD, -1.0)):
            for word in words:
                signs[tokenizer.encode(word)[0]] = sign
        embedding[:, SIGN_CHANNEL] = signs
        head: Any = model.heads["0.1"]
        head.W_V[SIGN_CHANNEL, READ_CHANNEL] = 1.0
        head.W_O[READ_CHANNEL, SIGN_CHANNEL] = 1.0
        assert model.output is not None
        model.output.vocabulary.weight.zero_()  # pyright: ignore
        model.output.vocabulary.weight[:, SIGN_CHANNEL] = signs  # pyright: ignore
    return model


@pytest.fixture(scope="module")
def model() -> hw.Transformer:
    return built_model()


@pytest.mark.parametrize("method", ["mean_difference", "ridge_probe"])
def test_find_steering_built_model_finds_head_and_direction(model: hw.Transformer, method: Any) -> None:
    result = hw.find_steering(model, POSITIVE, NEGATIVE, method=method, **OPTIONS)
    assert list(result.steering.vectors) == ["0.1"]  # other heads have no output
    vector = result.steering.vectors["0.1"].double()
    assert vector[READ_CHANNEL] / vector.norm() > 1 - 1e-6
    assert result.effect.low > 0.5
    assert result.is_effective
    assert result.p_value == 1 / 20
    np.testing.assert_allclose(result.random_effects, 0.0, atol=1e-12)  # W_O of the other heads is zero
    assert result.above_random.mean == pytest.approx(result.effect.mean)
    assert result.num_texts[0] + result.num_texts[1] == len(POSITIVE + NEGATIVE)


def test_effect_equals_log_probabilities_computed_directly(model: hw.Transformer) -> None:
    result = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    _, held_out = split_halves(tokenize_contrast_sets(model, POSITIVE, NEGATIVE), 0)

    def mean_log_prob(is_positive: bool) -> float:
        logps = [
            model(torch.tensor([text.ids]))[0].log_softmax(-1)[:-1].gather(-1, torch.tensor(text.ids)[1:, None])
            for text in held_out
            if text.is_positive == is_positive
        ]
        return float(torch.cat(logps).mean())

    with torch.no_grad():
        plain = mean_log_prob(True) - mean_log_prob(False)
        with result.steering.applied(model):
            steered = mean_log_prob(True) - mean_log_prob(False)
    assert result.effect.mean == pytest.approx(steered - plain, abs=1e-9)


def test_side_effects_equal_kl_and_loss_computed_directly(model: hw.Transformer) -> None:
    result = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    kl, loss, count, tokenizer = 0.0, 0.0, 0, tokenizer_of(model)
    for text in OTHER[1::2]:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            plain = model(ids)[0, :-1].log_softmax(-1)
            with result.steering.applied(model):
                steered = model(ids)[0, :-1].log_softmax(-1)
        kl += float((plain.exp() * (plain - steered)).sum())
        loss += float((plain - steered).gather(-1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    assert result.side_effect.divergence.mean == pytest.approx(kl / count, abs=1e-9)
    assert result.side_effect.loss is not None
    assert result.side_effect.loss.mean == pytest.approx(loss / count, abs=1e-9)


def test_function_vector_ranks_heads_by_effect_on_answers(model: hw.Transformer) -> None:
    answers = [(f"{GOOD[i % 4]} {word}", f" {GOOD[(i + 1) % 4]}") for i, word in enumerate(FILLERS)]
    shuffled = [(f"{BAD[i % 4]} {word}", f" {GOOD[(i + 1) % 4]}") for i, word in enumerate(FILLERS)]
    result = hw.find_steering(model, answers, shuffled, method="function_vector", **OPTIONS)
    assert next(iter(result.steering.origin["head_scores"])) == "0.1"
    assert result.effect.low > 0


def test_no_difference_between_sets_is_not_effective(model: hw.Transformer) -> None:
    mixed = [GOOD[0], BAD[0]]
    first = [f"{a} {mixed[i % 2]} {FILLERS[(i * 5) % 12]}" for i, a in enumerate(FILLERS)]
    second = [f"{a} {mixed[(i // 2) % 2]} {FILLERS[(i * 7 + 1) % 12]}" for i, a in enumerate(FILLERS)]
    result = hw.find_steering(model, first, second, **OPTIONS)
    assert not result.is_effective


def test_interrupted_search_resumes_with_equal_result(model: hw.Transformer, tmp_path: Path) -> None:
    expected = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    file = tmp_path / "steps.jsonl"

    def interrupt(label: str, done: int, total: int | None) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.find_steering(model, POSITIVE, NEGATIVE, steps_file=file, progress=interrupt, **OPTIONS)
    steps_before = file.read_text().splitlines()
    file.write_text("\n".join([*steps_before, '{"step": "trunc']))  # a crash while writing
    resumed = hw.find_steering(model, POSITIVE, NEGATIVE, steps_file=file, **OPTIONS)
    assert resumed.to_dict() == expected.to_dict()
    assert file.read_text().splitlines()[: len(steps_before)] == steps_before
    with pytest.raises(HeadwiseError, match="another run"):
        hw.find_steering(model, POSITIVE, NEGATIVE, steps_file=file, **{**OPTIONS, "seed": 5})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "few": ({"positive": POSITIVE[:3]}, "at least 8"),
    "text": ({"positive": "good"}, "list of texts"),
    "empty": ({"positive": ["", *POSITIVE]}, "not empty"),
    "overlap": ({"negative": [POSITIVE[0], *NEGATIVE]}, "both sets"),
    "method": ({"method": "probe"}, "method"),
    "heads": ({"num_heads": 0}, "num_heads"),
    "strengths": ({"strengths": ()}, "strengths"),
    "kl": ({"max_kl": 0.0}, "max_kl"),
    "distance": ({"max_distance": -1.0}, "max_distance"),
    "long": ({"positive": [" ".join(FILLERS * 3) + f" {word}" for word in FILLERS]}, "context"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise(model: hw.Transformer, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"positive": POSITIVE, "negative": NEGATIVE, **OPTIONS, **change}
    with pytest.raises(HeadwiseError, match=message):
        hw.find_steering(model, **arguments)


def built_encoder() -> hw.Transformer:
    """Build an encoder in which only head 0.1 has outputs. It writes the mean sign of the words to one channel."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer([*GOOD, *BAD, *FILLERS])
    spec = hw.ModelSpec(
        vocab=len(tokenizer), context=16, layers=2, mlp_width=4, positions="none", tied=False, norm="rms", kind="encoder",
        output="none", attention=hw.AttentionSpec(width=16, heads=4),
    )  # fmt: skip
    model = hw.Transformer(spec).eval().double()
    model.tokenizer = tokenizer
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.qkv.weight_by_head("v").zero_()
            layer.qkv.weight_by_head("q").zero_()  # uniform attention
            layer.output_projection.weight.zero_()
        for block in model.blocks:
            block.mlp.down.weight.zero_()  # pyright: ignore
        embedding = model.embed.tokens.weight
        embedding.normal_(std=0.5)
        for words, sign in ((GOOD, 1.0), (BAD, -1.0), (FILLERS, 0.0)):
            for word in words:
                embedding[tokenizer.encode(word)[0], SIGN_CHANNEL] = sign
        head: Any = model.heads["0.1"]
        head.W_V[SIGN_CHANNEL, READ_CHANNEL] = 1.0
        head.W_O[READ_CHANNEL, 5] = 1.0
    return model


@pytest.mark.parametrize("method", ["mean_difference", "ridge_probe"])
def test_find_steering_built_encoder_moves_embeddings_as_computed_directly(method: Any) -> None:
    model = built_encoder()
    options: dict[str, Any] = {**OPTIONS, "max_distance": 0.9}
    result = hw.find_steering(model, POSITIVE, NEGATIVE, method=method, **options)
    assert list(result.steering.vectors) == ["0.1"]
    vector = result.steering.vectors["0.1"].double()
    assert vector[READ_CHANNEL] / vector.norm() > 1 - 1e-6
    assert result.is_effective
    np.testing.assert_allclose(result.random_effects, 0.0, atol=1e-12)  # W_O of the other heads is zero
    assert result.residual_effect is not None
    halves = split_halves(tokenize_contrast_sets(model, POSITIVE, NEGATIVE), 0)

    def embeddings(texts: Any) -> torch.Tensor:  # one text at a time, without padding
        with torch.no_grad():
            rows = [model(torch.tensor([text.ids]), hidden=True)[0].mean(0) for text in texts]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)

    chosen, is_positive = embeddings(halves[0]), torch.tensor([text.is_positive for text in halves[0]])
    axis = chosen[is_positive].mean(0) / chosen[is_positive].mean(0).norm()
    axis = axis - chosen[~is_positive].mean(0) / chosen[~is_positive].mean(0).norm()
    plain = embeddings(halves[1])
    with result.steering.applied(model):
        steered = embeddings(halves[1])
    assert result.effect.mean == pytest.approx(float(((steered - plain) @ axis).mean()), abs=1e-9)
    assert result.unit.startswith("embedding margin")


def test_encoder_side_effect_equals_distance_of_embeddings(tmp_path: Path) -> None:
    model = built_encoder()
    result = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    plain = hw.embed(model, OTHER[1::2]).double()
    with result.steering.applied(model):
        steered = hw.embed(model, OTHER[1::2]).double()
    distance = result.side_effect.distance
    assert distance is not None
    assert result.side_effect.kl is None
    assert distance.mean == pytest.approx(1 - float((plain * steered).sum(-1).mean()), abs=1e-6)  # embed: float32
    header = result.to_csv(tmp_path / "a.csv").read_text().splitlines()[0]
    assert "distance_low" in header
    assert "kl" not in header
    assert json.loads(result.to_json(tmp_path / "a.json").read_text())["side_effect"]["kl"] is None


def test_function_vector_of_encoder_raises() -> None:
    with pytest.raises(HeadwiseError, match="function vector"):
        hw.find_steering(built_encoder(), POSITIVE, NEGATIVE, method="function_vector", **OPTIONS)


def test_decoder_without_output_layer_raises(model: hw.Transformer) -> None:
    headless = hw.Transformer(replace(model.spec, output="none"))
    headless.tokenizer = model.tokenizer
    with pytest.raises(HeadwiseError, match="encoder"):
        hw.find_steering(headless, POSITIVE, NEGATIVE)


def test_halves_keep_groups_together_and_cover_all_texts(model: hw.Transformer) -> None:
    pairs = [("word0", f" {GOOD[i % 4]} word{i}") for i in range(4)] + [
        (f"word{i}", " good1 word2") for i in range(1, 10)
    ]
    texts = tokenize_contrast_sets(model, pairs, [(prompt, answer.replace("good", "bad")) for prompt, answer in pairs])
    for seed in range(5):
        first, second = split_halves(texts, seed)
        assert not {text.group for text in first} & {text.group for text in second}
        assert len(first) + len(second) == len(texts)


def test_result_exports_as_json_csv_and_figure(model: hw.Transformer, tmp_path: Path) -> None:
    from headwise.ui.figures.tradeoff_curves import draw_steering

    result = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    assert json.loads(result.to_json(tmp_path / "a.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert len(result.to_csv(tmp_path / "a.csv").read_text().splitlines()) == 3
    for suffix, start in ((".svg", b"<?xml"), (".pdf", b"%PDF"), (".csv", b"line,")):
        assert draw_steering(result).save(tmp_path / f"a{suffix}").read_bytes().startswith(start)


def test_find_steering_half_precision_agrees_with_float64(model: hw.Transformer) -> None:
    expected = hw.find_steering(model, POSITIVE, NEGATIVE, **OPTIONS)
    half = hw.find_steering(built_model().to(torch.bfloat16), POSITIVE, NEGATIVE, **OPTIONS)
    assert list(half.steering.vectors) == list(expected.steering.vectors)
    assert half.effect.mean == pytest.approx(expected.effect.mean, rel=0.05)


@pytest.mark.parametrize("method", ["mean_difference", "ridge_probe"])
def test_find_steering_attached_llama_equals_native_copy(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def norm_in_float64(norm: Any, x: torch.Tensor) -> torch.Tensor:  # transformers computes it in float32
        return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", norm_in_float64)
    attached = hw.attach(build_llama().double(), tokenizer=word_tokenizer([*GOOD, *BAD, *FILLERS]))
    native = hw.to_native(attached)
    native.tokenizer = attached.tokenizer
    result, expected = (
        hw.find_steering(each, POSITIVE, NEGATIVE, method=method, **OPTIONS) for each in (attached, native)
    )
    assert list(result.steering.vectors) == list(expected.steering.vectors)
    assert result.steering.strength == expected.steering.strength
    for address, vector in expected.steering.vectors.items():
        assert vector.norm() > 1e-3
        torch.testing.assert_close(result.steering.vectors[address], vector, rtol=1e-6, atol=0)  # stored in float32
    for of_attached, of_native in zip(result.points, expected.points, strict=True):
        assert of_attached.effect.mean == pytest.approx(of_native.effect.mean, rel=1e-8, abs=1e-10)
        assert of_attached.side_effect.divergence.mean == pytest.approx(
            of_native.side_effect.divergence.mean, rel=1e-8, abs=1e-10
        )
    assert result.p_value == expected.p_value


def build_llama() -> Any:
    """Build a random Llama with grouped-query attention, whose heads write much more than at initialization."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(word_tokenizer([*GOOD, *BAD, *FILLERS])), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, max_position_embeddings=32, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    return llama


def test_cases_have_disjoint_texts_and_prompts() -> None:
    for case in CASES.values():
        prompts = {prompt for prompt, _ in (*case.positive, *case.negative)} - {""}
        groups = {prompt or completion for prompt, completion in case.positive}
        assert len(groups) >= 12  # of which neither half, nor its folds, has only one
        texts = {prompt + answer for prompt, answer in (*case.positive, *case.negative)}
        assert not prompts & set(case.prompts)
        assert not any(text in prompt or prompt in text for text in texts for prompt in case.prompts)
        assert len(case.positive) == len(case.negative)
        assert len(set(case.prompts)) == 32


def test_case_of_an_encoder_raises_before_the_search() -> None:
    with pytest.raises(HeadwiseError, match="judge continuations"):
        run_steering_case(built_encoder(), "sentiment")


@pytest.mark.parametrize("method", ["mean_difference", "function_vector"])
def test_progress_counts_every_step_once_and_skips_equal_streams(model: hw.Transformer, method: Any) -> None:
    calls: list[tuple[int, int | None]] = []
    sets = POSITIVE, NEGATIVE
    if method == "function_vector":
        sets = [
            [(f"{words[i % 4]} {word}", f" {GOOD[(i + 1) % 4]}") for i, word in enumerate(FILLERS)]
            for words in (GOOD, BAD)
        ]
    hw.find_steering(
        model, *sets, **(OPTIONS | {"method": method, "progress": lambda _, done, total: calls.append((done, total))})
    )
    missing = (
        1 if method == "function_vector" else 0
    )  # the input of layer 0 is the last prompt token, equal in both sets
    assert calls[-1][0] + missing == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_judges_score_texts() -> None:
    assert [sentiment_score(text) for text in ("A wonderful day.", "A bad, sad day", "A day")] == [1.0, -1.0, 0.0]
    assert [tense_score(text) for text in ("walked and sang", "walks and sings", "the")] == [1.0, -1.0, 0.0]
    assert [list_score(text) for text in ("Sure:\n1. Eat", "- Eat", "Eat well.")] == [1.0, 1.0, -1.0]


# Encoder-decoders: pairs (source, text), judged by the log-probability of the text.


PAIRS_POSITIVE = [(text, GOOD[i % 4]) for i, text in enumerate(POSITIVE)]
PAIRS_NEGATIVE = [(text, BAD[i % 4]) for i, text in enumerate(NEGATIVE)]
PAIR_OPTIONS: dict[str, Any] = OPTIONS | {"corpus": [(text, text) for text in OTHER]}


def built_encoder_decoder() -> hw.Transformer:
    """Build a model in which only head cross.1.2 has outputs: the mean sign of the words of the source."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer([*GOOD, *BAD, *FILLERS])
    spec = hw.ModelSpec(
        vocab=len(tokenizer), context=16, layers=2, mlp_width=4, positions="none", norm="rms", kind="encoder-decoder",
        attention=hw.AttentionSpec(width=16, heads=4),
    )  # fmt: skip
    model = hw.Transformer(spec).eval().double()
    model.tokenizer = tokenizer
    signs = torch.zeros(len(tokenizer), dtype=torch.double)
    for words, sign in ((GOOD, 1.0), (BAD, -1.0)):
        signs[[tokenizer.encode(word)[0] for word in words]] = sign
    with torch.no_grad():
        for layer in model.attention_layers():
            for projection in "qv":
                layer.qkv.weight_by_head(projection).zero_()  # q = 0: uniform attention
            layer.output_projection.weight.zero_()
        for name, parameter in model.named_parameters():
            if "mlp.down" in name:
                parameter.zero_()
        model.embed.tokens.weight.normal_(std=0.5)
        model.embed.tokens.weight[:, SIGN_CHANNEL] = signs
        head: Any = model.heads["cross.1.2"]
        head.W_V[SIGN_CHANNEL, READ_CHANNEL] = 1.0
        head.W_O[READ_CHANNEL, SIGN_CHANNEL] = 1.0
    return model


@pytest.mark.parametrize("method", ["mean_difference", "ridge_probe"])
def test_find_steering_built_encoder_decoder_finds_head_and_effect_as_computed_directly(method: Any) -> None:
    model = built_encoder_decoder()
    result = hw.find_steering(model, PAIRS_POSITIVE, PAIRS_NEGATIVE, method=method, **PAIR_OPTIONS)
    assert list(result.steering.vectors) == ["cross.1.2"]
    vector = result.steering.vectors["cross.1.2"].double()
    assert vector[READ_CHANNEL] / vector.norm() > 1 - 1e-6
    assert result.is_effective
    assert result.unit == "nats per token"
    _, held_out = split_halves(tokenize_contrast_sets(model, PAIRS_POSITIVE, PAIRS_NEGATIVE), 0)

    def log_probs(ids: tuple[int, ...], source: tuple[int, ...]) -> torch.Tensor:
        logits = model(torch.tensor([ids]), source=torch.tensor([source]))[0]
        return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])

    def margin() -> float:
        by_set = ([log_probs(t.ids, t.source) for t in held_out if t.is_positive == sign] for sign in (True, False))
        good, bad = (float(torch.cat(values).mean()) for values in by_set)
        return good - bad

    with torch.no_grad():
        plain = margin()
        with result.steering.applied(model):
            steered = margin()
    assert result.effect.mean == pytest.approx(steered - plain, abs=1e-9)
    tokenizer, loss, count = tokenizer_of(model), 0.0, 0
    for text in OTHER[1::2]:
        words = tokenizer.encode(text, add_special_tokens=False)
        source, ids = tokenizer.wrap_pair(words, words, model.decoder_start_token)
        with torch.no_grad():
            plain_loss = log_probs(tuple(ids), tuple(source))
            with result.steering.applied(model):
                loss += float((plain_loss - log_probs(tuple(ids), tuple(source))).sum())
        count += len(ids) - 1
    assert result.side_effect.loss is not None
    assert result.side_effect.loss.mean == pytest.approx(loss / count, abs=1e-9)


def test_find_steering_encoder_decoder_wrong_input_raises() -> None:
    model = built_encoder_decoder()
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (POSITIVE, {}, "pairs .source, text."),
        (PAIRS_POSITIVE, {"method": "function_vector"}, "only a decoder reads"),
        (PAIRS_POSITIVE, {"corpus": OTHER}, "needs pairs"),
        ([(" ".join(FILLERS * 2), f"word{i}") for i in range(12)], {}, "more than the context"),
    )
    for positive, options, message in wrong:
        with pytest.raises(HeadwiseError, match=message):
            hw.find_steering(model, positive, PAIRS_NEGATIVE, **(PAIR_OPTIONS | options))


def test_find_steering_attached_t5_equals_native_copy(tmp_path: Path) -> None:
    tokenizer = word_tokenizer([*GOOD, *BAD, *FILLERS])
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    t5 = transformers.T5ForConditionalGeneration(config).double().eval()
    t5.save_pretrained(tmp_path / "t5")
    native: Any = hw.load(tmp_path / "t5", dtype=torch.float64)
    native.tokenizer = tokenizer
    small: dict[str, Any] = PAIR_OPTIONS | {"num_random": 2, "num_heads": 4, "strengths": (2.0,)}
    results = [
        hw.find_steering(model, PAIRS_POSITIVE, PAIRS_NEGATIVE, **small) for model in (native, hw.attach(t5, tokenizer))
    ]
    assert results[0].steering.vectors.keys() == results[1].steering.vectors.keys()
    assert results[0].effect.mean == pytest.approx(results[1].effect.mean, abs=1e-6)
    assert results[0].random_effects == pytest.approx(results[1].random_effects, abs=1e-6)
    assert results[0].residual_effect is not None
