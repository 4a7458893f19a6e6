"""Train a small transformer, replace its kernels, and compare the loss curves and the speed.

Each run trains the same model on the same text, with the kernels of one backend or with single ones replaced. The
script generates the text and needs no network. It reports the loss curves, their distances from a run in float64, the
distance that rounding alone explains, and tokens per second.

    python docs/examples/train.py
    python docs/examples/train.py --replace swiglu=triton
    python docs/examples/train.py --device cuda --size large --backend all --replace each=triton --out curves.json
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Curve = Sequence[float] | np.ndarray
VOCABULARY = 256  # a token is a byte
IGNORED = -100  # marks the last token of a sequence, which has no next one
WARM_UP = 0.25  # the share of the steps that are not timed
REORDERED = 8  # runs that show what rounding alone does; an even number, for `chance`
# A right kernel is accused in one of a million comparisons.
LEAST_CHANCE = 1e-6


@dataclass(frozen=True)
class Size:
    """The sizes of the model and its batches, and Adam's parameters.

    Attributes:
        tokens: of a batch; its last sequence is truncated to fit.
        longest: the tokens of the longest sequence.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    tokens: int
    longest: int
    steps: int
    dtype: str
    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def head_size(self) -> int:
        """The columns of a head."""
        return self.width // self.heads

    @property
    def adam(self) -> dict[str, float]:
        """The parameters of Adam, by the names of the operation."""
        return {name: getattr(self, name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}


SIZES = {
    "tiny": Size(2, 32, 4, 2, 48, 64, 24, 200, "float32", 5e-3),
    "large": Size(8, 1024, 8, 8, 2816, 16384, 512, 40, "bfloat16", 1e-3),
}


# ---- the operations in torch, with the names and signatures that they have in this library


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    residual_out = x + residual
    return rms_norm(residual_out, weight, eps), residual_out


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    c, s = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, causal: bool, longest: int
) -> Tensor:
    """Pad the sequences to the longest, for torch's scaled dot product attention."""
    place = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(q_offsets, place, right=True) - 1
    rows, count = sequence * longest + place - q_offsets[sequence], len(q_offsets) - 1
    padded = (x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, rows, x) for x in (q, k, v))
    by_head = (x.unflatten(0, (count, longest)).transpose(1, 2) for x in padded)
    attended = F.scaled_dot_product_attention(*by_head, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, rows)


