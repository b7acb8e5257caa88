"""How the stream of somebody else's decoder is put together: seen on a few tokens, and checked there number by number.

Nothing here knows an architecture. One pass shows what every module is given and what it gives; who adds to the stream, and
through which norms, follows from whose numbers are whose. What does not add up is refused, so that no share is ever wrong.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.attached.transformers_forward import AttachedLMHead
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.model.residual_stream import LinearizedNorm, ResidualLayer, ResidualStream

BATCH_SIZE, SEQUENCE_LENGTH = 2, 6  # what is looked at to find out
# Linear logits are as many times larger where states are; a power of two, so that nothing is rounded.
PROBE_SCALE = 128.0


@torch.no_grad()
def find_residual_stream(model: Any, layers: Sequence[AttachedLayer]) -> ResidualStream:
    """The residual stream of a decoder with a language-model output, not in training mode; refused, with the reason, where it
    is not a sum that ends in one norm and a linear output."""
    recorded = _RecordedForward(model, layers)
    blocks = [block_of(model, layer) for layer in layers]
    residual_layers = {}
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        if block not in recorded.inputs or block not in recorded.outputs:
            raise _unsupported_error(
                model, f"{layer.info.name} is in no block that is called once and passes the stream on"
            )
        if i and not torch.equal(recorded.outputs[blocks[i - 1]], recorded.inputs[block]):
            raise _unsupported_error(
                model, f"something other than attention layers stands before layer {layer.hook_point.address}"
            )
        residual_layers[layer.hook_point.address.layer] = _residual_layer(model, recorded, layer, block)
    norm = _final_norm(model, recorded, blocks[-1])
    vocabulary = model.get_output_embeddings()
    scale = _logit_scale(model, recorded, vocabulary)
    return ResidualStream(
        blocks[0], residual_layers, norm, vocabulary, _token_embedding(model, recorded, blocks[0]), scale
    )


class _RecordedForward:
    """What modules were given and gave in one pass, as (B, T, D); those that are run more than once are left out."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer]) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.calls: dict[Any, AttentionCall] = {}
        table = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(len(table), (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator).to(table.device)
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(layer.hook_point.listen(self._on_call))
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self._record_input, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._record_output).remove)
            output = model(input_ids=self.ids, use_cache=False)
        self.logits = output.logits.double().cpu()  # (B, T, V)
        self.tolerance = torch.finfo(output.logits.dtype).eps ** 0.5

    def is_close(self, actual: Tensor, expected: Tensor) -> bool:
        """Whether two tensors in float64 are the same but for rounding on the way, beside their largest number."""
        if actual.shape != expected.shape:
            return False
        return bool((actual - expected).abs().max() <= self.tolerance * expected.abs().max())

    def modules_reading(self, block: nn.Module, inputs: Tensor) -> list[nn.Module]:
        """The modules of a block that were given these numbers and have given others of that shape."""
        return [
            module for module in block.modules() if module in self.outputs and _same(self.inputs.get(module), inputs)
        ]

    def _on_call(self, call: AttentionCall) -> None:
        self.calls[call.hook_point] = call

    def _record_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(self.inputs, module, args[0] if args else kwargs.get("hidden_states"))

    def _record_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._record(self.outputs, module, output[0] if isinstance(output, tuple) else output)

    def _record(self, store: dict[nn.Module, Tensor], module: nn.Module, states: Any) -> None:
        if isinstance(states, Tensor) and states.is_floating_point() and states.numel() % self.ids.numel() == 0:
            called_again = module in store
            store[module] = states.detach().reshape(*self.ids.shape, -1).clone().cpu()  # (B, T, D)
            if called_again:
                store[module].fill_(float("nan"))  # equal to nothing


