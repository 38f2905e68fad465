"""Whether bf16 activations fit 12 bits a value: a fixed code, its rates, and what it costs a GPU.

A block of 256 values keeps signs and mantissas whole, and of each exponent how far it lies below
the block's largest, in 4 bits; the last of these codes is a zero exponent. Up to `MOST_ESCAPES`
values further below are listed with the block. A block with more goes raw, into slots behind all.

    python benchmarks/packed_link.py rates --steps 2000 --output rates.json   # trains on a GPU
    python benchmarks/packed_link.py speed --output speed.json
    python benchmarks/packed_link.py check                                    # without a GPU, too
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 256
MOST_ESCAPES = 7
HEAD = 2 + 2 * MOST_ESCAPES
PACKED = BLOCK + BLOCK // 2 + HEAD
"""Bytes of a block: signs and mantissas, codes, and a head of base, count, escapes."""
RAW = 255


def pack(values):
    """Return planes and raw blocks of a bf16 tensor of n blocks: the definition.

    That is signs and mantissas (n, 256), codes (n, 128), heads (n, 16), slots (n,) of raw blocks,
    which kernels put into the head, raw (r, 256).
    """
    bits = values.reshape(-1, BLOCK).view(torch.int16).int() & 0xFFFF
    exponents = (bits >> 7) & 0xFF
    base = exponents.amax(1, keepdim=True)
    below = base - exponents
    is_zero = exponents == 0
    escapes = ~is_zero & (below > 14)
    codes = torch.where(is_zero | escapes, 15, below)
    signs = ((bits & 0x7F) | ((bits >> 8) & 0x80)).to(torch.uint8)
    half = BLOCK // 2
    nibbles = (codes[:, :half] | (codes[:, half:] << 4)).to(torch.uint8)
    count = escapes.sum(1)
    heads = torch.zeros(len(bits), HEAD, dtype=torch.uint8, device=bits.device)
    heads[:, 0], is_raw = base[:, 0].to(torch.uint8), count > MOST_ESCAPES
    heads[:, 1] = torch.where(is_raw, RAW, count).to(torch.uint8)
    number = escapes.cumsum(1) - 1
    rows, places = (escapes & (number < MOST_ESCAPES) & ~is_raw[:, None]).nonzero(as_tuple=True)
    at = 2 + 2 * number[rows, places]
    heads[rows, at] = places.to(torch.uint8)
    heads[rows, at + 1] = exponents[rows, places].to(torch.uint8)
    slots = torch.where(is_raw, is_raw.cumsum(0) - 1, -1).int()
    return signs, nibbles, heads, slots, bits[is_raw].to(torch.int32)


def unpack(signs, nibbles, heads, slots, raw):
    """Return the bf16 values of what `pack` has returned."""
    nibbles, heads = nibbles.int(), heads.int()
    codes = torch.cat([nibbles & 15, nibbles >> 4], 1)
    exponents = torch.where(codes == 15, 0, heads[:, :1] - codes)
    for i in range(MOST_ESCAPES):
        rows = ((heads[:, 1] > i) & (heads[:, 1] != RAW)).nonzero()[:, 0]
        exponents[rows, heads[rows, 2 + 2 * i]] = heads[rows, 3 + 2 * i]
    signs = signs.int()
    bits = (signs & 0x7F) | ((signs & 0x80) << 8) | (exponents << 7)
    is_raw = slots >= 0
    bits[is_raw] = raw[slots[is_raw].long()].to(bits.dtype)
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).short().view(torch.bfloat16)


def escapes_of(values):
    """Return how many escapes each block of a bf16 tensor has: below its largest, and at best."""
    flat = values.detach().to(torch.bfloat16).reshape(-1)
    flat = flat[: flat.numel() // BLOCK * BLOCK].view(torch.int16).reshape(-1, BLOCK)
    exponents = (flat.int() >> 7) & 0xFF
    base = exponents.amax(1, keepdim=True)
    anchored = ((exponents != 0) & (base - exponents > 14)).sum(1)
    seen = torch.zeros(len(flat), 256 + 15, dtype=torch.int16, device=flat.device)
    seen.scatter_add_(1, exponents.long(), torch.ones_like(exponents, dtype=torch.int16))
    seen[:, 0] = 0
    sums = F.pad(seen.int().cumsum(1), (1, 0))
    best = (sums[:, 15:] - sums[:, :-15]).amax(1)
    return anchored, seen.int().sum(1) - best


def make_kernels():
    """Return the code as kernels: pack and unpack, each of all planes of a tensor in one go."""
    import triton
    import triton.language as tl

    @triton.jit
    def pack_kernel(x, signs, nibbles, heads, raw, used, num, capacity, B: tl.constexpr):
        rows = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        inside = (rows < num)[:, None]
        half = tl.arange(0, 128)[None, :]
        at = rows[:, None] * 256 + half
        lo = tl.load(x + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
        hi = tl.load(x + at + 128, mask=inside, other=0).to(tl.int32) & 0xFFFF
        e_lo, e_hi = (lo >> 7) & 0xFF, (hi >> 7) & 0xFF
        base = tl.maximum(tl.max(e_lo, 1), tl.max(e_hi, 1))
        b_lo, b_hi = base[:, None] - e_lo, base[:, None] - e_hi
        x_lo, x_hi = (e_lo != 0) & (b_lo > 14), (e_hi != 0) & (b_hi > 14)
        c_lo = tl.where((e_lo == 0) | x_lo, 15, b_lo)
        c_hi = tl.where((e_hi == 0) | x_hi, 15, b_hi)
        tl.store(signs + at, ((lo & 0x7F) | ((lo >> 8) & 0x80)).to(tl.uint8), mask=inside)
        tl.store(signs + at + 128, ((hi & 0x7F) | ((hi >> 8) & 0x80)).to(tl.uint8), mask=inside)
        tl.store(nibbles + rows[:, None] * 128 + half, (c_lo | (c_hi << 4)).to(tl.uint8), mask=inside)
        n_lo = tl.sum(x_lo.to(tl.int32), 1)
        count = n_lo + tl.sum(x_hi.to(tl.int32), 1)
        is_raw = count > 7
        head = heads + rows * 16
        valid = rows < num
        tl.store(head, base.to(tl.uint8), mask=valid)
        tl.store(head + 1, tl.where(is_raw, 255, count).to(tl.uint8), mask=valid)
        if tl.max(count, 0) > 0:
            i_lo = tl.cumsum(x_lo.to(tl.int32), 1) - 1
            i_hi = tl.cumsum(x_hi.to(tl.int32), 1) - 1 + n_lo[:, None]
            listed = inside & (~is_raw)[:, None]
            p_lo = head[:, None] + 2 + 2 * i_lo
            p_hi = head[:, None] + 2 + 2 * i_hi
            pos = half + tl.zeros_like(e_lo)
            tl.store(p_lo, pos.to(tl.uint8), mask=x_lo & listed)
            tl.store(p_lo + 1, e_lo.to(tl.uint8), mask=x_lo & listed)
            tl.store(p_hi, (pos + 128).to(tl.uint8), mask=x_hi & listed)
            tl.store(p_hi + 1, e_hi.to(tl.uint8), mask=x_hi & listed)
            ones = tl.zeros_like(count) + 1
            goes = is_raw & valid
            slot = tl.atomic_add(used + tl.zeros_like(count), ones, mask=goes)
            for i in tl.static_range(4):
                tl.store(head + 2 + i, (slot >> (8 * i)).to(tl.uint8), mask=goes)
            fits = (goes & (slot < capacity))[:, None]
            to = slot[:, None].to(tl.int64) * 256 + half
            tl.store(raw + to, lo.to(tl.int16), mask=fits)
            tl.store(raw + to + 128, hi.to(tl.int16), mask=fits)

    @triton.jit
    def unpack_kernel(x, signs, nibbles, heads, raw, num, B: tl.constexpr):
        rows = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        valid = rows < num
        inside = valid[:, None]
        half = tl.arange(0, 128)[None, :]
        at = rows[:, None] * 256 + half
        nib = tl.load(nibbles + rows[:, None] * 128 + half, mask=inside, other=0).to(tl.int32)
        lo = tl.load(signs + at, mask=inside, other=0).to(tl.int32)
        hi = tl.load(signs + at + 128, mask=inside, other=0).to(tl.int32)
        head = heads + rows * 16
        base = tl.load(head, mask=valid, other=0).to(tl.int32)[:, None]
        count = tl.load(head + 1, mask=valid, other=0).to(tl.int32)
        c_lo, c_hi = nib & 15, nib >> 4
        e_lo = tl.where(c_lo == 15, 0, base - c_lo)
        e_hi = tl.where(c_hi == 15, 0, base - c_hi)
        some = tl.max(count, 0) > 0
        if some:
            for i in tl.static_range(7):
                has = valid & (count > i) & (count != 255)
                pos = tl.load(head + 2 + 2 * i, mask=has, other=0).to(tl.int32)[:, None]
                exponent = tl.load(head + 3 + 2 * i, mask=has, other=0).to(tl.int32)[:, None]
                e_lo = tl.where(has[:, None] & (pos == half), exponent, e_lo)
                e_hi = tl.where(has[:, None] & (pos == half + 128), exponent, e_hi)
        lo = (lo & 0x7F) | ((lo & 0x80) << 8) | (e_lo << 7)
        hi = (hi & 0x7F) | ((hi & 0x80) << 8) | (e_hi << 7)
        if some:
            is_raw = valid & (count == 255)
            slot = tl.zeros_like(count).to(tl.int64)
            for i in tl.static_range(4):
                byte = tl.load(head + 2 + i, mask=is_raw, other=0).to(tl.int64)
                slot += byte << (8 * i)
            frm = slot[:, None] * 256 + half
            has = is_raw[:, None]
            lo = tl.where(has, tl.load(raw + frm, mask=has, other=0).to(tl.int32), lo)
            hi = tl.where(has, tl.load(raw + frm + 128, mask=has, other=0).to(tl.int32), hi)
        tl.store(x + at, lo.to(tl.int16), mask=inside)
        tl.store(x + at + 128, hi.to(tl.int16), mask=inside)

    return pack_kernel, unpack_kernel, triton


class Packed:
    """Buffers for one tensor of n blocks, in one piece of memory that a copy can take."""

    def __init__(self, n, device, share_raw=1.0, pin=False):
        self.n, self.capacity = n, math.ceil(n * share_raw)
        parts = [n * BLOCK, n * BLOCK // 2, n * HEAD, self.capacity * BLOCK * 2]
        size = sum(parts)
        if pin:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.signs, self.nibbles, self.heads, raw = self.memory.split(parts)
        self.raw = raw.view(torch.int16)


class Codec:
    def __init__(self, blocks=8, warps=4):
        self.pack_kernel, self.unpack_kernel, self.triton = make_kernels()
        self.blocks, self.warps = blocks, warps

    def pack(self, values, to, used):
        grid = (self.triton.cdiv(to.n, self.blocks),)
        self.pack_kernel[grid](
            values.view(torch.int16), to.signs, to.nibbles, to.heads, to.raw, used,
            to.n, to.capacity, self.blocks, num_warps=self.warps,
        )

    def unpack(self, packed, to):
        grid = (self.triton.cdiv(packed.n, self.blocks),)
        self.unpack_kernel[grid](
            to.view(torch.int16), packed.signs, packed.nibbles, packed.heads, packed.raw, packed.n, self.blocks, num_warps=self.warps,
        )


def samples(device):
    """Return bf16 tensors of whole blocks: all patterns, and what nets and users may have."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    shuffled = every[torch.randperm(len(every), generator=generator)]
    normal = torch.randn(1 << 17, generator=generator)
    outliers = normal.clone()
    outliers[::300] *= 3000
    rare = normal.clone()
    rare[::97] *= 2.0**-22
    found = {
        "every pattern": every.view(torch.bfloat16),
        "every pattern, shuffled": shuffled.view(torch.bfloat16),
        "normal": normal.bfloat16(),
        "outliers": outliers.bfloat16(),
        "a few small": rare.bfloat16(),
        "zeros": torch.zeros(BLOCK * 3).bfloat16(),
        "halves of zero": F.relu(normal).bfloat16(),
        "NaN and infinities": torch.tensor([math.nan, math.inf, -math.inf, -0.0] * 64).bfloat16(),
        "denormals": (normal * 2.0**-130).bfloat16(),
    }
    return {name: x.to(device) for name, x in found.items()}


