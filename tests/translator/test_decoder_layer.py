"""`CachedDecoderLayer` is `nn.TransformerDecoderLayer`; `CachedDecoder` wraps a trained stack, copying nothing."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from translator import CachedDecoder, CachedDecoderLayer
from translator.attention import CachedMultiheadAttention, attend

pytestmark = pytest.mark.numeric
D, H, FF, B, T, S = 16, 2, 24, 3, 5, 4
SIZES = (D, H, FF)
TOLERANCE = 1e-12
FP64 = torch.float64


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights, gains and biases all random: with LayerNorm at 1 and 0, many faults don't show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return module


def pair(**options) -> tuple[nn.TransformerDecoderLayer, CachedDecoderLayer]:
    """The original and the drop-in with the same random weights, in training mode."""
    options = {"dropout": 0.0, "dtype": FP64, **options}
    original = randomise(nn.TransformerDecoderLayer(*SIZES, **options))
    cached = CachedDecoderLayer(*SIZES, **options)
    cached.load_state_dict(original.state_dict(), strict=True)
    return original, cached


def inputs(batch_first: bool = True, dtype: torch.dtype = FP64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tgt, memory = (torch.randn(B, n, D, generator=generator, dtype=dtype) for n in (T, S))
    return (tgt, memory) if batch_first else (tgt.transpose(0, 1), memory.transpose(0, 1))


def hidden(*shape: int) -> torch.Tensor:
    """A bool mask that leaves every query something to see."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < 0.4
    mask[..., 0] = False
    return mask


def as_float(mask: torch.Tensor) -> torch.Tensor:
    """The same mask as numbers to add, with some finite ones."""
    bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3), dtype=FP64)
    return bias.masked_fill(mask, float("-inf"))


def results(module: nn.Module, tgt: torch.Tensor, memory: torch.Tensor, **masks) -> dict[str, torch.Tensor]:
    """Output and every gradient of a loss that isn't symmetric in the elements."""
    module.zero_grad()
    tgt, memory = tgt.detach().clone().requires_grad_(), memory.detach().clone().requires_grad_()
    output = module(tgt, memory, **masks)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    found = {"output": output.detach(), "tgt": tgt.grad, "memory": memory.grad}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {name: torch.zeros(()) if grad is None else grad.clone() for name, grad in gradients.items()}


def assert_same(original: nn.Module, cached: nn.Module, *given: torch.Tensor, **masks) -> None:
    expected, actual = results(original, *given, **masks), results(cached, *given, **masks)
    assert expected.keys() == actual.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape
        assert torch.isfinite(want).all(), name
        assert (got - want).abs().max() <= TOLERANCE * max(want.abs().max(), 1.0), name


def causal(length: int = T) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=FP64)


