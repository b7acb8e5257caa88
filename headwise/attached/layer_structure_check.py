"""Test on a few tokens how the heads of a layer work: whether z enters W_O, and which rows of weights compute q, k and v.

Names of modules are not trusted. One call of the model records the inputs and outputs of every projection, of attention and
of W_O; gradients show which values depend on which. If a view of weights does not match the recorded values, it is not
available, and the reason is stored. If heads are combined before W_O, they cannot be silenced.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import output_projection_candidates
from headwise.attached.dummy_inputs import dummy_input_candidates
from headwise.attached.layer import AttachedLayer, bias_of, weight_matrix
from headwise.attached.non_sdpa_hooks import install_attention_hooks
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.kernels import attention_weights
from headwise.kernels.enable_grad import enable_gradients
from headwise.kernels.rounding_tolerance import to_float64
from headwise.kernels.score_params import ScoreParams, repeat_kv

# Possible layouts of rows, by number of projection modules.
LAYOUTS_BY_MODULE_COUNT = {3: ("separate", "padded_per_head", "padded_at_end"), 1: ("fused", "per_head")}
MAX_FOREIGN_FRACTION = 1e-3  # tolerated share of a head's q or k that depends on rows of other heads, due to rounding


class LayerTestCallRecorder:
    """Values recorded in one test call of a layer."""

    def __init__(self, layer: AttachedLayer) -> None:
        self.layer = layer
        # By projection: its input, its output, and the leaf tensor that replaced the output.
        self.projection_calls: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.z: Tensor | None = None  # (B, T, H, e), a leaf
        self.output_input: Tensor | None = None
        self.params: ScoreParams | None = None
        self.layer_output: Tensor | None = None
        self.z_enters_opaque_output = False  # whether z entered a module with the name of an output projection

    def on_attention(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, make_params: Callable[[], ScoreParams]
    ) -> Tensor:
        """Record a call of attention and replace its output by a leaf tensor with the same values."""
        if self.qkv is not None:
            return out
        self.qkv, self.z = (q, k, v), out.detach().requires_grad_()
        try:
            self.params = make_params()
        except HeadwiseError:
            self.params = None
        return self.z.clone()

    def on_qkv(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Record a call of a q, k or v projection."""
        if module in self.projection_calls or not isinstance(output, Tensor) or not inputs:
            return None
        leaf = output.detach().requires_grad_()
        self.projection_calls[module] = inputs[0].detach(), output.detach(), leaf
        return leaf.clone()

    def before_output(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record the input of W_O."""
        if self.output_input is None and self.z is not None and inputs:
            self.output_input = inputs[0]

    def after_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the output of W_O."""
        if inputs and inputs[0] is self.output_input and isinstance(output, Tensor):
            self.projection_calls[module] = inputs[0].detach(), output.detach(), output.detach()

    def before_opaque_output(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record whether z enters a module with the name of an output projection whose weights are not readable."""
        if self.z is not None and inputs and isinstance(inputs[0], Tensor) and inputs[0].numel() == self.z.numel():
            self.z_enters_opaque_output |= torch.equal(inputs[0].detach().reshape(self.z.shape), self.z.detach())

    def after_layer(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the output of the layer."""
        self.layer.num_outputs = len(output) if isinstance(output, list | tuple) else 0
        output = output[0] if isinstance(output, list | tuple) and output else output
        if self.layer_output is None and self.z is not None and isinstance(output, Tensor):
            self.layer_output = output

    # Evaluation.

    def store_probe_results(self) -> None:
        """Store the results in the layer."""
        layer = self.layer
        if self.qkv is None or self.z is None:
            _mark_unprobed(layer, "the test call did not run this layer")
            return
        layer.z_path = self._find_z_path(self.z)
        if layer.info.backend != "sdpa" and not self._is_reconstructed(self.z):
            layer.reconstruction_problem = (
                "its output could not be reproduced from its recorded queries, keys and values"
            )
        if layer.info.output_module is not None and layer.z_path != "coupled":
            layer.withheld_reasons |= _reason_entry("o", self._weight_problem(layer.info.output_module))
        if layer.info.qkv_modules is not None:
            for projection in "qkv":
                self._find_layout(projection)
        if self._attends_beyond_window():
            layer.hook_point.window = None

    def _find_z_path(self, z: Tensor) -> Any:
        if self.layer.info.output_module is None:
            return "unknown" if self._is_linear_in_z(z) else "unverified"
        output_input = self.output_input
        if output_input is None:
            self.layer.withheld_reasons["o"] = "the assumed output projection does not receive the output of attention"
            return "unknown" if self._is_linear_in_z(z) else "unverified"
        if output_input.numel() != z.numel():
            return "coupled"
        if torch.equal(output_input.detach().reshape(z.shape), z.detach()):
            return "plain"
        if not output_input.requires_grad:
            return "coupled"
        generator = torch.Generator().manual_seed(0)
        direction = (1 + torch.rand(output_input.shape, generator=generator, device="cpu")).to(output_input)
        (gradient,) = torch.autograd.grad(output_input, z, direction, retain_graph=True, allow_unused=True)
        if gradient is None:
            return "coupled"
        gate = gradient / direction.reshape(z.shape)
        return "gated" if _is_close(gate * z.detach(), output_input.detach().reshape(z.shape)) else "coupled"

    def _is_linear_in_z(self, z: Tensor) -> bool:
        """Return whether the layer's output is linear in z, but not z itself; then a silenced head contributes nothing."""
        layer_output = self.layer_output
        if layer_output is None or not layer_output.requires_grad:
            return self.z_enters_opaque_output  # no gradient passes a quantized projection
        if layer_output.numel() == z.numel() and torch.equal(layer_output.detach().reshape(z.shape), z.detach()):
            return False  # z is processed outside of the layer
        generator = torch.Generator().manual_seed(0)
        directions = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in (layer_output, z)]
        try:
            (gradient,) = torch.autograd.grad(layer_output, z, directions[0], create_graph=True, allow_unused=True)
            if gradient is None or not gradient.requires_grad:
                return self.z_enters_opaque_output if gradient is None else True
            (second_gradient,) = torch.autograd.grad(gradient, z, directions[1], retain_graph=True, allow_unused=True)
        except RuntimeError:  # not differentiable
            return self.z_enters_opaque_output
        if second_gradient is None:
            return True
        tolerance = torch.finfo(z.dtype).eps ** 0.5 * gradient.detach().abs().max()
        return bool(second_gradient.abs().max() * z.detach().abs().max() <= tolerance)

    def _weight_problem(self, module: nn.Module) -> str:
        """Return why a projection does not compute its weight times its input; empty if it does."""
        if module not in self.projection_calls:
            return "the projection was not called like a linear layer"
        inputs, output, _ = self.projection_calls[module]
        try:
            weight, bias = weight_matrix(module), bias_of(module)
        except HeadwiseError as error:
            return str(error).rstrip(".")
        if weight.device.type == "meta" or inputs.shape[-1] != weight.shape[1] or output.shape[-1] != weight.shape[0]:
            return "" if weight.device.type == "meta" else "the shape of the weight does not match its input and output"
        product = inputs.to(weight.dtype) @ weight.detach().mT
        product = product if bias is None else product + bias.detach()
        return (
            ""
            if _is_close(product.to(output.dtype), output)
            else "the output of the projection is not its weight times its input"
        )

    def _find_layout(self, projection: str) -> None:
        """Find the rows that compute q, k or v of each head, or store why they were not found."""
        layer = self.layer
        module = layer.info.qkv_module("qkv".index(projection) if len(layer.info.qkv_modules[1]) == 3 else 0)  # pyright: ignore
        problem = self._weight_problem(module)
        if not problem:
            layouts = [layout for layout in self._candidate_layouts() if self._layout_fits(projection, layout, module)]
            if layouts:
                layer.layouts[projection] = layouts[0]
                return
            description = (
                "the recorded values are not the output of the projection"
                if projection == "v"
                else f"{projection} of a head does not depend on separate rows"
            )
            problem = f"{description} in {type(layer.module).__name__}"
        layer.withheld_reasons[projection] = problem

    def _candidate_layouts(self) -> list[str]:
        default_layout, names = self.layer.info.qkv_modules or ("", ())
        return sorted(LAYOUTS_BY_MODULE_COUNT[3 if len(names) == 3 else 1], key=lambda layout: layout != default_layout)

    def _layout_fits(self, projection: str, layout: str, module: nn.Module) -> bool:
        """Return whether the first two heads and the last head depend on the rows that a layout assigns to them."""
        assert self.qkv is not None
        _, output, leaf = self.projection_calls[module]
        recorded, rows = self.qkv["qkv".index(projection)], torch.arange(output.shape[-1], device="cpu")
        try:
            row_indices = self.layer.qkv.split_heads(projection, rows, layout)  # (heads, channels): row numbers
        except RuntimeError:
            return False
        if recorded.ndim != 4 or recorded.shape[1] % len(row_indices) or recorded.shape[-1] != row_indices.shape[1]:
            return False
        repeats = recorded.shape[1] // len(row_indices)  # keys may be repeated for all heads of their group
        for head in sorted({0, min(1, len(row_indices) - 1), len(row_indices) - 1}):
            head_values = recorded[:, head * repeats]  # (B, T, d)
            if projection == "v":
                expected = output[..., row_indices[head].to(output.device)]
                if expected.numel() != head_values.numel() or not _is_close(
                    expected.reshape(head_values.shape), head_values.detach()
                ):
                    return False
                continue
            if not head_values.requires_grad:
                return False
            generator = torch.Generator().manual_seed(head)
            direction = torch.randn(head_values.shape, generator=generator, device="cpu").to(head_values)
            # Other heads may scale the values, as an RMS norm over all heads does, but not rotate them.
            detached = head_values.detach()
            squared_norm = detached.square().sum(-1, keepdim=True)
            direction = direction - detached * (direction * detached).sum(-1, keepdim=True) / squared_norm.where(
                squared_norm > 0, 1.0
            )
            (gradient,) = torch.autograd.grad(head_values, leaf, direction, retain_graph=True, allow_unused=True)
            if gradient is None:
                return False
            energy = to_float64(gradient).square().flatten(0, -2).sum(0).cpu()  # (rows,)
            if energy[row_indices[head]].sum() <= (1 - MAX_FOREIGN_FRACTION) * energy.sum():
                return False
        return True

    def _is_reconstructed(self, z: Tensor) -> bool:
        """Return whether attention weights computed from the recorded q and k, times values, equal the recorded output."""
        if self.params is None or self.qkv is None:
            return False
        q, k, v = (x.detach() for x in self.qkv)
        weights = attention_weights(q, k, self.params)  # (B, H, T, S)
        self.layer.attends_ahead = bool((weights.triu(1) > 0).any())
        return _equals_output(weights, v, self.params, z.detach())

    def _attends_beyond_window(self) -> bool:
        """Return whether a query attends farther than the window allows."""
        window = self.layer.hook_point.window
        if window is None or self.params is None or self.qkv is None:
            return False
        q, k = (x.detach() for x in self.qkv[:2])
        T, S = q.shape[2], k.shape[2]
        beyond_window = (
            torch.arange(T, device="cpu")[:, None] + (S - T) - torch.arange(S, device="cpu")
        ).abs() >= window  # (T, S)
        return bool((attention_weights(q, k, self.params)[..., beyond_window.to(q.device)] > 0).any())


def reproduces_output(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, out: Tensor) -> bool:
    """Return whether attention weights computed from q and k, times values, equal the output of attention (B, T, H, e)."""
    return _equals_output(attention_weights(q, k, params), v, params, out)


def _equals_output(weights: Tensor, v: Tensor, params: ScoreParams, out: Tensor) -> bool:
    reconstructed = (weights.to(v.dtype) @ repeat_kv(v, params.kv_of_head)).transpose(1, 2)  # (B, T, H, e)
    if out.dtype in (torch.float16, torch.bfloat16):
        return _is_close(reconstructed, out)
    return _is_close(reconstructed.float(), out.float())  # softmax may be in float32


@enable_gradients()
def probe_layers(
    model: Any, layers: Sequence[AttachedLayer], calls: Iterable[Callable[[], object]] | None = None
) -> None:
    """Call the model once in eval mode and store the results in each layer.

    Args:
        model: The model.
        layers: Its layers.
        calls: Functions that call the model. The first one that works counts. None calls it with dummy inputs.
    """
    calls = (partial(model, **inputs) for inputs in dummy_input_candidates(model)) if calls is None else calls
    training_modes = [(module, module.training) for module in model.modules()]
    probes = [LayerTestCallRecorder(layer) for layer in layers if layer.spec.head_ids]
    problem, first_problem = "its input format is unknown", ""
    hooks = [hook for layer in layers for hook in install_attention_hooks(layer)]
    try:
        for module, _ in training_modes:
            module.training = False
        for call in calls:
            probes = [LayerTestCallRecorder(layer) for layer in layers if layer.spec.head_ids]
            problem = _probe_run_error(call, probes)
            if not problem:
                break
            first_problem = first_problem or problem  # the first candidate is the model's main input
    finally:
        for module, training in training_modes:
            module.training = training
        for hook in hooks:
            hook.remove()
    for probe in probes:
        if problem:
            _mark_unprobed(probe.layer, f"the model could not be called with test inputs ({first_problem or problem})")
        else:
            probe.store_probe_results()


def check_reconstruction(layers: Sequence[AttachedLayer]) -> None:
    """Raise an error if attention without SDPA could not be reproduced from its recorded inputs."""
    for layer in layers:
        if layer.reconstruction_problem:
            raise UnsupportedModelError(
                f"{layer.info.name}: cannot be attached, for two reasons: it does not run on SDPA, and "
                f"{layer.reconstruction_problem}. If the model supports SDPA, load it with attn_implementation='sdpa'."
            )


def _probe_run_error(call: Callable[[], object], probes: list[LayerTestCallRecorder]) -> str:
    """Call the model with probes on all layers. Returns the error message, or an empty text."""
    with ExitStack() as stack, torch.random.fork_rng():
        for probe in probes:
            info = probe.layer.info
            for index in range(0 if info.qkv_modules is None else len(info.qkv_modules[1])):
                stack.callback(info.qkv_module(index).register_forward_hook(probe.on_qkv).remove)
            if info.output_module is not None:
                stack.callback(info.output_module.register_forward_pre_hook(probe.before_output).remove)
                stack.callback(info.output_module.register_forward_hook(probe.after_output).remove)
            else:
                for candidate in output_projection_candidates(info):
                    stack.callback(candidate.register_forward_pre_hook(probe.before_opaque_output).remove)
            stack.callback(probe.layer.module.register_forward_hook(probe.after_layer).remove)
            probe.layer.probe = probe
            stack.callback(setattr, probe.layer, "probe", None)
        try:
            call()
        except Exception as error:  # a model may raise any error on guessed inputs
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def _mark_unprobed(layer: AttachedLayer, reason: str) -> None:
    layer.z_path = "unprobed" if layer.info.output_module is not None else "unverified"
    layer.withheld_reasons = dict.fromkeys("qkvo", reason)
    layer.reconstruction_problem = "" if layer.info.backend == "sdpa" else reason


def _reason_entry(projection: str, reason: str) -> dict[str, str]:
    return {projection: reason} if reason else {}


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether values are equal up to rounding, relative to the largest value."""
    if not bool(expected.isfinite().all()):
        return False
    difference = (to_float64(actual) - to_float64(expected)).abs().max()
    return bool(difference <= torch.finfo(expected.dtype).eps ** 0.5 * to_float64(expected).abs().max())
