"""The handle of a transformers model: all that is asked of a model of ours, over one that is not."""

import copy
import sys
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from headwise.attached.attachment import Attachment, ModelState
from headwise.attached.families import norm_before
from headwise.attached.forward import OutputHead, hidden_states, own_output, takes_ids
from headwise.attached.generate import TOKENS, read_prompt, speak, speak_whole
from headwise.attached.image_input import Pictures
from headwise.attached.infer_spec import describe, has_output, start_of
from headwise.attached.layer import Layer
from headwise.attached.layer_probe import check_rebuilt, try_layers
from headwise.attached.offload import check_in_memory, is_offloaded, load_copy
from headwise.attached.prune_in_place import fold_in
from headwise.attached.residual_stream import find_wiring
from headwise.attached.resumable_forward import make_walk, why_whole
from headwise.attached.save_load import PLANS, is_cut, keep_note, make_layers, read, write
from headwise.attached.train_mode import Modes
from headwise.attached.validate import check_theirs, own_config
from headwise.attached.verify_prune import cut_proved
from headwise.errors import HeadwiseError
from headwise.heads import Heads, Site
from headwise.heads.head import Gates, Pattern, resolve_gates
from headwise.io.images import Pixels
from headwise.model import Walk, Wiring, quiet
from headwise.model.protocols import AnyOutput, Norms
from headwise.model.prune import heads_to_cut
from headwise.model.resumable_forward import Pick
from headwise.spec import ModelSpec, SiteAddress
from headwise.spec.cache_policy import Treatments
from headwise.text import Tokenizer


