"""Runs the command line with a device that loses one bit of every reload.

Started ranks import this file too, because it is their main module; so they lose the bit as well.
"""

import sys

import torch

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.cli import main as cli

_copy = SimulatedBackend.copy


def copy(self, pairs, stream, label):
    event = _copy(self, pairs, stream, label)
    if stream is self.h2d_stream:
        for destination, _ in pairs:
            destination.reshape(-1).view(torch.uint8)[2] ^= 0x40
    return event


SimulatedBackend.copy = copy

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
