"""Tiny random models with several towers, each with the arguments of a full call."""

from typing import Any

import torch
import transformers
from torch import Tensor

T: Any = transformers  # configurations accept more arguments than their signatures say

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
IMAGE_TOKEN = 98  # placeholder token that is replaced by patches

ModelAndInputs = tuple[Any, dict[str, Tensor]]


def _ids(patches: int) -> Tensor:
    between = [IMAGE_TOKEN] * patches
    return torch.tensor([[5, 7, *between, 11, 13, 17], [6, 8, *between, 12, 14, 18]])


def _pixels() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def clip() -> ModelAndInputs:
    """Two towers that are combined at the end."""
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
            "max_position_embeddings": 16, "eos_token_id": 98, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    model = T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))
    return model, {"input_ids": torch.tensor([[1, 5, 7, 98], [1, 8, 9, 98]]), "pixel_values": _pixels()}


def llava() -> ModelAndInputs:
    """Patches within the text."""
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(**VISION), text_config=T.LlamaConfig(**TEXT), image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )  # fmt: skip
    return T.LlavaForConditionalGeneration(config), {"input_ids": _ids(16), "pixel_values": _pixels()}


def paligemma() -> ModelAndInputs:
    """Patches before the text."""
    text = T.GemmaConfig(**TEXT, head_dim=8)
    vision = T.SiglipVisionConfig(**VISION)
    config = T.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, projection_dim=32)
    model = T.PaliGemmaForConditionalGeneration(config)
    return model, {"input_ids": _ids(16), "pixel_values": _pixels(), "token_type_ids": torch.zeros_like(_ids(16))}


def gemma3() -> ModelAndInputs:
    """Patches of an image attend to each other, within causal text."""
    text, vision = T.Gemma3TextConfig(**TEXT, head_dim=8), T.SiglipVisionConfig(**VISION)
    config = T.Gemma3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, mm_tokens_per_image=4, boi_token_id=96,
        eoi_token_id=97,
    )  # fmt: skip
    ids = _ids(4)
    model = T.Gemma3ForConditionalGeneration(config)
    return model, {"input_ids": ids, "pixel_values": _pixels(), "token_type_ids": (ids == IMAGE_TOKEN).long()}


def qwen() -> ModelAndInputs:
    """Qwen2.5-VL: its vision tower calls attention once per window."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "patch_size": 4, "out_hidden_size": 32,
              "fullatt_block_indexes": [1], "window_size": 16}  # fmt: skip
    config = T.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE_TOKEN,
        vision_start_token_id=96, vision_end_token_id=97, video_token_id=95,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    ids = torch.tensor([[5, 96, *[IMAGE_TOKEN] * 4, 97, 11, 13]])
    pixels = torch.randn(16, 96, generator=generator)
    model = T.Qwen2_5_VLForConditionalGeneration(config)
    return model, {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def blip2() -> ModelAndInputs:
    """Query tokens between the towers that cross-attend to patches."""
    query = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
             "encoder_hidden_size": 24, "cross_attention_frequency": 2, "vocab_size": 99}  # fmt: skip
    text = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
            "vocab_size": 99, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    config = T.Blip2Config(
        vision_config=VISION, qformer_config=query, text_config=text, num_query_tokens=4, image_token_id=IMAGE_TOKEN
    )
    config.image_token_index = IMAGE_TOKEN
    return T.Blip2ForConditionalGeneration(config), {"input_ids": _ids(4), "pixel_values": _pixels()}


def whisper() -> ModelAndInputs:
    """Audio and text: an encoder and a decoder."""
    config = T.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=99, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
    model = T.WhisperForConditionalGeneration(config)
    return model, {"input_features": sound, "decoder_input_ids": torch.tensor([[1, 5, 7], [1, 8, 9]])}


ALL = (clip, llava, paligemma, gemma3, qwen, blip2, whisper)


def build_model(build: Any) -> ModelAndInputs:
    """Return a model and its inputs in float64. Zero-initialized weights are randomized, so that all towers are connected."""
    torch.manual_seed(0)
    model, call = build()
    with torch.no_grad():
        for weight in model.parameters():
            if not bool(weight.any()):
                weight.normal_(0, 0.1)
    return model.double().eval(), {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
