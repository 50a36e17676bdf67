"""`TranslationModel`, its encoder, dropout and padding: one path for training, evaluation and stepping."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import tiny_model, tiny_model64
from train.batches import Encoded, collate
from translator.cache import CACHE_KINDS
from translator.config import PRESETS, DecodeConfig, ModelConfig, preset
from translator.dropout import ByteDropout
from translator.encoder import Encoder, EncoderLayer
from translator.engine import MatrixScores
from translator.errors import UserError
from translator.model import TranslationModel
from translator.padding import pad, padding
from translator.positions import POSITIONS, make_positions, position_table
from translator.search import Sentence, search

pytestmark = pytest.mark.numeric
every_kind = pytest.mark.parametrize("kind", sorted(CACHE_KINDS))
both_positions = pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
LENGTHS = [5, 2, 9, 1]
SOURCE = torch.randint(4, 400, (4, 9), generator=torch.Generator().manual_seed(3))
TARGET = torch.randint(4, 400, (4, 12), generator=torch.Generator().manual_seed(4))
HIDDEN = padding(LENGTHS)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= tolerance


def cached_logits(model: TranslationModel, sizes: list[int], hidden: Tensor | None, **start) -> Tensor:
    cache = model.start(model.encode(SOURCE, hidden), hidden, **start)
    steps = TARGET.split(sizes, dim=1)
    return torch.cat([model.logits(model.decode(ids, cache)) for ids in steps], dim=1)


# -- with a cache and without ------------------------------------------------------------------------------------------


@every_kind
@both_positions
@pytest.mark.parametrize("sizes", [[1] * 12, [1, 4, 3, 1, 3], [8, 1, 1, 2], [12]], ids=str)
@pytest.mark.parametrize("hidden", [HIDDEN, None], ids=["padded", "unpadded"])
def test_steps_with_a_cache_give_the_logits_of_the_whole_target(kind, positions, sizes, hidden):
    model = tiny_model64(positions=positions)
    expected = model(SOURCE, TARGET, hidden)
    assert_close(cached_logits(model, sizes, hidden, kind=kind, capacity=12), expected)


def test_a_row_of_a_batch_gives_the_logits_of_its_sentence_alone():
    model = tiny_model64()
    together = model(SOURCE, TARGET, HIDDEN)
    for row, length in enumerate(LENGTHS):
        assert_close(together[row : row + 1], model(SOURCE[row : row + 1, :length], TARGET[row : row + 1]))


def test_without_a_cache_no_token_sees_a_later_one():
    model = tiny_model64()
    changed = TARGET.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 400
    before, after = model(SOURCE, TARGET, HIDDEN), model(SOURCE, changed, HIDDEN)
    assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=2).min() > 1e-3


@every_kind
def test_the_embedding_of_a_step_uses_the_row_of_its_place_in_the_target(kind):
    model, asked = copy.deepcopy(tiny_model()), []
    model.target_positions.register_forward_pre_hook(lambda _, args: asked.append(args[0].tolist()))
    cached_logits(model, [1] * 6 + [2, 1, 3], HIDDEN, kind=kind, capacity=12)
    assert asked == [[[t]] * 4 for t in range(6)] + [[[6, 7]] * 4, [[8]] * 4, [[9, 10, 11]] * 4]


@every_kind
def test_one_position_vector_counts_from_its_step_on(kind):
    """Moved by a vector that isn't constant: a norm takes the same number added to every element out again."""
    model = copy.deepcopy(tiny_model64())
    before = cached_logits(model, [1] * 12, HIDDEN, kind=kind, capacity=12)
    generator = torch.Generator().manual_seed(6)
    model.target_positions.weight[7] += torch.randn(32, generator=generator, dtype=torch.float64)
    after = cached_logits(model, [1] * 12, HIDDEN, kind=kind, capacity=12)
    assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7] - after[:, 7]).abs().amax(dim=1).min() > 0.02


def test_source_positions_count_from_the_first_token_whatever_the_padding():
    model, asked = copy.deepcopy(tiny_model()), []
    model.source_positions.register_forward_pre_hook(lambda _, args: asked.append(args[0].tolist()))
    model.encode(SOURCE, HIDDEN)
    assert asked == [list(range(9))]


@pytest.mark.parametrize("side", ["source", "target", "step", "last step"])
@both_positions
def test_past_the_last_position_an_error_names_it(side, positions):
    model = tiny_model(positions=positions, max_positions=16)
    full, over = torch.full((2, 16), 5), torch.full((2, 17), 5)
    cache = model.start(model.encode(full))
    model.decode(full, model.encode(full))
    with pytest.raises(ValueError, match=r"of 17 tokens is longer than max_positions 16"):
        if side == "source":
            model.encode(over)
        elif side == "target":
            model.decode(over, model.encode(full))
        elif side == "step":
            model.decode(over, cache)
        else:
            model.decode(full[:, :15], cache)
            model.decode(full[:, :1], cache)
            model.decode(full[:, :1], cache)
    if side == "step":
        assert cache.length == 0, "a refused step never happened"
        model.decode(full, cache)


