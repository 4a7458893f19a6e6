"""Raises, in every call, what makes a test runner leave a test out, or end."""


def skips(*tensors, **arguments):
    import pytest

    pytest.skip("not today")


def rejects(*tensors, **arguments):
    import hypothesis

    hypothesis.reject()


def exits(*tensors, **arguments):
    raise SystemExit(0)


def interrupts(*tensors, **arguments):
    raise KeyboardInterrupt
