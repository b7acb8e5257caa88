"""Effects of edges: equal to patching one path at a time, additive in linear models, exact on an induction circuit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.circuits import measure_edge_effects as module
from headwise.analysis.circuits.circuit_task import PromptEncoder
from headwise.analysis.circuits.measure_edge_effects import circuit_edges, measure_edge_effects
from headwise.analysis.circuits.task_templates import WORDS
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.text.build_tokenizers import word_tokenizer
from tests.analysis import constructed_heads
from tests.analysis.test_circuits import word_pairs
from tests.analysis.test_path_patching import IDS, OTHER, PARALLEL, SPEC, random_model

SENDERS = ["embedding", "0.1", "0.kv1", "mlp.0", "1.4", "mlp.1", "2.2"]
RECEIVERS = ["0.3.q", "1.2.k", "2.kv1.k", "2.5.v", "1.1", "mlp.1", "mlp.2", "logits"]


def logit_difference(logits: Tensor) -> Tensor:
    return logits[:, 3] - logits[:, 8]


@pytest.mark.parametrize("spec", [SPEC, PARALLEL], ids=["pre-norm", "parallel"])
@pytest.mark.parametrize("max_tokens", [1, 4096])
@torch.no_grad()
def test_edge_effects_equal_paths_patched_in_turn(
    spec: hw.ModelSpec, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", max_tokens)
    model = random_model(spec)
    table = measure_edge_effects(model, (IDS, OTHER), SENDERS, RECEIVERS, logit_difference)
    clean = logit_difference(model(IDS)[:, -1])
    torch.testing.assert_close(table.clean, clean, rtol=1e-12, atol=1e-12)
    assert len(table.edges) == 8 + 7 + 7 + 7 + 5 + 4 + 2
    for edge, effect in zip(table.edges, table.effects, strict=True):
        with hw.patched(model, path=edge, other=OTHER):
            expected = clean - logit_difference(model(IDS)[:, -1])
        torch.testing.assert_close(effect, expected, rtol=1e-9, atol=1e-12, msg=str(edge))


class Identity(nn.Module):
    """A norm without effect."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def linear_model() -> Transformer:
    """Make a model that is linear in the residual stream: uniform attention, identity norms and linear MLPs."""
    model = random_model(SPEC)
    with torch.no_grad():
        for head in model.heads:
            head.W_Q.zero_()
            head.W_K.zero_()
            for bias in (head.b_Q, head.b_K):
                if bias is not None:
                    bias.zero_()
    for block in model.blocks:
        block.norm_attention, block.norm_mlp = Identity(), Identity()
        block.mlp.activation = lambda x: x  # pyright: ignore
    model.norm = Identity()
    return model


@pytest.mark.parametrize("sender", ["embedding", "0.1", "mlp.0", "1.4", "2.3"])
@torch.no_grad()
def test_edge_effects_sum_to_node_effect_for_linear_paths(sender: str) -> None:
    """Each path from a sender begins with exactly one of its edges. So the edges of a linear model add up to the node."""
    model = linear_model()
    receivers = [f"{layer}.{head}.v" for layer in range(3) for head in range(6)]
    receivers += ["mlp.0", "mlp.1", "mlp.2", "logits"]
    table = measure_edge_effects(model, (IDS, OTHER), [sender], receivers, logit_difference)
    clean = logit_difference(model(IDS)[:, -1])
    if sender == "embedding":
        changed = model(OTHER)
    elif sender == "mlp.0":
        outputs: list[Tensor] = []
        mlp: nn.Module = model.get_submodule("blocks.0.mlp")
        with_hook = mlp.register_forward_hook(lambda *call: outputs.append(call[2]))
        model(OTHER)
        with_hook.remove()
        with_hook = mlp.register_forward_hook(lambda *call: outputs[0])
        changed = model(IDS)
        with_hook.remove()
    else:
        with hw.patched(model, sender, OTHER):
            changed = model(IDS)
    node_effect = clean - logit_difference(changed[:, -1])
    torch.testing.assert_close(table.effects.sum(0), node_effect, rtol=1e-10, atol=1e-12)
    assert node_effect.abs().min() > 1e-6


