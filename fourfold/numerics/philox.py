"""Random numbers by Philox 4x32-10 from a seed and offsets, as in Triton and in torch's generator on a GPU.

A definition that drops elements out, or rounds them at random, calls these, and so has the bits of a right kernel.

Source: J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import torch

ROUNDS = 10
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
# Triton's factor from 31 bits to [0, 1): the largest float32 with a product below 1.
_TO_UNIT = 4.6566127342e-10


def philox(
    seed: int | torch.Tensor, offsets: torch.Tensor, subsequence: int | torch.Tensor = 0
) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox 4x32-10 for each offset.

    The key is the seed, and the counter consists of the offset in its lower and of the subsequence in its upper half.
    So the words are those of ``tl.randint4x(seed, offsets)``, and those of ``curand4`` after
    ``curand_init(seed, subsequence, 4 * offset)``, in order. torch's generator on a GPU takes the thread's number as
    the subsequence.

    Args:
        seed: an integer of up to 64 bits, or a tensor that is broadcast with the others.
        offsets: integers of any shape. Negative ones of int32 count as of 32 bits, as in Triton.
        subsequence: as the seed.

    Returns:
        four int64 tensors of the broadcast shape, with integers from 0 to 2**32 - 1.

    Raises:
        TypeError: an argument is not an integer or a tensor of integers.
    """
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"offsets must be a tensor of integers, not {offsets!r}")
    wide = {"seed": seed, "offsets": offsets, "subsequence": subsequence}
    low, high = {}, {}
    for name, operand in wide.items():
        if isinstance(operand, torch.Tensor):
            if operand.is_floating_point() or operand.is_complex() or operand.dtype == torch.bool:
                raise TypeError(f"{name} must be a tensor of integers, not of {operand.dtype}")
            number = operand.to(torch.int64)
        elif type(operand) is int:
            signed = (operand + (1 << 63)) % (1 << 64) - (1 << 63)
            number = torch.full((), signed, dtype=torch.int64, device=offsets.device)
        else:
            raise TypeError(f"{name} must be an integer or a tensor of integers, not {operand!r}")
        low[name], high[name] = number & _WORD, (number >> 32) & _WORD
    if offsets.dtype.itemsize < 8:
        high["offsets"] = torch.zeros_like(low["offsets"])
    k0, k1 = low["seed"], high["seed"]
    c0, c1, c2, c3 = torch.broadcast_tensors(low["offsets"], high["offsets"], low["subsequence"], high["subsequence"])
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = (
            _high(_ROUND_B, c2) ^ c1 ^ k0,
            (c2 * _ROUND_B) & _WORD,
            _high(_ROUND_A, c0) ^ c3 ^ k1,
            (c0 * _ROUND_A) & _WORD,
        )
        k0, k1 = (k0 + _KEY_A) & _WORD, (k1 + _KEY_B) & _WORD
    return c0, c1, c2, c3


def rand(seed: int | torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return uniform float32 numbers in [0, 1), the bits of ``tl.rand(seed, offsets)``: see `philox`."""
    word = philox(seed, offsets)[0]
    return torch.where(word > _WORD // 2, _WORD - word, word).to(torch.float32) * _TO_UNIT


def _high(factor: int, word: torch.Tensor) -> torch.Tensor:
    """Return the upper 32 bits of a product of 32-bit words, whose 64 bits would not fit into int64."""
    return ((word >> 16) * factor + (((word & 0xFFFF) * factor) >> 16)) >> 16
