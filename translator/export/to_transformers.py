"""Hugging Face Transformers: a `BlenderbotForConditionalGeneration`, written without importing that library.

Of the classes there, Blenderbot is this model: pre-norm, a position table of its own on either side that is read from
row 0, scaled and shared embeddings, a final norm in encoder and decoder. Sinusoidal positions are written out as its
table: M2M100, which computes its own, begins at row `pad_token_id + 1`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from translator.checkpoint import CONFIG, TOKENIZER, WEIGHTS, Checkpoint, write_tensors
from translator.config import DecodeConfig
from translator.errors import UserError
from translator.export.parts import check_structure, load_instructions
from translator.textio import atomic_write_bytes, json_text

GENERATION = "generation_config.json"
LAYER_NORM_EPS = 1e-5  # what the library's class has, with no setting for another

USAGE = """\
import sentencepiece
import torch
from transformers import AutoModelForSeq2SeqLM

tokenizer = sentencepiece.SentencePieceProcessor(model_file="{tokenizer}")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
ids = tokenizer.encode(" ".join("Where is the station?".split())) + [{end}]
[tokens] = model.generate(torch.tensor([ids]))
print(tokenizer.decode(tokens.tolist()))
"""


def prepare(checkpoint: Checkpoint, compute_type: str) -> Callable[[Path], None]:
    """What saves `checkpoint` into a folder; raises `UserError` for what the library's class can't express."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    check_structure(config.model, compute_type, "transformers")
    if config.model.layer_norm_eps != LAYER_NORM_EPS:
        raise UserError(
            f"--to transformers: cannot express layer_norm_eps = {config.model.layer_norm_eps}; "
            f"its class has {LAYER_NORM_EPS} alone"
        )
    settings = _settings(checkpoint)
    generation = _generation(checkpoint)
    tensors = _tensors(checkpoint)
    usage = USAGE.format(tokenizer=TOKENIZER, end=tokenizer.eos_id)

    def save(folder: Path) -> None:
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        for name, values in ((CONFIG, settings), (GENERATION, generation)):
            atomic_write_bytes(folder / name, (json_text(values, indent=2) + "\n").encode())
        atomic_write_bytes(folder / TOKENIZER, tokenizer.model)
        atomic_write_bytes(
            folder / "README.md", load_instructions(config, "Transformers", usage, tokenizer.has_slots).encode()
        )

    return save


def _special_ids(checkpoint: Checkpoint) -> dict[str, int]:
    tokenizer = checkpoint.tokenizer
    return {
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
    }


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    model = checkpoint.config.model
    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", model.num_encoder_layers), ("decoder", model.num_decoder_layers))
        for name, value in (
            ("layers", layers),
            ("attention_heads", model.nhead),
            ("ffn_dim", model.dim_feedforward),
            ("layerdrop", 0.0),
        )
    }
    return {
        "architectures": ["BlenderbotForConditionalGeneration"],
        "model_type": "blenderbot",
        "is_encoder_decoder": True,
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        **sides,
        "max_position_embeddings": model.max_positions,
        "activation_function": model.activation,
        "dropout": model.dropout,
        "attention_dropout": 0.0,
        "activation_dropout": model.dropout,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        **_special_ids(checkpoint),
        # The class's own defaults for these two are made for chatting.
        "forced_eos_token_id": None,
        "encoder_no_repeat_ngram_size": 0,
        "dtype": "float32",
    }


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """How to decode by default, as the checkpoint says; raises `UserError` for a search of another name."""
    decode: DecodeConfig = checkpoint.config.decode
    if decode.search_name not in ("greedy", "beam", "sampling"):
        raise UserError(
            f"--to transformers: cannot express search = {decode.search_name!r}; it has greedy, beam, sampling"
        )
    sampling = decode.search_name == "sampling"
    drawing = {"temperature": decode.temperature, "top_k": decode.top_k, "top_p": decode.top_p}
    return {
        **_special_ids(checkpoint),
        "max_length": checkpoint.config.model.max_positions + 1,  # the start token counts there
        "num_beams": 1 if sampling or decode.search_name == "greedy" else decode.beam_size,
        "length_penalty": decode.length_penalty,
        "early_stopping": decode.early_stopping,
        "no_repeat_ngram_size": decode.no_repeat_ngram_size,
        "suppress_tokens": [checkpoint.tokenizer.pad_id, checkpoint.tokenizer.bos_id],
        "do_sample": sampling,
        **(drawing if sampling else {}),
    }


# The names of a layer's parts there, by their names here.
_PARTS = {"linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm"}
_ENCODER = {**_PARTS, "norm2": "final_layer_norm"}
_DECODER = {**_PARTS, "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
_ATTENTIONS = {"self_attn": "self_attn", "multihead_attn": "encoder_attn"}


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    model = checkpoint.model
    found: dict[str, Tensor] = {
        "model.shared.weight": model.embedding.weight,
        "final_logits_bias": torch.zeros(1, model.config.vocab_size),
        "model.encoder.embed_positions.weight": model.source_positions.weight,  # type: ignore[dict-item]
        "model.decoder.embed_positions.weight": model.target_positions.weight,  # type: ignore[dict-item]
    }
    for side, stack, parts in (("encoder", model.encoder, _ENCODER), ("decoder", model.decoder, _DECODER)):
        found |= _linear(f"model.{side}.layer_norm", stack.norm)
        for number, layer in enumerate(stack.layers):
            place = f"model.{side}.layers.{number}"
            for mine, theirs in parts.items():
                found |= _linear(f"{place}.{theirs}", layer.get_submodule(mine))
            for mine, theirs in _ATTENTIONS.items():
                if hasattr(layer, mine):
                    found |= _attention(f"{place}.{theirs}", layer.get_submodule(mine))
    return {name: tensor.detach().float() for name, tensor in found.items()}


def _linear(place: str, module: Any) -> dict[str, Tensor]:
    return {f"{place}.weight": module.weight, f"{place}.bias": module.bias}


def _attention(place: str, module: Any) -> dict[str, Tensor]:
    """Q, K and V apart, as the class keeps them."""
    found = _linear(f"{place}.out_proj", module.out_proj)
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        found |= {f"{place}.{name}.weight": weight, f"{place}.{name}.bias": bias}
    return found
