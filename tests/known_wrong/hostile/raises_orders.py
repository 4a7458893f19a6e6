"""Raise, in every call, an exception that makes a test runner skip a test or exit."""


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
