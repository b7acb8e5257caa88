"""Before the first step: the tokenizer, the model, the tokens, and the folder they belong to."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.distributed.parallel_strategy import TeamLayout
from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.io.aligned_safetensors import aligned
from headwise.model import AnyModel, Transformer
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import add_frame, add_mask, make_tokenizer
from headwise.training.batches import Anywhere, Pairs, Texts, Windows
from headwise.training.loss import Loss, MakeLoss
from headwise.training.recipe import Recipe
from headwise.training.request import TrainRequest
from headwise.training.run_folder import earlier_request, is_same
from headwise.training.token_file import Tokens, read_tokens, write_tokens


@dataclass
class Prepared:
    """All that a run starts from."""

    loss: Loss  # with its model
    tokenizer: Tokenizer
    tokens: Tokens
    context: int
    objective: str
    noted: dict[str, Any]  # what was asked for, as it is noted in the folder
    layout: TeamLayout  # who shares what

    @property
    def model(self) -> Transformer:
        """What is trained."""
        return self.loss.model  # pyright: ignore[reportReturnType]


def prepare(request: TrainRequest, folder: Path, layout: TeamLayout) -> Prepared:
    """Check what was asked, claim the folder, and make or find everything in it."""
    given, recipe, tokenizer, team = request.model, request.how, request.tokenizer, layout.team
    corpus, valid = request.texts, request.held_out
    spec = given if isinstance(given, ModelSpec) else getattr(given, "spec", given)
    if not isinstance(spec, ModelSpec):
        raise HeadwiseError(f'train takes a ModelSpec or a Transformer, e.g. hw.preset("nano"); got {given!r}.')
    for texts in (corpus, valid):
        if texts is not None:
            texts.suits(spec.kind)
    if spec.weights:
        raise HeadwiseError(
            "weights at few bits are no parameters and cannot be trained; train hw.dequantise(model), then quantise it."
        )
    objective = _objective(spec, recipe)
    if (objective == "masked") != (spec.kind == "encoder"):
        raise HeadwiseError(
            f"the {objective} objective does not suit a model of kind {spec.kind}; leave objective out."
        )
    context = recipe.context or spec.context
    if context > spec.context and spec.positions == "learned":
        raise HeadwiseError(f"a context of {context} is more than the {spec.context} positions of the model.")
    if recipe.batch % (recipe.accumulate * team.size):
        raise HeadwiseError(
            f"a batch of {recipe.batch} rows cannot be shared by {team.size} processes in {recipe.accumulate} parts each; "
            f"make it a multiple of {recipe.accumulate * team.size}."
        )
    own = _own(given)
    if tokenizer is None:
        tokenizer = own or ("word" if corpus.name.startswith("the little language") else "byte")
    # What stands before a text in training stands there for ever. A model that is trained further keeps what it had.
    framed = recipe.rows == "texts" and spec.kind != "encoder-decoder" and tokenizer is not own
    asked = {
        "spec": json.loads(spec.to_json()),
        "recipe": asdict(recipe),
        "text": corpus.fingerprint,
        "held out": None if valid is None else valid.fingerprint,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else _digest(tokenizer.backend.to_str().encode()),
        "framed": framed,
        "weights": None if isinstance(given, ModelSpec) else weights_digest(given),
    }

    for what in ("spec", "recipe", "text", "held out", "tokenizer"):
        team.agree(json.dumps(asked[what]), f"the processes were given a different {what}; give every one the same.")

    def claim() -> None:
        known = is_same(folder, asked)
        if not known or not (folder / "tokens" / "tokens.json").is_file():
            made = tokenizer if isinstance(tokenizer, Tokenizer) else make_tokenizer(tokenizer, corpus)
            if objective == "masked":
                made = add_mask(made)
            if framed and made.end is not None:
                made = add_frame(made, behind=spec.kind == "encoder")
            write_tokens(folder / "tokens", corpus, valid, made, recipe.holdout)

    team.first_alone(claim)
    made = Tokenizer.load(folder / "tokens")
    loss = _loss(request.loss, _model(given, made, recipe.seed), recipe, layout)
    asked["loss"] = loss.name or None
    team.first_alone(lambda: is_same(folder, asked))
    return Prepared(loss, made, read_tokens(folder / "tokens"), context, objective, asked, layout)


def recall(folder: Path, make_loss: MakeLoss, everyone: Team) -> tuple[Prepared, Recipe]:
    """A run as its folder has it: its spec, recipe and tokens, without the texts they came from."""
    asked = earlier_request(folder)
    spec, recipe = ModelSpec.from_json(json.dumps(asked["spec"])), Recipe.from_json(json.dumps(asked["recipe"]))
    layout = TeamLayout.of(recipe.parallel, everyone, recipe.head_processes)
    tokenizer = Tokenizer.load(folder / "tokens")
    if asked["weights"] is None:
        model = _model(spec, tokenizer, recipe.seed)
    elif any((folder / "checkpoints").glob("step-*")):
        model = _model(Transformer(spec), tokenizer, recipe.seed)  # its weights are in the checkpoint
    else:
        raise HeadwiseError(f"{folder} went on from a model that was given and has no checkpoint yet; start it again.")
    context, objective = recipe.context or spec.context, _objective(spec, recipe)
    tokens, loss = read_tokens(folder / "tokens"), _loss(make_loss, model, recipe, layout)
    is_same(folder, {**asked, "loss": loss.name or None})
    return Prepared(loss, tokenizer, tokens, context, objective, asked, layout), recipe


def cutter(start: Prepared, recipe: Recipe) -> Callable[[np.ndarray], Any]:
    """How tokens become the rows of a step: pairs for an encoder-decoder, else as the recipe says."""
    tokenizer, paired = start.tokenizer, start.model.spec.kind == "encoder-decoder"
    how = {"context": start.context, "seed": recipe.seed}
    if not paired and recipe.rows != "texts":
        return partial(Anywhere if recipe.rows == "random" else Windows, **how)
    if tokenizer.end is None:
        instead = "use another tokenizer" if paired else "use rows='windows'"
        raise HeadwiseError(f"the tokenizer has no end token to tell texts apart; {instead}.")
    if paired:
        return partial(Pairs, **how, end=tokenizer.end, dress=partial(tokenizer.pair, start=start.model.start))
    before, behind = tokenizer.around
    # A decoder learns to end a text; an encoder, which is not asked for what comes next, reads it as everybody does.
    behind = (*behind, -1) if start.objective == "masked" else tokenizer.closing
    return partial(Texts, **how, end=tokenizer.end, before=before, behind=behind)


def _objective(spec: ModelSpec, recipe: Recipe) -> str:
    if recipe.objective != "auto":
        return recipe.objective
    return "masked" if spec.kind == "encoder" else "causal"


def _own(given: ModelSpec | Transformer) -> Tokenizer | None:
    own = None if isinstance(given, ModelSpec) else given.tokenizer
    return own if isinstance(own, Tokenizer) else None


def _model(given: ModelSpec | Transformer, tokenizer: Tokenizer, seed: int) -> Transformer:
    """A new model, its vocabulary that of the tokenizer; or the one that was given, if the tokenizer suits it."""
    if isinstance(given, ModelSpec):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer(replace(given, vocab=len(tokenizer)))
        model.tokenizer = tokenizer
        return model
    if len(tokenizer) > given.spec.vocab:
        raise HeadwiseError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {given.spec.vocab}; use the model's own tokenizer."
        )
    for parameter in given.parameters():  # training writes into them, so mapped ones would be copied anyway
        parameter.data = aligned(parameter.data)
    given.tokenizer = tokenizer
    return given


def _loss(make_loss: MakeLoss, model: Transformer, recipe: Recipe, layout: TeamLayout) -> Loss:
    """The model with what it learns from; what the loss draws for itself follows from the seed."""
    model = layout.arranged(model)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        loss = make_loss(model)
    if not isinstance(loss, Loss) or loss.model is not model:
        raise HeadwiseError(f"loss takes a model and gives a Loss of it, as LanguageLoss does; got {loss!r}.")
    if "fsdp" in layout.kind and any(name.startswith("loss.") for name in loss.learning()):
        raise HeadwiseError("this loss has parameters of its own; they are trained with parallel='ddp' or 'heads'.")
    return loss.to(layout.team.device)


def weights_digest(model: AnyModel) -> str:
    """What tells the weights of a model from all others."""
    state = model.state_dict()
    return _digest(*(value.detach().cpu().contiguous().view(torch.uint8).numpy().data for value in state.values()))


def _digest(*parts: Any) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()
