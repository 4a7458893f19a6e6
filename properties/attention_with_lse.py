"""The record of attention_with_lse: attention, and the log-sum-exp of each query's scores as a second output."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import attention as attention_oracle
from fourfold.oracles import attention_with_lse as oracle
from hypothesis import strategies as st

from fourfold.inputs.arrays import GENERATORS, repeat_first
from fourfold.numerics.bounded import Bounded, stored, unspecified_where
from fourfold.numerics.dtypes import DType, returned
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Operation, Relation
from fourfold.operations.workloads import whole

from . import attention
from .attention import ARGUMENTS as ARGUMENTS
from .attention import open_places, products_overflow, tokens

Make = Callable[[DType], Case]


def _overflows(q: Any, k: Any, v: Any, visible: np.ndarray) -> np.ndarray:
    """Return the rows with a visible score that is infinite or may overflow: of an infinity, inf - inf makes NaN."""
    return products_overflow(q, k, visible)


def _add_rows_beside_infinities(q: Any, k: Any, v: Any, visible: np.ndarray) -> np.ndarray:
    """Return those rows and all rows beside values that are not finite, which kernels multiply by a cotangent of 0."""
    return np.asarray(_overflows(q, k, v, visible) | ~np.isfinite(v.value).all((-2, -1), keepdims=True))


def _lse_rows(found: np.ndarray) -> np.ndarray:
    """Return the rows of an output ``[total_q, heads, head_size]`` as those of lse."""
    return np.asarray(found.any(-1)).T


def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """Return the oracle's log-sum-exp; unspecified where a score overflows, or all scores of a query are -inf."""
    lse = oracle.forward(q, k, v, **given)
    if not isinstance(q, Bounded):
        return lse
    values = Bounded.exact(np.zeros_like(v.value), v.arithmetic)
    return unspecified_where(lse, _lse_rows(open_places(None, q, k, values, given, _overflows)["output"]))


