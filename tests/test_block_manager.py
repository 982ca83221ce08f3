"""Which sequence holds which block, which is taken next, and what a hit may return.

Worked examples with exact block ids come first. Then a Hypothesis machine drives a
`BlockManager` together with an independent model of what every slot of every block
holds. A wrong hit would serve one prompt's cache to another, a missing copy one
sequence's cache to its sibling, and a leaked block would never come back: the machine
finds each of them, with a minimal script.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from helpers import new_group
from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Sequence

A, B, C, D = ([digit] * 4 for digit in range(1, 5))  # a block's worth of tokens each
DEVICE, SWAP, GONE = "device", "swap", "gone"
SAME_HASH = 2**61 - 1  # Python's hash of an int is the remainder of this division


def group_of(tokens, n=1, salt=None):
    return new_group(tokens, SamplingParams(n=n, max_tokens=None, cache_salt=salt))


def admit(manager, tokens, n=1, salt=None):
    """A sequence with its blocks, whose prefix may come from the cache."""
    seq = group_of(tokens, n, salt).live[0]
    prefix = manager.prefix_cache.match(seq)
    manager.replace_blocks(seq, prefix, len(prefix) * manager.block_size)
    assert manager.grow([seq], [])
    return seq


def compute(manager, *sequences):
    """What a step does: all tokens count as computed, full blocks are published."""
    for seq in sequences:
        manager.mark_computed(seq, seq.computable_end)


def run(manager, tokens, salt=None, n=1):
    seq = admit(manager, tokens, n, salt)
    compute(manager, seq)
    return seq


def decode(manager, seqs, *tokens):
    for seq, token in zip(seqs, tokens, strict=True):
        seq.token_ids.append(token)
    assert manager.grow(seqs, [])
    compute(manager, *seqs)


def fork(manager, tokens, n):
    """The sequences of a group that has just forked: they share all blocks."""
    leader = run(manager, tokens, n=n)
    for other in leader.group.live[1:]:
        manager.fork(leader, other)
    return leader.group.live


def hits(manager, tokens, salt=None):
    return manager.prefix_cache.match(group_of(tokens, salt=salt).live[0])


def tables(*sequences):
    return [list(seq.block_table) for seq in sequences]


def cached(manager):
    """The blocks that the prefix cache leads to."""
    return [content.block_id
            for content in manager.prefix_cache.published.values()]


def refs(manager):
    return manager.ref_counts


# -- Exact examples --------------------------------------------------------------------


def test_the_story_of_the_module():
    manager = BlockManager(4, 4)
    a = run(manager, [10, 11, 12, 13, 14, 15])
    assert (tables(a), cached(manager)) == ([[0, 1]], [0])

    b, sibling = fork(manager, [10, 11, 12, 13, 24, 25], 2)
    assert tables(b, sibling) == [[0, 2], [0, 2]] and refs(manager) == [3, 1, 2, 0]
    b.token_ids.append(1)
    sibling.token_ids.append(2)
    copies = []
    assert manager.grow([b, sibling], copies) and copies == [(2, 3)]
    assert tables(b, sibling) == [[0, 3], [0, 2]] and refs(manager) == [3, 1, 1, 1]


def test_what_cannot_be_found_is_taken_first_then_the_least_recently_used():
    manager = BlockManager(7, 4)
    one, two = run(manager, A + B + [9]), run(manager, C)
    assert tables(one, two) == [[0, 1, 2], [3]]
    manager.free(one)  # block 2 was never full; of the others the last goes first
    manager.free(two)
    assert list(manager.free_blocks) == [2, 4, 5, 6, 1, 0, 3]

    again = admit(manager, A + [8])  # a hit revives block 0
    assert tables(again) == [[0, 2]]
    manager.free(again)  # now it is the most recently used
    assert list(manager.free_blocks) == [2, 4, 5, 6, 1, 3, 0]
    run(manager, D * 5)
    assert [hits(manager, tokens + [9]) for tokens in (A + B, C)] == [[0], [3]]


def test_a_block_is_published_when_all_its_tokens_are_known_and_computed():
    manager = BlockManager(4, 4)
    seq = admit(manager, A + B[:3])
    for num_computed, found in ((3, []), (4, [0]), (7, [0])):
        manager.mark_computed(seq, num_computed)
        assert hits(manager, A + B + C) == found
    seq.pending = [-1]  # only the device knows the last token of block 1
    assert manager.grow([seq], [])
    compute(manager, seq)
    assert hits(manager, A + B + C) == [0]
    decode(manager, [seq], B[3])
    assert hits(manager, A + B + C) == [0, 1]
    assert hits(manager, A + B) == [0]  # the last token is always computed


def test_a_hit_follows_the_same_block_and_has_the_same_salt():
    salts = [None, "", "1", "tenant"]
    for salt, other in itertools.product(salts, salts):
        manager = BlockManager(8, 4)
        block = run(manager, A + B + C, salt).block_table[0]
        run(manager, C + D, salt)
        expected = [[block] if salt == other else []] * 3
        found = [hits(manager, A + rest + [9], other) for rest in ([], C + C, D)]
        assert found == expected
    collision = [token + SAME_HASH for token in A]
    assert hash(tuple(A)) == hash(tuple(collision))
    assert hits(manager, collision + [9], "tenant") == []


def test_twins_share_their_content_and_the_newer_is_found():
    manager = BlockManager(9, 4)
    first, second = admit(manager, A + [9]), admit(manager, A + B + [9])
    compute(manager, first, second)  # both computed A, in blocks 0 and 2
    assert hits(manager, A + B + [8]) == [2, 3]
    manager.free(second)
    late = admit(manager, C + [9])
    late.token_ids[:4] = A  # as if it had come before the others were published
    compute(manager, late)
    # What follows the one is found after the other.
    assert hits(manager, A + B + [8]) == [*tables(late)[0][:1], 3]


# -- Any order of operations -----------------------------------------------------------


class Machine(stateful.RuleBasedStateMachine):
    """Random operations, each followed by a full check against an independent model.

    The model writes into every slot what the K and V there stand for: a label of the
    salt and all tokens up to that position. A block that is taken loses its content;
    only the moves that the manager returns carry content between blocks. A hit must
    have exactly the labels of its prompt, and a sequence must find all it has computed,
    no matter where it forked and whether it was swapped.
    """

    @initialize(size=st.sampled_from([4, 2, 1]), num_slots=st.sampled_from([40, 8, 20]),
                num_swap_slots=st.sampled_from([40, 16]))
    def start(self, size, num_slots, num_swap_slots):
        self.size = size
        device, total = num_slots // size, (num_slots + num_swap_slots) // size
        self.manager = BlockManager(device, size, num_swap_blocks=total - device)
        self.slots = [[None] * size for _ in range(total)]
        self.orders = {DEVICE: list(range(device)), SWAP: list(range(device, total))}
        self.groups = {}  # where each is
        self.known = {}  # labels

    # The model: labels, who holds a block, and in which order blocks are taken.

    def labels(self, seq):
        labels, last = [], seq.group.params.cache_salt
        for token in seq.token_ids:
            last = self.known.setdefault((last, token), len(self.known))
            labels.append(last)
        return labels

    def holders(self):
        return Counter(block for group in self.groups for seq in group.live
                       for block in seq.block_table)

    def max_blocks(self, group):
        lengths = [len(seq.token_ids) for seq in group.live]
        return self.manager.max_blocks(group.num_prompt_tokens, lengths)

    def free_list(self, place):
        manager = self.manager
        return manager.free_blocks if place == DEVICE else manager.free_swap_blocks

    def take(self, count, order):
        taken, order[:] = order[:count], order[count:]
        for block in taken:
            self.counts["evicted"] += self.slots[block][-1] is not None
            self.slots[block] = [None] * self.size  # what it held is lost
        return taken

    def drop(self, seqs):
        """Freed blocks: the last one first; what cannot be found to the front."""
        holders = self.holders()
        for block in (block for seq in seqs for block in seq.block_table[::-1]):
            holders[block] -= 1
            if not holders[block]:
                order = self.orders[DEVICE if block < self.manager.num_blocks else SWAP]
                found = block in cached(self.manager)
                order.insert(len(order) if found else 0, block)

    def free(self, *seqs):
        self.drop(seqs)
        for seq in seqs:
            self.manager.free(seq)

    def move(self, moves):
        for source, target in moves:
            self.slots[target] = list(self.slots[source])

    def grow(self, seqs):
        """As in a step: all of them, or none if too few blocks are free."""
        order, holders, plans = self.orders[DEVICE], self.holders(), []
        for seq in seqs:
            table, index = list(seq.block_table), seq.num_computed_tokens // self.size
            shared = [b for b in table[index : index + 1] if holders[b] > 1]
            holders.subtract(shared)
            new = -(-seq.computable_end // self.size) - len(table)
            plans.append((table, index, shared, new))
        needed = sum(len(shared) + new for _, _, shared, new in plans)
        copies, expected = [], []
        fits = self.manager.grow(seqs, copies)
        assert fits == (needed <= len(order)), f"{needed} of {len(order)} free blocks"
        for table, index, shared, new in plans if fits else ():
            taken = self.take(len(shared) + new, order)
            expected += zip(shared, taken, strict=False)
            table[index : index + len(shared)] = taken[: len(shared)]
            table += taken[len(shared) :]
            self.counts.update(grown=new, copied=len(shared))
        assert copies == expected, "copy-on-write"
        assert tables(*seqs) == [table for table, *_ in plans]
        self.move(copies)
        return fits

    def write(self, seq, count):
        labels, holders = self.labels(seq), self.holders()
        start = seq.num_computed_tokens
        count = min(count, seq.computable_end - start)
        for position in range(start, start + count):
            block = seq.block_table[position // self.size]
            assert holders[block] == 1, "a shared block is written"
            self.slots[block][position % self.size] = labels[position]
        self.manager.mark_computed(seq, seq.num_computed_tokens + count)

    # Operations, as the scheduler does them.

    def pick(self, index, *places):
        groups = [group for group, place in self.groups.items() if place in places][-9:]
        return groups[index % len(groups)] if groups else None

    def admit(self, group):
        leader, order = group.live[0], self.orders[DEVICE]
        prefix = self.manager.prefix_cache.match(leader)
        num_tokens = len(prefix) * self.size
        assert num_tokens < leader.computable_end, "nothing is left to compute"
        found = [label for block in prefix for label in self.slots[block]]
        assert found == self.labels(leader)[:num_tokens], "a wrong hit"
        revived = [block for block in prefix if block in order]
        fits = self.max_blocks(group) - len(prefix) + len(revived) <= len(order)
        self.groups[group] = DEVICE if fits else GONE
        if fits:
            order[:] = [block for block in order if block not in revived]
            self.manager.replace_blocks(leader, prefix, num_tokens)
            self.counts.update(hits=len(prefix), revived=len(revived))
            assert self.grow([leader])
            self.step(group, 99, [1])
            self.step(group, 99, [0])
        elif oldest := self.pick(0, DEVICE):
            self.release(oldest)

    def step(self, group, count, tokens):
        seqs = group.next_sequences
        while not self.grow(seqs):
            others = [other for other, place in self.groups.items()
                      if place == DEVICE and other is not group]
            if not others:
                return
            self.release(others[-1])
        for seq in seqs:
            self.write(seq, count)
        leader, *others = group.live
        if not group.forked and leader.num_computed_tokens == group.num_prompt_tokens:
            for other in others:
                self.manager.fork(leader, other)
        for number, seq in enumerate(group.live if group.forked else ()):
            seq.token_ids += [token ^ number % 2 for token in tokens]

    def release(self, group):
        self.counts["freed while swapped"] += self.groups[group] == SWAP
        self.free(*group.live)
        self.groups[group] = GONE

    index, few = st.integers(0, 11), st.lists(st.integers(0, 1), max_size=3)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
          n=st.sampled_from([2, 1, 3]), salt=st.sampled_from([None, None, "", "1"]))
    def a_request_comes(self, tokens, n, salt):
        self.admit(group_of(tokens, n, salt))

    @rule(index=index, keep=st.integers(1, 14), more=few, n=st.sampled_from([1, 2]))
    def one_like_another_comes(self, index, keep, more, n):
        if like := self.pick(index, DEVICE, GONE):
            tokens = like.live[-1].token_ids[:keep] + more
            self.admit(group_of(tokens, n, like.params.cache_salt))

    @rule(index=index)
    def one_comes_again(self, index):
        if group := self.pick(index, GONE):
            self.admit(group)

    @rule(index=index, count=st.sampled_from([99, 99, 1, 2, 5]), tokens=few)
    def a_group_goes_on(self, index, count, tokens):
        if group := self.pick(index, DEVICE):
            self.step(group, count, tokens)

    @rule(index=index, choices=st.lists(index, min_size=3, max_size=3))
    def beams_advance(self, index, choices):
        """Each beam becomes a child of some beam; the parents' blocks are dropped."""
        group = self.pick(index, DEVICE)
        if group and group.forked:
            parents = group.live
            for number, choice in zip(range(len(parents)), choices, strict=False):
                parent, child = parents[choice % len(parents)], Sequence(group, number)
                child.token_ids = parent.token_ids[: parent.num_computed_tokens]
                child.token_ids.append(number % 2)
                self.manager.fork(parent, child)
                group.live = [*group.live, child]
            for parent in parents:
                self.free(parent)
            group.live = group.live[len(parents) :]

    @rule(index=index, which=index)
    def one_of_several_ends(self, index, which):
        group = self.pick(index, DEVICE)
        if group and group.forked and len(group.live) > 1:
            self.free(group.live[which % len(group.live)])
            del group.live[which % len(group.live)]

    @rule(index=index)
    def a_group_is_swapped(self, index):
        if group := self.pick(index, DEVICE, SWAP):
            target = SWAP if self.groups[group] == DEVICE else DEVICE
            order, expected = self.orders[target], []
            held = dict.fromkeys(b for table in tables(*group.live) for b in table)
            if len(held) <= len(order):
                self.drop(group.live)
                expected = list(zip(held, self.take(len(held), order), strict=True))
                self.groups[group] = target
                self.counts[f"swapped to {target}"] += 1
            swap = self.manager.swap_out if target == SWAP else self.manager.swap_in
            assert swap(group.live) == expected
            self.move(expected)

    @rule(index=index)
    def a_group_ends(self, index):
        if group := self.pick(index, DEVICE, SWAP):
            self.release(group)

    @invariant()
    def everything_adds_up(self):
        manager, holders = self.manager, self.holders()
        assert refs(manager) == [holders[i] for i in range(len(manager.ref_counts))]
        for place, order in self.orders.items():
            assert list(self.free_list(place)) == order
        for key, content in manager.prefix_cache.published.items():
            assert (content.before, content.token_ids) == key
            assert content.block_id < manager.num_blocks
        meanings = {}
        contents = manager.prefix_cache.contents
        for content, slots in zip(contents, self.slots, strict=True):
            if content is not None:
                meaning = meanings.setdefault(content, slots[-1])
                assert meaning == slots[-1] is not None, "a Content for two contents"
        for group, place in self.groups.items():
            held = {block for table in tables(*group.live) for block in table}
            assert len(held) <= self.max_blocks(group)
            assert {block < manager.num_blocks for block in held} <= {place == DEVICE}
            for seq in group.live:
                read = [slot for block in seq.block_table for slot in self.slots[block]]
                count = seq.num_computed_tokens
                assert read[:count] == self.labels(seq)[:count], "another's K and V"


@pytest.mark.parametrize("count", [50, pytest.param(600, marks=pytest.mark.slow)])
def test_any_operations_keep_every_invariant(count):
    class Counted(Machine):
        counts = Counter()

    stateful.run_state_machine_as_test(Counted, settings=settings(
        max_examples=count, stateful_step_count=50, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck)))
    for event in ("hits", "revived", "evicted", "grown", "copied", "swapped to swap",
                  "swapped to device", "freed while swapped"):
        assert Counted.counts[event] > count // 40, (event, Counted.counts)