def block_of(model: nn.Module, layer: AttachedLayer) -> nn.Module:
    """The part of a model that is one layer: as far as the number in its name."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.)", layer.info.name)
    return layer.info.parent if match is None else model.get_submodule(match[0])


def _residual_layer(model: Any, recorded: _RecordedForward, layer: AttachedLayer, block: nn.Module) -> ResidualLayer:
    """What a layer reads through, and adds."""
    info, layer_label = layer.info, f"layer {layer.hook_point.address}"
    if info.output_module is None:
        raise _unsupported_error(model, f"which part of {info.name} writes is not known")
    attention_output = recorded.outputs.get(info.output_module if layer.spec.head_ids else info.module)
    if attention_output is None or not recorded.is_close(_sum_of_heads(recorded, layer), attention_output.double()):
        raise _unsupported_error(
            model, f"what attention in {layer_label} gives is not the sum of what its heads write and a bias"
        )
    post_norm = next(
        (
            norm
            for module in recorded.modules_reading(block, attention_output)
            if (norm := LinearizedNorm.infer(module, layer.spec.width)) is not None
        ),
        None,
    )
    added = attention_output if post_norm is None else recorded.outputs[post_norm.module]
    attention_modules = {block, *info.module.modules(), None if post_norm is None else post_norm.module}
    for module in block.modules():
        other = None if module in attention_modules else recorded.outputs.get(module)
        if other is not None and _is_sum_of(recorded.outputs[block], recorded.inputs[block], added, other):
            norm, unsupported_reason = _find_input_norm(recorded, layer, block)
            return ResidualLayer(norm, post_norm, module, unsupported_reason)
    raise _unsupported_error(
        model,
        f"{layer_label} does not add to the stream just what its attention and one other part wrote: a norm or a factor "
        f"stands in between",
    )


def _sum_of_heads(recorded: _RecordedForward, layer: AttachedLayer) -> Tensor:
    """Σ z W_O + b_O: (B, T, D)."""
    bias = 0.0 if layer.b_O is None else layer.b_O.double().cpu()
    if not layer.spec.head_ids:
        return torch.zeros(*recorded.ids.shape, layer.spec.width, dtype=torch.double) + bias
    if layer.hook_point not in recorded.calls:
        return torch.full((1,), float("nan"))
    z, W_O = recorded.calls[layer.hook_point].z.double().cpu(), layer.hook_point.W_O.double().cpu()
    return torch.einsum("bhte,hed->btd", z, W_O) + bias


def _find_input_norm(
    recorded: _RecordedForward, layer: AttachedLayer, block: nn.Module
) -> tuple[nn.Module | None, str]:
    """The norm that heads read the stream through; and why what they bring does not follow from the stream, if so."""
    if not layer.spec.head_ids:
        return None, ""
    residual, layer_input = recorded.inputs[block], recorded.inputs.get(layer.module)
    if layer_input is None:
        return None, f"what {layer.info.name} reads cannot be seen."
    input_norms = [
        module
        for module in recorded.modules_reading(block, residual)
        if _same(recorded.outputs[module], layer_input) and module is not block
    ]
    if not input_norms and not _same(residual, layer_input):
        return None, f"between the stream and {layer.info.name} stands more than a norm."
    if layer.info.qkv_modules is not None:
        W_V, b_V = layer.qkv.weight_by_head("v").double().cpu(), layer.qkv.bias_by_head("v")  # (K, e, D)
        v = torch.einsum("btd,ked->bkte", layer_input.double(), W_V)  # (B, K, T, e)
        v = v if b_V is None else v + b_V.double().cpu()[:, None]
        if not recorded.is_close(v, recorded.calls[layer.hook_point].v.double().cpu()):
            return None, f"the values of {layer.info.name} are not what W_V makes of what is read."
    return (input_norms[0] if input_norms else None), ""


def _final_norm(model: Any, recorded: _RecordedForward, last_block: nn.Module) -> LinearizedNorm:
    """What stands between the last layer and the output."""
    block_output, head_input = recorded.outputs[last_block], recorded.inputs.get(model.get_output_embeddings())
    for module in recorded.modules_reading(model, block_output):
        if (
            _same(recorded.outputs[module], head_input)
            and (norm := LinearizedNorm.infer(module, block_output.shape[-1])) is not None
        ):
            return norm
    raise _unsupported_error(
        model, "between its last layer and its output stands something other than one LayerNorm or RMSNorm"
    )


def _logit_scale(model: Any, recorded: _RecordedForward, vocabulary: Any) -> float:
    """What logits are multiplied by behind the output layer; refused if that is not all that happens to them."""
    states, weight = recorded.inputs[vocabulary], vocabulary.weight  # (B, T, D), (V, D)
    bias = 0.0 if getattr(vocabulary, "bias", None) is None else vocabulary.bias.double().cpu()
    token_scores = (states.to(weight) @ weight.mT).double().cpu()  # (B, T, V)
    raw, expected_scaled = token_scores + bias, token_scores * PROBE_SCALE + bias
    scale = (
        1.0 if recorded.is_close(raw, recorded.logits) else float((raw * recorded.logits).sum() / raw.square().sum())
    )
    scaled_logits = AttachedLMHead(model)((states * PROBE_SCALE).to(weight.device)).double().cpu()  # (B, T, V)
    if not recorded.is_close(raw * scale, recorded.logits) or not recorded.is_close(
        expected_scaled * scale, scaled_logits
    ):
        raise _unsupported_error(model, "its logits are not linear in what its output layer reads; they may be capped")
    return scale


def _token_embedding(model: Any, recorded: _RecordedForward, first_block: nn.Module) -> nn.Module | None:
    """The table of tokens, if the stream begins with its rows and something that does not depend on which they are."""
    table, stream_start = model.get_input_embeddings(), recorded.inputs[first_block].double()  # (B, T, D)
    rows = table(recorded.ids).double().cpu()  # (B, T, D)
    return (
        table
        if rows.shape == stream_start.shape and recorded.is_close(rows[0] - rows[1], stream_start[0] - stream_start[1])
        else None
    )


def _is_sum_of(total: Tensor, *parts: Tensor) -> bool:
    """Whether a sum is one, each number up to the rounding of its own parts: (B, T, D) each."""
    if any(part.shape != total.shape for part in parts):
        return False
    size = sum(part.double().abs() for part in parts)
    difference = (total.double() - sum(part.double() for part in parts)).abs()
    return bool((difference <= 8 * torch.finfo(total.dtype).eps * size).all())


def _same(actual: Tensor | None, expected: Tensor | None) -> bool:
    return (
        actual is not None and expected is not None and actual.shape == expected.shape and torch.equal(actual, expected)
    )


def _unsupported_error(model: Any, reason: str) -> HeadwiseError:
    return HeadwiseError(
        f"what parts of {type(model).__name__} add to its logits cannot be told apart: {reason}; silence heads instead: "
        f"attached.heads[…].silenced()."
    )
