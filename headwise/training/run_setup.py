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

from headwise.distributed.parallel_strategy import ParallelStrategy
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import HeadwiseError
from headwise.io.aligned_safetensors import align
from headwise.model import Transformer
from headwise.model.weights_digest import weights_digest
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import add_bos_eos, add_mask_token, make_tokenizer
from headwise.training.batch_samplers import DocumentSampler, PairSampler, RandomWindowSampler, ShuffledWindowSampler
from headwise.training.recipe import Recipe
from headwise.training.run_folder import RUN_FORMAT, check_run_folder, read_run_json
from headwise.training.token_file import TokenFiles, read_tokens, write_tokens
from headwise.training.train_loss import MakeLoss, TrainLoss
from headwise.training.train_request import TrainRequest


@dataclass
class RunSetup:
    """All that a run starts from."""

    loss: TrainLoss  # with its model
    tokenizer: Tokenizer
    tokens: TokenFiles
    context: int
    objective: str
    run_record: dict[str, Any]  # what was asked for, as it is noted in the folder
    layout: ParallelStrategy  # who shares what

    @property
    def model(self) -> Transformer:
        """What is trained."""
        return self.loss.model  # pyright: ignore[reportReturnType]


def prepare_run(request: TrainRequest, folder: Path, layout: ParallelStrategy) -> RunSetup:
    """Check what was asked, claim the folder, and make or find everything in it."""
    model_or_spec, recipe, tokenizer, process_group = (
        request.model,
        request.resolved_recipe,
        request.tokenizer,
        layout.process_group,
    )
    corpus, valid = request.train_corpus, request.valid_corpus
    spec = model_or_spec if isinstance(model_or_spec, ModelSpec) else getattr(model_or_spec, "spec", model_or_spec)
    if not isinstance(spec, ModelSpec):
        raise HeadwiseError(f'train takes a ModelSpec or a Transformer, e.g. hw.preset("nano"); got {model_or_spec!r}.')
    objective, context = _check_request(request, spec, process_group.size)
    own_tokenizer = _own_tokenizer(model_or_spec)
    if tokenizer is None:
        tokenizer = own_tokenizer or ("word" if corpus.name.startswith("the synthetic language") else "byte")
    # What stands before a text in training stands there for ever. A model that is trained further keeps what it had.
    add_template = recipe.rows == "texts" and spec.kind != "encoder-decoder" and tokenizer is not own_tokenizer
    run_record = {
        "format": RUN_FORMAT,
        "spec": spec.to_dict(),
        "recipe": asdict(recipe),
        "corpus": corpus.fingerprint,
        "valid": None if valid is None else valid.fingerprint,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else _tokenizer_digest(tokenizer),
        "add_template": add_template,
        "weights": None if isinstance(model_or_spec, ModelSpec) else weights_digest(model_or_spec),
    }

    for field in ("spec", "recipe", "corpus", "valid", "tokenizer"):
        process_group.check_equal(
            json.dumps(run_record[field]), f"the processes were given a different {field}; give every one the same."
        )

    def claim_folder() -> None:
        is_same_run = check_run_folder(folder, run_record)
        if not is_same_run or not (folder / "tokens" / "tokens.json").is_file():
            saved_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else make_tokenizer(tokenizer, corpus)
            if objective == "masked":
                saved_tokenizer = add_mask_token(saved_tokenizer)
            if add_template and saved_tokenizer.end_id is not None:
                saved_tokenizer = add_bos_eos(saved_tokenizer, add_eos=spec.kind == "encoder")
            write_tokens(folder / "tokens", corpus, valid, saved_tokenizer, recipe.holdout)

    process_group.run_on_rank_zero(claim_folder)
    saved_tokenizer = Tokenizer.load(folder / "tokens")
    loss = _build_loss(request.loss, _build_model(model_or_spec, saved_tokenizer, recipe.seed), recipe, layout)
    run_record["loss"] = loss.name or None
    process_group.run_on_rank_zero(lambda: check_run_folder(folder, run_record))
    return RunSetup(loss, saved_tokenizer, read_tokens(folder / "tokens"), context, objective, run_record, layout)


def _check_request(request: TrainRequest, spec: ModelSpec, num_processes: int) -> tuple[str, int]:
    """Return the objective and the context length, or raise where the model, the corpus and the recipe do not fit."""
    recipe = request.resolved_recipe
    for text_corpus in (request.train_corpus, request.valid_corpus):
        if text_corpus is not None:
            text_corpus.check_model_kind(spec.kind)
    if spec.weight_rules:
        raise HeadwiseError(
            "weights at few bits are no parameters and cannot be trained; train hw.dequantize(model), then quantize it."
        )
    objective = _resolve_objective(spec, recipe)
    if (objective == "masked") != (spec.kind == "encoder"):
        raise HeadwiseError(
            f"the {objective} objective does not suit a model of kind {spec.kind}; leave objective out."
        )
    context = recipe.context or spec.context
    if context > spec.context and spec.positions == "learned":
        raise HeadwiseError(f"a context of {context} is more than the {spec.context} positions of the model.")
    if recipe.batch_size % (recipe.accumulation_steps * num_processes):
        raise HeadwiseError(
            f"a batch of {recipe.batch_size} rows cannot be shared by {num_processes} processes in "
            f"{recipe.accumulation_steps} parts each; make it a multiple of {recipe.accumulation_steps * num_processes}."
        )
    return objective, context


