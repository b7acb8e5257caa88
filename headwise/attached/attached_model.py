"""The handle of a transformers model: all that is asked of a model of ours, over one that is not."""

import copy
import sys
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from headwise.attached.attach_support import check_supported, copy_config
from headwise.attached.attachment import Attachment, AttachRollbackState
from headwise.attached.attention_norms import find_input_norm
from headwise.attached.generate import DEFAULT_MAX_NEW_TOKENS, generate, prompt_to_ids, stream_tokens
from headwise.attached.image_input import ImageInput
from headwise.attached.infer_spec import decoder_start_token, has_lm_head, infer_spec
from headwise.attached.layer import AttachedLayer
from headwise.attached.layer_probe import check_reconstruction, probe_layers
from headwise.attached.offload import check_in_memory, copy_to_memory, is_offloaded
from headwise.attached.prune_in_place import add_to_output_biases, prune_and_verify
from headwise.attached.residual_stream import find_residual_stream
from headwise.attached.resumable_forward import make_resumable_forward, why_not_resumable
from headwise.attached.save_load import (
    PLANS_ATTRIBUTE,
    is_pruned,
    load_attached,
    make_attached_layers,
    patch_save_pretrained,
    save_attached,
)
from headwise.attached.train_mode_mixin import TrainModeMixin
from headwise.attached.transformers_forward import AttachedLMHead, call_transformers_model, forward_tokens, validate_ids
from headwise.errors import HeadwiseError
from headwise.heads import Heads, HookPoint
from headwise.heads.head import Gates, HeadPattern, resolve_gates
from headwise.io.images import ImagePreprocessor
from headwise.model import ResidualStream, ResumableForward, eval_mode
from headwise.model.protocols import LMHeadProtocol, Norms
from headwise.model.prune import heads_to_prune
from headwise.model.resumable_forward import RowSelector
from headwise.spec import LayerAddress, ModelSpec, Plan
from headwise.spec.cache_policy import CachePolicies
from headwise.text import Tokenizer


