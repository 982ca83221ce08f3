"""The smallest engine: the ideas of PagedAttention in one file. Read this file first.

    python -m nanopaged.smallest

A language model writes one token at a time, and every token attends to all tokens
before it. So each layer keeps a key and a value for each token, K and V, and does not
compute them again. Together they are the KV cache.

Nobody knows how long an answer will be. If every request reserved memory for the
longest possible answer, most of that memory would stay empty. So the memory for K and
V is divided into small blocks, and a request gets another block when its last one is
full.

One step computes tokens of many requests. The processor must read all weights of the
model from memory to compute even a single token. A step reads the weights once for all
its tokens, so ten answers take little longer than one.

    sequence     one request: the tokens of the prompt, and of the answer so far
    block        room for the K and V of block_size tokens, in all layers
    pool         the memory for all blocks
    block table  the ids of a sequence's blocks, in order. The token at position p is in
                 block block_table[p // block_size], at the offset p % block_size
    computed     a token is computed when its K and V are in the pool
    step         one forward pass for the next tokens of many sequences
    batch        the tokens of a step in one flat list, without padding
    budget       how many tokens one step may compute
    decode       to compute the newest token of an answer, and choose the next token
    chunk        a part of a prompt that one step computes, if the budget is too small
                 for the whole prompt. So a long prompt does not stop the answers
    publish      to list a full block in the prefix cache. A sequence that begins with
                 the same tokens finds the block there, and does not compute it again
    preempt      to take all blocks from a sequence because the pool is full. Its tokens
                 are computed again later

The engine repeats one step until no request is left. The end of this file does that:

    batch = scheduler.schedule()       plan which tokens to compute
    tokens = runner.execute(batch)     compute them in one forward pass
    scheduler.update(batch, tokens)    append the new tokens to their sequences
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

# The bundled model is small, and writes like Shakespeare.
MODEL = Path(__file__).parent / "shakespeare"
# These numbers are from the model's config.json.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, EPS, EOS = 6, 2, 64, 1e-6, 0


class Sequence:
    """One request.

    For example, let block_size be 4, and let a prompt have 6 tokens. A step computes
    the prompt and chooses t0, the first token of the answer. Then the sequence has

        token_ids = [p0, p1, p2, p3, p4, p5, t0]
        num_computed_tokens = 6
        block_table = [0, 1]

    Block 0 is full. Block 1 holds p4 and p5. The next step decodes: it computes t0,
    stores the K and V of t0 in block 1, and chooses t1.
    """

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.token_ids = list(prompt)
        self.max_len = len(prompt) + max_tokens
        self.num_computed_tokens = 0
        self.block_table: list[int] = []


# The tokens that a step computes. Each is given by its sequence and its position.
Batch = list[tuple[Sequence, int]]


class BlockManager:
    """Decides which sequences hold which blocks.

    Sequences that begin with the same tokens share full blocks. That is safe, because
    nobody writes into a full block. A block that no sequence holds is free. A free
    block keeps its K and V until it is taken for other tokens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # how many sequences hold each block
        self.free_blocks = list(range(num_blocks))  # taken from the front
        # The prefix cache. The K and V of a block depend on all tokens before it, too.
        # So the key of a full block has all tokens from the start of the sequence to
        # the end of the block. The value is the block's id.
        self.published: dict[tuple[int, ...], int] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def match(self, seq: Sequence) -> None:
        """When a sequence begins to run, give it the blocks that hold its first tokens.
        The last token is always computed, because its output decides the next token.
        """
        for end in range(self.block_size, len(seq.token_ids), self.block_size):
            block_id = self.published.get(tuple(seq.token_ids[:end]))
            if block_id is None:
                break
            # If the block was free, it no longer is.
            self.free_blocks = [b for b in self.free_blocks if b != block_id]
            self.ref_counts[block_id] += 1
            seq.block_table.append(block_id)
            seq.num_computed_tokens = end

    def grow(self, seq: Sequence) -> bool:
        """Give a sequence blocks for all its tokens. If too few blocks are free, change
        nothing and return False.
        """
        num_blocks = self.num_blocks_for(len(seq.token_ids))
        if num_blocks - len(seq.block_table) > len(self.free_blocks):
            return False
        while len(seq.block_table) < num_blocks:
            block_id = self.free_blocks.pop(0)
            # The block gets new contents, so nobody may find the old ones any more.
            self.published = {k: b for k, b in self.published.items() if b != block_id}
            self.ref_counts[block_id] = 1
            seq.block_table.append(block_id)
        return True

    def mark_computed(self, seq: Sequence, end: int) -> None:
        """Count all tokens before position `end` as computed. If the last of them fills
        its block, publish the block.
        """
        seq.num_computed_tokens = end
        if end % self.block_size == 0:
            block_id = seq.block_table[end // self.block_size - 1]
            self.published[tuple(seq.token_ids[:end])] = block_id

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence. Its last block becomes free first, and is
        taken by others first. So the beginning of the sequence can be found longest.
        """
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_blocks.append(block_id)
        seq.block_table, seq.num_computed_tokens = [], 0


class Scheduler:
    """Decides which tokens a step computes: first come, first served.

    The oldest sequences run, and the younger ones wait. So `running` is always the
    beginning of `unfinished`. When the pool is full, the youngest running sequence is
    preempted: it loses its blocks, keeps its tokens, and waits. The oldest sequence can
    have the whole pool if it must, so it always finishes, and then the next one is the
    oldest.
    """

    def __init__(self, block_manager: BlockManager, budget: int) -> None:
        self.block_manager, self.budget = block_manager, budget
        self.unfinished: list[Sequence] = []  # the oldest first
        self.running: list[Sequence] = []  # those with blocks, the oldest first

    def add(self, seq: Sequence) -> None:
        """Queue a request. It must fit into the pool when no other request runs."""
        num_blocks = len(self.block_manager.ref_counts)
        needed = self.block_manager.num_blocks_for(seq.max_len)
        if needed > num_blocks:
            raise ValueError(f"num_blocks must be at least {needed} for this request, "
                             f"got {num_blocks}: raise it, or lower max_tokens")
        self.unfinished.append(seq)

    def schedule(self) -> Batch:
        """Plan the next step: all tokens that are not computed yet, those of the oldest
        sequence first, up to the budget. An answer has one such token, its newest. A
        prompt has many. If the budget ends inside a prompt, this step computes a chunk,
        and the next step continues there.
        """
        batch: Batch = []
        for seq in list(self.unfinished):
            if seq not in self.running:
                self.block_manager.match(seq)
                self.running.append(seq)
            # Preempt the youngest until there is room for this sequence. If it has just
            # started to run, it is the youngest itself, and nobody else is preempted.
            while seq in self.running and not self.block_manager.grow(seq):
                self.block_manager.free(self.running.pop())
            if seq not in self.running:
                break  # All younger sequences wait, too.
            end = len(seq.token_ids)
            batch += [(seq, p) for p in range(seq.num_computed_tokens, end)]
        return batch[: self.budget]

    def update(self, batch: Batch, tokens: list[int]) -> None:
        """Append the new tokens, and free the blocks of sequences that are complete.
        After each token of the batch, `tokens` has the one that the model would choose.
        """
        for (seq, position), token in zip(batch, tokens, strict=True):
            self.block_manager.mark_computed(seq, position + 1)
            # Inside a prompt, the next token is known, and the model's is not needed.
            if position + 1 == len(seq.token_ids):
                seq.token_ids.append(token)
                if token == EOS or len(seq.token_ids) == seq.max_len:
                    self.block_manager.free(seq)
                    self.unfinished.remove(seq)
                    self.running.remove(seq)


class ModelRunner:
    """The model, and the pool of K and V."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        weights = load_file(MODEL / "model.safetensors")
        self.weights: dict[str, Tensor] = {k: w.float() for k, w in weights.items()}
        kv_shape = 2, NUM_KV_HEADS, HEAD_DIM  # of one token in one layer
        self.kv_cache = torch.zeros(NUM_LAYERS, num_blocks, block_size, *kv_shape)

    def execute(self, batch: Batch) -> list[int]:
        """Compute all tokens of a step together. Return the most likely next token
        after each of them.
        """
        block_ids = [seq.block_table[p // self.block_size] for seq, p in batch]
        positions = torch.tensor([p for _, p in batch])
        offsets = positions % self.block_size
        # The rotary embedding turns Q and K by angles: [num_tokens, 1, head_dim / 2]
        angles = positions[:, None, None] / 10000 ** torch.arange(0, 1, 2 / HEAD_DIM)
        token_ids = [seq.token_ids[p] for seq, p in batch]
        x = self.weights["model.embed_tokens.weight"][token_ids]  # [num_tokens, hidden]
        for layer in range(NUM_LAYERS):
            at = f"model.layers.{layer}."  # how the names of its weights begin
            h = self.norm(x, at + "input_layernorm")
            q = self.rotated_heads(h, at + "self_attn.q", angles)
            k = self.rotated_heads(h, at + "self_attn.k", angles)
            v = self.linear(h, at + "self_attn.v_proj").unflatten(1, (-1, HEAD_DIM))
            # First all new K and V are stored. Both sides of this line have the shape
            # [num_tokens, 2, num_kv_heads, head_dim].
            self.kv_cache[layer, block_ids, offsets] = torch.stack((k, v), dim=1)
            # Then attention reads the old ones and the new ones alike.
            attended = [self.attend(layer, q[i], *batch[i]) for i in range(len(batch))]
            x = x + self.linear(torch.stack(attended), at + "self_attn.o_proj")
            h = self.norm(x, at + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(h, at + "mlp.gate_proj"))
            h = gate * self.linear(h, at + "mlp.up_proj")
            x = x + self.linear(h, at + "mlp.down_proj")
        # The weights are tied: the matrix that embeds tokens also gives the logits.
        logits = self.linear(self.norm(x, "model.norm"), "model.embed_tokens")
        return logits.argmax(dim=-1).tolist()  # from [num_tokens, vocab_size]

    def attend(self, layer: int, query: Tensor, seq: Sequence, position: int) -> Tensor:
        """Paged attention of one token. Its query sees the keys of its sequence from
        position 0 to its own.

        query: [num_heads, head_dim] -> [num_heads * head_dim]
        """
        # The blocks, in the order of the sequence, become [num_keys, 2, num_kv_heads,
        # head_dim]. What follows the token in its block is cut off.
        kv = self.kv_cache[layer, seq.block_table].flatten(0, 1)[: position + 1]
        # Several heads of the query share one head of K and V, so repeat those.
        k, v = kv.repeat_interleave(len(query) // NUM_KV_HEADS, dim=2).unbind(1)
        scores = torch.einsum("hd,khd->hk", query, k) / HEAD_DIM**0.5
        return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v).flatten()

    def rotated_heads(self, h: Tensor, name: str, angles: Tensor) -> Tensor:
        """The heads of Q or K: [num_tokens, num_heads, head_dim]."""
        heads = self.linear(h, name + "_proj").unflatten(1, (-1, HEAD_DIM))
        a, b = self.norm(heads, name + "_norm").chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], EPS)


if __name__ == "__main__":
    # Three requests arrive in steps 1, 3 and 6. The pool is too small for all of them.
    # A row has the newest token and the block table of each request.
    #
    #   step  1   The budget ends inside the prompt of request 1: its last token follows
    #             in step 2.
    #   step  3   Requests 1 and 2 begin with the same 4 tokens, so they share block 0.
    #   step  6   Requests 1 and 2 decode. The rest of the budget computes a chunk of
    #             request 3, whose prompt is complete in step 9.
    #   step 11   Request 2 needs a block, and none is free. Request 3 is preempted.
    #   step 15   Request 2 needs another block. It is the youngest that runs, so it is
    #             preempted itself.
    #   step 17   Request 1 is done, and its blocks become free.
    #   step 18   Requests 2 and 3 return. Request 2 finds its 4 full blocks in the
    #             prefix cache, so only its newest token is computed. The full block of
    #             request 3 was taken by request 1. So all tokens of request 3 are
    #             computed again, as a prompt would be, until step 20.
    #
    # The vocabulary writes Ġ for a space, and Ċ for the end of a line. The rows have _
    # and / instead, which every console can print.
    vocabulary = json.loads((MODEL / "tokenizer.json").read_bytes())["model"]["vocab"]
    pieces = {t: p.replace("Ġ", "_").replace("Ċ", "/") for p, t in vocabulary.items()}
    arrivals = {1: "O Ġmy Ġlord , Ġis", 3: "O Ġmy Ġlord , ĠI", 6: "R O M E O : Ċ"}
    scheduler = Scheduler(BlockManager(num_blocks=8, block_size=4), budget=4)
    runner = ModelRunner(num_blocks=8, block_size=4)
    requests, step = [], 0
    while arrivals or scheduler.unfinished:
        step += 1
        if step in arrivals:
            prompt = [vocabulary[piece] for piece in arrivals.pop(step).split()]
            requests.append(Sequence(prompt, max_tokens=16))
            scheduler.add(requests[-1])
        batch = scheduler.schedule()
        tokens = runner.execute(batch)
        scheduler.update(batch, tokens)
        row = f"step {step:2}"
        for seq in requests:
            state = "waits" if seq in scheduler.unfinished else "done"
            row += f"   {pieces[seq.token_ids[-1]]:6}{seq.block_table or state!s:20}"
        print(row.rstrip())

# You can stop here. The engine has the same four classes and the same step, and is best
# read in this order:
#
#     engine.py           the step, and requests that come, fail, or are aborted
#     sequence.py         a group: several sequences that answer one prompt
#     block_manager.py    sequences of a group share even a block that is not full. One
#                         that writes into the block gets a copy first. Blocks can also
#                         move to CPU memory
#     prefix_cache.py     short keys for the prefix cache, which are still exact
#     batch.py            a step in plain numbers, so the model runner sees no sequence
#     scheduler.py        whole groups are admitted, preempted and resumed
#     beam_search.py      the most likely sequences of a group are kept
#     attention.py        the queries of a chunk are computed together
#     model_runner.py     the inputs of a step are made on the device
#     paged_attention.py  K and V are read block by block, and not copied first
#     model.py            one decoder for Llama, Mistral, Qwen2 and Qwen3
#     fused.py            what is between matrix products becomes few GPU kernels
#     sampler.py          tokens are drawn at random
#     logits.py           penalties, bans, and functions of the caller
#     logprobs.py         log-probabilities
#     config.py           options of the engine, parameters of a request
#     stats.py            counters
#     checks.py           errors that name what is wrong
#     ranks.py            several GPUs compute one model
#     gpu/                kernels for GPUs, and steps that are recorded and repeated
#
# Five things look different there. The engine counts tokens as computed when it plans
# their step, and not in `update`. Its `match` only finds blocks, and the scheduler
# gives them to the sequence. A whole chunk is one entry of a batch. `max_len` belongs
# to the group. Each layer has its own `kv_cache`, where a block holds first all its K,
# and then all its V.
#
# On a GPU, the engine also plans a step before the tokens of the last step are known.
# The end of batch.py explains how.
