"""A Llama of random weights under the `Trainer` of transformers.

    python examples/trainer.py                   # on a GPU, or on a CPU with a simulated device
    python examples/trainer.py --no-offload      # prints the same losses

Needs transformers and accelerate. For TRL's trainers see trl_sft.py.
"""

from __future__ import annotations

import tempfile

import torch
from nanogpt import batches, parse
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_offload.integrations.hugging_face import OffloadMixin


class OffloadTrainer(OffloadMixin, Trainer):
    if not torch.cuda.is_available():  # where nothing is won, nothing is offloaded unasked
        offload_options = {"policy": "modules"}


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
    rows = torch.cat([inputs for inputs, _ in batches(args.batch, args.length, args.steps)])
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
