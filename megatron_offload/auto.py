"""``import megatron_offload.auto``: offload in a job over megatron-core, for trainers' plug-ins.

``MEGATRON_OFFLOAD_CONFIG`` names a YAML file with keys of OffloadConfig; ``MEGATRON_OFFLOAD_SET``
holds more of them, ``key=value`` by words, which win; ``MEGATRON_OFFLOAD_REPORT`` names a folder
for the launcher's report. Where megatron-core is absent this only warns:
trainers import their plug-ins in processes of other kinds, too.
"""

import logging
import os

from megatron_offload.errors import ConfigError, IntegrationError, did_you_mean
from megatron_offload.run.launch import install_by_flags

_PREFIX = "MEGATRON_OFFLOAD_"
_KNOWN = [_PREFIX + name for name in ("CONFIG", "SET", "REPORT", "LOG")]

for _name in os.environ:
    if _name.startswith(_PREFIX) and _name not in _KNOWN:
        raise ConfigError(f"unknown environment variable {_name}{did_you_mean(_name, _KNOWN)}")
try:
    install_by_flags(
        {
            "offload_config": os.environ.get("MEGATRON_OFFLOAD_CONFIG"),
            "offload_set": os.environ.get("MEGATRON_OFFLOAD_SET", "").split(),
            "offload_report": os.environ.get("MEGATRON_OFFLOAD_REPORT"),
        },
        "MEGATRON_OFFLOAD_SET",
    )
except IntegrationError as error:
    logging.getLogger(__name__).warning("no offload in this process: %s", error)
