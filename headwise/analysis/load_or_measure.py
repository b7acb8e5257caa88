"""Results that are kept on disk: profiles and importances, under keys of model, corpus, settings and version.

A key has the digest of all weights, the spec, the tokenizer, the fingerprint of the corpus, the settings, and the version of
the package with a digest of its files. Results with open edits (silenced or patched heads), with metrics or roles of the
user, or of sharded models are never stored.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.importance import Importance, importance
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus, default_corpus
from headwise.analysis.roles.causal_test import supports_causal_test
from headwise.analysis.roles.head_causal_test import run_head_causal_test, with_head_evidence
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_io import evidence_from_dict, profile_from_bytes, profile_to_bytes
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import RoleEvidence
from headwise.errors import FileFormatError, HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.io.result_store import ResultStore, result_key
from headwise.model import ModelProtocol
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress
from headwise.spec import Address, select
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus

PROFILE, IMPORTANCE, CAUSAL = "profile", "importance", "causal"


@dataclass(frozen=True)
class ModelKey:
    """Everything in a key that belongs to the model.

    Attributes:
        weights: Digest of all weights.
        details: Digest of spec, dtype, class, configuration and tokenizer.
        name: Short description of the model, for the list of results.
    """

    weights: str
    details: str
    name: str

    @staticmethod
    def of(model: ModelProtocol) -> "ModelKey | None":
        """Return the key of a model. None if its results are not stored: sharded, without tokenizer, or with open edits."""
        if model.is_sharded or model.image_input is not None or not isinstance(model.tokenizer, Tokenizer):
            return None
        if any(hook_point.is_active for hook_point in model.hook_points()):
            return None
        config = getattr(getattr(model, "model", None), "config", None)
        tokenizer = model.tokenizer
        details = {
            "spec": model.spec.to_dict(),
            "dtypes": sorted({str(weight.dtype) for weight in model.parameters()}),
            "class": type(model).__name__,
            "device": model.device.type,
            "torch": torch.__version__,
            "config": None if config is None else _to_text(config.to_dict()),
            "tokenizer": _digest(tokenizer.backend.to_str()),
            "special": tokenizer.special,
        }
        spec = model.spec
        name = f"{model.family or 'model'}, {spec.layers + spec.encoder_layers} × {spec.attention.heads} heads"
        return ModelKey(weights_digest(model), _digest(_to_text(details)), name)

    def to_dict(self) -> dict[str, str]:
        """Return the part of a key that belongs to the model."""
        return {"weights": self.weights, "model": self.details}


def corpus_key_fields(model: ModelProtocol, corpus: Any) -> dict[str, Any]:
    """Return the part of a key that belongs to the corpus."""
    chunking = None
    if isinstance(corpus, TokenizedCorpus):
        chunking, corpus = repr(corpus.chunking), corpus.corpus
    texts = default_corpus(model) if corpus is None else Corpus.of(corpus)
    return {"corpus": texts.fingerprint, "documents": documents_digest(texts), "chunking": chunking}


def documents_digest(corpus: Corpus) -> str:
    """Return a digest of words and relations of documents in memory, which the fingerprint of the texts leaves out."""
    if corpus.files:
        return ""
    hasher = hashlib.sha256()
    for item in corpus.items():
        if isinstance(item, Document):
            hasher.update(repr((item.text, item.words, item.relations)).encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def load_or_measure_profile(
    model: ModelProtocol, corpus: Any = None, *, store: ResultStore | None, key: ModelKey | None = None,
    prompts: bool = False, causal: bool = True, progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """Return the profile from the store, or measure and store it. Arguments as in `hw.profile`."""

    def measure() -> Profile:
        return profile(model, corpus, prompts=prompts, causal=causal, progress=progress)

    key = None if store is None else key or ModelKey.of(model)
    if store is None or key is None:
        return measure()
    parts = key.to_dict() | corpus_key_fields(model, corpus) | {"prompts": prompts, "causal": causal}
    description = {"model": key.name, "weights": key.weights, "prompts": prompts, "causal": causal}
    return _serve(store, PROFILE, parts, description, measure, profile_to_bytes, profile_from_bytes)


def profile_with_head_causal_test(
    model: ModelProtocol, head: Address, corpus: Any = None, *, store: ResultStore | None, prompts: bool = False,
    progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """Return a profile in which one head has causal tests, which takes a fraction of the time of testing all heads.

    A stored profile with causal tests serves. Otherwise the profile without them and the tests of the head are stored.

    Args:
        model: The model.
        head: The head.
        corpus: Corpus of the profile.
        store: The store. None measures everything.
        prompts: Whether roles on prompts are tested.
        progress: Called with stage, done and total.
    """
    key = None if store is None else ModelKey.of(model)
    if not supports_causal_test(model):
        return load_or_measure_profile(model, corpus, store=store, key=key, prompts=prompts, progress=progress)
    settings = {} if key is None else key.to_dict() | corpus_key_fields(model, corpus) | {"prompts": prompts}
    if store is not None and key is not None:
        full_key = result_key({"kind": PROFILE, **settings, "causal": True})
        full = _read(store, PROFILE, full_key, profile_from_bytes)
        if full is not None:
            return full
    base = load_or_measure_profile(
        model, corpus, store=store, key=key, prompts=prompts, causal=False, progress=progress
    )

    def measure() -> tuple[RoleEvidence, ...]:
        return run_head_causal_test(model, base, head, corpus, progress)

    if store is None or key is None:
        return with_head_evidence(base, head, measure())
    description = {"model": key.name, "weights": key.weights, "head": str(head), "prompts": prompts}
    parts = settings | {"head": str(head)}
    evidence = _serve(store, CAUSAL, parts, description, measure, _evidence_to_bytes, _evidence_from_bytes)
    return with_head_evidence(base, head, evidence)


def load_or_measure_importance(
    model: ModelProtocol, corpus: Any, heads: Sequence[str], *, store: ResultStore | None, key: ModelKey | None = None,
    progress: Progress | None = None,
) -> Importance:  # fmt: skip
    """Return the importance by ablation of the heads of some layers, with stored results layer by layer.

    Args:
        model: The model.
        corpus: Corpus of `hw.importance`.
        heads: Patterns of whole layers, such as `"5.*"`.
        store: The store. None measures all.
        key: Key of the model, if it is already known.
        progress: Called with stage, done and total.
    """
    key = None if store is None else key or ModelKey.of(model)
    if store is None or key is None:
        return importance(model, corpus, heads=",".join(heads), progress=progress)
    model_part = key.to_dict() | corpus_key_fields(model, corpus)
    keys = {pattern: result_key({"kind": IMPORTANCE, **model_part, "heads": pattern}) for pattern in heads}

    def read_all() -> dict[str, Importance]:
        stored = {pattern: _read(store, IMPORTANCE, keys[pattern], _importance_from_bytes) for pattern in heads}
        return {pattern: result for pattern, result in stored.items() if result is not None}

    stored = read_all()
    if len(stored) < len(heads):
        with store.lock(IMPORTANCE, result_key({"kind": "layers", **model_part})):
            stored = read_all()  # another process may have written some meanwhile
            missing = [pattern for pattern in heads if pattern not in stored]
            if missing:
                measured = importance(model, corpus, heads=",".join(missing), progress=progress)
                for pattern in missing:
                    stored[pattern] = _select_heads(measured, select(pattern, measured.addresses))
                    description = {"model": key.name, "weights": key.weights, "heads": pattern}
                    store.write(IMPORTANCE, keys[pattern], _importance_to_bytes(stored[pattern]), description)
    return _join_layers([stored[pattern] for pattern in heads])


def as_whole_layer_patterns(model: ModelProtocol, heads: HeadPattern) -> list[str]:
    """Return the layers that a pattern selects as patterns such as `"5.*"`. Empty if it selects only a part of a layer."""
    layers: dict[str, tuple[Address, ...]] = {}
    reachable = [address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses]
    selected = select_heads(heads, reachable)
    for hook_point in model.hook_points():
        if any(address in selected for address in hook_point.head_addresses):
            layers[f"{hook_point.address}.*"] = hook_point.head_addresses
    is_whole = sum(map(len, layers.values())) == len(selected)
    return list(layers) if is_whole else []


def find_default_corpus_profile(model: ModelProtocol, store: ResultStore | None = None) -> Profile | None:
    """Return the profile of a model on the default corpus, if it is in the store. Nothing is written.

    Args:
        model: The model.
        store: The store. None opens the default one.
    """
    store = ResultStore(read_only=True) if store is None else store
    if not any(result.kind == PROFILE for result in store.list_entries()):  # saves the digest of the weights
        return None
    try:
        key = ModelKey.of(model)
        if key is None:
            return None
        parts = key.to_dict() | corpus_key_fields(model, None)
    except HeadwiseError:  # for example, a model without tokenizer
        return None
    for prompts, causal in ((True, True), (False, True), (False, False)):
        options = {"prompts": prompts, "causal": causal}
        content = store.read(PROFILE, result_key({"kind": PROFILE, **parts, **options}))
        if content is not None:
            try:
                return profile_from_bytes(content)
            except FileFormatError:
                continue
    return None


def _serve(
    store: ResultStore, kind: str, parts: Mapping[str, Any], description: Mapping[str, Any],
    measure: Callable[[], Any], to_bytes: Callable[[Any], bytes], from_bytes: Callable[[bytes], Any],
) -> Any:  # fmt: skip
    """Read a result, or measure and write it under a lock, so that processes that need it at the same time measure once."""
    key = result_key({"kind": kind, **parts})
    result = _read(store, kind, key, from_bytes)
    if result is not None:
        return result
    with store.lock(kind, key):
        result = _read(store, kind, key, from_bytes)  # another process may have written it meanwhile
        if result is None:
            result = measure()
            store.write(kind, key, to_bytes(result), description)
    return result


def _read(store: ResultStore, kind: str, key: str, from_bytes: Callable[[bytes], Any]) -> Any:
    content = store.read(kind, key)
    try:
        return None if content is None else from_bytes(content)
    except FileFormatError:  # counts as missing
        return None


def _evidence_to_bytes(evidence: tuple[RoleEvidence, ...]) -> bytes:
    return json.dumps([asdict(entry) for entry in evidence]).encode()


def _evidence_from_bytes(content: bytes) -> tuple[RoleEvidence, ...]:
    try:
        return tuple(map(evidence_from_dict, json.loads(content)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"causal tests: damaged ({error}). They are measured again.") from None


def _importance_to_bytes(result: Importance) -> bytes:
    header = {
        "heads": [str(address) for address in result.addresses], "ranking": result.ranking, "ablation": result.ablation,
        "metric": result.metric, "texts": result.texts, "fields": result.accumulator.fields,
    }  # fmt: skip
    arrays = {f"sums/{group}": value for group, value in result.accumulator.sums.items()}
    arrays |= {f"counts/{group}": value for group, value in result.accumulator.counts.items()}
    buffer = BytesIO()
    encoded = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, **arrays, header=encoded)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def _importance_from_bytes(content: bytes) -> Importance:
    try:
        with np.load(BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        addresses = tuple(map(Address.parse, header["heads"]))
        accumulator = Accumulator(len(addresses))
        accumulator.fields = {name: tuple(place) for name, place in header["fields"].items()}
        for name, array in arrays.items():
            part, _, group = name.partition("/")
            getattr(accumulator, part)[group] = array
        return Importance(
            addresses, header["ranking"], header["ablation"], header["metric"], header["texts"], accumulator
        )
    except Exception as error:  # zipfile, zlib, numpy and json each have their own
        raise FileFormatError(f"importance: damaged ({error}). It is measured again.") from None


def _select_heads(result: Importance, addresses: Sequence[Address]) -> Importance:
    """Return the part of a result that belongs to some heads."""
    indices = [result.addresses.index(address) for address in addresses]
    accumulator = Accumulator(len(indices), result.accumulator.fields)
    for part in ("sums", "counts"):
        for group, array in getattr(result.accumulator, part).items():
            getattr(accumulator, part)[group] = array[:, indices]
    return Importance(tuple(addresses), result.ranking, result.ablation, result.metric, result.texts, accumulator)


def _join_layers(results: Sequence[Importance]) -> Importance:
    """Join the results of several layers on one corpus."""
    first = results[0]
    if len(results) == 1:
        return first
    addresses = tuple(address for result in results for address in result.addresses)
    accumulator = Accumulator(len(addresses))
    accumulator.fields = first.accumulator.fields
    for part in ("sums", "counts"):
        for group in getattr(first.accumulator, part):
            arrays = [getattr(result.accumulator, part)[group] for result in results]
            getattr(accumulator, part)[group] = np.concatenate(arrays, axis=1)
    return Importance(addresses, first.ranking, first.ablation, first.metric, first.texts, accumulator)


def _to_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
