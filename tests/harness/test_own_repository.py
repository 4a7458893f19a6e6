"""A kernel in a repository of its own: the example in docs/examples is accepted, and wrong variants of it are not."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import warm
from samples import sampled

import fourfold

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "rms_norm.py"
# What is changed, and what it is changed to.
WRONG = {
    "without_eps": ("/ cols + eps)", "/ cols)"),
    "mean_over_the_block": ("/ cols + eps)", "/ BLOCK + eps)"),
    "without_the_weight": ("x * scale * weight", "x * scale"),
    "loads_without_a_mask": (
        "at, mask=inside, other=0.0).to(tl.float32)\n    weight",
        "at).to(tl.float32)\n    weight",
    ),
    "stores_without_a_mask": ("weight, mask=inside)", "weight)"),
    "summed_in_the_dtype_of_x": ("tl.sum(x * x, axis=0)", "tl.sum((x * x).to(x_ptr.dtype.element_ty), axis=0)"),
    "a_program_for_each_column": ("(x.numel() // cols,)", "(cols,)"),
}
_numbers = itertools.count()


def write_example(folder: Path, old: str = "", new: str = "") -> ModuleType:
    """Return the example as a module, with a change."""
    source = EXAMPLE.read_text()
    assert source.count(old) == 1 or not old
    path = folder / "rms_norm.py"
    path.write_text(source.replace(old, new) if old else source)
    spec = importlib.util.spec_from_file_location(f"own_rms_norm_{next(_numbers)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_example_is_right_wherever_it_accepts(tmp_path: Path, device: str) -> None:
    module = write_example(tmp_path)
    verdict = fourfold.verify(module.my_rms_norm, module.rms_norm, examples=2, seed=1, device=device)
    assert verdict.passed, str(verdict)
    assert verdict.grade == "exact"
    assert set(verdict.refusals) == {"ValueError: x and weight must be contiguous"}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("way", sampled(WRONG, *list(WRONG)[::3]))
def test_wrong_variants_are_rejected(way: str, tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.skip("some of them would end the use of a GPU")
    module = write_example(tmp_path, *WRONG[way])
    options = {"examples": 5, "seed": 1, "device": device, "only": ["forward", "memory"]}
    verdict = fourfold.verify(module.my_rms_norm, module.rms_norm, **options)
    assert not verdict.passed
    assert verdict.failures, str(verdict)
    assert all(failure.counterexample.startswith("Case(x=") for _, failure in verdict.failures)


def test_plain_pytest_runs_the_suite_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_example(tmp_path)
    command = ["pytest", "-q", "rms_norm.py", "-k", "forward and float32", "-p", "no:cacheprovider"]
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = warm.run(*command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
