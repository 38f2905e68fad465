"""A plan of all pipeline ranks, as one rank follows it.

Owns the look at whether this run is the one that the plan was made for. Must not know how plans are
made, nor streams.

Invariant: a plan for another run is refused at the end of the first step, and never changes a bit.
Read next: `megatron_offload.planning.plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from megatron_offload.core.profile import GroupKey, RunShape, StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.plan import OffloadPlan, RankPlan

__all__ = ["FollowedPlan"]

_logger = logging.getLogger(__name__)


class FollowedPlan:
    """One rank's part of a plan.

    Args:
        plan: of all pipeline ranks.

    Attributes:
        rank: this rank's part; None until `begin`.
        kept: the groups that stay, each with the reason.
    """

    def __init__(self, plan: OffloadPlan) -> None:
        self.rank: RankPlan | None = None
        self.kept: Mapping[GroupKey, str] = {}
        self._plan = plan
        self._pp_rank = 0
        self._is_confirmed = False
        self._has_warned = False

    def begin(self, pp_rank: int) -> bool:
        """Take the part of a pipeline rank; return whether it is another than before.

        Raises:
            ConfigError: the plan has no such rank.
        """
        if self.rank is not None and pp_rank == self._pp_rank:
            return False
        if pp_rank >= self._plan.pp_size:
            raise ConfigError(
                f"the plan is for {self._plan.pp_size} pipeline ranks, and this is rank {pp_rank}; "
                "make one from this run's profiles"
            )
        self._pp_rank = pp_rank
        self.rank = self._plan.ranks[pp_rank]
        self.kept = self.rank.kept
        return True

    def confirm(self, profile: StepProfile) -> None:
        """Compare the run with the plan's, after a step.

        Raises:
            ConfigError: the first step shows that the plan was made for another run. A later step
                that differs is warned of once.
        """
        plan = self._plan
        run = RunShape(plan.num_microbatches, self._pp_rank, plan.pp_size, plan.vp_size)
        try:
            plan.check(replace(profile, run=run))
        except ConfigError as error:
            if not self._is_confirmed:
                raise
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("a step is not the one that was planned for: %s", error)
        else:
            self._is_confirmed = True
