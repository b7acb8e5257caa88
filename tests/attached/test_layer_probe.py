# ruff: noqa: C408 (sizes read better as keywords)
"""What is derived from heads is what the model computes, or is refused: gates and norms before W_O, layouts, adapters."""

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
from tests.attached.models import BODY, BY_NAME, GROUPED, PLAIN, VOCAB, Case, transformers

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


def _layer_outputs(theirs: Any, model: Any, given: dict[str, Tensor]) -> dict[Any, tuple[Tensor, Tensor]]:
    """What entered and left every W_O, seen by hooks of the test's own."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.found.writes.register_forward_hook(
            lambda module, given, made, at=layer.site.address: seen.__setitem__(at, (given[0], made))
        )
        for layer in theirs.attention_layers()
    ]
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("case", [GATED, BIGCODE, BY_NAME["llama"]], ids=lambda case: case.name)
def test_z_is_what_enters_w_o_and_writes_add_up(case: Case) -> None:
    model, given = case.build().double(), case.inputs("right")
    theirs = hw.attach(model)
    with hw.record(theirs, what=("z", "write")) as recording:
        seen = _layer_outputs(theirs, model, given)
    for layer in theirs.attention_layers():
        entered, left = seen[layer.site.address]
        z = torch.stack([recording[address].z for address in layer.site.addresses], 2).flatten(2)  # (B, T, H·e)
        assert (z - entered.reshape(z.shape)).abs().max() == 0
        total = sum(recording[address].write for address in layer.site.addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (total - left.reshape(total.shape)).abs().max() <= 1e-9  # pyright: ignore


def test_silence_and_replacing_act_where_z_enters_w_o() -> None:
    model, given = GATED.build().double(), GATED.inputs()
    theirs = hw.attach(model)
    with torch.no_grad():
        with theirs.heads["2.1"].silenced():
            silent = model(**given).logits
        site = theirs.sites()[-1]
        with hw.record(theirs, "2.*", what="z") as recording:
            whole = model(**given).logits
        z = torch.stack([recording[address].z for address in site.addresses], 1)
        with site.replaced(z):  # what it is already
            assert torch.equal(model(**given).logits, whole)
        head = theirs.heads["2.1"]
        assert isinstance(head, hw.Head)
        head.W_O.zero_()
        assert (model(**given).logits - silent).abs().max() <= 1e-9
        assert (silent - whole).abs().max() > 1e-4


def test_coupled_heads_can_be_looked_at_and_nothing_else() -> None:
    model, given = COUPLED.build(), COUPLED.inputs("right")
    before = model(**given).logits
    theirs = hw.attach(model)
    with hw.record(theirs) as recording:
        assert torch.equal(model(**given).logits, before)
    assert recording["1.2"].map().shape == (2, 13, 13)
    heads = theirs.heads["1.*"]
    for refused in (
        lambda: heads.silenced().__enter__(),
        lambda: theirs.sites()[0].replaced(lambda z: z).__enter__(),
        lambda: theirs(given["input_ids"], gates={"1.2": 0.0}),
        lambda: theirs.heads["1.2"].W_O,  # pyright: ignore
        lambda: recording["1.2"].write,
    ):
        with pytest.raises(hw.HeadwiseError, match="heads meet between attention and W_O"):
            refused()
    theirs.detach()
    assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("case", [GATED, BIGCODE], ids=lambda case: case.name)
def test_views_of_q_k_and_v_make_them(case: Case) -> None:
    """A head whose W_Q and b_Q are 0 has the same q for every text; its neighbours have not. And so for k and v."""
    for letter in "QKV":
        model = case.build()
        theirs = hw.attach(model)
        head = next(head for head in theirs.heads if head.address.layer == 2 and head.address.head == 1)
        with torch.no_grad():
            for view in (getattr(head, f"W_{letter}"), getattr(head, f"b_{letter}")):
                if view is not None:
                    view.zero_()
        kept: list[Tensor] = []
        with head.layer.site.listen(lambda seen, letter=letter, kept=kept: kept.append(getattr(seen, letter.lower()))):
            model(**case.inputs())
        index = head.index if letter == "Q" else head.kv_index
        assert (kept[0][0, index] - kept[0][1, index]).abs().max() <= 1e-6
        assert all((kept[0][0, i] - kept[0][1, i]).abs().max() > 1e-3 for i in range(kept[0].shape[1]) if i != index)


def test_another_choice_of_attention_is_survived_or_told() -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**given).logits
    theirs = hw.attach(model)
    assert model.config._attn_implementation == "sdpa"  # no configuration is touched
    with theirs.heads["1.1"].silenced():
        silent = model(**given).logits
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(**given).logits, silent)
    model.set_attn_implementation("eager")
    with pytest.raises(hw.HeadwiseError, match="runs on 'eager' now"):
        model(**given)
    theirs.detach()
    assert model.config._attn_implementation == "eager"  # the user's choice stays
    assert (model(**given).logits - before).abs().max() < 1e-4


def test_a_function_of_somebody_elses_in_sdpas_place_is_refused() -> None:
    functions = transformers.AttentionInterface
    own = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    functions.register("sdpa", lambda *arguments, **more: own(*arguments, **more))
    try:
        with pytest.raises(hw.HeadwiseError, match="function of their own"):
            hw.attach(BY_NAME["llama"].build())
    finally:
        functions.register("sdpa", own)


def test_a_copy_of_an_attached_model_is_free_and_can_be_attached() -> None:
    for case in (BY_NAME["llama"], GATED):
        model, given = case.build(), case.inputs()
        before = model(**given).logits
        theirs = hw.attach(model)
        with theirs.heads["2.*"].silenced():
            twin = copy.deepcopy(model)
            again = pickle.loads(pickle.dumps(model))
            for free in (twin, again):
                assert torch.equal(free(**given).logits, before)
        config = copy.deepcopy(model.config)
        for free in (twin, again, type(model)(config).eval()):
            other = hw.attach(free)
            with theirs.heads["2.*"].silenced():
                assert torch.equal(free(**given).logits, other.detach()(**given).logits)


def test_an_attached_model_that_was_saved_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**given).logits
    hw.attach(model)
    torch.save([model, given, before], tmp_path / "model.pt")
    code = f"""
