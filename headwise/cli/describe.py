"""headwise describe: a summary of one head."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    head: Annotated[
        str,
        typer.Argument(help="Address of the head, layer and number: 5.1.", autocompletion=completion.complete_heads),
    ],
    corpus: CorpusArgument = None,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles that have prompts of their own, such as name mover and copy suppression."
        ),
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also print all metrics and examples.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Summarize one head: its roles with evidence, attention sinks, output, cost, and the heads it works with."""
    from headwise.analysis.head_facts import HeadFacts, measure_head_facts
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.compression.head_compression_cost import HeadCompressionCosts, measure_head_compression_cost
    from headwise.spec import Address
    from headwise.ui.head_summary import summary_lines
    from headwise.ui.head_tables import show_head, show_summary
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    facts, cost = HeadFacts(), HeadCompressionCosts()
    if Path(model).is_file() and model.endswith(".npz"):
        full_profile = Profile.load(model)
        head_profile = full_profile[head]
    else:
        loaded = load(model)
        Address.parse(head)
        loaded.heads[head]  # an unknown address raises before the work starts
        with show_progress() as progress:
            full_profile = profile(loaded, corpus_input, prompts=prompts, progress=progress)
            head_profile = full_profile[head]
            facts = measure_head_facts(loaded, head_profile, corpus_input, progress)
            cost = measure_head_compression_cost(loaded, head_profile, corpus_input, progress)
    if as_json:
        ov_summary = facts.ov_summary
        token_effects = (
            None
            if ov_summary is None or not ov_summary.token_effects
            else [item._asdict() for item in ov_summary.token_effects]
        )
        copying_score = None if ov_summary is None or math.isnan(ov_summary.copying) else ov_summary.copying
        lines = [line._asdict() for line in summary_lines(full_profile, head_profile, facts, cost)]
        effect = None if ov_summary is None or ov_summary.effect is None else asdict(ov_summary.effect)
        more = {"summary": lines, "direct_effect": effect, "copying": copying_score, "promotes": token_effects}
        print(json.dumps({**head_profile.to_dict(), **more}, indent=2))
        return
    show_summary(full_profile, head_profile, facts, cost)
    if show_all:
        show_head(full_profile, head_profile, facts)
