"""headwise generate: continue a text token by token."""

import json
import sys
import time
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument
from headwise.cli.shell.steering_options import SteeringOption, StrengthOption, steered


def run(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue, or the source text of an encoder-decoder.")],
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling. Default: not reproducible.")] = None,
    silence: Annotated[
        str | None,
        typer.Option(
            help="Heads whose output is set to zero: 5.1, 5.*, 0-3.*, or a comma-separated list.",
            autocompletion=completion.complete_heads,
        ),
    ] = None,
    steering: SteeringOption = None,
    strength: StrengthOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, printing it token by token."""
    import torch

    from headwise.errors import UnsupportedModelError
    from headwise.weights import load

    loaded = load(model, device=device, dtype=dtype)
    if loaded.tokenizer is None:
        raise UnsupportedModelError(
            f"{model}: the model has no tokenizer, so it cannot read text. Use a model saved with its tokenizer."
        )
    gates = None if silence is None else {silence: 0.0}
    has_source = loaded.spec.kind == "encoder-decoder"  # then the prompt is the source text
    ids = [] if has_source else loaded.tokenizer.encode(prompt)
    prompt_input = prompt if has_source else torch.tensor([ids], dtype=torch.long, device=loaded.device)  # (1, T)
    prompt_length, end, start = len(ids), loaded.tokenizer.special.get("eos"), time.perf_counter()
    with steered(loaded, steering, strength):
        steps = loaded.stream(
            prompt_input, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, gates=gates
        )
        text = printed = loaded.tokenizer.decode(ids)
        if not as_json:
            print(printed, end="", flush=True)
        for step in steps:
            ids.append(int(step[0]))
            text = loaded.tokenizer.decode(ids)
            if not as_json and not text.endswith("\ufffd"):  # a character may take several tokens
                print(text[len(printed) :], end="", flush=True)
                printed = text
            if ids[-1] == end and not has_source:
                steps.close()
                break
    seconds, num_new_tokens = time.perf_counter() - start, len(ids) - prompt_length
    stop_reason = "reached --max-new-tokens" if num_new_tokens >= max_new_tokens else "end-of-text token"
    if as_json:
        result = {
            "prompt": prompt, "text": text, "ids": ids, "new_tokens": num_new_tokens, "seconds": seconds,
            "stopped": "tokens" if num_new_tokens >= max_new_tokens else "end",
        }  # fmt: skip
        print(json.dumps(result, indent=2))
    else:
        print(text[len(printed) :])
        print(f"{num_new_tokens} tokens ({stop_reason}), {num_new_tokens / seconds:.1f} tokens/s", file=sys.stderr)