def check(options):
    """Compare what comes out with what went in, of the definition and of the kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codec = Codec() if device == "cuda" else None
    for name, values in samples(device).items():
        planes = pack(values)
        back = unpack(*planes).view(-1)
        same = torch.equal(back.view(torch.int16), values.view(torch.int16))
        line = f"{name:26} definition {'equal' if same else 'WRONG'}"
        if codec is not None:
            for shift in (0, 1, 3):  # any alignment
                memory = torch.empty(values.numel() + shift, dtype=torch.bfloat16, device=device)
                own = memory[shift:]
                own.copy_(values)
                to = Packed(values.numel() // BLOCK, device)
                codec.pack(own, to, torch.zeros(1, dtype=torch.int32, device=device))
                out = torch.full_like(memory, 7)[shift:]
                codec.unpack(to, out)
                alike = torch.equal(out.view(torch.int16), values.view(torch.int16))
                is_same_code = all(
                    torch.equal(a.reshape(-1), b.reshape(-1))
                    for a, b in zip((to.signs, to.nibbles), planes, strict=False)
                )
                same &= alike and is_same_code
            line += f", kernels {'equal' if same else 'WRONG'}"
        print(line)
        if not same:
            sys.exit(1)


class Block(nn.Module):
    """A layer of one of three kinds of MLP: gated, GELU, or experts that are gated."""

    def __init__(self, width, heads, kind):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        inner = {"gated": width * 11 // 4, "gelu": 4 * width, "experts": width * 11 // 8}[kind]
        count = 8 if kind == "experts" else 1
        if count > 1:
            self.router = nn.Linear(width, count, False)
        self.up = nn.ModuleList(nn.Linear(width, inner, False) for _ in range(count))
        if kind != "gelu":
            self.gate = nn.ModuleList(nn.Linear(width, inner, False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(inner, width, False) for _ in range(count))

    def forward(self, x, rotary, see):
        b, s, w = x.shape
        see("residual", x)
        h = self.norm(x)
        see("norm output", h)
        q, k, v = self.qkv(h).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotary), rotate(k, rotary)
        for name, one in (("q", q), ("k", k), ("v", v)):
            see(name, one)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w)
        see("attention output", a)
        x = x + self.out(a)
        h = self.norm2(x)
        if self.kind == "experts":
            return x + self.route(h.reshape(-1, w), see).view_as(x)
        return x + self.mlp(h, 0, see)

    def mlp(self, h, number, see):
        up, experts = self.up[number](h), "expert's " if self.kind == "experts" else ""
        if self.kind == "gelu":
            see("GELU input", up)
            made = F.gelu(up)
            see("GELU output", made)
        else:
            gate = self.gate[number](h)
            see(experts + "gate", gate)
            see(experts + "up", up)
            made = F.silu(gate) * up
            see(experts + "product", made)
        return self.down[number](made)

    def route(self, h, see):
        weights, chosen = self.router(h).float().softmax(-1).topk(2)
        out = torch.zeros_like(h)
        for number in range(len(self.up)):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            given = h[rows]
            see("expert's input", given)
            made = self.mlp(given, number, see) * weights[rows, place, None].to(h.dtype)
            out = out.index_add(0, rows, made.to(out.dtype))
        return out


def rotate(x, rotary):
    cos, sin = rotary
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Net(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        kinds = ["gated", "gelu", "gated", "experts"]
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kinds[i % 4]) for i in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, False)
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, 1, 2 * heads / width))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets, see):
        # The residual stream is bf16, as large models have it.
        x = self.embed(tokens).bfloat16()
        for number, block in enumerate(self.blocks):
            x = block(x, (self.cos, self.sin), lambda kind, t, n=number: see(kind, n, t))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def read_text(most_bytes):
    """Return texts that Python and its packages ship: code, manuals, licences."""
    texts, total = [], 0
    roots = [Path(p) for p in sys.path if Path(p).is_dir() and "python" in p.lower()]
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".pyi", ".txt", ".rst", ".md", ".json") and path.is_file():
                try:
                    text = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                texts.append(text[:200_000])
                total += len(texts[-1])
                if total > most_bytes:
                    return texts
    return texts


def rates(options):
    """Train, and count escapes of what layers save, early and late."""
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    texts = read_text(options.text_mb << 20)
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    kinds = trainers.BpeTrainer(vocab_size=options.vocabulary, show_progress=False)
    tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 2000)], kinds)
    ids = [torch.tensor(e.ids, dtype=torch.int32) for e in tokenizer.encode_batch_fast(texts)]
    ids = [ids[i] for i in torch.randperm(len(ids)).tolist()]
    data = torch.cat(ids)
    length, batch = options.length, options.batch
    windows = data[: len(data) // (length + 1) * (length + 1)].view(-1, length + 1)
    windows = windows[torch.randperm(len(windows))]
    print(f"{len(data) / 1e6:.1f} M tokens of {len(texts)} files in "
          f"{time.perf_counter() - started:.0f} s", flush=True)
    net = Net(options.layers, options.width, options.width // 128, options.vocabulary, length)
    net = net.to(device).bfloat16()
    net.cos, net.sin = net.cos.float(), net.sin.float()
    master = [p.detach().float().requires_grad_() for p in net.parameters()]
    adam = torch.optim.AdamW(master, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    seen = []
    print(f"{sum(p.numel() for p in master) / 1e6:.0f} M parameters", flush=True)

    def look(kind, number, tensor):
        if is_seen:
            anchored, best = escapes_of(tensor)
            for how, count in (("anchored", anchored), ("best", best)):
                histogram[kind, how] += torch.bincount(count.clamp(max=64), minlength=65).cpu()

    for step in range(options.steps):
        is_last = step == options.steps - 1 or time.perf_counter() - started > options.seconds
        rate = min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / options.steps)) + 0.05
        for group in adam.param_groups:
            group["lr"] = 6e-4 * rate
        rows = [(step * batch + i) % len(windows) for i in range(batch)]
        one = windows[rows].long().to(device)
        is_seen = is_last or step in (0, 50, options.steps // 4)
        histogram = defaultdict(lambda: torch.zeros(65, dtype=torch.long))
        loss = net(one[:, :-1], one[:, 1:], look)
        loss.backward()
        grads = [p.grad.float() for p in net.parameters()]
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        scale = (1 / norm).clamp(max=1)
        for m, g in zip(master, grads, strict=True):
            m.grad = g * scale
        adam.step()
        for p, m in zip(net.parameters(), master, strict=True):
            p.data.copy_(m)
            p.grad = None
        if step % 100 == 0 or is_seen:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
        if is_seen:
            table = {}
            for (kind, how), counts in sorted(histogram.items()):
                share = counts.double() / counts.sum()
                values = (share * torch.arange(65)).sum() / BLOCK
                ratios = {
                    n: 512 / (386 + 2 * n + 512 * share[n + 1 :].sum().item()) for n in range(16)
                }
                table.setdefault(kind, {})[how] = {
                    "escapes": values.item(),
                    "raw_blocks": {n: share[n + 1 :].sum().item() for n in (1, 3, 7)},
                    "ratio_7": ratios[7],
                    "best_ratio": max(ratios.values()),
                    "best_ratio_at": max(ratios, key=ratios.get),
                    "blocks": int(counts.sum()),
                }
            seen.append({"step": step, "loss": loss.item(), "kinds": table})
            for kind, both in table.items():
                a, b = both["anchored"], both["best"]
                print(f"  {kind:18} escapes {a['escapes']:.2%} (best window {b['escapes']:.2%}), blocks "
                      f"of over 7 {a['raw_blocks'][7]:.2%} ({b['raw_blocks'][7]:.2%}), ratio "
                      f"{a['best_ratio']:.3f} ({b['best_ratio']:.3f})", flush=True)
        if is_last:
            break
    write(options, {"parameters": sum(p.numel() for p in master), "tokens": len(data), "seen": seen})


def timed(run, seconds=0.3):
    """Return the time of one call, of the median of three rounds, by events."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(3, int(seconds / 3 / max(1e-6, time.perf_counter() - begin)))
    found = []
    for _ in range(3):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(count):
            run()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b) / count / 1e3)
    return sorted(found)[1]


