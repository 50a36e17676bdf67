"""Each structure learns: a source of up to eight symbols, said backwards, decoded with a cache."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.translator.attention.test_every_structure import CASES
from translator.attention import Packing
from translator.config import ModelConfig
from translator.model import TranslationModel

BOS, EOS, SYMBOLS = 2, 3, range(4, 14)


def draw(chance: random.Random, count: int) -> list[list[int]]:
    return [[chance.choice(SYMBOLS) for _ in range(chance.randint(2, 8))] for _ in range(count)]


def trained(layer: dict[str, Any], steps: int) -> TranslationModel:
    torch.manual_seed(0)
    chance = random.Random(0)
    config = ModelConfig(
        vocab_size=14, d_model=48, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=96,
        dropout=0.0, max_positions=16, decoder_layers=(layer, layer),
    )  # fmt: skip
    model = TranslationModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        sources = draw(chance, 48)
        ends = [[*source, EOS] for source in sources]
        targets = [[BOS, *reversed(source)] for source in sources]
        wanted = torch.tensor([token for source in sources for token in (*reversed(source), EOS)])
        packings = (Packing([len(row) for row in rows]) for rows in (ends, targets))
        hidden = model.packed(
            *(torch.tensor([token for row in rows for token in row]) for rows in (ends, targets)), *packings
        )
        loss = F.cross_entropy(model.logits(hidden), wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def exact(model: TranslationModel, count: int = 200) -> float:
    """The share of fresh sources that come out backwards, and nothing else."""
    right = 0
    for source in draw(random.Random(1), count):
        cache = model.start(model.encode(torch.tensor([[*source, EOS]])), kind="dynamic")
        token, found = BOS, []
        while token != EOS and len(found) < 12:
            token = int(model.logits(model.decode(torch.tensor([[token]]), cache))[0, -1].argmax())
            found.append(token)
        right += found == [*reversed(source), EOS]
    return right / count


@pytest.mark.slow
@pytest.mark.parametrize("case", ["compressed, heavy", "compressed, light", "latent", "linear"])
def test_a_structure_learns_to_say_things_backwards(case):
    name, options, *_ = CASES[case]
    assert exact(trained({"attention": name, **options}, 400)) >= 0.95
