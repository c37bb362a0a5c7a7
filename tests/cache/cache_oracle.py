"""A second, naive cache: blocks are objects named by what they hold. No ids, no tree, no counters, all scans.

Used by the state machine to predict, exactly, what CacheManager must answer.
"""

from dataclasses import dataclass, field

from ridgeline.cache.layout import CacheLayout

Key = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of the block


@dataclass(eq=False)
class Block:
    owners: set[int] = field(default_factory=set)
    key: Key | None = None  # set while other sequences may find it


@dataclass
class Sequence:
    salt: str
    computed: int
    reserved: int
    attached: bool
    blocks: list[dict[int, Block]]  # [group] block index -> block
    promised: int  # tokens that admission counted


class OracleGroup:
    def __init__(self, kind, window, total):
        self.kind, self.window, self.total = kind, window, total
        self.found: dict[Key, Block] = {}
        self.idle: list[Block] = []  # findable, unowned, oldest first

    def first_visible(self, computed, size):
        return 0 if self.window is None else max(0, computed - self.window + 1) // size

    def drop(self, block, owner):
        block.owners.remove(owner)
        if not block.owners and block.key is not None:
            self.idle.append(block)

    def forget(self, key):
        block = self.found.pop(key, None)
        if block is not None:
            block.key = None
            if not block.owners:
                self.idle.remove(block)


