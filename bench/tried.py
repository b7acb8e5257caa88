"""Checks of one attached architecture: recording, silencing, copying and detaching, each against another computation.

A check returns nothing if it passes. `CheckFailed` is a wrong number; a `HeadwiseError` is an unsupported model, acceptable
if it is raised before anything is computed; any other exception is a crash.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.tried_cache import CacheNotApplicable, check_cache
from bench.tried_cut import LayerPruneUnsupported, check_prune
from bench.tried_quantize import check_quantize
from bench.tried_with import (
    TOLERANCE,
    VERDICTS,
    AttachReport,
    CheckFailed,
    build,
    check_same,
    check_same_dicts,
    disable_dropout,
    find_runnable_inputs,
    flipped_inputs,
    gradients_of,
    is_reached,
    make_tokenizer,
    one_line,
    outputs,
    reads_text,
    record_failure,
    record_projection,
    sample_heads,
    state_of,
)  # fmt: skip


def check_architecture(
    name: str,
    kind: Any,
    config_class: Any,
    on_built: Callable[[], object] = lambda: None,
    checks: tuple[str, ...] | None = None,
) -> AttachReport:
    """Build one tiny model and run all checks, or those named. `on_built` is called in between."""
    report = AttachReport(name, kind.__name__)
    try:
        model, inputs = build(kind, config_class)
    except Exception as error:
        return record_failure(report, "not built", error)
    on_built()
    try:
        attached = hw.attach(model)
    except hw.HeadwiseError as error:
        report = record_failure(report, "refused", error)
        return _check_advice(report, model, inputs, str(error))
    except Exception as error:
        return record_failure(report, "crash", error)
    parts = list(dict.fromkeys(layer.info.tower_path for layer in attached.attention_layers()))
    attached.detach()
    if len(parts) > 1 and checks is None:
        return _check_towers(report, model, inputs, parts)
    return _check_all(report, model, model, inputs, checks)


def _check_towers(report: AttachReport, model: Any, inputs: dict[str, Tensor], parts: list[str]) -> AttachReport:
    """Check the full model for equal bits, silencing and pruning, then each tower alone."""
    report = _check_all(
        report, model, model, inputs, ("bitwise", "silence", "copying", "prune", "per-head cache", "quantized")
    )
    for path in parts:
        part = model.get_submodule(path)
        try:
            tower_inputs, _ = find_runnable_inputs(part)
        except Exception:
            report.findings[f"{path} alone"] = "no call of it alone could be made by rule; it was checked in the whole"
            continue
        inner = _check_all(AttachReport(report.name, report.model), part, part, tower_inputs)
        report.findings |= {f"{path}: {check}": finding for check, finding in inner.findings.items()}
        if VERDICTS.index(inner.verdict) > VERDICTS.index(report.verdict):
            report.verdict, report.reason = inner.verdict, report.reason or inner.reason
    return report


def _check_advice(report: AttachReport, model: Any, inputs: dict[str, Tensor], message: str) -> AttachReport:
    """Check that the submodule recommended by an error message can be attached and passes."""
    for advice in re.finditer(r"hw\.attach\(model\.([\w.]+)\)", message):
        report = _check_advised_module(report, model, inputs, advice)
    return report


def _check_advised_module(
    report: AttachReport, model: Any, inputs: dict[str, Tensor], advice: re.Match[str]
) -> AttachReport:
    try:
        part = model.get_submodule(advice[1])
        hw.attach(part).detach()
    except Exception as error:
        report.verdict = "wrong"
        report.findings[f"advice {advice[1]}"] = f"{type(error).__name__}: {one_line(error)}"
        return report
    with hw.attach(part) as attached:
        reached = is_reached(attached, model, inputs)
    if not reached:
        report.findings[f"advice {advice[1]}"] = (
            f"{advice[1]} attaches; a call without pictures or sounds does not reach it"
        )
        return report
    inner = _check_all(AttachReport(report.name, report.model), model, part, inputs)
    report.findings |= {f"{advice[1]}: {check}": finding for check, finding in inner.findings.items()}
    if inner.verdict in ("wrong", "crash"):
        report.verdict = inner.verdict
    report.findings[f"advice {advice[1]}"] = f"{advice[1]} is {inner.verdict}"
    return report


def _check_all(
    report: AttachReport, model: Any, part: Any, inputs: dict[str, Tensor], names: tuple[str, ...] | None = None
) -> AttachReport:
    """Run all or some checks, each on the unchanged model. `part` is the attached submodule."""
    for name, check in CHECKS.items():
        if names is not None and name not in names:
            continue
        try:
            check(model, part, inputs)
        except CheckFailed as error:
            report.findings[name] = f"wrong: {error}"
            report.verdict = "wrong" if report.verdict != "crash" else "crash"
        except CacheNotApplicable as error:
            report.findings[name] = f"not applicable: {error}"
        except LayerPruneUnsupported as error:
            report.findings["prune layers"] = f"refused: {one_line(error)}"
        except hw.HeadwiseError as error:
            report.findings[name] = f"refused: {one_line(error)}"
            if name in ("silence", "output projection") and report.verdict == "right":
                report.verdict, report.reason = "looking only", one_line(error)
        except Exception as error:
            report.findings[name] = f"crash: {type(error).__name__}: {one_line(error)}"
            report.verdict = "crash"
    return report


# The checks. Each leaves the model unchanged.


def _bitwise(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    state, before = state_of(part), outputs(model, inputs)
    with hw.attach(part) as attached:
        attached_outputs = outputs(model, inputs)
        with hw.record(attached, tensors=("q", "k", "v", "z")) as recording:
            recorded_outputs = outputs(model, inputs)
    detached_outputs = outputs(model, inputs)
    for name, other in (
        ("attached", attached_outputs),
        ("looked at", recorded_outputs),
        ("detached", detached_outputs),
    ):
        if any(not torch.equal(a, b) for a, b in zip(before, other, strict=True)):
            raise CheckFailed(f"{name}: the outputs differ")
    if state_of(part) != state:
        raise CheckFailed("the detached model differs from the original")
    if not recording.nbytes:
        raise CheckFailed("nothing was recorded")


def _maps(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Maps times values equal z, unless a gate follows attention."""
    with hw.attach(part) as attached, hw.record(attached, tensors=("map", "q", "k", "v", "z")) as recording:
        outputs(model, inputs)
        for layer in attached.attention_layers():
            for address in layer.hook_point.head_addresses[:2]:
                for call in recording[address].calls[:2]:
                    weighted_values = call.map() @ call.v
                    if not bool(weighted_values.isfinite().all()):
                        raise CheckFailed(f"maps of {address} are not finite")
                    if not _gated(layer):
                        check_same(weighted_values, call.z, f"maps of {address} times v, beside z")


