"""The proofs and the profile of a decoder that this project did not train: PyTorch's, with its own embedding."""

import pytest
import torch
from torch import Tensor, nn

from translator import CachedDecoder
from translator.cache import CACHE_KINDS, DecoderCache
from translator.diagnostics import check_decoder, profile_decoder, self_test_decoder
from translator.diagnostics.parity.self_test import FAULTS
from translator.errors import UserError

pytestmark = pytest.mark.numeric

D, V = 32, 40


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(32, D)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(positions)


def trained(norm: bool = True, **options) -> tuple[nn.TransformerDecoder, Embedding, nn.Linear]:
    torch.manual_seed(4)
    layer = nn.TransformerDecoderLayer(D, 4, 48, **options)
    decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(D) if norm else None).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.4)
    return decoder, Embedding(), nn.Linear(D, V)


def sources(batch_first: bool) -> tuple[Tensor, Tensor]:
    memory = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(6) >= torch.tensor([[6], [2], [4], [1]])
    return (memory if batch_first else memory.transpose(0, 1)), padding


@pytest.mark.parametrize("as_modules", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True, "norm_first": True},
        {"batch_first": False, "norm_first": False, "norm": False, "activation": "gelu"},
        {"batch_first": True, "norm_first": False, "activation": nn.SiLU()},
    ],
    ids=["pre-norm", "post-norm", "silu"],
)
def test_a_decoder_of_ones_own_passes(options, as_modules):
    decoder, embed, project = trained(**options)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    given = (embed, project) if as_modules else (lambda ids, at: embed(ids, at), lambda hidden: project(hidden))
    report = check_decoder(decoder, *given, *sources(options["batch_first"]))
    assert report.passed, str(report)
    assert report.sentences == 4
    assert {check.dtype for check in report.checks} == {torch.float32} | ({torch.float64} if as_modules else set())
    checks = (2 if as_modules else 1) * (2 + 4 * len(CACHE_KINDS))
    assert str(report).endswith(f"{checks} of {checks} checks passed")
    assert "skipped" not in str(report)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())


def test_a_cached_decoder_is_checked_as_well_as_what_it_was_made_from():
    decoder, embed, project = trained(batch_first=True)
    assert check_decoder(CachedDecoder.from_torch(decoder), embed, project, *sources(True)).passed


def test_a_fault_in_the_cache_is_found(monkeypatch):
    decoder, embed, project = trained(batch_first=True)
    original = DecoderCache.reorder
    monkeypatch.setattr(DecoderCache, "reorder", lambda self, beam: original(self, beam.flip(1)))
    report = check_decoder(decoder, embed, project, *sources(True))
    assert not report.passed
    assert {check.name for check in report.checks if check.verdict == "FAIL"} == {"life of a grid", "beam 4"}


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "as_modules", "kind"), [(True, False, "dynamic"), (False, True, "static")])
def test_planted_faults_are_all_caught_on_it(norm, as_modules, kind):
    decoder, embed, project = trained(norm=norm, batch_first=not norm)
    given = (embed, project) if as_modules else (lambda ids, at: embed(ids, at), lambda hidden: project(hidden))
    report = self_test_decoder(decoder, *given, *sources(not norm), kinds=[kind])
    assert report.passed, str(report)
    planted = {outcome.fault.name for outcome in report.outcomes}
    assert ("final norm skipped" in planted) == norm  # what can't be faulty isn't planted, and isn't missing


def test_an_embedding_that_ignores_positions_hides_faults_and_the_report_says_so():
    decoder, embed, project = trained(batch_first=True)
    faults = [fault for fault in FAULTS if "position" in fault.name or fault.name == "past K/V ignored"]
    report = self_test_decoder(
        decoder, lambda ids, _: embed.tokens(ids), project, *sources(True), kinds=["dynamic"], faults=faults
    )
    missed = {outcome.fault.name for outcome in report.outcomes if not outcome.caught}
    assert missed == {"position restarts at 0", "position off by one", "position of the longest row"}
    assert not report.passed and "MISSED: dynamic" in str(report)


@pytest.mark.parametrize("batch_first", [True, False])
def test_profile_shows_each_container_and_its_bytes(batch_first):
    decoder, embed, project = trained(batch_first=batch_first)
    report = profile_decoder(decoder, embed, project, sources(batch_first)[0], tokens=8, repeats=1, threads=1)
    assert list(report.arms) == ["none", "dynamic", "static"]
    rows, layers, S, T = 4, 2, 6, 8
    cross = 2 * layers * rows * S * D * 4
    assert report.arms["static"].cache_bytes == cross + 2 * layers * rows * T * D * 4
    assert report.arms["dynamic"].cache_bytes == cross + 2 * layers * rows * 32 * D * 4
    assert report.arms["none"].cache_bytes == 0
    assert report.to_json()["arms"]["static"]["cache_bytes"] == report.arms["static"].cache_bytes
    assert report.sizes == {
        "d_model": D, "nhead": 4, "dim_feedforward": 48, "num_decoder_layers": 2, "vocab_size": V
    }  # fmt: skip
    assert "static" in str(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": torch.randn(4, 6, D, 1)}, "memory must be"),
        ({"padding": torch.zeros(4, 5, dtype=torch.bool)}, r"bool \(4, 6\)"),
        ({"padding": torch.zeros(4, 6)}, "must be bool"),
        ({"padding": torch.arange(6).expand(4, 6) < 2}, "end of a source"),
        ({"embed": lambda ids, at: torch.zeros(*ids.shape, 8)}, r"embed of one id gives \(1, 1, 8\)"),
        ({"beam_size": 2}, "beam of 3"),
        ({"max_positions": 16}, "more than 16"),
        ({"kinds": ["elastic"]}, "unknown cache kind 'elastic'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    decoder, embed, project = trained(batch_first=True)
    memory, padding = sources(True)
    given = {"embed": embed, "memory": memory, "padding": padding, **change}
    options = {name: given.pop(name) for name in ("beam_size", "max_positions", "kinds") if name in given}
    with pytest.raises(UserError, match=message):
        check_decoder(decoder, given["embed"], project, given["memory"], given["padding"], **options)


def test_settings_of_a_profile_that_the_decoder_decides_are_refused():
    decoder, embed, project = trained(batch_first=True)
    for setting, message in (({"batch": 2}, "batch: given by memory"), ({"token": 2}, "unknown key 'token'")):
        with pytest.raises(UserError, match=message):
            profile_decoder(decoder, embed, project, sources(True)[0], **setting)
