"""The groups of operations, begun anew, and a small fuser in the place of TransformerEngine's."""

from __future__ import annotations

import sys

import pytest
import small_fuser
from programs import make_manager

from megatron_offload.integrations import transformer_engine as policy


@pytest.fixture
def timing():
    return "late"


@pytest.fixture
def manager(monkeypatch, timing):
    """The manager of operations' groups."""
    for name in (policy._FUSER, policy._OPERATION):
        monkeypatch.setitem(sys.modules, name, small_fuser)
    fuser = small_fuser.OperationFuser
    found = small_fuser.OperationContext, small_fuser.prepare_for_saving, fuser.__call__
    policy.reset_operation_groups()
    yield policy.operation_groups(manager=make_manager(timing)).manager
    policy.reset_operation_groups()
    for _ in range(2):
        policy.uninstall()
    assert found == (small_fuser.OperationContext, small_fuser.prepare_for_saving, fuser.__call__)
