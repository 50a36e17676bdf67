"""A copy task small enough to train in seconds."""

import random
from pathlib import Path

WORDS = ["red", "green", "blue", "one", "two", "cat", "dog", "bird", "sun", "moon", "star", "tree", "sea", "sky"]

RECIPE = """
source_language = "en"
target_language = "en-x-copy"
corpora = [["pairs.src", "pairs.tgt"]]
output = "{run}"

[split]
dev = [["dev.src", "dev.tgt"]]
test = [["dev.src", "dev.tgt"]]

[filters]
drop_duplicates = false

[tokenizer]
vocab_size = 290

[model]
d_model = 32
nhead = 2
num_encoder_layers = 1
num_decoder_layers = 1
dim_feedforward = 64
max_positions = 64

[training]
max_steps = 20
batch_tokens = 256
learning_rate = 3e-3
warmup_steps = 5
precision = "float32"
max_tokens = 64
log_every = 1
save_every = 5

[evaluation]
every = 10
sentences = 8
samples = 1
"""


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


def write_copy_task(folder: Path, name: str = "run", **replacements: str) -> Path:
    """Writes the text and a recipe for it, whose run goes to `folder/name`; keywords replace text of the recipe."""
    for part, count, seed in (("pairs", 300, 1), ("dev", 8, 2)):
        for side in ("src", "tgt"):
            (folder / f"{part}.{side}").write_text("\n".join(sentences(count, seed)) + "\n", encoding="utf-8")
    text = RECIPE.format(run=folder / name)
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
