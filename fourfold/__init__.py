"""Fourfold: is a GPU kernel right, on every shape, dtype and layout? Is its gradient right? Is it fast?

PYTEST_DONT_REWRITE: pytest would warn that this module was imported before it could rewrite what it asserts: nothing.
"""

import importlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the types of what `_PUBLIC` names
    from fourfold.api.adapters import verify_contract as verify_contract
    from fourfold.api.adapters import verify_kernelbench as verify_kernelbench
    from fourfold.api.verify import assert_correct as assert_correct
    from fourfold.api.verify import suite as suite
    from fourfold.api.verify import verify as verify
    from fourfold.backends.cuda.functions import cuda_kernel as cuda_kernel
    from fourfold.candidates.load.models import module as module
    from fourfold.declaration.definition import operation as operation
    from fourfold.declaration.inference import like as like
    from fourfold.declaration.named_cases import example as example
    from fourfold.engine.verdict import Verdict as Verdict
    from fourfold.grading.driver import grade as grade
    from fourfold.monitoring.monitor import monitor as monitor
    from fourfold.numerics.philox import philox as philox
    from fourfold.numerics.philox import rand as rand
    from fourfold.operations.arguments import divisors as divisors
    from fourfold.operations.arguments import lengths as lengths
    from fourfold.operations.arguments import offsets as offsets
    from fourfold.operations.arguments import result as result
    from fourfold.operations.arguments import tensor as tensor
    from fourfold.operations.arguments import tensors as tensors
    from fourfold.operations.arguments import tied as tied
    from fourfold.operations.arguments import values as values
    from fourfold.operations.claims import Claims as Claims
    from fourfold.operations.claims import claims as claims
    from fourfold.performance.suite import benchmark_suite as benchmark_suite

    __version__: str

# ``pytest -p fourfold`` loads the plugin. Installing this package does not: options such as --device would collide with
# those of other test suites. Of these modules it loads only `rootdir`, which has no options.
# The second comes before those that import torch. pytest configures the last first: a run times what it selects.
pytest_plugins = [
    "fourfold.pytest_plugin.rootdir",
    "fourfold.pytest_plugin.early_start",
    "fourfold.performance.plugin",
    "fourfold.pytest_plugin.hooks",
]

# In a clone the operations lie beside this package, in impls/, oracles/ and properties/; a wheel holds them inside it.
# Either way they are `fourfold.impls`, `fourfold.oracles` and `fourfold.properties`.
if not (Path(__file__).parent / "impls").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))

# What users import from here, and the module that has it. A module is imported when its name is first asked for:
# `import fourfold` alone imports neither torch nor Triton.
_PUBLIC = {
    "Claims": "fourfold.operations.claims",
    "Verdict": "fourfold.engine.verdict",
    "assert_correct": "fourfold.api.verify",
    "benchmark_suite": "fourfold.performance.suite",
    "claims": "fourfold.operations.claims",
    "cuda_kernel": "fourfold.backends.cuda.functions",
    "divisors": "fourfold.operations.arguments",
    "example": "fourfold.declaration.named_cases",
    "grade": "fourfold.grading.driver",
    "like": "fourfold.declaration.inference",
    "lengths": "fourfold.operations.arguments",
    "module": "fourfold.candidates.load.models",
    "monitor": "fourfold.monitoring.monitor",
    "offsets": "fourfold.operations.arguments",
    "operation": "fourfold.declaration.definition",
    "philox": "fourfold.numerics.philox",
    "rand": "fourfold.numerics.philox",
    "result": "fourfold.operations.arguments",
    "suite": "fourfold.api.verify",
    "tensor": "fourfold.operations.arguments",
    "tensors": "fourfold.operations.arguments",
    "tied": "fourfold.operations.arguments",
    "values": "fourfold.operations.arguments",
    "verify": "fourfold.api.verify",
    "verify_contract": "fourfold.api.adapters",
    "verify_kernelbench": "fourfold.api.adapters",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return importlib.metadata.version(__name__)
        except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
            return "0+unknown"
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
