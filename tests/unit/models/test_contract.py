"""What the trainer asks of any model, and what it assumes where the model says nothing."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract import blocks_of, loss_of, next_token_loss


class Bare(nn.Module):
    """A model that says nothing."""


class Outspoken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).abs().mean()


def test_what_a_model_says_is_used() -> None:
    model = Outspoken()
    assert blocks_of(model) is model.blocks
    assert loss_of(model)(torch.tensor([3.0]), torch.tensor([1.0])) == 2.0


def test_what_it_does_not_say_is_assumed() -> None:
    assert len(blocks_of(Bare())) == 0
    assert loss_of(Bare()) is next_token_loss


@pytest.mark.parametrize(("name", "read"), [("blocks", blocks_of), ("loss", loss_of)])
def test_something_else_under_that_name_is_refused(name: str, read: object) -> None:
    model = Bare()
    setattr(model, name, 3)
    with pytest.raises(ConfigError, match=rf"Bare\.{name} is int"):
        read(model)  # type: ignore[operator]


def test_loss_is_the_mean_in_float32() -> None:
    logits_BSV = torch.randn(2, 3, 50, dtype=torch.bfloat16)
    targets_BS = torch.randint(0, 50, (2, 3))
    chosen_BS = logits_BSV.float().log_softmax(-1).gather(-1, targets_BS[..., None])[..., 0]
    loss = next_token_loss(logits_BSV, targets_BS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -chosen_BS.mean())


def test_ignored_targets_do_not_count() -> None:
    logits_BSV = torch.randn(1, 3, 5)
    whole = next_token_loss(logits_BSV[:, :2], torch.tensor([[1, 2]]))
    torch.testing.assert_close(next_token_loss(logits_BSV, torch.tensor([[1, 2, -100]])), whole)
