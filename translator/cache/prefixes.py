"""Which block holds a beginning that was decoded before: a chain of hashes, each of its parent and a block's tokens."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class PrefixIndex:
    """Blocks by the tokens in them and in all blocks before: equal digests mean equal beginnings.

    A chain starts from a root, a digest of everything else that K and V depend on: the layers, the weights, and in an
    encoder-decoder the source, since every layer but the first sees it through the one below. The index knows which
    blocks there are, not who holds them.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first, children before parents
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @staticmethod
    def root(*parts: bytes) -> bytes:
        """A digest to start from, of whatever makes two beginnings different although their tokens are equal."""
        digest = blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def add(self, chunks: Iterable[Sequence[int]], blocks: Iterable[int], root: bytes) -> list[int]:
        """Remembers each chunk of tokens in its block; returns the blocks that are new to the index."""
        added, chain = [], []
        for (digest, _), block in zip(_chained(chunks, root), blocks, strict=False):
            if digest not in self._blocks:
                self._blocks[digest], self._digests[block] = block, digest
                added.append(block)
            chain.append(digest)
        self._used(chain)
        return added

    def find(self, chunks: Iterable[Sequence[int]], root: bytes) -> list[int]:
        """The blocks of the chunks at the beginning, as far as they are known."""
        chain = []
        for digest, _ in _chained(chunks, root):
            if digest not in self._blocks:
                break
            chain.append(digest)
        found = [self._blocks[digest] for digest in chain]
        self._used(chain)
        return found

    def blocks(self) -> list[int]:
        """All of them, in the order in which they are to be forgotten: no parent before its children."""
        return list(self._blocks.values())

    def forget(self, block: int) -> None:
        """Finds this block no more."""
        del self._blocks[self._digests.pop(block)]

    def clear(self) -> list[int]:
        """Forgets everything; returns the blocks that were known."""
        known = self.blocks()
        self._blocks.clear()
        self._digests.clear()
        return known

    def _used(self, chain: Sequence[bytes]) -> None:
        for digest in reversed(chain):
            self._blocks.move_to_end(digest)


def _chained(chunks: Iterable[Sequence[int]], root: bytes) -> Iterable[tuple[bytes, Sequence[int]]]:
    parent = root
    for chunk in chunks:
        parent = blake2b(parent + array("q", chunk).tobytes(), digest_size=16).digest()
        yield parent, chunk