import torch
model, given, before = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(model(**given).logits, before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_checkpointing_leaves_nothing_behind() -> None:
    """How blocks are checkpointed is the user's again after each call, and a second handle's edits count, not the first's."""
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    functions = {name: part.__dict__.get("_gradient_checkpointing_func") for name, part in model.named_modules()}
    gradients = []
    for amounts in ((0.0, 0.3), (0.3,)):
        for amount in amounts:
            theirs = hw.attach(model)
            model.zero_grad()
            with theirs.heads["1.*"].scaled(amount):
                loss = model(**given).logits.square().mean()
            loss.backward()
            theirs.detach()
            now = {name: part.__dict__.get("_gradient_checkpointing_func") for name, part in model.named_modules()}
            assert now == functions
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_ones_own_around_edited_heads_is_refused(reentrant: bool) -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    embeds = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).logits

    theirs = hw.attach(model)
    plain = checkpoint(run, embeds, use_reentrant=reentrant)
    with theirs.heads["1.1"].silenced():  # opened later: none of the repeated pass's business
        plain.square().mean().backward()
    assert embeds.grad is not None
    theirs.detach()
    got, embeds.grad = embeds.grad, None
    run(embeds).square().mean().backward()
    assert (embeds.grad - got).abs().max() <= 1e-6 * got.abs().max()
    theirs = hw.attach(model)
    with theirs.heads["1.1"].silenced():
        out = checkpoint(run, embeds, use_reentrant=reentrant)
    with pytest.raises(hw.HeadwiseError, match="checkpoint of your own"):
        out.square().mean().backward()


def test_a_mask_that_is_written_into_between_calls() -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    T = given["input_ids"].shape[1]
    mask = torch.ones(2, 1, T, T, dtype=torch.bool).tril()
    theirs = hw.attach(model)
    with torch.no_grad(), hw.record(theirs, "1.1", what="map") as recording:
        model(input_ids=given["input_ids"], attention_mask=mask)
        mask[..., 1] = False
        model(input_ids=given["input_ids"], attention_mask=mask)
    first, second = recording["1.1"].calls
    assert (first.map()[:, 3:, 1] > 0).all()
    assert (second.map()[..., 1] == 0).all()


