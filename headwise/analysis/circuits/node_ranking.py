"""Effects of nodes on the metric: exact patching, attribution patching, EAP-IG, and learned gates.

exact:        the node is replaced in a forward pass of its own.
attribution:  one backward pass, (clean − corrupted) · gradient (attribution patching, https://arxiv.org/abs/2310.10348).
eap-ig:       the gradient is averaged over inputs between the corrupted and the clean embedding
              (https://arxiv.org/abs/2403.17806).
              Both gradient methods take two corrections of AtP* (https://arxiv.org/abs/2403.00745): the QK fix computes the
              attention to replaced keys exactly, and GradDrop repeats the backward pass without one layer at a time.
gates:        hard-concrete gates between the live and the corrupted value of each node, trained jointly so that few open
              gates keep the metric of the full model (https://arxiv.org/abs/1712.01312).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.gradient_memory import frozen_weights
from headwise.analysis.circuits.model_nodes import EMBEDDING, NodeEdit, NodeTensorHook, opened_hooks
from headwise.analysis.circuits.node_evaluator import NodeEvaluator, NodeValues, replace_unmasked_nodes
from headwise.heads.learned_gates import LearnedGates, add_sparsity_gradient
from headwise.kernels.enable_grad import enable_gradients
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import eval_mode
from headwise.model.resumable_forward import final_hidden_states_of_copies

RANKINGS = ("exact", "attribution", "eap-ig", "gates")
GATE_STEPS, GATE_RATE, GATE_PROMPTS, FINAL_OPEN_FRACTION = 100, 0.1, 8, 0.05
ANNEAL_FRACTION = 0.5  # fraction of the steps in which the fraction of open gates is lowered

Report = Callable[[int], object]  # number of finished units


def exact_effects(
    evaluator: NodeEvaluator, candidates: Sequence[int], base: np.ndarray, report: Report | None = None
) -> np.ndarray:
    """Return the drop of the metric if a node is replaced by its corrupted value, (candidates, P).

    Args:
        evaluator: Prompts of the score split.
        candidates: Indices of the nodes.
        base: True at the nodes that compute their value otherwise, (N,).
        report: Called with the number of finished nodes and prompts, as a product.
    """
    with_base, without_node = evaluator.sweep(candidates, base, report)
    return with_base - without_node


def gradient_effects(
    evaluator: NodeEvaluator,
    base: np.ndarray,
    steps: int = 1,
    report: Report | None = None,
    *,
    qk_fix: bool = False,
    grad_drop: bool = False,
) -> np.ndarray:
    """Return the first-order effect of every node on every prompt, (N, P).

    Args:
        evaluator: Prompts of the score split.
        base: True at the nodes that compute their value, (N,). Other nodes keep their corrupted value.
        steps: Number of inputs between the corrupted embedding (not included) and the clean one (included). 1 is attribution
            patching.
        report: Called with the number of finished prompts.
        qk_fix: Compute z of the readers of a KV head exactly for its corrupted keys and values. Only the effect of this
            change of z is then of first order.
        grad_drop: Mean absolute effect over backward passes without the outputs of one layer, with the sign of the effect in
            the complete pass. Effects of different signs along different paths cannot cancel in all of them.
    """
    result = np.zeros((len(evaluator.nodes), len(evaluator.prompts)))
    with enable_gradients(evaluator.model), frozen_weights(evaluator.model), eval_mode(evaluator.model):
        for b in range(len(evaluator.batches)):
            directions = _GradientEvaluator(evaluator, b, base, qk_fix=qk_fix)
            effects = directions.mean_over_inputs(steps)  # (P, N)
            if grad_drop:
                effects = effects.sign() * directions.without_layers(steps)
            result[:, list(evaluator.batches[b].indices)] = effects.mT.cpu().numpy()
            if report is not None:
                report(len(evaluator.batches[b].indices))
    result[~base] = 0.0
    return result


class _GradientEvaluator:
    """Derivatives of each prompt's metric in the direction clean − corrupted of each node, for one batch."""

    def __init__(self, evaluator: NodeEvaluator, batch_index: int, base: np.ndarray, *, qk_fix: bool) -> None:
        self.evaluator, self.batch = evaluator, evaluator.batches[batch_index]
        self.nodes = evaluator.nodes
        self.live_mask = torch.from_numpy(base).to(evaluator.model.device)[None]  # (1, N)
        self.corrupted = evaluator.corrupted_values(self.batch)
        clean = evaluator.record(self.batch, corrupted=False)
        self.directions = {key: clean[key] - self.corrupted[key] for key in clean}  # (R, n, T, c) by hook
        self.z_directions = self._reader_changes() if qk_fix else {}

    def mean_over_inputs(self, steps: int, dropped_layer: int | None = None) -> Tensor:
        """Return the derivatives, averaged over inputs, (P, N).

        Args:
            steps: Number of inputs between the corrupted embedding and the clean one.
            dropped_layer: Layer whose outputs are constants in the backward pass.
        """
        total = sum(self._gradient(step / steps, dropped_layer) for step in range(1, steps + 1))
        assert isinstance(total, Tensor)
        return total / steps

    def without_layers(self, steps: int) -> Tensor:
        """Return the mean absolute derivative over passes without one of the other layers, (P, N)."""
        layers = torch.tensor(self.nodes.layers, device=self.live_mask.device)
        distinct = sorted({layer for layer in self.nodes.layers if layer >= 0})
        total = sum(self.mean_over_inputs(steps, layer).abs() for layer in distinct)
        assert isinstance(total, Tensor)
        others = len(distinct) - (layers >= 0).to(total)  # a node of the dropped layer has no effect in that pass
        return total / others.clamp(min=1)

    def _gradient(self, fraction: float, dropped_layer: int | None) -> Tensor:
        amounts = torch.zeros(
            len(self.batch.ids), len(self.nodes), device=self.live_mask.device, requires_grad=True,
            dtype=torch.promote_types(torch.float32, self.directions[EMBEDDING].dtype),
        )  # fmt: skip

        def edit_of(hook: NodeTensorHook) -> NodeEdit:
            def edit(live: Tensor) -> Tensor:
                if hook.key == EMBEDDING:
                    live = self.corrupted[hook.key] + fraction * self.directions[hook.key]
                moved = self._move(live, hook, amounts)
                return moved.detach() if hook.layer == dropped_layer and not hook.is_kv else moved

            return edit

        with opened_hooks(self.nodes.hooks, edit_of):
            hidden = final_hidden_states_of_copies(self.evaluator.model, self.batch.ids, None, None, None, 1)
        scores = self.batch.scores(self.evaluator.model, hidden)[0]  # (P,); prompts do not interact
        (gradient,) = torch.autograd.grad(scores.sum(), amounts)  # (R, N)
        return sum_rows_by_prompt(to_float64(gradient), [len(prompt.clean_rows) for prompt in self.batch.prompts])

    def _move(self, live: Tensor, hook: NodeTensorHook, amounts: Tensor) -> Tensor:
        """Add the directions, times the amounts (R, N), to the values of nodes, and replace those outside the base."""
        if hook.key in self.z_directions:  # heads that read KV nodes
            live = live + amounts[:, hook.kv_nodes, None, None].to(live) * self.z_directions[hook.key]
        if not (hook.is_kv and self.z_directions):
            live = live + amounts[:, hook.nodes, None, None].to(live) * self.directions[hook.key]
        return replace_unmasked_nodes(live, self.live_mask[:, hook.nodes], self.corrupted[hook.key])

    @torch.no_grad()
    def _reader_changes(self) -> NodeValues:
        """Return z minus z with corrupted keys and values and the queries as they are, (R, H, T, e) by hook of z."""
        computed: NodeValues = {}
        changes: NodeValues = {}

        def record_edit(hook: NodeTensorHook) -> NodeEdit:
            def edit(live: Tensor) -> Tensor:
                if hook.kv_nodes:
                    computed[hook.key] = live
                return replace_unmasked_nodes(live, self.live_mask[:, hook.nodes], self.corrupted[hook.key])

            return edit

        def change_edit(hook: NodeTensorHook) -> NodeEdit:
            def edit(live: Tensor) -> Tensor:
                if hook.kv_nodes:
                    changes[hook.key] = computed[hook.key] - live
                    live = computed[hook.key]  # later layers read the same values as in the other pass
                mask = self.live_mask[:, hook.nodes] & (not hook.is_kv)
                return replace_unmasked_nodes(live, mask, self.corrupted[hook.key])

            return edit

        for edit_of in (record_edit, change_edit):
            with opened_hooks(self.nodes.hooks, edit_of):
                final_hidden_states_of_copies(self.evaluator.model, self.batch.ids, None, None, None, 1)
        return changes


