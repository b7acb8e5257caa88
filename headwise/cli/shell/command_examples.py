"""An example for each command, shown at the end of its help."""

from typing import Any

import typer
from typer.core import TyperCommand

EXAMPLES = {
    "demo": "headwise demo",
    "info": "headwise info smollm2",
    "layout": "headwise layout llama2-70b --processes 8 --context 32768",
    "generate": 'headwise generate smollm2 "The capital of France is" --max-new-tokens 8',
    "export": "headwise export smollm2 smollm2-folder",
    "presets": "headwise presets",
    "corpus": "headwise corpus --documents 100",
    "train": "headwise train --steps 300 --out runs/first",
    "distill": "headwise distill runs/first/model --layers 1 --steps 300 --out runs/student",
    "scan": 'headwise scan smollm2 "The capital of France is"',
    "profile": "headwise profile minilm --save minilm.npz",
    "describe": "headwise describe minilm 3.1",
    "maps": 'headwise maps smollm2 "The teacher gave the students their homework." --query their',
    "explain": 'headwise explain smollm2 "The teacher gave the students their homework." --head 13.8 --query their',
    "find": "headwise find rxnmapper",
    "circuit": "headwise circuit smollm2 induction --out induction.steps --save induction.json",
    "steer": "headwise steer smollm2 --case sentiment --out sentiment",
    "importance": "headwise importance minilm --ranking gradient",
    "evaluate": "headwise evaluate smollm2 --silence 18.6 --reference smollm2",
    "prune": "headwise prune minilm --keep 0.7 --out minilm-small",
    "quantize": "headwise quantize smollm2 --weights '*=4,mlp=8,vocabulary=8' --out smollm2-small",
    "sensitivity": "headwise sensitivity minilm --bits 4,3 --out minilm-bits.jsonl --plot minilm-bits.svg",
    "cache": "headwise cache smollm2 book.txt --fraction 0.5 --out smollm2-streaming --plot bytes.svg",
    "diff": "headwise diff before.npz after.npz",
    "sweep": "headwise sweep --num-heads 1,2,4,8",
    "claims": "headwise claims --list",
    "plot": "headwise plot roles minilm.npz",
    "view": "headwise view minilm",
    "store": "headwise store",
    "selftest": "headwise selftest --device cuda",
}
FIRST_COMMANDS = (
    "demo",
    "scan",
    "maps",
    "profile",
    "describe",
    "prune",
    "view",
    "train",
)  # shown by `headwise` without arguments


class ExampleHintCommand(TyperCommand):
    """A command that prints an example if its required arguments are missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Without any, print an example if some are required."""
        needed = [str(param.name).upper() for param in self.get_params(ctx) if param.required]
        if not args and needed and not ctx.resilient_parsing:  # not during shell completion
            typer.echo(f"headwise {self.name}: missing {' and '.join(needed)}. Example:", err=True)
            typer.echo(f"  {EXAMPLES[str(self.name)]}", err=True)
            typer.echo(f"All options: headwise {self.name} --help", err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)


def first_steps() -> str:
    """Return the text printed by `headwise` without arguments."""
    lines = [f"  {EXAMPLES[command]}" for command in FIRST_COMMANDS]
    intro = "Multi-head attention with the head as a first-class object. Examples:"
    return "\n".join([intro, *lines, "All commands: headwise --help"])
