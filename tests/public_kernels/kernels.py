"""The public kernels: where each lies, how it is called, what it is to compute, and what it says of itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation
from tests.public_kernels import absent_gpu
from tests.public_kernels import definitions as of


@dataclass(frozen=True)
class Kernel:
    """One public function.

    Attributes:
        name: the project and the kernel.
        path: module and attribute, as in ``package.module:function``.
        operation: what it is to compute.
        adapter: takes the imported object; returns a function of the operation's arguments.
        claims: what its documentation, its checks or its code say of it.
        needs: other packages that its module imports.
        bare: packages whose ``__init__`` is not run.
        without_gpu: called where there is no GPU, before its module is imported.
        unused: modules that its module imports, and that it does not use.
        dtypes: what it is verified in.
    """

    name: str
    path: str
    operation: Operation
    adapter: Callable[[Any], Callable[..., torch.Tensor]]
    claims: Claims = field(default_factory=Claims)
    needs: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    without_gpu: Callable[[], None] = lambda: None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def project(self) -> str:
        """The package that it comes from."""
        return self.name.partition("/")[0]


def as_it_is(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that takes the operation's arguments in their order."""
    return lambda *arguments: function(*arguments)


def applied(function: Any) -> Callable[..., torch.Tensor]:
    """Return an autograd.Function that takes the operation's arguments in their order."""
    return lambda *arguments: function.apply(*arguments)


def torchtune_norm(norm: Any) -> Callable[..., torch.Tensor]:
    """Return a module whose weight is an argument."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        module = norm(x.shape[-1], eps)
        del module.scale
        module.scale = weight
        return module(x)

    return call


def halves(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that takes both of its arguments in one tensor, side by side."""
    return lambda gate, up: function(torch.cat([gate, up], -1))


