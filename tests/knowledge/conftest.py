"""The real encoder, on one device: eight virtual ones on few cores take twice as long."""

import pytest

from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.models.families.bert import Encoder
from routerl_jax.parallel.mesh import single_device_mesh


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    return shared_encoder("all-MiniLM-L6-v2", single_device_mesh())
