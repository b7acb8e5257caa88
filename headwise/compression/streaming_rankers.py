"""What tells which key heads may stream: where they look, what is lost, gates that learn, and what they are for."""

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.analysis.metrics.hook_listeners import listen_at_hook_points
from headwise.analysis.metrics.induction import make_repeated_sequences
from headwise.analysis.metrics.long_offsets import attention_outside_window
from headwise.analysis.metrics.retrieval import make_needle_texts
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.l0_gates import ANNEAL_FRACTION, LearnedGates, add_sparsity_gradient, gate_training
from headwise.compression.streaming_selection import Scores, StreamRankingInput, cache_policy_override, streaming
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.batched import attention_weight_rows
from headwise.kernels.enable_grad import gradients_enabled
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import Block, Transformer, eval_mode
from headwise.model.block import BlockContext
from headwise.spec import Address, AttentionSpec, LayerAddress

SAMPLED_ROWS = 64  # queries of a text whose attention is looked at


@torch.no_grad()
def score_by_attention(model: Transformer, inputs: StreamRankingInput) -> Scores:
    """The share of attention on keys the key head would have forgotten, over queries that have forgotten any: of that head
    among its readers which looks there most. A mean would hide one that needs them behind two that do not."""
    total = {
        layer.address: torch.zeros(len(layer.head_ids), dtype=torch.float64) for layer in model.gathered_hook_points()
    }
    row_count = 0

    def on_call(call: AttentionCall, rows: list[int], _first: int) -> None:
        for row in rows:
            evicted_mass = attention_outside_window(call.map_rows([row])[0], [row], inputs.policy)  # (H, 1)
            total[call.hook_point.address] += evicted_mass[:, 0].double().cpu()

    texts = _long_texts(model, inputs)
    for index, ids in enumerate(texts):
        rows = (
            torch.linspace(
                inputs.retained_tokens, ids.shape[1] - 1, min(SAMPLED_ROWS, ids.shape[1] - inputs.retained_tokens)
            )
            .long()
            .tolist()
        )
        row_count += len(rows)
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_call, rows):
            model(ids, hidden=True)
        _report_progress(inputs, "attention beyond the window", index + 1, len(texts))
    means = {layer: sums / row_count for layer, sums in total.items()}
    return _reduce_per_kv_head(model, means, torch.amax)


@torch.no_grad()
def score_by_output_change(model: Transformer, inputs: StreamRankingInput) -> Scores:
    """How far what its heads write moves when it streams: the square of that against the square of the stream it is added to,
    over rows that have forgotten any. Heads that spread their attention evenly may look far and write the same without it."""
    change: Scores = dict.fromkeys(model.spec.kv_head_addresses, 0.0)
    texts = _long_texts(model, inputs)
    for index, ids in enumerate(texts):
        with eval_mode(model):
            x, context = model.begin_forward(ids)
            for block in model.blocks:
                assert isinstance(block, Block)
                layer, layer_address = block.attention, block.attention.hook_point.address
                full, streamed = _full_and_streamed(block, block.attention_input(x), context, inputs)  # (1, H, T, e)
                difference = at_least_float32(full - streamed)[0, :, inputs.retained_tokens :]  # (H, n, e)
                residual_norm = at_least_float32(x[0, inputs.retained_tokens :]).square().sum(-1)  # (n,)
                for kv_index, kv_head in enumerate(layer.spec.kv_head_ids):
                    heads = [head for head, kv_of in enumerate(layer.spec.kv_of_head) if kv_of == kv_index]
                    output_change = torch.einsum(
                        "hne,hed->nd", difference[heads], layer.hook_point.W_O[heads].to(difference)
                    )
                    change[layer_address.head_address(kv_head)] += (
                        output_change.square().sum(-1) / residual_norm
                    ).mean().item() / len(texts)
                x = block(x, context)
        _report_progress(inputs, "what each key head's heads write", index + 1, len(texts))
    return change


