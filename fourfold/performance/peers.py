"""Peers: other implementations of an operation, timed beside its backends.

torch.compile and torch's own kernel are always there. Others are timed where they are installed, as by
``pip install fourfold[peers]``: Liger (https://github.com/linkedin/Liger-Kernel), quack
(https://github.com/Dao-AILab/quack) and FlagGems (https://github.com/flagos-ai/FlagGems). Liger's cross entropy and
swiglu write over their inputs. They get copies, whose time counts: a call on what an earlier one has left is another
call.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fourfold import backends
from fourfold.compat import torch_internals

Function = Callable[..., Any]  # takes the operation's arguments by name; returns a tensor, or a tuple of the outputs
COMPILED, LIBRARY = "compile", "library"


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Any:
    residual_out = x + residual
    return F.rms_norm(residual_out, x.shape[-1:], weight, eps), residual_out


def _add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> Any:
    h = x + residual
    return F.layer_norm(h, x.shape[-1:], weight, bias, eps), h


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> torch.Tensor:
    """Call cuBLAS (on a GPU), then a separate kernel for the activation."""
    product = a @ b
    if activation == "none":
        return product
    return F.relu(product) if activation == "relu" else F.leaky_relu(product, negative_slope)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Call cuBLAS, which multiplies so on Hopper alone, in 14 bits that are promoted to float32 after each block.

    It takes the scales of a column by column, and a multiple of 4 scales of each block of columns of b.

    Raises:
        NotImplementedError: see `_float8_product`.
    """
    padded = F.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous().t()
    scales = {"BlockWise1x128": scale_a.t().contiguous().t(), "BlockWise128x128": padded}
    return _float8_product(a, b, "block-wise", [*scales.items()], out_dtype)


def rowwise_scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Call CUTLASS or cuBLAS, which multiply so in 14 bits.

    Raises:
        NotImplementedError: see `_float8_product`.
    """
    return _float8_product(a, b, "row-wise", [("RowWise", scale_a[:, None]), ("RowWise", scale_b[None])], out_dtype)


def _float8_product(
    a: torch.Tensor, b: torch.Tensor, kind: str, scales: Sequence[tuple[str, torch.Tensor]], out_dtype: torch.dtype
) -> torch.Tensor:
    """Call torch's product of scaled float8 matrices.

    Args:
        a: ``[m, k]``.
        b: ``[n, k]``.
        kind: of the scales, for the message.
        scales: of a and of b, each with the name of its `torch.nn.functional.ScalingType`.
        out_dtype: that of the result.

    Raises:
        NotImplementedError: the matrices are on the CPU, or torch cannot multiply them on this GPU.
    """
    if not a.is_cuda:
        raise NotImplementedError(f"torch has no {kind} scales on the CPU")
    (type_of_a, scale_a), (type_of_b, scale_b) = scales
    try:
        of_a, of_b = (getattr(F.ScalingType, name) for name in (type_of_a, type_of_b))
        return F.scaled_mm(a, b.t(), scale_a, of_a, scale_b, of_b, output_dtype=out_dtype)
    except (AttributeError, RuntimeError, ValueError) as error:
        raise NotImplementedError(str(error)) from error


def int8_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Call cuBLAS, and multiply its integers with the scales after.

    Raises:
        NotImplementedError: cuBLAS has no product of these extents.
    """
    try:
        sums = torch_internals.int8_product(a, b.t())
    except RuntimeError as error:
        raise NotImplementedError(str(error)) from error
    return (sums * scale_a[:, None] * scale_b).to(out_dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Call torch's own kernel, of one sequence, or of packed ones as nested tensors with keys for each head."""
    q_offsets, k_offsets = options.get("q_offsets"), options.get("k_offsets")
    if max(options.get("window", (-1, -1))) >= 0 or options.get("slopes") is not None:
        raise NotImplementedError("torch has no window and no slopes without a mask")
    if q_offsets is None:
        if causal and len(q) != len(k):
            raise NotImplementedError("torch aligns causal attention at the top left")
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = F.scaled_dot_product_attention(
            one_q, one_k, one_v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return output[0].transpose(0, 1)
    group, k_offsets = q.shape[1] // k.shape[1], q_offsets if k_offsets is None else k_offsets
    pairs = (q, q_offsets), *((x.repeat_interleave(group, 1), k_offsets) for x in (k, v))
    of_q, of_k, of_v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x, offsets in pairs)
    output = F.scaled_dot_product_attention(of_q, of_k, of_v, is_causal=causal, scale=scale)
    return output.transpose(1, 2).values()


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Gather all pages that the table has room for, and call torch's own kernel with a mask."""
    tokens = torch.arange(page_table.shape[1] * k_cache.shape[1], device=q.device)
    is_used = tokens < lengths[:, None]
    table = page_table.long().where(is_used[:, :: k_cache.shape[1]], 0)
    k, v = (x[table].flatten(1, 2).where(is_used[..., None, None], 0).transpose(1, 2) for x in (k_cache, v_cache))
    grouped = q.shape[1] != k.shape[1]
    mask = is_used[:, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, scale=scale, enable_gqa=grouped)[:, :, 0]


# torch's own kernels.
LIBRARIES: Mapping[str, Function] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x, weight, bias, eps=1e-5: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "rms_norm": lambda x, weight, eps=1e-6: F.rms_norm(x, x.shape[-1:], weight, eps),
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _add_layer_norm,
    "cross_entropy": lambda logits, target, **parameters: F.cross_entropy(logits, target, **parameters),
    "embedding": lambda table, ids, padding_idx=None: F.embedding(ids, table, padding_idx),
    "matmul": matmul,
    "scaled_matmul": scaled_matmul,
    "rowwise_scaled_matmul": rowwise_scaled_matmul,
    "int8_matmul": int8_matmul,
    "attention": attention,
    "paged_attention": paged_attention,
}


