"""Find the residual stream of a transformers decoder by a test on a few tokens.

Nothing here depends on an architecture. One forward pass records the inputs and outputs of every module; comparing values
shows which modules add to the residual stream, and through which norms. If the parts do not add up to the recorded values,
an error is raised, so that attributions are never wrong.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.attached.transformers_forward import AttachedLMHead
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model.residual_stream import LinearizedNorm, ResidualLayerModules, ResidualStream

BATCH_SIZE, SEQUENCE_LENGTH = 2, 6  # size of the test input
# Linear logits scale with the hidden states. The factor is a power of two, so that scaling does not round.
PROBE_SCALE = 128.0


@torch.no_grad()
def find_residual_stream(model: Any, layers: Sequence[AttachedLayer]) -> ResidualStream:
    """Find the residual stream of a decoder with an LM head, in eval mode.

    Raises:
        HeadwiseError: The residual stream is not a plain sum followed by one norm and a linear output.
    """
    recorded = _ModuleInputOutputRecord(model, layers)
    blocks = [block_of(model, layer) for layer in layers]
    residual_layers = {}
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        if block not in recorded.inputs or block not in recorded.outputs:
            raise _unsupported_error(
                model, f"the block that contains {layer.info.name} does not take and return the residual stream"
            )
        if i and not torch.equal(recorded.outputs[blocks[i - 1]], recorded.inputs[block]):
            raise _unsupported_error(
                model,
                f"the input of layer {layer.hook_point.address} is not the output of the layer before it (another module may "
                f"be in between, or a layer may be called more than once)",
            )
        residual_layers[layer.hook_point.address.layer] = _residual_layer(model, recorded, layer, block)
    norm = _final_norm(model, recorded, blocks[-1])
    vocabulary = model.get_output_embeddings()
    scale = _infer_constant_logit_scale(model, recorded, vocabulary)
    return ResidualStream(
        blocks[0], residual_layers, norm, vocabulary, _find_token_embedding_module(model, recorded, blocks[0]), scale
    )


class _ModuleInputOutputRecord:
    """Inputs and outputs of all modules in one forward pass, (B, T, D). Modules that run more than once are left out."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer]) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.calls: dict[Any, AttentionCall] = {}
        table = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(len(table), (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator, device="cpu").to(
            table.device
        )
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(layer.hook_point.listen(self._on_call))
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self._record_input, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._record_output).remove)
            output = model(input_ids=self.ids, use_cache=False)
        self.logits = to_float64(output.logits).cpu()  # (B, T, V)
        self.tolerance = torch.finfo(output.logits.dtype).eps ** 0.5

    def is_close(self, actual: Tensor, expected: Tensor) -> bool:
        """Return whether two float64 tensors are equal up to rounding, relative to the largest value."""
        if actual.shape != expected.shape:
            return False
        return bool((actual - expected).abs().max() <= self.tolerance * expected.abs().max())

    def modules_reading(self, block: nn.Module, inputs: Tensor) -> list[nn.Module]:
        """Return the modules of a block that received these values and returned a tensor of the same shape."""
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
                store[module].fill_(float("nan"))  # never equal to any tensor


