"""Operations that are declared as a user does, without a record."""

import torch

from fourfold import lengths, offsets, operation, tensor, values

IGNORED = -100


@operation(x=tensor("... cols"), weight=tensor("cols"), eps=values(1e-6, 1e-5), tried=False)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@operation(
    logits=tensor("rows classes"),
    target=tensor("rows", dtype=["int64", "int32"], high="classes", also=[IGNORED]),
    reduction=values("sum", "mean"),
    sizes={"classes": (1, None)},
    tried=False,
)
def cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    counted = target != IGNORED
    picked = logits.gather(-1, target.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    losses = torch.where(counted, logits.logsumexp(-1) - picked, 0.0)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


@operation(
    q=tensor("batch heads seq dim"),
    k=tensor("batch heads keys dim"),
    v=tensor("batch heads keys dim"),
    sizes={"dim": range(8, 129, 8), "keys": (1, None)},
    tried=False,
)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


@operation(ids=tensor("...", dtype="int64", high="vocab"), table=tensor("vocab dim"), tried=False)
def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, table.shape[1])


@operation(x=tensor("... cols"), mask=tensor("... cols", dtype="bool"), bias=tensor("cols", optional=True), tried=False)
def masked_softmax(x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    biased = x if bias is None else x + bias
    return torch.softmax(biased.masked_fill(~mask, -torch.inf), -1)


@operation(
    x=tensor("tokens dim"),
    counts=lengths("batch", total="tokens"),
    starts=offsets("batch", total="tokens", dtype=["int64", "int32"]),
    tried=False,
)
def ragged_mean(x: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    sums = torch.cat([torch.zeros_like(x[:1]) if len(x) else x.new_zeros(1, x.shape[1]), x.cumsum(0)])
    return (sums[starts[1:].long()] - sums[starts[:-1].long()]) / counts.unsqueeze(-1)


@operation(a=tensor("m k"), b=tensor("k n"), tried=False)
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


DECLARED = {
    made.name: made for made in (rms_norm, cross_entropy, attention, embedding, masked_softmax, ragged_mean, matmul)
}
