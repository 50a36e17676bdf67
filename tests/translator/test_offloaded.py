"""Layers that live in a file or in host memory: the same numbers, nothing left behind, little in memory at once."""

import random
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.translator.test_cache import FP64, LAYERS, D, Grid, H, Model
from tests.translator.test_indirect import OPERATIONS, Pair, happen, memory_of_nan
from translator import CachedDecoder
from translator.attention.band import Band
from translator.cache import CacheSpec, OffloadedCache, UnsupportedCacheOperation, WindowState
from translator.cache.host import MappedFile

__all__ = ["memory_of_nan"]  # a fixture for every test here
pytestmark = pytest.mark.numeric
WAYS = ["file", "memory", "staged"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> dict[str, str]:
    """Options of each way; "staged" is what a GPU does, on copies in the same memory, without its streams."""
    if request.param == "staged":
        monkeypatch.setattr(OffloadedCache, "stages", True)
        return {"offload": "memory"}
    return {"offload": request.param}


def mapped() -> list[str]:
    """The mappings of nameless files that this process has."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if re.search(r"/translator-|/#\d+", line)]


def resident() -> int:
    """Bytes of them that are in memory for this process."""
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = bool(re.search(r"/translator-|/#\d+", line))
        elif mine and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize("seed", range(20))
def test_any_history_shows_what_the_container_that_moves_shows(model, way, seed):
    chance = random.Random(seed)
    pair = Pair(model, chance, "offloaded", chance.randint(1, 4), (1, 3, 4)[seed % 3], **way)
    for _ in range(chance.randint(5, 25)):
        happen(chance.choice(OPERATIONS), pair, model)
    pair.step(2)
    pair.step(1)


def test_steps_of_a_decoder_through_the_life_of_a_grid(model, way):
    """By `attend`, in which the next layer comes and this one goes; each step is compared with the full pass."""
    grid = Grid(model, [3, 2, 4], "offloaded", capacity=2, **way)
    grid.step(3)
    grid.compact([2, 0])
    grid.crop([2, 3])
    grid.step(2)
    grid.expand(3)
    for _ in range(3):
        grid.step(1)
        grid.reorder([[1, 0, 2], [2, 2, 1]])
    grid.admit(1, Grid(model, [5], "offloaded", **way))
    grid.step(4)
    for length in (5, 1):  # one object for many sentences
        grid.cache.reset()
        grid.history = [torch.zeros(0, dtype=torch.int64)] * 6
        grid.step(length)


def test_a_step_that_breaks_off_leaves_nothing_staged(model, way, monkeypatch):
    grid = Grid(model, [3, 2], "offloaded", **way)
    grid.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(model.decoder.layers[0].linear1, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step(model.ids(2, 2), grid.cache)
    grid.step(2)
    nan = torch.full((2, H, 3, D // H), float("nan"), dtype=FP64)
    grid.cache.begin(3).layers[1].update(nan, nan)
    grid.step(1)
    grid.reorder([[0], [0]])
    grid.step(1)
    assert grid.cache.states[0].bytes_by_place["device"] == 0


def test_the_next_layer_is_on_its_way_while_one_computes_and_none_stays(monkeypatch):
    monkeypatch.setattr(OffloadedCache, "stages", True)
    stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 24, 0.0, batch_first=True, dtype=FP64), 4).eval()
    decoder = CachedDecoder.from_torch(stack)
    cache = decoder.start(torch.randn(2, 3, D, dtype=FP64), kind="offloaded", offload="memory", capacity=8)
    offloaded = cache.states[0].stack
    seen: list[list[int]] = []
    for state in cache.states:
        append = state.append

        def spied(*given, append=append):
            seen.append(sorted(offloaded._staged))
            append(*given)

        monkeypatch.setattr(state, "append", spied)
    decoder(torch.randn(2, 2, D, dtype=FP64), cache)
    assert seen == [[0, 1], [1, 2], [2, 3], [3]]
    one = 2 * 2 * 8 * D * 8
    assert [state.bytes_by_place for state in cache.states] == [{"memory": one, "device": 0}] * 4
    cache.begin(1)
    assert [state.bytes_by_place["device"] for state in cache.states] == [one, 0, 0, 0]


@on_linux
def test_files_have_no_name_and_go_with_the_cache(model, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, opened = len(mapped()), len(list(Path("/proc/self/fd").iterdir()))
    grid = Grid(model, [3, 2], "offloaded", capacity=2)
    grid.step(5)  # grows twice
    grid.expand(2)
    grid.step(1)
    assert grid.cache.states[0].bytes_by_place == {"file": grid.cache.states[0].nbytes, "device": 0}
    assert len(mapped()) == before + 2 * LAYERS  # K and V; what they were before is gone
    assert list(tmp_path.iterdir()) == []
    grid.cache = None
    assert len(mapped()) == before and len(list(Path("/proc/self/fd").iterdir())) == opened


@on_linux
def test_what_is_in_memory_is_not_what_is_held():
    """Six layers of 1 MiB: after a step the process has the pages of none."""
    stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 1, 8, 0.0, batch_first=True), 6).eval()
    decoder = CachedDecoder.from_torch(stack)
    cache = decoder.start(torch.randn(1, 3, 64), kind="offloaded", capacity=2048)
    others = resident()
    decoder(torch.randn(1, 2000, 64), cache)
    held = sum(state.nbytes for state in cache.states)
    assert held == 6 * 2**20
    assert resident() - others < held / 6
    kept = decoder(torch.randn(1, 1, 64), cache)
    assert kept.isfinite().all() and resident() - others < held / 6


@on_linux
def test_pages_that_went_come_back_as_they_were():
    file = MappedFile((64, 1024), torch.float64)
    file.tensor[:] = torch.arange(64 * 1024, dtype=FP64).view(64, 1024)
    there = resident()
    file.go()
    assert resident() <= there - file.tensor.nbytes
    file.come()
    assert torch.equal(file.tensor, torch.arange(64 * 1024, dtype=FP64).view(64, 1024))


def test_where_and_what_it_is_not_for(model):
    cache = model.start(model.sources(3), "offloaded")
    assert cache.states[0].where == "file" and not cache.states[0].stages
    with pytest.raises(ValueError, match="offload 'tape' must be 'memory' or 'file'"):
        model.start(model.sources(3), "offloaded", offload="tape")
    with pytest.raises(UnsupportedCacheOperation, match="'offloaded' cannot keep its addresses"):
        cache.prefix(1)
    # A window keeps a state of its own whatever the container: too small to pay.
    opened = CacheSpec(kind="offloaded").opened()
    window = opened.window_state(2, H, D // H, band=Band(4), dtype=FP64, device=torch.device("cpu"))
    assert type(window) is WindowState and "offloaded" not in opened.shared


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_layers_come_on_a_stream_of_their_own():
    stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 24, 0.0, batch_first=True, dtype=FP64), 4).eval()
    decoder = CachedDecoder.from_torch(stack.cuda())
    memory, x = (torch.randn(2, length, D, dtype=FP64, device="cuda") for length in (3, 12))
    steps = []
    for kind in ("dynamic", "offloaded"):
        cache = decoder.start(memory, kind=kind, capacity=4)
        steps.append(torch.cat([decoder(part, cache) for part in x.split([3, 1, 1, 4, 1, 2], dim=1)], dim=1))
    assert cache.states[0].k.is_pinned()
    assert (steps[0] - steps[1]).abs().max() < 1e-10
