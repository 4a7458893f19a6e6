"""What the checks take: a subject, and a search for the cases on which it is wrong."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType

import hypothesis
import torch
from hypothesis import strategies as st

from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dtypes import DType
from properties.operation import Operation, evaluate_tensors, reference, reference_gradients
from properties.running_error import Bounded
from properties.special_values import with_special_values

# What fails is looked for once more in cases of at most this many elements, which are drawn one by one and so shrink,
# in little time, to small whole numbers.
FEW_ELEMENTS = 8
SEED = secrets.randbits(32)  # of this process


class Failure(AssertionError):
    """An implementation failed a check."""


class Unsupported(Exception):
    """A check is not one that an implementation can be put through; says why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is being verified: one implementation of one operation, for one dtype on one device."""

    operation: Operation
    backend: str
    dtype: DType
    device: str
    implementation: Callable[..., torch.Tensor]
    # The same backend's implementation of another operation, for laws that relate two.
    sibling: Callable[[str], tuple[Operation, Callable[..., torch.Tensor]]]
    differentiable: bool = True  # whether it claims to have gradients
    # Why the bits of a sample's result may depend on the batch around it; None where they are claimed not to.
    depends_on_batch: str | None = "nothing is claimed of it"
    offsets_in_32_bits: str | None = None  # why offsets of 2^31 and more are too large for it

    def __str__(self) -> str:
        return f"{self.operation.name} · {self.backend} · {self.dtype} · {self.device}"

    def evaluate(
        self,
        case: Case,
        gradients: bool = True,
        place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
        watch: AbstractContextManager | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Call the implementation; gives its output, its gradients, if it has any, and what it was called with."""
        wanted = gradients and self.differentiable
        return evaluate_tensors(
            self.implementation, self.operation, case, self.dtype, self.device, wanted, place, watch
        )

    def needs_gradients(self) -> None:
        """What follows is about gradients.

        Raises:
            Unsupported: the implementation has none.
        """
        if not self.differentiable:
            raise Unsupported("forward only: its output has no gradient where its inputs do")


