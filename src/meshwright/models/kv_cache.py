"""KVCache: the keys and values of the positions already seen, so that generation computes each of them once.

Shapes: B batch, S new positions, T positions so far, M positions at most, K key/value heads, H head_dim.
"""

from torch import Tensor


class LayerCache:
    """Keys and values of one attention, in memory allocated once, at the first append."""

    def __init__(self, max_len: int) -> None:
        self.length = 0
        self._max_len = max_len
        self._key_BMKH: Tensor | None = None
        self._value_BMKH: Tensor | None = None

    def append(self, key_BSKH: Tensor, value_BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (key_BTKH, value_BTKH): all positions so far, the new ones last."""
        start, self.length = self.length, self.length + key_BSKH.shape[1]
        assert self.length <= self._max_len, f"{self.length} positions in a KVCache of {self._max_len}"
        if self._key_BMKH is None or self._value_BMKH is None:
            # Sized by what arrives: the batch, and the key heads, which may be this rank's share of them.
            batch_size, _, *rest = key_BSKH.shape
            self._key_BMKH = key_BSKH.new_empty(batch_size, self._max_len, *rest)
            self._value_BMKH = value_BSKH.new_empty(batch_size, self._max_len, *rest)
        self._key_BMKH[:, start : self.length] = key_BSKH
        self._value_BMKH[:, start : self.length] = value_BSKH
        return self._key_BMKH[:, : self.length], self._value_BMKH[:, : self.length]


class KVCache:
    """One LayerCache for each transformer block, for at most `max_len` positions (prompt and new tokens together)."""

    def __init__(self, num_layers: int, max_len: int) -> None:
        self.layers = [LayerCache(max_len) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Return how many positions are held: also the position of the next token."""
        return self.layers[0].length
