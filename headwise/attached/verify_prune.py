"""Whether a model from which heads were cut computes what it did with them silenced: tried on a few tokens, undone if not."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.dummy_inputs import dummy_inputs
from headwise.attached.layer import AttachedLayer
from headwise.attached.prune_in_place import check_prunable, expand_kv_groups, prune_layers
from headwise.attached.pruned_head_hooks import prune_hooks_of, restore_prune_hooks
from headwise.errors import HeadwiseError
from headwise.model import eval_mode

RunOutputs = tuple[list[Tensor], dict[str, list[Tensor]]]  # what the model gives, and what W_O of layers does, by path


def prune_and_verify(
    model: Any,
    layers: list[AttachedLayer],
    pruned: Iterable[Any],
    replace_layers: Callable[[list[AttachedLayer]], None],
    unregister_layers: Callable[[], None],
) -> None:
    """Cut heads, and see that the model is what it was with them silenced, attached and as plain transformers would run it.

    `replace_layers` attaches to other layers from then on, `unregister_layers` to none. Where the cut is refused, all is as
    it was.
    """
    pruned = list(pruned)
    check_prunable(layers, pruned)
    verifier = PruneVerifier(model, layers, pruned)
    with rollback_on_error(layers, pruned, replace_layers):
        pruned_layers = prune_layers(layers, pruned)
        replace_layers(pruned_layers)
        verifier.check(pruned_layers)
        heads = [
            address for layer in pruned_layers for address in layer.hook_point.head_addresses if layer.has_uneven_groups
        ]
        with suppress(RollbackSignal), rollback_on_error(pruned_layers, heads, replace_layers):
            unregister_layers()
            verifier.check(
                [
                    expand_kv_groups(layer) if layer.has_uneven_groups and layer.spec.head_ids else layer
                    for layer in pruned_layers
                ]
            )
            raise RollbackSignal


class RollbackSignal(Exception):  # noqa: N818 (a wish, not an error)
    """What was done is to be undone."""


class PruneVerifier:
    """What a model gives with some heads silenced, to hold against what it gives without them."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer], pruned: Iterable[Any]) -> None:
        self._model, self._pruned = model, list(pruned)
        self._names = {
            layer.info.name for layer in layers if any(a in self._pruned for a in layer.hook_point.head_addresses)
        }
        self._inputs: dict[str, Tensor] | None = None
        parameter = next(model.parameters(), None)
        self.is_possible = parameter is not None and parameter.device.type != "meta"
        if not self.is_possible:
            return
        with ExitStack() as silencing:
            for layer in layers:
                head_indices = [index for index, a in enumerate(layer.hook_point.head_addresses) if a in self._pruned]
                if head_indices:
                    gate = torch.ones(len(layer.spec.head_ids), device=parameter.device)  # pyright: ignore
                    gate[head_indices] = 0
                    silencing.enter_context(layer.hook_point.scaled(gate))
            self._silenced_outputs, reason = self._run_first_working(layers)
        if self._inputs is None:
            raise HeadwiseError(
                f"heads of {type(model).__name__} cannot be cut: no call could be tried to see that it stays right "
                f"({reason}); silence them instead: attached.heads[…].silenced()."
            )

    def _run_first_working(self, layers: Sequence[AttachedLayer]) -> tuple[RunOutputs, str]:
        reason = "what it reads is not known here"
        for inputs in dummy_inputs(self._model):
            try:
                outputs = self._run(layers, inputs)
            except Exception as error:  # whatever somebody else's model says to inputs that were guessed
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                continue
            self._inputs = inputs
            return outputs, ""
        return ([], {}), reason

    def _run(self, layers: Sequence[AttachedLayer], inputs: dict[str, Tensor]) -> RunOutputs:
        projection_outputs: dict[str, list[Tensor]] = {}
        with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(), eval_mode(self._model):
            for layer in layers:
                info = layer.info
                if info.output_module is not None and info.name in self._names:
                    captured = projection_outputs.setdefault(info.name, [])
                    hook = info.output_module.register_forward_hook(
                        lambda _, __, output, captured=captured: captured.append(output)
                    )
                    stack.callback(hook.remove)
            return [
                *flatten_tensors(self._model(**inputs)),
                *_next_token_outputs(self._model, inputs),
            ], projection_outputs

    def check(self, layers: Sequence[AttachedLayer]) -> None:
        """Refuse what computes other numbers."""
        if not self.is_possible or self._inputs is None:
            return
        outputs, projection_outputs = self._silenced_outputs
        try:
            new_outputs, new_projection_outputs = self._run(layers, self._inputs)
        except HeadwiseError:
            raise
        except Exception as error:  # shapes that do not fit any more
            message = " ".join(str(error).split())[:120]
            self._raise_unprunable(f"it cannot be called without them ({type(error).__name__}: {message})")
            raise AssertionError from error
        pairs = (
            list(zip(outputs, new_outputs, strict=True))
            if len(outputs) == len(new_outputs)
            else [(outputs[0], outputs[0].new_zeros(0))]
        )
        for name, expected in projection_outputs.items():  # an emptied layer may write without W_O
            pairs += list(zip(expected, new_projection_outputs.get(name, expected) or expected, strict=False))
        if any(a.shape != b.shape or not _is_close(b, a) for a, b in pairs):
            self._raise_unprunable("without them it computes other numbers than with them silenced")

    def _raise_unprunable(self, reason: str) -> None:
        names = sorted(self._names)
        raise HeadwiseError(
            f"heads of {type(self._model).__name__} ({names[0]}{' …' if len(names) > 1 else ''}) cannot be cut: {reason}; "
            f"silence them instead: attached.heads[…].silenced()."
        )


