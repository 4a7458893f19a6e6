"""Planted faults in giou: edits of its version in Triton."""

from fourfold.properties import giou as properties

from fourfold.checks.memory import memory_is_respected

from .edits import OFFSETS_OF_ROWS, Edits
from .far_apart import pairs_far_apart
from .planted import Fault, named, one_pair, sixty_four_pairs

# fmt: off
SMALL_BLOCKS = "BLOCK_ROWS = 512 => BLOCK_ROWS = 64"
ALL_NAN = "giou/triton_boxes.py: (a, b, propagate_nan=tl.PropagateNan.ALL) =>2 (a, b)"
# Both gradients and one more block in one buffer: a store past one gradient lands in the other.
ONE_BUFFER = (
    "    grad_boxes1, grad_boxes2 = empty_gradients((boxes1, boxes2), (needs1, needs2))\n"
    "    num_rows = grad_output.numel() =>     num_rows = grad_output.numel()\n"
    "    buffer = boxes1.new_empty((2 * num_rows + BLOCK_ROWS, 4))[: 2 * num_rows]\n"
    "    grad_boxes2, grad_boxes1 = (part.view(boxes1.shape) for part in buffer.chunk(2))"
)


def _faults() -> tuple[Fault, ...]:
    of, whole = Edits("giou", "triton"), {"right_on": sixty_four_pairs}
    return (
        of("tail_dropped", SMALL_BLOCKS, "(cdiv(num_rows, BLOCK_ROWS),),\n        (boxes1 =>"
           " (num_rows // BLOCK_ROWS,),\n        (boxes1", **whole),
        # As tl.minimum and tl.maximum do by default.
        of("nan_dropped", ALL_NAN, right_on=one_pair),
        of("contiguous_assumed", "PACKED1=packed(boxes1) =>2 PACKED1=True", "PACKED2=packed(boxes2) =>2 PACKED2=True",
           right_on=one_pair, examples=named(properties, "identical", "coordinates_strided")),
        of.gradient("store_into_the_next_tensor", SMALL_BLOCKS, ONE_BUFFER, "store_boxes(grad_boxes2_ptr, rows, x1, y1,"
                    " x2, y2, mask) => store_boxes(grad_boxes2_ptr, rows, x1, y1, x2, y2, rows >= 0)", **whole),
        of("store_past_the_end", SMALL_BLOCKS, "element_ty), mask=mask) => element_ty))", check=memory_is_respected,
           says=r"wrote \d+ elements past the end of a tensor \[", **whole),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, dtype="float16",
           examples={"rows_2_28_elements_apart": pairs_far_apart},
           source="https://github.com/triton-lang/triton/issues/1058", **whole),
    )


# fmt: on
FAULTS = _faults()
