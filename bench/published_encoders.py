"""Claims on published encoders: the 16 siblings of SCEPTR (T-cell receptors) and the BERTs of rxnfp (chemical reactions).

    pip install --no-deps --target FOLDER sceptr==1.2.0 rxnfp==0.1.0 olga==1.3.0 tidytcells==2.2.1
    PYTHONPATH=FOLDER:. python -m bench.published_encoders FOLDER --out docs/research/data/published-encoders.json

The rules are in docs/research/claims-plan.md. Weights are read as tensors only; the code of sceptr and rxnfp is not imported.
OLGA generates the receptors, and tidytcells has the first two loops of each V gene.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headwise as hw
from bench.atom_maps import FRESH_TEXTS, TEXTS, load_rxnfp
from bench.measure import machine
from headwise.experiments.engine.statistic import Statistic
from headwise.kernels.quantization import fake_quantize

SEED, RECEPTORS, BITS, NEAR, FAR, LOSS_INCREASE = 45, 512, 3, 3, 16, 0.01
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # token ids 3 to 22, after padding, mask and [CLS]
THRESHOLDS = {"local early": 0.05, "long range late": 0.05, "prunable fraction": 0.25, "spread over heads": 0.5}
CALL_SIZE = 128


@dataclass(frozen=True)
class Inputs:
    """Masked sequences: arguments of the model, targets of masked tokens (-100 elsewhere), ordinary tokens; all (N, T)."""

    call: tuple[Tensor, ...]
    targets: Tensor
    ordinary: Tensor

    def half(self, index: int) -> "Inputs":
        """Return every second sequence: half 0 ranks heads, half 1 judges them."""
        return Inputs(tuple(x[index::2] for x in self.call), self.targets[index::2], self.ordinary[index::2])


class Sceptr(nn.Module):
    """One sibling, rebuilt around its weights: tokens, positions and loops in, logits of the 20 residues out."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()

        def find(part: str) -> Tensor | None:
            return next((x for name, x in weights.items() if part in name), None)

        self.compartments, self.positions = find("compartment_embedding"), find("position_embedding_matrix")
        self.tokens, self.project = find("token_embedding."), find("_initial_projector.weight")
        if self.tokens is None:
            self.tokens = weights["_token_embedder._blosum_embedding._blosum_embeddings"].clone()
            self.tokens[:3] = weights["_token_embedder._blosum_embedding._special_token_embeddings.weight"]
        stack = {name.split("_self_attention_stack.")[-1]: x for name, x in weights.items() if "stack.layers." in name}
        layers = 1 + max(int(name.split(".")[1]) for name in stack)
        inner, width = stack["layers.0.linear1.weight"].shape
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, inner, batch_first=True), layers)
        self.stack.load_state_dict(stack)
        self.output = nn.Linear(width, len(RESIDUES))
        prefix = "_mlm_token_prediction_projector.projector."
        self.output.load_state_dict({name: weights[prefix + name] for name in ("weight", "bias")})
        self.eval()

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, compartments: Tensor) -> Tensor:
        """Compute logits: four tensors (N, T) → (N, T, 20)."""
        assert self.tokens is not None
        assert self.compartments is not None
        token, loop = self.tokens[tokens], self.compartments[compartments]
        if self.positions is not None:
            x = (token + self.positions[positions] + loop) * token.shape[-1] ** 0.5
        else:
            relative = torch.where(lengths > 1, (positions - 1) / (lengths - 1).clamp(min=1), 0.5) * (positions > 0)
            x = torch.cat((token, relative[..., None], loop), -1)
        if self.project is not None:
            x = x @ self.project.T
        return self.output(self.stack(x, src_key_padding_mask=tokens == 0))