def _call_on_rows(kernel: Function) -> Function:
    """Return a kernel of matrices, on the rows of a tensor with any number of axes."""

    def on_rows(x: torch.Tensor, *tensors: torch.Tensor, **parameters: Any) -> torch.Tensor:
        return kernel(x.reshape(-1, x.shape[-1]), *tensors, **parameters).reshape(x.shape)

    return on_rows


def _quack_cross_entropy(module: Any) -> Function:
    def cross_entropy(
        logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, **parameters: Any
    ) -> torch.Tensor:
        if label_smoothing:
            raise NotImplementedError("quack's cross entropy has no label smoothing")
        return module.cross_entropy(logits, target, **parameters)

    return cross_entropy


class _QuackLayerNorm(torch.autograd.Function):
    """quack's layer norm, whose weight and bias are float32 beside any dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, module: Any
    ) -> torch.Tensor:
        output, rstd, mean = module.layernorm_fwd(x, weight.float(), bias.float(), eps, True, True)
        ctx.save_for_backward(x, weight, rstd, mean)
        ctx.module = module
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd, mean = ctx.saved_tensors
        return *ctx.module.layernorm_bwd(x, weight, grad_output.contiguous(), rstd, mean), None, None


def _quack_topk(module: Any) -> Function:
    def topk(x: torch.Tensor, k: int, largest: bool = True) -> Any:
        if not largest:
            raise NotImplementedError("quack's topk has no smallest elements")
        return module.topk(x, k)

    return topk


class _LigerCrossEntropy(torch.autograd.Function):
    """Liger's cross entropy, which computes the gradient in its forward pass, on copies of what it writes over."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignored: int,
        smoothing: float,
        reduction: str,
        module: Any,
    ) -> torch.Tensor:
        scores = logits.clone().requires_grad_() if ctx.needs_input_grad[0] else logits
        loss, *_, gradient = module.cross_entropy_forward(
            scores, target, None, ignored, 0.0, smoothing, reduction, None, False
        )
        ctx.save_for_backward(gradient)
        ctx.module = module
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return ctx.module.cross_entropy_backward(gradient.clone(), grad_output), *[None] * 5


