"""DistributedDataParallel under fake collectives, whose futures are empty; checked in torch 2.11 to 2.15.

Its default reduction reads the result from a future in C++. A communication hook gives it the bucket instead; the
division by the number of ranks, otherwise part of a copy, is then an operation of its own.

Before the second step its reducer rebuilds its buckets in the order in which gradients became ready. Ranks agree on
this order by a broadcast of numbers, which fake tensors do not have; here each uses its own. Until then all gradients
are one bucket.

Its communication is marked, as torch marks that of FSDP2: its group is often the default group, without a name.
"""

# No future annotations: torch reads those of a hook.
import functools
import re
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as module
from torch.profiler import record_function

from meshwright.spec.trace.timeline import DDP_MARK
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.torch_patches.torch_names import replace, with_values

_MOST_BROADCASTS = 2
"""Concurrent broadcasts of buffers."""
_MOST_NAMED = 8
"""Maximum of parameters named in a message."""
_REDUCES, _SENDS_BUFFERS = f"{DDP_MARK}all_reduce", f"{DDP_MARK}broadcast_buffers"


def reduce_by_hook(mode: RecordingMode) -> None:
    """Make each new DistributedDataParallel reduce its gradients by `_reduced`."""
    # It compares shapes of parameters with other ranks, which do not exist here.
    replace(module, "_verify_param_shape_across_processes", lambda _: lambda *_, **__: None)
    replace(dist.Reducer, "_rebuild_buckets", lambda _: lambda *_: False)
    replace(DistributedDataParallel, "__init__", functools.partial(_with_hook, mode))
    replace(DistributedDataParallel, "_find_common_rank", _last_rank)
    replace(DistributedDataParallel, "_pre_forward", _with_new_buckets)
    replace(DistributedDataParallel, "register_comm_hook", _register)
    replace(DistributedDataParallel, "_register_builtin_comm_hook", lambda _: _register_builtin)
    replace(dist, "_broadcast_coalesced", lambda _: _broadcast_coalesced)
    replace(DistributedDataParallel, "_sync_buffers", record_function(_SENDS_BUFFERS))


def _with_hook(mode: RecordingMode, make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _hook(self, mode)
        if self.static_graph or not self.find_unused_parameters:
            _arrivals[self] = _Arrivals(self, mode)

    return made


def _last_rank(find: Callable[..., int]) -> Callable[..., int]:
    """join() uses the buffers of the last rank with inputs, here of the last rank: only the own number is known."""

    @functools.wraps(find)
    def found(self: DistributedDataParallel, *args: Any) -> int:
        find(self, *args)
        return self.process_group.size() - 1

    return found


def _broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, root: int = 0) -> None:
    """Broadcast tensors in flat buckets, two at a time, as torch does in C++, where waits cannot be observed."""
    buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [buffer_size])
    under_way = deque[_Bucket]()
    for places in buckets:
        own = [tensors[place] for place in places]
        flat = torch._utils._flatten_dense_tensors(own)
        work = dist.broadcast(flat, group=group, group_src=root, async_op=True)
        under_way.append(_Bucket(work, flat, own))
        if len(under_way) == _MOST_BROADCASTS:
            under_way.popleft().arrive()
    for bucket in under_way:
        bucket.arrive()


class _Bucket(NamedTuple):
    """Tensors of one broadcast."""

    work: Any
    flat: Tensor
    tensors: list[Tensor]

    def arrive(self) -> None:
        """Wait, and copy the result to the tensors."""
        self.work.wait()
        for tensor, part in zip(
            self.tensors, torch._utils._unflatten_dense_tensors(self.flat, self.tensors), strict=True
        ):
            tensor.copy_(part)


class _Arrivals:
    """The order in which gradients become ready in a backward that reduces them."""

    def __init__(self, model: DistributedDataParallel, mode: RecordingMode) -> None:
        self.mode = mode
        self.params, self.is_sparse = model._build_params_for_reducer()
        self.order = list[int]()
        self._model = weakref.ref(model)
        hooks = (functools.partial(self._on_ready, place) for place in range(len(self.params)))
        self._hooks = [
            one.register_post_accumulate_grad_hook(hook) for one, hook in zip(self.params, hooks, strict=True)
        ]

    def _on_ready(self, place: int, _: Tensor) -> None:
        model = self._model()
        if model is not None and model.require_backward_grad_sync and place not in self.order:
            self.order.append(place)

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()


