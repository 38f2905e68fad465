"""Where a compiled program leaves its graph for the engine.

Owns `graph_break`, which marks what a program under ``torch.compile`` calls of this package, and
what autograd calls.

The engine keeps books about memory, which no graph can hold: it has to run as it stands, whatever
compiles what is around it. ``torch.compiler.disable`` says that, but it imports the whole compiler
(seconds) and puts a second call around each one. So the marks that it sets are set here, on the
function itself: programs that compile nothing pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def graph_break(function: F) -> F:
    """Keep the compiler out of a function and of all that it calls; use as a decorator.

    Called from code that is being compiled it ends the graph; the next begins after it.
    """
    assert isinstance(function, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="activation offload runs between graphs, see docs/compile.md",
    )
    return function