def varlen(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, causal: bool, longest: int) -> Tensor:
    """Call torch's attention for packed sequences, which needs half types and a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    group, offsets = q.shape[1] // k.shape[1], (q_offsets.int(), k_offsets.int())
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return varlen_attn(q, k, v, *offsets, longest, longest, window_size=(-1, 0 if causal else -1))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=ignore_index)


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def operations_of_torch(size: Size) -> dict[str, Any]:
    """Return each operation; None for adam stands for `torch.optim.AdamW`."""
    of_torch = (add_rms_norm, cross_entropy, embedding, rms_norm, rope, swiglu)
    padded = functools.partial(attention, longest=size.longest)
    return {"adam": None, "attention": padded, **{each.__name__: each for each in of_torch}}


NAMES = ("adam", "add_rms_norm", "attention", "cross_entropy", "embedding", "rms_norm", "rope", "swiglu")


# ---- text


def sentences(rng: np.random.Generator) -> Iterator[str]:
    """Yield sentences of a small grammar and sums, endlessly."""
    things, deeds, kinds = ("cat", "dog", "owl", "fox"), ("sees", "likes", "finds"), ("red", "old", "big")
    while True:
        a, b, c, d, e = (int(n) for n in rng.integers(0, 12, 5))
        yield f"{a}+{b}={a + b}. "
        yield f"the {kinds[a % 3]} {things[b % 4]} {deeds[c % 3]} the {kinds[d % 3]} {things[e % 4]}. "


@dataclass
class Batch:
    """Packed sequences: tokens, places in their sequence and next tokens ``[tokens]``, offsets ``[sequences + 1]``."""

    tokens: Tensor
    positions: Tensor
    target: Tensor
    offsets: Tensor

    def to(self, device: str) -> "Batch":
        """Return the batch on a device."""
        return Batch(*(each.to(device) for each in (self.tokens, self.positions, self.target, self.offsets)))


def pack(sequences: Sequence[np.ndarray], count: int) -> Batch:
    """Pack sequences one after another, with empty ones up to `count`, so that all batches have the same shapes."""
    counts = [len(each) for each in sequences] + [0] * (count - len(sequences))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(n) for n in counts])
    target = np.concatenate([np.append(each[1:], IGNORED) for each in sequences])
    arrays = np.concatenate(sequences), positions, target, offsets
    return Batch(*(torch.from_numpy(each.astype(np.int64)) for each in arrays))


@functools.cache
def texts(size: Size) -> list[list[np.ndarray]]:
    """Return the sequences of bytes of each step's batch, with lengths from an eighth of the longest to the longest."""
    rng = np.random.default_rng(5)
    letters = itertools.chain.from_iterable(sentences(rng))
    batches = []
    for _ in range(size.steps):
        remaining, batch = size.tokens, []
        while remaining:
            length = min(remaining, int(rng.integers(size.longest // 8, size.longest + 1)))
            text = "".join(itertools.islice(letters, length)).encode()
            batch.append(np.frombuffer(text, dtype=np.uint8))
            remaining -= length
        batches.append(batch)
    return batches


# ---- the model: norms before each part, rotary positions, grouped heads, and gated layers, as in Llama

# The axes of each weight. The names of a layer's weights end with its number.
OF_A_LAYER = {
    "norm": ("width",),
    "q": ("width", "queries"),
    "k": ("width", "keys"),
    "v": ("width", "values"),
    "out": ("attended", "width"),
    "gated_norm": ("width",),
    "gate": ("width", "hidden"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
}
OF_ALL = {"embedding": ("vocabulary", "width"), "last_norm": ("width",), "head": ("width", "vocabulary")}
Order = Mapping[str, np.ndarray]


def axes_of_weights(size: Size) -> dict[str, tuple[str, ...]]:
    layers = {f"{name}_{layer}": axes for layer in range(size.layers) for name, axes in OF_A_LAYER.items()}
    return {**OF_ALL, **layers}


def identity(size: Size) -> dict[str, np.ndarray]:
    """Return the identity order of every axis of the weights, of the pairs of rope, and of the sequences."""
    keys, queries = size.kv_heads * size.head_size, size.width
    extents = {"vocabulary": VOCABULARY, "width": size.width, "hidden": size.hidden, "queries": queries, "keys": keys}
    extents |= {"values": keys, "attended": queries, "pairs": size.head_size // 2, "sequences": most_sequences(size)}
    return {axis: np.arange(extent) for axis, extent in extents.items()}


def reordered(size: Size, seed: int) -> dict[str, np.ndarray]:
    """Return an order of all axes by which the model computes the same function, with its sums in other orders.

    Channels, hidden units, bytes and sequences go anywhere. Heads go with their keys and values, the two columns of a
    pair of rope go together, and v's columns go with those of the attended.
    """
    rng = np.random.default_rng(seed)
    order = {axis: rng.permutation(places) for axis, places in identity(size).items()}
    group, columns = size.heads // size.kv_heads, size.head_size
    kv_heads, pairs, of_v = rng.permutation(size.kv_heads), order["pairs"], rng.permutation(columns)
    heads = (kv_heads[:, None] * group + rng.permutation(group)).ravel()
    of_qk = np.concatenate([pairs, pairs + columns // 2])
    for axis, by_head, by_column in (
        ("queries", heads, of_qk),
        ("keys", kv_heads, of_qk),
        ("values", kv_heads, of_v),
        ("attended", heads, of_v),
    ):
        order[axis] = (by_head[:, None] * columns + by_column).ravel()
    return order


@functools.cache
def initial_weights(size: Size) -> dict[str, Tensor]:
    """Return weights in float32: ones for norms, else normal numbers of the deviation ``1 / sqrt(rows)``."""
    extents, generator = identity(size), torch.Generator().manual_seed(13)
    weights = {}
    for name, axes in axes_of_weights(size).items():
        shape = [len(extents[axis]) for axis in axes]
        weights[name] = (
            torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) / math.sqrt(shape[0])
        )
    return weights


def loss_of(
    operations: Mapping[str, Any],
    size: Size,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor],
    batch: Batch,
    turn: Any,
) -> Tensor:
    """Return the mean loss of the next tokens, a scalar of float32 or wider. `turn`: rope's cos and sin."""
    norm, add_norm = operations["rms_norm"], operations["add_rms_norm"]
    w = {name: weight.to(dtype) for name, weight in weights.items()}
    residual = operations["embedding"](w["embedding"], batch.tokens)
    x = norm(residual, w["norm_0"])
    for layer in range(size.layers):
        q, k, v = ((x @ w[f"{each}_{layer}"]).unflatten(1, (-1, size.head_size)) for each in "qkv")
        q, k = (operations["rope"](each, *turn, batch.positions) for each in (q, k))
        attended = operations["attention"](q, k, v, batch.offsets, batch.offsets, True)
        x, residual = add_norm(attended.flatten(1) @ w[f"out_{layer}"], residual, w[f"gated_norm_{layer}"])
        gated = operations["swiglu"](x @ w[f"gate_{layer}"], x @ w[f"up_{layer}"])
        following = f"norm_{layer + 1}" if layer + 1 < size.layers else "last_norm"
        x, residual = add_norm(gated @ w[f"down_{layer}"], residual, w[following])
    logits = x @ w["head"]
    return operations["cross_entropy"](logits.to(torch.promote_types(dtype, torch.float32)), batch.target, IGNORED)


# ---- curves


class Comparison(NamedTuple):
    """The distance of a curve from the exact one, and the probability that rounding alone causes it."""

    distance: float
    chance: float

    @property
    def same(self) -> bool:
        """Whether rounding explains the distance."""
        return self.chance >= LEAST_CHANCE


def compare(curve: Curve, exact: Curve, others: Sequence[Curve]) -> Comparison:
    """Compare a curve with the exact one, in units of the deviations of runs with other orders of sums.

    At each step the runs show the deviation that rounding causes. The distance of a curve is the root of the mean
    square of its own deviations in that unit, so that early steps, with little rounding behind them, count as much as
    late ones.

    Args:
        curve: the losses of the run in question, ``[steps]``.
        exact: the losses of a run in float64. Steps that the curve lacks are left out, as in `others`.
        others: the losses of an even number of runs in the dtype of the run in question.
    """
    steps = len(curve)
    own, reference, runs = np.array(curve), np.array(exact)[:steps], np.array(others)[:, :steps]
    # A loss is stored in float32, and a few runs may all hit the same number.
    stored = np.finfo(np.float32).eps / 2 * reference
    unit = np.sqrt(((runs - reference) ** 2).mean(0) + stored**2)
    distance = float(np.sqrt((((own - reference) / unit) ** 2).mean()))
    return Comparison(distance, chance(distance, len(runs)))


def chance(far: float, runs: int) -> float:
    """Return the probability that rounding alone takes a curve so far from the exact one.

    A deviation is a sum of very many small ones, and so normal. In units of the deviation that `runs` others show, it
    has Student's t distribution with as many degrees of freedom. A mean over steps that do not rise and fall together
    is less spread than that. For an even number of degrees the probability is a finite sum: Abramowitz, Stegun,
    Handbook of Mathematical Functions, 26.7.4.
    """
    if runs < 2 or runs % 2:
        raise ValueError(f"runs must be an even number from 2 on, not {runs}")
    angle = math.atan2(far, math.sqrt(runs))
    term = total = 1.0
    for k in range(1, runs // 2):
        term *= (2 * k - 1) / (2 * k) * math.cos(angle) ** 2
        total += term
    return max(0.0, 1 - math.sin(angle) * total)  # of NaN too


# ---- training


@dataclass
class Run:
    """One training.

    Attributes:
        kernels: the backend of each operation.
        dtype: of the arithmetic, by its name.
        seed: of the order of sums, see `reordered`; None for the identity.
        losses: before each step.
        seconds: of a step, a median.
        error: what ended it.
    """

    name: str
    kernels: dict[str, str]
    dtype: str
    seed: int | None = None
    compiled: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: float | None = None
    error: str | None = None
    comparison: Comparison | None = None


def most_sequences(size: Size) -> int:
    return max(map(len, texts(size)))


def batch_of(size: Size, step: int, order: Order) -> Batch:
    """Return a step's batch, with its sequences and the numbers of its bytes reordered."""
    sequences, number = texts(size)[step], np.argsort(order["vocabulary"])
    chosen = [number[sequences[i]] for i in order["sequences"] if i < len(sequences)]
    return pack(chosen, most_sequences(size))


def tables(size: Size, order: Order) -> tuple[Tensor, Tensor]:
    """Return rope's cos and sin in float64, ``[longest, pairs]``."""
    rates = 10000.0 ** (-order["pairs"] / (size.head_size // 2))
    angles = torch.from_numpy(np.arange(size.longest)[:, None] * rates)
    return angles.cos(), angles.sin()


def optimizer(kernel: Any, weights: Sequence[Tensor], size: Size) -> Callable[[], object]:
    """Return the function that takes a step of Adam: torch's, or a kernel's."""
    if kernel is None:
        rates = {"lr": size.lr, "betas": (size.beta1, size.beta2), "eps": size.eps, "weight_decay": size.weight_decay}
        return torch.optim.AdamW(weights, **rates, fused=weights[0].is_cuda).step
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    steps = itertools.count(1)

    def step() -> None:
        now = next(steps)
        for weight, of_weight in zip(weights, moments):
            kernel(weight.detach(), weight.grad, *of_weight, **size.adam, step=now)

    return step


def clock(device: str) -> Callable[[], Any]:
    """Return a function that records the time: on the GPU without waiting, or on the host."""

    def event() -> torch.cuda.Event:
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        return now

    return event if device == "cuda" else time.perf_counter


def seconds_of_a_step(times: Sequence[Any]) -> float:
    """Return the median time between records of `clock`, without the warm-up."""
    pairs = list(itertools.pairwise(times))[int(len(times) * WARM_UP) :]
    if isinstance(times[0], float):
        return statistics.median(after - before for before, after in pairs)
    return statistics.median(before.elapsed_time(after) / 1000 for before, after in pairs)


def train(
    operations: Mapping[str, Any],
    size: Size,
    device: str,
    dtype: torch.dtype,
    order: Order,
    compiled: bool = False,
    tell: Callable[[int, Tensor], None] = lambda step, loss: None,
) -> tuple[list[float], float]:
    """Train from the same weights on the same batches.

    Args:
        operations: what computes each operation.
        size: what is trained, and for how many steps.
        device: cpu or cuda.
        dtype: of the arithmetic. Weights and Adam's states are float32, or float64 if this is.
        order: of all axes, see `identity` and `reordered`.
        compiled: whether torch.compile compiles the loss and its gradients.
        tell: called with each step and its loss, which is still on the device.

    Returns:
        The loss before each step, and the seconds of a step.
    """
    wide = torch.promote_types(dtype, torch.float32)
    weights = {}
    for name, axes in axes_of_weights(size).items():
        weight = initial_weights(size)[name].to(device, wide)
        for axis, along in enumerate(axes):
            weight = weight.index_select(axis, torch.from_numpy(order[along]).to(device))
        weights[name] = weight.requires_grad_()
    turn = tuple(table.to(device, dtype) for table in tables(size, order))
    batches = [batch_of(size, step, order).to(device) for step in range(size.steps)]
    loss_function = functools.partial(loss_of, operations, size, dtype)
    if compiled:
        loss_function = torch.compile(loss_function, fullgraph=True)
    take_step, note = optimizer(operations["adam"], list(weights.values()), size), clock(device)
    losses, times = [], [note()]
    for step, batch in enumerate(batches):
        for weight in weights.values():
            weight.grad = None
        loss = loss_function(weights, batch, turn)
        loss.backward()
        take_step()
        losses.append(loss.detach())
        times.append(note())
        tell(step, losses[-1])
    curve = torch.stack(losses).double().tolist()
    return curve, seconds_of_a_step(times)


# ---- the command


def load_operations(kernels: Mapping[str, str], size: Size, dtype: str, device: str) -> dict[str, Any]:
    """Return each operation from its backend.

    Raises:
        NotImplementedError: a backend does not support an operation in the dtype or on the device.
    """
    loaded = operations_of_torch(size)
    for name, backend in kernels.items():
        if backend == "varlen":
            loaded[name] = functools.partial(varlen, longest=size.longest)
        elif backend != "torch":
            # Import late: Triton reads TRITON_INTERPRET when it is imported.
            from fourfold.backends import load, unsupported

            required = "float32" if name == "adam" else dtype
            if reason := unsupported(name, backend, required, device):
                raise NotImplementedError(f"{name} on {backend}: {reason}")
            loaded[name] = load(name, backend)
    return loaded


# The choices of --backend: the backend of all operations, exceptions, and whether torch.compile compiles the rest.
BACKENDS: Mapping[str, tuple[str, Mapping[str, str], bool]] = {
    "torch": ("torch", {}, False),
    "varlen": ("torch", {"attention": "varlen"}, False),
    "triton": ("triton", {}, False),
    "cuda": ("cuda", {}, False),
    "compile": ("torch", {}, True),
    "compile+varlen": ("torch", {"attention": "varlen"}, True),
}
ON_CPU = ("torch", "triton", "cuda")


def plan(backends: Sequence[str], replacements: Sequence[str], device: str, dtype: str) -> list[Run]:
    """Return the requested runs: torch first, then other backends, then replacements in torch."""
    every = ON_CPU if device == "cpu" else [name for name in BACKENDS if "varlen" not in name or dtype == "bfloat16"]
    runs = []
    for name in every if "all" in backends else dict.fromkeys(["torch", *backends]):
        backend, replaced, compiled = BACKENDS[name]
        runs.append(Run(name, {**dict.fromkeys(NAMES, backend), **replaced}, dtype, compiled=compiled))
    for text in replacements:
        changed = dict(pair.split("=") for pair in text.split(","))
        each = changed.pop("each", None)
        for replaced in [{name: each, **changed} for name in NAMES] if each else [changed]:
            name = ", ".join(f"{name}={backend}" for name, backend in replaced.items())
            runs.append(Run(name, {**dict.fromkeys(NAMES, "torch"), **replaced}, dtype))
    return runs


def references(dtype: str) -> list[Run]:
    """Return the runs of torch to compare with: one in float64, and those with other orders of sums."""
    of_torch = dict.fromkeys(NAMES, "torch")
    return [
        Run("float64", of_torch, "float64"),
        *(Run(f"reordered {seed}", of_torch, dtype, seed) for seed in range(REORDERED)),
    ]


def replacement(text: str) -> str:
    """Check an argument of --replace."""
    for pair in text.split(","):
        name, _, backend = pair.partition("=")
        if name not in (*NAMES, "each") or backend not in ("triton", "cuda"):
            raise argparse.ArgumentTypeError(
                f"expected OPERATION=triton or OPERATION=cuda, of {', '.join(NAMES)} or each, got {pair!r}"
            )
    return text


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is a GPU")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model and its batches")
    parser.add_argument(
        "--backend",
        choices=[*BACKENDS, "all"],
        action="append",
        help="of all kernels; may be repeated; torch is always there; varlen is torch with its attention of packed "
        "sequences, of bfloat16 on a GPU; compile is torch.compile of torch; by default all that the device has",
    )
    parser.add_argument(
        "--replace",
        type=replacement,
        action="append",
        default=[],
        metavar="OPERATION=BACKEND[,...]",
        help="replace these kernels in the run of torch; may be repeated; each=BACKEND replaces one after the other",
    )
    parser.add_argument("--steps", type=int, help="of the training; by default as many as the size has")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="by default as the size has it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the curves and the times as JSON")
    options = parser.parse_args(words)
    if options.steps is not None and options.steps < 2:
        parser.error(f"argument --steps: expected 2 or more, got {options.steps}")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.backend = options.backend or ([] if options.replace else ["all"])
    return options


def attempt(run: Run, size: Size, device: str) -> None:
    """Carry out a run; store its exception, so that other runs continue."""
    every = max(1, size.steps // 10)

    def tell(step: int, loss: Tensor) -> None:
        # On a GPU, reading the loss would wait for it and distort the times.
        if device == "cpu" and run.seed is None and step % every == 0:
            print(f"{run.name}: step {step}, loss {float(loss):.4f}", flush=True)

    try:
        loaded, dtype = load_operations(run.kernels, size, run.dtype, device), getattr(torch, run.dtype)
        order = identity(size) if run.seed is None else reordered(size, run.seed)
        run.losses, run.seconds = train(loaded, size, device, dtype, order, run.compiled, tell)
        print(f"{run.name}: the last loss is {run.losses[-1]:.4f}, a step takes {run.seconds * 1e3:.3g} ms", flush=True)
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"
        print(f"{run.name}: {run.error}", flush=True)


def report(runs: Sequence[Run], exact: Run, size: Size) -> str:
    """Return two tables in Markdown: the runs, and their curves beside the one in float64."""
    lines = [
        "| kernels | last loss | distance | chance | curve | tokens/s | of torch's |",
        "|---|---|---|---|---|---|---|",
    ]
    base = runs[0].seconds
    for run in runs:
        far, probability, verdict = "", "", run.error or "not compared"
        if run.comparison:
            far, probability = f"{run.comparison.distance:.2f}", f"{run.comparison.chance:.2g}"
            verdict = "the same" if run.comparison.same else "not the same"
        last = f"{run.losses[-1]:.6f}" if run.losses else ""
        rate = f"{size.tokens / run.seconds:,.0f}" if run.seconds else ""
        ratio = f"{base / run.seconds:.2f}" if run.seconds and base else ""
        lines.append(f"| {' | '.join((run.name, last, far, probability, verdict, rate, ratio))} |")
    shown = [run for run in (exact, *runs) if run.losses]
    lines += ["", f"| step | {' | '.join(run.name for run in shown)} |", "|---" * (1 + len(shown)) + "|"]
    for step in sorted({*range(0, size.steps, max(1, size.steps // 10)), size.steps - 1}):
        lines.append(f"| {step} | {' | '.join(f'{run.losses[step]:.6f}' for run in shown)} |")
    return "\n".join(lines)


def as_json(run: Run, size: Size) -> dict[str, Any]:
    """Return a run for JSON, which has only finite numbers."""
    record = asdict(run)
    record["tokens_per_second"] = size.tokens / run.seconds if run.seconds else None
    record["losses"] = [loss if math.isfinite(loss) else None for loss in run.losses]
    if run.comparison:
        distance, probability = run.comparison
        far = distance if math.isfinite(distance) else None
        record["comparison"] = {"distance": far, "chance": probability, "same": run.comparison.same}
    return record


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a curve is not the same, or a run failed."""
    options = arguments(words)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
        torch.set_num_threads(1)  # for so small a model more threads mean waiting
    changes = {name: getattr(options, name) for name in ("steps", "dtype") if getattr(options, name) is not None}
    size = Size(**{**asdict(SIZES[options.size]), **changes})
    runs, (exact, *others) = plan(options.backend, options.replace, options.device, size.dtype), references(size.dtype)
    for run in (*runs, exact, *others):
        attempt(run, size, options.device)
    for run in runs:
        if run.losses and all(other.losses for other in (exact, *others)):
            run.comparison = compare(run.losses, exact.losses, [other.losses for other in others])
    print(f"\n{report(runs, exact, size)}")
    if options.device == "cpu":
        print("\nOn a CPU kernels are interpreted or emulated: their times say nothing about a GPU.")
    if options.out:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        record = {"size": asdict(size), "device": machine, "torch": torch.__version__}
        record["runs"] = [as_json(run, size) for run in (*runs, exact, *others)]
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(run.comparison and run.comparison.same for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
