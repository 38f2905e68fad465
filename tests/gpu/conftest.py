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


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Megatron's parallel groups of this process alone."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group(init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
