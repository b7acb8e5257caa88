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
    head: Annotated[str, typer.Argument(help="Its address: 5.1.", autocompletion=completion.complete_heads)],
    corpus: CorpusArgument = None,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles on their own prompts: name movers, name and copy suppression, others."
        ),
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every metric and every example, after the summary.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell one head's story: what it does and how sure that is, where it rests, what it writes, costs and works with."""
    from headwise.analysis.head_facts import HeadFacts, measure_head_facts
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.compression.head_cost import CompressionCostSummary, measure_compression_cost
    from headwise.spec import Address
    from headwise.ui.head_summary import summary_lines
    from headwise.ui.head_tables import show_head, show_summary
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    facts, cost = HeadFacts(), CompressionCostSummary()
    if Path(model).is_file() and model.endswith(".npz"):
        full_profile = Profile.load(model)
        head_profile = full_profile[head]
    else:
        loaded = load(model)
        Address.parse(head)
        loaded.heads[head]  # a wrong address is told before the work begins
        with show_progress() as progress:
            full_profile = profile(loaded, corpus_input, prompts=prompts, progress=progress)
            head_profile = full_profile[head]
            facts = measure_head_facts(loaded, head_profile, corpus_input, progress)
            cost = measure_compression_cost(loaded, head_profile, corpus_input, progress)
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