def _next_token_outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What a model says to a next token where it keeps those before it in a cache; nothing where it does not."""
    ids = inputs.get("input_ids")
    if ids is None or set(inputs) != {"input_ids"} or not getattr(model, "can_generate", bool)():
        return []
    prefix_output = model(input_ids=ids[:, :-1], use_cache=True)
    if getattr(prefix_output, "past_key_values", None) is None:
        return []
    try:
        return flatten_tensors(model(input_ids=ids[:, -1:], past_key_values=prefix_output.past_key_values)[0])
    except Exception:  # it wants to be told more than that
        return []


@contextmanager
def rollback_on_error(
    layers: list[AttachedLayer], pruned: Iterable[Any], replace_layers: Callable[[list[AttachedLayer]], None]
) -> Iterator[None]:
    """Put everything back as it was, and start again from there, if what is done inside fails."""
    pruned_set = set(pruned)
    infos = [layer.info for layer in layers if pruned_set & set(layer.hook_point.head_addresses)]
    modules = {module for info in infos for root in (info.parent, info.module) for module in root.modules()}
    saved = [(module, _copy_state(module), prune_hooks_of(module)) for module in modules]
    try:
        yield
    except BaseException:
        for module, state, prune_hooks in saved:
            hooks = {name: module.__dict__[name] for name in module.__dict__ if "_hooks" in name}
            module.__dict__.clear()
            module.__dict__.update(state | hooks)
            restore_prune_hooks(module, prune_hooks)
        replace_layers(layers)
        raise


def _copy_state(module: nn.Module) -> dict[str, Any]:
    return {name: type(value)(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}


def flatten_tensors(output: Any) -> list[Tensor]:
    """Every floating tensor an output holds, in order; caches are left out."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    return [x for item in output for x in flatten_tensors(item)] if isinstance(output, list | tuple) else []


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether numbers are the same but for rounding on the way, beside the largest."""
    if not expected.numel():
        return True
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return False
    difference = (actual[finite].double() - expected[finite].double()).abs()
    size = expected[finite].double().abs()
    return not len(difference) or bool(difference.max() <= torch.finfo(expected.dtype).eps ** 0.5 * size.max())