@torch.no_grad()
def score_by_loss(model: Transformer, inputs: StreamRankingInput) -> Scores:
    """What the loss of tokens gains, where anything is forgotten, when this key head alone streams."""
    loss_increase: Scores = dict.fromkeys(model.spec.kv_head_addresses, 0.0)
    texts, token_count = _long_texts(model, inputs), 0
    for index, ids in enumerate(texts):
        with eval_mode(model):
            x, context = model.begin_forward(ids)
            block_inputs = []  # the stream that each block reads
            for block in model.blocks:
                block_inputs.append(x)
                x = block(x, context)
            full_loss = _loss_after(model, x, ids, inputs.retained_tokens)
            token_count += ids.shape[1] - 1 - inputs.retained_tokens
            for head in loss_increase:  # what comes before its layer stays as it was
                x = block_inputs[head.layer]
                with streaming(model, (head,), inputs.policy):
                    for block in model.blocks[head.layer :]:
                        x = block(x, context)
                loss_increase[head] += _loss_after(model, x, ids, inputs.retained_tokens) - full_loss
        _report_progress(inputs, "loss of each key head", index + 1, len(texts))
    return {head: value / token_count for head, value in loss_increase.items()}


def score_by_gates(model: Transformer, inputs: StreamRankingInput, rate: float = 0.1) -> Scores:
    """A gate on each key head blends what its heads find among all keys with what they find among few, and learns to close.

    What is made small is how far the last states move, as in DuoAttention (https://arxiv.org/abs/2410.10819); the share of
    open gates is led down to what shall stay whole, as gates on heads are that may be cut.
    """
    if inputs.gate_steps < 1:
        raise HeadwiseError(f"gates learn in steps, 1 or more; got {inputs.gate_steps}.")
    texts = _long_texts(model, inputs)
    with gradients_enabled(model), gate_training(model, False), torch.random.fork_rng():
        torch.manual_seed(inputs.seed)
        gates = LearnedGates(
            {layer.hook_point.address: len(layer.spec.kv_head_ids) for layer in model.attention_layers()}
        )
        gates = gates.to(model.device)
        optimizer = torch.optim.Adam(gates.parameters(), lr=rate)
        initial_fraction, keep = gates.open_fraction().item(), 1 - inputs.fraction
        for step in range(inputs.gate_steps):
            ids = texts[step % len(texts)]
            with torch.no_grad():
                reference = at_least_float32(model(ids, hidden=True)[:, inputs.retained_tokens :])  # (1, n, D)
            difference = _gated_forward(model, ids, gates.sample(1), inputs)[:, inputs.retained_tokens :] - reference
            loss = difference.square().sum(-1).mean() / reference.square().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            add_sparsity_gradient(gates)
            optimizer.step()
            gates.set_open_fraction(
                initial_fraction
                + (keep - initial_fraction) * min(1.0, (step + 1) / max(1.0, ANNEAL_FRACTION * inputs.gate_steps))
            )
            _report_progress(inputs, "gates", step + 1, inputs.gate_steps)
        open_probability = gates.open_probability().tolist()
    return dict(zip(model.spec.kv_head_addresses, open_probability, strict=True))


def _gated_forward(
    model: Transformer, ids: Tensor, gates: dict[LayerAddress, Tensor], inputs: StreamRankingInput
) -> Tensor:
    """Last states with a gate on each key head, (B, K) for each layer: open, its heads see all; closed, what streams."""
    x, context = model.begin_forward(ids)
    for block in model.blocks:
        assert isinstance(block, Block)
        layer, attention_input = block.attention, block.attention_input(x)
        full, streamed = _full_and_streamed(block, attention_input, context, inputs)
        gate = gates[layer.hook_point.address][:, list(layer.spec.kv_of_head), None, None]  # (B, H, 1, 1)
        x = block.finish(
            x, attention_input, layer.output_projection(streamed + gate.to(streamed) * (full - streamed)), context
        )
    return x if model.norm is None else model.norm(x)


def _full_and_streamed(
    block: Block, attention_input: Tensor, context: BlockContext, inputs: StreamRankingInput
) -> tuple[Tensor, Tensor]:
    """What heads find among all keys, and among those they would keep: (B, H, T, e) twice."""
    layer, mask = block.attention, context.mask_for(None, attention_input.shape[1])
    full = layer.compute_z(attention_input, mask=mask, positions=context.rotary_table)
    with cache_policy_override(layer, list(layer.spec.kv_head_ids), inputs.policy):
        return full, layer.compute_z(attention_input, mask=mask, positions=context.rotary_table)


