"""`HarnessModel`: adapter that lets the lm-evaluation-harness run any model in memory."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError, MissingDependencyError, UnsupportedModelError
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol, eval_mode
from headwise.model.protocols import check_model
from headwise.progress import Progress

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "lm_eval":
        raise
    raise MissingDependencyError(
        "evaluation needs the lm-evaluation-harness. Run: pip install 'headwise[evaluate]'"
    ) from None

MAX_NEW_TOKENS = 256  # tokens generated per request if a task sets no limit
BATCH_TOKENS = 4096
LOGIT_ROWS = 512  # positions whose logits are computed at once
# A context and a continuation, both not empty. The harness also passes the texts, which are the key of its cache.
TokenRequest = tuple[Any, list[int], list[int]]


class HarnessModel(TemplateLM):
    """Any decoder as a model of the lm-evaluation-harness: native, attached, silenced, pruned, quantized or streaming.

    `lm_eval.simple_evaluate(HarnessModel(model), tasks=[…])` runs tasks of the harness. Open contexts such as
    `model.heads["5.1"].silenced()` and the cache policies of a streaming model apply.

    Args:
        model: A decoder with an output layer and a tokenizer.
        batch_tokens: Maximum number of tokens per batch, padding included.
        max_length: Maximum number of tokens that the model reads. None takes the context of the model.
        progress: Called with stage, done and total.

    Raises:
        UnsupportedModelError: If the model is not a decoder with an output layer and a tokenizer.
    """

    def __init__(
        self,
        model: ModelProtocol,
        *,
        batch_tokens: int = BATCH_TOKENS,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        if model.spec.kind != "decoder" or model.output is None:
            raise UnsupportedModelError(
                f"model: evaluation needs a decoder with an output layer. Got kind {model.spec.kind!r} with output "
                f"{model.spec.output!r}."
            )
        if batch_tokens < 1 or (max_length is not None and max_length < 1):
            raise ArgumentError(f"batch_tokens, max_length: must be 1 or more. Got {batch_tokens} and {max_length}.")
        self.model = model
        self.tokenizer: Any = tokenizer_of(model)
        self.batch_tokens, self.progress = batch_tokens, progress
        self.max_length = max_length or model.spec.context
        if self.eot_token_id is None:
            raise UnsupportedModelError(
                "model: its tokenizer has neither an end token nor a beginning token, one of which is the context of the "
                "first token. Set tokenizer.special['eos']."
            )

    @property
    def device(self) -> Any:
        """Device of the model."""
        return self.model.device

    @property
    def eot_token_id(self) -> Any:
        """Id of the end token."""
        special = self.tokenizer.special
        return next((special[name] for name in ("eos", "sep", "bos") if special[name] is not None), None)

    @property
    def prefix_token_id(self) -> Any:
        """Id of the token that is the context of a text without context: the beginning token, else the end token."""
        bos = self.tokenizer.special["bos"]
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in caches of the harness."""
        return "headwise"

    def tok_encode(self, string: str, *args: Any, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text. By default with special tokens, unless the text begins with the BOS token."""
        if add_special_tokens is None:
            prefix = self.tok_decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def tok_decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(tokens, keep_special_tokens=not skip_special_tokens)

    def loglikelihood(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation given its context, and whether it is the greedy continuation."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, *args: Any, **kwargs: Any) -> list[float]:
        """Return the log-likelihood of each text. A text longer than the context is split into disjoint windows."""
        windows: list[TokenRequest] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            texts = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += texts
            counts.append(len(texts))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: list[TokenRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """Score token requests. Requests with the same input share a row of a batch."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ArgumentError(
                    f"tasks: a continuation has {len(continuation)} tokens, more than the model reads at once "
                    f"({self.max_length}). Use a task with shorter continuations."
                )
            row = (*context, *continuation)[-(self.max_length + 1) :][:-1]
            rows.setdefault(row, []).append(index)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with eval_mode(self.model), torch.no_grad():
            done = 0
            for batch in self._batches(list(rows)):
                hidden = self._hidden_states(batch)  # (B, T, D)
                for states, row in zip(hidden, batch, strict=True):
                    for index in rows[row]:
                        results[index] = self._score(states, len(row), requests[index][2])
                        done += 1
                if self.progress is not None:
                    self.progress("evaluation", done, len(requests))
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _batches(self, rows: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Group rows of similar length, longest first, so that memory is largest in the first batch."""
        batch: list[tuple[int, ...]] = []
        for row in sorted(rows, key=lambda ids: (-len(ids), ids)):
            if batch and (len(batch) + 1) * len(batch[0]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _hidden_states(self, batch: list[tuple[int, ...]]) -> Tensor:
        """Run the model on rows padded on the right: (B, T, D)."""
        width = len(batch[0])
        ids = torch.zeros(len(batch), width, dtype=torch.long, device="cpu")
        mask = torch.zeros(len(batch), width, dtype=torch.bool, device="cpu")
        for i, row in enumerate(batch):
            ids[i, : len(row)] = torch.tensor(row, device="cpu")
            mask[i, : len(row)] = True
        padding = {} if bool(mask.all()) else {"attention_mask": mask.to(self.device)}
        return self.model(ids.to(self.device), hidden=True, **padding)

    def _score(self, states: Tensor, length: int, continuation: list[int]) -> tuple[float, bool]:
        """Score a continuation that ends one token after a row of `length` tokens."""
        assert self.model.output is not None
        total, is_greedy = 0.0, True
        start = length - len(continuation)
        for first in range(0, len(continuation), LOGIT_ROWS):
            targets = torch.tensor(continuation[first : first + LOGIT_ROWS], device=self.device)
            positions = slice(start + first, start + first + len(targets))
            log_probs = at_least_float32(self.model.output(states[None, positions])[0]).log_softmax(-1)  # (n, V)
            total += float(log_probs.gather(1, targets[:, None]).sum())
            is_greedy = is_greedy and bool((log_probs.argmax(-1) == targets).all())
        return total, is_greedy

    def generate_until(self, requests: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Continue each context until a stop sequence, the end token or the maximum number of tokens."""
        texts = []
        for done, request in enumerate(requests, 1):
            context, options = request.args
            texts.append(self._generate(context, dict(options)))
            self.cache_hook.add_partial("generate_until", (context, options), texts[-1])
            if self.progress is not None:
                self.progress("generation", done, len(requests))
        return texts

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else list(until)) if stop]
        limits = [options[name] for name in ("max_gen_toks", "max_new_tokens") if options.get(name) is not None]
        max_new_tokens = int(limits[0]) if limits else MAX_NEW_TOKENS
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ArgumentError(
                f"tasks: a request generates up to {max_new_tokens} tokens, but the model reads only {self.max_length}. Use "
                f"a task that generates fewer tokens."
            )
        prompt = torch.tensor([self.tok_encode(context)[-room:]], device=self.device)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        ids: list[int] = []
        with (
            eval_mode(self.model),
            closing(
                self.model.stream(prompt, max_new_tokens, temperature=temperature)  # pyright: ignore[reportArgumentType]
            ) as steps,
        ):
            for step in steps:
                token = int(step[0])
                if token == self.eot_token_id:
                    break
                ids.append(token)
                if any(stop in self.tok_decode(ids) for stop in stops):
                    break
        text = self.tok_decode(ids)
        return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
