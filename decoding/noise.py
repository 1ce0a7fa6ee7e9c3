"""Counter-based Gumbel noise: a pure function of (seed, path of the beam, token).

There is no generator state. The draft, the target and the reference see the same noise for the same continuation, in
any order of evaluation and on any device, which is what couples them (design §2). Beams are identified by a 62-bit hash
of the tokens generated so far; a token's noise mixes that hash with the token id in three multiply-xorshift rounds.
All arithmetic is on int64 with operands below 2**32 and multipliers below 2**31, so nothing overflows.
"""

from __future__ import annotations

import torch

from .host import reads_are_free

_MASK = 0xFFFFFFFF
_ROUND_1 = 0x7FEB352D  # the constants of the "lowbias32" and murmur3 mixers, cut to 31 bits where they were longer
_ROUND_2 = 0x46CA6B35
_ROUND_3 = 0x2C1B3C6D
_TOKEN = 0x1E3779B9
_PRIVATE = 1 << 30


def _mix(words: torch.Tensor, multiplier: int, shift: int) -> torch.Tensor:
    """One multiply-xorshift round on int64 words below 2**32. Writes to a new tensor."""
    mixed = (words * multiplier) & _MASK
    return mixed.bitwise_xor_(mixed >> shift)


def _hash(high: torch.Tensor, low: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """32-bit hash of ``words`` keyed by the pair (high, low); the shapes broadcast."""
    mixed = _mix(words ^ high, _ROUND_1, 15)
    mixed = _mix(mixed ^ low, _ROUND_2, 13)
    return _mix(mixed, _ROUND_3, 16)


def root_path(seed: int, stream: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Path hash of an empty continuation.

    Args:
        seed: of the whole call, any integer.
        stream: tells apart the prompts of one call, so that equal prompts get independent noise.
        device: where the hash lives.

    Returns:
        int64 tensor of shape (1,).
    """
    words = torch.tensor([[seed & _MASK, (seed >> 32) & _MASK, stream & _MASK]], dtype=torch.int64, device=device)
    path = torch.zeros(1, dtype=torch.int64, device=device)
    for column in range(words.shape[1]):
        path = extend_path(path, words[:, column])
    return path


def extend_path(paths_L: torch.Tensor, tokens_L: torch.Tensor) -> torch.Tensor:
    """Path hashes of beams that each took one more token.

    Args:
        paths_L: int64 (L,), hashes of the parents.
        tokens_L: int64 (L,), the tokens taken.

    Returns:
        int64 (L,), hashes of the children.
    """
    high, low = paths_L >> 31, paths_L & 0x7FFFFFFF
    words = (tokens_L * _TOKEN + 1) & _MASK
    new_high = _hash(high, low, words)
    new_low = _hash(low ^ _ROUND_3, high, words ^ _TOKEN)
    return ((new_high >> 1) << 31) | (new_low >> 1)


def private_path(paths_L: torch.Tensor, number: int) -> torch.Tensor:
    """Hashes beside those of any continuation, for random numbers that are not a token's.

    Args:
        paths_L: int64 (L,), hashes.
        number: tells several uses apart, below 2**30.

    Returns:
        int64 (L,). Token ids lie below 2**30, so no continuation shares them.
    """
    return extend_path(paths_L, torch.full_like(paths_L, _PRIVATE + number))


def gumbel(paths_L: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) noise of every continuation.

    Args:
        paths_L: int64 (L,), path hashes of the beams.
        token_ids: int64 (V,), ids of the tokens (in the target's vocabulary), or (L, V) ids per beam.

    Returns:
        float32 (L, V).
    """
    # The complement of the uniform keeps full relative precision where the noise is large. The clamp cuts the far lower
    # tail (probability 2**-24), where 1 - u would round to zero.
    complement = _bits(paths_L, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return complement.neg_().log1p_().neg_().log_().neg_()


def gumbel_where(paths_L: torch.Tensor, token_ids_V: torch.Tensor, weights_LV: torch.Tensor) -> torch.Tensor:
    """The same noise, for continuations that can be drawn; the others' is never looked at, and may be left out.

    Args:
        paths_L: int64 (L,), path hashes of the beams.
        token_ids_V: int64 (V,), ids of the tokens.
        weights_LV: float32 (L, V), log-probabilities; -inf excludes a continuation.

    Returns:
        float32 (L, V), `gumbel`, or 0 at excluded continuations where counting them costs no wait.
    """
    if reads_are_free(weights_LV.device):  # after top_k = 50 a hash of 50 tokens a beam, not of the vocabulary
        kept = (weights_LV > float("-inf")).view(-1).nonzero().squeeze(1)
        if kept.shape[0] < weights_LV.numel() // 4:
            rows = kept.div(token_ids_V.shape[0], rounding_mode="floor")
            tokens = token_ids_V[kept - rows * token_ids_V.shape[0]]
            noise = torch.zeros(weights_LV.shape, dtype=torch.float32, device=weights_LV.device)
            noise.view(-1)[kept] = gumbel(paths_L[rows], tokens.unsqueeze(1)).squeeze(1)
            return noise
    return gumbel(paths_L, token_ids_V)


def uniform(paths_L: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Uniform(0, 1) numbers, in steps of 2**-32 and never 0 or 1.

    Args:
        paths_L: int64 (L,), hashes.
        indices: int64 (N,), which numbers of each hash.

    Returns:
        float64 (L, N).
    """
    return _bits(paths_L, indices).to(torch.float64).add_(0.5).mul_(2.0**-32)


def _bits(paths_L: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """32 random bits for every (path, word): int64 (L, N)."""
    high, low = (paths_L >> 31).unsqueeze(-1), (paths_L & 0x7FFFFFFF).unsqueeze(-1)
    return _hash(high, low, words)