def sum_rows_by_prompt(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Sum the rows of each prompt: (R, N) → (P, N)."""
    return torch.stack([part.sum(0) for part in values.split(list(rows))])


def gate_scores(
    evaluator: NodeEvaluator, base: np.ndarray, steps: int = GATE_STEPS, seed: int = 0, report: Report | None = None
) -> np.ndarray:
    """Train gates and return log α of every node, (N,): large for nodes to keep.

    The loss of a prompt is the squared difference of its metric from the full model, in units of the mean effect of
    replacing all nodes.

    Args:
        evaluator: Prompts of the score split.
        base: True at the nodes that may be kept, (N,). Other nodes keep their corrupted value.
        steps: Training steps.
        seed: Seed of the noise of the gates and of the prompts.
        report: Called with the number of finished steps.
    """
    N, device = len(evaluator.nodes), evaluator.model.device
    full = evaluator.evaluate(np.stack([base, np.zeros(N, bool)]))  # (2, P)
    scale = max(1e-6, float(abs((full[0] - full[1]).mean())))
    rng = np.random.default_rng(seed)
    allowed = torch.from_numpy(base).to(device).float()
    with (
        enable_gradients(evaluator.model), frozen_weights(evaluator.model), eval_mode(evaluator.model),
        torch.random.fork_rng(),
    ):  # fmt: skip
        torch.manual_seed(seed)
        gates = LearnedGates({"nodes": N}).to(device)
        optimizer = torch.optim.Adam(gates.parameters(), lr=GATE_RATE)
        initial = gates.open_fraction().item()
        for step in range(steps):
            optimizer.zero_grad()
            b = int(rng.integers(len(evaluator.batches)))
            _backward_gate_loss(evaluator, b, gates, allowed, full[0], scale)
            add_sparsity_gradient(gates)
            optimizer.step()
            share = min(1.0, (step + 1) / max(1.0, ANNEAL_FRACTION * steps))
            gates.set_open_fraction(initial + (FINAL_OPEN_FRACTION - initial) * share)
            if report is not None:
                report(1)
    scores = to_float64(gates.log_alpha.detach()).cpu().numpy().copy()
    scores[~base] = scores.min() - 1
    return scores


def _backward_gate_loss(
    evaluator: NodeEvaluator, batch_index: int, gates: LearnedGates, allowed: Tensor, target: np.ndarray, scale: float
) -> None:
    """Add the gradient of the loss of one batch to the gates, with other noise for each row."""
    batch = evaluator.batches[batch_index]
    values = evaluator.corrupted_values(batch)
    (sampled,) = gates.sample(len(batch.ids)).values()
    masks = sampled * allowed  # (R, N)

    def edit_of(hook: NodeTensorHook) -> NodeEdit:
        def edit(live: Tensor) -> Tensor:
            gate = masks[:, hook.nodes, None, None].to(live)
            return values[hook.key] + gate * (live - values[hook.key])

        return edit

    with opened_hooks(evaluator.nodes.hooks, edit_of):
        hidden = final_hidden_states_of_copies(evaluator.model, batch.ids, None, None, None, 1)
    goal = torch.from_numpy(target[list(batch.indices)]).to(hidden.device)
    loss = ((batch.scores(evaluator.model, hidden)[0] - goal) / scale).square().mean()
    loss.backward()
