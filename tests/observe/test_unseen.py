"""How long torch's methods are patched."""

from threading import Thread

from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.frontends.whole_model import OffloadActivations


def test_torch_is_as_it_was_behind_the_last_forward_of_all_threads():
    original = saved_tensors_hooks.__enter__

    def enter():
        with OffloadActivations():
            assert saved_tensors_hooks.__enter__ is not original

    with OffloadActivations():
        threads = [Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saved_tensors_hooks.__enter__ is not original
    assert saved_tensors_hooks.__enter__ is original
