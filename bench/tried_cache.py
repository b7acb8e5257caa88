"""Check of the per-head cache of one architecture against explicit masks per head, without a cache.

The reference is the model on its eager attention, not attached. Scores of the tokens that a head would have evicted are
set to minus infinity before softmax. Nothing of the code under test is used for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import headwise as hw
from bench.tried_with import VOCAB, CheckFailed, check_same

LENGTH, PADDING = 14, 3  # tokens of a text, and padding of the second one
CHUNKS = (6, 1, 4, 1, 1, 1)
PROMPT = (6, 1, 1, 1, 1, 1, 1, 1, 1)  # for models that transformers itself does not run exactly in chunks
NEW_TOKENS = 5
POLICIES = (hw.CachePolicy(), hw.CachePolicy(sink_tokens=2, window=4), hw.CachePolicy(window=3))


class CacheNotApplicable(Exception):  # noqa: N818 (a finding, not an error)
    """The model does not generate with a KV cache."""


def check_cache(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Compare logits and greedy tokens with a per-head cache and with explicit masks, with and without left padding."""
    source, ids, policies = _prepare(part, inputs)
    with hw.attach(part) as attached:
        hw.per_head_cache(attached, policies)  # raises if layers have other KV heads than the spec
        layers = [
            (layer.module, layer.hook_point.address, layer.spec.kv_of_head, layer.info.backend)
            for layer in attached.attention_layers()
            if layer.hook_point.address.stack in ("", "dec", "text") and layer.spec.head_ids
        ]
    per_head = {
        module: [policies[str(address.head_address(kv))] for kv in kv_of_head]
        for module, address, kv_of_head, _ in layers
    }
    chunks = CHUNKS if _is_exact_in_chunks(part, source, ids) else PROMPT
    for padding in (0, PADDING):
        attention_mask = torch.ones_like(ids)
        attention_mask[1, :padding] = 0
        _check_own_cache_runs(part, source, ids, attention_mask, chunks)
        with hw.attach(part) as attached, torch.no_grad():
            cache = hw.per_head_cache(attached, policies)
            actual = _chunked(part, source, ids, attention_mask, cache, chunks)
        with masked_by_hand(part, per_head, attention_mask):
            expected = _full(part, source, ids, attention_mask)
        real = attention_mask.bool()
        check_same(
            actual[real], expected[real], f"a per-head cache, {padding} tokens of padding, beside explicit masks"
        )
    if part.can_generate() and source is None:
        _check_generate(part, ids, policies, per_head)


Source = dict[str, Tensor]  # inputs of the encoder of an encoder-decoder


def _prepare(part: Any, inputs: dict[str, Tensor]) -> tuple[Source | None, Tensor, dict[str, hw.CachePolicy]]:
    """Return the inputs of the encoder, the token ids and the policy of each KV head."""
    if getattr(part, "main_input_name", "") != "input_ids" and not getattr(part.config, "is_encoder_decoder", False):
        raise CacheNotApplicable("it does not take token ids")
    with hw.attach(part) as attached:
        if attached.spec.kind == "encoder":
            raise CacheNotApplicable("an encoder has no cache")
        kv_heads = attached.spec.cached_kv_head_addresses
        is_encoder_decoder = attached.spec.kind == "encoder-decoder"
    if not kv_heads:
        raise CacheNotApplicable("no head of its decoder has a cache")
    generator = torch.Generator().manual_seed(5)
    try:
        vocabulary = len(part.get_input_embeddings().weight)
    except (AttributeError, NotImplementedError):  # several tables, or none
        vocabulary = None
    if vocabulary is None:
        with hw.attach(part) as attached:
            hw.per_head_cache(attached)  # must raise
        raise CheckFailed("a per-head cache accepts a model without a single table of embeddings")
    vocab = min(VOCAB, vocabulary)
    ids = torch.randint(5, vocab - 5, (2, LENGTH), generator=generator)
    source = {"input_ids": ids} if is_encoder_decoder else None
    if is_encoder_decoder and part.main_input_name != "input_ids":  # sounds or images
        source = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    policies = {str(head): POLICIES[i % len(POLICIES)] for i, head in enumerate(kv_heads)}
    with torch.no_grad():
        try:
            output = part(**_inputs(source, ids, torch.ones_like(ids)), use_cache=True)
        except Exception as error:
            raise CacheNotApplicable(f"it cannot be called with token ids alone ({type(error).__name__})") from None
    if output.get("past_key_values") is None:
        raise CacheNotApplicable("transformers runs it without a cache")
    return source, ids, policies