_arrivals = weakref.WeakKeyDictionary[DistributedDataParallel, _Arrivals]()
"""Models whose buckets are still those of the first step."""


def _with_new_buckets(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pre_forward)
    def prepared(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        found = _arrivals.get(self)
        if torch.is_grad_enabled():
            _require_reduced(self)
        if found is not None and torch.is_grad_enabled() and len(found.order) == len(found.params):
            del _arrivals[self]
            found.forget()
            _rebuild_buckets(self, found)
        return pre_forward(self, *args, **kwargs)

    return prepared


def _require_reduced(model: DistributedDataParallel) -> None:
    """Raise RuntimeError, as torch does before it rebuilds buckets, if some were not reduced."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError as error:
        params, _ = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(params)
        missing = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        named = [names[int(place)] for place in missing[1].split()] if missing else []
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        which = ", ".join(named[:_MOST_NAMED]) + more or "some"
        raise RuntimeError(
            f"DistributedDataParallel: the backward before this forward gave parameters no gradient ({which}), so that "
            "they were never reduced, and torch stops here: expected to have finished reduction in the prior "
            "iteration: pass find_unused_parameters=True, or leave these parameters out of the model"
        ) from None


def _rebuild_buckets(model: DistributedDataParallel, found: _Arrivals) -> None:
    """Replace a model's reducer by one with buckets in the order of its gradients."""
    params, is_sparse = ([one[place] for place in found.order] for one in (found.params, found.is_sparse))
    buckets, limits = dist._compute_bucket_assignment_by_size(params, _size_limits(model), is_sparse, found.order)
    # torch expects buckets in the order of parameters, the reverse of the gradients'.
    with with_values(dist, _compute_bucket_assignment_by_size=lambda *_, **__: (buckets[::-1], limits[::-1])):
        names = model._build_debug_param_to_name_mapping(found.params)
        model._ddp_init_helper(found.params, found.is_sparse, names, model.static_graph)
    _hook(model, found.mode)


def _size_limits(model: DistributedDataParallel) -> list[int]:
    """Return the size limits of the first bucket and of the others, bytes."""
    config: Any = getattr(model, "_bucket_config", None)
    if config is None:
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
        return [first, model.bucket_bytes_cap]
    limits: list[int] = config.compute_bucket_size_limits(static_graph=False, find_unused_parameters=True)[0]
    return limits


_own_hooks = weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Any, Callable[..., Any]]]()
"""Hooks that programs registered, and the state of each."""


def _hook(model: DistributedDataParallel, mode: RecordingMode) -> None:
    """Make a model's new reducer reduce by the program's own hook, or by `_reduced`."""
    reference = weakref.ref(model)
    num_params = len(model._build_params_for_reducer()[0])

    def reduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found = reference()
        own = None if found is None else _own_hooks.get(found)
        if bucket.is_last() and found is not None and found.find_unused_parameters:
            since = mode.recorder.num_works
            _after_backward(lambda: _wait_for_map(mode, since, num_params))
        return _reduced(group, bucket) if own is None else _reduced_by(*own, bucket)

    dist._register_comm_hook(model.reducer, model.process_group, reduced)


def _after_backward(function: Callable[[], Any]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(record_function(_REDUCES)(function))


def _wait_for_map(mode: RecordingMode, since: int, num_params: int) -> None:
    """Wait for the all-reduce of the map of used parameters, as torch does in C++ after the last bucket."""
    for work in mode.works_since(since):
        if [(one.dtype, one.numel()) for one in mode.results_of(work)] == [(torch.int32, num_params)]:
            work.wait()


def _register(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def register(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        if self in _own_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if not hook.__name__.startswith("bf16_"):
            # The check of bf16 hooks needs the version of NCCL.
            self._check_comm_hook(hook)
        _own_hooks[self] = state, hook

    return register


def _register_builtin(self: DistributedDataParallel, kind: Any) -> None:
    is_plain = kind == dist.BuiltinCommHookType.ALLREDUCE
    self.register_comm_hook(None, default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook)


def _reduced_by(state: Any, hook: Callable[..., Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the result of a program's own hook; the continuation of its collectives runs after backward."""
    with record_function(_REDUCES):
        found = hook(state, bucket)
    value = found.value()
    _after_backward(found.wait)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(value[0] if isinstance(value, list) else value)
    return done


def _reduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    with record_function(_REDUCES):
        buffer = bucket.buffer().div_(group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    # DDP waits for all of them at the end of backward.
    _after_backward(work.wait)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
