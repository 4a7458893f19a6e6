"""Verify one implementation in this process: `verify`, `assert_correct` and, for pytest, `suite`."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.backends.triton import compilation
from fourfold.candidates.process.client import CALL_SECONDS
from fourfold.checks import catalogue
from fourfold.checks.catalogue import FORWARD, Check
from fourfold.checks.search import Search
from fourfold.engine.verdict import Verdict, refusal_lines
from fourfold.engine.verification import EXAMPLES, CheckPlan, Trial, _warn_of_refusals, verified
from fourfold.operations.claims import Claims
from fourfold.operations.outcomes import REFUSED
from fourfold.operations.record import Operation

# Options of a suite that are no limits of its searches.
GIVEN = ("claims", "device", "refusals", "strict_errors", "compile_seconds")


def verify(
    implementation: Callable[..., torch.Tensor] | str,
    operation: Operation | str,
    *,
    claims: Claims | None = None,
    device: str = "auto",
    dtypes: Collection[str] = (),
    only: Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int | None = None,
    reproduce: str | None = None,
    refusals: bool = True,
    strict_errors: bool = False,
    untrusted: bool = False,
    call_seconds: float = CALL_SECONDS,
    compile_seconds: float = compilation.SECONDS,
    first_failure: bool = False,
    seconds: float = math.inf,
    forbid_fallback: bool = False,
) -> Verdict:
    """Put an implementation through every check of an operation.

    Args:
        implementation: a function, an ``autograd.Function`` or an ``nn.Module``, which takes the operation's arguments
            by their names or in their order and returns a new tensor. An untrusted one may be given as
            "FILE_OR_MODULE:FUNCTION", and is then never imported in this process.
        operation: what it is to compute: a record, see `fourfold.operation`, or the name of a known operation.
        claims: what it claims; unless given, what the decorator `fourfold.claims` says of it.
        device: "cpu", "cuda", or "auto" for a GPU if there is one. After a verification on the CPU, all Triton kernels
            of the process are interpreted.
        dtypes: names of those to look at; all that are claimed if empty.
        only: names of the checks to make; all if empty.
        examples: how many generated cases each check runs.
        seed: of the generated cases; a random one unless given.
        reproduce: what a finding names as its ``blob``: this one case alone is run.
        refusals: whether an exception of the implementation's own is a refusal of that case, and no failure.
        strict_errors: whether bad input must raise the operation's declared errors.
        untrusted: whether it runs in a process of its own, where it cannot change what judges it. On the CPU alone.
        call_seconds: that a call may take, if it is untrusted.
        compile_seconds: of a processor that Triton's compiler may take for a kernel. A case with a kernel that takes
            longer is not reached.
        first_failure: whether the first check that fails is the last that is made.
        seconds: after which no further check is begun. If some were left out for that, the verdict has not passed.
        forbid_fallback: whether to check that torch is used for memory alone, and not to compute.

    Returns:
        the verdict. A wrong implementation raises nothing here: see `assert_correct`.

    Raises:
        ValueError: an argument is not as said above. The message names it.
        CannotBeCalled: the implementation cannot be called with the operation's arguments.
        CannotBeImported: it is untrusted, and there is no such function in the file.
    """
    own_process = call_seconds if untrusted else None
    plan = CheckPlan(
        dtypes=dtypes,
        only=only,
        examples=examples,
        seed=seed,
        reproduce=reproduce,
        first_failure=first_failure,
        seconds=seconds,
        forbid_fallback=forbid_fallback,
    )
    with Trial.of(
        implementation, operation, claims, device, refusals, strict_errors, own_process, compile_seconds
    ) as trial:
        return verified(trial, plan)


def assert_correct(implementation: Callable[..., torch.Tensor], operation: Operation | str, **options: Any) -> None:
    """Verify an implementation.

    Args:
        implementation: see `verify`.
        operation: see `verify`.
        **options: those of `verify`.

    Raises:
        AssertionError: it has not passed. The message is the verdict's text.
    """
    __tracebackhide__ = True
    verdict = verify(implementation, operation, **options)
    if not verdict.passed:
        raise AssertionError(str(verdict))


def suite(implementation: Callable[..., torch.Tensor], operation: Operation | str, **options: Any) -> type:
    """A class of tests for pytest: one test for each check, with one case for each dtype.

    Assign it to a name that begins with Test: ``TestSoftmax = fourfold.suite(my_softmax, "softmax")``.

    Args:
        implementation: see `verify`.
        operation: see `verify`.
        **options: those of `verify`.

    Raises:
        ValueError: an option is not as `verify` says.
    """
    given = {name: options.pop(name) for name in GIVEN if name in options}
    dtypes, only = options.pop("dtypes", ()), options.pop("only", ())
    trial = Trial.of(
        implementation,
        operation,
        **{"claims": None, "device": "auto", "refusals": True, "strict_errors": False, **given},
    )
    search = Search(**{"examples": EXAMPLES, **options})
    planned: dict[str, list[str]] = {}
    checks_by_name = {}
    for check, dtype in trial.planned(dtypes, only):
        planned.setdefault(check.name, []).append(dtype)
        checks_by_name[check.name] = check
    tests = {
        f"test_{name.replace(': ', '_').replace(' ', '_')}": _test(trial, checks_by_name[name], names, search)
        for name, names in planned.items()
    }
    source = inspect.currentframe()
    module = source.f_back.f_globals.get("__name__", __name__) if source and source.f_back else __name__
    return type("TestSuite", (), {**tests, "__doc__": f"{trial.name} as {trial.operation.name}", "__module__": module})


def _test(trial: "Trial", check: Check, dtypes: Sequence[str], search: Search) -> Callable[..., None]:
    """One test of a suite."""
    refused_all: set[str] = set()

    def test(self: Any, dtype: str) -> None:
        own, name = replace(search), f"{trial.name} as {trial.operation.name}, {dtype}"
        with trial.settings():
            outcome, _ = trial.outcome(check, dtype, own)
        if outcome.failure is not None:
            pytest.fail(f"{name}: {outcome.failure}", pytrace=False)
        if outcome.outcome == REFUSED and catalogue.parts_of(check.name)[0] == FORWARD:
            refused_all.add(dtype)
            if refused_all == {*dtypes}:
                pytest.fail(f"{name}: nothing was verified: {outcome.reason}", pytrace=False)
        if outcome.refusals:
            told = "; ".join(refusal_lines(Counter(outcome.refusals), outcome.examples, own.boundary.claim()))
            _warn_of_refusals(trial, f"{name}, {check.name}: {told}")
        if outcome.reason:
            pytest.skip(outcome.reason)

    test.__doc__ = check.run.__doc__ or check.name
    return pytest.mark.parametrize("dtype", dtypes)(test)