def _liger_cross_entropy(module: Any) -> Function:
    def cross_entropy(
        logits: torch.Tensor,
        target: torch.Tensor,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> torch.Tensor:
        return _LigerCrossEntropy.apply(logits, target, ignore_index, label_smoothing, reduction, module)

    return cross_entropy


class _LigerSwiglu(torch.autograd.Function):
    """Liger's swiglu, whose backward pass writes over the inputs, on copies of them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.module = module
        return module.swiglu_forward(gate, up)[-1]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.module.swiglu_backward(gate.clone(), up.clone(), grad_output), None


def _liger_embedding(module: Any) -> Function:
    def embedding(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
        if padding_idx is not None:
            raise NotImplementedError("Liger's embedding has no row of padding")
        return module.LigerEmbeddingFunction.apply(table, ids)

    return embedding


def _flaggems_softmax(module: Any) -> Function:
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            output = module.softmax(x, -1)
            ctx.save_for_backward(output)
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
            (output,) = ctx.saved_tensors
            return module.softmax_backward(grad_output, output, -1, output.dtype)

    return lambda x: Softmax.apply(x)


def _flaggems_layer_norm(module: Any) -> Function:
    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
            output, mean, rstd = module.layer_norm(x, x.shape[-1:], weight, bias, eps)
            ctx.save_for_backward(x, mean, rstd, weight, bias)
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
            x, mean, rstd, weight, bias = ctx.saved_tensors
            needs = ctx.needs_input_grad[:3]
            return *module.layer_norm_backward(grad_output, x, x.shape[-1:], mean, rstd, weight, bias, needs), None

    return _call_on_rows(lambda x, weight, bias, eps=1e-5: LayerNorm.apply(x, weight, bias, eps))


def _flaggems_cumsum(module: Any) -> Function:
    def cumsum(
        x: torch.Tensor, offsets: torch.Tensor | None = None, exclusive: bool = False, reverse: bool = False
    ) -> torch.Tensor:
        if offsets is not None or exclusive or reverse:
            raise NotImplementedError("FlagGems' cumsum has no segments, and begins with the first element")
        return module.cumsum(x, -1)

    return cumsum


def _flaggems_matmul(module: Any) -> Function:
    def matmul(
        a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01
    ) -> torch.Tensor:
        if activation != "none":
            raise NotImplementedError("FlagGems' mm has no activation")
        return module.mm(a, b)

    return matmul


# By the name of a library: its package, and for each operation the module that holds the kernel and what calls it.
INSTALLED: Mapping[str, tuple[str, Mapping[str, tuple[str, Callable[[Any], Function]]]]] = {
    "liger": (
        "liger_kernel.ops",
        {
            "softmax": ("softmax", lambda liger: lambda x: liger.LigerSoftmaxFunction.apply(x)),
            "layer_norm": (
                "layer_norm",
                lambda liger: (
                    lambda x, weight, bias, eps=1e-5: liger.LigerLayerNormFunction.apply(x, weight, bias, eps)
                ),
            ),
            "rms_norm": (
                "rms_norm",
                # Not in place: otherwise its backward pass would write over the cotangent.
                lambda liger: (
                    lambda x, weight, eps=1e-6: liger.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
                ),
            ),
            "add_rms_norm": (
                "fused_add_rms_norm",
                # Its mode "gemma" rounds once, as the operation does; the offset of the weight is left out.
                lambda liger: (
                    lambda x, residual, weight, eps=1e-6: liger.LigerFusedAddRMSNormFunction.apply(
                        x, residual, weight, eps, 0.0, "gemma", False
                    )
                ),
            ),
            "cross_entropy": ("cross_entropy", _liger_cross_entropy),
            "swiglu": ("swiglu", lambda liger: lambda gate, up: _LigerSwiglu.apply(gate, up, liger)),
            "embedding": ("experimental.embedding", _liger_embedding),
        },
    ),
    "quack": (
        "quack",
        {
            "softmax": ("softmax", lambda quack: _call_on_rows(quack.softmax)),
            "rms_norm": (
                "rmsnorm",
                lambda quack: _call_on_rows(lambda x, weight, eps=1e-6: quack.rmsnorm(x, weight, eps=eps)),
            ),
            "layer_norm": (
                "rmsnorm",
                lambda quack: _call_on_rows(
                    lambda x, weight, bias, eps=1e-5: _QuackLayerNorm.apply(x, weight, bias, eps, quack)
                ),
            ),
            "add_rms_norm": (
                "rmsnorm",
                lambda quack: (
                    lambda x, residual, weight, eps=1e-6: quack.rmsnorm(
                        x, weight, residual=residual, eps=eps, prenorm=True
                    )
                ),
            ),
            "topk": ("topk", _quack_topk),
            "cross_entropy": ("cross_entropy", _quack_cross_entropy),
        },
    ),
    # topk, cumsum and mm have no backward pass of their own, and are timed forward.
    "flaggems": (
        "flag_gems",
        {
            "softmax": ("ops.softmax", _flaggems_softmax),
            "layer_norm": ("ops.layernorm", _flaggems_layer_norm),
            "rms_norm": (
                "ops.rms_norm",
                lambda gems: lambda x, weight, eps=1e-6: gems.rms_norm(x, x.shape[-1:], weight, eps),
            ),
            "cross_entropy": (
                "fused.cross_entropy_loss",
                lambda gems: lambda logits, target, **kwargs: gems.cross_entropy_loss(logits, target, **kwargs),
            ),
            "swiglu": ("fused.silu_and_mul", lambda gems: lambda gate, up: gems.silu_and_mul(gate, up)),
            "topk": ("ops.topk", lambda gems: lambda x, k, largest=True: gems.topk(x, k, -1, largest)),
            "cumsum": ("ops.cumsum", _flaggems_cumsum),
            "matmul": ("ops.mm", _flaggems_matmul),
        },
    ),
}


def _installed(operation: str) -> dict[str, Callable[[], Function]]:
    """Return the kernels of installed libraries for an operation, by the library's name."""
    makers: dict[str, Callable[[], Function]] = {}
    for name, (package, kernels) in INSTALLED.items():
        if operation in kernels and importlib.util.find_spec(package.partition(".")[0]):
            module, wrap = kernels[operation]

            def make(package: str = package, module: str = module, wrap: Callable[[Any], Function] = wrap) -> Function:
                # Not as an attribute of the package, which may have a function of the module's name.
                return wrap(importlib.import_module(f"{package}.{module}"))

            makers[name] = make
    return makers


def torchvision_function(operation: str) -> Function | None:
    """Return torchvision's function, of paired boxes 1 - its loss; None if there is none, or no torchvision."""
    try:
        from torchvision import ops
    except ImportError:
        return None

    def nms(
        boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None = None
    ) -> torch.Tensor:
        if idxs is None:
            return ops.nms(boxes, scores, iou_threshold)
        return ops.batched_nms(boxes, scores, idxs, iou_threshold)

    def giou_matrix(
        boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str = "giou", eps: float = 1e-5
    ) -> torch.Tensor:
        return (ops.generalized_box_iou if mode == "giou" else ops.box_iou)(boxes_a, boxes_b)

    functions: dict[str, Function] = {
        "giou": lambda boxes1, boxes2, eps=1e-5: 1 - ops.generalized_box_iou_loss(boxes1, boxes2, eps=eps),
        "giou_matrix": giou_matrix,
        "sigmoid_focal_loss": lambda logits, targets, **kwargs: ops.sigmoid_focal_loss(logits, targets, **kwargs),
        "nms": nms,
    }
    return functions.get(operation)


def peers(operation: str, reference: Function | None = None) -> dict[str, Callable[[], Function]]:
    """Return the functions that make each peer when it is needed, by the peer's name.

    Args:
        operation: its name.
        reference: the definition of an operation that a user declares. It has no peers but `COMPILED`.
    """

    def compiled() -> Function:
        # Call this once for each set of shapes; each must have its own code.
        torch.compiler.reset()
        return torch.compile(reference or backends.load(operation, "torch"), dynamic=False)

    kernels: dict[str, Any] = {COMPILED: compiled}
    if reference is not None:
        return kernels
    library = LIBRARIES.get(operation) or torchvision_function(operation)
    if library is not None:
        kernels[LIBRARY] = lambda: library
    return kernels | _installed(operation)
