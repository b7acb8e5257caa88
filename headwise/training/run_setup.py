"""Prepare a run: tokenizer, model, tokens, loss and run folder."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.distributed.parallel_strategies import ParallelStrategy
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import ArgumentError, FileFormatError, UnsupportedModelError
from headwise.io.aligned_safetensors import align
from headwise.kernels.resolve_device import DTYPES
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol, Transformer
from headwise.model.weights_digest import weights_digest
from headwise.spec import ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import add_bos_eos, add_mask_token, make_tokenizer
from headwise.training.batch_samplers import DocumentSampler, PairSampler, RandomWindowSampler, ShuffledWindowSampler
from headwise.training.checkpoint import checkpoint_problem
from headwise.training.model_with_loss import MakeLoss, ModelWithLoss
from headwise.training.recipe import Recipe
from headwise.training.run_folder import RUN_FORMAT, check_run_folder, read_run_json
from headwise.training.token_file import TokenFiles, read_tokens, write_tokens
from headwise.training.train_request import TrainRequest
from headwise.weights.load import load

HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class RunSetup:
    """Everything that a run needs before its first step.

    Attributes:
        loss: The loss with its model.
        tokenizer: Tokenizer of the run.
        tokens: Token ids for training and evaluation.
        context: Tokens per row.
        objective: "causal" or "masked".
        run_record: Arguments of the run, as stored in run.json.
        layout: Distribution of data, weights and heads over processes.
        half_dtypes: Dtype of each parameter that had half precision before the run.
    """

    loss: ModelWithLoss
    tokenizer: Tokenizer
    tokens: TokenFiles
    context: int
    objective: str
    run_record: dict[str, Any]
    layout: ParallelStrategy
    half_dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def model(self) -> Transformer:
        """The model to train."""
        return self.loss.model  # pyright: ignore[reportReturnType]


def prepare_run(request: TrainRequest, folder: Path, layout: ParallelStrategy) -> RunSetup:
    """Check the request, claim the run folder, and create or load its contents."""
    model_or_spec, recipe, tokenizer, process_group = (
        request.model,
        request.resolved_recipe,
        request.tokenizer,
        layout.process_group,
    )
    corpus, valid = request.train_corpus, request.valid_corpus
    spec = model_or_spec if isinstance(model_or_spec, ModelSpec) else getattr(model_or_spec, "spec", model_or_spec)
    if not isinstance(spec, ModelSpec):
        raise ArgumentError(
            f'model: train needs a ModelSpec or a Transformer. Got {model_or_spec!r}. Use hw.preset("nano"), for example.'
        )
    objective, context = _resolve_objective_and_context(request, spec, process_group.size)
    own_tokenizer = _own_tokenizer(model_or_spec)
    if tokenizer is None:
        tokenizer = own_tokenizer or ("word" if corpus.name.startswith("the synthetic language") else "byte")
    # A new tokenizer gets a BOS/EOS template. A model that is trained further keeps its template.
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

    for key in ("spec", "recipe", "corpus", "valid", "tokenizer"):
        process_group.check_equal(
            json.dumps(run_record[key]),
            f"{key}: it differs between the processes. Pass the same {key} to every process.",
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

    half_dtypes = {} if isinstance(model_or_spec, ModelSpec) else _half_dtypes(model_or_spec)
    if half_dtypes:
        run_record["dtype"] = str(next(iter(half_dtypes.values()))).removeprefix("torch.")
    process_group.run_on_rank_zero(claim_folder)
    saved_tokenizer = Tokenizer.load(folder / "tokens")
    loss = _build_loss(request.loss, _build_model(model_or_spec, saved_tokenizer, recipe.seed), recipe, layout)
    run_record["loss"] = loss.name or None
    process_group.run_on_rank_zero(lambda: check_run_folder(folder, run_record))
    tokens = read_tokens(folder / "tokens")
    return RunSetup(loss, saved_tokenizer, tokens, context, objective, run_record, layout, half_dtypes)


def _resolve_objective_and_context(request: TrainRequest, spec: ModelSpec, num_processes: int) -> tuple[str, int]:
    """Return the objective and the context length. Raise if model, corpus and recipe do not fit together."""
    recipe = request.resolved_recipe
    for text_corpus in (request.train_corpus, request.valid_corpus):
        if text_corpus is not None:
            text_corpus.check_model_kind(spec.kind)
    if spec.weight_rules:
        raise UnsupportedModelError(
            "model: quantized weights cannot be trained. Train hw.dequantize(model), then quantize it again."
        )
    objective = _resolve_objective(spec, recipe)
    if (objective == "masked") != (spec.kind == "encoder"):
        raise ArgumentError(
            f"objective: {objective!r} does not suit a model of kind {spec.kind}. Use objective='auto'."
        )
    context = recipe.context or spec.context
    if context > spec.context and spec.positions == "learned":
        raise ArgumentError(
            f"context: the model has {spec.context} learned positions. Got {context}. Use at most {spec.context}."
        )
    if recipe.batch_size % (recipe.accumulation_steps * num_processes):
        raise ArgumentError(
            f"batch_size: it is not divisible by accumulation_steps × processes = {recipe.accumulation_steps} × "
            f"{num_processes}. Got {recipe.batch_size}. Use a multiple of {recipe.accumulation_steps * num_processes}."
        )
    return objective, context


def load_setup(folder: Path, make_loss: MakeLoss, world: ProcessGroup) -> tuple[RunSetup, Recipe]:
    """Load spec, recipe and tokens of a run from its folder. The texts are not needed."""
    run_record = read_run_json(folder)
    spec, recipe = (
        ModelSpec.from_dict(run_record["spec"]),
        Recipe.from_dict(run_record["recipe"]),
    )
    layout = ParallelStrategy.of(recipe.parallel, world, recipe.head_processes)
    tokenizer = Tokenizer.load(folder / "tokens")
    if run_record["weights"] is None:
        model = _build_model(spec, tokenizer, recipe.seed)
    elif (checkpoint := _newest_checkpoint(folder)) is not None:
        model = _build_model(_model_of_checkpoint(checkpoint, spec), tokenizer, recipe.seed)
    else:
        raise FileFormatError(
            f"{folder}: the run started from a given model and has no checkpoint yet, so it cannot be resumed. Start it "
            "again with the same model."
        )
    context, objective = recipe.context or spec.context, _resolve_objective(spec, recipe)
    tokens, loss = read_tokens(folder / "tokens"), _build_loss(make_loss, model, recipe, layout)
    check_run_folder(folder, {**run_record, "loss": loss.name or None})
    half_dtypes = (
        dict.fromkeys(dict(model.named_parameters()), DTYPES[run_record["dtype"]]) if "dtype" in run_record else {}
    )
    return RunSetup(loss, tokenizer, tokens, context, objective, run_record, layout, half_dtypes), recipe


def _newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is not damaged, the newest one if all are damaged, or None."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    return next((path for path in checkpoints if checkpoint_problem(path) is None), next(iter(checkpoints), None))


def _model_of_checkpoint(checkpoint: Path, spec: ModelSpec) -> Any:
    """Return a model for the weights of a checkpoint: a native one, or an attached one in the dtype of the checkpoint."""
    if (checkpoint / "config.json").is_file() and not (checkpoint / "spec.json").is_file():
        return load(checkpoint, dtype=None)
    return Transformer(spec)  # the checkpoint has the weights


def sampler_factory(setup: RunSetup, recipe: Recipe) -> Callable[[np.ndarray], Any]:
    """Return a function from tokens to a sampler: pairs for an encoder-decoder, otherwise as in the recipe."""
    tokenizer, is_paired = setup.tokenizer, setup.model.spec.kind == "encoder-decoder"
    common_kwargs = {"context": setup.context, "seed": recipe.seed}
    if not is_paired and recipe.rows != "texts":
        return partial(RandomWindowSampler if recipe.rows == "random" else ShuffledWindowSampler, **common_kwargs)
    if tokenizer.end_id is None:
        hint = "use another tokenizer" if is_paired else "use rows='windows'"
        raise ArgumentError(f"tokenizer: it has no end token, which separates texts. To continue, {hint}.")
    if is_paired:
        return partial(
            PairSampler,
            **common_kwargs,
            end_id=tokenizer.end_id,
            wrap_pair=partial(tokenizer.wrap_pair, decoder_start_token=setup.model.decoder_start_token),
        )
    prefix, suffix = tokenizer.template_ids
    # A decoder learns to predict the end of a text. An encoder sees only the template of its tokenizer.
    suffix = (*suffix, -1) if setup.objective == "masked" else tokenizer.suffix_ids_with_eos
    return partial(DocumentSampler, **common_kwargs, end_id=tokenizer.end_id, prefix=prefix, suffix=suffix)


def _resolve_objective(spec: ModelSpec, recipe: Recipe) -> str:
    if recipe.objective != "auto":
        return recipe.objective
    return "masked" if spec.kind == "encoder" else "causal"


def _own_tokenizer(model_or_spec: ModelSpec | ModelProtocol) -> Tokenizer | None:
    tokenizer = None if isinstance(model_or_spec, ModelSpec) else model_or_spec.tokenizer
    return tokenizer if isinstance(tokenizer, Tokenizer) else None


def _build_model(model_or_spec: ModelSpec | ModelProtocol, tokenizer: Tokenizer, seed: int) -> Any:
    """Return a new model with the vocabulary of the tokenizer, or the given model if the tokenizer fits."""
    if isinstance(model_or_spec, ModelSpec):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer(replace(model_or_spec, vocab=len(tokenizer)))
        model.tokenizer = tokenizer
        return model
    if len(tokenizer) > model_or_spec.spec.vocab:
        raise ArgumentError(
            f"tokenizer: it has {len(tokenizer)} tokens, the model {model_or_spec.spec.vocab}. Use the model's own tokenizer."
        )
    for parameter in model_or_spec.parameters():  # training writes to them, so memory-mapped ones are copied
        parameter.data = align(at_least_float32(parameter.data))  # updates are smaller than half precision resolves
    model_or_spec.tokenizer = tokenizer
    return model_or_spec


def _half_dtypes(model: Any) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter in half precision, by name."""
    return {name: weight.dtype for name, weight in model.named_parameters() if weight.dtype in HALF_DTYPES}