def generate_receptors(folder: Path) -> list[tuple[str, ...]]:
    """Generate pairs of an alpha and a beta chain: six loops (CDR1A, CDR2A, CDR3A, CDR1B, CDR2B, CDR3B)."""
    import tidytcells  # pyright: ignore[reportMissingImports]

    chains = []
    with tempfile.TemporaryDirectory() as name:
        for chain in ("TRA", "TRB"):
            out, count = Path(name) / chain, str(2 * RECEPTORS)
            script = folder / "bin" / "olga-generate_sequences"
            call = [sys.executable, script, f"--human{chain}", "-n", count, f"--seed={SEED}", "-o", out]
            subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
            rows = []
            for line in out.read_text().splitlines():
                _, junction, gene, _ = line.split("\t")
                try:
                    parts = tidytcells.tr.get_aa_sequence(f"{gene}*01")
                    rows.append((parts["CDR1-IMGT"], parts["CDR2-IMGT"], junction))
                except (KeyError, ValueError):
                    continue  # genes without a functional first allele
            chains.append(rows[:RECEPTORS])
    return [alpha + beta for alpha, beta in zip(*chains, strict=True)]


def encode_receptors(receptors: Sequence[tuple[str, ...]], loops: Sequence[int]) -> Inputs:
    """Encode loops as tokens, positions, lengths and compartments, and mask one residue in six."""
    rows = []
    for receptor in receptors:
        row = [(2, 0, 0, 0)]
        for number, loop in enumerate((receptor[i] for i in loops), 1):
            row += [(3 + RESIDUES.index(x), i, len(loop), number) for i, x in enumerate(loop, 1)]
        rows.append(torch.tensor(row))
    tokens, positions, lengths, compartments = nn.utils.rnn.pad_sequence(rows, batch_first=True).unbind(-1)
    ordinary = tokens > 2
    return mask_tokens((tokens, positions, lengths, compartments), ordinary, mask_id=1, target_offset=3)


def encode_reactions(model: Any) -> Inputs:
    """Encode the 78 reactions of `bench.atom_maps`, and mask one token in six."""
    rows = [torch.tensor(model.tokenizer.encode(text)) for text in (*TEXTS, *FRESH_TEXTS)]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    columns = torch.arange(tokens.shape[1])
    ordinary = (columns > 0) & (columns < lengths - 1)  # without [CLS], [SEP] and padding
    mask_id = model.tokenizer.encode("[MASK]")[1]
    return mask_tokens((tokens, (columns < lengths).long()), ordinary, mask_id=mask_id, target_offset=0)


def mask_tokens(call: tuple[Tensor, ...], ordinary: Tensor, *, mask_id: int, target_offset: int) -> Inputs:
    """Replace one ordinary token in six by the mask."""
    tokens = call[0]
    draw = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(SEED))
    masked = ordinary & (draw < 1 / 6)
    targets = torch.where(masked, tokens - target_offset, -100)
    return Inputs((torch.where(masked, mask_id, tokens), *call[1:]), targets, ordinary)


