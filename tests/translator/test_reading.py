"""The attention picture shows the model's own weights: those that PyTorch's own module gives."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from translator.checkpoint import DEFAULT_CHECKPOINT
from translator.config import ModelConfig
from translator.diagnostics.reading import Reading, cross_attention, in_terminal
from translator.model import TranslationModel

COMMAND = [sys.executable, "-m", "translator", "attention"]
NEEDS_MODEL = pytest.mark.skipif(not DEFAULT_CHECKPOINT.exists(), reason="no model is shipped in this checkout")


def test_weights_are_those_of_pytorchs_own_attention() -> None:
    torch.manual_seed(0)
    model = TranslationModel(
        ModelConfig(vocab_size=40, d_model=24, nhead=3, num_encoder_layers=2, num_decoder_layers=2, dropout=0.0)
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3)
    source, target = [5, 6, 7, 8, 3], [2, 9, 10, 11]
    found = cross_attention(model, source, target)
    assert found.shape == (2, 3, 4, 5)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 3, 4))

    memory = model.encode(torch.tensor([source]))
    x = model.embed(torch.tensor([target]), model.target_positions(torch.arange(4)))
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for layer, weights in zip(model.decoder.stack, found, strict=True):
        plain = nn.TransformerDecoderLayer(
            24, 3, layer.linear1.out_features, dropout=0.0, batch_first=True, norm_first=True
        ).eval()
        plain.load_state_dict(layer.state_dict())
        seen: list[Tensor] = []

        def weighed(self: nn.MultiheadAttention, *given: Tensor, keep: list[Tensor] = seen, **options: object) -> Any:
            options |= {"need_weights": True, "average_attn_weights": False}
            out, own = nn.MultiheadAttention.forward(self, *given, **options)  # type: ignore[arg-type]
            keep.append(own)
            return out, own

        plain.multihead_attn.forward = weighed.__get__(plain.multihead_attn)  # type: ignore[method-assign]
        x = plain(x, memory, tgt_mask=causal)
        torch.testing.assert_close(weights.unsqueeze(0), seen[0], rtol=1e-5, atol=1e-6)


def test_layers_and_heads_are_counted_from_one() -> None:
    weights = torch.zeros(2, 2, 1, 3)
    weights[0, 1, 0, 2] = weights[0, 0, 0, 0] = weights[1, :, 0, 1] = 1
    reading = Reading(["a", "b", "</s>"], ["x"], weights)
    assert reading.shown().tolist() == [[0.25, 0.5, 0.25]]
    assert reading.shown(layer=1).tolist() == [[0.5, 0.0, 0.5]]
    assert reading.shown(1, 2).tolist() == [[0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match="head 3: the model has heads 1 to 2"):
        reading.shown(head=3)
    assert in_terminal(reading, reading.shown(1, 2)) == ["x │    ██│ </s> 100%"]


@NEEDS_MODEL
def test_on_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "Good morning.", "--target", "早上好。"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("│") == 2 * len(done.stdout.splitlines()) and "</s>" in done.stdout
    image = tmp_path / "reading.png"
    done = subprocess.run([*COMMAND, "Good morning.", "--output", str(image)], capture_output=True, text=True)
    assert done.returncode == 0 and image.read_bytes().startswith(b"\x89PNG")
    done = subprocess.run([*COMMAND, "Good morning.", "--head", "99"], capture_output=True, text=True)
    assert done.returncode == 2 and "head 99: the model has heads 1 to 4" in done.stderr
