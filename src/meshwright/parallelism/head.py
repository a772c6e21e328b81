"""The last linear layer of a model apart from the rest, for a loss that computes it itself (layout.loss_chunks)."""

import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.models.contract import loss_of, next_token_loss
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.parallelism.collectives import all_gather_autograd
from meshwright.parallelism.tensor.layers import AllGatherInput


class SeparateHead(NamedTuple):
    """A separated head: logits are F.linear(hidden, weight, bias)."""

    module: Any
    """The module that owns the weight: its attributes are read at each use, since FSDP2 replaces them."""
    hidden_of: Callable[[Tensor], Tensor]
    """Returns the head's input, of the whole sequence, from the stage's output."""

    @property
    def weight_VD(self) -> Tensor:
        """Return this rank's rows of the vocabulary, in the compute format."""
        weight: Tensor = self.module.weight
        return weight

    @property
    def bias_V(self) -> Tensor | None:
        """Return the bias of these rows, if the head has one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


def require_separable(model: nn.Module, loss_chunks: int) -> None:
    """Raise UnsupportedError if `loss_chunks` are several and the loss cannot compute the head of the whole `model`."""
    if loss_chunks == 1:
        return
    name = type(model).__name__
    if loss_of(model) is not next_token_loss:
        raise UnsupportedError(
            f"layout.loss_chunks = {loss_chunks} computes the next-token loss, but {name} has a loss of its own: "
            "remove its method loss, or set layout.loss_chunks to 1"
        )
    head = model.get_submodule(_name_of_head(model, loss_chunks))
    if not isinstance(head, nn.Linear | nn.Embedding):
        raise UnsupportedError(
            f"layout.loss_chunks = {loss_chunks} multiplies by the weight of the head itself, but the head of {name} "
            f"is a {type(head).__name__}: make it an nn.Linear, or set layout.loss_chunks to 1"
        )


def separate_head(stage: nn.Module, loss_chunks: int) -> SeparateHead:
    """Return the head of a last stage, whose forward from now on returns the head's input."""
    head = stage.get_submodule(_name_of_head(stage, loss_chunks))
    if isinstance(stage, Llama | GPT2):
        stage.returns_hidden = True
        return SeparateHead(head, lambda hidden_BSD: hidden_BSD)
    passed_on = _PassedOn(type(stage).__name__, head)
    # Not a hook: those run after the layer has computed.
    head.forward = passed_on
    return SeparateHead(head, passed_on.hidden_of)


def _name_of_head(model: Any, loss_chunks: int) -> str:
    if isinstance(model, Llama | GPT2):
        return str(model.last_parts[-1])
    patterns = [pattern for pattern, role in (getattr(model, "tensor_parallel", None) or {}).items() if role == "head"]
    names: list[str] = [
        name for name, _ in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if len(names) == 1:
        return names[0]
    found = f"gives that role to {', '.join(names)}" if names else "names none"
    raise UnsupportedError(
        f"layout.loss_chunks = {loss_chunks} needs the head of {type(model).__name__}, one module with the role head "
        f'in tensor_parallel, which {found}: add tensor_parallel = {{"head": "head", ...}} with the name of its last '
        "layer (see meshwright/models/contract.py), or set layout.loss_chunks to 1"
    )


class _PassedOn:
    """The forward of a head that the loss computes: returns its input."""

    def __init__(self, model: str, head: nn.Module) -> None:
        self._model, self._head = model, head
        self._given: Callable[[], Tensor | None] = lambda: None
        self._version = 0

    def __call__(self, x_BSD: Tensor) -> Tensor:
        # Weak: the loss frees the tensor before backward.
        self._given, self._version = weakref.ref(x_BSD), x_BSD._version
        return x_BSD

    def hidden_of(self, output: Tensor) -> Tensor:
        """Return the head's input, of the whole sequence, from what the model's forward returned."""
        if output is not self._given() or output._version != self._version:
            raise ConfigError(
                f"the forward of {self._model} changes what its head returns, such as by scaling or in place, but with "
                "layout.loss_chunks the head is computed after forward: return its output as it is, or set "
                "layout.loss_chunks to 1"
            )
        if isinstance(self._head, AllGatherInput):
            return all_gather_autograd(output, 1, self._head.tp_group)
        return output
