"""The models and inputs that every system gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from translator.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, CheckpointConfig, read_checkpoint, write_checkpoint
from translator.config import preset
from translator.errors import UserError
from translator.export import FORMATS, export_checkpoint
from translator.model import TranslationModel
from translator.tokenizer import Tokenizer

SOURCE = 40  # tokens of the one sentence, end token included
XIANYAN_VOCABULARY, XIANYAN_POSITIONS = 16_000, 1024


def model_folders(names: list[str], into: Path, say: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """Folders of each model by format; a format whose package is missing is left out, with a line that says so."""
    folders = {}
    for name in names:
        source = DEFAULT_CHECKPOINT if name == "default" else random_checkpoint(name, into / name)
        folders[name] = {"checkpoint": str(source)}
        for to in FORMATS:
            output = into / f"{name}-{to}"
            try:
                export_checkpoint(read_checkpoint(source), to, output)
            except UserError as error:
                say(str(error))
                continue
            folders[name][to] = str(output)
    return folders


def random_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a preset with random weights, and the shipped tokenizer made up to its vocabulary."""
    import torch

    torch.manual_seed(0)
    tokenizer = widened(Tokenizer.load(DEFAULT_CHECKPOINT / "tokenizer.model"), XIANYAN_VOCABULARY)
    model = TranslationModel(preset(name, XIANYAN_VOCABULARY, max_positions=XIANYAN_POSITIONS))
    config = CheckpointConfig(source_language="en", target_language="zh", model=model.config)
    folder.mkdir(parents=True)
    write_checkpoint(folder, Checkpoint(model, tokenizer, config))
    return folder


def widened(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The tokenizer with pieces that no text needs, up to `size`.

    A serialised model is a list of fields, and pieces appended to it belong to it: field 1, each with its text (field
    1) and its score (field 2, a float, far below any other).
    """
    score = b"\x15\x00\x00\x7a\xc4"  # -1000.0
    pieces = [f"unused{number:05}".encode() for number in range(size - tokenizer.vocab_size)]
    bodies = [b"\x0a" + bytes([len(text)]) + text + score for text in pieces]
    return Tokenizer(tokenizer.model + b"".join(b"\x0a" + bytes([len(body)]) + body for body in bodies))


def source_ids(vocabulary: int) -> list[int]:
    """The one sentence: random pieces, the same in every run, and the end token."""
    draw = random.Random(7)
    return [*(draw.randrange(300, min(vocabulary, 8000)) for _ in range(SOURCE - 1)), 3]


def held_out(count: int) -> list[str]:
    """Different English sentences of the default corpora, held-out ones first."""
    from train.data import load_data
    from train.recipe import read_recipe

    data = load_data(*read_recipe("small"), say=lambda line: None)
    sentences = [*data.test.sources, *data.dev.sources, *(pair.source for pair in data.train)]
    return list(dict.fromkeys(sentences))[:count]


def mixed_lines(count: int) -> list[str]:
    """Different English lines of mixed lengths: every fifth is two sentences joined, every tenth three."""
    draw = iter(held_out(2 * count))
    lines = [" ".join(next(draw) for _ in range(3 if n % 10 == 9 else 2 if n % 5 == 4 else 1)) for n in range(count)]
    random.Random(7).shuffle(lines)
    return lines
