"""Supervised fine-tuning by TRL's `SFTTrainer`: a Llama of random weights, on sums it makes up.

    python examples/trl_sft.py                   # on a GPU, or on a CPU with a simulated device
    python examples/trl_sft.py --no-offload      # prints the same losses

Needs trl, which brings transformers, datasets and accelerate. Nothing is downloaded: the tokenizer
knows bytes. The lines of offload are marked.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import pyarrow
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from megatron_offload.integrations.hugging_face import OffloadMixin

ENDS = {"pad_token": "<pad>", "eos_token": "<eos>"}


class OffloadSFTTrainer(OffloadMixin, SFTTrainer):  # here
    if not torch.cuda.is_available():  # where nothing is won, nothing is offloaded unasked
        offload_options = {"policy": "modules"}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*ENDS.values(), *letters])}
    tokenizer = Tokenizer(models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ENDS)


def sums(number: int) -> Dataset:
    """Return prompts and completions of different lengths."""
    draw = random.Random(0)  # noqa: S311 - no secret
    pairs = [
        (draw.randrange(10**6), draw.randrange(10 ** draw.randint(1, 9))) for _ in range(number)
    ]
    texts = [(f"{a} + {b} = ", f"{a + b}, and {b} + {a} = {a + b} too") for a, b in pairs]
    table = pyarrow.table(
        dict(zip(("prompt", "completion"), zip(*texts, strict=True), strict=True))
    )
    return Dataset(table, fingerprint="sums")  # else a hash, which fails with some pyarrow


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 4, "width": 128, "heads": 4, "length": 128, "batch": 4, "steps": 6}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse(__doc__)
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = (OffloadSFTTrainer if args.offload else SFTTrainer)(  # and here
            model=LlamaForCausalLM(config),
            processing_class=tokenizer,
            args=SFTConfig(
                folder,
                max_steps=args.steps,
                max_length=args.length,
                per_device_train_batch_size=args.batch,
                gradient_checkpointing=False,  # on by default; it leaves only inputs of layers
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                bf16=on_gpu,
                use_cpu=not on_gpu,
            ),
            train_dataset=sums(args.batch * args.steps),
        )
        trainer.train()
    for log in trainer.state.log_history:
        if "loss" in log:
            print(f"step {log['step']}: loss {log['loss']:.9g}")
    if args.offload:
        trainer.offload.end_step()
        print(trainer.offload.last_step)


if __name__ == "__main__":
    main()