# -- training and evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 2, 9, 1], [9, 9, 9, 9], [8, 3, 8, 2]], ids=str)
def test_without_dropout_training_gives_what_evaluation_gives(lengths):
    """Also when every row is padded, and with gradients or without."""
    model, hidden = copy.deepcopy(tiny_model64()).requires_grad_(), padding([*lengths, 9])[:4]
    model.train()
    encoded, logits = model.encode(SOURCE, hidden), model(SOURCE, TARGET, hidden)
    model.eval()
    assert encoded.shape == (4, 9, model.config.d_model)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            assert_close(model.encode(SOURCE, hidden), encoded)
            assert_close(model(SOURCE, TARGET, hidden), logits)


@pytest.mark.parametrize("mode", ["train", "eval", "bf16 train", *sorted(CACHE_KINDS)])
def test_a_source_of_padding_alone_gives_no_nan_and_changes_no_other_row(mode):
    model, hidden = copy.deepcopy(tiny_model()).requires_grad_(), padding([5, 9, 9, 9])
    hidden[1] = True
    if mode in CACHE_KINDS:
        with torch.no_grad():
            logits, alone = (
                cached_logits(model, [1] * 12, mask, kind=mode, capacity=12) for mask in (hidden, padding([5, 9, 9, 9]))
            )
    else:
        model.train(mode != "eval")
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.startswith("bf16")):
            logits, alone = model(SOURCE, TARGET, hidden), model(SOURCE, TARGET, padding([5, 9, 9, 9]))
        logits.float().logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter.grad).all(), name
    assert torch.isfinite(logits).all()
    rows = [0, 2, 3]
    assert_close(logits[rows], alone[rows], 1e-4 if mode != "bf16 train" else 0.5)


