# ruff: noqa: C408 (sizes read better as keywords)
"""Derived values of heads equal those of the model, or raise an error: gates and norms before W_O, layouts, adapters."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from tests.attached.models import BY_NAME, COMMON_SIZES, GROUPED, PLAIN, VOCAB, Case, transformers

QWEN_NEXT = GROUPED | dict(
    layer_types=["linear_attention", "full_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=4, head_dim=8, experts_implementation="eager",
)  # fmt: skip
GATED = Case("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", QWEN_NEXT)
COUPLED = Case("bitnet", "BitNetForCausalLM", "BitNetConfig", {k: v for k, v in GROUPED.items() if k != "head_dim"})
BIGCODE = Case(
    "bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig",
    dict(n_embd=24, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=64, multi_query=False, bos_token_id=1, eos_token_id=2),
)  # fmt: skip


def _output_projection_io(attached: Any, model: Any, inputs: dict[str, Tensor]) -> dict[Any, tuple[Tensor, Tensor]]:
    """Record the inputs and outputs of every W_O with separate hooks."""
    projection_io: dict[Any, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.info.output_module.register_forward_hook(
            lambda module, inputs, output, at=layer.hook_point.address: projection_io.__setitem__(
                at, (inputs[0], output)
            )
        )
        for layer in attached.attention_layers()
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return projection_io


@pytest.mark.parametrize("case", [GATED, BIGCODE, BY_NAME["llama"]], ids=lambda case: case.name)
def test_record_z_enters_w_o_and_outputs_sum(case: Case) -> None:
    model, inputs = case.build().double(), case.inputs("right")
    attached = hw.attach(model)
    with hw.record(attached, tensors=("z", "output")) as recording:
        projection_io = _output_projection_io(attached, model, inputs)
    for layer in attached.attention_layers():
        entered, projected = projection_io[layer.hook_point.address]
        z = torch.stack([recording[address].z for address in layer.hook_point.head_addresses], 2).flatten(
            2
        )  # (B, T, H·e)
        assert (z - entered.reshape(z.shape)).abs().max() == 0
        total = sum(recording[address].output for address in layer.hook_point.head_addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (total - projected.reshape(total.shape)).abs().max() <= 1e-9  # pyright: ignore


def test_silenced_and_replaced_act_before_w_o() -> None:
    model, inputs = GATED.build().double(), GATED.inputs()
    attached = hw.attach(model)
    with torch.no_grad():
        with attached.heads["2.1"].silenced():
            silent = model(**inputs).logits
        hook_point = attached.hook_points()[-1]
        with hw.record(attached, "2.*", tensors="z") as recording:
            full = model(**inputs).logits
        z = torch.stack([recording[address].z for address in hook_point.head_addresses], 1)
        with hook_point.replaced(z):  # replaced by its current value
            assert torch.equal(model(**inputs).logits, full)
        head = attached.heads["2.1"]
        assert isinstance(head, hw.Head)
        head.W_O.zero_()
        assert (model(**inputs).logits - silent).abs().max() <= 1e-9
        assert (silent - full).abs().max() > 1e-4


def test_attach_coupled_heads_allows_recording_only() -> None:
    model, inputs = COUPLED.build(), COUPLED.inputs("right")
    before = model(**inputs).logits
    attached = hw.attach(model)
    with hw.record(attached) as recording:
        assert torch.equal(model(**inputs).logits, before)
    assert recording["1.2"].map().shape == (2, 13, 13)
    heads = attached.heads["1.*"]
    for refused in (
        lambda: heads.silenced().__enter__(),
        lambda: attached.hook_points()[0].replaced(lambda z: z).__enter__(),
        lambda: attached(inputs["input_ids"], gates={"1.2": 0.0}),
        lambda: attached.heads["1.2"].W_O,  # pyright: ignore
        lambda: recording["1.2"].output,
    ):
        with pytest.raises(hw.HeadwiseError, match="combines heads between attention and W_O"):
            refused()
    attached.detach()
    assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize("case", [GATED, BIGCODE], ids=lambda case: case.name)
def test_head_views_zeroed_give_constant_qkv(case: Case) -> None:
    """A head with zero W_Q and b_Q has the same q for every text, unlike other heads. Likewise for k and v."""
    for projection in "QKV":
        model = case.build()
        attached = hw.attach(model)
        head = next(head for head in attached.heads if head.address.layer == 2 and head.address.head == 1)
        with torch.no_grad():
            for view in (getattr(head, f"W_{projection}"), getattr(head, f"b_{projection}")):
                if view is not None:
                    view.zero_()
        recorded: list[Tensor] = []
        with head.layer.hook_point.listen(
            lambda call, projection=projection, recorded=recorded: recorded.append(getattr(call, projection.lower()))
        ):
            model(**case.inputs())
        index = head.index if projection == "Q" else head.kv_index
        assert (recorded[0][0, index] - recorded[0][1, index]).abs().max() <= 1e-6
        assert all(
            (recorded[0][0, i] - recorded[0][1, i]).abs().max() > 1e-3
            for i in range(recorded[0].shape[1])
            if i != index
        )


def test_attached_switched_implementation_works_or_raises() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**inputs).logits
    attached = hw.attach(model)
    assert model.config._attn_implementation == "sdpa"  # the configuration is unchanged
    with attached.heads["1.1"].silenced():
        silent = model(**inputs).logits
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(**inputs).logits, silent)
    model.set_attn_implementation("eager")
    with pytest.raises(hw.HeadwiseError, match="now runs 'eager'"):
        model(**inputs)
    attached.detach()
    assert model.config._attn_implementation == "eager"  # the user's choice is unchanged
    assert (model(**inputs).logits - before).abs().max() < 1e-4


def test_attach_replaced_sdpa_function_raises() -> None:
    functions = transformers.AttentionInterface
    own = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    functions.register("sdpa", lambda *arguments, **more: own(*arguments, **more))
    try:
        with pytest.raises(hw.HeadwiseError, match="another library has replaced"):
            hw.attach(BY_NAME["llama"].build())
    finally:
        functions.register("sdpa", own)


def test_deepcopy_attached_model_is_detached_and_attachable() -> None:
    for case in (BY_NAME["llama"], GATED):
        model, inputs = case.build(), case.inputs()
        before = model(**inputs).logits
        attached = hw.attach(model)
        with attached.heads["2.*"].silenced():
            twin = copy.deepcopy(model)
            again = pickle.loads(pickle.dumps(model))
            for free in (twin, again):
                assert torch.equal(free(**inputs).logits, before)
        config = copy.deepcopy(model.config)
        for free in (twin, again, type(model)(config).eval()):
            other = hw.attach(free)
            with attached.heads["2.*"].silenced():
                assert torch.equal(free(**inputs).logits, other.detach()(**inputs).logits)


def test_save_attached_model_loads_in_new_process(tmp_path: Path) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**inputs).logits
    hw.attach(model)
    torch.save([model, inputs, before], tmp_path / "model.pt")
    code = f"""
