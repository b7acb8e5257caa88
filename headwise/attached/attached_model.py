"""`AttachedModel`: the handle of an attached transformers model, with the interface of Headwise's own models."""

import copy
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from headwise.attached.attach_support import check_supported, copy_config
from headwise.attached.attachment import Attachment, AttachRollbackState
from headwise.attached.cache_policies import (
    CacheHandle,
    cache_layer_factory,
    check_cache_support,
    check_kv_heads,
    generate_with_cache,
    layers_that_need_all_keys,
    set_policies,
)
from headwise.attached.generate import (
    DEFAULT_MAX_NEW_TOKENS,
    check_can_generate,
    generate,
    prompt_to_ids,
    stream_tokens,
)
from headwise.attached.image_input_reader import ImageInputReader
from headwise.attached.infer_spec import decoder_start_token, has_lm_head, infer_spec
from headwise.attached.known_input_norms import find_input_norm
from headwise.attached.layer import AttachedLayer
from headwise.attached.layer_structure_check import check_reconstruction, probe_layers
from headwise.attached.offload import check_in_memory, copy_to_memory, is_offloaded
from headwise.attached.prune_in_place import add_to_output_biases, prune_and_verify
from headwise.attached.quantize_in_place import (
    blocks_with_mlps,
    dequantize_in_place,
    non_attention_linear_layers,
    quantize_in_place,
)
from headwise.attached.residual_stream import find_residual_stream
from headwise.attached.resumable_forward import make_resumable_forward, why_not_resumable
from headwise.attached.save_load_transformers_folder import (
    CACHE_ATTRIBUTE,
    PLANS_ATTRIBUTE,
    is_loadable_by_transformers,
    is_pruned,
    load_model_and_layers,
    make_attached_layers,
    patch_save_pretrained,
    save_attached,
)
from headwise.attached.simulated_streaming_forward import AttachedSimulatedStreamingForward
from headwise.attached.tokenizer import wrap_tokenizer
from headwise.attached.train_mode_and_checkpointing_mixin import TrainModeAndCheckpointingMixin
from headwise.attached.transformers_forward import AttachedLMHead, call_transformers_model, forward_tokens, validate_ids
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.heads import Heads, HookPoint
from headwise.heads.head import Gates, HeadPattern, resolve_gates
from headwise.io.images import ImagePreprocessor
from headwise.kernels.matmul_tuner import MatmulTuner
from headwise.model import ResidualStream, ResumableForward, eval_mode
from headwise.model.prefix_forward import PrefixForward
from headwise.model.protocols import Norms, OutputLayerProtocol
from headwise.model.prune import heads_to_prune
from headwise.model.resumable_forward import RowSelector
from headwise.spec import CacheRule, LayerAddress, ModelSpec, Plan
from headwise.spec.cache_policy import CachePolicies
from headwise.text import Tokenizer