class Squash(nn.Module):
    """An activation with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.7, dtype=FP64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.slope * x)


# -- the layer ----------


OPTIONS = [
    {"norm_first": norm_first, "batch_first": batch_first, "bias": bias, "activation": activation}
    for norm_first, batch_first, bias, activation in itertools.product(
        [False, True], [False, True], [False, True], ["relu", "gelu", F.silu]
    )
] + [{"layer_norm_eps": 1e-2}, {"layer_norm_eps": 1e-2, "norm_first": True}, {"activation": F.gelu}]


def as_name(options: dict) -> str:
    """The same in every process: functions by name, not by address."""
    return str({key: getattr(value, "__name__", value) for key, value in options.items()})


@pytest.mark.parametrize("options", OPTIONS, ids=as_name)
def test_outputs_and_gradients_equal_the_original(options):
    original, cached = pair(**options)
    given = inputs(options.get("batch_first", False))
    assert_same(original, cached, *given)
    assert_same(original, cached, *given, tgt_mask=causal(), memory_key_padding_mask=hidden(B, S))


@pytest.mark.parametrize("options", OPTIONS, ids=as_name)
def test_state_dict_loads_strictly_both_ways(options):
    original, cached = pair(**options)
    assert list(cached.state_dict()) == list(original.state_dict())
    assert [name for name, _ in cached.named_parameters()] == [name for name, _ in original.named_parameters()]
    randomise(cached, seed=5)
    assert not any(original.load_state_dict(cached.state_dict(), strict=True))
    for name, value in original.state_dict().items():
        assert torch.equal(value, cached.state_dict()[name])


def test_an_activation_module_is_trained_and_saved_as_in_the_original():
    original, cached = pair(activation=Squash())
    cached.activation = copy.deepcopy(original.activation)
    assert sorted(cached.state_dict()) == sorted(original.state_dict())
    assert_same(original, cached, *inputs(False))
    shared = CachedDecoderLayer.from_torch(original)
    assert shared.activation is original.activation
    assert shared.state_dict().keys() == original.state_dict().keys()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64])
def test_the_same_seed_gives_the_same_weights(bias, dtype):
    torch.manual_seed(7)
    original = nn.TransformerDecoderLayer(*SIZES, bias=bias, dtype=dtype)
    torch.manual_seed(7)
    cached = CachedDecoderLayer(*SIZES, bias=bias, dtype=dtype)
    for name, value in original.state_dict().items():
        assert value.dtype == cached.state_dict()[name].dtype == dtype
        assert torch.equal(value, cached.state_dict()[name]), name


def test_defaults_and_positional_arguments_are_the_originals():
    arguments = (D, H, FF, 0.25, "gelu", 1e-3, True, True, False)
    original, cached = nn.TransformerDecoderLayer(*arguments), CachedDecoderLayer(*arguments)
    for layer in (original, cached):
        assert (layer.norm_first, layer.self_attn.batch_first, layer.norm1.eps) == (True, True, 1e-3)
        assert (layer.dropout.p, layer.dropout3.p, layer.self_attn.dropout, layer.multihead_attn.dropout) == (0.25,) * 4
        assert layer.linear1.bias is None and layer.activation is F.gelu
    original, cached = nn.TransformerDecoderLayer(D, H), CachedDecoderLayer(D, H)
    for layer in (original, cached):
        assert (layer.linear1.out_features, layer.dropout1.p, layer.norm1.eps, layer.norm_first) == (
            2048,
            0.1,
            1e-5,
            False,
        )
        assert not layer.self_attn.batch_first and layer.activation is F.relu


def test_an_unknown_activation_is_refused_as_by_the_original():
    for layer in (nn.TransformerDecoderLayer, CachedDecoderLayer):
        with pytest.raises(RuntimeError, match="activation should be"):
            layer(D, H, activation="swish")


def test_meta_device_constructs_and_materialises():
    layer = CachedDecoderLayer(*SIZES, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    original = randomise(nn.TransformerDecoderLayer(*SIZES, dropout=0.0))
    layer.load_state_dict(original.state_dict(), strict=True, assign=True)
    given = inputs(False, torch.float32)
    assert torch.allclose(layer.eval()(*given), original.eval()(*given), atol=1e-5)


MASKS = {
    "bool": {"tgt_mask": hidden(T, T)},
    "float": {"tgt_mask": as_float(hidden(T, T))},
    "3-D bool": {"tgt_mask": hidden(B * H, T, T)},
    "3-D float": {"tgt_mask": as_float(hidden(B * H, T, T))},
    "causal": {"tgt_mask": causal()},
    "causal, hint": {"tgt_mask": causal(), "tgt_is_causal": True},
    "causal bool, hint, padding": {
        "tgt_mask": causal() != 0, "tgt_is_causal": True, "tgt_key_padding_mask": hidden(B, T),
    },
    "memory bool": {"memory_mask": hidden(T, S)},
    "memory float": {"memory_mask": as_float(hidden(T, S))},
    "memory 3-D": {"memory_mask": hidden(B * H, T, S)},
    "memory hint": {"memory_mask": torch.ones(T, S).triu(1) != 0, "memory_is_causal": True},
    "tgt padding": {"tgt_key_padding_mask": hidden(B, T)},
    "memory padding": {"memory_key_padding_mask": hidden(B, S)},
    "float padding": {
        "tgt_key_padding_mask": as_float(hidden(B, T)), "memory_key_padding_mask": as_float(hidden(B, S)),
    },
    "all bool": {
        "tgt_mask": hidden(T, T), "memory_mask": hidden(T, S),
        "tgt_key_padding_mask": hidden(B, T), "memory_key_padding_mask": hidden(B, S),
    },
    "all float": {
        "tgt_mask": as_float(hidden(B * H, T, T)), "memory_mask": as_float(hidden(T, S)),
        "tgt_key_padding_mask": as_float(hidden(B, T)), "memory_key_padding_mask": as_float(hidden(B, S)),
    },
}  # fmt: skip


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_to_the_original(name, batch_first):
    original, cached = pair(batch_first=batch_first, norm_first=True)
    assert_same(original, cached, *inputs(batch_first), **MASKS[name])
    bare = cached(*inputs(batch_first))
    assert not torch.allclose(bare, cached(*inputs(batch_first), **MASKS[name])), (
        "a mask that masks nothing proves nothing"
    )


def test_a_learned_bias_given_as_mask_gets_its_gradient():
    gradients = []
    for layer in pair():
        bias = torch.randn(T, T, generator=torch.Generator().manual_seed(2), dtype=FP64, requires_grad=True)
        layer(*inputs(False), tgt_mask=bias).square().sum().backward()
        gradients.append(bias.grad)
    assert torch.allclose(*gradients, rtol=0, atol=1e-12) and gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"tgt_mask": causal()},
        {"tgt_mask": hidden(H, T, T)},
        {"tgt_key_padding_mask": hidden(T), "memory_key_padding_mask": hidden(S)},
    ],
    ids=lambda masks: ",".join(masks),
)
def test_unbatched_input(masks, batch_first):
    original, cached = pair(batch_first=batch_first)
    assert_same(original, cached, *(part[0] for part in inputs()), **masks)


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_of_none_and_one(rows):
    tgt, memory = inputs()
    for layer in pair(batch_first=True):
        assert layer(tgt[:rows], memory[:rows]).shape == (rows, T, D)


def test_wrong_shapes_are_refused():
    layer = pair(batch_first=True)[1]
    tgt, memory = inputs()
    with pytest.raises(ValueError, match="3 rows and memory 2"):
        layer(tgt, memory[:2])
    with pytest.raises(ValueError, match="dimensions"):
        layer(tgt.unsqueeze(0), memory)
    with pytest.raises(ValueError, match="attention mask"):
        layer(tgt, memory, tgt_mask=torch.zeros(T, 1))
    with pytest.raises(ValueError, match="memory_is_causal"):  # the original raises too
        layer(tgt, memory, memory_is_causal=True)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        CachedDecoderLayer(10, 3)


def test_a_row_with_nothing_to_see_is_finite_and_alone():
    original, cached = pair(batch_first=True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    tgt, memory = inputs()
    output = cached(tgt, memory, memory_key_padding_mask=padding)
    assert torch.isfinite(output).all()
    expected = original(tgt, memory)
    assert torch.allclose(output[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64])
@pytest.mark.parametrize("float_mask", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_that_sees_nothing_gives_zeros(dtype, float_mask, grad):
    q, k, v = (torch.randn(2, H, n, 8, dtype=dtype, requires_grad=grad) for n in (3, S, S))
    mask = torch.ones(2, 1, 1, S, dtype=torch.bool)
    mask[1] = False
    if float_mask:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    attended = attend(q, k, v, mask)
    assert not attended[1].any() and torch.isfinite(attended).all()
    if grad:
        attended.float().square().sum().backward()
        assert all(torch.isfinite(part.grad).all() for part in (q, k, v))


@pytest.mark.parametrize(
    "mask",
    [None, "causal", ~hidden(T, T), as_float(hidden(B, 1, 1, T))],
    ids=["none", "causal", "bool", "float"],
)
def test_attention_in_bf16_training_is_attention(mask):
    """It takes a way of its own on a CPU; forward and backward agree with the kernel's in fp64."""
    generator = torch.Generator().manual_seed(4)
    results = []
    values = [torch.randn(B, H, T, 8, generator=generator).bfloat16() for _ in range(4)]
    for dtype in (torch.bfloat16, FP64):
        *parts, seed = (value.to(dtype) for value in values)
        parts = [part.clone().requires_grad_() for part in parts]
        causal_flag = isinstance(mask, str)
        given = mask.to(dtype) if isinstance(mask, torch.Tensor) and mask.is_floating_point() else mask
        attended = attend(*parts, None if causal_flag else given, causal_flag)
        attended.backward(seed)
        results.append([attended.detach().double(), *(part.grad.double() for part in parts)])
    for low, exact in zip(*results, strict=True):
        assert (low - exact).abs().max() < 0.05 * exact.abs().max()