def test_adapters_count_as_they_are_active() -> None:
    peft = pytest.importorskip("peft")
    case = BY_NAME["llama"]
    wrapped = peft.get_peft_model(
        case.build().double(),
        peft.LoraConfig(r=3, target_modules=["o_proj", "v_proj", "q_proj"], init_lora_weights=False),
    ).eval()
    with pytest.raises(hw.HeadwiseError, match=r"hw\.attach\(model\.get_base_model\(\)\)"):
        hw.attach(wrapped)
    model, given = wrapped.get_base_model(), case.inputs()
    theirs = hw.attach(model)
    for context in (False, True):
        with hw.record(theirs, what=("z", "write", "v")) as recording:
            if context:
                with wrapped.disable_adapter():
                    seen = _layer_outputs(theirs, wrapped, given)
                    writes = {a: recording[a].write for a in theirs.heads.addresses}
            else:
                seen = _layer_outputs(theirs, wrapped, given)
                writes = {a: recording[a].write for a in theirs.heads.addresses}
        for layer in theirs.attention_layers():
            total = sum(writes[address] for address in layer.site.addresses)
            assert (total - seen[layer.site.address][1]).abs().max() <= 1e-9  # pyright: ignore
    with torch.no_grad(), theirs.heads["*.*"].silenced():
        assert torch.isfinite(wrapped(**given).logits).all()


@pytest.mark.parametrize("name", ["whisper"])
def test_a_bias_that_only_some_letters_have(name: str) -> None:
    for head in hw.attach(BY_NAME[name].build()).heads:
        assert head.b_K is None
        assert head.b_Q is not None
        assert head.b_V is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_weights_are_not_shown_and_heads_are_silenced_all_the_same() -> None:
    model, given = BY_NAME["opt"].build(), BY_NAME["opt"].inputs()
    packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    before = packed(**given).logits
    theirs = hw.attach(packed)
    with hw.record(theirs, what=("q", "map", "z")) as recording:
        assert torch.equal(packed(**given).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with theirs.heads["1.1"].silenced():
        assert not torch.equal(packed(**given).logits, before)
    head = theirs.heads["1.1"]
    assert isinstance(head, hw.Head)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        with pytest.raises(hw.HeadwiseError):
            getattr(head, name)


def test_offloaded_weights_are_not_shown_and_heads_are_silenced_all_the_same() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    before = model(**given).logits
    accelerate.cpu_offload(model)
    theirs = hw.attach(model)
    with hw.record(theirs, what=("q", "map", "z")) as recording:
        assert torch.equal(model(**given).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with theirs.heads["1.1"].silenced():
        assert not torch.equal(model(**given).logits, before)
    with pytest.raises(hw.HeadwiseError, match="offloaded"):
        theirs.heads["1.1"].W_O  # pyright: ignore


def test_one_layer_that_is_called_many_times() -> None:
    sizes = PLAIN | dict(embedding_size=8, num_hidden_groups=1, inner_group_num=1)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes)).eval()
    tokenizer = hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    theirs = hw.attach(model, tokenizer)
    with pytest.raises(hw.HeadwiseError, match=r"called 3 times.*call=0"):
        hw.attend(theirs, "the cats sat", "0.1").map()
    maps = [hw.attend(theirs, "the cats sat", "0.1", call=number).map() for number in range(3)]
    assert not torch.equal(maps[0], maps[2])
    assert all((one.sum(1) - 1).abs().max() < 1e-5 for one in maps)


def test_every_layer_counts_also_those_without_attention() -> None:
    theirs = hw.attach(GATED.build())
    assert theirs.spec.layers == 3
    more = Case("tail", "Qwen3NextForCausalLM", "Qwen3NextConfig",
                QWEN_NEXT | dict(layer_types=["full_attention", "linear_attention", "linear_attention"]))  # fmt: skip
    assert hw.attach(more.build()).spec.layers == 3
    assert BODY["num_hidden_layers"] == 3


def test_a_body_without_an_output_says_so() -> None:
    case = BY_NAME["bart"]
    model = transformers.BartModel(transformers.BartConfig(**case.sizes)).eval()
    theirs = hw.attach(model)
    assert theirs.spec.output == "none"
    assert theirs.output is None