def load_setup(folder: Path, make_loss: MakeLoss, world: ProcessGroup) -> tuple[RunSetup, Recipe]:
    """A run as its folder has it: its spec, recipe and tokens, without the texts they came from."""
    run_record = read_run_json(folder)
    spec, recipe = (
        ModelSpec.from_dict(run_record["spec"]),
        Recipe.from_dict(run_record["recipe"]),
    )
    layout = ParallelStrategy.of(recipe.parallel, world, recipe.head_processes)
    tokenizer = Tokenizer.load(folder / "tokens")
    if run_record["weights"] is None:
        model = _build_model(spec, tokenizer, recipe.seed)
    elif any((folder / "checkpoints").glob("step-*")):
        model = _build_model(Transformer(spec), tokenizer, recipe.seed)  # its weights are in the checkpoint
    else:
        raise HeadwiseError(f"{folder} went on from a model that was given and has no checkpoint yet; start it again.")
    context, objective = recipe.context or spec.context, _resolve_objective(spec, recipe)
    tokens, loss = read_tokens(folder / "tokens"), _build_loss(make_loss, model, recipe, layout)
    check_run_folder(folder, {**run_record, "loss": loss.name or None})
    return RunSetup(loss, tokenizer, tokens, context, objective, run_record, layout), recipe


def sampler_factory(setup: RunSetup, recipe: Recipe) -> Callable[[np.ndarray], Any]:
    """How tokens become the rows of a step: pairs for an encoder-decoder, else as the recipe says."""
    tokenizer, is_paired = setup.tokenizer, setup.model.spec.kind == "encoder-decoder"
    common_kwargs = {"context": setup.context, "seed": recipe.seed}
    if not is_paired and recipe.rows != "texts":
        return partial(RandomWindowSampler if recipe.rows == "random" else ShuffledWindowSampler, **common_kwargs)
    if tokenizer.end_id is None:
        hint = "use another tokenizer" if is_paired else "use rows='windows'"
        raise HeadwiseError(f"the tokenizer has no end token to tell texts apart; {hint}.")
    if is_paired:
        return partial(
            PairSampler,
            **common_kwargs,
            end_id=tokenizer.end_id,
            wrap_pair=partial(tokenizer.wrap_pair, decoder_start_token=setup.model.decoder_start_token),
        )
    prefix, suffix = tokenizer.template_ids
    # A decoder learns to end a text; an encoder, which is not asked for what comes next, reads it as everybody does.
    suffix = (*suffix, -1) if setup.objective == "masked" else tokenizer.suffix_ids_with_eos
    return partial(DocumentSampler, **common_kwargs, end_id=tokenizer.end_id, prefix=prefix, suffix=suffix)


def _resolve_objective(spec: ModelSpec, recipe: Recipe) -> str:
    if recipe.objective != "auto":
        return recipe.objective
    return "masked" if spec.kind == "encoder" else "causal"


def _own_tokenizer(model_or_spec: ModelSpec | Transformer) -> Tokenizer | None:
    tokenizer = None if isinstance(model_or_spec, ModelSpec) else model_or_spec.tokenizer
    return tokenizer if isinstance(tokenizer, Tokenizer) else None


def _build_model(model_or_spec: ModelSpec | Transformer, tokenizer: Tokenizer, seed: int) -> Transformer:
    """A new model, its vocabulary that of the tokenizer; or the one that was given, if the tokenizer suits it."""
    if isinstance(model_or_spec, ModelSpec):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer(replace(model_or_spec, vocab=len(tokenizer)))
        model.tokenizer = tokenizer
        return model
    if len(tokenizer) > model_or_spec.spec.vocab:
        raise HeadwiseError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {model_or_spec.spec.vocab}; use the model's own tokenizer."
        )
    for parameter in model_or_spec.parameters():  # training writes into them, so mapped ones would be copied anyway
        parameter.data = align(parameter.data)
    model_or_spec.tokenizer = tokenizer
    return model_or_spec


def _build_loss(make_loss: MakeLoss, model: Transformer, recipe: Recipe, layout: ParallelStrategy) -> TrainLoss:
    """The model with what it learns from; what the loss draws for itself follows from the seed."""
    model = layout.place_model(model)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        loss = make_loss(model)
    if not isinstance(loss, TrainLoss) or loss.model is not model:
        raise HeadwiseError(f"loss takes a model and gives a Loss of it, as LanguageLoss does; got {loss!r}.")
    if "fsdp" in layout.kind and any(name.startswith("loss.") for name in loss.trainable_parameters()):
        raise HeadwiseError("this loss has parameters of its own; they are trained with parallel='ddp' or 'heads'.")
    return loss.to(layout.process_group.device)


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
