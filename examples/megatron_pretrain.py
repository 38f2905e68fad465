"""A small GPT in Megatron-LM's own `pretrain`, on random tokens: a job to try offload on.

    torchrun --nproc-per-node 1 -m megatron_offload.run examples/megatron_pretrain.py FLAGS

It knows nothing of offload. Without ``-m megatron_offload.run`` the same line trains without; what
`pretrain` prints of losses and gradient norms is the same with ``--deterministic-mode``. It needs
CUDA and megatron-core 0.19, whose wheel brings `megatron.training`. FLAGS are Megatron's.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch.utils.data import Dataset

try:
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
except ImportError as error:
    sys.exit(f"{error}; on Python 3.12 or later run: pip install 'megatron-core>=0.19'")


class RandomTokens(Dataset):
    """Sequences that are the same in every run."""

    def __init__(self, num_samples: int, length: int, vocabulary: int) -> None:
        self.num_samples, self.length, self.vocabulary = num_samples, length, vocabulary

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:]}


def provide_datasets(num_samples, vp_stage=None):  # each stage has its own iterator
    args = get_args()
    return [
        RandomTokens(number or 1, args.seq_length, args.padded_vocab_size - 1)
        for number in num_samples
    ]


provide_datasets.is_distributed = True


def provide_model(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    has_engine = args.transformer_impl == "transformer_engine"
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, has_engine, vp_stage=vp_stage)
    more = None
    if args.mtp_num_layers:
        more = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layers.layer_specs[-1], has_engine, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=more,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def sum_of_losses(losses):
    total = losses.float().sum()
    # Not copied from the host, which a CUDA graph of the whole step couldn't hold.
    number = torch.full_like(total, losses.numel(), dtype=torch.int)
    return total, number, {"lm loss": torch.stack([total.detach(), number.float()])}


def take_forward_step(data_iterator, model):
    batch = next(data_iterator)
    tokens, labels = batch["tokens"].cuda(), batch["labels"].cuda()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), sum_of_losses


def main():
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    # The wheel brings its helpers compiled, and no Makefile.
    dataset_utils.compile_helpers = functools.partial(print, "helpers are compiled")
    pretrain(
        pretrain_cfg_container_from_args(args),
        provide_datasets,
        ModelType.encoder_or_decoder,
        take_forward_step,
        model_provider=provide_model,
    )
    print(f"reserved at most: {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