def _gated(layer: Any) -> bool:
    """Whether a gate follows attention, so that z, the input of W_O, is not maps times v.

    `_output_projection` checks z then.
    """
    return getattr(layer, "z_path", "plain") == "gated"


def _silence(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    baseline = outputs(model, inputs)
    with hw.attach(part) as attached:
        for head in sample_heads(attached):
            with head.silenced():
                silent = outputs(model, inputs)
            try:
                W_O = head.W_O
            except hw.HeadwiseError:
                continue
            saved = W_O.detach().clone()
            with torch.no_grad():
                W_O.zero_()
                zeroed = outputs(model, inputs)
                W_O.copy_(saved)
            for a, b in zip(silent, zeroed, strict=True):
                check_same(a, b, f"silence of {head.address}, beside zeroed rows of W_O")
            changed = any(not torch.equal(a, b) for a, b in zip(baseline, zeroed, strict=True))
            if changed and all(torch.equal(a, b) for a, b in zip(baseline, silent, strict=True)):
                raise CheckFailed(f"silencing {head.address} does nothing")


def _output_projection(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Recorded z equals the input of W_O, and Σ z W_O + b_O its output."""
    with hw.attach(part) as attached:
        layers = [layer for layer in attached.attention_layers() if layer.spec.head_ids]
        heads = [head for layer in layers for head in attached.heads.select(list(layer.hook_point.head_addresses))]
        _ = [head.W_O for head in heads]
        projection_calls: dict[Any, list[tuple[Tensor, Tensor]]] = {layer.hook_point.address: [] for layer in layers}
        hooks = [
            layer.info.output_module.register_forward_hook(  # pyright: ignore[reportOptionalMemberAccess]
                lambda module, inputs, output, records=projection_calls[layer.hook_point.address]: records.append(
                    (inputs[0], output)
                )
            )
            for layer in layers
        ]
        with hw.record(attached, tensors=("z", "output")) as recording:
            outputs(model, inputs)
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer_calls = projection_calls[layer.hook_point.address]
            for index, (entered, projected) in enumerate(layer_calls):
                calls = [recording[address].calls[index] for address in layer.hook_point.head_addresses]
                z = torch.stack([call.z for call in calls], 2)  # (B, T, H, e)
                check_same(
                    z.reshape(entered.shape), entered, f"z of {layer.hook_point.address}, beside what enters W_O"
                )
                total = torch.stack([call.output for call in calls]).sum(0)  # (B, T, D)
                total = total if layer.b_O is None else total + layer.b_O
                check_same(
                    total.reshape(projected.shape),
                    projected,
                    f"writes of {layer.hook_point.address}, beside what leaves W_O",
                )


def _qkv_projection(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """If W_Q and b_Q of a head are 0, its q does not depend on the input, and so for k and v; other heads are unchanged."""
    refused: hw.HeadwiseError | None = None
    other = flipped_inputs(inputs)
    with hw.attach(part) as attached:
        for head in sample_heads(attached):
            for projection in "QKV":
                try:
                    views = [getattr(head, f"W_{projection}"), getattr(head, f"b_{projection}")]
                except hw.HeadwiseError as error:
                    refused = error
                    continue
                views = [view for view in views if view is not None]
                saved = [view.detach().clone() for view in views]
                before = record_projection(model, attached, inputs, head, projection)
                with torch.no_grad():
                    for view in views:
                        view.zero_()
                    zeroed, moved = (record_projection(model, attached, x, head, projection) for x in (inputs, other))
                    for view, old_value in zip(views, saved, strict=True):
                        view.copy_(old_value)
                index = head.index if projection == "Q" else head.kv_index
                if torch.equal(zeroed[:, index], before[:, index]):
                    raise CheckFailed(f"W_{projection} of {head.address} does not make its {projection.lower()}")
                if zeroed.shape == moved.shape:
                    size = before.abs().max()
                    if (zeroed[:, index] - moved[:, index]).abs().max() > TOLERANCE * size:
                        raise CheckFailed(
                            f"without W_{projection} of {head.address}, its {projection.lower()} still follows the input"
                        )
                    rest = [i for i in range(before.shape[1]) if i != index]
                    difference = (zeroed[:, rest] - before[:, rest]).abs().amax() if rest else torch.zeros(())
                    if projection == "V" and difference > TOLERANCE * size:
                        raise CheckFailed(f"W_V of {head.address} makes values of other heads too")
    if refused is not None:
        raise refused


def _gradients(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Gradients with a head gate of 0.5 equal those with its rows of W_O halved, also with gradient checkpointing."""
    with hw.attach(part) as attached:
        head = sample_heads(attached)[0]
        with head.scaled(0.5):
            scaled = gradients_of(model, inputs)
        try:
            W_O = head.W_O
        except hw.HeadwiseError:
            return
        with torch.no_grad():
            saved = W_O.detach().clone()
            W_O.mul_(0.5)
        halved = gradients_of(model, inputs)
        with torch.no_grad():
            W_O.copy_(saved)
        check_same_dicts(scaled, halved, f"slopes with {head.address} at half, beside its W_O at half")


def _checkpointing(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    training_modes = [(module, module.training) for module in model.modules()]
    with hw.attach(part) as attached:
        head = sample_heads(attached)[0]
        try:
            model.train()
            for module in model.modules():
                disable_dropout(module)
            try:
                plain = gradients_of(model, inputs)
                model.gradient_checkpointing_enable({"use_reentrant": False})
                unscaled = gradients_of(model, inputs)
            except Exception:
                return  # transformers cannot train it with checkpointing
            repeated = all((plain[n] - unscaled[n]).abs().max() <= TOLERANCE * plain[n].abs().max() for n in plain)
            if not repeated:
                return  # checkpointing of transformers changes the gradients
            with head.scaled(0.5):
                again = gradients_of(model, inputs)
            model.gradient_checkpointing_disable()
            with head.scaled(0.5):
                scaled = gradients_of(model, inputs)
            check_same_dicts(again, scaled, f"checkpointed slopes with {head.address} at half")
        finally:
            model.gradient_checkpointing_disable()
            for module, training in training_modes:
                module.training = training


def _importance(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """The importance of a head is not 0 if silencing it changes the output."""
    if not reads_text(part):
        return
    with hw.attach(part, make_tokenizer()) as attached:
        texts = ["w1 w5 w3 w9 w20", "w7 w2 w33 w4"]
        corpus: Any = texts if attached.spec.kind != "encoder-decoder" else hw.Corpus.of([(a, a) for a in texts])
        ablation = hw.importance(
            attached, corpus, ranking="ablation", ablation="zero", heads=[h.address for h in sample_heads(attached)]
        )
        gradients = hw.importance(
            attached, corpus, ranking="gradient", heads=[h.address for h in sample_heads(attached)]
        )
        for values in (ablation.mean, gradients.mean):
            if not all(abs(float(x)) < float("inf") for x in values):
                raise CheckFailed("the importance of a head is not finite")
        if all(float(x) == 0 for x in ablation.mean):
            with sample_heads(attached)[0].silenced():
                silent = outputs(model, inputs)
            if any(not torch.equal(a, b) for a, b in zip(silent, outputs(model, inputs), strict=True)):
                raise CheckFailed("every head is worth 0")


def _compare_heads(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    if not reads_text(part):
        return
    with hw.attach(part, make_tokenizer()) as attached:
        hw.compare_heads(attached, ["w1 w5 w3 w9 w20 w7", "w7 w2 w33 w4 w1"], rows=6, max_length=16)


def _attention_switch(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """After a switch of the attention implementation, silencing still works or the next call raises."""
    baseline = outputs(model, inputs)
    with hw.attach(part) as attached:
        head = sample_heads(attached)[0]
        with head.silenced():
            if all(torch.equal(a, b) for a, b in zip(baseline, outputs(model, inputs), strict=True)):
                return  # the head has no effect on the output
            try:
                part.set_attn_implementation("sdpa")
            except Exception:
                return  # transformers does not support a choice for it
            if all(torch.equal(a, b) for a, b in zip(baseline, outputs(model, inputs), strict=True)):
                raise CheckFailed('after set_attn_implementation("sdpa") silencing has no effect')
            try:
                part.set_attn_implementation("eager")
            except Exception:
                return  # no other implementation
            try:
                plain = outputs(copy.deepcopy(model), inputs)  # a copy is not attached
            except Exception:
                part.set_attn_implementation("sdpa")
                return  # transformers cannot run it with eager attention
            try:
                ineffective = all(torch.equal(a, b) for a, b in zip(plain, outputs(model, inputs), strict=True))
            except hw.HeadwiseError:
                ineffective = False
            finally:
                part.set_attn_implementation("sdpa")
            if ineffective:
                raise CheckFailed('after set_attn_implementation("eager") silencing has no effect, without an error')


def _copying(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """A copy of the model is not attached; a copy of the handle is attached and has its own heads."""
    if part is not model:
        return
    baseline = outputs(model, inputs)
    with hw.attach(model) as attached:
        head = sample_heads(attached)[0]
        with head.silenced():
            silent = outputs(model, inputs)
            free = copy.deepcopy(model)
            if any(not torch.equal(a, b) for a, b in zip(baseline, outputs(free, inputs), strict=True)):
                raise CheckFailed("a copy of the model is silenced with it")
        hw.attach(free).detach()
        twin = copy.deepcopy(attached)
        with twin.heads.select([head.address]).silenced():
            if any(not torch.equal(a, b) for a, b in zip(silent, outputs(twin.model, inputs), strict=True)):
                raise CheckFailed("silence of a copied handle is another")
            if any(not torch.equal(a, b) for a, b in zip(baseline, outputs(model, inputs), strict=True)):
                raise CheckFailed("silence of a copied handle reaches the first model")
        twin.detach()


CHECKS: dict[str, Callable[[Any, Any, dict[str, Tensor]], None]] = {
    "bitwise": _bitwise, "maps": _maps, "silence": _silence, "output projection": _output_projection,
    "qkv projection": _qkv_projection, "gradients": _gradients, "checkpointing": _checkpointing, "importance": _importance,
    "compare heads": _compare_heads, "switching": _attention_switch, "copying": _copying, "prune": check_prune,
    "per-head cache": check_cache, "quantized": check_quantize,
}  # fmt: skip
