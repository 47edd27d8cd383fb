"""How the statistics are stored between two steps: in full, or in bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def check_moment_dtype(moment_dtype: jax.typing.DTypeLike | None) -> jnp.dtype | None:
    """The dtype as jax knows it; refuse what the statistics cannot be kept in."""
    if moment_dtype is None:
        return None
    dtype = jnp.dtype(moment_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"invalid moment_dtype {dtype.name!r}: the range of the squares of gradients needs 'bfloat16' (half the "
            "memory), 'float32', or None for float32 or wider, as the parameters are"
        )
    return jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))


def store(x: jax.Array, dtype: jnp.dtype, count: jax.Array) -> jax.Array:
    """A number in the dtype in which it is kept; to bfloat16, rounded stochastically.

    To the nearest would not do: a mean that moves by a thousandth of the difference each step would
    not move at all in a format of two to three digits.
    """
    if dtype == jnp.bfloat16:
        return round_stochastically(x, count)
    return x.astype(dtype)


def round_stochastically(x: jax.Array, count: jax.Array) -> jax.Array:
    """Bfloat16, rounded away from zero with the probability of the part that is cut off.

    The random bits are a hash of the number itself and of the step. So there is no key in the state
    and none to be given; a resumed run rounds as an unbroken one, and a shard as the whole.

    Args:
      x: finite numbers.
      count: the step; the same number is rounded another way at another step.

    Returns:
      An array of bfloat16.

    Examples:
      >>> count = jnp.arange(4000)
      >>> rounded = round_stochastically(jnp.full(4000, 1.001), count)  # between 1 and 1 + 2**-7
      >>> print(jnp.unique(rounded), f"{rounded.astype(jnp.float32).mean():.3f}")
      [1 1.00781] 1.001
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = _hash(bits ^ _hash(count.astype(jnp.uint32))) >> 16
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)


def _hash(x: jax.Array) -> jax.Array:
    """Scatter the bits of an integer over all of it (the 32-bit finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
