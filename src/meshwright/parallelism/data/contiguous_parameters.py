"""Parameters of a user's own model, such as a transposed one, laid out row by row before they are cut into shards."""

from torch import nn


def make_contiguous(model: nn.Module) -> None:
    """Lay out each parameter of `model` row by row, in place.

    FSDP2 refuses others (torch 2.13). Of a DTensor that has their strides, over shards that lie row by row, a fused
    optimizer, which goes through memory, pairs elements with the moments of other ones. Tied parameters stay tied,
    since each stays the same object. Works on the meta device too.
    """
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
