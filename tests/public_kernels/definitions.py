"""What the public kernels are to compute: one definition in plain torch for each operation, as its formula reads."""

import functools

import torch
import torch.nn.functional as F

import fourfold
from fourfold import tensor, values

# Tests that only read the list of kernels need not wait until each definition is tried. A verification tries it.
operation = functools.partial(fourfold.operation, tried=False)

EPSILONS = values(1e-6, 1e-5)
SOME = {"cols": (1, None)}


def boxes(rng, shape, dtype):
    """Draw boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2, some of which overlap."""
    low = rng.uniform(0, 20, (*shape[:-1], 2)).round()
    return torch.cat([torch.as_tensor(low), torch.as_tensor(low + rng.integers(1, 16, low.shape))], -1).numpy()


def pair_of_boxes(**others):
    """Declare two sets of boxes."""
    one, two = (tensor("boxes 4", make=boxes) for _ in range(2))
    return {"boxes1": one, "boxes2": two, **others}


@operation(x=tensor("... cols"), sizes=SOME)
def softmax(x):
    return torch.softmax(x, -1)


@operation(x=tensor("... cols"), sizes=SOME)
def logsumexp(x):
    return torch.logsumexp(x, -1)


@operation(x=tensor("... cols"), weight=tensor("cols"), eps=EPSILONS, sizes=SOME)
def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@operation(x=tensor("rows cols"), residual=tensor("rows cols"), weight=tensor("cols"), eps=EPSILONS, sizes=SOME)
def added_rms_norm(x, residual, weight, eps=1e-6):
    added = x + residual
    return added * torch.rsqrt(added.square().mean(-1, keepdim=True) + eps) * weight


@operation(x=tensor("rows cols"), residual=tensor("rows cols"), weight=tensor("cols"), eps=EPSILONS, sizes=SOME)
def added_residual(x, residual, weight, eps=1e-6):
    return x + residual + 0 * weight


@operation(x=tensor("rows cols"), weight=tensor("cols"), eps=EPSILONS, sizes=SOME)
def gemma_rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


@operation(x=tensor("... cols"), weight=tensor("cols"), bias=tensor("cols"), eps=EPSILONS, sizes=SOME)
def layer_norm(x, weight, bias, eps=1e-6):
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight + bias


@operation(x=tensor("... cols"), eps=EPSILONS, sizes=SOME)
def l2_norm(x, eps=1e-6):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@operation(gate=tensor("... cols"), up=tensor("... cols"))
def swiglu(gate, up):
    return F.silu(gate) * up


@operation(gate=tensor("... cols"), up=tensor("... cols"))
def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


@operation(x=tensor("... cols"))
def silu(x):
    return F.silu(x)


@operation(x=tensor("... cols"))
def log_sigmoid(x):
    return F.logsigmoid(x)


@operation(x=tensor("... cols"))
def squared_relu(x):
    return F.relu(x).square()


@operation(x=tensor("... cols"))
def mish(x):
    return x * torch.tanh(F.softplus(x))


@operation(x=tensor("... cols"))
def hard_swish(x):
    return F.hardswish(x)


@operation(x=tensor("... cols"), alpha=tensor("one"), gamma=tensor("cols"), beta=tensor("cols"), sizes={"one": 1})
def dynamic_tanh(x, alpha, gamma, beta):
    return gamma * torch.tanh(alpha * x) + beta


def negative_log_likelihood(logits, target):
    """Return the logarithm of the sum of exponentials minus the target's logit.

    Where a row's largest logit is infinite it is NaN, and so is its gradient, as torch.nn.functional.cross_entropy's.
    """
    one = 1 + 0 * logits.amax(-1).detach()
    return one * (logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0])


@operation(logits=tensor("rows cols"), target=tensor("rows", dtype="int64", high="cols"), sizes=SOME)
def cross_entropy_rows(logits, target):
    return negative_log_likelihood(logits, target)


@operation(
    logits=tensor("rows cols"), target=tensor("rows", dtype="int64", high="cols"), sizes={"rows": (1, None)} | SOME
)
def cross_entropy_mean(logits, target):
    return negative_log_likelihood(logits, target).mean()


