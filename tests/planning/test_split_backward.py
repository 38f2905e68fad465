"""What torch keeps between the two parts of a split backward, which the simulator counts."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

TOKENS, WIDTH, VOCABULARY = 16, 8, 32


class Saved:
    def __init__(self, tensor):
        self.tensor = tensor.detach()  # an output that held its own node would never go


def test_all_but_the_loss_stays_for_the_weights_with_the_gradients_of_outputs():
    alive, place = weakref.WeakKeyDictionary(), ""

    def pack(tensor):
        saved = Saved(tensor)
        alive[saved] = place
        return saved

    def held():
        gc.collect()
        return Counter(alive.values())

    def weight(rows, columns):
        return torch.randn(rows, columns, requires_grad=True)

    weights = [weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, VOCABULARY)]
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        place = "qkv"
        q, k, v = (x @ weights[0]).view(1, 1, TOKENS, 3 * WIDTH).chunk(3, dim=-1)
        place = "attention"
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).view(TOKENS, WIDTH)
        place = "activation"
        y = functional.gelu(y @ weights[1])
        place = "head"
        logits = y @ weights[2]
        place = "loss"
        loss = functional.cross_entropy(logits.float(), torch.arange(TOKENS))
    del q, k, v, y, logits
    before = held()
    losses = [loss]
    del loss
    _, groups = stage_backward_input(losses, None, [x], iter(weights))
    losses.clear()
    after = held()
    assert after.keys() == before.keys() - {"loss"}
    assert all(after[name] == before[name] for name in after), "attention and activation too"
    gradients = [tuple(grad.shape) for group in groups for (grad,) in group["grads"]]
    outputs = [(TOKENS, weight.shape[1]) for weight in weights]
    assert sorted(gradients) == sorted(outputs)
    stage_backward_weight(iter(weights), groups)
    assert all(weight.grad is not None for weight in weights)
