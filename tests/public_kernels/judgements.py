"""What we hold of each kernel, after having read it: right, or whose mistake its failures are."""

_LANES = "right; relies on undefined lanes being 0"
_OVERWRITES = "[overwrites its inputs](#liger-swiglu)"
_STORAGE = "right; rounds between its steps"

JUDGEMENTS = {
    "liger-kernel/softmax": "[less exact than torch in bfloat16](#liger-softmax); right in float32",
    "liger-kernel/rms_norm (gemma)": "right",
    "liger-kernel/rms_norm (llama)": "right; rounds as its documentation says",
    "liger-kernel/layer_norm": "right",
    "liger-kernel/swiglu": _OVERWRITES,
    "liger-kernel/geglu": _OVERWRITES,
    "liger-kernel/relu_squared": "[0 where the input is NaN](#liger-relu)",
    "liger-kernel/dyt": "right for finite numbers and 65,535 rows; "
    "[more rows end in an error, an infinite `alpha` in NaN](#liger-dyt)",
    "liger-kernel/tvd": "right",
    "liger-kernel/kl_div": "right; storage accuracy in bfloat16, which it does not claim",
    "liger-kernel/cross_entropy": "[overwrites its logits](#liger-cross-entropy)",
    "fla-core/softmax": "right; has no gradients, and takes contiguous tensors alone",
    "fla-core/logsumexp": "right for finite numbers; [NaN where the input is infinite](#fla)",
    "fla-core/l2norm": "right; its backward pass uses the rounded result",
    "fla-core/rms_norm": f"{_LANES}; its backward pass divides by zero where there are no rows",
    "fla-core/layer_norm": f"{_LANES}; its backward pass divides by zero where there are no rows",
    "fla-core/swish": "right",
    "fla-core/swiglu": "right",
    "fla-core/logsigmoid": "[0 where it should be a small number](#fla-logsigmoid)",
    "fla-core/cross_entropy": "right",
    "flag-gems/silu_and_mul": "right; as shipped not with Triton 3.9, which has no block pointers",
    "flag-gems/rms_norm": "right; [overflows early in the gradient of the weight](#flag-gems), as others may",
    "flag-gems/softmax": "right",
    "conch-triton-kernels/rms_norm": _LANES,
    "conch-triton-kernels/fused_add_rms_norm": _LANES,
    "conch-triton-kernels/gemma_rms_norm": _LANES,
    "conch-triton-kernels/gemma_rms_norm (residual)": "[wrong](#conch)",
    "conch-triton-kernels/silu_and_mul": f"{_STORAGE}; divides by zero where there are no elements",
    "conch-triton-kernels/gelu_tanh_and_mul": "right in float32; raises for bfloat16",
    "flashnn/rms_norm": "right; has no gradients, and takes contiguous tensors alone",
    "torchvision/generalized_box_iou_loss": "right",
    "torchvision/distance_box_iou_loss": "right",
    "torchvision/complete_box_iou_loss": "[ignores `eps`](#torchvision)",
    "torchvision/sigmoid_focal_loss": "right for finite numbers; rounds between its steps",
    "fvcore/giou_loss": _STORAGE,
    "fvcore/smooth_l1_loss": "[NaN gradients of large numbers](#fvcore)",
    "torchtune/RMSNorm": "right; on a GPU [torch's own `rms_norm`](#torchtune) overflows early",
    "rotary-embedding-torch/apply_rotary_emb": _STORAGE,
    "timm/mish": _STORAGE,
    "timm/hard_swish_me": f"{_STORAGE}; NaN where the input is infinite",
}
