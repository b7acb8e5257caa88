"""One architecture tried: attached, looked at, silenced, copied, detached; and every number compared with another way to it.

A check says nothing if all is right. `Wrong` is a number that is off; a `HeadwiseError` is a refusal, and fine where it is
told before anything is computed; every other exception is a crash.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.tried_cut import HalfRefused, check_cut
from bench.tried_with import (
    CLOSE,
    VERDICTS,
    Tried,
    Wrong,
    build,
    calm_down,
    check_alike,
    check_same,
    end,
    first_that_runs,
    is_reached,
    make_tokenizer,
    other_inputs,
    outputs,
    reads_text,
    recorded_of,
    short,
    slopes_of,
    some_heads,
    state_of,
)  # fmt: skip


def try_out(name: str, kind: Any, config_class: Any, built: Callable[[], object] = lambda: None) -> Tried:
    """Build one tiny model and check everything; `built` is called in between."""
    made = Tried(name, kind.__name__)
    try:
        model, given = build(kind, config_class)
    except Exception as error:
        return end(made, "not built", error)
    built()
    try:
        theirs = hw.attach(model)
    except hw.HeadwiseError as error:
        made = end(made, "refused", error)
        return _follow(made, model, given, str(error))
    except Exception as error:
        return end(made, "crash", error)
    parts = list(dict.fromkeys(layer.found.part for layer in theirs.attention_layers()))
    theirs.detach()
    if len(parts) > 1:
        return _check_towers(made, model, given, parts)
    return _check_all(made, model, model, given)


def _check_towers(made: Tried, model: Any, given: dict[str, Tensor], parts: list[str]) -> Tried:
    """The whole bit by bit, silenced and cut; and every tower by itself, called as it can be called alone."""
    made = _check_all(made, model, model, given, ("bitwise", "silence", "copying", "cut"))
    for path in parts:
        part = model.get_submodule(path)
        try:
            alone, _ = first_that_runs(part)
        except Exception:
            made.told[f"{path} alone"] = "no call of it alone could be made by rule; it was checked in the whole"
            continue
        inner = _check_all(Tried(made.name, made.model), part, part, alone)
        made.told |= {f"{path}: {check}": what for check, what in inner.told.items()}
        if VERDICTS.index(inner.verdict) > VERDICTS.index(made.verdict):
            made.verdict, made.why = inner.verdict, made.why or inner.why
    return made


def _follow(made: Tried, model: Any, given: dict[str, Tensor], words: str) -> Tried:
    """Take a refusal by its word: what it says to attach instead must attach, and be right."""
    for advice in re.finditer(r"hw\.attach\(model\.([\w.]+)\)", words):
        made = _follow_one(made, model, given, advice)
    return made


def _follow_one(made: Tried, model: Any, given: dict[str, Tensor], advice: re.Match[str]) -> Tried:
    try:
        part = model.get_submodule(advice[1])
        hw.attach(part).detach()
    except Exception as error:
        made.verdict = "wrong"
        made.told[f"advice {advice[1]}"] = f"{type(error).__name__}: {short(error)}"
        return made
    with hw.attach(part) as theirs:
        reached = is_reached(theirs, model, given)
    if not reached:
        made.told[f"advice {advice[1]}"] = f"{advice[1]} attaches; a call without pictures or sounds does not reach it"
        return made
    inner = _check_all(Tried(made.name, made.model), model, part, given)
    made.told |= {f"{advice[1]}: {check}": what for check, what in inner.told.items()}
    if inner.verdict in ("wrong", "crash"):
        made.verdict = inner.verdict
    made.told[f"advice {advice[1]}"] = f"{advice[1]} is {inner.verdict}"
    return made


def _check_all(
    made: Tried, model: Any, part: Any, given: dict[str, Tensor], names: tuple[str, ...] | None = None
) -> Tried:
    """Every check, or some, each on the model as it was; `part` is what is attached."""
    for name, check in CHECKS.items():
        if names is not None and name not in names:
            continue
        try:
            check(model, part, given)
        except Wrong as error:
            made.told[name] = f"wrong: {error}"
            made.verdict = "wrong" if made.verdict != "crash" else "crash"
        except HalfRefused as error:
            made.told["cut layers"] = f"refused: {short(error)}"
        except hw.HeadwiseError as error:
            made.told[name] = f"refused: {short(error)}"
            if name in ("silence", "writes") and made.verdict == "right":
                made.verdict, made.why = "looking only", short(error)
        except Exception as error:
            made.told[name] = f"crash: {type(error).__name__}: {short(error)}"
            made.verdict = "crash"
    return made


# The checks. Each leaves the model as it was.


def _bitwise(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    state, before = state_of(part), outputs(model, given)
    with hw.attach(part) as theirs:
        attached = outputs(model, given)
        with hw.record(theirs, what=("q", "k", "v", "z")) as recording:
            looked = outputs(model, given)
    after = outputs(model, given)
    for name, other in (("attached", attached), ("looked at", looked), ("detached", after)):
        if any(not torch.equal(a, b) for a, b in zip(before, other, strict=True)):
            raise Wrong(f"{name}, its numbers differ")
    if state_of(part) != state:
        raise Wrong("detached, it is not what it was")
    if not recording.bytes:
        raise Wrong("nothing was recorded")


def _maps(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """Maps times values are what attention found: z, where nothing comes between it and W_O."""
    with hw.attach(part) as theirs, hw.record(theirs, what=("map", "q", "k", "v", "z")) as recording:
        outputs(model, given)
        for layer in theirs.attention_layers():
            for address in layer.site.addresses[:2]:
                for call in recording[address].calls[:2]:
                    found = call.map() @ call.v
                    if not bool(found.isfinite().all()):
                        raise Wrong(f"maps of {address} are not finite")
                    if not _gated(layer):
                        check_same(found, call.z, f"maps of {address} times v, beside z")


def _gated(layer: Any) -> bool:
    """Whether a gate stands behind attention, so that z, which enters W_O, is not maps times v; `_writes` checks z then."""
    return getattr(layer, "passes", "plain") == "gated"


def _silence(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    whole = outputs(model, given)
    with hw.attach(part) as theirs:
        for head in some_heads(theirs):
            with head.silenced():
                silent = outputs(model, given)
            try:
                W_O = head.W_O
            except hw.HeadwiseError:
                continue
            kept = W_O.detach().clone()
            with torch.no_grad():
                W_O.zero_()
                zeroed = outputs(model, given)
                W_O.copy_(kept)
            for a, b in zip(silent, zeroed, strict=True):
                check_same(a, b, f"silence of {head.address}, beside zeroed rows of W_O")
            changed = any(not torch.equal(a, b) for a, b in zip(whole, zeroed, strict=True))
            if changed and all(torch.equal(a, b) for a, b in zip(whole, silent, strict=True)):
                raise Wrong(f"silencing {head.address} does nothing")


def _writes(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """Recorded z is what enters W_O, and Σ z W_O + b_O what leaves it."""
    with hw.attach(part) as theirs:
        layers = [layer for layer in theirs.attention_layers() if layer.spec.head_ids]
        heads = [head for layer in layers for head in theirs.heads.select(list(layer.site.addresses))]
        _ = [head.W_O for head in heads]
        seen: dict[Any, list[tuple[Tensor, Tensor]]] = {layer.site.address: [] for layer in layers}
        hooks = [
            layer.found.writes.register_forward_hook(  # pyright: ignore[reportOptionalMemberAccess]
                lambda module, given, made, kept=seen[layer.site.address]: kept.append((given[0], made))
            )
            for layer in layers
        ]
        with hw.record(theirs, what=("z", "write")) as recording:
            outputs(model, given)
        for hook in hooks:
            hook.remove()
        for layer in layers:
            there = seen[layer.site.address]
            for number, (entered, left) in enumerate(there):
                calls = [recording[address].calls[number] for address in layer.site.addresses]
                z = torch.stack([call.z for call in calls], 2)  # (B, T, H, e)
                check_same(z.reshape(entered.shape), entered, f"z of {layer.site.address}, beside what enters W_O")
                total = torch.stack([call.write for call in calls]).sum(0)  # (B, T, D)
                total = total if layer.b_O is None else total + layer.b_O
                check_same(total.reshape(left.shape), left, f"writes of {layer.site.address}, beside what leaves W_O")


def _reads(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """A head whose W_Q and b_Q are 0 has a q that no input changes, and so for k and v; other heads keep theirs."""
    refused: hw.HeadwiseError | None = None
    other = other_inputs(given)
    with hw.attach(part) as theirs:
        for head in some_heads(theirs):
            for letter in "QKV":
                try:
                    views = [getattr(head, f"W_{letter}"), getattr(head, f"b_{letter}")]
                except hw.HeadwiseError as error:
                    refused = error
                    continue
                views = [view for view in views if view is not None]
                kept = [view.detach().clone() for view in views]
                before = recorded_of(model, theirs, given, head, letter)
                with torch.no_grad():
                    for view in views:
                        view.zero_()
                    zeroed, moved = (recorded_of(model, theirs, x, head, letter) for x in (given, other))
                    for view, was in zip(views, kept, strict=True):
                        view.copy_(was)
                index = head.index if letter == "Q" else head.kv_index
                if torch.equal(zeroed[:, index], before[:, index]):
                    raise Wrong(f"W_{letter} of {head.address} does not make its {letter.lower()}")
                if zeroed.shape == moved.shape:
                    size = before.abs().max()
                    if (zeroed[:, index] - moved[:, index]).abs().max() > CLOSE * size:
                        raise Wrong(
                            f"without W_{letter} of {head.address}, its {letter.lower()} still follows the input"
                        )
                    rest = [i for i in range(before.shape[1]) if i != index]
                    away = (zeroed[:, rest] - before[:, rest]).abs().amax() if rest else torch.zeros(())
                    if letter == "V" and away > CLOSE * size:
                        raise Wrong(f"W_V of {head.address} makes values of other heads too")
    if refused is not None:
        raise refused


def _gradients(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """Slopes with a head at half are those with its rows of W_O at half; and the same where blocks are checkpointed."""
    with hw.attach(part) as theirs:
        head = some_heads(theirs)[0]
        with head.scaled(0.5):
            scaled = slopes_of(model, given)
        try:
            W_O = head.W_O
        except hw.HeadwiseError:
            return
        with torch.no_grad():
            kept = W_O.detach().clone()
            W_O.mul_(0.5)
        halved = slopes_of(model, given)
        with torch.no_grad():
            W_O.copy_(kept)
        check_alike(scaled, halved, f"slopes with {head.address} at half, beside its W_O at half")


def _checkpointing(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    was = [(module, module.training) for module in model.modules()]
    with hw.attach(part) as theirs:
        head = some_heads(theirs)[0]
        try:
            model.train()
            for module in model.modules():
                calm_down(module)
            try:
                plain = slopes_of(model, given)
                model.gradient_checkpointing_enable({"use_reentrant": False})
                unscaled = slopes_of(model, given)
            except Exception:
                return  # transformers cannot train it so
            repeated = all((plain[n] - unscaled[n]).abs().max() <= CLOSE * plain[n].abs().max() for n in plain)
            if not repeated:
                return  # its own checkpointing changes its slopes
            with head.scaled(0.5):
                again = slopes_of(model, given)
            model.gradient_checkpointing_disable()
            with head.scaled(0.5):
                scaled = slopes_of(model, given)
            check_alike(again, scaled, f"checkpointed slopes with {head.address} at half")
        finally:
            model.gradient_checkpointing_disable()
            for module, training in was:
                module.training = training


def _importance(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """What taking a head away costs is not 0 where silencing it changes the output."""
    if not reads_text(part):
        return
    with hw.attach(part, make_tokenizer()) as theirs:
        texts = ["w1 w5 w3 w9 w20", "w7 w2 w33 w4"]
        corpus: Any = texts if theirs.spec.kind != "encoder-decoder" else hw.Corpus.of([(a, a) for a in texts])
        made = hw.importance(theirs, corpus, by="ablation", how="zero", heads=[h.address for h in some_heads(theirs)])
        slopes = hw.importance(theirs, corpus, by="gradient", heads=[h.address for h in some_heads(theirs)])
        for figures in (made.mean, slopes.mean):
            if not all(abs(float(x)) < float("inf") for x in figures):
                raise Wrong("what a head is worth is not finite")
        if all(float(x) == 0 for x in made.mean):
            with some_heads(theirs)[0].silenced():
                silent = outputs(model, given)
            if any(not torch.equal(a, b) for a, b in zip(silent, outputs(model, given), strict=True)):
                raise Wrong("every head is worth 0")


def _between(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    if not reads_text(part):
        return
    with hw.attach(part, make_tokenizer()) as theirs:
        hw.compare(theirs, ["w1 w5 w3 w9 w20 w7", "w7 w2 w33 w4 w1"], rows=6, longest=16)


def _switching(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """Another choice of attention either leaves silence at work, or the next call says so."""
    whole = outputs(model, given)
    with hw.attach(part) as theirs:
        head = some_heads(theirs)[0]
        with head.silenced():
            if all(torch.equal(a, b) for a, b in zip(whole, outputs(model, given), strict=True)):
                return  # a head that does not matter here
            try:
                part.set_attn_implementation("sdpa")
            except Exception:
                return  # transformers refuses every choice for it
            if all(torch.equal(a, b) for a, b in zip(whole, outputs(model, given), strict=True)):
                raise Wrong('after set_attn_implementation("sdpa") silence does nothing')
            try:
                part.set_attn_implementation("eager")
            except Exception:
                return  # it has no other
            try:
                plain = outputs(copy.deepcopy(model), given)  # a copy is not attached
            except Exception:
                part.set_attn_implementation("sdpa")
                return  # transformers itself cannot run it so
            try:
                unheard = all(torch.equal(a, b) for a, b in zip(plain, outputs(model, given), strict=True))
            except hw.HeadwiseError:
                unheard = False
            finally:
                part.set_attn_implementation("sdpa")
            if unheard:
                raise Wrong('after set_attn_implementation("eager") silence does nothing, and nobody says so')


def _copying(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """A copy of the model is free; a copy of the handle is attached, and each has heads of its own."""
    if part is not model:
        return
    whole = outputs(model, given)
    with hw.attach(model) as theirs:
        head = some_heads(theirs)[0]
        with head.silenced():
            silent = outputs(model, given)
            free = copy.deepcopy(model)
            if any(not torch.equal(a, b) for a, b in zip(whole, outputs(free, given), strict=True)):
                raise Wrong("a copy of the model is silenced with it")
        hw.attach(free).detach()
        twin = copy.deepcopy(theirs)
        with twin.heads.select([head.address]).silenced():
            if any(not torch.equal(a, b) for a, b in zip(silent, outputs(twin.model, given), strict=True)):
                raise Wrong("silence of a copied handle is another")
            if any(not torch.equal(a, b) for a, b in zip(whole, outputs(model, given), strict=True)):
                raise Wrong("silence of a copied handle reaches the first model")
        twin.detach()


CHECKS: dict[str, Callable[[Any, Any, dict[str, Tensor]], None]] = {
    "bitwise": _bitwise, "maps": _maps, "silence": _silence, "writes": _writes, "reads": _reads, "gradients": _gradients,
    "checkpointing": _checkpointing, "importance": _importance, "between": _between, "switching": _switching,
    "copying": _copying, "cut": check_cut,
}  # fmt: skip
