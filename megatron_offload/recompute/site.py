"""What is known of a module whose calls are recomputed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from megatron_offload.config import RECOMPUTE_SITES
from megatron_offload.engine.transfers import Transfers
from megatron_offload.model_map.structure import keeps_inside
from megatron_offload.recompute.module_state import ModuleLayout
from megatron_offload.recompute.proof import Proof
from megatron_offload.recompute.rerun import Form

_logger = logging.getLogger(__name__)


class Site:
    """What is known of a module whose calls are recomputed.

    Attributes:
        path: its dotted name.
        unit: the kind or pattern by which it was found, under which its bytes are counted.
        draws: whether it may draw random numbers, or ask for the grad mode.
        drops_inside: whether what it saves is dropped in forward.
        drops_output: whether what it returns is, where that is saved.
        refusal: why it is kept from here on, by what a call has shown.
        fills_late: whether a kernel fills what is saved last behind that: a rerun must not end
            there.
        layout: where its modules had what their forward reads, when that was last seen.
        adapted: the position among them of the last layer with adapters.
        may_end_early: whether a rerun may end in that: the last proof has saved nothing behind it.
        forms: of what its last call has saved; calls that save the same keep one list.
        counted_share: of the bytes that a call saves, those that it hasn't saved before.
        proof: of what it returns.
        proven_in: the step in which it was proven last, by the training flags of its modules.
        drawn_in: the flags under which random numbers were drawn in a proof.
    """

    def __init__(self, path: str, unit: str, module: nn.Module, *, draws: bool) -> None:
        self.path, self.unit, self.draws, self.type = path, unit, draws, type(module)
        self.drops_inside = draws and not keeps_inside(module)
        self.drops_output = unit not in RECOMPUTE_SITES
        self.refusal, self.fills_late = "", False
        self.layout: ModuleLayout | None = None
        self.adapted: int | None = None
        self.may_end_early = False
        self.forms: list[Form] = []
        self.counted_share = 1.0
        self.said = set[str]()
        """Why sites of the model were kept so far."""
        self.prove_for(lambda: None)

    def prove_for(self, transfers: Callable[[], Transfers | None]) -> None:
        """Let all be proven anew: what was shown under another manager counts by its steps."""
        self.transfers = transfers
        self.proven_in: dict[tuple[bool, ...], int] = {}
        self.drawn_in = set[tuple[bool, ...]]()
        self.proof = Proof(self.path)

    def warn(self, refusal: str, *, is_asked_for: bool = True) -> None:
        """Say once for each reason that a site is kept; a warning to who has asked for it."""
        if refusal not in self.said:
            self.said.add(refusal)
            level = logging.WARNING if is_asked_for else logging.INFO
            text = "recompute: %s, and maybe others, is kept: %s; it may be offloaded"
            _logger.log(level, text, self.path, refusal)