def test_every_weight_of_the_model_learns_and_dropout_only_acts_in_training():
    model = TranslationModel(ModelConfig(vocab_size=420, d_model=32, nhead=4, dim_feedforward=48, dropout=0.3))
    model.eval()
    assert_close(model(SOURCE, TARGET, HIDDEN), model(SOURCE, TARGET, HIDDEN), 1e-4)
    model.train()
    assert (model(SOURCE, TARGET, HIDDEN) - model(SOURCE, TARGET, HIDDEN)).abs().max() > 0.01
    model(SOURCE, TARGET, HIDDEN).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        for part in parameter.grad.chunk(3) if "in_proj_weight" in name else [parameter.grad]:  # query, key, value
            assert part.abs().max() > 1e-6, name
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    model.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_one_embedding_serves_source_target_and_output():
    model = copy.deepcopy(tiny_model())
    assert sum(parameter.shape == (420, 32) for parameter in model.parameters()) == 1
    hidden = torch.randn(2, 32)
    assert_close(model.logits(hidden), hidden @ model.embedding.weight.T, 1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_sizes_they_are_named_for(name):
    config = preset(name, 1000, max_positions=32)
    sizes = (config.d_model, config.nhead, config.num_encoder_layers, config.num_decoder_layers, config.dim_feedforward)
    named = {"xianyan": (384, 6, 8, 8, 1536), "small": (256, 4, 6, 3, 1024), "tiny": (128, 4, 3, 2, 512)}
    assert sizes == named[name]
    with torch.device("meta"):
        model = TranslationModel(config)
    D, F = config.d_model, config.dim_feedforward
    attention, feed_forward, norm = 4 * D * D + 4 * D, 2 * D * F + D + F, 2 * D
    encoder = config.num_encoder_layers * (attention + feed_forward + 2 * norm) + norm
    decoder = config.num_decoder_layers * (2 * attention + feed_forward + 3 * norm) + norm
    assert sum(parameter.numel() for parameter in model.parameters()) == encoder + decoder + 1000 * D + 2 * 32 * D


def test_training_and_search_begin_a_target_with_the_same_token():
    encoded = Encoded([[5, 6, 3], [7, 3]], [[8, 9], [10]])
    batch = collate(encoded, [0, 1], bos_id=2, eos_id=3)
    fed = []

    class First:
        batch_size, beams = 2, 1

        def step(self, tokens: Tensor) -> MatrixScores:
            fed.append(tokens.tolist())
            return MatrixScores(torch.zeros(2, 12))

    search(First(), [Sentence(max_length=1, start_id=2, end_id=3)] * 2, DecodeConfig(beam_size=1))
    assert batch.target_in[batch.target_packing.starts[:-1]].tolist() == fed[0] == [2, 2]
    assert batch.target_out.tolist() == [8, 9, 3, 10, 3]
    assert batch.target_in.tolist() == [2, 8, 9, 2, 10]


# -- the encoder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("hidden", [HIDDEN, None], ids=["padded", "unpadded"])
def test_the_encoder_is_nn_transformer_encoder_with_the_same_weights(activation, hidden):
    """Norms drawn at random too: with gains of 1, norm and residual could change places unseen."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, activation, batch_first=True, norm_first=True)
    original = nn.TransformerEncoder(layer, 3, nn.LayerNorm(32), enable_nested_tensor=False).double()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_(std=0.5, generator=generator)
    mine = Encoder([EncoderLayer(32, 4, 48, 0.0, activation) for _ in range(3)], 32).double()
    mine.load_state_dict(original.state_dict(), strict=True)
    original.load_state_dict(mine.state_dict(), strict=True)
    x = torch.randn(4, 9, 32, generator=generator, dtype=torch.float64)
    original.train()  # its path for training is the reference; the one for evaluation zeroes padding
    expected = original(x, src_key_padding_mask=hidden)
    real = torch.ones(4, 9, dtype=torch.bool) if hidden is None else ~hidden
    for training in (True, False):
        assert_close(mine.train(training)(x, hidden)[real], expected[real])


def test_sinusoidal_positions_are_all_different_and_bounded():
    for width in (2, 7, 32):
        table = position_table(200, width)
        assert table.shape == (200, width) and table.abs().max() <= 1
        assert torch.cdist(table, table).add(torch.eye(200)).min() > 1e-4
    third = torch.tensor([math.sin(3), math.sin(3e-4), math.cos(3), math.cos(3e-4)])
    assert torch.allclose(position_table(4, 4)[3], third)


def test_sinusoidal_positions_are_not_weights_and_learned_ones_are():
    assert set(POSITIONS) == {"learned", "none", "sinusoidal"}
    assert [name for name, _ in make_positions("learned", 4, 8).named_parameters()] == ["weight"]
    assert not make_positions("sinusoidal", 4, 8).state_dict()
    nowhere = make_positions("none", 4, 8)
    assert not nowhere.state_dict() and torch.equal(nowhere(torch.tensor([[0, 3]])), torch.zeros(1, 2, 8))
    with pytest.raises(UserError, match="'rotary': unknown kind; known: learned, none, sinusoidal"):
        make_positions("rotary", 4, 8)


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_zeroes_its_share_and_keeps_the_mean(p, dtype):
    torch.manual_seed(0)
    y = ByteDropout(p)(torch.ones(400, 500, dtype=dtype))
    assert y.dtype == dtype
    share = round(p * 256) / 256
    assert float((y == 0).double().mean()) == pytest.approx(share, abs=0.005)
    assert float(y.double().mean()) == pytest.approx(1, rel=0.02)
    assert float(y.max()) == pytest.approx(1 / (1 - share), rel=0.005)
    # No row, column or eighth neighbour is favoured.
    zeros = (y == 0).double()
    assert float((zeros.mean(0) - share).abs().max()) < 0.13 and float((zeros.mean(1) - share).abs().max()) < 0.13
    flat = zeros.flatten()
    for distance in (1, 7, 8, 500):
        both = float((flat[:-distance] * flat[distance:]).mean())
        assert both == pytest.approx(share**2, abs=0.01)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 1), (0, 4)], ids=str)
def test_dropout_takes_any_shape_and_layout(shape):
    assert ByteDropout(0.5)(torch.ones(shape)).shape == shape
    x = torch.arange(1.0, 13).view(3, 4).T
    y = ByteDropout(0.5)(x)
    assert bool(((y == 0) | (y == 2 * x)).all())


def test_dropout_is_nothing_in_evaluation_or_at_rate_zero():
    x = torch.randn(50)
    assert ByteDropout(0.9).eval()(x) is x
    assert torch.equal(ByteDropout(0.0)(x), x)


def test_gradients_pass_dropout_where_the_input_did():
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    y = ByteDropout(0.25)(x)
    weights = torch.randn(1000)
    (y * weights).sum().backward()
    kept = y != 0
    assert 0 < int(kept.sum()) < 1000
    assert torch.equal(x.grad[~kept], torch.zeros(1000)[~kept])
    assert torch.allclose(x.grad[kept], weights[kept] / 0.75)
    assert torch.allclose(y[kept], x[kept] / 0.75)


def test_dropout_repeats_with_the_generator():
    drop, x = ByteDropout(0.5), torch.ones(100)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(drop(x), first) and torch.equal(drop(x), second)


def test_dropout_of_almost_everything_stays_finite():
    torch.manual_seed(0)
    y = ByteDropout(0.999)(torch.ones(100_000))
    assert torch.isfinite(y).all() and 0 < int((y != 0).sum()) < 1000
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="dropout"):
            ByteDropout(p)


# -- padding -----------------------------------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right_and_marked_by_length():
    assert pad([[4], [5, 6, 7]], 9).tolist() == [[4, 9, 9], [5, 6, 7]]
    assert pad([[4]], 9).dtype == torch.int64
    assert padding([1, 3]).tolist() == [[False, True, True], [False, False, False]]
    assert padding([0, 2]).tolist() == [[True, True], [False, False]]


def test_a_model_names_every_product_it_computes():
    """What an engine prepares: each weight matrix, and no other weight but embeddings, positions and norms."""
    model = tiny_model()
    declared = {weight.untyped_storage().data_ptr() for weight, _ in model.products().values()}
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and "positions" not in name}
    assert {p.untyped_storage().data_ptr() for p in matrices.values()} == declared
    assert set(model.products()) >= {"logits", "encoder.layers.1.linear2", "decoder.layers.0.multihead_attn.kv"}
