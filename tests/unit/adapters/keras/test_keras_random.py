"""Random numbers of a Keras process, kept at each step where workers may die."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.adapters.keras import kept as keras_kept
from holdfast.adapters.keras import random as keras_random


@pytest.fixture
def slot():
    return memoryview(bytearray(8192))


@pytest.fixture
def _numpys_own_generator():
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


def test_what_is_kept_draws_the_same_numbers_again(slot):
    random.gauss(0, 1), np.random.standard_normal()  # both have one more in store now
    keras_kept._write_random(slot)
    drawn = [random.gauss(0, 1), random.random(), *np.random.standard_normal(3)]
    keras_random.restore(keras_kept._read_random(slot))
    assert [random.gauss(0, 1), random.random(), *np.random.standard_normal(3)] == drawn


@pytest.mark.usefixtures("_numpys_own_generator")
def test_a_generator_of_another_kind_is_left_out_and_said(slot):
    np.random.set_bit_generator(np.random.PCG64(3))
    keras_kept._write_random(slot)
    assert "numpy" not in keras_kept._read_random(slot)
    assert keras_random.doubts() == ["np.random draws from PCG64, whose state is not saved; MT19937 is"]