@dataclass(frozen=True)
class Encoder:
    """A model to test: a call that returns logits (N, T, V), the model for `hw`, and access to the weights of its heads."""

    name: str
    model: Any
    compute_logits: Callable[..., Tensor]
    quantized_head: Callable[[str], Any]

    @torch.inference_mode()
    def log_probs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return log-probabilities at the masked tokens (M, V), and the index of the sequence of each (M,)."""
        parts = zip(*(x.split(CALL_SIZE) for x in inputs.call), strict=True)
        logits = torch.cat([self.compute_logits(*part) for part in parts])
        masked = inputs.targets >= 0
        return logits[masked].log_softmax(-1), masked.nonzero()[:, 0]

    def loss(self, inputs: Inputs) -> float:
        """Return the mean cross-entropy of the masked tokens in nats."""
        targets = inputs.targets[inputs.targets >= 0]
        return -self.log_probs(inputs)[0].gather(1, targets[:, None]).double().mean().item()


def loops_of(name: str) -> Sequence[int]:
    """Return the loops that a sibling reads: one chain, the third loops, or all six."""
    if "CDR3" in name:
        return (2, 5)
    return {"A_SCEPTR": (0, 1, 2), "B_SCEPTR": (3, 4, 5)}.get(name, range(6))


def load_sceptr(folder: Path, name: str) -> Encoder:
    """Load a sibling and attach to it."""
    path = folder / "sceptr" / "_model_saves" / name / "state_dict.pt"
    module = Sceptr(torch.load(path, weights_only=True, map_location="cpu"))

    @contextmanager
    def quantized_head(address: str) -> Iterator[None]:
        layer, head = map(int, address.split("."))
        attention: Any = module.stack.layers[layer].self_attn
        matrices = attention.in_proj_weight, attention.out_proj.weight
        before = [matrix.detach().clone() for matrix in matrices]
        width = matrices[1].shape[0]
        size = width // 8
        with torch.no_grad():
            for part in range(3):
                rows = slice(part * width + head * size, part * width + (head + 1) * size)
                matrices[0][rows] = fake_quantize(matrices[0][rows], BITS, min(32, width))
            columns = slice(head * size, (head + 1) * size)
            matrices[1][:, columns] = fake_quantize(matrices[1][:, columns], BITS, size)
        try:
            yield
        finally:
            with torch.no_grad():
                for matrix, original in zip(matrices, before, strict=True):
                    matrix.copy_(original)

    return Encoder(name, hw.attach(module), module, quantized_head)


def load_reaction_bert(folder: Path, name: str) -> Encoder:
    """Load a BERT of rxnfp."""
    model = load_rxnfp(folder / "rxnfp" / "models" / "transformers" / name)
    current = [model]

    @contextmanager
    def quantized_head(address: str) -> Iterator[None]:
        current[0] = hw.quantize(model, {address: BITS})
        try:
            yield
        finally:
            current[0] = model

    def compute_logits(tokens: Tensor, attention_mask: Tensor) -> Tensor:
        return current[0](tokens, attention_mask=attention_mask)

    return Encoder(name, model, compute_logits, quantized_head)


def distance_shares(encoder: Encoder, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of attention 1 to `NEAR` and at least `FAR` tokens away, (layers, N).

    Queries and keys are ordinary tokens, a token's attention to itself counts in the denominator only.
    """
    near, far = [], []
    for start in range(0, len(inputs.targets), CALL_SIZE):
        part = slice(start, start + CALL_SIZE)
        with torch.inference_mode(), hw.record(encoder.model) as recording:
            encoder.compute_logits(*(x[part] for x in inputs.call))
        layers: dict[int, list[Tensor]] = {}
        for head in encoder.model.heads:
            weights = recording[str(head.address)].map().double()
            ordinary = inputs.ordinary[part, : weights.shape[-1]].double()  # torch leaves out columns of padding
            columns = torch.arange(weights.shape[-1])
            distance = (columns[:, None] - columns).abs()
            weights = weights * ordinary[:, None] * ordinary[..., None]
            near_share, far_share = ((weights * keep).sum((1, 2)) / weights.sum((1, 2))
                for keep in ((distance > 0) & (distance <= NEAR), distance >= FAR))  # fmt: skip
            layers.setdefault(head.address.layer, []).append(torch.stack((near_share, far_share)))
        means = torch.stack([torch.stack(layers[layer]).mean(0) for layer in sorted(layers)])  # (L, 2, n)
        near.append(means[:, 0].numpy())
        far.append(means[:, 1].numpy())
    return np.concatenate(near, 1), np.concatenate(far, 1)


def third_difference(shares: np.ndarray) -> np.ndarray:
    """Return the mean of the first third of the layers minus that of the last, per sequence."""
    thirds = np.array_split(shares, 3)
    return thirds[0].mean(0) - thirds[-1].mean(0)


def prunable_fraction(encoder: Encoder, order: Sequence[str], judged: Inputs) -> float:
    """Return the largest fraction of heads for which it and all smaller ones raise the loss by less than 1%."""
    full = encoder.loss(judged)
    for count in range(1, len(order) + 1):
        with encoder.model.heads.select(order[:count]).silenced():
            if encoder.loss(judged) >= (1 + LOSS_INCREASE) * full:
                return (count - 1) / len(order)
    return 1.0


