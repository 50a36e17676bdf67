"""Masks: one polarity inside, shapes refused rather than broadcast, bottom-right causality."""

import pytest
import torch

from translator.attention.masks import causal_mask, merge_masks, padding_visible, restrict, view_mask
from translator.cache import Lengths

B, H, T, S = 2, 3, 4, 5
SHAPE = (B, H, T, S)
INF = float("inf")


def hidden(*shape: int) -> torch.Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < 0.4
    mask[..., 0] = False
    return mask


def shown(mask: torch.Tensor | None, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """What a mask in sdpa's polarity shows, in full."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return (mask if mask.dtype == torch.bool else mask == 0).expand(shape)


def test_no_mask_stays_none_and_keeps_the_hint():
    assert merge_masks(None, None, SHAPE, torch.float64, is_causal=True) == (None, True)
    assert merge_masks(None, None, SHAPE, torch.float64) == (None, False)


@pytest.mark.parametrize("float_mask", [False, True])
@pytest.mark.parametrize("float_padding", [False, True])
@pytest.mark.parametrize("shape", [None, (T, S), (B * H, T, S), (B, H, T, S)])
@pytest.mark.parametrize("padded", [False, True])
def test_merged_mask_shows_what_neither_hides(shape, padded, float_mask, float_padding):
    if shape is None and not padded:
        return
    mask = None if shape is None else hidden(*shape)
    padding = hidden(B, S) if padded else None
    expected = torch.ones(SHAPE, dtype=torch.bool)
    if mask is not None:
        expected = expected & ~(mask.view(B, H, T, S) if mask.dim() == 3 else mask)
    if padding is not None:
        expected = expected & ~padding[:, None, None]

    def maybe_float(given, wanted):
        if given is None or not wanted:
            return given
        return torch.zeros(given.shape, dtype=torch.float32).masked_fill(given, -INF)

    merged, causal = merge_masks(
        maybe_float(mask, float_mask), maybe_float(padding, float_padding), SHAPE, torch.float64
    )
    assert not causal
    assert torch.equal(shown(merged), expected)
    assert merged.dtype in (torch.bool, torch.float64)


def test_float_masks_keep_their_values():
    mask, padding = torch.randn(T, S), torch.randn(B, S)
    merged, _ = merge_masks(mask, padding, SHAPE, torch.float64)
    assert torch.equal(merged.expand(B, 1, T, S), (mask.double() + padding.double()[:, None, None]))


def test_causal_hint_survives_a_padding_mask():
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    merged, causal = merge_masks(None, padding, (2, H, 4, 4), torch.float64, is_causal=True)
    assert not causal
    assert torch.equal(shown(merged, (2, H, 4, 4)), (~causal_mask(4, 4) & ~padding[:, None, None]).expand(2, H, 4, 4))


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        ((T, 1), None),  # these two would broadcast, silently
        ((1, S), None),
        ((T, T), None),
        ((B, T, S), None),
        ((H, T, S), None),
        ((S,), None),
        (None, (B, 1)),
        (None, (1, S)),
        (None, (B, T)),
        (None, (S,)),
    ],
)
def test_a_mask_that_only_broadcasts_is_refused(mask, padding):
    make = lambda shape: None if shape is None else torch.zeros(shape, dtype=torch.bool)  # noqa: E731
    with pytest.raises(ValueError, match=rf"past \+ step = 1 \+ {S - 1} = {S} keys"):
        merge_masks(make(mask), make(padding), SHAPE, torch.float64, past=1)


def test_an_integer_mask_is_refused():
    with pytest.raises(ValueError, match="bool"):
        merge_masks(torch.zeros(T, S, dtype=torch.int64), None, SHAPE, torch.float64)


@pytest.mark.parametrize("padding_only", [False, True])
def test_merged_masks_are_contiguous_in_the_last_dimension(padding_only):
    """Kernels refuse others on a GPU, with a message about a "bias"; a CPU doesn't show it."""
    expanded = torch.zeros(B, 1, dtype=torch.bool).expand(B, S)
    mask = None if padding_only else torch.zeros(S, T).t()
    merged, _ = merge_masks(mask, expanded, SHAPE, torch.float32)
    assert merged.stride(-1) == 1
    assert padding_visible(torch.ones(B, 1, dtype=torch.bool).expand(B, S), B, S).stride(-1) == 1


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (3, 3), (2, 5), (4, 5)])
def test_causal_mask_is_bottom_right(queries, keys):
    past = keys - queries
    expected = [[key > past + query for key in range(keys)] for query in range(queries)]
    assert causal_mask(queries, keys).tolist() == expected


