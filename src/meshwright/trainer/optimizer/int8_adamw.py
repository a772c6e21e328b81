"""Int8AdamW: torchao's 8-bit AdamW, with blocks that stay whole wherever a layout cuts a parameter.

Moments are codes of 8 bits and a float32 scale for each block of 128 values (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", arXiv:2110.02861). torchao counts blocks along the flat local shard, so that another sharding
would have other blocks. Here only matrices whose rows are whole blocks are quantized: then codes and scales are cut by
every layout as the parameter is, all layouts train alike, and a checkpoint is loaded by any of them to the bit. What
has other rows keeps float32 moments; a layout that cuts columns within a block is refused.

So does what stands outside of blocks, as in the paper. A row of the embedding whose token a step lacks has no gradient:
its second moments can round to 0 before its first ones do, and the quotient would then be that by epsilon.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import InfeasibleLayout
from meshwright.parallelism.torch_private.torch_compat import import_torchao, local_box
from meshwright.spec.job.rules.optimizer_rules import INT8_BLOCK_SIZE, INT8_MIN_ELEMENTS
from meshwright.trainer.optimizer.update_groups import is_block_matrix

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether they have a sign."""


class Int8AdamW:
    """Updates parameters by torchao's AdamW8bit; `names` are for messages."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Raise UnsupportedError without torchao, InfeasibleLayout where a block is cut."""
        self._names = names
        self._saved: dict[nn.Parameter, dict[str, Tensor]] = {}
        # torchao divides by the number of blocks, which an empty shard does not have.
        held = [{**group, "params": [each for each in group["params"] if _local(each).numel()]} for group in groups]
        self._optimizer: Any = _torchao().AdamW8bit(
            [group for group in held if group["params"]], lr=lr, betas=betas, eps=eps, block_size=INT8_BLOCK_SIZE
        )
        for group in groups:
            for parameter in group["params"]:
                self._make_state(parameter)

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Return the state of each parameter as torchao keeps it."""
        states: Mapping[Any, dict[str, Any]] = self._optimizer.state
        return states

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups; their rates are tensors."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, those of which this rank holds nothing included."""
        return [*self._saved]

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors of a parameter's state that a checkpoint holds: codes, scales and the step."""
        return self._saved[parameter]

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        # torchao compiles the update for each shape of a parameter: on a CPU that takes minutes, and saves little.
        on_host = all(each.device.type == "cpu" for each in self._saved)
        with torch.compiler.set_stance("force_eager") if on_host else nullcontext():
            self._optimizer.step()
        for parameter, saved in self._saved.items():
            # A checkpoint takes the count from any rank.
            if parameter.grad is not None and not _local(parameter).numel():
                saved["step"] += 1

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._saved:
            parameter.grad = None

    def _make_state(self, parameter: nn.Parameter) -> None:
        # On the host, as torchao has it: the compiled update takes it as a number.
        state: dict[str, Any] = {"step": torch.zeros(())}
        saved: dict[str, Tensor] = {"step": state["step"]}
        for name, is_signed in _MOMENTS.items():
            if not is_quantized(self._names[parameter], parameter):
                state[name] = saved[name] = torch.zeros_like(parameter)
                continue
            local = _local(parameter)
            self._require_whole_blocks(parameter, local)
            codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
            scales = torch.zeros((*local.shape[:-1], local.shape[-1] // INT8_BLOCK_SIZE), device=local.device)
            saved |= {
                f"{name}_codes": _placed(codes, parameter, parameter.shape),
                f"{name}_scales": _placed(
                    scales, parameter, (*parameter.shape[:-1], parameter.shape[-1] // INT8_BLOCK_SIZE)
                ),
            }
            if local.numel():
                state[name] = _placed(_quantized(codes, scales, is_signed, local.dtype), parameter, parameter.shape)
        if _local(parameter).numel():
            self._optimizer.state[parameter] = state
        self._saved[parameter] = saved

    def _require_whole_blocks(self, parameter: nn.Parameter, local: Tensor) -> None:
        if local.shape[-1] % INT8_BLOCK_SIZE:
            raise InfeasibleLayout(
                f'optimizer.state_dtype = "int8" has blocks of {INT8_BLOCK_SIZE} columns, and the layout cuts '
                f"{self._names[parameter]} into parts of {local.shape[-1]}: lower layout.tp, or set "
                'optimizer.state_dtype to "bfloat16"'
            )


def is_quantized(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter's moments are 8-bit; the same in every layout."""
    return (
        is_block_matrix(name, parameter)
        and parameter.shape[-1] % INT8_BLOCK_SIZE == 0
        and parameter.numel() >= INT8_MIN_ELEMENTS
    )


def _quantized(codes: Tensor, scales: Tensor, is_signed: bool, dtype: torch.dtype) -> Tensor:
    """Return torchao's tensor on the memory of `codes` and `scales`."""
    subclass = _torchao().subclass_8bit.OptimState8bit
    like: Any = subclass.zeros((INT8_BLOCK_SIZE,), is_signed, INT8_BLOCK_SIZE, codes.device, dtype=dtype)
    tensor: Tensor = subclass(codes, scales.view(-1), like.qmap, is_signed, dtype=dtype)
    return tensor


def _placed(local: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a local shard as a tensor that is sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def _torchao() -> Any:
    purpose = 'optimizer.state_dtype = "int8"'
    import_torchao("torchao.optim.subclass_8bit", purpose)
    return import_torchao("torchao.optim", purpose)


def _local(tensor: Tensor) -> Tensor:
    return local_box(tensor)[0]
