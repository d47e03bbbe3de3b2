import jax
import jax.numpy as jnp
import numpy as np

from hexllm.ops.gumbel import gumbel_noise, random_bits, row_keys
from hexllm.ops.sampling_reference import noise_reference

SEEDS = np.array([0, 1, 2**32 - 1], np.uint32)
POSITIONS = np.array([0, 5, 8191], np.int32)


def test_bits_are_those_of_jax_random():
    bits = random_bits(row_keys(SEEDS, POSITIONS), jnp.arange(1001)[None])
    for got, seed, position in zip(bits, SEEDS, POSITIONS, strict=True):
        key = jax.random.fold_in(jax.random.key(seed), position)
        np.testing.assert_array_equal(got, jax.random.bits(key, (1001,)))


def test_noise_of_a_token_depends_on_key_and_id_only():
    noise = jax.jit(lambda ids: gumbel_noise(row_keys(SEEDS, POSITIONS), ids))
    whole = np.asarray(noise(jnp.arange(50_001)[None]))
    some = np.random.default_rng(0).integers(0, 50_001, (3, 77)).astype(np.int32)
    np.testing.assert_array_equal(noise(some), np.take_along_axis(whole, some, 1))


def test_noise_equals_the_reference():
    noise = gumbel_noise(row_keys(SEEDS, POSITIONS), jnp.arange(5000)[None])
    for got, seed, position in zip(noise, SEEDS, POSITIONS, strict=True):
        reference = noise_reference(int(seed), int(position), 5000)
        np.testing.assert_allclose(got, reference, rtol=2e-6, atol=2e-6)


def test_noise_is_gumbel():
    noise = np.asarray(
        gumbel_noise(row_keys(SEEDS[1:2], POSITIONS[1:2]), jnp.arange(200_000)[None])
    )
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
