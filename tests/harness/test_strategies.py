"""The strategies generate what their names promise, in every dtype and often enough."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawing import collect
from fourfold.properties import paged_attention
from fourfold.properties.boxes import PAIRS, box_counts, box_pairs, explicit_pairs, pairs, pairs_without_ties
from fourfold.properties.giou import EPS
from hypothesis import strategies as st
from one_run import one_run
from samples import sampled

from fourfold.checks.records import operations
from fourfold.inputs.arrays import AWKWARD_LARGE, AWKWARD_SIZES, cotangent, layouts_for, sizes, sprinkle_special_values
from fourfold.inputs.special_values import cases_with_special_values, not_finite_in_turn, special_values
from fourfold.numerics.dtypes import DTYPES, QUANTISED, bits
from fourfold.operations.case import Case
from fourfold.operations.layouts import LAYOUTS

OPERATIONS = operations()
WITH_GRADIENTS = [name for name, operation in OPERATIONS.items() if operation.differentiable]
LOSSES = ("giou_loss", "giou_loss_ragged")
# Their cases are those of these.
BY_DISTANCE = ("diou_loss", "ciou_loss", "diou_loss_ragged", "ciou_loss_ragged")
BOXED = ("giou", *LOSSES)
FLOAT32 = DTYPES["float32"]
# A plain run draws from these: one of rows, and one of ragged batches.
SAMPLE = ("softmax", "giou_loss_ragged")
DRAWS = 300
# Enough for a sample of some thousand boxes.
ELEMENTS = 4 * 4100


@one_run
def drawn_cases(name: str, dtype: str = "float32", count: int = DRAWS, elements: int = ELEMENTS) -> list[Case]:
    return collect(OPERATIONS[name].cases(DTYPES[dtype], elements), count)


def many_small_cases(name: str) -> list[Case]:
    """Draw many small cases, for properties that are rare."""
    return drawn_cases(name, count=2 * DRAWS, elements=1024)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def boxes_of(case: Case) -> list[np.ndarray]:
    """Return the inputs that are no integers. Of a paged cache, return the tokens in use: the others are NaN."""
    inputs = dict(case.inputs)
    if "page_table" in inputs:
        used = paged_attention.used_tokens(case)[..., 0, 0]
        inputs |= {name: inputs[name][used] for name in ("k_cache", "v_cache")}
    return [wide(array) for array in inputs.values() if not np.issubdtype(array.dtype, np.integer)]


def rows_of(name: str, case: Case) -> int:
    """Return the number of rows that the result depends on."""
    if name == "giou_loss":
        return int(np.count_nonzero(wide(case["target"])[..., 3] > 0))
    return case["boxes1" if name == "giou" else "target"].size // 4


def counted(name: str, case: Case) -> list[np.ndarray]:
    """Return the boxes that the result depends on, ``[n, 4]`` twice."""
    if name == "giou":
        return [wide(case["boxes1"]).reshape(-1, 4), wide(case["boxes2"]).reshape(-1, 4)]
    pred, target = wide(case["pred"]), wide(case["target"])
    if not name.endswith("_ragged"):
        return [pred[target[..., 3] > 0], target[target[..., 3] > 0]]
    return [pred[np.arange(pred.shape[1]) < counts_of(case)[:, None]], target]


def often(happened: list[bool], share: float = 1 / DRAWS) -> bool:
    """Return whether it happened often enough for a search of the usual length to find it."""
    return np.mean(happened) >= share


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(BOXED, *SAMPLE))
def test_no_boxes_one_box_and_thousands_are_drawn(name: str) -> None:
    rows, few = ([rows_of(name, case) for case in cases] for cases in (drawn_cases(name), many_small_cases(name)))
    assert often([n == 0 for n in rows + few])
    assert often([n == 1 for n in rows + few])
    assert often([n > 1000 for n in rows], 1 / 32)


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(BOXED, "giou_loss"))
def test_most_cases_have_rows_that_count(name: str) -> None:
    for cases in (drawn_cases(name), many_small_cases(name)):
        assert often([rows_of(name, case) > 0 for case in cases], 2 / 3)


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_more_boxes_than_a_block_has_threads_are_common(name: str) -> None:
    assert often([rows_of(name, case) > 256 for case in drawn_cases(name, elements=2048)], 1 / 10)


@pytest.mark.parametrize("name", sampled(BOXED, "giou_loss"))
def test_boxes_that_count_lie_on_both_sides_of_zero(name: str) -> None:
    second = [counted(name, case)[1] for case in drawn_cases(name)]
    assert often([bool((boxes[:, :2] < 0).any()) for boxes in second], 1 / 5)
    if name != "giou_loss":  # there such a row is padding
        assert often([bool((boxes[:, 3] < 0).any()) for boxes in second], 1 / 5)


@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_inputs_stay_within_the_elements_asked_for(name: str) -> None:
    for elements in (16, 64, 1024):
        for case in drawn_cases(name, count=40, elements=elements):
            assert all(boxes.size <= elements for boxes in boxes_of(case))


@one_run
def drawn_sizes() -> list[int]:
    # Hypothesis also draws constants that it finds in this repository. With so many draws the shares hardly change.
    return collect(sizes(1025), 8000)


@pytest.mark.full
@pytest.mark.parametrize("block", [32, 64, 128])
def test_rows_come_one_short_of_a_block_in_full_and_one_past_it(block: int) -> None:
    for size in (block - 1, block, block + 1):
        assert often([n == size for n in drawn_sizes()], 1 / (4 * len(AWKWARD_SIZES + AWKWARD_LARGE)))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", BOXED)
def test_cases_have_rows_next_to_block_sizes(name: str) -> None:
    # Sizes: all rows, the rows of a sample, or the samples.
    sizes_seen = {
        size for case in drawn_cases(name) for boxes in boxes_of(case) for size in (boxes.size // 4, *boxes.shape[:-1])
    }
    for block in (32, 64, 128):
        assert sizes_seen & {block - 1, block, block + 1}


@pytest.mark.parametrize("limit", [0, 1, 5, 100, 5000])
def test_sizes_keep_their_limit(limit: int) -> None:
    drawn = collect(sizes(limit), 200)
    assert max(drawn) <= limit
    assert min(drawn) == 0


@pytest.mark.full
def test_giou_is_drawn_with_none_to_three_leading_axes() -> None:
    cases = drawn_cases("giou", count=10 * DRAWS, elements=32)
    assert {case["boxes1"].ndim - 1 for case in cases} == {0, 1, 2, 3}
    assert all(case.grad_output.shape == case["boxes1"].shape[:-1] for case in cases)


def test_padding_comes_in_the_middle_at_the_end_and_everywhere() -> None:
    valid = [wide(case["target"])[..., 3] > 0 for case in drawn_cases("giou_loss")]
    # In some large cases, at least every eighth row is a valid row after padding.
    assert often([bool((~v[:, :-1] & v[:, 1:]).mean() > 1 / 8) for v in valid if v.size > 64 and v.shape[1] > 1])
    # In some cases padding stands only at the ends of samples.
    assert often([not (~v[:, :-1] & v[:, 1:]).any() and not v.all() and bool(v.any()) for v in valid if v.size])
    assert often([v.size > 0 and not v.any() for v in valid])
    assert often([v.size > 0 and bool(v.all()) for v in valid])


def test_padding_is_marked_in_each_of_its_ways_and_holds_garbage() -> None:
    marks: list[set[str]] = []
    garbage = []
    for case in drawn_cases("giou_loss"):
        y2 = wide(case["target"])[..., 3]
        padding = ~(y2 > 0)
        kinds = {"zero": y2 == 0, "negative": (y2 < 0) & np.isfinite(y2), "nan": np.isnan(y2)}
        kinds["infinite"] = y2 == -np.inf
        marks.append({kind for kind, where in kinds.items() if (where & padding).any()})
        garbage.append(bool((~np.isfinite(wide(case["pred"])[padding])).any()))
    for kind in ("zero", "negative", "nan", "infinite"):
        assert often([kind in seen for seen in marks]), kind
    assert often(garbage)


def counts_of(case: Case) -> np.ndarray:
    return np.diff(case["offsets"])


@pytest.mark.full
def test_ragged_batches_are_empty_full_and_of_one_full_sample() -> None:
    cases = drawn_cases("giou_loss_ragged") + many_small_cases("giou_loss_ragged")
    batches = [(counts_of(case), case["pred"].shape[1]) for case in cases]
    real = [(counts, limit) for counts, limit in batches if len(counts) > 4 and limit > 1]
    assert often([not counts.any() for counts, _ in real])
    assert often([bool((counts == limit).all()) for counts, limit in real])
    assert often([counts.max() == limit and np.count_nonzero(counts) == 1 for counts, limit in real])
    assert often([counts.sum() == 1 for counts, _ in real])
    assert often([len(set(counts.tolist())) > 2 for counts, _ in real])


def test_offsets_are_always_those_of_the_targets() -> None:
    types = set()
    for case in drawn_cases("giou_loss_ragged"):
        offsets = case["offsets"]
        types.add(offsets.dtype.name)
        assert len(offsets) == len(case["pred"]) + 1
        assert offsets[0] == 0
        assert offsets[-1] == len(case["target"])
        assert np.all((counts_of(case) >= 0) & (counts_of(case) <= case["pred"].shape[1]))
    assert types == {"int32", "int64"}


@pytest.mark.full
def test_pred_is_strange_past_the_boxes_of_a_sample_now_and_then() -> None:
    strange = []
    for case in drawn_cases("giou_loss_ragged"):
        past = np.arange(case["pred"].shape[1]) >= counts_of(case)[:, None]
        strange.append(bool(np.isnan(wide(case["pred"])[past]).any()))
    assert often(strange)


def test_counts_of_few_boxes_are_as_in_a_face_detection_set() -> None:
    for batch, max_boxes in ((0, 5), (1, 0), (200, 7)):
        for counts in collect(box_counts(batch, max_boxes), 50):
            assert counts.shape == (batch,)
            assert np.all((counts >= 0) & (counts <= max_boxes))
    medians = [int(np.median(counts)) for counts in collect(box_counts(200, 100), 100)]
    # The median of |N(0, 3)| is 2.02.
    assert often([median == 2 for median in medians], 1 / 50)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_nan_and_infinity_appear_but_not_in_most_cases(name: str) -> None:
    boxes = [np.concatenate([b.ravel() for b in boxes_of(case)]) for case in many_small_cases(name)]
    assert often([bool(np.isnan(b).any()) for b in boxes])
    assert often([bool(np.isinf(b).any()) for b in boxes])
    assert often([bool(np.isfinite(b).all()) for b in boxes], 1 / 2)


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(BOXED, "giou_loss"))
def test_nan_and_infinity_reach_boxes_that_count_and_not_in_most_cases(name: str) -> None:
    strange = [[b[~np.isfinite(b)] for b in counted(name, case)] for case in many_small_cases(name)]
    either = [bool(first.size or second.size) for first, second in strange]
    assert often(either, 1 / 30)
    assert often([not seen for seen in either], 3 / 4)
    for which in (0, 1):
        assert often([bool(np.isnan(pair[which]).any()) for pair in strange], 1 / 100)
        assert often([bool(np.isinf(pair[which]).any()) for pair in strange], 1 / 100)


def test_no_two_arguments_of_a_call_have_the_same_numbers() -> None:
    def with_many_digits(array: np.ndarray) -> np.ndarray:
        ordinary = array[np.isfinite(array) & (abs(array) > 1e-30)]
        return ordinary[ordinary % 0.5 != 0]

    strategy = OPERATIONS["add_rms_norm"].cases(DTYPES["float32"], 256)
    for case in collect(strategy, 150):
        given = [with_many_digits(array) for array in (case["x"], case["residual"], case.grad_output)]
        for some, other in itertools.combinations(given, 2):
            assert np.isin(some, other).sum() <= len(some) / 4


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_special_values_are_of_each_kind_and_as_many_as_asked(dtype: str) -> None:
    kind = DTYPES[dtype]
    given = np.full((1000, 4), 2, dtype=kind.numpy)
    strange = sprinkle_special_values(np.random.default_rng(1), given)
    assert strange.dtype == kind.numpy
    values = wide(strange)
    kinds = (np.isnan(values), values == np.inf, values == -np.inf, (values == 0) & np.signbit(values))
    for where in (*kinds, values == kind.smallest_subnormal):
        # A fifth of a fifth of 4000 is 160.
        assert 80 < np.count_nonzero(where) < 320
    assert np.count_nonzero(values == 2) == pytest.approx(3200, abs=160)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_every_layout_appears_for_every_tensor(name: str) -> None:
    cases = drawn_cases(name) + many_small_cases(name)
    tensors = {tensor for case in cases for tensor in case.layouts}
    assert tensors >= set(OPERATIONS[name].differentiable)
    # Elements of a tensor that is changed in place share no memory. Sequences of one length would lack pages.
    not_expanded = {*OPERATIONS[name].mutates, *(("page_table", "lengths") if name == "paged_attention" else ())}
    for tensor in tensors:
        expected = set(LAYOUTS) - ({"expanded"} if tensor in not_expanded else set())
        assert {case.layouts[tensor] for case in cases if tensor in case.layouts} == expected
    assert often([set(case.layouts.values()) == {"contiguous"} for case in cases], 1 / 4)
    assert often([set(case.layouts.values()) != {"contiguous"} for case in cases], 1 / 4)


def test_layouts_are_drawn_for_the_named_tensors() -> None:
    for layouts in collect(layouts_for("a", "b"), 50):
        assert set(layouts) == {"a", "b"}
        assert set(layouts.values()) <= set(LAYOUTS)


@pytest.mark.full
def test_strides_of_zero_reach_boxes_and_cotangents_of_giou() -> None:
    strided: dict[str, list[bool]] = {"boxes1": [], "grad_output": []}
    for case in many_small_cases("giou"):
        for name, seen in strided.items():
            tensor = case.tensor(name, FLOAT32, "cpu")
            seen.append(any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape)))
    for seen in strided.values():
        assert often(seen)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_layouts_apply_to_every_case_drawn(name: str) -> None:
    contiguous = []
    for case in many_small_cases(name):
        tensors = [case.tensor(key, FLOAT32, "cpu") for key in (*case.inputs, "grad_output")]
        contiguous.append(all(tensor.is_contiguous() for tensor in tensors))
        for key, tensor in zip(case.inputs, tensors):
            assert torch.equal(bits(tensor), bits(FLOAT32.tensor(case[key], "cpu")))
    # Layouts are mixed in half of the cases. A quarter of these are empty or have one box.
    assert often([not c for c in contiguous], 1 / 8)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", sampled(WITH_GRADIENTS, *SAMPLE))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_cotangents_are_never_all_ones_and_sometimes_zero(name: str, dtype: str) -> None:
    cotangents = [wide(case.grad_output) for case in drawn_cases(name, dtype, DRAWS // 3, 64)]
    assert not any(c.size and (c == 1).all() for c in cotangents)
    assert often([bool((c == 0).any()) for c in cotangents])
    assert often([bool((c < 0).any()) for c in cotangents], 1 / 8)
    assert often([bool((c > 0).any()) for c in cotangents], 1 / 8)
    assert often([bool((c != 0).any()) for c in cotangents], 1 / 2)
    assert all(np.isfinite(c).all() for c in cotangents)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_no_element_of_a_cotangent_is_one(dtype: str) -> None:
    kind = DTYPES[dtype]
    drawn = cotangent(np.random.default_rng(2), (100_000,), kind)
    assert drawn.dtype == kind.numpy
    assert not (drawn == 1).any()
    assert np.mean(wide(drawn) == 0) == pytest.approx(0.1, abs=0.01)
    for shape in ((), (0,), (2, 0, 3)):
        assert cotangent(np.random.default_rng(2), shape, kind).shape == shape


PLAIN = Case(
    {"x": np.full((3, 4), 2, np.float32), "w": np.full(5, 2, np.float32), "offsets": np.arange(4)},
    np.full(7, 2, np.float32),
    {"eps": 0.25, "activation": "relu"},
)


def same(a: np.ndarray, b: float) -> np.ndarray:
    """Return where values are equal, with NaN equal to NaN and the sign of zeros compared."""
    return np.isnan(a) if np.isnan(b) else (a == b) & (np.signbit(a) == np.signbit(b))


@one_run
def special_cases() -> list[Case]:
    # As many cases as one implementation sees in a run over its checks and dtypes, each made from another case.
    plain = st.integers(1, 2**16).map(lambda n: replace(PLAIN, grad_output=np.full(7, n + 1, np.float32)))
    return collect(cases_with_special_values(FLOAT32, plain), 5000)


@pytest.mark.full
@pytest.mark.parametrize("name", ["x", "w"])
def test_every_special_value_is_put_into_every_input_and_at_every_place(name: str) -> None:
    changed = [wide(case[name]).ravel() for case in special_cases()]
    assert all(np.count_nonzero(array != 2) <= 1 for array in changed)
    values = np.stack(changed)
    for value in (float(np.float32(v)) for v in special_values(FLOAT32, PLAIN.parameters).values()):
        assert same(values, value).any(), value
    share = np.mean(values != 2, axis=0)
    assert share.min() > 0
    # The first and the last position matter: the last lane of a vector and the tail of a block are at the end.
    assert min(share[0], share[-1]) > 1 / 100
    assert np.mean(~np.isfinite(values[values != 2])) > 1 / 3
    assert np.mean((values != 2).any(axis=1)) < 1 / 2


def test_special_values_of_a_quantised_input_are_those_of_its_own_dtype() -> None:
    of_its_own = QUANTISED["float8_e4m3fn"]
    case = Case({"x": np.ones(3, of_its_own.numpy)}, np.ones(3, np.float32))
    cases = collect(cases_with_special_values(FLOAT32, st.just(case)), 500)
    assert all(case["x"].dtype == of_its_own.numpy for case in cases)
    numbers = np.concatenate([wide(case["x"]) for case in cases])
    wanted = {of_its_own.largest, -of_its_own.largest, of_its_own.smallest_subnormal}
    assert wanted <= set(numbers[np.isfinite(numbers)])
    assert np.isnan(numbers).any()


@pytest.mark.full
def test_integers_and_layouts_are_left_alone_by_special_values() -> None:
    for case in special_cases():
        assert np.array_equal(case["offsets"], PLAIN["offsets"])
        assert (case.parameters, case.layouts) == (PLAIN.parameters, PLAIN.layouts)
        assert all(case[name].dtype == PLAIN[name].dtype for name in PLAIN.inputs)


@pytest.mark.full
def test_cotangents_are_all_zero_and_zero_but_for_one_and_special_at_every_place() -> None:
    values = np.stack([wide(case.grad_output) for case in special_cases()])
    zero = values == 0
    assert np.mean(zero.all(axis=1)) > 1 / 50
    for at in range(values.shape[1]):
        assert np.mean(~zero[:, at] & (zero.sum(axis=1) == values.shape[1] - 1)) > 0
        assert not np.isfinite(values[:, at]).all()
    assert np.mean((values == values[:, :1]).all(axis=1) & ~zero[:, 0]) > 1 / 2


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_special_values_include_a_square_that_overflows_and_numbers_below_the_normal_ones(dtype: str) -> None:
    kind = DTYPES[dtype]
    special = {
        name: float(np.float64(value).astype(kind.numpy)) for name, value in special_values(kind, {"eps": 1e-5}).items()
    }
    assert special["its square overflows"] > special["largest"] / special["its square overflows"]
    assert 0 < special["smallest subnormal"] < special["largest subnormal"] < kind.smallest_normal
    assert np.isfinite(special["largest"])
    assert special["eps"] == float(np.float64(1e-5).astype(kind.numpy))


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_special_values_reach_searches_of_the_usual_length(name: str) -> None:
    plain = OPERATIONS[name].cases(FLOAT32, 1024)
    cases = collect(cases_with_special_values(FLOAT32, plain), 500)
    inputs = [np.concatenate([b.ravel() for b in boxes_of(case)]) for case in cases]
    # A few of a check's 25 cases. An implementation has some twenty checks over all dtypes.
    assert often([not np.isfinite(b).all() for b in inputs], 2 / 25)
    assert often([bool(np.isfinite(b).all()) for b in inputs], 1 / 2)
    cotangents = [wide(case.grad_output) for case in cases if case.grad_output.size]
    assert any(not c.any() for c in cotangents)
    if not OPERATIONS[name].differentiable:
        return
    assert any(not np.isfinite(c).all() for c in cotangents)
    assert often([bool(np.isfinite(c).all() and c.any()) for c in cotangents], 1 / 2)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rows_in_turn_have_each_value_that_is_not_finite_at_each_place(dtype: str) -> None:
    rows = wide(not_finite_in_turn(np.random.default_rng(1), 5, DTYPES[dtype])).reshape(3, 5, 5)
    for of_kind, value in zip(rows, (np.nan, np.inf, -np.inf)):
        assert np.array_equal(np.where(np.isfinite(of_kind), 0, 1), np.eye(5))
        assert same(of_kind.diagonal(), value).all()


@pytest.mark.parametrize(
    # The two cotangents of attention_with_lse follow each other without gaps.
    "name",
    sampled([x for x in WITH_GRADIENTS if x not in (*LOSSES, *BY_DISTANCE, "attention_with_lse")], *SAMPLE),
)
def test_cotangents_come_strided_and_with_strides_of_zero(name: str) -> None:
    strides = []
    for case in many_small_cases(name):
        tensor = case.tensor("grad_output", FLOAT32, "cpu")
        strides.append({s for s, n in zip(tensor.stride(), tensor.shape) if n > 1})
    assert often([0 in seen for seen in strides])
    assert often([bool(seen) and 0 not in seen and 1 not in seen for seen in strides], 1 / 100)


@pytest.mark.full
def test_every_eps_is_drawn() -> None:
    for name in BOXED:
        assert {case.parameters["eps"] for case in drawn_cases(name)} == set(EPS)


# The inputs that are float32 whatever the dtype under test.
ALWAYS_FLOAT32 = {"adam": ("m", "v"), "attention": ("slopes",), "attention_with_lse": ("slopes",)}


@pytest.mark.full(but=3)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", sampled(OPERATIONS, *SAMPLE))
def test_inputs_have_the_type_under_test(name: str, dtype: str) -> None:
    kind = DTYPES[dtype].numpy
    smooth = collect(OPERATIONS[name].smooth(DTYPES[dtype]), 10)
    examples = [make(DTYPES[dtype]) for make in OPERATIONS[name].examples.values()]
    for case in (*drawn_cases(name, dtype, DRAWS // 3, 64), *smooth, *examples):
        assert case.grad_output.dtype == kind
        quantised = [each.numpy for each in QUANTISED.values()]
        of_their_own = [np.float32] if any(array.dtype in quantised for array in case.inputs.values()) else []
        for argument, array in case.inputs.items():
            in_float32 = [np.float32] if argument in ALWAYS_FLOAT32.get(name, ()) else []
            assert array.dtype in (kind, np.int32, np.int64, *quantised, *of_their_own, *in_float32)
        assert all(case[key].dtype == kind for key in OPERATIONS[name].differentiable)


# The property that the name of a kind of pair promises, of boxes in float64, [n, 4] twice.
Claim = Callable[[np.ndarray, np.ndarray], np.ndarray]


def side(box: np.ndarray, axis: int) -> np.ndarray:
    return box[:, axis + 2] - box[:, axis]


def overlap(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    """Return the length of the overlap along an axis; negative for a gap."""
    return np.minimum(a[:, axis + 2], b[:, axis + 2]) - np.maximum(a[:, axis], b[:, axis])


def upright(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.all([side(box, axis) > 0 for box in (a, b) for axis in (0, 1)], axis=0)


def not_inverted(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.all([side(box, axis) >= 0 for box in (a, b) for axis in (0, 1)], axis=0)


def inside(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    return (inner[:, :2] >= outer[:, :2]).all(-1) & (inner[:, 2:] <= outer[:, 2:]).all(-1) & (inner != outer).any(-1)


def touching_along(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    return (overlap(a, b, axis) == 0) & (overlap(a, b, 1 - axis) > 0)


def ordinary(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return not_inverted(a, b) & np.isfinite(a).all(-1) & np.isfinite(b).all(-1)


CLAIMS: dict[str, Claim] = {
    "overlapping": lambda a, b: upright(a, b) & (overlap(a, b, 0) > 0) & (overlap(a, b, 1) > 0),
    "disjoint_along_x": lambda a, b: upright(a, b) & (overlap(a, b, 0) < 0),
    "disjoint_along_y": lambda a, b: upright(a, b) & (overlap(a, b, 1) < 0),
    "disjoint_along_both": lambda a, b: upright(a, b) & (overlap(a, b, 0) < 0) & (overlap(a, b, 1) < 0),
    "touching_edges": lambda a, b: upright(a, b) & (touching_along(a, b, 0) | touching_along(a, b, 1)),
    "touching_corners": lambda a, b: upright(a, b) & (overlap(a, b, 0) == 0) & (overlap(a, b, 1) == 0),
    "nested": lambda a, b: upright(a, b) & (inside(a, b) | inside(b, a)),
    "identical": lambda a, b: upright(a, b) & (a == b).all(-1),
    "sharing_edges": lambda a, b: not_inverted(a, b) & (a == b).any(-1),
    "points_and_lines": lambda a, b: not_inverted(a, b) & ~upright(a, b),
    "inverted": lambda a, b: np.any([side(box, axis) < 0 for box in (a, b) for axis in (0, 1)], axis=0),
    "pixels": lambda a, b: upright(a, b) & (a == np.rint(a)).all(-1) & (b == np.rint(b)).all(-1),
    "huge": ordinary,
    "tiny": ordinary,
}


def test_every_kind_of_pair_has_a_claim() -> None:
    assert set(CLAIMS) == set(PAIRS)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_what_their_name_says_after_rounding(pair: str, dtype: str) -> None:
    a, b = box_pairs(np.random.default_rng(3), 5000, (pair,), DTYPES[dtype])
    assert a.dtype == b.dtype == DTYPES[dtype].numpy
    assert a.shape == b.shape == (5000, 4)
    a, b = wide(a), wide(b)
    wrong = np.flatnonzero(~CLAIMS[pair](a, b))
    assert not len(wrong), (len(wrong), a[wrong[0]], b[wrong[0]])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pairs_touch_along_either_axis_and_from_either_side(dtype: str) -> None:
    a, b = (wide(x) for x in box_pairs(np.random.default_rng(4), 1000, ("touching_edges",), DTYPES[dtype]))
    for axis in (0, 1):
        assert often((touching_along(a, b, axis) & (a[:, axis] < b[:, axis])).tolist(), 1 / 8)
        assert often((touching_along(a, b, axis) & (a[:, axis] > b[:, axis])).tolist(), 1 / 8)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_edge_is_shared_and_not_all_at_once(dtype: str) -> None:
    a, b = (wide(x) for x in box_pairs(np.random.default_rng(5), 1000, ("sharing_edges",), DTYPES[dtype]))
    for edge in range(4):
        assert often((a[:, edge] == b[:, edge]).tolist(), 1 / 4)
    assert often((a != b).any(-1).tolist(), 1 / 2)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_points_and_lines_are_of_each_kind(dtype: str) -> None:
    a, _ = (wide(x) for x in box_pairs(np.random.default_rng(6), 1000, ("points_and_lines",), DTYPES[dtype]))
    flat = [side(a, axis) == 0 for axis in (0, 1)]
    for where in (flat[0] & flat[1], flat[0] & ~flat[1], ~flat[0] & flat[1], ~flat[0] & ~flat[1]):
        assert often(where.tolist(), 1 / 16)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_areas_of_huge_boxes_are_finite_and_those_of_tiny_ones_below_every_eps(dtype: str) -> None:
    kind = DTYPES[dtype]
    for pair in ("huge", "tiny"):
        # Scale huge boxes by the square root of the largest number, so that areas are finite here in float64 too.
        unit = kind.arithmetic.largest**0.5 if pair == "huge" else 1.0
        boxes = [wide(x) / unit for x in box_pairs(np.random.default_rng(7), 2000, (pair,), kind)]
        sides = [side(box, axis) for box in boxes for axis in (0, 1)]
        areas = np.concatenate([sides[0] * sides[1], sides[2] * sides[3]])
        both = np.concatenate(boxes, -1)
        hull = np.ptp(both[:, 0::2], axis=-1) * np.ptp(both[:, 1::2], axis=-1)
        if pair == "huge":
            assert hull.max() + 2 * areas.max() < 1
            assert abs(both).max() > min(kind.largest / unit, 1) / 8
        else:
            assert hull.max() < min(EPS)
            assert abs(both).max() > 0
            assert often([bool(x) for x in areas > 0], 1 / 2)


def test_kinds_are_mixed_and_each_is_drawn_alone() -> None:
    a, b = (wide(x) for x in box_pairs(np.random.default_rng(8), 3000, PAIRS, FLOAT32))
    with np.errstate(over="ignore"):
        for claim in CLAIMS.values():
            assert often(claim(a, b).tolist(), 1 / (2 * len(PAIRS)))
    first, second = box_pairs(np.random.default_rng(9), 0, PAIRS, FLOAT32)
    assert first.shape == second.shape == (0, 4)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 100])
def test_as_many_pairs_are_drawn_as_asked_for(count: int) -> None:
    for first, second in collect(pairs(FLOAT32, count), 20):
        assert first.shape == second.shape == (count, 4)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_explicit_pairs_are_exact_in_every_type_with_ties_and_degenerate_boxes(dtype: str) -> None:
    kind = DTYPES[dtype]
    drawn = collect(explicit_pairs(kind, 3), 100)
    a, b = (wide(np.concatenate(boxes)) for boxes in zip(*drawn))
    assert np.all(2 * a == np.rint(2 * a))
    assert abs(a).max() <= 24
    assert often((a == b).any(-1).tolist())
    assert often((~not_inverted(a, b)).tolist())
    assert often((side(a, 0) == 0).tolist())


def least_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the least distance of two edges of a pair along an axis."""
    edges = [np.sort(np.concatenate([a[:, axis::2], b[:, axis::2]], axis=-1), axis=-1) for axis in (0, 1)]
    return float(np.diff(edges, axis=-1).min(initial=1))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pairs_without_ties_have_none(dtype: str) -> None:
    kind = DTYPES[dtype]
    a, b = (wide(x) for x in pairs_without_ties(np.random.default_rng(10), 5000, kind))
    assert upright(a, b).all()
    # An eighth, less the rounding of two coordinates below 4.
    assert least_gap(a, b) >= 1 / 8 - 2 * kind.spacing_roundoff(np.array(4.0))
    both = (overlap(a, b, 0) > 0) & (overlap(a, b, 1) > 0)
    assert often(both.tolist(), 1 / 8)
    assert often((~both).tolist(), 1 / 8)


@pytest.mark.parametrize("name", [*BOXED, "ciou_loss", "ciou_loss_ragged"])
def test_smooth_cases_are_without_ties(name: str) -> None:
    for case in collect(OPERATIONS[name].smooth(DTYPES["float64"]), 50):
        assert least_gap(*counted(name, case)) > 0