def quantization_spread(encoder: Encoder, addresses: Sequence[str], inputs: Inputs) -> float:
    """Return the standard deviation over heads of the drift at 3 bits, divided by its mean, from two halves of the inputs."""
    drifts = []
    before, rows = encoder.log_probs(inputs)
    for address in addresses:
        with encoder.quantized_head(address):
            after = encoder.log_probs(inputs)[0]
        drift = (before.exp() * (before - after)).double().sum(-1)
        drifts.append([drift[rows % 2 == half].mean().item() for half in (0, 1)])
    first, second = np.array(drifts).T
    return float(np.sqrt(max(np.cov(first, second)[0, 1], 0) / (first.mean() * second.mean())))


def measure_encoder(encoder: Encoder, inputs: Inputs, *, has_output: bool = True) -> dict[str, Any]:
    """Return all quantities of one model."""
    addresses = [str(head.address) for head in encoder.model.heads]
    near, far = distance_shares(encoder, inputs)
    local, distant = third_difference(near), -third_difference(far)
    row: dict[str, Any] = {
        "heads": len(addresses), "local early": local.mean(), "long range late": distant.mean(),
        "local early, interval": bootstrap_interval(local), "long range late, interval": bootstrap_interval(distant),
    }  # fmt: skip
    if has_output:
        ranked, judged = inputs.half(0), inputs.half(1)
        log_probs = encoder.log_probs(inputs)[0]
        targets = inputs.targets[inputs.targets >= 0]
        row["loss"], row["accuracy"] = encoder.loss(inputs), (log_probs.argmax(-1) == targets).double().mean().item()
        row["accuracy of the most frequent token"] = targets.bincount().max().item() / len(targets)
        costs = {}
        for address in addresses:
            with encoder.model.heads[address].silenced():
                costs[address] = encoder.loss(ranked)
        row["prunable fraction"] = prunable_fraction(encoder, sorted(addresses, key=costs.__getitem__), judged)
        random = np.random.default_rng(SEED)
        orders = [list(random.permutation(addresses)) for _ in range(8)]
        row["prunable fraction, random order"] = float(
            np.mean([prunable_fraction(encoder, order, judged) for order in orders])
        )
        row["spread over heads"] = quantization_spread(encoder, addresses, inputs)
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}


def bootstrap_interval(values: np.ndarray) -> list[float]:
    """Return the 95% bootstrap interval of a mean over sequences."""
    draws = np.random.default_rng(SEED).integers(len(values), size=(2000, len(values)))
    return [round(float(x), 6) for x in np.quantile(values[draws].mean(1), (0.025, 0.975))]


def judge_siblings(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Apply the rule to the siblings: 95% Student intervals over models against the thresholds."""
    verdicts = {}
    for name, threshold in THRESHOLDS.items():
        is_share = name == "prunable fraction"
        values = [row[name] for row in rows.values()]
        statistic = Statistic.proportion_of(values) if is_share else Statistic.mean_of(values)
        holds, fails = statistic.is_interval_above(threshold), statistic.is_interval_below(threshold)
        verdicts[name] = {
            "mean": statistic.mean, "low": statistic.low, "high": statistic.high, "threshold": threshold,
            "verdict": "holds" if holds else "does not hold" if fails else "undecided",
        }  # fmt: skip
    return verdicts


def main() -> int:
    """Measure all models, print a table and the verdicts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    receptors = generate_receptors(options.folder)
    siblings, reactions = {}, {}
    for path in sorted((options.folder / "sceptr" / "_model_saves").glob("*/state_dict.pt")):
        name = path.parent.name
        siblings[name] = measure_encoder(load_sceptr(options.folder, name), encode_receptors(receptors, loops_of(name)))
        print(name, siblings[name], flush=True)
    for name in ("bert_pretrained", "bert_ft", "bert_ft_10k_25s"):
        encoder = load_reaction_bert(options.folder, name)
        has_output = name == "bert_pretrained"  # the fine-tuned models have no output over tokens
        reactions[name] = measure_encoder(encoder, encode_reactions(encoder.model), has_output=has_output)
        print(name, reactions[name], flush=True)
    verdicts = judge_siblings(siblings)
    print(json.dumps(verdicts, indent=1))
    result = {"machine": machine(), "siblings": siblings, "reactions": reactions, "verdicts": verdicts}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
