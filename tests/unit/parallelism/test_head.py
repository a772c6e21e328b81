"""A model whose head the loss cannot compute itself is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.parallelism.head import require_separable, separate_head


class WithRole(nn.Module):
    """A user's model that says which layer is its head."""

    tensor_parallel = {"body": "column", "out": "head"}

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.out(self.body(x_BSD))


class Scaled(WithRole):
    """Changes its logits after the head."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return super().forward(x_BSD) * 0.5


class Masked(WithRole):
    """Changes its logits in place."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        logits_BSV = super().forward(x_BSD)
        logits_BSV[..., 3:] = -30.0
        return logits_BSV


class WithLoss(WithRole):
    """Has a loss of its own."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).mean()


class Nameless(nn.Module):
    """Names no head."""


class TwoHeads(WithRole):
    """Names two."""

    tensor_parallel = {"*": "head"}


class Convolved(WithRole):
    """Ends with another kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv1d(4, 7, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Nameless(), "layout.loss_chunks = 4 needs the head of Nameless.* which names none: add tensor_parallel"),
        (TwoHeads(), "needs the head of TwoHeads.* gives that role to , body, out"),
        (WithLoss(), "WithLoss has a loss of its own: remove its method loss, or set layout.loss_chunks to 1"),
        (Convolved(), "the head of Convolved is a Conv1d: make it an nn.Linear, or set layout.loss_chunks to 1"),
    ],
)
def test_a_head_that_the_loss_cannot_compute_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        require_separable(model, 4)
    require_separable(model, 1)


def test_a_separated_head_leaves_its_product_to_the_loss() -> None:
    model, x_BSD = WithRole(), torch.randn(1, 3, 4)
    logits_BSV = model(x_BSD)
    head = separate_head(model, 4)
    hidden_BSD = head.hidden_of(model(x_BSD))
    assert hidden_BSD.shape == (1, 3, 4)
    torch.testing.assert_close(nn.functional.linear(hidden_BSD, head.weight_VD, head.bias_V), logits_BSV)


@pytest.mark.parametrize("kind", [Scaled, Masked])
def test_logits_that_change_after_the_head_are_refused(kind: type[WithRole]) -> None:
    model = kind()
    head = separate_head(model, 4)
    with pytest.raises(ConfigError, match=f"the forward of {kind.__name__} changes what its head returns"):
        head.hidden_of(model(torch.randn(1, 3, 4)))
