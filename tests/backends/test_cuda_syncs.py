"""Watching the host's waits with a made-up CUDA: what is set, told, and set again."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron_offload.backends import cuda

WARNING = "called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)"


class Mode:
    """PyTorch's sync debug mode."""

    def __init__(self):
        self.value = 0

    def set(self, value):
        self.value = {"default": 0, "warn": 1, "error": 2}.get(value, value)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)


@pytest.fixture
def mode(monkeypatch):
    mode = Mode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode.value)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.set)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: ("waited", device))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: "waited for an event")
    return mode


def watch(report):
    return cuda.CudaBackend.watch_syncs(None, report)


def item():
    """Do as PyTorch does at ``tensor.item()``."""
    warnings.warn(WARNING, stacklevel=2)


@pytest.mark.filterwarnings("error")
def test_every_warning_is_told_even_of_one_line_and_where_warnings_are_errors(mode):
    told = []
    with watch(told.append):
        assert mode.value == 1
        for _ in range(3):
            item()
    assert told == ["CUDA operation"] * 3


def test_calls_that_pytorch_doesn_t_warn_of_are_told_and_made(mode):
    told = []
    event = object.__new__(torch.cuda.Event)
    with watch(told.append):
        assert torch.cuda.synchronize(device=1) == ("waited", 1)
        assert event.synchronize() == "waited for an event"
    assert told == ["device", "event"]
    assert torch.cuda.synchronize() == ("waited", None)
    assert event.synchronize() == "waited for an event"
    assert told == ["device", "event"]


@pytest.mark.parametrize("found", [0, 1, 2])
def test_what_was_set_before_is_set_again_even_after_an_error(mode, found):
    mode.value = found
    before = warnings.filters[:], warnings.showwarning, torch.cuda.synchronize
    with pytest.raises(KeyError), watch(lambda kind: None):
        raise KeyError
    assert mode.value == found
    assert (warnings.filters[:], warnings.showwarning, torch.cuda.synchronize) == before


def test_other_warnings_go_where_they_went(mode):
    told = []
    with warnings.catch_warnings(record=True) as seen, watch(told.append):
        warnings.warn("of something else", stacklevel=1)
        item()
    assert told == ["CUDA operation"]
    assert [str(warning.message) for warning in seen] == ["of something else"]


def test_there_is_nothing_to_describe_without_a_device(monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert cuda.visible_devices() == ()
