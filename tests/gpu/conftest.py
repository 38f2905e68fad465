import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products may differ


@pytest.fixture(scope="module")
def deterministic():
    # With warn_only torch's flash attention adds up gradients in any order.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