def in_float32(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss of boxes whose result is in float32 where the boxes are in a half type."""
    return lambda boxes1, boxes2, eps: loss(boxes1, boxes2, eps=eps).to(boxes1.dtype)


LIGER_ROWS = {"cols": (1, 65536)}
FORWARD = Claims(gradients=False, contiguous=True)
UNSPECIFIED_LANES = Claims(gradients=False, contiguous=True, undefined_lanes_are_zero=True)
# "For parity with vLLM": the normalized row is rounded before it is multiplied by the weight.
AS_VLLM = Claims(gradients=False, contiguous=True, undefined_lanes_are_zero=True, ranks=(2, 3), accuracy="storage")

# The kernels of a project have in common what they need and leave out.
fla = partial(Kernel, needs=("einops",))
gems = partial(
    Kernel,
    needs=("pyyaml", "sqlalchemy"),
    bare=("flag_gems", "flag_gems.ops", "flag_gems.fused"),
    without_gpu=absent_gpu.of_flag_gems,
)
torchvision = partial(Kernel, unused=("PIL",), bare=("torchvision", "torchvision.ops"))
fvcore = partial(Kernel, bare=("fvcore", "fvcore.nn"))
timm = partial(Kernel, bare=("timm", "timm.layers"))

KERNELS = (
    Kernel("liger-kernel/softmax", "liger_kernel.ops.softmax:LigerSoftmaxFunction", of.softmax, applied),
    Kernel(
        "liger-kernel/rms_norm (gemma)",
        "liger_kernel.ops.rms_norm:LigerRMSNormFunction",
        of.rms_norm,
        lambda f: lambda x, weight, eps: f.apply(x, weight, eps, 0.0, "gemma", False),
        Claims(sizes=LIGER_ROWS, ranks=(2, 3)),
    ),
    Kernel(
        "liger-kernel/rms_norm (llama)",
        "liger_kernel.ops.rms_norm:LigerRMSNormFunction",
        of.rms_norm,
        lambda f: lambda x, weight, eps: f.apply(x, weight, eps, 0.0, "llama", False),
        Claims(sizes=LIGER_ROWS, ranks=(2, 3), accuracy="storage"),
    ),
    Kernel(
        "liger-kernel/layer_norm",
        "liger_kernel.ops.layer_norm:LigerLayerNormFunction",
        of.layer_norm,
        applied,
        Claims(sizes=LIGER_ROWS),
    ),
    Kernel(
        "liger-kernel/swiglu",
        "liger_kernel.ops.swiglu:LigerSiLUMulFunction",
        of.swiglu,
        applied,
        Claims(sizes=LIGER_ROWS, accuracy="storage"),
    ),
    Kernel(
        "liger-kernel/geglu",
        "liger_kernel.ops.geglu:LigerGELUMulFunction",
        of.geglu,
        applied,
        Claims(sizes=LIGER_ROWS, accuracy="storage"),
    ),
    Kernel(
        "liger-kernel/relu_squared", "liger_kernel.ops.relu_squared:LigerReLUSquaredFunction", of.squared_relu, applied
    ),
    Kernel(
        "liger-kernel/dyt",
        "liger_kernel.ops.dyt:LigerDyTFunction",
        of.dynamic_tanh,
        applied,
        Claims(contiguous=True, finite=True),
        without_gpu=absent_gpu.of_liger_kernel,
    ),
    Kernel(
        "liger-kernel/tvd",
        "liger_kernel.ops.tvd:LigerTVDLossFunction",
        of.total_variation,
        # The losses are in float32, whichever dtype the distributions have.
        lambda f: lambda p, q: f.apply(p, q, None, "none").to(p.dtype),
    ),
    Kernel(
        "liger-kernel/kl_div",
        "liger_kernel.ops.kl_div:LigerKLDivLossFunction",
        of.kl_divergence,
        lambda f: lambda log_p, log_q: f.apply(log_p, log_q, "none", True).to(log_p.dtype),
    ),
    Kernel(
        "liger-kernel/cross_entropy",
        "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction",
        of.cross_entropy_mean,
        lambda f: lambda logits, target: f.apply(logits, target, None)[0],
    ),
    fla(
        "fla-core/softmax",
        "fla.ops.utils.softmax:softmax_fwd",
        of.softmax,
        lambda f: lambda x: f(x, x.dtype),
        FORWARD,
        bare=("fla.ops",),
    ),
    fla(
        "fla-core/logsumexp",
        "fla.ops.utils.logsumexp:logsumexp_fwd",
        of.logsumexp,
        lambda f: lambda x: f(x, None, x.dtype),
        Claims(gradients=False, contiguous=True, finite=True, ranks=(2, 3, 4)),
        bare=("fla.ops",),
    ),
    fla("fla-core/l2norm", "fla.modules.norm.l2norm:l2norm", of.l2_norm, as_it_is, Claims(accuracy="storage")),
    fla(
        "fla-core/rms_norm",
        "fla.modules.norm.layernorm:rms_norm",
        of.rms_norm,
        lambda f: lambda x, weight, eps: f(x, weight, None, eps=eps),
        Claims(empty=False, undefined_lanes_are_zero=True),
    ),
    fla(
        "fla-core/layer_norm",
        "fla.modules.norm.layernorm:layer_norm",
        of.layer_norm,
        lambda f: lambda x, weight, bias, eps: f(x, weight, bias, eps=eps),
        Claims(empty=False, undefined_lanes_are_zero=True),
    ),
    fla("fla-core/swish", "fla.modules.activations.ops:SwishFunction", of.silu, applied),
    fla("fla-core/swiglu", "fla.modules.activations.ops:SwiGLUFunction", of.swiglu, applied),
    fla("fla-core/logsigmoid", "fla.modules.activations.ops:logsigmoid", of.log_sigmoid, as_it_is),
    fla(
        "fla-core/cross_entropy",
        "fla.modules.fused_cross_entropy.ops:cross_entropy_loss",
        of.cross_entropy_rows,
        lambda f: lambda logits, target: f(logits, target)[0].to(logits.dtype),
    ),
    gems("flag-gems/silu_and_mul", "flag_gems.fused.silu_and_mul:silu_and_mul", of.swiglu, as_it_is),
    gems(
        "flag-gems/rms_norm",
        "flag_gems.ops.rms_norm:rms_norm",
        of.rms_norm,
        lambda f: lambda x, weight, eps: f(x, list(weight.shape), weight, eps),
    ),
    gems(
        "flag-gems/softmax",
        "flag_gems.ops.softmax:softmax",
        of.softmax,
        lambda f: lambda x: f(x, -1),
        Claims(gradients=False),
    ),
    Kernel(
        "conch-triton-kernels/rms_norm", "conch.ops.normalization.rms_norm:rms_norm", of.rms_norm, as_it_is, AS_VLLM
    ),
    Kernel(
        "conch-triton-kernels/fused_add_rms_norm",
        "conch.ops.normalization.rms_norm:fused_add_rms_norm",
        of.added_rms_norm,
        # It works in place.
        lambda f: lambda x, residual, weight, eps: f(x.clone(), residual.clone(), weight, eps)[0],
        AS_VLLM,
    ),
    Kernel(
        "conch-triton-kernels/gemma_rms_norm",
        "conch.ops.normalization.gemma_rms_norm:gemma_rms_norm",
        of.gemma_rms_norm,
        lambda f: lambda x, weight, eps: f(x.clone(), weight, eps),
        UNSPECIFIED_LANES,
    ),
    Kernel(
        "conch-triton-kernels/gemma_rms_norm (residual)",
        "conch.ops.normalization.gemma_rms_norm:gemma_rms_norm",
        of.added_residual,
        lambda f: lambda x, residual, weight, eps: f(x.clone(), weight, eps, residual.clone())[1],
        UNSPECIFIED_LANES,
    ),
    Kernel(
        "conch-triton-kernels/silu_and_mul",
        "conch.ops.activation.silu_and_mul:silu_and_mul",
        of.swiglu,
        halves,
        Claims(gradients=False, ranks=(2, 3), empty=False, accuracy="storage"),
    ),
    Kernel(
        "conch-triton-kernels/gelu_tanh_and_mul",
        "conch.ops.activation.gelu_tanh_and_mul:gelu_tanh_and_mul",
        of.geglu,
        halves,
        Claims(dtypes=("float32",), gradients=False, ranks=(2, 3), empty=False),
    ),
    Kernel(
        "flashnn/rms_norm",
        "flashnn.triton_kernels.rms_norm:triton_rmsnorm_forward",
        of.rms_norm,
        as_it_is,
        FORWARD,
        bare=("flashnn", "flashnn.triton_kernels"),
    ),
    torchvision(
        "torchvision/generalized_box_iou_loss",
        "torchvision.ops.giou_loss:generalized_box_iou_loss",
        of.giou_loss,
        in_float32,
    ),
    torchvision(
        "torchvision/distance_box_iou_loss", "torchvision.ops.diou_loss:distance_box_iou_loss", of.diou_loss, in_float32
    ),
    torchvision(
        "torchvision/complete_box_iou_loss", "torchvision.ops.ciou_loss:complete_box_iou_loss", of.ciou_loss, in_float32
    ),
    torchvision(
        "torchvision/sigmoid_focal_loss",
        "torchvision.ops.focal_loss:sigmoid_focal_loss",
        of.focal_loss,
        as_it_is,
        Claims(accuracy="storage", finite=True),
    ),
    fvcore(
        "fvcore/giou_loss",
        "fvcore.nn.giou_loss:giou_loss",
        of.giou_loss,
        lambda f: lambda one, two, eps: f(one, two, eps=eps),
        Claims(accuracy="storage"),
    ),
    fvcore(
        "fvcore/smooth_l1_loss",
        "fvcore.nn.smooth_l1_loss:smooth_l1_loss",
        of.smooth_l1,
        as_it_is,
        Claims(accuracy="storage", finite=True),
    ),
    Kernel(
        "torchtune/RMSNorm",
        "torchtune.modules.rms_norm:RMSNorm",
        of.rms_norm,
        torchtune_norm,
        Claims(finite=True),
        bare=("torchtune", "torchtune.modules"),
    ),
    Kernel(
        "rotary-embedding-torch/apply_rotary_emb",
        "rotary_embedding_torch.rotary_embedding_torch:apply_rotary_emb",
        of.rotary_embedding,
        as_it_is,
        Claims(accuracy="storage"),
        ("einops",),
    ),
    timm("timm/mish", "timm.layers.activations:mish", of.mish, as_it_is, Claims(accuracy="storage")),
    timm(
        "timm/hard_swish_me",
        "timm.layers.activations_me:HardSwishAutoFn",
        of.hard_swish,
        applied,
        Claims(finite=True, accuracy="storage"),
    ),
)
