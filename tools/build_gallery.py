"""Write the report pages of the gallery: python tools/build_gallery.py [minilm] [rxnmapper] [smollm2].

Each page is one HTML file in docs/gallery without references to other files. The table of
docs/gallery.md names the texts.
"""

import sys
from pathlib import Path

import headwise as hw
from headwise.analysis.finding.bundled_examples_path import ATOM_MAPS
from headwise.analysis.finding.job_examples import read_examples
from headwise.text.probe import probe_set
from headwise.ui.report import DEFAULT_SENTENCES

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"
REPETITION = "Nora planted a maple behind the old mill. Years later, Nora planted a"


def build_minilm(path: Path) -> None:
    """Profile MiniLM on the probe set, with the importance of every head on 24 texts."""
    model = hw.load("minilm")
    profile = hw.profile(model)
    importance = hw.importance(model, hw.TokenizedCorpus.of(model, probe_set()).first(24))
    profile.report(path, model, name="MiniLM (all-MiniLM-L6-v2)", sentences=DEFAULT_SENTENCES, importance=importance)


def build_rxnmapper(path: Path) -> None:
    """Profile RXNMapper on the reactions that come with it, with the role of heads that map atoms."""
    model = hw.load("rxnmapper")
    found = hw.find_heads(model)
    reactions = [example.text for example in read_examples(ATOM_MAPS, "pairs")]
    profile = hw.profile(
        model, reactions, relations=False, metrics=[found.metric("atom map")], roles=[found.role("atom map")]
    )
    profile.report(path, model, name="RXNMapper", sentences=sorted(reactions, key=len)[:3])


def build_smollm2(path: Path) -> None:
    """Profile SmolLM2 on the probe set and on prompts, with causal tests."""
    model = hw.load("smollm2")
    profile = hw.profile(model, prompts=True)
    name = "SmolLM2-135M-Instruct (4-bit file)"
    profile.report(path, model, name=name, sentences=[REPETITION, *DEFAULT_SENTENCES[2:]])


BUILDERS = {"minilm": build_minilm, "rxnmapper": build_rxnmapper, "smollm2": build_smollm2}

if __name__ == "__main__":
    for bundle in sys.argv[1:] or BUILDERS:
        page = GALLERY / f"{bundle}.html"
        BUILDERS[bundle](page)
        print(page, f"{page.stat().st_size / 1e6:.1f} MB")