@dataclass(kw_only=True)
class Search:
    """How hard to look, and what was seen on the way."""

    examples: int
    elements: int = 2048
    blob: str | None = None  # repeats one generated case
    # Whether a check may go by what the subject gave for a case when one that is alike was put on it.
    keeps: bool = True
    # What the cases of checks that are alike depend on.
    seed: int = field(default_factory=lambda: 0 if hypothesis.settings().derandomize else SEED)
    note: Callable[[Case], None] = lambda case: None  # told of each case before it is run
    worst: float = 0.0
    ran: int = 0
    substantial: int = 0  # examples in which at least one element was held to a finite bound
    largest: int = 0  # elements of the largest result
    started: float = field(default_factory=time.perf_counter)

    def saw(self, *agreements: Agreement) -> None:
        """Count an example."""
        self.ran += 1
        self.substantial += any(a.elements > a.unspecified for a in agreements)
        self.largest = max([self.largest, *(a.elements for a in agreements)])
        self.worst = max([self.worst, *(a.worst for a in agreements)])

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.perf_counter() - self.started

    def for_all(
        self,
        name: str,
        strategy: st.SearchStrategy[Case],
        body: Callable[[Case], None],
        shrink: bool = True,
        examples: int | None = None,
        seed: str | None = None,
    ) -> None:
        """Run `body` on generated cases; on failure Hypothesis shrinks the case, if it may, and shows it.

        Searches of one seed and strategy draw the same cases.
        """

        def holds(case: Case) -> None:
            self.note(case)
            body(case)

        # Hypothesis files what it learns, failures above all, under the name of the function.
        holds.__name__ = holds.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        # There is but one argument, of which nothing is left to explain.
        without = {hypothesis.Phase.explain} if shrink else {hypothesis.Phase.explain, hypothesis.Phase.shrink}
        settings = hypothesis.settings(
            max_examples=examples or self.examples,
            phases=tuple(phase for phase in hypothesis.settings().phases if phase not in without),
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            # What a check cannot use it leaves out, which is cheap beside a call.
            suppress_health_check=[
                hypothesis.HealthCheck.too_slow,
                hypothesis.HealthCheck.data_too_large,
                hypothesis.HealthCheck.filter_too_much,
            ],
        )
        test = settings(hypothesis.given(strategy)(holds))
        if seed is not None:
            test = hypothesis.seed(seed)(test)
        if self.blob:
            test = hypothesis.reproduce_failure(hypothesis.__version__, self.blob.encode())(test)
        test()

    def cases(
        self,
        subject: Subject,
        check: str,
        body: Callable[[Case], None],
        *,
        few: bool = False,
        special: bool = True,
        named: bool = True,
        also: Mapping[str, Case] = MappingProxyType({}),
        alike: str | None = None,
    ) -> None:
        """The named examples of the subject's operation, then generated cases, some of which get special values.

        Few are an eighth as many, none large and none of them named but `also`: for what a call does always or never,
        whatever it is given, by checks that call often. Checks that are `alike` get the same cases in one process.
        """
        examples = min(self.examples, max(3, self.examples // 8)) if few else self.examples
        if not self.blob:
            makers = subject.operation.examples if named and not few else {}
            made = ((name, make(subject.dtype)) for name, make in makers.items())
            for name, case in itertools.chain(made, also.items()):
                self.note(case)
                try:
                    body(case)
                except Exception as error:
                    error.add_note(f"Named example {name}: {case!r}")
                    raise

        def among(elements: int, shrink: bool = True) -> None:
            name = f"{check} {subject} {elements}"
            strategy = subject.operation.cases(subject.dtype, elements)
            if special:
                strategy = with_special_values(subject.dtype, strategy)
            seed = f"{self.seed} {alike} {subject} {elements}" if alike else None
            self.for_all(name, strategy, body, shrink, examples, seed)

        most = self.elements // 4 if few else self.elements
        if self.blob:
            # It does not say for which of the two it was made.
            try:
                among(FEW_ELEMENTS)
            except hypothesis.errors.DidNotReproduce:
                among(most)
            return
        try:
            among(most, shrink=False)
        except Exception:
            if hypothesis.Phase.shrink in hypothesis.settings().phases:
                for elements in (FEW_ELEMENTS, most):
                    try:
                        among(elements)
                    except hypothesis.errors.Unsatisfiable:
                        continue  # among so few the check has use for none
                    except Exception as smaller:
                        raise smaller from None
            raise
        self.must_have_seen_something(subject, check)

    def must_have_seen_something(self, subject: Subject, check: str) -> None:
        """A search among nothing, or among single numbers alone, is no verification.

        Raises:
            Failure: no example could have failed; or each result had one element at most, where the named examples of
                the operation say that its output may have more.
        """
        seen = f"{subject}: {check} ran {self.ran} examples, and"
        if not self.substantial:
            raise Failure(f"{seen} none of them could have failed")
        examples = subject.operation.examples.values()
        if self.largest <= 1 and any(make(subject.dtype).grad_output.size > 1 for make in examples):
            raise Failure(f"{seen} no result had more than one element, as those of {subject.operation.name} may")


def describe(tensors: dict[str, torch.Tensor]) -> str:
    """Shapes and strides, for messages."""
    return ", ".join(f"{name}{list(t.shape)} strides {list(t.stride())}" for name, t in tensors.items())


def compare_results(
    subject: Subject,
    results: Mapping[str, torch.Tensor],
    expected: Mapping[str, Bounded],
    tensors: dict[str, torch.Tensor],
    when: str = "",
) -> list[Agreement]:
    """Hold results to what is expected of them.

    Raises:
        Failure: one is no plain tensor of the subject's dtype on its device, or disagrees; says which, when, and the
            strides of what the call was given.
    """
    what = {name: f"{when}{name}" for name in results}
    problems = (_problem(subject, result, what[name]) for name, result in results.items())
    problem = next(filter(None, problems), None)
    if problem is None:
        agreements = []
        try:
            for name, array in subject.dtype.arrays(results).items():
                within = expectation(expected[name], subject.dtype)
                agreements.append(compare(array, within, subject.dtype, what[name]))
            return agreements
        except Disagreement as disagreement:
            problem = str(disagreement)
    raise Failure(f"{subject}: {problem}\nwith {describe(tensors)}")


def _problem(subject: Subject, actual: torch.Tensor, what: str) -> str | None:
    problem = None
    if not isinstance(actual, torch.Tensor):
        problem = f"{what} is a {type(actual).__name__}, not a tensor"
    elif type(actual) is not torch.Tensor:
        # It may compute when it is looked at, or hide from autograd and torch.compile what it does.
        problem = f"{what} is a {type(actual).__name__}, a kind of tensor of its own"
    elif actual.dtype != subject.dtype.torch:
        problem = f"{what} has dtype {actual.dtype}, expected {subject.dtype.torch}"
    elif actual.device.type != subject.device:
        problem = f"{what} is on {actual.device}, expected on {subject.device}"
    return problem


def given_tensors(subject: Subject, case: Case) -> dict[str, torch.Tensor]:
    """The inputs of a case and its "grad_output"."""
    grad_output = {"grad_output": case.tensor("grad_output", subject.dtype, subject.device)}
    return case.tensors(subject.dtype, subject.device) | grad_output


def named_results(output: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The "output" of a call and the "gradient of ..." each input that one was taken of."""
    return {"output": output, **{f"gradient of {name}": gradient for name, gradient in gradients.items()}}


def expected_results(subject: Subject, case: Case) -> dict[str, Bounded]:
    """What the oracle says of each of the `named_results`, with its running error."""
    gradients = reference_gradients(subject.operation, case, subject.dtype)
    output = {"output": reference(subject.operation, case, subject.dtype)}
    return output | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def storage_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins: the same for all that share it."""
    return tensor.untyped_storage().data_ptr()
