"""Whether a model from which heads were cut computes what it did with them silenced: tried on a few tokens, undone if not."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.dummy_inputs import samples
from headwise.attached.layer import Layer
from headwise.attached.prune_in_place import check_cut, cut_layers, even_out
from headwise.attached.pruned_head_hooks import stand_again, standing
from headwise.errors import HeadwiseError
from headwise.model import quiet

Numbers = tuple[list[Tensor], dict[str, list[Tensor]]]  # what the model gives, and what W_O of layers does, by path


def cut_proved(
    model: Any,
    layers: list[Layer],
    gone: Iterable[Any],
    restart: Callable[[list[Layer]], None],
    unmark: Callable[[], None],
) -> None:
    """Cut heads, and see that the model is what it was with them silenced, attached and as plain transformers would run it.

    `restart` looks at other layers from then on, `unmark` at none. Where the cut is refused, all is as it was.
    """
    gone = list(gone)
    check_cut(layers, gone)
    proof = Proof(model, layers, gone)
    with undone(layers, gone, restart):
        cut = cut_layers(layers, gone)
        restart(cut)
        proof.check(cut)
        heads = [address for layer in cut for address in layer.site.addresses if layer.uneven]
        with suppress(Undo), undone(cut, heads, restart):
            unmark()
            proof.check([even_out(layer) if layer.uneven and layer.spec.head_ids else layer for layer in cut])
            raise Undo


class Undo(Exception):  # noqa: N818 (a wish, not an error)
    """What was done is to be undone."""


class Proof:
    """What a model gives with some heads silenced, to hold against what it gives without them."""

    def __init__(self, model: Any, layers: Sequence[Layer], gone: Iterable[Any]) -> None:
        self._model, self._gone = model, list(gone)
        self._names = {layer.found.name for layer in layers if any(a in self._gone for a in layer.site.addresses)}
        self._given: dict[str, Tensor] | None = None
        first = next(model.parameters(), None)
        self.possible = first is not None and first.device.type != "meta"
        if not self.possible:
            return
        with ExitStack() as silence:
            for layer in layers:
                here = [number for number, a in enumerate(layer.site.addresses) if a in self._gone]
                if here:
                    gate = torch.ones(len(layer.spec.head_ids), device=first.device)  # pyright: ignore
                    gate[here] = 0
                    silence.enter_context(layer.site.scaled(gate))
            self._silent, why = self._first_that_runs(layers)
        if self._given is None:
            raise HeadwiseError(
                f"heads of {type(model).__name__} cannot be cut: no call could be tried to see that it stays right ({why}); "
                f"silence them instead: theirs.heads[…].silenced()."
            )

    def _first_that_runs(self, layers: Sequence[Layer]) -> tuple[Numbers, str]:
        why = "what it reads is not known here"
        for given in samples(self._model):
            try:
                made = self._run(layers, given)
            except Exception as error:  # whatever somebody else's model says to inputs that were guessed
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                continue
            self._given = given
            return made, ""
        return ([], {}), why

    def _run(self, layers: Sequence[Layer], given: dict[str, Tensor]) -> Numbers:
        wrote: dict[str, list[Tensor]] = {}
        with ExitStack() as watching, torch.no_grad(), torch.random.fork_rng(), quiet(self._model):
            for layer in layers:
                found = layer.found
                if found.writes is not None and found.name in self._names:
                    kept = wrote.setdefault(found.name, [])
                    hook = found.writes.register_forward_hook(lambda _, __, made, kept=kept: kept.append(made))
                    watching.callback(hook.remove)
            return [*tensors(self._model(**given)), *_written_on(self._model, given)], wrote

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuse what computes other numbers."""
        if not self.possible or self._given is None:
            return
        out, wrote = self._silent
        try:
            now, writes = self._run(layers, self._given)
        except HeadwiseError:
            raise
        except Exception as error:  # shapes that do not fit any more
            words = " ".join(str(error).split())[:120]
            self._refuse(f"it cannot be called without them ({type(error).__name__}: {words})")
            raise AssertionError from error
        pairs = list(zip(out, now, strict=True)) if len(out) == len(now) else [(out[0], out[0].new_zeros(0))]
        for name, theirs in wrote.items():  # an emptied layer may write without W_O
            pairs += list(zip(theirs, writes.get(name, theirs) or theirs, strict=False))
        if any(a.shape != b.shape or not _close(b, a) for a, b in pairs):
            self._refuse("without them it computes other numbers than with them silenced")

    def _refuse(self, why: str) -> None:
        kinds = sorted(self._names)
        raise HeadwiseError(
            f"heads of {type(self._model).__name__} ({kinds[0]}{' …' if len(kinds) > 1 else ''}) cannot be cut: {why}; "
            f"silence them instead: theirs.heads[…].silenced()."
        )


def _written_on(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What a model says to a next token where it keeps those before it in a cache; nothing where it does not."""
    ids = given.get("input_ids")
    if ids is None or set(given) != {"input_ids"} or not getattr(model, "can_generate", bool)():
        return []
    first = model(input_ids=ids[:, :-1], use_cache=True)
    if getattr(first, "past_key_values", None) is None:
        return []
    try:
        return tensors(model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)[0])
    except Exception:  # it wants to be told more than that
        return []


@contextmanager
def undone(layers: list[Layer], gone: Iterable[Any], restart: Callable[[list[Layer]], None]) -> Iterator[None]:
    """Put everything back as it was, and start again from there, if what is done inside fails."""
    wanted = set(gone)
    touched = [layer.found for layer in layers if wanted & set(layer.site.addresses)]
    parts = {part for found in touched for top in (found.parent, found.module) for part in top.modules()}
    kept = [(part, _copied(part), standing(part)) for part in parts]
    try:
        yield
    except BaseException:
        for part, was, stood in kept:
            hooks = {name: part.__dict__[name] for name in part.__dict__ if "_hooks" in name}
            part.__dict__.clear()
            part.__dict__.update(was | hooks)
            stand_again(part, stood)
        restart(layers)
        raise


def _copied(part: nn.Module) -> dict[str, Any]:
    return {name: type(value)(value) if isinstance(value, dict) else value for name, value in part.__dict__.items()}


def tensors(made: Any) -> list[Tensor]:
    """Every floating tensor an output holds, in order; caches are left out."""
    if isinstance(made, Tensor):
        return [made] if made.is_floating_point() else []
    if isinstance(made, dict):
        made = list(made.values())
    return [x for one in made for x in tensors(one)] if isinstance(made, list | tuple) else []


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are the same but for rounding on the way, beside the largest."""
    if not other.numel():
        return True
    there = other.isfinite()
    if not torch.equal(there, one.isfinite()):
        return False
    far = (one[there].double() - other[there].double()).abs()
    size = other[there].double().abs()
    return not len(far) or bool(far.max() <= torch.finfo(other.dtype).eps ** 0.5 * size.max())
