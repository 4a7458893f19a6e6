"""attention's kernels for Hopper: in both half types, with heads in groups, and as compiled.

The checks of operations run it in float16. tests/known_wrong/planted_hopper.py has wrong kernels and their errors.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fourfold.impls.attention import cuda_kernel
from fourfold.impls.attention.operators import Call
from fourfold.properties import attention as properties
from subjects import subject_of

from fourfold.backends import tuning
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import compile_ahead_of_time
from fourfold.backends.tuning import Configuration
from fourfold.checks.backward import backward_agrees
from fourfold.checks.configurations import configuration_agrees
from fourfold.checks.records import operations
from fourfold.checks.search import Search

Tensor = torch.Tensor
HOPPER = [pytest.param(each, id=each.name) for each in cuda_kernel.HOPPER]
BACKWARD_HOPPER = [pytest.param(each, id=each.name) for each in cuda_kernel.BACKWARD_HOPPER]
emulated = pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or ""
)


def agrees(configuration: Configuration, dtype: str, **shape: Any) -> None:
    """Check one case: past several blocks of keys, with a sequence after them."""
    examples = {"one": properties.tokens([3, 70], [150, 90], **{"causal": True, "size": 1.0, **shape})}
    subject = subject_of(replace(operations()["attention"], examples=examples), dtype=dtype, backend="cuda")
    configuration_agrees(configuration, subject, Search(examples=1))
    # Backward reads the logarithms of the sums of exponentials.
    with tuning.force_configuration("attention_cuda", configuration.name) as forced:
        backward_agrees(subject, Search(examples=1))
    assert forced.launches


@pytest.mark.full
@emulated
@pytest.mark.parametrize("configuration", HOPPER)
def test_the_kernel_is_right_in_bfloat16_too(configuration: Configuration) -> None:
    """The heads are the widest that it accepts."""
    agrees(configuration, "bfloat16", heads=(2, 1), columns=configuration.options["columns"])


@pytest.mark.full(but=1)
@emulated
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("configuration", HOPPER[1:])
def test_the_kernel_adds_the_bias_of_slopes(configuration: Configuration, causal: bool) -> None:
    """Queries lie before, among and behind the keys."""
    agrees(configuration, "float16", heads=(4, 2), columns=16, causal=causal, slopes=(0.5, 0, -0.25, 8))


@pytest.mark.full(but=1)
@emulated
@pytest.mark.parametrize("configuration", HOPPER)
def test_few_queries_have_the_same_bits_with_one_warpgroup(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a sample would have other bits in a larger batch."""
    columns = configuration.options["columns"]
    q, k, v = torch.randn(3, 300, 2, columns, generator=torch.Generator().manual_seed(1)).half()
    offsets = torch.tensor([0, 70, 300], dtype=torch.int32)
    kernels, results = configuration.options["kernels"], []
    before = {key: kernel.launches_on_cpu for key, kernel in kernels.items()}
    for multiprocessors in (1, 100):
        monkeypatch.setattr(cuda_kernel, "multiprocessors", lambda device, number=multiprocessors: number)
        results.append((torch.empty_like(q), torch.empty(2, 300)))
        cuda_kernel.launch_hopper(configuration, Call(q, k, v, offsets, offsets, True, 0.1), *results[-1])
    launched = {key[2] for key, kernel in kernels.items() if kernel.launches_on_cpu > before[key]}
    assert launched == {1, configuration.options["warpgroups"]}
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_may_take_turns(heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the number of heads that are computed at once is limited so that keys and values stay in the cache."""
    monkeypatch.setattr(cuda_kernel, "KEPT_BYTES", heads_at_once * 4 * 240 * 16)
    agrees(cuda_kernel.HOPPER[1], "float16", heads=(6, 3), columns=16)


@pytest.mark.full
@emulated
@pytest.mark.parametrize("configuration", HOPPER)
def test_queries_without_keys_are_0_and_invalid_offsets_make_all_nan(configuration: Configuration) -> None:
    """Invalid offsets reach a kernel on a GPU, where checking them would wait for the device."""
    q, k = (torch.ones(n, 2, 16, dtype=torch.float16) for n in (5, 4))
    for q_ends, k_ends, causal, without in (
        ([0, 2, 5], [0, 4, 4], False, [2, 3, 4]),
        ([0, 5], [0, 4], True, [0]),
        ([0, 3, 2, 5], [0, 1, 2, 4], False, None),
        ([0, 2, 5], [0, 4, 3], False, None),
        ([0, 2, 6], [0, 2, 4], False, None),
    ):
        output, lse = torch.full_like(q, 7), torch.full((2, 5), 7.0)
        offsets = torch.tensor(q_ends, dtype=torch.int32), torch.tensor(k_ends)
        cuda_kernel.launch_hopper(configuration, Call(q, k, k, *offsets, causal, 0.5), output, lse)
        if without is None:
            assert output.isnan().all()
            continue
        expected = torch.ones_like(output)
        expected[without] = 0
        assert torch.equal(output, expected)
        assert (lse.isneginf() == (expected[:, :, 0].T == 0)).all()


@pytest.mark.full(but=2)
@emulated
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["heads_share_keys", "each_head_has_keys"])
@pytest.mark.parametrize("configuration", BACKWARD_HOPPER)
def test_the_gradient_is_right(configuration: Configuration, heads: tuple[int, int], causal: bool) -> None:
    """Both sides have several steps, in which queries lie before, among and behind the keys."""
    widest, name = configuration.options["columns"], "nothing_finite_in_another_sequence"
    of_shapes = {
        "wide": properties.tokens([3, 300], [330, 90], causal=causal, size=1.0, heads=heads, columns=widest),
        "narrow": properties.tokens([5, 70, 0, 9], [2, 270, 4, 0], causal=causal, heads=heads, columns=16),
        name: operations()["attention"].examples[name],
    }
    for name, example in of_shapes.items():
        record = replace(operations()["attention"], examples={name: example})
        with tuning.force_configuration("attention_cuda", configuration.name) as forced:
            backward_agrees(subject_of(record, dtype="bfloat16", backend="cuda"), Search(examples=1))
        assert forced.launches


@pytest.mark.full
@emulated
@pytest.mark.parametrize("configuration", BACKWARD_HOPPER)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_without_the_other_side_are_0_and_invalid_offsets_make_all_nan(
    configuration: Configuration, kv_heads: int
) -> None:
    """Invalid offsets reach a kernel on a GPU, where checking them would wait for the device."""
    q, k = torch.ones(5, 2, 16, dtype=torch.float16), torch.ones(4, kv_heads, 16, dtype=torch.float16)
    for q_ends, k_ends, causal, of_q, of_k in (
        ([0, 2, 5], [0, 4, 4], False, [2, 3, 4], []),
        ([0, 0, 5], [0, 3, 4], False, [], [0, 1, 2]),
        ([0, 5], [0, 4], True, [0], []),
        ([0, 3, 2, 5], [0, 1, 2, 4], False, None, None),
        ([0, 2, 5], [0, 4, 3], False, None, None),
    ):
        offsets = torch.tensor(q_ends, dtype=torch.int32), torch.tensor(k_ends)
        output, lse, delta = torch.zeros_like(q), torch.zeros(2, 5), torch.zeros(2, 5)
        grads = [torch.full_like(x, 7) for x in (q, k, k)]
        call = Call(q, k, k, *offsets, causal, 0.5)
        with tuning.force_configuration("attention_cuda", configuration.name) as forced:
            cuda_kernel._backward(call, q, None, output, lse, delta, *grads)
        assert forced.launches == 1
        for grad, without in zip(grads, (of_q, of_k, of_k)):
            if without is None:
                assert grad.isnan().all()
                continue
            empty = torch.zeros(len(grad), dtype=torch.bool)
            empty[without] = True
            assert ((grad == 0).all(-1).all(-1) == empty).all()
            assert not grad.isnan().any()


def of_shape(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("k", "scale", "takes"),
    [
        pytest.param(lambda: of_shape(5, 2, 64), 1.0, True, id="contiguous"),
        pytest.param(lambda: of_shape(2, 5, 64).transpose(0, 1), 1.0, True, id="heads_outside"),
        pytest.param(lambda: of_shape(5, 3, 2, 64)[:, 1], 1.0, True, id="part_of_qkv"),
        pytest.param(lambda: of_shape(1, 2, 64), 1.0, True, id="one_token"),
        pytest.param(lambda: of_shape(5, 72)[:, None, :64].expand(5, 1, 64), 1.0, True, id="one_head_of_wider_tokens"),
        pytest.param(lambda: of_shape(5, 2, 56), 1.0, True, id="fewer_columns"),
        pytest.param(lambda: of_shape(5, 2, 72), 1.0, False, id="more_columns"),
        pytest.param(lambda: of_shape(5, 2, 60), 1.0, False, id="columns_of_120_bytes"),
        pytest.param(lambda: of_shape(5, 2, 68)[:, :, :64], 1.0, False, id="heads_136_bytes_apart"),
        pytest.param(lambda: of_shape(5, 140)[:, :128].unflatten(1, (2, 64)), 1.0, False, id="tokens_280_bytes_apart"),
        pytest.param(lambda: of_shape(5, 136)[:, :128].unflatten(1, (2, 64)), 1.0, False, id="no_multiple_of_heads"),
        pytest.param(lambda: of_shape(649)[1:641].view(5, 2, 64), 1.0, False, id="misaligned"),
        pytest.param(lambda: of_shape(5, 1, 64).expand(5, 2, 64), 1.0, False, id="expanded"),
        pytest.param(lambda: of_shape(0, 2, 64), 1.0, False, id="no_keys"),
        pytest.param(lambda: of_shape(5, 2, 64), 1e-40, False, id="scale_of_0_in_float32"),
    ],
)
def test_what_the_copy_engine_does_not_take_is_left_to_the_portable_kernel(
    k: Callable[[], Tensor], scale: float, takes: bool
) -> None:
    keys = k()
    call = Call(of_shape(5, 2, keys.shape[2]), keys, of_shape(*keys.shape), None, None, False, scale)
    assert cuda_kernel.fits_hopper(cuda_kernel.HOPPER[0], call) == takes


@pytest.mark.full(but=1)
@pytest.mark.parametrize("configuration", HOPPER)
def test_products_do_not_wait_for_one_another_and_no_register_is_spilled(configuration: Configuration) -> None:
    """If the compiler serializes wgmma, a wait follows each one."""
    columns, keys = configuration.options["columns"], configuration.options["keys"]
    names = [kernel.name for kernel in configuration.options["kernels"].values()]
    resources = compile_ahead_of_time(cuda_kernel.HOPPER_SOURCE, names, "sm_90a")
    for kernel in configuration.options["kernels"].values():
        made = resources[kernel.name]
        assert (made.spill_store_bytes, made.spill_load_bytes) == (0, 0)
        # In the loop, and for the first keys and the last values.
        assert made.instruction_counts["HGMMA"] == 2 * (columns // 16 + keys // 16)
        assert made.instruction_counts["WARPGROUP"] <= 8
        assert max(configuration.options["shared_bytes"].values()) <= 227 * 1024


@pytest.mark.full(but=1)
@pytest.mark.parametrize("configuration", BACKWARD_HOPPER)
def test_the_same_of_the_gradient(configuration: Configuration) -> None:
    """OF_KEYS there are four products, else three: in the loop, and for the first step and the last sums.

    If warpgroups share them, each has two, and the last sums are in the loop.
    """
    options = configuration.options
    names = [kernel.name for kernel in options["kernels"].values()]
    resources = compile_ahead_of_time(cuda_kernel.BACKWARD_SOURCE, names, "sm_90a")
    for (_, of_keys, _), kernel in options["kernels"].items():
        made, step = resources[kernel.name], options["steps"][of_keys]
        assert (made.spill_store_bytes, made.spill_load_bytes) == (0, 0)
        products, sums = options["columns"] // 16, step // 16
        shared = options["rows"][of_keys] == 64
        expected = 2 * products + sums if shared else 4 * products + (4 if of_keys else 2) * sums
        assert made.instruction_counts["HGMMA"] == expected
        assert made.instruction_counts["WARPGROUP"] <= 9
        assert options["shared_bytes"][of_keys] <= 227 * 1024