import torch
model, inputs, before = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(model(**inputs).logits, before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_checkpointing_attached_leaves_no_state() -> None:
    """The checkpointing function is restored after each call, and edits of a second handle apply instead of the first's."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    functions = {name: part.__dict__.get("_gradient_checkpointing_func") for name, part in model.named_modules()}
    gradients = []
    for amounts in ((0.0, 0.3), (0.3,)):
        for amount in amounts:
            attached = hw.attach(model)
            model.zero_grad()
            with attached.heads["1.*"].scaled(amount):
                loss = model(**inputs).logits.square().mean()
            loss.backward()
            attached.detach()
            now = {name: part.__dict__.get("_gradient_checkpointing_func") for name, part in model.named_modules()}
            assert now == functions
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_caller_around_edited_heads_raises(reentrant: bool) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).logits

    attached = hw.attach(model)
    plain = checkpoint(run, embeds, use_reentrant=reentrant)
    with attached.heads["1.1"].silenced():  # opened later, so it must not affect the recomputation
        plain.square().mean().backward()
    assert embeds.grad is not None
    attached.detach()
    got, embeds.grad = embeds.grad, None
    run(embeds).square().mean().backward()
    assert (embeds.grad - got).abs().max() <= 1e-6 * got.abs().max()
    attached = hw.attach(model)
    with attached.heads["1.1"].silenced():
        out = checkpoint(run, embeds, use_reentrant=reentrant)
    with pytest.raises(hw.HeadwiseError, match=r"torch\.utils\.checkpoint recomputes"):
        out.square().mean().backward()


def test_record_mask_modified_between_calls_keeps_both() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    T = inputs["input_ids"].shape[1]
    mask = torch.ones(2, 1, T, T, dtype=torch.bool).tril()
    attached = hw.attach(model)
    with torch.no_grad(), hw.record(attached, "1.1", tensors="map") as recording:
        model(input_ids=inputs["input_ids"], attention_mask=mask)
        mask[..., 1] = False
        model(input_ids=inputs["input_ids"], attention_mask=mask)
    first, second = recording["1.1"].calls
    assert (first.map()[:, 3:, 1] > 0).all()
    assert (second.map()[..., 1] == 0).all()


def test_record_active_adapters_match_layer_output() -> None:
    peft = pytest.importorskip("peft")
    case = BY_NAME["llama"]
    wrapped = peft.get_peft_model(
        case.build().double(),
        peft.LoraConfig(r=3, target_modules=["o_proj", "v_proj", "q_proj"], init_lora_weights=False),
    ).eval()
    model, inputs = wrapped.get_base_model(), case.inputs()
    attached = hw.attach(wrapped)
    assert attached.model is model
    assert hw.attach(model) is attached
    for context in (False, True):
        with hw.record(attached, tensors=("z", "output", "v")) as recording:
            if context:
                with wrapped.disable_adapter():
                    projection_io = _output_projection_io(attached, wrapped, inputs)
                    writes = {a: recording[a].output for a in attached.heads.addresses}
            else:
                projection_io = _output_projection_io(attached, wrapped, inputs)
                writes = {a: recording[a].output for a in attached.heads.addresses}
        for layer in attached.attention_layers():
            total = sum(writes[address] for address in layer.hook_point.head_addresses)
            assert (total - projection_io[layer.hook_point.address][1]).abs().max() <= 1e-9  # pyright: ignore
    with torch.no_grad(), attached.heads["*.*"].silenced():
        assert torch.isfinite(wrapped(**inputs).logits).all()


@pytest.mark.parametrize("name", ["whisper"])
def test_head_biases_whisper_keys_have_none(name: str) -> None:
    for head in hw.attach(BY_NAME[name].build()).heads:
        assert head.b_K is None
        assert head.b_Q is not None
        assert head.b_V is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_attach_quantized_weights_silences_without_views() -> None:
    model, inputs = BY_NAME["opt"].build(), BY_NAME["opt"].inputs()
    packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    before = packed(**inputs).logits
    attached = hw.attach(packed)
    with hw.record(attached, tensors=("q", "map", "z")) as recording:
        assert torch.equal(packed(**inputs).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with attached.heads["1.1"].silenced():
        assert not torch.equal(packed(**inputs).logits, before)
    head = attached.heads["1.1"]
    assert isinstance(head, hw.Head)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        with pytest.raises(hw.HeadwiseError):
            getattr(head, name)


def test_attach_offloaded_weights_silences_without_views() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**inputs).logits
    accelerate.cpu_offload(model)
    attached = hw.attach(model)
    with hw.record(attached, tensors=("q", "map", "z")) as recording:
        assert torch.equal(model(**inputs).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with attached.heads["1.1"].silenced():
        assert not torch.equal(model(**inputs).logits, before)
    with pytest.raises(hw.HeadwiseError, match="offloaded"):
        attached.heads["1.1"].W_O  # pyright: ignore


def test_attention_maps_layer_called_repeatedly_needs_call() -> None:
    sizes = PLAIN | dict(embedding_size=8, num_hidden_groups=1, inner_group_num=1)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes)).eval()
    tokenizer = hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    attached = hw.attach(model, tokenizer)
    with pytest.raises(hw.HeadwiseError, match=r"called 3 times.*call_index=0"):
        hw.attention_maps(attached, "the cats sat", "0.1").map()
    maps = [hw.attention_maps(attached, "the cats sat", "0.1", call_index=index).map() for index in range(3)]
    assert not torch.equal(maps[0], maps[2])
    assert all((weights.sum(1) - 1).abs().max() < 1e-5 for weights in maps)


def test_spec_layers_counts_layers_without_attention() -> None:
    attached = hw.attach(GATED.build())
    assert attached.spec.layers == 3
    more = Case("tail", "Qwen3NextForCausalLM", "Qwen3NextConfig",
                QWEN_NEXT | dict(layer_types=["full_attention", "linear_attention", "linear_attention"]))  # fmt: skip
    assert hw.attach(more.build()).spec.layers == 3
    assert COMMON_SIZES["num_hidden_layers"] == 3


def test_attach_model_without_output_has_none() -> None:
    case = BY_NAME["bart"]
    model = transformers.BartModel(transformers.BartConfig(**case.sizes)).eval()
    attached = hw.attach(model)
    assert attached.spec.output == "none"
    assert attached.output is None
