"""One answer on all ranks of a job, through the store that the job has anyway.

No collective is called, so nothing can come between those of the program; and nobody waits for
longer than a given time, whatever another rank does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

_LONGEST_NAP_S = 0.02

_ASIDE = "aside"


def _job_store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return dist.PrefixStore("megatron_offload", dist.distributed_c10d._get_default_store())


def stand_aside(num: int = 1) -> None:
    """Let those who ask wait for this rank no more, which has nothing to say; -1 takes it back."""
    store = _job_store()
    if store is not None:
        store.add(_ASIDE, num)


class Ranks:
    """The ranks of a job that ask the same questions under one ``name``, or this process alone.

    Who comes first answers for all of them, once each has said something or the time is over.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_asked = 0
        self._job, self._place = _job_store(), 0
        self._store: dist.Store | None = None
        if self._job is not None:
            self._store = dist.PrefixStore(name, self._job)
            self._place = self._store.add("ranks", 1) - 1

    @property
    def answers(self) -> bool:
        """Whether this rank does, for all or for itself."""
        return self._store is None or self._place == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others, or they are not heard any more."""
        return self._store is None

    def is_first_of(self, kind: str) -> bool:
        """Whether no other rank has asked this about ``kind`` before."""
        return self._store is None or self._store.add(f"of/{kind}", 1) == 1

    def ask(self, said: str, answer: Callable[[list[str]], str]) -> str | None:
        """Return what the first rank answers to what all ranks say.

        ``answer``, asked there alone, is empty where there is none for all. None: so it was, or the
        others were not heard in time; `is_alone` from then on.
        """
        if self._store is None:
            return answer([said])
        number, place = self._num_asked, self._place
        self._num_asked += 1
        others, found = None, ""
        with contextlib.suppress(TimeoutError, dist.DistError):  # the store's own host may be gone
            if place:
                self._store.set(f"{number}/{place}", said)
                (found,) = self._hear(lambda: [f"{number}/answer"])
            else:
                others = self._hear(lambda: [f"{number}/{other}" for other in self._others()])
        if not place:
            found = "" if others is None else answer([said, *others])
            with contextlib.suppress(dist.DistError):
                self._store.set(f"{number}/answer", found)
        if not found:
            self._store = None
        return found or None

    def _others(self) -> range:
        """Return the places of those who answer to the first, less who stands aside by now."""
        assert self._job is not None
        return range(1, dist.get_world_size() - self._job.add(_ASIDE, 0))

    def _hear(self, keys_now: Callable[[], Sequence[str]]) -> list[str]:
        """Return what is there under the keys, once all is, else raise `TimeoutError`."""
        assert self._store is not None
        ends_s, nap_s = time.monotonic() + self._timeout_s, 1e-4
        while (keys := list(keys_now())) and not self._store.check(keys):
            if time.monotonic() > ends_s:
                raise TimeoutError
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return [self._store.get(key).decode() for key in keys]
