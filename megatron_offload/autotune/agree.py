"""One answer on all ranks of a job, through the store that the job has anyway, without waiting.

Each rank puts down what it has and goes on. The first looks between its steps whether all have, and
answers; an answer says behind how many steps from what was put down it is taken, so that ranks
which take their steps together take it together. No collective is called.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Generator, Iterator

import torch.distributed as dist

_MOST_BYTES = 4 << 20  # what goes into the store at once: more breaks it for the job itself
_NUM_STEPS_AHEAD = 3  # behind so many steps all have an answer, and take it
_MOST_STEPS_HEARD = 8  # so long the first waits for ranks that may be without groups
_MOST_STEPS_WAITED = 64  # behind so many no answer comes any more


_numbers = itertools.count()  # of this process's searches: ranks that run one program count alike


def is_alone() -> bool:
    """Whether this process is none of several ranks."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class Ranks:
    """The ranks of a job that look for a plan, or this process alone.

    Who puts something down first answers. Others count once they have put something down.

    Attributes:
        answers: whether this rank does, for all or for itself.
    """

    def __init__(self) -> None:
        name = f"megatron_offload/rows/{next(_numbers)}"
        self._store: dist.Store | None = None
        self._place = self._number = self._waited = 0
        if not is_alone():
            job = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(name, job)
            self._place = self._store.add("ranks", 1) - 1
        self.answers = self._place == 0
        self._num_ranks = 1

    def is_first_of(self, kind: str) -> bool:
        """Whether no other rank has asked this about ``kind`` before."""
        return self._store is None or self._store.add(f"of/{kind}", 1) == 1

    def ask(self, said: str, answer: Callable[[list[str]], str]) -> Iterator[str | None]:
        """Yield what the first rank answers to what all ranks say; before that, None for each step.

        ``answer`` is called there alone. Empty is what never comes, or is too large.

        Raises:
            torch.distributed.DistError: the job's store is gone.
        """
        if self._store is None:
            yield answer([said])
            return
        number = self._number
        self._number += 1
        if self.answers:
            others = yield from self._hear(number)
            found = _packed(answer([said, *others]) if all(others) else "")
            said = json.dumps([self._waited + _NUM_STEPS_AHEAD, found])
            self._store.set(f"{number}/answer", said)
        else:
            self._store.set(f"{number}/{self._place}", _packed(said))
            self._waited = 0
            while not self._store.check([f"{number}/answer"]):
                if self._waited >= _MOST_STEPS_WAITED:
                    yield ""
                    return
                self._waited += 1
                yield None
        num_steps, text = json.loads(self._store.get(f"{number}/answer"))
        while self._waited < num_steps:
            self._waited += 1
            yield None
        yield _unpacked(text)

    def _hear(self, number: int) -> Generator[None, None, list[str]]:
        """Let steps pass until the others have put something down; return what they have."""
        assert self._store is not None
        self._waited = 0
        while True:
            is_over = self._waited >= _MOST_STEPS_HEARD
            if number == 0:
                self._num_ranks = self._store.add("ranks", 0)
            keys = [f"{number}/{place}" for place in range(1, self._num_ranks)]
            is_whole = number > 0 or self._num_ranks == dist.get_world_size()
            if is_over:
                keys = [key for key in keys if self._store.check([key])]
            if is_over or (is_whole and (not keys or self._store.check(keys))):
                return [_unpacked(self._store.get(key).decode()) for key in keys]
            self._waited += 1
            yield None


def _packed(text: str) -> str:
    """Return a text as one that is much shorter, of few characters; empty where it is too long."""
    packed = base64.b85encode(zlib.compress(text.encode(), 6)).decode()
    return packed if len(packed) <= _MOST_BYTES else ""


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b85decode(text)).decode() if text else ""