class AttachedModel(TrainModeAndCheckpointingMixin):
    """Handle of a transformers model, created by `hw.attach`.

    Attributes:
        model: The transformers model.
        tokenizer: Tokenizer, or None. A tokenizer of transformers is converted when it is set.
        preprocessor: Preprocessing of images, or None.
        matmul_tuner: Choice of the matrix products of long analyses.
        family: `model_type` of the model's configuration.
    """

    def __init__(
        self, model: Any, layers: list[AttachedLayer], tokenizer: Any, preprocessor: ImagePreprocessor | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.preprocessor = preprocessor
        self.family: str | None = getattr(getattr(model, "config", None), "model_type", None)
        self._entered = 0  # number of open `with` blocks of this handle
        self._spec: ModelSpec | None = None
        self._residual_stream: ResidualStream | None = None
        self._image_input: ImageInputReader | None = None
        self._why_not_resumable: str | None = None  # None: not tested yet
        self.dense_cache_layers: set[LayerAddress] = set()  # layers whose cache passes on the keys of all tokens
        self._per_head_cache_checked = False
        self.matmul_tuner = MatmulTuner()
        self._save_notice_shown = False  # the notice about saving a pruned model is printed once
        devices = {weight.device for weight in model.parameters() if weight.device.type != "meta"}
        for layer in layers:  # analysis compares layers on different devices
            layer.hook_point.listener_device = self.device if len(devices) > 1 else None
        self._attachment = self._attach(layers)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer, or None."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = wrap_tokenizer(tokenizer)

    def _attach(self, layers: list[AttachedLayer]) -> Any:
        """Add marks and hooks to the model."""
        return Attachment(self.model, layers, self)

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
        """Attach to a model and, unless its layers are `already_probed`, test the layers on a few tokens.

        After any error, Ctrl-C included, the model has the hooks and modes that it had before.
        """
        before = AttachRollbackState(model)
        try:
            handle = cls(model, layers, tokenizer, preprocessor)
            handle = handle if already_probed else handle._try_layers()
            if handle.cache_rules:
                set_policies(handle._layers, handle.spec)
            return handle
        except BaseException:
            before.restore()
            raise

    def _try_layers(self) -> Self:
        """Test on a few tokens how heads contribute to each layer. Operations that the test does not support are disabled."""
        self._attachment.remove_hooks()
        for part, layers in self._towers():
            probe_layers(part, layers)
        self._attachment.add_hooks()
        check_reconstruction(self._layers)
        return self

    def __repr__(self) -> str:
        from headwise.ui.result_text import attached_model_table

        return attached_model_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import attached_model_table

        return attached_model_table(self).as_html()

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
        """Compute logits (B, T, V), or hidden states (B, T, D), of token ids (B, T).

        Args:
            ids: Token ids (B, T).
            attention_mask: (B, T), True at real tokens. Padding may be on either side.
            source: Token ids (B, S) for the encoder of an encoder-decoder.
            source_attention_mask: (B, S), True at real tokens of `source`.
            gates: Factors for the outputs of heads, by head pattern or layer address: (H,) or (B, H) each.
            hidden: Return the hidden states after the last norm instead of logits.
            **model_kwargs: Arguments of the transformers model (`input_ids`, `labels`, …). If any is given, the model is
                called directly and its own output is returned.

        Returns:
            Logits or hidden states, or the output of the transformers model if `model_kwargs` are given.
        """
        self._check_attached()
        if model_kwargs:
            with self._apply_gates(gates):
                return call_transformers_model(
                    self.model,
                    ids,
                    attention_mask,
                    source,
                    source_attention_mask,
                    hidden=hidden,
                    model_kwargs=model_kwargs,
                )
        ids = validate_ids(self.model, ids, attention_mask)
        return_hidden = hidden or not has_lm_head(self.model)
        with self._apply_gates(gates):
            return forward_tokens(
                self.model, self.spec, ids, attention_mask, source, source_attention_mask, hidden=return_hidden
            )

    # Heads.

    @property
    def heads(self) -> Heads:
        """All heads, by address: `attached.heads["5.1"]`."""
        return Heads(self._layers, owner=self)

    def hook_points(self) -> list[HookPoint]:
        """Return the hook points of all attention layers, in forward order."""
        return [layer.hook_point for layer in self._layers]

    gathered_hook_points, is_sharded = hook_points, False  # an attached model is never sharded
    is_native = False

    def attention_layers(self) -> list[AttachedLayer]:
        """Return the attention layers, those of the encoder first."""
        return list(self._layers)

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
        *,
        in_place: bool = False,
    ) -> Self:
        """Prune heads by making projections smaller.

        Args:
            heads: Heads to prune, by address or pattern.
            folded_biases: Tensors (D,) to add to the output biases, by layer.
            cache: Cache policies of KV heads. Evicted tokens are masked in every call, and `attached.generate` does not hold
                them in memory. None means those of the model.
            in_place: Prune this model instead of a copy that shares no memory with it.

        Returns:
            The handle of the pruned model.
        """
        if not in_place:
            copied = self.copy_offloaded_to_memory() if is_offloaded(self.model) else copy.deepcopy(self)
            return copied.prune(heads, folded_biases, cache, in_place=True)
        self._check_attached()
        check_in_memory(self.model)
        pruned = heads_to_prune(self.spec, heads)
        if self.spec.weight_rules and (pruned or folded_biases):
            return self._prune_quantized(pruned, folded_biases, cache)
        spec = self.spec if cache is None else replace(self.spec, cache=())
        rules = (spec.with_cache(cache) if cache else spec).without(pruned).cache
        if pruned:
            with self._policies_suspended():  # the test of the pruned model sees all tokens
                for tower, layers in self._towers():
                    if tower_pruned := [
                        address for layer in layers for address in layer.hook_point.head_addresses if address in pruned
                    ]:
                        prune_and_verify(
                            tower,
                            layers,
                            tower_pruned,
                            self._attachment.replace_layers,
                            self._attachment.stop_routing_modules,
                        )
        if pruned or folded_biases:
            patch_save_pretrained(self.model)  # plain transformers may not build the new shapes and biases
        add_to_output_biases(self._layers, folded_biases or {})
        self._forget_derived()
        self._set_cache_rules(rules)
        return self

    # Caches.

    @property
    def cache_rules(self) -> tuple[CacheRule, ...]:
        """Cache policies of KV heads that every call of the model follows."""
        return self.model.__dict__.get(CACHE_ATTRIBUTE, ())

    @contextmanager
    def _policies_suspended(self) -> Iterator[None]:
        """Let all KV heads keep all tokens inside the context, and set their policies again after an error."""
        spec = self.spec
        if spec.cache:
            set_policies(self._layers, replace(spec, cache=()))
        try:
            yield
        except BaseException:
            set_policies(self._layers, spec)
            raise

    def _set_cache_rules(self, rules: tuple[CacheRule, ...]) -> None:
        """Set the cache policies of KV heads."""
        if not rules and not self.cache_rules:
            return
        spec = replace(infer_spec(self.model, self._layers), cache=rules)
        check_cache_support(self._layers, spec)
        self.model.__dict__[CACHE_ATTRIBUTE], self._spec = spec.cache, spec
        set_policies(self._layers, spec)
        patch_save_pretrained(self.model)

    def cache(self, kind: str | Plan | CachePolicies = "dynamic") -> Any:
        """Make an empty transformers cache in which each KV head keeps its own tokens (see `hw.per_head_cache`).

        Args:
            kind: "dynamic" uses the cache policies of the model. A `Plan` or a mapping gives other policies.
        """
        self._check_attached()
        if isinstance(kind, str) and kind != "dynamic":
            raise ArgumentError(
                f"kind={kind!r}: an attached model supports only kind='dynamic', because caches of a fixed size cannot hold "
                f"other tokens for each KV head. Use kind='dynamic', a plan or a mapping."
            )
        return cache_layer_factory(self, None if isinstance(kind, str) else kind)()

    def check_per_head_cache(self) -> None:
        """Test a per-head cache on a few tokens, once per handle. Raise if the model does not support it."""
        if self.spec.kind == "encoder":
            raise UnsupportedModelError(
                "cache: an encoder does not have a KV cache, because it attends to all tokens at once. Call the model."
            )
        if not self._per_head_cache_checked:
            self.dense_cache_layers = layers_that_need_all_keys(self)
            self._per_head_cache_checked = True

    def _prune_quantized(
        self,
        pruned: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None,
        cache: CachePolicies | None,
    ) -> Self:
        """Prune heads of a quantized model in place. Weights of the remaining heads keep their bits and values."""
        before = self.spec
        self.dequantize()
        try:
            self.prune(pruned, folded_biases, cache, in_place=True)
        except BaseException:
            self.quantize(before)
            raise
        rules = before.without(pruned).weight_rules
        self.quantize(replace(self.spec, weight_rules=rules, activation_bits=before.activation_bits))
        return self

    def _forget_derived(self) -> None:
        """Forget values derived from the weights and sizes of the model."""
        self._spec = self._residual_stream = self._why_not_resumable = self._image_input = None
        self._per_head_cache_checked = False

    def quantize(self, spec: ModelSpec) -> Callable[[], None]:
        """Quantize weights in place. `hw.quantize` calls this method.

        Args:
            spec: Spec of this model with weight rules.

        Returns:
            A function that restores the original weights bitwise.
        """
        self._check_attached()
        check_in_memory(self.model)
        if any(layer.hook_point.is_active for layer in self._layers):
            raise HeadwiseError("a context that records or edits heads is open. Close it before quantizing.")
        restore = quantize_in_place(self.model, self._layers, blocks_with_mlps(self.model, self._layers), spec)
        patch_save_pretrained(self.model)
        self._forget_derived()

        def undo() -> None:
            restore()
            self._forget_derived()

        return undo

    def weight_paths_by_part(self) -> dict[str, tuple[str, ...]]:
        """Return the paths of the modules with the weights of heads, MLPs and the vocabulary."""
        names = {id(module): name for name, module in self.model.named_modules()}
        attention = [module for layer in self._layers for module in (layer.module, layer.info.output_module)]
        vocabulary = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        mlps = non_attention_linear_layers(self._layers, blocks_with_mlps(self.model, self._layers))
        return {
            "heads": tuple(names[id(module)] for module in attention if module is not None),
            "MLPs": tuple(names[id(module)] for module in mlps),
            "vocabulary": tuple(names[id(module)] for module in vocabulary if module is not None),
        }

    def dequantize(self) -> None:
        """Replace quantized weights by floats of the same values in place. `hw.dequantize` calls this method."""
        self._check_attached()
        dequantize_in_place(self.model)
        self._forget_derived()

    def _towers(self) -> list[tuple[Any, list[AttachedLayer]]]:
        """Return the model with its layers, or each tower of a multi-tower model with its layers."""
        layers_by_tower: dict[str, list[AttachedLayer]] = {}
        for layer in self._layers:
            layers_by_tower.setdefault(layer.info.tower_path, []).append(layer)
        return [(self.model.get_submodule(path), layers) for path, layers in layers_by_tower.items()]

    def copy_offloaded_to_memory(self) -> Self:
        """Return this handle or, if weights are offloaded, the handle of a copy with all weights in CPU memory."""
        self._check_attached()
        return self._attach_similar(copy_to_memory(self.model)) if is_offloaded(self.model) else self

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans (`hw.Plan`) by which the model was pruned, in order. Heads pruned without a plan are not included."""
        return self.model.__dict__.get(PLANS_ATTRIBUTE, ())

    @plans.setter
    def plans(self, plans: tuple[Plan, ...]) -> None:
        self.model.__dict__[PLANS_ATTRIBUTE] = plans

    # Properties of the model.

    @property
    def spec(self) -> ModelSpec:
        """Spec inferred from the model, with the fields that analysis and pruning need."""
        if self._spec is None:
            spec = infer_spec(self.model, self._layers)
            self._spec = replace(spec, cache=self.cache_rules) if self.cache_rules else spec
        return self._spec

    @property
    def output(self) -> OutputLayerProtocol | None:
        """LM head: final hidden states to logits. None if the model has no LM head."""
        return AttachedLMHead(self.model) if has_lm_head(self.model) else None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def image_input(self) -> ImageInputReader | None:
        """Image input of the model. None if the model does not take images."""
        if self._image_input is None and getattr(self.model, "main_input_name", "") == "pixel_values":
            self._image_input = ImageInputReader(self.model, self._layers, self.preprocessor)
        return self._image_input

    @property
    def decoder_start_token(self) -> int:
        """Token id with which the decoder of an encoder-decoder starts."""
        return decoder_start_token(self.model)

    def input_norms(self) -> Norms | None:
        """Return, for each layer, the norms in front of q and of k and v. None if the norms of a layer are unknown."""
        input_norms = {
            str(layer.hook_point.address): find_input_norm(layer.info) for layer in self._layers if layer.spec.head_ids
        }
        if not all(is_known for is_known, _ in input_norms.values()):
            return None
        return {layer_address: (norm, norm) for layer_address, (_, norm) in input_norms.items()}

    def residual_stream(self) -> ResidualStream:
        """Return the parts that read and write the residual stream of a decoder, found by a test on a few tokens.

        Raises:
            HeadwiseError: The model is not a decoder with an LM head, or its residual stream is not a plain sum.
        """
        self._check_attached()
        if self._residual_stream is None:
            if self.spec.kind != "decoder" or self.spec.output != "lm":
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: logit attribution requires a decoder with an LM head. Got kind "
                    f"{self.spec.kind}, output {self.spec.output}."
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
        """Run a clean forward pass that can be resumed at the given layers, without running the earlier blocks again.

        Args:
            ids: Token ids (B, T).
            layer_addresses: Layers at which to resume.
            select_rows: Selects the rows of the batch to continue with.
            attention_mask: (B, T), True at real tokens.
            source: Token ids for the encoder of an encoder-decoder.
            source_attention_mask: True at real tokens of `source`.
        """
        self._check_attached()
        inputs = (validate_ids(self.model, ids, attention_mask), attention_mask, source, source_attention_mask)
        return make_resumable_forward(self, self.model, self._layers, layer_addresses, select_rows, *inputs)

    def why_not_resumable(self) -> str:
        """Return why forward passes cannot be resumed, tested once on a few tokens. Empty if they can."""
        if self._why_not_resumable is None:
            self._why_not_resumable = why_not_resumable(self, self.model, self._layers)
        return self._why_not_resumable

    def prefix_forward(self, prefix_ids: Tensor) -> PrefixForward | None:
        """Return forward passes that share a prefix. None if the model does not support them.

        Args:
            prefix_ids: Token ids of the prefix of each text, (B, P), without padding.
        """
        from headwise.attached.prefix_forward import make_prefix_forward  # imports transformers

        self._check_attached()
        return make_prefix_forward(self.model, self.spec, validate_ids(self.model, prefix_ids, None))

    def streaming_forward(self) -> AttachedSimulatedStreamingForward:
        """Return forward passes in which KV heads stream, to rank them."""
        self._check_attached()
        check_kv_heads(self._layers, self.spec)
        return AttachedSimulatedStreamingForward(self)

    def untrained(self, seed: int = 0) -> "AttachedModel":
        """Return a model of the same architecture with random weights.

        Args:
            seed: Random seed of the weights.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = type(self.model)(copy_config(self.model)).to(self.device).eval()
        attached_copy = self._attach_similar(model)
        pruned = set(attached_copy.heads.addresses) - set(self.heads.addresses)
        return attached_copy.prune(tuple(pruned), in_place=True) if pruned else attached_copy

    # Generation and saving.

    def generate(
        self,
        prompt: Any = None,
        max_new_tokens: int | None = None,
        *,
        gates: Gates | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Continue a prompt, without dropout.

        Args:
            prompt: Text, list of token ids, or tensor (B, T).
            max_new_tokens: Maximum number of new tokens. Default: 64.
            gates: Factors for the outputs of heads, by head pattern or layer address.
            seed: Random seed for sampling.
            **options: For a text: `temperature`, `top_k` and `top_p`, as in `stream`. Otherwise any option of transformers'
                `generate`. `cache` is another name of `past_key_values`.

        Returns:
            The prompt and its continuation, in the type of the prompt. An encoder-decoder returns only the new text for a
            text prompt.
        """
        self._check_attached()
        if isinstance(prompt, str):
            max_new_tokens = DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
            ids = prompt_to_ids(self.model, self.tokenizer, prompt)  # (1, T)
            generated = [int(step) for step in self.stream(ids, max_new_tokens, gates=gates, seed=seed, **options)]
            prompt_ids = [] if self.spec.kind == "encoder-decoder" else ids[0].tolist()
            return self.tokenizer.decode([*prompt_ids, *generated])
        if "cache" in options:
            options["past_key_values"] = options.pop("cache")
        check_can_generate(self.model)
        with self._apply_gates(gates), eval_mode(self.model):
            return generate(self.model, prompt, max_new_tokens, seed, options, self._run_generate())

    def stream(
        self,
        prompt: str | Tensor,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        gates: Gates | None = None,
        **options: Any,
    ) -> Generator[Tensor, None, None]:
        """Generate token by token.

        Args:
            prompt: Text, or token ids (B, T).
            max_new_tokens: Maximum number of new tokens.
            gates: Factors for the outputs of heads, by head pattern or layer address.
            **options: `temperature` (0 is greedy), `top_k`, `top_p`, `seed`.

        Returns:
            A generator of token ids, (B,) per step. Between two steps the model is in its original state.
        """
        self._check_attached()
        ids = prompt_to_ids(self.model, self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        check_can_generate(self.model)
        steps = stream_tokens(self.model, ids, max_new_tokens, run_generate=self._run_generate(), **options)
        return self._stream(steps, gates)

    def _run_generate(self) -> Any:
        """Return transformers' `generate`, with a per-head cache if the model has cache policies."""
        if not self.cache_rules:
            return self.model.generate
        return partial(generate_with_cache, self.model, cache_layer_factory(self, None), CacheHandle())

    def _stream(self, steps: Generator[Tensor, None, None], gates: Gates | None) -> Generator[Tensor, None, None]:
        with closing(steps):
            while True:
                with self._apply_gates(gates), eval_mode(self.model):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def save_pretrained(self, folder: str | Path, *, full_shape: bool = False, remote_code: bool = False) -> Path:
        """Write the model to a folder atomically. `hw.load(folder)` restores it, pruned, quantized or not.

        Plain transformers loads a pruned model if all layers have the same number of heads and the model family has a
        configuration for that; otherwise only with `full_shape` or `remote_code`. A notice on stderr says so once.

        Args:
            folder: Output folder.
            full_shape: Write a pruned model in its original shape, with zeros for pruned heads, for plain `from_pretrained`.
            remote_code: Add a modeling file, with which plain transformers loads a pruned model of any shape by
                `from_pretrained(folder, trust_remote_code=True)`, without Headwise.

        Returns:
            The folder.
        """
        processors = (self.tokenizer, self.preprocessor)
        path = save_attached(
            self.model, self._layers, processors, folder, full_shape=full_shape, remote_code=remote_code
        )
        is_changed = bool(self.spec.weight_rules) or is_pruned(self._layers)
        if is_changed and not (
            full_shape or remote_code or self._save_notice_shown or is_loadable_by_transformers(path)
        ):
            self._save_notice_shown = True
            change = "quantized per head" if self.spec.weight_rules else "pruned"
            advice = (
                "hw.dequantize(model) returns a model without packed weights."
                if self.spec.weight_rules
                else "save(folder, remote_code=True) adds code with which it can."
            )
            print(
                f"This {type(self.model).__name__} is {change}: hw.load(folder) can load the saved folder, but "
                f"plain transformers cannot. {advice}",
                file=sys.stderr,
            )
        return path

    save = save_pretrained

    @classmethod
    def reopen(cls, folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Self:
        """Load a folder of transformers, pruned or not, as an attached model with its tokenizer."""
        folder = Path(folder)
        model, layers = load_model_and_layers(folder, dtype, device)
        check_supported(model)
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        return cls.attach_layers(
            model, layers, Tokenizer.load(folder) if has_tokenizer else None, ImagePreprocessor.load(folder)
        )

    def check_native(self, operation: str) -> None:
        """Raise an error: `operation` is a sentence that names an operation of Headwise's own models."""
        raise UnsupportedModelError(
            f"model: {operation}. Got an attached {type(self.model).__name__}. {self._native_advice()}"
        )

    def _native_advice(self) -> str:
        from headwise.weights.to_native import is_convertible

        if is_convertible(self):
            return "Convert it first: hw.to_native(model)."
        return f"This operation is not available for this {type(self.model).__name__}."

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load weights by the model's own names, as `save` writes them. Returns the unknown names."""
        return self.model.load_state_dict(state, strict=False).unexpected_keys

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model for plain transformers, with zeros for pruned heads. The model family cannot be changed."""
        if family is not None and family != self.family:
            raise ArgumentError(
                f"family={family!r}: an attached model can only be exported as its own family, {self.family}. Remove family."
            )
        return save_attached(
            self.model, self._layers, (self.tokenizer, self.preprocessor), folder, full_shape=True, exported=True
        )

    # Detaching.

    def detach(self) -> Any:
        """Remove all hooks and return the transformers model.

        If pruning has left KV groups of different sizes, each head gets its own key and value, because plain transformers
        does not support such groups.
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
        if self.is_attached and not self._entered:  # the outermost `with` block detaches
            self.detach()

    def _attach_similar(self, model: Any) -> Self:
        """Attach to another model of the same architecture, without testing its layers again."""
        layers = make_attached_layers(model)
        layers_by_address = {layer.hook_point.address: layer for layer in self._layers}
        for layer in layers:
            if layer.hook_point.address in layers_by_address:
                layer.copy_probe_results(layers_by_address[layer.hook_point.address])
        return type(self).attach_layers(model, layers, self.tokenizer, self.preprocessor, already_probed=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttachedModel":
        """Return the handle of a copy of the model."""
        self._check_attached()
        return self._attach_similar(copy.deepcopy(self.model, memo))

    def _check_attached(self) -> None:
        if not self.is_attached:
            raise HeadwiseError("this handle is detached. Attach the model again: hw.attach(model).")

    @contextmanager
    def _apply_gates(self, gates: Gates | None) -> Iterator[None]:
        """Scale the outputs of heads while the context is open, by pattern or layer: (H,) or (B, H) each."""
        gates_by_layer = resolve_gates(self._layers, gates)
        with ExitStack() as stack:
            for hook_point in self.hook_points():
                if hook_point.address in gates_by_layer:
                    stack.enter_context(hook_point.scaled(gates_by_layer[hook_point.address]))
            yield
