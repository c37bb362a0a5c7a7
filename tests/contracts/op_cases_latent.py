"""Cases of latent attention for the op table's contract."""

from random import Random

from op_case import Case, nbytes

from ridgeline.program.ops.latent import CacheWriteAttrs, LatentAttentionAttrs


def latent_write(rng: Random) -> Case:
    inputs = [("T", rng.randint(1, 7)), ("T", 1, 2 * rng.randint(1, 3))]
    return Case(CacheWriteAttrs(0), inputs, moved=lambda inputs, outputs, weights: 2 * nbytes(inputs))


def latent_attention(rng: Random) -> Case:
    heads, latent, rope = rng.randint(1, 3), rng.randint(1, 8), 2 * rng.randint(1, 2)
    nope, value = rng.randint(1, 4), rng.randint(1, 4)
    inputs = [("T", heads, nope + rope), ("T", latent), ("T", 1, rope)]
    return Case(LatentAttentionAttrs(0, 0.7), inputs, [(heads * (nope + value), latent)])


CASES = {case.__name__: case for case in (latent_write, latent_attention)}