@operation(
    p=tensor("rows cols", kind="probabilities"), q=tensor("rows cols", kind="probabilities", gradient=False), sizes=SOME
)
def total_variation(p, q):
    return 0.5 * (p - q).abs()


@operation(log_p=tensor("rows cols"), log_q=tensor("rows cols", gradient=False), sizes=SOME)
def kl_divergence(log_p, log_q):
    return log_q.exp() * (log_q - log_p)


def parts(boxes1, boxes2):
    """Return intersection, union, width and height of the enclosing box."""
    low, high = torch.maximum(boxes1[:, :2], boxes2[:, :2]), torch.minimum(boxes1[:, 2:], boxes2[:, 2:])
    size1, size2 = boxes1[:, 2:] - boxes1[:, :2], boxes2[:, 2:] - boxes2[:, :2]
    overlap = (high - low).clamp(min=0)
    intersection = overlap[:, 0] * overlap[:, 1]
    union = size1[:, 0] * size1[:, 1] + size2[:, 0] * size2[:, 1] - intersection
    hull = torch.maximum(boxes1[:, 2:], boxes2[:, 2:]) - torch.minimum(boxes1[:, :2], boxes2[:, :2])
    return intersection, union, hull


@operation(**pair_of_boxes(eps=values(1e-7, 1e-2)))
def giou_loss(boxes1, boxes2, eps=1e-7):
    intersection, union, hull = parts(boxes1, boxes2)
    area = hull[:, 0] * hull[:, 1]
    return 1 - (intersection / (union + eps) - (area - union) / (area + eps))


def distance(boxes1, boxes2):
    """Return the squared distance of the centres."""
    apart = (boxes1[:, :2] + boxes1[:, 2:] - boxes2[:, :2] - boxes2[:, 2:]) / 2
    return apart[:, 0] * apart[:, 0] + apart[:, 1] * apart[:, 1]


@operation(**pair_of_boxes(eps=values(1e-7, 1e-2)))
def diou_loss(boxes1, boxes2, eps=1e-7):
    intersection, union, hull = parts(boxes1, boxes2)
    diagonal = hull[:, 0] * hull[:, 0] + hull[:, 1] * hull[:, 1] + eps
    return 1 - intersection / (union + eps) + distance(boxes1, boxes2) / diagonal


@operation(**pair_of_boxes(eps=values(1e-7, 1e-2)))
def ciou_loss(boxes1, boxes2, eps=1e-7):
    intersection, union, hull = parts(boxes1, boxes2)
    iou = intersection / (union + eps)
    diagonal = hull[:, 0] * hull[:, 0] + hull[:, 1] * hull[:, 1] + eps
    size1, size2 = boxes1[:, 2:] - boxes1[:, :2], boxes2[:, 2:] - boxes2[:, :2]
    angle = torch.atan(size2[:, 0] / size2[:, 1]) - torch.atan(size1[:, 0] / size1[:, 1])
    ratio = 4 / torch.pi**2 * angle * angle
    return 1 - iou + distance(boxes1, boxes2) / diagonal + (ratio / (1 - iou + ratio + eps)).detach() * ratio


@operation(logits=tensor("... cols"), targets=tensor("... cols", kind="unit", gradient=False))
def focal_loss(logits, targets):
    chosen = torch.sigmoid(logits)
    right = chosen * targets + (1 - chosen) * (1 - targets)
    losses = -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits))
    return (0.25 * targets + 0.75 * (1 - targets)) * losses * (1 - right).square()


@operation(x=tensor("... cols"), target=tensor("... cols"), beta=values(1.0, 0.125))
def smooth_l1(x, target, beta=1.0):
    apart = (x - target).abs()
    return torch.where(apart < beta, 0.5 * apart * apart / beta, apart - 0.5 * beta)


@operation(angles=tensor("seq dim", gradient=False), x=tensor("... seq dim"), sizes={"dim": range(2, 65, 2)})
def rotary_embedding(angles, x):
    halves = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-halves[..., 1], halves[..., 0]], -1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()
