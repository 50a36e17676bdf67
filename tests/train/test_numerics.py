"""Twenty steps of a run against the same written out in plain PyTorch and by hand, in double precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench_train import Plain
from tests.train import runs
from train import backward, loop, run
from train.batches import Batch
from translator.checkpoint import Checkpoint

STEPS, RATE, WARMUP, DECAY, SMOOTHING, CLIP, AVERAGE = 20, 2e-3, 4, 0.1, 0.1, 0.9, 0.95
BETAS, EPSILON = (0.9, 0.98), 1e-8
RECIPE = f"""
source_language = "en"
target_language = "de"
output = "run"
corpora = ["pairs.tsv"]
[filters]
target_script = "any"
[model]
preset = "tiny"
dropout = 0.0
[training]
max_steps = {STEPS}
batch_tokens = 60
accumulate = 3
learning_rate = {RATE}
warmup_steps = {WARMUP}
weight_decay = {DECAY}
label_smoothing = {SMOOTHING}
clip_norm = {CLIP}
average_decay = {AVERAGE}
precision = "float32"
"""


def loss_of(model: Plain, batch: Batch) -> Tensor:
    """The summed loss of a batch, padded again, with the model made of PyTorch's own parts."""
    sources, targets = (
        part.split(packing.lengths.tolist())
        for part, packing in ((batch.source, batch.source_packing), (batch.target_in, batch.target_packing))
    )
    expected = batch.target_out.split(batch.target_packing.lengths.tolist())
    source = nn.utils.rnn.pad_sequence(list(sources), batch_first=True)
    target = nn.utils.rnn.pad_sequence(list(targets), batch_first=True)
    wanted = nn.utils.rnn.pad_sequence(list(expected), batch_first=True, padding_value=-100)
    hidden = torch.arange(source.shape[1]) >= batch.source_packing.lengths.unsqueeze(1)
    logits = model(source, hidden, target)
    return F.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), label_smoothing=SMOOTHING, reduction="sum", ignore_index=-100
    )


def by_hand(start: dict[str, Tensor], config: Any, steps: list[list[Batch]]) -> tuple[dict[str, Tensor], ...]:
    """Weights and averaged weights after the steps."""
    model = Plain(config).double()
    model.load_state_dict(start)
    weights = dict(model.named_parameters())
    first, second = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    averages = {name: weight.detach().clone() for name, weight in weights.items()}
    for step, batches in enumerate(steps, 1):
        model.zero_grad()
        tokens = sum(len(batch.target_out) for batch in batches)
        for batch in batches:
            (loss_of(model, batch) / tokens).backward()
        norm = math.sqrt(sum(float(weight.grad.pow(2).sum()) for weight in weights.values()))
        rate = RATE * step / WARMUP if step <= WARMUP else (
            RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        )  # fmt: skip
        decay = min(AVERAGE, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = weight.grad * min(1.0, CLIP / (norm + 1e-6))
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
                slope = first[name] / (1 - BETAS[0] ** step)
                size = (second[name] / (1 - BETAS[1] ** step)).sqrt() + EPSILON
                weight.mul_(1 - rate * DECAY).sub_(rate * slope / size)
                averages[name] = decay * averages[name] + (1 - decay) * weight
    return {name: weight.detach() for name, weight in weights.items()}, averages


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[loop.Trainer, dict[str, Tensor], list[list[Batch]]]:
    """A run in double precision, its first weights, and the batches of each step."""
    steps: list[list[Batch]] = []
    start: dict[str, Tensor] = {}
    trainers: list[loop.Trainer] = []
    made, computed, train = run.new_checkpoint, backward.Backward.run, loop.Trainer.train

    def double(*arguments: Any) -> Checkpoint:
        checkpoint = made(*arguments)
        checkpoint.model.double()
        start.update({name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()})
        return checkpoint

    def noted(self: backward.Backward, batches: list[Batch], tokens: int) -> float:
        steps.append(batches)
        return computed(self, batches, tokens)

    def kept(self: loop.Trainer) -> Any:
        trainers.append(self)
        return train(self)

    monkeypatch.setattr(run, "new_checkpoint", double)
    monkeypatch.setattr(backward.Backward, "run", noted)
    monkeypatch.setattr(loop.Trainer, "train", kept)
    for name in ("validate", "_save"):
        monkeypatch.setattr(loop.Trainer, name, lambda self: None)
    monkeypatch.setattr(run, "_finish", lambda *arguments: None)
    words = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
    lines = [
        f"{' '.join(words[i % 7 : i % 7 + 1 + i % 3])}\t{' '.join(words[i % 5 : i % 5 + i % 4 + 1])}\n"
        for i in range(140)
    ]
    (folder / "pairs.tsv").write_text("".join(dict.fromkeys(lines)))
    (folder / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(folder)
    assert run.run_recipe("recipe.toml", []) is None
    return trainers[0], start, steps


def test_twenty_steps_are_those_of_the_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, start, steps = trained(tmp_path, monkeypatch)
    assert len(steps) == STEPS
    assert len({sum(len(batch.target_out) for batch in batches) for batches in steps}) > 3  # unequal ones
    assert len({len(batch.target_out) for batches in steps for batch in batches}) > 3
    norms = [record for record in runs.records(tmp_path / "run") if record["event"] == "step"]
    assert norms
    weights, averages = by_hand(start, trainer.model.config, steps)
    for found, wanted in ((trainer.model, weights), (trainer.averaged.model, averages)):
        for name, tensor in found.named_parameters():
            torch.testing.assert_close(
                tensor, wanted[name], rtol=0, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
            )
