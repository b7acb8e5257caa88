"""Cache policies per KV head of attached models: `per_head_cache`, and `cached` for calls of `generate`."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headwise.attached.cache_step import TextOffsets
from headwise.attached.dummy_inputs import dummy_input_candidates
from headwise.attached.layer import AttachedLayer
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.model import check_model, eval_mode
from headwise.model.weights_digest import check_plan
from headwise.spec import CachePolicy, ModelSpec, Plan
from headwise.spec.cache_policy import KEEP_ALL, CachePolicies
from headwise.spec.model import CACHED_STACKS

if TYPE_CHECKING:
    from headwise.attached.attached_model import AttachedModel
    from headwise.attached.transformers_cache import PerHeadCacheLayer

# Chunks in which a cache receives the tokens of the test.
PROBE_CHUNKS = (5, 1, 3, 1, 1)
PROBE_PROMPT = (6, 1, 1, 1, 1, 1)
PROBE_POLICIES = (KEEP_ALL, CachePolicy(sink_tokens=1, window=3), CachePolicy(window=2))
TOLERANCE = 1e-4  # of the test, relative to the largest logit, in float32; scaled to the precision of other dtypes


@dataclass(eq=False)
class CacheHandle:
    """Result of `with hw.cached(…)`.

    Attributes:
        cache: The cache of the last call inside the context. None before the first call.
    """

    cache: Any = None


def per_head_cache(attached: "AttachedModel", plan: Plan | CachePolicies | None = None) -> Any:
    """Make a cache for a transformers model in which each KV head keeps its own tokens, at its own bits.

    The memory of evicted tokens is released. The result is a transformers `Cache` for one sequence of calls of
    `model.generate(…, past_key_values=cache)` or `model(…, past_key_values=cache)`. Padding must be on the left.

    Args:
        attached: Handle of a transformers decoder or encoder-decoder, from `hw.attach`.
        plan: A plan with cache policies, or a mapping from KV heads to policies, such as
            `{"0.2": hw.CachePolicy(sink_tokens=4, window=128), "1.*": 8}`. A number means bits. KV heads that are not named
            keep all tokens. None: the policies of the model, if it was changed by `hw.apply(plan, attached)`.

    Returns:
        The cache. `cache.nbytes` is the memory that it holds.

    Raises:
        HeadwiseError: The model does not support such a cache. The message gives the reason.

    >>> import torch, transformers, headwise as hw
    >>> sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    >>> sizes |= dict(intermediate_size=48, vocab_size=97, eos_token_id=None, pad_token_id=0)
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    >>> attached = hw.attach(model)
    >>> cache = hw.per_head_cache(attached, {"*.1": hw.CachePolicy(sink_tokens=4, window=12)})
    >>> ids = model.generate(torch.arange(2, 66)[None], max_new_tokens=1, past_key_values=cache)
    >>> cache.nbytes, 2 * 2 * (64 + 16) * 8 * 4  # layers, keys and values, tokens of the two KV heads, channels, bytes
    (10240, 10240)
    """
    handle = attached_model(attached)
    _check_plan_type(plan)
    return handle.cache("dynamic" if plan is None else plan)


@contextmanager
def cached(attached: "AttachedModel", plan: Plan | CachePolicies | None = None) -> Iterator[CacheHandle]:
    """Give every call of `generate` inside the context a new per-head cache.

    Args:
        attached: Handle of a transformers model, from `hw.attach`.
        plan: A plan or a mapping from KV heads to cache policies, as in `per_head_cache`.

    Returns:
        A context. Its value has the attribute `cache`, the cache of the last call.

    >>> import torch, transformers, headwise as hw
    >>> sizes = dict(n_embd=16, n_layer=2, n_head=4, vocab_size=31, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    >>> attached = hw.attach(model)
    >>> with hw.cached(attached, {"*": hw.CachePolicy(sink_tokens=1, window=7)}) as scope:
    ...     ids = model.generate(torch.arange(1, 25)[None], max_new_tokens=4)
    >>> ids.shape, scope.cache.nbytes == 2 * 4 * 2 * (1 + 7) * 4 * 4
    (torch.Size([1, 28]), True)
    """
    handle, scope = attached_model(attached), CacheHandle()
    make_layers = cache_layer_factory(handle, plan)
    with _generating_with(handle.model, make_layers, scope):
        yield scope


def attached_model(model: Any) -> "AttachedModel":
    """Return a handle; raise for a model that is not attached."""
    check_model(model)
    if not hasattr(model, "is_attached"):
        raise ArgumentError(
            f"attached: must be the handle of a transformers model, from hw.attach. Got {type(model).__name__}. "
            f"Headwise's own models make caches themselves: model.cache(plan)."
        )
    return model


def cache_layer_factory(attached: "AttachedModel", plan: Plan | CachePolicies | None) -> Callable[[], Any]:
    """Check a plan once, and return a function that makes empty caches."""
    spec = spec_with_cache(attached, plan)
    attached.check_per_head_cache()
    return partial(make_cache, attached, spec)


def spec_with_cache(attached: "AttachedModel", plan: Plan | CachePolicies | None) -> ModelSpec:
    """Return the spec of a model with the cache policies of a plan or a mapping."""
    if plan is None:
        return attached.spec
    if isinstance(plan, Plan):
        if plan.cache == attached.spec.cache and plan in attached.plans:
            return attached.spec
        check_plan(plan, attached)
        return plan.cache_spec()
    _check_plan_type(plan)
    return attached.spec.with_cache(plan)


def _check_plan_type(plan: object) -> None:
    """Raise an error if an argument is neither a plan nor a mapping nor None."""
    if plan is not None and not isinstance(plan, Plan | Mapping):
        raise ArgumentError(
            f"plan: must be a Plan, or map KV heads to cache policies. Got {plan!r}. Use, for example, "
            f"{{'5.1': hw.CachePolicy(sink_tokens=4, window=128)}}, or read a saved plan: hw.Plan.load(path)."
        )


def make_cache(attached: "AttachedModel", spec: ModelSpec) -> Any:
    """Make an empty cache with the cache policies of a spec."""
    from headwise.attached.transformers_cache import make_transformers_cache

    factories = {}
    for layer in attached.attention_layers():
        if layer.hook_point.address.stack in CACHED_STACKS:
            factories[_cache_index(layer)] = partial(_make_layer, attached, spec, layer)
    return make_transformers_cache(attached.model, factories)


def _cache_index(layer: AttachedLayer) -> int:
    """Return the index of a layer in the caches of its model."""
    for name in ("layer_idx", "layer_id"):
        index = getattr(layer.module, name, None)
        if isinstance(index, int):
            return index
    raise UnsupportedModelError(
        f"{layer.info.name}: its index in a cache of transformers is not known, so a per-head cache is not supported."
    )


def _make_layer(
    attached: "AttachedModel", spec: ModelSpec, layer: AttachedLayer, text_offsets: TextOffsets
) -> "PerHeadCacheLayer":
    from headwise.attached.transformers_cache import PerHeadCacheLayer

    address = layer.hook_point.address
    layer_spec = replace(layer.spec, window=layer.hook_point.window, cache=())
    policies = policies_of_layer(spec, layer)
    return PerHeadCacheLayer(
        address,
        layer_spec,
        policies,
        text_offsets,
        weakref.ref(attached),
        is_dense=address in attached.dense_cache_layers,
    )


def policies_of_layer(spec: ModelSpec, layer: AttachedLayer) -> tuple[CachePolicy, ...]:
    """Return the policy of each KV head of a layer."""
    policies = {head: rule.policy for rule in spec.cache for head in rule.heads}
    address = layer.hook_point.address
    return tuple(policies.get(str(address.head_address(number)), KEEP_ALL) for number in layer.spec.kv_head_ids)


@contextmanager
def _generating_with(model: Any, make: Callable[[], Any], scope: CacheHandle) -> Iterator[None]:
    """Let `model.generate` make its cache with a function inside the context."""
    previous = model.__dict__.get("generate")
    model.__dict__["generate"] = partial(generate_with_cache, model, make, scope)
    try:
        yield
    finally:
        model.__dict__.pop("generate")
        if previous is not None:
            model.__dict__["generate"] = previous


def generate_with_cache(model: Any, make: Callable[[], Any], scope: CacheHandle, *args: Any, **kwargs: Any) -> Any:
    """Call transformers' `generate` with a new per-head cache."""
    from headwise.attached.transformers_cache import PerHeadEncoderDecoderCache, PerHeadTransformersCache

    cache = kwargs.get("past_key_values")
    implementation = kwargs.get("cache_implementation") or getattr(
        kwargs.get("generation_config"), "cache_implementation", None
    )
    if implementation is not None:
        raise ArgumentError(
            f"cache_implementation={implementation!r}: not supported with cache policies per KV head, which need a cache of "
            f"their own. Omit it."
        )
    if cache is not None and not isinstance(cache, PerHeadTransformersCache | PerHeadEncoderDecoderCache):
        raise ArgumentError(
            f"past_key_values: with cache policies per KV head, generate needs a per-head cache. Got {type(cache).__name__}. "
            f"Omit it, or pass hw.per_head_cache(attached, plan)."
        )
    if cache is None and kwargs.get("use_cache") is not False:
        cache = kwargs["past_key_values"] = make()
        kwargs["use_cache"] = True  # the default of some configurations is False
    scope.cache = cache
    return type(model).generate(model, *args, **kwargs)


def layers_that_need_all_keys(attached: "AttachedModel") -> set[Any]:
    """Test a per-head cache on a few tokens. Return the layers whose cache must pass on all keys; raise if it fails.

    Logits with caches that receive the tokens in chunks must equal those of one pass in which evicted tokens are masked.
    """
    layers = [layer for layer in attached.attention_layers() if layer.hook_point.address.stack in CACHED_STACKS]
    check_kv_heads(layers, attached.spec)
    traced = {layer.hook_point.address for layer in layers if layer.info.backend == "traced"}
    everywhere = {layer.hook_point.address for layer in layers}
    problem = ""
    # Some models attend to other keys than those that the cache returns, or derive sizes from them. Recurrent layers of
    # hybrid models are exact only for prompts and single tokens.
    for dense, chunks in ((traced, PROBE_CHUNKS), (everywhere, PROBE_CHUNKS), (traced, PROBE_PROMPT)):
        attached.dense_cache_layers = dense
        latest = _probe_problem(attached, layers, chunks)
        if not latest:
            return dense
        problem = problem or latest
    raise UnsupportedModelError(
        f"{type(attached.model).__name__}: a per-head cache does not support this model. On a few tokens, {problem}"
    )


@torch.no_grad()
def _probe_problem(attached: "AttachedModel", layers: list[AttachedLayer], chunks: tuple[int, ...]) -> str:
    """Return how the logits with a per-head cache differ from those of one masked pass. Empty if they do not."""
    from headwise.attached.transformers_cache import make_dynamic_cache

    kv_heads = attached.spec.cached_kv_head_addresses
    policies = {str(head): PROBE_POLICIES[i % len(PROBE_POLICIES)] for i, head in enumerate(kv_heads)}
    spec = replace(attached.spec, cache=()).with_cache(policies)
    _token_embeddings(attached.model)
    try:
        with eval_mode(attached):
            with simulate_policies_by_masks(layers, spec):
                difference, limit = _cache_difference(attached, make_cache(attached, spec), chunks)
            if difference <= limit:
                return ""
            own_difference, limit = _cache_difference(attached, make_dynamic_cache(attached.model), chunks)
    except HeadwiseError as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return f"a call fails ({' '.join(str(error).split())[:200]})."
    own = (
        f" With its own cache, they differ by {own_difference:.2g} from one pass, too."
        if own_difference > limit
        else ""
    )
    return f"logits differ by {difference:.2g}.{own}"


def _cache_difference(attached: "AttachedModel", cache: Any, chunks: tuple[int, ...]) -> tuple[float, float]:
    """Compare the logits with a cache with those of one pass.

    Returns the largest difference, and the largest one that rounding explains.
    """
    model, table, start, logits = attached.model, _token_embeddings(attached.model), 0, []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(table), (2, sum(chunks)), generator=generator, device="cpu").to(table.device)
    name = "decoder_input_ids" if attached.spec.kind == "encoder-decoder" else "input_ids"
    inputs = _encoder_inputs(model, ids) if name == "decoder_input_ids" else {}
    expected = model(**inputs, **{name: ids}, use_cache=False)[0]
    for length in chunks:
        chunk = {name: ids[:, start : start + length], "past_key_values": cache, "use_cache": True}
        logits.append(model(**inputs, **chunk)[0])
        start += length
    limit = expected.abs().max() * max(TOLERANCE, 16 * torch.finfo(expected.dtype).eps)
    return float((torch.cat(logits, 1) - expected).abs().max()), float(limit)