def backward(grad_lse: Any, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    """Return the gradients for q and k where the output is not used. v has none."""
    grad_output = np.zeros_like(q)
    grad_q, grad_k, _ = attention_oracle.backward(grad_output, q, k, v, **given, stored=stored, grad_lse=grad_lse)
    if not isinstance(q, Bounded):
        return grad_q, grad_k
    places = open_places(grad_output, q, k, v, given, _add_rows_beside_infinities)
    return unspecified_where(grad_q, places["q"]), unspecified_where(grad_k, places["k"])


def joined_outputs(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """Return the output and lse, flattened, one after the other."""
    return np.concatenate([x.reshape(-1) for x in (attention.forward(q, k, v, **given), forward(q, k, v, **given))])


def backward_of_both(grads: Any, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, ...]:
    """Return the gradients under a cotangent of each output."""
    grad_output, grad_lse = grads[: q.size].reshape(q.shape), grads[q.size :].reshape(q.shape[1], q.shape[0])
    gradients = attention_oracle.backward(grad_output, q, k, v, **given, stored=stored, grad_lse=grad_lse)
    if not isinstance(q, Bounded):
        return gradients
    places = open_places(grad_output, q, k, v, given, _overflows)
    return tuple(unspecified_where(gradient, places[name]) for name, gradient in zip("qkv", gradients))


# ---- cases


def with_cotangent_of_lse(case: Case, dtype: DType) -> Case:
    """Return the case with the first column of its cotangent as that of lse."""
    grad_lse = np.ascontiguousarray(case.grad_output[..., 0].T).astype(returned(dtype, "compute").numpy)
    if case.layouts.get("grad_output") == "expanded":
        grad_lse = repeat_first(grad_lse)
    return replace(case, grad_output=grad_lse)


def with_both_cotangents(case: Case, dtype: DType) -> Case:
    """Return the case with a cotangent of each output."""
    of_lse = case.grad_output[..., 0].T * np.asarray(-0.5, case.grad_output.dtype)
    layouts = {name: layout for name, layout in case.layouts.items() if name != "grad_output"}
    return replace(case, grad_output=np.concatenate([case.grad_output.ravel(), of_lse.ravel()]), layouts=layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw two sequences of one to three tokens each, where each query sees a key: -inf has no derivative."""
    rng, heads, causal = draw(GENERATORS), draw(st.sampled_from((1, 2))), draw(st.booleans())
    counts = rng.integers(1, 4, 2)
    keys = (counts + draw(st.integers(0, 1))).tolist()
    return tokens(counts.tolist(), keys, heads=(heads, 1), columns=2, causal=causal, size=1.0, numbers=rng)(dtype)


def scores_far_below_0(arrays: dict[str, np.ndarray]) -> None:
    """Set all scores to -1024."""
    arrays["q"][:], arrays["k"][:] = -16, 16


examples: dict[str, Make] = {
    name: attention.examples[name]
    for name in (
        *("no_sequences", "no_keys", "causal", "heads_in_groups_causal", "misaligned"),
        *("scores_that_rise", "scores_far_from_0", "one_special_in_turn"),
    )
}
# All exponentials of its scores are 0 unless the largest is subtracted.
examples["scores_below_all_exponentials"] = attention.changed(tokens(3, 40, columns=4, scale=1.0), scores_far_below_0)
OF_BOTH = ("no_heads", "causal", "heads_in_groups_causal", "values_with_an_offset")


def logarithms_of_parts_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """``exp(lse)`` over all keys is the sum of those over two parts of them."""
    k, inputs = case["k"], {name: case[name] for name in "qkv"}
    if not attention._ordinary(case) or len(k) < 2 or not k.size:
        return
    case = Case(inputs, case.grad_output, {**case.parameters, "causal": False, "window": attention.WHOLE})
    half = len(k) // 2
    parts = [evaluate(case.with_inputs(k=k[of], v=case["v"][of])).output for of in (np.s_[:half], np.s_[half:])]
    largest = np.maximum(*(part.value for part in parts))
    yield Relation(evaluate(case).output, largest + np.log(sum(np.exp(part - largest) for part in parts)))


SIZED = attention.sized
RAGGED = tokens([5, 0, 40, 19], heads=(4, 2), columns=32, causal=True)
TIMED = {
    "cpu": {"small": tokens(32, heads=(2, 1), columns=32, causal=True), "ragged": RAGGED},
    "cuda": {
        "small": tokens(128, heads=(4, 2), columns=64, causal=True),
        "causal": tokens(512, heads=(8, 2), columns=128, causal=True, size=1.0),
        "ragged": tokens(attention.uneven(8, 384), heads=(8, 2), columns=128, causal=True, size=1.0),
    },
}


def _with_case(change: Callable[[Case, DType], Case], makes: dict[str, Make]) -> dict[str, Make]:
    return {name: lambda dtype, make=make: change(make(dtype), dtype) for name, make in makes.items()}  # type: ignore[misc]


def _record(change: Callable[[Case, DType], Case], makes: dict[str, Make], **fields: Any) -> Operation:
    """Return the record with cotangents that `change` makes of those of attention's output."""
    timed = {
        device: {name: whole(make) for name, make in _with_case(change, made).items()} for device, made in TIMED.items()
    }
    return replace(
        attention.operation,
        cases=lambda dtype, *sizes: attention.cases(dtype, *sizes).map(lambda case: change(case, dtype)),
        smooth=lambda dtype: smooth(dtype).map(lambda case: change(case, dtype)),
        examples=_with_case(change, makes),
        workloads=timed,
        sized=replace(SIZED, make=lambda sizes: _with_case(change, {"": SIZED.make(sizes)})[""]),
        **fields,
    )


_OUTPUT = _record(
    lambda case, dtype: case,
    {name: attention.examples[name] for name in ("no_keys", "causal")},
    name="attention_with_lse.output",
    laws=(),  # they are those of attention
)
_LSE = _record(
    with_cotangent_of_lse,
    examples,
    name="attention_with_lse.lse",
    forward=forward,
    backward=backward,
    differentiable=("q", "k"),
    laws=(logarithms_of_parts_add_up,),
    returns="compute",
)
operation = _record(
    with_both_cotangents,
    {name: attention.examples[name] for name in OF_BOTH},
    name="attention_with_lse",
    forward=joined_outputs,
    backward=backward_of_both,
    laws=(),
    outputs={"output": _OUTPUT, "lse": _LSE},
)
