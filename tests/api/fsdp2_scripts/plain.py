"""A plain FSDP2 script: a small language model, AdamW, gradient clipping, evaluation in between.

torchrun --nproc-per-node 4 tests/api/fsdp2_scripts/plain.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

VOCAB, DIM, LENGTH, STEPS = 32, 16, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            logits = self(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


def main(dtype: torch.dtype) -> list[float]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model().to(dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    register_fsdp_forward_method(model, "generate")
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    model.set_reshard_after_backward(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    losses = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step == 2:
            model.unshard(async_op=True)
        tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses += [total.item() / dist.get_world_size(), norm.item()]
        if step == 3:
            losses.append(float(model.generate(tokens[:, :3], 4).sum()))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main(torch.float32))
    dist.destroy_process_group()