class AttachedModel(TrainModeMixin):
    """A transformers model with its heads: `.heads`, `.hook_points()`, and the calls that looking and changing make."""

    def __init__(
        self, model: Any, layers: list[AttachedLayer], tokenizer: Any, preprocessor: ImagePreprocessor | None = None
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.preprocessor = preprocessor  # how a picture becomes what the model reads
        self.family: str | None = getattr(model.config, "model_type", None)
        self._entered = 0  # contexts of this handle that are open
        self._spec: ModelSpec | None = None
        self._residual_stream: ResidualStream | None = None
        self._image_input: ImageInput | None = None
        self._why_not_resumable: str | None = None  # why ablated copies cost them; None: not tried yet
        self._save_notice_shown = False  # what saving a cut model means for others
        self._attachment = Attachment(model, layers, self)

    @classmethod
    def attach_layers(
        cls,
        model: Any,
        layers: list[AttachedLayer],
        tokenizer: Any,
        preprocessor: ImagePreprocessor | None = None,
        *,
        already_probed: bool = False,
    ) -> Self:
        """Attach to a model and, unless its layers were `tried` before, test on a few tokens what holds for its heads.

        After any error, Ctrl-C included, the model has the hooks and modes that it had before.
        """
        before = AttachRollbackState(model)
        try:
            handle = cls(model, layers, tokenizer, preprocessor)
            return handle if already_probed else handle._try_layers()
        except BaseException:
            before.restore()
            raise

    def _try_layers(self) -> Self:
        """Test by one call on a few tokens what was derived about heads, and withhold the rest."""
        self._attachment.remove_hooks()
        for part, layers in self._towers():
            probe_layers(part, layers)
        self._attachment.add_hooks()
        check_reconstruction(self._layers)
        return self

    @property
    def is_attached(self) -> bool:
        """Whether the model is attached through this handle."""
        return self._attachment.is_active

    @property
    def _layers(self) -> list[AttachedLayer]:
        return self._attachment.layers

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
        gates: Gates | None = None,
        hidden: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Token ids (B, T) → logits (B, T, V), or hidden states (B, T, D), as our own models do it.

        `attention_mask` (B, T) is True at real tokens, left or right; `source` is what an encoder-decoder reads. With
        `input_ids` or any other argument of the model (`labels`, …) it is the model's own call, and its own output comes
        back.
        """
        self._check_attached()
        if model_kwargs:
            with self._apply_gates(gates):
                return call_transformers_model(
                    self.model, ids, attention_mask, source, source_attention_mask, hidden, model_kwargs
                )
        ids = validate_ids(self.model, ids, attention_mask)
        return_hidden = hidden or not has_lm_head(self.model)
        with self._apply_gates(gates):
            return forward_tokens(
                self.model, self.spec, ids, attention_mask, source, source_attention_mask, return_hidden
            )

    # Heads.

    @property
    def heads(self) -> Heads:
        """Every head, by address: attached.heads["5.1"]."""
        return Heads(self._layers, owner=self)

    def hook_points(self) -> list[HookPoint]:
        """Every place where attention happens, in the order data walks through them."""
        return [layer.hook_point for layer in self._layers]

    gathered_hook_points, is_sharded = hook_points, False  # no other process holds heads of it

    def attention_layers(self) -> list[AttachedLayer]:
        """The attention layers, encoder first."""
        return list(self._layers)

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
        *,
        in_place: bool = False,
    ) -> Self:
        """Return a smaller model without these heads: a copy, or this model with smaller projections.

        Args:
            heads: Heads to prune, by address or pattern.
            folded_biases: Added to the output biases of layers, (D,) each.
            cache: Cache policies of KV heads, which only native models have.
            in_place: Prune this model instead of a copy that shares no memory with it.
        """
        if cache:
            self.check_native("caches by head are for headwise's own models")
        if not in_place:
            copied = self.copy_offloaded_to_memory() if is_offloaded(self.model) else copy.deepcopy(self)
            return copied.prune(heads, folded_biases, in_place=True)
        self._check_attached()
        check_in_memory(self.model)
        pruned = heads_to_prune(self.spec, heads)
        if pruned:
            for tower, layers in self._towers():
                if tower_pruned := [
                    address for layer in layers for address in layer.hook_point.head_addresses if address in pruned
                ]:
                    prune_and_verify(
                        tower, layers, tower_pruned, self._attachment.replace_layers, self._attachment.unregister_layers
                    )
            patch_save_pretrained(self.model)
        add_to_output_biases(self._layers, folded_biases or {})
        self._spec = self._residual_stream = self._why_not_resumable = self._image_input = None
        return self

    def _towers(self) -> list[tuple[Any, list[AttachedLayer]]]:
        """The model with its layers; of several towers each one by itself, as it can be called alone."""
        layers_by_tower: dict[str, list[AttachedLayer]] = {}
        for layer in self._layers:
            layers_by_tower.setdefault(layer.info.tower_path, []).append(layer)
        return [(self.model.get_submodule(path), layers) for path, layers in layers_by_tower.items()]

    def copy_offloaded_to_memory(self) -> Self:
        """This handle, or, if weights are offloaded, that of a copy with all weights in CPU memory."""
        self._check_attached()
        return self._attach_similar(copy_to_memory(self.model)) if is_offloaded(self.model) else self

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans (`hw.Plan`) by which heads were cut, in their order; heads cut by hand are in none."""
        return self.model.__dict__.get(PLANS_ATTRIBUTE, ())

    @plans.setter
    def plans(self, plans: tuple[Plan, ...]) -> None:
        self.model.__dict__[PLANS_ATTRIBUTE] = plans

    # What it is.

    @property
    def spec(self) -> ModelSpec:
        """The model as far as those who look at it ask."""
        if self._spec is None:
            self._spec = infer_spec(self.model, self._layers)
        return self._spec

    @property
    def output(self) -> LMHeadProtocol | None:
        """From final hidden states to logits, as the model does it; None where it gives no logits of a vocabulary."""
        return AttachedLMHead(self.model) if has_lm_head(self.model) else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def image_input(self) -> ImageInput | None:
        """How it reads pictures; None where it reads something else."""
        if self._image_input is None and getattr(self.model, "main_input_name", "") == "pixel_values":
            self._image_input = ImageInput(self.model, self._layers, self.preprocessor)
        return self._image_input

    @property
    def decoder_start_token(self) -> int:
        """The token before what an encoder-decoder writes, as its configuration has it."""
        return decoder_start_token(self.model)

    def input_norms(self) -> Norms | None:
        """For each layer the norm its heads read through, for q, and for k and v; None where that is not known."""
        input_norms = {
            str(layer.hook_point.address): find_input_norm(layer.info) for layer in self._layers if layer.spec.head_ids
        }
        if not all(is_known for is_known, _ in input_norms.values()):
            return None
        return {layer_address: (norm, norm) for layer_address, (_, norm) in input_norms.items()}

    def residual_stream(self) -> ResidualStream:
        """What adds to the stream of a decoder and what reads it, found out once on a few tokens; refused if not a sum."""
        self._check_attached()
        if self._residual_stream is None:
            if self.spec.kind != "decoder" or self.spec.output != "lm":
                raise HeadwiseError(
                    f"logits are followed back in decoders with a language-model output; {type(self.model).__name__} is of "
                    f"kind {self.spec.kind}, output {self.spec.output}."
                )
            self._residual_stream = find_residual_stream(self.model, self._layers)
        return self._residual_stream

    def resumable_forward(
        self,
        ids: Tensor,
        layer_addresses: Collection[LayerAddress],
        select_rows: RowSelector,
        *,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
    ) -> ResumableForward:
        """A clean pass that stops at the layers wanted; from there copies go on, and blocks before it do not run again."""
        self._check_attached()
        inputs = (validate_ids(self.model, ids, attention_mask), attention_mask, source, source_attention_mask)
        return make_resumable_forward(self, self.model, self._layers, layer_addresses, select_rows, *inputs)

    def why_not_resumable(self) -> str:
        """Why such copies cost whole passes, found out once on a few tokens; empty where they do not."""
        if self._why_not_resumable is None:
            self._why_not_resumable = why_not_resumable(self, self.model, self._layers)
        return self._why_not_resumable

    def untrained(self, seed: int = 0) -> "AttachedModel":
        """The same model with random weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = type(self.model)(copy_config(self.model)).to(self.device).eval()
        attached_copy = self._attach_similar(model)
        pruned = set(attached_copy.heads.addresses) - set(self.heads.addresses)
        return attached_copy.prune(tuple(pruned), in_place=True) if pruned else attached_copy

    # Writing: texts, and folders.

    def generate(
        self,
        prompt: Any = None,
        max_new_tokens: int | None = None,
        *,
        gates: Gates | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """What is given, gone on by at most so many tokens (64), in its own kind: a text, a list of ids, a tensor (B, T).

        Of a text it takes what `stream` takes. Of anything else it is the model's own `generate`, with all its options.
        Nothing is dropped out.
        """
        self._check_attached()
        if isinstance(prompt, str):
            max_new_tokens = DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
            ids = prompt_to_ids(self.model, self.tokenizer, prompt)  # (1, T)
            generated = [int(step) for step in self.stream(ids, max_new_tokens, gates=gates, seed=seed, **options)]
            prompt_ids = [] if self.spec.kind == "encoder-decoder" else ids[0].tolist()
            return self.tokenizer.decode([*prompt_ids, *generated])
        with self._apply_gates(gates), eval_mode(self.model):
            return generate(self.model, prompt, max_new_tokens, seed, options)

    def stream(
        self,
        prompt: str | Tensor,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        gates: Gates | None = None,
        **options: Any,
    ) -> Generator[Tensor, None, None]:
        """The tokens that follow a text, (1,) each, or ids (B, T), (B,) each, as they are made.

        `temperature`, `top_k`, `top_p`, `seed` say how they are drawn. Between two tokens the model is as it was.
        """
        self._check_attached()
        ids = prompt_to_ids(self.model, self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        return self._stream(stream_tokens(self.model, ids, max_new_tokens, **options), gates)

    def _stream(self, steps: Generator[Tensor, None, None], gates: Gates | None) -> Generator[Tensor, None, None]:
        with closing(steps):
            while True:
                with self._apply_gates(gates), eval_mode(self.model):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def save_pretrained(self, folder: str | Path, *, full_shape: bool = False) -> Path:
        """Write the model, whole or not at all; `hw.load(folder)` brings it back, cut or not.

        With `full_shape` a cut model has its first shape again, zeros in place of heads, for plain `from_pretrained`.
        Without, plain transformers refuses a cut one: that is said on standard error, once.
        """
        path = save_attached(self.model, self._layers, (self.tokenizer, self.preprocessor), folder, full_shape)
        if is_pruned(self._layers) and not full_shape and not self._save_notice_shown:
            self._save_notice_shown = True
            print(
                f"heads were cut from this {type(self.model).__name__}: hw.load(folder) loads what is written, plain "
                f"transformers does not; hw.export(model, folder) writes a folder for both, zeros in place of heads.",
                file=sys.stderr,
            )
        return path

    save = save_pretrained

    @classmethod
    def reopen(
        cls, folder: str | Path, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
    ) -> Self:
        """A folder that transformers reads, cut or not, as an attached model with its tokenizer."""
        folder = Path(folder)
        model, layers = load_attached(folder, dtype, device)
        check_supported(model)
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        return cls.attach_layers(
            model, layers, Tokenizer.load(folder) if has_tokenizer else None, ImagePreprocessor.load(folder)
        )

    def check_native(self, operation: str) -> None:
        """Refuse what only models of our own can do."""
        raise HeadwiseError(
            f"{operation}; this is an attached {type(self.model).__name__}. Load it with hw.load(…), if its family is mapped "
            f"here."
        )

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over weights by the model's own names, as `save` writes them; the names that are not known."""
        return self.model.load_state_dict(state, strict=False).unexpected_keys

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model for plain transformers, zeros in place of heads that were cut; it stays the family it is."""
        if family is not None and family != self.family:
            raise HeadwiseError(f"an attached model stays what it is, {self.family}; leave the family away.")
        return save_attached(
            self.model, self._layers, (self.tokenizer, self.preprocessor), folder, full_shape=True, exported=True
        )

    # Leaving.

    def detach(self) -> Any:
        """Leave the model exactly as it was, and give it back.

        Where cutting has left groups of different sizes, every head gets its own keys, as plain transformers needs it.
        """
        self._check_attached()
        self._attachment.undo()
        return self.model

    def __enter__(self) -> Self:
        self._check_attached()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self.is_attached and not self._entered:  # the outermost of several contexts detaches
            self.detach()

    def _attach_similar(self, model: Any) -> Self:
        """A handle of another model that is built alike."""
        layers = make_attached_layers(model)
        layers_by_address = {layer.hook_point.address: layer for layer in self._layers}
        for layer in layers:
            if layer.hook_point.address in layers_by_address:
                layer.copy_probe_results(layers_by_address[layer.hook_point.address])
        return type(self).attach_layers(model, layers, self.tokenizer, self.preprocessor, already_probed=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttachedModel":
        """A copy of the model, attached, with hook points of its own."""
        self._check_attached()
        return self._attach_similar(copy.deepcopy(self.model, memo))

    def _check_attached(self) -> None:
        if not self.is_attached:
            raise HeadwiseError("this handle was detached already; attach the model again: hw.attach(model).")

    @contextmanager
    def _apply_gates(self, gates: Gates | None) -> Iterator[None]:
        """While open heads are scaled, by pattern or by layer: (H,) or (B, H) each."""
        gates_by_layer = resolve_gates(self._layers, gates)
        with ExitStack() as stack:
            for hook_point in self.hook_points():
                if hook_point.address in gates_by_layer:
                    stack.enter_context(hook_point.scaled(gates_by_layer[hook_point.address]))
            yield
