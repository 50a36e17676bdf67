"""CTranslate2: its `TransformerSpec`, pre-norm, with this project's vocabulary. Needs the package `ctranslate2`.

Weights are written in fp32; CTranslate2 converts them when it loads (`compute_type="int8"`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention
from translator.checkpoint import TOKENIZER, Checkpoint
from translator.errors import UserError
from translator.export.parts import check_structure, load_instructions
from translator.model import TranslationModel
from translator.textio import atomic_write_bytes

USAGE = """\
import ctranslate2
import sentencepiece

tokenizer = sentencepiece.SentencePieceProcessor(model_file="{tokenizer}")
translator = ctranslate2.Translator(".", compute_type="int8")  # or float32, as it was trained
tokens = tokenizer.encode(" ".join("Where is the station?".split()), out_type=str)
[result] = translator.translate_batch(
    [tokens],
    beam_size={beam_size},
    length_penalty={length_penalty},
    no_repeat_ngram_size={no_repeat_ngram_size},
    max_input_length={max_positions},
    max_decoding_length={max_positions},
    suppress_sequences={suppressed},
)
print(tokenizer.decode(result.hypotheses[0]))
"""


def prepare(checkpoint: Checkpoint, compute_type: str) -> Callable[[Path], None]:
    """What saves `checkpoint` into a folder; raises `UserError` for what CTranslate2 can't express or without it."""
    try:
        import ctranslate2
    except ImportError:
        raise UserError("--to ctranslate2: its package is not installed; pip install ctranslate2") from None
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    check_structure(config.model, compute_type, "ctranslate2")
    if not config.model.num_encoder_layers:
        raise UserError("--to ctranslate2: cannot express num_encoder_layers = 0; it takes 1 or more")
    specs = ctranslate2.specs
    activation = {"relu": specs.Activation.RELU, "gelu": specs.Activation.GELU}[config.model.activation]
    layers = (config.model.num_encoder_layers, config.model.num_decoder_layers)
    spec = specs.TransformerSpec.from_config(layers, config.model.nhead, pre_norm=True, activation=activation)
    _set_model(spec, checkpoint.model)
    pieces = tokenizer.pieces(list(range(tokenizer.vocab_size)))
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    start, end = pieces[tokenizer.bos_id], pieces[tokenizer.eos_id]
    settings = spec.config
    settings.unk_token, settings.bos_token, settings.eos_token = pieces[tokenizer.unk_id], start, end
    settings.decoder_start_token, settings.add_source_bos, settings.add_source_eos = start, False, True
    settings.layer_norm_epsilon = config.model.layer_norm_eps
    spec.validate()
    spec.optimize()
    usage = USAGE.format(
        tokenizer=TOKENIZER,
        suppressed=[[pieces[tokenizer.pad_id]], [start]],
        max_positions=config.model.max_positions,
        beam_size=config.decode.beam_size,
        length_penalty=config.decode.length_penalty,
        no_repeat_ngram_size=config.decode.no_repeat_ngram_size,
    )

    def save(folder: Path) -> None:
        spec.save(str(folder))
        atomic_write_bytes(folder / TOKENIZER, tokenizer.model)
        atomic_write_bytes(
            folder / "README.md", load_instructions(config, "CTranslate2", usage, tokenizer.has_slots).encode()
        )

    return save


def _set_model(spec: Any, model: TranslationModel) -> None:
    embedding = _array(model.embedding.weight)
    spec.encoder.embeddings[0].weight = embedding
    spec.decoder.embeddings.weight = embedding
    spec.encoder.position_encodings.encodings = _array(model.source_positions.weight)
    spec.decoder.position_encodings.encodings = _array(model.target_positions.weight)
    _set_norm(spec.encoder.layer_norm, model.encoder.norm)
    _set_norm(spec.decoder.layer_norm, cast(nn.LayerNorm, model.decoder.norm))
    spec.decoder.projection.weight = embedding
    # Of zeros, for a projection without a bias is one that CTranslate2 may pad, and then computes in another way.
    spec.decoder.projection.bias = _array(model.embedding.weight.new_zeros(model.config.vocab_size))
    for to, layer in zip(spec.encoder.layer, model.encoder.stack, strict=True):
        _set_self_attention(to.self_attention, layer.self_attn, layer.norm1)
        _set_feed_forward(to.ffn, layer.linear1, layer.linear2, layer.norm2)
    for to, own in zip(spec.decoder.layer, model.decoder.stack, strict=True):
        _set_self_attention(to.self_attention, cast(CachedMultiheadAttention, own.self_attn), own.norm1)
        _set_cross_attention(to.attention, own.multihead_attn, own.norm2)
        _set_feed_forward(to.ffn, own.linear1, own.linear2, own.norm3)


def _set_self_attention(spec: Any, attention: CachedMultiheadAttention, norm: nn.LayerNorm) -> None:
    products = attention.products()
    for to, name in zip(spec.linear, ("qkv", "out_proj"), strict=True):
        _set_linear(to, *products[name])
    _set_norm(spec.layer_norm, norm)


def _set_cross_attention(spec: Any, attention: CachedMultiheadAttention, norm: nn.LayerNorm) -> None:
    products = attention.products()
    for to, name in zip(spec.linear, ("q", "kv", "out_proj"), strict=True):
        _set_linear(to, *products[name])
    _set_norm(spec.layer_norm, norm)


def _set_feed_forward(spec: Any, first: nn.Linear, second: nn.Linear, norm: nn.LayerNorm) -> None:
    _set_linear(spec.linear_0, first.weight, first.bias)
    _set_linear(spec.linear_1, second.weight, second.bias)
    _set_norm(spec.layer_norm, norm)


def _set_linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _set_norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Any) -> Any:
    return tensor.detach().float().cpu().contiguous().numpy()