def block_of(model: nn.Module, layer: AttachedLayer) -> nn.Module:
    """Return the block of a layer: the submodule up to the number in the layer's path."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.)", layer.info.name)
    return layer.info.parent if match is None else model.get_submodule(match[0])


def _residual_layer(
    model: Any, recorded: _ModuleInputOutputRecord, layer: AttachedLayer, block: nn.Module
) -> ResidualLayerModules:
    """Return the norms and the other branch of a layer."""
    info, layer_label = layer.info, f"layer {layer.hook_point.address}"
    if info.output_module is None:
        raise _unsupported_error(
            model,
            f"the output projection W_O of {info.name} was not found, so the output of attention cannot be split into heads",
        )
    attention_output = recorded.outputs.get(info.output_module if layer.spec.head_ids else info.module)
    if attention_output is None or not recorded.is_close(_sum_of_heads(recorded, layer), to_float64(attention_output)):
        raise _unsupported_error(
            model,
            f"the output of attention in {layer_label} is not the sum of its heads and a bias, so it cannot be split into "
            f"heads",
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
            return ResidualLayerModules(norm, post_norm, module, block, unsupported_reason)
    raise _unsupported_error(
        model,
        f"{layer_label} does not add exactly two terms to the residual stream, the output of its attention and the output of "
        f"one other module (a norm or a factor may change a term before it is added)",
    )


def _sum_of_heads(recorded: _ModuleInputOutputRecord, layer: AttachedLayer) -> Tensor:
    """Compute Σ z W_O + b_O: (B, T, D)."""
    bias = 0.0 if layer.b_O is None else to_float64(layer.b_O).cpu()
    if not layer.spec.head_ids:
        return torch.zeros(*recorded.ids.shape, layer.spec.width, dtype=torch.double, device="cpu") + bias
    if layer.hook_point not in recorded.calls:
        return torch.full((1,), float("nan"), device="cpu")
    z, W_O = to_float64(recorded.calls[layer.hook_point].z).cpu(), to_float64(layer.hook_point.W_O).cpu()
    return torch.einsum("bhte,hed->btd", z, W_O) + bias


def _find_input_norm(
    recorded: _ModuleInputOutputRecord, layer: AttachedLayer, block: nn.Module
) -> tuple[nn.Module | None, str]:
    """Return the norm in front of the heads, and why their values do not follow from the stream (empty if they do)."""
    if not layer.spec.head_ids:
        return None, ""
    residual, layer_input = recorded.inputs[block], recorded.inputs.get(layer.module)
    if layer_input is None:
        return None, f"the input of {layer.info.name} could not be recorded."
    input_norms = [
        module
        for module in recorded.modules_reading(block, residual)
        if _same(recorded.outputs[module], layer_input) and module is not block
    ]
    if not input_norms and not _same(residual, layer_input):
        return None, f"there is more than a norm between the residual stream and {layer.info.name}."
    if layer.info.qkv_modules is not None:
        W_V, b_V = to_float64(layer.qkv.weight_by_head("v")).cpu(), layer.qkv.bias_by_head("v")  # (K, e, D)
        v = torch.einsum("btd,ked->bkte", to_float64(layer_input), W_V)  # (B, K, T, e)
        v = v if b_V is None else v + to_float64(b_V).cpu()[:, None]
        if not recorded.is_close(v, to_float64(recorded.calls[layer.hook_point].v).cpu()):
            return None, f"the values of {layer.info.name} are not W_V times its input."
    return (input_norms[0] if input_norms else None), ""


def _final_norm(model: Any, recorded: _ModuleInputOutputRecord, last_block: nn.Module) -> LinearizedNorm:
    """Return the norm between the last layer and the output."""
    block_output, head_input = recorded.outputs[last_block], recorded.inputs.get(model.get_output_embeddings())
    for module in recorded.modules_reading(model, block_output):
        if (
            _same(recorded.outputs[module], head_input)
            and (norm := LinearizedNorm.infer(module, block_output.shape[-1])) is not None
        ):
            return norm
    raise _unsupported_error(
        model, "between its last layer and its output layer there must be one LayerNorm or RMSNorm and nothing else"
    )


def _infer_constant_logit_scale(model: Any, recorded: _ModuleInputOutputRecord, vocabulary: Any) -> float:
    """Return the factor applied to logits after the output layer. Raise an error if logits are changed in any other way."""
    states, weight = recorded.inputs[vocabulary], vocabulary.weight  # (B, T, D), (V, D)
    bias = 0.0 if getattr(vocabulary, "bias", None) is None else to_float64(vocabulary.bias).cpu()
    token_scores = to_float64(states.to(weight) @ weight.mT).cpu()  # (B, T, V)
    raw, expected_scaled = token_scores + bias, token_scores * PROBE_SCALE + bias
    scale = (
        1.0 if recorded.is_close(raw, recorded.logits) else float((raw * recorded.logits).sum() / raw.square().sum())
    )
    scaled_logits = to_float64(AttachedLMHead(model)((states * PROBE_SCALE).to(weight.device))).cpu()  # (B, T, V)
    if not recorded.is_close(raw * scale, recorded.logits) or not recorded.is_close(
        expected_scaled * scale, scaled_logits
    ):
        raise _unsupported_error(
            model, "its logits are not a linear function of the input of its output layer (they may be capped)"
        )
    return scale


def _find_token_embedding_module(
    model: Any, recorded: _ModuleInputOutputRecord, first_block: nn.Module
) -> nn.Module | None:
    """Return the token embedding if the residual stream starts with its rows, plus terms that do not depend on the tokens."""
    table, stream_start = model.get_input_embeddings(), to_float64(recorded.inputs[first_block])  # (B, T, D)
    rows = to_float64(table(recorded.ids)).cpu()  # (B, T, D)
    return (
        table
        if rows.shape == stream_start.shape and recorded.is_close(rows[0] - rows[1], stream_start[0] - stream_start[1])
        else None
    )


def _is_sum_of(total: Tensor, *parts: Tensor) -> bool:
    """Return whether a tensor is the sum of its parts up to rounding: (B, T, D) each."""
    if any(part.shape != total.shape for part in parts):
        return False
    size = sum(to_float64(part).abs() for part in parts)
    difference = (to_float64(total) - sum(to_float64(part) for part in parts)).abs()
    return bool((difference <= 8 * torch.finfo(total.dtype).eps * size).all())


def _same(actual: Tensor | None, expected: Tensor | None) -> bool:
    return (
        actual is not None and expected is not None and actual.shape == expected.shape and torch.equal(actual, expected)
    )


def _unsupported_error(model: Any, reason: str) -> HeadwiseError:
    return UnsupportedModelError(
        f"{type(model).__name__}: its logits cannot be attributed to parts of the model: {reason}. Silence heads instead: "
        f"attached.heads[…].silenced()."
    )