@torch.no_grad()
def score_by_retrieval(model: Transformer, inputs: StreamRankingInput) -> Scores:
    """The most that any of its heads looks at what is repeated: the token behind the first copy, the first copy itself, or,
    of a needle being copied, the token that comes next; such heads stay whole (https://arxiv.org/abs/2407.15891)."""
    repeats, head_counts = (
        make_repeated_sequences(model, seed=inputs.seed),
        {layer.address: len(layer.head_ids) for layer in model.gathered_hook_points()},
    )
    sums = {layer: torch.zeros(3, n, dtype=torch.float64) for layer, n in head_counts.items()}
    second_copy = range(repeats.second_copy.start, repeats.second_copy.stop)

    def on_call(call: AttentionCall, _first: int) -> None:
        weights = attention_weight_rows(
            at_least_float32(call.q), at_least_float32(call.k), call.params, second_copy
        )  # (B, H, m, S)
        for index, offset in enumerate((repeats.length - 1, repeats.length)):
            diagonal = weights.diagonal(second_copy.start - offset, -2, -1)[..., : len(second_copy)]  # (B, H, m)
            sums[call.hook_point.address][index] += diagonal.mean((0, 2)).double().cpu()

    if repeats.length:
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_call):
            model(repeats.repeated, hidden=True)
    needles = make_needle_texts(model, inputs.corpus, inputs.seed)
    copied = 0
    for index, needle in enumerate(needles):
        target_of_row = {row: target for row, target in enumerate(needle.copy_source_positions) if target >= 0}
        hits_by_layer: dict[LayerAddress, Tensor] = {}

        def on_needle_call(
            call: AttentionCall, _first: int, target_of_row=target_of_row, hits_by_layer=hits_by_layer
        ) -> None:
            needle_weights = call.map_rows(list(target_of_row))  # (1, H, rows, S)
            targets = torch.tensor(list(target_of_row.values()), device=needle_weights.device)
            hits_by_layer[call.hook_point.address] = (
                (needle_weights[0].argmax(-1) == targets).double().cpu()
            )  # (H, rows)

        ids = torch.tensor([needle.ids], device=model.device)
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_needle_call):
            predicted = model(ids)[0].argmax(-1)  # (T,)
        correct = torch.tensor(
            [int(predicted[row]) == needle.ids[row + 1] for row in target_of_row], dtype=torch.float64
        )
        copied += int(correct.sum())
        for layer, hits in hits_by_layer.items():
            sums[layer][2] += (hits * correct).sum(-1)
        _report_progress(inputs, "needles", index + 1, len(needles))
    means = {
        layer: torch.stack((layer_sums[0], layer_sums[1], layer_sums[2] / max(1, copied))).amax(0)
        for layer, layer_sums in sums.items()
    }
    return _reduce_per_kv_head(model, means, torch.amax)


def _long_texts(model: Transformer, inputs: StreamRankingInput) -> list[Tensor]:
    """Texts long enough that something is forgotten: (1, T) each."""
    corpus = TokenizedCorpus.of(model, inputs.corpus, inputs.max_length)
    texts = [
        torch.tensor([sample.ids], device=model.device)
        for sample in corpus
        if len(sample.ids) > inputs.retained_tokens + 1
    ]
    if not texts:
        raise HeadwiseError(
            f"no text is longer than the {inputs.retained_tokens} tokens that are kept, so nothing is forgotten; "
            "give longer ones."
        )
    return texts


def _loss_after(model: Transformer, x: Tensor, ids: Tensor, retained_tokens: int) -> float:
    """The summed loss of the tokens that come after something was forgotten."""
    x = x if model.norm is None else model.norm(x)
    assert model.output is not None
    return model.output.cross_entropy(x[0, retained_tokens:-1], ids[0, retained_tokens + 1 :], total=1).item()


def _reduce_per_kv_head(
    model: Transformer, values: dict[LayerAddress, Tensor], reduce: Callable[[Tensor], Tensor]
) -> Scores:
    """Values of heads, (H,) for each layer, brought together over the heads that share keys."""
    scores: Scores = {}
    for head in model.spec.kv_head_addresses:
        layer = model.spec.attention_at(head.layer_address)
        scores[head] = float(reduce(values[head.layer_address][_query_heads_of(layer, head)]))
    return scores


def _query_heads_of(layer: AttentionSpec, head: Address) -> list[int]:
    """The heads that read a key head's keys, by where they stand."""
    kv_index = layer.kv_head_ids.index(head.head)
    return [i for i, kv_of in enumerate(layer.kv_of_head) if kv_of == kv_index]


def _report_progress(inputs: StreamRankingInput, label: str, done: int, total: int) -> None:
    if inputs.progress is not None:
        inputs.progress(label, done, total)
