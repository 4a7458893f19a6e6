"""The check that Triton's compiler accepts the kernels that its interpreter runs."""

import contextlib
import traceback

from fourfold.backends.triton import front_end
from fourfold.candidates.frames import FRAMES_ELSEWHERE
from fourfold.checks.search import Search, Subject
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import BRIEFLY, Exclusion, Failure, Unsupported

# The most elements of a named example.
MOST_ELEMENTS = 16384


def compiler_accepts(subject: Subject, search: Search) -> None:
    """Check that the compiler's front end accepts what named examples launch, without a GPU.

    For an implementation in a process of its own, all earlier launches are checked, too.

    Raises:
        Unsupported: no Triton kernel was launched, the front end answers nothing here, or the search is brief.
    """
    if search.brief:  # the interpreter has shown that the kernel is wrong
        raise Unsupported(BRIEFLY)
    process = subject.process
    if process is None:
        front_end.forget_launches()

    def body(case: Case) -> None:
        subject.evaluate(case)
        search.saw(Agreement(0.0, case.grad_output.size, 0))

    for name, case in subject.filled_examples().items():
        if case.elements <= MOST_ELEMENTS:
            with contextlib.suppress(Exception):  # other checks find these
                search.run_named_case(name, case, body)
    search.failing = None
    search.note(None)  # the compiler refuses a kernel, and no case
    answer = front_end.answer() if process is None else process.compiler_answer()
    if answer.refused:
        search.seeks_claims = False
        raise _failure(subject, answer.refused)
    if answer.unknown and not answer.accepted:
        raise Unsupported(f"cannot judge: Triton's compiler was not heard: {answer.unknown[0]}", Exclusion.NO_COMPILER)
    search.remarks += [f"Triton's compiler was not heard of a kernel: {kernel}" for kernel in answer.unknown]
    if not answer.accepted:
        raise Unsupported("it launches no Triton kernel", Exclusion.NO_COMPILER)


def _failure(subject: Subject, refused: list[front_end.CompilerRefusal]) -> Failure:
    first = refused[0]
    lines = [f"{refusal.kernel} ({refusal.file}:{refusal.line}): {refusal.reason}" for refusal in refused]
    failure = Failure(
        f"{subject}: Triton's compiler refuses what its interpreter runs: {'; '.join(dict.fromkeys(lines))}"
    )
    frame = traceback.FrameSummary(first.file, first.line, first.kernel, line=first.text)
    setattr(failure, FRAMES_ELSEWHERE, [frame])
    return failure