@torch.no_grad()
def restore_half_precision(model: Transformer, half_dtypes: dict[str, torch.dtype]) -> None:
    """Round the trained float32 parameters to the dtypes that they had before the run, and drop their gradients."""
    for name, parameter in model.named_parameters():
        if name in half_dtypes:
            parameter.grad = None
            parameter.data = parameter.data.to(half_dtypes[name])


def _build_loss(make_loss: MakeLoss, model: Transformer, recipe: Recipe, layout: ParallelStrategy) -> ModelWithLoss:
    """Build the loss of a model. Its random initialization depends only on the seed."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"model: its weights are on several devices ({', '.join(devices)}), and training needs all on one. Load "
            f"it on one device, for example without device_map."
        )
    model = layout.place_model(model)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        loss = make_loss(model)
    if not isinstance(loss, ModelWithLoss) or loss.model is not model:
        raise ArgumentError(
            "loss: must be a function that takes the model and returns a ModelWithLoss of this model, such as LanguageLoss. "
            f"Got {loss!r}."
        )
    if "fsdp" in layout.kind and any(name.startswith("loss.") for name in loss.trainable_parameters()):
        raise ArgumentError(
            f"parallel: losses with parameters do not support FSDP. Got {layout.kind!r}. Use parallel='ddp' or 'heads'."
        )
    return loss.to(layout.process_group.device)


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
