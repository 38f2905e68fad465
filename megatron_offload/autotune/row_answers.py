"""What the rank that answers says to all that look for rows: texts in, one text out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.planning.frontier import Part, Plan, of_plain, to_plain
from megatron_offload.planning.row_choice import RowChoice, Slowdown, Stage


class RowAnswers:
    """Answers first what all have, then what each plan has shown.

    A rank says first what it has (arguments of `Stage`) and, for all that have the same layers,
    what may be done with each (``actions``); then what it couldn't recompute or, behind as many
    steps as the others, what they took and reserved. Ranks of a stage whose first was not heard get
    no answer.

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
        """Return ``[phase, why, {stage: plan}]``: refused, trying, measuring or final."""
        everyone = [json.loads(text) for text in texts]
        refusal = next((one["refusal"] for one in everyone if one.get("refusal")), "")
        if refusal:
            return json.dumps(["refused", refusal, {}])
        if self.choice is None:
            self.choice = self._choice_of(everyone)
            is_final, text = self.choice.next()
        else:
            is_final, text = self._hear(self.choice, everyone)
        plans = {
            name: [to_plain({x: (y,) for x, y in stage.plan.actions.items()}), *stage.plan[1:]]
            for name, stage in self.choice.stages.items()
        }
        phase = "trying" if self._is_trying else "measuring"
        return json.dumps(["final" if is_final else phase, text, plans])

    def _choice_of(self, everyone: Sequence[dict[str, Any]]) -> RowChoice:
        stages: dict[str, Stage] = {}
        for one in everyone:
            if one["actions"] is not None:
                alike = [other["has"] for other in everyone if other["stage"] == one["stage"]]
                most = {x: max(has[x] for has in alike) for x in ("num_inflight", "bare_bytes")}
                actions = of_plain(one["actions"])
                link_bytes = dict(zip(actions, one["link_bytes"], strict=True))
                stages[one["stage"]] = Stage(actions, link_bytes, **one["has"] | most)
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


def plan_of(answer: Sequence[Any]) -> Plan:
    """Return a stage's plan of those that were answered."""
    actions, *figures = answer
    layers = {number: action for number, (action,) in of_plain(actions).items()}
    return Plan(layers, *figures)