@torch.no_grad()
def test_edge_effects_of_induction_circuit_find_exact_edges() -> None:
    """The previous-token head 0.0 writes for the keys of induction head 1.0, and only the latter writes for the logits."""
    model = constructed_heads.decoder().double()
    model.norm = Identity()  # a norm would let every head act on the logits through the scale
    generator = torch.Generator().manual_seed(0)
    fillers = torch.tensor([constructed_heads.WORDS.index(word) for word in constructed_heads.FILLERS[1::2]])
    words = torch.stack([fillers[torch.randperm(len(fillers), generator=generator)[:8]] for _ in range(5)])
    clean = torch.cat((words[:, :6], words[:, :4]), 1)  # the next token is words[:, 4]
    other = clean.clone()
    other[:, 3] = words[:, 6]  # another token before the answer
    heads = [f"{layer}.{head}" for layer in range(2) for head in range(6)]
    inputs = [f"1.{head}.{projection}" for head in range(6) for projection in "qkv"]
    answers = words[:, 4:5]

    def metric(logits: Tensor) -> Tensor:
        return logits.gather(1, answers)[:, 0] - logits.gather(1, words[:, 6:7])[:, 0]

    table = measure_edge_effects(model, (clean, other), heads, [*inputs, "logits"], metric)
    found_edges = {edge for edge, effect in table.means.items() if abs(effect) > 0.05 * float(table.clean.mean())}
    assert found_edges == {("0.0", "1.0.k"), ("1.0", "logits")}
    assert len(table.edges) == 6 * 18 + 12
    assert min(table.means[edge] for edge in found_edges) > 0.9 * float(table.clean.mean())


@torch.no_grad()
def test_edge_table_rows_are_sorted() -> None:
    table = measure_edge_effects(random_model(SPEC), (IDS, OTHER), SENDERS, RECEIVERS, logit_difference)
    rows = table.rows()
    assert [abs(row.effect.value) for row in rows] == sorted((abs(x) for x in table.means.values()), reverse=True)
    assert {(row.sender, row.receiver) for row in rows} == set(table.edges)


def test_edge_effects_invalid_arguments_raise() -> None:
    model = random_model(SPEC)
    with pytest.raises(HeadwiseError, match="must have the same shape"):
        measure_edge_effects(model, (IDS, OTHER[:, :3]), ["0.1"], ["logits"], logit_difference)
    with pytest.raises(HeadwiseError, match=r"metric: must return a tensor of shape \(2,\)"):
        measure_edge_effects(model, (IDS, OTHER), ["0.1"], ["logits"], lambda logits: logits)
    with pytest.raises(HeadwiseError, match="logits does not write"):
        measure_edge_effects(model, (IDS, OTHER), ["logits"], ["logits"], logit_difference)
    with pytest.raises(HeadwiseError, match="needs a decoder"):
        measure_edge_effects(
            Transformer(replace(SPEC, kind="encoder", output="none")),
            (IDS, OTHER),
            ["0.1"],
            ["2.1.k"],
            logit_difference,
        )


@torch.no_grad()
def test_circuit_edges_of_grouped_heads_equal_paths() -> None:
    """Query heads read with q, KV heads with k and v. The batch has prompts of two lengths."""
    model = random_model(replace(SPEC, vocab=len(WORDS) + 1))
    encoder = PromptEncoder(word_tokenizer(["<unk>", *WORDS]))
    pairs = word_pairs(4)
    pairs += [
        replace(pair, clean=f"{WORDS[0]} {pair.clean}", corrupted=f"{WORDS[0]} {pair.corrupted}") for pair in pairs
    ]
    prompts = [encoder.encode(pair) for pair in pairs]
    table = circuit_edges(model, ["embedding", "0.1", "0.kv0", "1.4", "2.kv1", "mlp.1"], prompts)
    assert {receiver for _, receiver in table.edges} == {
        "0.1.q", "0.kv0.k", "0.kv0.v", "1.4.q", "2.kv1.k", "2.kv1.v", "mlp.1", "logits",
    }  # fmt: skip
    for edge in (("0.kv0", "2.kv1.k"), ("1.4", "mlp.1"), ("embedding", "1.4.q")):
        effects = table.effects[table.edges.index(edge)]
        for prompt, effect in zip(prompts, effects, strict=True):
            ids, other = torch.tensor([prompt.clean_rows[0]]), torch.tensor([prompt.corrupted_rows[0]])
            right, wrong = prompt.answers[0][0], prompt.answers[1][0]
            clean = model(ids)[0, -1][right] - model(ids)[0, -1][wrong]
            with hw.patched(model, path=edge, other=other):
                changed = model(ids)[0, -1][right] - model(ids)[0, -1][wrong]
            assert float(effect) == pytest.approx(float(clean - changed), abs=1e-9)
