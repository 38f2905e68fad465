"""A Llama of random weights under the `Trainer` of transformers.

    python examples/trainer.py                   # on a GPU, or on a CPU with a simulated device
    python examples/trainer.py --no-offload      # prints the same losses

Needs transformers and accelerate. For TRL's trainers see trl_sft.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_offload.integrations.hugging_face import OffloadMixin


class OffloadTrainer(OffloadMixin, Trainer):
    if not torch.cuda.is_available():  # where nothing is won, nothing is offloaded unasked
        offload_options = {"policy": "modules"}


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
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - args.length, (args.steps * args.batch, 1))
    rows = text[starts + torch.arange(args.length)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = (OffloadTrainer if args.offload else Trainer)(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
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