def _inputs(source: Source | None, ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    mask = None if bool(attention_mask.all()) else attention_mask
    if source is None:
        return {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    return {**source, "decoder_input_ids": ids} | ({} if mask is None else {"decoder_attention_mask": mask})


def _full(part: Any, source: Source | None, ids: Tensor, attention_mask: Tensor) -> Tensor:
    return part(**_inputs(source, ids, attention_mask), use_cache=False)[0]


@torch.no_grad()
def _is_exact_in_chunks(part: Any, source: Source | None, ids: Tensor) -> bool:
    """Return whether transformers' own cache gives the logits of one pass if the tokens come in chunks."""
    mask = torch.ones_like(ids)
    try:
        check_same(
            _chunked(part, source, ids, mask, _own_cache(part, source), CHUNKS),
            _full(part, source, ids, mask),
            "chunks",
        )
    except Exception:
        return False
    return True


def _own_cache(part: Any, source: Source | None) -> Any:
    """Return an empty cache of transformers."""
    from transformers import DynamicCache, EncoderDecoderCache

    config = part.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=config)
    return cache if source is None else EncoderDecoderCache(cache, DynamicCache())


@torch.no_grad()
def _check_own_cache_runs(
    part: Any, source: Source | None, ids: Tensor, attention_mask: Tensor, chunks: tuple[int, ...]
) -> None:
    """Raise if these calls fail with transformers' own cache, too, because the model does not continue texts (ColQwen2)."""
    try:
        _chunked(part, source, ids, attention_mask, _own_cache(part, source), chunks)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise CacheNotApplicable(
            f"transformers does not continue a text with its own cache ({problem[:100]})"
        ) from None


def _chunked(
    part: Any, source: Source | None, ids: Tensor, attention_mask: Tensor, cache: Any, chunks: tuple[int, ...]
) -> Tensor:
    """Return the logits of all tokens, given to a cache in chunks."""
    logits, start = [], 0
    for length in chunks:
        chunk = _inputs(source, ids[:, start : start + length], attention_mask[:, : start + length])
        logits.append(part(**chunk, past_key_values=cache, use_cache=True)[0])
        start += length
    return torch.cat(logits, 1)


def _check_generate(
    part: Any, ids: Tensor, policies: dict[str, hw.CachePolicy], per_head: dict[nn.Module, Any]
) -> None:
    """Greedy tokens with a cache are those that full passes with explicit masks choose."""
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    options["use_cache"] = True
    try:
        with torch.no_grad():
            part.generate(ids, attention_mask=torch.ones_like(ids), **options)
    except Exception:
        return  # transformers itself does not generate with these options (HiggsAudio)
    with hw.attach(part) as attached, hw.cached(attached, policies):
        actual = part.generate(ids, attention_mask=torch.ones_like(ids), **options)
    with masked_by_hand(part, per_head, torch.ones(2, LENGTH + NEW_TOKENS)):
        logits = _full(part, None, actual[:, :-1], torch.ones_like(actual[:, :-1]))[:, LENGTH - 1 :]
    chosen = logits.gather(-1, actual[:, LENGTH:, None])[..., 0]
    best = logits.amax(-1)
    suppressed = part.generation_config.eos_token_id
    if suppressed is not None:  # min_new_tokens never chooses the end
        best = logits.index_fill(-1, torch.tensor(suppressed).flatten(), -torch.inf).amax(-1)
    if bool((best - chosen > 1e-3 * logits.abs().max()).any()):
        raise CheckFailed("generate with a per-head cache chooses other tokens than explicit masks")


@contextmanager
def masked_by_hand(part: Any, per_head: dict[nn.Module, Any], attention_mask: Tensor) -> Iterator[None]:
    """Hide evicted tokens in eager attention: a policy per query head of each attention module."""
    configs = {id(module.config): module.config for module in part.modules() if hasattr(module, "config")}
    saved = {key: config._attn_implementation_internal for key, config in configs.items()
             if hasattr(config, "_attn_implementation_internal")}  # fmt: skip
    starts = attention_mask.argmax(1)  # first real token of each row
    mode = _HideEvicted(per_head, starts)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for key in saved:
            configs[key]._attn_implementation_internal = "eager"
        for module in per_head:
            stack.callback(module.register_forward_pre_hook(mode.enter_module).remove)
            stack.callback(module.register_forward_hook(mode.leave_module, always_call=True).remove)
        try:
            with mode:
                yield
        finally:
            for key, implementation in saved.items():
                configs[key]._attn_implementation_internal = implementation
    if mode.missed:
        raise CacheNotApplicable("its softmax was not seen by the reference")


class _HideEvicted(TorchFunctionMode):
    """Sets scores of evicted tokens to minus infinity in softmax and logsumexp of some modules."""

    def __init__(self, per_head: dict[nn.Module, Any], starts: Tensor) -> None:
        super().__init__()
        self.per_head, self.starts, self.missed = per_head, starts, False
        self._current: list[tuple[nn.Module, list[bool]]] = []

    def enter_module(self, module: nn.Module, *_: Any) -> None:
        """Remember the module that runs."""
        self._current.append((module, [False]))

    def leave_module(self, module: nn.Module, *_: Any) -> None:
        """Forget the module that ran."""
        self.missed |= not self._current.pop()[1][0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_softmax = func in (torch.softmax, nn.functional.softmax, Tensor.softmax)
        is_sum = func in (torch.logsumexp, Tensor.logsumexp)  # some modules apply their learned sinks after softmax
        if self._current and (is_softmax or is_sum) and args and args[0].ndim >= 3:
            module, is_masked = self._current[-1]
            scores = args[0]
            T, heads = scores.shape[-2], len(self.per_head[module])
            if scores.shape[-1] in (T, T + 1) and scores.numel() == len(self.starts) * heads * T * scores.shape[-1]:
                is_masked[0] |= is_softmax
                hidden = self._hidden(self.per_head[module], T)  # (B, H, T, T)
                by_head = scores.reshape(len(self.starts), heads, T, scores.shape[-1]).clone()
                by_head[..., :T].masked_fill_(hidden, torch.finfo(scores.dtype).min)
                args = (by_head.reshape(scores.shape), *args[1:])
                if is_softmax and scores.dtype == torch.float64:
                    kwargs = kwargs | {"dtype": torch.float64}  # eager attention would round to float32
        return func(*args, **kwargs)

    def _hidden(self, policies: Any, T: int) -> Tensor:
        distance = torch.arange(T)[:, None] - torch.arange(T)
        position = torch.arange(T) - self.starts[:, None]  # (B, T) within the text
        masks = [
            torch.zeros(len(position), T, T, dtype=torch.bool)
            if policy.window is None
            else (distance >= policy.window) & (position >= policy.sink_tokens)[:, None]
            for policy in policies
        ]
        return torch.stack(masks, 1)
