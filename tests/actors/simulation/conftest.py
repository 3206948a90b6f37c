"""The simulation is silent: its processes would log thousands of losses and drains."""

import logging

import pytest


@pytest.fixture(autouse=True)
def silence_logs():
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)
