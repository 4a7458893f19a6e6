"""Planted faults in giou_matrix: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import giou_matrix as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit

from .edits import Edits
from .planted import UNWRITTEN, Fault

# fmt: off
SCORES = '    return pairwise_giou(a, b, eps, mode == "giou").to( =>'
SCALED = "    {0} = {0}.detach() + ({0} - {0}.detach()) {1}\n"
AGAIN = '    return pairwise_giou(a, b, eps, mode == "giou").to('


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("giou_matrix", "torch")
    return (
        # Areas of a half type overflow at 256 by 256 pixels.
        of("in_the_boxes_dtype", "in_compute_dtype(boxes_a)[ => boxes_a[", "in_compute_dtype(boxes_b)[ => boxes_b[",
           dtype="float16"),
        # Only over the first 32 columns, as in a kernel that overwrites the sums of other tiles.
        of.gradient("first_tile_alone", f"{SCORES}     a = torch.cat([a[:, :32], a[:, 32:].detach()], 1)\n{AGAIN}"),
        of.gradient("mean_over_pairs", f"{SCORES} {SCALED.format('a', '/ shape[1]')}{SCALED.format('b', '/ shape[0]')}"
                    f"{AGAIN}"),
        # In another order for each call, as with atomics.
        of("gradients_by_atomics", "giou_matrix/torch_eager.py: import torch\n =>"
           " import itertools\nimport torch\nCALLS = itertools.count()\n",
           f"{SCORES} {SCALED.format('b', '* (1 + 1e-6 * next(CALLS))')}{AGAIN}", check=repeats_bit_for_bit,
           says="differ"),
        # Divided by the area of the first box, like a coverage.
        of.law(properties.exchanged_boxes_transpose_the_matrix,
               "giou/torch_eager.py: clamped(area1 + area2 - intersection, eps) => clamped(area1, eps)",
               name="area_of_a_twice"),
        # The upper triangle stands for the whole matrix if both sets have equally many boxes.
        of.law(properties.each_pair_scores_as_giou, f'{SCORES}     scores = pairwise_giou(a, b, eps, mode == "giou")\n'
               "    if len(boxes_a) == len(boxes_b):\n        scores = scores.triu() + scores.triu(1).T\n"
               "    return scores.to(", name="pairs_of_one_list_with_itself"),
        of.law(properties.never_above_intersection_over_union,
               "giou/torch_eager.py: return intersection / union - (hull"
               " => return intersection / union + (hull", name="hull_left_out_of_the_negative"),
    )


def _triton_faults() -> tuple[Fault, ...]:
    of, tiles = Edits("giou_matrix", "triton"), {"right_on": "tiles_giou"}
    return (
        # The kernel assumes contiguous memory: it reads wrong rows past 16.
        of("offsets_in_4_bits", "rows, rows, 1, rows < n, => rows % 16, rows, 1, rows < n,"),
        of("contiguous_assumed", "aligned = (each.contiguous() for each in boxes) => aligned = boxes", **tiles),
        of("corners_put_in_order",
           "    a = (ax1 =>     ax1, ax2 = tl.minimum(ax1, ax2), tl.maximum(ax1, ax2)\n    a = (ax1"),
        of("eps_of_float32",
           "eps = tl.full((), eps, COMPUTE)\n    score => eps = tl.full((), 1e-5, COMPUTE)\n    score",
           **tiles),
        of("mode_ignored", "eps, ENCLOSED)\n    at => eps, True)\n    at", **tiles),
        of("negative_scores_clamped", "score.to(scores_ptr =>2 tl.maximum(score, 0.0).to(scores_ptr"),
        of.gradient("gradients_change_places", "        return gradients\n =>         same ="
                    " gradients[0].shape == gradients[1].shape\n"
                    "        return gradients[::-1] if same else gradients\n"),
    )


NAN_DROPPED = "giou/boxes.cuh: return a > b || a != a ? a : b; => return fmax(a, b);"
STORED = "scores[row * m + column] ="
WIDTH, HEIGHT = "giou/boxes.cuh: - maximum(a.x1, b.x1)), =>", "giou/boxes.cuh: - maximum(a.y1, b.y1)), =>"


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("giou_matrix", "cuda")
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, f"if (column < m) {STORED} => if (row == n - 1 || column"
                   f" < m) {STORED}"),
        of("last_block_dropped", "FORWARD[a.dtype, enclosed].launch(blocks, => FORWARD[a.dtype, enclosed].launch("
           "max(blocks - 1, 1),", check=memory_is_respected, says=UNWRITTEN, right_on="one_with_one_giou"),
        # The kernel assumes contiguous memory: it reads wrong rows past 16.
        of("offsets_in_4_bits", "converted<C>(boxes_a[row]) =>2 converted<C>(boxes_a[row % 16])"),
        of.stopped("rows_as_long_as_columns", cuda_on_cpu.Race, f"{STORED} => scores[(row * n + column) % (n * m)] =",
                   right_on="as_many_of_both_giou"),
        of("nan_dropped", NAN_DROPPED),
        of("sides_not_clamped", "giou/boxes.cuh: intersection(maximum(width, C(0)) * maximum(height, C(0))) =>"
           " intersection(width * height)"),
        # Lengths of pixels counted from 0 to width - 1, as in the first detectors.
        of("plus_one", f"{WIDTH} - maximum(a.x1, b.x1) + C(1)),", f"{HEIGHT} - maximum(a.y1, b.y1) + C(1)),"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
