"""`p2ptrain export`: writes a checkpoint as a directory that transformers loads, with its tokenizer.

A GPT becomes a GPT2LMHeadModel, a Llama a Qwen3ForCausalLM (without QK-norm a LlamaForCausalLM). Models of `hf:` keep
their class. Neither pickles nor code are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.tokenizer import IDS, Tokenizer
from p2ptrain.training.data.tokenizer_file import SEPARATOR, TOKENIZER_FILE, TokenizerFile, as_file
from p2ptrain.training.models import GPT, Llama, context_length
from p2ptrain.training.models.gpt import NORM_EPS
from p2ptrain.training.models.hf import CausalLM
from p2ptrain.training.models.llama import RMS_EPS, ROPE_THETA

# Our name of a module, then transformers' name, and whether its matrix is transposed there: Conv1D keeps (in, out).
_GPT2_NAMES = {
    "attention_norm": ("ln_1", False),
    "attention.query_key_value": ("attn.c_attn", True),
    "attention.project": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp.expand": ("mlp.c_fc", True),
    "mlp.project": ("mlp.c_proj", True),
}


def export(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write config.json, model.safetensors, and the tokenizer if there is one.

    Raises ConfigError if transformers has no class for the model, or `out` is not empty or cannot be written.
    """
    is_theirs = isinstance(model, CausalLM)
    config, weights = ({}, {}) if is_theirs else converted(model)
    config |= {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: is not empty; give a new directory")
        try:
            if isinstance(model, CausalLM):
                _end_as(tokenizer, model)
                model.lm.save_pretrained(out)  # type: ignore[operator]
            else:
                _write_json(out / "config.json", config)
                save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
            _share_weights(out)
            if tokenizer.identity != IDS:
                # It must not add tokens around a text: the model was trained without them.
                content = json.loads(as_file(tokenizer)) | {"post_processor": None}
                (out / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
                _write_json(out / "tokenizer_config.json", _tokenizer_config(tokenizer, context_length(model)))
        except BaseException:
            for path in out.iterdir():  # all ours; left there, they would refuse the next attempt
                path.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"--out {error.filename or out}: cannot be written ({error.strerror})") from error
    except SafetensorError as error:  # a full disk
        raise ConfigError(f"--out {out}: cannot be written ({error})") from error


def _end_as(tokenizer: Tokenizer, model: CausalLM) -> None:
    """Set the model's end of text to the tokenizer's. Its own may be another tokenizer's: texts would never end.

    It stays if the tokenizer's is one of several, or is not known.
    """
    end = tokenizer.separator
    if tokenizer.identity == IDS or (end is None and isinstance(tokenizer, TokenizerFile)):
        return
    for ids in (model.lm.config, model.lm.generation_config):
        own = getattr(ids, "eos_token_id", None)
        if end is None or end not in (own if isinstance(own, list) else [own]):
            ids.bos_token_id = ids.eos_token_id = end  # type: ignore[union-attr]


def converted(model: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the weights for transformers. Raises ConfigError if it has no class for the model."""
    if isinstance(model, GPT):
        return _gpt2(model)
    if isinstance(model, Llama):
        return _llama(model)
    raise ConfigError(
        f"{type(model).__name__}: transformers has no class for a model of your own; load the checkpoint's "
        f"model.safetensors into it yourself"
    )


def _gpt2(model: GPT) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    shape = model.config
    if shape.attention_width != shape.width:
        raise ConfigError(
            f"the model has {shape.heads} heads of {shape.head_size} on a width of {shape.width}, which GPT-2 cannot "
            f"have: it divides the width among the heads. Only models without head_size can be exported"
        )
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": NORM_EPS,
        "tie_word_embeddings": True,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "torch_dtype": "float32",
    }
    named = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
    weights = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        transposed = False
        if module.startswith("blocks."):
            _, number, part = module.split(".", 2)
            theirs, transposed = _GPT2_NAMES[part]
            module = f"h.{number}.{theirs}"
        else:
            module = named[module]
        value = value.T if transposed and kind == "weight" else value
        weights[f"transformer.{module}.{kind}"] = value.detach().cpu().contiguous()
    return config, weights


def _llama(model: Llama) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    shape = model.config
    name = "Qwen3" if shape.qk_norm else "Llama"
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    return config, {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def _tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    if tokenizer.separator is None:
        return named
    separator = tokenizer.decode([tokenizer.separator]) if tokenizer.file else SEPARATOR
    return {**named, "bos_token": separator, "eos_token": separator}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _share_weights(out: Path) -> None:
    """Give files of weights, which safetensors makes for their owner alone, the mode of the other files."""
    mode = (out / "config.json").stat().st_mode
    for path in out.glob("*.safetensors"):
        path.chmod(mode)