def test_dropout_acts_in_training_only():
    layer = CachedDecoderLayer(*SIZES, dropout=0.5, batch_first=True, dtype=FP64)
    given = inputs()
    assert (layer(*given) - layer(*given)).abs().max() > 0.01
    assert torch.allclose(layer.eval()(*given), layer(*given), rtol=0, atol=1e-12)
    original = nn.TransformerDecoderLayer(*SIZES, dropout=0.5, batch_first=True, dtype=FP64).eval()
    original.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(*given), original(*given), rtol=0, atol=1e-12)


def test_attention_dropout_reaches_the_kernel():
    layer = CachedDecoderLayer(*SIZES, dropout=0.0, dtype=FP64)
    for name in ("self_attn", "multihead_attn"):
        attention = getattr(layer, name)
        attention.dropout = 0.5
        assert (layer(*inputs(False)) - layer(*inputs(False))).abs().max() > 0.01, name
        attention.dropout = 0.0


def test_tgt_is_causal_alone_is_the_causal_mask():
    cached = pair()[1]
    tgt, memory = inputs(False)
    padding = hidden(B, T)
    for more in ({}, {"tgt_key_padding_mask": padding}):
        hinted = cached(tgt, memory, tgt_is_causal=True, **more)
        assert torch.allclose(hinted, cached(tgt, memory, tgt_mask=causal() != 0, **more), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("final_norm", [False, True])
def test_works_inside_nn_transformer_decoder(batch_first, final_norm):
    original, cached = pair(batch_first=batch_first)
    stacks = []
    for layer in (original, cached):
        norm = nn.LayerNorm(D, dtype=FP64) if final_norm else None
        stack = nn.TransformerDecoder(layer, 2, norm)
        assert type(stack.layers[1]) is type(layer) and stack.layers[1] is not layer
        stacks.append(randomise(stack))
    stacks[1].load_state_dict(stacks[0].state_dict(), strict=True)
    given = inputs(batch_first)
    for masks in ({"tgt_mask": causal()}, {"tgt_mask": causal(), "tgt_is_causal": True}, {}):
        assert_same(*stacks, *given, memory_key_padding_mask=hidden(B, S), **masks)
    assert_same(stacks[0], CachedDecoder.from_torch(stacks[1]), *given, tgt_mask=causal())


def test_a_training_run_continues_with_the_same_losses():
    def losses(stack: nn.Module, optimiser: torch.optim.Optimizer, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            tgt, memory, goal = (torch.randn(B, n, D, generator=generator, dtype=FP64) for n in (T, S, T))
            loss = F.mse_loss(stack(tgt, memory, tgt_mask=causal(), memory_key_padding_mask=hidden(B, S)), goal)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    layer = nn.TransformerDecoderLayer(*SIZES, dropout=0.0, batch_first=True, norm_first=True, dtype=FP64)
    original = randomise(nn.TransformerDecoder(layer, 2, nn.LayerNorm(D, dtype=FP64)))
    optimiser = torch.optim.Adam(original.parameters(), 1e-2)
    losses(original, optimiser, 3)
    saved, state = copy.deepcopy(original.state_dict()), copy.deepcopy(optimiser.state_dict())
    expected = losses(original, optimiser, 5)

    cached = CachedDecoder(
        [CachedDecoderLayer(*SIZES, dropout=0.0, batch_first=True, norm_first=True, dtype=FP64) for _ in range(2)],
        nn.LayerNorm(D, dtype=FP64),
    )
    cached.load_state_dict(saved, strict=True)
    optimiser = torch.optim.Adam(cached.parameters(), 1e-2)
    optimiser.load_state_dict(state)
    assert losses(cached, optimiser, 5) == pytest.approx(expected, rel=1e-10, abs=0)


# -- from_torch ----------


def torch_stack(layers: int = 2, norm: bool = True, **options) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(*SIZES, **{"dropout": 0.0, "dtype": FP64, **options})
    return randomise(nn.TransformerDecoder(layer, layers, nn.LayerNorm(D, dtype=FP64) if norm else None))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_from_torch_shares_every_parameter(norm, batch_first, norm_first, bias):
    original = torch_stack(norm=norm, batch_first=batch_first, norm_first=norm_first, bias=bias)
    cached = CachedDecoder.from_torch(original)
    theirs, mine = dict(original.named_parameters()), dict(cached.named_parameters())
    assert list(mine) == list(theirs)
    assert all(mine[name] is theirs[name] for name in theirs)
    assert list(cached.state_dict()) == list(original.state_dict())
    assert cached.batch_first == batch_first and (cached.norm is None) == (not norm)
    assert_same(original, cached, *inputs(batch_first), tgt_mask=causal(), memory_key_padding_mask=hidden(B, S))
    with torch.no_grad():
        original.layers[1].self_attn.in_proj_weight.mul_(2)
    assert_same(original, cached, *inputs(batch_first))


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("activation", ["gelu", F.silu, nn.GELU(), Squash()])
def test_from_torch_keeps_activation_and_eps(activation, copied):
    """Also where PyTorch's layer forgets its activation module on being copied, and computes ReLU."""
    original = torch_stack(activation=activation, layer_norm_eps=1e-1)
    if not copied:
        options = {"dropout": 0.0, "activation": activation, "layer_norm_eps": 1e-1, "dtype": FP64}
        original.layers[1] = randomise(nn.TransformerDecoderLayer(*SIZES, **options))
    cached = CachedDecoder.from_torch(original)
    assert sorted(cached.state_dict()) == sorted(original.state_dict())
    assert_same(original, cached, *inputs(False))


def test_from_torch_keeps_frozen_parameters_dropout_and_modes():
    original = torch_stack(dropout=0.3).eval()
    original.layers[0].linear1.weight.requires_grad_(False)
    original.layers[1].train()
    cached = CachedDecoder.from_torch(original)
    for mine, theirs in zip(cached.layers, original.layers, strict=True):
        assert mine.training == theirs.training == mine.self_attn.training == mine.norm1.training
        assert (mine.self_attn.dropout, mine.multihead_attn.dropout, mine.dropout2.p) == (0.3,) * 3
    assert not cached.training and not cached.layers[0].linear1.weight.requires_grad
    cached.train()
    assert cached.layers[0].self_attn.training and cached.layers[0].dropout.training


@pytest.mark.parametrize("cached_mode", [True, False])
@pytest.mark.parametrize("original_mode", [True, False])
def test_modes_of_original_and_cached_decoder_are_their_own(original_mode, cached_mode):
    """Whoever calls train() or eval() on one afterwards: the other's dropout stays as it was."""
    original = torch_stack(dropout=0.5).train(not cached_mode)
    cached = CachedDecoder.from_torch(original).train(cached_mode)
    original.train(original_mode)
    tgt, memory = inputs(False)
    for module, training in ((original, original_mode), (cached, cached_mode)):
        difference = (module(tgt, memory) - module(tgt, memory)).abs().max()
        assert difference > 0.01 if training else difference <= 1e-12


class TunedLinear(nn.Linear):
    pass


def pruned(stack: nn.TransformerDecoder) -> None:
    prune.random_unstructured(stack.layers[1].linear1, "weight", amount=0.5)


def parametrised(part: str, tensor: str):
    return lambda stack: parametrize.register_parametrization(stack.get_submodule(part), tensor, nn.Identity())


def hooked(part: str, before: bool = False):
    def hook(stack: nn.TransformerDecoder) -> None:
        module = stack.get_submodule(part)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        register(lambda module, args, *output: None)

    return hook


def replaced(part: str, module: nn.Module):
    return lambda stack: setattr(stack.get_submodule(part.rpartition(".")[0]), part.rpartition(".")[2], module)


def own_forward(stack: nn.TransformerDecoder) -> None:
    stack.layers[0].forward = lambda tgt, memory, **masks: tgt


CHANGED = {
    "from_torch: .* 1 hook": hooked(""),
    "the layer: .*TransformerDecoderLayer: it has 1 hook": hooked("layers.1"),
    "the layer: .* hook ": hooked("layers.0", before=True),
    "self_attn: .*MultiheadAttention: it has 1 hook": hooked("layers.1.self_attn"),
    "multihead_attn: .* hook": hooked("layers.0.multihead_attn"),
    "self_attn.out_proj: .* hook": hooked("layers.0.self_attn.out_proj"),
    "dropout2: .* hook": hooked("layers.0.dropout2"),
    "linear1: .* hook": hooked("layers.0.linear1"),
    "linear1: .*pruned": pruned,
    "linear2: .*ParametrizedLinear": parametrised("layers.0.linear2", "weight"),
    "multihead_attn: .*ParametrizedMultiheadAttention": parametrised("layers.1.multihead_attn", "in_proj_weight"),
    "self_attn.out_proj: .*Parametrized": parametrised("layers.1.self_attn.out_proj", "weight"),
    "linear1: .*Sequential": replaced("layers.0.linear1", nn.Sequential(nn.Linear(D, FF), nn.Linear(FF, FF))),
    "linear2: .*TunedLinear": replaced("layers.0.linear2", TunedLinear(FF, D)),
    "norm3: .*RMSNorm": replaced("layers.0.norm3", nn.RMSNorm(D)),
    "dropout1: .*AlphaDropout": replaced("layers.1.dropout1", nn.AlphaDropout(0.1)),
    "the layer: .* its forward was replaced": own_forward,
}


@pytest.mark.parametrize("message", CHANGED)
def test_hooked_parametrised_pruned_and_replaced_parts_are_refused_by_name(message):
    stack = torch_stack()
    CHANGED[message](stack)
    with pytest.raises(TypeError, match=message):
        CachedDecoder.from_torch(stack)


@pytest.mark.parametrize(
    "part",
    [
        *itertools.product(["self_attn", "multihead_attn"], ["in_proj_weight", "in_proj_bias", "out_proj"]),
        *[(name,) for name in ("linear1", "linear2", "norm1", "norm2", "norm3")],
    ],
    ids=".".join,
)
def test_another_part_in_the_original_is_noticed_at_the_next_step(part):
    original = torch_stack().eval()
    cached = CachedDecoder.from_torch(original)
    memory = torch.randn(2, 5, D, dtype=FP64).transpose(0, 1)
    cache = cached.start(memory)
    token = torch.randn(1, 2, D, dtype=FP64)
    cached(token, cache)
    owner = original.layers[1].get_submodule(".".join(part[:-1]))
    setattr(owner, part[-1], copy.deepcopy(getattr(owner, part[-1])))
    for call in (lambda: cached(token, cache), lambda: cached.start(memory), lambda: cached(token, memory)):
        with pytest.raises(RuntimeError, match=rf"layers\.1\.{'.'.join(part)}: .*from_torch again"):
            call()
    assert cache.length == 1


def test_assigned_parameters_of_the_original_are_noticed_and_copied_ones_followed():
    original, other = torch_stack().eval(), torch_stack().eval()
    cached = CachedDecoder.from_torch(original)
    tgt, memory = inputs(False)
    original.load_state_dict(other.state_dict())
    assert_same(original, cached, tgt, memory)
    original.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="assign=True"):
        cached(tgt, memory)
    assert_same(original, CachedDecoder.from_torch(original), tgt, memory)


def test_a_copy_of_a_cached_decoder_stands_for_itself():
    original = torch_stack().eval()
    twin = copy.deepcopy(CachedDecoder.from_torch(original))
    tgt, memory = inputs(False)
    expected = original(tgt, memory)
    with torch.no_grad():
        original.layers[0].self_attn.in_proj_weight.zero_()
    assert torch.allclose(twin(tgt, memory), expected, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_whole_transformer_gives_its_encoder_and_the_cached_decoder(batch_first):
    whole = randomise(nn.Transformer(D, H, 1, 2, FF, 0.0, batch_first=batch_first, dtype=FP64))
    encoder, decoder = CachedDecoder.from_torch(whole)
    assert encoder is whole.encoder and isinstance(decoder, CachedDecoder)
    assert all(a is b for a, b in zip(decoder.parameters(), whole.decoder.parameters(), strict=True))
    tgt, source = inputs(batch_first)
    expected = whole(source, tgt, tgt_mask=causal())
    assert torch.allclose(decoder(tgt, encoder(source), tgt_mask=causal()), expected, rtol=0, atol=1e-11)


def test_cached_layers_inside_are_taken_as_they_are():
    stack = nn.TransformerDecoder(CachedDecoderLayer(*SIZES), 2)
    cached = CachedDecoder.from_torch(stack)
    assert all(mine is theirs for mine, theirs in zip(cached.layers, stack.layers, strict=True))


class TunedLayer(nn.TransformerDecoderLayer):
    pass


class TunedCachedLayer(CachedDecoderLayer):
    pass


class TunedDecoder(nn.TransformerDecoder):
    pass


class TunedAttention(nn.MultiheadAttention):
    pass


def with_attention(attention: nn.Module, name: str = "self_attn") -> nn.TransformerDecoder:
    stack = torch_stack()
    setattr(stack.layers[1], name, attention)
    return stack


def whole_with(decoder: nn.Module) -> nn.Transformer:
    return nn.Transformer(D, H, 1, 1, FF, custom_decoder=decoder)


UNKNOWN = {
    "TunedLayer": lambda: nn.TransformerDecoder(TunedLayer(*SIZES), 2),
    "TunedCachedLayer": lambda: nn.TransformerDecoder(TunedCachedLayer(*SIZES), 2),
    "TunedDecoder": lambda: TunedDecoder(nn.TransformerDecoderLayer(*SIZES), 2),
    "TunedAttention": lambda: with_attention(TunedAttention(D, H)),
    "MultiheadAttention": lambda: with_attention(nn.MultiheadAttention(D, H, kdim=8, vdim=8), "multihead_attn"),
    "MultiheadAttention ": lambda: with_attention(nn.MultiheadAttention(D, H, add_bias_kv=True)),
    " MultiheadAttention": lambda: with_attention(nn.MultiheadAttention(D, H, add_zero_attn=True)),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(*SIZES), 1),
    "TransformerEncoderLayer": lambda: nn.TransformerDecoder(nn.TransformerEncoderLayer(*SIZES), 1),
    "Linear": lambda: nn.Linear(2, 2),
    "TunedDecoder ": lambda: whole_with(TunedDecoder(nn.TransformerDecoderLayer(*SIZES), 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_class_is_refused_by_name(name):
    with pytest.raises(TypeError, match=rf"\b{name.strip()}\b"):
        CachedDecoder.from_torch(UNKNOWN[name]())


def test_a_stack_needs_a_layer():
    with pytest.raises(ValueError, match="at least one layer"):
        CachedDecoder([])


def test_packed_weights_are_split_by_views():
    attention = CachedMultiheadAttention(D, H, dtype=FP64)
    x = torch.randn(2, 3, D, dtype=FP64)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    assert torch.allclose(attention.q(x), q) and torch.allclose(attention.kv(x), torch.cat([k, v], -1))
    before = attention.in_proj_weight.data_ptr()
    for training in (True, False):
        attention.train(training)
        assert attention.in_proj_weight.data_ptr() == before
    for name, (weight, bias) in attention.products().items():
        assert torch.allclose(F.linear(x, weight, bias), getattr(attention, name)(x)), name
        assert weight.untyped_storage().data_ptr() in (before, attention.out_proj.weight.data_ptr())
