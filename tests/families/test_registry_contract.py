"""A family from outside that lacks part of the contract is refused by name, where it is given."""

import dataclasses

import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_pvi import AutoExponentialFamily, GuideError
from numpyro_pvi.families import register_family, registered_families


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Some of a family, derived from nothing."""

    event_shape = ()

    def log_partition(self, natural):
        return natural


def test_a_family_that_lacks_something_is_not_registered():
    before = registered_families()
    with pytest.raises(
        TypeError, match="It lacks .*natural_to_mean.*Derive it from numpyro_pvi.families.FamilyDefaults"
    ):
        register_family(dist.Gumbel, ByHand())
    assert registered_families() == before


def test_nor_is_it_taken_for_a_latent():
    def model():
        numpyro.sample("x", dist.Normal(0.0, 1.0))

    guide = AutoExponentialFamily(model, families={"x": ByHand()})
    with pytest.raises(GuideError, match=r"families\['x'\].* is not a family. It lacks"):
        numpyro.handlers.seed(guide, random.key(0))()
