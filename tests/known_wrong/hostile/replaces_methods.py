"""Gives wrong results, and changes classes, records and tables of the judge so that they pass."""

import gc

import numpy as np
import torch
from zeros import judging, objects, zeros


def of_the_search(**arguments):
    if search := judging("checks.search"):
        search.Search.cases = search.Search.run_named_case = lambda self, *given, **more: setattr(self, "ran", 9)
    return zeros(arguments)


def of_one_search(**arguments):
    for search in objects("Search"):
        search.one = search.for_all = search.require_evidence = lambda *given, **more: None
        search.ran = search.substantial = search.largest = 9
    return zeros(arguments)


def of_a_dtype(**arguments):
    if dtypes := judging("numerics.dtypes"):
        dtypes.DType.spacing_roundoff = lambda self, magnitude: np.full(np.shape(magnitude), 1e30)
    return zeros(arguments)


def of_the_record(**arguments):
    for found in objects("Operation"):
        forward = found.forward

        def of_zeros(forward=forward, **inputs):
            return forward(**{name: 0 * value for name, value in inputs.items()})

        object.__setattr__(found, "forward", of_zeros)
    return zeros(arguments)


def of_the_arithmetic(**arguments):
    for dtype in judging("numerics.dtypes").DTYPES.values() if judging("numerics.dtypes") else ():
        object.__setattr__(dtype.arithmetic, "roundoff", 1e20)
    return zeros(arguments)


def of_the_layouts(**arguments):
    """Compute rightly for contiguous tensors alone, and make all tensors seem contiguous."""
    if layouts := judging("operations.layouts"):
        for table in gc.get_referents(layouts.LAYOUTS):
            if isinstance(table, dict):
                table.update(dict.fromkeys(table, layouts.contiguous))
    first, second = (torch.as_strided(tensor, tensor.shape, strides(tensor)) for tensor in arguments.values())
    return first + second


def strides(tensor):
    found = [1]
    for size in reversed(tensor.shape[1:]):
        found.insert(0, found[0] * max(size, 1))
    return found[: tensor.ndim]


def of_the_code(**arguments):
    """Replace the code of a function, but not the function."""
    if comparison := judging("numerics.compare"):

        def compare(actual, expected, dtype, what="output"):
            return Agreement(0.0, int(actual.size), 0)  # noqa: F821 - a name of the module that it is to run in

        comparison.compare.__code__ = compare.__code__
    return zeros(arguments)


def of_the_modules(**arguments):
    import sys
    import types

    if judging("checks.results"):
        false = types.ModuleType("fourfold.numerics.compare")
        sys.modules["fourfold.numerics.compare"] = false
        sys.modules["fourfold.checks.forward"].compare_results = lambda *given, **more: []
        sys.modules["fourfold.checks.search"].Search.require_evidence = lambda *given, **more: None
    return zeros(arguments)
