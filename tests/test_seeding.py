"""Random numbers of images: the published generator, the right distributions, by image alone."""

import pytest
import torch
from scipy import stats

from tread_zoo.seeding import (
    ImageGenerator,
    make_image_generator,
    make_image_generators,
    per_image_generator,
)

MASK = 2**64 - 1


def splitmix64(state, count):
    """Return the numbers of SplitMix64 in Python's integers."""
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


def test_uniform_numbers_are_the_top_bits_of_splitmix64():
    keys = [0, 5, -(2**63), 2**63 - 1]
    drawn = ImageGenerator(torch.tensor(keys)).rand(7)
    expected = [[(z >> 40) * 2.0**-24 for z in splitmix64(key & MASK, 7)] for key in keys]
    assert torch.equal(drawn, torch.tensor(expected))


@pytest.mark.parametrize("along", ["images", "one image"])
def test_distributions(along):
    images, shape = (range(100_000), ()) if along == "images" else (range(3), (11, 3031))
    generator = make_image_generator("test", 3, images=images)
    uniform, whole = generator.rand(*shape), generator.randint(1000, *shape)
    normal = generator.randn(*shape)
    assert stats.kstest(uniform.flatten(), "uniform").pvalue > 0.001
    assert stats.kstest(normal.flatten(), "norm").pvalue > 0.001
    assert stats.chisquare(whole.flatten().bincount(minlength=1000)).pvalue > 0.001
    neighbours = torch.stack([normal.flatten()[:-1], normal.flatten()[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.012


def test_an_image_draws_the_same_in_any_batch_and_goes_on():
    whole = make_image_generator("noise", 1, 2, images=range(8))
    part = make_image_generator("noise", 1, 2, images=[6, 3])
    for shape in ((), (4,), (3, 5, 5)):
        first, second = whole.randn(*shape), whole.randn(*shape)
        assert torch.equal(first[[6, 3]], part.randn(*shape))
        assert torch.equal(second[[6, 3]], part.randn(*shape))
        assert not torch.equal(first, second)
    keys = make_image_generator("noise", 1, 2, images=range(8)).keys
    for other in (("noise", 1, 3), ("noise", 2, 2), ("level", 1, 2)):
        assert not torch.isin(make_image_generator(*other, images=range(8)).keys, keys).any()


def test_generators_that_are_made_together_draw_what_each_draws_alone():
    together = make_image_generators(("label", "noise"), 3, 1, images=range(4, 9))
    for purpose, generator in together.items():
        alone = make_image_generator(purpose, 3, 1, images=range(4, 9))
        for shape in ((), (13,), (5, 9), ()):  # some before, across and after what is made ahead
            assert torch.equal(generator.rand(*shape), alone.rand(*shape))
            assert torch.equal(generator.randn(*shape), alone.randn(*shape))


def test_a_torch_generator_gives_the_keys():
    drawn = [
        per_image_generator(torch.Generator().manual_seed(seed), 4).rand(3) for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