@pytest.mark.parametrize("visible", ["none", "causal", "mask"])
@pytest.mark.parametrize("given", ["padding", "attention"])
@pytest.mark.parametrize("as_float", [False, True])
def test_restrict_shows_only_what_both_show(visible, given, as_float):
    queries = keys = S
    shape = (B, 1, queries, keys)
    mask = ~hidden(B, 1, 1, keys) if given == "padding" else ~hidden(queries, keys)
    own = {
        "none": torch.ones(queries, keys, dtype=torch.bool),
        "causal": ~causal_mask(queries, keys),
        "mask": ~hidden(B, 1, queries, keys),
    }[visible]
    caller = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -INF) if as_float else mask
    result = restrict(caller, own if visible == "mask" else None, visible == "causal", queries)
    assert torch.equal(shown(result, shape), (mask & own).expand(shape))


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [4, 4, 4], [0, 2, 7], [5, 1, 0]])
def test_step_mask_against_its_definition(lengths, tokens, block):
    """Token `i` of row `r` stands at `lengths[r] + i` and sees the keys at or before it, nothing else."""
    visible = -(-(max(lengths) + tokens) // block) * block
    held = Lengths.of(torch.tensor(lengths))
    past = held.tensor() if held.uniform is None else held.uniform
    mask, causal = view_mask(past, tokens, visible, torch.device("cpu"))
    shape = (len(lengths), 1, tokens, visible)
    result = shown(~causal_mask(tokens, visible) if causal else mask, shape)
    expected = [[[[key <= length + i for key in range(visible)] for i in range(tokens)]] for length in lengths]
    assert result.tolist() == expected


def test_a_view_s_mask_costs_nothing_where_none_is_needed():
    device = torch.device("cpu")
    assert view_mask(5, 1, 6, device) == (None, False)
    assert view_mask(0, 4, 4, device) == (None, True)
    assert view_mask(5, 1, 6, device, window=6) == (None, False)
    assert view_mask(0, 4, 4, device, window=3)[0] is not None


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("past", [0, 4, [0, 2, 7]], ids=str)
def test_the_mask_of_slots_in_another_order(past, window, tokens):
    """Slots hold positions in any order, some of them nothing (-1): what counts is the position, not the slot."""
    lengths = past if isinstance(past, list) else [past] * 3
    places = [[*range(length + tokens)][::-1] + [-1] * (max(lengths) - length) for length in lengths]
    keys = torch.tensor(places if isinstance(past, list) else places[0])
    given = torch.tensor(past) if isinstance(past, list) else past
    mask, causal = view_mask(given, tokens, keys.shape[-1], torch.device("cpu"), window, keys)
    expected = [
        [[[0 <= key <= n + i and (window is None or key > n + i - window) for key in row] for i in range(tokens)]]
        for n, row in zip(lengths, places, strict=True)
    ]
    assert not causal and mask.expand(3, 1, tokens, -1).tolist() == expected


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_callers_mask_is_over_positions_whatever_the_slots(as_float, per_row):
    generator = torch.Generator().manual_seed(1)
    wanted = torch.rand(3, 1, 2, 6, generator=generator) < 0.6  # (rows, 1, T, past + T), True = visible
    given = torch.zeros_like(wanted, dtype=torch.float32).masked_fill(~wanted, -INF) if as_float else wanted
    order = (
        torch.stack([torch.randperm(6, generator=generator) for _ in range(3)]) if per_row else torch.arange(6).flip(0)
    )
    keys = torch.cat([order, torch.full((*order.shape[:-1], 2), -1)], dim=-1)
    seen, causal = view_mask(4, 2, 8, torch.device("cpu"), None, keys)
    found = restrict(given, seen, causal, 2, keys)
    found = found if found.dtype == torch.bool else found == 0
    rows = keys if per_row else keys.expand(3, -1)
    for row in range(3):
        for i in range(2):
            expected = [0 <= key <= 4 + i and bool(wanted[row, 0, i, key]) for key in rows[row].tolist()]
            assert found.expand(3, 1, 2, 8)[row, 0, i].tolist() == expected


def test_a_callers_mask_hides_nothing_of_a_block_s_spare_slots_itself():
    seen, causal = view_mask(4, 2, 8, torch.device("cpu"))
    assert torch.equal(restrict(torch.ones(2, 6, dtype=torch.bool), seen, causal, 2), seen)


@pytest.mark.parametrize("as_float", [False, True])
def test_padding_visible(as_float):
    padding = torch.tensor([[False, False, True], [False, False, False]])
    given = torch.zeros(2, 3).masked_fill(padding, -INF) if as_float else padding
    assert torch.equal(padding_visible(given, 2, 3), ~padding)
    assert padding_visible(torch.zeros_like(given), 2, 3) is None
    assert padding_visible(None, 2, 3) is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.bool), r"\(2, 4\)"),
        (torch.zeros(3, dtype=torch.bool), r"\(3,\)"),
        (torch.full((2, 3), 0.5), "0 and -inf"),
        (torch.zeros(2, 3, dtype=torch.int64), "bool"),
    ],
)
def test_padding_visible_refuses(mask, message):
    with pytest.raises(ValueError, match=message):
        padding_visible(mask, 2, 3)