def _encoder_inputs(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return inputs of the encoder for as many texts as `ids` has rows: these ids, dummy sounds or dummy images."""
    if model.main_input_name == "input_ids":
        return {"input_ids": ids}
    for inputs in dummy_input_candidates(model):
        inputs.pop("decoder_input_ids", None)
        try:
            model(**inputs, decoder_input_ids=ids[:, :1], use_cache=False)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
            continue  # for example, a number of frames that the encoder does not accept
        return inputs
    raise UnsupportedModelError(f"inputs that its encoder accepts are not known ({model.main_input_name}).")


def _token_embeddings(model: Any) -> torch.Tensor:
    """Return the table of token embeddings; raise if there is none, or several."""
    try:
        return model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        raise UnsupportedModelError(
            f"{type(model).__name__}: a per-head cache does not support this model, because it cannot be tested with token "
            f"ids: the model has no single table of token embeddings."
        ) from None


@contextmanager
def simulate_policies_by_masks(layers: list[AttachedLayer], spec: ModelSpec) -> Iterator[None]:
    """Let layers mask the tokens that these cache policies evict, in calls without a cache."""
    saved = [layer.spec for layer in layers]
    set_policies(layers, spec)
    try:
        yield
    finally:
        for layer, layer_spec in zip(layers, saved, strict=True):
            layer.spec = layer_spec


def set_policies(layers: list[AttachedLayer], spec: ModelSpec) -> None:
    """Set the cache policies of layers to those of a spec."""
    for layer in layers:
        policies = dict(zip(layer.spec.kv_head_ids, policies_of_layer(spec, layer), strict=True))
        cache = tuple(policies.get(number, KEEP_ALL) for number in range(layer.spec.kv_heads))
        layer.spec = replace(layer.spec, cache=() if all(policy == KEEP_ALL for policy in cache) else cache)


def check_kv_heads(layers: list[AttachedLayer], spec: ModelSpec) -> None:
    """Raise if a layer has other KV heads than the spec, so that policies would not reach all of its KV heads."""
    addresses = set(map(str, spec.cached_kv_head_addresses))
    for layer in layers:
        address = layer.hook_point.address
        own = {str(address.head_address(number)) for number in layer.spec.kv_head_ids}
        named = {head for head in addresses if head.rpartition(".")[0] == str(address)}
        if address.stack in CACHED_STACKS and own != named:
            raise UnsupportedModelError(
                f"{layer.info.name}: cache policies per KV head are not supported, because layers of this model differ in "
                f"their number of query heads per KV head. Got {len(own)} KV heads in this layer, but {len(named)} addresses."
            )


def check_cache_support(layers: list[AttachedLayer], spec: ModelSpec) -> None:
    """Raise if policies do not reach all KV heads, or quantize the cache of a layer that computes its scores itself."""
    if spec.cache:
        check_kv_heads(layers, spec)
    for layer in layers:
        if layer.info.backend == "traced" and any(policy.bits != 32 for policy in policies_of_layer(spec, layer)):
            raise UnsupportedModelError(
                f"{layer.info.name}: bits per KV head are not supported in a model with {type(layer.module).__name__}, whose "
                f"keys cannot be quantized without a cache. Pass a cache: hw.per_head_cache(attached, plan)."
            )
