"""What each snippet of the documents presupposes, and what it must have done.

`PRELUDES` has a text before and after for each; `tests/test_documents.py` runs them.
"""

from __future__ import annotations

_LAYERS = """
from types import SimpleNamespace
import torch
from torch import nn
from megatron_offload import OffloadConfig, PipelineOffloadManager

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(512, 512)
        self.mlp = nn.Sequential(nn.Linear(512, 512), nn.GELU())
    def forward(self, x):
        return self.mlp(self.attention(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.output = nn.Linear(512, 512)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.output(x).square().mean()

manager = PipelineOffloadManager.get_instance()
model = Model()
data = [torch.randn(1024, 512) for _ in range(2)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = lambda output: output
def train_step(batch=data[0]):
    with manager.step():
        manager.begin_chunk()
        model(batch).backward()
"""

_EAGER = """
# Inductor asks for a C++ compiler; what is traced and where it breaks is the same without.
import functools
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""

_GRAPHS = f"""{_LAYERS}
from contextlib import nullcontext
from programs import MOVING, Capturing

class Cuda:
    '''Captures on the simulated device, which refuses what is forbidden.'''
    Stream = synchronize = lambda *_: None
    stream = lambda *_: nullcontext()
    graph = lambda *_, **__: manager.backend.capture()
    CUDAGraph = lambda _: SimpleNamespace(replay=lambda: None)
    def __getattr__(self, name):
        return getattr(real, name)

def configure(config):
    settings = MOVING.model_copy(update=config.model_dump(exclude_unset=True))
    type(manager).configure(manager, settings, backend=Capturing(settings.simulated))

manager.configure = configure
batch = data[0]
real, torch.cuda = torch.cuda, Cuda()
"""

_MEGATRON = """
from torch import nn
from types import SimpleNamespace

def mlp():
    names = ("linear_fc1", "activation_func", "linear_fc2")
    return nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp()}) for _ in range(2))
model_chunks = [nn.ModuleDict({"decoder": nn.ModuleDict({"layers": layers})})]

import torch
data = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]

def train_step(x):
    for layer in layers:
        for module in layer["mlp"].values():
            x = module(x)
    x.sum().backward()
"""

_ONE_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

_LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2,
    intermediate_size=128, num_attention_heads=2))
words = torch.randint(64, (64,))
dataset = [{"input_ids": words, "labels": words}] * 8
"""

_TRAINED = """
assert trainer.offload.last_step.offloaded_bytes > 0
trainer.offload.close()
"""

