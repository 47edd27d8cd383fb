"""How the statistics are stored between steps: at full precision, or in bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def check_moment_dtype(moment_dtype: jax.typing.DTypeLike | None) -> jnp.dtype | None:
    """Return the canonical dtype, or raise if the statistics cannot be stored in it."""
    if moment_dtype is None:
        return None
    dtype = jnp.dtype(moment_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"invalid moment_dtype {dtype.name!r}: squared gradients need the range of 'bfloat16' (half the memory) "
            "or 'float32'; None uses float32, or float64 for float64 parameters"
        )
    return jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))


def store(x: jax.Array, dtype: jnp.dtype, count: jax.Array) -> jax.Array:
    """Convert to the storage dtype, with stochastic rounding for bfloat16.

    Rounding to nearest does not work: a running mean changes by a thousandth of the difference per
    step, and bfloat16 has two to three digits, so every change would be rounded away.
    """
    if dtype == jnp.bfloat16:
        return round_stochastically(x, count)
    return x.astype(dtype)


def round_stochastically(x: jax.Array, count: jax.Array) -> jax.Array:
    """Round to bfloat16 stochastically: away from zero with a probability equal to the truncated fraction.

    The random bits are a hash of the number, the step and the element's index. So no random key is needed. A
    resumed run rounds exactly as an uninterrupted one, a sharded array exactly as the whole one (but in a
    ``shard_map``, where a shard is an array of its own), and equal numbers independently.

    Args:
      x: numbers; NaN stays NaN.
      count: the step; the same number may round differently at another step.

    Returns:
      An array of bfloat16.

    Examples:
      >>> count = jnp.arange(4000)
      >>> rounded = round_stochastically(jnp.full(4000, 1.001), count)  # between 1 and 1 + 2**-7
      >>> print(jnp.unique(rounded), f"{rounded.astype(jnp.float32).mean():.3f}")
      [1 1.00781] 1.001
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = _hash(bits ^ _hash(count.astype(jnp.uint32) + _index(x.shape) * jnp.uint32(0x9E3779B9))) >> 16
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    # The bits of a NaN may be all ones, as on a GPU: adding to them gives zero.
    return jnp.where(jnp.isnan(x), x, lax.bitcast_convert_type(cut, jnp.float32)).astype(jnp.bfloat16)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Each element's index in row-major order, by dimension, so that every device computes its own."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    return index


def _hash(x: jax.Array) -> jax.Array:
    """Mix the bits of an integer (the 32-bit finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
