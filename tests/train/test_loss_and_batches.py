"""Label smoothing never counts padding; batches hold what they say, in an order that seed and epoch decide."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from train.batches import Encoded, collate, plan_epoch
from train.loss import smoothed_cross_entropy
from train.recipe import TrainingConfig
from translator.config import ModelConfig
from translator.model import TranslationModel
from translator.padding import pad, padding

pytestmark = pytest.mark.numeric
PAD, BOS, EOS = 0, 2, 3


def encoded(count: int, seed: int = 0) -> Encoded:
    draw = torch.Generator().manual_seed(seed)

    def row() -> list[int]:
        return torch.randint(4, 50, (int(torch.randint(1, 20, (1,), generator=draw)),), generator=draw).tolist()

    return Encoded([[*row(), EOS] for _ in range(count)], [row() for _ in range(count)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_the_plain_formula(smoothing: float, dtype: torch.dtype) -> None:
    logits = torch.randn(12, 30, generator=torch.Generator().manual_seed(1)) * 3
    target = torch.arange(12)
    given = logits.to(dtype).requires_grad_()
    plain = given.detach().float().requires_grad_()
    loss = smoothed_cross_entropy(given, target, smoothing)
    expected = F.cross_entropy(plain, target, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    (loss / 7).backward()
    (expected / 7).backward()
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(given.grad.float(), plain.grad, rtol=tolerance, atol=tolerance)


def test_no_tokens_give_a_loss_of_zero() -> None:
    assert float(smoothed_cross_entropy(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 0.1)) == 0


def test_a_packed_pass_gives_what_a_padded_one_gives_and_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = TranslationModel(
        ModelConfig(vocab_size=50, d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dropout=0.0)
    ).double()
    corpus = encoded(7)
    batch = collate(corpus, range(7), BOS, EOS)
    source, hidden = pad(corpus.sources, PAD), padding([len(ids) for ids in corpus.sources])
    target = pad([[BOS, *ids] for ids in corpus.targets], PAD)
    real = ~padding([len(ids) + 1 for ids in corpus.targets])
    padded = model.decode(target, model.encode(source, hidden), hidden)[real]
    packed = model.packed(batch.source, batch.target_in, batch.source_packing, batch.target_packing)
    torch.testing.assert_close(packed, padded, rtol=1e-12, atol=1e-12)
    results = []
    for states in (packed, padded):
        loss = smoothed_cross_entropy(model.logits(states), batch.target_out, 0.1)
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


def test_a_sentence_in_a_packed_row_sees_no_other() -> None:
    torch.manual_seed(0)
    model = TranslationModel(
        ModelConfig(vocab_size=50, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
    ).double()
    corpus = encoded(3)
    changed = Encoded([*corpus.sources[:2], [9, 9, 9, 9, 9, EOS]], [*corpus.targets[:2], [8] * 11])
    one, two = (collate(text, range(3), BOS, EOS) for text in (corpus, changed))
    both = [model.packed(b.source, b.target_in, b.source_packing, b.target_packing) for b in (one, two)]
    first = int(one.target_packing.starts[2])
    torch.testing.assert_close(both[0][:first], both[1][:first], rtol=0, atol=1e-12)
    assert not torch.allclose(both[0][first:][:1], both[1][first:][:1])


def test_a_batch_is_shifted_and_packed_by_lengths() -> None:
    batch = collate(Encoded([[7, EOS], [PAD, 8, EOS]], [[5, PAD, 6], [9]]), [0, 1], BOS, EOS)
    assert batch.source.tolist() == [7, EOS, PAD, 8, EOS]
    assert batch.source_packing.starts.tolist() == [0, 2, 5]
    assert batch.target_in.tolist() == [BOS, 5, PAD, 6, BOS, 9]
    assert batch.target_out.tolist() == [5, PAD, 6, EOS, 9, EOS]
    assert batch.target_packing.starts.tolist() == [0, 4, 6]
    assert batch.target_packing.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.tokens == 6


def test_an_epoch_holds_every_pair_once_within_the_budget() -> None:
    corpus = encoded(500)
    plan = plan_epoch(corpus, 200, seed=1, epoch=0)
    assert sorted(itertools.chain(*plan)) == list(range(500))
    batches = [collate(corpus, indices, BOS, EOS) for indices in plan]
    assert max(max(len(batch.source), batch.tokens) for batch in batches) <= 200
    fullest = sum(max(len(batch.source), batch.tokens) for batch in batches) / len(batches)
    assert fullest > 0.9 * 200


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    corpus = encoded(100)
    first = plan_epoch(corpus, 200, seed=1, epoch=0)
    torch.rand(5)
    assert plan_epoch(corpus, 200, seed=1, epoch=0) == first
    assert plan_epoch(corpus, 200, seed=1, epoch=1) != first
    assert plan_epoch(corpus, 200, seed=2, epoch=0) != first


def test_a_pair_over_the_budget_is_a_batch_of_its_own() -> None:
    corpus = Encoded([[5, EOS], [5] * 99 + [EOS], [5, EOS]], [[5], [5] * 99, [5]])
    assert sorted(map(sorted, plan_epoch(corpus, 16, seed=0, epoch=0))) == [[0, 2], [1]]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt", "constant"])
def test_the_rate_rises_then_follows_its_schedule(schedule: str) -> None:
    config = TrainingConfig(learning_rate=1.0, warmup_steps=10, max_steps=100, schedule=schedule)  # type: ignore[arg-type]
    rates = [config.rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    ends = {"cosine": 0.0, "linear": 0.0, "inverse_sqrt": 10**-0.5, "constant": 1.0}
    assert rates[-1] == pytest.approx(ends[schedule], abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "quarter", "half"),
    [
        ("cosine", (1 + 0.5**0.5) / 2, 0.5),
        ("linear", 0.75, 0.5),
        ("inverse_sqrt", (20 / 40) ** 0.5, (20 / 60) ** 0.5),
        ("constant", 1.0, 1.0),
    ],
)
def test_each_schedule_is_the_curve_of_its_name(schedule: str, quarter: float, half: float) -> None:
    """A quarter and half of the way from the end of the warm-up, step 20, to the last step, 100."""
    config = TrainingConfig(learning_rate=1.0, warmup_steps=20, max_steps=100, schedule=schedule)  # type: ignore[arg-type]
    assert config.rate(10) == pytest.approx(0.5)
    assert (config.rate(40), config.rate(60)) == pytest.approx((quarter, half))
