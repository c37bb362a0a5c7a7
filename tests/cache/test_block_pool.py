import pytest

from ridgeline.cache.pool import BlockPool


def counts(pool):
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_block_is_free_after_its_last_release():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.acquire(block)
    assert counts(pool) == (2, 0, 1)
    pool.release(block)
    assert counts(pool) == (2, 0, 1)
    pool.release(block)
    assert counts(pool) == (3, 0, 0)


def test_a_published_block_stays_cached_until_withdrawn():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block)
    pool.release(block)
    assert counts(pool) == (2, 1, 0)
    assert pool.num_available == 3
    pool.acquire(block)
    assert counts(pool) == (2, 0, 1)
    pool.release(block)
    pool.withdraw(block)
    assert counts(pool) == (3, 0, 0)


def test_a_withdrawn_block_in_use_is_freed_by_its_owner():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.publish(block)
    pool.withdraw(block)
    assert counts(pool) == (0, 0, 1)
    pool.release(block)
    assert counts(pool) == (1, 0, 0)


def test_eviction_order_is_order_of_last_use():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.publish(block)
        pool.release(block)
    pool.acquire(blocks[0])
    pool.release(blocks[0])
    assert tuple(pool._cached) == (blocks[1], blocks[2], blocks[0])
    assert pool.least_recent() == blocks[1]


def test_misuse_is_asserted():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.acquire(block)
    with pytest.raises(AssertionError, match="cannot be published"):
        pool.publish(block)
    with pytest.raises(AssertionError, match="not published"):
        pool.withdraw(block)
