"""Architectures of transformers, each so small that a step takes milliseconds, made from its configuration alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the hub; read when transformers is imported

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from tests.models.case import Case

VOCABULARY, BATCH, LENGTH, LABELS, PIXELS = 64, 2, 8, 3, 32

# Names that most configurations know; it does no harm if one does not know all.
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRANSLATES = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1,
    "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SEES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": PIXELS,
    "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
# With several stages, each of its own width.
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": LABELS}
WINDOWS = {
    "image_size": PIXELS, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
    "num_labels": LABELS,
}  # fmt: skip
HEARS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": [8, 8],
    "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "num_labels": LABELS, "vocab_size": VOCABULARY,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

# By the type of model: what is added to the settings of its kind.
CAUSAL: dict[str, Mapping[str, Any]] = {
    "gpt2": {}, "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {}, "gptj": {"rotary_dim": 4}, "gpt_bigcode": {}, "openai-gpt": {}, "opt": {"ffn_dim": 32}, "bloom": {},
    "mpt": {}, "falcon": {}, "llama": {}, "mistral": {"head_dim": 8}, "mixtral": EXPERTS, "qwen2": {}, "qwen3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 8}, "qwen3_moe": EXPERTS, "phi": {}, "phi3": {},
    "gemma": {"head_dim": 8}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8}, "olmo": {}, "olmo2": {},
    "olmoe": EXPERTS, "stablelm": {}, "starcoder2": {}, "cohere": {}, "cohere2": {}, "granite": {},
    "granitemoe": EXPERTS, "gpt_oss": {**EXPERTS, "head_dim": 8}, "glm": {"head_dim": 8}, "glm4": {"head_dim": 8},
    "smollm3": {}, "nemotron": {}, "persimmon": {}, "xglm": {"ffn_dim": 32}, "biogpt": {}, "ctrl": {"dff": 32},
    "exaone4": {}, "ernie4_5": {}, "helium": {"head_dim": 8}, "lfm2": {}, "arcee": {}, "diffllama": {}, "minimax": {},
    "nanochat": {}, "apertus": {}, "hunyuan_v1_dense": {"head_dim": 8}, "seed_oss": {"head_dim": 8}, "rwkv": {},
    "mamba": {}, "falcon_mamba": {}, "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "deepseek_v3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
MASKED: dict[str, Mapping[str, Any]] = {
    "bert": {}, "roberta": {}, "distilbert": {"hidden_dim": 32}, "albert": {"embedding_size": 8}, "electra": {},
    "deberta": {}, "deberta-v2": {}, "mpnet": {}, "camembert": {}, "xlm-roberta": {}, "roformer": {}, "fnet": {},
    "convbert": {"embedding_size": 16}, "longformer": {"attention_window": 4}, "big_bird": {}, "nystromformer": {},
    "esm": {}, "modernbert": {}, "eurobert": {}, "megatron-bert": {}, "ernie": {}, "rembert": {},
    "data2vec-text": {}, "ibert": {}, "layoutlm": {}, "tapas": {}, "xlm": {}, "flaubert": {}, "yoso": {}, "mra": {},
    "luke": {"entity_vocab_size": 8},
}  # fmt: skip
SEQUENCE_TO_SEQUENCE: dict[str, Mapping[str, Any]] = {
    "t5": {}, "mt5": {}, "umt5": {}, "longt5": {}, "switch_transformers": {"num_experts": 2}, "bart": {}, "mbart": {},
    "pegasus": {}, "marian": {}, "blenderbot": {}, "blenderbot-small": {}, "m2m_100": {}, "plbart": {}, "mvp": {},
    "bigbird_pegasus": {}, "nllb-moe": {"num_experts": 2},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
}  # fmt: skip
IMAGES: dict[str, Mapping[str, Any]] = {
    "vit": SEES, "beit": SEES, "data2vec-vision": SEES, "dinov2": SEES, "dinov2_with_registers": SEES,
    "vit_msn": SEES, "ijepa": SEES, "resnet": {**STAGES, "embedding_size": 8}, "regnet": {**STAGES, "groups_width": 8},
    "convnext": {**STAGES, "num_stages": 2}, "convnextv2": {**STAGES, "num_stages": 2},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "mobilenet_v1": {**SEES, "depth_multiplier": 0.25}, "mobilenet_v2": {**SEES, "depth_multiplier": 0.25},
    "bit": {**STAGES, "embedding_size": 8, "num_groups": 2},
    "focalnet": {
        **SEES, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
        "focal_levels": [1, 1], "focal_windows": [3, 3],
    },
}  # fmt: skip
SOUNDS: dict[str, Mapping[str, Any]] = {
    "wav2vec2": {}, "wav2vec2-conformer": {}, "hubert": {}, "wavlm": {}, "unispeech": {}, "data2vec-audio": {},
    "sew": {},
}  # fmt: skip


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _next_token(model: nn.Module) -> torch.Tensor:
    ids = _ids()
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _of_image(model: nn.Module) -> torch.Tensor:
    pixels, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(LABELS, (BATCH,))
    loss: torch.Tensor = model(pixel_values=pixels, labels=labels).loss
    return loss


def _of_sound(model: nn.Module) -> torch.Tensor:
    sound, labels = torch.randn(BATCH, 400), torch.randint(LABELS, (BATCH,))
    loss: torch.Tensor = model(input_values=sound, labels=labels).loss
    return loss


# By the name in the table: the class that has the head for the loss, the type, its settings, and the loss.
KINDS: dict[str, tuple[Any, str, Mapping[str, Any], Callable[[nn.Module], torch.Tensor]]] = {
    f"transformers {kind}": (head, kind, {**common, **own}, loss)
    for head, common, architectures, loss in (
        (transformers.AutoModelForCausalLM, TEXT, CAUSAL, _next_token),
        (transformers.AutoModelForMaskedLM, TEXT, MASKED, _next_token),
        (transformers.AutoModelForSeq2SeqLM, TRANSLATES, SEQUENCE_TO_SEQUENCE, _next_token),
        (transformers.AutoModelForImageClassification, {}, IMAGES, _of_image),
        (transformers.AutoModelForAudioClassification, HEARS, SOUNDS, _of_sound),
    )
    for kind, own in architectures.items()
}


def case_of(name: str) -> Case:
    """The case of a name in `KINDS`."""
    head, kind, settings, loss = KINDS[name]
    return Case(name, lambda: head.from_config(AutoConfig.for_model(kind, **settings)), loss)
