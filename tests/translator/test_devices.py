"""The same answers on every device. The CUDA half is skipped where there is none; it has not been run on a GPU yet."""

import copy

import pytest
import torch
from torch import Tensor, nn

from train.initial import parameters
from translator import CachedDecoder, TranslationModel
from translator.cache import CacheSpec
from translator.config import DecodeConfig, preset
from translator.device import check_memory
from translator.diagnostics.latency.arms import LatencySettings
from translator.diagnostics.latency.profile import profile_latency
from translator.engine.eager import EagerEngine
from translator.errors import UserError
from translator.search import Sentence, search

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def stack(device: str, dtype: torch.dtype) -> nn.TransformerDecoder:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerDecoder(layer, 2, nn.LayerNorm(64)).to(device, dtype).eval()


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("source", [1, 7])
def test_steps_equal_the_whole_pass(device: str, dtype: torch.dtype, kind: str, source: int) -> None:
    """Batch 1, source length 1 and a first step of one token: where a mask of stride 0 made kernels refuse."""
    trained = stack(device, dtype)
    x = torch.randn(1, 9, 64, device=device, dtype=dtype)
    memory = torch.randn(1, source, 64, device=device, dtype=dtype)
    hidden = torch.zeros(1, 1, dtype=torch.bool, device=device).expand(1, source)
    causal = nn.Transformer.generate_square_subsequent_mask(9, device=device, dtype=dtype)
    decoder = CachedDecoder.from_torch(trained)
    cache = decoder.start(memory, hidden, kind=kind, capacity=9)
    with torch.no_grad():
        whole = trained(x, memory, tgt_mask=causal)
        steps: list[Tensor] = []
        for T in (1, 4, 1, 3):
            past = cache.length
            assert cache.positions(T).device.type == device
            steps.append(decoder(x[:, past : past + T], cache))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=tolerance, atol=tolerance)


@devices
@pytest.mark.parametrize("config", [DecodeConfig(beam_size=1), DecodeConfig(beam_size=3, n_best=3)])
def test_searches_find_what_the_cpu_finds(device: str, config: DecodeConfig) -> None:
    torch.manual_seed(1)
    model = TranslationModel(
        preset("small", 40, d_model=32, nhead=2, num_encoder_layers=1, num_decoder_layers=2)
    ).eval()
    source = torch.randint(4, 40, (3, 6))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])

    def found(where: str) -> list[list[list[int]]]:
        engine = EagerEngine(copy.deepcopy(model).to(where))
        memory = engine.encode(source.to(where), padding.to(where))
        decoding = engine.start(memory, padding.to(where), CacheSpec(beams=config.beam_size))
        sentences = [Sentence(max_length=most, start_id=2, end_id=3, suppressed=(0, 2)) for most in (12, 8, 5)]
        return [[h.tokens for h in each] for each in search(decoding, sentences, config)]

    assert found(device) == found("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_times_on_a_gpu_wait_for_the_gpu() -> None:
    """The sum of the steps must be the wall time of the pass: without synchronising it is far below."""
    model = TranslationModel(preset("xianyan", 1000))
    report = profile_latency(model, LatencySettings(tokens=16, device="cuda", repeats=3, threads=1))
    for arm in report.arms.values():
        for wall, start, steps in zip(arm.wall_samples, arm.start_samples, arm.token_samples, strict=True):
            assert start + sum(steps) == pytest.approx(wall, rel=0.1)


def test_what_needs_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    check_memory(1 << 20, "a little")
    with pytest.raises(UserError, match=r"all of it needs 1,048,576\.0 GiB of memory, and there are \d+\.\d"):
        check_memory(1 << 50, "all of it")
    largest = {"d_model": 8192, "dim_feedforward": 131_072, "num_decoder_layers": 30}
    with pytest.raises(UserError, match=r"training a model of \d+,\d+,?\d*\.\d M parameters needs"):
        parameters(preset("small", 8000, **largest))


@devices
def test_beams_move_by_indices_on_the_device_as_by_those_on_the_host(device: str) -> None:
    decoder = CachedDecoder.from_torch(stack(device, torch.float32))
    memory = torch.randn(2, 3, 64, device=device)
    token, later = torch.randn(4, 2, 64, device=device), torch.randn(4, 1, 64, device=device)
    beam = torch.tensor([[1, 0], [1, 1]])
    found = []
    for indices in (beam, beam.to(device)):
        cache = decoder.start(memory, beams=2)
        decoder(token, cache)
        cache.reorder(indices)
        found.append(decoder(later, cache))
    assert torch.equal(*found)