def speed(options):
    """Measure the kernels alone, beside products of matrices, and a link with and without."""
    device = torch.device("cuda")
    size = 256 << 20
    values = torch.randn(size // 2, device=device).bfloat16()
    used = torch.zeros(1, dtype=torch.int32, device=device)
    result = {"alone": []}
    best = None
    for blocks, warps in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4)):
        codec, to, out = Codec(blocks, warps), Packed(size // 512, device, 0.01), torch.empty_like(values)
        rate = size / timed(lambda: codec.pack(values, to, used)) / 1e9
        back = size / timed(lambda: codec.unpack(to, out)) / 1e9
        row = {"blocks": blocks, "warps": warps, "pack_gbps": rate, "unpack_gbps": back}
        result["alone"].append(row)
        print(row, flush=True)
        if best is None or min(rate, back) > best[0]:
            best = min(rate, back), codec
    codec = best[1]
    out, copied = torch.empty_like(values), torch.empty_like(values)
    result["device_copy_gbps"] = size / timed(lambda: copied.copy_(values)) / 1e9
    n = 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    c = torch.empty(n, n, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(priority=options.priority)

    def products(num=400):
        for _ in range(num):
            torch.mm(a, b, out=c)

    def wall(beside=None, rounds=3):
        """Return the time of the products, and bytes that went by in it."""
        found = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            products()
            end.record()
            moved = 0
            while beside is not None and not end.query():
                moved += beside()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            torch.cuda.synchronize()
            found.append((seconds, moved / seconds / 1e9))
        return sorted(found)[1]

    products(50)
    alone = wall()[0]
    result["products"] = {"alone_s": alone}

    def wait(event):
        while not event.query():
            time.sleep(2e-5)

    def loop(stream_work):
        """Return a function that keeps some of the work queued, and tells what went by."""
        queue = []

        def beside():
            moved = stream_work()
            event = torch.cuda.Event()
            event.record(side)
            queue.append(event)
            if len(queue) > 4:
                wait(queue.pop(0))
            return moved

        return beside

    def packing():
        with torch.cuda.stream(side):
            codec.pack(values, to_all, used)
        return size

    to_all = Packed(size // 512, device, 0.01)
    seconds, gbps = wall(loop(packing))
    result["products"]["packing_all_the_time"] = {"slower": seconds / alone - 1, "gbps": gbps}
    print(result["products"], flush=True)
    sweep = []
    for mib in (64, 256):
        part = mib << 20
        own = values[: part // 2]
        host = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        host_back = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        packed, packed_back = Packed(part // 512, device, 0.0), Packed(part // 512, device, 0.0)
        codec.pack(own, packed_back, used)
        torch.cuda.synchronize()
        num = packed.memory.numel()
        row = {"mib": mib, "ratio": part / num}
        raw_bytes, received = own.view(torch.uint8), torch.empty(part, dtype=torch.uint8, device=device)
        host_packed = torch.empty(num, dtype=torch.uint8, pin_memory=True)
        host_packed.copy_(packed_back.memory)

        def raw_out():
            host.copy_(raw_bytes, non_blocking=True)

        def packed_out():
            codec.pack(own, packed, used)
            host_packed.copy_(packed.memory, non_blocking=True)

        def raw_in():
            received.copy_(host, non_blocking=True)

        def packed_in():
            packed_back.memory.copy_(host_packed, non_blocking=True)
            codec.unpack(packed_back, out[: part // 2])

        for name, work in (("raw_out", raw_out), ("packed_out", packed_out),
                           ("raw_in", raw_in), ("packed_in", packed_in)):
            row[name + "_gbps"] = part / timed(work) / 1e9

            def here(work=work):
                with torch.cuda.stream(side):
                    work()
                return part

            seconds, gbps = wall(loop(here))
            row[name + "_beside"] = {"slower": seconds / alone - 1, "gbps": gbps}
        row["alone_again"] = wall()[0] / alone - 1
        sweep.append(row)
        print(json.dumps(row), flush=True)
    result["sweep"] = sweep
    write(options, result)


def write(options, result):
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }
    if options.output:
        options.output.write_text(json.dumps(head | result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    for run in (check, rates, speed):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--output", type=Path)
        if run is speed:
            command.add_argument("--priority", type=int, default=0, help="of the stream of copies")
        if run is rates:
            for name, default in (("steps", 2000), ("layers", 24), ("width", 1024), ("length", 1024),
                                  ("batch", 16), ("vocabulary", 16384), ("text-mb", 150), ("seconds", 400)):
                command.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
