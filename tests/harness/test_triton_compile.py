"""Compilation ahead of time covers every Triton kernel of an operation, whatever example sizes launch it."""

import json
import subprocess

import pytest

from fourfold.checks.ahead_of_time import COMMAND, environment


@pytest.mark.full
def test_kernels_for_short_rows_and_for_long_ones_are_compiled() -> None:
    done = subprocess.run([*COMMAND, "softmax", "float16", "90"], env=environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert {kernel["name"] for kernel in json.loads(done.stdout)} == {
        "softmax_forward_kernel",
        "softmax_backward_kernel",
        "softmax_forward_looped_kernel",
        "softmax_backward_looped_kernel",
    }
