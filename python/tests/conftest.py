import os
import sys

import pytest

# The package of this checkout, wherever another may be installed.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

SEED = 42


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(SEED)


def pytest_report_header():
    return f"seed {SEED}"