class Attached(Modes):
    """A transformers model with its heads: `.heads`, `.sites()`, and the calls that looking and changing make."""

    def __init__(self, model: Any, layers: list[Layer], tokenizer: Any, pixels: Pixels | None = None) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.pixels = pixels  # how a picture becomes what the model reads
        self.family: str | None = getattr(model.config, "model_type", None)
        self._entered = 0  # contexts of this handle that are open
        self._spec: ModelSpec | None = None
        self._wiring: Wiring | None = None
        self._pictures: Pictures | None = None
        self._whole_passes: str | None = None  # why ablated copies cost them; None: not tried yet
        self._said = False  # what saving a cut model means for others
        self._attachment = Attachment(model, layers, self)

    @classmethod
    def attach_layers(
        cls, model: Any, layers: list[Layer], tokenizer: Any, pixels: Pixels | None = None, *, tried: bool = False
    ) -> Self:
        """Attach to a model and, unless its layers were `tried` before, test on a few tokens what holds for its heads.

        After any error, Ctrl-C included, the model has the hooks and modes that it had before.
        """
        before = ModelState(model)
        try:
            handle = cls(model, layers, tokenizer, pixels)
            return handle if tried else handle._try_layers()
        except BaseException:
            before.restore()
            raise

    def _try_layers(self) -> Self:
        """Test by one call on a few tokens what was derived about heads, and withhold the rest."""
        self._attachment.unwatch()
        for part, layers in self._parts():
            try_layers(part, layers)
        self._attachment.watch()
        check_rebuilt(self._layers)
        return self

    @property
    def attached(self) -> bool:
        """Whether the model is attached through this handle."""
        return self._attachment.is_active

    @property
    def _layers(self) -> list[Layer]:
        return self._attachment.layers

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        gates: Gates | None = None,
        hidden: bool = False,
        **theirs: Any,
    ) -> Any:
        """Token ids (B, T) → logits (B, T, V), or hidden states (B, T, D), as our own models do it.

        `padding` (B, T) is True at real tokens, left or right; `source` is what an encoder-decoder reads. Whatever else is
        said (`labels`, `attention_mask`, …) the model is told, and its own output comes back.
        """
        self._check_attached()
        if theirs:
            with self._gated(gates):
                return own_output(self.model, ids, padding, source, source_padding, hidden, theirs)
        ids = takes_ids(self.model, ids, padding)
        states = hidden or not has_output(self.model)
        with self._gated(gates):
            return hidden_states(self.model, self.spec, ids, padding, source, source_padding, states)

    # Heads.

    @property
    def heads(self) -> Heads:
        """Every head, by address: theirs.heads["5.1"]."""
        return Heads(self._layers, owner=self)

    def sites(self) -> list[Site]:
        """Every place where attention happens, in the order data walks through them."""
        return [layer.site for layer in self._layers]

    all_sites, is_shared = sites, False  # no other process holds heads of it

    def attention_layers(self) -> list[Layer]:
        """The attention layers, encoder first."""
        return list(self._layers)

    def cut(self, heads: Pattern, folded: Mapping[SiteAddress, Tensor] | None = None) -> Self:
        """Cut heads out of the model, in place: its projections become smaller. `folded` is added to output biases."""
        self._check_attached()
        check_in_memory(self.model)
        gone = heads_to_cut(self.spec, heads)
        if gone:
            for part, layers in self._parts():
                if here := [address for layer in layers for address in layer.site.addresses if address in gone]:
                    cut_proved(part, layers, here, self._attachment.replace, self._attachment.unmark)
            keep_note(self.model)
        fold_in(self._layers, folded or {})
        self._spec = self._wiring = self._whole_passes = self._pictures = None
        return self

    def _parts(self) -> list[tuple[Any, list[Layer]]]:
        """The model with its layers; of several towers each one by itself, as it can be called alone."""
        held: dict[str, list[Layer]] = {}
        for layer in self._layers:
            held.setdefault(layer.found.part, []).append(layer)
        return [(self.model.get_submodule(path), layers) for path, layers in held.items()]

    def without(
        self, heads: Pattern, folded: Mapping[SiteAddress, Tensor] | None = None, cache: Treatments | None = None
    ) -> Self:
        """A smaller model without these heads, sharing no memory with this one, which stays as it is."""
        if cache:
            self.check_own("caches by head are for headwise's own models")
        copied = self.in_memory() if is_offloaded(self.model) else copy.deepcopy(self)
        return copied.cut(heads, folded)

    def in_memory(self) -> Self:
        """This handle, or, if weights are offloaded, that of a copy with all weights in CPU memory."""
        self._check_attached()
        return self._alike(load_copy(self.model)) if is_offloaded(self.model) else self

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans (`hw.Plan`) by which heads were cut, in their order; heads cut by hand are in none."""
        return self.model.__dict__.get(PLANS, ())

    @plans.setter
    def plans(self, plans: tuple[Any, ...]) -> None:
        self.model.__dict__[PLANS] = plans

    # What it is.

    @property
    def spec(self) -> ModelSpec:
        """The model as far as those who look at it ask."""
        if self._spec is None:
            self._spec = describe(self.model, self._layers)
        return self._spec

    @property
    def output(self) -> AnyOutput | None:
        """From final hidden states to logits, as the model does it; None where it gives no logits of a vocabulary."""
        return OutputHead(self.model) if has_output(self.model) else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def pictures(self) -> Pictures | None:
        """How it reads pictures; None where it reads something else."""
        if self._pictures is None and getattr(self.model, "main_input_name", "") == "pixel_values":
            self._pictures = Pictures(self.model, self._layers, self.pixels)
        return self._pictures

    @property
    def start(self) -> int:
        """The token before what an encoder-decoder writes, as its configuration has it."""
        return start_of(self.model)

    def norms(self) -> Norms | None:
        """For each layer the norm its heads read through, for q, and for k and v; None where that is not known."""
        found = {str(layer.site.address): norm_before(layer.found) for layer in self._layers if layer.spec.head_ids}
        if not all(known for known, _ in found.values()):
            return None
        return {site: (norm, norm) for site, (_, norm) in found.items()}

    def wiring(self) -> Wiring:
        """What adds to the stream of a decoder and what reads it, found out once on a few tokens; refused if not a sum."""
        self._check_attached()
        if self._wiring is None:
            if self.spec.kind != "decoder" or self.spec.output != "lm":
                raise HeadwiseError(
                    f"logits are followed back in decoders with a language-model output; {type(self.model).__name__} is of "
                    f"kind {self.spec.kind}, output {self.spec.output}."
                )
            self._wiring = find_wiring(self.model, self._layers)
        return self._wiring

    def walk(
        self,
        ids: Tensor,
        wanted: Collection[SiteAddress],
        pick: Pick,
        *,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
    ) -> Walk:
        """A clean pass that stops at the layers wanted; from there copies go on, and blocks before it do not run again."""
        self._check_attached()
        given = (takes_ids(self.model, ids, padding), padding, source, source_padding)
        return make_walk(self, self.model, self._layers, wanted, pick, *given)

    def whole_passes(self) -> str:
        """Why such copies cost whole passes, found out once on a few tokens; empty where they do not."""
        if self._whole_passes is None:
            self._whole_passes = why_whole(self, self.model, self._layers)
        return self._whole_passes

    def untrained(self, seed: int = 0) -> "Attached":
        """The same model with random weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = type(self.model)(own_config(self.model)).to(self.device).eval()
        made = self._alike(model)
        gone = set(made.heads.addresses) - set(self.heads.addresses)
        return made.cut(tuple(gone)) if gone else made

    # Writing: texts, and folders.

    def generate(
        self,
        prompt: Any = None,
        tokens: int | None = None,
        *,
        gates: Gates | None = None,
        seed: int | None = None,
        **how: Any,
    ) -> Any:
        """What is given, gone on by at most so many tokens (64), in its own kind: a text, a list of ids, a tensor (B, T).

        Of a text it takes what `stream` takes. Of anything else it is the model's own `generate`, with all its options.
        Nothing is dropped out.
        """
        self._check_attached()
        if isinstance(prompt, str):
            tokens = TOKENS if tokens is None else tokens
            ids = read_prompt(self.model, self.tokenizer, prompt)  # (1, T)
            made = [int(step) for step in self.stream(ids, tokens, gates=gates, seed=seed, **how)]
            start = [] if self.spec.kind == "encoder-decoder" else ids[0].tolist()
            return self.tokenizer.decode([*start, *made])
        with self._gated(gates), quiet(self.model):
            return speak_whole(self.model, prompt, tokens, seed, how)

    def stream(
        self, prompt: str | Tensor, tokens: int = TOKENS, *, gates: Gates | None = None, **how: Any
    ) -> Generator[Tensor, None, None]:
        """The tokens that follow a text, (1,) each, or ids (B, T), (B,) each, as they are made.

        `temperature`, `top_k`, `top_p`, `seed` say how they are drawn. Between two tokens the model is as it was.
        """
        self._check_attached()
        ids = read_prompt(self.model, self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        return self._stream(speak(self.model, ids, tokens, **how), gates)

    def _stream(self, steps: Generator[Tensor, None, None], gates: Gates | None) -> Generator[Tensor, None, None]:
        with closing(steps):
            while True:
                with self._gated(gates), quiet(self.model):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def save_pretrained(self, folder: str | Path, *, whole: bool = False) -> Path:
        """Write the model, whole or not at all; `hw.load(folder)` brings it back, cut or not.

        With `whole` a cut model has its first shape again, zeros in place of heads, for plain `from_pretrained`. Without,
        plain transformers refuses a cut one: that is said on standard error, once.
        """
        written = write(self.model, self._layers, (self.tokenizer, self.pixels), folder, whole)
        if is_cut(self._layers) and not whole and not self._said:
            self._said = True
            print(
                f"heads were cut from this {type(self.model).__name__}: hw.load(folder) loads what is written, plain "
                f"transformers does not; hw.export(model, folder) writes a folder for both, zeros in place of heads.",
                file=sys.stderr,
            )
        return written

    save = save_pretrained

    @classmethod
    def reopen(
        cls, folder: str | Path, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
    ) -> Self:
        """A folder that transformers reads, cut or not, as an attached model with its tokenizer."""
        folder = Path(folder)
        model, layers = read(folder, dtype, device)
        check_theirs(model)
        there = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        return cls.attach_layers(model, layers, Tokenizer.load(folder) if there else None, Pixels.read(folder))

    def check_own(self, what: str) -> None:
        """Refuse what only models of our own can do."""
        raise HeadwiseError(
            f"{what}; this is an attached {type(self.model).__name__}. Load it with hw.load(…), if its family is mapped here."
        )

    def restore(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over weights by the model's own names, as `save` writes them; the names that are not known."""
        return self.model.load_state_dict(state, strict=False).unexpected_keys

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model for plain transformers, zeros in place of heads that were cut; it stays the family it is."""
        if family is not None and family != self.family:
            raise HeadwiseError(f"an attached model stays what it is, {self.family}; leave the family away.")
        return write(self.model, self._layers, (self.tokenizer, self.pixels), folder, whole=True, exported=True)

    # Leaving.

    def detach(self) -> Any:
        """Leave the model exactly as it was, and give it back.

        Where cutting has left groups of different sizes, every head gets its own keys, as plain transformers needs it.
        """
        self._check_attached()
        self._attachment.undo()
        return self.model

    def __enter__(self) -> Self:
        self._check_attached()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self.attached and not self._entered:  # the outermost of several contexts detaches
            self.detach()

    def _alike(self, model: Any) -> Self:
        """A handle of another model that is built alike."""
        layers = make_layers(model)
        known = {layer.site.address: layer for layer in self._layers}
        for layer in layers:
            if layer.site.address in known:
                layer.learned_of(known[layer.site.address])
        return type(self).attach_layers(model, layers, self.tokenizer, self.pixels, tried=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attached":
        """A copy of the model, attached, with sites of its own."""
        self._check_attached()
        return self._alike(copy.deepcopy(self.model, memo))

    def _check_attached(self) -> None:
        if not self.attached:
            raise HeadwiseError("this handle was detached already; attach the model again: hw.attach(model).")

    @contextmanager
    def _gated(self, gates: Gates | None) -> Iterator[None]:
        """While open heads are scaled, by pattern or by layer: (H,) or (B, H) each."""
        amounts = resolve_gates(self._layers, gates)
        with ExitStack() as stack:
            for site in self.sites():
                if site.address in amounts:
                    stack.enter_context(site.scaled(amounts[site.address]))
            yield
