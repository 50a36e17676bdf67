"""The container that rounds: old keys and values as codes of 8, 4 or 2 bits, the newest as they are.

After KIVI (Liu et al. 2024): keys have channels of very different size, so each channel of `group` tokens has a scale;
values are scaled token by token. What is saved is memory. Each step makes numbers of all codes again, so that it takes
longer than with plain numbers unless memory is what limits it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from translator.cache.codes import decode, encode
from translator.cache.dense import normal_tensors
from translator.cache.lengths import Lengths
from translator.cache.spec import CacheSpec, register
from translator.cache.state import KeyValueState
from translator.cache.step import Step, View

CODED = ("k_codes", "k_scale", "k_low", "v_codes", "v_scale", "v_low")


class CodedPositions(NamedTuple):
    """`KeyPositions` of `coded` slots that stand at their position, as far as a row has that many, and of the exact
    ones behind them."""

    groups: tuple[int, ...]
    coded: int
    exact: int
    size: int

    def __call__(self, lengths: Lengths, T: int, device: torch.device) -> Tensor:
        """`(rows, coded + exact)`; -1 where a row has no token."""
        held = torch.tensor(self.groups, device=device).unsqueeze(1) * self.size  # (rows, 1)
        first = torch.arange(self.coded, device=device).expand(len(self.groups), -1)
        return torch.cat([first.where(first < held, -1), held + torch.arange(self.exact, device=device)], dim=1)


@register
class QuantisedCache(KeyValueState):
    """Codes of whole groups of tokens `(rows, H_kv, groups, …)`, and `(rows, H_kv, slots, D_head)` of the tokens after.

    A row's newest `residual` tokens at least are exact; whenever `group` more have come, the oldest of them become
    codes, all at once. What was rounded stays so: rows can be emptied, and shortened as far as they are exact. Between
    steps every slot beyond a row's length is zero, and so are the scales beyond its groups.
    """

    kind = "quantised"
    loses = "it rounds keys and values"
    options = ("bits", "group", "residual")
    uneven = True

    def __init__(
        self,
        spec: CacheSpec,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        value_width: int | None = None,
    ) -> None:
        self.bits, self.group, self.residual = spec.bits, spec.group, spec.residual
        widths = width, value_width or width
        self.channels = min(spec.group, widths[1])
        if widths[1] % self.channels or self.channels * self.bits % 8 or self.group * self.bits % 8:
            raise self.cannot(
                f"hold values {widths[1]} wide in groups of {spec.group} codes of {self.bits} bits: a group has to "
                "divide the width and fill whole bytes"
            )
        bytes_, groups = [count * self.bits // 8 for count in (self.group, self.channels)], widths[1] // self.channels
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        shape = rows, heads, 0
        with normal_tensors():
            self.coded = {
                "k_codes": torch.zeros(*shape, widths[0], bytes_[0], dtype=torch.uint8, device=device),
                "k_scale": torch.zeros(*shape, widths[0], **factory),
                "k_low": torch.zeros(*shape, widths[0], **factory),
                "v_codes": torch.zeros(*shape, self.group, groups, bytes_[1], dtype=torch.uint8, device=device),
                "v_scale": torch.zeros(*shape, self.group, groups, **factory),
                "v_low": torch.zeros(*shape, self.group, groups, **factory),
            }
            self.exact = {name: torch.zeros(*shape, w, **factory) for name, w in zip("kv", widths, strict=True)}
        self.groups, self.lengths = Lengths(rows), Lengths(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, lowest values and exact slots."""
        return sum(part.nbytes for part in (*self.coded.values(), *self.exact.values()))

    @classmethod
    def account(
        cls, spec: CacheSpec, rows: int, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype
    ) -> int:
        """See `KeyValueState.account`."""
        return rows * cls.account_read(spec, heads, widths, length, dtype)

    @classmethod
    def account_read(cls, spec: CacheSpec, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype) -> int:
        """See `KeyValueState.account_read`: codes, a scale and a lowest value for each group, and exact tokens."""
        coded = max(0, (length - spec.residual) // spec.group * spec.group)
        codes = coded * sum(widths) * spec.bits // 8
        pairs = coded // spec.group * widths[0] + coded * (widths[1] // min(spec.group, widths[1]))
        return heads * (codes + 2 * pairs * dtype.itemsize + (length - coded) * sum(widths) * dtype.itemsize)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> View:
        """All groups, and the exact slots with room for the step's own tokens."""
        held = self._held(step.lengths)
        room = int(held.max()) + step.T if len(held) else step.T
        with normal_tensors():
            self.exact = {name: _padded(part, room) for name, part in self.exact.items()}
        coded = self.coded["k_low"].shape[2] * self.group
        if self.groups.uniform is not None and step.lengths.uniform is not None:
            return View(coded + room)
        groups = tuple(self.groups.tensor().tolist())
        return View(coded + room, None, CodedPositions(groups, coded, room, self.group))

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` behind the exact tokens of each row."""
        held = self._held(step.lengths)
        for name, new in (("k", k), ("v", v)):
            part = self.exact[name]
            if new.shape != (*part.shape[:2], step.T, part.shape[3]):  # a single row would broadcast
                raise ValueError(f"K or V {tuple(new.shape)} for a step of {step.T} tokens on {len(part)} rows")
            if step.lengths.uniform is not None and self.groups.uniform is not None:
                first = int(held[0]) if len(held) else 0
                part[:, :, first : first + step.T] = new
            else:
                places = (held.unsqueeze(1) + torch.arange(step.T)).to(part.device)[:, None, :, None]
                part.scatter_(2, places.expand_as(new), new.to(part.dtype))

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`: codes as numbers, then exact tokens."""
        coded, bits = self.coded, self.bits
        k = decode(coded["k_codes"], coded["k_scale"], coded["k_low"], bits)  # (rows, H, groups, D_head, group)
        v = decode(coded["v_codes"], coded["v_scale"], coded["v_low"], bits)  # (rows, H, groups, group, …, channels)
        exact = view.visible - k.shape[2] * self.group
        return (
            torch.cat([k.transpose(3, 4).flatten(2, 3), self.exact["k"][:, :, :exact]], dim=2),
            torch.cat([v.flatten(4, 5).flatten(2, 3), self.exact["v"][:, :, :exact]], dim=2),
        )

    def commit(self, step: Step) -> None:
        """Pushes down what is no longer among the newest."""
        self.lengths = step.lengths.advanced(step.T)
        due = ((self._held(self.lengths) - self.residual).clamp(min=0) // self.group).tolist()
        if not any(due):
            return
        with normal_tensors():
            if len(set(due)) == 1:
                self._push(slice(None), due[0])
                self.exact = {name: part[:, :, due[0] * self.group :].clone() for name, part in self.exact.items()}
            else:
                self._make_room(int((self.groups.tensor() + torch.tensor(due)).max()))
                for row, count in enumerate(due):
                    if count:
                        self._push(slice(row, row + 1), count)
        self.groups = Lengths.of(self.groups.tensor() + torch.tensor(due))
        self._trim()

    def rollback(self, step: Step) -> None:
        """What the step wrote is zeroed."""
        self._zero_beyond(step.lengths)

    def _held(self, lengths: Lengths) -> Tensor:
        """Exact tokens of each row, `(rows,)`, on the host."""
        return lengths.tensor() - self.groups.tensor() * self.group

    def _push(self, rows: slice, count: int) -> None:
        """Makes `count` groups of codes of the oldest exact tokens of `rows`, behind those that are there."""
        size = count * self.group
        k, v = (self.exact[name][rows, :, :size].unflatten(2, (count, self.group)) for name in "kv")
        made = (
            *encode(k.transpose(3, 4), self.bits),
            *encode(v.unflatten(4, (-1, self.channels)), self.bits),
        )
        if rows == slice(None):
            pairs = zip(CODED, made, strict=True)
            self.coded = {name: torch.cat([self.coded[name], new], dim=2) for name, new in pairs}
            return
        first = int(self.groups.tensor()[rows.start])
        for name, new in zip(CODED, made, strict=True):
            self.coded[name][rows, :, first : first + count] = new
        for part in self.exact.values():
            rest = part[rows, :, size:].clone()
            part[rows, :, : rest.shape[2]] = rest
            part[rows, :, rest.shape[2] :] = 0

    def _make_room(self, groups: int) -> None:
        self.coded = {name: _padded(part, groups) for name, part in self.coded.items()}

    def _trim(self) -> None:
        """Gives back slots and groups that no row has any more."""
        slots = int(self._held(self.lengths).max()) if self.lengths.rows else 0
        groups = self.groups.longest if self.groups.rows else 0
        with normal_tensors():
            if self.exact["k"].shape[2] > slots:
                self.exact = {name: part[:, :, :slots].clone() for name, part in self.exact.items()}
            if self.coded["k_low"].shape[2] > groups:
                self.coded = {name: part[:, :, :groups].clone() for name, part in self.coded.items()}

    def _zero_beyond(self, lengths: Lengths) -> None:
        held = self._held(lengths).to(self.exact["k"].device)
        for part in self.exact.values():
            beyond = torch.arange(part.shape[2], device=part.device) >= held.unsqueeze(1)
            part.masked_fill_(beyond[:, None, :, None], 0)

    # -- the life of a grid ------------------------------------------------------------------------------------------

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row `beams` times, neighbours first."""
        self.select(torch.arange(self.lengths.rows).repeat_interleave(beams), length)

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`."""
        with normal_tensors():
            self._all(lambda part: part.index_select(0, rows.to(part.device)))
        host = rows.cpu()
        self.groups, self.lengths = (Lengths.of(each.tensor()[host]) for each in (self.groups, self.lengths))
        self._trim()

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """Codes and exact tokens of these rows, and how many there are of each."""
        held = {name: part[rows] for name, part in (*self.coded.items(), *self.exact.items())}
        return held | {"groups": self.groups.tensor()[rows], "lengths": self.lengths.tensor()[rows]}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`; raises `UnsupportedCacheOperation` for what another kind of state held."""
        if contents.keys() != {*CODED, "k", "v", "groups", "lengths"}:
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        for parts in (self.coded, self.exact):
            for name, part in parts.items():
                new = contents[name]
                if new.shape[3:] != part.shape[3:]:
                    raise self.cannot("admit codes of other groups or bits")
                with normal_tensors():
                    size = max(part.shape[2], new.shape[2])
                    parts[name] = _padded(part, size, copy=True)
                    parts[name][rows] = _padded(new, size)
        groups, lengths = self.groups.tensor().clone(), self.lengths.tensor().clone()
        groups[rows], lengths[rows] = contents["groups"], contents["lengths"]
        self.groups, self.lengths = Lengths.of(groups), Lengths.of(lengths)

    def check_clear(self, lengths: Lengths) -> None:
        """Rows can be emptied, and shortened as far as their tokens are exact."""
        wanted = lengths.tensor()
        if bool(((wanted > 0) & (wanted < self.groups.tensor() * self.group)).any()):
            raise self.cannot("crop into tokens that are codes; a row can be emptied, or keep all of them")

    def clear(self, lengths: Lengths, until: int) -> None:
        """Forgets each row's tokens from its length on."""
        self.check_clear(lengths)
        kept = self.groups.tensor().where(lengths.tensor() > 0, 0)
        self.groups, self.lengths = Lengths.of(kept), lengths
        self._zero_beyond(lengths)
        for name in CODED:  # a scale of NaN would make NaN of a slot that is masked
            part = self.coded[name]
            beyond = torch.arange(part.shape[2], device=part.device) >= kept.to(part.device).unsqueeze(1)
            part.masked_fill_(beyond.view(*beyond.shape[:1], 1, -1, *[1] * (part.dim() - 3)), 0)
        self._trim()

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves all, and converts what isn't codes."""
        with normal_tensors():
            self._all(lambda part: part.to(device, None if part.dtype == torch.uint8 else dtype))

    def _all(self, change: Any) -> None:
        self.coded = {name: change(part) for name, part in self.coded.items()}
        self.exact = {name: change(part) for name, part in self.exact.items()}


def _padded(part: Tensor, size: int, copy: bool = False) -> Tensor:
    """`part` `(rows, H, n, …)` with zeros behind up to `size` of the third dimension."""
    if part.shape[2] >= size:
        return part.clone() if copy else part
    more = part.new_zeros(*part.shape[:2], size - part.shape[2], *part.shape[3:])
    return torch.cat([part, more], dim=2)
