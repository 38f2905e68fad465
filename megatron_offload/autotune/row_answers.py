"""What the rank that answers says to all that look for rows: texts in, one text out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.planning.frontier import Action, Layers, Part, Plan
from megatron_offload.planning.row_choice import RowChoice, Slowdown, Stage

ANSWER = TypeAdapter(tuple[str, str, dict[str, Plan]])
"""The phase (trying, measuring or final), why in words, and the plan of each stage, if any."""
Alike: TypeAlias = list[tuple[list[int], tuple[Action, ...]]]
"""Numbers of layers that are alike, and what may be done with each."""
_KINDS = TypeAdapter(list[Alike])


def by_layer(kinds: Sequence[Alike]) -> list[Layers]:
    """Return kinds of layers as `frontier` takes them."""
    return [{x: actions for numbers, actions in kind for x in numbers} for kind in kinds]


class RowAnswers:
    """Answers first what all have, then what each plan has shown.

    A rank says first what it has, as arguments of `Stage`; of those that have the same layers the
    first says what may be done with these (``kinds``). Then it says what it couldn't recompute or,
    behind as many steps as the others, what they took and reserved. Ranks of a stage whose first
    was not heard get no answer.

    Args:
        policy: what is promised.

    Attributes:
        choice: the plans, once all have said what they have.
    """

    def __init__(self, policy: AutoConfig | MemoryTargetConfig) -> None:
        self._policy = policy
        self.choice: RowChoice | None = None
        self._is_trying = True

    def __call__(self, texts: Sequence[str]) -> str:
        """Return an `ANSWER`, as JSON."""
        everyone = [json.loads(text) for text in texts]
        refusal = next((one["refusal"] for one in everyone if one.get("refusal")), "")
        if refusal:
            return ANSWER.dump_json(("final", refusal, {})).decode()
        if self.choice is None:
            self.choice = self._choice_of(everyone)
            is_final, text = self.choice.next()
        else:
            is_final, text = self._hear(self.choice, everyone)
        plans = {name: stage.plan for name, stage in self.choice.stages.items()}
        phase = "trying" if self._is_trying else "measuring"
        return ANSWER.dump_json(("final" if is_final else phase, text, plans)).decode()

    def _choice_of(self, everyone: Sequence[dict[str, Any]]) -> RowChoice:
        stages: dict[str, Stage] = {}
        for one in everyone:
            has = one["has"]
            if has["kinds"] is not None:
                alike = [other["has"] for other in everyone if other["stage"] == one["stage"]]
                more: dict[str, Any] = {"link_bytes": dict(has["link_bytes"])}
                more["kinds"] = by_layer(_KINDS.validate_python(has["kinds"]))
                for key in ("num_inflight", "bare_bytes"):
                    more[key] = max(other[key] for other in alike)
                stages[one["stage"]] = Stage(**has | more)
        policy = self._policy if isinstance(self._policy, AutoConfig) else None
        return RowChoice(policy, stages, max(one["bare_us"] for one in everyone))

    def _hear(self, choice: RowChoice, everyone: Sequence[dict[str, Any]]) -> tuple[bool, str]:
        """Take what ranks say of the plan that is followed; return whether the next is final."""
        refused, reserved = dict[str, list[Part]](), dict[str, int]()
        for name, stage in choice.stages.items():
            ranks = [one for one in everyone if one["stage"] == name]
            targets = [one["target_bytes"] for one in ranks if one["target_bytes"] is not None]
            stage.target_bytes = min(targets, default=None)
            refused[name] = [(site, what) for one in ranks for site, what in one.get("refused", ())]
            reserved[name] = max((one.get("reserved_bytes", 0) for one in ranks), default=0)
        if not self._is_trying:
            costs = (Slowdown(*one["slowdown"]) for one in everyone if one["slowdown"])
            if not choice.note(max(costs, default=None), reserved, everyone[0]["num_steps"]):
                return False, ""
            self._is_trying = True
        elif any(refused.values()):
            choice.refuse(refused)
        else:
            self._is_trying = False
            return choice.is_blind or not self._policy.measured_plans, choice.predicted()
        return choice.next()
