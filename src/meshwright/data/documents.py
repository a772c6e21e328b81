"""Which document each token of a sequence belongs to, where several stand in one: told from the ends between them."""

from torch import Tensor


def document_numbers(tokens_BS: Tensor, end_of_text: int) -> Tensor:
    """Return documents_BS in int64: 0 up to and with a row's first end of text, 1 up to and with its second, ..."""
    ends_BS = (tokens_BS == end_of_text).long()
    return ends_BS.cumsum(dim=1) - ends_BS
