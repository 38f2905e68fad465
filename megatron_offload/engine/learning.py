"""What a step teaches the next: which groups are kept, how large the budgets are, what to unpin.

Nothing learned is needed for exactness: a step that differs from the last is planned as well as may
be, and learned from in turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

from megatron_offload.config import OffloadConfig
from megatron_offload.core.policy import KeepRules
from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.transfers import Transfers

_NUM_ALIKE = 8
"""How many steps have to be alike: pinning is slow, and unpinning waits for the device."""

_OPEN_SHARE = 0.6
"""Of the device's memory, what may be in use while all that is saved is kept: what comes besides,
at the head of a model and in backward, is not known yet."""

_UNLISTED = "its name is not among OffloadConfig.modules"

_UNSEEN = (
    "OffloadConfig.modules names %r, and no group of the step is called so: mark it with "
    "offload_modules(), or list it in TransformerConfig.offload_modules"
)

_logger = logging.getLogger(__name__)


class Learner:
    """Plans a step from the one before it, between steps.

    Attributes:
        policy: the rules for what is kept.
        pp_rank: the pipeline rank whose rules count; None before the first chunk.
        profile: what the last step has shown; None where it has to be learned anew.
        kept: groups of that step that are kept on the device, each with the reason.
        is_open: whether what is offloaded is still looked for: all is kept that the device has room
            for.
        is_measured: whether steps alternate with others that need more of the device's memory.
    """

    def __init__(self, config: OffloadConfig, transfers: Transfers) -> None:
        self.pp_rank: int | None = None
        self.profile: StepProfile | None = None
        self.kept: dict[GroupKey, str] = {}
        self._last_chunk = 0
        self.is_open = self.is_measured = False
        self._config = config
        listed = config.modules if "modules" in config.model_fields_set else ()
        self._expected = dict.fromkeys(listed, _UNSEEN)
        self._is_unlisted = cache(
            lambda name: bool(listed) and not any(fnmatchcase(name, one) for one in listed)
        )
        self._transfers = transfers
        self._may_trim = True
        self._peaks: deque[int] = deque(maxlen=_NUM_ALIKE)
        self._chosen_by: KeepRules | None = None
        self._largest_bytes = 0
        policy = config.policy if config.enabled else None
        ratio = policy.ratio if isinstance(policy, RatioConfig) else None
        self.policy = KeepRules(config.fraction, ratio=ratio)

    # What is followed

    def follow(self, pp_rank: int, fraction: float | None, delta_bytes: int | None) -> None:
        """Take the rules of the caller's model; they count from the next step on.

        What was set in the configuration wins over them.
        """
        config, given = self._config, self._config.model_fields_set
        if fraction is None or "fraction" in given:
            fraction = config.fraction
        if delta_bytes is None or "delta_bytes_across_pp_ranks" in given:
            delta_bytes = int(config.delta_bytes_across_pp_ranks)
        self.policy = KeepRules(fraction, pp_rank * delta_bytes, self.policy.ratio)
        self.pp_rank = pp_rank

    @property
    def keeps_everything(self) -> bool:
        """Whether each group is kept by the rules, whatever it has."""
        return self.policy.fraction == 0.0 and self.policy.ratio is None

    @property
    def is_ruled(self) -> bool:
        """Whether the caller's model says what is kept, where no policy does."""
        return self._config.policy is None and self.policy != KeepRules()

    def follow_rules(self, *, is_open: bool = False) -> None:
        """Follow the configuration's rules again, or keep what the device has room for."""
        self.is_open, self.kept = is_open, {}
        self._transfers.budget.restart()
        if self.profile is not None:
            self._choose(self.profile)

    # What is learned

    def learn(self, profile: StepProfile) -> None:
        """Learn from what a step has shown that is over."""
        before, has_changed = self.profile, profile != self.profile
        if has_changed:  # else what it foretells is known
            self.profile = profile
        self._warn_of_names(profile)
        self._fit_host_pool()
        if before is not None and not before.has_groups_of(profile):
            self._transfers.kept_by_others.clear()
        elif before is not None and self._may_trim:
            self._may_trim = False
            if not (self.is_open or self.is_measured):
                self._transfers.backend.trim_device()  # what only the first steps needed
        if has_changed or self.policy != self._chosen_by:
            self._choose(profile)
        self._transfers.budget.learn(self._largest_bytes)

    def _choose(self, profile: StepProfile) -> None:
        self._chosen_by = self.policy
        groups = tuple(group for group in profile.groups if not self._is_unlisted(group.name))
        listed = replace(profile, groups=groups)
        self.kept = self.policy.plan(listed)
        self._last_chunk = max((group.key.chunk for group in groups), default=0)
        moving = (group.num_bytes for group in groups if group.key not in self.kept)
        self._largest_bytes = max(moving, default=0)

    def reason_to_keep(self, group: OffloadGroup) -> str:
        """Return why a group is to be kept on the device; empty where it may be offloaded."""
        if self._transfers.by_rows:  # in place of all that follows
            return ""
        if self._is_unlisted(group.name):
            return _UNLISTED
        if self.is_open:
            return "" if self.is_short_of_memory() else "what is offloaded is still looked for"
        default = "the fraction that may be offloaded is 0" if self.keeps_everything else ""
        chunk, order = group.key  # one that is new is as the last one was
        return self.kept.get(GroupKey(min(chunk, self._last_chunk), order), default)

    def expect(self, names: Iterable[str], warning: str) -> None:
        """Warn once, behind the next step, of each name that no group of it has."""
        self._expected |= dict.fromkeys(names, warning)

    def _warn_of_names(self, profile: StepProfile) -> None:
        for pattern, warning in self._expected.items():
            if not any(fnmatchcase(group.name, pattern) for group in profile.groups):
                _logger.warning(warning, pattern)
        self._expected.clear()

    def is_short_of_memory(self) -> bool:
        """Whether so much is in use that not all that is saved may find room."""
        backend = self._transfers.backend
        capacity_bytes = backend.capacity_bytes()
        if capacity_bytes is None:
            return False
        return backend.memory().allocated_bytes > _OPEN_SHARE * capacity_bytes

    # Memory

    def _fit_host_pool(self) -> None:
        """Unpin what steps don't need that are alike by now; blocks the host where there is such.

        Where lengths vary nothing is unpinned: a longer one would pin it again.
        """
        pool, peaks = self._transfers.host_pool, self._peaks
        peaks.append(pool.stats.peak_in_use_bytes)
        if len(peaks) < _NUM_ALIKE or len(set(peaks)) > 1:
            return
        keep_bytes = pool.pinned_for(peaks[-1])
        pinned_bytes = pool.stats.slab_bytes_total - pool.bytes_of_graphs
        if pinned_bytes - keep_bytes >= pool.slab_bytes:
            self._transfers.backend.sync_copies()
            pool.shrink(keep_bytes)
