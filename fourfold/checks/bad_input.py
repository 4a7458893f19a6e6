"""The check that bad input raises an error that names the argument."""

import re

import torch

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.instruments import line_coverage
from fourfold.numerics.compare import Agreement
from fourfold.operations.outcomes import Failure
from fourfold.operations.refusals import has_lost_device, is_fault, is_rejection, reason


def declared_errors_are_raised(subject: Subject, search: Search) -> None:
    """Check that bad input raises the declared error, which names the argument, or gives NaN if a device cannot raise.

    If errors are not strict, bad input that gives a result is only a warning.
    """
    with line_coverage.bad_input(subject.implementation):
        (_errors_are_raised if subject.strict_errors else _bad_input_is_noticed)(subject, search)


def _errors_are_raised(subject: Subject, search: Search) -> None:
    for declared in subject.operation.errors:
        arguments = declared.arguments(subject.device)
        try:
            with convert_escapes():
                output = subject.call(**arguments)
        except declared.raises as error:
            if not re.search(rf"\b{re.escape(declared.names)}\b", str(error)):
                raise Failure(
                    f"{subject}: {declared.name}: the message does not name {declared.names}: {error}"
                ) from error
        except Exception as error:
            raise Failure(
                f"{subject}: {declared.name}: {type(error).__name__} in place of {declared.raises.__name__}: {error}"
            ) from error
        else:
            if subject.device in declared.devices:
                missing = f"no {declared.raises.__name__} naming {declared.names} was raised"
                raise Failure(f"{subject}: {declared.name}: {missing}")
            if not output.isnan().all():
                raise Failure(f"{subject}: {declared.name}: the output is {output}, not NaN", OUTPUT)
        search.saw(Agreement(0.0, 1, 0))
    if not search.ran:
        raise Failure(f"{subject}: no error is declared, so none was looked for")


def _bad_input_is_noticed(subject: Subject, search: Search) -> None:
    """Check that bad input raises some error. Add a warning that names the bad inputs that give a result instead.

    On a GPU tensors of another device are skipped. A kernel that does not check the device would read memory outside
    of the GPU, and this process could not use the GPU after that.
    """
    accepted = []
    for declared in subject.operation.errors:
        arguments = declared.arguments(subject.device)
        devices = {value.device.type for value in arguments.values() if isinstance(value, torch.Tensor)}
        if subject.device == "cuda" and devices - {"cuda"}:
            continue
        try:
            with convert_escapes():
                subject.call(**arguments)
            if subject.device == "cuda":
                torch.cuda.synchronize()  # raises an error for a fault of this call
        except Exception as error:
            if has_lost_device(error):
                raise Failure(f"{subject}: bad input, {declared.name}, ends the use of the GPU: {error}") from error
            if not is_rejection(error):
                if not is_fault(error):
                    raise
                search.warnings.append(f"bad input is not noticed: {declared.name}: {reason(error)}")
        else:
            accepted.append(declared.name)
        search.saw(Agreement(0.0, 1, 0))
    if accepted:
        search.warnings.append(f"bad input gives a result: {', '.join(accepted)}")
