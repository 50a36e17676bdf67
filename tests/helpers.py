"""Small models that several tests share: built in a second, the same in every run, cached for the session."""

import copy
from functools import lru_cache
from typing import Any

import torch

from translator.checkpoint import Checkpoint, CheckpointConfig
from translator.config import DecodeConfig, ModelConfig
from translator.model import TranslationModel
from translator.pipeline import Translator
from translator.tokenizer import Tokenizer

ENGLISH = [
    "The cat sat on the mat and looked at the dog.",
    "I would like a cup of tea, please.",
    "Where is the station? It is over there.",
    "She has been reading the same book for three weeks.",
    "Tom doesn't know how to swim, does he?",
    "We were waiting for the rain to stop.",
    "The price is 123 percent higher than it was last year!",
    "What a beautiful day; let us go for a walk.",
    "He said that he would come back tomorrow morning.",
    "Nobody knows what will happen next.",
]
CHINESE = [
    "猫坐在垫子上，看着狗。",
    "请给我一杯茶。",
    "车站在哪里？就在那边。",
    "她三个星期以来一直在读同一本书。",
    "汤姆不会游泳，对吗？",
    "我们在等雨停。",
    "价格：比去年高了１２３％，好！",
    "多么美好的一天，我们去散步吧。",
    "他说他明天早上会回来。",
    "没有人知道接下来会发生什么。",
]
VOCABULARY = 420


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """A SentencePiece model of `VOCABULARY` pieces, 256 of them bytes, trained on the sentences above."""
    return Tokenizer.train(ENGLISH + CHINESE, VOCABULARY, threads=1)


@lru_cache
def tiny_model(seed: int = 11, **changes: Any) -> TranslationModel:
    """A random model in eval mode with big weights, under which every token, position and padding counts.

    A model fresh from its initialisation is nearly uniform, and most faults don't show on it. This one's output
    varies from step to step and from source to source, and some of it ends before the limit.
    """
    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "nhead": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "dim_feedforward": 48,
        "dropout": 0.0,
        "max_positions": 96,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = TranslationModel(ModelConfig(**(settings | changes)))
        for name, parameter in model.named_parameters():
            if name.endswith("_positions.weight"):
                parameter.mul_(8)
            elif name in ("encoder.norm.weight", "decoder.norm.weight"):
                parameter.mul_(3)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name != "embedding.weight":
                parameter.mul_(4)
        model.embedding.weight.mul_(0.3)
        model.embedding.weight[4:260].mul_(0.7)  # fewer bytes: most of them spell nothing
        model.embedding.weight[3].mul_(2.2)  # the end token
    return model.eval().requires_grad_(False)


@lru_cache
def tiny_model64(seed: int = 11, **changes: Any) -> TranslationModel:
    """The tiny model in fp64: where rounding must not decide between two tokens."""
    return copy.deepcopy(tiny_model(seed, **changes)).double()


def tiny_checkpoint(decode: DecodeConfig | None = None, model: TranslationModel | None = None) -> Checkpoint:
    """A checkpoint from English to Chinese around the tiny model, or around `model`."""
    model = model or tiny_model()
    config = CheckpointConfig(
        source_language="en", target_language="zh", model=model.config, decode=decode or DecodeConfig()
    )
    return Checkpoint(model, tiny_tokenizer(), config)


def tiny_translator(
    decode: DecodeConfig | None = None, model: TranslationModel | None = None, **options: Any
) -> Translator:
    """A `Translator` around the tiny checkpoint."""
    return Translator(tiny_checkpoint(decode, model), **options)