_MOVED = "assert manager.last_step.offloaded_bytes > 0, manager.last_step"
PRELUDES = {
    '{"layers": "4-7", "site": "mlp", "offload": 2}': (
        _LAYERS,
        "assert offload.end_step()\n"
        "assert offload.last_step.by_name['layer'].recomputed_bytes > 0\n"
        "assert offload.last_step.by_name['mlp'].num_groups == 4",
    ),
    "most_slowdown_percent=3)": (
        f"{_LAYERS}\nfrom megatron_offload import get_act_offloading_ctx_manager",
        "assert offload.manager.config.policy.most_slowdown_percent == 3\n"
        "assert type(offload.manager.tuner).__name__ == 'RowSearch'",
    ),
    "seen = map_model(model, batch)": (
        f"{_LAYERS}\nbatch = torch.randn(2, 512, 512)",
        "assert 'layers.*.mlp.1' not in str(seen) and seen.num_bytes > 0",
    ),
    "megatron_core.install(config)": ("", "assert megatron_core.is_installed()"),
    "import megatron_offload.auto": (
        "import sys\nfrom types import SimpleNamespace\n"
        "cfg = SimpleNamespace(model=SimpleNamespace())\n"
        "sys.modules.pop('megatron_offload.auto', None)  # as in a new process\n",
        "from megatron_offload.integrations import megatron_core as core\n"
        "assert core.is_installed()",
    ),
    'offload_modules(model_chunks, ["mlp_fc1"': (
        _MEGATRON,
        "assert manager.step_number == 4 and manager.last_step.num_groups == 6",
    ),
    'offload_modules(model, ["layers.*.attention", "layers.*.mlp"])\nfor batch': (_LAYERS, _MOVED),
    "offload = OffloadActivations()\nfor batch": (
        _LAYERS,
        "assert offload.end_step()\nassert offload.last_step.offloaded_bytes > 0",
    ),
    "torch.compile(layer)": (f"{_LAYERS}{_EAGER}", _MOVED),
    "torch.cuda.CUDAGraph()": (_GRAPHS, f"{_MOVED}\nassert manager.last_step.is_captured"),
    'group_start(x, "mlp")': (
        f"{_LAYERS}embed, layers = model.output, [layer.mlp for layer in model.layers]\n"
        "loss = lambda x: x.sum()\n",
        _MOVED,
    ),
    "with trace_step(manager, rank=rank)": (
        f"{_LAYERS}rank = 0\n",
        "from pathlib import Path\nassert Path('trace_0.json').is_file()",
    ),
    "class OffloadTrainer(OffloadMixin, Trainer)": (
        f"{_LLAMA}from transformers import TrainingArguments\n"
        "arguments = TrainingArguments('out', max_steps=2, report_to=[], use_cpu=True)\n",
        f"{_TRAINED}assert trainer.state.log_history",
    ),
    "class OffloadSFTTrainer(OffloadMixin, SFTTrainer)": (
        "import pytest\n"
        "pytest.importorskip('trl', reason='no TRL')\n"
        f"{_LLAMA}import pyarrow\nfrom datasets import Dataset\n"
        "from tokenizers import Tokenizer, models\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "words = {str(index): index for index in range(64)}\n"
        "words = Tokenizer(models.WordLevel(words, '0'))\n"
        "words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token='0', pad_token='1')\n"
        "words.save_pretrained('model')\n"
        "model.config._name_or_path = 'model'\n"
        "table = pyarrow.table({'input_ids': [list(range(64))] * 8})\n"
        "dataset = Dataset(table, fingerprint='tokens')  # else a hash, which pickles\n"
        "# Preparing a dataset would pickle a trainer's class, which here is in no module.\n"
        "arguments = SFTConfig('out', max_steps=2, report_to=[], use_cpu=True, bf16=False,\n"
        "    dataset_kwargs={'skip_prepare_dataset': True})\n",
        _TRAINED,
    ),
    "callback = OffloadCallback()": (
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import lightning, torch\n"
        "class Module(lightning.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = [torch.nn.Linear(512, 512) for _ in range(8)]\n"
        "        self.model = torch.nn.Sequential(*layers)\n"
        "    def training_step(self, batch, index):\n"
        "        return self.model(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "module = Module()\n"
        "batches = torch.utils.data.DataLoader(torch.randn(4096, 512), batch_size=1024)\n",
        "assert callback.offload.last_step.offloaded_bytes > 0",
    ),
    '"most_slowdown_percent": 5}': (_LAYERS, "assert offload.end_step()"),
    "accelerator.prepare(model, optimizer, batches)": (
        f"{_LAYERS}batches = torch.utils.data.DataLoader(torch.randn(64, 512), batch_size=32)\n",
        "assert offload.last_step.offloaded_bytes > 0",
    ),
    "for layer in model.layers:\n    fully_shard(layer)": (
        f"{_LAYERS}{_ONE_RANK}",
        "dist.destroy_process_group()\nassert offload.last_step.offloaded_bytes > 0",
    ),
    "from torchtitan.trainer import Trainer": (
        "import pytest\n"
        "pytest.importorskip('torchtitan.trainer', reason='no torchtitan')\n"
        f"{_LAYERS}",
        """
# Of a whole job, which needs a GPU, what stands around its forward and backward.
def run(inputs, labels, num_tokens, more):
    loss = model(inputs)
    loss.backward()
    return loss
trainer = OffloadTrainer.__new__(OffloadTrainer)
trainer.model_parts = [model]
trainer.parallel_dims = SimpleNamespace(pp_enabled=False)
trainer.post_dataloading_process = lambda batch, labels: (batch["input"], labels, {})
trainer.fwd_bwd_fn = run
for batch in data:
    step = {"input_dict": {"input": batch}, "labels": batch, "global_valid_tokens": batch}
    trainer.forward_backward_step(**step)
assert trainer.offload.end_step()
assert trainer.offload.last_step.offloaded_bytes > 0
""",
    ),
    "megatron_moe.install()": ("", ""),
    "set_activation_offloading(fc1, True)": (
        "from types import SimpleNamespace\n"
        "from torch import nn\n"
        "# TransformerEngine's operations need a GPU; any module takes the setting.\n"
        "make = lambda sizes: nn.Linear(8, 8)\n"
        "te = SimpleNamespace(ops=SimpleNamespace(\n"
        "    Sequential=nn.Sequential, GroupedLinear=make, ScaledSwiGLU=make))\n",
        "from megatron_offload.integrations.transformer_engine import activation_offloading as of\n"
        "assert [of(one) for one in mlp] == [True, False, None]",
    ),
    "choice.under([26 << 30] * 4)": ("", "assert len(planned.step.ranks) == 4"),
    "CPUOffload(offload_ratio": (
        f"{_LAYERS}"
        "data = [(batch, batch) for batch in data]\n"
        "resnet, head = model.layers[0], model.layers[1]\n"
        "criterion = nn.functional.mse_loss\n",
        "assert CPUOffload(tag='head').last_step.offloaded_bytes > 0",
    ),
    "simulation = simulate(job": ("", "assert simulation.step_us > 0"),
    'recompute=["norm", "mlp_act", "**.dropout"])': (
        _LAYERS,
        'assert offload.last_step.by_name["activations"].recomputed_bytes > 0',
    ),
    'OffloadConfig(recompute="layer")': (
        _LAYERS,
        'assert offload.last_step.by_name["layer"].recomputed_bytes > 0',
    ),
    "cross_entropy(logits, target, dtype=torch.float32)": (
        "import torch\n"
        "logits = torch.randn(96, 512).bfloat16().requires_grad_()\n"
        "target = torch.randint(512, (96,))\n",
        "expected = torch.nn.functional.cross_entropy(logits.float(), target)\n"
        "assert torch.equal(loss, expected) and logits.grad is not None",
    ),
    "recomputable(torch.nn.functional.gelu, y)": (
        f"{_LAYERS}linear, x = model.output, torch.randn(1024, 512, requires_grad=True)\n",
        'assert manager.last_step.by_name["ffn"].recomputed_bytes > 0',
    ),
    "checkpoint(layer, x, use_reentrant=False)": (
        _LAYERS,
        "assert offload.last_step.offloaded_bytes >= 4 * data[0].nbytes, offload.last_step",
    ),
    "offload_pipeline(schedule)": (
        f"{_LAYERS}{_ONE_RANK}"
        "from torch.distributed.pipelining import PipelineStage\n"
        "stages = [PipelineStage(model.layers[i], i, 2, torch.device('cpu')) for i in range(2)]\n"
        "data = [(batch, batch) for batch in data]\n"
        "loss_fn = nn.functional.mse_loss\n",
        "dist.destroy_process_group()",
    ),
    "get_act_offloading_ctx_manager(model, enable_activation_offloading=True)": (
        _LAYERS,
        "assert offload.manager.last_step.offloaded_bytes > 0",
    ),
}
"""For each snippet a text that it alone holds: what comes before it, and what must be so after."""

SLOW_SNIPPETS = {
    "megatron_core.install(config)": "imports all of megatron-core",
    "import megatron_offload.auto": "likewise",
    "torch.compile(layer)": "compiles",
    "torch.cuda.CUDAGraph()": "takes seventeen steps",
    "callback = OffloadCallback()": "imports all of Lightning",
    "choice.under([26 << 30] * 4)": "chooses for four ranks",
}
"""Of `PRELUDES`, those that take seconds, and why."""