class Oracle:
    def __init__(self, layout: CacheLayout, caching: bool):
        self.layout, self.size, self.caching = layout, layout.block_size, caching
        self.groups = [OracleGroup(group.kind, group.window, group.num_blocks) for group in layout.groups]
        self.seqs: dict[int, Sequence] = {}

    def counts(self):
        """(free, cached, used) of each group."""
        rows = []
        for index, group in enumerate(self.groups):
            used = len({id(b) for seq in self.seqs.values() for b in seq.blocks[index].values()})
            rows.append((group.total - used - len(group.idle), len(group.idle), used))
        return rows

    def key(self, salt, tokens, index):
        return salt, tuple(tokens[: (index + 1) * self.size])

    def needed(self, group, num_blocks):
        if group.kind == "recurrent":
            return range(max(num_blocks - 1, 0), num_blocks)
        return range(group.first_visible(num_blocks * self.size, self.size), num_blocks)

    def span_end(self, start, end, drafted):
        logs = [group.max_logged for group in self.layout.groups if group.kind == "recurrent"]
        if drafted and logs:
            fits = [e for e in range(start + 1, end + 1) if e - start <= min(logs) and e // 256 == start // 256]
            return max(fits, default=start + 1)
        boundary = end // self.size * self.size
        cut = self.caching and end - start > 1 and any(group.kind == "recurrent" for group in self.groups)
        return boundary if cut and boundary > start else end

    def match(self, tokens, salt):
        """Blocks of the longest hit: the largest n whose needed blocks can all be found, in every group."""
        if not self.caching:
            return 0
        for n in range((len(tokens) - 1) // self.size, 0, -1):
            if all(self.key(salt, tokens, i) in g.found for g in self.groups for i in self.needed(g, n)):
                return n
        return 0

    def can_admit(self, tokens, salt):
        n = self.match(tokens, salt)
        for index, group in enumerate(self.groups):
            hit = [group.found[self.key(salt, tokens, i)] for i in self.needed(group, n)]
            free, cached, _ = self.counts()[index]
            owed = sum(
                max(0, self.peak(group, seq.promised) - len(seq.blocks[index]))
                for seq in self.seqs.values()
                if seq.computed + 1 < seq.promised
            )
            room = free + cached - sum(not b.owners for b in hit) - owed
            if self.peak(group, len(tokens) + 1) - len(hit) > room:
                return False
        return True

    def peak(self, group, held):
        span = self.layout.max_span_tokens
        if group.kind == "recurrent":
            return 2
        if group.window is not None and span is not None:
            held = min(held, group.window + span + self.size)
        return -(-held // self.size)

    def admit(self, seq_id, tokens, salt):
        n = self.match(tokens, salt)
        blocks = []
        for group in self.groups:
            row = {i: group.found[self.key(salt, tokens, i)] for i in self.needed(group, n)}
            for block in row.values():
                if not block.owners:
                    group.idle.remove(block)
                block.owners.add(seq_id)
            blocks.append(row)
        self.seqs[seq_id] = Sequence(salt, n * self.size, n * self.size, self.caching, blocks, len(tokens) + 1)
        return n * self.size

    def reserve(self, seq_id, end):
        """The number of copies, or None."""
        seq = self.seqs[seq_id]
        tail = seq.computed // self.size
        wants = []
        for index in range(len(self.groups)):
            row = seq.blocks[index]
            if self.groups[index].kind == "recurrent":
                at, block = next(iter(row.items()), (0, None))
                wants.append(([] if row else [0], at if block and (len(block.owners) > 1 or block.key) else None))
                continue
            new = [i for i in range(tail, -(-end // self.size)) if i not in row]
            copy = seq.computed % self.size != 0 and len(row[tail].owners) > 1
            wants.append((new, tail if copy else None))
        if any(len(new) + (at is not None) > free + idle for (new, at), (free, idle, _) in zip(wants, self.counts())):
            return None
        for index, (new, at) in enumerate(wants):
            if at is not None:
                self.take(index)
                self.groups[index].drop(seq.blocks[index][at], seq_id)
                seq.blocks[index][at] = Block({seq_id})
            for i in new:
                self.take(index)
                seq.blocks[index][i] = Block({seq_id})
        seq.reserved = max(seq.reserved, end)
        return sum(at is not None for _, at in wants)

    def take(self, index):
        """Room for one block: where nothing is free the oldest idle one is forgotten, by all groups if it is full."""
        if self.counts()[index][0] == 0:
            group = self.groups[index]
            key = group.idle[0].key
            for other in self.groups if group.kind == "full" else [group]:
                other.forget(key)

    def commit(self, seq_id, tokens, computed, num_logged):
        seq = self.seqs[seq_id]
        for i in range(seq.computed // self.size, computed // self.size) if seq.attached else ():
            key = self.key(seq.salt, tokens, i)
            for group, row in zip(self.groups, seq.blocks):
                if group.kind == "recurrent":
                    ends_here = (i + 1) * self.size == computed and (computed - seq.computed > 1 or computed % 256 == 0)
                    if ends_here and not num_logged and key not in group.found:
                        (group.found[key],) = row.values()
                        group.found[key].key = key
                    continue
                block = group.found.setdefault(key, row[i])
                block.key = key
                if block is not row[i]:
                    if not block.owners:
                        group.idle.remove(block)
                    block.owners.add(seq_id)
                    row[i] = block
        seq.computed = computed
        for group, row in zip(self.groups, seq.blocks):
            if group.kind == "recurrent":
                self.moved(row, (computed - 1) // self.size)
                continue
            for i in sorted(i for i in row if i < group.first_visible(computed, self.size)):
                group.drop(row.pop(i), seq_id)

    def moved(self, row, at):
        """A recurrent group's row with its only block at block index `at`."""
        (block,) = row.values()
        row.clear()
        row[at] = block
        return row

    def truncate(self, seq_id, computed):
        seq = self.seqs[seq_id]
        seq.reserved = min(seq.reserved, computed)
        for group, row in zip(self.groups, seq.blocks):
            for i in [i for i in row if i >= -(-seq.reserved // self.size) and group.kind != "recurrent"]:
                del row[i]

    def fork(self, parent_id, child_id):
        parent = self.seqs[parent_id]
        self.truncate(parent_id, parent.computed)
        for row in parent.blocks:
            for block in row.values():
                block.owners.add(child_id)
        self.seqs[child_id] = Sequence(
            parent.salt,
            parent.computed,
            parent.computed,
            parent.attached,
            [dict(row) for row in parent.blocks],
            parent.promised,
        )

    def release(self, seq_id):
        seq = self.seqs.pop(seq_id)
        for group, row in zip(self.groups, seq.blocks):
            for i in sorted(row, reverse=True):
                group.drop(row[i], seq_id)

    def reset(self):
        for group in self.groups:
            for key in list(group.found):
                group.forget(key)
        for seq in self.seqs.values():
            seq.attached = False
