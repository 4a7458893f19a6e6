"""TorchDynamo's private parts. Importing them takes two seconds, so they are not in ``torch_internals``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo.callback import callback_handler
from torch._inductor.runtime.benchmarking import benchmarker

from fourfold.compat import uses


@uses("torch._dynamo.callback.callback_handler")
@contextlib.contextmanager
def around_compilation(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a context whenever torch.compile begins to compile something, and leave it when that has ended.

    ``torch.compiler`` has hooks for what compiles, but none for when it does. ``torch.compiler.reset`` removes them.
    """
    entered = contextlib.ExitStack()

    def begin(*about: Any) -> None:
        entered.enter_context(context())

    def end(*about: Any) -> None:
        entered.close()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        for callbacks, ours in ((callback_handler.start_callbacks, begin), (callback_handler.end_callbacks, end)):
            callbacks[:] = [callback for callback in callbacks if callback is not ours]


@uses("torch._inductor.runtime.benchmarking.benchmarker")
@contextlib.contextmanager
def around_measurements(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a context whenever torch.compile times kernels on a GPU to choose the fastest, and leave it afterwards."""
    by_torch: Callable[..., float] = benchmarker.benchmark_gpu

    def measure(*args: Any, **options: Any) -> float:
        with context():
            return by_torch(*args, **options)

    with mock.patch.object(benchmarker, "benchmark_gpu", measure):
        yield
