"""Crossings of one step, for tests that need routes."""

from dataclasses import replace

from tread_zoo import create
from tread_zoo.routing import Stack, Step
from tread_zoo.seeding import make_image_generator


def draw(network, part="tread", *, batch=1, index=0, num_steps=1, seed=0, keep=None, **options):
    """Return the crossings that a routing method chooses for a network."""
    images = make_image_generator("route", seed, index, images=range(batch))
    stack = replace(Stack.of(network), keep=keep)
    return create("routing", part, **options).draw(stack, images, Step(index, num_steps, seed))
