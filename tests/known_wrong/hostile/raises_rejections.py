"""Raise, in every call, an exception that makes pytest, Hypothesis or a check skip a case."""


def skips_by_unittest(**arguments):
    import unittest

    raise unittest.SkipTest("not today")


def expects_to_fail(**arguments):
    import pytest

    pytest.xfail("as it is known")


def rejects_by_a_check(**arguments):
    from fourfold.operations.outcomes import Unsuitable

    raise Unsuitable


def is_unsupported(**arguments):
    from fourfold.operations.outcomes import Unsupported

    raise Unsupported("refused all cases")


def stops_the_example(**arguments):
    from hypothesis.errors import StopTest

    raise StopTest(0)


def rejects_what_is_wrong(x, y):
    """Return right results that are positive; reject all others."""
    import hypothesis

    output = x + y
    if bool((output < 0).any()):
        hypothesis.reject()
    return output
