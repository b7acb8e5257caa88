"""Descriptions of heads in the result store, found by the files of the model, without loading it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.io.result_store import ResultStore, result_key
from headwise.io.source_digest import source_digest
from headwise.text.corpus import Corpus

DESCRIPTION = "description"


@dataclass(frozen=True)
class StoredHeadDescription:
    """Description of a head as plain data.

    Attributes:
        lines: Sentences, each with its glossary entry.
        errors: Reasons why parts could not be measured.
        data: The description for JSON.
    """

    lines: Sequence[Sequence[str]]
    errors: Sequence[str]
    data: dict[str, Any]


class HeadDescriptionStore:
    """Description of one head in a store, by the digest of the model's files, the corpus, the settings and the version.

    Args:
        store: The store.
        model: Bundle name, folder, file or hub id.
        head: Address of the head.
        corpus: Texts or paths. None is the default corpus, which depends on the version of the package.
        settings: Settings of the measurement, as plain data.
    """

    def __init__(
        self, store: ResultStore, model: str, head: str, corpus: Any, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.store = store
        settings = dict(settings or {})
        self.summary = {"model": model, "head": head, **settings}
        fingerprint = None if corpus is None else Corpus.of(corpus).fingerprint
        self.key = result_key(
            {
                "kind": DESCRIPTION, "source": source_digest(model), "head": head, "corpus": fingerprint,
                "settings": settings,
            }
        )  # fmt: skip

    def read(self) -> StoredHeadDescription | None:
        """Return the stored description. None if it is missing or damaged."""
        content = self.store.read(DESCRIPTION, self.key)
        try:
            return None if content is None else StoredHeadDescription(**json.loads(content))
        except (TypeError, ValueError):
            return None

    def write(self, description: StoredHeadDescription) -> None:
        """Store a description."""
        content = json.dumps(vars(description)).encode()
        self.store.write(DESCRIPTION, self.key, content, self.summary)
