"""KV blocks of running requests, their state slots, and the prefix cache."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from molink.errors import InvariantError
from molink.scheduler.blocks import BlockAllocator, ReleasingBlocks
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.prefix_tree import PrefixMatch, PrefixTree, SpanLog, find_root
from molink.scheduler.request_state import PendingRelease, RequestState
from molink.scheduler.state_slots import StateSlots


class KVCacheManager:
    """Allocates blocks to requests and caches those of finished ones while there is room.

    Only KV that is complete at every stage enters the prefix tree, so rows that read it never wait.
    Full blocks are shared, since nothing writes to them again; a shared prefix within a block is
    copied.

    A request that holds a block of the tree holds all its ancestors. All descendants of a cached
    block are therefore cached, and every cached block can be evicted, in LRU order and leaves
    first.

    Requests find only blocks of requests with the same cache scope (salt and adapter) and, if keys
    depend on the maximum length (LongRoPE), of the same length class. Each such combination has its
    own root in the tree. Eviction is common to all.

    With recurrent layers each request holds one of the ``state_slots`` as long as its blocks, and a
    cached prefix can be used up to the end of a snapshot. A released request's slot becomes the
    snapshot of everything it has computed. Further snapshots are copies
    (:meth:`choose_snapshot_end`).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.allocator = BlockAllocator(config.num_blocks)
        self.states = StateSlots(config.state_slots)
        self._min_snapshot_rows = config.min_snapshot_rows
        self._tree = PrefixTree(config.block_size)
        self._block_size = config.block_size
        #: Log of changes, for reports to routers.
        self.span_log = SpanLog()
        self._enabled = config.prefix_cache
        self._short_context = config.short_context
        #: The last lookup: its request, the versions of tree and snapshots, and the result.
        self._last_lookup: tuple[RequestState, int, int, PrefixMatch] | None = None
        self.num_hit_tokens = 0
        self.num_lookup_tokens = 0
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, by eviction if necessary."""
        return self.allocator.num_free + self.allocator.num_settled

    @property
    def hit_rate(self) -> float:
        """Share of new requests' tokens found in the prefix cache."""
        return self.num_hit_tokens / self.num_lookup_tokens if self.num_lookup_tokens else 0.0

    def allocate_state_slot(self, found: PrefixMatch) -> int:
        """Allocate a slot; -1 for a model without states.

        The match's snapshot is held until :meth:`release_snapshot` or a release.

        Raises:
            InvariantError: there is no slot.
        """
        if not self.states.are_needed:
            return -1
        if found.snapshot >= 0:
            self.states.allocator.share_blocks((found.snapshot,))
        slot = self.states.allocate_slot()
        if slot is None:
            raise InvariantError("a request was admitted without a slot for its state")
        return slot

    def choose_snapshot_end(self, state: RequestState, found: PrefixMatch) -> int:
        """Return the block boundary at which to snapshot an admitted request's state; 0: none.

        As in Marconi (arXiv 2411.19379), it is the point where the request branches off from cached
        sequences, which is likely to be shared again; the chunk is split there. Without a branch it
        is the last block boundary of a long prompt, since the next turn of a chat may omit the
        beginning of this answer.
        """
        if not self._enabled or not self.states.are_needed:
            return 0
        size = self._block_size
        branch, last = found.num_kv_tokens // size * size, (len(state.tokens) - 1) // size * size
        end = branch if branch > found.num_tokens else last
        return end if end - found.num_tokens >= self._min_snapshot_rows else 0

    def reclaim_released(self, seq: int) -> int:
        """Complete the release ``seq``; return how many blocks became usable."""
        self.states.allocator.reclaim_released(seq)
        return self.allocator.reclaim_released(seq)

    def find_prefix(self, state: RequestState) -> PrefixMatch:
        """Find the cached prefix of a waiting request; its last token is always computed."""
        if not self._enabled:
            return PrefixMatch()
        versions = self._tree.version, self.states.version
        if self._last_lookup is not None and self._last_lookup[:3] == (state, *versions):
            return self._last_lookup[3]
        found = self._match_tokens(state, len(state.tokens) - 1)
        if self.states.are_needed:
            found = self._end_at_snapshot(found)
        self._last_lookup = state, *versions, found
        return found

    def keep_full_blocks(self, found: PrefixMatch) -> PrefixMatch:
        """Drop the partial block from a match, so that no block is held for copying."""
        full = replace(found, copy_source=-1, num_tokens=len(found.blocks) * self._block_size)
        return self._end_at_snapshot(full, full_blocks=True) if self.states.are_needed else full

    def list_matches(self, found: PrefixMatch) -> Iterator[PrefixMatch]:
        """List a match and shorter ones, which hold fewer blocks and slots of others."""
        yield found
        yield self.keep_full_blocks(found)
        if found.snapshot >= 0:
            yield PrefixMatch(self._root_of(found), num_kv_tokens=found.num_kv_tokens)

    def can_allocate(self, found: PrefixMatch, total: int) -> bool:
        """Whether a table of ``total`` blocks, and a state slot if needed, can be allocated.

        ``total`` includes the matched blocks.
        """
        lacking = total - len(found.blocks)
        if lacking > self.num_available or not self.states.can_allocate(found.snapshot):
            return False
        return lacking <= self.num_available - self.allocator.count_settled(found.matched_blocks)

    def allocate_table(self, found: PrefixMatch, total: int) -> list[int] | None:
        """Allocate a table of ``total`` blocks that begins with the match; ``None`` if too few.

        The copy source is held until :meth:`release_copy_source` or a release.
        """
        if not self.can_allocate(found, total):
            return None
        self.allocator.share_blocks(found.matched_blocks)
        fresh = self.allocate_blocks(total - len(found.blocks))
        if fresh is None:
            raise InvariantError("available blocks can't be allocated")
        self._last_lookup = None
        return [*found.blocks, *fresh]

    def count_lookup(self, state: RequestState) -> None:
        """Count the cache hits of a request's first admission."""
        self.num_lookup_tokens += len(state.tokens)
        self.num_hit_tokens += state.num_reused

    def allocate_blocks(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, evicting cached blocks as needed; ``None`` if too few."""
        if count > self.num_available:
            return None
        while self.allocator.num_free < count:
            self._evict_oldest()
        return self.allocator.allocate_blocks(count)

    def release_copy_source(self, state: RequestState) -> None:
        """Drop the copy source when the rows that copy from it are back."""
        self.allocator.unshare_block(state.copy_source)
        state.copy_source = -1

    def release_snapshot(self, state: RequestState) -> None:
        """Drop the snapshot from which a request has continued, when its first rows are back."""
        self.states.allocator.unshare_block(state.snapshot)
        state.snapshot = -1

    def cache_computed(self, state: RequestState) -> None:
        """Insert the full blocks that a running request has computed, for others to share.

        Its copied state becomes a snapshot if its prefix is then cached.
        """
        state.has_cached_blocks = True
        if not self._enabled:
            return
        self._cache_full_blocks(state)
        if state.kept_slot >= 0:
            self._add_snapshot(state, state.kept_slot, state.snapshot_end)
            self.states.allocator.unshare_block(state.kept_slot)
            state.kept_slot = -1

    def _cache_full_blocks(self, state: RequestState) -> None:
        """Insert full blocks up to one whose tokens another request's block already has.

        A request may hold tree blocks only below blocks that it also holds.
        """
        for index in range(state.tree_depth, state.num_computed // self._block_size):
            key = tuple(state.tokens[index * self._block_size : (index + 1) * self._block_size])
            if self._tree.find_child(state.tree_node, key) is not None:
                return
            state.tree_node = self._cache_block(state, state.tree_node, key, state.blocks[index])
            state.tree_depth = index + 1

    def release_request(self, seq: int, pending: PendingRelease) -> None:
        """Release an ended request as of ``seq``, and cache its computed blocks.

        A failed request's blocks, and unheld blocks below them, are evicted: if a stage's KV is
        bad, other requests with the same prefix must not fail, too.
        """
        state = pending.state
        leaf = state.tree_node
        if self._enabled and state.has_valid_kv:
            leaf = self._insert_released(state)
            self._keep_released_states(state)
        self.allocator.release_blocks(seq, pending.held_blocks)
        self.states.allocator.release_blocks(seq, state.held_slots)
        self.allocator.touch_blocks(self._tree.path_to_root(leaf))
        if not state.has_valid_kv:
            for block in self._match_tokens(state, len(state.tokens)).matched_blocks:
                self.states.drop_snapshots(block)
            self._evict_invalid(leaf)

    def collect_releasing(self, pending: Iterable[PendingRelease]) -> ReleasingBlocks:
        """Collect blocks that become usable when all releases complete, ``pending`` included."""
        found = ReleasingBlocks(self.allocator)
        for each in pending:
            found.add_blocks(each.held_blocks)
        return found

    def _insert_released(self, state: RequestState) -> int:
        """Insert a request's computed blocks; return the last node of its path."""
        node, size, tokens, end = (
            state.tree_node,
            self._block_size,
            state.tokens,
            state.num_computed,
        )
        full = end // size
        for index in range(state.tree_depth, full):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = self._tree.find_child(node, key)
            if child is None:
                child = self._cache_block(state, node, key, state.blocks[index])
            node = child
        rest = tuple(tokens[full * size : end])
        if rest and full >= state.tree_depth and not self._tree.has_extension(node, rest):
            node = self._cache_block(state, node, rest, state.blocks[full])
        return node

    def _keep_released_states(self, state: RequestState) -> None:
        """Make snapshots of a released request's states, unless rows in flight change them."""
        end = state.num_computed
        if state.state_slot >= 0 and end == state.num_issued and not state.is_fresh:
            self._add_snapshot(state, state.state_slot, end)
        if state.kept_slot >= 0 and state.snapshot_end <= end:
            self._add_snapshot(state, state.kept_slot, state.snapshot_end)

    def _add_snapshot(self, state: RequestState, slot: int, end: int) -> None:
        """Keep the state after the first ``end`` tokens of a request if their KV is cached."""
        found = self._match_tokens(state, end)
        if found.num_tokens == end:
            index = (end - 1) // self._block_size
            block = found.matched_blocks[index]
            self.states.add_snapshot(slot, block, end - index * self._block_size)

    def _match_tokens(self, state: RequestState, end: int) -> PrefixMatch:
        """Match the part of a request's first ``end`` tokens whose KV is cached."""
        long = 0 < self._short_context < state.kv_end
        root = find_root(state.request.cache_scope, is_other=long)
        return self._tree.match_prefix(state.tokens[:end], root)

    def _root_of(self, found: PrefixMatch) -> int:
        """Return the root of the tree above a match."""
        path = found.matched_blocks
        return self._tree.parent_of(path[0]) if path else found.end_node

    def _end_at_snapshot(self, found: PrefixMatch, *, full_blocks: bool = False) -> PrefixMatch:
        """Return the longest part of a match that ends at a snapshot.

        It has no partial block if so asked.
        """
        size, path = self._block_size, found.matched_blocks
        known = max(found.num_kv_tokens, found.num_tokens)
        for index in reversed(range(len(path))):
            maximum = min(size, found.num_tokens - index * size)
            kept = self.states.find_snapshot(path[index], size if full_blocks else 1, maximum)
            if kept is not None:
                tokens, slot = kept
                blocks = path[: index + tokens // size]
                source = -1 if tokens == size else path[index]
                end = blocks[-1] if blocks else self._root_of(found)
                return PrefixMatch(end, blocks, source, index * size + tokens, slot, known)
        return PrefixMatch(self._root_of(found), num_kv_tokens=known)

    def _cache_block(
        self, state: RequestState, parent: int, key: tuple[int, ...], block: int
    ) -> int:
        """Insert a block of ``state`` and evict the partial block that it supersedes."""
        before = self._tree.find_shorter(parent, key)
        self.allocator.mark_cached(block)
        self._tree.insert_block(parent, key, block)
        if before is not None and self.allocator.is_cached(before):
            self.states.move_snapshots(before, block)
            self._evict_block(before)
        if len(key) == self._block_size:
            self.span_log.add_block(block, parent, key, state.request.cache_scope)
        return block

    def _evict_invalid(self, leaf: int) -> None:
        """Evict the cached part of ``leaf``'s path and everything below it."""
        cached = [
            block for block in self._tree.path_to_root(leaf) if self.allocator.is_cached(block)
        ]
        for block in reversed(self._tree.list_subtree(cached[-1]) if cached else []):
            self._evict_block(block)

    def _evict_oldest(self) -> None:
        """Evict the least recently used block to make room."""
        self._evict_block(next(iter(self.allocator.eviction_order)))
        self.num_evictions += 1

    def _evict_block(self, block: int) -> None:
        self.states.drop_snapshots(block)
        self._tree.remove_block(block)
        self.span_log.remove_block(block)
        self.allocator.evict_block(block)

    def validate(self, requests: Iterable[RequestState], pending: Iterable[PendingRelease]) -> None:
        """Check that tables and copies account for all references, and that paths are complete.

        Raises:
            InvariantError: they don't.
        """
        references = Counter(
            block for state in requests for block in (*state.blocks, state.copy_source)
        )
        references.update(block for each in pending for block in each.held_blocks)
        del references[-1]
        self.allocator.validate(references, self._tree)
        states = [*requests, *(each.state for each in pending)]
        slots = Counter(slot for each in states for slot in each.held_slots)
        self.states.validate(slots, self._tree)
        self._tree.validate()
        ages = {block: index for index, block in enumerate(self.allocator.eviction_order)}
        for block in self._tree:
            parent = self._tree.parent_of(block)
            if parent in ages and ages.get(block, len(ages)) > ages[parent]:
                raise InvariantError(f"block {block} outlives its parent {parent}")
