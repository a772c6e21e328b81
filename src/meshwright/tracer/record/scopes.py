"""Scopes: the module or mark whose code is running, by fully qualified names.

torch's ModTracker hooks tensors, which keeps gradients alive longer and so changes memory. Here nothing is hooked on
tensors: torch numbers the nodes of the autograd graph in order of creation, so a node's number identifies the module
that was running then, which is the module whose backward the node belongs to.
"""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.parallelism.torch_private.torch_compat import canonical_fqn
from meshwright.spec.layout.schedule.action import ACTION_MARK, parse_action

_NO_TASK = -1
_UPDATE_MARK = "Optimizer.step#"
"""How torch marks an optimizer's step, which hooks may run in backward."""
_ACCUMULATES_GRADIENTS = 2**64 - 1
"""The number of all AccumulateGrad nodes."""


class _Open(NamedTuple):
    name: str
    task: int
    """The backward pass in which it was opened; -1 outside of any."""
    is_recomputed: bool
    """Whether it is in a recomputed forward."""
    module: nn.Module | None = None
    """The module; None for a mark."""

    @property
    def scope(self) -> str:
        """Return its name; "" for an action of a schedule, which is no module."""
        return "" if self.name.startswith(ACTION_MARK) else self.name


class Scopes:
    """Follows the modules that are called and the marks that are set."""

    def __init__(self) -> None:
        self.action: str | None = None
        """The action of the pipeline's schedule, as spec/layout/schedule/action.py writes it; None outside of any."""
        self.is_compiled_forward = False
        """Whether a compiled graph runs kernels of its forward."""
        self.is_in_schedule = False
        """Whether one of torch's pipeline schedules runs: its work after a backward is not the optimizer's."""
        self._open = [_Open("", _NO_TASK, is_recomputed=False)]
        self._names = weakref.WeakKeyDictionary[nn.Module, str]()
        self._first_nodes, self._makers = [0], [""]
        """First nodes, and the scopes that made the nodes from there on."""
        self._of_last_node = ""
        self._is_after_backward = False
        self.left_by_error = ""
        """The innermost module of the latest error."""

    @property
    def scope(self) -> str:
        """Return the module whose forward, recompute or backward runs, or a mark within it; "" outside of any."""
        top = self._open[-1]
        if top.task == torch._C._current_graph_task_id():
            return top.scope
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return top.scope
        if (number := node._sequence_nr()) != _ACCUMULATES_GRADIENTS:
            self._of_last_node = self._makers[bisect_right(self._first_nodes, number) - 1]
        return self._of_last_node

    @property
    def phase(self) -> str:
        """Return forward, backward, recompute or optimizer, which is between a backward and the next forward.

        An optimizer's step in a backward is optimizer, too. In one of torch's pipeline schedules what lies between is
        backward: messages, and the reductions of FSDP2.
        """
        if torch._C._current_graph_task_id() != _NO_TASK:
            self._is_after_backward = True
            if self._open[-1].name.startswith(_UPDATE_MARK):
                return "optimizer"
            # In a backward, gradients are enabled only for recomputed forwards.
            is_recomputed = self.is_compiled_forward or self._open[-1].is_recomputed or torch.is_grad_enabled()
            return "recompute" if is_recomputed else "backward"
        if self.action is not None:
            return "forward" if parse_action(self.action).kind.endswith("F") else "backward"
        if self._is_after_backward:
            return "backward" if self.is_in_schedule else "optimizer"
        return "forward"

    def begin(self) -> None:
        """Start a step: the phase is forward again."""
        self._is_after_backward = False

    def open(self, name: str, module: nn.Module | None = None) -> None:
        """Enter a module, or one of torch's marks."""
        if name.startswith(ACTION_MARK):
            self.action = name.removeprefix(ACTION_MARK)
        self.left_by_error = ""
        task = torch._C._current_graph_task_id()
        self._is_after_backward &= module is None or task != _NO_TASK
        is_recomputed = self._open[-1].is_recomputed or (module is not None and task != _NO_TASK)
        self._open.append(_Open(name, task, is_recomputed, module))
        self._next_nodes_are_made_here()

    def close(self) -> None:
        """Leave the innermost mark."""
        while (left := self._open.pop()).module is not None:
            pass
        if left.name.startswith(ACTION_MARK):
            self.action = None
        self._next_nodes_are_made_here()

    def leave(self, module: nn.Module) -> None:
        """Leave a module and everything open within it.

        After an error during compilation torch also runs the hooks of modules that were entered there, which are not
        open here.
        """
        if any(one.module is module for one in self._open):
            while self._open.pop().module is not module:
                pass
            self._next_nodes_are_made_here()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all calls of modules within the context."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, module: nn.Module) -> None:
        """Enter the forward of a module."""
        if module not in self._names:
            self._name_all_of(module)
        self.open(self._names[module], module)

    def _enter(self, module: nn.Module, _: Any) -> None:
        # Dynamo's own tracing is not part of the step.
        if not torch.compiler.is_dynamo_compiling():
            self.enter(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if sys.exception() is not None:
            self.left_by_error = self.left_by_error or self._open[-1].scope
        self.leave(module)

    def _name_all_of(self, root: nn.Module) -> None:
        """Name the modules of a model by their names without wrappers."""
        model = root.module if isinstance(root, DistributedDataParallel) else root
        self._names[root] = ""
        for fqn, module in model.named_modules():
            self._names[module] = canonical_fqn(f"{fqn}.").removesuffix(".")

    def _next_nodes_are_made_here(self) -> None:
        node = torch._C._autograd._get_sequence_nr()
        if self._first_nodes[-1] == node:
            self._makers[-1] = self._open[-1].scope
        else:
            self._first_nodes.append(node)
            self._makers.append(self._open[-1].scope)
