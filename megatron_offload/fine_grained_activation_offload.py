"""Megatron-core's documented module; one object with `megatron_api.names`.

So ``DEBUG`` that is set under either path is read under both.
"""

import sys

from megatron_offload.megatron_api import names
from megatron_offload.megatron_api.names import *  # noqa: F403 - what type checkers read

sys.modules[__name__] = names
