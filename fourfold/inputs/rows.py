"""Named cases of operations that work row by row, along the last axis."""

from collections.abc import Callable

from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case


def row_examples(rows: Callable[..., Callable[[DType], Case]]) -> dict[str, Callable[[DType], Case]]:
    """Return the named cases of any row-wise operation: around the sizes of blocks, and in every layout.

    Args:
        rows: a function that makes a case of random rows ``x`` and their cotangent, from a shape and, by name, their
            layouts.
    """

    def laid_out(*shape: int, layout: str) -> Callable[[DType], Case]:
        return rows(*shape, x=layout, grad_output=layout)

    return {
        "no_rows": rows(0, 5),
        "no_columns": rows(3, 0),
        "no_rows_and_no_columns": rows(0, 0),
        "one_column": rows(5, 1),
        "one_row_without_leading_axes": rows(7),
        # The tail of a vector, of a warp, and of the last block, and one column past each.
        "columns_not_a_multiple_of_16": rows(3, 15),
        "one_warp_and_one_column": rows(3, 33),
        "one_short_of_1024_columns": rows(2, 1023),
        "one_past_1024_columns": rows(2, 1025),
        "many_short_rows": rows(700, 3),
        "rows_with_gaps": laid_out(5, 64, layout="sliced_rows"),
        "columns_with_gaps": laid_out(5, 32, layout="sliced_columns"),
        "rows_one_element_too_wide": laid_out(5, 64, layout="cut_from_wider"),
        "misaligned": laid_out(5, 64, layout="misaligned"),
        "transposed": laid_out(64, 40, layout="transposed"),
        # No single stride steps through these rows, which lie along several axes.
        "three_axes_each_in_another_order": rows(3, 4, 8, x="transposed", grad_output="axes_reversed"),
        "four_axes_each_in_another_order": rows(3, 2, 5, 8, x="transposed", grad_output="axes_reversed"),
    }
