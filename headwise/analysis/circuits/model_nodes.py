"""Nodes of a decoder, and the modules at which their values are recorded and replaced.

A node is a query head (z before W_O), a KV head (its keys and values before positions; its own node in grouped-query models),
an MLP (its term of the residual stream) or the embedding (the residual stream before the first layer).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import weight_matrix
from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import HookPoint
from headwise.model import ModelProtocol
from headwise.spec import KVAddress, MLPAddress

# Value of some nodes with a node axis, (B, n, T, c) → new value of the same shape, or None to leave it unchanged.
NodeEdit = Callable[[Tensor], Tensor | None]
Opener = Callable[[NodeEdit], Any]  # edit → context manager in which it is applied
EMBEDDING = "embedding"


@dataclass(frozen=True, eq=False)
class NodeTensorHook:
    """A tensor of the forward pass that holds the values of some nodes.

    Attributes:
        key: Unique name, such as `5.z` or `5.k`.
        layer: Number of the layer. −1 for the embedding.
        nodes: Indices of the nodes on the node axis.
        opened: Returns a context in which an edit of the tensor is applied in every forward pass.
        kv_nodes: Index of the KV node that each head reads, at hooks of z. Empty if KV heads are not nodes.
    """

    key: str
    layer: int
    nodes: tuple[int, ...]
    opened: Opener
    kv_nodes: tuple[int, ...] = ()

    @property
    def is_kv(self) -> bool:
        """True at hooks of keys or values."""
        return self.key.endswith((".k", ".v"))


@dataclass(frozen=True, eq=False)
class ModelNodes:
    """All nodes of a model.

    Attributes:
        names: Names of the nodes, layer by layer.
        kinds: "head", "kv", "mlp" or "embedding", by node.
        layers: Number of the layer of each node. −1 for the embedding.
        hooks: Tensors that hold the values of the nodes.
        blocks: Blocks of the model by layer.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    hooks: tuple[NodeTensorHook, ...]
    blocks: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.names)

    def index(self, names: Sequence[str]) -> list[int]:
        """Return the indices of nodes by name.

        Args:
            names: Names of the nodes.
        """
        by_name = {name: i for i, name in enumerate(self.names)}
        return [by_name[name] for name in names]

    @staticmethod
    def of(model: ModelProtocol) -> "ModelNodes":
        """Return the nodes of a decoder. Raise if the model has no plain residual stream.

        Args:
            model: A headwise model or an attached model.
        """
        if model.is_sharded:
            raise UnsupportedModelError(
                "model: circuits are not supported for a model whose heads are split over processes."
            )
        if model.spec.kind != "decoder":
            raise UnsupportedModelError(
                f"model: circuits need a decoder that predicts tokens. Got kind={model.spec.kind!r}."
            )
        residual = model.residual_stream()
        names, kinds, layers = [EMBEDDING], ["embedding"], [-1]
        hooks = [NodeTensorHook(EMBEDDING, -1, (0,), partial(_edit_input, residual.first_module))]

        def add(kind: str, layer: int, added: Sequence[str]) -> tuple[int, ...]:
            start = len(names)
            names.extend(added)
            kinds.extend([kind] * len(added))
            layers.extend([layer] * len(added))
            return tuple(range(start, len(names)))

        for attention in model.attention_layers():
            hook_point: HookPoint = attention.hook_point
            layer, stack = hook_point.address.layer, hook_point.address.stack
            spec = attention.spec
            is_grouped = 0 < len(spec.kv_head_ids) < len(spec.head_ids)
            heads = add("head", layer, [str(head) for head in hook_point.head_addresses])
            kv_names = [str(KVAddress(stack, layer, number)) for number in spec.kv_head_ids] if is_grouped else []
            kv = add("kv", layer, kv_names)
            if heads:
                kv_nodes = tuple(kv[index] for index in spec.kv_of_head) if is_grouped else ()
                hooks.append(NodeTensorHook(f"{layer}.z", layer, heads, partial(_edit_z, hook_point), kv_nodes))
            if is_grouped:
                opener = _edit_native_kv if model.is_native else _edit_projection
                hooks += [NodeTensorHook(f"{layer}.{p}", layer, kv, partial(opener, attention, p)) for p in "kv"]
            mlp = add("mlp", layer, [str(MLPAddress(stack, layer))])
            term = residual.layers[layer]
            hooks.append(NodeTensorHook(f"{layer}.mlp", layer, mlp, partial(_edit_output, term.mlp, term.block)))
        blocks = tuple(item.block for _, item in sorted(residual.layers.items()))
        return ModelNodes(tuple(names), tuple(kinds), tuple(layers), tuple(hooks), blocks)


@contextmanager
def opened_hooks(hooks: Sequence[NodeTensorHook], edit_of: Callable[[NodeTensorHook], NodeEdit]) -> Iterator[None]:
    """Apply an edit at each hook while the context is open."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.opened(edit_of(hook)))
        yield


@contextmanager
def _edit_z(hook_point: HookPoint, edit: NodeEdit) -> Iterator[None]:
    def replace(z: Tensor) -> Tensor:
        changed = edit(z)  # (B, H, T, e)
        return z if changed is None else changed

    with hook_point.replaced(replace):
        yield


@contextmanager
def _edit_native_kv(attention: Any, projection: str, edit: NodeEdit) -> Iterator[None]:
    index = "qkv".index(projection)

    def hook(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        changed = edit(output[index])  # (B, K, T, d); keys are already rotated
        return None if changed is None else (*output[:index], changed, *output[index + 1 :])

    with _registered(attention.qkv.register_forward_hook(hook)):
        yield


@contextmanager
def _edit_projection(attention: Any, projection: str, edit: NodeEdit) -> Iterator[None]:
    module: nn.Module = attention.qkv.projection_module(projection)
    weight = attention.qkv.weight_by_head(projection)  # (K, d, D)
    size = weight_matrix(module).shape[0]  # the module may compute q, k and v together
    rows = attention.qkv.split_heads(projection, torch.arange(size, device="cpu")[:, None])[..., 0]  # (K, d)
    columns, heads = rows.flatten().to(weight.device), weight.shape[0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        computed = output[..., columns].unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, K, T, d)
        changed = edit(computed)
        if changed is None:
            return None
        result = output.clone()
        result[..., columns] = changed.transpose(1, 2).flatten(-2)
        return result

    with _registered(module.register_forward_hook(hook)):
        yield


@contextmanager
def _edit_output(module: nn.Module, block: nn.Module, edit: NodeEdit) -> Iterator[None]:
    shape: list[int] = []  # batch and tokens of the block, because some MLPs flatten them

    def record_shape(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        shape[:] = states.shape[:2]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output  # (B, T, D) or (B·T, D)
        changed = edit((states.unflatten(0, shape) if states.ndim == 2 else states)[:, None])
        if changed is None:
            return None
        changed = changed[:, 0].reshape(states.shape)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with (
        _registered(block.register_forward_pre_hook(record_shape, with_kwargs=True)),
        _registered(module.register_forward_hook(hook)),
    ):
        yield


@contextmanager
def _edit_input(module: nn.Module, edit: NodeEdit) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states: Tensor = args[0] if args else kwargs["hidden_states"]  # (B, T, D)
        changed = edit(states[:, None])
        if changed is None:
            return None
        if args:
            return (changed[:, 0], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": changed[:, 0]}

    with _registered(module.register_forward_pre_hook(hook, with_kwargs=True)):
        yield


@contextmanager
def _registered(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
